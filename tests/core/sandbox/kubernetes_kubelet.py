"""A node for the tests: a pod is a bubblewrap tree, process 1 in it what the pod says."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gymllm.sandbox.launch import bwrap_path

_PATH = "/usr/local/bin:/usr/bin:/bin"
_ROOT = [
    *("--unshare-all", "--die-with-parent", "--as-pid-1", "--new-session", "--clearenv"),
    *("--cap-drop", "ALL"),
    *("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib"),
    *("--symlink", "usr/lib64", "/lib64", "--symlink", "usr/sbin", "/sbin"),
    *("--proc", "/proc", "--dev", "/dev", "--dir", "/tmp", "--dir", "/etc", "--dir", "/root"),
]


class Container:
    """The one container of a pod."""

    def __init__(self, command: Sequence[str], env: dict[str, str], workdir: str) -> None:
        self._env = {"PATH": _PATH, "HOME": "/root", "HOSTNAME": "pod"} | env
        self._workdir = workdir
        passwd, written = os.pipe()
        os.write(written, b"user:x:1000:1000:user:/home/user:/bin/sh\n")
        os.close(written)
        argv = [bwrap_path(), *_ROOT, "--file", str(passwd), "/etc/passwd", "--info-fd", "{info}"]
        argv += ["--dir", workdir, "--chdir", workdir]
        for name, value in self._env.items():
            argv += ["--setenv", name, value]
        reading, writing = os.pipe()
        argv = [str(writing) if word == "{info}" else word for word in argv]
        self.process = subprocess.Popen(
            [*argv, "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(writing, passwd),
        )
        os.close(writing)
        os.close(passwd)
        with open(reading) as info:
            said = info.read()
        self.pid = int(json.loads(said)["child-pid"]) if said else 0
        with suppress(OSError):  # it may have ended already
            while Path(f"/proc/{self.pid}/comm").read_text() == "bwrap\n":
                time.sleep(0.001)  # its root isn't there yet

    def running(self) -> bool:
        return self.process.poll() is None

    def complaint(self) -> str:
        assert self.process.stderr is not None
        with self.process.stderr:
            return self.process.stderr.read().decode(errors="replace").strip()

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.pid and self.running():
                os.kill(self.pid, number)

    async def end(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL, as a kubelet does; returns when all in it are dead."""
        self.signal(signal.SIGTERM)
        ends = asyncio.get_running_loop().time() + grace_s
        while self.running():
            if asyncio.get_running_loop().time() >= ends:
                self.signal(signal.SIGKILL)
            await asyncio.sleep(0.002)
        assert self.process.stderr is not None
        self.process.stderr.close()

    async def start(self, argv: Sequence[str], *, tty: bool) -> Program:
        """Runs a program in it."""
        enter = ["nsenter", "-t", str(self.pid), "--user", "--preserve-credentials"]
        enter += ["--pid", "--mount", "--net", "--ipc", "--uts", "--cgroup"]
        enter += [f"--wdns={self._workdir}", "--", "env", "-i"]
        enter += [f"{name}={value}" for name, value in self._env.items()]
        # As of a pod that drops all capabilities and gains none.
        enter += ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
        enter += ["setsid", "--wait", *(["--ctty"] if tty else [])]
        program = Program(tty)
        await program.start([*enter, *argv])
        return program


class Program:
    """A process beside a container's process 1."""

    def __init__(self, tty: bool) -> None:
        self._tty = tty
        self._terminal = -1

    async def start(self, argv: Sequence[str]) -> None:
        if not self._tty:
            self.process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                limit=1 << 17,
            )
            return
        self._terminal, theirs = os.openpty()
        self.process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        os.set_blocking(self._terminal, False)

    async def read(self, channel: int) -> bytes:
        """Empty at the end."""
        if not self._tty:
            stream = self.process.stdout if channel == 1 else self.process.stderr
            assert stream is not None
            return await stream.read(1 << 15)
        if channel == 2:
            return b""
        while True:
            try:
                return os.read(self._terminal, 1 << 15)
            except BlockingIOError:
                await _readable(self._terminal)
            except OSError:  # its last user is gone
                return b""

    async def write(self, data: bytes) -> None:
        if self._tty:
            with suppress(OSError):
                os.write(self._terminal, data)
            return
        assert self.process.stdin is not None
        with suppress(ConnectionError):
            self.process.stdin.write(data)
            await self.process.stdin.drain()

    def resize(self, size: dict[str, int]) -> None:
        fcntl.ioctl(
            self._terminal,
            termios.TIOCSWINSZ,
            struct.pack("HHHH", size["Height"], size["Width"], 0, 0),
        )

    def close_input(self) -> None:
        if not self._tty and self.process.stdin is not None:
            self.process.stdin.close()

    async def exit_code(self) -> int:
        code = await self.process.wait()
        if self._terminal >= 0:
            os.close(self._terminal)
            self._terminal = -1
        return code if code >= 0 else 128 - code


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)
