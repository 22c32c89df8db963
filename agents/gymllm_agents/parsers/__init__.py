"""How models write reasoning and tool calls, and how that is read.

said            what a parser is given, and what it makes of it
markup          finds markup in a reply, and walks from mark to mark
json_calls, python_calls, argument_types    what is between the marks
hermes, qwen, llama, gemma, deepseek, mistral, glm, kimi, gpt_oss    a family each
dsml            the later form of DeepSeek models
json_form, plain                            forms for models that have none
thought                                     reasoning alone
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gymllm.errors import UnknownNameError
from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.parsers.deepseek import DeepSeekParser
from gymllm_agents.parsers.gemma import GemmaParser
from gymllm_agents.parsers.glm import GlmParser
from gymllm_agents.parsers.gpt_oss import GptOssParser
from gymllm_agents.parsers.hermes import HermesParser as HermesParser
from gymllm_agents.parsers.json_form import JsonParser
from gymllm_agents.parsers.kimi import KimiParser
from gymllm_agents.parsers.llama import LlamaParser
from gymllm_agents.parsers.mistral import MistralParser
from gymllm_agents.parsers.plain import PlainParser as PlainParser
from gymllm_agents.parsers.qwen import QwenParser
from gymllm_agents.parsers.said import ParsedReply as ParsedReply
from gymllm_agents.parsers.said import Said as Said
from gymllm_agents.parsers.said import ToolCallParser as ToolCallParser
from gymllm_agents.parsers.said import UnreadableCall as UnreadableCall
from gymllm_agents.parsers.thought import ThoughtParser as ThoughtParser

_FORMS: Mapping[str, Callable[[Sequence[ToolSchema]], ToolCallParser]] = {
    "deepseek": lambda _: DeepSeekParser(),
    "gemma": GemmaParser,
    "glm": GlmParser,
    "gpt-oss": lambda _: GptOssParser(),
    "hermes": lambda _: HermesParser(),
    "json": lambda _: JsonParser(),
    "kimi": lambda _: KimiParser(),
    "llama": lambda _: LlamaParser(),
    "mistral": lambda _: MistralParser(),
    "plain": PlainParser,
    "qwen": QwenParser,
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
    "ThoughtParser",
    "ToolCallParser",
    "UnreadableCall",
    "make_parser",
]
