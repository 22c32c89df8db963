"""Evaluation: what is counted, what is not, and how far a mean is to be trusted."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from gymllm.engines import ScriptedEngine
from gymllm.env import Env
from gymllm.episode import EpisodeLimits
from gymllm.errors import ConfigError
from gymllm.evaluation import EvaluationResult, evaluate, mean_interval
from gymllm.pool import EnvPool
from gymllm.task import SeededTasks, Task
from gymllm.trajectory import Ending
from gymllm_agents import ConversationConfig, ModelAgent, train_tokenizer

TOKENIZER = train_tokenizer([], vocab_size=259)


class Coin(Env):
    """Reward 1 for "heads"; two turns at most. Breaks where its task says so."""

    async def areset(self, *, seed=None, options=None):
        self._turns = 0
        if (options or {}).get("broken"):
            raise RuntimeError("no coin")
        return f"coin {seed}", {}

    async def astep(self, action):
        self._turns += 1
        done = action in ("heads", "tails")
        return "again", float(action == "heads"), done, self._turns == 2 and not done, {}


class Tasks:
    """Every third task is broken."""

    def __init__(self, broken: bool = True) -> None:
        self._broken = broken
        self._seeds = SeededTasks(run_seed=0)

    def task(self, index: int) -> Task:
        broken = self._broken and index % 3 == 2
        seed = self._seeds.task(index).seed
        return Task(index=index, id=f"t{index}", seed=seed, options={"broken": broken})


def toss(prompt: str, rng: np.random.Generator) -> str:
    return str(rng.choice(["heads", "tails", "edge"]))


async def play(**changes: object) -> EvaluationResult:
    pool = EnvPool(Coin, 4)
    engine = ScriptedEngine(toss, TOKENIZER)
    arguments: dict[str, object] = {
        "pool": pool,
        "engine": engine,
        "make_agent": ModelAgent.factory(TOKENIZER, ConversationConfig(max_new_tokens=8)),
        "tasks": Tasks(),
        "episodes": 9,
        "concurrency": 3,
        "run_seed": 1,
    }
    try:
        return await evaluate(**{**arguments, **changes})  # type: ignore[arg-type] # built for tests
    finally:
        await engine.aclose()
        await pool.aclose()


@pytest.mark.asyncio
async def test_failed_episodes_are_counted_and_never_scored():
    ended: list[int] = []
    result = await play(retries=1, on_trajectory=lambda t: ended.append(t.task.index))
    assert [t.task.index for t in result.trajectories] == list(range(9)), "in task order"
    assert sorted(ended) == list(range(9))
    assert result.failed == 3
    assert result.retried == {"EnvCrashedError": 3}
    assert [t.attempt for t in result.trajectories if t.ending is Ending.FAILED] == [1, 1, 1]
    assert result.reward.count == result.turns.count == 6
    assert result.reward.mean == np.mean([t.reward for t in result.scored])
    assert sum(result.endings.values()) == 9
    assert any(name.startswith("failed: EnvCrashedError") for name in result.endings)
    assert result.tokens.mean > result.generated_tokens.mean > 0


@pytest.mark.asyncio
async def test_result_does_not_depend_on_concurrency():
    one, many = await play(concurrency=1), await play(concurrency=50)
    assert [(t.reward, t.messages) for t in one.trajectories] == [
        (t.reward, t.messages) for t in many.trajectories
    ]
    other = await play(run_seed=2)
    assert [t.messages for t in other.trajectories] != [t.messages for t in one.trajectories]


@pytest.mark.asyncio
async def test_limits_end_episodes():
    result = await play(
        tasks=Tasks(broken=False), limits=EpisodeLimits(max_turns=1), episodes=20, retries=0
    )
    assert result.endings["truncated: max_turns"] > 0


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"episodes": 0}, "episodes must be >= 1, got 0."),
        ({"concurrency": 0}, "concurrency must be >= 1, got 0."),
        ({"retries": -1}, "retries must be >= 0, got -1."),
    ],
)
async def test_numbers_out_of_range_are_refused(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        await play(**changes)


def test_interval_of_successes_is_wilsons():
    # Wilson 1927; the numbers are those of Newcombe 1998, table I: 81 of 263 and 0 of 20.
    estimate = mean_interval([1.0] * 81 + [0.0] * 182)
    assert estimate.mean == pytest.approx(81 / 263)
    assert (estimate.low, estimate.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    estimate = mean_interval([0.0] * 20)
    assert (estimate.low, estimate.high) == pytest.approx((0.0, 0.1611), abs=5e-5)


@pytest.mark.parametrize(
    ("count", "quantile"),
    [
        (2, 12.7062),
        (3, 4.3027),
        (4, 3.1824),
        (5, 2.7764),
        (8, 2.3646),
        (20, 2.0930),
        (64, 1.9983),
        (500, 1.9647),
    ],
)
def test_interval_of_other_numbers_is_students(count, quantile):
    values = np.random.default_rng(count).normal(3, 2, count)
    estimate = mean_interval(values.tolist())
    half = quantile * values.std(ddof=1) / count**0.5
    assert estimate.mean == pytest.approx(values.mean())
    assert estimate.high - estimate.mean == pytest.approx(half, rel=2e-3)
    assert estimate.mean - estimate.low == pytest.approx(half, rel=2e-3)


def test_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    for draw in (lambda: (rng.random(64) < 0.3).astype(float), lambda: rng.random(64) ** 2):
        truth = 0.3 if draw()[0] in (0, 1) else 1 / 3
        estimates = [mean_interval(draw().tolist()) for _ in range(1000)]
        covered = np.mean([e.low <= truth <= e.high for e in estimates])
        assert 0.93 < covered < 0.97


def test_interval_of_nothing_and_of_one_number():
    assert math.isnan(mean_interval([]).mean)
    one = mean_interval([2.5])
    assert (one.mean, one.low, one.high) == (2.5, -math.inf, math.inf)
    assert str(mean_interval([1.0, 0.0])) == "0.500 [0.095, 0.905]"
