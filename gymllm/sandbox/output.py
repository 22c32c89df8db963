"""Reading what processes write: bounded, from several descriptors at once, without a task for each."""

from __future__ import annotations

import os
import select
from collections import deque
from contextlib import suppress
from types import TracebackType

import anyio

from gymllm.sandbox.interface import Output

_CHUNK = 1 << 16
_READ_FREELY = 8 << 20
"""What is written beyond this is read at about 25 MB/s, so that endless output takes no whole core."""
_DRAIN = 1 << 20  # the most that a pipe can hold


class Kept:
    """Keeps both ends of a stream."""

    def __init__(self, max_bytes: int) -> None:
        self._head_bytes = max_bytes - max_bytes // 2
        self._tail_bytes = max_bytes // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._held = 0
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._head_bytes - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data and self._tail_bytes:
            self._tail.append(data)
            self._held += len(data)
            while self._held - len(self._tail[0]) >= self._tail_bytes:
                self._held -= len(self._tail.popleft())

    async def hold_back(self, size_bytes: int) -> None:
        """Waits, after a piece of this size, once there was so much that it seems endless."""
        if self.total > _READ_FREELY:
            await anyio.sleep(size_bytes / 25e6)

    def output(self) -> Output:
        tail = b"".join(self._tail)[-self._tail_bytes :] if self._tail_bytes else b""
        cut = self.total - len(self._head) - len(tail)
        if not cut:
            return Output(head=bytes(self._head) + tail)
        return Output(head=bytes(self._head), tail=tail, cut_bytes=cut)


class Reader:
    """The reading end of a pipe, what is kept of it, and whether more may come."""

    def __init__(self, fd: int, max_bytes: int) -> None:
        os.set_blocking(fd, False)
        self.fd, self.kept, self.open = fd, Kept(max_bytes), True

    def read(self) -> bool:
        """Takes what is there, one chunk; False if there was nothing."""
        try:
            data = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.open = False
            return False
        self.kept.add(data)
        return True

    def drain(self) -> None:
        """Takes what is there, once its writer has ended. Others may go on writing: a bound."""
        most = self.kept.total + _DRAIN
        while self.open and self.kept.total < most and self.read():
            pass

    async def hold_back(self) -> None:
        await self.kept.hold_back(_CHUNK)


class Poller:
    """Waits for any of several descriptors in one wait of the event loop."""

    def __init__(self) -> None:
        self._epoll = select.epoll()

    def add(self, fd: int, events: int = select.EPOLLIN) -> None:
        self._epoll.register(fd, events)

    def remove(self, fd: int) -> None:
        with suppress(FileNotFoundError, OSError):
            self._epoll.unregister(fd)

    async def wait(self) -> list[int]:
        """The descriptors that are ready, or were closed at their other end."""
        await anyio.wait_readable(self._epoll.fileno())
        return [fd for fd, _ in self._epoll.poll(0)]

    def close(self) -> None:
        self._epoll.close()

    def __enter__(self) -> Poller:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
