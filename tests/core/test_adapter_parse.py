"""A text as an action: what is marked, else one name, else JSON; and nothing that breaks it."""

import re
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import gymllm
from gymllm.adapters import how_to_answer, parser_for
from gymllm.adapters.parse import marked_action
from gymllm.errors import ConfigError, ConfigTypeError, UnknownNameError

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
        ("<action>up  left</action>", r"several actions \(up, left\)"),
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
    ("text", "action"),
    [
        ("up left", 1),
        ("<action>up  left</action>", 1),
        ("Up\t LEFT", 1),
        ("go down  by one!", 2),
        ("up\nand on", 0),
        ("up, left", 0),
    ],
)
def test_a_blank_of_a_name_may_be_several_on_a_line(text: str, action: int) -> None:
    assert parser_for(spaces.Discrete(3), names=("up", "up left", " down  by one"))(text) == action


@pytest.mark.parametrize(
    "names",
    [
        ("a",),
        ("a", "b", "c", "d", "e"),
        ("a", "A", "b", "c"),
        ("a", " ", "b", "c"),
        ("a b", "a  b", "b", "c"),
    ],
)
def test_names_that_do_not_fit_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="4 different names"):
        parser_for(spaces.Discrete(4), names=names)
    with pytest.raises(ConfigError, match="Discrete"):
        parser_for(spaces.MultiBinary(4), names=names)


def test_names_that_are_no_texts_are_refused() -> None:
    with pytest.raises(ConfigTypeError, match=r"action_names must be texts, got \[1, 2\]"):
        parser_for(spaces.Discrete(2), names=(1, 2))  # type: ignore[arg-type]  # what is tested


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


ARM = spaces.Dict(
    speed=BOX, arm=spaces.Dict(side=spaces.Discrete(2), at=spaces.Tuple((BOX, spaces.Text(3))))
)
AT = "[a list of numbers of shape [2] from [-1.0, -1.0] to [1.0, 1.0], a text of at most 3 characters]"


@pytest.mark.parametrize(
    ("space", "text", "why"),
    [
        (spaces.MultiDiscrete([3, 2]), "[true, 1]", "got [true, 1]"),
        (spaces.MultiBinary(2), "[1, false]", "of 0 and 1 of shape [2], got [1, false]"),
        (BOX, "[0.5, true]", "got [0.5, true]"),
        (BOX, "[0.5, 2]", "of numbers of shape [2] from [-1.0, -1.0] to [1.0, 1.0], got [0.5, 2]"),
        (BOX, f"[{10**30}, 0]", f"to [1.0, 1.0], got [{10**30}, 0]"),
        (BOX, f"[{10**400}, 0]", f"got [{10**38}..."),
        (spaces.Box(-np.inf, np.inf, (2,)), "[1e39, 0]", "of shape [2], got [1e+39, 0]"),
        (spaces.Box(-np.inf, np.inf, (2,)), "[Infinity, 0]", "of shape [2], got [Infinity, 0]"),
        (spaces.Box(0, 9, (2,), np.int8), "[300, 2]", "from [0, 0] to [9, 9], got [300, 2]"),
        (spaces.Box(0, 9, (2,), np.int8), "[0.5, 2]", "a list of whole numbers of shape [2]"),
        (spaces.Box(0, 9, (2,), np.uint64), f"[{2**64}, 2]", f"got [{2**64}, 2]"),
        (BOX, "[" * 500 + "]" * 500, f"got {'[' * 40}..."),
        (spaces.Tuple((spaces.Discrete(2), BOX)), "[2, [0, 0]]", "The action[0] must be a whole"),
        (gymllm.Unicode(3), "much", 'a text of at most 3 characters, got "much"'),
    ],
)
def test_a_wrong_value_is_shown_with_what_is_expected(
    space: spaces.Space[Any], text: str, why: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        parser_for(space)(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            '{"speed": [0, 7], "arm": {}}',
            '"speed" must be a list of numbers of shape [2] from [-1.0, -1.0] to [1.0, 1.0], got [0, 7].',
        ),
        ('{"speed": [0, 0], "arm": []}', '"arm" must be {"side": '),
        ('{"speed": [0, 0], "arm": {"side": 0}}', f'"arm"."at" is missing; it must be {AT}.'),
        (
            '{"speed": [0, 0], "arm": {"side": 0, "at": 0, "x": 1}}',
            'There is no "arm"."x"; keys: side, at.',
        ),
        (
            f'{{"speed": [0, 0], "arm": {{"at": [[0, 0], "a"], "side": {10**30}}}}}',
            f'"arm"."side" must be a whole number from 0 to 1, got {10**30}.',
        ),
        (
            '{"speed": [0, 0], "arm": {"side": 0, "at": [[0, 0], "much"]}}',
            '"arm"."at"[1] must be a text of at most 3 characters, got "much".',
        ),
    ],
)
def test_only_the_wrong_part_of_a_dict_is_shown(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(why)}"):
        parser_for(ARM)(text)


def test_the_bounds_that_are_told_lie_in_the_space() -> None:
    space = spaces.Box(-0.41887903, 0.41887903, (1,), np.float32)
    assert "from -0.41887903 to 0.41887903]" in how_to_answer(space)
    assert parser_for(space)("[0.41887903]") == space.high


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
