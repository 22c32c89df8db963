"""Many episodes at once: no barrier, everything bounded, failures replaced, nothing lost."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import numpy as np
import pytest
from anyio.streams.memory import MemoryObjectReceiveStream

from gymllm.engines import ScriptedEngine
from gymllm.env import Env
from gymllm.errors import ConfigError, RunError
from gymllm.pool import EnvPool
from gymllm.rollout import AdmissionGate, Rollout, RolloutConfig
from gymllm.task import Task
from gymllm.timeline import Timeline
from gymllm.trajectory import Ending, Group, Trajectory
from gymllm_agents import ConversationConfig, ModelAgent, train_tokenizer

TOKENIZER = train_tokenizer([], vocab_size=259)


class Walk(Env):
    """Three turns, reward 1 each. The subclasses change one thing each."""

    async def areset(self, *, seed=None, options=None):
        self.turns, self.task = 0, (options or {})["index"]
        return f"task {self.task}", {}

    async def astep(self, action):
        self.turns += 1
        return "on", 1.0, self.turns == 3, False, {}


class Tasks:
    """Remembers what was drawn."""

    def __init__(self) -> None:
        self.drawn: list[int] = []

    def task(self, index: int) -> Task:
        self.drawn.append(index)
        return Task(index=index, id=f"t{index}", seed=index, options={"index": index})


class Scene:
    """A rollout with everything around it."""

    def __init__(
        self,
        make_env: Callable[[], Env] = Walk,
        *,
        slots: int = 8,
        groups_per_step: int = 1,
        max_lag: int = 1,
        first_index: int = 0,
        again: Sequence[int] = (),
        context_length: int = 4096,
        **config: int,
    ) -> None:
        self.tasks, self.ended = Tasks(), list[Trajectory]()
        self.pool = EnvPool(make_env, slots, env_id="test")
        self.gate = AdmissionGate(groups_per_step=groups_per_step, max_lag=max_lag)
        settings: dict[str, int] = {"group_size": 2, "concurrency": slots, "max_lag": max_lag}
        self.rollout = Rollout(
            pool=self.pool,
            make_agent=ModelAgent.factory(TOKENIZER, ConversationConfig(max_new_tokens=8)),
            engine=ScriptedEngine(
                lambda prompt, rng: str(rng.integers(10**6)),
                TOKENIZER,
                context_length=context_length,
            ),
            tasks=self.tasks,
            config=RolloutConfig(**{**settings, **config}),
            gate=self.gate,
            run_seed=0,
            timeline=Timeline(),
            first_index=first_index,
            again=again,
            on_trajectory=self.ended.append,
        )

    @asynccontextmanager
    async def play(self) -> AsyncGenerator[MemoryObjectReceiveStream[Group]]:
        try:
            with anyio.fail_after(5):
                async with self.rollout.stream() as groups:
                    yield groups
            # Every environment is free again.
            with anyio.fail_after(1):
                async with anyio.create_task_group() as lenders:
                    free = anyio.Semaphore(0)

                    async def borrow() -> None:
                        async with self.pool.lease():
                            free.release()
                            await anyio.sleep_forever()

                    for _ in range(self.pool.num_envs):
                        lenders.start_soon(borrow)
                    for _ in range(self.pool.num_envs):
                        await free.acquire()
                    lenders.cancel_scope.cancel()
        finally:
            await self.pool.aclose()

    async def take(self, count: int, *, train: bool = True) -> list[Group]:
        """Plays until `count` groups have come."""
        taken: list[Group] = []
        async with self.play() as groups:
            for _ in range(count):
                taken.append(await groups.receive())
                if train:
                    self.rollout.settle(taken[-1].task)
                    self.gate.leave()
        return taken


def index_of(group: Group) -> int:
    return group.task.index


# ---------------------------------------------------------------------- no barrier


@pytest.mark.asyncio
async def test_environments_that_wait_for_each_other_both_finish() -> None:
    """A barrier between steps of episodes, or one episode at a time, would hang here."""
    arrived = [anyio.Event() for _ in range(4)]
    made: list[Env] = []

    class Meeting(Walk):
        def __init__(self) -> None:
            super().__init__()
            self.place = len(made)
            made.append(self)

        async def astep(self, action):
            # In turn k of the first, the second is in turn k too: each waits for the other twice.
            if self.turns < 2:
                arrived[2 * self.turns + self.place].set()
                await arrived[2 * self.turns + 1 - self.place].wait()
            return await super().astep(action)

    (group,) = await Scene(Meeting, slots=2, max_lag=0).take(1)
    assert group.rewards == (3, 3)


@pytest.mark.asyncio
async def test_groups_complete_while_a_member_of_another_hangs() -> None:
    hanging: list[int] = []

    class Hanging(Walk):
        async def astep(self, action):
            if self.task == 0 and not hanging:
                hanging.append(0)
                await anyio.sleep_forever()
            return await super().astep(action)

    groups = await Scene(Hanging, max_lag=3).take(5)
    assert hanging == [0]
    assert [index_of(group) for group in groups] == [1, 2, 3, 4, 5]


@pytest.mark.asyncio
async def test_a_group_comes_the_moment_its_last_member_ends() -> None:
    let_go = {0: anyio.Event(), 1: anyio.Event()}

    class Held(Walk):
        async def astep(self, action):
            if self.task in let_go:
                await let_go[self.task].wait()
            return await super().astep(action)

    scene = Scene(Held, max_lag=2)
    async with scene.play() as groups:
        assert index_of(await groups.receive()) == 2
        let_go[1].set()
        assert index_of(await groups.receive()) == 1
        let_go[0].set()
        assert index_of(await groups.receive()) == 0


# ---------------------------------------------------------------------- bounded


@pytest.mark.asyncio
@pytest.mark.parametrize("concurrency", [1, 3, 5])
async def test_concurrency_is_used_and_never_exceeded(concurrency: int) -> None:
    playing, most, go_on = Counter[str](), list[int](), anyio.Event()

    class Watched(Walk):
        async def areset(self, *, seed=None, options=None):
            playing["now"] += 1
            most.append(playing["now"])
            return await super().areset(seed=seed, options=options)

        async def astep(self, action):
            await go_on.wait()
            answer = await super().astep(action)
            playing["now"] -= answer[2]
            return answer

    scene = Scene(Watched, slots=8, max_lag=5, concurrency=concurrency)
    async with scene.play() as groups:
        await anyio.wait_all_tasks_blocked()
        assert playing["now"] == scene.rollout.counts.in_flight == concurrency
        go_on.set()
        for _ in range(12):
            await groups.receive()
            scene.gate.leave()
    assert max(most) == concurrency


@pytest.mark.asyncio
async def test_who_does_not_read_holds_the_task_source_back() -> None:
    scene = Scene(groups_per_step=2, max_lag=1)
    async with scene.play() as groups:
        await anyio.wait_all_tasks_blocked()
        assert scene.tasks.drawn == [0, 1, 2, 3]
        assert scene.gate.outstanding == scene.gate.limit == 4
        assert len(scene.ended) == 8, "everything admitted was played"
        for _ in range(3):
            await groups.receive()
        await anyio.wait_all_tasks_blocked()
        assert scene.tasks.drawn == [0, 1, 2, 3], "taking groups is not training on them"
        scene.gate.leave(2)
        await anyio.wait_all_tasks_blocked()
        assert scene.tasks.drawn == [0, 1, 2, 3, 4, 5]
        assert scene.gate.outstanding == 4


@pytest.mark.asyncio
async def test_cancellation_in_mid_episode_reaches_every_environment() -> None:
    inside: list[str] = []

    class Waiting(Walk):
        async def astep(self, action):
            inside.append("in")
            try:
                await anyio.sleep_forever()
            finally:
                inside.append("out")

    scene = Scene(Waiting, slots=4)
    async with scene.play():
        await anyio.wait_all_tasks_blocked()
        assert inside == ["in"] * 4
        assert scene.rollout.counts.in_flight == 4
    assert inside == ["in"] * 4 + ["out"] * 4
    assert scene.rollout.counts.in_flight == 0
    assert scene.rollout.position() == (2, [0, 1])


@pytest.mark.asyncio
async def test_an_error_of_the_consumer_is_that_error() -> None:
    with pytest.raises(ZeroDivisionError):
        async with Scene().play():
            raise ZeroDivisionError


# ---------------------------------------------------------------------- failures


class Flaky(Walk):
    """Fails in its second turn, as often as its task says."""

    failures: Counter[int]

    async def astep(self, action):
        if self.turns == 1 and self.failures[self.task] > 0:
            self.failures[self.task] -= 1
            raise OSError("connection lost")
        return await super().astep(action)


def flaky(**failures: int) -> type[Flaky]:
    """Of task k the first `tk` episodes fail."""
    counter = Counter({int(name[1:]): count for name, count in failures.items()})
    return type("Flaky", (Flaky,), {"failures": counter})


@pytest.mark.asyncio
async def test_a_failed_episode_is_played_again_with_another_seed() -> None:
    scene = Scene(flaky(t0=1), slots=1, retries=1)
    (group,) = await scene.take(1)
    assert index_of(group) == 0
    assert group.rewards == (3, 3), "the failed attempt is no reward"
    assert sorted(t.attempt for t in group.trajectories) == [0, 1]
    failed = [t for t in scene.ended if t.ending is Ending.FAILED]
    assert len(failed) == 1
    assert failed[0].reason.startswith("EnvCrashedError: ")
    again = next(t for t in group.trajectories if t.attempt == 1)
    assert failed[0].member == again.member
    assert failed[0].turns[0].action != again.turns[0].action
    counts = scene.rollout.counts
    assert (counts.failed, counts.replaced_groups) == (1, 0)
    assert scene.rollout.failures == {"EnvCrashedError": 1}


@pytest.mark.asyncio
async def test_a_task_that_keeps_failing_is_replaced_and_never_scored() -> None:
    scene = Scene(flaky(t1=10**6), slots=2, retries=2, max_lag=0)
    groups = await scene.take(3)
    assert [index_of(group) for group in groups] == [0, 2, 3]
    assert all(t.ending is Ending.TERMINATED for g in groups for t in g.trajectories)
    failed = [(t.task.index, t.attempt) for t in scene.ended if t.ending is Ending.FAILED]
    assert set(failed) == {(1, 0), (1, 1), (1, 2)}
    counts = scene.rollout.counts
    assert counts.replaced_groups == 1
    assert counts.lost_episodes == 0
    assert scene.gate.outstanding <= 1
    assert 1 not in scene.rollout.position()[1], "a resume does not play it again"


@pytest.mark.asyncio
async def test_a_member_of_a_group_that_was_given_up_is_not_tried_again() -> None:
    resets, given_up = Counter[int](), anyio.Event()

    class Doomed(Walk):
        async def areset(self, *, seed=None, options=None):
            answer = await super().areset(seed=seed, options=options)
            if self.task == 1:
                given_up.set()
            self.waits = self.task == 0 and resets[0] == 0
            resets[self.task] += 1
            return answer

        async def astep(self, action):
            if self.waits:
                await given_up.wait()
            if self.task == 0:
                raise OSError("connection lost")
            return await super().astep(action)

    scene = Scene(Doomed, slots=2, retries=2, max_lag=0)
    assert [index_of(group) for group in await scene.take(1)] == [1]
    assert resets[0] == 1 + 3


@pytest.mark.asyncio
async def test_members_that_finished_are_lost_with_their_group_and_counted() -> None:
    class SecondFails(Walk):
        async def areset(self, *, seed=None, options=None):
            answer = await super().areset(seed=seed, options=options)
            starts[self.task] += 1
            self.fails = self.task == 0 and starts[self.task] > 1
            return answer

        async def astep(self, action):
            if self.fails:
                raise OSError("connection lost")
            return await super().astep(action)

    starts = Counter[int]()
    scene = Scene(SecondFails, slots=1, retries=1)
    assert [index_of(group) for group in await scene.take(1)] == [1]
    assert scene.rollout.counts.lost_episodes == 1
    assert starts[0] == 1 + 2


@pytest.mark.asyncio
async def test_a_run_whose_first_prompts_never_fit_stops_and_says_so() -> None:
    scene = Scene(max_failed_groups=3, context_length=8)
    with pytest.raises(
        RunError, match=r"3 groups in a row .* context of 8 tokens\. Raise engine\."
    ):
        await scene.take(4)


@pytest.mark.asyncio
async def test_a_run_in_which_everything_fails_stops_within_bounds() -> None:
    class Broken(Walk):
        async def areset(self, *, seed=None, options=None):
            raise OSError("no display")

    scene = Scene(Broken, retries=2, max_failed_groups=4, slots=3)
    expected = "4 groups in a row failed after 2 retries each (EnvCrashedError x"
    with pytest.raises(
        RunError, match=re.escape(expected) + r".*OSError: no display .*\. Look"
    ) as raised:
        await scene.take(1)
    assert "\n" not in str(raised.value)
    assert len(scene.tasks.drawn) <= 4 + scene.gate.limit
    per_member = Counter((t.task.index, t.member) for t in scene.ended)
    assert max(per_member.values()) <= 3


@pytest.mark.asyncio
async def test_a_group_that_finishes_forgives_those_before() -> None:
    failing = {f"t{index}": 10**6 for index in range(12) if index % 3}
    scene = Scene(flaky(**failing), slots=1, retries=0, max_failed_groups=3)
    assert [index_of(group) for group in await scene.take(4)] == [0, 3, 6, 9]
    assert scene.rollout.counts.replaced_groups >= 6


# ---------------------------------------------------------------------- resume


@pytest.mark.asyncio
async def test_a_resume_plays_every_task_that_was_not_settled_and_no_other() -> None:
    settled: set[int] = set()
    scene = Scene(groups_per_step=2, max_lag=1)
    async with scene.play() as groups:
        for number in range(5):
            group = await groups.receive()
            if number % 2 == 0:
                scene.rollout.settle(group.task)
                settled.add(index_of(group))
                scene.gate.leave()
        await anyio.wait_all_tasks_blocked()
    first, again = scene.rollout.position()
    assert first == len(scene.tasks.drawn)
    assert set(again) == set(range(first)) - settled
    later = Scene(first_index=first, again=again, groups_per_step=2)
    assert later.rollout.position() == (first, again), "before anything is played"
    played = {index_of(group) for group in await later.take(len(again) + 2)}
    assert set(again) <= played
    assert not played & settled
    assert later.tasks.drawn[: len(again)] == again, "the old ones first"
    assert later.tasks.drawn[len(again)] == first


@pytest.mark.asyncio
async def test_the_same_run_gives_the_same_tokens_at_any_concurrency() -> None:
    def tokens(groups: Sequence[Group]) -> dict[tuple[int, int], list[int]]:
        return {
            (index_of(group), t.member): np.concatenate([s.ids for s in t.segments]).tolist()
            for group in groups
            for t in group.trajectories
        }

    one = tokens(await Scene(slots=1, max_lag=0).take(4))
    many = tokens(await Scene(slots=8, max_lag=3).take(4))
    assert one == many
    assert len({str(ids) for ids in one.values()}) == 8


# ---------------------------------------------------------------------- the gate and the settings


@pytest.mark.asyncio
async def test_the_gate_lets_as_many_in_as_leave() -> None:
    gate = AdmissionGate(groups_per_step=2, max_lag=1)
    for _ in range(4):
        assert gate.open
        await gate.enter()
    assert not gate.open
    async with anyio.create_task_group() as waiters:
        for _ in range(3):
            waiters.start_soon(gate.enter)
        await anyio.wait_all_tasks_blocked()
        assert gate.outstanding == 4
        gate.leave(2)
        await anyio.wait_all_tasks_blocked()
        assert gate.outstanding == 4, "two more came in, the third waits"
        gate.leave()
        await anyio.wait_all_tasks_blocked()
        assert gate.outstanding == 4
    with pytest.raises(ValueError, match="5 groups leave, but only 4 are in"):
        gate.leave(5)


@pytest.mark.asyncio
@pytest.mark.parametrize("max_lag", [0, 1, 3])
async def test_groups_trained_in_order_are_never_older_than_max_lag(max_lag: int) -> None:
    gate, started = AdmissionGate(groups_per_step=3, max_lag=max_lag), list[int]()
    for version in range(20):
        while gate.open:
            await gate.enter()
            started.append(version)
        trained, started = started[:3], started[3:]
        assert len(trained) == 3, "the gate never lets in too few for a step"
        assert max(version - start for start in trained) <= max_lag
        gate.leave(3)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"group_size": 0}, "rollout.group_size must be >= 1, got 0."),
        ({"concurrency": 0}, "rollout.concurrency must be >= 1, got 0."),
        ({"max_turns": 0}, "rollout.max_turns must be >= 1, got 0."),
        ({"max_failed_groups": 0}, "rollout.max_failed_groups must be >= 1, got 0."),
        ({"max_lag": -1}, "rollout.max_lag must be >= 0, got -1."),
        ({"retries": -1}, "rollout.retries must be >= 0, got -1."),
        ({"episode_timeout_s": 0.0}, "rollout.episode_timeout_s must be > 0, got 0.0."),
        ({"generate_timeout_s": -1.0}, "rollout.generate_timeout_s must be > 0, got -1.0."),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        RolloutConfig(**setting)
