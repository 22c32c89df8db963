"""Which actions are possible now, where an environment says so.

The mask is `info["action_mask"]`, as Gymnasium's Taxi gives it, or what a method `action_masks()` of the
innermost environment returns.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# Gymnasium's spaces are generic over types that its own annotations leave partly unknown.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from gymllm.adapters.registry import AnyEnv, AnySpace


@dataclass(frozen=True)
class Possible:
    """The possible actions of a `Discrete`, or of each position of a `MultiDiscrete`."""

    masks: tuple[npt.NDArray[np.bool], ...]
    starts: tuple[int, ...]
    names: Sequence[str]
    """Of a `Discrete`'s actions; empty: they have numbers."""

    def allows(self, action: Any) -> bool:
        """Whether an action of the space is possible."""
        indices = np.atleast_1d(action) - np.asarray(self.starts)
        return all(bool(mask[i]) for mask, i in zip(self.masks, indices.tolist(), strict=True))

    def shown(self) -> str:
        """The line that lists them."""
        choices = [
            (np.flatnonzero(mask) + start).tolist()
            for mask, start in zip(self.masks, self.starts, strict=True)
        ]
        if len(choices) > 1:
            parts = (f"{i}: {', '.join(map(str, c))}" for i, c in enumerate(choices))
            return f"Valid numbers by position: {'; '.join(parts)}."
        return f"Valid actions: {', '.join(self.name(number) for number in choices[0])}."

    def name(self, action: Any) -> str:
        """What an action is called."""
        if self.names:
            return self.names[int(action) - self.starts[0]]
        return str(np.asarray(action).tolist())


def possible_actions(
    env: AnyEnv, info: Mapping[str, Any], names: Sequence[str] = ()
) -> Possible | None:
    """What the environment says is possible after a reset or step with this `info`.

    None: it doesn't say, or its mask does not fit the action space (a wrapper has changed one of them),
    or it allows nothing.
    """
    mask: Any = info.get("action_mask")
    if mask is None:
        method = getattr(env.unwrapped, "action_masks", None)
        mask = method() if callable(method) else None
    if mask is None:
        return None
    space = env.action_space
    masks = _split(space, mask)
    if masks is None or not all(part.any() for part in masks):
        return None
    if isinstance(space, spaces.Discrete):
        return Possible(masks, (int(space.start),), names)
    return Possible(masks, tuple(space.start.tolist()), ())  # type: ignore[attr-defined]  # MultiDiscrete


def _split(space: AnySpace, mask: Any) -> tuple[npt.NDArray[np.bool], ...] | None:
    if isinstance(space, spaces.Discrete):
        sizes = [int(space.n)]
    elif isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        sizes = space.nvec.tolist()
    else:
        return None
    if isinstance(mask, tuple | list) and len(mask) == len(sizes) > 1:
        parts = [np.asarray(part) for part in mask]
    else:
        flat = np.asarray(mask)
        if flat.shape != (sum(sizes),):
            return None
        parts = np.split(flat, np.cumsum(sizes)[:-1])
    if [part.shape for part in parts] != [(size,) for size in sizes]:
        return None
    return tuple(part.astype(np.bool) for part in parts)
