"""The form of GLM-4.5 and later: keys and values between tags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from gymllm.message import ToolCall
from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.parsers.argument_types import ArgumentTypes
from gymllm_agents.parsers.json_calls import check_value, tell, unreadable
from gymllm_agents.parsers.markup import Marks, Reader
from gymllm_agents.parsers.said import ParsedReply, Said, UnreadableCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _END_KEY = "<arg_key>", "</arg_key>"
_VALUE, _END_VALUE = "<arg_value>", "</arg_value>"
_MARKS = Marks(_OPEN, _CLOSE, _KEY, _END_KEY, _VALUE, _END_VALUE)
_EXPECTED = f"{_OPEN}<name>\n{_KEY}<argument>{_END_KEY}\n{_VALUE}<value>{_END_VALUE}\n{_CLOSE}"


@final
class GlmParser:
    """`<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>`, blanks between or not."""

    from_template = True

    def __init__(self, tools: Sequence[ToolSchema] = ()) -> None:
        """Takes the schemas, which tell texts from other values."""
        self._types = ArgumentTypes(tools)

    def parse(self, said: Said) -> ParsedReply:
        """Reads a reply. A call that is not closed can't be read: more might have followed."""
        reader = Reader(said, _MARKS)
        while reader.advance(_OPEN):
            reader.calls.append(self._read_call(reader))
        return reader.reply()

    def instructions(self, tools: Sequence[ToolSchema]) -> str:
        """The tools as JSON, one a line, and the form of a call."""
        return tell(
            tools,
            f"write {_OPEN}<function name>, then for each argument {_KEY}<its name>{_END_KEY}{_VALUE}<its "
            f"value, JSON if it is no text>{_END_VALUE}, then {_CLOSE}",
        )

    def _read_call(self, reader: Reader) -> ToolCall | UnreadableCall:
        name, mark, arguments, before = "", "", dict[str, object](), (_OPEN, _CLOSE)
        try:
            between, mark = reader.until(_KEY, _CLOSE, before=(_OPEN,))
            name = between.strip()
            if not name or "\n" in name:
                raise ValueError("has no name on its first line")
            while mark == _KEY:
                argument = reader.field(_END_KEY, followed_by=(_VALUE,), before=before).strip()
                reader.until(_VALUE)
                value = reader.field(_END_VALUE, followed_by=(_KEY, _CLOSE), before=before)
                arguments[argument] = self._types.value(name, argument, value)
                _, mark = reader.until(_KEY, _CLOSE, before=(_OPEN,))
            if not mark:
                raise ValueError(f"lacks its {_CLOSE}")
            check_value(arguments)
        except ValueError as error:
            if mark != _CLOSE:
                reader.until(_CLOSE, before=(_OPEN,))
            return unreadable(error, _EXPECTED, name=name)
        return ToolCall(name=name, arguments=arguments)
