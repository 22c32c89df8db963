"""Folders that are made once and kept, in $GYMLLM_CACHE, $XDG_CACHE_HOME/gymllm or ~/.cache/gymllm."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path


def cache_folder() -> Path:
    """Where everything of the SWE environment is kept."""
    named = os.environ.get("GYMLLM_CACHE")
    if named:
        return Path(named).absolute() / "swe"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "gymllm" / "swe"


@contextlib.contextmanager
def locked(path: Path) -> Generator[None]:
    """Holds the lock of a path among all processes; the lock's file lies beside it, and stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / f".{path.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def folder_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, made if it isn't there: whole or not at all, by one process.

    Args:
        folder: Where it will be.
        make: Fills an empty folder that takes this place when it has returned.
    """
    if folder.is_dir():
        return folder
    with locked(folder):
        if folder.is_dir():  # another process was faster
            return folder
        new = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            make(new)
            new.chmod(0o755)
            new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return folder
