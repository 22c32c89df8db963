"""Each operator on a small source: the bug it makes, and that nothing else changes."""

import ast
import difflib
import random

import pytest

from gymllm_envs.swe.making.mutation import Source, choose, functions, mutated, mutations
from gymllm_envs.swe.making.operators import OPERATORS

CASES = {
    "comparison": ("if a < b:  # c\n    return 1", "if a <= b:  # c\n    return 1"),
    "boundary": ("return a[3]", "return a[4]"),
    "boolean": ("return a and b and c", "return a or b or c"),
    "negation": ("if a:\n    return 1", "if not a:\n    return 1"),
    "drop_not": ("return not  a", "return a"),
    "arithmetic": ("a += b", "a -= b"),
    "swap_arguments": ("return f(a,  b)", "return f(b,  a)"),
    "drop_statement": ("a.sort()  # in place\nreturn a", "return a"),
    "drop_guard": ("if a:\n    return 1\nreturn 2", "return 2"),
    "drop_branch": (
        "if a:\n    b = 1\nelif b:\n    b = 2\nelse:\n    b = 3",
        "if a:\n    b = 1\nelse:\n    b = 3",
    ),
    "slice_bound": ("return a[1:b]", "return a[:b]"),
    "loop_exit": ("for a in b:\n    break", "for a in b:\n    continue"),
    "wrong_variable": ("return a", "return b"),
    "exception_type": ("raise ValueError(a)", "raise TypeError(a)"),
    "wrong_element": ("return a[0]", "return a[-1]"),
    "drop_call": ("return a.strip() + b", "return a + b"),
    "flag": ("return True", "return False"),
    "twin": ("return min(a, b)", "return max(a, b)"),
    "swap_branches": ("return a if c else b", "return b if c else a"),
    "drop_keyword": ("return f(a, key=b)", "return f(a)"),
}


def module(body: str, header: str = "def function(a, b, c):") -> str:
    indented = "".join(f"    {line}\n" for line in body.split("\n"))
    top = '"""Module: größer, 日本."""\n\nx = 1  # kept\n\n'
    return f'{top}{header}\n    "a < b, in a docstring"\n{indented}\ny = 2\n'


def bugs(text: str, operator: str) -> list[str]:
    source = Source(text)
    (function,) = functions(source)
    made = [mutated(source, bug) for bug in mutations(source, function).get(operator, [])]
    return [text for text in made if text is not None]


def test_every_operator_has_a_case() -> None:
    assert set(CASES) | {"default_value"} == set(OPERATORS)
    assert len(OPERATORS) >= 12


@pytest.mark.parametrize("operator", CASES)
def test_operator_makes_its_bug_and_keeps_the_rest(operator: str) -> None:
    before, after = CASES[operator]
    assert module(after) in bugs(module(before), operator)


@pytest.mark.parametrize(
    ("default", "other"), [("True", "False"), ("7", "8"), ("'x'", "''"), ("None", "False")]
)
def test_default_value(default: str, other: str) -> None:
    text = module("return a", f"def function(a, *, b={default}):")
    assert text.replace(f"b={default}", f"b={other}") in bugs(text, "default_value")


LARGE = '''
class Größe:
    """Text with `if a < b` in it."""

    @property
    def area(self) -> "int":
        é = "日本"; w = self.w * 2  # ü
        return w * (self.h - 1)

    def scan(
        self, items, limit=10, *, strict=True
    ):
        found = []
        for i, item in enumerate(items):
            if not item or item in found:
                continue
            elif len(found) >= limit and (
                strict
            ):
                break
            else:
                found.append(item.strip().lower())
        try:
            return sorted(found, key=len)[1:], max(found, default=None)
        except (TypeError, ValueError) as error:
            raise KeyError(f"{error!r} < {limit + 1}") from error
'''


def test_every_bug_of_a_larger_module_is_one_change_that_parses() -> None:
    source = Source(LARGE)
    seen = set()
    for function in functions(source):
        for operator, found in mutations(source, function).items():
            for bug in found:
                text = mutated(source, bug)
                if text is None:
                    continue
                seen.add(operator)
                assert ast.dump(ast.parse(text)) != ast.dump(source.tree)
                blocks = difflib.SequenceMatcher(None, LARGE.split("\n"), text.split("\n"))
                changed = [op for op in blocks.get_opcodes() if op[0] != "equal"]
                assert 1 <= len(changed) <= 2, (operator, text)
                assert bug.function in ("Größe.area", "Größe.scan")
    assert len(seen) >= 14, seen


def test_functions_that_are_no_use_are_left_out() -> None:
    text = """
from typing import TYPE_CHECKING, overload
if TYPE_CHECKING:
    def typed(a): return a + 1
class A:
    def __repr__(self): return "A" + str(1)
    def todo(self): raise NotImplementedError
    @overload
    def kept(self, a: int) -> int: ...
    def kept(self, a): return a + 1
try:
    import fast
except ImportError:
    fast = None
else:
    def quick(a): return a - 1
"""
    assert [f.name for f in functions(Source(text))] == ["A.kept", "quick"]


def test_line_is_that_of_the_statement() -> None:
    source = Source("def f(a):\n    b = g(\n        a,\n        1,\n    )\n    return b\n")
    (function,) = functions(source)
    (bug, _) = mutations(source, function)["boundary"]
    assert bug.line == 2


def test_choice_is_seeded_and_spread() -> None:
    source = Source(LARGE)
    _, scan = functions(source)

    def chosen(seed: int) -> list[str]:
        chance, used = random.Random(seed), dict[str, int]()
        picked = [choose(mutations(source, scan), chance, used) for _ in range(12)]
        return [bug.operator for bug in picked if bug]

    assert chosen(1) == chosen(1) != chosen(2)
    assert len(set(chosen(1))) > 8
    assert choose({}, random.Random(0), {}) is None
