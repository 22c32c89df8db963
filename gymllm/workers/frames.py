"""Python objects through a stream socket: pickle protocol 5, large buffers beside the pickle.

A frame is a header, the lengths of its parts, the pickle and then each large buffer (an image, an array) as
it lies in memory: it is sent from where it is and received where it stays, so no second copy is made on
either side.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

_COUNT = struct.Struct("<I")
"""Parts of a frame: the pickle and its buffers."""
_PLAIN = struct.Struct("<IQ")
"""The header of a frame that is a pickle alone, as most are: 1 and its length."""
LARGE_BYTES = 32_768
"""Buffers from this size on travel beside the pickle."""
_CHUNK = 65_536
_MOST_PARTS_SENT = 512
"""Fewer than the operating system's limit of buffers in one call (1,024 on Linux)."""

NOTHING = object()
"""No frame has come whole yet."""


def encode(value: object) -> list[memoryview]:
    """A frame as the buffers to send, in order.

    Raises:
        Exception: Whatever pickling raised.
    """
    large: list[pickle.PickleBuffer] = []

    def in_band(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < LARGE_BYTES:
            return True
        large.append(buffer)
        return False

    body = pickle.dumps(value, protocol=5, buffer_callback=in_band)
    if not large:
        return [memoryview(_PLAIN.pack(1, len(body)) + body)]
    parts = [buffer.raw() for buffer in large]
    lengths = struct.pack(f"<{1 + len(parts)}Q", len(body), *(part.nbytes for part in parts))
    return [memoryview(_COUNT.pack(1 + len(parts)) + lengths + body), *parts]


def send(sock: socket.socket, parts: list[memoryview]) -> list[memoryview]:
    """Sends as much as the socket takes now; returns what is left.

    Raises:
        BlockingIOError: Nothing can be sent now.
        OSError: The other side is gone.
    """
    sent = sock.send(parts[0]) if len(parts) == 1 else sock.sendmsg(parts[:_MOST_PARTS_SENT])
    left: list[memoryview] = []
    for part in parts:
        if sent >= part.nbytes:
            sent -= part.nbytes
        else:
            left.append(part[sent:])
            sent = 0
    return left


class FrameReader:
    """Reads frames from a socket, blocking or not."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._chunk = memoryview(bytearray(_CHUNK))
        self._head = b""
        """What has come of the next frame's header, and perhaps more."""
        self._parts: Sequence[bytearray] = ()
        self._open: list[memoryview] = []
        """Where the rest of the current frame goes."""

    @property
    def holds_more(self) -> bool:
        """Whether something of the next frame was received with the last one."""
        return bool(self._head)

    def read(self) -> object:
        """The next frame's object; `NOTHING` where a socket that does not block has no whole one.

        Raises:
            EOFError: The other side has closed.
            OSError: The other side is gone.
            Exception: Whatever unpickling raised; the next frame can be read.
        """
        while True:
            if self._parts and not self._open:
                return self._take()
            try:
                if self._parts:
                    self._fill()
                elif not self._parse_head():
                    received = self._socket.recv_into(self._chunk)
                    if received == 0:
                        raise EOFError
                    if not self._head and self._is_plain(received):
                        return pickle.loads(self._chunk[_PLAIN.size : received])
                    self._head += self._chunk[:received]
            except BlockingIOError:
                return NOTHING

    def _is_plain(self, received: int) -> bool:
        """Whether what has just come is one whole frame without buffers."""
        if received < _PLAIN.size:
            return False
        count, length = _PLAIN.unpack_from(self._chunk)
        return count == 1 and received == _PLAIN.size + length

    def _parse_head(self) -> bool:
        head = self._head
        if len(head) < _COUNT.size:
            return False
        (count,) = _COUNT.unpack_from(head)
        start = _COUNT.size + 8 * count
        if len(head) < start:
            return False
        lengths = struct.unpack_from(f"<{count}Q", head, _COUNT.size)
        rest = memoryview(head)[start:]
        self._parts = [bytearray(length) for length in lengths]
        self._open = []
        for part in self._parts:
            taken = min(len(part), rest.nbytes)
            part[:taken] = rest[:taken]
            rest = rest[taken:]
            if taken < len(part):
                self._open.append(memoryview(part)[taken:])
        self._head = bytes(rest)
        return True

    def _fill(self) -> None:
        into = self._open[0]
        count = self._socket.recv_into(into)
        if count == 0:
            raise EOFError
        if count < into.nbytes:
            self._open[0] = into[count:]
        else:
            del self._open[0]

    def _take(self) -> Any:
        (body, *buffers), self._parts = self._parts, ()
        return pickle.loads(body, buffers=buffers)
