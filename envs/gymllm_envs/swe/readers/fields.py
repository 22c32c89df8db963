"""Fields of rows, checked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import cast

from gymllm.errors import ConfigError
from gymllm_envs.swe.readers.rows import Row


def text(row: Row, name: str, where: str, *, needed: bool = True) -> str:
    """A text; empty where it may be missing.

    Raises:
        ConfigError: It is missing, or no text.
    """
    value = row.get(name)
    if value is None and not needed:
        return ""
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {name} must be a text, got {value!r}.")
    return value


def names(value: object, where: str) -> tuple[str, ...]:
    """Test names: a list, or the JSON text of one.

    Raises:
        ConfigError: It is neither.
    """
    found = value
    if isinstance(value, str):
        try:
            found = cast("object", json.loads(value)) if value.strip() else ()
        except json.JSONDecodeError as problem:
            raise ConfigError(f"{where} must be a list of names, got {value!r}.") from problem
    if isinstance(found, list | tuple):
        listed = cast("Sequence[object]", found)
        if all(isinstance(name, str) for name in listed):
            return tuple(cast("Sequence[str]", listed))
    raise ConfigError(f"{where} must be a list of names, got {value!r}.")


def rest(row: Row, used: Sequence[str]) -> dict[str, object]:
    """The other fields; none of them says anything to us."""
    return {name: value for name, value in row.items() if name not in used and value is not None}
