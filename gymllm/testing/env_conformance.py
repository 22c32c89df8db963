"""What every gymllm environment must do, as one function that a third party runs over its own.

from gymllm.testing import check_env_conformance

def test_my_env():
    check_env_conformance(lambda: gymnasium.make("me/MyEnv-v0"))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium

from gymllm.workers import StepResult
from gymllm.workers.slot import check_reset, check_step

UNREADABLE = ("", " ", "\n\n", "\x00", "é🙂日本", "<action>", "[1, 2", "{" * 64, "a" * 5_000)
"""Texts that few environments can read; none may make one raise."""

TextEnv = gymnasium.Env[str, str]


@dataclass(frozen=True, kw_only=True)
class _Played:
    """One episode: the reset's observation and info, and each step."""

    observation: str
    info: dict[str, object]
    steps: tuple[StepResult, ...]


def check_env_conformance(
    make_env: Callable[[], TextEnv],
    *,
    actions: Sequence[str] = UNREADABLE,
    longest_episode: int = 100,
) -> None:
    """Checks an environment; raises at the first rule it breaks.

    The rules: observations and actions are texts that lie in their spaces; the same reset seed and
    actions give the same episode, in a fresh environment and in one that was used before; an action that
    can't be read never raises and `info["invalid_action"]` says so or says False; a step before the first
    reset and after an episode's end raises; `close` can be called twice.

    Args:
        make_env: Makes a new environment, wrapped or not, on each call.
        actions: What is played, over and over; mix in actions that the environment can read.
        longest_episode: Steps after which an episode that has not ended is left.

    Raises:
        AssertionError: A rule is broken; the message says which and how.
    """
    first, second = make_env(), make_env()
    try:
        _check_refuses_step(first, "before the first reset")
        played = _play(first, seed=11, actions=actions, limit=longest_episode)
        again = _play(second, seed=11, actions=actions, limit=longest_episode)
        _require(played == again, "two environments with the same seed and actions differ")
        _play(first, seed=12, actions=actions[::-1], limit=longest_episode)
        replayed = _play(first, seed=11, actions=actions, limit=longest_episode)
        _require(played == replayed, "an earlier episode changes a later one with the same seed")
    finally:
        for env in (first, second):
            env.close()
            env.close()


def _play(env: TextEnv, *, seed: int, actions: Sequence[str], limit: int) -> _Played:
    observation, info = check_reset(env.reset(seed=seed))
    _check_contains(env, observation)
    steps: list[StepResult] = []
    while len(steps) < limit:
        action = actions[len(steps) % len(actions)]
        try:
            answer: Any = env.step(action)
        except Exception as error:
            raise AssertionError(f"step({action!r}) raised {error!r}") from error
        step = check_step(answer)
        _check_contains(env, step.observation)
        invalid = step.info.get("invalid_action", False)
        _require(
            isinstance(invalid, bool), f'info["invalid_action"] must be a bool, got {invalid!r}'
        )
        steps.append(step)
        if step.terminated or step.truncated:
            _check_refuses_step(env, "after the episode's end")
            break
    return _Played(observation=observation, info=info, steps=tuple(steps))


def _check_contains(env: TextEnv, observation: str) -> None:
    _require(
        env.observation_space.contains(observation),
        f"the observation {observation[:80]!r} does not lie in {env.observation_space}",
    )


def _check_refuses_step(env: TextEnv, when: str) -> None:
    try:
        env.step("")
    except Exception:  # any will do: wrappers raise their own
        return
    raise AssertionError(f"step {when} must raise, for instance gymnasium.error.ResetNeeded")


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise AssertionError(rule)
