"""ReAct: thoughts, actions and observations as lines of text, for models that know no form of calls.

Yao et al. 2022 (arXiv:2210.03629), in the lines that its successors have made common.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast, final

from gymllm.agent import AgentFactory
from gymllm.errors import ConfigError
from gymllm.message import Message, ToolCall
from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.parsers import ParsedReply, Said, ToolCallParser, UnreadableCall
from gymllm_agents.tokenizer import Tokenizer
from gymllm_agents.tool_agent import ToolAgent, ToolConfig
from gymllm_agents.tools import Tool, ToolResult

_LINE = re.compile(
    r"^[ \t]*(Thought|Action|Action Input|Observation|Final Answer)[ \t]*:[ \t]?",
    re.MULTILINE | re.IGNORECASE,
)


@final
class ReActParser:
    """`Action: name` and `Action Input: ...`, or `Final Answer: ...`.

    The input is a JSON object of arguments, or, for a tool of one argument, that argument as it stands.
    What a model writes after its first action, results that it makes up included, is not looked at.
    """

    from_template = False

    def __init__(self, tools: Sequence[ToolSchema]) -> None:
        """Takes the schemas of the tools that can be called."""
        self._arguments = dict(map(_name_and_arguments, tools))

    def parse(self, said: Said) -> ParsedReply:
        """Reads a reply."""
        fields = _fields(said.text)
        thoughts: list[str] = []
        for place, (name, value) in enumerate(fields):
            if name == "thought":
                thoughts.append(value)
            elif name == "final answer":
                return ParsedReply(text=value, reasoning="\n".join(thoughts))
            elif name == "action":
                following = fields[place + 1] if place + 1 < len(fields) else ("", "")
                given = following[1] if following[0] == "action input" else ""
                call = self._call(value, given)
                return ParsedReply(text="", reasoning="\n".join(thoughts), calls=(call,))
            elif name == "observation":
                break
        return ParsedReply(text=said.text.strip())

    def instructions(self, tools: Sequence[ToolSchema]) -> str:
        """The tools and the form."""
        listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        return (
            f"You may use these tools:\n{listed}\n"
            "Write in this form:\n"
            "Thought: what to do next\n"
            "Action: the name of a tool\n"
            "Action Input: its arguments, as a JSON object\n"
            "Then wait; you are told an Observation. When you know what to answer, write:\n"
            "Final Answer: the answer"
        )

    def _call(self, name: str, given: str) -> ToolCall | UnreadableCall:
        name = name.strip().strip("`").strip()
        bracketed = re.fullmatch(r"([\w.-]+)[ \t]*[\[(](.*)[\])]", name, re.DOTALL)
        if bracketed and not given:  # as the paper writes it: Action: search[what]
            name, given = bracketed[1], bracketed[2]
        given = given.strip()
        try:
            value: object = json.loads(given) if given else {}
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            return ToolCall(name=name, arguments=cast("dict[str, object]", value))
        arguments = self._arguments.get(name, ())
        if len(arguments) == 1:
            plain = value if isinstance(value, str) else given
            return ToolCall(name=name, arguments={arguments[0]: plain})
        wanted = ", ".join(arguments) or "none"
        return UnreadableCall(
            name=name,
            problem=f"The Action Input must be a JSON object of the arguments of {name!r}: {wanted}.",
        )


class ReActAgent(ToolAgent):
    """A `ToolAgent` that thinks, calls and answers in labelled lines of text."""

    @classmethod
    def factory(
        cls,
        tokenizer: Tokenizer | None,
        config: ToolConfig | None = None,
        *,
        tools: Sequence[Tool],
        parser: ToolCallParser | str | None = None,
    ) -> AgentFactory:
        """As `ToolAgent.factory`, with the form of ReAct.

        Raises:
            ConfigError: A parser was given, no tools, or two of one name.
            ModelError: The tokenizer has no chat template, or one that can't be used like this.
        """
        if parser is not None:
            raise ConfigError("A ReActAgent has its own form of calls; leave the parser out.")
        react = ReActParser([tool.schema for tool in tools])
        return super().factory(tokenizer, config, tools=tools, parser=react)

    def tell(
        self, calls: Sequence[ToolCall | UnreadableCall], results: Sequence[ToolResult]
    ) -> Sequence[Message]:
        """The results, as observations."""
        told = "\n".join(f"Observation: {result.text}" for result in results)
        return [Message(role="user", content=told)]


def _fields(text: str) -> list[tuple[str, str]]:
    """The labelled lines, each with all up to the next one."""
    found = list(_LINE.finditer(text))
    ends = [*(match.start() for match in found[1:]), len(text)]
    return [
        (match[1].lower(), text[match.end() : end].strip())
        for match, end in zip(found, ends, strict=False)
    ]


def _name_and_arguments(tool: ToolSchema) -> tuple[str, tuple[str, ...]]:
    function = cast("Mapping[str, Any]", tool["function"])
    return function["name"], tuple(function["parameters"].get("properties", {}))
