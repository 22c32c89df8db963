"""gymllm/Terminal-v0: starts, steps in both modes, whole episodes, many at once, and the emulator.

python benchmarks/terminal.py [--quick] [--at-once 16]
"""

from __future__ import annotations

import argparse
import functools
import time

import anyio
from table import Table

from gymllm.message import ToolCall
from gymllm.pool import EnvPool
from gymllm.tool_calls import write_calls
from gymllm_envs.terminal.default_tasks import default_tasks
from gymllm_envs.terminal.emulator import Emulator
from gymllm_envs.terminal.env import TerminalEnv

SUBMIT = "```bash\nsubmit\n```"
FLOODS = {
    "lines": b"a line of text, as programs write them\r\n",
    "colours": b"\x1b[31mred\x1b[0m ",
    "cleared screens": b"\x1b[2J",
    "tabs back and forth": b"\x1b[99I\x1b[99Z",
    "accents": "e\u0301\u0301\u0301\u0301".encode(),
}


def block(command: str) -> str:
    return f"```bash\n{command}\n```"


def timed(table: Table, what: str, repeats: int, call: functools.partial[object]) -> None:
    times: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    table.add_times(what, times)


def one_env(table: Table, repeats: int) -> None:
    shell, screen = TerminalEnv(max_turns=10**6), TerminalEnv(mode="screen", max_turns=10**6)
    for env in (shell, screen):
        env.reset(options={"task": "count-words"})  # makes its tree
    timed(table, "reset, shell", repeats, functools.partial(shell.reset, options={"task": 0}))
    timed(table, "reset, screen", repeats, functools.partial(screen.reset, options={"task": 0}))
    timed(table, "step, shell: true", 10 * repeats, functools.partial(shell.step, block("true")))
    keys = ToolCall(name="keys", arguments={"keys": ["true", "Enter"], "quiet_s": 0.01})
    press = functools.partial(screen.step, write_calls([keys]))
    timed(table, "step, screen: true and Enter, quiet for 10 ms", repeats, press)
    times: list[float] = []
    rewards: list[float] = []
    for task in default_tasks():
        for _ in range(2):  # the second time its tree is there
            began = time.perf_counter()
            shell.reset(options={"task": task.id})
            shell.step(block(task.solution))
            rewards.append(float(shell.step(SUBMIT)[1]))
        times.append(time.perf_counter() - began)
    table.add_times("episode: reset, solution, check", times)
    table.add("mean reward of the solutions", sum(rewards) / len(rewards), "", "1")
    shell.close()
    screen.close()


async def at_once(table: Table, number: int) -> None:
    pool = EnvPool(TerminalEnv, number)
    rewards: list[float] = []

    async def one(index: int) -> None:
        task = default_tasks()[index % len(default_tasks())]
        async with pool.lease() as env:
            await env.reset(options={"task": task.id})
            await env.step(block(task.solution))
            rewards.append((await env.step(SUBMIT)).reward)

    for _ in range(2):
        rewards.clear()
        began, cpu = time.perf_counter(), time.process_time()
        async with anyio.create_task_group() as tasks:
            for index in range(number):
                tasks.start_soon(one, index)
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    await pool.aclose()
    table.add(f"{number} episodes at once", wall, "s")
    table.add(f"{number} episodes at once, our own CPU", cpu, "s")
    table.add(f"{number} episodes at once, mean reward", sum(rewards) / number, "", "1")


def emulator(table: Table) -> None:
    for name, unit in FLOODS.items():
        data = unit * (32768 // len(unit))
        began = time.process_time()
        Emulator(80, 24).feed(data)
        took = time.process_time() - began
        table.add(f"emulator, 32 KB of {name}", took * 1e3, "ms of CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--at-once", type=int, default=16, help="episodes at the same time")
    asked = parser.parse_args()
    table = Table()
    one_env(table, 5 if asked.quick else 30)
    anyio.run(at_once, table, asked.at_once)
    emulator(table)
    table.print_json()


if __name__ == "__main__":
    main()
