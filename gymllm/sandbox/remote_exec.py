"""Running one command in a container to its end, and ending what runs there."""

from __future__ import annotations

import errno
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from gymllm.errors import SandboxDiedError, SandboxError
from gymllm.sandbox.output import Kept
from gymllm.sandbox.remote_marks import Marks, Sink
from gymllm.sandbox.remote_marks import number as read_number
from gymllm.sandbox.remote_programs import KEEPER, LISTEN, RETIRE, told

if TYPE_CHECKING:
    from gymllm.sandbox.remote import Container, ProcessStream

LISTENING = ("sh", "-c", LISTEN)
END_TIMEOUT_S = 2.0
_ANSWER_TIMEOUT_S = 10.0
_MOST_IDLE = 4
_LONGEST_START = 1 << 16
_FULL = "resource temporarily unavailable"
_PIECE = 1 << 18
_SENT_AT_ONCE = 1 << 15
"""So little fits into what lies between, whether or not it is read."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How a program ended."""

    status: int | None
    """As in a shell; None after a timeout."""
    timed_out: bool

    @property
    def exit_code(self) -> int | None:
        return exit_code(self.status)

    @property
    def signal(self) -> int | None:
        return ending_signal(self.status)


def exit_code(status: int | None) -> int | None:
    """Without what a shell says for signals."""
    return None if ending_signal(status) else status


def ending_signal(status: int | None) -> int | None:
    """A program that ends itself with 128 and more can't be told from one that a signal has ended."""
    return status - 128 if status is not None and 128 < status <= 128 + 64 else None


class Keeper:
    """A sh that stays in the container to end others: it needs no new process for that."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._stream: ProcessStream | None = None
        self._lock = anyio.Lock()
        self._said = b""
        self.facts: frozenset[str] = frozenset()
        """"leader" if programs lead a session of their own; which of bash, setsid and tar there are."""

    async def start(self) -> None:
        """Also the proof that programs can be run.

        Raises:
            SandboxError: They can't; what the container said.
        """
        word = secrets.token_hex(8).encode()
        stream = await self._container.open(LISTENING)
        self._said = b""
        try:
            with anyio.move_on_after(_ANSWER_TIMEOUT_S):
                await stream.send(told(word, KEEPER.encode()))
                said = b""
                # Bounded: who has killed the last one may write to this one's output.
                while len(said) < _LONGEST_START and (got := await stream.receive()) is not None:
                    said += got[1]
                    first, newline, _ = said.partition(b"\n")
                    if newline and first.startswith(word):
                        self.facts = frozenset(first.decode(errors="replace").split()[1:])
                        self._stream = stream
                        return
                why = said.decode(errors="replace").strip()[-500:] or "it said nothing"
                raise SandboxError(f"{self._container.name}: no sh could be run in it: {why}.")
            raise SandboxError(
                f"{self._container.name}: sh did not answer within {_ANSWER_TIMEOUT_S} s."
            )
        finally:
            if self._stream is not stream:
                with anyio.CancelScope(shield=True):
                    await stream.aclose()

    async def tell(self, how: str, pid: int, keep: bytes = b"") -> None:
        """Has it end something and waits until it has. Started again if it was killed itself.

        Raises:
            SandboxError: It can't be started again, or the container is gone.
        """
        async with self._lock:
            for _ in range(2):
                if self._stream is None:
                    await self.start()
                if await self._ask(how, pid, keep):
                    return
                stream, self._stream = self._stream, None
                if stream is not None:
                    await stream.aclose()
        raise SandboxError(f"{self._container.name}: nothing can be ended in it.")

    async def _ask(self, how: str, pid: int, keep: bytes) -> bool:
        stream = self._stream
        assert stream is not None
        answer = secrets.token_hex(8).encode()
        try:
            await stream.send(b"%s %s %d %s\n" % (answer, how.encode(), pid, keep))
        except SandboxDiedError:
            return False
        while (got := await stream.receive()) is not None:
            self._said = (self._said + got[1])[-4096:]
            if answer in self._said:
                return True
        return False

    async def aclose(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.aclose()


class Runners:
    """Streams whose sh waits for its next command: to start another takes a daemon some 50 ms."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._idle: list[ProcessStream] = []

    async def take(self) -> tuple[ProcessStream, bool]:
        """One that listens, and whether it has waited: then it may have been killed meanwhile."""
        if self._idle:
            return self._idle.pop(), True
        return await self._container.open(LISTENING), False

    async def give_back(self, stream: ProcessStream) -> None:
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(stream)
            return
        with suppress(SandboxDiedError):
            await stream.send(RETIRE)
        await stream.aclose()

    async def aclose(self) -> None:
        """With the container, which ends them."""
        while self._idle:
            await self._idle.pop().aclose()


class Command:
    """One command: sent, followed, and killed if it is late or nobody waits for it any more."""

    def __init__(
        self, container: Container, keeper: Keeper, runners: Runners, stdout: Sink, stderr: Sink
    ) -> None:
        self._container, self._keeper, self._runners = container, keeper, runners
        self._sinks = {1: stdout, 2: stderr}
        self._marks = {1: Marks(), 2: Marks()}
        self._ended: set[int] = set()
        self._pids: list[int] = []
        """Of the sh around it; then, if it has a session of its own, of that."""
        self._status: int | None = None
        self._left = False
        self._word = self._marks[1].new_word()
        self._marks[2].expect(self._word)
        self.pid_word = self._marks[2].new_word()
        """For the command to say the pid of its session behind."""

    async def run(
        self, program: Callable[[int], bytes], input: bytes | Path, timeout_s: float, *, stay: bool
    ) -> Ran:
        """Runs what `remote_programs.command` gives for so many bytes of input.

        Args:
            program: Gives the text for a size of the input.
            input: Its standard input.
            timeout_s: Counted from when it is sent.
            stay: What `command` was told.

        Raises:
            SandboxDiedError: The container is gone.
        """
        size = _size(input)
        text = told(self._word, program(size))
        while True:
            try:
                stream, waited = await self._runners.take()
            except SandboxError as problem:
                if _FULL not in str(problem).lower():
                    raise
                return Ran(status=self._no_process(), timed_out=False)
            given_back = False
            try:
                with anyio.move_on_after(timeout_s) as limit:
                    await self._follow(stream, text, input, size)
                if limit.cancelled_caught:
                    await self._kill(stream)
                    with anyio.move_on_after(END_TIMEOUT_S):
                        await self._until_end(stream)
                elif waited and not self._pids:
                    continue  # killed before; nothing has begun
                for number, marks in self._marks.items():
                    marks.flush(self._sinks[number])
                if limit.cancelled_caught:
                    return Ran(status=None, timed_out=True)
                status = await self._how_it_ended(stream)
                if stay and len(self._ended) == 2 and not self._left:
                    given_back = True
                    await self._runners.give_back(stream)
                return Ran(status=status, timed_out=False)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await self._kill(stream)
                raise
            finally:
                if not given_back:
                    with anyio.CancelScope(shield=True):
                        if stay and len(self._ended) == 2:
                            with suppress(SandboxDiedError):
                                await stream.send(RETIRE)
                        await stream.aclose()

    async def _follow(
        self, stream: ProcessStream, first: bytes, input: bytes | Path, size: int
    ) -> None:
        async def send() -> None:
            try:
                await stream.send(first)
                if size:
                    async with aclosing(_pieces(input)) as pieces:
                        async for piece in pieces:
                            await stream.send(piece)
            except SandboxDiedError:
                pass  # whoever receives hears of it

        if len(first) + size <= _SENT_AT_ONCE and isinstance(input, bytes):
            with suppress(SandboxDiedError):
                await stream.send(first + input)
            await self._until_end(stream)
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, name="input of a command in a container")
            await self._until_end(stream)
            tasks.cancel_scope.cancel()  # what the program hasn't read

    async def _until_end(self, stream: ProcessStream) -> None:
        while len(self._ended) < 2:
            got = await stream.receive()
            if got is None:
                return
            number, data = got
            sink = self._sinks[number]
            for word, text in self._marks[number].take(data, sink):
                self._hear(number, word, text)
            if isinstance(sink, Kept):
                await sink.hold_back(len(data))

    def _hear(self, number: int, word: bytes, text: bytes) -> None:
        if word == self.pid_word or (number == 2 and not self._pids):
            if (pid := read_number(text)) is not None:
                self._pids.append(pid)
        else:
            status, _, left = text.partition(b" ")
            if (said := read_number(status)) is not None:
                self._status, self._left = said, bool(left.strip())
                self._ended.add(number)

    async def _kill(self, stream: ProcessStream) -> None:
        """Its session and all that descends from it, and the sh around it."""
        if len(self._ended) == 2:
            return
        with anyio.CancelScope(shield=True), anyio.move_on_after(END_TIMEOUT_S):
            while not self._pids:  # cancelled before it could begin
                got = await stream.receive()
                if got is None:
                    return
                for word, text in self._marks[got[0]].take(got[1], self._sinks[got[0]]):
                    self._hear(got[0], word, text)
            with suppress(SandboxError):  # then nothing runs there
                for pid in reversed(self._pids):
                    await self._keeper.tell("session", pid)

    def _no_process(self) -> int:
        """As the local sandbox says it: commands that fill the sandbox are no fault of ours."""
        self._sinks[2].add(b"sandbox: no process could be started\n")
        return 126

    async def _how_it_ended(self, stream: ProcessStream) -> int | None:
        if len(self._ended) == 2:
            return self._status
        # The sh around it was killed, by itself or for want of memory, or all of the container was.
        if not await self._container.alive():
            raise SandboxDiedError("The sandbox died while a command ran in it.")
        await self._kill(stream)
        status = await stream.exit_code()
        if status is not None and (not self._pids or status <= 128):
            return self._no_process()  # no signal has ended it: a sh that can't fork gives up
        if status is None:
            raise SandboxError(
                f"{self._container.name}: the connection to a command broke; nobody knows how it ended."
            )
        return status


def _size(input: bytes | Path) -> int:
    return len(input) if isinstance(input, bytes) else input.stat().st_size


async def _pieces(input: bytes | Path) -> AsyncGenerator[bytes]:
    if isinstance(input, bytes):
        for start in range(0, len(input), _PIECE):
            yield input[start : start + _PIECE]
        return
    async with await anyio.open_file(input, "rb") as file:
        while piece := await file.read(_PIECE):
            yield piece


class FileSink:
    """Output that is written to a file of the host, up to a size."""

    def __init__(self, path: Path, max_bytes: int | None) -> None:
        self._file = path.open("xb")
        self._left = max_bytes
        self.problem: OSError | None = None

    def add(self, data: bytes) -> None:
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                self.problem = OSError(errno.EFBIG, "larger than max_bytes")
        if self.problem is None:
            try:
                self._file.write(data)
            except OSError as problem:
                self.problem = problem

    def close(self) -> None:
        self._file.close()
