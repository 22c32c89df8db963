"""What runs inside tries to see, reach, outlive or exhaust what is outside."""

# ruff: noqa: ASYNC240 - looking at the host takes no time

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import anyio
import pytest
from sandbox_helpers import processes_with, said

from gymllm.sandbox import SandboxSpec, open_sandbox
from gymllm.sandbox.local import LocalSandbox

pytestmark = pytest.mark.asyncio


async def test_the_hosts_environment_and_files_are_invisible(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "s3cret")
    (tmp_path / "secret").write_text("s3cret")
    async with await open_sandbox(SandboxSpec(base=base)) as sandbox:
        assert "s3cret" not in await said(
            sandbox, "env; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'"
        )
        assert "No such file" in await said(sandbox, f"cat {tmp_path}/secret")
        assert "No such file" in await said(sandbox, "cat /etc/shadow")
        roots = (await said(sandbox, "ls /")).split()
    assert set(roots) <= {
        *("bin", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "proc", "root", "opt"),
        *("run", "sbin", "tmp", "usr", "workspace"),
    }


async def test_host_processes_are_invisible_and_unreachable(sandbox: LocalSandbox) -> None:
    shown = await said(sandbox, f"ls /proc | grep -c '^[0-9]'; kill -0 {os.getpid()}; kill -9 -1")
    assert int(shown.split()[0]) < 8
    assert (await sandbox.exec(["true"])).exit_code == 0


async def test_process_1_cannot_be_killed_traced_or_read(sandbox: LocalSandbox) -> None:
    await said(sandbox, "kill -9 1; kill -STOP 1; kill -INT 1; kill -TERM 1; kill -CHLD 1")
    assert await said(sandbox, "ls /proc/1; umount /proc/1 2>/dev/null; ls -A /proc/1") == ""
    assert "exec works" in await said(sandbox, "echo exec works")


async def test_a_job_cannot_be_taken_over_before_it_is_its_program(sandbox: LocalSandbox) -> None:
    code = """
import os
newest = os.getpid()
while True:
    for pid in range(newest + 1, newest + 9):
        try:
            fd = os.open(f"/proc/{pid}/cmdline", os.O_RDONLY)
        except OSError:
            continue
        newest = pid
        try:
            if b"supervisor" in os.read(fd, 4096):
                os.open(f"/proc/{pid}/mem", os.O_RDWR)
                print("taken over", flush=True)
        except OSError:
            pass
        os.close(fd)
"""
    async with anyio.create_task_group() as tasks:

        async def attack() -> None:
            done = await sandbox.exec(["python3", "-c", code], timeout_s=0.5)
            assert bytes(done.stdout) == b""
            tasks.cancel_scope.cancel()

        tasks.start_soon(attack)
        while True:
            await sandbox.exec(["true"])


async def test_the_kernels_files_are_read_only(sandbox: LocalSandbox) -> None:
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    script = "cp /proc/sys/kernel/core_pattern x; cat x > /proc/sys/kernel/core_pattern"
    assert "Read-only" in await said(sandbox, script)
    writable = await said(
        sandbox,
        "find /proc -maxdepth 4 -type f -not -path '/proc/[0-9]*' 2>/dev/null |"
        " while read -r f; do (exec 3>>$f) 2>/dev/null && echo $f; done",
    )
    assert set(writable.split()) <= {f"/proc/{name}" for name in ("kmsg", "kcore", "keys")}
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before
    assert "No such" in await said(sandbox, "ls /sys")


async def test_nothing_but_the_scratch_places_can_be_written(sandbox: LocalSandbox) -> None:
    for place in ("/", "/usr/", "/etc/", "/dev/", "/run/", "/proc/", "/run/gymllm/"):
        assert "echo" not in await said(sandbox, f"touch {place}x 2>/dev/null && echo echo")
    for place in ("/tmp/", "/dev/shm/", "/home/user/", "/workspace/"):
        assert await said(sandbox, f"echo x > {place}x; cat {place}x; rm {place}x") == "x\n"


async def test_there_is_no_network(sandbox: LocalSandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        tried = (
            "import socket\n"
            f"for host in ('127.0.0.1', '::1', '8.8.8.8'):\n"
            f"    try: socket.create_connection((host, {port}), 0.2); print('reached')\n"
            "    except OSError as error: print('no')\n"
        )
        done = await sandbox.exec(["python3", "-c", tried])
        assert bytes(done.stdout) == b"no\nno\nno\n"
    assert "1 " not in await said(sandbox, "ls /sys/class/net 2>/dev/null")
    inside = "import socket; s = socket.create_server(('127.0.0.1', 0)); "
    inside += "socket.create_connection(s.getsockname()); print('own loopback')"
    assert bytes((await sandbox.exec(["python3", "-c", inside])).stdout) == b"own loopback\n"


async def test_abstract_sockets_of_the_host_are_unreachable(sandbox: LocalSandbox) -> None:
    name = f"\0gymllm-test-{os.getpid()}-{threading.get_ident()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        code = f"import socket; socket.socket(socket.AF_UNIX).connect({name!r})"
        done = await sandbox.exec(["python3", "-c", code])
    assert b"ConnectionRefusedError" in bytes(done.stderr)


FORBIDDEN_CALLS = """
import ctypes, errno, os, platform
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == "x86_64"
calls = dict(unshare=(272, 97, 0x10000000), mount=(165, 40), ptrace=(101, 117, 0), bpf=(321, 280),
    keyctl=(250, 219), userfaultfd=(323, 282), perf_event_open=(298, 241), setns=(308, 268),
    process_vm_readv=(310, 270), add_key=(248, 217), open_by_handle_at=(304, 265), chroot=(161, 51),
    umount2=(166, 39), move_mount=(429, 429), fsopen=(430, 430), init_module=(175, 105),
    pidfd_getfd=(438, 438), clone3=(435, 435), io_uring_setup=(425, 425),
    clone=(56, 220, 0x10000011), tiocsti=(16, 29, 0, 0x5412, b"x"), vsock=(41, 198, 40, 1, 0),
    packet=(41, 198, 17, 3, 0), alg=(41, 198, 38, 5, 0), pair=(53, 199, 40, 1, 0))
for name, (x86_64, arm, *arguments) in calls.items():
    ctypes.set_errno(0)
    result = libc.syscall(x86_64 if x86 else arm, *(arguments or [0] * 6))
    print(name, result, errno.errorcode.get(ctypes.get_errno()))
if x86:
    print("x32", libc.syscall(0x40000000 + 39), errno.errorcode.get(ctypes.get_errno()))
status = open("/proc/self/status").read()
print("NoNewPrivs:\\t1" in status, "Seccomp:\\t2" in status, "CapEff:\\t0000000000000000" in status)
"""


async def test_forbidden_system_calls(sandbox: LocalSandbox) -> None:
    done = await sandbox.exec(["python3", "-c", FORBIDDEN_CALLS])
    *calls, last = bytes(done.stdout).decode().splitlines()
    assert len(calls) >= 25, done
    for line in calls:
        name, result, error = line.split()
        assert result == "-1", line
        expected = {"clone3": "ENOSYS", "io_uring_setup": "ENOSYS", "x32": "ENOSYS"}
        expected |= dict.fromkeys(("vsock", "packet", "alg", "pair"), "EAFNOSUPPORT")
        assert error == expected.get(name, "EPERM"), line
    assert last == "True True True"


async def test_a_fork_bomb_ends_with_its_command(base: Path) -> None:
    async with await open_sandbox(SandboxSpec(base=base, pids=40)) as sandbox:
        assert "40" in sandbox.limits.pids
        done = await sandbox.exec(["bash", "-c", "bomb() { bomb | bomb & }; bomb"], timeout_s=5)
        counted = len(processes_with("bomb() {"))
        assert counted <= 40, done
        again = await sandbox.exec(["true"])  # the bomb may go on behind: told, no error of ours
        assert again.exit_code in (0, 126)
    assert not processes_with("bomb() {")


async def test_a_memory_bomb_is_killed(sandbox: LocalSandbox) -> None:
    assert "256" in sandbox.limits.memory
    code = "x = []\nwhile True: x.append(bytearray(b'1') * (16 << 20))"
    done = await sandbox.exec(["python3", "-c", code], timeout_s=20)
    assert done.signal == 9 or b"MemoryError" in bytes(done.stderr)
    assert await said(sandbox, "echo lives") == "lives\n"


@pytest.mark.parametrize("place", ["/workspace", "/tmp", "/home/user", "/dev/shm"])
async def test_the_disk_cannot_be_filled(sandbox: LocalSandbox, place: str) -> None:
    script = f"cd {place}; for n in 1 2 3; do head -c 20M /dev/zero > f$n; done; du -sm ."
    shown = await said(sandbox, script)
    assert "No space left" in shown
    assert int(shown.split()[-2] if shown.split()[-1] == "." else shown.split()[0]) <= 33
    assert await said(sandbox, f"cd {place}; rm f*; echo again > x; cat x; rm x") == "again\n"


async def test_the_disk_cannot_be_filled_with_empty_files(base: Path) -> None:
    async with await open_sandbox(SandboxSpec(base=base, file_mb=1)) as sandbox:
        shown = await said(sandbox, "for n in {1..400}; do : > /tmp/$n; done; ls /tmp | wc -l")
        assert "No space left" in shown
        assert int(shown.splitlines()[0 if shown[0].isdigit() else -1]) < 260


async def test_a_daemon_is_gone_after_close(base: Path) -> None:
    script = (
        "(setsid sh -c 'trap \"\" HUP TERM INT; (sleep 76.01 &) ; exec sleep 76.02' &) & disown"
    )
    async with await open_sandbox(SandboxSpec(base=base)) as sandbox:
        await said(sandbox, script)
        with anyio.fail_after(5):
            while len(processes_with("sleep\x0076.0")) < 2:  # noqa: ASYNC110
                await anyio.sleep(0.01)
    assert not processes_with("sleep\x0076.0")


async def test_stopping_everything_inside_does_not_stop_the_end(base: Path) -> None:
    async with await open_sandbox(SandboxSpec(base=base)) as sandbox:
        done = await sandbox.exec(["sh", "-c", "sleep 76.03 & kill -STOP $! $$"], timeout_s=0.3)
        assert done.timed_out
    assert not processes_with("76.03")
