"""The infos of many environments as one, in Gymnasium's form, whatever they hold.

Each key has an array with a place for each environment, and `_key` says for which it was given; dicts hold
such arrays again. Where environments disagree about a key's type (a score here, None there) its array is one
of objects, and whole numbers become floats beside floats: nothing raises, and nothing is cut off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
UNBATCHED = "final_obs"
"""Its values are kept as they are, for an array of them would not be wanted."""


def add_info(infos: dict[str, Any], info: Mapping[str, Any], index: int, count: int) -> None:
    """Adds the info of one of `count` environments."""
    for key, value in info.items():
        held: Any = infos.get(key)
        given: Any = infos.get(f"_{key}")
        if given is None:
            given = np.zeros(count, np.bool)
        if held is None:
            held = _room_for(value, count) if key != UNBATCHED else np.full(count, None, object)
        elif key != UNBATCHED:
            held = _widened(held, given, value)
        if isinstance(held, dict):
            add_info(cast("dict[str, Any]", held), value, index, count)
        else:
            held[index] = value
        given[index] = True
        infos[key], infos[f"_{key}"] = held, given


def _room_for(value: Any, count: int) -> dict[str, Any] | Array:
    if isinstance(value, dict):
        return {}
    if isinstance(value, np.ndarray):
        array = cast("Array", value)
        return np.zeros((count, *array.shape), array.dtype)
    dtype = None if isinstance(value, np.bool) else _number_type(value)
    return np.full(count, None, object) if dtype is None else np.zeros(count, dtype)


def _widened(held: Any, given: Array, value: Any) -> Any:
    """What is held already, so that it can hold `value` too."""
    if isinstance(held, dict):
        return cast("object", held) if isinstance(value, dict) else _objects(held, given)
    array = cast("Array", held)
    shape, dtype = (), _number_type(value)
    if isinstance(value, np.ndarray):
        shape, dtype = cast("Array", value).shape, cast("Array", value).dtype
    if array.dtype == object and array.ndim == 1:
        return array
    if dtype is None or shape != array.shape[1:] or not _are_alike(dtype, array.dtype):
        return _objects(array, given)
    return array if dtype == array.dtype else array.astype(np.promote_types(array.dtype, dtype))


def _are_alike(one: np.dtype[Any], other: np.dtype[Any]) -> bool:
    """Whether an array can hold both as they are: all numbers are alike."""
    return one.kind == other.kind or {one.kind, other.kind} <= set("iufc")


def _number_type(value: Any) -> np.dtype[Any] | None:
    """Of a number that an array of numbers holds; else None."""
    if not isinstance(value, bool | int | float | np.number | np.bool):
        return None
    dtype = np.asarray(cast("object", value)).dtype
    return dtype if dtype.kind != "O" else None  # an int may be too large


def _objects(held: Any, given: Array) -> Array:
    """What is held, as an array of objects: what each environment gave."""
    objects = np.full(len(given), None, object)
    for index in given.nonzero()[0].tolist():
        objects[index] = _taken_out(held, index)
    return objects


def _taken_out(held: Any, index: int) -> object:
    if isinstance(held, dict):
        parts = cast("dict[str, Any]", held)
        return {
            key: _taken_out(part, index)
            for key, part in parts.items()
            if f"_{key}" in parts and parts[f"_{key}"][index]
        }
    value = cast("Array", held)[index]
    return cast("object", value.item() if isinstance(value, np.generic) else value)
