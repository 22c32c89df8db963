"""Tasks, their order and their seeds: pure functions of the run's seed (invariant 7).

A task is what every member of a group plays: one environment seed and its reset options. What differs
between members is only the sampling seed. No global random state is read or written anywhere.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gymllm.errors import ConfigError


def derive_seed(*parts: int | str) -> int:
    """A 31-bit seed that is a function of `parts` alone (SHA-256 of their reprs).

    31 bits because NumPy's legacy generators and Gymnasium accept no more everywhere.
    """
    digest = hashlib.sha256("\x1f".join(repr(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


@dataclass(frozen=True, kw_only=True)
class Task:
    """One thing to be played, the same for every member of its group."""

    index: int
    """Place in the task source's order, >= 0; unique within a run."""
    id: str
    """A name people can read."""
    seed: int
    """Seed that the environment is reset with."""
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    """Options that the environment is reset with."""

    def member_seed(self, run_seed: int, member: int, attempt: int = 0) -> int:
        """Sampling seed of one member's episode; a retry (`attempt` > 0) plays another one."""
        return derive_seed("member", run_seed, self.index, member, attempt)


class TaskSource(Protocol):
    """Gives the task at any index; the same index always gives the same task."""

    def task(self, index: int) -> Task:
        """The task at `index` >= 0."""
        ...


@dataclass(frozen=True, kw_only=True)
class SeededTasks:
    """Endless tasks that differ by environment seed; or `count` of them, over and over."""

    run_seed: int
    """Seed of the run."""
    count: int | None = None
    """Distinct environment seeds; None is endless."""
    split: str = "train"
    """Names a stream of seeds of its own: training and evaluation never share one by design."""
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    """Reset options of every task."""

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise ConfigError(f"tasks.count must be >= 1 or none, got {self.count}.")

    def task(self, index: int) -> Task:
        which = index if self.count is None else index % self.count
        return Task(
            index=index,
            id=f"{self.split}-{which}",
            seed=derive_seed("task", self.run_seed, self.split, which),
            options=self.options,
        )


@dataclass(frozen=True, kw_only=True)
class ListedTasks:
    """Tasks that an environment has by name (`Env.task_ids`), over and over; each once before any again."""

    run_seed: int
    """Seed of the run."""
    ids: Sequence[str]
    """Their names, as the reset option "task" takes them."""
    split: str = "train"
    """Names a stream of seeds of its own."""
    shuffle: bool = False
    """Whether each pass has an order of its own, a function of the run's seed and the pass."""
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    """Reset options of every task, beside "task"."""

    def __post_init__(self) -> None:
        if not self.ids:
            raise ConfigError("ListedTasks needs at least one task, got none.")

    def task(self, index: int) -> Task:
        round_, place = divmod(index, len(self.ids))
        if self.shuffle:
            place = _order(self.run_seed, self.split, round_, tuple(self.ids))[place]
        name = self.ids[place]
        seed = derive_seed("task", self.run_seed, self.split, name, round_)
        return Task(index=index, id=name, seed=seed, options={**self.options, "task": name})


@functools.lru_cache(maxsize=4)
def _order(run_seed: int, split: str, round_: int, ids: tuple[str, ...]) -> list[int]:
    """One pass's order."""
    keys = [derive_seed("order", run_seed, split, round_, name) for name in ids]
    return sorted(range(len(keys)), key=lambda place: (keys[place], place))
