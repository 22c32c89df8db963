"""A step's numbers, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from gymllm.ledger import Segment
from gymllm.task import Task
from gymllm.trajectory import Ending, Group, Trajectory, Turn
from gymllm_trainers.statistics import StepStatistics


def turn(*, env_s: float = 0.0, engine_s: float = 0.0, **changes: bool | int) -> Turn:
    return Turn(
        observation="",
        action="",
        reward=0.0,
        prompt_tokens=4,
        generated_tokens=2,
        env_s=env_s,
        engine_s=engine_s,
        **changes,
    )


def segment(size: int, generated: int) -> Segment:
    mask = np.array([0] * (size - generated) + [1] * generated, np.int32)
    zeros = np.zeros(size, np.float32)
    return Segment(ids=mask, mask=mask, logprobs=zeros, versions=mask - 1)


def trajectory(member: int, reward: float, **changes: object) -> Trajectory:
    fields: dict[str, object] = {
        "task": Task(index=0, id="t", seed=0),
        "member": member,
        "attempt": 0,
        "segments": (segment(6, 2),),
        "turns": (turn(),),
        "messages": (),
        "ending": Ending.TERMINATED,
        "reward": reward,
        "started_ns": 0,
        "ended_ns": 10**9,
    }
    return Trajectory(**{**fields, **changes})  # type: ignore[arg-type] # built for tests


def group(*rewards: float) -> Group:
    members = tuple(trajectory(member, reward) for member, reward in enumerate(rewards))
    return Group(task=members[0].task, trajectories=members)


def of(*groups: Group) -> dict[str, float]:
    statistics = StepStatistics()
    for one in groups:
        statistics.add(one)
    return statistics.metrics()


def test_rewards_and_groups_by_hand() -> None:
    metrics = of(group(1, 1), group(0, 0), group(1, 0), group(0.5, 0.5))
    expected = {
        "reward/mean": 4 / 8,
        "reward/std": np.std([1, 1, 0, 0, 1, 0, 0.5, 0.5]),
        "groups/count": 4,
        "groups/all_solved": 1 / 4,
        "groups/none_solved": 1 / 4,
        "groups/zero_variance": 3 / 4,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_episodes_and_turns_by_hand() -> None:
    first = trajectory(
        0,
        1,
        turns=(
            turn(invalid_action=True, env_s=0.1, engine_s=1.0),
            turn(tool_calls=3, tool_errors=1, env_s=0.3, engine_s=2.0),
        ),
        segments=(segment(6, 2), segment(10, 4)),
        ending=Ending.TRUNCATED,
        reason="max_turns",
        ended_ns=3 * 10**9,
    )
    second = trajectory(1, 0, ending=Ending.TRUNCATED)
    metrics = of(Group(task=first.task, trajectories=(first, second)))
    expected = {
        "episode/turns": 1.5,
        "episode/tokens": (16 + 6) / 2,
        "episode/generated_tokens": (6 + 2) / 2,
        "episode/segments": 1.5,
        "episode/truncated": 1.0,
        "episode/truncated/max_turns": 0.5,
        "episode/truncated/environment": 0.5,
        "episode/seconds": 2.0,
        "turn/invalid_actions": 1 / 3,
        "turn/tool_calls": 1.0,
        "turn/tool_errors": 1 / 3,
        "turn/generated_tokens": 2.0,
        "latency/env_p50_s": 0.1,
        "latency/engine_p50_s": 1.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert metrics["latency/env_p50_s"] <= metrics["latency/env_p95_s"] <= 0.3


def test_a_terminated_episode_has_no_limit() -> None:
    metrics = of(group(1, 0))
    assert metrics["episode/truncated"] == 0
    assert not any(name.startswith("episode/truncated/") for name in metrics)


def test_every_number_is_finite_even_without_a_turn() -> None:
    empty = tuple(trajectory(member, 0.0, turns=(), segments=()) for member in range(2))
    metrics = of(Group(task=empty[0].task, trajectories=empty))
    assert all(np.isfinite(value) for value in metrics.values())
    assert {type(value) for value in metrics.values()} == {float}, "what JSON can hold"


def test_each_step_starts_anew() -> None:
    statistics = StepStatistics()
    assert statistics.metrics() == {}
    statistics.add(group(1, 1))
    assert statistics.metrics()["reward/mean"] == 1
    assert statistics.metrics() == {}


def test_what_environments_say_of_their_episodes_is_averaged_over_those_that_do() -> None:
    one, two = trajectory(0, 0.0, metrics={"mended": 1.0}), trajectory(1, 0.0)
    three = trajectory(2, 0.0, metrics={"mended": 0.0, "kept": 3.0})
    found = of(Group(task=one.task, trajectories=(one, two, three)))
    assert {name: found[name] for name in found if name.startswith("env/")} == {
        "env/mended": 0.5,
        "env/kept": 3.0,
    }


def test_rewards_have_a_latency_where_something_gives_them() -> None:
    statistics = StepStatistics()
    for seconds in (0.1, 0.2, 0.6):
        statistics.scored(seconds)
    statistics.add(group(1, 1))
    assert statistics.metrics()["latency/reward_p50_s"] == 0.2
    statistics.add(group(1, 1))
    assert "latency/reward_p50_s" not in statistics.metrics()
