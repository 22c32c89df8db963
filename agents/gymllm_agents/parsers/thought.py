"""Reasoning alone, for agents without tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.parsers.markup import THINK, Marks, Reader
from gymllm_agents.parsers.said import ParsedReply, Said

_MARKS = Marks(thoughts={**THINK, "[THINK]": "[/THINK]", "◁think▷": "◁/think▷"})


@final
class ThoughtParser:
    """Splits off what is thought; all else is the text, calls too. A reply without a thought is its text."""

    from_template = True

    def parse(self, said: Said) -> ParsedReply:
        """Reads a reply."""
        reader = Reader(said, _MARKS)
        reader.advance()
        reply = reader.reply()
        return reply if reply.reasoning or said.in_thought else ParsedReply(text=said.text)

    def instructions(self, tools: Sequence[ToolSchema]) -> str:
        """Nothing: there are no calls."""
        return ""
