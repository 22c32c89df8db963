"""The calls of DeepSeek V3.2 and V4: tags that hold a control token, `｜DSML｜`."""

from __future__ import annotations

import re

from gymllm.message import ToolCall
from gymllm_agents.parsers.json_calls import check_value, unreadable, whole_json
from gymllm_agents.parsers.markup import Reader
from gymllm_agents.parsers.said import UnreadableCall

TOKEN = "｜DSML｜"
INVOKE = f'<{TOKEN}invoke name="'
SECTIONS = tuple(
    f"<{slash}{TOKEN}{name}>" for slash in ("", "/") for name in ("function_calls", "tool_calls")
)
_END_INVOKE, _PARAMETER = f"</{TOKEN}invoke>", f'<{TOKEN}parameter name="'
_END_PARAMETER = f"</{TOKEN}parameter>"
MARKS = (*SECTIONS, INVOKE, _END_INVOKE, _PARAMETER, _END_PARAMETER)
_EXPECTED = (
    f'{INVOKE}<name>">{_PARAMETER}<argument>" string="true|false"><value>{_END_PARAMETER}'
    f"{_END_INVOKE}"
)
_NAME = re.compile(r'([^"<>\n]{1,200})">')
_ARGUMENT = re.compile(r'([^"<>\n]{1,200})"(?: string="(true|false)")?>')


def read_invoke(reader: Reader) -> ToolCall | UnreadableCall:
    """Reads `<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">x</...></...>`, whose opening
    mark has been read. A value that is not said to be a string is JSON.
    """
    name = mark = ""
    arguments, before = dict[str, object](), (INVOKE, *SECTIONS)
    try:
        name = _match(reader, _NAME)[1].strip()
        while True:
            between, mark = reader.until(_PARAMETER, _END_INVOKE, before=before)
            if between.strip():
                raise ValueError(f'has text outside of {_PARAMETER}...">{_END_PARAMETER}')
            if mark != _PARAMETER:
                break
            argument = _match(reader, _ARGUMENT)
            value = reader.field(
                _END_PARAMETER, followed_by=(_PARAMETER, _END_INVOKE), before=before
            )
            arguments[argument[1]] = whole_json(value) if argument[2] == "false" else value
        if not mark:
            raise ValueError(f"lacks its {_END_INVOKE}")
        check_value(arguments)
    except ValueError as error:
        if mark != _END_INVOKE:
            reader.until(_END_INVOKE, before=before)
        return unreadable(error, _EXPECTED, name=name)
    return ToolCall(name=name, arguments=arguments)


def _match(reader: Reader, form: re.Pattern[str]) -> re.Match[str]:
    found = form.match(reader.text, reader.position)
    if not found or not found[1].strip():
        raise ValueError("has no name where one is due")
    reader.move(found.end())
    return found
