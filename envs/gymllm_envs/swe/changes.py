"""What an agent has changed in its tree, and which of it counts.

It is read from the overlay's upper folder on the host, so nothing that the agent could have put in the
place of git or diff has a say. Tests, configuration of the test run, caches and links are left out: they
can't be part of a solution, and are how solutions are forged.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from gymllm_envs.swe.patching import make_patch

MAX_CHANGED_BYTES = 16 << 20
MAX_CHANGED_FILES = 2000
_MOST_PATCH_CHARS = 200_000

_TEST_FILE = re.compile(r"(test_.*|.*_tests?|tests?|conftest)\.py[a-z]?$")
_TEST_FOLDERS = frozenset({"test", "tests", "testing"})
_SETTINGS = frozenset(
    {
        *("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"),
        *("setup.py", "pyproject.toml", "noxfile.py", ".coveragerc", "Makefile"),
        *("sitecustomize.py", "usercustomize.py"),
    }
)
_SUFFIXES = frozenset({".pyc", ".pyo", ".pth", ".so", ".pyd", ".egg-link"})
_FOLDERS = frozenset({".git", ".hg", ".svn", "__pycache__", ".pytest_cache", ".tox", ".venv"})
_OPAQUE = ("user.overlay.opaque", "trusted.overlay.opaque")


@dataclass(frozen=True, kw_only=True)
class Changes:
    """A patch, as the files that it leaves."""

    files: Mapping[str, bytes | None] = field(default_factory=dict[str, bytes | None])
    """Content by path from the tree's root; None: deleted."""
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    """Paths that don't count, and why."""
    refused: str = ""
    """Not empty: why there is no patch to be graded, though something was changed."""


class Merged:
    """A base folder and overlay layers over it, as an overlay shows them."""

    def __init__(self, base: Path, layers: Sequence[Path] = ()) -> None:
        self._folders = (*reversed(layers), base)

    def read(self, path: str) -> bytes | None:
        """A file's content; None where there is none. Links aren't followed."""
        for folder in self._folders:
            place = folder
            for part in PurePosixPath(path).parts[:-1]:
                place = place / part
                if place.is_symlink() or (os.path.lexists(place) and not place.is_dir()):
                    return None  # deleted, or something else than a folder is there
            with suppress(FileNotFoundError, NotADirectoryError):
                found = (folder / path).lstat()
                return (folder / path).read_bytes() if stat.S_ISREG(found.st_mode) else None
        return None

    def text(self, path: str) -> str | None:
        """The same as text; None where it is none."""
        data = self.read(path)
        try:
            return None if data is None else data.decode()
        except UnicodeDecodeError:
            return None

    def files(self, below: str = "") -> Iterator[str]:
        """Paths of all files below a folder."""
        seen: set[str] = set()
        for folder in self._folders:
            for path in sorted((folder / below).rglob("*")):
                name = path.relative_to(folder).as_posix()
                if name not in seen:
                    seen.add(name)
                    if self.read(name) is not None:
                        yield name


def why_left_out(path: str, hidden: frozenset[str] = frozenset()) -> str:
    """Why a changed path can't count; empty if it can.

    Args:
        path: From the tree's root.
        hidden: Test files of the task.
    """
    parts = PurePosixPath(path).parts
    name = parts[-1]
    if _FOLDERS & {*parts} or any(p.endswith((".egg-info", ".dist-info")) for p in parts):
        return "neither source nor data"
    if path in hidden or _TEST_FILE.match(name) or _TEST_FOLDERS & {*parts[:-1]}:
        return "a test"
    if any(file.startswith(f"{path}/") for file in hidden):
        return "it would take the place of a folder of tests"
    if not path.isprintable():  # bytes that aren't UTF-8, too
        return "a name that can't be written"
    if name in _SETTINGS:
        return "a setting of builds or tests"
    if PurePosixPath(name).suffix in _SUFFIXES:
        return "compiled, or run by every interpreter"
    top = [part for part in parts if part != "src"][:1]
    if top and top[0].partition(".")[0] in _MACHINERY:
        return "it would take the place of a module that the tests run with"
    return ""


_MACHINERY = frozenset(sys.stdlib_module_names) | {
    *("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "coverage", "py"),
}


def read_changes(upper: Path, tree: Merged, hidden: frozenset[str] = frozenset()) -> Changes:
    """Reads an overlay's upper folder.

    Args:
        upper: A copy of it that nobody writes to any more.
        tree: What lay under it.
        hidden: Test files of the task.
    """
    files: dict[str, bytes | None] = {}
    left_out: dict[str, str] = {}
    size = 0
    for path, content in _written(upper, tree):
        why = why_left_out(path, hidden)
        if not why and isinstance(content, str):
            why = content
        if why:
            if tree.read(path) != content:
                left_out[path if path.isprintable() else ascii(path)[1:-1]] = why
            continue
        assert not isinstance(content, str)
        if content == tree.read(path):
            continue
        files[path] = content
        size += len(content or b"")
        if size > MAX_CHANGED_BYTES or len(files) > MAX_CHANGED_FILES:
            refused = (
                f"more than {MAX_CHANGED_FILES} files or {MAX_CHANGED_BYTES >> 20} MB were changed"
            )
            return Changes(left_out=left_out, refused=refused)
    shown = dict(list(left_out.items())[:MAX_CHANGED_FILES])
    return Changes(files=files, left_out=shown)


def _written(upper: Path, tree: Merged) -> Iterator[tuple[str, bytes | str | None]]:
    """Paths with their content, None where deleted; or why there is nothing to read."""
    for folder, folders, names in os.walk(upper):
        here = Path(folder)
        prefix = here.relative_to(upper).as_posix()
        for name in [n for n in folders if (here / n).is_symlink()]:
            folders.remove(name)
            names.append(name)
        if here.name in _FOLDERS and prefix != ".":
            folders.clear()
            continue
        if prefix != "." and _is_opaque(here):
            for path in tree.files(prefix):
                if not os.path.lexists(upper / path):
                    yield path, None
        for name in names:
            path = (here / name).relative_to(upper).as_posix()
            found = (here / name).lstat()
            if stat.S_ISREG(found.st_mode):
                if found.st_size > MAX_CHANGED_BYTES:
                    yield path, "too large"
                else:
                    yield path, (here / name).read_bytes()
            elif stat.S_ISCHR(found.st_mode) and found.st_rdev == 0:
                below = list(tree.files(path))
                for one in below or [path]:
                    yield one, None
            else:
                yield path, "a link" if stat.S_ISLNK(found.st_mode) else "no regular file"


def _is_opaque(folder: Path) -> bool:
    for name in _OPAQUE:
        with suppress(OSError):
            if os.getxattr(folder, name) == b"y":
                return True
    return False


def write_layer(files: Mapping[str, bytes | None], target: Path) -> None:
    """Writes an overlay layer that makes these changes.

    Args:
        files: Content by path; None deletes.
        target: A folder; made if it isn't there.
    """
    target.mkdir(exist_ok=True)
    for path, content in files.items():
        place = target / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            os.mknod(place, stat.S_IFCHR, 0)  # overlayfs: deleted here; anyone may make these
        else:
            place.write_bytes(content)


def patch_of(changes: Changes, tree: Merged) -> str:
    """The changes as a unified diff, for reading; files that are no text are named only."""
    before: dict[str, str] = {}
    after: dict[str, str | None] = {}
    notes: list[str] = []
    for path, content in changes.files.items():
        old = tree.read(path)
        try:
            if old is not None:
                before[path] = old.decode()
            after[path] = None if content is None else content.decode()
        except UnicodeDecodeError:
            before.pop(path, None)
            notes.append(f"(binary file {path})\n")
    text = make_patch(before, after) + "".join(notes)
    if len(text) > _MOST_PATCH_CHARS:
        return (
            f"{text[:_MOST_PATCH_CHARS]}\n(... {len(text) - _MOST_PATCH_CHARS} more characters)\n"
        )
    return text
