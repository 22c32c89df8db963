"""Rows of SWE-bench, of SWE-Gym, and of SWE-rebench: one shape, three ways to say how tests are run.

SWE-bench (princeton-nlp/SWE-bench, _Lite, _Verified; SWE-bench/...): repo, instance_id, base_commit, patch,
test_patch, problem_statement, hints_text, created_at, version, FAIL_TO_PASS and PASS_TO_PASS (JSON texts),
environment_setup_commit. The command is its harness's, by repository (`commands`); the image is
swebench/sweb.eval.x86_64.<id>, "__" in ids as "_1776_". Rows for swebench 5 also have image, log_parser
(a key of PARSER_REGISTRY), eval_type ("pass_and_fail", "fail_only") and eval_script, which activates the
environment, resets the test files, applies the test patch and runs the tests between two markers.

    resolved: every F2P test PASSED or XFAIL; every P2P test these or SKIPPED. A name that was cut in its
    parameters (more "[" than "]") counts as any that begins so, if those agree.

SWE-Gym (SWE-Gym/SWE-Gym, SWE-Gym-Lite): the same fields, lists instead of JSON texts, no
environment_setup_commit; 11 other repositories; images xingyaoww/sweb.eval.x86_64.<id>, "__" as "_s_".

SWE-rebench (nebius/SWE-rebench; -leaderboard; -V2): the fields of SWE-bench and install_config
({"test_cmd": a text or a list, "log_parser": a name, "install", "python", ...}); the image in image_name or
docker_image, swerebench/sweb.eval.x86_64.<id>, "__" as "_1776_". Its harness is a fork of swebench 4, so the
test files of the test patch follow test_cmd, in the conda environment "testbed". Of -V2 (with a field
"language", or a test command that is a list) test_cmd is whole, the tree is in /<name of the repository>,
and times are cut off from the ends of test names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import cast

from gymllm.errors import ConfigError
from gymllm_envs.swe.readers import commands
from gymllm_envs.swe.readers.fields import names, rest, text
from gymllm_envs.swe.readers.rows import Row
from gymllm_envs.swe.recipe import Recipe
from gymllm_envs.swe.task import SweTask

_TIMEOUT_S = 1800.0
"""The harness's own."""
_NAMED = ("image", "image_name", "docker_image")
_USED = (
    *("instance_id", "repo", "problem_statement", "patch", "test_patch", "base_commit"),
    *("FAIL_TO_PASS", "PASS_TO_PASS", *_NAMED),
)
_MARK = ">>>>> {} Test Output"


def read_swe_bench(row: Row, where: str) -> SweTask:
    """A row of SWE-bench.

    Raises:
        ConfigError: A field is missing or of another type; nothing says how its tests are run.
    """
    image = _image(row, "swebench/sweb.eval.x86_64.{}:latest", "_1776_")
    if "eval_script" not in row:
        return _by_repository(row, where, "swe-bench", image, strict=False)
    if row.get("eval_type") == "fail_only":
        raise ConfigError(
            f"{where} is graded by failures alone (eval_type 'fail_only'): a run that prints nothing would "
            "resolve it. Leave such tasks out; they are those of eslint, chart.js and a few more."
        )
    setup, command = split_eval_script(text(row, "eval_script", where), where)
    recipe = Recipe(
        format="swe-bench",
        log_parser=text(row, "log_parser", where),
        test_setup=setup,
        path=commands.CONDA_PATH,
        skipped_is_kept=True,
    )
    used = ("eval_script", "log_parser", "eval_type")
    return _task(row, where, recipe, image, command, used=used)


def read_swe_gym(row: Row, where: str) -> SweTask:
    """A row of SWE-Gym. Raises as `read_swe_bench` does."""
    image = _image(row, "xingyaoww/sweb.eval.x86_64.{}:latest", "_s_")
    return _by_repository(row, where, "swe-gym", image, strict=True)


def read_swe_rebench(row: Row, where: str) -> SweTask:
    """A row of SWE-rebench. Raises as `read_swe_bench` does."""
    value = row["install_config"]
    if isinstance(value, str):
        try:
            value = cast("object", json.loads(value))
        except json.JSONDecodeError as problem:
            raise ConfigError(f"{where}: install_config is no JSON: {problem}.") from problem
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: install_config must be an object, got {value!r}.")
    config = cast("Mapping[str, object]", value)
    test_cmd = config.get("test_cmd")
    many = not isinstance(test_cmd, str)
    lines = (test_cmd,) if isinstance(test_cmd, str) else names(test_cmd, f"{where}: test_cmd")
    parser = text(config, "log_parser", where)
    image = _image(row, "swerebench/sweb.eval.x86_64.{}:latest", "_1776_")
    if "language" in row or many:
        repo = text(row, "repo", where)
        recipe = Recipe(format="swe-rebench-v2", log_parser=parser)
        command = "\n".join(lines)
        return _task(row, where, recipe, image, command, workdir=f"/{repo.rpartition('/')[2]}")
    recipe = Recipe(
        format="swe-rebench",
        log_parser=parser,
        test_setup=commands.CONDA,
        path=commands.CONDA_PATH,
    )
    how = commands.Commands(test=lines[0])
    command = commands.test_command("", how, text(row, "test_patch", where), where)
    return _task(row, where, recipe, image, command)


def _by_repository(row: Row, where: str, form: str, image: str, *, strict: bool) -> SweTask:
    repo = text(row, "repo", where)
    how = commands.commands_of(repo)
    if how is None:
        known = ", ".join(sorted([*commands.SWE_BENCH, *commands.SWE_GYM]))
        raise ConfigError(
            f"{where}: nothing says how the tests of {repo!r} are run. Give the row an eval_script and a "
            f"log_parser (as swebench 5 has them) or a test_command. Known without: {known}."
        )
    command = commands.test_command(repo, how, text(row, "test_patch", where), where)
    if repo == "django/django" and row.get("version") == "1.9":
        command = command.replace(" --settings=test_sqlite --parallel 1", "")
    recipe = Recipe(
        format=form,
        log_parser=how.parser,
        test_setup=f"{commands.CONDA}\n{how.setup}".strip(),
        path=commands.CONDA_PATH,
        skipped_is_kept=not strict,
    )
    return _task(row, where, recipe, image, command)


def _image(row: Row, usual: str, double: str) -> str:
    for name in _NAMED:
        value = row.get(name)
        if isinstance(value, str) and value:
            return value
    return usual.format(str(row.get("instance_id", "")).lower().replace("__", double))


def _task(
    row: Row,
    where: str,
    recipe: Recipe,
    image: str,
    command: str,
    *,
    workdir: str = "/testbed",
    used: tuple[str, ...] = (),
) -> SweTask:
    return SweTask(
        id=text(row, "instance_id", where),
        repo=text(row, "repo", where),
        problem_statement=text(row, "problem_statement", where),
        fail_to_pass=names(row.get("FAIL_TO_PASS"), f"{where}: FAIL_TO_PASS"),
        pass_to_pass=names(row.get("PASS_TO_PASS", []), f"{where}: PASS_TO_PASS"),
        patch=text(row, "patch", where, needed=False),
        test_patch=text(row, "test_patch", where, needed=False),
        base_commit=text(row, "base_commit", where, needed=False),
        image=image,
        workdir=workdir,
        test_command=command,
        timeout_s=_TIMEOUT_S,
        extra=rest(row, (*_USED, *used)) | recipe.extra(),
    )


def split_eval_script(script: str, where: str) -> tuple[str, str]:
    """What comes before the tests, and the tests.

    Left out is what grading does itself, of files that the host has: the reset of test files, and the patch
    that brings the hidden ones, a here-document of `git apply`.

    Raises:
        ConfigError: The markers aren't there.
    """
    before: list[str] = []
    tests: list[str] = []
    current: list[str] | None = before
    ends = ""
    for line in script.splitlines():
        if ends:
            ends = "" if line == ends else ends
        elif opened := re.match(r"git apply\b.*<<\s*-?\s*(['\"]?)(\w+)\1", line):
            ends = opened.group(2)
        elif _MARK.format("Start") in line:
            current = tests
        elif _MARK.format("End") in line:
            current = None
        elif current is not None and not _DONE_BY_US.match(line):
            current.append(line)
    if current is not None or not any(line.strip() for line in tests):
        raise ConfigError(
            f"{where}: eval_script has no command between {_MARK.format('Start')!r} and "
            f"{_MARK.format('End')!r}."
        )
    return "\n".join(before).strip(), "\n".join(tests).strip()


_DONE_BY_US = re.compile(
    r"#!|set -\w+( pipefail)?$|git (status|show|checkout [0-9a-f]{7,40}|reset)\b|git .*\bdiff [0-9a-f]{7,40}"
)
