"""A program on a terminal: what it can, what it is kept from, how it ends."""

# ruff: noqa: ASYNC110 - what is on the host tells nobody that it has changed

from __future__ import annotations

import os
import re
from pathlib import Path

import anyio
import pytest
from sandbox_helpers import processes_with, said

from gymllm.errors import ConfigError, SandboxDiedError, SandboxError
from gymllm.sandbox import SandboxSpec, Terminal, open_sandbox
from gymllm.sandbox.local import LocalSandbox

pytestmark = pytest.mark.asyncio


async def until(terminal: Terminal, wanted: str, limit_s: float = 10.0) -> str:
    """All that it writes until a text is in it."""
    seen = b""
    with anyio.move_on_after(limit_s):
        while not re.search(wanted.encode(), seen):
            more = await terminal.receive(limit_s)
            if not more and not terminal.alive:
                break
            seen += more
    text = seen.decode(errors="replace")
    assert re.search(wanted, text), text
    return text


async def running(word: str, processes: int = 1) -> None:
    with anyio.fail_after(5):
        while len(processes_with(word)) < processes:
            await anyio.sleep(0.001)


async def test_a_program_has_a_terminal_with_a_name_and_a_size(sandbox: LocalSandbox) -> None:
    terminal = await sandbox.terminal(
        ["bash", "-c", "tty; stty size; echo $TERM; pwd; exec 3</dev/tty && echo is mine"],
        columns=101,
        rows=33,
    )
    text = await until(terminal, "is mine")
    assert text.split() == ["/dev/pts/0", "33", "101", "linux", "/workspace", "is", "mine"]
    assert await terminal.receive(5) == b""
    assert (terminal.alive, terminal.exit_code) == (False, 0)
    assert await terminal.send(b"too late") == 0


async def test_keys_reach_it_and_jobs_are_controlled(sandbox: LocalSandbox) -> None:
    terminal = await sandbox.terminal(env={"PS1": "ready> "})
    await until(terminal, "ready> ")
    await terminal.send(b"sleep 99.25\r")
    await running("99.25")
    await terminal.send(b"\x1a")  # C-z
    await until(terminal, r"(?s)Stopped.*ready> ")
    await terminal.send(b"fg\r")
    await until(terminal, r"[\r\n]sleep 99.25")
    await terminal.send(b"\x03")
    await until(terminal, "ready> ")
    await terminal.send(b"read -s x; echo got:$x\r")
    await until(terminal, "x\r\n")
    await terminal.send("süß\r".encode())
    assert "got:süß" in await until(terminal, "got:süß")
    assert terminal.alive


async def test_it_hears_of_a_new_size(sandbox: LocalSandbox) -> None:
    terminal = await sandbox.terminal(
        ["bash", "-c", "trap 'stty size; exit' WINCH; echo set; while :; do read -t 9; done"]
    )
    await until(terminal, "set")
    await terminal.resize(40, 10)
    await until(terminal, "10 40")
    with pytest.raises(ConfigError, match="columns must be within 1 and 1000, got 0"):
        await sandbox.terminal(columns=0)
    with pytest.raises(ConfigError, match="as a list"):
        await sandbox.terminal("bash")
    with pytest.raises(ConfigError, match="NUL"):
        await sandbox.terminal(["bash", "-c", "\0"])


async def test_a_missing_program_says_so(sandbox: LocalSandbox) -> None:
    terminal = await sandbox.terminal(["no-such-program"])
    await until(terminal, "no-such-program: No such file")
    await terminal.receive(5)
    assert terminal.exit_code == 127


async def test_a_terminal_that_is_never_read_holds_its_program_up(sandbox: LocalSandbox) -> None:
    terminal = await sandbox.terminal(["bash", "-c", "yes | tee >(wc -c >seen) | cat; :"])
    await terminal.send(b"x" * 100, timeout_s=0.1)
    async with anyio.create_task_group():
        with anyio.move_on_after(0.1):  # others are served meanwhile
            while True:
                assert await said(sandbox, "echo other") == "other\n"
    waiting = await terminal.receive(5, max_bytes=1 << 20)
    assert 0 < len(waiting) < 100_000
    assert len(await terminal.receive(5, max_bytes=1000)) <= 1000


async def test_what_a_program_does_not_read_is_not_taken_for_ever(sandbox: LocalSandbox) -> None:
    terminal = await sandbox.terminal(["bash", "-c", "stty raw -echo; echo set; exec sleep 99.5"])
    await until(terminal, "set")
    assert await terminal.send(b"y" * 1_000_000, timeout_s=0.05) < 1_000_000
    await terminal.aclose()


@pytest.mark.parametrize("how", ["terminal", "sandbox"])
async def test_closing_kills_what_runs_on_it(base: Path, how: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with await open_sandbox(SandboxSpec(base=base)) as sandbox:
        terminal = await sandbox.terminal(
            ["bash", "-c", "trap '' HUP; sleep 98.125 & sleep 98.125"]
        )
        await running("98.125", 2)
        if how == "terminal":
            await terminal.aclose()
            with anyio.fail_after(5):
                while processes_with("98.125"):
                    await anyio.sleep(0.001)
            with pytest.raises(SandboxDiedError, match="terminal was closed"):
                await terminal.receive(1)
    assert not processes_with("98.125")
    assert not terminal.alive
    with pytest.raises(SandboxDiedError):
        await terminal.send(b"x")
    assert len(os.listdir("/proc/self/fd")) == before


async def test_one_whose_program_has_ended_is_closed_with_its_sandbox(base: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with await open_sandbox(SandboxSpec(base=base)) as sandbox:
        for _ in range(3):
            terminal = await sandbox.terminal(["true"])
            await terminal.receive(5)
            assert not terminal.alive
    assert len(os.listdir("/proc/self/fd")) == before


async def test_cancelled_reads_lose_nothing_and_closing_ends_them(sandbox: LocalSandbox) -> None:
    terminal = await sandbox.terminal(["cat"])
    for _ in range(20):
        with anyio.move_on_after(0):
            await terminal.receive(5)
    await terminal.send(b"still here\r")
    await until(terminal, "still here\r\nstill here")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(terminal.receive, 60)
        await anyio.lowlevel.checkpoint()
        await terminal.aclose()


async def test_a_start_that_is_cancelled_leaves_nothing(sandbox: LocalSandbox) -> None:
    await said(sandbox, "true")
    before = len(os.listdir("/proc/self/fd"))
    for waits in range(6):
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:

                async def cancel(waits: int = waits, scope: anyio.CancelScope = scope) -> None:
                    for _ in range(waits):
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()

                tasks.start_soon(cancel)
                terminal = await sandbox.terminal(["sleep", "97.5"])
                await terminal.aclose()
    assert len(os.listdir("/proc/self/fd")) == before
    with anyio.fail_after(5):
        while processes_with("97.5"):
            await anyio.sleep(0.001)
    assert await said(sandbox, "echo lives") == "lives\n"


async def test_the_death_of_its_sandbox_is_heard(sandbox: LocalSandbox) -> None:
    terminal = await sandbox.terminal(["cat"])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(terminal.receive, 60)
        await anyio.lowlevel.checkpoint()
        os.kill(sandbox.pid, 9)
    with anyio.fail_after(5):
        while terminal.alive:
            await anyio.sleep(0.001)
    with pytest.raises(SandboxDiedError, match="sandbox is gone"):
        await terminal.receive(1)


async def test_typing_into_a_terminal_from_inside_is_refused(sandbox: LocalSandbox) -> None:
    code = """
import fcntl, os, sys
for number in (0x5412, 0x541C):  # TIOCSTI, TIOCLINUX
    for fd in (0, os.open(sys.argv[1], os.O_RDWR)):
        try:
            fcntl.ioctl(fd, number, b"x")
            print("typed")
        except OSError as error:
            print(error.strerror)
print("done")
"""
    victim = await sandbox.terminal(["bash", "-c", "tty; exec cat"])
    name = (await until(victim, "/dev/pts/[0-9]+\r")).split()[0]
    attacker = await sandbox.terminal(["python3", "-c", code, name])
    text = await until(attacker, "done")
    assert text.count("Operation not permitted") == 4
    assert "typed" not in text


async def test_a_sandbox_full_of_processes_is_an_error(base: Path) -> None:
    async with await open_sandbox(SandboxSpec(base=base, pids=12)) as sandbox:
        if not sandbox.limits.pids:
            pytest.skip("nothing bounds processes here")
        shell = await sandbox.shell()
        await shell.run("for i in {1..8}; do sleep 96.5 & done")

        async def open_many() -> None:
            for _ in range(20):
                await sandbox.terminal(["sleep", "96.5"])

        with pytest.raises(SandboxError, match="could open no terminal"):
            await open_many()


async def test_endless_output_holds_up_nobody(sandbox: LocalSandbox) -> None:
    terminal = await sandbox.terminal(["sh", "-c", "stty raw; cat /dev/zero"])
    turns = 0
    async with anyio.create_task_group() as tasks:

        async def another() -> None:
            nonlocal turns
            while True:
                await anyio.lowlevel.checkpoint()
                turns += 1

        tasks.start_soon(another)
        for _ in range(50):
            await terminal.receive(5)
        tasks.cancel_scope.cancel()
    assert turns >= 49
