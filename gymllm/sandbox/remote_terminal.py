"""A program on a terminal, in a container: the daemon makes the terminal, `stty` sets it up.

Its name and environment come as in `remote_programs.LISTEN`, while the terminal passes all bytes on and
shows none; then it is put back, a mark says that the rest is the program's, and sh becomes the program.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

import anyio

from gymllm.errors import SandboxDiedError, SandboxError
from gymllm.sandbox import remote_programs
from gymllm.sandbox.interface import MAX_OUTPUT_BYTES
from gymllm.sandbox.remote_exec import END_TIMEOUT_S, ending_signal
from gymllm.sandbox.remote_marks import number
from gymllm.sandbox.terminal import window_size

if TYPE_CHECKING:
    from gymllm.sandbox.remote import ProcessStream, RemoteSandbox

_LISTENING = (
    "sh",
    "-c",
    'saved=$(stty -g) && stty raw -echo && printf "$0\\n" || exit 1\n' + remote_programs.LISTEN,
)
_SENT_AT_ONCE = 256
_START_TIMEOUT_S = 10.0
_LONGEST_START = 1 << 16


class RemoteTerminal:
    """A `Terminal` of a `RemoteSandbox`. Nobody listens meanwhile: its end shows when it is read."""

    def __init__(self, sandbox: RemoteSandbox) -> None:
        self._sandbox = sandbox
        self._stream: ProcessStream | None = None
        self._exit_code: int | None = None
        self._ended = False
        self._unread = b""

    async def start(
        self, argv: list[bytes], *, columns: int, rows: int, cwd: bytes, env: Mapping[str, str]
    ) -> None:
        """Starts the program; leaves nothing when that fails or is cancelled."""
        window_size(columns, rows)
        container, _ = self._sandbox.live()
        program = (
            b"unset program line\ncd -- %s || exit 127\n%s"
            b'stty "$saved"; stty rows %d cols %d\nprintf \'%%s %%s\\n\' "$word" $$\n'
            b"unset word saved\nexec %s\n"
        ) % (
            remote_programs.quoted(cwd),
            remote_programs.exports({"TERM": "linux", **env}),
            rows,
            columns,
            b" ".join(map(remote_programs.quoted, argv)),
        )
        hello, word = secrets.token_hex(8).encode() + b"\n", secrets.token_hex(8).encode()
        seen = b""
        stream = await container.open((*_LISTENING, hello.decode().strip()), tty=True)
        try:
            with anyio.move_on_after(_START_TIMEOUT_S):
                while hello not in seen:
                    if (got := await stream.receive()) is None:
                        break
                    seen = (seen + got[1])[-_LONGEST_START:]
                else:
                    await stream.send(remote_programs.told(word, program))
                seen = seen.replace(hello, b"")
                while (got := await stream.receive()) is not None:
                    seen = (seen + got[1])[-_LONGEST_START:]  # others may write to it
                    _, mark, after = seen.partition(word + b" ")
                    if mark and b"\n" in after:
                        pid, _, self._unread = after.partition(b"\n")
                        self._pid = number(pid.strip()) or 0
                        self._stream = stream
                        return
            why = seen.decode(errors="replace").strip()[-500:]
            raise SandboxError(f"The sandbox could open no terminal: {why or 'no answer'}.")
        finally:
            if self._stream is not stream:
                with anyio.CancelScope(shield=True):
                    await stream.aclose()

    @property
    def alive(self) -> bool:
        return self._stream is not None and not self._ended and self._sandbox.alive

    @property
    def exit_code(self) -> int | None:
        return self._exit_code

    async def send(self, data: bytes, *, timeout_s: float = 2.0) -> int:
        stream = self._require_open()
        sent = 0
        with anyio.move_on_after(timeout_s):
            while sent < len(data) and not self._ended:
                piece = data[sent : sent + _SENT_AT_ONCE]
                try:
                    await stream.send(piece)
                except SandboxDiedError:
                    break
                sent += len(piece)
        return sent

    async def receive(self, timeout_s: float, *, max_bytes: int = MAX_OUTPUT_BYTES) -> bytes:
        stream = self._require_open()
        if not self._unread and not self._ended:
            with anyio.move_on_after(timeout_s):
                got = await stream.receive()
                if got is None:
                    self._ended = True
                    status = await stream.exit_code()
                    signal = ending_signal(status)
                    self._exit_code = -signal if signal else status
                    await self._sandbox.still_there()
                else:
                    self._unread = got[1]
        data, self._unread = self._unread[:max_bytes], self._unread[max_bytes:]
        return data

    async def resize(self, columns: int, rows: int) -> None:
        window_size(columns, rows)
        await self._require_open().resize(rows, columns)

    async def aclose(self) -> None:
        if self._stream is None:
            return
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(END_TIMEOUT_S):
                try:
                    _, keeper = self._sandbox.live()
                    await keeper.tell("session", self._pid)
                except SandboxError:
                    pass  # it is gone with its sandbox
            await self.forget()

    async def forget(self) -> None:
        """Drops the connection. Whoever waits for it in another task hears of its end."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with anyio.CancelScope(shield=True):
                await stream.aclose()

    def _require_open(self) -> ProcessStream:
        if self._stream is None:
            raise SandboxDiedError("The terminal was closed.")
        if not self._sandbox.alive:
            raise SandboxDiedError("The terminal's sandbox is gone.")
        return self._stream
