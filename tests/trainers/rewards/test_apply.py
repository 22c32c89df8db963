"""Scores put into trajectories of real episodes, played by a rollout."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable

import anyio
import numpy as np
import pytest

from gymllm.engines.scripted import ScriptedEngine
from gymllm.errors import RunError
from gymllm.pool import EnvPool
from gymllm.rollout import AdmissionGate, Rollout, RolloutConfig
from gymllm.task import SeededTasks
from gymllm.timeline import Timeline
from gymllm.trajectory import Ending, Group, Trajectory
from gymllm_agents import ConversationConfig, ModelAgent, Tokenizer, train_tokenizer
from gymllm_envs.frozen_lake import FrozenLake, scripted_action
from gymllm_trainers.rewards import FunctionReward, RewardConfig, apply_rewards

Score = Callable[[Trajectory], float | Awaitable[float]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["left right up down row column ice"] * 10, vocab_size=300)


async def play(tokenizer: Tokenizer, score: Score, config: RewardConfig, **limits: int) -> Group:
    """A group of two, scored by a function; `limits` are of the rollout."""

    def reply(prompt: str, rng: np.random.Generator) -> str:
        return scripted_action(prompt, rng=rng, skill=1.0)

    model = FunctionReward(score)
    settings = {"max_failed_groups": 2, "retries": 1} | limits
    async with EnvPool(lambda: FrozenLake(size=2), 2) as pool:
        rollout = Rollout(
            pool=pool,
            make_agent=ModelAgent.factory(tokenizer, ConversationConfig(max_new_tokens=8)),
            engine=ScriptedEngine(reply, tokenizer),
            tasks=SeededTasks(run_seed=0),
            config=RolloutConfig(group_size=2, **settings),
            gate=AdmissionGate(groups_per_step=1, max_lag=0),
            run_seed=0,
            timeline=Timeline(),
            score_episode=lambda trajectories: apply_rewards(trajectories, model, config),
        )
        async with rollout.stream() as groups:
            return await groups.receive()


def turns_score(trajectory: Trajectory) -> float:
    return 10.0 + len(trajectory.turns)


@pytest.mark.asyncio
async def test_a_score_is_added_to_the_last_turn_and_the_return(tokenizer: Tokenizer) -> None:
    config = RewardConfig(kind="function", function="a:b", weight=0.5)
    group = await play(tokenizer, turns_score, config)
    for trajectory in group.trajectories:
        assert len(trajectory.turns) == 2  # from a corner of 2 x 2 to the other
        assert trajectory.reward == 1.0 + 0.5 * 12.0
        assert [turn.reward for turn in trajectory.turns] == [0.0, 7.0]
        assert trajectory.metrics["reward/score"] == 12.0
        assert trajectory.metrics["reward/environment"] == 1.0


@pytest.mark.asyncio
async def test_a_score_replaces_every_reward_of_the_environment(tokenizer: Tokenizer) -> None:
    config = RewardConfig(kind="function", function="a:b", combine="replace", weight=-1.0)

    async def score(trajectory: Trajectory) -> float:
        await anyio.lowlevel.checkpoint()
        return float(trajectory.member)

    group = await play(tokenizer, score, config)
    assert group.rewards == (0.0, -1.0)
    assert [turn.reward for turn in group.trajectories[1].turns] == [0.0, -1.0]
    assert group.trajectories[1].metrics["reward/environment"] == 1.0


@pytest.mark.asyncio
async def test_an_episode_whose_score_breaks_is_played_again(tokenizer: Tokenizer) -> None:
    attempts: list[tuple[int, int]] = []

    def score(trajectory: Trajectory) -> float:
        attempts.append((trajectory.member, trajectory.attempt))
        if trajectory.attempt == 0 and trajectory.member == 1:
            raise ConnectionError("the grader is away")
        return 3.0

    group = await play(tokenizer, score, RewardConfig(kind="function", function="a:b"))
    assert [trajectory.attempt for trajectory in group.trajectories] == [0, 1]
    assert group.rewards == (4.0, 4.0)
    assert sorted(attempts) == [(0, 0), (1, 0), (1, 1)]


@pytest.mark.asyncio
async def test_scores_that_always_break_stop_the_run_with_the_reason(tokenizer: Tokenizer) -> None:
    def score(trajectory: Trajectory) -> float:
        raise ConnectionError("the grader is away")

    config = RewardConfig(kind="function", function="a:b")
    with pytest.raises(RunError, match=r"RewardError.*ConnectionError: the grader is away"):
        await play(tokenizer, score, config)


# ---------------------------------------------------------------------- without a rollout


@pytest.fixture(scope="module")
def played(tokenizer: Tokenizer) -> Trajectory:
    async def one() -> Group:
        return await play(tokenizer, lambda trajectory: 0.0, RewardConfig())

    return anyio.run(one).trajectories[0]


async def failing(played: Trajectory, value: object) -> Trajectory:
    model = FunctionReward(lambda trajectory: value)  # type: ignore[arg-type, return-value]  # tested
    (scored,) = await apply_rewards([played], model, RewardConfig())
    return scored


@pytest.mark.asyncio
@pytest.mark.parametrize("value", [math.nan, math.inf, None, "0.5", np.ones(2), 10**400])
async def test_what_is_no_finite_number_fails_the_episode(
    played: Trajectory, value: object
) -> None:
    scored = await failing(played, value)
    assert scored.ending is Ending.FAILED
    assert scored.reason.startswith("RewardError: a score must be a finite number, got")


@pytest.mark.asyncio
@pytest.mark.parametrize("value", [2, True, np.float32(2), np.int64(2), np.array(2.0)])
async def test_any_number_is_a_score(played: Trajectory, value: object) -> None:
    scored = await failing(played, value)
    assert scored.reward == played.reward + float(value)  # type: ignore[arg-type]  # each is a number


@pytest.mark.asyncio
async def test_a_score_that_takes_too_long_fails_the_episode(played: Trajectory) -> None:
    async def never(trajectory: Trajectory) -> float:
        await anyio.sleep_forever()
        return 0.0

    config = RewardConfig(kind="function", function="a:never", timeout_s=0.02)
    (scored,) = await apply_rewards([played], FunctionReward(never), config)
    assert scored.ending is Ending.FAILED
    assert scored.reason == "RewardTimeout: no score within reward.timeout_s (0.02 s)"


@pytest.mark.asyncio
async def test_one_agent_that_cannot_be_scored_fails_the_episode_of_all(
    played: Trajectory,
) -> None:
    def score(trajectory: Trajectory) -> float:
        if trajectory.agent == "bob":
            raise ValueError("no")
        return 1.0

    both = [dataclasses.replace(played, agent=name) for name in ("ann", "bob")]
    scored = await apply_rewards(both, FunctionReward(score), RewardConfig())
    assert [one.ending for one in scored] == [Ending.FAILED] * 2
    assert [one.reason for one in scored] == ["RewardError: ValueError: no"] * 2


@pytest.mark.asyncio
async def test_failed_episodes_are_not_scored(played: Trajectory) -> None:
    called: list[Trajectory] = []

    def score(trajectory: Trajectory) -> float:
        called.append(trajectory)
        return 1.0

    broken = dataclasses.replace(played, ending=Ending.FAILED, reason="EnvError: x")
    assert await apply_rewards([broken], FunctionReward(score), RewardConfig()) == [broken]
    assert called == []
    assert await apply_rewards([played], None, RewardConfig()) == [played]


@pytest.mark.asyncio
async def test_an_episode_that_ended_before_its_first_turn_is_scored_too(
    played: Trajectory,
) -> None:
    empty = dataclasses.replace(played, turns=(), reward=0.0)
    scored = await apply_rewards([empty], FunctionReward(turns_score), RewardConfig())
    assert scored[0].reward == 10.0
    assert scored[0].turns == ()


@pytest.mark.asyncio
async def test_cancelling_is_no_failure(played: Trajectory) -> None:
    async def never(trajectory: Trajectory) -> float:
        scope.cancel()
        await anyio.sleep_forever()
        return 0.0

    with anyio.CancelScope() as scope:
        await apply_rewards([played], FunctionReward(never), RewardConfig())
    assert scope.cancelled_caught
