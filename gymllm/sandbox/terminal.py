"""A program on a terminal, in a local sandbox.

The supervisor opens the terminal, so that it has a name inside, makes it the program's controlling one and
sends its master here, where it is read only when somebody asks: a program that writes more than is read
waits, and nothing piles up. TIOCSTI, which types into a terminal, is forbidden by the system-call filter.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from gymllm.errors import ConfigError, SandboxDiedError, SandboxError
from gymllm.sandbox.interface import MAX_OUTPUT_BYTES
from gymllm.sandbox.output import Poller

if TYPE_CHECKING:
    from gymllm.sandbox.local import LocalSandbox

LARGEST = 1000
"""Columns and rows of a terminal, at most."""
_CHUNK = 1 << 16
_START_TIMEOUT_S = 10.0


def window_size(columns: int, rows: int) -> bytes:
    """As the kernel takes it.

    Raises:
        ConfigError: Not within 1 to `LARGEST`.
    """
    for name, value in (("columns", columns), ("rows", rows)):
        if not 1 <= value <= LARGEST:
            raise ConfigError(f"A terminal's {name} must be within 1 and {LARGEST}, got {value}.")
    return struct.pack("HHHH", rows, columns, 0, 0)


class LocalTerminal:
    """A `Terminal` of a `LocalSandbox`."""

    def __init__(self, sandbox: LocalSandbox) -> None:
        self._sandbox = sandbox
        self._open = ExitStack()
        self._job: socket.socket | None = None
        self._master = -1
        self._exit_code: int | None = None
        self._ended = self._drained = self._dropped = False
        self._waiting = 0

    async def start(self, request: dict[str, object], argv: Sequence[str | bytes]) -> None:
        """Starts the program; leaves nothing when that fails or is cancelled."""
        if isinstance(argv, str | bytes) or not argv:
            raise ConfigError(
                f"terminal takes a program and its arguments as a list, got {argv!r}."
            )
        encoded = [os.fsencode(part) for part in argv]
        if any(b"\0" in part for part in encoded):
            raise ConfigError("terminal: an argument can't hold a NUL byte.")
        with ExitStack() as stack:
            job = await self._sandbox.start_job(request | {"argv": encoded}, ())
            stack.callback(job.close)
            with anyio.move_on_after(_START_TIMEOUT_S):
                await anyio.wait_readable(job)
            self._master = _take_master(job)
            stack.callback(os.close, self._master)
            os.set_blocking(self._master, False)
            self._poller = stack.enter_context(Poller())
            self._poller.add(self._master)
            self._poller.add(job.fileno())
            self._job, self._open = job, stack.pop_all()

    @property
    def alive(self) -> bool:
        self._hear()
        return self._job is not None and not self._ended and self._sandbox.alive

    @property
    def is_open(self) -> bool:
        """Whether it holds descriptors, also when its program has ended."""
        return self._job is not None

    @property
    def exit_code(self) -> int | None:
        self._hear()
        return self._exit_code

    async def send(self, data: bytes, *, timeout_s: float = 2.0) -> int:
        self._require_open()
        left = memoryview(data)
        self._waiting += 1
        try:
            with anyio.move_on_after(timeout_s), Poller() as poller:
                poller.add(self._master, select.EPOLLOUT)
                assert self._job is not None
                poller.add(self._job.fileno())
                while left and not self._drained:
                    try:
                        left = left[os.write(self._master, left[:1024]) :]
                    except BlockingIOError:
                        await poller.wait()
                        self._hear()
                        if self._ended or self._dropped:
                            break
                    except OSError:  # nobody has it open any more
                        break
            return len(data) - len(left)
        finally:
            self._stop_waiting()

    async def receive(self, timeout_s: float, *, max_bytes: int = MAX_OUTPUT_BYTES) -> bytes:
        self._require_open()
        self._waiting += 1
        try:
            await anyio.lowlevel.checkpoint()  # a program that never stops holds up nobody
            with anyio.move_on_after(timeout_s):
                while not self._dropped:
                    if data := self._read(max_bytes):
                        return data
                    if self._ended:
                        return b""
                    await self._poller.wait()
                    self._hear()
            return b""
        finally:
            self._stop_waiting()

    async def resize(self, columns: int, rows: int) -> None:
        size = window_size(columns, rows)
        self._require_open()
        import fcntl
        import termios

        fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    async def aclose(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Has the supervisor kill the program. Whoever waits for it in another task hears of its end."""
        if self._waiting and self._job is not None:
            self._dropped = True
            with suppress(OSError):
                self._job.shutdown(socket.SHUT_RDWR)
        else:
            self._close()

    def _stop_waiting(self) -> None:
        self._waiting -= 1
        if self._dropped and not self._waiting:
            self._close()

    def _close(self) -> None:
        self._job, self._dropped = None, False
        self._open.close()

    def _require_open(self) -> None:
        if self._job is None or self._dropped:
            raise SandboxDiedError("The terminal was closed.")
        if not self._sandbox.alive:
            self._close()
            raise SandboxDiedError("The terminal's sandbox is gone.")

    def _read(self, most: int) -> bytes:
        """What is there: a terminal gives some kilobytes at a time."""
        parts: list[bytes] = []
        while most > 0 and not self._drained:
            try:
                data = os.read(self._master, min(most, _CHUNK))
            except BlockingIOError:
                break
            except OSError:  # EIO: its program, and all that had it from there, are gone
                data = b""
            if not data:
                self._drained = True
                self._poller.remove(self._master)
                break
            parts.append(data)
            most -= len(data)
        return b"".join(parts)

    def _hear(self) -> None:
        """How the program ended, if it has."""
        if self._job is None or self._ended:
            return
        try:
            said = self._job.recv(64)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        self._ended = True
        if said[:1] == b"x":
            self._exit_code = int(said[1:])
        self._poller.remove(self._job.fileno())


def _take_master(job: socket.socket) -> int:
    try:
        space = socket.CMSG_SPACE(array.array("i", [0]).itemsize)
        said, ancillary, _, _ = job.recvmsg(64, space, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        raise SandboxError(f"The sandbox opened no terminal within {_START_TIMEOUT_S} s.") from None
    for _, _, packed in ancillary:
        return int(array.array("i", packed[:4])[0])
    why = os.strerror(int(said[1:])) if said[:1] == b"f" else "the sandbox is gone"
    raise SandboxError(f"The sandbox could open no terminal: {why}.")
