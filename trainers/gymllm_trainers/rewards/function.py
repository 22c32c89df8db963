"""A Python function as a reward model."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable
from typing import cast, final

import anyio
import anyio.to_thread

from gymllm.errors import ConfigError, UnknownNameError
from gymllm.trajectory import Trajectory

Function = Callable[[Trajectory], float | Awaitable[float]]


@final
class FunctionReward:
    """Calls a function of the trajectory.

    An async function is awaited. Any other is called in a thread, one call after the other, so it may take
    long and need not be safe in several threads; a call that is cancelled goes on there until it returns.
    """

    def __init__(self, function: Function) -> None:
        """Keeps the function."""
        self._function = function
        call = getattr(type(function), "__call__", None)  # noqa: B004  # the method, not whether it is there
        self._waits = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
        self._one_at_a_time = anyio.CapacityLimiter(1)

    async def score(self, trajectory: Trajectory) -> float:
        """What the function returns."""
        if self._waits:
            return await cast("Awaitable[float]", self._function(trajectory))
        value = await anyio.to_thread.run_sync(
            self._function, trajectory, limiter=self._one_at_a_time, abandon_on_cancel=True
        )
        return cast("float", value)


def load_function(where: str) -> Function:
    """The function called "module:name".

    Raises:
        ConfigError: The module can't be imported, or what is called that can't be called.
        UnknownNameError: The module has nothing of that name.
    """
    module_name, _, name = where.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as problem:
        raise ConfigError(
            f"reward.function {where}: the module {module_name} can't be imported: "
            f"{type(problem).__name__}: {problem}. Install it, or put its folder on PYTHONPATH."
        ) from problem
    if not hasattr(module, name):
        known = [each for each in vars(module) if not each.startswith("_")]
        raise UnknownNameError(f"function of {module_name}", name, known)
    function = getattr(module, name)
    if not callable(function):
        raise ConfigError(f"reward.function {where} must be a function, got {function!r}.")
    return cast("Function", function)
