"""JSON as models write it: read in the middle of a text, and refused in words that help them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import NoReturn, cast

MAX_DEPTH = 100
"""Of objects and lists in each other. Few tools and no encoder like what is deeper."""

_BEFORE_JSON = re.compile(r"[\s;]*+")
_PYTHON = re.compile(r"'|None\b|True\b|False\b|\(")


def read_json(text: str, start: int = 0) -> tuple[object, int]:
    """The JSON value that begins at an offset, after blanks, and where it ends.

    Line breaks inside of strings are let pass, since models write them. Of a key that is there twice the
    last value counts.

    Raises:
        ValueError: There is none, or one that JSON does not have or that can't be passed on.
    """
    position = cast(re.Match[str], _BEFORE_JSON.match(text, start)).end()
    try:
        value, end = cast(tuple[object, int], _DECODER.raw_decode(text, position))
    except RecursionError:
        raise ValueError("is nested too deep") from None
    except json.JSONDecodeError as error:  # its text quotes a line of ours, never all of the text
        hint = ""
        if _PYTHON.match(text, error.pos):
            hint = "; it looks like Python: JSON has double quotes, true, false and null"
        raise ValueError(f"is not JSON ({str(error)[:100]}{hint})") from None
    except ValueError as error:
        raise ValueError(f"is not JSON ({str(error)[:100]})") from None
    check_value(value)
    return value, end


def check_value(value: object) -> None:
    """Refuses what can't be encoded again.

    Raises:
        ValueError: It is nested too deep, or holds half a character.
    """
    waiting = [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise ValueError("is nested too deep")
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError:
                raise ValueError("holds half of a surrogate pair") from None
        elif isinstance(item, dict):
            for key, inner in cast(dict[str, object], item).items():
                waiting += [(key, depth), (inner, depth + 1)]
        elif isinstance(item, list):
            waiting += [(inner, depth + 1) for inner in cast(list[object], item)]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON value")


def _read_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:20]} is too large")
    return number


_DECODER = json.JSONDecoder(
    strict=False, parse_constant=cast(Callable[[str], object], _refuse), parse_float=_read_float
)
