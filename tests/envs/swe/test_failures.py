"""What breaks in the machine is never a reward: it raises, or is tried again, and nothing is left behind."""

# ruff: noqa: ASYNC240 - looking at the host takes no time

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import anyio
import pytest
import pytest_asyncio
from playing import SUBMIT, bash
from sample import MEND
from sandbox_helpers import cgroups_of, processes_with

import gymllm
from gymllm.errors import EnvError, SandboxDiedError, SandboxError
from gymllm.sandbox.local import LocalSandbox
from gymllm.sandbox.state import owner_name, state
from gymllm_envs.swe import grading
from gymllm_envs.swe.env import SWE
from gymllm_envs.swe.task import SweTask

pytestmark = pytest.mark.asyncio
_KINDS = ("noted", "layers", "graded")
"""What our folder holds of each sandbox, snapshot and grading."""


@pytest.fixture(autouse=True)
def nothing_left(task: SweTask) -> Iterator[None]:
    """Compares this process's traces on the host before and after."""

    def traces() -> tuple[int, list[Path], list[Path]]:
        return (
            len(os.listdir("/proc/self/fd")),
            cgroups_of(owner_name(os.getpid())),
            sorted(path for kind in _KINDS for path in state().folder.glob(f"{kind}/*")),
        )

    state()
    before = traces()
    yield
    assert traces() == before
    assert not processes_with(str(state().folder))


@pytest_asyncio.fixture
async def env(task: SweTask) -> AsyncGenerator[SWE]:
    env = SWE(tasks=[task])
    await env.areset(seed=0)
    yield env
    await env.aclose()


def sandbox_of(env: SWE) -> LocalSandbox:
    place = env._place
    assert place is not None
    assert isinstance(place.sandbox, LocalSandbox)
    return place.sandbox


def ours(word: str) -> list[int]:
    """Processes that this one has started, with this word in their command line."""
    return [pid for pid in processes_with(word) if os.getpid() in ancestors(pid)]


def ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return
        yield pid


async def appears(word: str) -> int:
    """Waits for a process with this word in its command line."""
    async with asyncio.timeout(10):
        while not (found := ours(word)):
            await anyio.lowlevel.checkpoint()
    return found[0]


async def ends(sandbox: LocalSandbox) -> None:
    """Kills a sandbox from the host, and waits for its end."""
    kill(sandbox.pid)
    async with asyncio.timeout(10):
        while sandbox.alive:
            await anyio.lowlevel.checkpoint()


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


async def test_killed_while_a_command_runs(env: SWE) -> None:
    step = asyncio.create_task(env.astep(bash("sleep 97.01")))
    await appears("97.01")
    kill(sandbox_of(env).pid)
    with pytest.raises(SandboxDiedError):
        await step


async def test_killed_before_a_submission(env: SWE) -> None:
    await env.astep(bash(MEND))
    await ends(sandbox_of(env))
    with pytest.raises(SandboxError):
        await env.astep(SUBMIT)


@pytest.mark.parametrize("what", ["grade/judge.py", "grade/worker.py"])
async def test_killed_once_while_grading_is_tried_again(env: SWE, what: str) -> None:
    await env.astep(bash(MEND))
    slow = "import time; open('/tmp/here', 'w').close(); time.sleep(0.3)"
    await env.astep(bash(f'echo "{slow}" >> src/sample/chunks.py'))
    step = asyncio.create_task(env.astep(SUBMIT))
    here = Path(f"/proc/{await appears('grade/worker.py')}/root/tmp/here")
    async with asyncio.timeout(10):  # pytest has started, and imports the graded code
        while not here.exists():
            await anyio.lowlevel.checkpoint()
    kill(ours(what)[0])
    _, reward, _, _, info = await step
    assert (reward, info["reason"]) == (1.0, "")


async def test_killed_before_pytest_is_there_raises(env: SWE) -> None:
    step = asyncio.create_task(env.astep(SUBMIT))
    kill(await appears("grade/worker.py"))
    with pytest.raises(SandboxError, match="pytest could not be started"):
        await step


async def test_killed_each_time_raises(env: SWE) -> None:
    await env.astep(bash(MEND))
    step = asyncio.create_task(env.astep(SUBMIT))
    while not step.done():
        for pid in ours("grade/judge.py"):
            kill(pid)
        await asyncio.sleep(0.01)
    with pytest.raises(SandboxError, match=r"can't be run here|could not be started"):
        await step


async def test_without_the_folder_of_pytest(
    env: SWE, sample_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "swe"
    folder.mkdir()
    for name in ("trees", "layers"):
        (folder / name).symlink_to(sample_cache / "swe" / name)
    monkeypatch.setenv("GYMLLM_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(EnvError, match="pip could not install"):
        await env.astep(SUBMIT)


async def test_a_layer_that_is_gone(
    env: SWE, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(grading, "INSIDE", "/proc/nowhere")  # bwrap can't mount there
    with pytest.raises(SandboxError):
        await env.astep(SUBMIT)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    options = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(tmp_path)]
    if subprocess.run(options, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    (tmp_path / "full").write_bytes(b"x" * 4096)
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("kind", ["layers", "graded"])
async def test_a_full_disk(
    env: SWE, monkeypatch: pytest.MonkeyPatch, full_disk: Path, kind: str
) -> None:
    await env.astep(bash(MEND))
    unique = type(state()).unique

    def elsewhere(self: object, wanted: str) -> Path:
        found = unique(state(), wanted)
        return full_disk / found.name if wanted == kind else found

    monkeypatch.setattr(type(state()), "unique", elsewhere)
    with pytest.raises(SandboxError, match="No space"):
        await env.astep(SUBMIT)
    assert os.listdir(full_disk) == ["full"]


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.08, 0.2, 0.4])
async def test_cancelled_while_grading(env: SWE, delay_s: float) -> None:
    with anyio.move_on_after(delay_s) as scope:
        await env.astep(SUBMIT)
    assert scope.cancelled_caught or delay_s > 0.1  # it may be done by then
    await env.aclose()


async def test_closed_while_a_command_runs(env: SWE) -> None:
    step = asyncio.create_task(env.astep(bash("sleep 97.03")))
    await appears("97.03")
    await env.aclose()
    with pytest.raises(SandboxError):
        await step
    assert not processes_with("97.03")


async def test_in_a_pool_the_episode_failed_and_the_next_is_sound(task: SweTask) -> None:
    made: list[SWE] = []

    def make() -> SWE:
        made.append(SWE(tasks=[task]))
        return made[-1]

    async with gymllm.EnvPool(make, 1) as pool, pool.lease() as env:
        await env.reset(seed=0)
        await ends(sandbox_of(made[0]))
        with pytest.raises(EnvError):
            await env.step(SUBMIT)
        await env.reset(seed=0)
        await env.step(bash(MEND))
        assert (await env.step(SUBMIT)).reward == 1.0
    assert len(made) == 2
