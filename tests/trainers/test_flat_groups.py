"""Groups whose rewards are all equal: said once, then the end of the run."""

from __future__ import annotations

import dataclasses

import pytest

from gymllm.errors import RunError
from gymllm.task import Task
from gymllm.trajectory import Ending, Group, Trajectory
from gymllm_trainers.flat_groups import SAID_AFTER, FlatGroups


def flat(reward: float) -> Group:
    task = Task(index=0, id="t", seed=0)
    one = Trajectory(
        task=task,
        member=0,
        attempt=0,
        segments=(),
        turns=(),
        messages=(),
        ending=Ending.TERMINATED,
        reward=reward,
    )
    return Group(task=task, trajectories=(one, one))


def test_said_once_and_then_the_run_stops():
    said: list[str] = []
    groups = FlatGroups(most=40, say=said.append)
    for _ in range(SAID_AFTER - 1):
        groups.add(flat(0.0))
    assert said == []
    for _ in range(39 - (SAID_AFTER - 1)):
        groups.add(flat(0.0))
    assert said == [
        "the last 25 groups all had reward 0.00 in every episode: nothing to learn from; the run "
        "stops after 40 of them in a row."
    ]
    with pytest.raises(RunError) as raised:
        groups.add(flat(0.0))
    shown = str(raised.value)
    assert shown.startswith("the last 40 groups all had reward 0.00 in every episode")
    for way in ("easier tasks", "agent.temperature", "rollout.group_size", "zero_variance keep"):
        assert way in shown


def test_solved_task_is_not_called_too_hard():
    groups = FlatGroups(most=2)
    groups.add(flat(1.0))
    with pytest.raises(RunError, match=r"reward 1\.00 .*nothing left to learn.*solve.*harder") as e:
        groups.add(flat(1.0))
    assert "easier" not in str(e.value)


def test_different_rewards_are_counted():
    groups = FlatGroups(most=3)
    groups.add(flat(0.0))
    groups.add(flat(1.0))
    with pytest.raises(RunError, match=r"each of the last 3 groups .*\(0\.00 in 2, 1\.00 in 1\)"):
        groups.add(flat(0.0))


def test_groups_that_nothing_was_worth_imitating_of_say_so():
    mixed = flat(0.1)
    worse = dataclasses.replace(mixed.trajectories[0], reward=0.0)
    mixed = dataclasses.replace(mixed, trajectories=(worse, *mixed.trajectories[1:]))
    groups = FlatGroups(most=2)
    groups.add(mixed)
    with pytest.raises(
        RunError, match=r"no episode of the last 2 groups .*keep_above: nothing"
    ) as e:
        groups.add(mixed)
    assert "a lower algorithm.keep_above" in str(e.value)


def test_group_that_teaches_starts_the_count_again():
    said: list[str] = []
    groups = FlatGroups(most=2, say=said.append)
    for _ in range(5):
        groups.add(flat(0.0))
        groups.end()
    assert said == []
