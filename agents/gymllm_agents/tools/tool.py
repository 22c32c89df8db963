"""A tool: its schema, its limits, and how a call of it is run."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

import anyio
import anyio.lowlevel

from gymllm.clip import clip
from gymllm.errors import ConfigError, SandboxError
from gymllm.tool_calls import argument_problems, name_problems
from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.tools.places import Places, run_in_thread
from gymllm_agents.tools.text import as_error, as_text, without_surrogates

ToolFunction = Callable[[Mapping[str, object]], object]
"""Takes the arguments by name, already checked; returns the result or, if async, an awaitable of it.
A str is told as it is, None as nothing, all else as JSON. A `ToolError` it raises is told to the model."""

ArgumentConverter = Callable[[Mapping[str, object]], Mapping[str, object]]
"""Checks arguments and makes of them what the function takes. A `ToolError` it raises is told."""

MOST_THREADS = 32
"""Threads that a sync tool without `max_concurrent` may have, those that hang included."""


class ToolError(Exception):
    """A tool can't do what was asked; the message is for the model."""


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """What a call gave."""

    text: str
    failed: bool = False
    """The text says what went wrong."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    """Something the model can call. `tool` makes one of a typed function."""

    name: str
    """What the model calls it."""
    description: str
    """What it does, for the model."""
    parameters: ToolSchema
    """JSON schema of the arguments, an object with "properties" and "required"."""
    function: ToolFunction
    """What runs: sync or async."""
    timeout_s: float | None = 10.0
    """Seconds a call may take; a sync function then runs in a thread, which is left behind when time is
    up. None: a sync function that is bounded by itself and quick enough to run on the event loop."""
    max_result_chars: int = 4000
    """Longer results are cut: the head and the tail are kept, and it is said how much is missing."""
    max_concurrent: int | None = None
    """Most calls at once, over all episodes. The others wait their turn, which no timeout counts. A
    thread that was left behind counts until it ends."""
    in_order: bool = False
    """Calls of one reply run one after the other, in their order, together with those of all such tools:
    for tools that change something they share."""
    convert: ArgumentConverter | None = None
    """None: names, types and "enum" are checked against `parameters`, nested objects aside, and the function
    takes the arguments as the model gave them."""
    _is_async: bool = field(init=False, repr=False)
    _places: Places | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        is_async = inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            type(self.function).__call__
        )
        object.__setattr__(self, "_is_async", is_async)
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(
                f"timeout_s of tool {self.name!r} must be > 0 or None, got {self.timeout_s}."
            )
        if self.timeout_s is None and self._is_async:
            raise ConfigError(f"Tool {self.name!r} is async, so it needs a timeout_s.")
        if self.max_result_chars < 1:
            raise ConfigError(
                f"max_result_chars of tool {self.name!r} must be >= 1, got {self.max_result_chars}."
            )
        if self.max_concurrent is not None and self.max_concurrent < 1:
            raise ConfigError(
                f"max_concurrent of tool {self.name!r} must be >= 1 or None, "
                f"got {self.max_concurrent}."
            )
        most = self.max_concurrent
        if self.timeout_s is None:
            most = None  # runs on the event loop, where there is but one at a time
        elif most is None and not is_async:
            most = MOST_THREADS
        object.__setattr__(self, "_places", None if most is None else Places(most))

    @property
    def schema(self) -> ToolSchema:
        """As chat templates list it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}

    async def __call__(self, arguments: Mapping[str, object]) -> ToolResult:
        """Checks the arguments and runs the function. What it raises is told.

        Cancelled or out of time, an async function is cancelled and a sync one's thread left behind.

        Raises:
            SandboxError: Its sandbox could not be had, which is no fault of the model's.
        """
        await anyio.lowlevel.checkpoint()
        try:
            text, failed = await self._told(arguments), False
        except ToolError as error:
            text, failed = f"Error: {error}", True
        # Someone else's code; the model hears of it, the episode goes on. The loop turns Ctrl-C into
        # cancellation, so that a KeyboardInterrupt here is the function's own.
        except (anyio.get_cancelled_exc_class(), GeneratorExit, SandboxError):
            raise
        except BaseException as error:
            text, failed = f"Error: {as_error(error)}", True
        return ToolResult(text=clip(without_surrogates(text), self.max_result_chars), failed=failed)

    async def _told(self, arguments: Mapping[str, object]) -> str:
        converted = self._checked(arguments) if self.convert is None else self.convert(arguments)
        if self.timeout_s is None:
            return as_text(await _finished(self.function(converted)))
        if self._places is not None and not await self._places.take():
            raise ToolError(
                f"{self.name} can't run: all threads it may have ({self._places.total}) hang in "
                "earlier calls."
            )
        with anyio.move_on_after(self.timeout_s):
            return await self._run(converted)
        raise ToolError(f"{self.name} took longer than {self.timeout_s:g} s.")

    async def _run(self, arguments: Mapping[str, object]) -> str:
        """Runs the function and gives its place back."""
        if not self._is_async:
            assert self._places is not None
            work = _Work(self.function, arguments)
            return as_text(
                await _finished(await run_in_thread(work, self._places, name=f"tool {self.name}"))
            )
        try:
            return as_text(await cast(Awaitable[object], self.function(arguments)))
        finally:
            if self._places is not None:
                self._places.leave()

    def _checked(self, arguments: Mapping[str, object]) -> Mapping[str, object]:
        """The arguments, if they are what the schema asks for."""
        problems = argument_problems(self.name, self.parameters, arguments)
        if problems:
            raise ToolError(problems)
        return arguments


def check_names(tool: str, parameters: ToolSchema, arguments: Mapping[str, object]) -> None:
    """Checks that the required arguments are there and no unknown ones.

    Raises:
        ToolError: They are not.
    """
    if problems := name_problems(tool, parameters, arguments):
        raise ToolError(" ".join(problems))


class _Work:
    """What a tool's thread does: the call, and the text of its result while it is at it."""

    def __init__(self, function: ToolFunction, arguments: Mapping[str, object]) -> None:
        self._function, self._arguments = function, arguments

    def __call__(self) -> object:
        try:
            value = self._function(self._arguments)
            return value if inspect.isawaitable(value) else as_text(value)
        except Exception:
            raise
        except BaseException as error:  # a CancelledError would look like our own cancellation
            raise ToolError(as_error(error)) from error


async def _finished(value: object) -> object:
    """Awaits what a sync function returned, where it is the awaitable of an async one."""
    return await cast(Awaitable[object], value) if inspect.isawaitable(value) else value
