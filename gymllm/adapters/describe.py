"""An observation as text, or as an image where nothing else is possible."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# Gymnasium's spaces are generic over types that its own annotations leave partly unknown.

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from gymnasium import spaces

from gymllm.adapters.registry import AnyEnv, AnySpace, description_for, same_space
from gymllm.errors import ConfigError, EnvTypeError
from gymllm.spaces import Image, is_text

Describe = Callable[[Any], str]
"""Observation to text. The observation is whatever the wrapped environment's space holds."""
Parts = tuple[str | Image, ...]

LARGEST_DESCRIBED = 256
"""Arrays with more numbers than this are not written out: images become image parts, and everything else
needs a describer."""
MOST_FIELDS = 32
"""A `Box` of one axis with at most this many numbers is written one numbered field a line."""
SIGNIFICANT_DIGITS = 4


@dataclass(frozen=True)
class Describer:
    """How one environment's observations are shown."""

    describe: Callable[[Any], Parts]
    images: bool = False
    """Whether there are images among the parts."""

    def __call__(self, observation: Any) -> Parts:
        """Texts and images, in the order to read them."""
        return self.describe(observation)


def text_describer(describe: Describe) -> Describer:
    """A describer of a function that returns a text."""

    def parts(observation: Any) -> Parts:
        text = describe(observation)
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]  users' code
            raise EnvTypeError(f"a describer must return a str, got {text!r} of {describe!r}.")
        return (text,)

    return Describer(parts)


def describer_for(env: AnyEnv) -> Describer:
    """The first of these that the environment has.

    1. What is registered for it (`register_describer`), unless a wrapper changed the observation's space.
    2. Its "ansi" picture, if that is its render mode, with what is coloured marked.
    3. Its `pprint_grid()`, and the texts of a `Dict` observation.
    4. The observation written out, with images in it as image parts.
    5. Its "rgb_array" picture, if that is its render mode, as an image part.

    Raises:
        ConfigError: There is none: the observation is too large to be written out. Or the registered
            names don't fit the observation.
    """
    space, inner = env.observation_space, env.unwrapped
    description = description_for(env)
    if description is not None and same_space(space, inner.observation_space):
        describe, fields = description.describe, description.fields
        if describe is not None:
            return text_describer(lambda observation: describe(inner, observation))
        if fields:
            _check_fields(space, fields)
            return text_describer(lambda observation: describe_fields(observation, fields))
    if is_text(space):
        return text_describer(str)
    if env.render_mode == "ansi":
        return text_describer(lambda _: mark_highlights(str(cast("object", env.render()))))
    grid: Any = getattr(inner, "pprint_grid", None)
    if callable(grid):
        return text_describer(
            lambda observation: "\n".join([*_texts(observation), mark_highlights(str(grid()))])
        )
    too_large = _too_large(space)
    if too_large is None:
        return _value_describer(space)
    if env.render_mode == "rgb_array":
        return Describer(lambda _: (_rgb(cast("Any", env.render())),), images=True)
    raise ConfigError(
        f"an observation of shape {too_large.shape} is too large to be written out; give TextAdapter "
        "a describe=, register one with register_describer, or make the environment with "
        'render_mode="ansi" or "rgb_array" if it has them.'
    )


def needed_render_mode(env: AnyEnv) -> str | None:
    """The render mode that an environment is best made with to be shown in text, or None: any."""
    modes = env.metadata.get("render_modes") or ()
    space, inner = env.observation_space, env.unwrapped
    description = description_for(env)
    registered = description is not None and description.shows
    if is_text(space) or (registered and same_space(space, inner.observation_space)):
        return None
    if "ansi" in modes:
        return "ansi"
    needs_picture = not hasattr(inner, "pprint_grid") and _too_large(space) is not None
    return "rgb_array" if needs_picture and "rgb_array" in modes else None


def describe_value(space: AnySpace, value: Any) -> str:
    """An element of a space as text.

    Texts stay as they are; numbers are written plainly, floats with 4 significant digits; arrays as
    lists; a `Tuple` as its parts between brackets; a `Dict` as one `name: value` a line. An image is
    "(image)".
    """
    if is_text(space):
        return str(value)
    if isinstance(space, spaces.Discrete):
        return str(int(value))
    if isinstance(space, spaces.Tuple):
        parts = zip(space.spaces, value, strict=True)
        return f"({', '.join(describe_value(part, v) for part, v in parts)})"
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{k}: {describe_value(p, value[k])}" for k, p in space.spaces.items())
    if is_image(space):
        return "(image)"
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return json.dumps(rounded(np.asarray(value).tolist()))
    written = space.to_jsonable([value])[0]
    return written if isinstance(written, str) else json.dumps(written)


def describe_fields(values: Any, names: Sequence[str]) -> str:
    """Numbers with their names, one a line."""
    numbers = rounded(np.asarray(values).ravel().tolist())
    return "\n".join(f"{name}: {number}" for name, number in zip(names, numbers, strict=True))


def mark_highlights(picture: str) -> str:
    """Terminal colours as marks: what was coloured stands between square brackets."""
    marked = re.sub(r"\x1b\[(?!0?m)[\d;]*m(.*?)\x1b\[0?m", r"[\1]", picture, flags=re.DOTALL)
    return re.sub(r"\x1b\[[\d;]*m", "", marked).rstrip("\n")


def is_image(space: AnySpace) -> bool:
    """Whether elements are pictures, grey or coloured, too large to be written out."""
    return (
        isinstance(space, spaces.Box)
        and space.dtype == np.uint8
        and int(np.prod(space.shape)) > LARGEST_DESCRIBED
        and (len(space.shape) == 2 or (len(space.shape) == 3 and space.shape[2] in (1, 3)))
    )


def parts_of(space: AnySpace) -> Iterable[AnySpace] | None:
    """The spaces that a `Dict` or `Tuple` holds; None for others."""
    if isinstance(space, spaces.Dict):
        return space.spaces.values()
    return space.spaces if isinstance(space, spaces.Tuple) else None


def rounded(value: Any) -> Any:
    """Floats with 4 significant digits, in lists too."""
    if isinstance(value, list):
        return [rounded(part) for part in cast("list[Any]", value)]
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if isinstance(value, float) else value


def _value_describer(space: AnySpace) -> Describer:
    if is_image(space):
        return Describer(lambda observation: (_rgb(observation),), images=True)
    if isinstance(space, spaces.Box) and len(space.shape) == 1 and space.shape[0] <= MOST_FIELDS:
        names = [f"field {i}" for i in range(space.shape[0])]
        return text_describer(lambda observation: describe_fields(observation, names))
    if not _has_image(space):
        return text_describer(lambda observation: describe_value(space, observation))
    return Describer(
        lambda observation: (describe_value(space, observation), *_images(space, observation)),
        images=True,
    )


def _check_fields(space: AnySpace, fields: Sequence[str]) -> None:
    size = int(np.prod(space.shape)) if isinstance(space, spaces.Box) else 0
    if size != len(fields):
        raise ConfigError(
            f"{len(fields)} names were registered for the numbers of {space}, which has {size}: "
            f"{', '.join(fields)}. Correct fields= of register_describer."
        )


def _texts(observation: Any) -> list[str]:
    if not isinstance(observation, dict):
        return []
    values = cast("dict[str, Any]", observation)
    return [f"{name}: {value}" for name, value in values.items() if isinstance(value, str)]


def _too_large(space: AnySpace) -> AnySpace | None:
    """The first part that can't be written out and is no image."""
    parts = parts_of(space)
    if parts is not None:
        return next((found for part in parts if (found := _too_large(part)) is not None), None)
    if space.shape is None or is_image(space):
        return None
    return space if int(np.prod(space.shape)) > LARGEST_DESCRIBED else None


def _has_image(space: AnySpace) -> bool:
    parts = parts_of(space)
    return is_image(space) if parts is None else any(map(_has_image, parts))


def _images(space: AnySpace, value: Any) -> list[Image]:
    """The images in a value, in the order in which its text names them."""
    if is_image(space):
        return [_rgb(value)]
    if isinstance(space, spaces.Dict):
        held = [(part, value[key]) for key, part in space.spaces.items()]
    elif isinstance(space, spaces.Tuple):
        held = list(zip(space.spaces, value, strict=True))
    else:
        return []
    return [image for part, v in held for image in _images(part, v)]


def _rgb(pixels: Any) -> Image:
    """Pixels of shape [H, W, 3], copied, because environments write into their screens again."""
    array = np.array(pixels, np.uint8)
    if array.ndim == 2:
        array = array[:, :, None]
    return np.repeat(array, 3, axis=2) if array.shape[2] == 1 else array
