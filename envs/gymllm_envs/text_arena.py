"""`gymllm/TextArena-v0`: a game of TextArena, each player an agent.

gymnasium.make("gymllm/TextArena-v0", env_id="ConnectFour-v0")

`info["agent"]` names whose turn it is: "player_0", "player_1", ...; see `Env`.
"""

# TextArena says little of its types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, final

import numpy as np

from gymllm.env import Env
from gymllm.errors import ConfigError, MissingExtraError, UnknownNameError
from gymllm.pool import make_pool

ENV_ID = "gymllm/TextArena-v0"
INSTALL = 'pip install "gymllm-envs[textarena]"'
RAW = "-raw"
"""How TextArena calls a game whose observations are not wrapped."""

_RANDOM = threading.Lock()
"""Held while a game has the process's own generators."""


@final
class TextArena(Env):
    """A game of TextArena.

    A player is shown the rules at first and then what was said and done since its last turn: messages of
    the game as they are, the newest board alone, and what the others said. (An id with wrappers of
    TextArena's own, such as "TicTacToe-v0-train", is shown as those say.) An action that the game refuses
    is asked for again, with the reason; one too many in a row loses the game. Rewards come at the end.

    The games draw from `random` and `numpy.random`; here each has generators of its own, put in their
    place while it is called.
    """

    waits = False

    def __init__(  # pyright: ignore[reportInconsistentConstructor]  Env.__new__ takes anything
        self,
        *,
        env_id: str = "TicTacToe-v0",
        num_players: int = 2,
        env_kwargs: Mapping[str, Any] | None = None,
        max_invalid: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        """Makes the game.

        Args:
            env_id: TextArena's name of it.
            num_players: How many play, >= 1; each game takes some numbers.
            env_kwargs: The game's own arguments.
            max_invalid: Refused actions in a row that lose the game, >= 1; None: as the game says, two as
                a rule.
            render_mode: As for `Env.render`.

        Raises:
            MissingExtraError: TextArena is not installed.
            UnknownNameError: It has no such game.
            ConfigError: A setting is wrong.
        """
        if num_players < 1:
            raise ConfigError(f"num_players must be >= 1, got {num_players}.")
        if max_invalid is not None and max_invalid < 1:
            raise ConfigError(f"max_invalid must be >= 1 or None, got {max_invalid}.")
        self.render_mode = render_mode
        self._id, self._players, self._max_invalid = env_id, num_players, max_invalid
        self._generators: tuple[Any, Any] = random.Random(0).getstate(), _numpy_state(0)
        make = _maker(env_id)
        with self._own_random():
            self._game = make(**(env_kwargs or {}))
        self.possible_agents = tuple(f"player_{number}" for number in range(num_players))
        """Everyone who may play, by name."""
        self._player = 0

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Starts a game.

        Raises:
            ConfigError: Options were given, there are none; or it is no game for so many players.
        """
        if options:
            raise ConfigError(f"{ENV_ID} takes no reset options, got {sorted(options)}.")
        drawn = int(self.np_random.integers(2**31))
        self._generators = random.Random(drawn).getstate(), _numpy_state(drawn)
        with self._own_random():
            try:
                self._game.reset(num_players=self._players, seed=drawn)
            except AssertionError as problem:
                raise ConfigError(
                    f"{self._id} can't be played by num_players = {self._players}: {problem}"
                ) from problem
            if self._max_invalid is not None:
                self._game.state.error_allowance = self._max_invalid - 1
            shown = self._look()
        return shown, {"agent": self.possible_agents[self._player]}

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Acts for the agent whose turn it is."""
        player, refused = self._player, self._refused()
        with self._own_random():
            done, _ = self._game.step(action=action)
            rewards, facts = self._game.close() if done else ({}, {})
            shown = "" if done else self._look()
        rewards = {self.possible_agents[p]: float(r) for p, r in (rewards or {}).items()}
        facts = facts.get(player, {})
        invalid = bool(facts.get("invalid_move", False)) or self._refused() > refused
        info: dict[str, Any] = {"agent_rewards": rewards, "invalid_action": invalid}
        reward = rewards.get(self.possible_agents[player], 0.0)
        if done:
            return str(facts.get("reason") or "The game is over."), reward, True, False, info
        info["agent"] = self.possible_agents[self._player]
        return shown, reward, False, False, info

    async def aclose(self) -> None:
        """Nothing is held."""

    def _refused(self) -> int:
        """Actions in a row that the game has refused, by its own count."""
        return int(getattr(self._game.state, "error_count", 0))

    def _look(self) -> str:
        """Whose turn it is, and what that player has not been shown yet."""
        self._player, observation = self._game.get_observation()
        if isinstance(observation, str):
            return observation
        boards = [n for n, (*_, kind) in enumerate(observation) if kind.name == "GAME_BOARD"]
        lines: list[str] = []
        for number, (speaker, text, kind) in enumerate(observation):
            if kind.name == "GAME_BOARD" and number != boards[-1]:
                continue
            if kind.name != "PLAYER_ACTION":
                lines.append(str(text).strip())
            elif speaker != self._player:  # one knows what one has said
                lines.append(f"Player {speaker}: {text}")
        return "\n".join(lines)

    @contextmanager
    def _own_random(self) -> Generator[None]:
        """This game's generators in the place of the process's own."""
        with _RANDOM:
            outer: tuple[Any, Any] = random.getstate(), np.random.get_state()
            self._place(self._generators)
            try:
                yield
            finally:
                self._generators = random.getstate(), np.random.get_state()
                self._place(outer)

    @staticmethod
    def _place(generators: tuple[Any, Any]) -> None:
        random.setstate(generators[0])
        np.random.set_state(generators[1])


def _numpy_state(seed: int) -> Any:
    return np.random.RandomState(seed).get_state()


def _maker(env_id: str) -> Callable[..., Any]:
    """What makes a game."""
    try:
        import textarena
        from textarena.envs.registration import ENV_REGISTRY as known
    except ImportError as problem:
        raise MissingExtraError(f"{ENV_ID} needs the package textarena: {INSTALL}.") from problem
    if env_id not in known:
        raise UnknownNameError("game of TextArena", env_id, known)
    raw = f"{env_id}{RAW}"
    return functools.partial(textarena.make, raw if raw in known else env_id)


make_vector = functools.partial(make_pool, ENV_ID)
"""What `gymnasium.make_vec` calls: games in a pool, each stepped for whoever's turn it is."""
