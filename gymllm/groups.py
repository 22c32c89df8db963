"""Grouping without a barrier: a group exists the moment its last member ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gymllm.errors import ConfigError
from gymllm.task import Task
from gymllm.trajectory import Ending, Group, Trajectory


@dataclass
class _Partial:
    task: Task
    members: dict[int, Trajectory] = field(default_factory=dict[int, Trajectory])


class GroupStream:
    """Collects trajectories into groups, one for each task and agent; none waits for another or is mixed.

    A plain state machine: it neither waits nor owns a queue.
    """

    def __init__(self, group_size: int) -> None:
        if group_size < 1:
            raise ConfigError(f"rollout.group_size must be >= 1, got {group_size}.")
        self.group_size = group_size
        self._partial: dict[int, dict[str, _Partial]] = {}

    def open(self, task: Task, agents: Iterable[str] = ("",)) -> None:
        """Announces a task's groups, one for each agent.

        Raises:
            ConfigError: The task's index is open already.
        """
        if task.index in self._partial:
            raise ConfigError(f"task index {task.index} has an open group already.")
        self._partial[task.index] = {agent: _Partial(task) for agent in agents}

    def add(self, trajectory: Trajectory) -> Group | None:
        """Adds a member; returns the group if it was the last one.

        Raises:
            ValueError: The trajectory failed, its group is not open, or the member is there already.
        """
        index, member, agent = trajectory.task.index, trajectory.member, trajectory.agent
        partials = self._partial.get(index, {})
        partial = partials.get(agent)
        if trajectory.ending is Ending.FAILED:
            raise ValueError(
                f"a failed trajectory has no place in a group (task {index}, {member})."
            )
        if partial is None or not 0 <= member < self.group_size or member in partial.members:
            whose = f"{agent!r} in member" if agent else "member"
            raise ValueError(f"no open place for {whose} {member} of task {index}.")
        partial.members[member] = trajectory
        if len(partial.members) < self.group_size:
            return None
        del partials[agent]
        if not partials:
            del self._partial[index]
        members = tuple(partial.members[m] for m in range(self.group_size))
        return Group(task=partial.task, agent=agent, trajectories=members)

    def drop(self, task: Task) -> int:
        """Gives a task's groups up; returns how many finished members are lost with them."""
        partials = self._partial.pop(task.index, {})
        return max((len(partial.members) for partial in partials.values()), default=0)

    @property
    def open_groups(self) -> int:
        """Groups that have not all their members yet."""
        return sum(len(partials) for partials in self._partial.values())
