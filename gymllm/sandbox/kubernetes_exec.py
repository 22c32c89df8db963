"""Programs in a pod: the exec subprotocols v5 and v4 of the API, over a WebSocket.

    binary message = channel byte + data      0 stdin, 1 stdout, 2 stderr, 3 status (JSON), 4 resize

The official client has an own reader of such streams, `kubernetes.stream`, on websocket-client. It blocks a
thread for each program, hundreds of them for hundreds of shells. So only the connecting is left to a thread:
address, certificates, token and proxy from the official client's configuration, the handshake from
websocket-client. From there the socket doesn't block and is read in the event loop, frame by frame; a shell
that stays costs one descriptor.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import cast
from urllib.parse import urlencode

import anyio
import anyio.lowlevel
import anyio.to_thread
from websocket import ABNF, WebSocket

from gymllm.errors import SandboxDiedError
from gymllm.sandbox.kubernetes_client import Api
from gymllm.sandbox.kubernetes_cluster import Cluster

_CHUNK = 1 << 16
_MOST_IN_A_FRAME = 1 << 15
_LARGEST_FRAME = 1 << 26
_STDIN, _STDOUT, _STDERR, _STATUS, _RESIZE = range(5)
_NOT_THERE = ("no such file", "not found")


async def start_program(
    cluster: Cluster, pod: str, argv: Sequence[str], *, tty: bool
) -> PodProcess:
    """Starts a program in a pod's container, attached.

    Raises:
        ApiError: The API said no, or could not be reached. Not repeated: nobody knows whether it started.
    """
    query = [("command", part) for part in argv]
    query += [("stdin", "true"), ("stdout", "true"), ("stderr", "false" if tty else "true")]
    query += [("tty", "true" if tty else "false")]
    path = f"/api/v1/namespaces/{cluster.namespace}/pods/{pod}/exec"
    connecting = _Connecting(cluster.api, f"{path}?{urlencode(query)}")
    try:
        # A thread that hangs in a connection is left to its timeout: nobody's cancellation waits for it.
        opened = await anyio.to_thread.run_sync(
            connecting.connect, abandon_on_cancel=True, limiter=cluster.connecting
        )
        return PodProcess(opened, pod)
    except BaseException:
        connecting.drop()
        raise


class _Connecting:
    """A connection that may be given up while it is being made."""

    def __init__(self, api: Api, path: str) -> None:
        self._api, self._path = api, path
        self._lock = threading.Lock()
        self._dropped = False
        self._made: WebSocket | None = None

    def connect(self) -> WebSocket:
        made = self._api.connect(self._path)
        with self._lock:
            self._made = made
            if self._dropped:
                made.shutdown()
        return made

    def drop(self) -> None:
        with self._lock:
            self._dropped = True
            if self._made is not None:
                self._made.shutdown()


class PodProcess:
    """A `ProcessStream` over a WebSocket."""

    def __init__(self, opened: WebSocket, pod: str) -> None:
        sock = cast("socket.socket", opened.sock)
        sock.setblocking(False)
        self._socket, self._pod = sock, pod
        self.protocol = str(opened.subprotocol or "")
        self._received = bytearray()
        self._fragments = bytearray()
        """Of a message whose last frame isn't there yet."""
        self._unsent = bytearray()
        """Whole frames, but for the first one's beginning: a send may have been cancelled in it."""
        self._ended = self._closed = False
        self._exit_code: int | None = None

    async def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            await self._send(_STDIN, view[:_MOST_IN_A_FRAME])
            view = view[_MOST_IN_A_FRAME:]

    async def resize(self, rows: int, columns: int) -> None:
        await self._send(_RESIZE, json.dumps({"Width": columns, "Height": rows}).encode())

    async def receive(self) -> tuple[int, bytes] | None:
        while not self._ended:
            message = self._message()
            if message is None:
                if not await self._read():
                    self._ended = True
            elif message:
                channel, data = message[0], bytes(message[1:])
                if channel == _STATUS:
                    # The last there is: outputs are closed before it is known.
                    self._ended = True
                    self._exit_code, complaint = _exit_code(data)
                    if complaint:
                        return 2, complaint
                elif channel in (_STDOUT, _STDERR) and data:
                    return channel, data
        return None

    async def exit_code(self) -> int | None:
        return self._exit_code

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = self._ended = True
        # Frees whoever waits on the socket: it must not be closed under them.
        anyio.notify_closing(self._socket)
        with suppress(OSError):  # a polite end, if it fits
            if not self._unsent:
                self._socket.send(_frame(struct.pack("!H", 1000), ABNF.OPCODE_CLOSE))
        self._socket.close()

    # Frames

    async def _send(self, channel: int, data: bytes | memoryview) -> None:
        await self._flush()
        self._unsent += _frame(bytes((channel,)) + data, ABNF.OPCODE_BINARY)
        await self._flush()

    async def _flush(self) -> None:
        await anyio.lowlevel.checkpoint()
        while self._unsent and not self._closed:
            try:
                sent = self._socket.send(self._unsent)
                del self._unsent[:sent]
            except (BlockingIOError, ssl.SSLWantWriteError):
                with suppress(anyio.ClosedResourceError):
                    await anyio.wait_writable(self._socket)
            except ssl.SSLWantReadError:
                await anyio.sleep(0.005)  # TLS has something to say first; `receive` reads it
            except OSError as error:
                raise SandboxDiedError(
                    f"The connection to pod {self._pod} broke: {error}."
                ) from None
        if self._closed or self._ended:
            raise SandboxDiedError(f"The program in pod {self._pod} has ended, or its connection.")

    async def _read(self) -> bool:
        """Takes more in; False at the end."""
        while not self._closed:
            try:
                data = self._socket.recv(_CHUNK)
            except (BlockingIOError, ssl.SSLWantReadError):
                try:
                    await anyio.wait_readable(self._socket)
                except anyio.ClosedResourceError:
                    return False
                continue
            except ssl.SSLWantWriteError:
                await anyio.sleep(0.005)
                continue
            except OSError:
                return False
            self._received += data
            return bool(data)
        return False

    def _message(self) -> bytes | None:
        """The next whole message, empty for what is none of a channel's; None if it isn't there yet."""
        received = self._received
        if len(received) < 2:
            return None
        size, start = received[1] & 0x7F, 2
        if size > 125:
            start = 4 if size == 126 else 10
            if len(received) < start:
                return None
            size = int.from_bytes(received[2:start])
        if received[1] & 0x80 or received[0] & 0x70 or size > _LARGEST_FRAME:
            self._ended = True  # masked, extended or endless: no server of this protocol
            return b""
        if len(received) < start + size:
            return None
        last, opcode = received[0] & 0x80, received[0] & 0x0F
        data = bytes(received[start : start + size])
        del received[: start + size]
        if opcode == ABNF.OPCODE_CLOSE:
            self._ended = True
        elif opcode == ABNF.OPCODE_PING:
            self._unsent += _frame(data, ABNF.OPCODE_PONG)
            with suppress(OSError):
                sent = self._socket.send(self._unsent)
                del self._unsent[:sent]
        elif opcode in (ABNF.OPCODE_TEXT, ABNF.OPCODE_BINARY, ABNF.OPCODE_CONT):
            self._fragments += data
            if last:
                message = bytes(self._fragments)
                self._fragments.clear()
                return message
        return b""


def _frame(data: bytes, opcode: int) -> bytes:
    return ABNF.create_frame(data, opcode).format()


def _exit_code(status: bytes) -> tuple[int | None, bytes]:
    """What the Status at a program's end says: its exit code, and a complaint if it never ran."""
    try:
        said = cast("dict[str, object]", json.loads(status))
    except ValueError:
        return None, b"%s\n" % status
    if said.get("status") == "Success":
        return 0, b""
    details = cast("dict[str, object]", said.get("details") or {})
    for cause in cast("list[dict[str, str]]", details.get("causes") or []):
        if cause.get("reason") == "ExitCode" and cause.get("message", "").isdigit():
            return int(cause["message"]), b""
    message = str(said.get("message") or said.get("reason") or "it could not be started")
    # The runtime's words for what a shell says with 127, and with 126.
    return 127 if any(word in message for word in _NOT_THERE) else 126, f"{message}\n".encode()
