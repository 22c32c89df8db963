"""One episode: every way it can end, and what is kept of it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from gymllm.agent import Action, EpisodeContext
from gymllm.engine import Engine, GenerateRequest, Generation
from gymllm.engines import ScriptedEngine
from gymllm.env import Env
from gymllm.episode import EpisodeLimits, run_episode
from gymllm.errors import ConfigError, EngineError, SandboxDiedError
from gymllm.ledger import Segment
from gymllm.message import Message
from gymllm.pool import EnvPool
from gymllm.task import Task
from gymllm.timeline import Timeline
from gymllm.trajectory import Ending, Trajectory
from gymllm_agents import ConversationConfig, ModelAgent, train_tokenizer

TOKENIZER = train_tokenizer([], vocab_size=259)
TASK = Task(index=4, id="t4", seed=11, options={"goal": 3})


class Counter(Env):
    """Reward 1 a turn; ends at `options["goal"]`. What the subclasses change is one thing each."""

    async def areset(self, *, seed=None, options=None):
        self.turns, self.goal = 0, (options or {})["goal"]
        return f"start {seed}", {}

    async def astep(self, action):
        self.turns += 1
        return f"turn {self.turns}", 1.0, self.turns == self.goal, False, {}


async def play(
    make_env: Callable[[], Env] = Counter,
    *,
    engine: Engine | None = None,
    timeline: Timeline | None = None,
    limits: EpisodeLimits | None = None,
    make_agent: Callable[[EpisodeContext], object] | None = None,
    member: int = 1,
    **timeouts: float,
) -> Trajectory:
    pool = EnvPool(make_env, 1, env_id="test", **timeouts)
    config = ConversationConfig(max_new_tokens=8)
    try:
        with anyio.fail_after(5):
            async with pool.lease() as env:
                trajectory = await run_episode(
                    env=env,
                    make_agent=make_agent or ModelAgent.factory(TOKENIZER, config),  # type: ignore[arg-type] # tests' own agents
                    engine=engine or ScriptedEngine(lambda prompt, rng: "go", TOKENIZER),
                    task=TASK,
                    member=member,
                    run_seed=0,
                    limits=limits or EpisodeLimits(),
                    timeline=timeline or Timeline(),
                )
            async with pool.lease():
                return trajectory  # the environment is free again, whatever happened
    finally:
        await pool.aclose()


@pytest.mark.asyncio
async def test_terminated() -> None:
    timeline = Timeline()
    trajectory = await play(timeline=timeline)
    assert (trajectory.ending, trajectory.reason) == (Ending.TERMINATED, "")
    assert trajectory.reward == 3
    assert [turn.observation for turn in trajectory.turns] == ["start 11", "turn 1", "turn 2"]
    assert {turn.action for turn in trajectory.turns} == {"go"}
    assert [(m.role, m.content) for m in trajectory.messages[:2]] == [
        ("user", "start 11"),
        ("assistant", "go"),
    ]
    assert (trajectory.task, trajectory.member, trajectory.attempt) == (TASK, 1, 0)
    assert trajectory.generated_tokens == sum(t.generated_tokens for t in trajectory.turns) > 0
    assert trajectory.ended_ns > trajectory.started_ns
    names = [span.name for span in timeline.spans() if span.track == "episodes/4.1"]
    assert names[0] == "reset"
    assert names.count("step") == 3
    assert names[-1] == "episode (terminated)"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("info", "reason"), [({}, "environment"), ({"truncated_by": "max_moves"}, "max_moves")]
)
async def test_truncated_by_the_environment(info: dict[str, str], reason: str) -> None:
    class Truncating(Counter):
        async def astep(self, action):
            return "", 0.5, False, True, info

    trajectory = await play(Truncating)
    assert (trajectory.ending, trajectory.reason) == (Ending.TRUNCATED, reason)
    assert trajectory.reward == 0.5


class Measured(Counter):
    async def astep(self, action):
        observation, reward, terminated, truncated, _ = await super().astep(action)
        info = {"metrics": {"mended": 0.5, "known": True, "name": "left out"}} if terminated else {}
        return observation, reward, terminated, truncated, info


@pytest.mark.asyncio
async def test_numbers_of_the_last_step_are_kept() -> None:
    assert (await play(Measured)).metrics == {"mended": 0.5, "known": 1.0}
    assert (await play(Counter)).metrics == {}


@pytest.mark.asyncio
async def test_truncated_by_max_turns() -> None:
    trajectory = await play(limits=EpisodeLimits(max_turns=2))
    assert (trajectory.ending, trajectory.reason) == (Ending.TRUNCATED, "max_turns")
    assert (len(trajectory.turns), trajectory.reward) == (2, 2)


@pytest.mark.asyncio
async def test_an_end_at_the_limit_is_the_environments() -> None:
    trajectory = await play(limits=EpisodeLimits(max_turns=3))
    assert trajectory.ending is Ending.TERMINATED


@pytest.mark.asyncio
async def test_truncated_by_the_agents_limit() -> None:
    engine = ScriptedEngine(lambda prompt, rng: "go", TOKENIZER, context_length=60)
    trajectory = await play(engine=engine)
    assert (trajectory.ending, trajectory.reason) == (Ending.TRUNCATED, "context_length")
    assert len(trajectory.turns) == trajectory.reward == 2


@pytest.mark.asyncio
async def test_truncated_by_the_episodes_time_with_what_it_has() -> None:
    cancelled: list[int] = []

    class Hanging(Counter):
        async def astep(self, action):
            if self.turns == 1:
                try:
                    await anyio.sleep_forever()
                finally:
                    cancelled.append(self.turns)
            return await super().astep(action)

    trajectory = await play(Hanging, limits=EpisodeLimits(episode_timeout_s=0.1))
    assert (trajectory.ending, trajectory.reason) == (Ending.TRUNCATED, "episode_timeout")
    assert (len(trajectory.turns), trajectory.reward) == (1, 1)
    assert cancelled == [1]


class Raising(Counter):
    async def astep(self, action):
        if self.turns == 1:
            raise KeyError("lost")
        return await super().astep(action)


class RaisingReset(Counter):
    async def areset(self, *, seed=None, options=None):
        raise OSError("no display")


class RaisingInit(Counter):
    def __init__(self):
        raise OSError("no display")


class HangingStep(Counter):
    async def astep(self, action):
        await anyio.sleep_forever()


class HangingReset(Counter):
    async def areset(self, *, seed=None, options=None):
        await anyio.sleep_forever()


class WrongObservation(Counter):
    async def astep(self, action):
        return 7, 1.0, False, False, {}


class WrongShape(Counter):
    async def astep(self, action):
        return "turn", 1.0, True


class NotANumber(Counter):
    async def astep(self, action):
        return "turn", float("nan"), True, False, {}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("make_env", "reason", "turns"),
    [
        (Raising, r"EnvCrashedError: .*KeyError.*lost", 1),
        (RaisingReset, r"EnvCrashedError: .*OSError.*no display", 0),
        (RaisingInit, r"EnvCrashedError: .*OSError.*no display", 0),
        (HangingStep, r"EnvTimeoutError: .*step_timeout_s", 0),
        (HangingReset, r"EnvTimeoutError: .*reset_timeout_s", 0),
        (WrongObservation, r"EnvTypeError: .*must be a str, got int", 0),
        (WrongShape, r"Env(Type|Crashed)Error: .*must return a tuple of", 0),
        (NotANumber, r"Env(Type|Crashed)Error: .*nan", 0),
    ],
)
async def test_failed_by_the_environment(
    make_env: Callable[[], Env], reason: str, turns: int
) -> None:
    trajectory = await play(make_env, step_timeout_s=0.05, reset_timeout_s=0.05)
    assert trajectory.ending is Ending.FAILED
    assert re.match(reason, trajectory.reason)
    assert len(trajectory.turns) == turns, "what was played before is kept, to read"


class StuckEngine:
    """Answers the first request, and no other."""

    context_length, version = 4096, 0

    def __init__(self, error: Exception | None = None) -> None:
        self._inner = ScriptedEngine(lambda prompt, rng: "go", TOKENIZER)
        self._error, self._asked = error, 0
        self.cancelled = False

    async def generate(self, request: GenerateRequest) -> Generation:
        self._asked += 1
        if self._asked == 1:
            return await self._inner.generate(request)
        if self._error is not None:
            raise self._error
        try:
            await anyio.sleep_forever()
        finally:
            self.cancelled = True
        raise AssertionError

    async def aclose(self) -> None:
        await self._inner.aclose()


@pytest.mark.asyncio
async def test_failed_by_an_engine_that_breaks() -> None:
    trajectory = await play(engine=StuckEngine(EngineError("device lost")))
    assert (trajectory.ending, trajectory.reason) == (Ending.FAILED, "EngineError: device lost")
    assert len(trajectory.turns) == 1


@pytest.mark.asyncio
async def test_failed_by_an_engine_that_hangs() -> None:
    engine = StuckEngine()
    trajectory = await play(engine=engine, limits=EpisodeLimits(generate_timeout_s=0.05))
    assert trajectory.ending is Ending.FAILED
    assert re.match(
        r"EngineTimeoutError: .*limits.generate_timeout_s \(0.05 s\)", trajectory.reason
    )
    assert engine.cancelled


class BrokenAgent:
    async def act(self, observation: str) -> Action:
        raise ZeroDivisionError("a mistake of the agent's author")

    def segments(self) -> tuple[Segment, ...]:
        return ()

    def messages(self) -> tuple[Message, ...]:
        return ()


@pytest.mark.asyncio
async def test_mistakes_in_code_are_not_swallowed() -> None:
    with pytest.raises(ZeroDivisionError):
        await play(make_agent=lambda context: BrokenAgent())


@pytest.mark.asyncio
async def test_cancellation_leaves_through_the_environment() -> None:
    stepping, cancelled = anyio.Event(), list[bool]()

    class Waiting(Counter):
        async def astep(self, action):
            stepping.set()
            try:
                await anyio.sleep_forever()
            finally:
                cancelled.append(True)

    async with anyio.create_task_group() as group:
        group.start_soon(play, Waiting)
        await stepping.wait()
        group.cancel_scope.cancel()
    assert cancelled == [True]


@pytest.mark.asyncio
async def test_invalid_actions_are_turns_and_are_counted() -> None:
    class Picky(Counter):
        async def astep(self, action):
            observation, _, *rest, _ = await super().astep(action)
            return observation, 0.0, *rest, {"invalid_action": self.turns < 3}

    trajectory = await play(Picky)
    assert [turn.invalid_action for turn in trajectory.turns] == [True, True, False]


@pytest.mark.asyncio
async def test_what_is_sampled_is_a_function_of_the_member() -> None:
    engine = ScriptedEngine(lambda prompt, rng: str(rng.integers(10**6)), TOKENIZER)
    one, again, other = [await play(engine=engine, member=member) for member in (1, 1, 2)]

    def ids(trajectory: Trajectory) -> list[int]:
        return np.concatenate([s.ids for s in trajectory.segments]).tolist()

    assert ids(one) == ids(again) != ids(other)
    assert one.turns[0].observation == other.turns[0].observation


@pytest.mark.parametrize("name", ["max_turns", "episode_timeout_s", "generate_timeout_s"])
def test_limits_must_be_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"limits.{name} must be > 0, got 0"):
        EpisodeLimits(**{name: 0})


class Holder:
    """Holds something open; acts as it is told."""

    def __init__(self, act: Callable[[], Awaitable[Action]]) -> None:
        self._act, self.closed = act, 0

    async def act(self, observation: object) -> Action:
        return await self._act()

    def segments(self) -> tuple[Segment, ...]:
        return ()

    def messages(self) -> tuple[Message, ...]:
        return ()

    async def aclose(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.closed += 1


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("problem", "ending"),
    [
        (None, Ending.TERMINATED),
        (EngineError("gone"), Ending.FAILED),
        (SandboxDiedError("gone"), Ending.FAILED),
        (RuntimeError("a mistake"), None),
    ],
)
async def test_an_agent_that_holds_something_is_closed_whatever_happens(
    problem: Exception | None, ending: Ending | None
) -> None:
    async def act() -> Action:
        if problem is not None:
            raise problem
        return Action(text="go")

    agent = Holder(act)
    if ending is None:
        with pytest.raises(RuntimeError, match="a mistake"):
            await play(make_agent=lambda context: agent)
    else:
        trajectory = await play(make_agent=lambda context: agent)
        assert trajectory.ending == ending
        assert trajectory.reason == ("" if problem is None else f"{type(problem).__name__}: gone")
    assert agent.closed == 1


@pytest.mark.asyncio
async def test_an_agent_is_closed_when_its_episode_is_cancelled() -> None:
    scope = anyio.CancelScope()

    async def act() -> Action:
        scope.cancel()
        await anyio.sleep_forever()
        raise AssertionError

    agent = Holder(act)
    with scope:
        await play(make_agent=lambda context: agent)
    assert (scope.cancelled_caught, agent.closed) == (True, 1)
