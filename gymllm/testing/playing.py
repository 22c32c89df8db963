"""What the conformance rules share: an episode played by fixed actions, and how episodes are compared.

An episode is a list of `Event`s, one for the reset and one for each step. An environment that raises or
answers with a wrong type ends it with an event that says so, so that only the rules about that fail.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import gymnasium
from gymnasium.utils.env_checker import data_equivalence

from gymllm.errors import ConfigError, EnvTypeError
from gymllm.workers import StepResult
from gymllm.workers.slot import check_reset, check_step

SEED = 11
OTHER_SEED = 12

TextEnv = gymnasium.Env[str, str]


@dataclass(frozen=True, kw_only=True)
class Case:
    """An environment under test."""

    make_env: Callable[[], TextEnv]
    actions: Sequence[str]
    """Played over and over."""
    longest_episode: int
    timeout_s: float
    """Longest that a reset, a step, a close or a release may take."""

    def __post_init__(self) -> None:
        if not self.actions:
            raise ConfigError("actions must not be empty: they are what is played.")
        if self.longest_episode < 1:
            raise ConfigError(f"longest_episode must be >= 1, got {self.longest_episode}.")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s must be > 0, got {self.timeout_s}.")

    def action(self, step: int) -> str:
        """The action of a step, counted from 0."""
        return self.actions[step % len(self.actions)]


@dataclass(frozen=True, kw_only=True)
class Event:
    """What the environment did at a reset or a step."""

    call: str
    """As one would write it: `step('left')`."""
    answer: tuple[object, ...] = ()
    """What it answered; empty if there is a fault."""
    fault: str = ""
    """"raised KeyError", or what is wrong with the answer's types."""
    error: Exception | None = None
    """What it raised, for the message."""

    @property
    def ended(self) -> bool:
        """Whether there is nothing to step after this."""
        return bool(self.fault) or (len(self.answer) == 5 and any(self.answer[2:4]))

    def same(self, other: Event) -> bool:
        """Whether both have the same answer or the same kind of fault."""
        return self.fault == other.fault and data_equivalence(self.answer, other.answer, exact=True)

    def __str__(self) -> str:
        shown = self.fault or repr(self.answer)
        return shown if len(shown) <= 300 else f"{shown[:297]}..."


def step_answer(result: StepResult) -> tuple[object, ...]:
    """A step's answer in Gymnasium's order."""
    return (
        result.observation,
        result.reward,
        result.terminated,
        result.truncated,
        result.info,
    )


def play(env: TextEnv, case: Case, *, seed: int = SEED, backwards: bool = False) -> Iterator[Event]:
    """Plays one episode through the synchronous face; the next event is only made when asked for."""
    yield (event := _event(f"reset(seed={seed})", lambda: check_reset(env.reset(seed=seed))))
    for step in range(case.longest_episode):
        if event.ended:
            return
        action = case.action(-1 - step if backwards else step)
        yield (
            event := _event(
                f"step({action!r})", lambda action=action: step_answer(check_step(env.step(action)))
            )
        )


async def aplay(
    case: Case,
    reset: Callable[[], Awaitable[Event]],
    step: Callable[[str], Awaitable[Event]],
) -> list[Event]:
    """Plays one episode by functions that make each event."""
    events = [await reset()]
    while not events[-1].ended and len(events) <= case.longest_episode:
        events.append(await step(case.action(len(events) - 1)))
    return events


def fresh_episode(make_env: Callable[[], TextEnv], case: Case) -> list[Event]:
    """One episode in an environment that is made for it and closed."""
    with closing(make_env()) as env:
        return list(play(env, case))


def repeatable_episode(case: Case) -> list[Event] | None:
    """The episode that every fresh environment plays; None if two differ, which rule "seeds" is about."""
    first, second = (fresh_episode(case.make_env, case) for _ in range(2))
    return first if difference(first, second, "", "") is None else None


def difference(
    first: Sequence[Event], second: Sequence[Event], first_name: str, second_name: str
) -> str | None:
    """Where two episodes differ first, in words; None if they don't."""
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if not one.same(other):
            return f"at call {number}, {one.call}, {first_name}: {one}; {second_name}: {other}"
    if len(first) != len(second):
        return f"{first_name} has {len(first)} calls, {second_name} {len(second)}"
    return None


def require(holds: object, message: str) -> None:
    """Raises `AssertionError` unless it holds."""
    if not holds:
        raise AssertionError(message)


def _event(call: str, function: Callable[[], tuple[object, ...]]) -> Event:
    try:
        return Event(call=call, answer=function())
    except EnvTypeError as error:
        return Event(call=call, fault=str(error), error=error)
    except Exception as error:
        return Event(call=call, fault=f"raised {type(error).__name__}", error=error)
