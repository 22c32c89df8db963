"""A task's tree, made once in a process and then shared by its episodes.

local       a sandbox, the task's files and steps, a snapshot of the tree: a base for all others
containers  the task's image, or one built from its Dockerfile; files and steps on top, committed
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.util
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
from anyio import to_thread
from anyio.lowlevel import RunVar

from gymllm.errors import ConfigError, MissingExtraError, SandboxError
from gymllm.sandbox import Mount, Sandbox, SandboxSpec, Snapshot, check_kind, open_sandbox
from gymllm.sandbox.clip import clean, clip
from gymllm.sandbox.docker import DockerHost
from gymllm.sandbox.kubernetes import KubernetesHost
from gymllm_envs.terminal.dockerfile import interpret
from gymllm_envs.terminal.images import build_image
from gymllm_envs.terminal.task import CopyStep, RunStep, TerminalTask

Kind = str | DockerHost | KubernetesHost
"""Of sandbox, as `open_sandbox` takes it."""

LOGS = "/logs"
TESTS = "/tests"
_CONTEXT = "/mnt/context"
_PYTEST = "/opt/gymllm/pytest"
_PYTEST_PACKAGES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
# Under /logs, where checkers write. Links, for there are only a few places to write to.
_LOG_FOLDERS = ("verifier", "agent", "artifacts")
_LOG_TARGET = "/tmp/.logs"

_prepared: dict[tuple[int, str, str], Prepared] = {}
_locks: RunVar[dict[str, anyio.Lock]] = RunVar("gymllm_terminal_builds")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A task that is ready to be worked on."""

    task: TerminalTask
    """Its tree, directory and environment as they turned out."""
    spec: SandboxSpec
    """Of the agent's sandbox."""


def is_container(kind: Kind) -> bool:
    """Whether sandboxes of this kind have images.

    Raises:
        ConfigError: It has neither images nor a file system of its own.
        UnknownNameError: There is no such kind.
    """
    check_kind(kind)
    if kind in ("unshare", "unsafe-local"):
        raise ConfigError(
            f"terminal tasks need kind='local', 'docker' or 'kubernetes', got {kind!r}: their paths and "
            "tests need a file system of their own."
        )
    return not isinstance(kind, str) or kind in ("docker", "kubernetes")


def has_mounts(kind: Kind) -> bool:
    """Whether sandboxes of this kind can be shown folders of this machine."""
    if not is_container(kind):
        return True
    if kind == "docker":
        return not os.environ.get("DOCKER_HOST", "unix://").startswith("tcp://")
    return isinstance(kind, DockerHost) and kind.url[:4] in ("", "unix")


async def prepare(task: TerminalTask, kind: Kind) -> Prepared:
    """Makes a task's tree, unless it has been made.

    Raises:
        ConfigError: This kind of sandbox can't do what the task needs, or a step failed.
        SandboxError: A sandbox broke.
    """
    described = repr(task) + await to_thread.run_sync(_stamp, task)
    digest = hashlib.sha256(described.encode(errors="replace")).hexdigest()
    try:
        locks = _locks.get()
    except LookupError:
        locks = dict[str, anyio.Lock]()
        _locks.set(locks)
    key = (os.getpid(), repr(kind), digest)
    async with locks.setdefault(digest + repr(kind), anyio.Lock()):
        if key not in _prepared:
            made = await _make(task, kind)
            if task.needs_pytest:
                await _require_pytest(made, kind)
            _prepared[key] = made
        return _prepared[key]


def _stamp(task: TerminalTask) -> str:
    """Changes when a file does that the tree is made from."""
    if task.dockerfile is None:
        return ""
    found = sorted(task.dockerfile.parent.rglob("*"))
    stats = [(str(path), path.lstat()) for path in found]
    return repr([(path, stat.st_mtime_ns, stat.st_size, stat.st_mode) for path, stat in stats])


async def _make(task: TerminalTask, kind: Kind) -> Prepared:
    if is_container(kind):
        task = await _with_image(task, kind)
    elif task.dockerfile is not None:
        found = interpret(task.dockerfile)
        task = replace(
            task,
            tree=found.tree,
            workdir=found.workdir,
            env={**found.env, **task.env},
            steps=(*found.steps, *task.steps),
            notes=(*found.notes, *task.notes),
        )
    elif task.image:
        raise ConfigError(
            f"terminal task {task.id!r} needs the image {task.image!r}, so kind='docker' or 'kubernetes', "
            f"not {kind!r}."
        )
    spec = SandboxSpec(
        workdir=task.tree,
        image=task.image if is_container(kind) else "",
        env=task.env,
        memory_mb=task.memory_mb,
        cpus=task.cpus,
        # Files are kept in memory: filling the disk must not end the sandbox.
        file_mb=min(task.file_mb, max(task.memory_mb // 2, 1)),
    )
    if not task.files and not task.steps:
        return Prepared(task=task, spec=spec)
    contexts = _contexts(task)
    async with await open_sandbox(replace(spec, mounts=contexts), kind) as sandbox:
        for path, text in task.files.items():
            await sandbox.write(path, text.encode())
        with anyio.move_on_after(task.build_timeout_s) as limit:
            for step in task.steps:
                if isinstance(step, CopyStep):
                    await _copy(task, sandbox, step, contexts)
                else:
                    await _run(task, sandbox, step)
        if limit.cancelled_caught:
            raise ConfigError(
                f"terminal task {task.id!r}: its tree was not made within {task.build_timeout_s:g} s."
            )
        snapshot = await sandbox.snapshot()
    if snapshot.archive is not None:
        raise ConfigError(
            f"terminal task {task.id!r} has files or steps, which {kind!r} can't keep: put them "
            f"into its image."
        )
    if snapshot.image:
        atexit.register(_discard, snapshot)
        return Prepared(task=task, spec=replace(spec, image=snapshot.image))
    return Prepared(task=task, spec=replace(spec, base=snapshot.base, layers=snapshot.layers))


def _discard(snapshot: Snapshot) -> None:
    with suppress(SandboxError):  # the daemon may have ended before us
        snapshot.discard()


async def _with_image(task: TerminalTask, kind: Kind) -> TerminalTask:
    if task.image or task.dockerfile is None:
        if not task.image:
            raise ConfigError(f"terminal task {task.id!r} names no image, so kind='local'.")
        return task
    if kind != "docker" and not isinstance(kind, DockerHost):
        raise ConfigError(
            f"terminal task {task.id!r} has a Dockerfile and no image, so kind='docker', not {kind!r}."
        )
    url = kind.url if isinstance(kind, DockerHost) else ""
    image, workdir = await to_thread.run_sync(build_image, task, url, abandon_on_cancel=True)
    return replace(task, image=image, tree=workdir, workdir=workdir)


def _contexts(task: TerminalTask) -> tuple[Mount, ...]:
    """Where the steps' sources are seen while the tree is made."""
    folders = {source.parent for s in task.steps if isinstance(s, CopyStep) for source in s.sources}
    return tuple(
        Mount(source=folder, target=f"{_CONTEXT}/{number}")
        for number, folder in enumerate(sorted(folders))
    )


async def _require_pytest(prepared: Prepared, kind: Kind) -> None:
    """Before anybody works on it: a pytest that doesn't start later is the agent's fault."""
    mounts, env = pytest_mounts() if has_mounts(kind) else ((), {})
    async with await open_sandbox(replace(prepared.spec, mounts=mounts), kind) as sandbox:
        argv = ["python3", "-m", "pytest", "--version"]
        done = await sandbox.exec(argv, cwd="/", env=env)
    if done.exit_code != 0:
        said = clip(clean(bytes(done.stdout) + bytes(done.stderr)).strip(), 1000)
        raise ConfigError(
            f"terminal task {prepared.task.id!r} needs pytest, which does not start: {said}"
        )


async def _copy(
    task: TerminalTask, sandbox: Sandbox, step: CopyStep, contexts: tuple[Mount, ...]
) -> None:
    seen = {mount.source: mount.target for mount in contexts}
    for source in step.sources:
        inside = f"{seen[source.parent]}/{source.name}"
        if source.is_dir():
            script = 'mkdir -p "$2" && cp -a "$1/." "$2"'
        elif step.target.endswith("/"):
            script = 'mkdir -p "$2" && cp -a "$1" "$2"'
        else:
            script = 'mkdir -p "$(dirname "$2")" && cp -aT "$1" "$2"'
        argv = ["sh", "-c", script, "sh", inside, step.target]
        done = await sandbox.exec(argv, timeout_s=task.build_timeout_s)
        if done.exit_code != 0:
            raise _failed(task, step, bytes(done.stderr))


async def _run(task: TerminalTask, sandbox: Sandbox, step: RunStep) -> None:
    # The directory of a Dockerfile's line may be made by that line's WORKDIR, or lie outside of the tree.
    script = 'mkdir -p "$1" 2>/dev/null && cd "$1" || cd "$2"; eval "$3"'
    done = await sandbox.exec(
        ["bash", "-c", script, "bash", step.cwd, task.tree, step.command],
        env={**task.env, **step.env},
        timeout_s=task.build_timeout_s,
    )
    if done.exit_code != 0:
        raise _failed(task, step, bytes(done.stdout) + bytes(done.stderr))


def _failed(task: TerminalTask, step: CopyStep | RunStep, said: bytes) -> ConfigError:
    why = clip(clean(said).strip(), 500) or "it said nothing"
    return ConfigError(
        f"terminal task {task.id!r}: {step.line} failed: {why}. "
        'Local sandboxes have this machine\'s programs, no network and one folder to write to; kind="docker" '
        "builds images."
    )


# What is shown beside the tree


@functools.cache
def _own_folder(pid: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="gymllm-terminal-"))
    atexit.register(lambda: os.getpid() == pid and shutil.rmtree(folder, ignore_errors=True))
    return folder


def new_folder(name: str) -> Path:
    """An empty folder of the host, gone at our end at the latest."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_own_folder(os.getpid())))
    folder.chmod(0o755)  # a container's user may be another
    return folder


@functools.cache
def _log_links(pid: int) -> Path:
    folder = _own_folder(pid) / "logs"
    folder.mkdir()
    for name in _LOG_FOLDERS:
        (folder / name).symlink_to(f"{_LOG_TARGET}/{name}")
    return folder


def log_mount() -> Mount:
    """/logs, where there are mounts; `MAKE_LOGS` makes what it leads to."""
    return Mount(source=_log_links(os.getpid()), target=LOGS)


MAKE_LOGS = ("sh", "-c", f"rm -rf {_LOG_TARGET}; mkdir -p " + " ".join(
    f"{_LOG_TARGET}/{name}" for name in _LOG_FOLDERS
))  # fmt: skip


def pytest_mounts() -> tuple[tuple[Mount, ...], dict[str, str]]:
    """Our pytest, and the variables with which it is found.

    Raises:
        MissingExtraError: There is none.
    """
    mounts: list[Mount] = []
    for name in _PYTEST_PACKAGES:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            raise MissingExtraError(
                'This task\'s tests run with pytest: pip install "gymllm-envs[terminal]".'
            )
        source = Path(found.origin)
        source = source.parent if source.name == "__init__.py" else source
        mounts.append(Mount(source=source, target=f"{_PYTEST}/{source.name}"))
    return tuple(mounts), {"PYTHONPATH": _PYTEST}
