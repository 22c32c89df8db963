"""Copies of a package that lie about on this machine: programs bring their own, and each is a solution."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

from gymllm_envs.swe.making.packages import PACKAGES, Package

_ALIKE = 0.5
"""Share of a source's lines that a copy has; another version has most of them, a namesake hardly any."""


def folders_with_copies(package: Package, base: Path, roots: tuple[str, ...]) -> tuple[str, ...]:
    """Folders in which a package lies, whatever its version; for a module, the folder that it is in.

    Found by name, then compared: not what was renamed, packed or compiled.

    Args:
        package: Which.
        base: Its tree, as released.
        roots: What is searched, once in each process.
    """
    names = frozenset(name for known in PACKAGES.values() for name in known.sources)
    named = _places(names | frozenset(package.sources), roots)
    found: set[str] = set()
    for name in package.sources:
        source = base / package.source_root / name
        if not source.is_dir():
            source = source.with_name(f"{name}.py")
        for place in named.get(name, ()):
            if _is_copy(place, source):
                found.add(str(place if place.is_dir() else place.parent))
    return tuple(sorted(found))


@functools.cache
def _places(names: frozenset[str], roots: tuple[str, ...]) -> dict[str, list[Path]]:
    """Folders and modules of these names. A fifth of a second for a usual /usr."""
    found: dict[str, list[Path]] = {}
    for root in roots:
        for folder, below, files in os.walk(root):
            for name in names.intersection(below):
                found.setdefault(name, []).append(Path(folder, name))
            for file in files:
                if file.endswith(".py") and file[:-3] in names:
                    found.setdefault(file[:-3], []).append(Path(folder, file))
    return found


def _is_copy(place: Path, source: Path) -> bool:
    same = of = 0
    for theirs, ours in _pairs(place, source):
        if copied := _lines(theirs):
            released = _lines(ours)
            same += len(released & copied)
            of += len(released)
    return of > 0 and same >= _ALIKE * of


def _pairs(place: Path, source: Path) -> Iterator[tuple[Path, Path]]:
    """Files of the place, which may not be there, beside those of the release."""
    inner = "__init__.py"
    if place.is_dir() and source.is_dir():
        for ours in source.rglob("*.py"):
            yield place / ours.relative_to(source), ours
    else:
        yield (
            (place / inner if place.is_dir() else place),
            (source / inner if source.is_dir() else source),
        )


def _lines(file: Path) -> frozenset[str]:
    try:
        text = file.read_text("utf-8", errors="replace")
    except OSError:
        return frozenset()
    return frozenset(line.strip() for line in text.splitlines() if line.strip())
