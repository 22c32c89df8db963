"""What a model reads of a result: values as text, and long texts cut where it can be seen."""

from __future__ import annotations

import json
import unicodedata

import pydantic_core

_JOINER = "\u200d"
_LONGEST_CLUSTER = 32  # no sane emoji is longer; a text of nothing but accents must still be cut
_LONGEST_FLAGS = 10_000


def as_text(value: object) -> str:
    """A tool's return value for the model: a str as it is, None as nothing, all else as JSON.

    Pydantic models, dataclasses, enums, dates and arrays are understood.

    Raises:
        ValueError: The value has no JSON form.
    """
    if isinstance(value, str):
        return without_surrogates(str(value))
    if value is None:
        return ""
    try:
        plain = pydantic_core.to_jsonable_python(value, fallback=_plain_array)
        return without_surrogates(json.dumps(plain, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"the result, of type {type(value).__name__}, has no JSON form ({error})."
        ) from error


def as_error(error: BaseException) -> str:
    """What went wrong in someone else's code, on one line where it is one."""
    try:
        said = str(error)
    except BaseException:  # a broken __str__ must not take the episode with it
        said = ""
    kind = type(error).__name__
    return without_surrogates(f"{kind}: {said}" if said else kind)


def cut(text: str, most: int) -> str:
    """Keeps `most` characters of a longer text, its head and its tail, and says what was left out."""
    if len(text) <= most:
        return text
    tail_length = most // 3
    head = text[: _boundary(text, most - tail_length)]
    tail = text[_boundary(text, len(text) - tail_length, forward=True) :]
    left_out = len(text) - len(head) - len(tail)
    mark = f"[... {left_out} characters left out ...]"
    return "\n".join([head, mark, tail] if tail else [head, mark])


def _plain_array(value: object) -> object:
    """NumPy's and JAX's arrays and scalars."""
    to_list = getattr(value, "tolist", None)
    if not callable(to_list):
        raise TypeError(f"{type(value).__name__} is no JSON type")
    return to_list()


def without_surrogates(text: str) -> str:
    """Halves of characters, as undecodable file names have, can't be encoded for a tokenizer."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _boundary(text: str, at: int, *, forward: bool = False) -> int:
    """The nearest place before (or after) `at` that splits no accented letter and no emoji."""
    step = 1 if forward else -1
    for place in range(at, at + step * _LONGEST_CLUSTER, step):
        if not 0 < place < len(text) or not _joined(text, place):
            return min(max(place, 0), len(text))
    return at


def _joined(text: str, at: int) -> bool:
    """Whether the characters on both sides of `at` are seen as one."""
    before, after = text[at - 1], text[at]
    if before == _JOINER or after == _JOINER or unicodedata.category(after) in ("Mn", "Me", "Mc"):
        return True
    if "\U0001f3fb" <= after <= "\U0001f3ff" or "\U000e0020" <= after <= "\U000e007f":
        return True  # a skin tone; a flag's tag
    if before == "\r" and after == "\n":
        return True
    if not (_regional(before) and _regional(after)):
        return False
    start = at
    while start > 0 and at - start < _LONGEST_FLAGS and _regional(text[start - 1]):
        start -= 1
    return (at - start) % 2 == 1  # flags are pairs


def _regional(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"
