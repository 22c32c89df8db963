"""`Env`: an environment that is written once, with async methods, and is a real `gymnasium.Env`.

Subclasses write `areset`, `astep` and, where something must be released, `aclose`. The synchronous
`reset`, `step` and `close` that Gymnasium and its wrappers call are here: they run the async methods
through `gymllm.bridge`, so one object works in a script, a thread, a notebook, and in the pool under any
stack of wrappers without ever blocking the pool's loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar, Self, TypeVar, cast

import gymnasium
from gymnasium.error import ResetNeeded

from gymllm.bridge import HomeLoop, finish
from gymllm.errors import ClosedError, EnvTypeError, UnknownNameError
from gymllm.render import draw, show
from gymllm.spaces import Image, Unicode, text_of
from gymllm.tool_calls import ToolSchema

T = TypeVar("T")

STEP_PARTS = ("observation", "reward", "terminated", "truncated", "info")
RENDER_MODES = ("ansi", "human", "rgb_array")


class Env(gymnasium.Env[str, str], ABC):
    """An environment for a language-model agent: text in, text out.

    `info["metrics"]` of an episode's last step, numbers by name, is averaged into evaluations and logs.

    `self.np_random` is seeded before `areset` is called; draw all randomness from it. Always driven on
    one event loop (`HomeLoop`), one call at a time.

    It may have several agents, who take turns. `info["agent"]` of a reset or step then names who acts next
    and is meant by the observation; whoever calls `step` acts for that one. What a step is worth is
    `info["agent_rewards"]`, a reward for each agent concerned; without it, the step's reward is that of
    the agent who has just acted. `gymllm.team` says who plays whom.
    """

    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]  # as Gymnasium has it
        "render_modes": list(RENDER_MODES),
        "render_fps": 2,
    }
    waits: bool = True
    """False promises that the async methods never suspend: the synchronous face then runs them on the
    spot instead of through an event loop, which is some 20 times cheaper."""

    execution: str = "inline"
    """Where a pool runs it unless its user says otherwise: "inline" for one that waits asynchronously or
    not at all, "thread" for one that blocks, "process" for one that computes, leaks or may crash."""

    tools: Sequence[ToolSchema] = ()
    """Not empty: its actions are calls of these, written and read by `gymllm.tool_calls`, whatever form the
    agent's model has for them. JSON schemas as chat templates list them: {"type": "function", "function":
    {"name", "description", "parameters"}}. Of the class or set by `__init__`: they stay the same."""

    reset_timeout_s: float = 60.0
    """What a pool lets a reset take unless its user says otherwise. For environments that take long as a
    matter of course; one that hangs is noticed no sooner."""
    step_timeout_s: float = 60.0
    """The same for a step."""

    _home: HomeLoop
    _running: bool
    _closed: bool
    _observation: str

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Here rather than in __init__, so that a subclass need not call super().__init__(); and not on
        # the class, because a space holds the state of its own generator.
        self = super().__new__(cls)
        self.observation_space = Unicode()
        self.action_space = Unicode()
        self._home = HomeLoop()
        self._running = False
        self._closed = False
        self._observation = ""
        return self

    def __init__(self, *, render_mode: str | None = None) -> None:
        """For environments without settings of their own; others need not call it.

        Args:
            render_mode: As for `render`.
        """
        self.render_mode = render_mode

    @abstractmethod
    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Starts an episode.

        Args:
            seed: What `self.np_random` was just seeded with, or None: go on with the generator.
            options: Settings of this episode.

        Returns:
            The first observation, and whatever else is worth knowing.
        """

    @abstractmethod
    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Takes one action.

        An action that can't be read is answered in the observation, with `info["invalid_action"]` True;
        raise only when the environment itself is broken.

        Returns:
            Observation, reward, terminated, truncated and info, as `gymnasium.Env.step`.
        """

    def task_ids(self) -> Sequence[str]:
        """Names of the tasks there are, as `reset(options={"task": name})` takes them.

        Empty where tasks differ by their seed alone, and there is no end of them. May take long the first
        time, where tasks have to be fetched or made.
        """
        return ()

    async def aclose(self) -> None:
        """Releases what the environment holds; called once, by `close`."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Seeds `np_random` and runs `areset`.

        Raises:
            ClosedError: After `close`.
            EnvTypeError: `areset` did not return an observation and an info.
        """
        self._check_open()
        super().reset(seed=seed)
        self._running = False
        result = self._drive(self.areset(seed=seed, options=options))
        self._check_answer("areset", result, ("observation", "info"))
        observation, info = result
        self._running, self._observation = True, observation
        self._show()
        return observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Runs `astep`.

        Raises:
            ClosedError: After `close`.
            gymnasium.error.ResetNeeded: Before the first `reset`, or after the episode's end.
            EnvTypeError: The action is no text, or `astep` did not return five things.
        """
        self._check_open()
        if not self._running:
            raise ResetNeeded(
                f"{self._name} has no episode to step: it has not been reset, or its last step was "
                "terminated or truncated. Call reset() first."
            )
        if not isinstance(action, str) and isinstance(self.action_space, Unicode):  # pyright: ignore[reportUnnecessaryIsInstance]  users' code
            raise EnvTypeError(
                f"{self._name}: the action must be a str, got {action!r}: what an agent would write."
            )
        self._running = False  # stays so if the step raises or is cancelled: its state is unknown
        result = self._drive(self.astep(action))
        self._check_answer("astep", result, STEP_PARTS)
        observation, _, terminated, truncated, _ = result
        self._running, self._observation = not (terminated or truncated), observation
        self._show()
        return result

    def render(self) -> str | Image | None:
        """The last observation, as `render_mode` says.

        Returns:
            "ansi": its text. "rgb_array": the text, and the images of a `Message`, drawn as a frame; see
            `gymllm.render.draw`. "human": None; its text is printed, as it is after each reset and step.
            No render mode: None.

        Raises:
            MissingExtraError: "rgb_array" without Pillow.
            UnknownNameError: Another render mode.
        """
        if self.render_mode is None:
            return None
        if self.render_mode not in RENDER_MODES:
            raise UnknownNameError("render mode", self.render_mode, RENDER_MODES)
        if self.render_mode == "rgb_array":
            return draw(self._observation)
        if self.render_mode == "ansi":
            return text_of(self._observation)
        show(self._observation)
        return None

    def close(self) -> None:
        """Runs `aclose`, the first time only."""
        if not self._closed:
            self._closed = True
            self._drive(self.aclose())

    def _show(self) -> None:
        if self.render_mode == "human":
            self.render()

    @property
    def _name(self) -> str:
        return self.spec.id if self.spec is not None else type(self).__name__

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self._name} was used after close(); make a new one.")

    def _check_answer(self, method: str, answer: object, parts: tuple[str, ...]) -> None:
        """That it can be unpacked, as every wrapper around does; a pool looks at the parts too."""
        if not isinstance(answer, tuple) or len(cast("tuple[object, ...]", answer)) != len(parts):
            shown = repr(cast("object", answer))
            shown = shown if len(shown) <= 200 else f"{shown[:197]}..."
            raise EnvTypeError(
                f"{self._name}: {method} must return a tuple of {', '.join(parts)}, got {shown}."
            )

    def _drive(self, coroutine: Coroutine[object, object, T]) -> T:
        return self._home.run(coroutine) if self.waits else finish(coroutine)
