"""Scripted players of gymllm's environments, by id: baselines, and what a warm start imitates."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gymllm.errors import UnknownNameError
from gymllm_envs import frozen_lake, petting_zoo, terminal
from gymllm_envs.terminal import default_tasks

ScriptedPlayer = Callable[[str, np.random.Generator, float], str]
"""From a text with the latest observation in it, a generator and a skill of 0 to 1, an action."""


def _frozen_lake(text: str, rng: np.random.Generator, skill: float) -> str:
    return frozen_lake.scripted_action(text, rng=rng, skill=skill)


def _petting_zoo(text: str, rng: np.random.Generator, skill: float) -> str:
    """Plays at random, whatever its skill: one player for every game that says what is possible."""
    return petting_zoo.scripted_action(text, rng=rng)


def _terminal(text: str, rng: np.random.Generator, skill: float) -> str:
    return default_tasks.scripted_action(text, rng=rng, skill=skill)


SCRIPTED_PLAYERS: dict[str, ScriptedPlayer] = {
    frozen_lake.ENV_ID: _frozen_lake,
    petting_zoo.ENV_ID: _petting_zoo,
    terminal.ENV_ID: _terminal,
}
"""Every scripted player."""


def scripted_player(env_id: str) -> ScriptedPlayer:
    """The scripted player of an environment.

    Raises:
        UnknownNameError: It has none.
    """
    try:
        return SCRIPTED_PLAYERS[env_id]
    except KeyError:
        raise UnknownNameError(
            "scripted player for environment", env_id, SCRIPTED_PLAYERS
        ) from None
