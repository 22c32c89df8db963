"""A bash that stays, in a local sandbox.

bash reads its lines from a pipe, interactively: then an interrupt takes it back to its prompt with all its
state, and neither an unset variable nor a syntax error ends it. Each command is two lines: an `eval` of
the quoted text with its own descriptors, and, read by bash only when that is over, a `printf` of a random
word and the status to another pipe. So nothing that a command prints or leaves open is taken for its end.

Tried: closing that pipe for commands (`3>&-`). An interrupt while bash puts a descriptor back loses it for
good, once in some hundred times. Commands inherit 253 and 254 instead, and can't know the next word.
"""

from __future__ import annotations

import array
import itertools
import marshal
import os
import secrets
import socket
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import anyio

from gymllm.errors import ConfigError, SandboxDiedError, SandboxError
from gymllm.sandbox.interface import MAX_OUTPUT_BYTES, ExecResult, Output
from gymllm.sandbox.output import Kept, Poller, Reader

if TYPE_CHECKING:
    from gymllm.sandbox.local import LocalSandbox

_BASH = (b"bash", b"--norc", b"--noprofile", b"--noediting", b"-i")
_SETTINGS = (
    b"PS1= PS2= PROMPT_COMMAND=; unset HISTFILE MAILCHECK; set +o history +H; set -m; "
    b"exec 2>/dev/null\n"
)
# An empty line first, for the interrupt may have cut the line that bash was reading; and it may have kept
# bash from taking its own output back.
_BACK = b"\n\\exec >/dev/null 2>&1\n"
_FORGET_JOBS = b"\\builtin jobs\n"  # or they would be announced in the next command's output
_INTERRUPT_TIMEOUT_S = 2.0
_ROUND_S = 0.02
_LONGEST_MARK = 64
_START_TIMEOUT_S = 10.0
_ESCAPES = {
    **{byte: b"\\x%02x" % byte for byte in (*range(1, 32), *range(127, 256))},
    ord("\\"): b"\\\\",
    ord("'"): b"\\'",
    ord("\n"): b"\\n",
}
_PLAIN = bytes(sorted(set(range(32, 127)) - {ord("\\"), ord("'")}))


def quoted(command: bytes) -> bytes:
    """The command as one word on one line."""
    if not command.translate(None, _PLAIN):
        return b"$'%s'" % command
    return b"$'%s'" % b"".join(_ESCAPES.get(b, bytes((b,))) for b in command)


class LocalShell:
    """A `Shell` of a `LocalSandbox`."""

    def __init__(self, sandbox: LocalSandbox, request: dict[str, object]) -> None:
        self._sandbox = sandbox
        self._request = request | {"argv": list(_BASH)}
        self._open = ExitStack()
        self._job: socket.socket | None = None
        self._unsettled = False
        """A command was cancelled; it has to be ended before the next."""
        self._busy = self._dropped = False
        self._lock = anyio.Lock()

    @property
    def alive(self) -> bool:
        return self._job is not None and self._sandbox.alive

    @property
    def is_open(self) -> bool:
        """Whether it holds descriptors."""
        return self._job is not None

    async def restart(self) -> None:
        self.forget()
        async with self._lock:
            self._close()
            await self._start()

    async def _start(self) -> None:
        stack = ExitStack()
        try:
            with ExitStack() as theirs:

                def pipe() -> tuple[int, int]:
                    reading, writing = os.pipe2(os.O_CLOEXEC)
                    return reading, writing

                lines, self._lines = pipe()
                theirs.callback(os.close, lines)
                stack.callback(os.close, self._lines)
                os.set_blocking(self._lines, False)
                self._marks, marks = pipe()
                theirs.callback(os.close, marks)
                stack.callback(os.close, self._marks)
                os.set_blocking(self._marks, False)
                self._output, output = pipe()
                theirs.callback(os.close, output)
                stack.callback(os.close, self._output)
                null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
                theirs.callback(os.close, null)
                # The supervisor puts a terminal in as number 2.
                job = await self._sandbox.start_job(self._request, (lines, null, marks, output))
                stack.callback(job.close)
            self._poller = stack.enter_context(Poller())
            for fd in (job.fileno(), self._marks, self._output):
                self._poller.add(fd)
            self._children = await self._hear_children(job)
            if self._children >= 0:
                stack.callback(os.close, self._children)
            self._said, self._unsettled, self._ended, self._all_killed = b"", False, False, True
            self._before: list[int] = []
            self._noise = Kept(0)
            self._reader = Reader(self._output, 0)
            self._job, self._open = job, stack
            with anyio.move_on_after(_START_TIMEOUT_S):
                word = secrets.token_hex(8).encode()
                await self._send(_SETTINGS + _mark(word))
                if await self._until(word) is not None:
                    return
            raise SandboxError("bash did not start; is there one in the sandbox?")
        except BaseException:
            self._close()
            stack.close()
            raise

    async def run(
        self,
        command: bytes | str,
        *,
        timeout_s: float = 60.0,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> ExecResult:
        text = os.fsencode(command)
        if b"\0" in text:
            raise ConfigError("A shell's command can't hold a NUL byte.")
        async with self._lock:
            self._require_alive()
            self._busy = True
            try:
                if self._unsettled and not await self._interrupt():
                    self._close()
                    self._require_alive()
                return await self._run(text, timeout_s, max_output_bytes)
            finally:
                self._busy = False
                if self._dropped:
                    self._close()

    async def _run(self, text: bytes, timeout_s: float, max_output_bytes: int) -> ExecResult:
        began = time.monotonic()
        self._before = self._children_now()
        self._noise = Kept(0)
        self._reader = Reader(self._output, max_output_bytes)
        word = secrets.token_hex(8).encode()
        status: int | None = None
        self._unsettled = True
        with anyio.move_on_after(timeout_s) as limit:
            line = b"\\eval %s </dev/null >&254 2>&254\n" % quoted(text)
            await self._send(line + _mark(word))
            status = await self._until(word)
        timed_out = limit.cancelled_caught
        died = False
        exit_code = status
        if timed_out:
            died = not await self._interrupt()
        elif status is None:
            died, exit_code = True, self._ended_with
        self._unsettled = False
        self._reader.drain()
        kept = self._reader.kept
        if died:
            self._close()
        return ExecResult(
            stdout=kept.output(),
            stderr=Output(),
            exit_code=exit_code if exit_code is not None and exit_code >= 0 else None,
            signal=9
            if timed_out
            else -exit_code
            if exit_code is not None and exit_code < 0
            else None,
            timed_out=timed_out,
            wall_s=time.monotonic() - began,
            shell_died=died,
        )

    async def aclose(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Has the supervisor kill the shell. A command that runs in another task hears of its end."""
        if self._busy and self._job is not None:
            self._dropped = True
            with suppress(OSError):
                self._job.shutdown(socket.SHUT_RDWR)
        else:
            self._close()

    def _close(self) -> None:
        self._job, self._dropped = None, False
        self._open.close()

    def _require_alive(self) -> None:
        if self._job is None:
            raise SandboxDiedError("The shell is gone; `await shell.restart()` starts a fresh one.")
        if not self._sandbox.alive:
            self._close()
            raise SandboxDiedError("The shell's sandbox is gone.")

    # Lines to bash, and what it answers

    async def _send(self, lines: bytes) -> None:
        left = memoryview(lines)
        while left:
            try:
                left = left[os.write(self._lines, left) :]
            except BlockingIOError:
                await anyio.wait_writable(self._lines)
            except OSError:  # it is gone: `_until` hears how
                return

    async def _until(self, word: bytes) -> int | None:
        """Takes output in until bash says this word; its status, or None if bash has ended."""
        assert self._job is not None
        self._ended_with: int | None = None
        while True:
            for fd in await self._poller.wait():
                if fd == self._output:
                    if self._reader.read():
                        await self._reader.hold_back()
                    elif not self._reader.open:
                        self._poller.remove(fd)
                elif fd == self._marks:
                    with suppress(BlockingIOError):
                        said = os.read(fd, 1 << 16)
                        if not said:
                            self._poller.remove(fd)  # the job's socket says how it ended
                        # Commands can write here, too: whatever they like, without an end.
                        *lines, self._said = (self._said + said).split(b"\n")
                        self._said = self._said[-_LONGEST_MARK:]
                        if (status := _status_of(word, lines)) is not None:
                            return status
                        self._noise.add(said)
                        await self._noise.hold_back(len(said))
                else:
                    with suppress(BlockingIOError):
                        said = self._job_said(self._job)
                        if said != b"e":
                            self._ended = True
                            self._ended_with = int(said[1:]) if said[:1] == b"x" else None
                            return None
                        self._all_killed = True

    @staticmethod
    def _job_said(job: socket.socket) -> bytes:
        try:
            return job.recv(64)
        except ConnectionError:
            return b""

    async def _interrupt(self) -> bool:
        """Ends the command and all that it has started; whether bash is at its prompt again."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(_INTERRUPT_TIMEOUT_S):
            for way in itertools.cycle((b"i", b"K")):
                if await self._settles(way):
                    break
                if self._ended:
                    return False
            # What is left in its background. Once that is answered no signal of ours is on its way any
            # more, but one may be pending and take the next line with it: asked until it is answered.
            self._signal(b"e")
            while not (await self._settles() and self._all_killed):
                if self._ended:
                    return False
            while not await self._settles(first=_FORGET_JOBS):
                if self._ended:
                    return False
            return True
        return False

    async def _settles(self, way: bytes = b"", first: bytes = b"") -> bool:
        """Signals, then asks bash for a word; whether it comes at once."""
        if way:
            self._signal(way)
        word = secrets.token_hex(8).encode()
        with anyio.move_on_after(_ROUND_S):
            await self._send(_BACK + first + _mark(word))
            return await self._until(word) is not None
        return False

    def _signal(self, way: bytes) -> None:
        self._all_killed = False
        assert self._job is not None
        with suppress(OSError):
            self._job.send(way + marshal.dumps(self._before))

    def _children_now(self) -> list[int]:
        if self._children < 0:
            return []
        with suppress(OSError):
            return [int(pid) for pid in os.pread(self._children, 1 << 16, 0).split()]
        return []

    async def _hear_children(self, job: socket.socket) -> int:
        """The open file that lists bash's children, from the supervisor; -1 if the kernel has none."""
        with anyio.move_on_after(_START_TIMEOUT_S) as limit:
            await anyio.wait_readable(job)
        if limit.cancelled_caught:
            raise SandboxError("The shell could not be started: the supervisor said nothing.")
        space = socket.CMSG_SPACE(array.array("i", [0]).itemsize)
        said, ancillary, _, _ = job.recvmsg(64, space, socket.MSG_CMSG_CLOEXEC)
        for _, _, packed in ancillary:
            return int(array.array("i", packed[:4])[0])
        if said[:1] == b"p":
            return -1
        why = os.strerror(int(said[1:])) if said[:1] == b"f" else "the sandbox is gone"
        raise SandboxError(
            f"The shell could not be started: {why}. Is a process free, of the sandbox's (spec.pids) and of "
            "this machine's?"
        )


def _status_of(word: bytes, lines: list[bytes]) -> int | None:
    """What a line with this word says, if one does; a command that spies on bash may have written it."""
    for line in lines:
        said, _, status = line[:_LONGEST_MARK].partition(b" ")
        if said == word and status.isdigit() and int(status) < 256:
            return int(status)
    return None


def _mark(word: bytes) -> bytes:
    return b"\\builtin printf '%s %%s\\n' \"$?\" >&253\n" % word
