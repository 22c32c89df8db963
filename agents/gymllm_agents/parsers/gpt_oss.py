"""The form of gpt-oss, Harmony: messages with a channel and, where they are calls, a recipient."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import final

from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.parsers.json_calls import call_named, tell, unreadable, whole_json
from gymllm_agents.parsers.markup import Marks, Reader
from gymllm_agents.parsers.said import ParsedReply, Said

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
# The prompt never opens a thought here, but if it is said to, then an end closes it.
_MARKS = Marks(_START, _CHANNEL, _MESSAGE, *_ENDS, thoughts={})
_EXPECTED = f"{_CHANNEL}commentary to=functions.<name> <|constrain|>json{_MESSAGE}<object>"
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]++)")
_CHANNEL_NAME = re.compile(r"\s*+(\w++)")


@final
class GptOssParser:
    """`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`, the recipient
    there or before the channel. The channel "analysis" is reasoning; the others are text.
    """

    from_template = True

    def parse(self, said: Said) -> ParsedReply:
        """Reads a reply, message by message."""
        reader = Reader(said, _MARKS)
        if said.in_thought:
            reader.think(reader.until(*_ENDS)[0])
        while not reader.at_end():
            before, mark = reader.until(_START, _CHANNEL, _MESSAGE, *_ENDS)
            if mark in (_START, _CHANNEL, _MESSAGE):
                _read_message(reader, before, mark)
            else:  # not Harmony: a model that was not taught it, or a stray end
                reader.keep(before)
        return reader.reply()

    def instructions(self, tools: Sequence[ToolSchema]) -> str:
        """The tools as JSON, one a line, and the form of a call."""
        form = f"{_CHANNEL}commentary to=functions.<function name> <|constrain|>json{_MESSAGE}"
        return tell(tools, f"write {form}<object of arguments><|call|>")


def _read_message(reader: Reader, before: str, mark: str) -> None:
    """Reads a message whose header's first mark has been read, and `before` in front of that."""
    role, channel = ("", "") if mark == _START else (before, "")
    if mark == _START:
        reader.keep(before)
        role, mark = reader.until(_CHANNEL, _MESSAGE, before=(_START, *_ENDS))
    elif not _RECIPIENT.search(before) and before.strip() != "assistant":
        reader.keep(before)
    if mark == _CHANNEL:
        channel, mark = reader.until(_MESSAGE, before=(_START, *_ENDS))
    body = reader.until(*_ENDS, before=(_START,))[0] if mark else ""
    recipient = _RECIPIENT.search(f"{role} {channel}")
    kind = _CHANNEL_NAME.match(channel)
    if recipient and recipient[1] not in ("user", "assistant", "all"):
        _read_call(reader, recipient[1].removeprefix("functions."), body)
    elif kind and kind[1] == "analysis":
        reader.think(body)
    else:
        reader.keep(f"{body}\n")


def _read_call(reader: Reader, name: str, body: str) -> None:
    try:
        arguments = whole_json(body)
    except ValueError as error:
        reader.calls.append(unreadable(error, _EXPECTED, name=name))
        return
    reader.calls.append(call_named(name, arguments, _EXPECTED))
