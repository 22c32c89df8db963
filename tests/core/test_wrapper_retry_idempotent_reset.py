"""`RetryIdempotentReset`: only resets, only what is listed, only so often."""

from typing import Any

import gymnasium
import pytest

from gymllm.errors import ConfigError
from gymllm.spaces import Unicode
from gymllm.wrappers import RetryIdempotentReset


class Flaky(gymnasium.Env[str, str]):
    """Raises what it was given, one a reset, then resets well. Takes its options apart."""

    def __init__(self, *problems: BaseException) -> None:
        self.observation_space, self.action_space = Unicode(), Unicode()
        self.problems = list(problems)
        self.asked: list[tuple[int | None, dict[str, Any] | None]] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.asked.append((seed, None if options is None else dict(options)))
        if options is not None:
            options.clear()
        if self.problems:
            raise self.problems.pop(0)
        return "ready", {"own": 1}

    def step(self, action: str) -> Any:
        raise ConnectionError("step")


def test_a_listed_exception_is_tried_again_with_the_same_seed_and_options() -> None:
    inner = Flaky(ConnectionResetError("1"), TimeoutError("2"))
    env = RetryIdempotentReset(inner, retry_on=(ConnectionError, TimeoutError))
    assert env.reset(seed=5, options={"a": 1}) == ("ready", {"own": 1, "reset_tries": 3})
    assert inner.asked == [(5, {"a": 1})] * 3
    assert env.reset() == ("ready", {"own": 1, "reset_tries": 1})
    assert inner.asked[3:] == [(None, None)]


def test_the_last_exception_is_raised_and_says_how_often() -> None:
    inner = Flaky(*(ConnectionError(str(i)) for i in range(4)))
    env = RetryIdempotentReset(inner, retry_on=ConnectionError, tries=2)
    with pytest.raises(ConnectionError, match="1") as raised:
        env.reset(seed=1)
    assert raised.value.__notes__ == ["reset raised at the last of 2 tries."]
    assert len(inner.asked) == 2


@pytest.mark.parametrize("problem", [KeyError("other"), KeyboardInterrupt(), SystemExit(1)])
def test_every_other_exception_leaves_at_once(problem: BaseException) -> None:
    inner = Flaky(problem)
    with pytest.raises(type(problem)):
        RetryIdempotentReset(inner, retry_on=ConnectionError).reset()
    assert len(inner.asked) == 1


def test_steps_are_not_tried_again() -> None:
    env = RetryIdempotentReset(Flaky(), retry_on=ConnectionError)
    env.reset()
    with pytest.raises(ConnectionError, match="step") as raised:
        env.step("a")
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize("retry_on", [(), (KeyboardInterrupt,), BaseException, ("OSError",), int])
def test_what_is_no_list_of_exceptions_is_refused(retry_on: Any) -> None:
    with pytest.raises(ConfigError, match="retry_on must list"):
        RetryIdempotentReset(Flaky(), retry_on=retry_on)


def test_no_tries_are_refused() -> None:
    with pytest.raises(ConfigError, match="tries must be >= 1, got 0"):
        RetryIdempotentReset(Flaky(), retry_on=OSError, tries=0)
