"""Who plays in an environment with several agents, and who of them is trained.

Self-play is a team whose players share the run's engine; a frozen opponent has an engine of its own and is
not trainable; a user simulator has another agent, with its own prompt, and is not trainable either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, cast

import numpy as np

from gymllm.agent import AgentFactory
from gymllm.engine import Engine
from gymllm.errors import ConfigError

ANYONE = "*"
"""The key of a team whose player plays every agent that has none of its own."""


class Player(NamedTuple):
    """Plays one agent of an environment.

    A tuple for the reason that `Turn` is one: an episode of one agent makes it on the way.
    """

    make_agent: AgentFactory
    """Makes the agent, anew in each episode: its prompt, its tools and its ledger."""
    engine: Engine | None = None
    """The model behind it; None is the run's own. Not closed by whoever plays."""
    trainable: bool = True
    """Whether its trajectories come out, in a group of their own."""


Team = Mapping[str, Player]
"""Players by the name that the environment calls their agent by (`info["agent"]`), or `ANYONE`. The agent of
an environment that names none is called ""."""


def team_of(make_agent: AgentFactory | None, team: Team | None) -> Team:
    """The team, or one agent as a team: the one that has no name.

    Raises:
        ConfigError: Not exactly one of them was given, or the team has nobody.
    """
    if (make_agent is None) == (team is None):
        raise ConfigError("give make_agent= for one agent, or team= for several; one of them.")
    if make_agent is not None:
        return {"": Player(make_agent)}
    if not team:
        raise ConfigError("team must have at least one player, got none.")
    return team


def trained_agents(team: Team) -> tuple[str, ...]:
    """The agents that each episode gives a trajectory of, known before anything is played.

    Raises:
        ConfigError: There is none, or `ANYONE` is trainable: who that is shows only in play.
    """
    names = tuple(name for name, player in team.items() if player.trainable)
    if ANYONE in names:
        raise ConfigError(
            f"player {ANYONE!r} can't be trainable, because groups are made for agents that are known "
            "beforehand: name each agent that is trained."
        )
    if not names:
        raise ConfigError(f"nobody of the team is trainable, got {', '.join(team)}.")
    return names


def finite_reward(value: object) -> float | None:
    """What an environment gave as a reward as a float; None if it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return None
    try:
        reward = float(cast("float", value))
    except OverflowError:  # an int that no float holds
        return None
    return reward if math.isfinite(reward) else None
