"""Test functions are taken out whole; what is left stays as it was."""

import ast

import pytest

from gymllm_envs.swe.making.hiding import hide

TEXT = '''"""Tests."""
import pytest

CASES = [1, 2]


def test_first():
    assert 1


@pytest.mark.parametrize(
    "x", CASES
)
def test_second(x):
    assert x  # last


class TestClass:
    """Has one test."""

    def test_only(self):
        assert 1


class TestBare:
    @staticmethod
    def test_a(): assert 1

    def test_b(self): assert 2


if CASES:
    def test_inner(): assert 1
'''


def line(start: str) -> int:
    return next(n for n, text in enumerate(TEXT.split("\n"), 1) if text.strip().startswith(start))


@pytest.mark.parametrize(
    ("start", "name"),
    [
        ("def test_first", "test_first"),
        ("@pytest.mark", "test_second"),
        ("def test_only", "test_only"),
        ("@staticmethod", "test_a"),
        ("def test_b", "test_b"),
        ("def test_inner", "test_inner"),
    ],
)
def test_one_function_is_gone_and_the_rest_is_kept(start: str, name: str) -> None:
    left = hide(TEXT, {line(start)})
    assert left is not None
    before = [n.name for n in ast.walk(ast.parse(TEXT)) if isinstance(n, ast.FunctionDef)]
    after = [n.name for n in ast.walk(ast.parse(left)) if isinstance(n, ast.FunctionDef)]
    assert sorted(after) == sorted(set(before) - {name})
    kept = [text for text in left.split("\n") if text.strip() and text.strip() != "pass"]
    lines = iter(TEXT.split("\n"))
    assert all(text in lines for text in kept)  # in their order, unchanged


def test_an_emptied_class_keeps_a_pass() -> None:
    left = hide(TEXT, {line("@staticmethod"), line("def test_b")})
    assert left is not None
    assert "class TestBare:\n    pass\n" in left


def test_all_at_once_still_parses() -> None:
    starts = (
        "def test_first",
        "@pytest",
        "def test_only",
        "@static",
        "def test_b",
        "def test_inner",
    )
    left = hide(TEXT, {line(start) for start in starts})
    assert left is not None
    assert "test_" not in left
    ast.parse(left)


def test_a_function_that_is_not_there_hides_nothing() -> None:
    assert hide(TEXT, {1}) is None


def test_a_function_that_shares_its_line_is_not_hidden() -> None:
    assert hide("x = 1; y = 2\ndef test_a(): pass\n", {2}) == "x = 1; y = 2\n"
    assert hide("def test_a(): pass ; x = 1\n", {1}) == ""
