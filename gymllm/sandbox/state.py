"""What sandboxes need on the host, and how it goes away whatever happens to us.

Each process that makes sandboxes has a folder, named after its pid and its start time, below one that
belongs to the user. It notes there what must be undone. A process that is killed can't; the next one that
makes sandboxes finds the folder, sees that its owner is gone (a pid that was given to somebody else started
at another time), and kills, unmounts and removes what is noted.
"""

from __future__ import annotations

import atexit
import errno
import itertools
import os
import py_compile
import shutil
import signal
import stat
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from gymllm.errors import SandboxStartError
from gymllm.sandbox import supervisor
from gymllm.sandbox.seccomp import seccomp_filter

GROUPS = "gymllm-"
"""How the names of control groups begin; the owner's name and a number follow."""
_DYING_S = 0.2
_HOSTS = "127.0.0.1 localhost sandbox\n::1 localhost\n"
_ETC = {
    "passwd": "user:x:1000:1000:user:/home/user:/bin/bash\nnobody:x:65534:65534::/:/bin/false\n",
    "group": "user:x:1000:\nnogroup:x:65534:\n",
    "hosts": _HOSTS,
    "resolv.conf": "",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


class State:
    """The folder of this process."""

    def __init__(self, root: Path) -> None:
        self.pid = os.getpid()
        self.folder = root / owner_name(self.pid)
        self._numbers = itertools.count()
        self._group_parents: set[Path] = set()
        for name in ("mnt", "etc", "empty", "layers", "trees", "noted", "groups"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for name, text in _ETC.items():
            (self.folder / "etc" / name).write_text(text)
        self.supervisor = self.folder / "supervisor.pyc"
        py_compile.compile(supervisor.__file__, cfile=str(self.supervisor), doraise=True)
        self.filter: Path | None = None
        if (program := seccomp_filter()) is not None:
            self.filter = self.folder / "filter.bpf"
            self.filter.write_bytes(program)

    def unique(self, kind: str) -> Path:
        """A path that nobody else uses, not made yet."""
        return self.folder / kind / str(next(self._numbers))

    def note(self, pids: tuple[int, ...], cgroups: tuple[Path, ...]) -> Path:
        """Writes down what to undo; unlink the note once it is undone."""
        lines = [f"pid {owner_name(pid)}" for pid in pids if start_time(pid) is not None]
        lines += [f"cgroup {path}" for path in cgroups]
        note = self.unique("noted")
        note.write_text("\n".join(lines))
        return note

    def note_group(self, cgroup: Path) -> None:
        """Before it is made: we may be killed before anything else is noted. All beside it are ours, too."""
        if cgroup.parent not in self._group_parents:
            self._group_parents.add(cgroup.parent)
            self.unique("groups").write_text(f"cgroups {cgroup.parent}")

    def remove(self) -> None:
        if os.getpid() == self.pid and _undo_all(self.folder):  # not in a fork
            shutil.rmtree(self.folder, ignore_errors=True)


_states: dict[Path, State] = {}
_locks: dict[int, threading.Lock] = {}  # by pid: a fork waits for no thread of its parent's


def state() -> State:
    """This process's folder; made, and others' leavings cleared away, the first time."""
    root = Path(tempfile.gettempdir()) / f"gymllm-sandbox-{os.getuid()}"
    with _locks.setdefault(os.getpid(), threading.Lock()):  # two states would count alike
        known = _states.get(root)
        if known is None or known.pid != os.getpid():
            _make_private(root)
            reap(root)
            known = _states[root] = State(root)
            atexit.register(known.remove)
    return known


def _make_private(root: Path) -> None:
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise SandboxStartError(f"{root} must be a folder of our own with mode 700; remove it.")


def reap(root: Path) -> list[Path]:
    """Undoes what owners that are gone have left. Returns their folders, which are gone now, too."""
    gone: list[Path] = []
    for folder in root.iterdir():
        if not is_alive(folder.name) and _undo_all(folder):
            shutil.rmtree(folder, ignore_errors=True)
            gone.append(folder)
    return gone


def _undo_all(folder: Path) -> bool:
    """False: something there is still dying; the next one tries again."""
    ends = time.monotonic() + _DYING_S
    while True:
        notes = sorted((*folder.glob("noted/*"), *folder.glob("groups/*")))
        for note in notes:
            with suppress(OSError):
                if _undo(note.read_text(), f"{GROUPS}{folder.name}-"):
                    note.unlink()
        if not any(note.exists() for note in notes):
            return True
        if time.monotonic() > ends:
            return False
        time.sleep(0.002)


def _undo(noted: str, ours: str) -> bool:
    """Whether nothing is left of it; `ours` is how the owner's groups begin."""
    groups: list[Path] = []
    for line in noted.splitlines():
        kind, _, value = line.partition(" ")
        if kind == "pid" and is_alive(value):
            with suppress(OSError, ValueError):
                os.kill(int(value.partition("-")[0]), signal.SIGKILL)
        elif kind == "cgroup":
            groups.append(Path(value))
        elif kind == "cgroups":
            groups += Path(value).glob(f"{ours}*")
    removed = [_remove_group(group) for group in groups]  # all are tried
    return all(removed)


def _remove_group(group: Path) -> bool:
    with suppress(OSError):
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(OSError):
                os.kill(int(pid), signal.SIGKILL)
    try:
        group.rmdir()
    except OSError as problem:
        return problem.errno != errno.EBUSY
    return True


def owner_name(pid: int) -> str:
    """A process's name for all time: pids are given out again, at another time."""
    return f"{pid}-{start_time(pid)}"


def is_alive(name: str) -> bool:
    """Whether the process of this `owner_name` lives."""
    pid, _, started = name.partition("-")
    return pid.isdigit() and str(start_time(int(pid))) == started


def start_time(pid: int) -> int | None:
    """In clock ticks since boot; None if nobody, or only a zombie, has that pid."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
