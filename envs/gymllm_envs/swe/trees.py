"""The trees of a task from a source distribution: what the agent is given, and what is graded.

    agent    released package / bug / hidden tests taken out / a git repository of one commit / what it writes
    graded   released package / bug / what the agent changed / test files with canaries

Each is an overlay; the layers of a task are made once and kept in the cache. The graded tree gets its tests
from the package as released, and nothing of the agent's but `Changes.files`.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio import to_thread

from gymllm.errors import EnvError
from gymllm.sandbox import Mount, SandboxSpec, open_sandbox
from gymllm.sandbox.layers import copy_layer
from gymllm_envs.swe.changes import Merged, write_layer
from gymllm_envs.swe.copies import folders_with_copies
from gymllm_envs.swe.making.cache import cache_folder
from gymllm_envs.swe.making.packages import Package, package_named
from gymllm_envs.swe.making.sdists import tree
from gymllm_envs.swe.making.site import site_folder
from gymllm_envs.swe.patching import PatchError, apply_patch
from gymllm_envs.swe.task import SweTask

WORKDIR = "/testbed"
SITE = "/opt/gymllm/site"
_LAYOUT = "1"
"""Of the layers in the cache; another one makes them anew."""

# One commit without a past, by nobody, at no time: there is nothing to be found in it but the tree.
_COMMIT = """set -e
git init -q -b main
git config user.name user
git config user.email user@localhost
git add -A -f
git commit -q -m "The tree as it is" --no-verify --allow-empty
rm -rf .git/hooks .git/logs .git/description
"""


@dataclass(frozen=True, kw_only=True)
class TaskTree:
    """Folders on the host that nobody writes to."""

    package: Package
    base: Path
    """The package as released: it has the solution."""
    bug: Path
    """A layer with the bug."""
    hide: Path
    """A layer without the tests that tell."""
    git: Path
    """A layer with a repository of the tree that the agent gets; empty without git."""
    site: Path
    """pytest, and what the tests import."""
    copies: tuple[str, ...] = ()
    """Folders of the system with copies of the package."""

    @property
    def given(self) -> Merged:
        """What the agent gets."""
        return Merged(self.base, (self.bug, self.hide))

    @property
    def faulty(self) -> Merged:
        """The whole package with the bug, all tests included."""
        return Merged(self.base, (self.bug,))

    def spec(
        self,
        *layers: Path,
        mounts: tuple[Mount, ...] = (),
        memory_mb: int = 2048,
        pids: int = 256,
        file_mb: int = 512,
    ) -> SandboxSpec:
        """A sandbox with the tree, pytest, and no installed package beside it.

        Args:
            layers: Over the released package.
            mounts: More of them.
            memory_mb: As in `SandboxSpec`.
            pids: As there.
            file_mb: As there.
        """
        path = [SITE, *(f"{WORKDIR}/{part}".rstrip("/") for part in self.python_path)]
        return SandboxSpec(
            base=self.base,
            layers=layers,
            mounts=(Mount(source=self.site, target=SITE), *mounts),
            hidden=(*system_folders_to_hide(), *self.copies),
            workdir=WORKDIR,
            env={
                "PYTHONPATH": ":".join(path),
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                "PYTEST_ADDOPTS": "-p no:cacheprovider",
                "PAGER": "cat",
                "GIT_PAGER": "cat",
            },
            memory_mb=memory_mb,
            pids=pids,
            file_mb=file_mb,
        )

    @property
    def python_path(self) -> tuple[str, ...]:
        """Where modules are looked for, from the tree's root."""
        return (self.package.source_root, "") if self.package.source_root else ("",)


async def prepare(task: SweTask) -> TaskTree:
    """Makes what a task needs, or finds it in the cache.

    Raises:
        UnknownNameError: The task's package is none that is known.
        EnvError: It can't be downloaded; or the task's patches don't fit it.
        SandboxError: A sandbox can't be started.
    """
    package = package_named(task.sdist.partition("==")[0])
    base = await to_thread.run_sync(tree, task.sdist)
    site = await to_thread.run_sync(site_folder, package.requirements)
    recipe = json.dumps([_LAYOUT, task.sdist, task.bug_patch, task.hide_patch])
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:24]
    folder = cache_folder() / "layers" / digest
    made = TaskTree(
        package=package,
        base=base,
        site=site,
        copies=await to_thread.run_sync(_copies_to_hide, package, base),
        **{name: folder / name for name in ("bug", "hide", "git")},
    )
    if not folder.is_dir():
        await _make_layers(task, made, folder)
    return made


async def _make_layers(task: SweTask, made: TaskTree, folder: Path) -> None:
    """Whole or not at all; of several who do it at once, one is kept."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        bug, hide = new / "bug", new / "hide"
        _write_patched(task, "bug_patch", Merged(made.base), bug)
        _write_patched(task, "hide_patch", Merged(made.base, (bug,)), hide)
        await _commit(made.spec(bug, hide), new / "git")
        await to_thread.run_sync(_put_in_place, new, folder)
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(lambda: shutil.rmtree(new, ignore_errors=True))


def _put_in_place(new: Path, folder: Path) -> None:
    new.chmod(0o755)
    try:
        new.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _write_patched(task: SweTask, which: str, under: Merged, layer: Path) -> None:
    try:
        files = apply_patch(getattr(task, which), under.text)
    except PatchError as problem:
        raise EnvError(
            f"The {which} of task {task.id} doesn't fit {task.sdist}: {problem} Make the tasks anew with "
            "gymllm-swe-tasks make."
        ) from problem
    write_layer({p: None if t is None else t.encode() for p, t in files.items()}, layer)


async def _commit(spec: SandboxSpec, layer: Path) -> None:
    if shutil.which("git", path="/usr/bin:/bin:/usr/local/bin") is None:
        await anyio.Path(layer).mkdir()
        return
    dates = {f"GIT_{who}_DATE": "2000-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")}
    async with await open_sandbox(spec) as sandbox:
        done = await sandbox.exec(["sh", "-c", _COMMIT], env=dates, timeout_s=120)
        if done.exit_code != 0:
            raise EnvError(
                f"git could not commit a task's tree: {bytes(done.stderr).decode()[-500:]}"
            )
        snapshot = await sandbox.snapshot()
        try:
            await to_thread.run_sync(copy_layer, snapshot.layers[-1], layer)
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(snapshot.discard)


def _copies_to_hide(package: Package, base: Path) -> tuple[str, ...]:
    roots = tuple(sorted({"/usr", os.path.realpath(sys.base_prefix)}))
    hidden = tuple(f"{folder}/" for folder in system_folders_to_hide())
    found = folders_with_copies(package, base, roots)
    return tuple(folder for folder in found if not f"{folder}/".startswith(hidden))


@functools.cache
def system_folders_to_hide() -> tuple[str, ...]:
    """Folders of the host in which installed copies of a task's package may lie, solution included."""
    roots = {"/usr", "/usr/local", os.path.realpath(sys.base_prefix), "/opt/gymllm/none"}
    found = {"/usr/share/python-wheels", "/usr/src", "/usr/share/doc"}
    for root in roots:
        found |= {f"{root}/pkgs", f"{root}/envs"} if os.path.isdir(f"{root}/conda-meta") else set()
        for lib in ("lib", "lib64", "local/lib"):
            for name in ("site-packages", "dist-packages", "ensurepip"):
                found |= set(glob.glob(f"{root}/{lib}/python*/{name}"))
    real = {os.path.realpath(path) for path in found if os.path.isdir(path)}
    return tuple(sorted(real))
