"""The kinds of bugs: each looks through a function and yields the edits that make one, as people make them.

An operator gets the module and the function; it yields lists of edits, each a bug. An edit that changes
nothing or doesn't parse is dropped by who asks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping

from gymllm_envs.swe.making.mutation import Edit, FunctionNode, Source, blocks, code_nodes

Operator = Callable[[Source, FunctionNode], Iterator[list[Edit]]]

_COMPARISONS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "is": "is not", "is not": "is", "in": "not in", "not in": "in",
}  # fmt: skip
_SYMBOLS: Mapping[type[ast.AST], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Div: "/", ast.Mod: "%",
    ast.And: "and", ast.Or: "or",
}  # fmt: skip
_ARITHMETIC = {"+": "-", "-": "+", "*": "+", "//": "/", "/": "//", "%": "//"}
_TWINS = {
    "min": "max", "any": "all", "startswith": "endswith", "lstrip": "rstrip", "find": "rfind",
    "split": "rsplit", "keys": "values", "lower": "upper", "partition": "rpartition",
    "append": "extend", "floor": "ceil", "ljust": "rjust", "index": "rindex", "add": "discard",
    "appendleft": "append", "update": "setdefault", "isdigit": "isalpha", "match": "search",
}  # fmt: skip
_TWINS.update({second: first for first, second in list(_TWINS.items()) if second not in _TWINS})
_NEEDLESS = frozenset(
    {"strip", "lstrip", "rstrip", "lower", "upper", "copy", "casefold", "title", "capitalize"}
)
_WRAPPERS = frozenset({"sorted", "reversed", "abs", "list", "tuple", "str", "int", "set", "iter"})
_EXCEPTIONS = {
    "ValueError": "TypeError", "TypeError": "ValueError", "KeyError": "IndexError",
    "IndexError": "KeyError", "AttributeError": "KeyError", "StopIteration": "IndexError",
    "LookupError": "ValueError", "OverflowError": "ValueError", "RuntimeError": "ValueError",
}  # fmt: skip


def _between(source: Source, left: ast.expr, right: ast.expr, symbol: str, new: str) -> Edit | None:
    """Replaces an operator that stands between two nodes."""
    start, end = source.span(left).end, source.span(right).start
    gap = source.text[start:end]
    word = r"\s+".join(re.escape(part) for part in symbol.split())
    edge = r"\b" if symbol[0].isalpha() else ""
    found = re.search(edge + word + edge, re.sub(r"#[^\n]*", lambda m: " " * len(m[0]), gap))
    if found is None:
        return None
    return Edit(start=start + found.start(), end=start + found.end(), text=new)


def comparison(source: Source, function: FunctionNode) -> Iterator[list[Edit]]:
    """`<` for `<=`, `==` for `!=`, `is` for `is not`, `in` for `not in`."""
    for node in code_nodes(function):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for left, kind, right in zip(sides, node.ops, sides[1:], strict=False):
                symbol = _SYMBOLS[type(kind)]
                edit = _between(source, left, right, symbol, _COMPARISONS[symbol])
                if edit:
                    yield [edit]


def boundary(source: Source, function: FunctionNode) -> Iterator[list[Edit]]:
    """A whole number one too large or too small."""
    for node in code_nodes(function):
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 1000:
            span = source.span(node)
            if span.text.isdigit():
                for value in (node.value + 1, node.value - 1):
                    text = str(value) if value >= 0 else f"({value})"
                    yield [Edit(start=span.start, end=span.end, text=text)]


def boolean(source: Source, function: FunctionNode) -> Iterator[list[Edit]]:
    """`and` for `or`."""
    for node in code_nodes(function):
        if isinstance(node, ast.BoolOp):
            symbol = _SYMBOLS[type(node.op)]
            new = "or" if symbol == "and" else "and"
            pairs = zip(node.values, node.values[1:], strict=False)
            edits = [_between(source, left, right, symbol, new) for left, right in pairs]
            found = [edit for edit in edits if edit]
            if len(found) == len(edits):
                yield found


def negation(source: Source, function: FunctionNode) -> Iterator[list[Edit]]:
    """A condition turned around."""
    for node in code_nodes(function):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            test = node.test
            plain = isinstance(test, ast.Name | ast.Call | ast.Attribute | ast.Subscript)
            # `not x` is `drop_not`'s, and a comparison is `comparison`'s.
            if plain:
                span = source.span(test)
                yield [Edit(start=span.start, end=span.start, text="not ")]


def drop_not(source: Source, function: FunctionNode) -> Iterator[list[Edit]]:
    """A `not` forgotten."""
    for node in code_nodes(function):
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            start = source.span(node).start
            blank = re.match(r"not\s*", source.text[start:])
            assert blank is not None
            yield [Edit(start=start, end=start + blank.end(), text="")]


def arithmetic(source: Source, function: FunctionNode) -> Iterator[list[Edit]]:
    """`+` for `-`, `//` for `/`; in `+=` too."""
    for node in code_nodes(function):
        if isinstance(node, ast.BinOp | ast.AugAssign):
            symbol = _SYMBOLS.get(type(node.op))
            if symbol is None:
                continue
            left, right = (
                (node.left, node.right)
                if isinstance(node, ast.BinOp)
                else (node.target, node.value)
            )
            if isinstance(left, ast.Constant) and isinstance(left.value, str):
                continue  # formatting with %, and texts that are put together
            edit = _between(source, left, right, symbol, _ARITHMETIC[symbol])
            if edit:
                yield [edit]


def swap_arguments(source: Source, function: FunctionNode) -> Iterator[list[Edit]]:
    """Two arguments next to each other in the wrong order."""
    for node in code_nodes(function):
        if isinstance(node, ast.Call):
            for left, right in zip(node.args, node.args[1:], strict=False):
                if not isinstance(left, ast.Starred) and not isinstance(right, ast.Starred):
                    first, second = source.span(left), source.span(right)
                    yield [
                        Edit(start=first.start, end=first.end, text=second.text),
                        Edit(start=second.start, end=second.end, text=first.text),
                    ]


def _removed(source: Source, statement: ast.stmt, block: list[ast.stmt]) -> list[Edit]:
    """Takes a statement out; the last one of its block leaves a `pass`."""
    span = source.span(statement)
    lines = source.whole_lines(span.start, span.end)
    if lines is None or len(block) == 1:
        return [Edit(start=span.start, end=span.end, text="pass")]
    return [lines]


def drop_statement(source: Source, function: FunctionNode) -> Iterator[list[Edit]]:
    """A call, an item's or attribute's assignment, or a `+=` that isn't there."""
    for block in blocks(function):
        for statement in block:
            dropped = isinstance(statement, ast.AugAssign | ast.Delete) or (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Call | ast.Await)
            )
            if isinstance(statement, ast.Assign):
                target = statement.targets[0]
                # A name that is assigned for the first time would only be missing.
                dropped = isinstance(target, ast.Subscript | ast.Attribute) or any(
                    isinstance(target, ast.Name)
                    and isinstance(name, ast.Name)
                    and name.id == target.id
                    for name in ast.walk(statement.value)
                )
            if dropped:
                yield _removed(source, statement, block)


def drop_guard(source: Source, function: FunctionNode) -> Iterator[list[Edit]]:
    """An `if` that returns, raises or goes on early, left out."""
    leaving = ast.Return | ast.Raise | ast.Continue | ast.Break
    for block in blocks(function):
        for statement in block:
            if isinstance(statement, ast.If) and not statement.orelse and len(block) > 1:
                is_elif = source.text.startswith("elif", source.span(statement).start)
                if isinstance(statement.body[-1], leaving) and not is_elif:
                    yield _removed(source, statement, block)


def drop_branch(source: Source, function: FunctionNode) -> Iterator[list[Edit]]:
    """An `elif` left out, or an `else` that does nothing."""
    for node in code_nodes(function):
        if not isinstance(node, ast.If) or not node.orelse:
            continue
        first = node.orelse[0]
        start = source.span(first).start
        if isinstance(first, ast.If) and source.text.startswith("elif", start):
            lines = source.whole_lines(start, source.span(first.body[-1]).end)
            if lines:
                yield [lines]
        elif source.line_of(start) > source.line_of(source.span(node.body[-1]).end) + 1:
            column = source.text.rfind("\n", 0, start) + 1
            indent = source.text[column:start]
            lines = source.whole_lines(start, source.span(node.orelse[-1]).end)
            if lines and not indent.strip():
                yield [Edit(start=lines.start, end=lines.end, text=f"{indent}pass\n")]


def default_value(source: Source, function: FunctionNode) -> Iterator[list[Edit]]:
    """A parameter's default that is another."""
    arguments = function.args
    for default in (*arguments.defaults, *arguments.kw_defaults):
        if isinstance(default, ast.Constant):
            span = source.span(default)
            value = default.value
            new = ""
            if isinstance(value, bool):
                new = str(not value)
            elif type(value) is int and span.text.isdigit():
                new = str(value + 1)
            elif isinstance(value, str):
                new = "''" if span.text.startswith("'") else '""'
            elif value is None:
                new = "False"
            if new:
                yield [Edit(start=span.start, end=span.end, text=new)]


def slice_bound(source: Source, function: FunctionNode) -> Iterator[list[Edit]]:
    """A slice without its start or its end."""
    for node in code_nodes(function):
        if isinstance(node, ast.Slice):
            for bound in (node.lower, node.upper, node.step):
                if bound is not None:
                    span = source.span(bound)
                    yield [Edit(start=span.start, end=span.end, text="")]


def loop_exit(source: Source, function: FunctionNode) -> Iterator[list[Edit]]:
    """`break` for `continue`."""
    for node in code_nodes(function):
        if isinstance(node, ast.Break | ast.Continue):
            span = source.span(node)
            new = "continue" if isinstance(node, ast.Break) else "break"
            yield [Edit(start=span.start, end=span.end, text=new)]


def wrong_variable(source: Source, function: FunctionNode) -> Iterator[list[Edit]]:
    """Another variable of the function."""
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    assigned = (node for node in code_nodes(function) if isinstance(node, ast.Name))
    names += [node.id for node in assigned if isinstance(node.ctx, ast.Store)]
    names = [name for name in dict.fromkeys(names) if name not in ("self", "cls", "_")]
    for node in code_nodes(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names:
            # Its neighbours in order of appearance: what people mix up.
            place = names.index(node.id)
            for other in names[max(0, place - 1) : place + 2]:
                if other != node.id:
                    span = source.span(node)
                    yield [Edit(start=span.start, end=span.end, text=other)]


def exception_type(source: Source, function: FunctionNode) -> Iterator[list[Edit]]:
    """An exception of another type, raised or caught."""
    for node in code_nodes(function):
        named: list[ast.expr] = []
        if isinstance(node, ast.Raise) and node.exc is not None:
            named = [node.exc.func if isinstance(node.exc, ast.Call) else node.exc]
        elif isinstance(node, ast.ExceptHandler) and node.type is not None:
            named = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        for name in named:
            if isinstance(name, ast.Name) and name.id in _EXCEPTIONS:
                span = source.span(name)
                yield [Edit(start=span.start, end=span.end, text=_EXCEPTIONS[name.id])]


def wrong_element(source: Source, function: FunctionNode) -> Iterator[list[Edit]]:
    """The last for the first; a pair the wrong way round."""
    for node in code_nodes(function):
        if isinstance(node, ast.Subscript):
            span = source.span(node.slice)
            new = {"0": "-1", "-1": "0"}.get(span.text)
            if new:
                yield [Edit(start=span.start, end=span.end, text=new)]
        elif isinstance(node, ast.Tuple) and len(node.elts) == 2:
            first, second = (source.span(element) for element in node.elts)
            yield [
                Edit(start=first.start, end=first.end, text=second.text),
                Edit(start=second.start, end=second.end, text=first.text),
            ]


def drop_call(source: Source, function: FunctionNode) -> Iterator[list[Edit]]:
    """A `.strip()`, a `sorted(...)` forgotten."""
    for node in code_nodes(function):
        if not isinstance(node, ast.Call) or node.keywords:
            continue
        span = source.span(node)
        called, arguments = node.func, node.args
        if isinstance(called, ast.Attribute) and called.attr in _NEEDLESS and len(arguments) < 2:
            kept = source.span(called.value).text
            yield [Edit(start=span.start, end=span.end, text=kept)]
        elif isinstance(called, ast.Name) and called.id in _WRAPPERS and len(arguments) == 1:
            kept = source.span(arguments[0]).text
            whole = isinstance(arguments[0], ast.Name | ast.Attribute | ast.Call | ast.Subscript)
            if not isinstance(arguments[0], ast.Starred | ast.GeneratorExp):
                yield [Edit(start=span.start, end=span.end, text=kept if whole else f"({kept})")]


def flag(source: Source, function: FunctionNode) -> Iterator[list[Edit]]:
    """`True` for `False` in the body."""
    for statement in function.body:
        for node in code_nodes_of(statement):
            if isinstance(node, ast.Constant) and isinstance(node.value, bool):
                span = source.span(node)
                yield [Edit(start=span.start, end=span.end, text=str(not node.value))]


def code_nodes_of(statement: ast.stmt) -> Iterator[ast.AST]:
    """What runs of one statement."""
    wrapper = ast.parse("def f(): pass").body[0]
    assert isinstance(wrapper, ast.FunctionDef)
    wrapper.body = [statement]
    return code_nodes(wrapper)


def twin(source: Source, function: FunctionNode) -> Iterator[list[Edit]]:
    """`max` for `min`, `all` for `any`, `endswith` for `startswith`."""
    for node in code_nodes(function):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        end = source.span(called).end
        name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
        if name in _TWINS and source.text[end - len(name) : end] == name:
            yield [Edit(start=end - len(name), end=end, text=_TWINS[name])]


def swap_branches(source: Source, function: FunctionNode) -> Iterator[list[Edit]]:
    """`b if c else a` for `a if c else b`."""
    for node in code_nodes(function):
        if isinstance(node, ast.IfExp):
            first, second = source.span(node.body), source.span(node.orelse)
            yield [
                Edit(start=first.start, end=first.end, text=second.text),
                Edit(start=second.start, end=second.end, text=first.text),
            ]


def drop_keyword(source: Source, function: FunctionNode) -> Iterator[list[Edit]]:
    """A keyword argument that isn't passed on."""
    for node in code_nodes(function):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                span = source.span(keyword)
                before = re.search(r",\s*\Z", source.text[: span.start][-200:])
                if before and keyword.arg is not None:
                    yield [Edit(start=span.start - len(before[0]), end=span.end, text="")]


OPERATORS: dict[str, Operator] = {
    "comparison": comparison,
    "boundary": boundary,
    "boolean": boolean,
    "negation": negation,
    "drop_not": drop_not,
    "arithmetic": arithmetic,
    "swap_arguments": swap_arguments,
    "drop_statement": drop_statement,
    "drop_guard": drop_guard,
    "drop_branch": drop_branch,
    "default_value": default_value,
    "slice_bound": slice_bound,
    "loop_exit": loop_exit,
    "wrong_variable": wrong_variable,
    "exception_type": exception_type,
    "wrong_element": wrong_element,
    "drop_call": drop_call,
    "flag": flag,
    "twin": twin,
    "swap_branches": swap_branches,
    "drop_keyword": drop_keyword,
}
"""By name; the order is that of a function's mutations."""
