"""Groups: complete at their last member, never mixed, never with a failed one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gymllm.errors import ConfigError
from gymllm.groups import GroupStream
from gymllm.task import SeededTasks
from gymllm.trajectory import Ending, Group, Trajectory

TASKS = [SeededTasks(run_seed=0).task(index) for index in range(6)]


def trajectory(task: int, member: int, ending: Ending = Ending.TERMINATED) -> Trajectory:
    return Trajectory(
        task=TASKS[task],
        member=member,
        attempt=0,
        segments=(),
        turns=(),
        messages=(),
        ending=ending,
        reward=10.0 * task + member,
    )


def stream(*tasks: int, size: int = 3) -> GroupStream:
    groups = GroupStream(size)
    for task in tasks:
        groups.open(TASKS[task])
    return groups


def test_a_group_is_there_with_its_last_member_and_in_member_order() -> None:
    groups = stream(0, 1)
    assert groups.add(trajectory(0, 2)) is None
    assert groups.add(trajectory(1, 0)) is None
    assert groups.add(trajectory(0, 0)) is None
    group = groups.add(trajectory(0, 1))
    assert isinstance(group, Group)
    assert group.rewards == (0, 1, 2)
    assert group.task is TASKS[0]
    assert groups.open_groups == 1, "the other one goes on"


def test_truncated_members_belong_to_a_group() -> None:
    groups = stream(0, size=2)
    groups.add(trajectory(0, 0, Ending.TRUNCATED))
    group = groups.add(trajectory(0, 1))
    assert group is not None
    assert [t.ending for t in group.trajectories] == [Ending.TRUNCATED, Ending.TERMINATED]


@pytest.mark.parametrize("seed", range(5))
def test_any_order_gives_every_group_once_and_unmixed(seed: int) -> None:
    groups = stream(*range(6), size=4)
    order = [(task, member) for task in range(6) for member in range(4)]
    random.Random(seed).shuffle(order)
    last = dict(order)  # each task's last member
    for task, member in order:
        group = groups.add(trajectory(task, member))
        assert (group is not None) == (last[task] == member)
        if group is not None:
            assert group.rewards == tuple(10 * task + k for k in range(4))
    assert groups.open_groups == 0


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (trajectory(0, 1, Ending.FAILED), "failed trajectory has no place"),
        (trajectory(1, 0), "no open place for member 0 of task 1"),
        (trajectory(0, 0), "no open place for member 0 of task 0"),
        (trajectory(0, 3), "no open place for member 3 of task 0"),
        (trajectory(0, -1), "no open place for member -1 of task 0"),
    ],
)
def test_what_does_not_belong_is_refused(bad: Trajectory, match: str) -> None:
    groups = stream(0)
    groups.add(trajectory(0, 0))
    with pytest.raises(ValueError, match=match):
        groups.add(bad)


def test_a_complete_group_takes_no_more() -> None:
    groups = stream(0, size=2)
    for member in range(2):
        groups.add(trajectory(0, member))
    with pytest.raises(ValueError, match="no open place"):
        groups.add(trajectory(0, 0))


def test_drop_says_how_many_are_lost() -> None:
    groups = stream(0, 1)
    groups.add(trajectory(0, 0))
    groups.add(trajectory(0, 1))
    assert groups.drop(TASKS[0]) == 2
    assert groups.drop(TASKS[0]) == 0
    assert groups.open_groups == 1
    groups.open(TASKS[0])
    assert groups.add(trajectory(0, 0)) is None


def test_a_task_has_one_open_group() -> None:
    with pytest.raises(ConfigError, match="task index 2 has an open group already"):
        stream(2, 2)


def test_a_group_has_members() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.group_size must be >= 1, got 0"):
        GroupStream(0)


def test_each_agent_has_a_group_of_its_own() -> None:
    groups = GroupStream(2)
    groups.open(TASKS[0], ["a", "b"])
    assert groups.open_groups == 2
    assert groups.add(replace(trajectory(0, 0), agent="b")) is None
    assert groups.add(replace(trajectory(0, 1), agent="a")) is None
    group = groups.add(replace(trajectory(0, 1), agent="b"))
    assert group is not None
    assert (group.agent, group.rewards) == ("b", (0, 1))
    assert {t.agent for t in group.trajectories} == {"b"}
    with pytest.raises(ValueError, match="no open place for 'b' in member 0 of task 0"):
        groups.add(replace(trajectory(0, 0), agent="b"))
    with pytest.raises(ValueError, match="no open place for member 0 of task 0"):
        groups.add(trajectory(0, 0))
    assert groups.drop(TASKS[0]) == 1, "one episode, whoever played it"
    assert groups.open_groups == 0
