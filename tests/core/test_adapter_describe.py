"""An observation as text, or as an image where nothing else is possible."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import gymllm
from gymllm.adapters import (
    describe_value,
    describer_for,
    mark_highlights,
    needed_render_mode,
    register_describer,
    registry,
)
from gymllm.errors import ConfigError

BOX = spaces.Box(-1, 1, (2,), np.float32)
SCREEN = spaces.Box(0, 255, (20, 10, 3), np.uint8)
LARGE = spaces.Box(-1, 1, (300,), np.float32)


class Shows(gymnasium.Env[Any, Any]):
    """Has an observation space, and pictures of itself."""

    def __init__(self, space: spaces.Space[Any], render_mode: str | None = None) -> None:
        self.observation_space, self.render_mode = space, render_mode
        self.action_space = spaces.Discrete(2)

    def render(self) -> Any:
        picture = np.full((2, 3, 3), 7, np.uint8)
        return picture if self.render_mode == "rgb_array" else "ab\x1b[41mc\x1b[0m\n"


class Prints(Shows):
    """Has a grid that it prints."""

    def pprint_grid(self) -> str:
        return "W W"


@pytest.fixture(autouse=True)
def _only_own_describers(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]  # a fixture
    monkeypatch.setattr(registry, "_by_id", {})
    monkeypatch.setattr(registry, "_by_class", {})


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


def test_registered_describer_gets_the_inner_env_and_counts_first() -> None:
    env = Prints(spaces.Discrete(9), "ansi")
    register_describer(env_class=Shows, describe=lambda e, seen: f"{type(e).__name__} saw {seen}")
    assert describer_for(gymnasium.Wrapper(env))(5) == ("Prints saw 5",)


def test_describer_is_not_used_where_a_wrapper_changed_the_observation() -> None:
    register_describer(env_class=Shows, describe=lambda _, seen: f"saw {seen}")
    flat: Any = gymnasium.wrappers.FlattenObservation(Shows(spaces.MultiDiscrete([2, 2])))
    assert "saw" not in str(describer_for(flat)(np.zeros(4, np.float32)))


def test_named_fields() -> None:
    register_describer(env_class=Shows, fields=("height", "speed (m/s)"))
    described = describer_for(Shows(BOX))(np.array([0.123456, -1], np.float32))
    assert described == ("height: 0.1235\nspeed (m/s): -1.0",)
    with pytest.raises(ConfigError, match=r"2 names .* has 300: height"):
        describer_for(Shows(LARGE))


def test_ansi_picture_counts_before_the_grid_and_the_grid_before_fields() -> None:
    assert describer_for(Prints(BOX, "ansi"))(np.zeros(2)) == ("ab[c]",)
    assert describer_for(Prints(BOX))(np.zeros(2)) == ("W W",)
    assert describer_for(Shows(BOX))(np.zeros(2)) == ("field 0: 0.0\nfield 1: 0.0",)


def test_grid_comes_with_the_texts_of_a_dict() -> None:
    space = spaces.Dict(mission=gymllm.Unicode(), image=LARGE)
    observation = {"mission": "open the door", "image": np.zeros(300)}
    assert describer_for(Prints(space))(observation) == ("mission: open the door\nW W",)


def test_images_become_image_parts() -> None:
    pixels = SCREEN.sample()
    describer = describer_for(Shows(SCREEN))
    assert describer.images
    (image,) = describer(pixels)
    np.testing.assert_array_equal(image, pixels)
    assert not np.shares_memory(image, pixels)  # type: ignore[arg-type]  # an image


@pytest.mark.parametrize("shape", [(20, 15), (20, 15, 1)])
def test_grey_images_have_three_equal_channels(shape: tuple[int, ...]) -> None:
    space = spaces.Box(0, 255, shape, np.uint8)
    pixels = space.sample()
    (image,) = describer_for(Shows(space))(pixels)
    assert isinstance(image, np.ndarray)
    assert image.shape == (20, 15, 3)
    for channel in range(3):
        np.testing.assert_array_equal(image[:, :, channel], pixels.reshape(20, 15))


def test_images_within_others_stand_below_their_text() -> None:
    space = spaces.Dict(a=spaces.Discrete(9), b=spaces.Tuple((SCREEN, spaces.Discrete(2))))
    observation = space.sample()
    text, image = describer_for(Shows(space))(observation)
    assert text == f"a: {observation['a']}\nb: ((image), {observation['b'][1]})"
    np.testing.assert_array_equal(image, observation["b"][0])


def test_what_is_too_large_is_shown_as_its_picture_or_refused() -> None:
    describer = describer_for(Shows(LARGE, "rgb_array"))
    (image,) = describer(np.zeros(300))
    np.testing.assert_array_equal(image, np.full((2, 3, 3), 7))
    assert describer.images
    with pytest.raises(ConfigError, match=r"shape \(300,\).*describe=.*rgb_array"):
        describer_for(Shows(LARGE))


def test_needed_render_mode_is_the_one_that_shows_most() -> None:
    def needed(space: spaces.Space[Any], *modes: str, kind: type[Shows] = Shows) -> str | None:
        env = kind(space)
        env.metadata = {"render_modes": list(modes)}
        return needed_render_mode(env)

    assert needed(BOX, "ansi", "rgb_array") == "ansi"
    assert needed(BOX, "rgb_array") is None
    assert needed(LARGE, "rgb_array") == "rgb_array"
    assert needed(LARGE, "rgb_array", kind=Prints) is None
    assert needed(LARGE) is None
    assert needed(gymllm.Unicode(), "ansi") is None
    register_describer(env_class=Shows, fields=("a", "b"))
    assert needed(BOX, "ansi") is None
