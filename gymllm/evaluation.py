"""Plays a set number of episodes and says what they came to, with how far to trust it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import anyio

from gymllm.agent import AgentFactory
from gymllm.engine import Engine
from gymllm.episode import EnvSource, EpisodeLimits, run_episode
from gymllm.errors import ConfigError
from gymllm.task import TaskSource
from gymllm.timeline import Timeline
from gymllm.trajectory import Ending, Trajectory

_Z = 1.959964
"""97.5 % quantile of the normal distribution."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float
    count: int
    """Numbers that it is the mean of."""

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """What was played, in task order."""

    trajectories: tuple[Trajectory, ...]
    """The last try of each episode."""
    retried: Mapping[str, int]
    """Failed tries that were played again, by what broke."""

    @property
    def scored(self) -> tuple[Trajectory, ...]:
        """Episodes that have a reward: all but the failed (invariant 3)."""
        return tuple(t for t in self.trajectories if t.ending is not Ending.FAILED)

    @property
    def failed(self) -> int:
        """Episodes that failed at every try."""
        return len(self.trajectories) - len(self.scored)

    @property
    def reward(self) -> Estimate:
        """Mean reward of the scored episodes; NaN if there are none."""
        return mean_interval([t.reward for t in self.scored])

    @property
    def turns(self) -> Estimate:
        """Mean turns of a scored episode."""
        return mean_interval([len(t.turns) for t in self.scored])

    @property
    def generated_tokens(self) -> Estimate:
        """Mean tokens that the policy generated in a scored episode."""
        return mean_interval([t.generated_tokens for t in self.scored])

    @property
    def tokens(self) -> Estimate:
        """Mean tokens of a scored episode, prompts included."""
        return mean_interval([t.tokens for t in self.scored])

    @property
    def endings(self) -> dict[str, int]:
        """Episodes by how they ended ("truncated: max_turns"), most frequent first."""
        names = Counter(
            f"{t.ending.value}: {t.reason.partition(chr(10))[0]}" if t.reason else t.ending.value
            for t in self.trajectories
        )
        return dict(names.most_common())

    @property
    def invalid_actions(self) -> int:
        """Turns whose action the environment could not read."""
        return sum(turn.invalid_action for t in self.trajectories for turn in t.turns)


async def evaluate(
    *,
    pool: EnvSource,
    make_agent: AgentFactory,
    engine: Engine,
    tasks: TaskSource,
    episodes: int,
    concurrency: int,
    run_seed: int = 0,
    retries: int = 2,
    limits: EpisodeLimits | None = None,
    timeline: Timeline | None = None,
    on_trajectory: Callable[[Trajectory], None] = lambda trajectory: None,
) -> EvaluationResult:
    """Plays one episode of each of the first `episodes` tasks.

    With the same seed, tasks and weights the result is the same whatever the concurrency.

    Args:
        pool: Where environments come from; not closed here.
        make_agent: Makes each episode's agent.
        engine: The model; not closed here.
        tasks: The tasks, by index.
        episodes: How many are played, >= 1.
        concurrency: Episodes at once at most, >= 1.
        run_seed: Decides everything sampled, with the task.
        retries: Further tries of a failed episode, each with another sampling seed.
        limits: What ends an episode if nothing else does.
        timeline: Where spans go.
        on_trajectory: Called with each episode's last try as it ends.
    """
    for name, value, least in (
        ("episodes", episodes, 1),
        ("concurrency", concurrency, 1),
        ("retries", retries, 0),
    ):
        if value < least:
            raise ConfigError(f"{name} must be >= {least}, got {value}.")
    limits, timeline = limits or EpisodeLimits(), timeline or Timeline()
    played: dict[int, Trajectory] = {}
    retried: Counter[str] = Counter()

    async def player(indices: Iterator[int]) -> None:
        for index in indices:
            task, attempt = tasks.task(index), 0
            while True:
                # A new lease for each try: the pool may have replaced what broke.
                async with pool.lease() as env:
                    trajectory = await run_episode(
                        env=env,
                        make_agent=make_agent,
                        engine=engine,
                        task=task,
                        member=0,
                        attempt=attempt,
                        run_seed=run_seed,
                        limits=limits,
                        timeline=timeline,
                    )
                if trajectory.ending is not Ending.FAILED or attempt == retries:
                    break
                retried[trajectory.reason.partition(":")[0]] += 1
                attempt += 1
            played[index] = trajectory
            on_trajectory(trajectory)

    # One iterator for all players: an episode is taken by whoever is free next.
    waiting = iter(range(episodes))
    async with anyio.create_task_group() as players:
        for number in range(min(concurrency, episodes)):
            players.start_soon(player, waiting, name=f"player {number}")
    return EvaluationResult(
        trajectories=tuple(played[index] for index in range(episodes)), retried=dict(retried)
    )


def mean_interval(values: Sequence[float]) -> Estimate:
    """The mean of independent values and its 95 % confidence interval.

    Where every value is 0 or 1 the interval is Wilson's score interval (Wilson 1927), which stays
    inside [0, 1] and keeps its width when all agree; otherwise Student's t. A single other value
    has an unbounded one.
    """
    count = len(values)
    if count == 0:
        return Estimate(mean=math.nan, low=math.nan, high=math.nan, count=0)
    mean = math.fsum(values) / count
    if all(value in (0, 1) for value in values):
        low, high = _wilson(mean, count)
    elif count == 1:
        low, high = -math.inf, math.inf
    else:
        variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
        half = _student_t(count - 1) * math.sqrt(variance / count)
        low, high = mean - half, mean + half
    return Estimate(mean=mean, low=low, high=high, count=count)


def _wilson(share: float, count: int) -> tuple[float, float]:
    shrink = 1 + _Z**2 / count
    centre = (share + _Z**2 / (2 * count)) / shrink
    half = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2)) / shrink
    return max(0.0, centre - half), min(1.0, centre + half)


def _student_t(freedom: int) -> float:
    """97.5 % quantile of Student's t; within 0.2 % (Abramowitz and Stegun 1964, 26.7.5)."""
    exact = {1: 12.7062, 2: 4.3027}  # where the expansion is too short
    if freedom in exact:
        return exact[freedom]
    z, v = _Z, freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4)
    )
