"""What runs in one sandbox takes what all share, or spoils what the host reads of it."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import anyio
import pytest
from sandbox_helpers import said

from gymllm.sandbox import SandboxSpec, open_sandbox
from gymllm.sandbox.layers import copy_layer
from gymllm.sandbox.local import LocalSandbox

pytestmark = pytest.mark.asyncio

TAKE_ALL = {
    "terminals": """
import os
kept = []
while len(kept) < 4000: kept.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
""",
    "descriptors on their way": """
import array, os, socket
fds, kept = array.array("i", [os.open("/dev/null", 0)] * 250), []
while len(kept) < 40000:
    kept += socket.socketpair()
    kept[-1].setblocking(False)
    try:
        while True: kept[-1].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    except BlockingIOError: pass
""",
    "timers": """
import ctypes
libc, timer = ctypes.CDLL(None), ctypes.c_void_p()
made = 0
while libc.timer_create(0, None, ctypes.byref(timer)) == 0:
    made += 1
    assert made < 5000
raise OSError
""",
}


@pytest.mark.parametrize("what", TAKE_ALL)
async def test_nobody_takes_all_that_sandboxes_share(base: Path, what: str) -> None:
    code = TAKE_ALL[what].strip().replace("\n", "\n    ")
    taking = f"import time\ntry:\n    {code}\nexcept OSError: print('no more', flush=True)\ntime.sleep(60)"
    async with await open_sandbox(SandboxSpec(base=base)) as hostile:
        job = await hostile.shell()
        await hostile.write("taking.py", taking.encode())
        started = await job.run(
            "python3 taking.py > said & while ! [ -s said ]; do sleep 0.01; done"
        )
        assert started.exit_code == 0
        async with await open_sandbox(SandboxSpec(base=base)) as other:
            with anyio.fail_after(10):
                shell = await other.shell()
                assert bytes((await shell.run("echo works")).stdout) == b"works\n"
                terminal = await other.terminal(["echo", "works"])
                assert b"works" in await terminal.receive(5)
                timers = "import signal; signal.setitimer(signal.ITIMER_REAL, 9); " + (
                    "import ctypes; t = ctypes.c_void_p(); "
                    "print(ctypes.CDLL(None).timer_create(0, None, ctypes.byref(t)))"
                )
                assert bytes((await other.exec(["python3", "-c", timers])).stdout) == b"0\n"


async def test_commands_may_open_fewer_files_than_the_supervisor(sandbox: LocalSandbox) -> None:
    code = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    soft, hard = map(int, (await said(sandbox, f"python3 -c '{code}'")).split())
    assert 512 <= soft == hard <= max(512, resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 2)


async def test_too_few_open_files_are_told() -> None:
    code = (
        "import asyncio; from gymllm.sandbox import SandboxSpec, open_sandbox\n"
        "try: asyncio.run(open_sandbox(SandboxSpec()))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    limited = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh", sys.executable, "-c", code]
    done = await anyio.run_process(limited)
    assert b"SandboxStartError" in done.stdout
    assert b"ulimit" in done.stdout


async def test_the_supervisors_limits_and_priority_are_its_own(sandbox: LocalSandbox) -> None:
    code = """
import os, resource
tries = dict(
    limits=lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3)),
    cpus=lambda: os.sched_setaffinity(1, {0}),
    scheduler=lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
    process=lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
    user=lambda: os.setpriority(os.PRIO_USER, 0, 19),
)
for name, attempt in tries.items():
    try:
        attempt()
        print(name, "was set")
    except PermissionError:
        pass
me = os.getpid()
resource.prlimit(me, resource.RLIMIT_CORE, (0, 0)), os.sched_setaffinity(0, os.sched_getaffinity(me))
os.setpriority(os.PRIO_PROCESS, me, 5)
print("ours can be")
"""
    done = await sandbox.exec(["python3", "-c", code])
    assert bytes(done.stdout) == b"ours can be\n", done
    assert (await sandbox.exec(["true"])).exit_code == 0


SPY = """set -T; spy() { case $BASH_COMMAND in *printf*\\ %%s*)
word=${BASH_COMMAND#*\\'}; word=${word%%%% *}; builtin printf "%%s %%s\\n" "$word" "%s" >&%s;; esac; }
trap spy DEBUG"""


@pytest.mark.parametrize("status", ["9" * 5000, "9" * 30, "-1", "1e3", ""])
async def test_a_forged_status_is_one_or_none(sandbox: LocalSandbox, status: str) -> None:
    shell = await sandbox.shell()
    await shell.run(SPY % (status, 253), timeout_s=5)
    done = await shell.run("echo told; (exit 3)", timeout_s=5)
    assert bytes(done.stdout) == b"told\n"
    assert done.exit_code in range(256)


async def test_a_flood_of_marks_holds_up_nobody(sandbox: LocalSandbox) -> None:
    shell = await sandbox.shell()
    gaps: list[float] = []
    async with anyio.create_task_group() as tasks:

        async def tick() -> None:
            last = anyio.current_time()
            while True:
                await anyio.sleep(0.005)
                gaps.append(anyio.current_time() - last)
                last = anyio.current_time()

        tasks.start_soon(tick)
        assert (await shell.run("yes '' >&253", timeout_s=0.5)).timed_out
        tasks.cancel_scope.cancel()
    assert max(gaps) < 0.2
    assert bytes((await shell.run("echo works")).stdout) == b"works\n"


async def test_a_snapshot_is_no_larger_than_the_disk(sandbox: LocalSandbox) -> None:
    script = "head -c 5M /dev/urandom > a; for n in 1 2 3 4; do ln a l$n; truncate -s 9M h$n; done"
    await said(
        sandbox,
        f"{script}; (printf x; head -c 1M /dev/zero; printf y) > mixed; truncate -s 2M mixed",
    )
    before = await said(sandbox, "sha256sum * | sort")
    snapshot = await sandbox.snapshot()
    assert snapshot.owned is not None
    taken = {
        found.st_ino: found.st_blocks * 512 for found in map(Path.lstat, snapshot.owned.iterdir())
    }
    assert sum(taken.values()) < 8 << 20
    await sandbox.restore(snapshot)
    assert await said(sandbox, "sha256sum * | sort") == before


async def test_what_comes_while_it_is_copied_is_bounded(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a").write_bytes(b"x" * 6000)
    copy_layer(tree, tmp_path / "fits", held_bytes=8192)
    (tree / "b").write_bytes(b"x" * 6000)
    with pytest.raises(OSError, match="meanwhile"):
        copy_layer(tree, tmp_path / "large", held_bytes=8192)
    for name in ("a", "b", "c"):
        (tree / name).write_bytes(b"")
    with pytest.raises(OSError, match="names"):
        copy_layer(tree, tmp_path / "many", held_bytes=8192)
