"""The plain form: a call is a line of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast, final

from gymllm.errors import ConfigError
from gymllm.message import ToolCall
from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.parsers.markup import Marks, Reader
from gymllm_agents.parsers.said import ParsedReply, Said, UnreadableCall

_MARKS = Marks()


@final
class PlainParser:
    """`calculator(12 * 7)` on a line of its own: a fifth of the tokens of a JSON call, for small models.

    What is between the parentheses is the tool's one argument, as it stands. A line that begins in another
    way is text, so an unknown name is no call.
    """

    from_template = False

    def __init__(self, tools: Sequence[ToolSchema]) -> None:
        """Takes the schemas of the tools that can be called.

        Raises:
            ConfigError: A tool has not just one argument, a text.
        """
        self._arguments = dict(_only_argument(tool) for tool in tools)

    def parse(self, said: Said) -> ParsedReply:
        """Reads a reply, line by line."""
        reader, kept = Reader(said, _MARKS), list[str]()
        reader.advance()
        for line in reader.take_text().split("\n"):
            name, opened, rest = line.strip().partition("(")
            if not opened or name not in self._arguments:
                kept.append(line)
            elif rest.endswith(")"):
                reader.calls.append(
                    ToolCall(name=name, arguments={self._arguments[name]: rest[:-1]})
                )
            else:
                problem = f"The line of a call of {name} must end with a closing parenthesis."
                reader.calls.append(UnreadableCall(problem=problem, name=name))
        reader.keep("\n".join(kept))
        return reader.reply()

    def instructions(self, tools: Sequence[ToolSchema]) -> str:
        """How each tool is called, and what it does, one a line."""
        described = [cast(Mapping[str, str], tool["function"]) for tool in tools]
        lines = [
            f"{f['name']}({self._arguments[f['name']]}): {f['description']}" for f in described
        ]
        listed = "\n".join(lines)
        return f"You may call these functions, each on a line of its own:\n{listed}"


def _only_argument(tool: ToolSchema) -> tuple[str, str]:
    """A tool's name and that of its one argument."""
    function = cast(Mapping[str, object], tool["function"])
    parameters = cast(Mapping[str, object], function["parameters"])
    properties = cast(Mapping[str, Mapping[str, object]], parameters.get("properties", {}))
    name = cast(str, function["name"])
    if len(properties) != 1 or next(iter(properties.values())).get("type") != "string":
        arguments = ", ".join(properties) or "none"
        raise ConfigError(
            f"The plain form of tool calls is for tools with one argument, of type string; {name!r} "
            f"has: {arguments}. Use the Hermes form."
        )
    return name, next(iter(properties))
