"""The form of Kimi K2: control tokens around an id and JSON arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from gymllm.message import ToolCall
from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.parsers.json_calls import call_named, read_arguments, tell, unreadable
from gymllm_agents.parsers.markup import THINK, Marks, Reader
from gymllm_agents.parsers.said import ParsedReply, Said, UnreadableCall

_SECTION, _END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_OPEN, _CLOSE = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_MARKS = Marks(
    _SECTION, _END_SECTION, _OPEN, _CLOSE, _ARGUMENTS, thoughts={**THINK, "◁think▷": "◁/think▷"}
)
_EXPECTED = f"{_OPEN}functions.<name>:<number>{_ARGUMENTS}<object of arguments>{_CLOSE}"


@final
class KimiParser:
    """`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, in a section.

    What is before the arguments is the call's id, and names the tool.
    """

    from_template = True

    def parse(self, said: Said) -> ParsedReply:
        """Reads a reply. Calls outside of a section are read, too."""
        reader = Reader(said, _MARKS)
        while mark := reader.advance(_SECTION, _OPEN, _END_SECTION):
            if mark == _OPEN:
                reader.calls.append(_read_call(reader))
        return reader.reply()

    def instructions(self, tools: Sequence[ToolSchema]) -> str:
        """The tools as JSON, one a line, and the form of a call."""
        form = (
            f"{_SECTION}{_OPEN}functions.<function name>:<number>{_ARGUMENTS}<object of arguments>"
        )
        return tell(tools, f"write {form}{_CLOSE}{_END_SECTION}, numbering calls from 0,")


def _read_call(reader: Reader) -> ToolCall | UnreadableCall:
    id, mark = reader.until(_ARGUMENTS, before=(_OPEN, _CLOSE, _END_SECTION))
    id = id.strip()
    name, _, number = id.rpartition(":")
    if not number.isdigit():
        name = id
    name = name.removeprefix("functions.")
    if not mark:
        if reader.at(_CLOSE):
            reader.until(_CLOSE)
        return unreadable(f"lacks its {_ARGUMENTS}", _EXPECTED, name=name, id=id)
    try:
        arguments = reader.enclosed(read_arguments, _CLOSE, before=(_OPEN, _END_SECTION))
    except ValueError as error:
        return unreadable(error, _EXPECTED, name=name, id=id)
    return call_named(name, arguments, _EXPECTED, id=id)
