"""Calls of tools as an environment's action: how they are written, read and checked.

An environment that offers tools (`Env.tools`) gets each call in one form, whatever form the model's family
has; agents translate. `write_calls` and `read_calls` are that form, `check_call` compares a call with the
tools' schemas.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from gymllm.json_text import read_json
from gymllm.message import ToolCall

ToolSchema = Mapping[str, object]
"""A tool as chat templates list it: "type" is "function"; "function" has name, description, parameters."""

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FORM = f'{OPEN}{{"name": <tool>, "arguments": <object>}}{CLOSE}'
"""How a call is written, for instructions and errors."""

MOST_CALLS = 1000
"""Of one text; a model that writes more has lost its way."""
MOST_PROBLEMS = 8
LONGEST_VALUE = 80

_OPENS = re.compile(r"<tool_call>\s*+(?:```\w*\s)?+")
_CLOSES = re.compile(r"\s*+(?:```\s*+)?+(?:</tool_call>|\Z|(?=<tool_call>))")
_FENCE_BEFORE = re.compile(r"(?:^|\n)[ \t]*```\w*[ \t]*\n?\Z")
_FENCE_AFTER = re.compile(r"\A\s*```[ \t]*(?:\n|\Z)")
_JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (Mapping,),
    "null": (type(None),),
}


@dataclass(frozen=True, kw_only=True)
class ToolCalls:
    """What a text holds of calls."""

    calls: tuple[ToolCall, ...] = ()
    """In the order written, their arguments not yet checked."""
    text: str = ""
    """What is outside of calls, without blanks around it."""
    errors: tuple[str, ...] = ()
    """What could not be read and why, in sentences for whoever wrote it."""


def write_calls(calls: Sequence[ToolCall]) -> str:
    """Calls as an action; `read_calls` reads them back, but for their ids."""
    return "\n".join(f"{OPEN}\n{_as_json(call)}\n{CLOSE}" for call in calls)


def read_calls(text: str) -> ToolCalls:
    """Reads the calls in an action.

    Code fences around a call, or around its JSON, are let pass, and so is a missing end tag before the next
    call or the end of the text. A tag inside of an argument is part of that argument. Nothing is read
    behind what can't be read: it might be the rest of an argument.
    """
    calls: list[ToolCall] = []
    outside: list[str] = []
    errors: list[str] = []
    position, fenced = 0, False
    while opened := _OPENS.search(text, position):
        if len(calls) == MOST_CALLS:
            errors.append(f"There are more than {MOST_CALLS} calls; the rest was not read.")
            break
        before = text[position : opened.start()]
        fenced, before = _without_fence(before, fenced)
        outside.append(before)
        position = opened.end()
        try:
            call, position = _read_call(text, position)
        except ValueError as error:
            which = f"Tool call {len(calls) + 1}"
            errors.append(f"{which} {error}; expected {FORM}.")
            if text.find(OPEN, opened.end()) >= 0:
                errors.append("What follows it was not read.")
            break
        calls.append(call)
    else:
        rest = text[position:]
        outside.append(_FENCE_AFTER.sub("", rest, count=1) if fenced else rest)
    said = "\n".join(filter(None, (part.strip() for part in outside)))
    return ToolCalls(calls=tuple(calls), text=said, errors=tuple(errors))


def check_call(tools: Sequence[ToolSchema], call: ToolCall) -> str:
    """What is wrong with a call, in sentences for the model; empty where nothing is.

    Looked at are the tool's name and, by its schema, the arguments' names and types, "enum", and the same
    of what a list holds.
    """
    by_name = {tool_name(tool): tool for tool in tools}
    tool = by_name.get(call.name)
    if tool is None:
        known = ", ".join(by_name) or "none"
        return (
            f"there is no tool {_named(call.name)}; there is: {known}."
            f"{did_you_mean(call.name, by_name)}"
        )
    function = cast("Mapping[str, object]", tool["function"])
    parameters = cast("Mapping[str, object]", function.get("parameters") or {})
    return argument_problems(call.name, parameters, call.arguments)


def tools_problem(tools: object) -> str:
    """What is wrong with an environment's tools, in a sentence; empty where nothing is.

    They are schemas of functions that JSON has, with names of their own. No tools are fine; a description
    and parameters may be left out.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        return f"tools must be a sequence of schemas, got {shown_value(tools)}."
    names: set[str] = set()
    for tool in cast("Sequence[object]", tools):
        function = _mapping(_mapping(tool).get("function"))
        name, parameters = function.get("name"), function.get("parameters", {})
        if not (isinstance(name, str) and name and isinstance(parameters, Mapping)):
            return (
                'an environment\'s tools must be {"type": "function", "function": {"name", '
                f'"description", "parameters"}}}}, got {shown_value(tool)}.'
            )
        if name in names:
            return f"an environment's tools must have names of their own, but two are {name!r}."
        names.add(name)
    try:
        json.dumps(tools, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return f"an environment's tools must be what JSON has, but {error}."
    return ""


def argument_problems(
    tool: str, parameters: Mapping[str, object], arguments: Mapping[str, object]
) -> str:
    """What is wrong with a call's arguments, one sentence each; empty where nothing is.

    Args:
        tool: The tool's name.
        parameters: JSON schema of the arguments, with "properties" and "required".
        arguments: By name.
    """
    properties = cast("Mapping[str, object]", parameters.get("properties", {}))
    problems = name_problems(tool, parameters, arguments)
    for name, value in arguments.items():
        schema = properties.get(name)
        if isinstance(schema, Mapping):
            expected = cast("Mapping[str, object]", schema)
            problem = _value_problem(f"the argument {name!r} of {tool}", expected, value)
            problems += [problem] if problem else []
    shown = problems[:MOST_PROBLEMS]
    if len(problems) > MOST_PROBLEMS:
        shown.append(f"{len(problems) - MOST_PROBLEMS} more problems.")
    return " ".join(shown)


def name_problems(
    tool: str, parameters: Mapping[str, object], arguments: Mapping[str, object]
) -> list[str]:
    """Which required arguments are missing and which are unknown, a sentence each."""
    properties = cast("Mapping[str, object]", parameters.get("properties", {}))
    required = cast("Sequence[str]", parameters.get("required", ()))
    problems = [
        f"{tool} needs the argument {name!r}." for name in required if name not in arguments
    ]
    if not (parameters.get("additionalProperties") or parameters.get("patternProperties")):
        unknown = [name for name in arguments if name not in properties]
        problems += [unknown_argument(tool, name, list(properties)) for name in unknown]
    return problems


def unknown_argument(tool: str, name: str, known: Sequence[str]) -> str:
    """Tells the model that a tool has no such argument."""
    takes = ", ".join(known) or "none"
    return f"{tool} has no argument {_named(name)}; it takes: {takes}.{did_you_mean(name, known)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ " Did you mean 'x'?", with a blank before it; empty where nothing is close."""
    close = difflib.get_close_matches(name[:LONGEST_VALUE], list(known), n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def shown_value(value: object) -> str:
    """A value in a sentence, as JSON where it has that form, cut where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def tool_name(tool: ToolSchema) -> str:
    """The name that a tool's schema gives it."""
    return str(cast("Mapping[str, object]", tool["function"])["name"])


def _mapping(value: object) -> Mapping[str, object]:
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else {}


def _named(name: str) -> str:
    return repr(name if len(name) <= LONGEST_VALUE else f"{name[:LONGEST_VALUE]}...")


def _as_json(call: ToolCall) -> str:
    made = {"name": call.name, "arguments": dict(call.arguments)}
    text = json.dumps(made, ensure_ascii=False)
    try:
        text.encode()
    except (
        UnicodeEncodeError
    ):  # half a character: the text stays one, and its reader refuses the call
        return json.dumps(made)
    return text


def _read_call(text: str, start: int) -> tuple[ToolCall, int]:
    """The call whose opening tag ends at `start`, and where it ends itself.

    Raises:
        ValueError: It is none; the rest of a sentence that says so.
    """
    try:
        value, end = read_json(text, start)
    except ValueError as error:
        if CLOSE not in text[start:]:
            raise ValueError(f"{error}, and it has no {CLOSE}: was it cut off?") from None
        raise
    closed = _CLOSES.match(text, end)
    if closed is None:
        raise ValueError(f"has something else behind its JSON ({shown_value(text[end:].strip())})")
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    call = cast("dict[str, object]", value)
    name = call.get("name")
    if not isinstance(name, str) or not name.strip():
        raise ValueError('has no "name"')
    key = "parameters" if "parameters" in call and "arguments" not in call else "arguments"
    arguments = call.get(key)
    if not isinstance(arguments, dict | None):
        raise ValueError(f'must have a JSON object as its "{key}", not {shown_value(arguments)}')
    given = cast("dict[str, object]", arguments or {})
    return ToolCall(name=name.strip(), arguments=given), closed.end()


def _without_fence(before: str, fenced: bool) -> tuple[bool, str]:
    """The text before a call without the fence around calls, and whether one is open then."""
    if fenced:
        closed = _FENCE_AFTER.search(before)
        if closed is None:
            return not before.strip(), before
        before = before[closed.end() :]
    opened = _FENCE_BEFORE.search(before)
    return (False, before) if opened is None else (True, before[: opened.start()])


def _value_problem(what: str, schema: Mapping[str, object], value: object) -> str:
    types = schema.get("type")
    named = [types] if isinstance(types, str) else types
    if isinstance(named, list):
        names = [name for name in cast("list[object]", named) if isinstance(name, str)]
        if names and not any(_is_of(value, name) for name in names):
            return f"{what} must be of type {' or '.join(names)}, got {shown_value(value)}."
    allowed = schema.get("enum")
    if isinstance(allowed, list) and value not in cast("list[object]", allowed):
        listed = ", ".join(map(shown_value, cast("list[object]", allowed)))
        return f"{what} must be one of {listed}, got {shown_value(value)}."
    items = schema.get("items")
    if isinstance(items, Mapping) and isinstance(value, list):
        expected = cast("Mapping[str, object]", items)
        for index, item in enumerate(cast("list[object]", value)):
            if problem := _value_problem(f"item {index} of {what}", expected, item):
                return problem
    return ""


def _is_of(value: object, name: str) -> bool:
    if name not in _JSON_TYPES:
        return True
    if isinstance(value, bool):  # an int to Python
        return name == "boolean"
    return isinstance(value, _JSON_TYPES[name])
