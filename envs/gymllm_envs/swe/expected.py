"""What a test expects, and other things that it might have expected: for tests that must fail."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

_MOST_PLACES = 3
"""In a function: each is tried out when a task is made."""
_ALTERNATIVES = 2
_NOTHING = "object()"
"""Equal to nothing but itself."""
_OTHER_ERRORS = ("ZeroDivisionError", "BufferError")
"""That tests seldom wait for, and that are the base of no other."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A piece of a test, and texts that could stand there as well."""

    node: ast.expr | ast.stmt
    values: tuple[str, ...]


def changed_values(function: ast.FunctionDef, source: str) -> list[Place]:
    """Where the function says what it expects, each with other values.

    Literals where there are any: which is right can't be seen then. Else another value for the parameter
    that holds it, an object that equals nothing, an error that isn't raised, or the opposite of what is
    asserted. The same each time for the same function.
    """
    literals: list[Place] = []
    others: list[Place] = []
    truths: list[Place] = []
    for node in ast.walk(function):
        for expected, is_literal in _compared(node):
            if is_literal:
                atoms = [place for atom in _atoms(expected) if (place := _changed(atom, source))]
                literals += atoms
            elif place := _rebound(function, expected, source):
                others.append(place)
            else:
                others.append(Place(node=expected, values=(_NOTHING,)))
        if error := _expected_error(node):
            values = tuple(name for name in _OTHER_ERRORS if name != ast.unparse(error))
            others.append(Place(node=error, values=values))
        elif isinstance(node, ast.Assert) and not list(_compared(node)):
            text = ast.get_source_segment(source, node.test)
            if text and "\n" not in text:
                truths.append(Place(node=node.test, values=(f"not ({text})",)))
    found = literals or others or truths
    rng = random.Random(f"{function.name} {len(found)}")
    return rng.sample(found, min(_MOST_PLACES, len(found)))


def _rebound(function: ast.FunctionDef, expected: ast.expr, source: str) -> Place | None:
    """Gives another value to the parameter that a result is compared with, before all else."""
    arguments = {argument.arg for argument in function.args.args}
    first = function.body[0]
    text = ast.get_source_segment(source, first)
    if not isinstance(expected, ast.Name) or expected.id not in arguments or text is None:
        return None
    if first.lineno == function.lineno or isinstance(first, ast.FunctionDef | ast.ClassDef):
        return None
    gap = "\n" + " " * first.col_offset
    name = expected.id
    return Place(
        node=first, values=(f"{name} = [{name}]{gap}{text}", f"{name} = ({name}, 0){gap}{text}")
    )


def _compared(node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """The sides that results are compared with, and whether they are literals."""
    for left, right in _equalities(node):
        if _literal(right):
            yield right, True
        elif _literal(left):
            yield left, True
        else:
            yield right, False


def _equalities(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Assert):
        tests = [node.test]
        while tests:
            test = tests.pop()
            if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
                tests += test.values
            elif (
                isinstance(test, ast.Compare)
                and len(test.ops) == 1
                and isinstance(test.ops[0], ast.Eq)
            ):
                yield test.left, test.comparators[0]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        equal = name.endswith(("Equal", "Equals")) and "Not" not in name and "Almost" not in name
        if name.startswith("assert") and equal and len(node.args) >= 2:
            yield node.args[0], node.args[1]


def _expected_error(node: ast.AST) -> ast.expr | None:
    """The type in `pytest.raises(...)` and `self.assertRaises(...)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    waits = node.func.attr in {"raises", "assertRaises", "assertRaisesRegex"}
    return node.args[0] if waits and node.args else None


def _literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _atoms(node: ast.expr) -> Iterator[ast.expr]:
    """The constants in a literal, and containers that have nothing in them."""
    inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    if isinstance(node, ast.Constant) or not inner:
        yield node
    for child in inner:
        yield from _atoms(child)


def _changed(node: ast.expr, source: str) -> Place | None:
    text = ast.get_source_segment(source, node)
    if text is None:
        return None
    values = _others(node, text)
    return Place(node=node, values=values) if values else None


def _others(node: ast.expr, text: str) -> tuple[str, ...]:
    if isinstance(node, ast.List):
        return ("[0]", "[None]")
    if isinstance(node, ast.Dict):
        return ("{0: 0}", "{None: 1}")
    if isinstance(node, ast.Tuple):
        return ("(0,)", "(None,)")
    if not isinstance(node, ast.Constant):
        return ()
    value = node.value
    rng = random.Random(text)
    if isinstance(value, bool):
        return (repr(not value),)
    if isinstance(value, int):
        steps = rng.sample([-3, -2, -1, 1, 2, 3, 4], _ALTERNATIVES + 2)
        # None of another sign: -x is written as an operator and a constant.
        return tuple(str(value + n) for n in steps if value + n >= 0 or value < 0)[:_ALTERNATIVES]
    if isinstance(value, float):
        return tuple(repr(value + step) for step in rng.sample([0.5, 1.0, 1.5, 2.0], _ALTERNATIVES))
    if value is None:
        return ("False", "0")
    if isinstance(value, str | bytes):
        return _other_texts(text, rng)
    return ()


def _other_texts(text: str, rng: random.Random) -> tuple[str, ...]:
    """The same literal with one letter or digit another; with one more where there is none."""
    start = re.match(r"[a-zA-Z]*", text)
    assert start is not None
    at = start.end()
    if text.count(text[at]) != 2:  # several literals in a row, or three quotes
        return ()
    plain = [i for i in range(at + 1, len(text) - 1) if text[i].isascii() and text[i].isalnum()]
    if "\\" in text or not plain:
        return tuple(f"{text[: at + 1]}{extra}{text[at + 1 :]}" for extra in ("k", "q"))
    at = rng.choice(plain)
    letters = "0123456789" if text[at].isdigit() else "bdfghjkmnpqrstvwz"
    if text[at].isupper():
        letters = letters.upper()
    others = rng.sample([c for c in letters if c != text[at]], _ALTERNATIVES)
    return tuple(f"{text[:at]}{other}{text[at + 1 :]}" for other in others)
