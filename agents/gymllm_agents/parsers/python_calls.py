"""Calls written as Python: names, and literals as arguments; nothing is ever run.

Not `ast`: on a text that a model made it may warn, recurse too deep, or take more than linear time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import final

from gymllm.message import ToolCall
from gymllm_agents.parsers.json_calls import MAX_DEPTH, check_value

_TOKEN = re.compile(
    r"""(?:\s|\#[^\n]*)*+(?:
    (?P<raw>[rR])?(?:\"\"\"(?P<long>(?:[^"\\]|\\.|"(?!""))*+)\"\"\"
        |'''(?P<long1>(?:[^'\\]|\\.|'(?!''))*+)'''
        |"(?P<short>(?:[^"\\\n]|\\.)*+)"|'(?P<short1>(?:[^'\\\n]|\\.)*+)')
    |(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)
    |(?P<name>[^\W\d]\w*(?:\.[^\W\d]\w*)*)
    |(?P<sign>[()\[\]{},:=;])
    )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(\n|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL
)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_CONSTANTS = {
    "True": True,
    "False": False,
    "None": None,
    "true": True,
    "false": False,
    "null": None,
}
_CLOSES = {"(": ")", "[": "]", "{": "}"}


def read_python_calls(
    text: str, names_of: Callable[[str], tuple[str, ...]]
) -> tuple[list[ToolCall], int]:
    """The calls that a text begins with: `f(a=1)`, `[f(a=1), g()]`, several on lines of their own.

    `print(f(a=1))` is the call of `f`.

    Args:
        text: The text.
        names_of: A tool's arguments in order, for those that are given by position.

    Returns:
        The calls, at least one, and where they end.

    Raises:
        ValueError: A call can't be read.
    """
    reading = _PythonReader(text, names_of)
    calls = [] if reading.takes("[") else [reading.call()]
    if not calls:
        while not reading.takes("]"):
            calls.append(reading.call())
            if not reading.takes(","):
                reading.must_take("]")
                break
        if not calls:
            raise ValueError("is an empty list")
    while reading.takes(";") or reading.kind == "name":
        if reading.kind == "name":
            calls.append(reading.call())
    for call in calls:
        check_value(dict(call.arguments))
    return calls, reading.end


@final
class _PythonReader:
    """One token ahead in the text."""

    def __init__(self, text: str, names_of: Callable[[str], tuple[str, ...]]) -> None:
        self._text, self._names_of = text, names_of
        self.kind = self._token = ""
        self.end = self._position = 0
        self._step()

    def call(self, *, printed: bool = False) -> ToolCall:
        """Reads a call, and goes behind it."""
        name = self._take("name", "the name of a function")
        if name == "print" and not printed and not self._names_of(name):
            self.must_take("(")
            call = self.call(printed=True)
            self.must_take(")")
            return call
        self.must_take("(")
        arguments, names = dict[str, object](), iter(self._names_of(name))
        while not self.takes(")"):
            key = self._token if self.kind == "name" and self._token not in _CONSTANTS else ""
            if key:
                self._step()
                self.must_take("=")
            else:
                key = next(names, "")
                if not key:
                    raise ValueError("must give its arguments by name")
            arguments[key] = self._value(1)
            if not self.takes(","):
                self.must_take(")")
                break
        return ToolCall(name=name, arguments=arguments)

    def takes(self, sign: str) -> bool:
        """Goes behind a sign if it is next."""
        if self.kind != "sign" or self._token != sign:
            return False
        self._step()
        return True

    def must_take(self, sign: str) -> None:
        """Goes behind a sign."""
        if not self.takes(sign):
            raise ValueError(f"lacks a {sign} {self._place()}")

    def _value(self, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise ValueError("is nested too deep")
        kind, token = self.kind, self._token
        if kind == "string":
            self._step()
            parts = [token]
            while self.kind == "string":
                parts.append(self._token)
                self._step()
            return "".join(parts)
        if kind == "number":
            self._step()
            return _number(token)
        if kind == "name" and token in _CONSTANTS:
            self._step()
            return _CONSTANTS[token]
        if kind != "sign" or token not in _CLOSES:
            raise ValueError(f"has an argument that is no literal value {self._place()}")
        self._step()
        return self._mapping(depth) if token == "{" else self._items(_CLOSES[token], depth)

    def _items(self, close: str, depth: int) -> object:
        items = list[object]()
        while not self.takes(close):
            items.append(self._value(depth + 1))
            if not self.takes(","):
                self.must_take(close)
                return items[0] if close == ")" and len(items) == 1 else items
        return items

    def _mapping(self, depth: int) -> dict[str, object]:
        mapping = dict[str, object]()
        while not self.takes("}"):
            key = self._take("string", "a key in quotes")
            self.must_take(":")
            mapping[key] = self._value(depth + 1)
            if not self.takes(","):
                self.must_take("}")
                break
        return mapping

    def _take(self, kind: str, what: str) -> str:
        if self.kind != kind:
            raise ValueError(f"lacks {what} {self._place()}")
        token = self._token
        self._step()
        return token

    def _place(self) -> str:
        rest = self._text[self.end : self.end + 100].split()
        return f"at {rest[0][:30]!r}" if rest else "at its end"

    def _step(self) -> None:
        self.end = self._position
        found = _TOKEN.match(self._text, self._position)
        if not found:
            self.kind = self._token = ""
            return
        self._position = found.end()
        self.kind = found.lastgroup or ""
        self._token = found[self.kind]
        if self.kind not in ("number", "name", "sign"):
            self.kind = "string"
            self._token = self._token if found["raw"] else _ESCAPE.sub(_letter, self._token)


def _letter(found: re.Match[str]) -> str:
    escape = found[1]
    if escape in _LETTERS:
        return _LETTERS[escape]
    if escape[0] in "xuU" and len(escape) > 1:
        return chr(int(escape[1:], 16))
    if escape.isdigit() and escape[0] in "01234567":
        return chr(int(escape, 8))
    return escape if escape in "\\'\"" else found[0]


def _number(token: str) -> int | float:
    if token.lstrip("+-").isdigit():
        return int(token)
    number = float(token)
    if math.isinf(number):
        raise ValueError(f"has a number that is too large, {token[:20]}")
    return number
