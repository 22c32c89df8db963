"""Bugs as edits of a source text: everything that isn't the bug stays as it was, to the byte.

`operators.py` says which edits there are; here is what they are made of, and the choice among them.
"""

from __future__ import annotations

import ast
import bisect
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A stretch of a text, and what takes its place."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One bug in one function."""

    operator: str
    function: str
    """Its qualified name in the module."""
    line: int
    """Of the statement that it is in."""
    edits: tuple[Edit, ...]


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function or method that bugs can be put in; inner functions are part of it."""

    name: str
    """Qualified: "Class.method"."""
    node: FunctionNode


class Source:
    """A module's text, and where its nodes are in it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self._starts = [0]
        for line in re.split(r"(?<=\n)", text):
            self._starts.append(self._starts[-1] + len(line))
        self._ascii = text.isascii()

    def offset(self, line: int, column: int) -> int:
        """Of a position as `ast` has it: the line from 1, the column in bytes of UTF-8."""
        start = self._starts[line - 1]
        if self._ascii:
            return start + column
        row = self.text[start : self._starts[line]]
        return start + len(row.encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt | ast.arg | ast.keyword | ast.excepthandler) -> Edit:
        """Where a node is, with its own text."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.offset(node.lineno, node.col_offset)
        end = self.offset(node.end_lineno, node.end_col_offset)
        return Edit(start=start, end=end, text=self.text[start:end])

    def line_of(self, offset: int) -> int:
        """From 1."""
        return bisect.bisect_right(self._starts, offset)

    def whole_lines(self, start: int, end: int) -> Edit | None:
        """The lines of a stretch, to be taken out; None if anything else but a comment is on them."""
        first = self.text.rfind("\n", 0, start) + 1
        last = self.text.find("\n", end)
        last = len(self.text) if last < 0 else last + 1
        after = self.text[end:last].strip()
        if self.text[first:start].strip() or (after and not after.startswith("#")):
            return None
        return Edit(start=first, end=last, text="")

    def edited(self, edits: Sequence[Edit]) -> str:
        """The text with edits made, which must not overlap."""
        text = self.text
        for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
            text = text[: edit.start] + edit.text + text[edit.end :]
        return text


def functions(source: Source) -> Iterator[Function]:
    """All functions and methods of a module that are worth a bug.

    Not those that only describe an object, overloads, and what only type checkers read.
    """
    yield from _functions(source.tree.body, "")


def _functions(body: Sequence[ast.stmt], prefix: str) -> Iterator[Function]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, FunctionNode):
            decorators = {
                ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list
            }
            if node.name != "__repr__" and "overload" not in decorators and not _is_stub(node):
                yield Function(name=prefix + node.name, node=node)
        elif isinstance(node, ast.If | ast.Try):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            yield from _functions([*node.body, *node.orelse], prefix)


def _is_stub(node: FunctionNode) -> bool:
    """Whether a function only has a docstring, `pass`, `...` or raises NotImplementedError."""
    return all(
        isinstance(statement, ast.Pass)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        or (isinstance(statement, ast.Raise) and "NotImplemented" in ast.unparse(statement))
        for statement in node.body
    )


def code_nodes(function: FunctionNode) -> Iterator[ast.AST]:
    """The nodes of a function that run: no docstrings, annotations or decorators; in order of the text."""
    arguments = function.args
    waiting: list[ast.AST] = [
        *arguments.defaults,
        *(default for default in arguments.kw_defaults if default is not None),
        *function.body,
    ]
    waiting.reverse()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        yield node
        if isinstance(node, FunctionNode):
            waiting += [*reversed(node.body), *reversed(node.args.defaults)]
        elif isinstance(node, ast.AnnAssign):
            waiting += [value for value in (node.value, node.target) if value is not None]
        elif not isinstance(
            node, ast.JoinedStr
        ):  # before 3.12 these have no positions of their own
            waiting += reversed(list(ast.iter_child_nodes(node)))


def blocks(function: FunctionNode) -> Iterator[list[ast.stmt]]:
    """The lists of statements of a function."""
    for node in (function, *code_nodes(function)):
        yield from blocks_of(node)


def blocks_of(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """A node's own lists of statements."""
    for field in ("body", "orelse", "finalbody"):
        block: object = getattr(node, field, None)
        if isinstance(block, list) and block:  # of a lambda or a conditional it is an expression
            yield cast("list[ast.stmt]", block)


def mutations(source: Source, function: Function) -> dict[str, list[Mutation]]:
    """All bugs that the operators know for a function, by operator. `mutated` says which are any."""
    from gymllm_envs.swe.making.operators import OPERATORS

    starts = {function.node.lineno: function.node.lineno}
    for node in code_nodes(function.node):
        if isinstance(node, ast.stmt):
            assert node.end_lineno is not None
            # Inner statements come later and take their lines over.
            starts.update(dict.fromkeys(range(node.lineno, node.end_lineno + 1), node.lineno))
    found: dict[str, list[Mutation]] = {}
    for name, operator in OPERATORS.items():
        for edits in operator(source, function.node):
            line = source.line_of(min(edit.start for edit in edits))
            mutation = Mutation(
                operator=name,
                function=function.name,
                line=starts.get(line, function.node.lineno),
                edits=tuple(edits),
            )
            found.setdefault(name, []).append(mutation)
    return found


def mutated(source: Source, mutation: Mutation) -> str | None:
    """The module's text with a bug; None if it doesn't parse, or means what it meant."""
    text = source.edited(mutation.edits)
    try:
        differs = ast.dump(ast.parse(text)) != ast.dump(source.tree)
    except SyntaxError:
        return None
    return text if differs else None


def choose(
    found: Mapping[str, list[Mutation]], chance: random.Random, used: dict[str, int]
) -> Mutation | None:
    """Picks one, of an operator that was used less than others if it can.

    Args:
        found: By operator.
        chance: Decides among equals.
        used: How often each operator was picked; counted up.
    """
    names = sorted(name for name in found if found[name])
    if not names:
        return None
    # The least used of three: always the least used would make every package's first bugs alike.
    name = min(chance.sample(names, min(3, len(names))), key=lambda name: used.get(name, 0))
    used[name] = used.get(name, 0) + 1
    return chance.choice(found[name])
