"""The reset option "task" of environments that have their tasks by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from gymllm.errors import ConfigError, UnknownNameError

T = TypeVar("T")


def chosen_task(
    tasks: Mapping[str, T], options: Mapping[str, object], rng: np.random.Generator, env_id: str
) -> T:
    """The task that the options ask for, by id or index; by default the generator draws one.

    Args:
        tasks: By id, in order; at least one.
        options: Of the reset.
        rng: The environment's.
        env_id: For errors.

    Raises:
        ConfigError: Another option, or an index out of range.
        UnknownNameError: No such task.
    """
    wanted = options.get("task")
    if unknown := set(options) - {"task"}:
        raise ConfigError(f"{env_id} has the reset option 'task', got {sorted(unknown)}.")
    names = list(tasks)
    if wanted is None:
        wanted = int(rng.integers(len(names)))
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        if not 0 <= wanted < len(names):
            raise ConfigError(f"task must be from 0 to {len(names) - 1}, got {wanted}.")
        wanted = names[wanted]
    if not isinstance(wanted, str) or wanted not in tasks:
        raise UnknownNameError("task", str(wanted), names)
    return tasks[wanted]
