"""gymllm/SWE-v0: gold patches and no patches on every task, and 64 episodes at once.

    python benchmarks/swe.py [--quick] [--tasks FILE] [--at-once 64]

Everything goes through the environment as an agent would: calls of its tools, then submit. Without --tasks
the default tasks are played; `gymllm-swe-tasks make` makes more.
"""

from __future__ import annotations

import argparse
import functools
import os
import resource
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import anyio
from anyio import to_thread
from table import Table

import gymllm
from gymllm.message import ToolCall
from gymllm.pool import EnvPool
from gymllm.sandbox.state import state
from gymllm.tool_calls import write_calls
from gymllm_envs.swe.patching import apply_patch
from gymllm_envs.swe.sources import default_tasks
from gymllm_envs.swe.task import SweTask, read_tasks
from gymllm_envs.swe.trees import prepare

ENV_ID = "gymllm/SWE-v0"


def call(name: str, **arguments: object) -> str:
    return write_calls([ToolCall(name=name, arguments=arguments)])


async def solution(task: SweTask) -> list[str]:
    """The gold patch, as calls of the editor."""
    given = (await prepare(task)).given
    files = apply_patch(task.patch, given.text)
    calls: list[str] = []
    for path, text in files.items():
        if text is None:
            calls.append(call("bash", command=f"rm {path}"))
        else:
            calls.append(call("edit", command="create", path=path, file_text=text))
    return calls


async def episode(pool: EnvPool, task: SweTask, actions: list[str]) -> dict[str, object]:
    """Plays the actions and submits; the last step's info with the reward."""
    async with pool.lease() as env:
        await env.reset(seed=0, options={"task": task.id})
        for action in actions:
            step = await env.step(action)
            assert not step.info["invalid_action"], step.observation
        step = await env.step(call("submit"))
        return {**step.info, "reward": step.reward}


async def play_all(
    source: list[SweTask], plan: dict[str, list[str]], at_once: int
) -> dict[str, dict[str, object]]:
    results: dict[str, dict[str, object]] = {}
    make = functools.partial(gymllm.make, ENV_ID, tasks=source)
    async with EnvPool(make, at_once, env_id=ENV_ID) as pool:
        limit = anyio.CapacityLimiter(at_once)

        async def one(task: SweTask) -> None:
            async with limit:
                results[task.id] = await episode(pool, task, plan[task.id])

        async with anyio.create_task_group() as tasks:
            for task in source:
                tasks.start_soon(one, task)
    return results


class Memory:
    """The most that this process and those below it held together, sampled (PSS)."""

    def __init__(self) -> None:
        self.most_mb, self._stop = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.5):
            total = 0
            for pid in below(os.getpid()):
                with suppress(OSError, IndexError):
                    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
                    total += int(text.partition("\nPss:")[2].split()[0])
            self.most_mb = max(self.most_mb, total / 1024)


def below(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for one in found:
        with suppress(OSError):
            for thread in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (thread / "children").read_text().split())
    return found


def cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def left_on_host() -> set[Path]:
    """Folders and notes of sandboxes and gradings that live, or that nobody has removed."""
    return {
        path for kind in ("graded", "layers", "noted") for path in state().folder.glob(f"{kind}/*")
    }


async def main(arguments: argparse.Namespace) -> None:
    table = Table()
    tasks = (
        read_tasks(arguments.tasks) if arguments.tasks else await to_thread.run_sync(default_tasks)
    )
    tasks = tasks[:6] if arguments.quick else tasks
    table.add("tasks", len(tasks))
    table.add("packages", len({task.repo for task in tasks}))
    gold = {task.id: await solution(task) for task in tasks}
    began = time.perf_counter()
    solved = await play_all(tasks, gold, 4)
    table.add("gold patch, mean reward", mean(solved), "", "1.0")
    table.add("gold patch, seconds a task", (time.perf_counter() - began) / len(tasks), "s")
    for name, info in solved.items():
        if info["reward"] != 1.0:
            print(f"   {name}: {info['reason']}")
    nothing = await play_all(tasks, {task.id: [] for task in tasks}, 4)
    table.add("no patch, mean reward", mean(nothing), "", "0.0")
    table.add(
        "no patch, most reward", max(float(str(i["reward"])) for i in nothing.values()), "", "0.0"
    )

    at_once = 8 if arguments.quick else arguments.at_once
    many = [tasks[number % len(tasks)] for number in range(at_once)]
    before, noted, cpu, began = below(os.getpid()), left_on_host(), cpu_s(), time.perf_counter()
    looks = [
        call("bash", command="git log --oneline | head -3; ls; git status --short"),
        call("search", pattern="def ", include="*.py"),
    ]
    tests = call("bash", command="python -m pytest -q -x --maxfail=3 2>&1 | tail -3")
    rewards: list[float] = []
    make = functools.partial(gymllm.make, ENV_ID, tasks=tasks)
    with Memory() as memory:
        async with EnvPool(make, at_once, env_id=ENV_ID, max_starts=at_once) as pool:

            async def one(task: SweTask) -> None:
                info = await episode(pool, task, [*looks, *gold[task.id], tests])
                rewards.append(float(str(info["reward"])))

            async with anyio.create_task_group() as group:
                for task in many:
                    group.start_soon(one, task)
    wall = time.perf_counter() - began
    name = f"{at_once} episodes at once"
    table.add(f"{name}, mean reward", sum(rewards) / len(rewards), "", "1.0")
    table.add(f"{name}, wall", wall, "s")
    table.add(f"{name}, CPU", cpu_s() - cpu, "s")
    table.add(f"{name}, most memory (PSS of all processes)", memory.most_mb, "MB")
    await anyio.sleep(0.2)
    table.add(f"{name}, processes left behind", len(set(below(os.getpid())) - set(before)), "", "0")
    table.add(f"{name}, folders left behind", len(left_on_host() - noted), "", "0")
    print(dict(Counter(task.repo for task in tasks)))
    table.print_json()


def mean(results: dict[str, dict[str, object]]) -> float:
    return sum(float(str(info["reward"])) for info in results.values()) / len(results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="six tasks, eight episodes at once")
    parser.add_argument("--tasks", type=Path, help="a task file")
    parser.add_argument("--at-once", type=int, default=64)
    anyio.run(main, parser.parse_args())
