"""docs/models.md: its examples run in their order, on a tiny model in place of SmolLM2."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import gymllm_trainers.models
from gymllm_trainers.models import load_model

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
TINY = Path(__file__).parent / "fixtures" / "tiny_smollm2"


def test_the_examples_run_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert EXAMPLES[0].count('load_model("smollm2")') == 1
    names: dict[str, object] = {"__name__": "example"}
    for number, example in enumerate(EXAMPLES):
        code = example.replace('load_model("smollm2")', f"load_model({str(TINY)!r})")
        exec(compile(code, f"docs/models.md, example {number + 1}", "exec"), names)
    assert "length [" in capsys.readouterr().out
    exported = load_model(tmp_path / "exported")
    before = load_model(TINY)
    # Adapters start as the identity: what was exported is the model that was loaded.
    assert exported.config == before.config
    assert exported.params.keys() == before.params.keys()
    np.testing.assert_array_equal(exported.params["embedding"], before.params["embedding"])
    assert (tmp_path / "adapters" / "adapter_config.json").is_file()


def test_the_models_public_names_are_sorted_and_complete() -> None:
    names = gymllm_trainers.models.__all__
    assert names == sorted(names)
    source = Path(gymllm_trainers.models.__file__).read_text("utf-8")
    assert set(names) == set(re.findall(r" as (\w+)$", source, re.MULTILINE))
