"""`gymllm/Gym-v0`: any Gymnasium environment in text, by its id.

gymnasium.make("gymllm/Gym-v0", env_id="FrozenLake-v1", env_kwargs={"is_slippery": False})
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from gymllm.adapters.parse import AnswerRule
from gymllm.adapters.text_adapter import TextAdapter, is_text_env
from gymllm.errors import ConfigError
from gymllm.pool import make_pool
from gymllm.registration import GYM_ID, make_to_describe


def make_gym(
    env_id: str | None = None,
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    instructions: str | None = None,
    action_names: Sequence[str] | None = None,
    answer_rule: AnswerRule = "marked",
    invalid_reward: float = 0.0,
    max_invalid: int | None = 5,
    max_turns: int | None = None,
    render_mode: str | None = None,
) -> TextAdapter:
    """Makes an environment and adapts it.

    Args:
        env_id: Its id, as `gymllm.make` takes it.
        env_kwargs: Its own arguments. Without a `render_mode` it has the one that shows most in text.
        instructions: As for `TextAdapter`; so are the others.
        action_names: What its actions are called.
        answer_rule: Which of several actions in an answer counts.
        invalid_reward: Reward of a turn without an action that can be taken.
        max_invalid: Such turns in a row that truncate the episode.
        max_turns: Turns that truncate the episode.
        render_mode: How the adapter renders; as for `Env.render`.

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
    if is_text_env(env):
        env.close()
        raise ConfigError(f'{env_id} is played in text already: make("{env_id}") instead.')
    return TextAdapter(
        env,
        instructions=instructions,
        action_names=action_names,
        answer_rule=answer_rule,
        invalid_reward=invalid_reward,
        max_invalid=max_invalid,
        max_turns=max_turns,
        render_mode=render_mode,
    )


# Gymnasium reads these from an entry point before it calls it.
make_gym.metadata = TextAdapter.metadata  # type: ignore[attr-defined]  # a function has what it is given
make_vector = functools.partial(make_pool, GYM_ID)
"""What `gymnasium.make_vec` calls: adapted environments in a pool; takes what `make_gym` and a pool take."""
