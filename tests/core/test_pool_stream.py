"""`EnvPool.episode`, `EnvPool.stream`, spare environments, starts in turn, and both event loops."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import cloudpickle
import gymnasium
import numpy as np
import pytest

import gymllm
from gymllm.errors import (
    ConfigError,
    EngineError,
    EnvBatchError,
    EnvCrashedError,
    EnvTypeError,
    UnknownNameError,
)
from gymllm.pool import LeasedEnv, Played, execution_of
from gymllm.task import SeededTasks, Task

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the processes can't import this file

LAKE = "gymllm/FrozenLake-v0"
TASKS = SeededTasks(run_seed=5)


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


class Walk(gymllm.Env):
    """Five steps; the task's options say what goes wrong."""

    def __init__(self, log: list[str] | None = None) -> None:
        self.log: list[str] = [] if log is None else log

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._options, self._steps = options or {}, 0
        self.log.append(f"reset {seed}")
        await anyio.lowlevel.checkpoint()
        if self._options.get("breaks") == "reset":
            raise OSError("no server")
        return str(self.np_random.integers(1_000_000)), {}

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        await anyio.lowlevel.checkpoint()
        self._steps += 1
        if self._options.get("breaks") == "step":
            raise KeyError("step")
        text = f"{action} {self.np_random.integers(1_000_000)}"
        return text, 1.0, self._steps == 5, False, {}


async def walk(env: LeasedEnv, task: Task) -> list[str]:
    """Plays to the end; every observation."""
    seen = [str(env.observation)]
    while True:
        result = await env.step(f"go {len(seen)}")
        seen.append(result.observation)
        assert env.observation == result.observation
        if result.terminated or result.truncated:
            return seen


def tasks(count: int, breaks: dict[int, str] | None = None) -> list[Task]:
    breaks = breaks or {}
    return [
        Task(index=i, id=str(i), seed=i + 1, options={"breaks": breaks[i]} if i in breaks else {})
        for i in range(count)
    ]


async def play_all(
    pool: gymllm.EnvPool, given: Sequence[Task], **settings: Any
) -> dict[int, Played[list[str]]]:
    with anyio.fail_after(20):
        async with pool.stream(given, walk, **settings) as ended:
            return {played.task.index: played async for played in ended}


@pytest.mark.anyio
@pytest.mark.parametrize("worker", ["inline", "thread", "process"])
async def test_episodes_are_the_same_whatever_runs_them(worker: str) -> None:
    """Whatever the worker, how many there are and which loop: the seeds decide."""
    alone = gymllm.EnvPool(Walk, 1)
    expected = await play_all(alone, tasks(12))
    await alone.aclose()
    shared = {"envs_per_process": 2} if worker == "process" else {}
    pool = gymllm.EnvPool(Walk, 3, worker=worker, **shared)
    try:
        played = await play_all(pool, tasks(12))
    finally:
        await pool.aclose()
    assert {i: p.result for i, p in played.items()} == {i: p.result for i, p in expected.items()}
    assert pool.stats.resets == 12


@pytest.mark.anyio
async def test_an_episode_is_reset_for_its_task() -> None:
    task = TASKS.task(3)
    alone = gymnasium.make(LAKE)
    pool = gymllm.EnvPool(LAKE, 1)
    async with pool.episode(task) as env:
        assert env.observation == alone.reset(seed=task.seed)[0]
        assert (await env.step("down")).observation == alone.step("down")[0]
    await pool.aclose()


@pytest.mark.anyio
async def test_a_task_that_keeps_failing_is_set_aside_and_the_rest_goes_on() -> None:
    pool = gymllm.EnvPool(Walk, 2)
    played = await play_all(pool, tasks(8, {2: "reset", 5: "step"}), retries=1)
    await pool.aclose()
    assert sorted(played) == list(range(8))
    for index, one in played.items():
        if index in (2, 5):
            assert isinstance(one.error, EnvCrashedError)
            assert (one.result, one.tries) == (None, 2)
        else:
            assert one.error is None
            assert one.tries == 1
    assert pool.stats.crashes == 4


@pytest.mark.anyio
async def test_a_retry_plays_the_same_seed_on_a_new_environment() -> None:
    log: list[str] = []
    pool = gymllm.EnvPool(lambda: Walk(log), 1)
    failures = iter([EngineError("no answer")])

    async def play(env: LeasedEnv, task: Task) -> str:
        for failure in failures:
            raise failure
        return str(env.observation)

    async with pool.stream(tasks(1), play) as ended:
        played = [one async for one in ended]
    await pool.aclose()
    assert log == ["reset 1", "reset 1"]
    assert [(one.tries, one.error) for one in played] == [(2, None)]


@pytest.mark.anyio
async def test_what_playing_raises_besides_ends_the_stream() -> None:
    pool = gymllm.EnvPool(Walk, 2)

    async def play(env: LeasedEnv, task: Task) -> None:
        raise ZeroDivisionError("a mistake")

    async def play_and_read() -> None:
        async with pool.stream(tasks(3), play) as ended:
            async for _ in ended:
                pass

    with pytest.raises(ZeroDivisionError, match="a mistake"):
        await play_and_read()
    await pool.aclose()


@pytest.mark.anyio
async def test_tasks_are_taken_no_faster_than_the_stream_is_read() -> None:
    taken: list[int] = []

    def endless() -> Iterator[Task]:
        index = 0
        while True:
            taken.append(index)
            yield TASKS.task(index)
            index += 1

    pool = gymllm.EnvPool(Walk, 2)
    async with pool.stream(endless(), walk) as ended:
        await ended.receive()
        await anyio.wait_all_tasks_blocked()
        # Those in the stream's buffer, those that wait to get in, and the one that was read.
        assert len(taken) <= 2 + 2 + 1 + 2
    await pool.aclose()


@pytest.mark.anyio
async def test_environments_beyond_those_playing_are_reset_ahead() -> None:
    log: list[str] = []
    pool = gymllm.EnvPool(lambda: Walk(log), 4)
    ahead: list[int] = []
    playing = 0

    async def play(env: LeasedEnv, task: Task) -> None:
        nonlocal playing
        playing += 1
        assert playing == 1
        await anyio.wait_all_tasks_blocked()
        ahead.append(len(log) - len(ahead) - 1)  # those that play, or have, are one each
        playing -= 1

    async with pool.stream(tasks(12), play, playing=1) as ended:
        assert len([one async for one in ended]) == 12
    await pool.aclose()
    assert ahead[0] == 3
    assert max(ahead) == 3


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"playing": 0}, "playing must be >= 1 and <= num_envs = 2, got 0"),
        ({"playing": 3}, "got 3"),
        ({"retries": -1}, "retries must be >= 0, got -1"),
        ({"playing": "2"}, "playing must be a whole number >= 1 and <= num_envs = 2, got '2'"),
        ({"retries": 1.5}, "retries must be a whole number >= 0, got 1.5"),
    ],
)
async def test_wrong_settings_of_a_stream_are_refused(settings: Any, message: str) -> None:
    pool = gymllm.EnvPool(Walk, 2)
    with pytest.raises(ConfigError, match=message):
        async with pool.stream(tasks(1), walk, **settings):
            pass
    await pool.aclose()


class SlowStart(Walk):
    """Counts those that are being made at once."""

    lock = threading.Lock()
    starting = most = made = 0
    go_on = threading.Event()

    def __init__(self) -> None:
        super().__init__()
        with self.lock:
            SlowStart.starting += 1
            SlowStart.most = max(self.most, self.starting)
            SlowStart.made += 1
        self.go_on.wait(5)
        with self.lock:
            SlowStart.starting -= 1


@pytest.fixture
def slow_start() -> type[SlowStart]:
    SlowStart.starting = SlowStart.most = SlowStart.made = 0
    SlowStart.go_on.clear()
    return SlowStart


@pytest.mark.anyio
async def test_so_many_start_at_once_and_steps_do_not_wait_for_them(
    slow_start: type[SlowStart],
) -> None:
    pool = gymllm.EnvPool(slow_start, 6, worker="thread", max_starts=2)
    slow_start.go_on.set()
    async with pool.lease() as running:
        await running.reset()
        slow_start.go_on.clear()

        async def begin() -> None:
            async with pool.lease() as env:
                await env.reset()

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(begin)
            while slow_start.made < 3:  # noqa: ASYNC110 - they are made in threads
                await anyio.sleep(0.001)
            assert (await running.step("x")).reward == 1.0
            assert slow_start.made == 3
            slow_start.go_on.set()
    assert slow_start.most == 2
    assert pool.stats.built == 6
    await pool.aclose()


@pytest.mark.anyio
async def test_a_start_has_a_limit_of_its_own(slow_start: type[SlowStart]) -> None:
    pool = gymllm.EnvPool(slow_start, 1, worker="thread", start_timeout_s=0.05)
    async with pool.lease() as env:
        with pytest.raises(gymllm.errors.EnvTimeoutError, match=r"start: .* raise start_timeout_s"):
            await env.reset()
        slow_start.go_on.set()
        await env.reset()
    await pool.aclose()
    with anyio.fail_after(5):
        # The one that was too slow closes what it made, and ends.
        while any(thread.name.startswith("gymllm-env") for thread in threading.enumerate()):  # noqa: ASYNC110
            await anyio.sleep(0.001)


@pytest.mark.anyio
@pytest.mark.parametrize("worker", ["inline", "thread", "process"])
async def test_spares_are_made_ahead_and_take_the_place_of_broken_ones(worker: str) -> None:
    pool = gymllm.EnvPool(Walk, 1, worker=worker, spares=2)
    with anyio.fail_after(20):
        async with pool:
            while len(pool._supply._spares) < 2:  # noqa: ASYNC110 - nothing tells of it
                await anyio.sleep(0.001)
            assert pool.stats.built == 2
            async with pool.lease() as env:
                await env.reset(options={"breaks": "step"})
                with pytest.raises(EnvCrashedError):
                    await env.step("x")
                await env.reset()
            while len(pool._supply._spares) < 2:  # noqa: ASYNC110
                await anyio.sleep(0.001)
            assert pool.stats.built == 4
            assert pool.stats.rebuilt == 1
    assert pool.closed
    assert pool._supply._spares == []


@pytest.mark.anyio
async def test_a_spare_that_cannot_be_made_is_told_to_whoever_needs_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def make() -> gymllm.Env:
        raise OSError("no licence")

    with anyio.fail_after(10):
        async with gymllm.EnvPool(make, 1, spares=1) as pool:
            await anyio.wait_all_tasks_blocked()
            assert "a spare environment could not be made: OSError: no licence" in caplog.text
            async with pool.lease() as env:
                with pytest.raises(EnvCrashedError, match="start: raised OSError: no licence"):
                    await env.reset()


@pytest.mark.anyio
async def test_an_inline_environment_that_blocks_the_loop_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Blocks(Walk):
        async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            until = time.monotonic() + 5
            while "has stood still" not in caplog.text and time.monotonic() < until:
                time.sleep(0.01)  # noqa: ASYNC251 - that is the mistake
            return await super().astep(action)

    monkeypatch.setattr("gymllm.pool.BLOCKED_AFTER_S", 0.1)
    pool = gymllm.EnvPool(Blocks, 1)
    async with pool.lease() as env:
        await env.reset()
        await env.step("x")
    await pool.aclose()
    (record,) = [r for r in caplog.records if r.name == "gymllm.workers.watch"]
    assert "the event loop of Blocks has stood still for 0.1 s" in record.message
    assert 'worker="thread"' in record.message
    assert ", in astep\n" in record.message
    assert not any(thread.name == "gymllm-watch" for thread in threading.enumerate())


def test_where_an_environment_runs_is_its_classes_word() -> None:
    class Blocks(Walk):
        execution = "thread"

    class Wrong(Walk):
        execution = "threads"

    assert execution_of(Walk) == "inline"
    assert execution_of(Blocks) == "thread"
    assert execution_of(lambda: Blocks()) == "inline"
    assert execution_of(gymnasium.make) == "inline"
    with pytest.raises(UnknownNameError, match=r"Unknown execution 'threads'.* mean thread"):
        gymllm.EnvPool(Wrong, 1)


# The vector face


@pytest.mark.parametrize("worker", ["inline", "thread", "process"])
def test_attributes_are_read_called_and_set(worker: str) -> None:
    pool = gymllm.EnvPool("CartPole-v1", 2, worker=worker, text=False)
    try:
        assert pool.get_attr("length") == (0.5, 0.5)
        pool.set_attr("length", [0.25, 1.0])
        assert pool.get_attr("length") == (0.25, 1.0)
        pool.set_attr("length", 2.0)
        assert pool.call("length") == (2.0, 2.0)
        pool.reset(seed=3)
        spec = pool.call("get_wrapper_attr", "spec")
        assert [each.id for each in spec] == ["CartPole-v1"] * 2
        with pytest.raises(ConfigError, match="expected 2 values of length, got 3"):
            pool.set_attr("length", [1, 2, 3])
        with pytest.raises(AttributeError, match=r"CartPole-v1 .* no attribute 'no_such'"):
            pool.get_attr("no_such")
        pool.step(np.array([0, 1]))  # nothing was broken by that
    finally:
        pool.close()


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Blackjack-v1"])
def test_any_spaces_are_batched_as_gymnasium_does(env_id: str, mode: str) -> None:
    """Step by step what `SyncVectorEnv` answers, automatic resets and infos included."""
    autoreset = gymnasium.vector.AutoresetMode(mode)
    theirs = gymnasium.vector.SyncVectorEnv(
        [lambda: gymnasium.make(env_id)] * 3, autoreset_mode=autoreset
    )
    ours = gymllm.EnvPool(env_id, 3, text=False, autoreset_mode=mode)
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    assert ours.single_observation_space == theirs.single_observation_space
    assert ours.metadata["render_modes"] == theirs.metadata["render_modes"]
    expected, got = theirs.reset(seed=7), ours.reset(seed=7)
    theirs.action_space.seed(1)
    for _ in range(60):
        assert_same(got, expected)
        action = theirs.action_space.sample()
        expected, got = theirs.step(action), ours.step(action)
    theirs.close()
    ours.close()


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, tuple):
        assert len(ours) == len(theirs)
        for left, right in zip(ours, theirs, strict=True):
            assert_same(left, right)
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, np.ndarray) and theirs.dtype == object:
        assert len(ours) == len(theirs)
        for left, right in zip(ours, theirs, strict=True):
            assert_same(left, right)
    else:
        np.testing.assert_array_equal(ours, theirs)
        assert getattr(ours, "dtype", None) == getattr(theirs, "dtype", None)


def test_a_reset_mask_can_be_given_by_itself() -> None:
    pool = gymllm.EnvPool(Walk, 3)
    first, _ = pool.reset(seed=1)
    again, _ = pool.reset(seed=11, reset_mask=np.array([False, True, False]))
    assert again[::2] == first[::2]
    assert again[1] == gymllm.EnvPool(Walk, 1).reset(seed=12)[0][0]
    pool.close()


@pytest.mark.parametrize("worker", ["inline", "process"])
def test_each_environments_generator_can_be_seen(worker: str) -> None:
    pool = gymllm.EnvPool(Walk, 2, worker=worker)
    pool.reset(seed=42)
    assert pool.np_random_seed == (42, 43)
    pool.reset()
    assert pool.np_random_seed == (42, 43)
    drawn = [rng.integers(1_000_000) for rng in pool.np_random]
    assert len(set(drawn)) == 2
    pool.close()


def test_different_spaces_in_one_pool_are_named() -> None:
    sizes = iter(range(1, 9))

    class Sized(gymnasium.Env[Any, Any]):
        def __init__(self) -> None:
            self.observation_space = gymnasium.spaces.Box(0, next(sizes), (2,))
            self.action_space = gymnasium.spaces.Discrete(2)

        def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
            return self.observation_space.sample(), {}

    pool = gymllm.EnvPool(Sized, 2, text=False)
    with pytest.raises(
        EnvBatchError, match=r"Sized: start: the observation_space is Box\(0.*2"
    ) as caught:
        pool.reset(seed=1)
    assert caught.value.failed == (1,)
    pool.close()


def test_what_gymnasium_expects_of_a_vector_env_holds() -> None:
    pool = gymllm.EnvPool(LAKE, 2)
    with pytest.raises(TypeError, match="reset_mask must be a bool array"):
        pool.reset(options={"reset_mask": np.array([1, 0])})
    pool.metadata = {"autoreset_mode": pool.autoreset_mode, "mine": 1}
    assert pool.metadata["mine"] == 1
    pool.close()
    with pytest.raises(gymnasium.error.ClosedEnvironmentError):
        pool.reset()


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_pool_that_nobody_closes_takes_what_it_started_with_it(worker: str) -> None:
    def children() -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    def play_and_forget() -> None:
        gymllm.EnvPool("CartPole-v1", 2, worker=worker, text=False).reset(seed=1)

    threads, processes = set(threading.enumerate()), children()
    play_and_forget()
    gc.collect()
    until = time.monotonic() + 5
    while time.monotonic() < until and (
        children() != processes
        or any(t.name.startswith("gymllm-env") for t in set(threading.enumerate()) - threads)
    ):
        time.sleep(0.01)
    assert time.monotonic() < until


class Odd(Walk):
    """Raises, or answers, what nobody expects."""

    async def astep(self, action: str) -> Any:
        class NoText(Exception):
            def __str__(self) -> str:
                raise ValueError("no text")

        class NoPicture(float):
            __repr__ = None  # type: ignore[assignment]

        class Panic(BaseException):
            pass

        if action == "no text":
            raise NoText
        if action == "panic":
            raise Panic("from below")
        if action == "circle":
            first, second = KeyError("first"), KeyError("second")
            first.__cause__, second.__cause__ = second, first
            raise first
        if action == "long":
            raise KeyError("x" * 1_000_000)
        rewards = {"huge": 10**400, "complex": np.complex64(1j), "nan": NoPicture("nan")}
        return "text", rewards[action], False, False, {}


@pytest.mark.anyio
@pytest.mark.parametrize("worker", ["inline", "thread", "process"])
@pytest.mark.parametrize("what", ["no text", "panic", "circle", "long", "huge", "complex", "nan"])
async def test_one_odd_environment_ends_its_own_episode_only(what: str, worker: str) -> None:
    async def play(env: LeasedEnv, task: Task) -> None:
        await env.step(what)

    pool = gymllm.EnvPool(Odd, 1, worker=worker, step_timeout_s=20)
    with anyio.fail_after(15):
        async with pool.stream(tasks(2), play, retries=0) as ended:
            errors = [played.error async for played in ended]
    await pool.aclose()
    assert len(errors) == 2
    # What has no text can't be pickled here either, so it does not leave its process.
    typed = ("huge", "complex") if worker == "process" else ("huge", "complex", "nan")
    expected = EnvTypeError if what in typed else EnvCrashedError
    for error in errors:
        assert isinstance(error, expected)
        assert len(str(error)) < 10_000


@pytest.mark.anyio
async def test_options_of_processes_are_refused_elsewhere() -> None:
    with pytest.raises(ConfigError, match="for worker='process'; this pool's is 'inline'"):
        gymllm.EnvPool(Walk, 1, envs_per_process=2)
    with pytest.raises(ConfigError, match="memory_limit_bytes must be >= 1 or None, got -5"):
        gymllm.EnvPool(Walk, 1, worker="process", memory_limit_bytes=-5)


@pytest.mark.parametrize("worker", ["inline", "thread", "process"])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_pool_goes_on_where_its_loop_is_closed_and_another_runs(
    worker: str, backend: str
) -> None:
    pool = gymllm.EnvPool(Walk, 1, worker=worker)

    async def play() -> str:
        with anyio.fail_after(10):
            async with pool.lease() as env:
                return (await env.reset(seed=3))[0]

    assert anyio.run(play, backend=backend) == anyio.run(play, backend=backend)
    anyio.run(pool.aclose, backend=backend)


def test_an_id_that_this_program_registered_is_known_in_its_processes() -> None:
    gymnasium.register("here/Walk-v0", Walk)
    try:
        pool = gymllm.EnvPool("here/Walk-v0", 1, worker="process")
        assert pool.reset(seed=3)[0] == gymllm.EnvPool(Walk, 1).reset(seed=3)[0]
        pool.close()
    finally:
        del gymnasium.registry["here/Walk-v0"]


OWN_MODULE = """
import os, gymnasium, gymllm
PID = os.getpid()
class Own(gymllm.Env):
    async def areset(self, *, seed=None, options=None):
        return "", {"imported_in": PID, "parent": os.getppid()}
    async def astep(self, action):
        raise RuntimeError("broken")
gymnasium.register("own/Own-v0", "gymllm_own_module:Own")
"""


@pytest.mark.anyio
async def test_a_module_that_registers_itself_is_imported_once_for_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gymllm_own_module.py").write_text(OWN_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("gymllm_own_module")
    try:
        pool = gymllm.EnvPool("own/Own-v0", 1, worker="process")
        async with pool, pool.lease() as env:
            _, info = await env.reset()
            assert info["imported_in"] == info["parent"]  # where all processes are forked
            with pytest.raises(EnvCrashedError) as raised:
                await env.step("")
        # Registered twice, it would say so in the log of each process.
        assert "Overriding" not in str(raised.value)
    finally:
        del gymnasium.registry["own/Own-v0"], sys.modules["gymllm_own_module"]


class Deaf(gymllm.Env):
    """Waits for ever, and "deaf" hears no cancellation."""

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        return "", {}

    async def astep(self, action: str) -> Any:
        while True:
            try:
                await anyio.sleep(60)
            except BaseException:
                if action != "deaf":
                    raise


@pytest.mark.anyio
async def test_those_who_share_a_process_that_is_killed_hear_of_it_at_once() -> None:
    heard = list[str]()
    pool = gymllm.EnvPool(Deaf, 2, worker="process", envs_per_process=2)

    async def wait(env: LeasedEnv) -> None:
        with pytest.raises(EnvCrashedError):
            await env.step("wait")
        heard.append("killed")

    with anyio.fail_after(10):
        async with pool, pool.lease() as env, pool.lease() as other:
            await env.reset()
            await other.reset()
            async with anyio.create_task_group() as group:
                group.start_soon(wait, other)
                await anyio.wait_all_tasks_blocked()
                with anyio.move_on_after(0.05):
                    await env.step("deaf")
    assert heard == ["killed"]
    assert pool.stats.close_failures == 0


class ThrowsItselfAway(Deaf):
    """Raises what is thrown into coroutines that nobody wants."""

    async def astep(self, action: str) -> Any:
        await anyio.lowlevel.checkpoint()
        raise GeneratorExit


@pytest.mark.anyio
async def test_an_environment_that_raises_generator_exit_has_broken() -> None:
    async with gymllm.EnvPool(ThrowsItselfAway, 1) as pool, pool.lease() as env:
        await env.reset()
        with pytest.raises(EnvCrashedError, match="raised GeneratorExit"):
            await env.step("")
