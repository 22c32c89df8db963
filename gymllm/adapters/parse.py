"""A text as an action.

What is read is the last `<action>…</action>` in the text, else the last `\\boxed{…}`, else the whole
text, in which one action may be named and no other.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# Gymnasium's spaces are generic over types that its own annotations leave partly unknown.

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from gymllm.adapters.describe import parts_of
from gymllm.adapters.registry import AnySpace
from gymllm.errors import ConfigError, ConfigTypeError, UnknownNameError
from gymllm.spaces import Unicode, is_text

Parse = Callable[[str], Any]
"""Text to action; raises `ValueError`, whose message the agent is shown, if it can't be read."""

AnswerRule = Literal["marked", "last"]
"""Which of several actions in a text counts. "marked": the marked one (see the module), and a text that
marks none must name one alone. "last": the last one named, whatever is marked."""
RULES = ("marked", "last")

LONGEST_JSON = 20_000
"""Characters at the end of a text in which a JSON action is looked for."""
LONGEST_QUOTED = 40
MOST_BOUNDS = 8
"""A `Box` of at most so many numbers has the bounds of each written out."""
_WHOLE = "The action"

_TAG = re.compile(r"<(/?)action>", re.IGNORECASE)
_BRACE = re.compile(r"\\boxed\s*\{|[{}]")
_BLANKS = re.compile(r"[^\S\r\n]+")
_INTEGER = re.compile(r"(?<![\w.])[+-]?\d{1,18}(?![\w]|\.\d)")


def marked_action(text: str) -> str | None:
    """What stands in the last `<action>…</action>`, else in the last `\\boxed{…}`; None if in neither."""
    tags = list(_TAG.finditer(text))
    for opening, closing in reversed(list(pairwise(tags))):
        if not opening[1] and closing[1]:
            return text[opening.end() : closing.start()].strip()
    found, open_braces = None, list[tuple[bool, int]]()
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            open_braces.append((len(brace[0]) > 1, brace.end()))
        elif open_braces:
            is_boxed, start = open_braces.pop()
            found = text[start : brace.start()].strip() if is_boxed else found
    return found


def parser_for(
    space: AnySpace, *, names: Sequence[str] | None = None, rule: AnswerRule = "marked"
) -> Parse:
    """The default parser of an action space.

    - `Discrete` with names: a name that stands in what is read as a whole word, upper or lower case,
      with any blanks where it has one. Where names overlap ("up", "up left"), the longest counts.
    - `Discrete` without names: a whole number that is one of the actions.
    - texts: the text as it is.
    - every other space: the last JSON value in what is read that is a list (or an object for `Dict`, a
      number for a `Box` without axes), which must lie in the space. A marked number is also read for a
      `Box` of one number.

    Args:
        space: Where the actions lie.
        names: What a `Discrete`'s actions are called, in order.
        rule: Which of several actions counts.

    Raises:
        ConfigError: The space can't be written in JSON, the names don't fit it or there is no such rule.
    """
    if rule not in RULES:
        raise UnknownNameError("answer rule", str(rule), RULES)
    if names is not None:
        return _name_parser(space, names, rule)
    if is_text(space):
        return lambda text: _from_json(space, text)
    if isinstance(space, spaces.Discrete):
        return lambda text: _parse_integer(space, text, rule)
    _check_writable(space)
    return lambda text: _parse_json(space, text, rule)


def how_to_answer(
    space: AnySpace, *, names: Sequence[str] | None = None, rule: AnswerRule = "marked"
) -> str:
    """One line that tells an agent what `parser_for` can read."""
    if is_text(space):
        return ""
    marked = rule == "marked"
    if names is not None:
        listed = ", ".join(names)
        if marked:
            return f"Answer with <action>NAME</action>, where NAME is one of: {listed}."
        return f"Answer with one of: {listed}."
    if isinstance(space, spaces.Discrete):
        first, last = int(space.start), int(space.start + space.n - 1)
        if marked:
            return (
                f"Answer with <action>N</action>, where N is a whole number from {first} to {last}."
            )
        return f"Answer with one number from {first} to {last}."
    if marked:
        return f"Answer with <action>JSON</action>, where JSON is {json_form(space)}."
    return f"Answer with JSON: {json_form(space)}."


def json_form(space: AnySpace) -> str:
    """What a JSON value of a space looks like, in words."""
    if isinstance(space, spaces.Dict):
        fields = (f'"{key}": {json_form(part)}' for key, part in space.spaces.items())
        return "{" + ", ".join(fields) + "}"
    if isinstance(space, spaces.Tuple):
        return f"[{', '.join(json_form(part) for part in space.spaces)}]"
    if isinstance(space, spaces.Discrete):
        return f"a whole number from {int(space.start)} to {int(space.start + space.n - 1)}"
    if isinstance(space, spaces.MultiDiscrete):
        last = (space.start + space.nvec - 1).tolist()
        if space.nvec.ndim != 1:
            return f"a list of whole numbers from {space.start.tolist()} to {last}"
        each = (
            f"a whole number from {low} to {high}"
            for low, high in zip(space.start.tolist(), last, strict=True)
        )
        return f"[{', '.join(each)}]"
    if isinstance(space, spaces.MultiBinary):
        return f"a list of 0 and 1 of shape {list(space.shape)}"
    if isinstance(space, spaces.Box):
        whole = "whole " if np.dtype(space.dtype).kind in "iu" else ""
        if space.shape == (1,):
            return f"[a {whole}number{_range(*_bounds(space, 0))}]"
        if space.shape == ():
            return f"a {whole}number{_range(*_bounds(space))}"
        return f"a list of {whole}numbers of shape {list(space.shape)}{_range(*_bounds(space))}"
    longest = cast("Unicode | spaces.Text", space).max_length
    return f"a text of at most {longest} characters" if longest < LONGEST_JSON else "a text"


def _bounds(space: spaces.Box, index: int | None = None) -> tuple[Any, Any]:
    """The lowest and highest numbers, in as few digits as mean just them; of many, those of all."""
    low: Any = space.low
    high: Any = space.high
    if index is not None:
        low, high = low[index], high[index]
    elif low.size > MOST_BOUNDS or not (np.isfinite(low).any() or np.isfinite(high).any()):
        low, high = low.min(), high.max()
    return _shortest(low), _shortest(high)


def _shortest(numbers: npt.NDArray[Any]) -> Any:
    # Rounded further they might lie outside, and an action that is written as they are be refused.
    if numbers.shape:
        return [_shortest(part) for part in numbers]
    return float(str(numbers)) if numbers.dtype.kind == "f" else int(numbers)


def _range(low: Any, high: Any) -> str:
    return "" if (low, high) == (-math.inf, math.inf) else f" from {low} to {high}"


def _name_parser(space: AnySpace, names: Sequence[str], rule: AnswerRule) -> Parse:
    if not isinstance(space, spaces.Discrete):
        raise ConfigError(f"action_names need a Discrete action space, got {space}.")
    if not all(isinstance(name, str) for name in names):  # pyright: ignore[reportUnnecessaryIsInstance]  users' code
        raise ConfigTypeError(f"action_names must be texts, got {list(names)}.")
    actions = {_plain(name): int(space.start) + i for i, name in enumerate(names)}
    if len(names) != space.n or len(actions) != space.n or "" in actions:
        raise ConfigError(
            f"action_names must be {space.n} different names, one for each action, got {list(names)}."
        )
    longest_first = sorted(actions, key=len, reverse=True)
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")

    def parse(text: str) -> int:
        read = _read(text, rule)
        found = pattern.findall(_plain(read))
        if not found:
            raise ValueError(_nothing("action", text, rule))
        if rule == "marked":
            _check_unique(found)
        return actions[found[-1]]

    return parse


def _plain(text: str) -> str:
    """In one case, with one blank where there are several on a line."""
    return _BLANKS.sub(" ", text.casefold().strip())


def _parse_integer(space: spaces.Discrete[Any], text: str, rule: AnswerRule) -> int:
    found = [int(number) for number in _INTEGER.findall(_read(text, rule))]
    if not found:
        raise ValueError(_nothing("number", text, rule))
    if rule == "marked":
        _check_unique(found)
    action = found[-1]
    if not space.contains(action):
        raise ValueError(f"{action} is not one of the actions.")
    return action


def _parse_json(space: AnySpace, text: str, rule: AnswerRule) -> Any:
    marked = marked_action(text) if rule == "marked" else None
    if marked is None:
        return _from_json(space, _last_json(space, text))
    is_number = isinstance(space, spaces.Box) and int(np.prod(space.shape)) == 1
    return _from_json(space, _last_json(space, marked, or_number=is_number))


def _read(text: str, rule: AnswerRule) -> str:
    marked = marked_action(text) if rule == "marked" else None
    return text if marked is None else marked


def _nothing(what: str, text: str, rule: AnswerRule) -> str:
    marked = marked_action(text) if rule == "marked" else None
    if not marked:
        return f"No {what} was found in the answer."
    return f"{_short(marked)!r} is not one of the actions."


def _check_unique(found: Sequence[object]) -> None:
    different = list(dict.fromkeys(found))
    if len(different) > 1:
        shown = ", ".join(map(str, different[:8])) + (", ..." if len(different) > 8 else "")
        raise ValueError(f"The answer has several actions ({shown}) and must mark one alone.")


def _last_json(space: AnySpace, text: str, *, or_number: bool = False) -> Any:
    """The last JSON value of the kind that the space needs; a value inside another does not count."""
    number = r"(?<![\w.\-])-?\d"
    if isinstance(space, spaces.Dict):
        starts, kinds = r"\{", (dict,)
    elif isinstance(space, spaces.Box) and space.shape == ():
        starts, kinds = number, (int, float)
    elif or_number:
        starts, kinds = rf"\[|{number}", (list, int, float)
    else:
        starts, kinds = r"\[", (list,)
    text = text[-LONGEST_JSON:]
    decoder, found, end = json.JSONDecoder(), list[Any](), 0
    for start in re.finditer(starts, text):
        if start.start() < end:
            continue
        try:
            value, end = decoder.raw_decode(text, start.start())
        except ValueError:
            continue
        except RecursionError:  # no action is so deep; looking on would take quadratic time
            break
        if isinstance(value, kinds):
            found.append(value)
    if not found:
        raise ValueError("No JSON of the right form was found in the answer.")
    return found[-1]


def _from_json(space: AnySpace, value: Any, place: str = "") -> Any:
    """The action that a JSON value is.

    Args:
        space: Where it must lie.
        value: What was read.
        place: Which part of the action it is; the message names that part alone.
    """
    if isinstance(space, spaces.Dict):
        fields = space.spaces
        if not isinstance(value, dict):
            raise _wrong(space, value, place)
        given = cast("dict[str, Any]", value)
        places = {key: f'{place and f"{place}."}"{key}"' for key in (*fields, *given)}
        for key, part in fields.items():
            if key not in given:
                raise ValueError(f"{places[key]} is missing; it must be {json_form(part)}.")
        for key in given:
            if key not in fields:
                raise ValueError(f"There is no {_short(places[key])}; keys: {', '.join(fields)}.")
        return {key: _from_json(part, given[key], places[key]) for key, part in fields.items()}
    if isinstance(space, spaces.Tuple):
        values = cast("list[Any]", value)
        if not isinstance(value, list) or len(values) != len(space.spaces):
            raise _wrong(space, value, place)
        return tuple(
            _from_json(part, each, f"{place or _WHOLE}[{i}]")
            for i, (part, each) in enumerate(zip(space.spaces, values, strict=True))
        )
    if is_text(space):
        action = value if isinstance(value, str) else None
    elif isinstance(space, spaces.Discrete):
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        # `contains` would make it an int64 first
        action = value if is_whole and space.start <= value < space.start + space.n else None
    else:
        action = _array_from_json(space, value)
    if action is None or not space.contains(action):
        raise _wrong(space, value, place)
    return action


def _array_from_json(space: AnySpace, value: Any) -> npt.NDArray[Any] | None:
    """The numbers as the space has them; None where they are none, or it can't hold them."""
    if not _is_numbers(value):
        return None
    dtype = np.dtype(space.dtype)
    try:
        array = np.asarray(value, np.float64 if dtype.kind == "f" else None)
    # Ragged or very deep lists; whole numbers that are too long.
    except (ValueError, OverflowError):
        return None
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            array = array.astype(dtype)
        if not np.isfinite(array).all():  # also what JSON does not have, but Python reads
            return None
    elif array.size:
        if array.dtype.kind not in "iu":
            return None
        range_ = np.iinfo(dtype.name)
        if array.min() < range_.min or array.max() > range_.max:
            return None
    if array.shape == () and space.shape == (1,):  # one marked number
        array = array.reshape(1)
    return array.astype(dtype)


def _is_numbers(value: Any) -> bool:
    """Whether it is a number, or a list of them and of such lists, and none is a truth value."""
    open_lists = [[value]]  # not by recursion: they may be thousands deep
    while open_lists:
        for each in open_lists.pop():
            if isinstance(each, list):
                open_lists.append(cast("list[Any]", each))
            elif isinstance(each, bool) or not isinstance(each, int | float):
                return False
    return True


def _wrong(space: AnySpace, value: Any, place: str) -> ValueError:
    try:
        shown = _short(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        shown = "lists in lists"
    return ValueError(f"{place or _WHOLE} must be {json_form(space)}, got {shown}.")


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_QUOTED else f"{text[:LONGEST_QUOTED]}..."


def _check_writable(space: AnySpace) -> None:
    parts = parts_of(space)
    if parts is not None:
        for part in parts:
            _check_writable(part)
    elif not (
        is_text(space)
        or isinstance(
            space, spaces.Discrete | spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary
        )
    ):
        raise ConfigError(
            f"an action of {space} has no text form; give TextAdapter a parse= that turns text into one."
        )
