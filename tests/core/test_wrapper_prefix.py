"""`FewShot` and `History`: what stands before an observation, and where it does not."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import ResetNeeded

from gymllm.errors import ConfigError
from gymllm.spaces import ChatMessage, Message, Unicode, message, text_of
from gymllm.wrappers import FewShot, History

EXAMPLES = [("1 + 1?", "2"), ("{2} + 2?", "4")]
PICTURE = np.zeros((2, 2, 3), np.uint8)


class Counter(gymnasium.Env[Any, Any]):
    """Says its step, in a text or in a message with a picture."""

    def __init__(self, space: spaces.Space[Any] | None = None, *, length: int = 6) -> None:
        self.observation_space = space or Unicode(length)
        self.action_space = Unicode(length)
        self.steps, self.length = 0, length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._say(), {"first": True}

    def step(self, action: str) -> Any:
        self.steps += 1
        return self._say(), 1.0, False, False, {}

    def _say(self) -> str | ChatMessage:
        text = f"step {self.steps}".ljust(self.length, ".")
        return text if is_unicode(self.observation_space) else message("tool", PICTURE, text)


def is_unicode(space: spaces.Space[Any]) -> bool:
    return isinstance(space, Unicode | spaces.Text)


def play(env: gymnasium.Env[Any, Any], actions: list[str]) -> list[str]:
    observations = [env.reset(seed=0)[0]]
    observations += [env.step(action)[0] for action in actions]
    assert all(observation in env.observation_space for observation in observations)
    return [text_of(observation) for observation in observations]


def test_examples_stand_before_the_first_observation_only() -> None:
    env = FewShot(Counter(), EXAMPLES)
    for _ in range(2):
        first, second = play(env, ["go"])
        assert first == (
            "Worked examples:\n\n"
            "Observation: 1 + 1?\nAction: 2\n\n"
            "Observation: {2} + 2?\nAction: 4\n\n"
            "Now it is your turn.\n\n"
            "step 0"
        )
        assert second == "step 1"


def test_examples_are_written_as_told() -> None:
    env = FewShot(Counter(), [("q", "a")], before="[", turn="{action}<-{observation};", after="] ")
    assert play(env, []) == ["[a<-q;] step 0"]


def test_the_last_turns_stand_before_each_observation() -> None:
    env = History(Counter(), turns=2)
    for _ in range(2):
        observations = play(env, ["a", "{b}", "c"])
        assert observations[0] == "step 0"
        assert observations[1] == "So far:\n\nObservation: step 0\nAction: a\n\nNow: step 1"
        assert observations[3] == (
            "So far:\n\n"
            "Observation: step 1\nAction: {b}\n\n"
            "Observation: step 2\nAction: c\n\n"
            "Now: step 3"
        )


def test_both_together_hold_each_text_once() -> None:
    env = FewShot(History(Counter(), turns=1), [("q", "a")])
    first, second = play(env, ["go"])
    assert first.endswith("step 0")
    assert "Worked" not in second


@pytest.mark.parametrize(
    "wrap", [lambda env: FewShot(env, EXAMPLES), lambda e: History(e, turns=1)]
)
def test_messages_get_a_text_part_before_theirs(wrap: Any) -> None:
    space = Message(max_length=6, roles=("tool",))
    env = wrap(Counter(space))
    assert env.observation_space.roles == ("tool",)
    env.reset()
    shown = env.step("go")[0] if isinstance(env, History) else env.reset()[0]
    assert shown in env.observation_space
    assert [part["type"] for part in shown["content"]] == ["text", "image", "text"]
    assert shown["role"] == "tool"
    assert not env.unwrapped.observation_space.contains(shown), "the space was widened"


def test_longest_texts_lie_in_the_widened_space() -> None:
    inner = Counter(spaces.Text(900), length=900)
    env = History(inner, turns=3, turn="{observation}{observation}{action}|")
    longest = play(env, ["a" * 900] * 5)[-1]
    assert len(longest) > 3 * 3 * 900
    assert isinstance(env.observation_space, Unicode)
    shot = FewShot(Counter(length=6), [("q" * 900, "a")])
    assert shot.observation_space == Unicode(len(play(shot, [])[0]))


def test_step_before_reset_raises() -> None:
    with pytest.raises(ResetNeeded, match="History"):
        History(Counter(), turns=1).step("go")


@pytest.mark.parametrize(
    "turn", ["{observation}", "{0} {observation} {action}", "{", "{a.b}", "{act}"]
)
def test_a_turn_that_cannot_be_filled_in_is_refused(turn: str) -> None:
    with pytest.raises(ConfigError, match="turn"):
        FewShot(Counter(), EXAMPLES, turn=turn)
    with pytest.raises(ConfigError, match="turn"):
        History(Counter(), turns=1, turn=turn)


@pytest.mark.parametrize("example", ["ab", ("a",), ("a", 3), ("a", "b", "c"), 3])
def test_an_example_that_is_no_pair_of_texts_is_named(example: Any) -> None:
    with pytest.raises(ConfigError, match="an observation and an action, got"):
        FewShot(Counter(), [("q", "a"), example])


def test_other_mistakes_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one example"):
        FewShot(Counter(), [])
    with pytest.raises(ConfigError, match="got 0"):
        History(Counter(), turns=0)
    for wrap in (lambda e: FewShot(e, EXAMPLES), lambda e: History(e, turns=1)):
        with pytest.raises(ConfigError, match="TextAdapter"):
            wrap(Counter(spaces.Discrete(3)))
