"""Rows of SWE-smith (SWE-bench/SWE-smith, SWE-smith-py): bugs put into repositories by program or model.

Fields: instance_id (<owner>__<name>.<commit>.<kind>__<hash>), repo (swesmith/<owner>__<name>.<commit>, or
without the owner), patch (it makes the *bug*: the solution is its reverse), FAIL_TO_PASS and PASS_TO_PASS
(lists), image_name (jyangballin/swesmith.x86_64.<owner>_1776_<name>.<commit>), problem_statement (may be
empty), base_commit, created_at. There is no test patch: the tests are in the repository as it is.

The image has the repository without the bug; SWE-smith's own harness fetches a branch with it, whose last
commit takes the files of the F2P tests away. We have no network and do both ourselves.

    tests run: pytest on the files of the F2P tests, with -v; P2P tests of other files don't count
    resolved: its harness counts a test that isn't in the log as passed. We don't.
"""

from __future__ import annotations

import re

from gymllm.errors import ConfigError
from gymllm_envs.swe.patching import PatchError
from gymllm_envs.swe.readers import commands
from gymllm_envs.swe.readers.fields import names, rest, text
from gymllm_envs.swe.readers.reversing import reverse_patch
from gymllm_envs.swe.readers.rows import Row
from gymllm_envs.swe.recipe import Recipe
from gymllm_envs.swe.task import SweTask

_VERBOSE = "pytest --disable-warnings --color=no --tb=no --verbose"
_OTHERS = {
    "jax-ml/jax": commands.Commands(test=f"{_VERBOSE} -n auto", parser="verbose"),
    "mido/mido": commands.Commands(test=f"{_VERBOSE} -rs -c /dev/null", parser="verbose"),
    "paramiko/paramiko": commands.Commands(test="pytest -rA --color=no --disable-warnings"),
    "pydantic/pydantic": commands.Commands(
        test=f"/root/.local/bin/uv run {_VERBOSE}", parser="verbose"
    ),
}
_WITHOUT_PYTEST = ("gin-gonic/gin", "python/mypy", "tornadoweb/tornado", "un33k/python-slugify")
_NO_STATEMENT = (
    "A change has broken something that worked. Run the tests, find the cause, and mend it."
)


def read_swe_smith(row: Row, where: str) -> SweTask:
    """A row of SWE-smith.

    Raises:
        ConfigError: A field is missing or of another type; its repository isn't tested by pytest.
    """
    task_id = text(row, "instance_id", where)
    repo = task_id.partition(".")[0].replace("__", "/")
    if repo in _WITHOUT_PYTEST:
        raise ConfigError(f"{where}: the tests of {repo} don't run in pytest; leave its tasks out.")
    how = _OTHERS.get(repo, commands.Commands(test=_VERBOSE, parser="verbose"))
    fail_to_pass = names(row.get("FAIL_TO_PASS"), f"{where}: FAIL_TO_PASS")
    files = list(dict.fromkeys(test.partition("::")[0] for test in fail_to_pass))
    pass_to_pass = names(row.get("PASS_TO_PASS", []), f"{where}: PASS_TO_PASS")
    bug = text(row, "patch", where)
    try:
        gold = reverse_patch(bug)
    except PatchError as problem:
        raise ConfigError(f"{where}: patch: {problem}") from problem
    recipe = Recipe(
        format="swe-smith",
        log_parser=how.parser,
        test_setup=commands.CONDA,
        path=commands.CONDA_PATH,
        hidden=tuple(files),
    )
    used = ("instance_id", "repo", "problem_statement", "patch", "base_commit", "image_name")
    return SweTask(
        id=task_id,
        repo=re.sub(r"\.[0-9a-f]{8}$", "", repo),
        problem_statement=text(row, "problem_statement", where, needed=False).strip()
        or _NO_STATEMENT,
        fail_to_pass=fail_to_pass,
        pass_to_pass=tuple(test for test in pass_to_pass if test.partition("::")[0] in files),
        patch=gold,
        bug_patch=bug,
        image=text(row, "image_name", where),
        base_commit=text(row, "base_commit", where, needed=False),
        test_command=" ".join([how.test, *files]),
        timeout_s=600.0,
        extra=rest(row, (*used, "FAIL_TO_PASS", "PASS_TO_PASS")) | recipe.extra(),
    )
