"""What environments that raise, hang and die cost an `EnvPool`: part of env_pool.py."""

from __future__ import annotations

import functools
import gc
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from peers.cpu_time import descendants
from playing import Reset, Step, Trivial, all_at_once, episode

from gymllm.pool import EnvPool
from gymllm.timeline import Timeline

STEP_S, HANG_LIMIT_S, SPARES = 0.02, 0.5, 16


class Faulty(Trivial):
    """Five steps of 20 ms, or a fault in the third as the reset's options say."""

    async def areset(self, *, seed: int | None = None, options: Any = None) -> Reset:
        self.turns, self.fault = 0, (options or {}).get("fault", "")
        return "begin", {}

    async def astep(self, action: str) -> Step:
        self.turns += 1
        if self.turns == 3 and self.fault == "raise":
            raise ValueError("as planned")
        if self.turns == 3 and self.fault == "hang":
            await anyio.sleep_forever()
        if self.turns == 3 and self.fault == "kill":
            os._exit(9)
        await anyio.sleep(STEP_S)
        return "on", 1.0, self.turns == 5, False, {}


@dataclass(frozen=True)
class FaultRun:
    """What a run with or without faults came to."""

    endings: Counter[str]
    steps_a_slot_second: float
    """Steps that were answered, by the time that episodes took, less the limits that hung ones waited for."""
    left: str
    """Threads, processes and descriptors that were not there before."""
    grown_mb: float


def run_with_faults(worker: str, slots: int, count: int, faults: dict[int, str]) -> FaultRun:
    """Plays `count` episodes of five 20 ms steps; those in `faults` (by index % 100) break in the third."""
    before, memory = things_held(), memory_mb()
    endings, rate = anyio.run(_play, worker, slots, count, faults)
    gc.collect()
    deadline = time.monotonic() + 5
    while things_held() - before and time.monotonic() < deadline:
        time.sleep(0.05)  # anyio's threads end by themselves, soon after their loop
    left = ", ".join(f"{number} {what}" for what, number in (things_held() - before).items())
    return FaultRun(endings, rate, left or "nothing", memory_mb() - memory)


async def _play(
    worker: str, slots: int, count: int, faults: dict[int, str]
) -> tuple[Counter[str], float]:
    spares = SPARES if worker == "process" else 0
    pool = EnvPool(Faulty, slots, worker=worker, step_timeout_s=HANG_LIMIT_S, spares=spares)
    timeline = Timeline()
    async with pool:
        played = await all_at_once(
            [
                functools.partial(episode, pool, timeline, i, faults.get(i % 100, ""))
                for i in range(count)
            ]
        )
    endings = Counter(t.reason.split(":", 1)[0] or str(t.ending) for t in played)
    taken = sum(t.ended_ns - t.started_ns for t in played) / 1e9
    limits = endings["EnvTimeoutError"] * HANG_LIMIT_S
    return endings, sum(len(t.turns) for t in played) / (taken - limits)


def things_held() -> Counter[str]:
    """Counts of what a process can leak."""
    return Counter(
        threads=len(os.listdir("/proc/self/task")),
        descriptors=len(os.listdir("/proc/self/fd")),
        processes=len(descendants()),
    )


def memory_mb() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
