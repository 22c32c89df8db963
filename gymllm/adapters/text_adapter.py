"""`TextAdapter`: any Gymnasium environment as a text environment.

Observations become text by a describer and the agent's text becomes an action by a parser. A text that
can't be read, or names an action that is not possible now, never reaches the environment and never raises:
the agent is told what was wrong and what it may answer.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# Gymnasium's spaces are generic over types that its own annotations leave partly unknown.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import gymnasium
import numpy as np

from gymllm.adapters.describe import Describe, Parts, describer_for, text_describer
from gymllm.adapters.masks import Possible, possible_actions
from gymllm.adapters.parse import AnswerRule, Parse, how_to_answer, parser_for
from gymllm.adapters.registry import AnyEnv, action_names_for, rules_for
from gymllm.bridge import run_sync
from gymllm.env import RENDER_MODES, Env
from gymllm.errors import ConfigError, ConfigTypeError
from gymllm.spaces import ChatMessage, Image, Message, is_text, message

Shown = Any
"""A text, or a `ChatMessage` where the observation holds images."""


class TextAdapter(Env):
    """Any Gymnasium environment, played in text. Owns the environment and closes it.

    The first observation of an episode is the instructions and the state; later ones are the state
    alone. Where the environment says which actions are possible, the state ends with them. Where the state
    holds an image, observations are messages: `observation_space` is a `Message`.

    After an action that can't be read or is not possible, the environment has not moved, the observation
    is what was wrong and the state, the reward is `invalid_reward`, and the turn counts.
    `info["invalid_action"]` says which it was and `info["invalid_actions"]` how many there were in the
    episode.
    """

    def __init__(
        self,
        env: AnyEnv,
        *,
        describe: Describe | None = None,
        parse: Parse | None = None,
        instructions: str | None = None,
        action_names: Sequence[str] | None = None,
        answer_rule: AnswerRule = "marked",
        invalid_reward: float = 0.0,
        max_invalid: int | None = 5,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        """Wraps `env`.

        Args:
            env: What is played.
            describe: Observation to text. By default what `describer_for` finds.
            parse: Text to action. By default made for the action space; see `parser_for`.
            instructions: Text before an episode's first state: the task and how to answer. By default
                the env's id, its registered rules and the answers that can be read.
            action_names: What a `Discrete` action space's actions are called, in order. By default what
                `action_names_for` finds, else they have numbers.
            answer_rule: Which of several actions in an answer counts; see `AnswerRule`.
            invalid_reward: Reward of a turn whose action could not be read or was not possible.
            max_invalid: Such turns in a row after which the episode is truncated, with
                `info["truncated_by"]` "invalid_actions". None is no limit.
            max_turns: Turns after which the episode is truncated, with `info["truncated_by"]`
                "max_turns"; unreadable actions count. None is no limit.
            render_mode: As for `Env.render`.

        Raises:
            ConfigError: The spaces need a describer or parser that was not given, or a setting is wrong.
        """
        if not isinstance(env, gymnasium.Env):  # pyright: ignore[reportUnnecessaryIsInstance]  users' code
            raise ConfigTypeError(f"TextAdapter needs a gymnasium.Env, got {env!r}.")
        for name, limit in (("max_turns", max_turns), ("max_invalid", max_invalid)):
            if limit is not None and limit < 1:
                raise ConfigError(f"{name} must be >= 1 or None, got {limit}.")
        if not np.isfinite(invalid_reward):
            raise ConfigError(f"invalid_reward must be a finite number, got {invalid_reward}.")
        if parse is not None and action_names is not None:
            raise ConfigError("give parse= or action_names=, not both.")
        self.env = env
        self.render_mode = render_mode
        self.waits = isinstance(env.unwrapped, Env) and env.unwrapped.waits
        names = action_names_for(env) if action_names is None and parse is None else action_names
        names = names or None
        self._names = tuple(names or ())
        self._given = describe, parse, answer_rule
        self._make_functions()
        if self._describe.images:
            self.observation_space = cast("Any", Message(roles=("user",)))
        self._how = "" if parse else how_to_answer(env.action_space, names=names, rule=answer_rule)
        self._own_instructions = instructions
        self._invalid_reward = float(invalid_reward)
        self._max_invalid, self._max_turns = max_invalid, max_turns
        self._turns = self._invalid = self._invalid_in_a_row = 0
        self._state: Parts = ()
        self._possible: Possible | None = None

    def _make_functions(self) -> None:
        describe, parse, rule = self._given
        env, names = self.env, self._names or None
        self._describe = describer_for(env) if describe is None else text_describer(describe)
        self._parse = parse or parser_for(env.action_space, names=names, rule=rule)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the functions, which are made of the rest again."""
        return {k: v for k, v in vars(self).items() if k not in ("_describe", "_parse")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make_functions()

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Shown, dict[str, Any]]:
        if self.waits:
            observation, info = await run_sync(self.env.reset, seed=seed, options=options)
        else:
            observation, info = self.env.reset(seed=seed, options=options)
        self._turns = self._invalid = self._invalid_in_a_row = 0
        self._see(observation, info, ended=False)
        return self._shown(self._instructions()), dict(info)

    async def astep(self, action: str) -> tuple[Shown, float, bool, bool, dict[str, Any]]:
        self._turns += 1
        try:
            parsed = self._parse(action)
            if self._possible is not None and not self._possible.allows(parsed):
                raise ValueError(f"{self._possible.name(parsed)} is not possible now.")
        except ValueError as error:
            self._invalid += 1
            self._invalid_in_a_row += 1
            shown = self._shown(str(error), self._how)
            info: dict[str, Any] = {"invalid_action": True}
            reward, terminated, truncated = self._invalid_reward, False, False
        else:
            self._invalid_in_a_row = 0
            if self.waits:
                result = await run_sync(self.env.step, parsed)
            else:
                result = self.env.step(parsed)
            observation, env_reward, terminated, truncated, env_info = result
            self._see(observation, env_info, ended=bool(terminated or truncated))
            shown = self._shown()
            info = {**env_info, "invalid_action": False}
            reward = float(env_reward)
        info["invalid_actions"] = self._invalid
        limit = self._limit_reached()
        if limit and not (terminated or truncated):
            truncated, info["truncated_by"] = True, limit
        return shown, reward, bool(terminated), bool(truncated), info

    async def aclose(self) -> None:
        if self.waits:
            await run_sync(self.env.close)
        else:
            self.env.close()

    def _instructions(self) -> str:
        if self._own_instructions is not None:
            return self._own_instructions
        lines = (f"You are playing {_title(self.env)}.", rules_for(self.env), self._how)
        return "\n".join(line for line in lines if line)

    def _see(self, observation: Any, info: Mapping[str, Any], *, ended: bool) -> None:
        """Takes in a new state of the environment."""
        self._possible = None if ended else possible_actions(self.env, info, self._names)
        self._state = self._describe(observation)
        if self._possible is not None:
            self._state += (self._possible.shown(),)

    def _shown(self, *before: str) -> str | ChatMessage:
        """The state below some texts: one text, or a message of texts and images."""
        parts: list[str | Image] = []
        for part in (*(text for text in before if text), *self._state):
            last = parts[-1] if parts else None
            if isinstance(part, str) and isinstance(last, str):
                parts[-1] = f"{last}\n{part}"
            else:  # an image is shown again after an unreadable answer, and is the caller's to change
                parts.append(part if isinstance(part, str) else part.copy())
        if self._describe.images:
            return message("user", *parts)
        return cast("str", parts[0])

    def _limit_reached(self) -> str:
        if self._max_invalid is not None and self._invalid_in_a_row >= self._max_invalid:
            return "invalid_actions"
        return "max_turns" if self._max_turns is not None and self._turns >= self._max_turns else ""


def textify(env: AnyEnv) -> gymnasium.Env[str, str]:
    """`env` itself if it is played in text already, else a `TextAdapter` around it.

    The adapter has the env's render mode, if `Env.render` has it, and renders what an agent is shown.
    """
    if not isinstance(env, gymnasium.Env):  # pyright: ignore[reportUnnecessaryIsInstance]  users' code
        raise ConfigTypeError(f"textify needs a gymnasium.Env, got {env!r}.")
    if is_text_env(env):
        return env
    mode = env.render_mode if env.render_mode in RENDER_MODES else None
    return TextAdapter(env, render_mode=mode)


def is_text_env(env: AnyEnv) -> bool:
    """Whether it is played in text: observations are strings or chat messages, actions strings."""
    observed = env.observation_space
    return (is_text(observed) or isinstance(observed, Message)) and is_text(env.action_space)


def _title(env: AnyEnv) -> str:
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__
