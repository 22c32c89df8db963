"""The forms of Llama 3.1 and later: JSON as the whole reply, or a function's tag."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import final

from gymllm.message import ToolCall
from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.parsers.json_calls import (
    call_named,
    calls_in,
    read_arguments,
    tell,
    unreadable,
)
from gymllm_agents.parsers.markup import Marks, Reader
from gymllm_agents.parsers.python_calls import read_python_calls
from gymllm_agents.parsers.said import ParsedReply, Said, UnreadableCall

_PYTHON, _FUNCTION, _END_FUNCTION = "<|python_tag|>", "<function=", "</function>"
_MARKS = Marks(_PYTHON, _FUNCTION, _END_FUNCTION)
_EXPECTED = '{"name": <name>, "parameters": <object>} and nothing else'
_EXPECTED_TAG = f"{_FUNCTION}<name>><object of arguments>{_END_FUNCTION}"
_NAME = re.compile(r"([^<>\n{]{1,200})>")
_BUILT_IN = re.compile(r"\s*+[^\W\d]\w*+\.call\(")


@final
class LlamaParser:
    """`{"name": ..., "parameters": {...}}` as the whole reply, several with ";" between them, with
    `<|python_tag|>` before them or not; or `<function=name>{...}</function>`. Built-in tools are called
    as `<|python_tag|>name.call(query="...")`.
    """

    from_template = True

    def parse(self, said: Said) -> ParsedReply:
        """Reads a reply. An object that is no call is text."""
        reader = Reader(said, _MARKS)
        while mark := reader.advance(_PYTHON, _FUNCTION):
            if mark == _PYTHON:
                text, _ = reader.until(before=(_PYTHON, _FUNCTION))
                reader.calls += _after_tag(text)
            else:
                reader.calls.append(_read_function(reader))
        if not reader.calls:
            calls, rest = calls_in(reader.take_text(), _EXPECTED)
            reader.calls += calls
            reader.keep(rest)
        return reader.reply()

    def instructions(self, tools: Sequence[ToolSchema]) -> str:
        """The tools as JSON, one a line, and the form of a call."""
        form = '{"name": <function name>, "parameters": <object of arguments>}'
        return tell(tools, f"reply with {form} and nothing else,")


def _after_tag(text: str) -> list[ToolCall | UnreadableCall]:
    if _BUILT_IN.match(text):
        try:
            calls, end = read_python_calls(text, lambda _: ())
        except ValueError as error:
            return [unreadable(error, _EXPECTED)]
        if not text[end:].strip():
            return [
                ToolCall(name=call.name.removesuffix(".call"), arguments=call.arguments)
                for call in calls
            ]
    calls, rest = calls_in(text, _EXPECTED)
    if not calls or rest.strip():
        calls = [*calls, unreadable(f"has something else than calls after {_PYTHON}", _EXPECTED)]
    return calls


def _read_function(reader: Reader) -> ToolCall | UnreadableCall:
    name = ""
    try:
        found = _NAME.match(reader.text, reader.position)
        if not found:
            reader.until(_END_FUNCTION, before=(_FUNCTION, _PYTHON))
            raise ValueError("has no name")
        name = found[1].strip()
        reader.move(found.end())
        arguments = reader.enclosed(read_arguments, _END_FUNCTION, before=(_FUNCTION, _PYTHON))
    except ValueError as error:
        return unreadable(error, _EXPECTED_TAG, name=name)
    return call_named(name, arguments, _EXPECTED_TAG)
