"""`TextAdapter`: any Gymnasium environment in text, and no text that breaks it."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import RenderCollection

import gymllm
from gymllm.adapters import TextAdapter, how_to_answer, is_text_env, textify
from gymllm.bridge import run_sync
from gymllm.errors import ConfigError, ConfigTypeError, EnvTypeError
from gymllm.spaces import Message
from gymllm.testing import check_env_conformance

NAMES = ("left", "down", "right", "up")
BOX = spaces.Box(-1, 1, (2,), np.float32)


class Echo(gymnasium.Env[Any, Any]):
    """Records the actions that reach it; shows one observation."""

    def __init__(self, action_space: spaces.Space[Any], observation: Any, space: Any) -> None:
        self.action_space = action_space
        self.observation_space = space
        self.observation = observation
        self.actions: list[Any] = []
        self.mask: Any = None
        self.closed = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation, {"seed": seed, "options": options} | self.masked()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        return self.observation, 1.0, False, False, {"extra": 1} | self.masked()

    def masked(self) -> dict[str, Any]:
        return {} if self.mask is None else {"action_mask": self.mask}

    def close(self) -> None:
        self.closed += 1


def echo(action_space: spaces.Space[Any]) -> Echo:
    return Echo(action_space, 5, spaces.Discrete(9))


@pytest.mark.parametrize(
    ("space", "text", "action"),
    [
        (BOX, "I take [0.5, -1]", np.array([0.5, -1], np.float32)),
        (spaces.MultiDiscrete([3, 2]), "<action>[2, 1]</action>", np.array([2, 1])),
        (
            spaces.Dict(a=spaces.Discrete(2), b=gymllm.Unicode()),
            r'\boxed{{"b": "é", "a": 1}}',
            {"a": 1, "b": "é"},
        ),
        (spaces.Discrete(3), "2", 2),
    ],
)
def test_actions_reach_the_env(space: spaces.Space[Any], text: str, action: Any) -> None:
    env = echo(space)
    adapter = TextAdapter(env)
    adapter.reset(seed=0)
    assert adapter.step(text)[4]["invalid_action"] is False
    np.testing.assert_equal(env.actions, [action])


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (BOX, "[2, 0]"),
        (spaces.MultiDiscrete([3, 2]), "[3, 0]"),
        (spaces.Dict(a=spaces.Discrete(2)), '{"b": 1}'),
        (spaces.Discrete(2), "0 or 1"),
    ],
)
def test_unreadable_actions_never_reach_the_env(space: spaces.Space[Any], text: str) -> None:
    env = echo(space)
    adapter = TextAdapter(env, invalid_reward=-0.5)
    adapter.reset(seed=0)
    observation, reward, terminated, truncated, info = adapter.step(text)
    assert env.actions == []
    assert (reward, terminated, truncated) == (-0.5, False, False)
    assert info == {"invalid_action": True, "invalid_actions": 1}
    wrong, how, state = observation.split("\n")
    assert wrong.endswith(".")
    assert how == how_to_answer(space)
    assert state == "5"


def test_impossible_actions_never_reach_the_env_and_the_possible_ones_are_listed() -> None:
    env = echo(spaces.Discrete(4, start=1))
    env.mask = np.array([1, 0, 1, 0], np.int8)
    adapter = TextAdapter(env, action_names=NAMES)
    assert adapter.reset(seed=0)[0].endswith("5\nValid actions: left, right.")
    observation, *_, info = adapter.step("down")
    assert env.actions == []
    assert observation.startswith("down is not possible now.\nAnswer with ")
    assert observation.endswith("Valid actions: left, right.")
    assert info == {"invalid_action": True, "invalid_actions": 1}
    env.mask = None
    assert adapter.step("right")[0] == "5"
    assert env.actions == [3]


def test_illegal_actions_truncate_after_max_invalid_in_a_row_and_are_counted() -> None:
    adapter = TextAdapter(echo(spaces.Discrete(2)), max_invalid=2)
    for _ in range(2):
        adapter.reset()
        steps = [adapter.step(text) for text in ("?", "0", "?", "?")]
        assert [truncated for *_, truncated, _ in steps] == [False, False, False, True]
        assert [step[4]["invalid_actions"] for step in steps] == [1, 1, 2, 3]
        assert [step[4]["invalid_action"] for step in steps] == [True, False, True, True]
        assert steps[-1][4]["truncated_by"] == "invalid_actions"
    endless = TextAdapter(echo(spaces.Discrete(2)), max_invalid=None)
    endless.reset()
    assert not any(endless.step("?")[3] for _ in range(50))
    with pytest.raises(ConfigError, match="max_invalid must be >= 1 or None, got 0"):
        TextAdapter(echo(spaces.Discrete(2)), max_invalid=0)


def test_possible_actions_are_not_listed_at_the_end() -> None:
    class Short(Echo):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            observation, reward, _, truncated, info = super().step(action)
            return observation, reward, True, truncated, info

    env = Short(spaces.Discrete(2), 5, spaces.Discrete(9))
    env.mask = np.ones(2, np.int8)
    adapter = TextAdapter(env)
    adapter.reset()
    assert adapter.step("1")[0] == "5"


def test_the_last_name_counts_where_the_rule_is_last() -> None:
    env = echo(spaces.Discrete(4))
    adapter = TextAdapter(env, action_names=NAMES, answer_rule="last")
    assert "Answer with one of: left, down, right, up." in adapter.reset()[0]
    adapter.step("<action>left</action>, no: up")
    assert env.actions == [3]


def test_spaces_without_a_text_form_need_a_parser() -> None:
    graph = spaces.Graph(BOX, None)
    with pytest.raises(ConfigError, match="parse="):
        TextAdapter(echo(graph))
    adapter = TextAdapter(echo(graph), parse=str.split)
    adapter.reset()
    assert adapter.step("a b")[4]["invalid_action"] is False
    with pytest.raises(ConfigError, match="not both"):
        TextAdapter(echo(spaces.Discrete(1)), parse=int, action_names=["a"])


def test_images_make_messages() -> None:
    screen = spaces.Box(0, 255, (20, 10, 3), np.uint8)
    pixels = screen.sample()
    adapter = TextAdapter(Echo(spaces.Discrete(2), pixels, screen))
    assert adapter.observation_space == Message(roles=("user",))
    assert is_text_env(adapter)
    first: Any = adapter.reset()[0]
    later: Any = adapter.step("1")[0]
    refused: Any = adapter.step("?")[0]
    assert [part["type"] for part in first["content"]] == ["text", "image"]
    assert first["content"][0]["text"].startswith("You are playing Echo.\nAnswer with ")
    assert [part["type"] for part in later["content"]] == ["image"]
    assert [part["type"] for part in refused["content"]] == ["text", "image"]
    for shown in (first, later, refused):
        assert shown in adapter.observation_space
        np.testing.assert_array_equal(shown["content"][-1]["image"], pixels)
    later["content"][0]["image"][:] = 0
    np.testing.assert_array_equal(refused["content"][-1]["image"], pixels)


def test_a_describer_of_images_makes_texts() -> None:
    image = np.zeros((32, 32, 3), np.uint8)
    env = Echo(spaces.Discrete(2), image, spaces.Box(0, 255, image.shape, np.uint8))
    adapter = TextAdapter(env, describe=lambda observation: f"{observation.mean():g}")
    assert adapter.reset()[0].endswith("\n0")


def test_first_observation_has_the_instructions_later_ones_the_state() -> None:
    adapter = TextAdapter(echo(spaces.Discrete(4)), action_names=NAMES)
    how = "Answer with <action>NAME</action>, where NAME is one of: left, down, right, up."
    assert adapter.reset(seed=3, options={"a": 1}) == (
        f"You are playing Echo.\n{how}\n5",
        {"seed": 3, "options": {"a": 1}},
    )
    info = {"extra": 1, "invalid_action": False, "invalid_actions": 0}
    assert adapter.step("left") == ("5", 1.0, False, False, info)
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


@pytest.mark.parametrize("wrap", [textify, TextAdapter])
def test_what_is_no_environment_is_named(wrap: Callable[[Any], object]) -> None:
    with pytest.raises(ConfigTypeError, match=r"needs a gymnasium\.Env, got None"):
        wrap(None)


def test_a_describer_that_gives_no_text_is_named() -> None:
    env = TextAdapter(echo(spaces.Discrete(2)), describe=lambda observation: observation)
    with pytest.raises(EnvTypeError, match="a describer must return a str, got 5 of <function"):
        env.reset()


def test_textify_keeps_the_render_mode() -> None:
    env = textify(gymnasium.make("CartPole-v1", render_mode="rgb_array"))
    frames = RenderCollection(env)  # refuses an env without a render mode
    frames.reset(seed=0)
    frames.step("<action>1</action>")
    assert [frame.shape for frame in cast("Any", frames.render())] == [(480, 640, 3)] * 2
    made = gymllm.make("CartPole-v1", render_mode="rgb_array_list")
    assert made.render_mode is None, "the env's alone: an adapter gives no lists"


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([3, 2]),
        spaces.Dict(move=spaces.Discrete(3), force=spaces.Box(0, 1, (1,), np.float32)),
    ],
)
def test_conforms(space: spaces.Space[Any]) -> None:
    actions = ["[2, 1]", '<action>{"move": 1, "force": [0.5]}</action>', "?"]
    check_env_conformance(lambda: TextAdapter(echo(space)), actions=actions, longest_episode=20)


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
