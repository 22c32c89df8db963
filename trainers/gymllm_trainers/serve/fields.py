"""A JSON object to a dataclass: every field known, every mistake named."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import NoReturn, TypeVar, cast

from gymllm.errors import ConfigError, UnknownNameError
from gymllm_trainers.config_files import merge
from gymllm_trainers.serve.problems import RefusedError

T = TypeVar("T")

Unsupported = Mapping[str, tuple[object, str]]
"""Fields of a protocol that are not served: the one value that is let pass, and what to do instead."""


def parse_object(data: bytes, where: str = "the body") -> dict[str, object]:
    """The JSON object in a body.

    Raises:
        RefusedError: It is no JSON, or no object.
    """
    try:
        value: object = json.loads(data, parse_constant=_refuse_constant)
        if b"\\u" in data or b"\xed" in data:
            value = _without_halves(value)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"{where} is not valid JSON: {str(error)[:200]}.") from None
    if not isinstance(value, dict):
        raise RefusedError(
            400, f"{where} must be a JSON object, got {json.dumps(value)[:100]}."
        ) from None
    return cast("dict[str, object]", value)


def read_fields(
    kind: type[T],
    body: Mapping[str, object],
    *,
    where: str = "",
    harmless: frozenset[str] = frozenset(),
    unsupported: Unsupported | None = None,
) -> T:
    """The object as a dataclass whose fields all have defaults; null means the default.

    Args:
        kind: The dataclass.
        body: From a client.
        where: Of the object in the body ("sampling_params."), for errors.
        harmless: Fields that change no answer; let pass, whatever they hold.
        unsupported: Fields that are known and not served.

    Raises:
        RefusedError: An unknown field, with what is close; one of a wrong type; one that isn't served.
    """
    unsupported = unsupported or {}
    known = _names(kind)
    kept: dict[str, object] = {}
    for name, value in body.items():
        if name in unsupported:
            passes, instead = unsupported[name]
            if value is not None and value != passes:
                raise RefusedError(
                    400,
                    f"{where}{name} is not supported here{instead and f': {instead}'}.",
                    param=f"{where}{name}",
                    code="unsupported_parameter",
                )
        elif name in known:
            if value is not None:
                kept[name] = value
        elif name not in harmless:
            every = [*known, *unsupported, *harmless]
            problem = UnknownNameError("field", name, every)
            raise RefusedError(
                400,
                f"{problem}{f' It is in {where[:-1]}.' if where else ''}",
                param=f"{where}{name}",
                code="unknown_parameter",
            )
    try:
        return merge(kind(), kept)
    except ConfigError as error:
        name = str(error).split(" ", 1)[0]
        raise RefusedError(
            400, f"{where}{error}", param=f"{where}{name}" if name in known else None
        ) from error


def as_list(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """What a client may give as one or as a list."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def _without_halves(value: object) -> object:
    """The same, U+FFFD where half a surrogate pair stands: texts cut in the middle have them, and no answer
    or error that repeats one could be sent."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return json.loads(whole)
    return value


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON value")
