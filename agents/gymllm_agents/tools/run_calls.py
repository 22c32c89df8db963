"""Runs the calls of one reply at the same time."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import anyio
import anyio.lowlevel

from gymllm.clip import clip
from gymllm.errors import SandboxError
from gymllm.message import ToolCall
from gymllm.timeline import Timeline
from gymllm.tool_calls import did_you_mean
from gymllm_agents.parsers.said import UnreadableCall
from gymllm_agents.tools.text import without_surrogates
from gymllm_agents.tools.tool import Tool, ToolResult

LONGEST_NAME = 100


async def run_calls(
    tools: Mapping[str, Tool],
    calls: Sequence[ToolCall | UnreadableCall],
    *,
    timeline: Timeline | None = None,
    track: str = "tools",
) -> tuple[ToolResult, ...]:
    """Runs calls concurrently, but those of `in_order` tools one after the other. Cancellation ends all.

    Args:
        tools: By name.
        calls: As a parser read them.
        timeline: Gets a span for each call.
        track: The spans' track. Those of the second call and the next, which may overlap with it, are
            on tracks of their own.

    Returns:
        A result for each call, in the order of the calls.

    Raises:
        SandboxError: A tool's sandbox could not be had; the other calls are cancelled.
    """
    await anyio.lowlevel.checkpoint()
    # An async function may be cancelled by its own code, which ends nothing but its task.
    cancelled = ToolResult(text="Error: the call was cancelled.", failed=True)
    results = [cancelled] * len(calls)

    broken: list[SandboxError] = []

    async def run(*indices: int) -> None:
        for index in indices:
            call = calls[index]
            on = track if index == 0 else f"{track} +{index}"
            name = clip(call.name, LONGEST_NAME) or "unreadable"
            with contextlib.nullcontext() if timeline is None else timeline.span(on, name):
                try:
                    results[index] = await _run_call(tools, call)
                except SandboxError as error:  # raised below: nobody looks for it in a group
                    broken.append(error)
                    group.cancel_scope.cancel()

    in_order = [
        k for k, call in enumerate(calls) if call.name in tools and tools[call.name].in_order
    ]
    async with anyio.create_task_group() as group:
        if in_order:
            group.start_soon(run, *in_order, name=f"{track}: calls in order")
        for index, call in enumerate(calls):
            if index not in in_order:
                group.start_soon(run, index, name=f"{track}: {call.name or 'unreadable call'}")
    if broken:
        raise broken[0]
    return tuple(results)


async def _run_call(tools: Mapping[str, Tool], call: ToolCall | UnreadableCall) -> ToolResult:
    if isinstance(call, ToolCall) and call.name in tools:
        return await tools[call.name](call.arguments)
    await anyio.lowlevel.checkpoint()
    if isinstance(call, UnreadableCall):
        return ToolResult(text=without_surrogates(f"Error: {call.problem}"), failed=True)
    name = without_surrogates(clip(call.name, LONGEST_NAME))
    known = ", ".join(tools) or "none"
    hint = did_you_mean(name, tools)
    return ToolResult(
        text=f"Error: there is no tool {name!r}; there is: {known}.{hint}", failed=True
    )
