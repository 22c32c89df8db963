"""A text as an action: what is marked, else one name, else JSON; and nothing that breaks it."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import gymllm
from gymllm.adapters import how_to_answer, parser_for
from gymllm.adapters.parse import marked_action
from gymllm.errors import ConfigError, UnknownNameError

NAMES = ("left", "down", "right", "up")


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ("<action>left</action>", "left"),
        ("<action>left</action> or <ACTION> up\n</Action>!", "up"),
        ("<action>left <action>up</action>", "up"),
        ("<action>left</action> </action>", "left"),
        ("<action>left", None),
        ("</action>left<action>", None),
        ("<action></action>", ""),
        (r"so \boxed{left}", "left"),
        (r"\boxed{left} no: \boxed {up}", "up"),
        (r'\boxed{{"a": {"b": 1}}} }', '{"a": {"b": 1}}'),
        (r"\boxed{\text{left}}", r"\text{left}"),
        (r"\boxed{left", None),
        (r"<action>up</action> \boxed{left}", "up"),  # the tag counts before the box
        ("left", None),
    ],
)
def test_last_marked_action_counts(text: str, marked: str | None) -> None:
    assert marked_action(text) == marked


def test_unclosed_marks_are_none() -> None:
    assert marked_action("<action>" * 100_000) is None
    assert marked_action(r"\boxed{" * 100_000) is None


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("left", 0),
        ("UP", 3),
        ("  Right!\n", 2),
        ("**down**", 1),
        ('{"action": "down"}', 1),
        ("left, yes, left", 0),
        ("left is bad, up too. <action>right</action>", 2),
        ("<action>right</action> is better than left", 2),
        (r"left or up: \boxed{\text{Down}}", 1),
        ("<action>go left</action>", 0),
    ],
)
def test_marked_or_only_name_counts(text: str, action: int) -> None:
    assert parser_for(spaces.Discrete(4), names=NAMES)(text) == action


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("I could go left, but I go right.", r"several actions \(left, right\)"),
        ("<action>left or up</action>", r"several actions \(left, up\)"),
        ("<action>jump</action> left", "'jump' is not one of the actions"),
        (r"left \boxed{jump}", "'jump' is not one of the actions"),
        ("<action></action> left", "No action was found"),
        (f"<action>{'a' * 500}</action>", r"'a{40}\.\.\.' is not"),
    ],
)
def test_ambiguous_and_wrongly_marked_answers_are_unreadable(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parser_for(spaces.Discrete(4), names=NAMES)(text)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("I could go left, but I go right.", 2),
        ("up; no: left", 0),
        ("<action>right</action> is better than left", 0),
    ],
)
def test_by_the_rule_last_the_last_name_counts(text: str, action: int) -> None:
    assert parser_for(spaces.Discrete(4), names=NAMES, rule="last")(text) == action


def test_unknown_rule_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean marked"):
        parser_for(spaces.Discrete(4), rule="maked")  # type: ignore[arg-type]  # what is tested


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
        parser_for(spaces.Discrete(4), names=names)
    with pytest.raises(ConfigError, match="Discrete"):
        parser_for(spaces.MultiBinary(4), names=names)


@pytest.mark.parametrize(
    ("text", "action"),
    [("1", 1), ("2, yes, 2.", 2), ("action: +0", 0), ("0 or 1? <action>2</action>", 2)],
)
def test_marked_or_only_number_counts(text: str, action: int) -> None:
    assert parser_for(spaces.Discrete(3))(text) == action


def test_by_the_rule_last_the_last_number_counts() -> None:
    assert parser_for(spaces.Discrete(3), rule="last")("0 or 2? 2.") == 2
    with pytest.raises(ValueError, match=r"several actions \(0, 2\)"):
        parser_for(spaces.Discrete(3))("0 or 2? 2.")


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
        (BOX, "[9, 9] <action>[1, 0]</action> [0, 0]", np.array([1, 0], np.float32)),
        (BOX, r"\boxed{[1, 0]}", np.array([1, 0], np.float32)),
        (spaces.Box(-1, 1, (1,), np.float32), "[0.5] in step 1", np.array([0.5], np.float32)),
        (spaces.Box(-1, 1, (1,), np.float32), "<action>-1</action>", np.array([-1], np.float32)),
        (spaces.Dict(a=spaces.Discrete(2)), r'\boxed{{"a": 1}}', {"a": 1}),
        (gymllm.Unicode(), " any\ntext ", " any\ntext "),
    ],
)
def test_json_actions(space: spaces.Space[Any], text: str, action: Any) -> None:
    np.testing.assert_equal(parser_for(space)(text), action)


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
        (BOX, "[0, 0] <action>go</action>"),
        (spaces.Box(-1, 1, (1,), np.float32), "<action>2</action>"),
        (
            spaces.Box(-1, 1, (1,), np.float32),
            "0.5",
        ),  # might be any number: a list or a mark is needed
        (spaces.Discrete(2), ""),
    ],
)
def test_unreadable_actions_say_why(space: spaces.Space[Any], text: str) -> None:
    with pytest.raises(ValueError, match=r"\.$"):
        parser_for(space)(text)


def test_spaces_without_a_text_form_need_a_parser() -> None:
    with pytest.raises(ConfigError, match="parse="):
        parser_for(spaces.Graph(BOX, None))


@pytest.mark.parametrize(
    ("space", "names", "how"),
    [
        (spaces.Discrete(2), ("a", "b"), "<action>NAME</action>, where NAME is one of: a, b."),
        (
            spaces.Discrete(3, start=1),
            None,
            "<action>N</action>, where N is a whole number from 1 to 3.",
        ),
        (
            spaces.MultiDiscrete([3, 2]),
            None,
            "<action>JSON</action>, where JSON is [a whole number from 0 to 2, a whole number from 0 to 1].",
        ),
        (
            spaces.Box(-1, 1, (1,)),
            None,
            "<action>JSON</action>, where JSON is [a number from -1.0 to 1.0].",
        ),
        (
            spaces.Dict(a=spaces.Discrete(2), b=gymllm.Unicode()),
            None,
            '<action>JSON</action>, where JSON is {"a": a whole number from 0 to 1, "b": a text}.',
        ),
    ],
)
def test_how_to_answer_says_what_can_be_read(
    space: spaces.Space[Any], names: tuple[str, ...] | None, how: str
) -> None:
    assert how_to_answer(space, names=names) == f"Answer with {how}"
    assert "<action>" not in how_to_answer(space, names=names, rule="last")
