"""The synchronous face of a pool: a complete `gymnasium.vector.VectorEnv`.

It steps all environments concurrently and returns when the slowest has answered, as that interface wants.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import anyio
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from gymllm.bridge import Finished, HomeLoop
from gymllm.errors import (
    ClosedError,
    ConfigError,
    ConfigTypeError,
    EnvBatchError,
    EnvError,
    UnsendableError,
)
from gymllm.vector_info import add_info
from gymllm.workers import EnvFacts, Slot, StepResult
from gymllm.workers.given import checked_options, checked_seed
from gymllm.workers.worker import CALL, NoAttribute

T = TypeVar("T")


@dataclass(kw_only=True)
class _VectorState:
    observations: list[Any]
    ended: npt.NDArray[np.bool]
    """Which have no episode to step: never reset, ended or broken."""
    was_reset: bool = False
    """Whether a reset was asked for, ever: the first one never comes by itself."""


class VectorFace(VectorEnv[Any, Any, npt.NDArray[Any]]):
    """What `EnvPool` is to Gymnasium. Its subclass sets `num_envs`, `env_id` and the underscored ones."""

    env_id: str
    autoreset_mode: AutoresetMode
    _slots: list[Slot]
    _home: HomeLoop
    _text: bool
    _vector: _VectorState | None = None

    @abstractmethod
    async def aclose(self) -> None:
        """Closes everything."""

    @abstractmethod
    def _take_all(self) -> None:
        """Takes every slot for this face; raises if one is lent or the pool is closed."""

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        reset_mask: npt.NDArray[np.bool] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Resets all environments at once, or those of a mask.

        Args:
            seed: Of environment 0; environment i gets `seed + i`. Or one for each. None goes on.
            options: Given to each environment, without "reset_mask" if that is in it.
            reset_mask: Bool array of shape [num_envs], here or as `options["reset_mask"]`: where it is
                False the environment stays as it is.

        Raises:
            EnvBatchError: Some broke; the others are reset and `error.answers` has their answers.
            ConfigError: The seeds, options or mask can't be used; none was reset.
        """
        options = checked_options(options) or {}
        given = options.pop("reset_mask", None)
        mask = _mask(given if reset_mask is None else reset_mask, self.num_envs)
        seeds = _seeds(seed, self.num_envs)
        state = self._vector_state()
        state.ended |= mask  # stays so if this is interrupted
        state.was_reset = True
        answers = self._home.run(
            self._gather(
                {
                    i: functools.partial(self._slots[i].reset, seed=seeds[i], options=options)
                    for i in mask.nonzero()[0].tolist()
                }
            )
        )
        infos: dict[str, Any] = {}
        for i, answer in answers.items():
            state.ended[i] = isinstance(answer, EnvError)
            if not isinstance(answer, EnvError):
                state.observations[i], info = answer
                infos = self._add_info(infos, info, i)
        _raise_failures(answers, self.num_envs)
        return self._batch(state.observations), infos

    def step(
        self, actions: Any
    ) -> tuple[Any, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], dict[str, Any]]:
        """Steps all environments at once.

        One that broke needs a reset (by mask, or by itself where the autoreset mode is NEXT_STEP); the
        others have taken their step and go on.

        Raises:
            EnvBatchError: Some broke; `error.answers` has the `StepResult` of each of the others.
            gymnasium.error.ResetNeeded: Some have no episode to step; none has been stepped.
            ConfigError: There are not as many actions as environments, or some are no texts where only
                texts can be read; none has been stepped.
            UnsendableError: An action can't be sent to its environment's process; the others have
                taken their step.
        """
        actions = self._unbatch(actions)
        if len(actions) != self.num_envs:
            raise ConfigError(f"expected {self.num_envs} actions, got {len(actions)}.")
        state = self._vector_state()
        for slot, action in zip(self._slots, actions, strict=True):
            if type(action) is not str:
                slot.check_action(action)
        resets_itself = state.was_reset and self.autoreset_mode is AutoresetMode.NEXT_STEP
        if state.ended.any() and not resets_itself:
            raise ResetNeeded(
                f"environments {state.ended.nonzero()[0].tolist()} have no episode to step; reset "
                'them, e.g. with options={"reset_mask": terminated | truncated}.'
            )
        ended = state.ended.copy()
        state.ended[:] = True  # stays so if this is interrupted: who has stepped is not known
        try:
            answers = self._home.run(
                self._gather(
                    {
                        i: functools.partial(self._begin_step, i, action, reset_first=ended[i])
                        for i, action in enumerate(actions)
                    }
                )
            )
        except UnsendableError:
            state.ended = ended
            raise
        infos: dict[str, Any] = {}
        rewards = np.zeros(self.num_envs, np.float64)
        terminated, truncated = np.zeros((2, self.num_envs), np.bool)
        for i, answer in answers.items():
            if isinstance(answer, EnvError):
                state.ended[i] = True
                continue
            state.observations[i] = answer.observation
            rewards[i] = answer.reward
            terminated[i], truncated[i] = answer.terminated, answer.truncated
            infos = self._add_info(infos, answer.info, i)
            ended = answer.terminated or answer.truncated
            state.ended[i] = ended and self.autoreset_mode is not AutoresetMode.SAME_STEP
        _raise_failures(answers, self.num_envs)
        return self._batch(state.observations), rewards, terminated, truncated, infos

    def render(self) -> tuple[Any, ...]:
        """What each environment's `render` returns. Raises as `call`."""
        return self._call_each({i: (slot, "render", ()) for i, slot in enumerate(self._slots)}, {})

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The value of an attribute of each environment, or of what a method of it returns.

        Args:
            name: Looked for in the outermost wrapper first, as `gymnasium.Env.get_wrapper_attr` does.
            *args: Given to the method.
            **kwargs: Given to the method.

        Raises:
            AttributeError: There is no such attribute.
            EnvBatchError: Some broke.
        """
        _check_name(name)
        calls = {i: (slot, CALL, (name, *args)) for i, slot in enumerate(self._slots)}
        answers = self._call_each(calls, kwargs)
        if any(isinstance(answer, NoAttribute) for answer in answers):
            raise AttributeError(f"{self.env_id} and its wrappers have no attribute {name!r}.")
        return answers

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """As `call` without arguments."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Sets an attribute of each environment, in the wrapper that has it or else the innermost.

        Args:
            name: The attribute.
            values: A list or tuple with one value for each environment, or one value for all.

        Raises:
            ConfigError: There are not as many values as environments, or the name is no text.
            EnvBatchError: Some broke.
        """
        _check_name(name)
        if isinstance(values, list | tuple):
            each = list(cast("Sequence[Any]", values))
        else:
            each = [values] * self.num_envs
        if len(each) != self.num_envs:
            raise ConfigError(f"expected {self.num_envs} values of {name}, got {len(each)}.")
        calls = {
            i: (slot, "set_wrapper_attr", (name, each[i])) for i, slot in enumerate(self._slots)
        }
        self._call_each(calls, {})

    @property
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]  # as Gymnasium's
        """The generator of each environment; in a process worker, a copy."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]  # as Gymnasium's
        """The seed of each environment's generator; -1 where it is not known."""
        return self.get_attr("np_random_seed")

    def close_extras(self, **kwargs: Any) -> None:
        """What `close` calls: `aclose`, from synchronous code."""
        self._home.run(self.aclose())

    # Gymnasium declares these as attributes. They are looked up when first wanted, because that needs an
    # environment, and can be assigned.

    @functools.cached_property
    def _facts(self) -> EnvFacts:
        """Those of environment 0, which is made if there is none."""
        return self._home.run(self._slots[0].start())

    @functools.cached_property
    def single_observation_space(self) -> spaces.Space[Any]:  # type: ignore[override]  # see above
        """Space of one environment's observation."""
        return self._facts.observation_space

    @functools.cached_property
    def single_action_space(self) -> spaces.Space[Any]:  # type: ignore[override]  # see above
        """Space of one environment's action."""
        return self._facts.action_space

    @functools.cached_property
    def observation_space(self) -> spaces.Space[Any]:  # type: ignore[override]  # see above
        """Space of the observations of all environments."""
        return batch_space(self.single_observation_space, self.num_envs)

    @functools.cached_property
    def action_space(self) -> spaces.Space[Any]:  # type: ignore[override]  # see above
        """Space of the actions of all environments."""
        return batch_space(self.single_action_space, self.num_envs)

    @functools.cached_property
    def render_mode(self) -> str | None:  # type: ignore[override]  # see above
        """Render mode of the environments."""
        return self._facts.render_mode

    @functools.cached_property
    def metadata(self) -> dict[str, Any]:  # type: ignore[override]  # see above
        """Metadata of one environment, and the pool's autoreset mode."""
        return {**self._facts.metadata, "autoreset_mode": self.autoreset_mode}

    def _add_info(
        self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int
    ) -> dict[str, Any]:
        """As Gymnasium's, where infos may differ in their types."""
        add_info(vector_infos, env_info, env_num, self.num_envs)
        return vector_infos

    def _vector_state(self) -> _VectorState:
        if self._vector is None or self.closed:
            self._take_all()
            self._vector = _VectorState(
                observations=[None] * self.num_envs, ended=np.ones(self.num_envs, np.bool)
            )
        return self._vector

    def _call_each(
        self, calls: Mapping[int, tuple[Slot, str, tuple[Any, ...]]], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        async def one(slot: Slot, method: str, args: tuple[Any, ...]) -> object:
            await slot.start()
            return await slot.call(method, *args, **kwargs)

        self._vector_state()
        answers = self._home.run(
            self._gather({i: functools.partial(one, *call) for i, call in calls.items()})
        )
        _raise_failures(answers, self.num_envs)
        return tuple(answers.values())

    async def _gather(
        self, calls: Mapping[int, Callable[[], Finished[T] | Coroutine[object, Any, T]]]
    ) -> dict[int, T | EnvError]:
        """Makes all calls at once; each one's answer or fault, in order."""
        for index in calls:
            await self._slots[index].wait_idle()  # of an interrupted call
        answers: dict[int, T | EnvError] = {}
        refused: list[UnsendableError | ClosedError] = []
        waiting: list[tuple[int, Coroutine[object, Any, T]]] = []
        for index, call in calls.items():
            begun = call()
            if isinstance(begun, Finished):  # a task costs more than most steps
                answers[index] = begun.value
            else:
                waiting.append((index, begun))

        async def one(index: int, rest: Coroutine[object, Any, T]) -> None:
            try:
                answers[index] = await rest
            except EnvError as error:
                answers[index] = error
            except (UnsendableError, ClosedError) as error:
                refused.append(error)

        if waiting:
            async with anyio.create_task_group() as group:
                for index, rest in waiting:
                    group.start_soon(one, index, rest, name=f"{self.env_id} slot {index}")
        if refused:  # only now, so that the other environments' calls were not cut off
            raise refused[0]
        return {index: answers[index] for index in calls}

    def _begin_step(
        self, index: int, action: Any, *, reset_first: bool
    ) -> Finished[StepResult] | Coroutine[object, Any, StepResult]:
        slot = self._slots[index]
        if reset_first:
            return self._reset_instead(slot)
        begun = slot.begin_step(action)
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            return self._reset_at_end(slot, begun)
        return begun

    async def _reset_instead(self, slot: Slot) -> StepResult:
        observation, info = await slot.reset()
        return StepResult(observation, 0.0, False, False, info)

    async def _reset_at_end(
        self, slot: Slot, begun: Finished[StepResult] | Coroutine[object, Any, StepResult]
    ) -> StepResult:
        result = begun.value if isinstance(begun, Finished) else await begun
        if not (result.terminated or result.truncated):
            return result
        observation, info = await slot.reset()
        final = {"final_obs": result.observation, "final_info": result.info}
        return result._replace(observation=observation, info={**info, **final})

    def _batch(self, observations: Sequence[Any]) -> Any:
        if self._text:
            return tuple(observations)
        space = self.single_observation_space
        return concatenate(space, observations, create_empty_array(space, self.num_envs))

    def _unbatch(self, actions: Any) -> Sequence[Any]:
        if self._text:
            if isinstance(actions, str) or not isinstance(actions, Sequence | np.ndarray):
                raise ConfigTypeError(
                    f"actions must be a tuple or list with one for each environment, got {actions!r}."
                )
            return cast("Sequence[Any]", actions)
        return list(iterate(self.action_space, actions))


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise ConfigTypeError(f"an attribute's name must be a str, got {name!r}.")


def _mask(mask: object, count: int) -> npt.NDArray[np.bool]:
    if mask is None:
        return np.ones(count, np.bool)
    array = np.asarray(mask)
    wrong = f"reset_mask must be a bool array of shape ({count},), got {mask!r}."
    if array.dtype != np.bool:
        raise ConfigTypeError(wrong)
    if array.shape != (count,):
        raise ConfigError(wrong)
    if not array.any():
        raise ConfigError("reset_mask must be True somewhere.")
    return array


def _seeds(seed: object, count: int) -> Sequence[int | None]:
    if isinstance(seed, list | tuple | np.ndarray):
        each = list(cast("Sequence[object]", seed))
        if len(each) != count:
            raise ConfigError(f"expected {count} seeds, got {len(each)}.")
        return [checked_seed(one) for one in each]
    first = checked_seed(seed)
    return [None if first is None else first + i for i in range(count)]


def _raise_failures(answers: Mapping[int, object], count: int) -> None:
    failures = [answer for answer in answers.values() if isinstance(answer, EnvError)]
    if failures:
        raise EnvBatchError(
            f"{len(failures)} of {len(answers)} environments broke: "
            + " ".join(str(failure) for failure in failures),
            [answers.get(i) for i in range(count)],
        ) from failures[0]
