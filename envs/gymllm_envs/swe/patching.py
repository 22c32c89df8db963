"""Unified diffs: made, and applied without any program, for neither host nor image need have one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from gymllm.errors import GymLLMError

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = "\\ No newline at end of file"
_NOWHERE = "/dev/null"


class PatchError(GymLLMError, ValueError):
    """A text is no unified diff, or doesn't fit the files it is for."""


@dataclass
class _Hunk:
    start: int
    """Line of the old file, from 1; 0 where it has none."""
    before: list[str] = field(default_factory=list[str])
    after: list[str] = field(default_factory=list[str])


@dataclass
class FilePatch:
    """What a patch does to one file."""

    old: str | None
    """Its path, from the tree's root; None for a new file."""
    new: str | None
    """None for one that is deleted."""
    hunks: list[_Hunk] = field(default_factory=list[_Hunk])


def make_patch(before: Mapping[str, str], after: Mapping[str, str | None]) -> str:
    """Writes a unified diff that `git apply` and `patch -p1` take.

    Args:
        before: Texts by path; what isn't there doesn't exist yet.
        after: Texts of the paths that may differ; None deletes.
    """
    return "".join(_file_patch(path, before.get(path), after[path]) for path in sorted(after))


def _file_patch(path: str, old: str | None, new: str | None) -> str:
    if old == new:
        return ""
    said = [f"diff --git a/{path} b/{path}\n"]
    if old is None:
        said.append("new file mode 100644\n")
    if new is None:
        said.append("deleted file mode 100644\n")
    lines = difflib.unified_diff(
        _lines(old or ""),
        _lines(new or ""),
        _NOWHERE if old is None else f"a/{path}",
        _NOWHERE if new is None else f"b/{path}",
    )
    said += [line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}\n" for line in lines]
    return "".join(said)


def _lines(text: str) -> list[str]:
    """Lines as diffs count them: other separators than the newline end none."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


def read_patch(patch: str) -> list[FilePatch]:
    """Reads a unified diff, git's extensions included.

    Raises:
        PatchError: It isn't one, or it is one of binary files.
    """
    files: list[FilePatch] = []
    lines = _lines(patch if patch.endswith("\n") or not patch else patch + "\n")
    position, moved = 0, ""
    while position < len(lines):
        line = lines[position]
        position += 1
        if line.startswith("diff --git "):
            moved = ""
        elif line.startswith(("GIT binary patch", "Binary files ")):
            raise PatchError(f"the patch holds a binary file, which can't be applied: {line!r}.")
        elif line.startswith("rename from "):
            moved = line[len("rename from ") :].rstrip("\n")
        elif line.startswith("rename to "):
            files.append(FilePatch(moved, line[len("rename to ") :].rstrip("\n")))
        elif line.startswith("--- ") and position < len(lines):
            old, new = _path(line, "--- "), _path(lines[position], "+++ ")
            position += 1
            if not (moved and files and files[-1].new == new):
                files.append(FilePatch(old, new))
            elif files[-1].old != old:
                raise PatchError(f"the patch names two files for one: {files[-1].old!r}, {old!r}.")
        elif line.startswith("@@ "):
            if not files:
                raise PatchError("the patch has a hunk before it names a file.")
            hunk, position = _read_hunk(lines, position - 1)
            files[-1].hunks.append(hunk)
    if not files and patch.strip():
        raise PatchError(f"this is no unified diff: it begins {patch[:60]!r}.")
    return files


def _path(line: str, mark: str) -> str | None:
    if not line.startswith(mark):
        raise PatchError(f"the patch should name a file with {mark!r} here: {line!r}.")
    path = line[len(mark) :].rstrip("\r\n").partition("\t")[0]
    if path == _NOWHERE:
        return None
    return path[2:] if path[:2] in ("a/", "b/") else path


def _read_hunk(lines: list[str], position: int) -> tuple[_Hunk, int]:
    found = _HUNK.match(lines[position])
    if found is None:
        raise PatchError(f"the patch has a hunk that can't be read: {lines[position]!r}.")
    left, right = (1 if found[n] is None else int(found[n]) for n in (2, 4))
    hunk = _Hunk(int(found[1]))
    position += 1
    last: tuple[list[str], ...] = ()
    while position < len(lines):
        kind, text = lines[position][:1], lines[position][1:]
        if kind == "\\":
            for side in last:
                side[-1] = side[-1].removesuffix("\n")
            position += 1
            continue
        if left <= 0 and right <= 0:
            break
        if kind == "\n":  # an empty line of context, its blank lost on the way
            kind, text = " ", "\n"
        if kind not in (" ", "-", "+"):
            raise PatchError(f"a hunk of the patch is cut short: {lines[position]!r}.")
        last = (hunk.before,) if kind == "-" else (hunk.after,) if kind == "+" else ()
        last = last or (hunk.before, hunk.after)
        for side in last:
            side.append(text)
        left, right = left - (kind != "+"), right - (kind != "-")
        position += 1
    if left > 0 or right > 0:
        raise PatchError("the last hunk of the patch is cut short.")
    return hunk, position


def apply_patch(patch: str, read: Callable[[str], str | None]) -> dict[str, str | None]:
    """The files that a patch changes, as they are then. Hunks may have moved, but must fit exactly.

    Args:
        patch: A unified diff.
        read: Gives a file's text, None where there is no such file.

    Returns:
        Texts by path; None where it deletes.

    Raises:
        PatchError: It can't be read, or doesn't fit.
    """
    changed: dict[str, str | None] = {}
    for one in read_patch(patch):
        text = ""
        if one.old is not None:
            found = changed[one.old] if one.old in changed else read(one.old)
            if found is None:
                raise PatchError(f"the patch changes {one.old}, which is not there.")
            text = found
        if one.new is None and one.old is not None:
            changed[one.old] = None
            continue
        if one.new != one.old and one.old is not None:
            changed[one.old] = None
        if one.new is not None:
            changed[one.new] = _patched(one.new, _lines(text), one.hunks)
    return changed


def _patched(path: str, lines: list[str], hunks: list[_Hunk]) -> str:
    done: list[str] = []
    taken = 0
    for number, hunk in enumerate(hunks, 1):
        expected = hunk.start - 1 if hunk.before else hunk.start
        for start in _places(expected, taken, len(lines) - len(hunk.before)):
            if lines[start : start + len(hunk.before)] == hunk.before:
                break
        else:
            raise PatchError(f"hunk {number} of the patch doesn't fit {path} (line {hunk.start}).")
        done += lines[taken:start] + hunk.after
        taken = start + len(hunk.before)
    return "".join(done + lines[taken:])


def _places(expected: int, first: int, last: int) -> Iterator[int]:
    """Line numbers from the expected one outwards."""
    for distance in range(max(last - expected, expected - first, 0) + 1):
        for place in (expected + distance, expected - distance)[: 2 if distance else 1]:
            if first <= place <= last:
                yield place
