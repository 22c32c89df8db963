"""Tools that an agent can run inside a turn, and the calculator."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import anyio
import anyio.lowlevel
import anyio.to_thread

from gymllm.errors import ConfigError
from gymllm_agents.chat_template import ToolSchema

ToolFunction = Callable[[Mapping[str, object]], str | Awaitable[str]]
"""Takes the arguments by name, already checked against the schema; returns the result's text. A
`ToolError` it raises is told to the model."""

LONGEST_EXPRESSION = 200
LARGEST_BITS = 512
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


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
    """Something the model can call."""

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
    """Longer results are cut, and marked so."""
    _is_async: bool = field(init=False, repr=False)

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
        """Checks the arguments and runs the function. Raises nothing but cancellation."""
        await anyio.lowlevel.checkpoint()
        problem = self._problem(arguments)
        if problem:
            return ToolResult(text=f"Error: {problem}", failed=True)
        text = f"Error: {self.name} took longer than {self.timeout_s} s."
        try:
            with anyio.move_on_after(self.timeout_s) as scope:
                text = await self._run(arguments)
        except ToolError as error:
            return ToolResult(text=f"Error: {error}", failed=True)
        except (
            Exception
        ) as error:  # someone else's code; the model hears of it, the episode goes on
            return ToolResult(text=f"Error: {type(error).__name__}: {error}", failed=True)
        if len(text) > self.max_result_chars:
            cut = len(text) - self.max_result_chars
            text = f"{text[: self.max_result_chars]}\n[{cut} more characters were cut]"
        return ToolResult(text=text, failed=scope.cancelled_caught)

    async def _run(self, arguments: Mapping[str, object]) -> str:
        if self._is_async:
            return await cast(Awaitable[str], self.function(arguments))
        if self.timeout_s is None:
            return cast(str, self.function(arguments))
        return cast(
            str,
            await anyio.to_thread.run_sync(self.function, arguments, abandon_on_cancel=True),
        )

    def _problem(self, arguments: Mapping[str, object]) -> str:
        """What is wrong with the arguments; empty if nothing is. Checks names and top-level types."""
        properties = cast(Mapping[str, Mapping[str, Any]], self.parameters.get("properties", {}))
        required = cast(list[str], self.parameters.get("required", []))
        for name in required:
            if name not in arguments:
                return f"{self.name} needs the argument {name!r}."
        for name, value in arguments.items():
            if name not in properties:
                known = ", ".join(properties) or "none"
                return f"{self.name} has no argument {name!r}; it takes: {known}."
            expected = properties[name].get("type")
            types = _JSON_TYPES.get(expected) if isinstance(expected, str) else None
            wrong_bool = isinstance(value, bool) and expected != "boolean"
            if types is not None and (wrong_bool or not isinstance(value, types)):
                return f"the argument {name!r} of {self.name} must be of type {expected}."
        return ""


def calculate(expression: str) -> str:
    """The value of an arithmetic expression: + - * / // % ** and parentheses on numbers.

    Never evaluates code: the expression is parsed, and only numbers and these operators are walked.
    Whole numbers stay exact up to 512 bits.

    Raises:
        ToolError: Not such an expression, or too large; the message is for the model.
    """
    if len(expression) > LONGEST_EXPRESSION:
        raise ToolError(f"the expression is longer than {LONGEST_EXPRESSION} characters.")
    try:
        tree = ast.parse(expression.strip().replace("×", "*").replace("^", "**"), mode="eval")
        value = _value(tree.body)
    except ZeroDivisionError:
        raise ToolError("division by zero.") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError(f"{expression!r} is not an arithmetic expression.") from None
    except OverflowError:
        raise ToolError("the result is too large.") from None
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    return str(value)


def calculator() -> Tool:
    """The tool "calculator", with one argument "expression"."""
    return Tool(
        name="calculator",
        description="Works out an arithmetic expression.",
        parameters={
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
        function=lambda arguments: calculate(cast(str, arguments["expression"])),
        timeout_s=None,
    )


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=operator, right=right):
            return _bounded(_apply(operator, _value(left), _value(right)))
        case _:
            raise ValueError("not arithmetic")


def _apply(operator: ast.operator, left: int | float, right: int | float) -> int | float:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case ast.FloorDiv():
            return left // right
        case ast.Mod():
            return left % right
        case ast.Pow():
            # Checked before the work is done: 9**9**9 would never end.
            if isinstance(left, int) and left.bit_length() * abs(right) > 2 * LARGEST_BITS:
                raise OverflowError
            power = left**right
            if isinstance(power, complex):
                raise ValueError("a root of a negative number")
            return cast(int | float, power)
        case _:
            raise ValueError("not arithmetic")


def _bounded(number: int | float) -> int | float:
    if isinstance(number, int) and number.bit_length() > LARGEST_BITS:
        raise OverflowError
    if isinstance(number, float) and (number != number or number in (float("inf"), float("-inf"))):
        raise OverflowError
    return number
