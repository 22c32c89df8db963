"""How a model writes that it calls a tool, and how that is read.

A parser never raises: what it can't read becomes an `UnreadableCall`, which is told to the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast, final

from gymllm.errors import ConfigError
from gymllm.message import ToolCall
from gymllm_agents.chat_template import ToolSchema


@dataclass(frozen=True, kw_only=True)
class UnreadableCall:
    """A call that could not be read."""

    problem: str
    """One sentence for the model."""


@dataclass(frozen=True, kw_only=True)
class ParsedReply:
    """What is in a reply."""

    text: str
    """What is outside of calls, without blanks around it."""
    calls: tuple[ToolCall | UnreadableCall, ...] = ()
    """In the order written."""


class ToolCallParser(Protocol):
    """One form of tool calls."""

    from_template: bool
    """Whether a chat template that lists tools teaches this form; else `instructions` always does."""

    def parse(self, text: str) -> ParsedReply:
        """Reads a reply. Never raises; takes time linear in the text."""
        ...

    def instructions(self, tools: Sequence[ToolSchema]) -> str:
        """Tells the model of the tools and the form, for templates that don't."""
        ...


@final
class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen models write it."""

    from_template = True
    OPEN = "<tool_call>"
    CLOSE = "</tool_call>"

    def parse(self, text: str) -> ParsedReply:
        """Reads a reply. A call that is not closed ends where the reply does."""
        outside, *rest = text.split(self.OPEN)
        kept, calls = [outside], list[ToolCall | UnreadableCall]()
        for part in rest:
            inside, closed, after = part.partition(self.CLOSE)
            call = _read_call(inside)
            # A call that is whole but for its closing tag has said all there is to say.
            if isinstance(call, UnreadableCall) and not closed:
                call = UnreadableCall(problem=f"{call.problem} {self.CLOSE} is missing.")
            calls.append(call)
            kept.append(after)
        return ParsedReply(text="".join(kept).strip(), calls=tuple(calls))

    def instructions(self, tools: Sequence[ToolSchema]) -> str:
        """The tools as JSON, one a line, and the form of a call."""
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return (
            f"You may call these functions:\n{listed}\n"
            f'To call one, write {self.OPEN}{{"name": <function name>, "arguments": <object of '
            f"arguments>}}{self.CLOSE} and wait for its result."
        )


@final
class PlainParser:
    """`calculator(12 * 7)` on a line of its own: a fifth of the tokens of a JSON call, for small models.

    What is between the parentheses is the tool's one argument, as it stands. A line that begins in another
    way is text, so an unknown name is no call.
    """

    from_template = False

    def __init__(self, tools: Sequence[ToolSchema]) -> None:
        """Takes the schemas of the tools that can be called.

        Raises:
            ConfigError: A tool has not just one argument, a text.
        """
        self._arguments = dict(_only_argument(tool) for tool in tools)

    def parse(self, text: str) -> ParsedReply:
        """Reads a reply, line by line."""
        kept, calls = list[str](), list[ToolCall | UnreadableCall]()
        for line in text.split("\n"):
            name, opened, rest = line.strip().partition("(")
            if not opened or name not in self._arguments:
                kept.append(line)
            elif rest.endswith(")"):
                calls.append(ToolCall(name=name, arguments={self._arguments[name]: rest[:-1]}))
            else:
                problem = f"The line of a call of {name} must end with a closing parenthesis."
                calls.append(UnreadableCall(problem=problem))
        return ParsedReply(text="\n".join(kept).strip(), calls=tuple(calls))

    def instructions(self, tools: Sequence[ToolSchema]) -> str:
        """How each tool is called, and what it does, one a line."""
        described = [cast(Mapping[str, str], tool["function"]) for tool in tools]
        lines = [
            f"{f['name']}({self._arguments[f['name']]}): {f['description']}" for f in described
        ]
        listed = "\n".join(lines)
        return f"You may call these functions, each on a line of its own:\n{listed}"


def _only_argument(tool: ToolSchema) -> tuple[str, str]:
    """A tool's name and that of its one argument."""
    function = cast(Mapping[str, object], tool["function"])
    parameters = cast(Mapping[str, object], function["parameters"])
    properties = cast(Mapping[str, Mapping[str, object]], parameters.get("properties", {}))
    name = cast(str, function["name"])
    if len(properties) != 1 or next(iter(properties.values())).get("type") != "string":
        arguments = ", ".join(properties) or "none"
        raise ConfigError(
            f"The plain form of tool calls is for tools with one argument, of type string; {name!r} "
            f"has: {arguments}. Use the Hermes form."
        )
    return name, next(iter(properties))


def _read_call(text: str) -> ToolCall | UnreadableCall:
    """The call in a JSON text."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = str(error) if isinstance(error, ValueError) else "nested too deep"
        return UnreadableCall(problem=f"The tool call is not JSON ({problem[:100]}).")
    if not isinstance(value, dict):
        return UnreadableCall(problem="The tool call must be a JSON object.")
    call = cast(dict[str, object], value)
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str):
        return UnreadableCall(problem='The tool call has no "name".')
    if not isinstance(arguments, dict):
        return UnreadableCall(problem='The "arguments" of a tool call must be a JSON object.')
    return ToolCall(name=name, arguments=cast(dict[str, object], arguments))
