"""What callers give to environments, checked before an environment is asked.

A mistake of the caller's is said to the caller: no environment breaks of it, and no episode fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np

from gymllm.errors import ConfigError, ConfigTypeError


def checked_seed(seed: object) -> int | None:
    """A seed as `gymnasium.Env.reset` takes it.

    Raises:
        ConfigError: It is no whole number, or negative.
    """
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise ConfigTypeError(
            f"a seed must be a whole number >= 0 or None, got {seed!r} of type {type(seed).__name__}."
        )
    if seed < 0:
        raise ConfigError(f"a seed must be >= 0, got {seed}.")
    return int(cast("int", seed))


def checked_options(options: object) -> dict[str, object] | None:
    """Options as `gymnasium.Env.reset` takes them, copied; None for empty ones.

    Raises:
        ConfigTypeError: They are no mapping.
    """
    if options is None:
        return None
    if not isinstance(options, Mapping):
        raise ConfigTypeError(
            "reset's options must be a dict by the options' names, or None, got "
            f"{options!r} of type {type(options).__name__}."
        )
    return dict(cast("Mapping[str, object]", options)) or None
