"""What a process holds: threads, child processes, open descriptors and asyncio tasks."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Hashable, Mapping
from pathlib import Path

POLL_S = 0.005


def held(loop: asyncio.AbstractEventLoop | None = None) -> Mapping[Hashable, str]:
    """Everything that is held now, each with its name for people.

    Descriptors and children are only known where there is a /proc, as on Linux.

    Args:
        loop: Whose tasks count; the current one is left out.
    """
    things: dict[Hashable, str] = {
        thread: f"thread {thread.name!r}" for thread in threading.enumerate()
    }
    if loop is not None:
        for task in asyncio.all_tasks(loop):
            things[task] = f"task {task.get_name()!r}"
    descriptors = Path("/proc/self/fd")
    if descriptors.is_dir():
        for name in os.listdir(descriptors):
            try:
                target = os.readlink(descriptors / name)
            except OSError:  # the listing's own, closed by now
                continue
            things[name, target] = f"descriptor {name} ({target})"
    for pid, name in _children():
        things[pid] = f"child process {pid} ({name})"
    return things


def new_since(
    before: Mapping[Hashable, str],
    loop: asyncio.AbstractEventLoop | None = None,
    *,
    timeout_s: float,
) -> list[str]:
    """What is held now and was not before, in words; waits within the limit for it to go."""
    deadline = time.monotonic() + timeout_s
    while True:
        new = sorted(name for thing, name in held(loop).items() if thing not in before)
        if not new or time.monotonic() >= deadline:
            return new
        time.sleep(POLL_S)


def _children() -> list[tuple[int, str]]:
    """Children that live or were not waited for: process id and command."""
    found: list[tuple[int, str]] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = stat.read_text().rpartition(")")
        except OSError:  # it has ended
            continue
        pid, _, command = head.partition(" (")
        if int(tail.split()[1]) == os.getpid():
            found.append((int(pid), command))
    return found
