"""What a model reads of a result: values and errors as text."""

from __future__ import annotations

import json

import pydantic_core


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
