"""`TimeLimit`: each limit truncates with its own reason, and nothing else does."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded

from gymllm.errors import ConfigError
from gymllm.spaces import Message, Unicode, message
from gymllm.wrappers import TimeLimit


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Echo(gymnasium.Env[Any, Any]):
    """Says what it is told; "end" and "cut" end the episode, "wait" takes five seconds."""

    def __init__(self, clock: Clock | None = None, *, messages: bool = False) -> None:
        self.observation_space = Message() if messages else Unicode()
        self.action_space = Unicode()
        self._clock, self._messages = clock, messages

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if self._clock is not None:
            self._clock.now_s += 50.0
        return self._say("begin now"), {}

    def step(self, action: str) -> Any:
        if action == "wait" and self._clock is not None:
            self._clock.now_s += 5.0
        info = {"truncated_by": "its own"} if action == "cut" else {}
        return self._say(action), 1.0, action == "end", action == "cut", info

    def _say(self, text: str) -> Any:
        picture = np.zeros((2, 2, 3), np.uint8)
        return message("user", text, picture) if self._messages else text


def words(text: str) -> int:
    return len(text.split())


def endings(env: gymnasium.Env[Any, Any], actions: list[str]) -> list[str]:
    """What truncated each step; "" where nothing did."""
    env.reset(seed=0)
    shown: list[str] = []
    for action in actions:
        _, _, _, truncated, info = env.step(action)
        assert truncated == ("truncated_by" in info)
        shown.append(info.get("truncated_by", ""))
    return shown


def test_turns_truncate_and_start_anew_at_a_reset() -> None:
    env = TimeLimit(Echo(), max_turns=3)
    for _ in range(2):
        assert endings(env, ["a"] * 3) == ["", "", "turns"]


def test_tokens_of_observations_and_actions_truncate() -> None:
    env = TimeLimit(Echo(), max_tokens=7, count_tokens=words)
    for _ in range(2):  # 2 of the reset, 2 each step, 8 after the third
        assert endings(env, ["a"] * 3) == ["", "", "tokens"]
    assert endings(env, ["a b c"]) == ["tokens"]
    assert endings(TimeLimit(Echo(), max_tokens=1, count_tokens=words), [""]) == ["tokens"]


def test_tokens_of_a_message_are_those_of_its_texts() -> None:
    env = TimeLimit(Echo(messages=True), max_tokens=6, count_tokens=words)
    assert endings(env, ["a", "a"]) == ["", "tokens"]


def test_wall_clock_runs_from_the_end_of_the_reset() -> None:
    clock = Clock()
    env = TimeLimit(Echo(clock), wall_clock_s=10.0, clock=clock)
    for _ in range(2):
        assert endings(env, ["wait", "a", "wait"]) == ["", "", "wall_clock"]


def test_the_agents_time_counts() -> None:
    clock = Clock()
    env = TimeLimit(Echo(clock), wall_clock_s=10.0, clock=clock)
    env.reset()
    clock.now_s += 10.0
    assert env.step("a")[-1] == {"truncated_by": "wall_clock"}


def test_the_first_reason_counts_where_several_are_reached() -> None:
    clock = Clock()
    limits: dict[str, Any] = {"max_tokens": 1, "count_tokens": words, "wall_clock_s": 1.0}
    assert endings(TimeLimit(Echo(clock), max_turns=1, clock=clock, **limits), ["wait"]) == [
        "turns"
    ]
    assert endings(TimeLimit(Echo(clock), clock=clock, **limits), ["wait"]) == ["tokens"]


def test_an_ending_of_its_own_is_kept() -> None:
    env = TimeLimit(Echo(), max_turns=1)
    env.reset()
    assert env.step("end") == ("end", 1.0, True, False, {})
    assert endings(env, ["cut"]) == ["its own"]


def test_step_after_the_limit_raises() -> None:
    env = TimeLimit(Echo(), max_turns=1)
    assert endings(env, ["a"]) == ["turns"]
    with pytest.raises(ResetNeeded, match="truncated by turns"):
        env.step("a")
    assert endings(env, ["a"]) == ["turns"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "at least one"),
        ({"max_turns": 0}, "max_turns must be > 0 or None, got 0"),
        ({"max_turns": "3"}, "max_turns must be a whole number > 0 or None, got '3'"),
        ({"max_turns": 1.5}, "max_turns must be a whole number"),
        ({"max_turns": True}, "max_turns must be a whole number"),
        ({"wall_clock_s": "1"}, "wall_clock_s must be seconds > 0"),
        ({"wall_clock_s": -1.0}, "wall_clock_s must be > 0"),
        ({"wall_clock_s": float("nan")}, "wall_clock_s must be > 0"),
        ({"max_tokens": 5}, "count_tokens"),
        ({"max_turns": 5, "count_tokens": words}, "go together"),
        ({"max_tokens": 0, "count_tokens": words}, "max_tokens must be > 0"),
    ],
)
def test_settings_that_cannot_hold_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        TimeLimit(Echo(), **settings)
