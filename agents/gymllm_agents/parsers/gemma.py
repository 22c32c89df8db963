"""The forms of Gemma models: Python or JSON in fences, and the control tokens of later ones."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import final

from gymllm.message import ToolCall
from gymllm_agents.chat_template import ToolSchema
from gymllm_agents.parsers.argument_types import ArgumentTypes
from gymllm_agents.parsers.json_calls import call_named, read_json, tell, unreadable
from gymllm_agents.parsers.json_form import (
    END_FENCE,
    JSON_FENCE,
    read_json_fence,
    read_whole_reply,
)
from gymllm_agents.parsers.markup import THINK, Marks, Reader
from gymllm_agents.parsers.python_calls import read_python_calls
from gymllm_agents.parsers.said import ParsedReply, Said, UnreadableCall

_CODE_FENCE, _CALL_FENCE = "```tool_code", "```tool_call"
# What opens a call, by what opens it: what closes it, and what quotes a text in it.
_TOKENS: Mapping[str, tuple[str, str]] = {
    "<start_function_call>": ("<end_function_call>", "<escape>"),  # FunctionGemma
    "<|tool_call>": ("<tool_call|>", '<|"|>'),  # Gemma 4
}
_MARKS = Marks(
    _CODE_FENCE,
    _CALL_FENCE,
    JSON_FENCE,
    END_FENCE,
    *_TOKENS,
    *(mark for pair in _TOKENS.values() for mark in pair),
    thoughts={**THINK, "<|channel>": "<channel|>"},
    label="thought\n",
)
_OPENS = (_CODE_FENCE, _CALL_FENCE, JSON_FENCE, END_FENCE, *_TOKENS)
_EXPECTED = "```tool_code\n<name>(<argument>=<literal value>, ...)\n```"
_EXPECTED_JSON = '```tool_call\n{"name": <name>, "parameters": <object>}\n```'
_HEAD = re.compile(r"\s*+call:\s*+([^\s{}:]++)\s*+(?=\{)")
_PIECE = re.compile(r"\s*+(?:([{}\[\],:])|([^\s{}\[\],:]++(?:[ \t]++[^\s{}\[\],:]++)*+))")
_LIST_OF_CALLS = re.compile(r"\s*+\[\s*+[^\W\d]\w*+\(")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_CONSTANT = re.compile(
    r"true|false|null|-?(?:0|[1-9]\d*+)(?:\.\d++)?+(?:[eE][-+]?\d++)?+", re.ASCII
)


@final
class GemmaParser:
    """`f(a=1)` in a `tool_code` fence, or `{"name": ..., "parameters": {...}}` in a `json` or `tool_call`
    fence or as the whole reply, as Gemma 2 and 3 are asked for; FunctionGemma's
    `<start_function_call>call:f{a:<escape>x<escape>}<end_function_call>` and Gemma 4's likeness of it.
    """

    from_template = True

    def __init__(self, tools: Sequence[ToolSchema] = ()) -> None:
        """Takes the schemas, which name arguments that are given by position."""
        self._types = ArgumentTypes(tools)

    def parse(self, said: Said) -> ParsedReply:
        """Reads a reply. Python is read as names and literals; it is never run."""
        reader = Reader(said, _MARKS)
        while mark := reader.advance(*_OPENS):
            if mark == _CODE_FENCE:
                self._read_code(reader)
            elif mark in _TOKENS:
                reader.calls.append(_read_tokens(reader, mark))
            else:
                read_json_fence(reader, mark, _EXPECTED_JSON, always=mark == _CALL_FENCE)
        if not reader.calls:
            self._read_whole_reply(reader)
        return reader.reply()

    def instructions(self, tools: Sequence[ToolSchema]) -> str:
        """The tools as JSON, one a line, and the form of a call."""
        form = '{"name": <function name>, "parameters": <object of arguments>}'
        return tell(tools, f"write {_CALL_FENCE}\n{form}\n{END_FENCE}")

    def _read_code(self, reader: Reader) -> None:
        try:
            reader.calls += reader.enclosed(
                lambda text: read_python_calls(text, self._types.names),
                END_FENCE,
                before=(_CODE_FENCE,),
            )
        except ValueError as error:
            reader.calls.append(unreadable(error, _EXPECTED))

    def _read_whole_reply(self, reader: Reader) -> None:
        text = reader.take_text()
        if _LIST_OF_CALLS.match(text):
            try:
                calls, end = read_python_calls(text, self._types.names)
            except ValueError:
                calls, end = [], 0  # a list of something else
            reader.calls += calls
            text = text[end:]
        reader.keep(text)
        if not reader.calls:
            read_whole_reply(reader, _EXPECTED_JSON)


def _read_tokens(reader: Reader, mark: str) -> ToolCall | UnreadableCall:
    """Reads a call between control tokens: its arguments are JSON but for keys and quotes."""
    close, quote = _TOKENS[mark]
    expected = f"{mark}call:<name>{{<argument>:{quote}<text>{quote}}}{close}"
    name = ""
    try:
        text, ended = reader.until(quote, close, before=(mark,))
        head = _HEAD.match(text)
        if not head:
            if ended == quote:
                reader.until(close, before=(mark,))
            raise ValueError("has no name")
        name = head[1]
        pieces = [_as_json(text[head.end() :])]
        while ended == quote:
            inside, ended = reader.until(quote, before=(mark,))
            if not ended:
                raise ValueError(f"lacks a {quote}")
            pieces.append(json.dumps(inside))
            text, ended = reader.until(quote, close, before=(mark,))
            pieces.append(_as_json(text))
        whole = "".join(pieces)
        arguments, end = read_json(whole)
        if whole[end:].strip():
            raise ValueError("is not as it should be (more follows its end)")
    except ValueError as error:
        return unreadable(error, expected, name=name)
    return call_named(name, arguments, expected)


def _as_json(text: str) -> str:
    """JSON of what is outside of quotes: bare words are texts, unless JSON has them."""
    pieces, position = list[str](), 0
    while found := _PIECE.match(text, position):
        sign, word = found.groups()
        if word and text[found.end() : found.end() + 1] != ":":
            word = _CONSTANTS.get(word, word)
            sign = word if _CONSTANT.fullmatch(word) else json.dumps(word)
        pieces.append(sign or json.dumps(word))
        position = found.end()
    return "".join(pieces)
