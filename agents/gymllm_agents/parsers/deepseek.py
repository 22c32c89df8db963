"""The forms of DeepSeek models: V3, R1 and V3.1 put control tokens around a name and JSON arguments.

Those of later versions are in `dsml`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import final

from gymllm.message import ToolCall
from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.parsers import dsml
from gymllm_agents.parsers.json_calls import call_named, read_arguments, tell, unreadable
from gymllm_agents.parsers.markup import Marks, Reader
from gymllm_agents.parsers.said import ParsedReply, Said, UnreadableCall

_SECTION, _END_SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_OPEN, _SEPARATOR, _CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_MARKS = Marks(_SECTION, _END_SECTION, _OPEN, _SEPARATOR, _CLOSE, *dsml.MARKS, core=dsml.TOKEN)
_EXPECTED = f"{_OPEN}<name>{_SEPARATOR}<object of arguments>{_CLOSE}"
_FENCED = re.compile(r"\s*+([^\s{]++)\s*+(?:```(?:json)?+)?+")
_END_FENCE = re.compile(r"\s*+```")


@final
class DeepSeekParser:
    """V3.1's `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`, and V3's and R1's, where
    "function" stands for the name, which follows the separator, and the arguments are in a fence; and
    the tags of V3.2 and V4.
    """

    from_template = True

    def parse(self, said: Said) -> ParsedReply:
        """Reads a reply. Calls outside of a section are read, too."""
        reader = Reader(said, _MARKS)
        while mark := reader.advance(_SECTION, _OPEN, _END_SECTION, dsml.INVOKE, *dsml.SECTIONS):
            if mark == _OPEN:
                reader.calls.append(_read_call(reader))
            elif mark == dsml.INVOKE:
                reader.calls.append(dsml.read_invoke(reader))
        return reader.reply()

    def instructions(self, tools: Sequence[ToolSchema]) -> str:
        """The tools as JSON, one a line, and V3.1's form of a call."""
        form = f"{_SECTION}{_OPEN}<function name>{_SEPARATOR}<object of arguments>{_CLOSE}"
        return tell(tools, f"write {form}{_END_SECTION}")


def _read_call(reader: Reader) -> ToolCall | UnreadableCall:
    name, mark = reader.until(_SEPARATOR, before=(_OPEN, _CLOSE, _END_SECTION))
    name = name.strip()
    if not mark:
        if reader.at(_CLOSE):
            reader.until(_CLOSE)
        return unreadable(f"lacks its {_SEPARATOR}", _EXPECTED, name=name)

    def read(text: str) -> tuple[tuple[str, object], int]:
        fenced = _FENCED.match(text)
        if not fenced:
            arguments, end = read_arguments(text)
            return (name, arguments), end
        arguments, length = read_arguments(text[fenced.end() :])
        end = fenced.end() + length
        closed = _END_FENCE.match(text, end)
        return (fenced[1], arguments), closed.end() if closed else end

    try:
        called, arguments = reader.enclosed(read, _CLOSE, before=(_OPEN, _END_SECTION))
    except ValueError as error:
        return unreadable(error, _EXPECTED, name="" if name == "function" else name)
    return call_named(called, arguments, _EXPECTED)
