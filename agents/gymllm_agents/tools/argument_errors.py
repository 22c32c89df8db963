"""What is wrong with a call's arguments, in lines that a model can act on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from pydantic import ValidationError

from gymllm.clip import clip
from gymllm.tool_calls import MOST_PROBLEMS, shown_value, unknown_argument

LONGEST_MESSAGE = 300


def argument_problems(
    tool: str, error: ValidationError, arguments: Mapping[str, object], known: Sequence[str]
) -> str:
    """A line for each argument: its name, what was expected, what was given.

    Args:
        tool: The tool's name.
        error: What pydantic says.
        arguments: What the model gave.
        known: The arguments that there are.
    """
    # A union gives an error for each of its types; to the model they are one.
    expected: dict[str, list[str]] = {}
    given: dict[str, object] = {}
    lines: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        kind, message = problem["type"], problem["msg"]
        path = _path(problem["loc"], arguments, missing=kind == "missing")
        if kind == "missing":
            lines[path] = f"{tool} needs the argument {path!r}."
        elif kind == "extra_forbidden" and path in arguments:
            lines[path] = unknown_argument(tool, path, list(known))
        else:
            said = message.removeprefix("Input should be ").removeprefix("Value error, ")
            said = f"must be {said}" if message.startswith("Input should be ") else said
            said = clip(said, LONGEST_MESSAGE)
            lines.setdefault(path, "")
            given[path] = problem["input"]
            if said not in expected.setdefault(path, []):
                expected[path].append(said)
    for path, said in expected.items():
        if not lines[path]:
            all_said = " or ".join([said[0], *(s.removeprefix("must be ") for s in said[1:])])
            colon = "" if all_said.startswith("must be ") else ":"
            lines[path] = (
                f"the argument {path!r}{colon} {all_said}, got {shown_value(given[path])}."
            )
    shown = list(lines.values())[:MOST_PROBLEMS]
    if len(lines) > MOST_PROBLEMS:
        shown.append(f"{len(lines) - MOST_PROBLEMS} more problems.")
    return "\n".join(shown)


def _path(location: tuple[int | str, ...], arguments: object, *, missing: bool) -> str:
    """A place as one would write it, `points[2].x`, without pydantic's names of a union's types."""
    path, value = "", arguments
    for index, step in enumerate(location):
        if isinstance(step, int):
            path += f"[{step}]"
            if isinstance(value, list | tuple):
                items = cast(Sequence[object], value)
                value = items[step] if step < len(items) else None
        elif isinstance(value, Mapping) and step in value:
            path += f".{step}" if path else step
            value = cast(Mapping[str, object], value)[step]
        elif missing and index == len(location) - 1:
            path += f".{step}" if path else step
    return path
