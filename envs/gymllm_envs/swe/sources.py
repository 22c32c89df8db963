"""Where tasks come from: the default ones, a file, the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gymllm.errors import ConfigError
from gymllm_envs.swe.readers import read_tasks_of
from gymllm_envs.swe.task import SweTask, read_tasks

DEFAULT = "default"


def default_tasks() -> list[SweTask]:
    """Bugs in small real packages: made at first use, then kept in the cache.

    Raises:
        EnvError: The packages can't be downloaded.
        MissingExtraError: bubblewrap isn't installed.
    """
    from gymllm_envs.swe.making import making  # it is slow to import, and used once

    return read_tasks(making.default_tasks())


def load_tasks(source: str | Path | Sequence[SweTask], split: str = "test") -> list[SweTask]:
    """Reads tasks.

    Args:
        source: A file or folder of tasks in any format of `readers`; the name of a data set on the hub; or
            tasks.
        split: Of a folder or data set.

    Raises:
        ConfigError: They can't be read.
        MissingExtraError: A package that reads them isn't installed.
        EnvError: The hub doesn't answer.
    """
    if isinstance(source, str | Path):
        return read_tasks_of(source, split)
    tasks = list(source)
    if not tasks:
        raise ConfigError("tasks is an empty list: give at least one SweTask.")
    return tasks
