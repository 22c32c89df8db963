"""The forms of Mistral models: a list of calls, or from Tekken v11 on a name and its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import final

from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.parsers.json_calls import (
    call_named,
    calls_in,
    read_arguments,
    tell,
    unreadable,
)
from gymllm_agents.parsers.markup import THINK, Marks, Reader
from gymllm_agents.parsers.said import ParsedReply, Said

_OPEN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MARKS = Marks(_OPEN, _ID, _ARGUMENTS, thoughts={**THINK, "[THINK]": "[/THINK]"})
_EXPECTED = f"{_OPEN}<name>{_ARGUMENTS}<object of arguments>"
_EXPECTED_LIST = f'{_OPEN}[{{"name": <name>, "arguments": <object>}}]'
_NAME = re.compile(r"\s*+([^\s{\[]*+)")


@final
class MistralParser:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}]`, or as often as there are calls
    `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`, where the id may be left out. Text may follow either.
    """

    from_template = True

    def parse(self, said: Said) -> ParsedReply:
        """Reads a reply."""
        reader = Reader(said, _MARKS)
        while reader.advance(_OPEN):
            start = reader.ahead(_OPEN, _ID, _ARGUMENTS)
            if start.lstrip().startswith(("[", "{")):
                _read_list(reader)
            else:
                _read_call(reader)
        return reader.reply()

    def instructions(self, tools: Sequence[ToolSchema]) -> str:
        """The tools as JSON, one a line, and the newer form of a call."""
        return tell(tools, f"write {_OPEN}<function name>{_ARGUMENTS}<object of arguments>")


def _read_list(reader: Reader) -> None:
    text, start = reader.ahead(_OPEN), reader.position
    calls, rest = calls_in(text, _EXPECTED_LIST)
    if not calls:
        calls, rest = [unreadable("is no list of calls", _EXPECTED_LIST)], ""
    reader.calls += calls
    reader.move(start + len(text) - len(rest))


def _read_call(reader: Reader) -> None:
    found = _NAME.match(reader.text, reader.position)
    name = found[1] if found else ""
    reader.move(found.end() if found else reader.position)
    id = ""
    if reader.at(_ID):
        reader.until(_ID)
        id = reader.until(_ARGUMENTS, before=(_OPEN,))[0].strip()
    elif reader.at(_ARGUMENTS):  # some templates write neither
        reader.until(_ARGUMENTS)
    text, start = reader.ahead(_OPEN), reader.position
    try:
        arguments, end = read_arguments(text)
        reader.calls.append(call_named(name, arguments, _EXPECTED, id=id))
    except ValueError as error:
        reader.calls.append(unreadable(error, _EXPECTED, name=name, id=id))
        end = len(text)
    reader.move(start + end)
