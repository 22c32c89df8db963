"""Grouping without a barrier: a group exists the moment its last member ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from gymllm.errors import ConfigError
from gymllm.task import Task
from gymllm.trajectory import Ending, Group, Trajectory


@dataclass
class _Partial:
    task: Task
    members: dict[int, Trajectory] = field(default_factory=dict[int, Trajectory])


class GroupStream:
    """Collects trajectories into groups; no group waits for another, none is ever mixed.

    A plain state machine: it neither waits nor owns a queue.
    """

    def __init__(self, group_size: int) -> None:
        if group_size < 2:
            raise ConfigError(
                f"rollout.group_size must be >= 2 for a group baseline, got {group_size}."
            )
        self.group_size = group_size
        self._partial: dict[int, _Partial] = {}

    def open(self, task: Task) -> None:
        """Announces a task's group.

        Raises:
            ConfigError: The task's index is open already.
        """
        if task.index in self._partial:
            raise ConfigError(f"task index {task.index} has an open group already.")
        self._partial[task.index] = _Partial(task)

    def add(self, trajectory: Trajectory) -> Group | None:
        """Adds a member; returns the group if it was the last one.

        Raises:
            ValueError: The trajectory failed, its group is not open, or the member is there already.
        """
        index, member = trajectory.task.index, trajectory.member
        partial = self._partial.get(index)
        if trajectory.ending is Ending.FAILED:
            raise ValueError(
                f"a failed trajectory has no place in a group (task {index}, {member})."
            )
        if partial is None or not 0 <= member < self.group_size or member in partial.members:
            raise ValueError(f"no open place for member {member} of task {index}.")
        partial.members[member] = trajectory
        if len(partial.members) < self.group_size:
            return None
        del self._partial[index]
        members = tuple(partial.members[m] for m in range(self.group_size))
        return Group(task=partial.task, trajectories=members)

    def drop(self, task: Task) -> int:
        """Gives a group up; returns how many finished members are lost with it."""
        partial = self._partial.pop(task.index, None)
        return len(partial.members) if partial else 0

    @property
    def open_groups(self) -> int:
        """Groups that have not all their members yet."""
        return len(self._partial)
