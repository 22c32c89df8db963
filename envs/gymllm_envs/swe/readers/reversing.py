"""A patch, the other way round."""

from __future__ import annotations

import re

from gymllm_envs.swe.patching import PatchError

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)", re.DOTALL)
_OTHER = {"+": "-", "-": "+", " ": " "}
_SWAPPED = (
    ("new file mode", "deleted file mode"),
    ("rename from", "rename to"),
    ("old mode", "new mode"),
)


def reverse_patch(patch: str) -> str:
    """The unified diff that takes another back.

    Raises:
        PatchError: A hunk is cut short, or it isn't text.
    """
    said: list[str] = []
    lines = patch.splitlines(keepends=True)
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if found := _HUNK.match(line):
            old, new = (int(found[n] or 1) if found[n] != "0" else 0 for n in (2, 4))
            said.append(f"@@ -{found[3]},{new} +{found[1]},{old} @@{found[5]}")
            at = _hunk(lines, at, old, new, said)
        elif line.startswith("--- ") and at < len(lines) and lines[at].startswith("+++ "):
            said += [f"--- {_side(lines[at], 'b/', 'a/')}", f"+++ {_side(line, 'a/', 'b/')}"]
            at += 1
        elif line.startswith(("GIT binary patch", "Binary files")):
            raise PatchError("a patch of binary files can't be reversed.")
        elif not line.startswith("index "):
            said.append(_header(line))
    return "".join(said)


def _hunk(lines: list[str], at: int, old: int, new: int, said: list[str]) -> int:
    """Swaps a hunk's lines; what goes comes before what comes, as in every diff."""
    gone: list[str] = []
    came: list[str] = []
    last = gone
    while at < len(lines) and (old > 0 or new > 0 or lines[at].startswith("\\")):
        line = lines[at]
        at += 1
        if line.startswith("\\"):  # no newline at the end: of the line before
            last.append(line)
            continue
        sign = line[0] if line[0] in _OTHER else " "
        if sign == " ":
            said += [*gone, *came]
            gone.clear()
            came.clear()
        last = came if sign == "-" else gone
        last.append(_OTHER[sign] + (line[1:] if line[0] in _OTHER else line))
        old, new = old - (sign != "+"), new - (sign != "-")
    said += [*gone, *came]
    if old > 0 or new > 0:
        raise PatchError("the last hunk of the patch is cut short.")
    return at


def _side(line: str, was: str, becomes: str) -> str:
    path = line[4:]
    return becomes + path[2:] if path.startswith(was) else path


def _header(line: str) -> str:
    for one, other in _SWAPPED:
        for start, becomes in ((one, other), (other, one)):
            if line.startswith(start):
                return becomes + line[len(start) :]
    return line
