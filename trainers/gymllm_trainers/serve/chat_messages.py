"""OpenAI's messages and tools, read; and replies, written."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import cast

from gymllm.json_text import check_value
from gymllm.message import Message, ToolCall
from gymllm.tool_calls import ToolSchema
from gymllm_agents import ParsedReply
from gymllm_trainers.serve.problems import RefusedError

Record = Mapping[str, object]

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_KEYS = frozenset(
    {
        "role",
        "content",
        "name",
        "tool_calls",
        "tool_call_id",
        "reasoning_content",
        "reasoning",
        # What answers of OpenAI's hold, and clients send back.
        "refusal",
        "annotations",
        "audio",
        "function_call",
    }
)


def read_messages(given: object) -> list[Message]:
    """The conversation.

    Raises:
        RefusedError: A message that can't be read; the error names its place.
    """
    if not isinstance(given, list) or not given:
        raise _wrong("messages", "a list of at least one message", given)
    names: dict[str, str] = {}
    return [
        _read_message(message, f"messages[{place}]", names)
        for place, message in enumerate(cast("list[object]", given))
    ]


def read_tools(given: object) -> list[ToolSchema]:
    """The tools, each with all that templates look for.

    Raises:
        RefusedError: One that is no function, or has no name.
    """
    if given is None:
        return []
    if not isinstance(given, list):
        raise _wrong("tools", "a list", given)
    tools: list[ToolSchema] = []
    for place, tool in enumerate(cast("list[object]", given)):
        where = f"tools[{place}]"
        kind = _record(tool, where).get("type")
        if kind != "function":
            raise _wrong(f"{where}.type", '"function"', kind)
        function = dict(_record(_record(tool, where).get("function"), f"{where}.function"))
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise _wrong(f"{where}.function.name", "a text", function.get("name"))
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        _record(parameters, f"{where}.function.parameters")
        function |= {"description": function.get("description") or "", "parameters": parameters}
        function.pop("strict", None)  # says how calls are sampled, nothing that a template shows
        tools.append({"type": "function", "function": function})
    return tools


def written_calls(parsed: ParsedReply) -> list[dict[str, object]]:
    """A reply's calls in OpenAI's form."""
    return [
        {
            "id": call.id or f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(dict(call.arguments), ensure_ascii=False),
            },
        }
        for call in parsed.calls
        if isinstance(call, ToolCall)
    ]


def _read_message(given: object, where: str, names: dict[str, str]) -> Message:
    """A message; `names` are those of called tools by the ids of the calls so far."""
    held = _record(given, where)
    unknown = [key for key in held if key not in _KEYS]
    if unknown:
        raise RefusedError(
            400,
            f"{where} has the unknown field {unknown[0]!r}; it may have {', '.join(sorted(_KEYS))}.",
            param=where,
        )
    role = held.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _wrong(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
    for key in ("audio", "function_call"):
        if held.get(key) is not None:
            raise RefusedError(400, f"{where}.{key} is not supported here.", param=where)
    content = _text(held.get("content"), f"{where}.content")
    if role == "tool":
        call_id = _string(held, "tool_call_id", where)
        name = _string(held, "name", where) or names.get(call_id, "")
        return Message(role="tool", content=content, tool_call_id=call_id, name=name)
    if role != "assistant":
        return Message(role=_ROLES[role], content=content, name=_string(held, "name", where))
    calls = _read_calls(held.get("tool_calls"), f"{where}.tool_calls")
    names.update((call.id, call.name) for call in calls)
    reasoning = _string(held, "reasoning_content", where) or _string(held, "reasoning", where)
    return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)


def _read_calls(given: object, where: str) -> tuple[ToolCall, ...]:
    if given is None:
        return ()
    if not isinstance(given, list):
        raise _wrong(where, "a list", given)
    calls: list[ToolCall] = []
    for place, call in enumerate(cast("list[object]", given)):
        each = f"{where}[{place}]"
        record = _record(call, each)
        function = _record(record.get("function"), f"{each}.function")
        text = function.get("arguments")
        try:
            arguments: object = json.loads(text or "{}") if isinstance(text, str) else text
            check_value(arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise _wrong(f"{each}.function.arguments", "a JSON object as text", text)
        name = _string(function, "name", f"{each}.function")
        if not name:
            raise _wrong(f"{each}.function.name", "a text", function.get("name"))
        calls.append(
            ToolCall(
                name=name,
                arguments=cast("dict[str, object]", arguments),
                id=_string(record, "id", each),
            )
        )
    return tuple(calls)


def _text(content: object, where: str) -> str:
    """The text of a message, which may come in parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "a text or a list of parts", content)
    texts: list[str] = []
    for place, part in enumerate(cast("Sequence[object]", content)):
        record = _record(part, f"{where}[{place}]")
        if record.get("type") != "text":
            kind = str(record.get("type"))[:40]
            raise RefusedError(
                400,
                f"{where}[{place}] is of type {kind!r}; this server's models read text alone.",
                param=where,
            )
        texts.append(_string(record, "text", f"{where}[{place}]"))
    return "\n".join(texts)


def _string(held: Record, key: str, where: str) -> str:
    value = held.get(key)
    if value is not None and not isinstance(value, str):
        raise _wrong(f"{where}.{key}", "a text", value)
    return value or ""


def _record(value: object, where: str) -> Record:
    if not isinstance(value, dict):
        raise _wrong(where, "an object", value)
    return cast("Record", value)


def _wrong(where: str, expected: str, value: object) -> RefusedError:
    shown = json.dumps(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return RefusedError(400, f"{where} must be {expected}, got {shown}.", param=where)
