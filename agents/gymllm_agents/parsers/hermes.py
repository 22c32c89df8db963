"""The form of Hermes and most Qwen models: JSON between tags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from gymllm.message import ToolCall
from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.parsers.json_calls import call_of, read_json, tell, unreadable
from gymllm_agents.parsers.markup import Marks, Reader
from gymllm_agents.parsers.said import ParsedReply, Said, UnreadableCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_EXPECTED = f'{OPEN}{{"name": <name>, "arguments": <object>}}{CLOSE}'
_MARKS = Marks(OPEN, CLOSE)


@final
class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen models write it."""

    from_template = True
    OPEN = OPEN
    CLOSE = CLOSE

    def parse(self, said: Said) -> ParsedReply:
        """Reads a reply. A call that is not closed ends where the reply or the next call does."""
        reader = Reader(said, _MARKS)
        while reader.advance(OPEN):
            reader.calls.append(read_hermes_call(reader))
        return reader.reply()

    def instructions(self, tools: Sequence[ToolSchema]) -> str:
        """The tools as JSON, one a line, and the form of a call."""
        form = f'{OPEN}{{"name": <function name>, "arguments": <object of arguments>}}{CLOSE}'
        return tell(tools, f"write {form}")


def read_hermes_call(reader: Reader) -> ToolCall | UnreadableCall:
    """Reads a call whose opening tag has been read."""
    try:
        value = reader.enclosed(read_json, CLOSE, before=(OPEN,))
    except ValueError as error:
        return unreadable(error, _EXPECTED)
    return call_of(value, _EXPECTED)
