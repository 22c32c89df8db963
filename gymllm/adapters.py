"""`TextAdapter`: any Gymnasium environment as a text environment.

Observations become text by a describer (from the space, the env's "ansi" picture, or the user's own),
and the agent's text becomes an action by a parser. A text that can't be read as an action never reaches
the environment and never raises: the agent is told what was wrong and what it may answer.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# Gymnasium's spaces are generic over types that its own annotations leave partly unknown.

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, cast

import gymnasium
import numpy as np
from gymnasium import spaces

from gymllm.bridge import run_sync
from gymllm.env import Env
from gymllm.errors import ConfigError
from gymllm.spaces import is_text

Describe = Callable[[Any], str]
"""Observation to text. The observation is whatever the wrapped environment's space holds."""
Parse = Callable[[str], Any]
"""Text to action; raises `ValueError`, whose message the agent is shown, if it can't be read."""

AnyEnv = gymnasium.Env[Any, Any]
AnySpace = spaces.Space[Any]

LARGEST_DESCRIBED = 256
"""Arrays with more numbers than this are not written out (images); they need a describer."""
SIGNIFICANT_DIGITS = 4
LONGEST_JSON = 20_000
"""Characters at the end of a text in which a JSON action is looked for."""


class TextAdapter(Env):
    """Any Gymnasium environment, played in text. Owns the environment and closes it.

    The first observation of an episode is the instructions and the state; later ones are the state
    alone. After an action that can't be read, the environment has not moved, the observation is what was
    wrong and the state, the reward is `invalid_reward`, and the turn counts.
    `info["invalid_action"]` says which it was.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 4}  # type: ignore[misc]  # as Gymnasium has it

    def __init__(
        self,
        env: AnyEnv,
        *,
        describe: Describe | None = None,
        parse: Parse | None = None,
        instructions: str | None = None,
        action_names: Sequence[str] | None = None,
        invalid_reward: float = 0.0,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        """Wraps `env`.

        Args:
            env: What is played.
            describe: Observation to text. By default the env's own picture if its render mode is
                "ansi", else the observation written out.
            parse: Text to action. By default made for the action space; see `parser_for`.
            instructions: Text before an episode's first state: the task and how to answer. By default
                the env's id and the answers that can be read.
            action_names: What a `Discrete` action space's actions are called, in order.
            invalid_reward: Reward of a turn whose action could not be read.
            max_turns: Turns after which the episode is truncated, with `info["truncated_by"]`
                "max_turns"; unreadable actions count. None is no limit.
            render_mode: None, or "ansi": `render` returns the last observation.

        Raises:
            ConfigError: The spaces need a describer or parser that was not given, or a setting is wrong.
        """
        if max_turns is not None and max_turns < 1:
            raise ConfigError(f"max_turns must be >= 1 or None, got {max_turns}.")
        if not np.isfinite(invalid_reward):
            raise ConfigError(f"invalid_reward must be a finite number, got {invalid_reward}.")
        self.env = env
        self.render_mode = render_mode
        self.waits = isinstance(env.unwrapped, Env) and env.unwrapped.waits
        self._describe = describe or describer_for(env)
        if parse is not None and action_names is not None:
            raise ConfigError("give parse= or action_names=, not both.")
        self._parse = parse or parser_for(env.action_space, names=action_names)
        self._how = "" if parse else how_to_answer(env.action_space, names=action_names)
        self._instructions = (
            f"You are playing {_title(env)}.\n{self._how}".rstrip()
            if instructions is None
            else instructions
        )
        self._invalid_reward = float(invalid_reward)
        self._max_turns = max_turns
        self._turns = 0
        self._state = ""

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        if self.waits:
            observation, info = await run_sync(self.env.reset, seed=seed, options=options)
        else:
            observation, info = self.env.reset(seed=seed, options=options)
        self._turns, self._state = 0, self._describe(observation)
        text = f"{self._instructions}\n{self._state}" if self._instructions else self._state
        return text, dict(info)

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._turns += 1
        out_of_turns = self._max_turns is not None and self._turns >= self._max_turns
        try:
            parsed = self._parse(action)
        except ValueError as error:
            text = "\n".join(part for part in (str(error), self._how, self._state) if part)
            info: dict[str, Any] = {"invalid_action": True}
            reward, terminated, truncated = self._invalid_reward, False, False
        else:
            if self.waits:
                result = await run_sync(self.env.step, parsed)
            else:
                result = self.env.step(parsed)
            observation, env_reward, terminated, truncated, env_info = result
            text = self._state = self._describe(observation)
            info = {**env_info, "invalid_action": False}
            reward = float(env_reward)
        if out_of_turns and not (terminated or truncated):
            truncated, info["truncated_by"] = True, "max_turns"
        return text, reward, bool(terminated), bool(truncated), info

    async def aclose(self) -> None:
        if self.waits:
            await run_sync(self.env.close)
        else:
            self.env.close()


def textify(env: AnyEnv) -> gymnasium.Env[str, str]:
    """`env` itself if it is played in text already, else a `TextAdapter` around it."""
    return env if is_text_env(env) else TextAdapter(env)


def is_text_env(env: AnyEnv) -> bool:
    """Whether observations and actions are strings."""
    return is_text(env.observation_space) and is_text(env.action_space)


def describer_for(env: AnyEnv) -> Describe:
    """The default describer: the env's "ansi" picture if that is its render mode, else its space's.

    Raises:
        ConfigError: The observation is too large to be written out.
    """
    if env.render_mode == "ansi" and not is_text(env.observation_space):
        return lambda observation: mark_highlights(str(env.render()))
    _check_describable(env.observation_space)
    return lambda observation: describe_value(env.observation_space, observation)


def describe_value(space: AnySpace, value: Any) -> str:
    """An element of a space as text.

    Texts stay as they are; numbers are written plainly, floats with 4 significant digits; arrays as
    lists; a `Tuple` as its parts between brackets; a `Dict` as one `name: value` a line.
    """
    if is_text(space):
        return str(value)
    if isinstance(space, spaces.Discrete):
        return str(int(value))
    if isinstance(space, spaces.Tuple):
        parts = zip(space.spaces, value, strict=True)
        return f"({', '.join(describe_value(part, v) for part, v in parts)})"
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{k}: {describe_value(p, value[k])}" for k, p in space.spaces.items())
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return json.dumps(_rounded(np.asarray(value).tolist()))
    return json.dumps(space.to_jsonable([value])[0])


def mark_highlights(picture: str) -> str:
    """Terminal colours as marks: what was coloured stands between square brackets."""
    marked = re.sub(r"\x1b\[(?!0?m)[\d;]*m(.*?)\x1b\[0?m", r"[\1]", picture, flags=re.DOTALL)
    return re.sub(r"\x1b\[[\d;]*m", "", marked).rstrip("\n")


def parser_for(space: AnySpace, *, names: Sequence[str] | None = None) -> Parse:
    """The default parser of an action space.

    - `Discrete` with names: the *last* name that stands in the text as a whole word, upper or lower
      case, whatever is around it. Where names overlap ("up", "up left"), the longest counts.
    - `Discrete` without names: the last integer in the text, if it is one of the actions.
    - texts: the text as it is.
    - every other space: the last JSON value in the text that is a list (or an object for `Dict`, a
      number for a `Box` without axes), which must lie in the space.

    Raises:
        ConfigError: The space can't be written in JSON, or the names don't fit it.
    """
    if names is not None:
        return _name_parser(space, names)
    if is_text(space):
        return lambda text: _checked(space, text)
    if isinstance(space, spaces.Discrete):
        return lambda text: _parse_integer(space, text)
    _check_writable(space)
    return lambda text: _checked(space, _from_json(space, _last_json(space, text)))


def how_to_answer(space: AnySpace, *, names: Sequence[str] | None = None) -> str:
    """One line that tells an agent what `parser_for` can read."""
    if names is not None:
        return f"Answer with one of: {', '.join(names)}."
    if isinstance(space, spaces.Discrete):
        first, last = int(space.start), int(space.start + space.n - 1)
        return f"Answer with one number from {first} to {last}."
    if is_text(space):
        return ""
    return f"Answer with JSON: {_json_form(space)}."


def _title(env: AnyEnv) -> str:
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__


def _name_parser(space: AnySpace, names: Sequence[str]) -> Parse:
    if not isinstance(space, spaces.Discrete):
        raise ConfigError(f"action_names need a Discrete action space, got {space}.")
    actions = {name.casefold(): int(space.start) + i for i, name in enumerate(names)}
    if len(names) != space.n or len(actions) != space.n or not all(n.strip() for n in names):
        raise ConfigError(
            f"action_names must be {space.n} different names, one for each action, got {list(names)}."
        )
    longest_first = sorted(actions, key=len, reverse=True)
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")

    def parse(text: str) -> int:
        found = pattern.findall(text.casefold())
        if not found:
            raise ValueError("No action was found in the answer.")
        return actions[found[-1]]

    return parse


def _parse_integer(space: spaces.Discrete[Any], text: str) -> int:
    found = re.findall(r"(?<![\w.])[+-]?\d{1,18}(?![\w]|\.\d)", text)
    if not found:
        raise ValueError("No number was found in the answer.")
    action = int(found[-1])
    if not space.contains(action):
        raise ValueError(f"{action} is not one of the actions.")
    return action


def _checked(space: AnySpace, action: Any) -> Any:
    if not space.contains(action):
        raise ValueError(f"The action does not lie in {space}.")
    return action


def _last_json(space: AnySpace, text: str) -> Any:
    """The last JSON value of the kind that the space needs; a value inside another does not count."""
    if isinstance(space, spaces.Dict):
        starts, kinds = r"\{", (dict,)
    elif isinstance(space, spaces.Box) and space.shape == ():
        starts, kinds = r"(?<![\w.\-])-?\d", (int, float)
    else:
        starts, kinds = r"\[", (list,)
    text = text[-LONGEST_JSON:]
    decoder, found, end = json.JSONDecoder(), list[Any](), 0
    for start in re.finditer(starts, text):
        if start.start() < end:
            continue
        try:
            value, end = decoder.raw_decode(text, start.start())
        except ValueError:
            continue
        except RecursionError:  # no action is so deep; looking on would take quadratic time
            break
        if isinstance(value, kinds):
            found.append(value)
    if not found:
        raise ValueError("No JSON of the right form was found in the answer.")
    return found[-1]


def _from_json(space: AnySpace, value: Any) -> Any:
    if isinstance(space, spaces.Dict):
        fields = space.spaces
        if not isinstance(value, dict) or set(cast("dict[str, Any]", value)) != set(fields):
            raise ValueError(f"The keys must be {', '.join(fields)}.")
        return {key: _from_json(part, value[key]) for key, part in fields.items()}
    if isinstance(space, spaces.Tuple):
        parts = space.spaces
        if not isinstance(value, list) or len(cast("list[Any]", value)) != len(parts):
            raise ValueError(f"The list must have {len(parts)} parts.")
        values = cast("list[Any]", value)
        return tuple(_from_json(part, v) for part, v in zip(parts, values, strict=True))
    if is_text(space):
        return value
    if isinstance(space, spaces.Discrete):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{value!r} is not a whole number.")
        return value
    return _array_from_json(space, value)


def _array_from_json(space: AnySpace, value: Any) -> Any:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):  # ragged lists
        array = np.asarray(None)
    if array.dtype.kind not in "iuf":
        raise ValueError("The list must hold numbers only, in rows of equal length.")
    dtype = np.dtype(space.dtype)
    if array.dtype.kind == "f" and dtype.kind != "f":
        raise ValueError("The list must hold whole numbers only.")
    if dtype.kind in "iu" and array.size:
        range_ = np.iinfo(dtype.name)
        if array.min() < range_.min or array.max() > range_.max:
            raise ValueError(f"The action does not lie in {space}.")
    return array.astype(dtype)


def _parts(space: AnySpace) -> Iterable[AnySpace] | None:
    if isinstance(space, spaces.Dict):
        return space.spaces.values()
    return space.spaces if isinstance(space, spaces.Tuple) else None


def _check_writable(space: AnySpace) -> None:
    parts = _parts(space)
    if parts is not None:
        for part in parts:
            _check_writable(part)
    elif not (
        is_text(space)
        or isinstance(
            space, spaces.Discrete | spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary
        )
    ):
        raise ConfigError(
            f"an action of {space} has no text form; give TextAdapter a parse= that turns text into one."
        )


def _check_describable(space: AnySpace) -> None:
    parts = _parts(space)
    if parts is not None:
        for part in parts:
            _check_describable(part)
    elif space.shape is not None and int(np.prod(space.shape)) > LARGEST_DESCRIBED:
        raise ConfigError(
            f"an observation of shape {space.shape} is too large to be written out; give TextAdapter "
            'a describe=, or make the environment with render_mode="ansi" if it has one.'
        )


def _json_form(space: AnySpace) -> str:
    if isinstance(space, spaces.Dict):
        fields = (f'"{key}": {_json_form(part)}' for key, part in space.spaces.items())
        return "{" + ", ".join(fields) + "}"
    if isinstance(space, spaces.Tuple):
        return f"[{', '.join(_json_form(part) for part in space.spaces)}]"
    if isinstance(space, spaces.Discrete):
        return f"a whole number from {int(space.start)} to {int(space.start + space.n - 1)}"
    if isinstance(space, spaces.MultiDiscrete):
        last = (space.start + space.nvec - 1).tolist()
        return f"a list of whole numbers from {space.start.tolist()} to {last}"
    if isinstance(space, spaces.MultiBinary):
        return f"a list of 0 and 1 of shape {list(space.shape)}"
    if isinstance(space, spaces.Box):
        low, high = (_rounded(bound.tolist()) for bound in (space.low, space.high))
        kind = (
            "a number" if space.shape == () else f"a list of numbers of shape {list(space.shape)}"
        )
        if int(np.prod(space.shape)) > 8:
            low, high = _rounded(float(space.low.min())), _rounded(float(space.high.max()))
        return f"{kind} from {low} to {high}"
    return "a text"


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(part) for part in cast("list[Any]", value)]
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if isinstance(value, float) else value
