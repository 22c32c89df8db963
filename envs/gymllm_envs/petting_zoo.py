"""`gymllm/PettingZoo-v0`: a turn-based game of PettingZoo in text, each player an agent.

gymnasium.make("gymllm/PettingZoo-v0", env_id="connect_four_v3")

`info["agent"]` names whose turn it is, `info["agent_rewards"]` what a step was worth to each; see `Env`.
"""

# PettingZoo's environments are made by modules that are looked up by name, so no type checker knows them.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from gymnasium import spaces

from gymllm.adapters.describe import LARGEST_DESCRIBED, describe_value
from gymllm.adapters.masks import Possible
from gymllm.adapters.parse import AnswerRule, Parse, how_to_answer, parser_for
from gymllm.env import Env
from gymllm.errors import ConfigError, MissingExtraError, UnknownNameError
from gymllm.pool import make_pool

ENV_ID = "gymllm/PettingZoo-v0"
INSTALL = 'pip install "gymllm-envs[pettingzoo]"'
MARKS = "XO"
"""Of the first player and of the second, on a board."""

CLASSIC = "classic/"
_VERSION = re.compile(r"[-_]v(\d+)$")
_VALID = re.compile(r"Valid actions: ([^\n]*)\.")


@dataclass(frozen=True, kw_only=True)
class Game:
    """What is known of a game beyond its spaces."""

    rules: str = ""
    """Said to each player at first; {mine} and {theirs} are the marks."""
    draw: Callable[[Any, str, str], str] | None = None
    """The board, from an observation's planes (own marks, the other's) and the marks."""
    action_names: tuple[str, ...] = ()


def _tic_tac_toe(planes: Any, mine: str, theirs: str) -> str:
    cells = [
        mine if own else theirs if other else str(number)
        for number, (own, other) in enumerate(planes.reshape(9, 2).tolist())
    ]
    return "\n".join(" ".join(cells[start : start + 3]) for start in (0, 3, 6))


def _connect_four(planes: Any, mine: str, theirs: str) -> str:
    rows = [
        " ".join(mine if own else theirs if other else "." for own, other in row)
        for row in planes.tolist()
    ]
    return "\n".join([" ".join(map(str, range(planes.shape[1]))), *rows])


GAMES = {
    "tictactoe": Game(
        rules="You play {mine} against {theirs} in tic-tac-toe: three of your marks in a row, column or "
        "diagonal win. A free cell is shown by its number.",
        draw=_tic_tac_toe,
    ),
    "connect_four": Game(
        rules="You play {mine} against {theirs} in Connect Four: a mark falls to the lowest free cell of "
        "the column that you choose; four of yours in a row, column or diagonal win.",
        draw=_connect_four,
    ),
    "rps": Game(
        rules="You play rock, paper, scissors; the observation is what the other played last: 0 rock, "
        "1 paper, 2 scissors, 3 nothing yet.",
        action_names=("rock", "paper", "scissors"),
    ),
}
"""By id, without its version. Others are shown as their "ansi" picture or written out."""


@final
class PettingZoo(Env):
    """A game of PettingZoo's AEC interface.

    A player's first observation is the rules and the state; later ones are the state alone, which ends
    with the possible actions where the game says so. After an action that can't be read or is not
    possible the game has not moved and the same player is asked again, told what was wrong; `max_invalid`
    of them in a row lose the game: it is terminated, with `forfeit_reward` for that player and
    `info["forfeited_by"]`. Rewards are the game's own.
    """

    waits = False

    def __init__(  # pyright: ignore[reportInconsistentConstructor]  Env.__new__ takes anything
        self,
        *,
        env_id: str = "tictactoe_v3",
        env_kwargs: Mapping[str, Any] | None = None,
        action_names: Sequence[str] | None = None,
        answer_rule: AnswerRule = "marked",
        invalid_reward: float = 0.0,
        max_invalid: int = 3,
        forfeit_reward: float = -1.0,
        render_mode: str | None = None,
    ) -> None:
        """Makes the game.

        Args:
            env_id: PettingZoo's id ("classic/tictactoe-v3"), of a classic game also as its module is
                called ("tictactoe_v3").
            env_kwargs: The game's own arguments.
            action_names: What the actions are called, in order, where they are `Discrete`. By default
                as `GAMES` says, else they have numbers.
            answer_rule: Which of several actions in an answer counts; see `AnswerRule`.
            invalid_reward: Reward of an action that can't be read or is not possible.
            max_invalid: Such actions in a row that lose the game, >= 1.
            forfeit_reward: Reward of the last of them.
            render_mode: As for `Env.render`.

        Raises:
            MissingExtraError: PettingZoo, or what this game needs besides, is not installed.
            UnknownNameError: It has no such game.
            ConfigError: A setting is wrong, or the game can't be shown in text.
        """
        if max_invalid < 1:
            raise ConfigError(f"max_invalid must be >= 1, got {max_invalid}.")
        for name, reward in (
            ("invalid_reward", invalid_reward),
            ("forfeit_reward", forfeit_reward),
        ):
            if not math.isfinite(reward):
                raise ConfigError(f"{name} must be a finite number, got {reward}.")
        self.render_mode = render_mode
        self._id = env_id
        self._known = GAMES.get(_VERSION.sub("", env_id.removeprefix(CLASSIC)), Game())
        self._game = self._make(_maker(env_id), dict(env_kwargs or {}))
        self.possible_agents: tuple[str, ...] = tuple(self._game.possible_agents)
        """Everyone who may play, by name."""
        self._names = tuple(action_names or self._known.action_names) or None
        self._rule: AnswerRule = answer_rule
        self._parsers: dict[str, Parse] = {
            agent: parser_for(self._game.action_space(agent), names=self._names, rule=answer_rule)
            for agent in self.possible_agents
        }
        self._invalid_reward, self._max_invalid = float(invalid_reward), max_invalid
        self._forfeit_reward = float(forfeit_reward)
        self._told: set[str] = set()
        self._invalid_in_a_row = 0
        self._possible: Possible | None = None
        self._state = ""

    def _make(self, make: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        try:
            game = make(**kwargs)
        except Exception as problem:
            if not isinstance(problem, ImportError) and not isinstance(
                problem.__cause__, ImportError
            ):
                raise
            extra = self._id.rpartition("/")[0] or CLASSIC[:-1]
            raise MissingExtraError(
                f'{self._id} needs more than PettingZoo: pip install "pettingzoo[{extra}]" ({problem})'
            ) from problem
        if self._known.draw is not None or "render_mode" in kwargs:
            return game
        if "ansi" in game.metadata.get("render_modes", ()):
            game.close()
            return make(render_mode="ansi", **kwargs)
        for agent in game.possible_agents:
            space, _ = _without_mask(game.observation_space(agent), None)
            if math.prod(space.shape or ()) > LARGEST_DESCRIBED:
                game.close()
                raise ConfigError(
                    f"{self._id} can't be played in text: its observation of shape {space.shape} is too "
                    'large to be written out, and it has no render mode "ansi".'
                )
        return game

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Deals; the first player is asked."""
        self._game.reset(seed=int(self.np_random.integers(2**31)), options=options)
        self._told = set()
        self._invalid_in_a_row = 0
        self._look()
        agent = self._game.agent_selection
        return self._shown(agent), {"agent": agent}

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Acts for the agent whose turn it is."""
        agent = self._game.agent_selection
        try:
            parsed = self._parsers[agent](action)
            if self._possible is not None and not self._possible.allows(parsed):
                raise ValueError(f"{self._possible.name(parsed)} is not possible now.")
        except ValueError as problem:
            return self._refused(agent, str(problem))
        self._invalid_in_a_row = 0
        self._game.step(parsed)
        # Before the ended are let go, which sets everyone's reward to 0.
        rewards = {name: float(reward) for name, reward in self._game.rewards.items()}
        terminated, truncated = self._let_go()
        info: dict[str, Any] = {"agent_rewards": rewards, "invalid_action": False}
        reward = rewards.get(agent, 0.0)
        if terminated or truncated:
            return _result(rewards), reward, terminated, truncated, info
        self._look()
        info["agent"] = following = self._game.agent_selection
        return self._shown(following), reward, False, False, info

    async def aclose(self) -> None:
        self._game.close()

    def _refused(self, agent: str, problem: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._invalid_in_a_row += 1
        lost = self._invalid_in_a_row >= self._max_invalid
        reward = self._forfeit_reward if lost else self._invalid_reward
        info: dict[str, Any] = {"agent_rewards": {agent: reward}, "invalid_action": True}
        if lost:
            info["forfeited_by"] = agent
            return f"{problem}\nThat loses the game.", reward, True, False, info
        info["agent"] = agent
        how = how_to_answer(self._game.action_space(agent), names=self._names, rule=self._rule)
        return f"{problem}\n{how}\n{self._state}", reward, False, False, info

    def _let_go(self) -> tuple[bool, bool]:
        """Lets those go whose game has ended; whether that was everyone: terminated, truncated."""
        game, terminated = self._game, False
        while game.agents:
            agent = game.agent_selection
            if not (game.terminations[agent] or game.truncations[agent]):
                return False, False
            terminated |= bool(game.terminations[agent])
            game.step(None)
        return terminated, not terminated

    def _look(self) -> None:
        """Takes in what the agent whose turn it is sees, and can do."""
        game = self._game
        agent = game.agent_selection
        space, observation = game.observation_space(agent), game.observe(agent)
        mask = game.infos.get(agent, {}).get("action_mask")
        if isinstance(observation, dict) and "action_mask" in observation:
            mask = observation["action_mask"]
        space, observation = _without_mask(space, observation)
        action_space = game.action_space(agent)
        self._possible = None
        if mask is not None and isinstance(action_space, spaces.Discrete):
            allowed = np.asarray(mask).astype(np.bool)
            if allowed.any():
                self._possible = Possible((allowed,), (int(action_space.start),), self._names or ())
        if self._known.draw is not None:
            mine, theirs = self._marks(agent)
            self._state = self._known.draw(observation, mine, theirs)
        elif game.render_mode == "ansi":
            self._state = str(game.render())
        else:
            self._state = describe_value(space, observation)
        if self._possible is not None:
            self._state += f"\n{self._possible.shown()}"

    def _shown(self, agent: str) -> str:
        if agent in self._told:
            return self._state
        self._told.add(agent)
        mine, theirs = self._marks(agent)
        rules = self._known.rules.format(mine=mine, theirs=theirs)
        how = how_to_answer(self._game.action_space(agent), names=self._names, rule=self._rule)
        return "\n".join([rules or f"You are {agent} in {self._id}.", how, self._state])

    def _marks(self, agent: str) -> tuple[str, str]:
        return (MARKS[0], MARKS[1]) if agent == self.possible_agents[0] else (MARKS[1], MARKS[0])


def _without_mask(space: Any, observation: Any) -> tuple[Any, Any]:
    """The part of an observation that is looked at, where the possible actions are beside it."""
    if isinstance(space, spaces.Dict) and {"observation", "action_mask"} == set(space.spaces):
        return space["observation"], None if observation is None else observation["observation"]
    return space, observation


def _result(rewards: Mapping[str, float]) -> str:
    return f"The game is over: {', '.join(f'{agent} {r:g}' for agent, r in rewards.items())}."


def _maker(env_id: str) -> Callable[..., Any]:
    """What makes a game."""
    try:
        import pettingzoo  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as problem:
        raise MissingExtraError(f"{ENV_ID} needs the package pettingzoo: {INSTALL}.") from problem
    name = _VERSION.sub(r"-v\1", env_id)
    name = name if "/" in name else f"{CLASSIC}{name}"
    registry = pettingzoo.aec_registry
    if name not in registry:
        raise UnknownNameError("game of PettingZoo", name, registry)
    return functools.partial(pettingzoo.make, "aec", name)


def scripted_action(text: str, *, rng: np.random.Generator) -> str:
    """One of the possible actions that a text says last, all as likely; "0" if it says none."""
    found = _VALID.findall(text)
    return str(rng.choice(found[-1].split(", "))) if found else "0"


make_vector = functools.partial(make_pool, ENV_ID)
"""What `gymnasium.make_vec` calls: games in a pool, each stepped for whoever's turn it is."""
