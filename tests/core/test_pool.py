"""`EnvPool`: fair leases, no barrier, and environments that raise, hang, lie and are cancelled."""

import asyncio
import logging
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, RecordEpisodeStatistics, TimeLimit
from gymnasium.wrappers.vector import RecordEpisodeStatistics as RecordVectorStatistics

import gymllm
from gymllm.errors import (
    ClosedError,
    ConfigError,
    ConfigTypeError,
    EnvBatchError,
    EnvCrashedError,
    EnvTimeoutError,
    EnvTypeError,
    UnknownNameError,
)

LAKE = "gymllm/FrozenLake-v0"


class Faulty(gymllm.Env):
    """Does as the action says. `log` is shared by all environments of a test."""

    def __init__(self, log: list[str], gate: threading.Event | None = None) -> None:
        self.log, self.gate = log, gate

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        await self._do((options or {}).get("do", ""))
        return f"seed {seed}", {}

    async def astep(self, action: str) -> Any:
        await self._do(action)
        answers: dict[str, Any] = {
            "bytes": (b"text", 0.0, False, False, {}),
            "nan": ("text", float("nan"), False, False, {}),
            "string reward": ("text", "1", False, False, {}),
            "list info": ("text", 0.0, False, False, []),
            "number terminated": ("text", 0.0, 1, False, {}),
            "end": ("text", 1.0, True, False, {"ended": True}),
        }
        return answers.get(action, ("text", 0.0, False, False, {"step": action}))

    async def aclose(self) -> None:
        self.log.append("closed")

    async def _do(self, what: str) -> None:
        if what == "raise":
            raise KeyError("broken")
        if what == "exit":
            raise SystemExit(3)
        if what == "stray cancellation":
            raise asyncio.CancelledError
        if what == "block":
            assert self.gate is not None
            self.gate.wait(20)
        if what == "soon":
            for _ in range(3):
                await asyncio.sleep(0)
            self.log.append("over")
        if what in ("hang", "hang and raise"):
            try:
                self.log.append("waiting")
                await asyncio.Event().wait()
            finally:
                self.log.append("cleaned up")
                if what == "hang and raise":
                    raise ValueError("raised while cancelled")


@asynccontextmanager
async def faulty_pool(
    num_envs: int = 1, **settings: Any
) -> AsyncIterator[tuple[gymllm.EnvPool, list[str]]]:
    """A pool of `Faulty` and its log; the whole test within a limit."""
    log: list[str] = []
    gate = settings.pop("gate", None)
    pool = gymllm.EnvPool(lambda: Faulty(log, gate), num_envs, **settings)
    async with asyncio.timeout(10):
        try:
            yield pool, log
        finally:
            await pool.aclose()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # some of it happens in threads
        await asyncio.sleep(0)


def threads_of(pool_threads: str = "gymllm-env-") -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(pool_threads)]


# The asynchronous face


@pytest.mark.asyncio
@pytest.mark.parametrize("worker", ["inline", "thread"])
async def test_episode_is_that_of_the_env_alone(worker: str) -> None:
    alone = gymnasium.make(LAKE)
    pool = gymllm.EnvPool(LAKE, 2, worker=worker)
    async with pool.lease() as env:
        assert await env.reset(seed=4) == alone.reset(seed=4)
        for action in ("down", "right", "nonsense"):
            result = await env.step(action)
            answer = alone.step(action)
            assert (result.observation, result.reward, result.terminated) == answer[:3]
            assert result.info == answer[4]
    await pool.aclose()
    assert pool.stats.built == 1
    assert pool.stats.steps == 3
    assert threads_of() == []


@pytest.mark.asyncio
async def test_raising_env_is_named_and_replaced() -> None:
    async with faulty_pool() as (pool, log), pool.lease() as env:
        await env.reset(seed=1)
        with pytest.raises(
            EnvCrashedError, match=r"step: raised KeyError: 'broken' \(slot 0\)"
        ) as caught:
            await env.step("raise")
        assert isinstance(caught.value.__cause__, KeyError)
        assert log == ["closed"]
        with pytest.raises(ResetNeeded):
            await env.step("fine")
        assert await env.reset(seed=2) == ("seed 2", {})
        assert (await env.step("fine")).info == {"step": "fine"}
        assert (pool.stats.crashes, pool.stats.built, pool.stats.rebuilt) == (1, 2, 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("worker", ["inline", "thread"])
@pytest.mark.parametrize("what", ["raise", "exit", "stray cancellation"])
async def test_whatever_is_raised_is_a_crash(what: str, worker: str) -> None:
    async with faulty_pool(worker=worker) as (pool, _), pool.lease() as env:
        with pytest.raises(EnvCrashedError, match="reset: raised"):
            await env.reset(options={"do": what})
        await env.reset()
        with pytest.raises(EnvCrashedError, match="step: raised"):
            await env.step(what)
        assert pool.stats.crashes == 2


@pytest.mark.asyncio
@pytest.mark.parametrize("worker", ["inline", "thread"])
@pytest.mark.parametrize("what", ["hang", "hang and raise"])
async def test_async_hang_is_cancelled_and_its_finally_ran(what: str, worker: str) -> None:
    async with (
        faulty_pool(worker=worker, step_timeout_s=0.02) as (pool, log),
        pool.lease() as env,
    ):
        await env.reset()
        with pytest.raises(EnvTimeoutError, match=r"no answer within 0\.02 s"):
            await env.step(what)
        assert log == ["waiting", "cleaned up", "closed"]
        await env.reset()
        assert pool.stats.timeouts == 1
        assert pool.stats.abandoned_threads == 0


class Unruly(Faulty):
    """Waits a moment, then raises what would end more than a step."""

    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__([])
        self.kind = kind

    async def astep(self, action: str) -> Any:
        await asyncio.sleep(0)
        raise self.kind


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("worker", "kind"),
    [("inline", GeneratorExit), ("thread", GeneratorExit), ("thread", KeyboardInterrupt)],
)
async def test_what_would_end_the_loop_is_a_crash(worker: str, kind: type[BaseException]) -> None:
    async with (
        gymllm.EnvPool(lambda: Unruly(kind), 2, worker=worker) as pool,
        pool.lease() as env,
        pool.lease() as sibling,
    ):
        await env.reset()
        await sibling.reset()
        with pytest.raises(EnvCrashedError, match=f"step: raised .*{kind.__name__}"):
            await env.step("now")
        assert await env.reset(seed=2) == ("seed 2", {})
        assert pool.stats.crashes == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("worker", ["inline", "thread", "process"])
@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("None", "must return a gymnasium.Env, got None"),
        ("dict", "got <class 'dict'>; call the class"),
    ],
)
async def test_what_makes_no_environment_is_named(worker: str, made: str, message: str) -> None:
    def make() -> Any:
        return {"None": None, "dict": dict}[made]

    async with gymllm.EnvPool(make, 1, worker=worker) as pool, pool.lease() as env:
        with pytest.raises(EnvTypeError, match=message):
            await env.reset()


@pytest.mark.asyncio
async def test_blocking_env_is_abandoned_in_its_thread_and_replaced() -> None:
    gate = threading.Event()
    async with faulty_pool(worker="thread", step_timeout_s=0.02, gate=gate) as (pool, log):
        async with pool.lease() as env:
            await env.reset()
            with pytest.raises(EnvTimeoutError):
                await env.step("block")
            assert pool.stats.abandoned_threads == 1
            await env.reset()
            assert (await env.step("fine")).observation == "text"
        assert len(threads_of()) == 2  # the lost one, and the one in its place
        await pool.aclose()
        lost = threads_of()
        assert len(lost) == 1
        assert lost[0].daemon
        gate.set()  # it was told to end if it ever can
        lost[0].join(5)
        assert threads_of() == []
        assert log == ["closed", "closed"]  # the lost one by its own thread, at last


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("bytes", "the observation must be a str, got bytes"),
        ("nan", "the reward must be a finite number, got nan"),
        ("string reward", "the reward must be a finite number, got '1'"),
        ("list info", "info must be a dict, got list"),
        ("number terminated", "terminated must be a bool, got 1"),
    ],
)
async def test_wrong_types_are_named(action: str, message: str) -> None:
    async with faulty_pool() as (pool, _), pool.lease() as env:
        await env.reset()
        with pytest.raises(EnvTypeError, match=f"step: {message}"):
            await env.step(action)
        await env.reset()
        assert (pool.stats.type_errors, pool.stats.rebuilt) == (1, 1)


@pytest.mark.asyncio
async def test_a_tuple_of_the_wrong_length_is_named() -> None:
    class Short(gymllm.Env):
        waits = False

        async def areset(self, **_: Any) -> Any:
            return "text", {}

        async def astep(self, action: str) -> Any:
            return "text", 0.0, False, True, {}

        def step(self, action: str) -> Any:
            return super().step(action)[:4]

    gymnasium.register("test/Short-v0", Short)
    try:
        # By its id it comes with Gymnasium's wrappers, whose own checks must not come first.
        for made_by in (Short, "test/Short-v0"):
            async with gymllm.EnvPool(made_by, 1).lease() as env:
                await env.reset()
                with pytest.raises(
                    EnvTypeError, match=r"a tuple of 5, got 4: \('text', 0.0, False, True\)"
                ):
                    await env.step("")
    finally:
        del gymnasium.registry["test/Short-v0"]


@pytest.mark.asyncio
async def test_an_env_without_text_is_refused() -> None:
    pool = gymllm.EnvPool(lambda: gymnasium.make("CartPole-v1"), 1)
    async with pool.lease() as env:
        with pytest.raises(EnvTypeError, match=r"got ndarray; wrap .* gymllm\.TextAdapter"):
            await env.reset()
    await pool.aclose()


@pytest.mark.asyncio
async def test_an_env_that_cannot_be_made_breaks_its_reset_only() -> None:
    attempts: list[int] = []

    def make_env() -> gymllm.Env:
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("no licence")
        return Faulty([])

    pool = gymllm.EnvPool(make_env, 1)
    async with pool.lease() as env:
        with pytest.raises(EnvCrashedError, match=r"make_env: start: raised OSError: no licence"):
            await env.reset()
        await env.reset()
    await pool.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("worker", ["inline", "thread"])
@pytest.mark.parametrize("what", ["hang", "hang and raise"])
async def test_cancellation_in_mid_step_cleans_up_and_frees_the_slot(
    what: str, worker: str
) -> None:
    async with faulty_pool(worker=worker) as (pool, log):

        async def episode() -> None:
            async with pool.lease() as env:
                await env.reset()
                await env.step(what)

        task = asyncio.create_task(episode())
        await until(lambda: "waiting" in log)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log == ["waiting", "cleaned up", "closed"]
        async with pool.lease() as env:
            assert (await env.reset(seed=3))[0] == "seed 3"
        assert (pool.stats.cancelled, pool.stats.crashes) == (1, 0)


@pytest.mark.asyncio
async def test_leases_are_first_come_first_served() -> None:
    async with faulty_pool() as (pool, _):
        order: list[int] = []

        async def episode(number: int) -> None:
            async with pool.lease() as env:
                order.append(number)
                await env.reset(seed=number)

        async with pool.lease():
            tasks = [asyncio.create_task(episode(number)) for number in range(5)]
            await asyncio.sleep(0)
            tasks[2].cancel()
            await asyncio.sleep(0)
            assert order == []
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == [0, 1, 3, 4]
        assert pool.stats.built == 1


@pytest.mark.asyncio
async def test_a_slot_handed_to_a_cancelled_waiter_is_passed_on() -> None:
    async with faulty_pool() as (pool, _):

        async def wait() -> None:
            async with pool.lease():
                pytest.fail("it was cancelled")

        async with pool.lease():
            task = asyncio.create_task(wait())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        task.cancel()  # the slot is already its own, but it has not run since
        with pytest.raises(asyncio.CancelledError):
            await task
        async with pool.lease() as env:
            await env.reset()


class Meeting(gymllm.Env):
    """A step returns once two environments are in theirs."""

    def __init__(self, events: list[asyncio.Event]) -> None:
        self.mine = asyncio.Event()
        events.append(self.mine)
        self.events = events

    async def areset(self, **_: Any) -> tuple[str, dict[str, Any]]:
        return "here", {}

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.mine.set()
        for event in list(self.events):
            await event.wait()
        return "met", 1.0, True, False, {}


@pytest.mark.asyncio
async def test_envs_under_stock_wrappers_overlap() -> None:
    events: list[asyncio.Event] = []

    def make_env() -> gymnasium.Env[str, str]:
        inner = OrderEnforcing(PassiveEnvChecker(Meeting(events)))
        return TimeLimit(RecordEpisodeStatistics(inner), 10)

    pool = gymllm.EnvPool(make_env, 2)
    reset = asyncio.Barrier(2)  # so that both exist before either is stepped

    async def episode() -> Any:
        async with pool.lease() as env:
            await env.reset()
            await reset.wait()
            return (await env.step("go")).info["episode"]

    async with asyncio.timeout(5):  # a barrier, or a blocked loop, would wait for ever
        statistics = await asyncio.gather(episode(), episode())
    assert [s["l"] for s in statistics] == [1, 1]
    await pool.aclose()


@pytest.mark.asyncio
async def test_one_hanging_env_holds_nobody_up() -> None:
    async with faulty_pool(2) as (pool, log):

        async def hang() -> None:
            async with pool.lease() as env:
                await env.reset()
                await env.step("hang")

        task = asyncio.create_task(hang())
        await until(lambda: "waiting" in log)
        for seed in range(20):
            async with pool.lease() as env:
                await env.reset(seed=seed)
                assert (await env.step("fine")).info is not None
        assert not task.done(), "the other env hangs all along"
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError)


@pytest.mark.asyncio
async def test_a_lease_has_an_episode_of_its_own_and_ends() -> None:
    async with faulty_pool() as (pool, _):
        async with pool.lease() as env:
            await env.reset()
            assert (await env.step("end")).terminated
            with pytest.raises(ResetNeeded, match="ended the episode"):
                await env.step("more")
        with pytest.raises(ClosedError, match="lease has ended"):
            await env.reset()
        async with pool.lease() as another:
            with pytest.raises(ResetNeeded):
                await another.step("of whose episode?")
            await another.reset()
        assert pool.stats.crashes == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("worker", ["inline", "thread"])
async def test_aclose_ends_calls_and_waits_and_is_idempotent(worker: str) -> None:
    async with faulty_pool(worker=worker) as (pool, log):
        caught: list[BaseException] = []

        async def episode(what: str) -> None:
            try:
                async with pool.lease() as env:
                    await env.reset()
                    await env.step(what)
            except ClosedError as error:
                caught.append(error)

        tasks = [asyncio.create_task(episode(what)) for what in ("hang", "wait for a slot")]
        await until(lambda: "waiting" in log)
        await pool.aclose()
        await pool.aclose()
        await asyncio.gather(*tasks)
        assert len(caught) == 2
        assert log == ["waiting", "cleaned up", "closed"]
        assert threads_of() == []
        with pytest.raises(ClosedError, match="is closed"):
            await pool.lease().__aenter__()
        with pytest.raises(ClosedError):
            pool.reset()
        pool.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("worker", ["inline", "thread"])
async def test_an_env_answers_one_call_at_a_time(worker: str) -> None:
    async with faulty_pool(worker=worker) as (pool, _), pool.lease() as env:
        await env.reset()
        async with asyncio.TaskGroup() as group:
            step = group.create_task(env.step("soon"))
            await asyncio.sleep(0)
            for call in (env.step("soon"), env.reset()):
                with pytest.raises(ConfigError, match=r"another call is in progress \(slot 0\)"):
                    await call
        assert (await step).info == {"step": "soon"}
        assert (await env.step("fine")).info == {"step": "fine"}


@pytest.mark.asyncio
@pytest.mark.parametrize("worker", ["inline", "thread"])
async def test_a_call_that_outlives_its_lease_does_not_meet_the_next(worker: str) -> None:
    async with faulty_pool(worker=worker) as (pool, log), asyncio.TaskGroup() as group:
        async with pool.lease() as env:
            await env.reset()
            left = group.create_task(env.step("soon"))
            await asyncio.sleep(0)
        assert log == ["over"]
        async with pool.lease() as env:
            assert await env.reset(seed=3) == ("seed 3", {})
        assert (await left).info == {"step": "soon"}


@pytest.mark.asyncio
async def test_aclose_is_bounded_and_says_what_failed(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Faulty):
        async def aclose(self) -> None:
            if self.log:
                raise OSError("in use")
            self.log.append("stuck")
            await asyncio.Event().wait()

    log: list[str] = []
    pool = gymllm.EnvPool(lambda: Stuck(log), 2, close_timeout_s=0.05)
    async with asyncio.timeout(5), pool.lease() as first, pool.lease() as second:
        await first.reset()
        await second.reset()
        with caplog.at_level(logging.WARNING):
            await pool.aclose()
    assert pool.stats.close_failures == 2
    assert "close: raised OSError: in use" in caplog.text


@pytest.mark.asyncio
async def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="num_envs must be >= 1, the environments at once, got 0"):
        gymllm.EnvPool(LAKE, 0)
    with pytest.raises(UnknownNameError, match="Did you mean thread"):
        gymllm.EnvPool(LAKE, 1, worker="threads")
    with pytest.raises(UnknownNameError, match="Did you mean gymllm/FrozenLake-v0"):
        gymllm.EnvPool("gymllm/FrozenLake", 1)
    with pytest.raises(UnknownNameError, match="SameStep"):
        gymllm.EnvPool(LAKE, 1, autoreset_mode="SameStp")
    with pytest.raises(ConfigError, match="step_timeout_s must be > 0"):
        gymllm.EnvPool(LAKE, 1, step_timeout_s=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_envs": "3"}, "num_envs must be a whole number >= 1.*got '3' of type str"),
        ({"num_envs": 2.5}, r"num_envs must be a whole number.*got 2\.5 of type float"),
        ({"worker": 3}, "Unknown worker '3'"),
        ({"num_envs": True}, "num_envs must be a whole number.*got True"),
        ({"make_env": None}, 'make_env must be an id such as "gymllm/FrozenLake-v0".*got None'),
        ({"make_env": gymnasium.Env()}, "give what makes it"),
        ({"spares": "1"}, "spares must be a whole number >= 0, got '1'"),
        ({"memory_limit_bytes": 1e9}, "memory_limit_bytes must be a whole number >= 1 or None"),
        ({"reset_timeout_s": "1"}, "reset_timeout_s must be a number of seconds > 0, got '1'"),
    ],
)
def test_settings_of_wrong_types_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gymllm.EnvPool(**{"make_env": LAKE, "num_envs": 1, **settings})


def test_make_vec_names_a_wrong_number_of_environments() -> None:
    with pytest.raises(ConfigTypeError, match=r"num_envs must be a whole number.*got '3'"):
        gymnasium.make_vec(LAKE, num_envs="3")  # type: ignore[arg-type]  # what is tested
    pool = gymnasium.make_vec(LAKE, num_envs=cast("int", np.int64(2)))
    assert len(pool.reset(seed=0)[0]) == 2
    pool.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seed": "7"}, "a seed must be a whole number >= 0 or None, got '7' of type str"),
        ({"seed": -1}, "a seed must be >= 0, got -1"),
        ({"options": [("a", 1)]}, "options must be a dict by the options' names"),
        (7, r"the action must be a str.*got 7 of type int \(slot 0\)"),
    ],
)
async def test_a_callers_mistake_breaks_no_episode(given: Any, message: str) -> None:
    async with gymllm.EnvPool(LAKE, 1) as pool, pool.lease() as env:
        await env.reset(seed=np.int64(1))  # type: ignore[arg-type]  # as good as an int
        with pytest.raises(ConfigError, match=message):
            await (env.reset(**given) if isinstance(given, dict) else env.step(given))
        assert not (await env.step("right")).terminated
        assert (pool.stats.built, pool.stats.resets, pool.stats.crashes) == (1, 1, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda pool: pool.step("ab"), "actions must be a tuple or list .* got 'ab'"),
        (lambda pool: pool.step({"left", "up"}), "actions must be a tuple or list"),
        (lambda pool: pool.step(("right", 1)), r"got 1 of type int \(slot 1\)"),
        (lambda pool: pool.reset(seed=[1, 2.5]), r"a seed must be a whole.* got 2\.5"),
        (lambda pool: pool.reset(seed={1, 2}), "a seed must be a whole"),
        (lambda pool: pool.reset(options=3), "options must be a dict"),
        (lambda pool: pool.call(3), "name must be a str, got 3"),
    ],
)
def test_a_mistake_with_a_batch_moves_no_environment(
    wrong: Callable[[gymllm.EnvPool], object], message: str
) -> None:
    pool = gymllm.EnvPool(LAKE, 2)
    pool.reset(seed=np.array([1, 2]))  # type: ignore[arg-type]  # as good as a list
    with pytest.raises(ConfigTypeError, match=message):
        wrong(pool)
    assert (pool.stats.resets, pool.stats.steps) == (2, 0)
    pool.step(("right", "right"))
    pool.close()


def test_a_pool_belongs_to_one_loop() -> None:
    pool = gymllm.EnvPool(LAKE, 2)
    pool.reset(seed=0)  # on the helper loop

    async def lease() -> None:
        async with pool.lease():
            pass

    with pytest.raises(ConfigError, match="vector"):
        asyncio.run(lease())
    pool.close()


@pytest.mark.asyncio
async def test_a_leased_pool_is_no_vector_env() -> None:
    async with faulty_pool() as (pool, _), pool.lease():
        with pytest.raises(ConfigError, match="leased"):
            pool.reset()


# The vector face


@pytest.mark.parametrize("worker", ["inline", "thread"])
def test_vector_face_is_each_env_with_its_seed(worker: str) -> None:
    pool = gymllm.EnvPool(LAKE, 3, worker=worker)
    alone = [gymnasium.make(LAKE) for _ in range(3)]
    observations, infos = pool.reset(seed=7)
    assert observations == tuple(env.reset(seed=7 + i)[0] for i, env in enumerate(alone))
    assert observations in pool.observation_space
    assert infos["prob"].tolist() == [1, 1, 1]
    for actions in (("down", "right", "?"), ("right", "down", "down")):
        observations, rewards, terminated, truncated, infos = pool.step(actions)
        answers = [env.step(action) for env, action in zip(alone, actions, strict=True)]
        assert observations == tuple(answer[0] for answer in answers)
        assert rewards.tolist() == [answer[1] for answer in answers]
        assert terminated.tolist() == [answer[2] for answer in answers]
        assert not truncated.any()
        assert infos["invalid_action"].tolist() == [a[4]["invalid_action"] for a in answers]
        if terminated.any():
            break
    assert pool.reset(seed=[7, 8, 9])[0] == pool.reset(seed=7)[0]
    pool.close()
    assert threads_of() == []


@pytest.mark.asyncio
async def test_vector_face_works_in_a_notebook() -> None:
    pool = gymllm.EnvPool(LAKE, 2)
    assert len(pool.reset(seed=0)[0]) == 2
    pool.close()


def vector_pool(mode: AutoresetMode = AutoresetMode.DISABLED) -> gymllm.EnvPool:
    return gymllm.EnvPool(lambda: Faulty([]), 3, autoreset_mode=mode)


def test_disabled_autoreset_wants_a_masked_reset() -> None:
    pool = vector_pool()
    with pytest.raises(ResetNeeded, match=r"\[0, 1, 2\]"):
        pool.step(("a", "b", "c"))
    pool.reset(seed=0)
    _, rewards, terminated, truncated, _ = pool.step(("end", "x", "end"))
    assert rewards.tolist() == [1, 0, 1]
    with pytest.raises(ResetNeeded, match=r"\[0, 2\]"):
        pool.step(("a", "b", "c"))
    assert pool.stats.steps == 3  # none was stepped
    options = {"reset_mask": terminated | truncated, "do": ""}
    observations, _ = pool.reset(seed=[10, None, 12], options=options)
    assert observations == ("seed 10", "text", "seed 12")
    assert "reset_mask" in options  # the caller's own
    assert pool.step(("a", "b", "c"))[4]["step"].tolist() == ["a", "b", "c"]
    pool.close()


def test_next_step_autoreset() -> None:
    pool = vector_pool(AutoresetMode.NEXT_STEP)
    pool.reset(seed=0)
    assert pool.step(("end", "x", "x"))[2].tolist() == [True, False, False]
    observations, rewards, terminated, _, infos = pool.step(("ignored", "end", "x"))
    assert observations == ("seed None", "text", "text")
    assert rewards.tolist() == [0, 1, 0]
    assert terminated.tolist() == [False, True, False]
    assert infos["_step"].tolist() == [False, False, True]
    pool.close()


def test_the_first_reset_never_comes_by_itself() -> None:
    pool = vector_pool(AutoresetMode.NEXT_STEP)
    with pytest.raises(ResetNeeded, match=r"\[0, 1, 2\]"):
        pool.step(("x", "x", "x"))
    assert pool.stats.resets == 0
    pool.close()


def test_a_name_that_is_no_text_reaches_no_environment() -> None:
    pool = vector_pool()
    pool.reset(seed=0)
    with pytest.raises(ConfigTypeError, match="name must be a str, got 5"):
        pool.set_attr(5, 1)  # type: ignore[arg-type]
    with pytest.raises(ConfigTypeError, match="name must be a str, got 5"):
        pool.call(5)  # type: ignore[arg-type]
    assert pool.stats.crashes == 0
    pool.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [KeyError("mine"), ExceptionGroup("mine", [KeyError("one")])])
async def test_what_is_raised_in_a_pools_block_comes_out_as_it_is(error: Exception) -> None:
    pool = gymllm.EnvPool(LAKE, 1, spares=1)

    async def play() -> None:
        async with pool, pool.lease() as env:
            await env.reset(seed=0)
            raise error

    with pytest.raises(type(error)) as raised:
        await play()
    assert raised.value is error
    assert pool.closed


def test_a_step_whose_pool_is_closed_meanwhile_says_so() -> None:
    log: list[str] = []
    gate = threading.Event()
    pool = gymllm.EnvPool(lambda: Faulty(log, gate), 2, worker="thread")
    pool.reset(seed=0)
    closer = threading.Timer(0.1, pool.close)
    closer.start()
    with pytest.raises(ClosedError, match="the pool was closed meanwhile"):
        pool.step(("block", "block"))
    gate.set()
    closer.join()


def test_same_step_autoreset_keeps_the_final_observation() -> None:
    pool = vector_pool(AutoresetMode.SAME_STEP)
    pool.reset(seed=0)
    observations, rewards, terminated, _, infos = pool.step(("end", "x", "x"))
    assert observations == ("seed None", "text", "text")
    assert rewards.tolist() == [1, 0, 0]
    assert terminated.tolist() == [True, False, False]
    assert infos["final_obs"].tolist() == ["text", None, None]
    assert infos["final_info"]["ended"].tolist() == [True, False, False]
    pool.step(("x", "x", "x"))
    pool.close()


def test_one_raising_env_loses_nothing_of_the_others() -> None:
    pool = vector_pool()
    pool.reset(seed=0)
    with pytest.raises(EnvBatchError, match=r"1 of 3 environments broke: .*slot 1") as caught:
        pool.step(("end", "raise", "x"))
    first, second, third = caught.value.answers
    assert isinstance(first, gymllm.StepResult)
    assert first.terminated
    assert isinstance(second, EnvCrashedError)
    assert isinstance(third, gymllm.StepResult)
    assert caught.value.failed == (1,)
    observations, _ = pool.reset(seed=5, options={"reset_mask": np.array([True, True, False])})
    assert observations == ("seed 5", "seed 6", "text")
    pool.step(("x", "x", "x"))
    with pytest.raises(EnvBatchError, match="3 of 3"):
        pool.reset(options={"do": "raise"})
    pool.close()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.zeros(3, np.bool), "True somewhere"),
        (np.ones(2, np.bool), r"shape \(3,\)"),
        (np.ones(3), "bool array"),
        ([1, 0, 1], "bool array"),
    ],
)
def test_wrong_masks_are_refused(mask: object, message: str) -> None:
    pool = vector_pool()
    with pytest.raises(ConfigError, match=message):
        pool.reset(options={"reset_mask": mask})
    with pytest.raises(ConfigError, match="3 seeds, got 2"):
        pool.reset(seed=[1, 2])
    pool.reset()
    with pytest.raises(ConfigError, match="expected 3 actions, got 1"):
        pool.step(("a",))
    pool.close()


@pytest.mark.parametrize("worker", ["inline", "thread"])
def test_an_interrupted_step_leaves_a_pool_that_can_be_reset(worker: str) -> None:
    log: list[str] = []
    pool = gymllm.EnvPool(lambda: Faulty(log), 2, worker=worker)
    pool.reset(seed=1)

    main = threading.get_ident()

    def interrupt() -> None:
        while "waiting" not in log:
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        pool.step(("hang", "fine"))
    with pytest.raises(ResetNeeded, match=r"environments \[0, 1\] have no episode"):
        pool.step(("fine", "fine"))
    assert pool.reset(seed=3)[0] == ("seed 3", "seed 4")
    assert pool.step(("fine", "fine"))[0] == ("text", "text")
    pool.close()


def test_gymnasiums_vector_wrappers_work() -> None:
    envs = RecordVectorStatistics(gymnasium.make_vec(LAKE, num_envs=2, max_turns=2))
    envs.reset(seed=0)
    for _ in range(2):
        *_, truncated, infos = envs.step(("?", "?"))
    assert truncated.tolist() == [True, True]
    assert infos["episode"]["l"].tolist() == [2, 2]
    envs.close()


def test_vector_render() -> None:
    pool = gymllm.EnvPool(lambda: gymllm.make(LAKE, render_mode="ansi"), 2)
    observations, _ = pool.reset(seed=0)
    assert pool.render() == observations
    pool.close()


class Slow(gymllm.Env):
    """Says how long it may take."""

    reset_timeout_s = 0.02

    async def areset(self, *, seed: Any = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        await anyio.sleep_forever()
        raise AssertionError

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        raise NotImplementedError


@pytest.mark.asyncio
async def test_a_class_says_how_long_a_reset_may_take() -> None:
    async with gymllm.EnvPool(Slow, 1) as pool:
        with pytest.raises(EnvTimeoutError, match=r"no answer within 0.02 s"):
            async with pool.lease() as env:
                await env.reset(seed=0)
    patient = gymllm.EnvPool(Slow, 1, reset_timeout_s=0.05)
    async with patient:
        with pytest.raises(EnvTimeoutError, match=r"no answer within 0.05 s"):
            async with patient.lease() as env:
                await env.reset(seed=0)
