"""Trajectories on disk: exact to the token as JSON, harmless and self-contained as a page."""

from __future__ import annotations

import html.parser
import json
import math
import re

import numpy as np
import pytest

from gymllm.errors import ConfigError
from gymllm.ledger import Segment
from gymllm.message import Message
from gymllm.task import Task
from gymllm.trajectory import Ending, Trajectory, Turn
from gymllm.transcripts import append_jsonl, from_json, read_jsonl, to_json, write_html, write_jsonl

NASTY = '</pre><script>alert("1")</script>&amp; \u2028 <|im_end|> é\x00 {title} \'"'


def make_trajectory(**changes: object) -> Trajectory:
    rng = np.random.default_rng(0)
    fields: dict[str, object] = {
        "task": Task(index=3, id="train-3", seed=11, options={"level": 2}),
        "member": 1,
        "attempt": 2,
        "segments": tuple(
            Segment(
                ids=rng.integers(0, 50_000, n).astype(np.int32),
                mask=rng.integers(0, 2, n).astype(np.int32),
                logprobs=(-rng.random(n)).astype(np.float32),
                versions=rng.integers(-1, 5, n).astype(np.int32),
            )
            for n in (3, 5)
        ),
        "turns": (
            Turn(
                observation=NASTY,
                action="left",
                reward=0.5,
                prompt_tokens=7,
                generated_tokens=2,
                invalid_action=True,
                tool_calls=2,
                tool_errors=1,
                engine_s=0.25,
            ),
        ),
        "messages": (
            Message(role="user", content=NASTY),
            Message(role="assistant", content="left"),
        ),
        "ending": Ending.TRUNCATED,
        "reason": "max_turns",
        "reward": 0.5,
        "started_ns": 5,
        "ended_ns": 9,
        "metrics": {"distance": 2.0},
    }
    return Trajectory(**{**fields, **changes})  # type: ignore[arg-type] # built for tests


def assert_same(left: Trajectory, right: Trajectory) -> None:
    for a, b in zip(left.segments, right.segments, strict=True):
        for name in ("ids", "mask", "logprobs", "versions"):
            x, y = getattr(a, name), getattr(b, name)
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)
    for name in Trajectory.__dataclass_fields__:
        if name != "segments":
            assert getattr(left, name) == getattr(right, name), name


def test_json_gives_back_the_same_trajectory():
    trajectory = make_trajectory()
    line = to_json(trajectory)
    assert "\n" not in line
    assert_same(from_json(line), trajectory)


def test_extra_keys_are_kept_in_the_file_and_left_out_when_read():
    line = to_json(make_trajectory(), step=12)
    assert json.loads(line)["step"] == 12
    assert_same(from_json(line), make_trajectory())


def test_numbers_that_are_not_finite_stay_valid_json():
    line = to_json(make_trajectory(reward=math.nan, metrics={"a": math.inf}))
    assert json.loads(line, parse_constant=lambda text: pytest.fail(text))["reward"] is None
    assert math.isnan(from_json(line).reward)


def test_options_that_are_no_json_are_written_as_people_read_them():
    task = Task(index=0, id="a", seed=1, options={"map": {1, 2}})
    assert from_json(to_json(make_trajectory(task=task))).task.options == {"map": "{1, 2}"}


def test_file_reads_back_in_order_and_a_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [make_trajectory(member=member) for member in (2, 0, 1)])
    with path.open("a") as file:
        file.write('{"task": {"ind')
    assert [trajectory.member for trajectory in read_jsonl(path)] == [2, 0, 1]


def test_line_that_is_no_trajectory_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(to_json(make_trajectory()) + '\n{"task": 3}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: not a trajectory"):
        list(read_jsonl(path))


class Page(html.parser.HTMLParser):
    """Collects the tags, texts and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.pre: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._open.append(tag)
        if tag == "pre":
            self.pre.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "pre" in self._open:
            self.pre[-1] += data


def test_page_shows_every_message_as_it_was(tmp_path):
    path = tmp_path / "page.html"
    failed = make_trajectory(ending=Ending.FAILED, reason=f"EnvCrashedError: {NASTY}\nmore")
    write_html(path, [make_trajectory(), failed], title=NASTY, facts={"reward": "0.5 <b>"})
    text = path.read_text()
    page = Page(text)
    assert page.tags.count("script") == 1, "nothing from a conversation runs"
    shown = re.sub("[\x00-\x08\x0b-\x1f]", lambda match: chr(0x2400 + ord(match[0])), NASTY)
    assert page.pre == [shown, "left"] * 2
    assert not set(text) & set(map(chr, range(32))) - {"\n", "\t"}, "a text file, for every tool"
    assert ("data-ending", "truncated: max_turns") in page.attributes
    assert ("data-reward", "") in page.attributes, "a failed episode has no reward"


def test_page_needs_nothing_from_elsewhere(tmp_path):
    path = tmp_path / "page.html"
    write_html(path, [make_trajectory()], title="a")
    page = Page(path.read_text())
    assert not {"link", "img", "iframe"} & set(page.tags)
    assert not [value for name, value in page.attributes if name in ("src", "href")]
    assert not re.search(r"@import|url\(|fetch\(|https?://", path.read_text())
    assert "prefers-color-scheme:dark" in path.read_text()


def test_page_of_nothing_is_a_page(tmp_path):
    write_html(tmp_path / "page.html", [], title="none")
    assert "none" in (tmp_path / "page.html").read_text()


def test_text_that_no_encoding_holds_is_written(tmp_path):
    surrogate = make_trajectory(messages=(Message(role="user", content="a\ud800b"),))
    write_html(tmp_path / "page.html", [surrogate], title="a")
    write_jsonl(tmp_path / "a.jsonl", [surrogate])
    (read,) = read_jsonl(tmp_path / "a.jsonl")
    assert read.messages == surrogate.messages


def test_appended_lines_come_after_those_that_are_there(tmp_path):
    path = tmp_path / "a.jsonl"
    append_jsonl(path, make_trajectory(member=2))
    write_jsonl(tmp_path / "b.jsonl", [make_trajectory(member=2)])
    assert path.read_text() == (tmp_path / "b.jsonl").read_text()
    append_jsonl(path, make_trajectory(member=0))
    assert [trajectory.member for trajectory in read_jsonl(path)] == [2, 0]
