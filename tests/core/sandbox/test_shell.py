"""The shell that stays: its state, and everything that tries to take it out of step."""

from __future__ import annotations

import random
from pathlib import Path

import anyio
import pytest
from sandbox_helpers import processes_with, said

from gymllm.errors import ConfigError, SandboxDiedError, SandboxError
from gymllm.sandbox import SandboxSpec, open_sandbox
from gymllm.sandbox.local import LocalSandbox
from gymllm.sandbox.shell import LocalShell, quoted

pytestmark = pytest.mark.asyncio


async def output(shell: LocalShell, command: bytes | str, timeout_s: float = 20) -> bytes:
    return bytes((await shell.run(command, timeout_s=timeout_s)).stdout)


async def test_state_is_kept(shell: LocalShell) -> None:
    await shell.run("cd pkg; x=1; export Y=2; f() { echo f$1; }; alias ll='echo aliased'")
    assert await output(shell, 'pwd; echo $x; sh -c "echo \\$Y"; f 3') == (
        b"/workspace/pkg\n1\n2\nf3\n"
    )
    assert (await shell.run("(exit 7)")).exit_code == 7


HARMLESS = [
    ('read line; echo "<$line>"', b"<>\n", 0),
    ("cat", b"", 0),
    ("echo 'a' \"b\" $'c' \\\\d `echo e` $(echo f)", b"a b c \\d e f\n", 0),
    ("cat <<'END'\n$x `y`\nEND", b"$x `y`\n", 0),
    ("if", None, 2),
    ('echo "unbalanced', None, 2),
    ("cat <<END\nopen", None, 0),
    ("${x?gone}", None, None),
    ("set -u; echo $unset", None, 1),
    ("set +u", b"", 0),
    ("exec 1>&- 2>&-", b"", None),
    ("exec 0<&- 3>&- 4>&-; echo on", b"on\n", 0),
    ("exec >/dev/null; echo lost", b"", 0),
    ("trap 'echo trapped' DEBUG; trap - DEBUG", None, 0),
    ("trap '' TERM; trap - TERM", b"", 0),
    ("set -x; true; set +x", None, 0),
    ("set -v; set +v", None, 0),
    ("set -o posix; set +o posix", b"", 0),
    ("alias printf=false eval=false builtin=false; unalias -a", b"", 0),
    ("printf() { echo mine; }; printf; unset -f printf", b"mine\n", 0),
    ("IFS=x; set -f; set +f; unset IFS", b"", 0),
    ("PS1='$ ' PROMPT_COMMAND='echo prompt'; unset PROMPT_COMMAND", b"", 0),
    ("echo '0123456789abcdef 0' >&254", None, 0),
    ("echo '0123456789abcdef 0' >&253", None, None),
    ("for fd in /proc/$$/fd/*; do echo '0123456789abcdef 0' > $fd; done 2>/dev/null", None, None),
    ("kill -STOP $BASHPID & kill -CONT $!; wait; jobs", None, None),
    ("(sleep 50 &)", b"", 0),
    ("sleep 50 & disown", None, 0),
    ("true & wait $!", None, 0),
    ("! true", b"", 1),
    ("# only a comment", b"", 0),
    ("", b"", None),
    ("\n\n;", None, 2),
    ("true\r", None, None),
    (b"printf '\\377\\000\\001'", b"\xff\x00\x01", 0),
    ("echo " + "y" * 100_000, b"y" * 100_000 + b"\n", 0),
]


async def test_nothing_takes_it_out_of_step(shell: LocalShell) -> None:
    await shell.run("kept=1")
    for command, expected, code in HARMLESS:
        done = await shell.run(command, timeout_s=10, max_output_bytes=1 << 20)
        assert not done.timed_out, command
        assert not done.shell_died, command
        assert expected is None or bytes(done.stdout) == expected, command
        assert code is None or done.exit_code == code, (command, done)
        assert await output(shell, 'echo "$kept-next"') == b"1-next\n", command


@pytest.mark.parametrize(
    ("command", "code"),
    [("exit 5", 5), ("exec sh -c 'exit 6'", 6), ("set -e; false", 1), ("kill -9 $$", None)],
)
async def test_a_shell_that_is_ended_says_so_and_restarts(
    shell: LocalShell, command: str, code: int | None
) -> None:
    done = await shell.run("echo before; " + command)
    assert done.shell_died
    assert done.exit_code == code
    assert done.stdout.head.startswith(b"before\n")
    assert not shell.alive
    with pytest.raises(SandboxDiedError, match="restart"):
        await shell.run("true")
    await shell.restart()
    assert await output(shell, "echo again") == b"again\n"


async def test_closing_every_descriptor_hangs_nobody(shell: LocalShell) -> None:
    done = await shell.run('for n in {0..255}; do eval "exec $n>&-"; done', timeout_s=1)
    if done.shell_died:
        await shell.restart()
    assert await output(shell, "echo on") == b"on\n"


@pytest.mark.parametrize(
    "command",
    [
        "echo begun; sleep 50; echo never",
        "echo begun; while :; do :; done",
        "echo begun; while :; do sleep 0.01; done",
        "echo begun; for i in 1 2 3 4; do (trap '' INT; sleep 50); done",
        "echo begun; sleep 50 | cat | (trap '' INT TERM; cat)",
        "echo begun; f() { f2; }; f2() { sleep 50; f; }; f",
        "echo begun; bash -c \"trap '' INT; exec sleep 50\"",
        "echo begun; wait $(sleep 50)",
        "echo begun; sleep 50 & wait",
    ],
)
async def test_a_timeout_kills_the_command_and_keeps_the_shell(
    shell: LocalShell, command: str
) -> None:
    await shell.run("cd pkg; x=kept")
    done = await shell.run(command, timeout_s=0.3)
    assert done.timed_out
    assert not done.shell_died
    assert bytes(done.stdout).startswith(b"begun\n")
    assert b"never" not in bytes(done.stdout)
    assert done.wall_s < 2.5
    assert await output(shell, "echo $x; pwd") == b"kept\n/workspace/pkg\n"
    assert await output(shell, "ps -A -o args | grep '^sleep 5'") == b""


async def test_a_timeout_spares_earlier_background_jobs(shell: LocalShell) -> None:
    await shell.run("sleep 74.05 & sleep 74.06 & disown")
    done = await shell.run("sleep 74.07 & sleep 74.08", timeout_s=0.2)
    assert done.timed_out
    left = await output(shell, "ps -A -o args | grep '^sleep 74' | sort")
    assert left == b"sleep 74.05\nsleep 74.06\n"
    assert b"74.05" in await output(shell, "jobs")


@pytest.mark.slow
async def test_a_shell_that_ignores_interrupts_is_killed_and_told(shell: LocalShell) -> None:
    done = await shell.run("trap '' INT; while :; do :; done", timeout_s=0.2)
    assert done.timed_out
    assert done.shell_died
    await shell.restart()
    assert await output(shell, "echo on") == b"on\n"


async def test_background_output_neither_wedges_nor_is_lost(shell: LocalShell) -> None:
    await shell.run("mkfifo gate; (read _ <gate; echo late; echo >gate2) & mkfifo gate2")
    assert await output(shell, "echo now") == b"now\n"
    assert b"late\n" in await output(shell, "echo >gate; read _ <gate2")


async def test_endless_output_is_bounded(shell: LocalShell) -> None:
    done = await shell.run("yes", timeout_s=0.2, max_output_bytes=1000)
    assert done.timed_out
    assert len(done.stdout.head) + len(done.stdout.tail) == 1000
    assert done.stdout.cut_bytes > 100_000
    assert await output(shell, "echo on") == b"on\n"


async def test_a_cancelled_command_is_ended_before_the_next(shell: LocalShell) -> None:
    await shell.run("x=kept")
    with anyio.move_on_after(0.1):
        await shell.run("echo gone; sleep 75.01")
    assert await output(shell, "echo $x") == b"kept\n"
    assert await output(shell, "ps -A -o args | grep '^sleep 75'") == b""


async def test_cancelled_at_every_await(shell: LocalShell) -> None:
    for after in range(12):
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:

                async def later(scope: anyio.CancelScope, turns: int) -> None:
                    for _ in range(turns):
                        await anyio.lowlevel.checkpoint()
                    scope.cancel()

                tasks.start_soon(later, scope, after)
                await shell.run("echo one; sleep 0.001; echo two")
        assert await output(shell, "echo mine") == b"mine\n"


@pytest.mark.parametrize("how", ["shell", "sandbox", "restart"])
async def test_closed_while_a_command_runs(
    sandbox: LocalSandbox, shell: LocalShell, how: str
) -> None:
    async with anyio.create_task_group() as tasks:

        async def close() -> None:
            while not processes_with("78.01"):  # noqa: ASYNC110
                await anyio.sleep(0.01)
            close = {"shell": shell.aclose, "sandbox": sandbox.aclose, "restart": shell.restart}
            await close[how]()

        tasks.start_soon(close)
        with anyio.fail_after(5):
            done = await shell.run("echo begun; sleep 78.01")
        assert done.shell_died
        assert done.stdout.head == b"begun\n"
    assert shell.alive == (how == "restart")
    if how == "restart":
        assert await output(shell, "echo on") == b"on\n"


async def test_nul_bytes_are_refused(shell: LocalShell) -> None:
    with pytest.raises(ConfigError, match="NUL"):
        await shell.run(b"echo a\0b")
    assert await output(shell, "echo on") == b"on\n"


async def test_any_bytes_arrive_as_they_are(shell: LocalShell) -> None:
    rng = random.Random(0)
    for _ in range(30):
        data = bytes(rng.choice([*range(1, 256), 39, 92, 10, 36]) for _ in range(40))
        data = data.replace(b"'", b"")
        assert await output(shell, b"printf %s '" + data + b"'") == data
    assert b"\n" not in quoted(bytes(range(1, 256)))


async def test_shells_of_one_sandbox_share_its_tree_and_nothing_else(
    sandbox: LocalSandbox,
) -> None:
    one, two = await sandbox.shell(), await sandbox.shell(cwd="pkg", env={"WHO": "two"})
    await one.run("x=1; echo shared > f")
    assert await output(two, "pwd; echo $x$WHO; cat ../f") == b"/workspace/pkg\ntwo\nshared\n"
    await one.aclose()
    assert await said(sandbox, "cat f") == "shared\n"
    await sandbox.aclose()
    with pytest.raises(SandboxDiedError):
        await two.run("true")


async def test_no_process_for_a_shell_is_an_error_that_says_so(base: Path) -> None:
    async with await open_sandbox(SandboxSpec(base=base, pids=12)) as sandbox:
        if not sandbox.limits.pids:
            pytest.skip("nothing bounds processes here")
        first = await sandbox.shell()
        await first.run("for i in {1..20}; do sleep 96.7 & done")

        async def open_many() -> None:
            for _ in range(12):
                await sandbox.shell()

        with pytest.raises(SandboxError, match=r"started: Resource temporarily.*spec\.pids"):
            await open_many()
