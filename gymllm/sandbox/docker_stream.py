"""A program in a container, attached: the connection that the daemon has turned into its streams.

Without a terminal each piece of output has a header of eight bytes: 1 or 2, three zeros, its length.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Protocol, cast

import anyio
import anyio.lowlevel

from gymllm.errors import SandboxDiedError, SandboxError

_CHUNK = 1 << 16
_HEADER_BYTES = 8
_ASKED = 10


class Exec(Protocol):
    """What the daemon knows of it."""

    async def exit_code(self) -> int | None: ...

    async def resize(self, rows: int, columns: int) -> None: ...


def take_socket(started: object) -> tuple[socket.socket, bytes]:
    """The connection below the SDK's, ours from now on, and what was read from it already."""
    theirs = cast("socket.SocketIO", started)
    response = getattr(started, "_response", None)
    connection = cast("socket.socket | None", getattr(theirs, "_sock", None))
    if response is None or connection is None:
        raise SandboxError(f"the docker SDK gave no plain connection, but {started!r}")
    connection.setblocking(False)  # so that what is left in its buffer can be asked for
    early = cast("bytes", response.raw._fp.fp.peek(_CHUNK))
    ours = socket.socket(fileno=os.dup(connection.fileno()))
    ours.setblocking(False)
    response.close()
    theirs.close()
    connection.close()
    return ours, early


class DockerStream:
    """A `ProcessStream` of a daemon."""

    def __init__(self, taken: tuple[socket.socket, bytes], exec: Exec, *, tty: bool) -> None:
        self._socket, self._early = taken
        self._exec, self._tty = exec, tty
        self._header = b""
        self._stream = 1
        self._left = 0
        """Bytes of this piece that are still to come."""

    async def send(self, data: bytes) -> None:
        await anyio.lowlevel.checkpoint()
        left = memoryview(data)
        while left:
            try:
                left = left[self._socket.send(left[:_CHUNK]) :]
            except BlockingIOError:
                with suppress(anyio.ClosedResourceError):
                    await anyio.wait_writable(self._socket)
            except OSError as problem:
                raise SandboxDiedError("The program in the container has ended.") from problem

    async def receive(self) -> tuple[int, bytes] | None:
        await anyio.lowlevel.checkpoint()  # a program that never stops holds up nobody
        while True:
            if self._tty:
                data = await self._read(_CHUNK)
                return (1, data) if data else None
            if self._left:
                data = await self._read(min(self._left, _CHUNK))
                self._left -= len(data)
                return (self._stream, data) if data else None
            data = await self._read(_HEADER_BYTES - len(self._header))
            if not data:
                return None
            self._header += data
            if len(self._header) == _HEADER_BYTES:
                self._stream = 2 if self._header[0] == 2 else 1
                self._left = int.from_bytes(self._header[4:], "big")
                self._header = b""

    async def _read(self, size: int) -> bytes:
        if self._early:
            data, self._early = self._early[:size], self._early[size:]
            return data
        while True:
            try:
                return self._socket.recv(size)
            except BlockingIOError:
                with suppress(anyio.ClosedResourceError):
                    await anyio.wait_readable(self._socket)
            except OSError:
                return b""

    async def exit_code(self) -> int | None:
        for _ in range(_ASKED):  # the daemon may hear of the end after us
            if (code := await self._exec.exit_code()) is not None:
                return code
            await anyio.sleep(0.02)
        return None

    async def resize(self, rows: int, columns: int) -> None:
        await self._exec.resize(rows, columns)

    async def aclose(self) -> None:
        if self._socket.fileno() >= 0:
            anyio.notify_closing(self._socket)
            self._socket.close()
        await anyio.lowlevel.checkpoint()
