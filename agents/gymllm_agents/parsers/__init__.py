"""How models write reasoning and tool calls, and how that is read.

said            what a parser is given, and what it makes of it
hermes, plain   one form each
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gymllm.errors import UnknownNameError
from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.parsers.hermes import HermesParser as HermesParser
from gymllm_agents.parsers.plain import PlainParser as PlainParser
from gymllm_agents.parsers.said import ParsedReply as ParsedReply
from gymllm_agents.parsers.said import Said as Said
from gymllm_agents.parsers.said import ToolCallParser as ToolCallParser
from gymllm_agents.parsers.said import UnreadableCall as UnreadableCall

_FORMS: Mapping[str, Callable[[Sequence[ToolSchema]], ToolCallParser]] = {
    "hermes": lambda _: HermesParser(),
    "plain": PlainParser,
}

PARSERS: tuple[str, ...] = tuple(_FORMS)
"""Every form that `make_parser` knows."""


def make_parser(name: str, tools: Sequence[ToolSchema] = ()) -> ToolCallParser:
    """The parser of a form.

    Args:
        name: One of `PARSERS`.
        tools: Those that can be called; some forms need a tool's schema to read its arguments.

    Raises:
        UnknownNameError: No form is called that.
        ConfigError: A tool can't be called in this form.
    """
    if name not in _FORMS:
        raise UnknownNameError("form of tool calls", name, PARSERS)
    return _FORMS[name](tools)


__all__ = [
    "PARSERS",
    "HermesParser",
    "ParsedReply",
    "PlainParser",
    "Said",
    "ToolCallParser",
    "UnreadableCall",
    "make_parser",
]
