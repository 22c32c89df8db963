"""A tool's limits: time, threads, calls at once, and the length of a result."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading

import anyio
import anyio.lowlevel
import pytest

from gymllm.clip import clip
from gymllm.errors import ConfigError
from gymllm_agents import Tool
from gymllm_agents.tools.places import Places

NOTHING = {"type": "object", "properties": {}, "required": []}
SHORT_S = 0.05


def make(function, **settings) -> Tool:
    return Tool(name="work", description="", parameters=NOTHING, function=function, **settings)


class Gate:
    """A function that says when it has begun, and ends when it may."""

    def __init__(self) -> None:
        self.open, self.begun, self.threads = threading.Event(), threading.Semaphore(0), set()

    def __call__(self, arguments: object) -> str:
        self.threads.add(threading.current_thread())
        self.begun.release()
        assert self.open.wait(10)
        return "done"

    def end(self) -> None:
        self.open.set()
        for thread in self.threads:
            thread.join(10)


@pytest.mark.asyncio
async def test_a_thread_that_hangs_keeps_its_place_and_the_rest_is_told():
    gate = Gate()
    run = make(gate, timeout_s=SHORT_S, max_concurrent=2)
    late = [await run({}), await run({})]
    assert {result.text for result in late} == {"Error: work took longer than 0.05 s."}
    told = await run({})
    assert told.failed
    assert told.text == (
        "Error: work can't run: all threads it may have (2) hang in earlier calls."
    )
    assert len(gate.threads) == 2
    assert all(thread.daemon for thread in gate.threads)
    gate.end()
    assert (await run({})).text == "done"


@pytest.mark.asyncio
async def test_those_who_wait_are_told_when_the_last_place_hangs():
    gate = Gate()
    run = make(gate, timeout_s=SHORT_S, max_concurrent=1)
    results = await asyncio.gather(run({}), run({}))
    assert [r.text.split(":")[1] for r in results] == [
        " work took longer than 0.05 s.",
        " work can't run",
    ]
    gate.end()


@pytest.mark.asyncio
async def test_waiting_for_a_turn_is_not_counted_in_the_timeout():
    async def work(arguments: object) -> str:
        await anyio.sleep(SHORT_S / 2)
        return "done"

    run = make(work, timeout_s=SHORT_S * 0.9, max_concurrent=1)
    results = await asyncio.gather(*(run({}) for _ in range(4)))
    assert [result.text for result in results] == ["done"] * 4


@pytest.mark.asyncio
@pytest.mark.parametrize("sync", [False, True])
async def test_no_more_run_at_once_than_may(sync):
    running, most = 0, 0

    def count(change: int) -> None:
        nonlocal running, most
        running += change
        most = max(most, running)

    async def wait(arguments: object) -> str:
        count(1)
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        count(-1)
        return ""

    def block(arguments: object) -> str:
        with lock:
            count(1)
        both.wait(10)
        with lock:
            count(-1)
        return ""

    lock, both = threading.Lock(), threading.Barrier(2)
    run = make(block if sync else wait, max_concurrent=2)
    results = await asyncio.gather(*(run({}) for _ in range(8)))
    assert not any(result.failed for result in results)
    assert most == 2  # the barrier needs both places


def test_a_tool_serves_one_event_loop_after_the_other():
    async def work(arguments: object) -> str:
        await anyio.lowlevel.checkpoint()
        return "done"

    async def twice() -> list[str]:
        return [r.text for r in await asyncio.gather(run({}), run({}), run({}))]

    for function in (work, lambda arguments: "done"):
        run = make(function, max_concurrent=1)
        for _ in range(2):
            assert asyncio.run(twice()) == ["done"] * 3


def test_a_thread_left_behind_by_a_loop_that_ended_gives_its_place_back():
    gate = Gate()
    run = make(gate, timeout_s=SHORT_S, max_concurrent=1)
    assert asyncio.run(run({})).failed
    gate.end()
    assert asyncio.run(run({})).text == "done"


def test_loops_at_the_same_time_share_the_places():
    gate = Gate()
    run = make(gate, max_concurrent=1)
    first: list[str] = []
    other = threading.Thread(target=lambda: first.append(asyncio.run(run({})).text))
    other.start()
    gate.begun.acquire()

    async def second() -> str:
        _, result = await asyncio.gather(anyio.to_thread.run_sync(gate.open.set), run({}))
        return result.text

    assert asyncio.run(second()) == "done"
    other.join(10)
    assert first == ["done"]


@pytest.mark.asyncio
@pytest.mark.parametrize("waits", [False, True])
async def test_cancellation_gives_the_place_on(waits):
    gate = Gate()
    run = make(gate, max_concurrent=1)
    async with anyio.create_task_group() as group:
        if waits:
            group.start_soon(run, {})
            await anyio.to_thread.run_sync(gate.begun.acquire)
        with anyio.move_on_after(SHORT_S) as scope:
            await run({})
        assert scope.cancelled_caught
        gate.open.set()
    gate.end()
    assert (await run({})).text == "done"


@pytest.mark.asyncio
async def test_a_place_that_was_granted_to_a_cancelled_call_goes_on():
    places = Places(1)
    assert await places.take()
    taken: list[str] = []

    async def take(name: str) -> None:
        assert await places.take()
        taken.append(name)
        places.leave()

    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as cancelled:
                cancelled.start_soon(take, "first")
                await anyio.wait_all_tasks_blocked()
                group.start_soon(take, "second")
                await anyio.wait_all_tasks_blocked()
                scope.cancel()  # the first won't take it ...
                places.leave()  # ... but is first in line, as it has not noticed yet
    assert taken == ["second"]
    assert await places.take()


@pytest.mark.asyncio
async def test_no_place_is_lost_whatever_becomes_of_the_calls():
    rng = random.Random(0)
    running, most, lock = 0, 0, threading.Lock()

    def work(arguments: object) -> str:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(rng.random() * 0.004)
        with lock:
            running -= 1
        return ""

    run = make(work, timeout_s=0.002, max_concurrent=3)

    async def call() -> None:
        with anyio.move_on_after(rng.random() * 0.05):
            await run({})

    for _ in range(5):
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(call)
    assert most <= 3
    places = run._places
    assert places is not None
    while places._hanging:  # noqa: ASYNC110 (threads have no event of ours to set)
        await anyio.sleep(0.001)
    assert (places._free, places._hanging, len(places._waiting)) == (3, 0, 0)


def test_a_thread_that_hangs_does_not_keep_the_interpreter():
    program = """
import asyncio, threading
from gymllm_agents import tool

@tool(timeout_s=0.01)
def hang() -> None:
    threading.Event().wait()

print(asyncio.run(hang({})).text)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert ended.stdout == "Error: hang took longer than 0.01 s.\n"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt("k"), SystemExit(3), StopIteration(), OSError()]
)
async def test_whatever_a_function_raises_is_told(error):
    def raises(arguments: object) -> str:
        raise error

    async def raises_later(arguments: object) -> str:
        await anyio.lowlevel.checkpoint()
        raise error

    for run in (make(raises), make(raises, timeout_s=None), make(raises_later)):
        result = await run({})
        assert result.failed
        name = type(error).__name__
        assert result.text.startswith(f"Error: {name}") or name in ("StopIteration",)


@pytest.mark.asyncio
async def test_a_cancelled_error_of_a_threads_own_does_not_cancel_us():
    def raises(arguments: object) -> str:
        raise asyncio.CancelledError

    assert (await make(raises)({})).text == "Error: CancelledError"


@pytest.mark.asyncio
async def test_an_error_that_cannot_be_shown_is_still_told():
    class Broken(Exception):
        def __str__(self) -> str:
            raise ValueError

    def raises(arguments: object) -> str:
        raise Broken

    assert (await make(raises)({})).text == "Error: Broken"


@pytest.mark.asyncio
async def test_a_sync_function_may_return_an_awaitable():
    async def later() -> str:
        await anyio.lowlevel.checkpoint()
        return "later"

    assert (await make(lambda arguments: later())({})).text == "later"
    assert (await make(lambda arguments: later(), timeout_s=None)({})).text == "later"


@pytest.mark.asyncio
async def test_errors_are_cut_as_results_are():
    def raises(arguments: object) -> str:
        raise ValueError("x" * 100_000)

    result = await make(raises, max_result_chars=100)({})
    assert result.failed
    assert len(result.text) < 150


@pytest.mark.parametrize(
    "character", ["👩‍👩‍👧", "e\u0301", "🇫🇷", "👍🏽", "🏴\U000e0067\U000e0062\U000e007f"]
)
def test_no_character_is_cut_in_two(character):
    for most in range(1, 40):
        shown = clip(character * 30, most)
        head, _, *tail = shown.split("\n")
        assert head == character * (len(head) // len(character))
        assert "".join(tail) == character * (len("".join(tail)) // len(character))
        left_out = len(character) * 30 - len(head) - len("".join(tail))
        assert f"[... {left_out} characters left out ...]" in shown


def test_a_text_of_nothing_but_accents_is_cut_all_the_same():
    assert len(clip("\u0301" * 10_000, 100)) < 250


def test_max_concurrent_must_be_positive():
    with pytest.raises(ConfigError, match="max_concurrent of tool 'work' must be >= 1 or None"):
        make(len, max_concurrent=0)
