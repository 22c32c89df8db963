"""The greenlet bridge: synchronous code that waits on a loop, and async code without one."""

import asyncio
import contextvars
import pickle
import threading

import anyio
import anyio.lowlevel
import pytest

from gymllm.bridge import (
    HomeLoop,
    LoopThread,
    await_only,
    finish,
    helper_loop,
    in_bridge,
    run_sync,
)

LABEL: contextvars.ContextVar[str] = contextvars.ContextVar("LABEL", default="none")


async def identity(value: object) -> object:
    await asyncio.sleep(0)
    return value


@pytest.mark.asyncio
async def test_run_sync_returns_what_the_function_returns() -> None:
    def function(a: int, *, b: int) -> int:
        assert in_bridge()
        first, second = await_only(identity(a)), await_only(identity(b))
        assert isinstance(first, int)
        assert isinstance(second, int)
        return first * second

    assert await run_sync(function, 6, b=7) == 42
    assert not in_bridge()


@pytest.mark.asyncio
async def test_exceptions_cross_both_ways() -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise KeyError("inside")

    def function() -> str:
        try:
            await_only(fails())
        except KeyError as error:
            raise ValueError("outside") from error
        return "unreached"

    with pytest.raises(ValueError, match="outside") as caught:
        await run_sync(function)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.asyncio
async def test_two_calls_overlap() -> None:
    here, there = asyncio.Event(), asyncio.Event()

    def first() -> str:
        here.set()
        await_only(there.wait())
        return "first"

    def second() -> str:
        await_only(here.wait())
        there.set()
        return "second"

    async with asyncio.timeout(5):
        assert await asyncio.gather(run_sync(first), run_sync(second)) == ["first", "second"]


@pytest.mark.asyncio
async def test_cancellation_reaches_the_coroutine_then_the_function() -> None:
    log: list[str] = []
    waiting = asyncio.Event()

    async def hangs() -> None:
        try:
            waiting.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            log.append("coroutine cancelled")
            raise
        finally:
            await asyncio.sleep(0)  # may wait while it cleans up
            log.append("coroutine cleaned up")

    def function() -> None:
        try:
            await_only(hangs())
        finally:
            await_only(identity(None))
            log.append("function cleaned up")

    task = asyncio.create_task(run_sync(function))
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["coroutine cancelled", "coroutine cleaned up", "function cleaned up"]


@pytest.mark.asyncio
async def test_context_variables_and_task_are_the_callers() -> None:
    def function() -> tuple[str, object]:
        await_only(identity(None))
        seen = LABEL.get()
        LABEL.set("changed inside")
        return seen, asyncio.current_task()

    LABEL.set("outer")
    assert await run_sync(function) == ("outer", asyncio.current_task())
    assert LABEL.get() == "changed inside"


@pytest.mark.asyncio
async def test_bridges_nest() -> None:
    def inner() -> object:
        return await_only(identity("deep"))

    def outer() -> object:
        return await_only(run_sync(inner))

    assert await run_sync(outer) == "deep"


def test_run_sync_works_on_trio_through_anyio() -> None:
    pytest.importorskip("trio")

    async def wait() -> str:
        await anyio.lowlevel.checkpoint()
        return "waited"

    async def main() -> str:
        return await run_sync(lambda: await_only(wait()))

    assert anyio.run(main, backend="trio") == "waited"


def test_await_only_outside_a_bridge_raises() -> None:
    with pytest.raises(RuntimeError, match="outside run_sync"):
        await_only(identity(1))


def test_finish_runs_what_never_waits_and_refuses_what_does() -> None:
    async def at_once() -> int:
        return 3

    assert finish(at_once()) == 3
    with pytest.raises(RuntimeError, match="waits = True"):
        finish(identity(3))


def test_home_loop_runs_without_a_loop_on_the_helper_thread() -> None:
    async def where() -> str:
        await asyncio.sleep(0)
        return threading.current_thread().name

    assert HomeLoop().run(where()) == "gymllm-helper-loop"


@pytest.mark.asyncio
async def test_home_loop_runs_under_a_running_loop() -> None:
    home = HomeLoop()  # as in a notebook: no bridge, and this thread's loop is busy with us
    assert home.run(identity("answer")) == "answer"


def test_home_loop_stays_the_same_from_thread_to_thread() -> None:
    home, loops = HomeLoop(), list[asyncio.AbstractEventLoop]()

    async def note() -> None:
        loops.append(asyncio.get_running_loop())

    home.run(note())
    thread = threading.Thread(target=lambda: home.run(note()))
    thread.start()
    thread.join()

    async def bridged() -> None:
        await run_sync(lambda: home.run(note()))

    asyncio.run(bridged())
    assert loops == [helper_loop()] * 3


@pytest.mark.asyncio
async def test_home_loop_is_driven_from_another_thread_once_it_is_bound_here() -> None:
    home, loops = HomeLoop(), list[asyncio.AbstractEventLoop]()

    async def note() -> None:
        loops.append(asyncio.get_running_loop())

    await run_sync(lambda: home.run(note()))
    await asyncio.to_thread(lambda: home.run(note()))
    assert loops == [asyncio.get_running_loop()] * 2
    with pytest.raises(RuntimeError, match="would wait for the event loop"):
        home.run(note())


def test_home_loop_starts_anew_when_its_loop_is_closed() -> None:
    home = HomeLoop()

    async def bridged() -> object:
        return await run_sync(lambda: home.run(identity("first")))

    assert asyncio.run(bridged()) == "first"
    assert home.run(identity("second")) == "second"


def test_a_home_loop_that_stands_is_refused() -> None:
    home, loop = HomeLoop(), asyncio.new_event_loop()
    try:
        loop.run_until_complete(run_sync(lambda: home.run(identity(1))))
        with pytest.raises(RuntimeError, match="no longer runs"):
            home.run(identity(2))
    finally:
        loop.close()


def test_home_loop_pickles_as_a_new_one() -> None:
    home = HomeLoop()
    home.run(identity(1))
    assert isinstance(pickle.loads(pickle.dumps(home)), HomeLoop)


def test_loop_thread_cancels_its_tasks_when_it_stops() -> None:
    log: list[str] = []
    started = threading.Event()

    async def forever() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            log.append("cleaned up")

    thread = LoopThread("test-loop")
    future = asyncio.run_coroutine_threadsafe(forever(), thread.loop)
    assert started.wait(5)
    thread.stop()
    assert thread.join(5)
    assert log == ["cleaned up"]
    assert future.cancelled()
    thread.stop()  # no-op


def test_system_exit_reaches_the_caller_and_not_the_loop() -> None:
    async def leaves() -> None:
        await asyncio.sleep(0)
        raise SystemExit(3)

    for _ in range(2):
        with pytest.raises(SystemExit, match="3"):
            HomeLoop().run(leaves())
    assert HomeLoop().run(identity("alive")) == "alive"
