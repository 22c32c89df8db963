"""What an engine of messages is: a conversation in, a message out, and no exact tokens.

Servers that speak OpenAI's chat-completions protocol are such engines. They serve to play and to
evaluate; nothing can be trained on what they say, for nobody knows its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from gymllm.engine import FinishReason, SamplingParams
from gymllm.message import Message


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """One call of a chat engine."""

    messages: Sequence[Message]
    """The whole conversation, oldest first."""
    sampling: SamplingParams
    """`stop_token_ids` must be empty: the engine's own template ends a turn."""
    tools: Sequence[Mapping[str, object]] = ()
    """What the model may call, as JSON schemas of functions."""
    request_id: str = ""
    """A name for traces and errors."""


@dataclass(frozen=True, kw_only=True)
class ChatReply:
    """What a chat engine answered."""

    message: Message
    """From the assistant. Calls whose arguments are no JSON object are in `unreadable`, not here."""
    finish_reason: FinishReason
    unreadable: Sequence[tuple[str, str]] = ()
    """Name and arguments of each call whose arguments are no JSON object."""
    prompt_tokens: int = 0
    """As the server counts."""
    generated_tokens: int = 0


@runtime_checkable
class ChatEngine(Protocol):
    """An engine of messages. Cancelling `chat` ends the request."""

    async def chat(self, request: ChatRequest) -> ChatReply:
        """Answers a conversation.

        Raises:
            ContextLengthError: The conversation fills the model's context.
            EngineError: The server broke or refused; the caller may retry elsewhere.
        """
        ...
