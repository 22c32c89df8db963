"""Plays a set number of episodes and says what they came to, with how far to trust it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import anyio

from gymllm.agent import AgentFactory
from gymllm.engine import Engine
from gymllm.episode import EnvSource, EpisodeLimits, run_team_episode
from gymllm.errors import ConfigError
from gymllm.task import TaskSource
from gymllm.team import Team, team_of
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
    """The last try of each episode; where several agents play, one of each."""
    retried: Mapping[str, int]
    """Failed tries that were played again, by what broke."""

    @property
    def scored(self) -> tuple[Trajectory, ...]:
        """Those that have a reward: all but the failed (invariant 3)."""
        return tuple(t for t in self.trajectories if t.ending is not Ending.FAILED)

    @property
    def episodes(self) -> int:
        """Episodes that were played."""
        return len({t.task.index for t in self.trajectories})

    @property
    def failed(self) -> int:
        """Episodes that failed at every try."""
        return len({t.task.index for t in self.trajectories if t.ending is Ending.FAILED})

    @property
    def agents(self) -> tuple[str, ...]:
        """Whose trajectories there are; "" where an environment names nobody."""
        return tuple(dict.fromkeys(t.agent for t in self.scored))

    def of(self, agent: str) -> EvaluationResult:
        """What one agent's trajectories come to."""
        return replace(self, trajectories=tuple(t for t in self.trajectories if t.agent == agent))

    def wins(self, agent: str) -> Estimate:
        """Share of the scored episodes in which an agent's reward is higher than everyone else's."""
        won: list[float] = []
        by_episode: dict[int, dict[str, float]] = {}
        for trajectory in self.scored:
            by_episode.setdefault(trajectory.task.index, {})[trajectory.agent] = trajectory.reward
        for rewards in by_episode.values():
            others = [reward for name, reward in rewards.items() if name != agent]
            if agent in rewards and others:
                won.append(float(rewards[agent] > max(others)))
        return mean_interval(won)

    @property
    def reward(self) -> Estimate:
        """Mean reward of the scored episodes; NaN if there are none."""
        return mean_interval([t.reward for t in self.scored])

    @property
    def metrics(self) -> dict[str, Estimate]:
        """Means of what environments say of an episode at its end, over the episodes that have it."""
        found: dict[str, list[float]] = {}
        for trajectory in self.scored:
            for name, number in trajectory.metrics.items():
                found.setdefault(name, []).append(number)
        return {name: mean_interval(numbers) for name, numbers in sorted(found.items())}

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
        episodes = {t.task.index: t for t in self.trajectories}  # it ended for all agents alike
        names = Counter(
            f"{t.ending.value}: {t.reason.partition(chr(10))[0]}" if t.reason else t.ending.value
            for t in episodes.values()
        )
        return dict(names.most_common())

    @property
    def invalid_actions(self) -> int:
        """Turns whose action the environment could not read."""
        return sum(turn.invalid_action for t in self.trajectories for turn in t.turns)


async def evaluate(
    *,
    pool: EnvSource,
    make_agent: AgentFactory | None = None,
    team: Team | None = None,
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
        make_agent: Makes each episode's agent, where there is one.
        team: Who plays, where there are several; instead of `make_agent`. Trajectories come out of all of
            them, trainable or not.
        engine: The model; not closed here. Of a team, that of players without one of their own.
        tasks: The tasks, by index.
        episodes: How many are played, >= 1.
        concurrency: Episodes at once at most, >= 1.
        run_seed: Decides everything sampled, with the task.
        retries: Further tries of a failed episode, each with another sampling seed.
        limits: What ends an episode if nothing else does.
        timeline: Where spans go.
        on_trajectory: Called with each trajectory of an episode's last try as it ends.

    Raises:
        ConfigError: A number is out of its range, or not exactly one of `make_agent` and `team` given.
    """
    team = {
        name: player._replace(trainable=True) for name, player in team_of(make_agent, team).items()
    }
    for name, value, least in (
        ("episodes", episodes, 1),
        ("concurrency", concurrency, 1),
        ("retries", retries, 0),
    ):
        if value < least:
            raise ConfigError(f"{name} must be >= {least}, got {value}.")
    limits, timeline = limits or EpisodeLimits(), timeline or Timeline()
    played: dict[int, list[Trajectory]] = {}
    retried: Counter[str] = Counter()

    async def player(indices: Iterator[int]) -> None:
        for index in indices:
            task, attempt = tasks.task(index), 0
            while True:
                # A new lease for each try: the pool may have replaced what broke.
                async with pool.lease() as env:
                    trajectories = await run_team_episode(
                        env=env,
                        team=team,
                        engine=engine,
                        task=task,
                        member=0,
                        attempt=attempt,
                        run_seed=run_seed,
                        limits=limits,
                        timeline=timeline,
                    )
                first = trajectories[0]
                if first.ending is not Ending.FAILED or attempt == retries:
                    break
                retried[first.reason.partition(":")[0]] += 1
                attempt += 1
            played[index] = trajectories
            for trajectory in trajectories:
                on_trajectory(trajectory)

    # One iterator for all players: an episode is taken by whoever is free next.
    waiting = iter(range(episodes))
    async with anyio.create_task_group() as players:
        for number in range(min(concurrency, episodes)):
            players.start_soon(player, waiting, name=f"player {number}")
    return EvaluationResult(
        trajectories=tuple(t for index in range(episodes) for t in played[index]),
        retried=dict(retried),
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
