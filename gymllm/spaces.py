"""`Unicode`: the space of any text.

Gymnasium's own `Text` lists its characters: it rejects blanks and accents by default, and with all of
Unicode listed it pickles to tens of megabytes. `Unicode` only knows a longest length.
"""

# pyright: reportUnknownMemberType=false
# Gymnasium's functions over spaces are generic over types that its annotations leave partly unknown.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.spaces import utils as space_utils
from gymnasium.vector import utils as vector_utils

from gymllm.errors import ConfigError

LONGEST_SAMPLE = 32
_SAMPLE_CHARACTERS = (
    " \n\t0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~äéñøßçΔλжя中文字日本한글 אبة→∑🙂🚀"
)


class Unicode(spaces.Space[str]):
    """Any text of at most `max_length` characters.

    Samples are short (up to 32 characters) and mix alphabets, blanks and line breaks. In a batch it is
    a `Tuple` of `Unicode`, so a batch of texts is a tuple of strings.
    """

    def __init__(
        self, max_length: int = 1_000_000, *, seed: int | np.random.Generator | None = None
    ) -> None:
        if max_length < 0:
            raise ConfigError(f"max_length must be >= 0, got {max_length}.")
        self.max_length = max_length
        super().__init__(dtype=str, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: None = None, probability: None = None) -> str:
        """A short random text. Masks have no meaning here and are refused."""
        if mask is not None or probability is not None:
            raise ConfigError("Unicode can't be sampled with a mask or probabilities.")
        length = int(self.np_random.integers(min(self.max_length, LONGEST_SAMPLE) + 1))
        which = self.np_random.integers(len(_SAMPLE_CHARACTERS), size=length).tolist()
        return "".join(_SAMPLE_CHARACTERS[i] for i in which)

    def contains(self, x: object) -> bool:
        """Whether `x` is a string that is not too long."""
        return isinstance(x, str) and len(x) <= self.max_length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unicode) and other.max_length == self.max_length

    __hash__ = None  # type: ignore[assignment]  # spaces are mutable (their seed), as Gymnasium's are

    def __repr__(self) -> str:
        return f"Unicode({self.max_length})"


def is_text(space: spaces.Space[object]) -> bool:
    """Whether elements of the space are strings."""
    return isinstance(space, Unicode | spaces.Text)


# Gymnasium's functions over spaces dispatch on the class; these are the ones whose default refuses
# spaces it does not know. A text has no flat array, so flattening leaves it as it is, as for `Graph`.


@vector_utils.batch_differing_spaces.register(Unicode)
def _batch_differing(different: Sequence[Unicode]) -> spaces.Tuple[Any]:  # pyright: ignore[reportUnusedFunction]  # registered
    return spaces.Tuple(different)


@space_utils.flatdim.register(Unicode)
def _flat_dimension(space: Unicode) -> int:  # pyright: ignore[reportUnusedFunction]  # registered
    raise ValueError(
        f"{space} can't be flattened to an array of numbers: texts have no fixed size."
    )


@space_utils.flatten_space.register(Unicode)
def _flat_space(space: Unicode) -> Any:  # pyright: ignore[reportUnusedFunction]  # registered
    return space


@space_utils.flatten.register(Unicode)
@space_utils.unflatten.register(Unicode)
def _flat_text(space: Unicode, x: str) -> Any:  # pyright: ignore[reportUnusedFunction]  # registered
    return x
