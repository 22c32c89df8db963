"""Which family's form a chat template has, found by reading back what it renders."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gymllm.message import ToolCall
from gymllm_agents.chat_format import ChatFormat
from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.parsers import (
    PARSERS,
    HermesParser,
    Said,
    ThoughtParser,
    ToolCallParser,
    make_parser,
)
from gymllm_agents.template_trials import common_length

_log = logging.getLogger(__name__)

_FIRST = ("qwen", "hermes", "llama", "json")
"""Tried first, in this order, for other forms can read their calls too."""


def choose_parser(chat: ChatFormat, tools: Sequence[ToolSchema] = ()) -> ToolCallParser:
    """The parser that reads back what the template shows of a call, or without tools of a thought.

    Args:
        chat: Its template has been tried out.
        tools: As the parser is made with; empty for one that reads no calls.
    """
    if not tools:
        for parser in (ThoughtParser(), make_parser("gpt-oss")):
            if _reads_thought(chat, parser):
                return parser
        return ThoughtParser()
    names = (*_FIRST, *(name for name in PARSERS if name not in _FIRST and name != "plain"))
    for name in names:
        parser = make_parser(name, tools)
        if _reads_call(chat, parser):
            _log.info("tool calls are read in the %s form, which the chat template shows", name)
            return parser
    return HermesParser()


def reads_its_calls(chat: ChatFormat, parser: ToolCallParser) -> bool:
    """Whether a parser reads the calls that the template shows; so if it shows none."""
    return chat.trials.calling_sample is None or _reads_call(chat, parser)


def _reads_thought(chat: ChatFormat, parser: ToolCallParser) -> bool:
    sample = chat.trials.thinking_sample
    if sample is None:
        return False
    parsed = parser.parse(_said(chat, sample.prompt, sample.shown))
    return (parsed.text, parsed.reasoning) == (sample.answer, sample.thought)


def _reads_call(chat: ChatFormat, parser: ToolCallParser) -> bool:
    sample = chat.trials.calling_sample
    if sample is None:
        return False
    parsed = parser.parse(_said(chat, sample.prompt, sample.shown))
    if len(parsed.calls) != 1 or parsed.text or not isinstance(parsed.calls[0], ToolCall):
        return False
    call = parsed.calls[0]
    return (call.name, dict(call.arguments)) == (sample.call.name, dict(sample.call.arguments))


def _said(chat: ChatFormat, prompt: str, shown: str) -> Said:
    """A rendered reply as a policy would have generated it."""
    tokenizer = chat.tokenizer
    # Not every template shows an answered prompt just as it was: what is not common is the reply.
    before, ids = (tokenizer.encode(text, allow_special=True) for text in (prompt, shown))
    ids = ids[common_length(before, ids) :]
    end = next((k for k, i in enumerate(ids) if i in chat.stop_token_ids), len(ids))
    decoded, controls = tokenizer.decode_marked(ids[:end])
    return Said(
        text=decoded,
        controls=controls,
        vocabulary=tokenizer.control_tokens,
        in_thought=chat.opens_thought,
    )
