"""`TextAdapter`: any Gymnasium environment in text, and no text that breaks it."""

import asyncio
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

import gymllm
from gymllm.adapters import (
    TextAdapter,
    describe_value,
    how_to_answer,
    mark_highlights,
    parser_for,
    textify,
)
from gymllm.bridge import run_sync
from gymllm.errors import ConfigError

NAMES = ("left", "down", "right", "up")


class Echo(gymnasium.Env[Any, Any]):
    """Records the actions that reach it; shows one observation."""

    def __init__(self, action_space: spaces.Space[Any], observation: Any, space: Any) -> None:
        self.action_space = action_space
        self.observation_space = space
        self.observation = observation
        self.actions: list[Any] = []
        self.closed = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation, {"seed": seed, "options": options}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        return self.observation, 1.0, False, False, {"extra": 1}

    def close(self) -> None:
        self.closed += 1


def echo(action_space: spaces.Space[Any]) -> Echo:
    return Echo(action_space, 5, spaces.Discrete(9))


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("left", 0),
        ("UP", 3),
        ("  Right!\n", 2),
        ("**down**", 1),
        ("I could go left, but I go right.", 2),  # the last one counts
        ("up; no: left", 0),
        ('{"action": "down"}', 1),
    ],
)
def test_last_named_action_counts(text: str, action: int) -> None:
    assert parser_for(spaces.Discrete(4), names=NAMES)(text) == action


@pytest.mark.parametrize("text", ["", "leftover", "upright", "0", "nothing", "l e f t"])
def test_parts_of_words_are_not_actions(text: str) -> None:
    with pytest.raises(ValueError, match="No action was found"):
        parser_for(spaces.Discrete(4), names=NAMES)(text)


def test_longest_of_overlapping_names_counts_and_start_is_added() -> None:
    parse = parser_for(spaces.Discrete(3, start=7), names=("up", "up left", "Ünten"))
    assert [parse(t) for t in ("go up left", "up", "ÜNTEN")] == [8, 7, 9]


@pytest.mark.parametrize(
    "names", [("a",), ("a", "b", "c", "d", "e"), ("a", "A", "b", "c"), ("a", " ", "b", "c")]
)
def test_names_that_do_not_fit_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="4 different names"):
        TextAdapter(echo(spaces.Discrete(4)), action_names=names)
    with pytest.raises(ConfigError, match="Discrete"):
        TextAdapter(echo(spaces.MultiBinary(4)), action_names=names)


@pytest.mark.parametrize(("text", "action"), [("1", 1), ("0 or 2? 2.", 2), ("action: +0", 0)])
def test_last_number_counts(text: str, action: int) -> None:
    assert parser_for(spaces.Discrete(3))(text) == action


@pytest.mark.parametrize("text", ["3", "-1", "1.5", "x1", "one", "9" * 500])
def test_other_numbers_are_unreadable(text: str) -> None:
    with pytest.raises(ValueError, match=r"not one of|No number"):
        parser_for(spaces.Discrete(3))(text)


BOX = spaces.Box(-1, 1, (2,), np.float32)


@pytest.mark.parametrize(
    ("space", "text", "action"),
    [
        (BOX, "I take [0.5, -1]", np.array([0.5, -1], np.float32)),
        (BOX, "[9, 9] no, [0, 0]!", np.zeros(2, np.float32)),
        (spaces.Box(-1, 1, (), np.float32), "x = -0.5", np.array(-0.5, np.float32)),
        (
            spaces.Box(0, 9, (2, 2), np.int8),
            "[[1, 2], [3, 4]]",
            np.array([[1, 2], [3, 4]], np.int8),
        ),
        (spaces.MultiDiscrete([3, 2]), "[2, 1]", np.array([2, 1])),
        (spaces.MultiBinary(3), "[0, 1, 1]", np.array([0, 1, 1], np.int8)),
        (spaces.Tuple((spaces.Discrete(2), BOX)), "[1, [0, 1]]", (1, np.array([0, 1], np.float32))),
        (
            spaces.Dict(a=spaces.Discrete(2), b=gymllm.Unicode()),
            '{"b": "é", "a": 1}',
            {"a": 1, "b": "é"},
        ),
        (gymllm.Unicode(), " any\ntext ", " any\ntext "),
    ],
)
def test_json_actions(space: spaces.Space[Any], text: str, action: Any) -> None:
    env = echo(space)
    adapter = TextAdapter(env)
    adapter.reset(seed=0)
    assert adapter.step(text)[4]["invalid_action"] is False
    np.testing.assert_equal(env.actions, [action])


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (BOX, "[0.5]"),
        (BOX, "[2, 0]"),
        (BOX, "[[0, 0], [0]]"),
        (BOX, '["a", "b"]'),
        (BOX, "[true, false]"),
        (BOX, "[NaN, 0]"),
        (BOX, "[1e400, 0]"),
        (BOX, "[0, 0"),
        (BOX, "[" * 100_000),
        (BOX, "0.5"),
        (spaces.Box(0, 9, (2,), np.int8), "[1.5, 2]"),
        (spaces.Box(0, 9, (2,), np.int8), "[300, 2]"),
        (spaces.Box(0, 9, (2,), np.uint8), f"[{10**30}, 2]"),
        (spaces.MultiDiscrete([3, 2]), "[3, 0]"),
        (spaces.MultiDiscrete([3, 2]), "[0, 0, 0]"),
        (spaces.Tuple((spaces.Discrete(2), BOX)), "[1]"),
        (spaces.Tuple((spaces.Discrete(2), BOX)), "[true, [0, 0]]"),
        (spaces.Dict(a=spaces.Discrete(2)), '{"b": 1}'),
        (spaces.Dict(a=spaces.Discrete(2)), '{"a": 5}'),
        (spaces.Dict(a=gymllm.Unicode()), '{"a": 5}'),
        (gymllm.Unicode(3), "too long"),
        (spaces.Discrete(2), ""),
    ],
)
def test_unreadable_actions_never_reach_the_env(space: spaces.Space[Any], text: str) -> None:
    env = echo(space)
    adapter = TextAdapter(env, invalid_reward=-0.5)
    adapter.reset(seed=0)
    observation, reward, terminated, truncated, info = adapter.step(text)
    assert env.actions == []
    assert (reward, terminated, truncated, info) == (-0.5, False, False, {"invalid_action": True})
    wrong, *_, state = observation.split("\n")
    assert wrong.endswith(".")
    assert state == "5"
    assert how_to_answer(space) in observation


def test_spaces_without_a_text_form_need_a_parser() -> None:
    graph = spaces.Graph(BOX, None)
    with pytest.raises(ConfigError, match="parse="):
        TextAdapter(echo(graph))
    adapter = TextAdapter(echo(graph), parse=str.split)
    adapter.reset()
    assert adapter.step("a b")[4]["invalid_action"] is False
    with pytest.raises(ConfigError, match="not both"):
        TextAdapter(echo(spaces.Discrete(1)), parse=int, action_names=["a"])


def test_images_need_a_describer() -> None:
    image = np.zeros((32, 32, 3), np.uint8)
    env = Echo(spaces.Discrete(2), image, spaces.Box(0, 255, image.shape, np.uint8))
    with pytest.raises(ConfigError, match="describe="):
        TextAdapter(env)
    adapter = TextAdapter(env, describe=lambda observation: f"{observation.mean():g}")
    assert adapter.reset()[0].endswith("\n0")


@pytest.mark.parametrize(
    ("space", "value", "text"),
    [
        (spaces.Discrete(9), np.int64(5), "5"),
        (BOX, np.array([0.123456, -1], np.float32), "[0.1235, -1.0]"),
        (spaces.MultiDiscrete([3, 2]), np.array([2, 1]), "[2, 1]"),
        (gymllm.Unicode(), "as it\nis", "as it\nis"),
        (spaces.Tuple((spaces.Discrete(2), spaces.Discrete(9))), (1, 7), "(1, 7)"),
        (
            spaces.Dict(a=spaces.Discrete(2), b=BOX),
            {"a": 0, "b": np.zeros(2)},
            "a: 0\nb: [0.0, 0.0]",
        ),
        (spaces.Sequence(spaces.Discrete(3)), (1, 2), "[1, 2]"),
    ],
)
def test_values_are_written_plainly(space: spaces.Space[Any], value: Any, text: str) -> None:
    assert describe_value(space, value) == text


def test_highlights_become_marks() -> None:
    assert mark_highlights("  (Down)\n\x1b[41mS\x1b[0mFF\n") == "  (Down)\n[S]FF"
    assert mark_highlights("\x1b[0mplain\x1b[0m") == "plain"


def test_first_observation_has_the_instructions_later_ones_the_state() -> None:
    adapter = TextAdapter(echo(spaces.Discrete(4)), action_names=NAMES)
    how = "Answer with one of: left, down, right, up."
    assert adapter.reset(seed=3, options={"a": 1}) == (
        f"You are playing Echo.\n{how}\n5",
        {"seed": 3, "options": {"a": 1}},
    )
    assert adapter.step("left") == ("5", 1.0, False, False, {"extra": 1, "invalid_action": False})
    own = TextAdapter(echo(spaces.Discrete(4)), action_names=NAMES, instructions="Do well.")
    assert own.reset()[0] == "Do well.\n5"
    assert TextAdapter(echo(spaces.Discrete(4)), instructions="").reset()[0] == "5"


def test_max_turns_truncates_and_unreadable_actions_count() -> None:
    adapter = TextAdapter(echo(spaces.Discrete(2)), max_turns=3)
    for _ in range(2):
        adapter.reset()
        truncations = [adapter.step(text)[3:] for text in ("0", "?", "1")]
        assert [truncated for truncated, _ in truncations] == [False, False, True]
        assert truncations[-1][1]["truncated_by"] == "max_turns"
        assert "truncated_by" not in truncations[0][1]
    with pytest.raises(ConfigError, match="max_turns"):
        TextAdapter(echo(spaces.Discrete(2)), max_turns=0)
    with pytest.raises(ConfigError, match="invalid_reward"):
        TextAdapter(echo(spaces.Discrete(2)), invalid_reward=float("nan"))


def test_closes_the_env_it_owns_once() -> None:
    env = echo(spaces.Discrete(2))
    adapter = TextAdapter(env)
    adapter.close()
    adapter.close()
    assert env.closed == 1


def test_textify_leaves_text_alone() -> None:
    text = echo(gymllm.Unicode())
    text.observation_space = gymllm.Unicode()
    assert textify(text) is text
    assert isinstance(textify(echo(spaces.Discrete(2))), TextAdapter)


@pytest.mark.parametrize("make_env", [lambda: gymnasium.make("CartPole-v1").unwrapped])
def test_passes_gymnasiums_check_env(make_env: Callable[[], gymnasium.Env[Any, Any]]) -> None:
    gymnasium.register("gymllm-test/Adapted-v0", lambda **kwargs: TextAdapter(make_env(), **kwargs))
    try:
        check_env(gymnasium.make("gymllm-test/Adapted-v0").unwrapped)
    finally:
        del gymnasium.registry["gymllm-test/Adapted-v0"]


def test_an_async_env_inside_waits_on_the_loop() -> None:
    class Slow(gymllm.Env):
        """Text observations, numbers as actions."""

        def __init__(self) -> None:
            self.action_space = spaces.Discrete(2)  # type: ignore[assignment]  # what is adapted

        async def areset(self, **_: Any) -> tuple[str, dict[str, Any]]:
            await asyncio.sleep(0)
            return "start", {}

        async def astep(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
            await asyncio.sleep(0)
            return f"did {action}", 0.0, True, False, {}

    async def bridged() -> str:
        adapter = TextAdapter(Slow())
        await run_sync(adapter.reset)
        return (await run_sync(adapter.step, "1"))[0]

    assert asyncio.run(bridged()) == "did 1"
    adapter = TextAdapter(Slow())
    adapter.reset()
    assert adapter.step("0")[0] == "did 0"
