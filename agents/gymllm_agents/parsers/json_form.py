"""JSON as the whole reply or in a fence: a form for any model that has none of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from gymllm.message import ToolCall
from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.parsers.json_calls import calls_in, tell, unreadable
from gymllm_agents.parsers.markup import Marks, Reader
from gymllm_agents.parsers.said import ParsedReply, Said, UnreadableCall

JSON_FENCE, END_FENCE = "```json", "```"
_MARKS = Marks(JSON_FENCE, END_FENCE)
_EXPECTED = '{"name": <name>, "arguments": <object>} in a ```json fence'


@final
class JsonParser:
    """`{"name": ..., "arguments": {...}}` or a list of such; "parameters" will do for "arguments"."""

    from_template = False

    def parse(self, said: Said) -> ParsedReply:
        """Reads a reply. JSON that is no call is text."""
        reader = Reader(said, _MARKS)
        while mark := reader.advance(JSON_FENCE, END_FENCE):
            read_json_fence(reader, mark, _EXPECTED)
        if not reader.calls:
            read_whole_reply(reader, _EXPECTED)
        return reader.reply()

    def instructions(self, tools: Sequence[ToolSchema]) -> str:
        """The tools as JSON, one a line, and the form of a call."""
        form = '{"name": <function name>, "arguments": <object of arguments>}'
        return tell(tools, f"reply with just {form}, or a list of such for several calls,")


def read_json_fence(reader: Reader, mark: str, expected: str, *, always: bool = False) -> None:
    """Reads what is behind the opening mark of a fence, and keeps it as text if it is no call.

    Args:
        reader: Behind the mark.
        mark: Opens the fence; a bare one holds no calls.
        expected: Told to the model.
        always: Whether such a fence is for calls only.
    """
    calls, rest = list[ToolCall | UnreadableCall](), ""
    start, before = reader.position, () if mark == END_FENCE else (mark,)
    if before:
        text = reader.ahead(*before)
        calls, rest = calls_in(text, expected)
        if calls and isinstance(calls[-1], ToolCall):  # behind another its end can't be told
            reader.move(start + len(text) - len(rest))
    inside, closed = reader.until(END_FENCE, before=before)
    if not calls and always:
        calls = [unreadable("is no JSON object with a name", expected)]
    elif not calls:
        reader.keep(f"{mark}{inside}{closed}")
    elif isinstance(calls[-1], ToolCall) and inside.strip():
        calls.append(unreadable("has something else in its fence", expected))
    reader.calls += calls


def read_whole_reply(reader: Reader, expected: str) -> None:
    """Reads calls from the text that a reply is, thoughts aside, if it begins with one."""
    calls, rest = calls_in(reader.take_text(), expected)
    reader.calls += calls
    reader.keep(rest)
