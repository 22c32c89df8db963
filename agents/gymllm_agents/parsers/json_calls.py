"""Calls from JSON texts, and the sentences that say why one can't be read."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from typing import cast

from gymllm.json_text import MAX_DEPTH as MAX_DEPTH
from gymllm.json_text import check_value as check_value
from gymllm.json_text import read_json as read_json
from gymllm.message import ToolCall
from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.parsers.said import UnreadableCall

_OBJECTS = re.compile(r"[\s;]*+(?=[\[{])")
_CALL_BEGINS = re.compile(r'[\s\[]*+\{\s*+"name"\s*+:')


def unreadable(why: object, expected: str, *, name: str = "", id: str = "") -> UnreadableCall:
    """Says what was wrong with a call ("is not JSON") and what is expected."""
    return UnreadableCall(problem=f"The tool call {why}; expected {expected}.", name=name, id=id)


def call_of(value: object, expected: str) -> ToolCall | UnreadableCall:
    """The call in `{"name": ..., "arguments": {...}}`; "parameters" will do, and an "id" is kept."""
    if not isinstance(value, dict):
        return unreadable("must be a JSON object", expected)
    call = cast(dict[str, object], value)
    name, id = call.get("name"), call.get("id")
    id = id if isinstance(id, str) else ""
    if not isinstance(name, str) or not name.strip():
        return unreadable('has no "name"', expected, id=id)
    key = "parameters" if "parameters" in call and "arguments" not in call else "arguments"
    return call_named(name, call.get(key), expected, id=id, key=f'the "{key}" of')


def call_named(
    name: str, arguments: object, expected: str, *, id: str = "", key: str = "the arguments of"
) -> ToolCall | UnreadableCall:
    """A call whose name stands outside of the JSON. No arguments are none."""
    name = name.strip()
    if not name:
        return unreadable("has no name", expected, id=id)
    if isinstance(arguments, str):  # an object, encoded twice
        with contextlib.suppress(ValueError):
            arguments = whole_json(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        problem = (
            f"{key[0].upper()}{key[1:]} a tool call must be a JSON object; expected {expected}."
        )
        return UnreadableCall(problem=problem, name=name, id=id)
    return ToolCall(name=name, arguments=cast(dict[str, object], arguments), id=id)


def whole_json(text: str) -> object:
    """The JSON value that is all of a text; None where that is blank.

    Raises:
        ValueError: There is another thing in it.
    """
    if not text.strip():
        return None
    value, end = read_json(text)
    if text[end:].strip():
        raise ValueError("is not JSON (more follows its end)")
    return value


def read_arguments(text: str) -> tuple[object, int]:
    """`read_json` for arguments: nothing at all is none."""
    return (None, len(text)) if not text.strip() else read_json(text)


def is_call(value: object) -> bool:
    """Whether a JSON value is meant as a call, or is a list of such."""
    if isinstance(value, list):
        items = cast(list[object], value)
        return bool(items) and all(
            isinstance(item, dict) and is_call(cast(object, item)) for item in items
        )
    if not isinstance(value, dict):
        return False
    call = cast(dict[str, object], value)
    return isinstance(call.get("name"), str) and ("arguments" in call or "parameters" in call)


def begins_call(text: str) -> bool:
    """Whether a text that may not be JSON is meant as a call."""
    return _CALL_BEGINS.match(text) is not None


def calls_in(text: str, expected: str) -> tuple[list[ToolCall | UnreadableCall], str]:
    """The calls that a text begins with: one, a list, or several with ";" or blanks between them.

    Returns:
        The calls, and the text behind them. No calls and all of the text where it is not meant as calls.
    """
    calls, position = list[ToolCall | UnreadableCall](), 0
    while _OBJECTS.match(text, position):
        try:
            value, position = read_json(text, position)
        except ValueError as error:
            if not calls and not begins_call(text):
                return [], text
            return [*calls, unreadable(error, expected)], ""
        if not calls and not is_call(value):
            return [], text
        items = cast(list[object], value) if isinstance(value, list) else [value]
        calls += [call_of(item, expected) for item in items]
    return calls, text[position:].lstrip().removeprefix(";")


def tell(tools: Sequence[ToolSchema], form: str) -> str:
    """Instructions: the tools as JSON, one a line, and how one is called ("write ...")."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return f"You may call these functions:\n{listed}\nTo call one, {form} and wait for its result."
