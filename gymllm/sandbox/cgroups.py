"""Memory, processes and CPU time bounded by the kernel's control groups, version 2 or 1, where we may."""

from __future__ import annotations

import errno
import itertools
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio

from gymllm.sandbox.interface import SandboxSpec
from gymllm.sandbox.state import GROUPS, State, owner_name

_PERIOD_US = 100_000
_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Cgroups:
    """The groups of one sandbox, and which limits they enforce ("memory", "pids", "cpu")."""

    folders: tuple[Path, ...] = ()
    version: int = 0
    enforced: frozenset[str] = frozenset()

    def enter(self, pid: int) -> None:
        """Puts a process, with what it will start, in."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    async def remove(self) -> None:
        """Removes them, once the last process is gone: it may take a moment. Kills who is still there."""
        for folder in self.folders:
            for turn in range(200):
                if turn:
                    kill_all(folder)
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    break
                except OSError as error:
                    if error.errno != errno.EBUSY:
                        break
                    await anyio.sleep(0.005)
                else:
                    break


def kill_all(folder: Path) -> None:
    """Kills every process of a group."""
    with suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)


def make_cgroups(spec: SandboxSpec, state: State) -> Cgroups:
    """Groups with the spec's limits; as many of them as this host lets us make, maybe none."""
    name = f"{GROUPS}{owner_name(os.getpid())}-{next(_numbers)}"
    memory = str(spec.memory_mb << 20)
    quota = str(int(spec.cpus * _PERIOD_US))
    unified, by_controller = _own_groups()
    if unified is not None and _may_delegate(unified):
        folder = unified / name
        settings = {
            "memory": (("memory.max", memory), ("memory.swap.max", "0")),
            "pids": (("pids.max", str(spec.pids)),),
            "cpu": (("cpu.max", f"{quota} {_PERIOD_US}"),),
        }
        enforced = _make(folder, settings, state)
        if enforced:
            return Cgroups(folders=(folder,), version=2, enforced=enforced)
    settings = {
        "memory": (("memory.limit_in_bytes", memory), ("memory.memsw.limit_in_bytes", memory)),
        "pids": (("pids.max", str(spec.pids)),),
        "cpu": (("cpu.cfs_period_us", str(_PERIOD_US)), ("cpu.cfs_quota_us", quota)),
    }
    folders: list[Path] = []
    enforced = frozenset[str]()
    for controller, values in settings.items():
        if (parent := by_controller.get(controller)) is not None:
            done = _make(parent / name, {controller: values}, state)
            if done:
                folders.append(parent / name)
                enforced |= done
    return Cgroups(folders=tuple(folders), version=1 if folders else 0, enforced=enforced)


def _make(
    folder: Path, settings: dict[str, tuple[tuple[str, str], ...]], state: State
) -> frozenset[str]:
    state.note_group(folder)
    try:
        folder.mkdir()
    except OSError:
        return frozenset()
    enforced: set[str] = set()
    for controller, values in settings.items():
        for number, (file, value) in enumerate(values):
            try:
                (folder / file).write_text(value)
            except OSError:
                if number == 0:
                    break
                continue  # no swap accounting: the first value is what counts
        else:
            enforced.add(controller)
    if not enforced or not os.access(folder / "cgroup.procs", os.W_OK):
        folder.rmdir()
        return frozenset()
    return frozenset(enforced)


def _own_groups() -> tuple[Path | None, dict[str, Path]]:
    """Our own group of version 2, if mounted, and of each version 1 controller."""
    mounted: dict[str, Path] = {}
    unified_at: Path | None = None
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None, {}
    for line in mounts:
        _, target, kind, options = line.split()[:4]
        if kind == "cgroup2":
            unified_at = Path(target)
        elif kind == "cgroup":
            mounted |= {option: Path(target) for option in options.split(",")}
    unified: Path | None = None
    by_controller: dict[str, Path] = {}
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            unified = unified_at / path.lstrip("/") if unified_at else None
        for controller in controllers.split(","):
            if controller in mounted:
                by_controller[controller] = mounted[controller] / path.lstrip("/")
    return unified, by_controller


def _may_delegate(group: Path) -> bool:
    """Whether groups below this one get the memory controller."""
    with suppress(OSError):
        if "memory" not in (group / "cgroup.controllers").read_text().split():
            return False
        control = group / "cgroup.subtree_control"
        if "memory" not in control.read_text().split():
            control.write_text("+memory +pids +cpu")
        return "memory" in control.read_text().split()
    return False
