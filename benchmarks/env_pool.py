"""What a step costs in an `EnvPool`, how well it keeps many slots busy, and what faults cost it.

CPU time is that of this process and every process below it, user and system, start-up excluded. What is
written by others is measured in the same run, each in a virtual environment of its own under --venvs
(benchmarks/peers holds the scripts); what can't be installed says so in its row.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import gymnasium
from env_pool_faults import run_with_faults
from gymnasium.wrappers import OrderEnforcing, RecordEpisodeStatistics, TimeLimit
from peers.cpu_time import cpu_s
from peers.in_venv import run_in_venv
from playing import Reset, Step, Trivial, all_at_once, episode
from table import Table

from gymllm.event_loop import LOOP_OPTIONS
from gymllm.memory import collect_rarely
from gymllm.pool import WORKERS, EnvPool
from gymllm.timeline import Timeline
from gymllm.trajectory import Ending

SLOTS = 64
STEP_S, SLOW_S, SLOW_SHARE = 0.02, 1.0, 0.05

TextEnv = gymnasium.Env[str, str]


# Environments. All have `self.np_random` from the reset's seed and nothing else that is random.


class NeverWaits(Trivial):
    """Answers at once and promises so."""

    waits = False


class Sleeper(Trivial):
    """A step takes 20 ms, a slow one 1 s."""

    def __init__(self, slow_share: float) -> None:
        self.slow_share = slow_share

    async def astep(self, action: str) -> Step:
        seconds = SLOW_S if self.np_random.random() < self.slow_share else STEP_S
        await anyio.sleep(seconds)
        return "on", 0.0, False, False, {"seconds": seconds}


class TenSteps(Trivial):
    """Ten steps of 100 ms; says when it begins the last one."""

    def __init__(self, on_last: Callable[[], None] = lambda: None) -> None:
        self.on_last = on_last

    async def areset(self, *, seed: int | None = None, options: Any = None) -> Reset:
        self.turns = 0
        return "begin", {}

    async def astep(self, action: str) -> Step:
        self.turns += 1
        if self.turns == 10:
            self.on_last()
        await anyio.sleep(0.1)
        return "on", 1.0, self.turns == 10, False, {}


def wrapped(kind: type[TextEnv]) -> TextEnv:
    """In three stock wrappers."""
    return RecordEpisodeStatistics(OrderEnforcing(TimeLimit(kind(), 10**9)))


# CPU a step


async def cpu_a_step(kind: type[TextEnv], worker: str, steps: int, together: int = 1) -> float:
    """Microseconds a step with 64 environments stepped at once, each by a task of its own.

    With worker "process", `together` of them share a process.
    """
    make_env = functools.partial(wrapped, kind)
    pool = EnvPool(make_env, SLOTS, worker=worker, envs_per_process=together)
    ready, played, go, end = 0, 0, anyio.Event(), anyio.Event()
    used = 0.0

    async def play() -> None:
        nonlocal ready, played, used
        async with pool.lease() as env:
            await env.reset(seed=0)
            for _ in range(10):
                await env.step("left")
            ready += 1
            if ready == SLOTS:  # start-up is over
                used = -cpu_s()
                go.set()
            await go.wait()
            for _ in range(steps):
                await env.step("left")
            played += 1
            if played == SLOTS:
                used += cpu_s()
                end.set()
            await end.wait()

    async with anyio.create_task_group() as tasks:
        for _ in range(SLOTS):
            tasks.start_soon(play)
    await pool.aclose()
    return used * 1e6 / steps / SLOTS


def cpu_alone(steps: int) -> float:
    """Microseconds a step of the wrappers and the environment alone, without a pool."""
    env = wrapped(NeverWaits)
    env.reset(seed=0)
    before = cpu_s()
    for _ in range(steps):
        env.step("left")
    return (cpu_s() - before) * 1e6 / steps


# How busy the slots are


async def busy_share(slow_share: float, seconds: float) -> float:
    """Share of the slots' time that environments spend in their own waiting; 1 is ideal.

    Every slot plays its own seeded sequence until the times it drew add up to `seconds`. With no barrier a
    slot is always in a step, so the ideal time of a slot is that sum, whatever the others draw.
    """
    pool = EnvPool(lambda: Sleeper(slow_share), SLOTS)
    drawn: list[float] = []
    taken: list[float] = []

    async def play(seed: int) -> None:
        async with pool.lease() as env:
            await env.reset(seed=seed)
            started, sum_s = time.perf_counter(), 0.0
            while sum_s < seconds:
                sum_s += float((await env.step("left")).info["seconds"])  # type: ignore[arg-type]
            taken.append(time.perf_counter() - started)
            drawn.append(sum_s)

    async with anyio.create_task_group() as tasks:
        for seed in range(SLOTS):
            tasks.start_soon(play, seed)
    await pool.aclose()
    return sum(drawn) / sum(taken)


async def busy_share_asyncio(seconds: float) -> float:
    """The same of 20 ms steps for asyncio's own sleep: what the timers of this machine allow."""
    steps = round(seconds / STEP_S)

    async def play() -> None:
        for _ in range(steps):
            await asyncio.sleep(STEP_S)

    started = time.perf_counter()
    await asyncio.gather(*(play() for _ in range(SLOTS)))
    return steps * STEP_S / (time.perf_counter() - started)


# Many episodes at once


async def episodes_at_once(count: int) -> float:
    """Seconds of that many episodes at once, the making of their environments included; ideal 1.0."""
    pool, timeline = EnvPool(TenSteps, count), Timeline()
    started = time.perf_counter()
    played = await all_at_once(
        [functools.partial(episode, pool, timeline, i) for i in range(count)]
    )
    taken = time.perf_counter() - started
    assert all(t.ending is Ending.TERMINATED and t.reward == 10 for t in played)
    await pool.aclose()
    return taken


async def asyncio_at_once(count: int) -> float:
    """The same with nothing but asyncio's sleep."""

    async def play() -> None:
        for _ in range(10):
            await asyncio.sleep(0.1)

    started = time.perf_counter()
    await asyncio.gather(*(play() for _ in range(count)))
    return time.perf_counter() - started


async def memory_an_episode(count: int) -> float:
    """KB that an episode holds in its tenth step, its past turns and spans included, less its environment.

    By tracemalloc, which also sees the saved stacks of greenlets.
    """
    tracemalloc.start()
    envs = [TenSteps() for _ in range(count)]
    for env in envs:
        env.reset(seed=0)
    own = tracemalloc.get_traced_memory()[0]
    envs.clear()
    gc.collect()
    base, last, held = tracemalloc.get_traced_memory()[0], 0, 0

    def on_last() -> None:
        nonlocal last, held
        last += 1
        if last == count:
            held = tracemalloc.get_traced_memory()[0] - base

    pool, timeline = EnvPool(lambda: TenSteps(on_last), count), Timeline()
    await all_at_once([functools.partial(episode, pool, timeline, i) for i in range(count)])
    await pool.aclose()
    tracemalloc.stop()
    return (held - own) / count / 1000


# Rows


def cpu_rows(table: Table, steps: int) -> None:
    """Each the best of three: the machine is shared."""

    def best(kind: type[TextEnv], worker: str, count: int, together: int = 1) -> float:
        return min(anyio.run(cpu_a_step, kind, worker, count, together) for _ in range(3))

    alone = min(cpu_alone(steps * SLOTS) for _ in range(3))
    table.add("CPU a step: environment and three wrappers, no pool", alone, "us")
    table.add("CPU a step: inline", best(Trivial, "inline", steps), "us", "<= 15")
    table.add("CPU a step: inline, waits = False", best(NeverWaits, "inline", steps), "us", "<= 15")
    table.add("CPU a step: thread", best(NeverWaits, "thread", steps // 4), "us", "<= 60")
    what = "CPU a step: thread, with a loop for an environment that may wait"
    table.add(what, best(Trivial, "thread", steps // 4), "us")
    for together in (32, 1):
        what = f"CPU a step: process, {together} environments in each"
        table.add(what, best(Trivial, "process", steps // 2, together), "us", "<= 80")
        what = f"{what}, waits = False"
        table.add(what, best(NeverWaits, "process", steps // 2, together), "us", "<= 80")


def latency_rows(table: Table, seconds: float) -> None:
    """Rows of the busy share, each the best of three."""

    def best(run: Callable[[], float]) -> float:
        return max(run() for _ in range(3))

    for what, slow_share, goal in (
        ("64 environments with 20 ms steps: share of the ideal", 0.0, ">= 0.97"),
        ("... 5 % of the steps take 1 s: share of the ideal", SLOW_SHARE, ">= 0.95"),
    ):
        # The loop of gymllm-train and gymllm-eval.
        play = functools.partial(
            anyio.run, busy_share, slow_share, seconds, backend_options=LOOP_OPTIONS
        )
        table.add(what, best(play), "", goal)
    what = "64 tasks of plain asyncio that sleep 20 ms: share of the ideal"
    table.add(what, best(lambda: anyio.run(busy_share_asyncio, seconds)))
    what = "64 environments with 20 ms steps on asyncio's own loop: share of the ideal"
    table.add(what, best(lambda: anyio.run(busy_share, 0.0, seconds)))


def episode_rows(table: Table, memory_count: int) -> None:
    """Rows of episodes at once, each the best of three."""
    for count, goal in ((1024, "<= 1.15"), (4096, "<= 1.6")):
        what = f"{count} episodes of ten 100 ms steps at once"
        play = functools.partial(anyio.run, episodes_at_once, count, backend_options=LOOP_OPTIONS)
        table.add(what, min(play() for _ in range(3)), "s", goal)
        plain = min(anyio.run(asyncio_at_once, count) for _ in range(3))
        table.add("... plain asyncio", plain, "s")
    held = anyio.run(memory_an_episode, memory_count)
    table.add(f"memory an episode, {memory_count} at once", held, "KB", "<= 20")


def fault_rows(table: Table, worker: str, count: int) -> None:
    """Rows of a run with faults, against one without."""
    kinds = ["raise"] * 5 + ["hang"] * 2 + ["kill"] * (worker == "process")
    faults = dict(enumerate(kinds))
    run_with_faults(worker, SLOTS, SLOTS, {})  # what is made once for the process is no leak
    clean = run_with_faults(worker, SLOTS, count, {})
    run = run_with_faults(worker, SLOTS, count, faults)
    each = count // 100
    expected = {"EnvTimeoutError": 2 * each, "EnvCrashedError": (len(kinds) - 2) * each}
    expected["terminated"] = count - sum(expected.values())
    what = f"{worker}: {count} episodes, {len(kinds)} % faults"
    share = run.steps_a_slot_second / clean.steps_a_slot_second
    table.add(f"{what}: throughput against a clean run", share, "", ">= 0.85")
    lost = "nothing" if run.endings == expected else f"{dict(run.endings)}, not {expected}"
    table.add(f"{what}: lost", lost, "", "nothing")
    table.add(f"{what}: left behind", run.left, "", "nothing")
    table.add(f"{what}: memory grown", run.grown_mb, "MB")


def peer_rows(table: Table, venvs: Path, quick: bool) -> None:
    """Rows of what others do on this machine now."""
    rows = (
        ("gymnasium SyncVectorEnv x64, CPU a step", "us", "gymnasium", "sync_cpu_us"),
        ("gymnasium AsyncVectorEnv x64, CPU a step", "us", "gymnasium", "async_cpu_us"),
        ("GEM asynchronous x64, 20 ms steps: share of the ideal", "", "gem", "share"),
        ("... 5 % of the steps take 1 s: share of the ideal", "", "gem", "slow_share"),
        ("google-tunix: 1024 episodes of ten 100 ms steps at once", "s", "tunix", "1024"),
        ("google-tunix: 4096 episodes of ten 100 ms steps at once", "s", "tunix", "4096"),
    )
    measured = {
        "gymnasium": run_in_venv(venvs, "gymnasium", SLOTS, 200 if quick else 1000),
        "gem": run_in_venv(venvs, "gem", SLOTS, 5 if quick else 20, SLOW_SHARE),
        "tunix": run_in_venv(venvs, "tunix", *((1024,) if quick else (1024, 4096))),
    }
    for what, unit, peer, key in rows:
        got = measured[peer]
        if isinstance(got, str):
            table.add(what, f"not measured: {got}")
        elif key in got:
            table.add(what, got[key], unit)


def main() -> None:
    """Prints the table and its JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of each, under a minute")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    cache = Path("~/.cache/gymllm/benchmarks").expanduser()
    parser.add_argument("--venvs", type=Path, default=cache, help="where peers are installed")
    parser.add_argument(
        "--workers",
        nargs="*",
        default=["inline", "process"],
        help="kinds whose faults are measured",
    )
    arguments = parser.parse_args()
    quick, table = arguments.quick, Table()
    collect_rarely()  # as gymllm-train and gymllm-eval do
    # First, while the heap is as a command's is at its start; the others leave it in pieces.
    episode_rows(table, 1024 if quick else 4096)
    cpu_rows(table, 500 if quick else 5000)
    latency_rows(table, 2.0 if quick else 10.0)
    for worker in arguments.workers:
        if worker in WORKERS:
            few = 300 if worker == "process" else 1000  # a process takes a while to start
            fault_rows(table, worker, few if quick else 10_000)
    if arguments.peers:
        peer_rows(table, arguments.venvs, quick)
    table.print_json()


if __name__ == "__main__":
    main()
