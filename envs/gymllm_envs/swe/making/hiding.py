"""Takes test functions out of a test file, so that what is left still imports and passes."""

from __future__ import annotations

import ast
from collections.abc import Collection

from gymllm_envs.swe.making.mutation import Edit, FunctionNode, Source, blocks_of


def hide(text: str, lines: Collection[int]) -> str | None:
    """The text of a test file without some of its functions.

    Args:
        text: The file.
        lines: Where the functions begin, their decorators included.

    Returns:
        The text, or None if a function isn't where it was said to be.
    """
    source = Source(text)
    wanted, edits = set(lines), list[Edit]()
    for parent in ast.walk(source.tree):
        for block in blocks_of(parent):
            hidden = [
                node
                for node in block
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and _first_line(node) in wanted
            ]
            for node in hidden:
                wanted.discard(_first_line(node))
                edit = _taken_out(source, node)
                if edit is None:
                    return None
                edits.append(edit)
            if hidden and len(hidden) == len(block) and not isinstance(parent, ast.Module):
                # An emptied class stays: others may inherit from it.
                first = edits[-len(hidden)]
                indent = " " * hidden[0].col_offset
                edits[-len(hidden)] = Edit(start=first.start, end=first.end, text=f"{indent}pass\n")
    if wanted:
        return None
    return source.edited(edits)


def _first_line(node: FunctionNode) -> int:
    """Of a function, its decorators included."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _taken_out(source: Source, node: FunctionNode) -> Edit | None:
    """A function's lines and the blank ones after it."""
    start = source.offset(_first_line(node), 0)
    lines = source.whole_lines(source.span(node).start, source.span(node).end)
    if lines is None:
        return None
    end = lines.end
    while source.text[end : end + 1] == "\n":
        end += 1
    return Edit(start=start, end=end, text="")
