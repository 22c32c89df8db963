"""A shell that stays, in a container: the local sandbox's way (shell.py) over one attached stream.

bash reads its lines from the stream and writes to it what commands print, and marks. It lists its children
after each command, for those are spared when the next has to be ended; the container's `Keeper` sends the
signals, in turn until bash answers. An image without bash gets its sh, with the same lines as far as it
understands them.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

from gymllm.errors import ConfigError, SandboxDiedError, SandboxError
from gymllm.sandbox import remote_programs
from gymllm.sandbox.interface import MAX_OUTPUT_BYTES, ExecResult, Output
from gymllm.sandbox.output import Kept
from gymllm.sandbox.remote_exec import END_TIMEOUT_S, LISTENING, ending_signal, exit_code
from gymllm.sandbox.remote_marks import Marks, number
from gymllm.sandbox.shell import quoted as quoted_for_bash

if TYPE_CHECKING:
    from gymllm.sandbox.remote import ProcessStream, RemoteSandbox

_BASH = b"bash --norc --noprofile --noediting -i"
# What it starts with as its errors it takes for its terminal, whose modes it keeps for its jobs: without a
# real one it complains whenever one dies of a signal. `exec` would end the sh if there were none.
_BASH_START = (
    b"if (: 2<>/dev/ptmx) 2>/dev/null; then exec %s 2<>/dev/ptmx; else exec %s 2>/dev/null; fi\n"
) % (_BASH, _BASH)
_BASH_SETTINGS = (
    b"PS1= PS2= PROMPT_COMMAND=; unset HISTFILE MAILCHECK; set +o history +H; set -m; "
    b"exec 254>&1 >/dev/null 2>/dev/null\n"
)
_SH_SETTINGS = b"PS1= PS2=; unset ENV MAIL; exec 9>&1 >/dev/null\n"
_START_TIMEOUT_S = 10.0
_INTERRUPT_TIMEOUT_S = 3.0
_ROUND_S = 0.05


class _Dialect:
    """How one kind of shell is spoken to."""

    def __init__(self, *, is_bash: bool) -> None:
        self.start = _BASH_START if is_bash else b"exec sh -i 2>/dev/null\n"
        self.settings = _BASH_SETTINGS if is_bash else _SH_SETTINGS
        self._out = b"254" if is_bash else b"9"  # dash takes one digit only
        self._prefix = b"\\builtin " if is_bash else b"\\command "
        self._quoted: Callable[[bytes], bytes] = (
            quoted_for_bash if is_bash else remote_programs.quoted
        )

    def command(self, text: bytes) -> bytes:
        return b"\\eval %s </dev/null >&%s 2>&%s\n" % (self._quoted(text), self._out, self._out)

    def mark(self, word: bytes) -> bytes:
        """The status, then its children: in one piece, for jobs write to the same pipe."""
        return (
            b"GYMLLM_S=$?; IFS= %sread -r GYMLLM_C </proc/$$/task/$$/children; "
            b"%sprintf '%s %%s %%s\n' $GYMLLM_S \"$GYMLLM_C\" >&%s\n"
        ) % (self._prefix, self._prefix, word, self._out)


# An empty line first, and its own output taken back: shell.py says why.
_BACK = b"\n\\exec >/dev/null 2>&1\n"
_FORGET_JOBS = b"\\jobs\n"


class RemoteShell:
    """A `Shell` of a `RemoteSandbox`."""

    def __init__(self, sandbox: RemoteSandbox, cwd: bytes, env: Mapping[str, str]) -> None:
        self._sandbox, self._cwd = sandbox, cwd
        self._exports = remote_programs.exports(env)
        self._stream: ProcessStream | None = None
        self._unsettled = False
        """A command was cancelled; it has to be ended before the next."""
        self._busy = self._closing = False
        self._lock = anyio.Lock()

    @property
    def alive(self) -> bool:
        return self._stream is not None and self._sandbox.alive

    async def restart(self) -> None:
        await self.aclose()
        async with self._lock:
            await self._drop()
            await self._start()

    async def _start(self) -> None:
        container, keeper = self._sandbox.live()
        self._dialect = _Dialect(is_bash="bash" in keeper.facts)
        self._marks, self._kept = Marks(), Kept(0)
        self._unsettled, self._ended, self._children = False, False, b""
        self._closing = False
        stream = await container.open(LISTENING)
        try:
            with anyio.move_on_after(_START_TIMEOUT_S):
                begun, ready = self._marks.new_word(), self._marks.new_word()
                program = (
                    b"cd -- %s || exit 127\n%sunset program line\nprintf '%%s %%s\\n' %s $$\n%s"
                ) % (
                    remote_programs.quoted(self._cwd),
                    self._exports,
                    begun,
                    self._dialect.start,
                )
                self._kept = Kept(2000)
                await stream.send(remote_programs.told(begun + b".", program))
                pid = await self._until(stream, begun)
                if pid is not None:
                    self._pid = number(pid) or 0
                    await stream.send(self._dialect.settings + self._dialect.mark(ready))
                    if (said := await self._until(stream, ready)) is not None:
                        self._status(said)
                        self._stream = stream
                        return
            said = bytes(self._kept.output()).decode(errors="replace").strip()
            raise SandboxError(f"The shell did not start: {said or 'no answer'}.")
        finally:
            if self._stream is not stream:
                with anyio.CancelScope(shield=True):
                    await stream.aclose()

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
            stream = self._require_alive()
            self._busy = True
            try:
                if self._unsettled and not await self._interrupt(stream):
                    await self._drop()
                    self._require_alive()
                return await self._run(stream, text, timeout_s, max_output_bytes)
            finally:
                self._busy = False

    async def _run(
        self, stream: ProcessStream, text: bytes, timeout_s: float, max_output_bytes: int
    ) -> ExecResult:
        began = time.monotonic()
        kept = self._kept = Kept(max_output_bytes)
        done = self._marks.new_word()
        status: int | None = None
        self._unsettled = True
        with anyio.move_on_after(timeout_s) as limit:
            await self._send(stream, self._dialect.command(text) + self._dialect.mark(done))
            said = await self._until(stream, done)
            status = self._status(said) if said is not None else None
        timed_out = limit.cancelled_caught
        died = False
        if timed_out:
            died = not await self._interrupt(stream)
        elif status is None or self._closing:
            # Its command may be killed before it, so that it can still tell of that.
            died, status = True, await stream.exit_code() if status is None else status
        self._unsettled = False
        self._marks.flush(kept)
        if died:
            await self._drop()
            await self._sandbox.still_there()
        signal = ending_signal(status) if died else None
        return ExecResult(
            stdout=kept.output(),
            stderr=Output(),
            exit_code=None if timed_out else exit_code(status) if died else status,
            signal=9 if timed_out else signal,
            timed_out=timed_out,
            wall_s=time.monotonic() - began,
            shell_died=died,
        )

    async def aclose(self) -> None:
        if self._stream is None:
            return
        self._closing = True
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(END_TIMEOUT_S):
                try:
                    _, keeper = self._sandbox.live()
                    await keeper.tell("session", self._pid)
                except SandboxError:
                    pass  # it is gone with its sandbox
            await self.forget()

    async def forget(self) -> None:
        """Drops the connection; a command that runs in another task hears of its end."""
        if self._busy and self._stream is not None:
            await self._stream.aclose()
        else:
            await self._drop()

    async def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with anyio.CancelScope(shield=True):
                await stream.aclose()

    def _require_alive(self) -> ProcessStream:
        if self._stream is None:
            raise SandboxDiedError("The shell is gone; `await shell.restart()` starts a fresh one.")
        if not self._sandbox.alive:
            raise SandboxDiedError("The shell's sandbox is gone.")
        return self._stream

    # Lines to the shell, and what it answers

    async def _send(self, stream: ProcessStream, lines: bytes) -> None:
        with suppress(SandboxDiedError):  # `_until` hears of it
            await stream.send(lines)

    async def _until(self, stream: ProcessStream, word: bytes) -> bytes | None:
        """Takes output in until the shell says this word; what came with it, or None if it has ended."""
        while (got := await stream.receive()) is not None:
            for said, text in self._marks.take(got[1], self._kept):
                if said == word and number(text.partition(b" ")[0]) is not None:
                    return text
            await self._kept.hold_back(len(got[1]))
        self._ended = True
        return None

    def _status(self, said: bytes) -> int | None:
        status, _, children = said.partition(b" ")
        self._children = children
        return number(status)

    async def _interrupt(self, stream: ProcessStream) -> bool:
        """Ends the command and all that it has started; whether the shell is at its prompt again."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(_INTERRUPT_TIMEOUT_S):
            for way in itertools.cycle(("interrupt", "kill")):
                if await self._settles(stream, way):
                    break
                if self._ended:
                    return False
            while not await self._settles(stream, "rest"):
                if self._ended:
                    return False
            while not await self._settles(stream, first=_FORGET_JOBS):
                if self._ended:
                    return False
            return True
        return False

    async def _settles(self, stream: ProcessStream, way: str = "", first: bytes = b"") -> bool:
        """Signals, then asks the shell for a word; whether it comes at once."""
        _, keeper = self._sandbox.live()
        if way:
            await keeper.tell(way, self._pid, self._children)
        word = self._marks.new_word()
        with anyio.move_on_after(_ROUND_S):
            await self._send(stream, _BACK + first + self._dialect.mark(word))
            return await self._until(stream, word) is not None
        return False
