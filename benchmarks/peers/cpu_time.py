"""CPU time of this process and of everything below it; imported by every benchmark, so no dependencies."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


def cpu_s() -> float:
    """User and system seconds: this process, its children that ended and its descendants that live."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + sum(
        (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND for fields in descendants().values()
    )


def descendants() -> dict[int, list[str]]:
    """Fields of /proc/<pid>/stat after the command, of every process below this one."""
    processes = dict(_processes())
    found: dict[int, list[str]] = {}
    parents = {os.getpid()}
    while parents:
        below = {pid: fields for pid, fields in processes.items() if int(fields[1]) in parents}
        found |= below
        parents = set(below)
    return found


def _processes() -> Iterator[tuple[int, list[str]]]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            yield int(stat.parent.name), stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
