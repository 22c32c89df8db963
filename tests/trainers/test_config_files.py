"""YAML to dataclasses and back, and what a mistake in a file is answered with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

import pytest

from gymllm.errors import ConfigError, UnknownNameError
from gymllm_trainers.config_files import flatten, merge, read_yaml, to_mapping, to_yaml, walk_fields


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Example:
    role: str
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Rollout:
    group_size: int = 8
    rate: float = 0.1
    limit: int | None = None
    mode: Literal["auto", "off"] = "auto"
    examples: tuple[Example, ...] = ()
    chunks: tuple[int, ...] = (1, 2)

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ConfigError(f"rollout.group_size must be >= 2, got {self.group_size}.")


@dataclass(frozen=True, kw_only=True)
class Config:
    name: str = "run"
    folder: Path = Path("runs")
    colour: Colour = Colour.RED
    verbose: bool = False
    kwargs: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    rollout: Rollout = field(default_factory=Rollout)


def merge_text(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return merge(Config(), read_yaml(file))


def test_what_the_file_leaves_out_keeps_its_value(tmp_path):
    config = merge_text(tmp_path, "rollout:\n  rate: 0.5\n")
    assert config == Config(rollout=Rollout(rate=0.5))


def test_empty_file_changes_nothing(tmp_path):
    assert merge_text(tmp_path, "# nothing\n") == Config()


def test_every_kind_of_value_is_read(tmp_path):
    config = merge_text(
        tmp_path,
        """
        name: other
        folder: /data/runs
        colour: blue
        verbose: true
        kwargs: {size: 5, slippery: false, skill: 0.5, kind: off}
        rollout:
          group_size: 4
          rate: 1
          limit: 3
          mode: off
          examples: [{role: user}, {role: assistant, weight: 2}]
          chunks: [8]
        """,
    )
    assert config == Config(
        name="other",
        folder=Path("/data/runs"),
        colour=Colour.BLUE,
        verbose=True,
        kwargs={"size": 5, "slippery": False, "skill": 0.5, "kind": "off"},
        rollout=Rollout(
            group_size=4,
            rate=1.0,
            limit=3,
            mode="off",
            examples=(Example(role="user"), Example(role="assistant", weight=2.0)),
            chunks=(8,),
        ),
    )
    assert isinstance(config.rollout.rate, float)
    assert config.kwargs["slippery"] is False


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("3E+2", 300.0), (".5", 0.5), ("2.", 2.0), ("1", 1.0), (".inf", math.inf)],
)
def test_numbers_are_read_as_people_write_them(tmp_path, text, value):
    assert merge_text(tmp_path, f"rollout: {{rate: {text}}}").rollout.rate == value


def test_unknown_key_is_answered_with_its_full_path(tmp_path):
    with pytest.raises(UnknownNameError) as raised:
        merge_text(tmp_path, "rollout:\n  group_sise: 4\n")
    expected = "Unknown config key 'rollout.group_sise'. Did you mean rollout.group_size?"
    assert str(raised.value) == expected


def test_key_on_the_wrong_level_is_found_by_its_full_path(tmp_path):
    with pytest.raises(UnknownNameError, match=r"'group_size'.*rollout\.group_size"):
        merge_text(tmp_path, "group_size: 4\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "rollout: {group_size: four}",
            "rollout.group_size must be a whole number, got 'four' (text",
        ),
        ("rollout: {group_size: 4.0}", "must be a whole number, got 4.0 (a number)"),
        ("rollout: {group_size: true}", "must be a whole number, got True (true or false)"),
        ("rollout: {group_size: null}", "must be a whole number, got nothing"),
        ("rollout: {limit: x}", "rollout.limit must be a whole number or null, got 'x' (text)"),
        ("rollout: {mode: on}", "rollout.mode must be one of auto, off, got 'on' (text)"),
        ("rollout: {mode: autto}", "got 'autto' (text). Did you mean auto?"),
        ("zzz: 1", "Unknown config key 'zzz'. Known: colour, folder"),
        ("rollout: {chunks: 3}", "rollout.chunks must be a list, each item a whole number, got 3"),
        ("rollout: {chunks: [a]}", "rollout.chunks must be a list, each item a whole number"),
        ("rollout: {examples: [hi]}", "each item a mapping with role, weight"),
        ("rollout: {examples: [{weight: 1}]}", "an item of rollout.examples lacks 'role'"),
        (
            "rollout: {examples: [{rol: a}]}",
            "Unknown key of rollout.examples 'rol'. Did you mean ro",
        ),
        ("rollout: 3", "rollout must hold the keys group_size, rate"),
        ("verbose: off", "verbose must be true or false, got 'off' (text)"),
        ("colour: green", "colour must be one of red, blue, got 'green'"),
        ("kwargs: [1]", "kwargs must be a mapping"),
        (
            "kwargs: {a: [1]}",
            "kwargs must be a mapping, each value true or false or a whole number",
        ),
        ("name: 3", "name must be text, got 3 (a whole number)"),
        ("name: a\nname: b", "'name' is written twice"),
        ("[1, 2]", "must hold `key: value` lines, got [1, 2] (a list)"),
        ("a: [", "is not YAML"),
        ("rollout: {group_size: 1}", "rollout.group_size must be >= 2, got 1."),
    ],
)
def test_mistake_is_named_with_what_was_expected(tmp_path, text, message):
    with pytest.raises(ConfigError) as raised:
        merge_text(tmp_path, text)
    assert message in str(raised.value)


def test_missing_and_unreadable_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="can't be read"):
        read_yaml(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="can't be read"):
        read_yaml(tmp_path / "binary")


def test_yaml_reads_back_to_an_equal_config(tmp_path):
    config = Config(
        name="off",
        folder=Path("a b"),
        colour=Colour.BLUE,
        kwargs={"a": "1e-4", "b": "true", "c": 1e-7, "d": "0x10", "e": "null", "f": "ä\n- x"},
        rollout=Rollout(rate=1e20, mode="off", examples=(Example(role="no", weight=math.inf),)),
    )
    assert merge_text(tmp_path, to_yaml(config)) == config


def test_mapping_keeps_field_order_and_plain_values():
    mapping = to_mapping(Config())
    assert list(mapping) == ["name", "folder", "colour", "verbose", "kwargs", "rollout"]
    assert mapping["folder"] == "runs"
    assert type(mapping["colour"]) is str


def test_flatten_and_walk_give_dotted_paths():
    assert flatten(Config(kwargs={"a": 1}))["kwargs.a"] == 1
    assert flatten(Config())["rollout.group_size"] == 8
    paths = [path for path, _ in walk_fields(Config)]
    assert "rollout" in paths
    assert "rollout.group_size" in paths
    assert "rollout.examples.role" not in paths
