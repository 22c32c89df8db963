"""The forms of Qwen models: JSON between tags, and the tags of Qwen3-Coder and Qwen3.5."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import final

from gymllm.message import ToolCall
from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.parsers.argument_types import ArgumentTypes
from gymllm_agents.parsers.hermes import CLOSE, OPEN, read_hermes_call
from gymllm_agents.parsers.json_calls import check_value, tell, unreadable
from gymllm_agents.parsers.markup import Marks, Reader
from gymllm_agents.parsers.said import ParsedReply, Said, UnreadableCall

_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_MARKS = Marks(OPEN, CLOSE, _FUNCTION, _END_FUNCTION, _PARAMETER, _END_PARAMETER)
_EXPECTED = (
    f"{OPEN}{_FUNCTION}<name>>{_PARAMETER}<argument>>\n<value>\n"
    f"{_END_PARAMETER}{_END_FUNCTION}{CLOSE}"
)
_NAME = re.compile(r"([^<>\n]{1,200})>")


@final
class QwenParser:
    """Either of both, in any reply: which of them a model was taught depends on its version.

    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, or
    `<tool_call><function=name><parameter=x>value</parameter></function></tool_call>`, where the value
    stands on lines of its own. Of the latter the outer opening tag may be missing before a function
    that begins a line, since these models at times forget it.
    """

    from_template = True

    def __init__(self, tools: Sequence[ToolSchema] = ()) -> None:
        """Takes the schemas, which tell texts from other values."""
        self._types = ArgumentTypes(tools)

    def parse(self, said: Said) -> ParsedReply:
        """Reads a reply. A function that is not closed can't be read: more might have followed."""
        reader = Reader(said, _MARKS)
        while mark := reader.advance(OPEN, _FUNCTION):
            if mark == OPEN and not reader.at(_FUNCTION):
                reader.calls.append(read_hermes_call(reader))
                continue
            if mark == OPEN:
                reader.until(_FUNCTION)
            elif not self._begins_line(reader):
                reader.keep(mark)
                continue
            reader.calls.append(self._read_function(reader))
        return reader.reply()

    def instructions(self, tools: Sequence[ToolSchema]) -> str:
        """The tools as JSON, one a line, and the form of a call as JSON."""
        form = f'{OPEN}{{"name": <function name>, "arguments": <object of arguments>}}{CLOSE}'
        return tell(tools, f"write {form}")

    def _begins_line(self, reader: Reader) -> bool:
        before = reader.position - len(_FUNCTION)
        return before == 0 or reader.text[before - 1] == "\n"

    def _read_function(self, reader: Reader) -> ToolCall | UnreadableCall:
        name = mark = ""
        arguments = dict[str, object]()
        try:
            name = _read_name(reader)
            while (mark := _next_tag(reader)) == _PARAMETER:
                argument = _read_name(reader)
                value = reader.field(
                    _END_PARAMETER,
                    followed_by=(_PARAMETER, _END_FUNCTION, CLOSE),
                    before=(OPEN, CLOSE),
                )
                value = value.removeprefix("\n").removesuffix("\n")
                arguments[argument] = self._types.value(name, argument, value)
            if not mark:
                raise ValueError(f"lacks its {_END_FUNCTION}")
            check_value(arguments)
            call = ToolCall(name=name, arguments=arguments)
        except ValueError as error:
            call = unreadable(error, _EXPECTED, name=name)
            if mark not in (_END_FUNCTION, CLOSE):
                mark = reader.until(_END_FUNCTION, CLOSE, before=(OPEN,))[1]
        if mark == _END_FUNCTION and reader.at(CLOSE):
            reader.until(CLOSE)
        return call


def _next_tag(reader: Reader) -> str:
    between, mark = reader.until(_PARAMETER, _END_FUNCTION, CLOSE, before=(OPEN, _FUNCTION))
    if between.strip():
        raise ValueError(f"has text outside of {_PARAMETER}...>{_END_PARAMETER}")
    return mark


def _read_name(reader: Reader) -> str:
    found = _NAME.match(reader.text, reader.position)
    if not found or not found[1].strip():
        raise ValueError("has no name where one is due")
    reader.move(found.end())
    return found[1].strip()
