"""The process that processes for environments are forked from.

Its argument is the control socket, its standard input the pickled function that makes environments.
It is started clean, imports what every environment needs, and does nothing else, so that a fork of it is as
clean, starts in milliseconds and shares its memory with its siblings. It owns what it forks: it says how
each process ended, and kills whatever that has started and left behind (orphans come to it, as it is their
subreaper), before it says so. It ends, and all its processes with it, when the pool closes the control
socket or dies.

Messages have one size. From the pool: b"f", number, memory limit in bytes or 0, with the descriptors of a
log and of a socket for each environment: fork. b"s", number, signal: send it to the process. b"k", number,
0: kill the process and all it has started. b"q": end. To the pool: b"e", number, exit status: it has ended.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MESSAGE = struct.Struct("<cIq")
"""Operation, number of the process, value."""
FORK, SIGNAL, KILL, QUIT, ENDED = b"f", b"s", b"k", b"q", b"e"
MOST_DESCRIPTORS = 250
"""In one message; the operating system takes a few more."""
_MOST_ROUNDS = 200
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class Nursery:
    """Forks on demand and looks after what it has forked."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._numbers: dict[int, int] = {}
        """Number of each living process, by pid."""
        self._pool: int | None = None
        if hasattr(os, "pidfd_open"):
            self._pool = os.pidfd_open(os.getppid())
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def run(self) -> Callable[[], None] | None:
        """Serves until the pool is gone; in a forked process, returns at once with what it is to do."""
        waiting = select.poll()
        waiting.register(self._control, select.POLLIN)
        waiting.register(self._woken, select.POLLIN)
        if self._pool is not None:
            waiting.register(self._pool, select.POLLIN)
        while True:
            for descriptor, _ in waiting.poll():
                if descriptor == self._pool:  # a child of the pool's may hold its end of the socket
                    self._end()
                    return None
                if descriptor == self._woken:
                    os.read(self._woken, 4096)
                    self._reap()
                    continue
                try:
                    message, descriptors, _, _ = socket.recv_fds(
                        self._control, MESSAGE.size, MOST_DESCRIPTORS + 1
                    )
                except ConnectionResetError:  # the pool's process died with messages unread
                    message, descriptors = b"", []
                operation, number, value = MESSAGE.unpack(message) if message else (QUIT, 0, 0)
                if operation == QUIT:
                    self._end()
                    return None
                if operation == FORK:
                    if (pid := os.fork()) == 0:
                        return self._in_fork(value, *descriptors)
                    self._numbers[pid] = number
                    for each in descriptors:
                        os.close(each)
                else:
                    self._signal(number, value if operation == SIGNAL else 0)

    def _in_fork(self, memory_limit_bytes: int, log: int, *sockets: int) -> Callable[[], None]:
        atexit._clear()  # pyright: ignore[reportPrivateUsage]  those are the nursery's own
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (self._control.detach(), self._woken, self._wake, self._pool):
            if descriptor is not None:
                os.close(descriptor)
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        from gymllm.workers.child import main

        return lambda: main(sockets, memory_limit_bytes)

    def _signal(self, number: int, signum: int) -> None:
        """Sends a signal to a process, or kills it with its group where the signal is 0."""
        for pid in [pid for pid, its in self._numbers.items() if its == number]:
            with suppress(ProcessLookupError):
                if signum:
                    os.kill(pid, signum)
                else:
                    os.killpg(pid, signal.SIGKILL)

    def _reap(self) -> None:
        ended: list[tuple[int, int]] = []
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                number = self._numbers.pop(pid, None)
                if number is not None:
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(pid, signal.SIGKILL)  # what else was in its group
                    ended.append((number, os.waitstatus_to_exitcode(status)))
        if ended:
            self._kill_orphans()
        for number, code in ended:
            with suppress(OSError):  # the pool is gone: the next message is its end
                self._control.sendall(MESSAGE.pack(ENDED, number, code))

    def _kill_orphans(self) -> None:
        """Kills what dead processes have left behind, and what that has started.

        First all are stopped, so that none starts another meanwhile.
        """
        for _ in range(_MOST_ROUNDS):
            orphans = _children() - self._numbers.keys()
            if not orphans:
                return
            for signum in (signal.SIGSTOP, signal.SIGKILL):
                for pid in orphans:
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signum)
            time.sleep(0.001)
            for pid in orphans:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _end(self) -> None:
        for pid in self._numbers:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self._numbers.clear()
        self._kill_orphans()


def _children() -> set[int]:
    """This process' children, where the operating system lists them (Linux)."""
    try:
        listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    except OSError:
        return set()
    return {int(pid) for pid in listed.split()}


_libc: ctypes.CDLL | None = ctypes.CDLL(None) if sys.platform == "linux" else None
"""Opened once, before anything is forked."""


def _prctl(option: int, value: int) -> None:
    if _libc is not None:  # pyright: ignore[reportUnnecessaryComparison]  on this platform
        _libc.prctl(option, value, 0, 0, 0)


def _import_what_makes_environments(pickled: bytes) -> None:
    """Loads the modules that the environments come from, which every process would otherwise do again.

    Nothing is made here. What goes wrong goes wrong again, and is told, where one is made.
    """
    with suppress(BaseException):
        made = pickle.loads(pickled)
        entry_point_of = importlib.import_module("gymllm.registration").entry_point_of
        if hasattr(made, "register"):
            made.register()
        entry_point_of(getattr(made, "make_env", made))


def main() -> None:
    """See the module's docstring."""
    # All that an environment's process needs and that is the same for all of them.
    importlib.import_module("gymllm.workers.child")
    _import_what_makes_environments(sys.stdin.buffer.read())
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    control = socket.socket(fileno=int(sys.argv[1]))
    original = os.environ.pop("GYMLLM_PYTHONPATH", None)
    if (
        original is None
    ):  # ours brought the pool's sys.path; the environments' children get the user's
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = original
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    gc.collect()
    gc.freeze()  # the collector would write into shared pages, which copies them
    job = Nursery(control).run()
    if job is not None:
        job()
