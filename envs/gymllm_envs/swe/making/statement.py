"""Problem statements: an issue as a user would file it, from how a hidden test fails.

What was called, what was expected, what came. The fault itself isn't named, unless the test calls it.
"""

from __future__ import annotations

import ast
import contextlib
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gymllm_envs.swe.making.mutation import FunctionNode, blocks_of
from gymllm_envs.swe.making.running import Failure, Outcome

_MOST_LINES = 30
_MOST_MESSAGE_LINES = 15
_ASSERT_EQUAL = re.compile(r"assert\w*Equals?$")

_CHECKS = {
    "assertTrue": "{}", "assertFalse": "{}", "assertIn": "{} in {}", "assertNotIn": "{} not in {}",
    "assertIs": "{} is {}", "assertIsNot": "{} is not {}", "assertIsNone": "{} is None",
    "assertIsNotNone": "{} is not None", "assertLess": "{} < {}", "assertGreater": "{} > {}",
    "assertIsInstance": "isinstance({}, {})", "assertNotEqual": "{} != {}",
}  # fmt: skip
"""unittest's checks as expressions."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one failing test shows."""

    title: str
    code: str
    expected: str
    actual: str


def problem_statement(
    sdist: str, tests: Sequence[Outcome], texts: Mapping[str, str], secret: str
) -> str:
    """Writes the issue.

    Args:
        sdist: "name==version".
        tests: The failing tests; one of them is told in full, others of other functions in short.
        texts: Their files, by path.
        secret: The name of the function with the fault.
    """
    name, _, version = sdist.partition("==")
    reports = [r for r in (_report(test, texts) for test in _spread(tests)) if r is not None]
    if not reports:
        failing = ", ".join(f"`{test.id.rpartition('::')[2]}`" for test in tests[:3])
        return (
            f"# {name} {version} does something wrong\n\nSeen where it is used as in {failing}.\n"
        )
    first = reports[0]
    parts = [f"# {first.title}", f"I use {name} {version}.", *_sections(first)]
    for report in reports[1:]:
        parts += [f"## Also: {report.title}", *_sections(report)]
    text = "\n\n".join(parts) + "\n"
    known = "\n".join(report.code for report in reports)
    return _without(text, secret, known)


def _spread(tests: Sequence[Outcome]) -> list[Outcome]:
    """Up to three, of functions of their own; first those that fail nearest to the test itself."""
    failed = [test for test in tests if test.failure is not None and test.failure.line]
    failed.sort(key=lambda test: (test.failure.depth if test.failure else 0, test.id))
    by_function = {(test.file, test.line): test for test in reversed(failed)}
    return sorted(by_function.values(), key=failed.index)[:3]


def _sections(report: Report) -> list[str]:
    return [
        f"**What I did**\n\n```python\n{report.code}\n```",
        f"**What I expected**\n\n{report.expected}",
        f"**What happened**\n\n```\n{report.actual}\n```",
    ]


def _without(text: str, secret: str, known: str) -> str:
    """Hides a function's name where only messages have it."""
    if len(secret) < 4 or re.search(rf"\b{re.escape(secret)}\b", known):
        return text
    return re.sub(rf"\b(?:\w+\.)*{re.escape(secret)}\b(?:\(\))?", "a function", text)


def _report(test: Outcome, texts: Mapping[str, str]) -> Report | None:
    failure, text = test.failure, texts.get(test.file)
    if failure is None or text is None:
        return None
    module = ast.parse(text)
    function = _function_at(module, test.line)
    if function is None:
        return None
    found = _Excerpt(text, module, function, failure)
    if not found.statements:
        return None
    outcome = _outcome(found, failure)
    return Report(
        title=outcome.title,
        code="\n".join(_cut(found.code(outcome.code, outcome.wanted).split("\n"), _MOST_LINES)),
        expected=outcome.expected,
        actual=outcome.actual,
    )


def _function_at(module: ast.Module, line: int) -> FunctionNode | None:
    for node in ast.walk(module):
        if isinstance(node, FunctionNode):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == line:
                return node
    return None


class _Excerpt:
    """The failing statement of a test, with what it needs to be understood."""

    def __init__(
        self, text: str, module: ast.Module, function: FunctionNode, failure: Failure
    ) -> None:
        self._text, self._module, self._function = text, module, function
        self.parameters = failure.parameters
        self.statements = list(_path_to(function.body, failure.line))
        """From the test's own block down to the simple statement that failed."""

    def source(self, node: ast.AST) -> str:
        text = ast.get_source_segment(self._text, node) or ast.unparse(node)
        if isinstance(node, FunctionNode | ast.ClassDef):
            above = [f"@{self.source(decorator)}\n" for decorator in node.decorator_list]
            return (" " * node.col_offset).join([*above, text])
        return text

    def code(self, last: str, wanted: str) -> str:
        """What a user would run.

        Args:
            last: The failing statement as it is to be shown; empty: with the block around it.
            wanted: What was expected, whose names are explained, too.
        """
        top = self.statements[0]
        try:
            needed = _names(ast.parse(last) if last else top)
        except SyntaxError:  # of several lines, in the brackets of a check
            last, needed = f"({last})", _names(self.statements[-1])
        if wanted.isidentifier() and wanted not in self.parameters:
            needed.add(wanted)
        lines = [last or self.dedented(top)]
        for statement in reversed(self._function.body[: self._function.body.index(top)]):
            if _bound(statement) & needed and not _is_check(statement):
                lines.insert(0, self.dedented(statement))
                needed |= _names(statement)
        if any("self." in re.sub(r"self\.(assert\w*|fail)", "", line) for line in lines):
            set_up = self._set_up()
            lines[:0] = [self.dedented(statement) for statement in set_up]
            needed |= set[str]().union(*(_names(statement) for statement in set_up))
        given = self.parameters.items()
        lines[:0] = [f"{name} = {value}" for name, value in given if name in needed]
        for name, value in given:
            with contextlib.suppress(SyntaxError):  # not all that Python writes can be read
                needed |= _names(ast.parse(value)) if name in needed else set()
        before = self._module_level(needed)
        return "\n".join([*before, "", *lines] if before else lines)

    def dedented(self, node: ast.stmt) -> str:
        return textwrap.dedent(" " * node.col_offset + self.source(node))

    def _set_up(self) -> list[ast.stmt]:
        for node in ast.walk(self._module):
            if isinstance(node, ast.ClassDef) and self._function in node.body:
                for method in node.body:
                    if isinstance(method, FunctionNode) and method.name in (
                        "setUp",
                        "setup_method",
                    ):
                        return method.body
        return []

    def _module_level(self, needed: set[str]) -> list[str]:
        """Imports and short definitions of the test's module that the excerpt uses, and what these use."""
        kept: list[ast.stmt] = []
        for node in reversed(self._module.body):
            if isinstance(node, ast.Assign | FunctionNode | ast.ClassDef) and _bound(node) & needed:
                short = (node.end_lineno or 0) - node.lineno < 8
                if short and node is not self._function:
                    kept.insert(0, node)
                    needed |= _names(node)
        imports = [self._import(node, needed) for node in self._module.body]
        return [line for line in imports if line] + [self.source(node) for node in kept]

    def _import(self, node: ast.stmt, needed: set[str]) -> str:
        """An import of what is needed, or nothing."""
        if not isinstance(node, ast.Import | ast.ImportFrom):
            return ""
        names = [
            ast.unparse(alias)
            for alias in node.names
            if alias.name == "*" or (alias.asname or alias.name.partition(".")[0]) in needed
        ]
        if not names or (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            return ""
        if isinstance(node, ast.Import):
            return f"import {', '.join(names)}"
        return f"from {'.' * node.level}{node.module or ''} import {', '.join(names)}"


@dataclass(frozen=True, kw_only=True)
class _Told:
    title: str
    code: str
    """The failing statement as a user would write it; empty: the test's block as it is."""
    wanted: str
    """What it should give, as source, if the test says that plainly."""
    expected: str
    actual: str


def _outcome(found: _Excerpt, failure: Failure) -> _Told:
    statement = found.statements[-1]
    check = _checked(found, statement)
    wanted = found.parameters.get(check.wanted, check.wanted)
    code = (check.called or found.dedented(statement)) if len(found.statements) == 1 else ""
    done = getattr(statement, "value", None) or statement
    subject = _subject(check.called or found.source(done), found.parameters)
    message = "\n".join(_cut(_plain(failure.message).split("\n"), _MOST_MESSAGE_LINES))
    expected = "" if "\n" in wanted or "`" in wanted or not wanted else f"`{wanted}`."
    error = _error_wanted(found.statements)
    if "DID NOT RAISE" in failure.message or "not raised" in failure.message:
        return _Told(
            title=f"{subject} doesn't raise {error or 'an error'}",
            code=code,
            wanted=check.wanted,
            expected=f"`{error}`." if error else "An error.",
            actual="No error.",
        )
    if failure.error == "AssertionError":
        return _Told(
            title=f"{subject} gives a wrong result",
            code=code,
            wanted=check.wanted,
            expected=expected or "The check at the end of the code to hold.",
            actual=_got(message, check) or "It doesn't.",
        )
    return _Told(
        title=f"{subject} raises {failure.error}",
        code=code,
        wanted=check.wanted,
        expected=f"`{error}`." if error else expected or "No error.",
        actual=f"{failure.error}: {message}".rstrip(": "),
    )


def _error_wanted(statements: Sequence[ast.stmt]) -> str:
    """The exception that the test waits for; empty if it waits for none."""
    calls: list[ast.expr] = []
    for statement in statements:
        if isinstance(statement, ast.With):
            calls += [item.context_expr for item in statement.items]
        elif isinstance(statement, ast.Expr):
            calls.append(statement.value)
    for call in calls:
        if not isinstance(call, ast.Call) or not call.args:
            continue
        if ast.unparse(call.func).rpartition(".")[2] in ("raises", "assertRaises"):
            return ast.unparse(call.args[0])
    return ""


def _got(message: str, check: _Check) -> str:
    """What came, from an assertion's message: pytest's and unittest's say both sides."""
    text = message.removeprefix("assert ")
    first = text.partition("\n")[0]
    try:
        compared = ast.parse(first, mode="eval").body
    except (SyntaxError, ValueError):
        return text
    if not isinstance(compared, ast.Compare) or len(compared.ops) != 1 or not check.wanted:
        return text
    # pytest shortens long values: then its whole message says more.
    if not isinstance(compared.ops[0], ast.Eq | ast.NotEq) or "..." in first:
        return text
    side = compared.left if check.called_first else compared.comparators[0]
    return ast.get_source_segment(first, side) or text


@dataclass(frozen=True, kw_only=True)
class _Check:
    """What a check calls and what it wants, as source; empty if it isn't that plain."""

    called: str = ""
    wanted: str = ""
    called_first: bool = True


def _checked(found: _Excerpt, statement: ast.stmt) -> _Check:
    if isinstance(statement, ast.Assert):
        test = statement.test
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq | ast.Is):
            return _ordered(found, test.left, test.comparators[0])
        return _Check(called=found.source(test))
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args:
        plain = not any(isinstance(argument, ast.Starred) for argument in call.args)
        if _ASSERT_EQUAL.match(call.func.attr) and len(call.args) >= 2 and plain:
            return _ordered(found, call.args[0], call.args[1])
        form = _CHECKS.get(call.func.attr, "")
        if form and len(call.args) >= form.count("{}"):
            called = form.format(*(found.source(argument) for argument in call.args))
            return _Check(
                called=called, wanted="False" if call.func.attr == "assertFalse" else "True"
            )
    return _Check()


def _ordered(found: _Excerpt, first: ast.expr, second: ast.expr) -> _Check:
    """The side that calls something is what was done, whichever way the test was written."""
    calls = [any(isinstance(n, ast.Call) for n in ast.walk(side)) for side in (first, second)]
    left, right = found.source(first), found.source(second)
    if calls == [False, True]:
        return _Check(called=right, wanted=left, called_first=False)
    return _Check(called=left, wanted=right)


def _subject(code: str, parameters: Mapping[str, str]) -> str:
    """A short name for what was done."""
    line = " ".join(code.split())
    for name, value in parameters.items():
        if len(value) <= 30:
            line = re.sub(
                rf"(?<![\w.\"']){re.escape(name)}(?![\w\"'=])", lambda _, v=value: v, line
            )
    if len(line) <= 70 and "`" not in line and not re.match(r"self\.(assert|fail)|with ", line):
        return f"`{line}`"
    called = re.findall(r"([A-Za-z_][\w.]*)\(", line)
    called = [name for name in called if not re.match(r"self\.|pytest\.|assert|raises", name)]
    return f"`{called[0]}`" if called else "The following"


def _path_to(body: Sequence[ast.stmt], line: int) -> Iterator[ast.stmt]:
    """The statements around a line, from the outermost to the innermost."""
    for statement in body:
        if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            yield statement
            handlers = statement.handlers if isinstance(statement, ast.Try) else []
            for node in (statement, *handlers):
                for block in blocks_of(node):
                    yield from _path_to(block, line)
            return


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _bound(statement: ast.stmt) -> set[str]:
    """The names that a statement gives a value, or whose value it may change."""
    if isinstance(statement, FunctionNode | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    names = {
        n.id
        for n in ast.walk(statement)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.value, ast.Name):
            changes = isinstance(node.ctx, ast.Store | ast.Del) or isinstance(statement, ast.Expr)
            if changes and node.value.id != "self":
                names.add(node.value.id)
    return names


def _is_check(statement: ast.stmt) -> bool:
    """Whether a statement only checks something."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return ast.unparse(statement.value.func).startswith("self.assert")
    return isinstance(statement, ast.Assert)


def _cut(lines: list[str], most: int) -> list[str]:
    if len(lines) <= most:
        return lines
    half = most // 2
    return [*lines[:half], f"... ({len(lines) - most} lines)", *lines[half - most :]]


def _plain(message: str) -> str:
    """Without what differs from run to run."""
    message = re.sub(r"0x[0-9a-f]{6,}", "0x...", message)
    message = re.sub(r"/[^\s\"']*/(?=lib/python3)", "/usr/", message)
    return message.strip().replace("```", "'''")
