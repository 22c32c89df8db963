"""exec: streams, endings, limits of time and output, cancellation."""

from __future__ import annotations

import signal

import anyio
import pytest
from sandbox_helpers import processes_with, said

from gymllm.errors import ConfigError, SandboxDiedError
from gymllm.sandbox import SandboxSpec, open_sandbox
from gymllm.sandbox.local import LocalSandbox

pytestmark = pytest.mark.asyncio


async def test_streams_exit_code_input_environment_and_directory(sandbox: LocalSandbox) -> None:
    script = 'cat; echo "$WORD" >&2; pwd >&2; exit 3'
    done = await sandbox.exec(
        ["sh", "-c", script], input=b"\0\xff in", env={"WORD": "äö"}, cwd="pkg"
    )
    assert bytes(done.stdout) == b"\0\xff in"
    assert bytes(done.stderr).decode() == "äö\n/workspace/pkg\n"
    assert (done.exit_code, done.signal, done.timed_out) == (3, None, False)


async def test_a_signal_is_told(sandbox: LocalSandbox) -> None:
    done = await sandbox.exec(["sh", "-c", "kill -SEGV $$"])
    assert (done.exit_code, done.signal) == (None, signal.SIGSEGV)


async def test_a_program_that_is_not_there_is_127(sandbox: LocalSandbox) -> None:
    done = await sandbox.exec(["no-such-program"])
    assert done.exit_code == 127
    assert b"no-such-program" in bytes(done.stderr)
    done = await sandbox.exec(["true"], cwd="nowhere")
    assert done.exit_code == 127
    assert b"nowhere" in bytes(done.stderr)


async def test_large_input_that_is_read_late_or_never(sandbox: LocalSandbox) -> None:
    data = b"x" * 3_000_000
    assert bytes((await sandbox.exec(["wc", "-c"], input=data)).stdout) == b"3000000\n"
    assert (await sandbox.exec(["true"], input=data)).exit_code == 0


async def test_endless_output_keeps_both_ends_and_counts_the_rest(sandbox: LocalSandbox) -> None:
    done = await sandbox.exec(
        ["sh", "-c", "echo first; yes | head -c 1000000; echo last"], max_output_bytes=100
    )
    out = done.stdout
    assert out.head.startswith(b"first\n")
    assert out.tail.endswith(b"last\n")
    assert len(out.head) + len(out.tail) == 100
    assert out.cut_bytes == 1_000_000 + 11 - 100
    assert b"[... %d bytes cut ...]" % out.cut_bytes in bytes(out)
    done = await sandbox.exec(["yes"], timeout_s=0.2, max_output_bytes=1000)
    assert done.timed_out
    assert done.stdout.cut_bytes > 1_000_000


async def test_a_timeout_keeps_partial_output_and_kills_the_session(sandbox: LocalSandbox) -> None:
    script = "echo begun; (trap '' INT TERM; sleep 71.01) & sleep 71.02; echo never"
    done = await sandbox.exec(["bash", "-c", script], timeout_s=0.3)
    assert done.timed_out
    assert bytes(done.stdout) == b"begun\n"
    assert done.wall_s < 2
    assert "71.0" not in await said(sandbox, "ps ax | grep '[7]1[.]0'")


async def test_background_children_do_not_hold_it_up(sandbox: LocalSandbox) -> None:
    done = await sandbox.exec(["sh", "-c", "sleep 60 & echo done"], timeout_s=10)
    assert bytes(done.stdout) == b"done\n"
    assert not done.timed_out


async def test_cancelled_it_kills_what_it_has_started(sandbox: LocalSandbox) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sandbox.exec, ["sleep", "72.03"])
        with anyio.fail_after(5):
            while not processes_with("72.03"):  # noqa: ASYNC110 - another process's doing
                await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
    with anyio.fail_after(5):
        while processes_with("72.03"):  # noqa: ASYNC110
            await anyio.sleep(0.01)
    assert await said(sandbox, "echo lives") == "lives\n"


async def test_many_at_once(sandbox: LocalSandbox) -> None:
    answers: dict[int, bytes] = {}

    async def one(number: int) -> None:
        answers[number] = bytes((await sandbox.exec(["echo", str(number)])).stdout)

    async with anyio.create_task_group() as tasks:
        for number in range(40):
            tasks.start_soon(one, number)
    assert answers == {number: b"%d\n" % number for number in range(40)}


async def test_arguments_are_checked(sandbox: LocalSandbox) -> None:
    with pytest.raises(ConfigError, match="as a list"):
        await sandbox.exec("ls")
    with pytest.raises(ConfigError, match="NUL"):
        await sandbox.exec(["echo", "a\0b"])


async def test_after_the_end_it_says_so(sandbox: LocalSandbox) -> None:
    await sandbox.aclose()
    await sandbox.aclose()
    assert not sandbox.alive
    with pytest.raises(SandboxDiedError, match="closed"):
        await sandbox.exec(["true"])


async def test_wall_limit_ends_it_all() -> None:
    async with await open_sandbox(SandboxSpec(wall_s=0.5)) as sandbox:
        with pytest.raises(SandboxDiedError):
            await sandbox.exec(["sleep", "73.04"])
        assert not sandbox.alive
        assert not processes_with("73.04")


async def test_it_runs_on_trio_too(base: object) -> None:
    import trio

    async def main() -> bytes:
        async with await open_sandbox() as sandbox:
            shell = await sandbox.shell()
            await shell.run("x=1")
            return bytes((await shell.run("echo $x")).stdout)

    assert await anyio.to_thread.run_sync(trio.run, main) == b"1\n"
