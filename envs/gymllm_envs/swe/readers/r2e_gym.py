"""Rows of R2E-Gym (R2E-Gym/R2E-Gym-Subset, -Lite, -V1): commits of repositories, tests that a model wrote.

Fields: repo_name, docker_image (namanjain12/<repo>_final:<commit>), commit_hash, parsed_commit_content (JSON:
the commit's diff, taken apart), expected_output_json (JSON: each test's name to its status once the commit
is in), execution_result_content, problem_statement (the issue between [ISSUE] and [/ISSUE]), prompt,
modified_files, relevant_files and counts.

The image has the repository before the commit in /testbed, with its Python in /testbed/.venv; the hidden
tests in /r2e_tests, and /testbed/run_tests.sh, which runs pytest -rA on r2e_tests/ in the tree. R2E-Gym moves
both to /root and links the tests into the tree, where agents can read them. We take them out of the agent's
container.

    resolved: the short summary of pytest has exactly the tests of expected_output_json, each with that
    status; a test's name is what follows the file's, joined by dots, up to " - "
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import cast

from gymllm.errors import ConfigError
from gymllm_envs.swe.log_parsing import R2E, without_colors
from gymllm_envs.swe.readers.fields import rest, text
from gymllm_envs.swe.readers.rows import Row
from gymllm_envs.swe.recipe import Recipe
from gymllm_envs.swe.task import SweTask

_NAMES = (
    *("run_tests.sh", "r2e_tests", "expected_test_output.json", "execution_result.json"),
    *("parsed_commit.json", "syn_issue.json", "modified_files.json", "modified_entities.json"),
)
"""Which R2E-Gym's own tools leave in its images."""
_PATH = (
    "/testbed/.venv/bin:/root/.local/bin:/root/.cargo/bin:"
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)
_BRING = """for place in /r2e_tests /root/r2e_tests; do
  if [ -d "$place" ] && [ ! -e r2e_tests ]; then cp -r "$place" r2e_tests; fi
done
for place in /root/run_tests.sh /run_tests.sh; do
  if [ -f "$place" ] && [ ! -e run_tests.sh ]; then cp "$place" run_tests.sh; fi
done
[ -d r2e_tests ] && [ -f run_tests.sh ]
"""
_ISSUE = re.compile(r"\[ISSUE\](.*)\[/ISSUE\]", re.DOTALL)
_USED = (
    *("repo_name", "docker_image", "commit_hash", "problem_statement", "expected_output_json"),
    *("parsed_commit_content", "execution_result_content", "prompt"),
)


def read_r2e_gym(row: Row, where: str) -> SweTask:
    """A row of R2E-Gym.

    Raises:
        ConfigError: A field is missing, of another type, or no JSON.
    """
    commit = text(row, "commit_hash", where)
    repo = text(row, "repo_name", where)
    found = _object(row, "expected_output_json", where)
    expected = {without_colors(name).split(" - ")[0]: str(found[name]) for name in found}
    passing = tuple(name for name, status in expected.items() if status == "PASSED")
    statement = text(row, "problem_statement", where)
    issue = _ISSUE.search(statement)
    recipe = Recipe(
        format="r2e-gym",
        log_parser=R2E,
        path=_PATH,
        hidden=(*_NAMES, *(f"{folder}/{n}" for folder in ("", "/root") for n in _NAMES)),
        bring=_BRING,
        expected=expected,
    )
    return SweTask(
        id=f"{repo}-{commit}",
        repo=repo,
        problem_statement=(issue.group(1) if issue else statement).strip(),
        fail_to_pass=passing,
        patch=gold_patch(_object(row, "parsed_commit_content", where)),
        image=text(row, "docker_image", where),
        base_commit=f"{commit}^",
        test_command="bash run_tests.sh",
        timeout_s=300.0,
        extra=rest(row, _USED) | recipe.extra(),
    )


def _object(row: Row, name: str, where: str) -> Mapping[str, object]:
    value: object = row.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as problem:
            raise ConfigError(f"{where}: {name} is no JSON: {problem}.") from problem
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {name} must be a JSON object, got {value!r}.")
    return cast("Mapping[str, object]", value)


_SIGNS = {"context": " ", "added": "+", "deleted": "-"}


def gold_patch(commit: Mapping[str, object]) -> str:
    """The commit's changes to Python sources, put together again; tests are left out.

    Args:
        commit: file_diffs, each with header.file.path, minus_file, plus_file and hunks, those with
            descriptor.old_range, .new_range and line_group.all_lines.
    """
    said: list[str] = []
    for one in _list(commit, "file_diffs"):
        path = str(_at(one, "header", "file").get("path", ""))
        name = path.rpartition("/")[2]
        parts = {part.lower() for part in path.split("/")[:-1]}
        if not path.endswith(".py") or parts & {"test", "tests"}:
            continue
        if name.startswith("test_") or name.endswith("_test.py"):
            continue
        said.append(f"diff --git a/{path} b/{path}\n")
        for side, sign in (("minus_file", "---"), ("plus_file", "+++")):
            if _at(one, side):
                said.append(f"{sign} {_at(one, side)['path']}\n")
        for hunk in _list(one, "hunks"):
            descriptor = _at(hunk, "descriptor")
            old, new = _range(_at(descriptor, "old_range")), _range(_at(descriptor, "new_range"))
            said.append(f"@@ -{old} +{new} @@\n")
            for line in _list(_at(hunk, "line_group"), "all_lines"):
                sign = _SIGNS.get(str(line.get("type")), "\\ ")
                said.append(f"{sign}{line.get('content', '')}\n")
    return "".join(said)


def _range(lines: Mapping[str, object]) -> str:
    length = lines.get("length")
    return f"{lines.get('start', 0)}" + ("" if length is None else f",{length}")


def _at(value: Mapping[str, object], *names: str) -> Mapping[str, object]:
    for name in names:
        value = cast("Mapping[str, object]", value.get(name) or {})
    return value


def _list(value: Mapping[str, object], name: str) -> list[Mapping[str, object]]:
    return cast("list[Mapping[str, object]]", value.get(name) or [])
