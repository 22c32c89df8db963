"""Tasks of other data sets: which format a row is in shows from its fields.

    ours          sdist; or image_name and test_command
    r2e-gym       docker_image and expected_output_json
    swe-rebench   install_config and test_patch
    swe-smith     image_name, patch and FAIL_TO_PASS, but no test_patch
    swe-gym       the fields of SWE-bench for one of SWE-Gym's repositories, or with lists of tests
    swe-bench     instance_id, test_patch and FAIL_TO_PASS

Each reader's docstring says which fields the data set has and how its own harness grades.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gymllm.errors import ConfigError
from gymllm_envs.swe.patching import PatchError
from gymllm_envs.swe.readers import commands
from gymllm_envs.swe.readers.r2e_gym import read_r2e_gym
from gymllm_envs.swe.readers.rows import Row, read_rows
from gymllm_envs.swe.readers.swe_bench import read_swe_bench, read_swe_gym, read_swe_rebench
from gymllm_envs.swe.readers.swe_smith import read_swe_smith
from gymllm_envs.swe.task import SweTask, from_row

Reader = Callable[[Row, str], SweTask]

FORMATS: dict[str, tuple[str, ...]] = {
    "ours, from a source distribution": ("instance_id", "sdist", "FAIL_TO_PASS"),
    "ours, from an image": ("instance_id", "image_name", "test_command", "FAIL_TO_PASS"),
    "swe-bench": ("instance_id", "repo", "test_patch", "FAIL_TO_PASS"),
    "swe-gym": ("instance_id", "repo", "test_patch", "FAIL_TO_PASS"),
    "swe-smith": ("instance_id", "image_name", "patch", "FAIL_TO_PASS"),
    "swe-rebench": ("instance_id", "repo", "test_patch", "install_config", "FAIL_TO_PASS"),
    "r2e-gym": ("docker_image", "repo_name", "commit_hash", "expected_output_json"),
}
"""The fields by which each is known."""


def read_tasks_of(source: Path | str, split: str) -> list[SweTask]:
    """Reads a data set, whatever its format.

    Args:
        source: A file, a folder, or the name of a data set on the hub.
        split: Which part of a folder or data set.

    Raises:
        ConfigError: It can't be read, holds no tasks, two of one id, or rows in no known format.
        MissingExtraError: A package that reads it isn't installed.
        EnvError: The hub doesn't answer.
    """
    tasks: dict[str, SweTask] = {}
    for where, row in read_rows(source, split):
        task = read_row(row, where)
        if task.id in tasks:
            raise ConfigError(f"{where}: there are two tasks called {task.id!r}.")
        tasks[task.id] = task
    if not tasks:
        raise ConfigError(f"{str(source)!r} holds no tasks.")
    return list(tasks.values())


def read_row(row: Row, where: str) -> SweTask:
    """Reads a row, whatever its format.

    Raises:
        ConfigError: It is in no known one, or a field is wrong.
    """
    reader = _reader(row)
    if reader is None:
        known = "; ".join(f"{name}: {', '.join(fields)}" for name, fields in FORMATS.items())
        raise ConfigError(
            f"{where} is in no format that is known by its fields, which are {', '.join(row) or 'none'}. "
            f"Known are {known}."
        )
    try:
        return reader(row, where)
    except PatchError as problem:
        raise ConfigError(str(problem)) from problem
    except ConfigError as problem:
        if where in str(problem):
            raise
        raise ConfigError(f"{where}: {problem}") from problem


def _reader(row: Row) -> Reader | None:
    has = {name for name, value in row.items() if value is not None}
    if {"docker_image", "expected_output_json"} <= has:
        return read_r2e_gym
    if "sdist" in has or {"image_name", "test_command"} <= has:
        return from_row
    if not {"instance_id", "FAIL_TO_PASS"} <= has:
        return None
    if "test_patch" not in has:
        return read_swe_smith if {"image_name", "patch"} <= has else None
    if "install_config" in has:
        return read_swe_rebench
    if str(row.get("repo")).lower() in commands.SWE_GYM and "eval_script" not in has:
        return read_swe_gym
    return read_swe_bench
