"""Canaries: hidden tests under other names, and copies with other expected values."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Sequence

import pytest

from gymllm_envs.swe.canaries import add_canaries, all_copies, inherited
from gymllm_envs.swe.expected import changed_values

SOURCE = '''import pytest


def test_list():
    """Doc."""
    assert make(2) == [1, "é", {"a": None}]


class TestIt:
    @pytest.mark.slow
    def test_method(self):
        self.assertEqual(make(1), -7)


@pytest.mark.parametrize("given, expected", [(1, 2), (2, 3)])
def test_parameters(given, expected):
    assert make(given) == expected


def test_helper():
    check(1)
'''
TESTS = (
    "t.py::test_list",
    "t.py::TestIt::test_method",
    "t.py::test_parameters[1-2]",
    "t.py::test_parameters[2-3]",
)


def functions(source: str) -> dict[str, str]:
    """Every function's text, by classes and name."""
    found: dict[str, str] = {}

    def visit(body: Sequence[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                assert prefix + node.name not in found
                found[prefix + node.name] = ast.unparse(node)
            elif isinstance(node, ast.ClassDef):
                visit(node.body, f"{node.name}::")

    visit(ast.parse(source).body, "")
    return found


def bodies(source: str, stem: str = "") -> list[str]:
    """Texts of the tests that call make, without their names."""
    found = functions(source)
    texts = [text for name, text in found.items() if name.startswith(stem) and "make(" in text]
    return [re.sub(r"def \w+", "def", text) for text in texts]


@pytest.mark.parametrize("seed", range(5))
def test_real_tests_are_renamed_and_nothing_else(seed: int) -> None:
    made = add_canaries("t.py", SOURCE, TESTS, random.Random(seed))
    assert set(made.renamed) == set(TESTS)
    before, after = functions(SOURCE), functions(made.source)
    assert "test_helper" in after
    for test, new in made.renamed.items():
        assert new != test
        old, name = (text.partition("[")[0].partition("::")[2] for text in (test, new))
        assert after[name].replace(name.split("::")[-1], old.split("::")[-1]) == before[old]
        assert old not in after
        assert test.partition("[")[2] == new.partition("[")[2]


@pytest.mark.parametrize("seed", range(5))
def test_canaries_differ_from_their_tests_in_what_they_expect(seed: int) -> None:
    made = add_canaries("t.py", SOURCE, TESTS, random.Random(seed))
    after = functions(made.source)
    names = {name.partition("[")[0].partition("::")[2] for name in made.names}
    assert names < set(after)
    assert not names & {name.partition("[")[0].partition("::")[2] for name in made.renamed.values()}
    assert set(made.names.values()) == {*TESTS, ""}
    assert 8 <= made.guesses <= 27
    for stem in ("test_list_", "TestIt::test_method_"):
        like = bodies(made.source, stem)
        assert len(like) == len(set(like)) >= 2
        shapes = {"".join(c for c in text if not c.isalnum() and c != "-") for text in like}
        assert len(shapes) == 1, like


def test_each_grading_draws_other_names_and_orders() -> None:
    made = [add_canaries("t.py", SOURCE, TESTS, random.Random(seed)) for seed in range(20)]
    assert len({canaries.source for canaries in made}) == 20
    first = {
        next(name for name in functions(canaries.source) if name.startswith("test_list_"))
        in {name.partition("::")[2] for name in canaries.renamed.values()}
        for canaries in made
    }
    assert first == {True, False}


def test_without_tests_there_are_plain_canaries() -> None:
    made = add_canaries("t.py", "x = 1", (), random.Random(0))
    assert list(made.names.values()) == [""] * 4
    assert made.renamed == {}
    assert made.source.startswith("x = 1\n")


def test_all_copies_has_whatever_may_be_drawn() -> None:
    trial = all_copies(SOURCE, TESTS)
    tried = set(bodies(trial.source))
    for seed in range(20):
        made = add_canaries("t.py", SOURCE, TESTS, random.Random(seed))
        assert set(bodies(made.source)) <= tried


def test_tests_that_are_not_in_the_file_are_left() -> None:
    gone = ("t.py::test_gone", "t.py::TestIt::test_inherited", "t.py::Base::test_list")
    made = add_canaries("t.py", SOURCE, gone, random.Random(0))
    assert set(made.renamed) <= set(gone)
    assert all(test == new for test, new in made.renamed.items())
    assert all_copies(SOURCE, gone).renamed == {}
    assert add_canaries("t.py", "def test_x(:", ("t.py::test_x",), random.Random(0)).names


@pytest.mark.parametrize(
    ("line", "others"),
    [
        ("assert f() == 3", True),
        ("assert f() == 0", True),
        ("assert 'ab' == f()", True),
        ("assert f() == ''", True),
        (r"assert f() == '\n'", True),
        ("assert f() == b'a'", True),
        ("assert f() == rb'\\d\"'", True),
        ("assert f() == 1.5", True),
        ("assert f() == True", True),
        ("assert f() == []", True),
        ("assert f() == ()", True),
        ("assert f() == {}", True),
        ("assert f() == -1", True),
        ("assert f() == None and g() == 2", True),
        ("self.assertListEqual(f(), [1, [2]])", True),
        ("assert f() == 'a' 'b'", False),
        ("assert f() == {1, 2}", True),
    ],
)
def test_other_literals(line: str, others: bool) -> None:
    source = f"def test_x():\n    {line}\n"
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    places = changed_values(function, source)
    assert bool(places) == others
    for place in places:
        own = ast.literal_eval(ast.get_source_segment(source, place.node) or "")
        values = [ast.literal_eval(value) for value in place.values]
        assert values
        assert all(repr(value) != repr(own) for value in values)
        assert len(set(map(repr, values))) == len(values)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("assert f() == g()", "object()"),
        ("with pytest.raises(ValueError): f()", "ZeroDivisionError"),
        ("with self.assertRaises(ZeroDivisionError): f()", "BufferError"),
        ("assert f()", "not (f())"),
        ("assert f(x) == x", "x = [x]\n    assert f(x) == x"),
    ],
)
def test_where_there_is_no_literal(line: str, value: str) -> None:
    source = f"def test_x(x):\n    {line}\n"
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    (place,) = changed_values(function, source)
    assert value in place.values


def test_what_asserts_nothing_has_no_copies() -> None:
    source = "def test_x():\n    f()\n"
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert changed_values(function, source) == []


def test_functions_that_others_inherit_are_found() -> None:
    source = (
        "class TestOne:\n    def test_a(self):\n        assert f() == 1\n\n"
        "class TestTwo(TestOne):\n    def test_b(self):\n        assert f() == 2\n"
    )
    names = ["t.py::TestOne::test_a", "t.py::TestTwo::test_a", "t.py::TestTwo::test_b[x]"]
    assert inherited(source, names) == {"test_a"}
    assert inherited(source, [names[0], names[2]]) == set()
