"""`gymllm/Gym-v0`: any Gymnasium environment in text, by its id.

gymnasium.make("gymllm/Gym-v0", env_id="FrozenLake-v1", env_kwargs={"is_slippery": False})
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from gymllm.adapters.text_adapter import TextAdapter, is_text_env
from gymllm.errors import ConfigError
from gymllm.pool import make_pool
from gymllm.registration import GYM_ID, make_to_describe


def make_gym(
    env_id: str | None = None, *, env_kwargs: Mapping[str, Any] | None = None, **settings: Any
) -> TextAdapter:
    """Makes an environment and adapts it.

    Args:
        env_id: Its id, as `gymllm.make` takes it.
        env_kwargs: Its own arguments. Without a `render_mode` it has the one that shows most in text.
        **settings: What `TextAdapter` takes; `render_mode` says how the adapter renders.

    Raises:
        UnknownNameError: Nothing is registered by that name.
        ConfigError: No id was given, or it is one of an environment that is played in text already, or the
            environment can't be made or adapted.
    """
    if env_id is None:
        raise ConfigError(
            f'{GYM_ID} needs the id of what is played: make("{GYM_ID}", env_id="CartPole-v1").'
        )
    env = make_to_describe(env_id, dict(env_kwargs or {}))
    try:
        if is_text_env(env):
            raise ConfigError(f'{env_id} is played in text already: make("{env_id}") instead.')
        return TextAdapter(env, **settings)
    except BaseException:
        env.close()
        raise


# Gymnasium reads these from an entry point before it calls it.
make_gym.metadata = TextAdapter.metadata  # type: ignore[attr-defined]  # a function has what it is given
make_vector = functools.partial(make_pool, GYM_ID)
"""What `gymnasium.make_vec` calls: adapted environments in a pool; takes what `make_gym` and a pool take."""
