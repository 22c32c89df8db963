"""Ctrl-C that always ends: the first one asks, 5 seconds or the second one insist.

A training run asks its event loop to cancel, writes a checkpoint and closes what it holds. That
takes the main thread, which may sit in a compiler or a driver for longer than a person waits; so a
thread of our own watches for the signal and ends the process when the time is up.

`ends_on_interrupt` is that watch, around a whole command line. `Interrupt` is how a run inside it is
asked: by a flag and a cancelled scope instead of an exception out of nowhere.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

import anyio

EXIT_INTERRUPTED = 130
"""128 + SIGINT: what a shell expects of a program that Ctrl-C ended."""
GRACE_S = 5.0
"""From the first signal to the end, at most."""


@contextmanager
def ends_on_interrupt(
    grace_s: float = GRACE_S, *, exit_now: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Guards a block of the main thread: SIGINT and SIGTERM raise KeyboardInterrupt in it, once.

    SIGINT keeps Python's own handler, which asyncio replaces by one that cancels its main task;
    SIGTERM goes the same way. A second signal, or `grace_s` after the first, ends the process with
    exit code 130 whatever its threads are doing.

    Args:
        grace_s: Seconds from the first signal on.
        exit_now: Ends the process, given the reason; another one for tests.
    """
    exit_now = exit_now or _exit_now
    # The interpreter writes each signal's number to this socket at once, even while the main thread
    # is in C code and no Python handler can run.
    read_end, write_end = socket.socketpair()
    write_end.setblocking(False)
    previous_fd = signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
    previous_sigterm = signal.signal(signal.SIGTERM, _as_sigint)
    watcher = threading.Thread(
        target=_watch, args=(read_end, grace_s, exit_now), name="interrupt", daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_sigterm)
        signal.set_wakeup_fd(previous_fd)
        write_end.close()  # ends the watcher
        watcher.join()
        read_end.close()


class Interrupt:
    """A `with` block in which SIGINT asks and never raises; KeyboardInterrupt is raised at its end.

    Python's own handler raises wherever the main thread is: inside a weakref's callback the exception
    is lost, inside a `finally` it ends what was being closed. An error that leaves the block goes
    before the interrupt. Outside the main thread no signal is handled, and the block does nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        """Whether the signal came."""
        self.patience_s = 0.0
        """How long after the signal the scope is cancelled, for what is nearly done."""
        self._ask: Callable[[], object] | None = None
        self._handles = False

    def __enter__(self) -> Interrupt:
        self._handles = threading.current_thread() is threading.main_thread()
        if self._handles:
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._handles:
            signal.signal(signal.SIGINT, self._previous)
        if self.requested and error is None:
            raise KeyboardInterrupt

    @contextmanager
    def cancels(self, scope: anyio.CancelScope) -> Iterator[None]:
        """While this block runs on an asyncio loop, the signal cancels `scope`."""
        loop = asyncio.get_running_loop()

        def cancel() -> None:
            loop.call_later(self.patience_s, scope.cancel)

        self._ask = lambda: loop.call_soon_threadsafe(cancel)
        try:
            if self.requested:
                cancel()
            yield
        finally:
            self._ask = None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True
        if self._ask is not None:
            self._ask()


def flush_and_exit(code: int) -> None:
    """Ends the process now, without waiting for threads, with the terminal left as it was."""
    try:
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h")  # a live display hides the cursor
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _as_sigint(signum: int, frame: FrameType | None) -> None:
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):
        handler(signum, frame)
    else:
        raise KeyboardInterrupt


def _watch(read_end: socket.socket, grace_s: float, exit_now: Callable[[str], None]) -> None:
    if not _wait_for_signal(read_end):
        return
    read_end.settimeout(grace_s)
    try:
        if _wait_for_signal(read_end):
            exit_now("interrupted again: leaving at once; what was not saved yet is lost")
    except TimeoutError:
        exit_now(f"could not close within {grace_s:.0f} s: leaving; what was not saved yet is lost")


def _wait_for_signal(read_end: socket.socket) -> bool:
    """Whether a SIGINT or SIGTERM came; False when the other end was closed."""
    while data := read_end.recv(1):
        if data[0] in (signal.SIGINT, signal.SIGTERM):
            return True
    return False


def _exit_now(reason: str) -> None:
    # os.write: the main thread may hold the lock of sys.stderr.
    os.write(2, f"\ngymllm: {reason}.\n".encode())
    if os.isatty(1):
        os.write(1, b"\x1b[?25h")
    os._exit(EXIT_INTERRUPTED)
