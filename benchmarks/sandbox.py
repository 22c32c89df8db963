"""What a sandbox costs: starts, commands through its shell and through exec, memory.

Local ones beside `subprocess` without any sandbox in the same run; with `--image`, also containers of the
Docker or Podman at DOCKER_HOST, beside `podman exec`. Starts are to the first answer of a sandbox.
"""

# ruff: noqa: ASYNC110, ASYNC221 - nothing else runs in this loop

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
from table import Table

from gymllm.sandbox import SandboxPool, SandboxSpec, open_sandbox
from gymllm.sandbox.launch import bwrap_path
from gymllm.sandbox.local import LocalSandbox
from gymllm.sandbox.remote import RemoteSandbox

FILES = 4000


def make_base(folder: Path) -> Path:
    """A work tree as large as a usual repository's."""
    for number in range(FILES):
        path = folder / f"d{number % 40}" / f"f{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"x = {number}\n" * 100)
    return folder


async def starts(
    spec: SandboxSpec, together: int, rounds: int, kind: str = "local"
) -> tuple[list[float], float]:
    """Seconds from asking for a sandbox to having it, and from first to last."""
    took: list[float] = []
    made: list[object] = []

    async def one() -> None:
        began = time.perf_counter()
        sandbox = await open_sandbox(spec, kind)
        took.append(time.perf_counter() - began)
        made.append(sandbox)
        await sandbox.exec(["true"])
        while len(made) % together:  # all there before the first goes
            await anyio.sleep(0.002)
        await sandbox.aclose()

    total = 0.0
    for _ in range(rounds):
        began = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for _ in range(together):
                tasks.start_soon(one)
        total += time.perf_counter() - began
    return took, total / rounds


async def per_second(call: Callable[[], Awaitable[object]], seconds: float) -> float:
    await call()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        await call()
        calls += 1
    return calls / (time.perf_counter() - began)


def pss_mb(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total / 1024


def below(roots: list[int]) -> list[int]:
    """The processes and all their descendants."""
    found = list(roots)
    for pid in found:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        found += [int(child) for child in children]
    return found


async def containers(table: Table, image: str, seconds: float, rounds: int) -> None:
    """The same of containers."""
    spec = SandboxSpec(image=image)
    await (await open_sandbox(spec, "docker")).aclose()
    took, _ = await starts(spec, 1, rounds, "docker")
    table.add_times("docker: start, one at a time", took)
    took, wall = await starts(spec, 16, 1, "docker")
    table.add_times("docker: start, 16 at once", took)
    table.add("docker: 16 sandboxes started, used once and closed", wall, "s")
    async with await open_sandbox(spec, "docker") as sandbox:
        shell = await sandbox.shell()
        table.add("docker: shell: true", await per_second(lambda: shell.run("true"), seconds), "/s")
        table.add("docker: shell: ls", await per_second(lambda: shell.run("ls"), seconds), "/s")
        table.add(
            "docker: exec: true", await per_second(lambda: sandbox.exec(["true"]), seconds), "/s"
        )
        data = os.urandom(100_000)
        writes = await per_second(lambda: sandbox.write("x", data), seconds)
        table.add("docker: write of 100 kB", writes, "/s")
        assert isinstance(sandbox, RemoteSandbox)
        argv = ["podman", "--url", os.environ["DOCKER_HOST"], "exec", sandbox.name, "true"]

        async def plain() -> None:
            subprocess.run(argv, capture_output=True, check=True)

        if shutil.which("podman"):
            table.add(
                "podman exec, on the same socket: true", await per_second(plain, seconds), "/s"
            )
        began = time.perf_counter()
        snapshot = await sandbox.snapshot()
        table.add("docker: snapshot", (time.perf_counter() - began) * 1e3, "ms")
        began = time.perf_counter()
        await sandbox.restore(snapshot)
        table.add("docker: restore", (time.perf_counter() - began) * 1e3, "ms")
    snapshot.discard()


async def main(quick: bool, image: str) -> None:
    table = Table()
    seconds, rounds = (0.5, 10) if quick else (3.0, 60)
    with tempfile.TemporaryDirectory() as folder:
        base = make_base(Path(folder))
        spec = SandboxSpec(base=base)
        await (await open_sandbox(spec)).aclose()
        took, _ = await starts(spec, 1, rounds)
        table.add_times(f"start, one at a time, base of {FILES} files", took, "milliseconds")
        took, wall = await starts(spec, 64, 1 if quick else 3)
        table.add_times("start, 64 at once", took)
        table.add("64 sandboxes started, used once and closed", wall, "s")
        took = []
        async with SandboxPool(ahead=4) as pool:
            for _ in range(rounds // 2):
                pool.prepare(spec)
                while pool.fresh(spec) < 4:
                    await anyio.sleep(0.01)
                began = time.perf_counter()
                async with pool.lease(spec):
                    took.append(time.perf_counter() - began)
        table.add_times("start, from the pool", took)
        took = []
        argv = [bwrap_path(), "--unshare-all", "--ro-bind", "/", "/", "true"]
        for _ in range(rounds):
            began = time.perf_counter()
            subprocess.run(argv, check=True)
            took.append(time.perf_counter() - began)
        table.add_times("bwrap alone, one command", took)
        async with await open_sandbox(spec) as sandbox:
            shell = await sandbox.shell()
            table.add("shell: true", await per_second(lambda: shell.run("true"), seconds), "/s")
            table.add("shell: ls", await per_second(lambda: shell.run("ls"), seconds), "/s")
            table.add("exec: true", await per_second(lambda: sandbox.exec(["true"]), seconds), "/s")

            async def plain() -> None:
                subprocess.run(["true"], capture_output=True, check=True)

            async def through_anyio() -> None:
                await anyio.run_process(["true"])

            table.add("subprocess.run, no sandbox: true", await per_second(plain, seconds), "/s")
            table.add(
                "anyio.run_process, no sandbox: true",
                await per_second(through_anyio, seconds),
                "/s",
            )
            data = os.urandom(100_000)
            table.add(
                "write of 100 kB",
                await per_second(lambda: sandbox.write("x", data), seconds),
                "/s",
            )
            made = [await open_sandbox(spec) for _ in range(4 if quick else 16)]
            pss = pss_mb(below([one.pid for one in made if isinstance(one, LocalSandbox)])) / len(
                made
            )
            table.add("memory a sandbox (PSS), idle", pss, "MB")
            for one in made:
                await one.aclose()
            await shell.run("for n in {1..100}; do echo $n > new$n; done")
            began = time.perf_counter()
            snapshot = await sandbox.snapshot()
            table.add("snapshot, 100 files changed", (time.perf_counter() - began) * 1e3, "ms")
            began = time.perf_counter()
            await sandbox.restore(snapshot)
            table.add("restore", (time.perf_counter() - began) * 1e3, "ms")
    if image:
        await containers(table, image, seconds, rounds // 2)
    table.print_json()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--image", default="", help="of containers at DOCKER_HOST; none: no containers"
    )
    parsed = parser.parse_args()
    anyio.run(main, parsed.quick, parsed.image)
