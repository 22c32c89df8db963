"""docs/algorithms.md says what the presets are and names every metric."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from gymllm_trainers.algorithms import AlgorithmConfig, resolve
from gymllm_trainers.algorithms.algorithm import PRESETS
from gymllm_trainers.algorithms.diagnostics import LAGS, PolicySums, finish
from gymllm_trainers.config_files import merge, read_yaml

PAGE = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text("utf-8")


def test_the_table_of_presets_is_what_they_resolve_to() -> None:
    table = PAGE.split("## Presets", 1)[1].split("\n\n", 2)[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    found = {}
    for name, advantage, loss, clip, correction, aggregation, _ in rows:
        algorithm = resolve(AlgorithmConfig(preset=name.strip("`")))  # pyright: ignore
        found[algorithm.preset] = algorithm
        parts = (algorithm.advantage, algorithm.loss, algorithm.correction, algorithm.aggregation)
        assert parts == (advantage, loss, correction, aggregation)
        if clip:
            assert [float(side) for side in clip.split("/")] == [
                algorithm.clip_low,
                algorithm.clip_high,
            ]
    assert set(found) == set(PRESETS)


def test_every_metric_is_in_the_table() -> None:
    sums = {name: np.float64(1) for name in PolicySums._fields} | {"lag": np.ones(LAGS + 1)}
    metrics = finish(PolicySums(**sums), divisor=1.0)  # pyright: ignore
    named = set(re.findall(r"`([\w/]+)`", PAGE.split("## Metrics", 1)[1]))
    for name in metrics:
        assert name in named or re.fullmatch(r"lag/[1-7]", name), name


def test_the_example_is_a_configuration(tmp_path: Path) -> None:
    example = re.findall(r"^```yaml\nalgorithm:\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[0]
    (tmp_path / "part.yaml").write_text(example, encoding="utf-8")
    config = merge(AlgorithmConfig(), read_yaml(tmp_path / "part.yaml"))
    assert config == AlgorithmConfig(preset="dapo", advantage="rloo", clip_high=0.3)
    assert resolve(config).overlong_buffer == 0.2
