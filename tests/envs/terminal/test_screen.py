"""Keys in, screen out, on real programs in a real sandbox."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio
from terminal_helpers import bash, call, play

from gymllm.sandbox import Sandbox, SandboxSpec, open_sandbox
from gymllm_envs.terminal.screen import MOST_KEPT_BYTES, Screen
from gymllm_envs.terminal.task import TerminalTask

pytestmark = pytest.mark.usefixtures("needs_bwrap")

SMALL = TerminalTask(
    id="small", instruction="Say hello.", check="grep -qx hello out.txt", file_mb=8
)


@pytest_asyncio.fixture
async def sandbox(needs_bwrap: None) -> AsyncGenerator[Sandbox]:
    async with await open_sandbox(SandboxSpec(file_mb=8)) as sandbox:
        yield sandbox


async def screen_of(sandbox: Sandbox, *argv: str, columns: int = 40, rows: int = 6) -> Screen:
    env = {"PS1": "$ ", "TERM": "xterm"}
    program = argv or ("bash", "--norc", "--noprofile", "-i")
    return Screen(
        await sandbox.terminal(program, columns=columns, rows=rows, env=env), columns, rows
    )


@pytest.mark.asyncio
async def test_a_shell_is_used(sandbox: Sandbox) -> None:
    screen = await screen_of(sandbox)
    assert await screen.settle(5, expected=True)
    assert screen.text() == "[40x6, cursor at row 1, column 3]\n$"
    assert await screen.press(["echo hi", "Enter"])
    assert await screen.settle(5, quiet_s=0.3)
    assert screen.text() == "[40x6, cursor at row 3, column 3]\n$ echo hi\nhi\n$"
    await screen.press(["seq 9", "Enter"])
    await screen.settle(5, quiet_s=0.3)
    assert screen.text(scrollback=3) == (
        "[3 lines above the screen]\n2\n3\n4\n[40x6, cursor at row 6, column 3]\n5\n6\n7\n8\n9\n$"
    )


@pytest.mark.asyncio
async def test_a_full_screen_program_is_used_and_leaves_the_screen_as_it_was(
    sandbox: Sandbox,
) -> None:
    screen = await screen_of(sandbox)
    await screen.press(["seq 100 | less", "Enter"])
    await screen.settle(5, quiet_s=0.3)
    if "1\n2\n3" not in screen.text():
        pytest.skip("there is no less")
    await screen.press(["PageDown"])
    await screen.settle(5, quiet_s=0.3)
    assert "\n6\n7\n8\n9\n10\n" in screen.text()
    await screen.press(["G"])
    await screen.settle(5, quiet_s=0.3)
    assert "\n100\n" in screen.text()
    await screen.press(["q"])
    await screen.settle(5, quiet_s=0.3)
    assert screen.text().endswith("$ seq 100 | less\n$")


@pytest.mark.asyncio
async def test_a_program_that_asks_the_terminal_is_answered(sandbox: Sandbox) -> None:
    ask = "stty -echo raw; printf 'abc\\033[6n'; IFS= read -r -d R x; stty sane; echo; echo ${x#?}"
    screen = await screen_of(sandbox, "bash", "-c", ask)
    await screen.settle(5, quiet_s=0.3)
    assert "[1;4" in screen.text()


@pytest.mark.asyncio
async def test_a_flood_is_thinned_and_ended_by_a_key(sandbox: Sandbox) -> None:
    screen = await screen_of(sandbox)
    await screen.press(["yes flooding", "Enter"])
    cpu = time.process_time()
    assert not await screen.settle(0.4)
    assert time.process_time() - cpu < 0.4
    assert "flooding" in screen.text()
    assert len(screen.emulator.grid.scrollback) * len("flooding\r\n") < 2 * MOST_KEPT_BYTES
    await screen.press(["C-c", "clear", "Enter", "echo back", "Enter"])
    assert await screen.settle(5, quiet_s=0.3)
    assert "$ echo back\nback\n$" in screen.text()


@pytest.mark.asyncio
async def test_waits_end_when_the_screen_is_quiet_or_time_is_over(sandbox: Sandbox) -> None:
    screen = await screen_of(sandbox, "bash", "-c", "echo a; sleep 0.4; echo b; exec sleep 9")
    began = time.monotonic()
    assert await screen.settle(5, quiet_s=0.1, expected=True)
    assert "a" in screen.text()
    assert "b" not in screen.text()
    assert await screen.settle(5, quiet_s=0.8)
    assert "b" in screen.text()
    assert not await screen.settle(0.05, quiet_s=0.1)
    assert time.monotonic() - began < 3


def test_a_task_is_done_on_the_screen() -> None:
    played = play(
        SMALL,
        call("keys", keys=["cat >out.txt", "Enter", "hello", "Enter", "C-d"], quiet_s=0.5),
        call("screen"),
        call("submit"),
        mode="screen",
        columns=60,
        rows=10,
    )
    assert "[60x10, cursor at row 1, column" in played.first
    assert "$ cat >out.txt\nhello\n" in played.texts[0]
    assert played.texts[1] == played.texts[0]
    assert played.reward == 1.0


def test_a_program_that_ends_is_followed_by_a_fresh_one() -> None:
    played = play(SMALL, call("keys", keys=["echo bye; exit", "Enter"], quiet_s=0.5), mode="screen")
    assert "bye" in played.texts[0]
    assert "[the program has ended; this is a fresh one]" in played.texts[0]


def test_a_screen_that_is_not_quiet_says_so() -> None:
    busy = call("keys", keys=["while sleep 0.02; do echo .; done", "Enter"], wait_s=0.1)
    played = play(SMALL, busy, call("screen", scrollback=5), mode="screen")
    assert "[the screen was not quiet within 0.1 s]" in played.texts[0]


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        (bash("ls"), "Error: this is no call of a tool"),
        (call("keys", keys="ls"), 'must be of type array, got "ls"'),
        (call("keys", keys=[1]), "item 0 of the argument 'keys' of keys must be of type string"),
        (call("bash", command="ls"), "there is: keys, screen, submit"),
    ],
)
def test_what_is_no_action_on_a_screen_is_answered(action: str, answer: str) -> None:
    played = play(SMALL, action, mode="screen")
    assert played.info["invalid_action"] is True
    assert answer in played.texts[0]


def test_a_hostile_screen_reaches_nobody() -> None:
    evil = (
        r"printf '\033]0;x\007\033[2J\033[99999;99999H\033[?1049h\033P+q\033\\\302\233\200\n"
        r"\033[8;999;999t'"
    )
    played = play(SMALL, call("keys", keys=[evil, "Enter"]), mode="screen")
    assert "\x1b" not in played.texts[0]
    assert "\x9b" not in played.texts[0]
