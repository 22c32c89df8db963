"""The conformance rules about how an environment behaves in an `EnvPool`.

They run on an event loop in a thread of their own, so that they work in a test, a script or a notebook,
and so that an environment that never comes back is reported instead of waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TypeVar

from gymllm.bridge import STOP_LIMIT_S, LoopThread
from gymllm.errors import EnvCrashedError, EnvTimeoutError, EnvTypeError
from gymllm.pool import EnvPool, LeasedEnv
from gymllm.testing.playing import (
    SEED,
    Case,
    Event,
    aplay,
    difference,
    repeatable_episode,
    require,
    step_answer,
)
from gymllm.workers import StepResult

T = TypeVar("T")

AT_ONCE_S = 1e-9
"""A limit that has always passed when an environment waits for the first time."""


def both_faces(case: Case) -> None:
    """The synchronous face and a lease of a pool answer the same actions alike."""
    expected = repeatable_episode(case)
    if expected is None:
        return

    async def check() -> None:
        _require_same(expected, await _play_new(case), "in a pool")

    _on_a_loop(check)


def cancellation(case: Case) -> None:
    """A reset or step that is cancelled where it first waits ends, and the next episode is as any."""

    async def check() -> None:
        expected, again = [await _play_new(case) for _ in range(2)]
        is_repeatable = difference(expected, again, "", "") is None
        async with _lease(case) as (pool, env):
            for name in ("reset", "step"):
                waiting = await _first_that_waits(env, case, name)
                if waiting is None:
                    continue
                waiting.cancel()
                await asyncio.wait({waiting}, timeout=case.timeout_s)
                call = waiting.get_name()
                require(waiting.done(), f"{call} was cancelled and did not end")
                require(
                    waiting.cancelled(),
                    f"{call} was cancelled and answered all the same: it must let the "
                    "cancellation through, after cleaning up",
                )
                require(
                    not pool.stats.close_failures,
                    f"close() raised or did not end after {call} was cancelled",
                )
                played = await _play(env, case)
                require(
                    not played[-1].fault or expected[-1].fault,
                    f"after {call} was cancelled, a new episode: {played[-1]}",
                )
                if is_repeatable:
                    _require_same(expected, played, f"after {call} was cancelled")

    _on_a_loop(check)


def timeouts(case: Case) -> None:
    """The limit of a reset or a step ends it where it waits."""

    async def check() -> None:
        for name in ("reset", "step"):
            async with _lease(case, **{f"{name}_timeout_s": AT_ONCE_S}) as (_, env):
                waiting = await _first_that_waits(env, case, name)
                if waiting is None:
                    continue
                await asyncio.wait({waiting}, timeout=case.timeout_s)
                call = waiting.get_name()
                require(
                    waiting.done(),
                    f"the limit of {call} passed and it goes on waiting; nothing that waits may be "
                    "shielded from cancellation",
                )
                error = waiting.exception()
                require(
                    isinstance(error, EnvTimeoutError),
                    f"the limit of {call} passed and it "
                    + (f"raised {error!r}" if error else "answered all the same"),
                )

    _on_a_loop(check)


async def _first_that_waits(
    env: LeasedEnv, case: Case, name: str
) -> asyncio.Task[tuple[str, dict[str, object]]] | asyncio.Task[StepResult] | None:
    """The reset, or the episode's first step, that waits; None if none does or one breaks before."""
    begun = await _begin(env.reset(seed=SEED), f"reset(seed={SEED})")
    if name == "reset":
        return None if begun.done() else begun
    await asyncio.wait({begun})
    if begun.exception() is not None:
        return None
    for number in range(case.longest_episode):
        action = case.action(number)
        step = await _begin(env.step(action), f"step({action!r})")
        if not step.done():
            return step
        if step.exception() is not None or step.result().terminated or step.result().truncated:
            return None
    return None


async def _begin(call: Coroutine[object, object, T], name: str) -> asyncio.Task[T]:
    """Runs a call until it first waits, or to its end."""
    task = asyncio.create_task(call, name=name)  # the caller waits for it or cancels it
    await asyncio.sleep(0)
    return task


async def _play_new(case: Case) -> list[Event]:
    async with _lease(case) as (_, env):
        return await _play(env, case)


async def _play(env: LeasedEnv, case: Case) -> list[Event]:
    async def reset() -> Event:
        return await _event(f"reset(seed={SEED})", env.reset(seed=SEED))

    async def step(action: str) -> Event:
        async def answer() -> tuple[object, ...]:
            return step_answer(await env.step(action))

        return await _event(f"step({action!r})", answer())

    return await aplay(case, reset, step)


async def _event(call: str, answer: Awaitable[tuple[object, ...]]) -> Event:
    try:
        return Event(call=call, answer=await answer)
    except EnvTypeError as error:
        # The slot says "<id>: <method>: <what is wrong> (slot 0)."
        what = str(error).partition(": ")[2].partition(": ")[2].rpartition(" (slot")[0]
        return Event(call=call, fault=what, error=error)
    except EnvCrashedError as error:
        return Event(call=call, fault=f"raised {type(error.__cause__).__name__}", error=error)
    except EnvTimeoutError as error:
        return Event(call=call, fault="did not answer in time", error=error)


def _require_same(expected: list[Event], played: list[Event], where: str) -> None:
    differs = difference(expected, played, "elsewhere", "here")
    require(differs is None, f"{where} the same seed and actions give another episode: {differs}")


@asynccontextmanager
async def _lease(case: Case, **limits: float) -> AsyncGenerator[tuple[EnvPool, LeasedEnv]]:
    named = ("reset_timeout_s", "step_timeout_s", "close_timeout_s")
    pool = EnvPool(
        case.make_env,
        1,
        **{name: limits.get(name, case.timeout_s) for name in named},  # pyright: ignore[reportArgumentType]
    )
    try:
        async with pool.lease() as env:
            yield pool, env
    finally:
        await pool.aclose()


def _on_a_loop(check: Callable[[], Coroutine[object, object, None]]) -> None:
    thread = LoopThread("gymllm-conformance")
    future = asyncio.run_coroutine_threadsafe(check(), thread.loop)
    try:
        future.result()
    finally:
        thread.stop()  # cancels what a failed check left waiting
        thread.join(2 * STOP_LIMIT_S)
