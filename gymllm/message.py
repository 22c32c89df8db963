"""One message of a conversation, and the tool calls in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gymllm.spaces import Image


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call of a tool, as a model made it."""

    name: str
    arguments: Mapping[str, object]
    """By name, as JSON has them. Not yet checked against the tool's schema."""
    id: str = ""
    """Names the call where the model's form has ids; its result then carries the same."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message of a conversation, as a person or a chat template reads it."""

    role: str
    """"system", "user", "assistant" or "tool"."""
    content: str = ""
    """Its text. Of an assistant message: what is outside of reasoning and tool calls."""
    parts: tuple[str | Image, ...] = ()
    """Texts and images (uint8, [H, W, 3]) in their order, where there are images; `content` is then
    the texts alone, each on lines of its own."""
    reasoning: str = ""
    """What an assistant thought before it answered."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tools that an assistant called, in its order."""
    tool_call_id: str = ""
    """Of a tool message: the id of the call it answers, where calls have ids."""
    name: str = ""
    """Of a tool message: the tool that answers."""
    raw: str = field(default="", compare=False)
    """Of an assistant message that a policy generated: its whole text, control tokens included,
    decoded for reading only and never encoded again."""

    @property
    def said(self) -> str:
        """The message as it was said, for reading: `raw` where there is one, else `content`."""
        return self.raw or self.content
