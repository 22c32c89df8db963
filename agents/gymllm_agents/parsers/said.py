"""What a model said, and what is in it: reasoning, text, calls.

A parser reads text in which the places of control tokens are known. A family's markup counts only
where the model generated the token for it: the same letters, spelt out, are text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

from gymllm.message import ToolCall
from gymllm_agents.chat_template import ToolSchema


@final
@dataclass(frozen=True, kw_only=True)
class Said:
    """A reply, decoded with its control tokens, the stop token that ended it left out."""

    text: str
    controls: tuple[int, ...] = ()
    """Where in `text` each generated control token starts, in order."""
    vocabulary: frozenset[str] = frozenset()
    """The model's control tokens. Any markup that is not among them counts wherever it is written."""
    in_thought: bool = False
    """The chat template has opened the thought already (`<think>` ends the prompt)."""
    stopped_by: str = ""
    """The stop token that ended the reply; empty where a length limit did."""


@final
@dataclass(frozen=True, kw_only=True)
class UnreadableCall:
    """A call that could not be read."""

    problem: str
    """One sentence for the model."""
    id: str = ""
    """Of the call, where it could be read that far."""
    name: str = ""
    """Of the tool, likewise."""


@final
@dataclass(frozen=True, kw_only=True)
class ParsedReply:
    """What is in a reply."""

    text: str
    """What is outside of reasoning and calls, without blanks around it."""
    reasoning: str = ""
    """What was thought, without its markup and without blanks around it. A thought that is not closed
    is all of the rest: such a reply has no text and no calls."""
    calls: tuple[ToolCall | UnreadableCall, ...] = ()
    """In the order written."""


class ToolCallParser(Protocol):
    """One family's form of tool calls and reasoning."""

    from_template: bool
    """Whether a chat template that lists tools teaches this form; else `instructions` always does."""

    def parse(self, said: Said) -> ParsedReply:
        """Reads a reply. Never raises; takes time linear in the text."""
        ...

    def instructions(self, tools: Sequence[ToolSchema]) -> str:
        """Tells the model of the tools and the form, for templates that don't."""
        ...
