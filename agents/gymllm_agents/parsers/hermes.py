"""The form of Hermes models: JSON between tags."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import cast, final

from gymllm.message import ToolCall
from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.parsers.said import ParsedReply, Said, UnreadableCall


@final
class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen models write it."""

    from_template = True
    OPEN = "<tool_call>"
    CLOSE = "</tool_call>"

    def parse(self, said: Said) -> ParsedReply:
        """Reads a reply. A call that is not closed ends where the reply does."""
        outside, *rest = said.text.split(self.OPEN)
        kept, calls = [outside], list[ToolCall | UnreadableCall]()
        for part in rest:
            inside, closed, after = part.partition(self.CLOSE)
            call = _read_call(inside)
            # A call that is whole but for its closing tag has said all there is to say.
            if isinstance(call, UnreadableCall) and not closed:
                call = UnreadableCall(problem=f"{call.problem} {self.CLOSE} is missing.")
            calls.append(call)
            kept.append(after)
        return ParsedReply(text="".join(kept).strip(), calls=tuple(calls))

    def instructions(self, tools: Sequence[ToolSchema]) -> str:
        """The tools as JSON, one a line, and the form of a call."""
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return (
            f"You may call these functions:\n{listed}\n"
            f'To call one, write {self.OPEN}{{"name": <function name>, "arguments": <object of '
            f"arguments>}}{self.CLOSE} and wait for its result."
        )


def _read_call(text: str) -> ToolCall | UnreadableCall:
    """The call in a JSON text."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = str(error) if isinstance(error, ValueError) else "nested too deep"
        return UnreadableCall(problem=f"The tool call is not JSON ({problem[:100]}).")
    if not isinstance(value, dict):
        return UnreadableCall(problem="The tool call must be a JSON object.")
    call = cast(dict[str, object], value)
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str):
        return UnreadableCall(problem='The tool call has no "name".')
    if not isinstance(arguments, dict):
        return UnreadableCall(problem='The "arguments" of a tool call must be a JSON object.')
    return ToolCall(name=name, arguments=cast(dict[str, object], arguments))
