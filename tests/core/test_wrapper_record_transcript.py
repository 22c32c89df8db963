"""`RecordTranscript`: every episode is on disk, whatever ended it, and can be read back."""

import asyncio
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from gymllm.bridge import run_sync
from gymllm.errors import ConfigError
from gymllm.spaces import Message, Unicode, message
from gymllm.trajectory import Ending, Trajectory
from gymllm.transcripts import read_jsonl
from gymllm.wrappers import RecordTranscript, TimeLimit


class Echo(gymnasium.Env[Any, Any]):
    """Says what it is told; "end" ends, "raise" raises, "cancel" is cancelled."""

    def __init__(self, *, messages: bool = False) -> None:
        self.observation_space = Message() if messages else Unicode()
        self.action_space = Unicode()
        self.messages, self.closes = messages, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if options and options.get("raise"):
            raise OSError("no reset")
        return self._say("begin"), {}

    def step(self, action: str) -> Any:
        if action == "raise":
            raise KeyError("broken")
        if action == "cancel":
            raise asyncio.CancelledError
        info = {"invalid_action": action == "bad"}
        return self._say(action), 0.5, action == "end", False, info

    def close(self) -> None:
        self.closes += 1

    def _say(self, text: str) -> Any:
        picture = np.zeros((2, 4, 3), np.uint8)
        return message("user", text, picture) if self.messages else f"said {text}"


def play(env: gymnasium.Env[Any, Any], *actions: str, **reset: Any) -> None:
    env.reset(**reset)
    for action in actions:
        env.step(action)


def recorded(folder: Path, number: int = 0) -> list[Trajectory]:
    return list(read_jsonl(folder / f"transcript-{number}.jsonl"))


def test_an_episode_is_on_disk_when_its_last_step_returns(tmp_path: Path) -> None:
    env = RecordTranscript(Echo(), tmp_path / "new" / "folder")
    assert env.path is None
    assert not (tmp_path / "new").exists(), "making an environment writes nothing"
    play(env, "bad", "end", seed=7, options={"level": 2})
    assert env.path == tmp_path / "new" / "folder" / "transcript-0.jsonl"
    (episode,) = recorded(env.path.parent)
    assert (episode.task.id, episode.task.seed, episode.task.options) == ("Echo", 7, {"level": 2})
    assert [(m.role, m.content) for m in episode.messages] == [
        ("user", "said begin"),
        ("assistant", "bad"),
        ("user", "said bad"),
        ("assistant", "end"),
        ("user", "said end"),
    ]
    assert [(t.observation, t.action, t.reward, t.invalid_action) for t in episode.turns] == [
        ("said begin", "bad", 0.5, True),
        ("said bad", "end", 0.5, False),
    ]
    assert (episode.ending, episode.reward) == (Ending.TERMINATED, 1.0)
    assert 0 < episode.started_ns <= episode.ended_ns


def test_every_ending_is_written_once_with_its_reason(tmp_path: Path) -> None:
    inner = Echo()
    env = RecordTranscript(TimeLimit(inner, max_turns=3), tmp_path)
    play(env, "a", "a", "a")
    play(env, "a")
    play(env, "a", "end")
    env.reset()
    with pytest.raises(KeyError, match="broken"):
        env.step("raise")
    env.reset()
    with pytest.raises(asyncio.CancelledError):
        env.step("cancel")
    with pytest.raises(OSError, match="no reset"):
        env.reset(options={"raise": True})
    play(env, "a")
    env.close()
    env.close()
    assert inner.closes == 2, "the wrapped environment is closed as often as this one"
    episodes = recorded(tmp_path)
    assert [(e.task.index, e.ending.value, e.reason) for e in episodes] == [
        (0, "truncated", "turns"),
        (1, "truncated", "reset"),
        (2, "terminated", ""),
        (3, "failed", "KeyError: 'broken'"),
        (4, "failed", "CancelledError: "),
        (5, "truncated", "close"),
    ]
    assert [m.content for m in episodes[3].messages] == ["said begin", "raise"]
    assert {e.task.seed for e in episodes} == {-1}


def test_close_writes_the_page(tmp_path: Path) -> None:
    env = RecordTranscript(Echo(), tmp_path)
    play(env, "<b>hello</b>", "end")
    play(env, "again", "end")
    env.close()
    page = (tmp_path / "transcript-0.html").read_text()
    assert "<h1>transcript-0</h1>" in page
    assert page.count("<details data-ending") == 2
    assert "&lt;b&gt;hello&lt;/b&gt;" in page


def test_nothing_played_leaves_nothing(tmp_path: Path) -> None:
    RecordTranscript(Echo(), tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_environments_share_a_folder_and_older_files_stay(tmp_path: Path) -> None:
    first, second = (RecordTranscript(Echo(), tmp_path) for _ in range(2))
    play(first, "a", "end")
    play(second, "b", "end")
    play(first, "c", "end")
    assert [e.turns[0].action for e in recorded(tmp_path, 0)] == ["a", "c"]
    assert [e.turns[0].action for e in recorded(tmp_path, 1)] == ["b"]
    other = RecordTranscript(Echo(), tmp_path, name="other")
    play(other, "end")
    assert other.path == tmp_path / "other-0.jsonl"


def test_images_are_noted_by_their_size(tmp_path: Path) -> None:
    play(RecordTranscript(Echo(messages=True), tmp_path), "end")
    (episode,) = recorded(tmp_path)
    assert episode.messages[0].content == "begin\n[image, 4 x 2]"


@pytest.mark.asyncio
async def test_it_records_in_the_bridge(tmp_path: Path) -> None:
    env = RecordTranscript(gymnasium.make("gymllm/FrozenLake-v0", max_turns=1), tmp_path)
    await run_sync(env.reset, seed=1)
    await run_sync(env.step, "nothing")
    (episode,) = recorded(tmp_path)
    assert (episode.task.id, episode.reason) == ("gymllm/FrozenLake-v0", "max_turns")
    await run_sync(env.close)


def test_options_that_json_cannot_hold_are_written_in_words(tmp_path: Path) -> None:
    circle: list[Any] = []
    circle.append(circle)
    options = {"a": [1], "b": float("inf"), "c": {(1, 2): 3}, "d": circle, "e": np.arange(2)}
    play(RecordTranscript(Echo(), tmp_path), "end", options=options)
    (episode,) = recorded(tmp_path)
    assert episode.task.options == {
        "a": [1],
        "b": "inf",
        "c": "{(1, 2): 3}",
        "d": "[[...]]",
        "e": "array([0, 1])",
    }


def test_the_env_is_closed_although_nothing_can_be_written(tmp_path: Path) -> None:
    inner = Echo()
    env = RecordTranscript(inner, tmp_path / "folder")
    env.reset()
    (tmp_path / "folder").write_text("in the way")
    with pytest.raises(FileExistsError):
        env.close()
    assert inner.closes == 1


def test_a_folder_or_name_that_cant_be_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is a file"):
        RecordTranscript(Echo(), tmp_path / "file")
    with pytest.raises(ConfigError, match="got 'a/b'; give folders as folder="):
        RecordTranscript(Echo(), tmp_path, name="a/b")
