"""The calls of one reply run at the same time and are answered in their order."""

from __future__ import annotations

import anyio
import pytest

from gymllm.message import ToolCall
from gymllm.timeline import Timeline
from gymllm_agents import Tool, ToolError, run_calls, tool
from gymllm_agents.parsers.said import UnreadableCall


def named(*tools: Tool) -> dict[str, Tool]:
    return {made.name: made for made in tools}


def call(name: str, **arguments: object) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


@pytest.mark.asyncio
async def test_calls_run_at_the_same_time_and_answer_in_order():
    second_ran = anyio.Event()

    @tool
    async def first() -> str:
        await second_ran.wait()
        return "first"

    @tool
    async def second() -> str:
        second_ran.set()
        await anyio.lowlevel.checkpoint()
        return "second"

    timeline = Timeline()
    results = await run_calls(
        named(first, second), [call("first"), call("second")], timeline=timeline, track="episode"
    )
    assert [result.text for result in results] == ["first", "second"]
    spans = [(span.track, span.name) for span in timeline.spans()]
    assert sorted(spans) == [("episode", "first"), ("episode +1", "second")]


@pytest.mark.asyncio
async def test_what_cannot_be_run_is_told():
    @tool
    def search(query: str) -> str:
        return query

    @tool
    def read(path: str) -> str:
        raise SystemExit

    results = await run_calls(
        named(search, read),
        [
            call("serach", query="a"),
            UnreadableCall(problem="the call is not JSON."),
            call("search", query="found"),
            call("x" * 1000),
            call("read", path="a"),
        ],
    )
    assert [result.failed for result in results] == [True, True, False, True, True]
    assert results[0].text == (
        "Error: there is no tool 'serach'; there is: search, read. Did you mean 'search'?"
    )
    assert results[1].text == "Error: the call is not JSON."
    assert results[2].text == "found"
    assert len(results[3].text) < 250
    assert results[4].text == "Error: SystemExit"
    assert (await run_calls({}, [call("a")]))[
        0
    ].text == "Error: there is no tool 'a'; there is: none."
    assert await run_calls({}, []) == ()


@pytest.mark.asyncio
async def test_cancellation_ends_every_call():
    begun, ended = [anyio.Event(), anyio.Event()], list[int]()

    @tool
    async def hang(index: int) -> None:
        begun[index].set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(index)

    async with anyio.create_task_group() as group:
        group.start_soon(run_calls, named(hang), [call("hang", index=0), call("hang", index=1)])
        for event in begun:
            await event.wait()
        group.cancel_scope.cancel()
    assert sorted(ended) == [0, 1]


@pytest.mark.asyncio
async def test_whatever_a_tool_raises_its_call_has_a_result():
    @tool
    async def exits() -> str:
        await anyio.lowlevel.checkpoint()
        raise BaseExceptionGroup("tasks", [SystemExit(2)])

    @tool
    async def cancels() -> str:
        await anyio.lowlevel.checkpoint()
        raise anyio.get_cancelled_exc_class()

    @tool
    async def halves() -> str:
        await anyio.lowlevel.checkpoint()
        raise ToolError("half \ud83c")

    calls = [call("exits"), call("cancels"), call("halves"), call("\ud83c")]
    results = await run_calls(named(exits, cancels, halves), calls)
    assert [result.failed for result in results] == [True] * 4
    assert all(result.text.encode() for result in results)
    assert results[0].text == "Error: BaseExceptionGroup: tasks (1 sub-exception)"
    assert results[1].text == "Error: the call was cancelled."
    assert results[2].text == "Error: half \ufffd"
