"""Rendering: the last observation as text, printed, or drawn as frames that make a video."""

import asyncio
import builtins
import io
import re
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import RecordEpisodeStatistics, RecordVideo

import gymllm
from gymllm.bridge import run_sync
from gymllm.errors import MissingExtraError, UnknownNameError
from gymllm.render import (
    CUT,
    HEIGHT,
    LINE_HEIGHT,
    MARGIN,
    PAPER,
    ROWS,
    WIDTH,
    draw,
    show,
    width_of,
    wrap,
)
from gymllm.spaces import Image, Message, message, text_of


class Countdown(gymllm.Env):
    """Says how many steps are left, longer and longer."""

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.left = 3

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        await asyncio.sleep(0)
        self.left = 3
        return "3 left", {}

    async def astep(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        await asyncio.sleep(0)
        self.left -= 1
        return f"{self.left} left\n" * 20 * (4 - self.left), 1.0, self.left == 0, False, {}


class Slides(Countdown):
    """Shows a picture with each text."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode)
        self.observation_space = Message()  # type: ignore[assignment]  # a text environment's is Unicode

    async def areset(self, **kwargs: Any) -> Any:
        text, info = await super().areset(**kwargs)
        return message("user", text, np.full((40, 30, 3), (200, 0, 0), np.uint8)), info


def play(env: gymnasium.Env[Any, Any]) -> dict[str, Any]:
    env.reset(seed=0)
    terminated, info = False, dict[str, Any]()
    while not terminated:
        *_, terminated, _, info = env.step("go")
    return info


def ink(frame: Image) -> int:
    """How many pixels are not paper."""
    return int((frame != np.array(PAPER, np.uint8)).any(axis=2).sum())


def test_every_render_mode_is_there_by_inheritance() -> None:
    gymnasium.register("gymllm-test/Rendered-v0", Countdown)
    try:
        env = gymnasium.make("gymllm-test/Rendered-v0", render_mode="rgb_array")
        assert env.metadata["render_modes"] == ["ansi", "human", "rgb_array"]
        check_env(env.unwrapped)
    finally:
        del gymnasium.registry["gymllm-test/Rendered-v0"]


def test_no_render_mode_renders_nothing() -> None:
    env = Countdown()
    env.reset()
    assert env.render() is None


def test_unknown_render_mode_is_named() -> None:
    env = Countdown(render_mode="rgb_aray")
    env.reset()
    with pytest.raises(UnknownNameError, match="Did you mean rgb_array"):
        env.render()


def test_human_prints_each_observation(capsys: pytest.CaptureFixture[str]) -> None:
    env = Countdown(render_mode="human")
    env.reset()
    assert capsys.readouterr().out == "3 left\n"
    observation, *_ = env.step("go")
    assert capsys.readouterr().out == observation + "\n"
    assert env.render() is None
    assert capsys.readouterr().out == observation + "\n"


def test_what_the_terminal_lacks_is_printed_as_question_marks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    show("é 中 \ud800")
    assert written.getvalue().decode("latin-1") == "é ? ?\n"


def test_a_frame_is_the_drawn_observation() -> None:
    env = Countdown(render_mode="rgb_array")
    env.reset()
    frame = env.render()
    assert isinstance(frame, np.ndarray)
    assert (frame.shape, frame.dtype) == ((HEIGHT, WIDTH, 3), np.uint8)
    np.testing.assert_array_equal(frame, draw("3 left"))
    assert ink(frame) > 50
    env.step("go")
    later = env.render()
    assert isinstance(later, np.ndarray)
    assert later.shape == frame.shape
    assert ink(later) > ink(frame)


@pytest.mark.asyncio
async def test_frames_can_be_drawn_in_the_bridge() -> None:
    env = Countdown(render_mode="rgb_array")
    await run_sync(env.reset)
    np.testing.assert_array_equal(await run_sync(env.render), draw("3 left"))


def test_a_message_shows_its_texts_and_images() -> None:
    env = Slides(render_mode="rgb_array")
    observation: Any = env.reset()[0]
    assert observation in env.observation_space
    frame = env.render()
    assert isinstance(frame, np.ndarray)
    red = (frame == (200, 0, 0)).all(axis=2)
    assert int(red.sum()) == 40 * 30
    rows = np.flatnonzero((frame != np.array(PAPER, np.uint8)).any(axis=(1, 2)))
    assert rows.min() < np.flatnonzero(red.any(axis=1)).min(), "the text stands above the image"
    env.render_mode = "ansi"
    assert env.render() == text_of(observation) == "3 left"


def test_an_image_that_is_too_large_is_made_smaller() -> None:
    frame = draw(message("user", "above", np.zeros((3000, 2000, 3), np.uint8), "below"))
    black = (frame == 0).all(axis=2)
    rows, columns = (np.flatnonzero(black.any(axis=axis)) for axis in (1, 0))
    height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
    assert height / width == pytest.approx(1.5, rel=0.02)
    assert height < HEIGHT * 3 / 4
    assert ink(frame) > height * width, "the texts are drawn too"


def test_a_long_observation_shows_its_end() -> None:
    lines = [f"line {number}" for number in range(1000)]
    end = [CUT, *lines[-(ROWS - 1) :]]
    cut, drawn = draw("\n".join(lines)), draw("\n".join(end))
    first_line = MARGIN + LINE_HEIGHT
    np.testing.assert_array_equal(cut[first_line:], drawn[first_line:])
    assert ink(cut[:first_line]) > 0, "and says that something was above"
    assert ink(draw("\n".join(["x"] * ROWS))) == ROWS * ink(draw("x")), "a full page is not cut"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", [""]),
        ("a\n\nb", ["a", "", "b"]),
        ("one two three", ["one two", "three"]),
        ("  in dented words", ["  in", "dented", "words"]),
        ("abcdefghijk", ["abcdefgh", "ijk"]),
        ("a abcdefghijk", ["a", "abcdefgh", "ijk"]),
        ("abcdefgh  ", ["abcdefgh"]),
        ("中文字日本한글", ["中文字日", "本한글"]),
        ("a\u0301" * 9, ["a\u0301" * 8, "a\u0301"]),
        ("a\tb", ["a   b"]),
        ("a\r\nb", ["a", "b"]),
        ("\x1b[31mred\x1b[0m", ["red"]),
        ("\x00\ud800\x1b", ["\ufffd\ufffd\ufffd"]),
    ],
)
def test_lines_are_wrapped_between_words_where_possible(text: str, lines: list[str]) -> None:
    assert wrap(text, 8) == lines


def test_wrapped_text_fits_and_loses_nothing_but_blanks() -> None:
    rng = np.random.default_rng(0)
    letters = list("ab c  de\u0301\n中🙂-")
    for _ in range(300):
        text = "".join(rng.choice(letters, size=60))
        rows = wrap(text, 10)
        assert all(width_of(row) <= 10 for row in rows), text
        assert re.sub(r"\s", "", "".join(rows)) == re.sub(r"\s", "", text)


@pytest.mark.parametrize(
    "text",
    ["", "\x00", "\ud800", "中文 한글 🙂🚀 👩‍👩‍👧", "e\u0301\u0301", "x" * 100_000, "\n" * 9999],
)
def test_any_text_can_be_drawn(text: str) -> None:
    assert draw(text).shape == (HEIGHT, WIDTH, 3)


def test_wide_and_narrow_characters_stay_on_the_grid() -> None:
    narrow, wide = (draw(f"{text}|") for text in ("ab" * 10, "中" * 10))
    bar = [np.flatnonzero((f != np.array(PAPER)).any(axis=(0, 2))).max() for f in (narrow, wide)]
    assert bar[0] == bar[1]


def test_without_pillow_the_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_pillow(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "PIL":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_pillow)
    with pytest.raises(MissingExtraError, match=r'pip install "gymllm\[render\]"'):
        draw("a")


@pytest.mark.filterwarnings("ignore:Setting the shape on a NumPy array")  # moviepy does
def test_gymnasium_records_a_video_and_statistics(tmp_path: Path) -> None:
    moviepy = pytest.importorskip("moviepy")
    folder = tmp_path / "videos"
    env = RecordVideo(
        RecordEpisodeStatistics(Countdown(render_mode="rgb_array")),
        str(folder),
        episode_trigger=lambda episode: episode == 1,
    )
    play(env)
    info = play(env)
    env.close()
    assert (info["episode"]["r"], info["episode"]["l"]) == (3.0, 3)
    (path,) = folder.glob("*.mp4")
    assert path.name == "rl-video-episode-1.mp4"
    with moviepy.VideoFileClip(str(path)) as video:
        assert tuple(video.size) == (WIDTH, HEIGHT)
        assert video.fps == Countdown.metadata["render_fps"]
        assert video.n_frames == 4, "one of the reset, one of each step"
        np.testing.assert_allclose(video.get_frame(0).mean(), draw("3 left").mean(), atol=2)


def test_gymnasium_records_statistics_without_rendering() -> None:
    info = play(RecordEpisodeStatistics(Countdown()))
    assert (info["episode"]["r"], info["episode"]["l"]) == (3.0, 3)


@pytest.mark.filterwarnings("ignore:Setting the shape on a NumPy array")  # moviepy does
def test_a_registered_environment_is_recorded_as_it_is_played(tmp_path: Path) -> None:
    moviepy = pytest.importorskip("moviepy")
    made = gymnasium.make("gymllm/FrozenLake-v0", render_mode="rgb_array", max_turns=2)
    env = RecordEpisodeStatistics(RecordVideo(made, str(tmp_path / "videos")))
    observation, _ = env.reset(seed=3)
    np.testing.assert_array_equal(env.render(), draw(observation))
    env.step("nothing")
    *_, truncated, info = env.step("nothing")
    env.close()
    assert truncated
    assert info["episode"]["l"] == 2
    with moviepy.VideoFileClip(str(tmp_path / "videos" / "rl-video-episode-0.mp4")) as video:
        assert video.n_frames == 3
