"""Where a task is worked on: a sandbox with its tree, and what comes of it."""

from __future__ import annotations

import errno
import os
from typing import Protocol

import anyio
from anyio import to_thread
from anyio.lowlevel import RunVar

from gymllm.errors import ConfigError, SandboxFileError
from gymllm.sandbox import Sandbox, open_sandbox
from gymllm.sandbox.docker import DockerHost
from gymllm.sandbox.kubernetes import KubernetesHost
from gymllm_envs.swe.changes import Changes, read_changes
from gymllm_envs.swe.grading import Verdict, grade, test_files
from gymllm_envs.swe.task import SweTask
from gymllm_envs.swe.trees import TaskTree, prepare

_MOST_FILES_MB = 512
MAX_WRITTEN_BYTES = 64 << 20
"""Most that may have been written below the tree, what doesn't count included."""
_FAULTS_OF_THE_HOST = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    }
)
"""All others are what the agent can bring about."""

_grading: RunVar[anyio.CapacityLimiter] = RunVar("gymllm_swe_grading")


class Place(Protocol):
    """A task's sandbox."""

    @property
    def sandbox(self) -> Sandbox: ...

    async def submit(self) -> Verdict:
        """Takes what was changed, closes the sandbox, and has it graded.

        Raises:
            SandboxError: It could not be graded; that says nothing of what was changed.
        """
        ...

    async def aclose(self) -> None: ...


class SdistPlace:
    """A tree from a source distribution, in a local sandbox."""

    def __init__(self, task: SweTask, made: TaskTree, sandbox: Sandbox) -> None:
        self._task, self._made, self.sandbox = task, made, sandbox

    async def submit(self) -> Verdict:
        """See `Place`."""
        changes = await self._changes()
        await self.aclose()
        async with grading_limit():
            return await grade(self._task, changes)

    async def _changes(self) -> Changes:
        try:
            snapshot = await self.sandbox.snapshot(max_bytes=MAX_WRITTEN_BYTES)
        except SandboxFileError as problem:
            if problem.errno in _FAULTS_OF_THE_HOST or not await self._lives():
                raise
            if problem.errno == errno.EFBIG:
                why = f"more than {MAX_WRITTEN_BYTES >> 20} MB were written to the tree"
            else:  # unreadable, too deep, or changed by a process while it was copied
                why = f"the tree can't be read: {problem.strerror}"
            return Changes(refused=why)
        under = self._made.given
        hidden = frozenset(test_files(self._task))
        try:
            return await to_thread.run_sync(read_changes, snapshot.layers[-1], under, hidden)
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(snapshot.discard)

    async def _lives(self) -> bool:
        await anyio.sleep(0.1)  # what was killed ends within moments
        return self.sandbox.alive

    async def aclose(self) -> None:
        """Kills everything in the sandbox."""
        await self.sandbox.aclose()


def grading_limit() -> anyio.CapacityLimiter:
    """Gradings at once, two a core: more would run into their time limits together."""
    try:
        return _grading.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(2 * (os.cpu_count() or 1))
        _grading.set(limiter)
        return limiter


async def open_place(
    task: SweTask, kind: str | DockerHost | KubernetesHost, *, memory_mb: int
) -> Place:
    """Starts a task's sandbox.

    Args:
        task: What is worked on.
        kind: Of sandbox: "local" for source distributions; "docker", "kubernetes" or a host of those for
            images.
        memory_mb: Of the sandbox.

    Raises:
        ConfigError: Tasks of this sort need another kind of sandbox.
        SandboxError: It can't be started.
        EnvError: What it is made from can't be had.
    """
    if task.sdist:
        if kind != "local":
            raise ConfigError(
                f"task {task.id} is made from a source distribution, which needs kind='local', got {kind!r}."
            )
        made = await prepare(task)
        # What is written counts as memory: files alone must not bring the sandbox down.
        file_mb = min(_MOST_FILES_MB, memory_mb // 2)
        layers = (made.bug, made.hide, made.git)
        sandbox = await open_sandbox(made.spec(*layers, memory_mb=memory_mb, file_mb=file_mb))
        return SdistPlace(task, made, sandbox)
    if kind not in ("docker", "kubernetes") and isinstance(kind, str):
        raise ConfigError(
            f"task {task.id} needs the image {task.image!r}, so kind='docker' or 'kubernetes', got {kind!r}."
        )
    from gymllm_envs.swe.image_place import open_image_place  # it imports this module

    return await open_image_place(task, kind, memory_mb=memory_mb)
