"""Environments in processes: whatever one does there fails its episode, with the cause, and nothing else."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import cloudpickle
import gymnasium
import numpy as np
import pytest

import gymllm
from gymllm.errors import EnvCrashedError, EnvTimeoutError, EnvTypeError, UnsendableError
from gymllm.spaces import Message
from gymllm.workers import StepResult
from gymllm.workers.process import MOST_MADE

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the processes can't import this file

pytestmark = pytest.mark.asyncio


class Misbehaving(gymllm.Env):
    """Does as the action says, and notes what happened in a file."""

    execution = "process"
    here = 0

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        return f"seed {seed}", {"pid": os.getpid()}

    async def astep(self, action: str) -> Any:
        answer = getattr(self, action.replace(" ", "_"), self.echo)()
        if isinstance(answer, tuple):
            return answer
        if action == "meet":
            await self.meet()
        if action == "wait for ever":
            await self.wait_and_note()
        return action, 0.0, False, False, {}

    async def meet(self) -> None:
        """Waits until another environment of this process is here too."""
        Misbehaving.here += 1
        while Misbehaving.here < 2:  # noqa: ASYNC110 - the class is all that they share
            await anyio.sleep(0.001)

    async def wait_and_note(self) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            self.note("cleaned up")

    def echo(self) -> None: ...

    def note(self, text: str) -> None:
        with self.notes.open("a") as file:
            file.write(f"{text}\n")

    def raise_something(self) -> None:
        raise KeyError("broken")

    def raise_what_cannot_be_pickled(self) -> None:
        class Local(Exception):
            lock = threading.Lock()

            def __reduce__(self) -> Any:
                raise TypeError("not me")

        raise Local("local")

    def answer_what_cannot_be_pickled(self) -> Any:
        return "text", 0.0, False, False, {"lock": threading.Lock()}

    def answer_bytes(self) -> Any:
        return b"text", 0.0, False, False, {}

    def exit(self) -> None:
        sys.stderr.write("last words\n")
        sys.stderr.flush()
        os._exit(3)

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def crash(self) -> None:
        ctypes.string_at(0)

    def blow_up(self) -> None:
        np.ones(1 << 30, np.uint8)

    def sleep(self) -> None:
        try:
            self.note("sleeping")
            time.sleep(60)
        finally:
            self.note("woken")

    def sleep_whatever_happens(self) -> None:
        while True:
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                self.note("not me")

    def start_others(self) -> None:
        """One child, one in a session of its own, and one that has lost its parent too."""
        sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
        for session in (False, True):
            self.note(str(subprocess.Popen(sleep, start_new_session=session).pid))
        daemon = (
            "import subprocess as s; "
            f"print(s.Popen({sleep!r}, start_new_session=True, stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
        )
        done = subprocess.run(
            [sys.executable, "-c", daemon], capture_output=True, check=True, text=True
        )
        self.note(done.stdout.strip())


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@asynccontextmanager
async def pool_of(
    tmp_path: Path,
    num_envs: int = 1,
    kind: Callable[[Path], gymllm.Env] = Misbehaving,
    **settings: Any,
) -> AsyncIterator[tuple[gymllm.EnvPool, Callable[[], list[str]]]]:
    """A pool of `Misbehaving` and its notes; the whole test within a limit."""
    notes = tmp_path / "notes"
    notes.touch()
    pool = gymllm.EnvPool(lambda: kind(notes), num_envs, worker="process", **settings)
    with anyio.fail_after(30):
        try:
            yield pool, lambda: notes.read_text().splitlines()
        finally:
            await pool.aclose()


@pytest.mark.parametrize(
    ("action", "error", "message", "same_process"),
    [
        ("raise something", EnvCrashedError, r"step: raised KeyError: 'broken' \(slot 0\)", False),
        ("raise what cannot be pickled", EnvCrashedError, r"step: raised Local: local", False),
        (
            "answer what cannot be pickled",
            EnvCrashedError,
            "can't leave its process: .*pickle",
            False,
        ),
        ("answer bytes", EnvTypeError, "the observation must be a str, got bytes", True),
        ("exit", EnvCrashedError, r"exited with status 3 .*\n.*printed:\nlast words", False),
        ("kill", EnvCrashedError, r"killed by SIGKILL \(out of memory\?\)", False),
        ("crash", EnvCrashedError, "killed by SIGSEGV", False),
        ("blow up", EnvCrashedError, "raised .*MemoryError", False),
    ],
)
async def test_a_fault_is_named_and_the_env_replaced(
    tmp_path: Path, action: str, error: type[Exception], message: str, same_process: bool
) -> None:
    limit = 600 << 20
    async with pool_of(tmp_path, memory_limit_bytes=limit) as (pool, _), pool.lease() as env:
        _, info = await env.reset(seed=1)
        with pytest.raises(error, match=message):
            await env.step(action)
        again, info_again = await env.reset(seed=2)
        assert again == "seed 2"
        assert (info_again["pid"] == info["pid"]) == same_process
        assert (pool.stats.built, pool.stats.rebuilt) == (2, 1)


class ReadsAnything(Misbehaving):
    """Its actions need not be texts."""

    def __init__(self, notes: Path) -> None:
        super().__init__(notes)
        self.action_space = gymnasium.spaces.Discrete(2)  # type: ignore[assignment]  # see above


class OnlyHere:
    """Can be pickled, and not be made of that again."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (threading.Lock(), r"\(of type lock\) to .*: TypeError: cannot pickle.*\(slot 0\)"),
        (OnlyHere(), r"\(of type OnlyHere\) to .*: ValueError: invalid"),
    ],
)
async def test_what_cant_be_sent_is_its_givers_mistake_and_the_env_lives_on(
    tmp_path: Path, value: Any, message: str
) -> None:
    async with pool_of(tmp_path, kind=ReadsAnything) as (pool, _), pool.lease() as env:
        _, info = await env.reset(seed=1)
        with pytest.raises(UnsendableError, match=f"step: can't send the action {message}"):
            await env.step(value)
        assert (await env.step("same episode")).observation == "same episode"
        with pytest.raises(UnsendableError, match=f"reset: can't send the option 'b' {message}"):
            await env.reset(options={"a": 1, "b": value})
        assert (await env.step("same episode")).observation == "same episode"
        assert (await env.reset(seed=2))[1]["pid"] == info["pid"]
        assert (pool.stats.built, pool.stats.crashes) == (1, 0)


async def test_what_cant_be_sent_cuts_off_no_other_call(tmp_path: Path) -> None:
    async with pool_of(tmp_path, 2, ReadsAnything) as (pool, _):
        await anyio.to_thread.run_sync(lambda: pool.reset(seed=1))
        with pytest.raises(UnsendableError, match=r"the action .*lock.*\(slot 1\)"):
            await anyio.to_thread.run_sync(lambda: pool.step(("fine", threading.Lock())))
        again = await anyio.to_thread.run_sync(lambda: pool.step(("fine", "too")))
        assert again[0] == ("fine", "too")
        assert pool.stats.built == 2


async def test_a_process_stays_for_some_environments_that_did_not_raise(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as (pool, _), pool.lease() as env:
        pids: list[Any] = []
        for _ in range(2 * MOST_MADE):
            pids.append((await env.reset())[1]["pid"])
            with pytest.raises(EnvTypeError):
                await env.step("answer bytes")
        assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [MOST_MADE] * 2
        assert not is_running(pids[0])


async def test_a_process_that_dies_while_it_is_idle_is_replaced(tmp_path: Path) -> None:
    before = descriptors()
    async with pool_of(tmp_path) as (pool, _):
        async with pool.lease() as env:
            pid: Any = (await env.reset())[1]["pid"]
            with pytest.raises(EnvTypeError):
                await env.step("answer bytes")
            os.kill(pid, signal.SIGKILL)
            while is_running(pid):  # noqa: ASYNC110
                await anyio.sleep(0.001)
            assert (await env.reset())[1]["pid"] != pid
        await pool.aclose()
    assert descriptors() == before


async def test_a_nursery_that_dies_is_replaced_and_leaves_nothing(tmp_path: Path) -> None:
    before = children(), descriptors()
    async with pool_of(tmp_path) as (pool, _):
        async with pool.lease() as env:
            await env.reset()
            (nursery,) = children() - before[0]
            os.kill(int(nursery), signal.SIGKILL)
            with pytest.raises(EnvCrashedError):
                await env.step("sleep")
            assert (await env.reset(seed=2))[0] == "seed 2"
        await pool.aclose()
    with anyio.fail_after(5):
        # What earlier tests left may go meanwhile; nothing new may stay.
        while children() - before[0] or descriptors() - before[1]:  # noqa: ASYNC110
            await anyio.sleep(0.001)


async def test_a_nursery_that_was_stopped_holds_no_close_up(tmp_path: Path) -> None:
    before = children()
    async with pool_of(tmp_path, 2) as (pool, _):
        async with pool.lease() as env:
            await env.reset()
        (nursery,) = children() - before
        os.kill(int(nursery), signal.SIGSTOP)
        began = time.monotonic()
        await pool.aclose()
        assert time.monotonic() - began < 1
        assert children() == before


async def test_a_forked_child_that_comes_back_answers_nothing(tmp_path: Path) -> None:
    class Forking(Misbehaving):
        def fork(self) -> Any:
            child = os.fork() == 0
            if not child:
                time.sleep(0.2)
            return ("child" if child else "parent"), 0.0, False, False, {}

    pool = gymllm.EnvPool(lambda: Forking(tmp_path / "notes"), 1, worker="process")
    async with pool.lease() as env:
        await env.reset()
        assert (await env.step("fork")).observation == "parent"
        assert (await env.step("fine")).observation == "fine"
    await pool.aclose()


async def test_what_was_raised_there_brings_its_traceback(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as (_, _), pool_of(tmp_path) as (pool, _), pool.lease() as env:
        await env.reset()
        with pytest.raises(EnvCrashedError) as caught:
            await env.step("raise something")
        assert "in raise_something" in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("action", "noted"),
    [
        ("sleep", ["sleeping", "woken"]),
        ("wait for ever", ["cleaned up"]),
        ("sleep whatever happens", ["not me"]),
    ],
)
async def test_a_hang_is_interrupted_else_killed_and_siblings_go_on(
    tmp_path: Path, action: str, noted: list[str]
) -> None:
    async with pool_of(tmp_path, 2, step_timeout_s=0.3) as (pool, notes):
        async with pool.lease() as env, pool.lease() as sibling:
            await env.reset()
            await sibling.reset()
            answered: list[StepResult] = []

            async def go_on() -> None:
                answered.extend([await sibling.step(str(number)) for number in range(50)])

            async with anyio.create_task_group() as group:
                group.start_soon(go_on)
                with pytest.raises(EnvTimeoutError, match=r"no answer within 0\.3 s"):
                    await env.step(action)
            assert [each.observation for each in answered] == [str(number) for number in range(50)]
            assert notes()[: len(noted)] == noted
            await env.reset()
        assert pool.stats.timeouts == 1


async def test_a_cancelled_step_reaches_the_environment(tmp_path: Path) -> None:
    async with pool_of(tmp_path) as (pool, notes), pool.lease() as env:
        await env.reset()
        with anyio.move_on_after(0.2):
            await env.step("sleep")
        assert notes() == ["sleeping", "woken"]
        assert pool.stats.cancelled == 1
        await env.reset()


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
@pytest.mark.parametrize("end", ["close", "kill"])
async def test_nothing_is_left_of_what_the_environment_started(tmp_path: Path, end: str) -> None:
    before = children(), descriptors(), set(threading.enumerate())
    async with pool_of(tmp_path) as (pool, notes):
        async with pool.lease() as env:
            _, info = await env.reset()
            await env.step("start others")
            started = [int(pid) for pid in notes()]
            assert len(started) == 3
            assert all(is_running(pid) for pid in started)
            if end == "kill":
                with pytest.raises(EnvCrashedError):
                    await env.step("kill")
        await pool.aclose()
        assert not any(is_running(pid) for pid in (info["pid"], *started))
    assert (children(), descriptors()) == before[:2]
    left = set(threading.enumerate()) - before[2]
    assert all("AnyIO worker" in thread.name for thread in left)  # anyio keeps its own


async def test_a_child_that_holds_the_socket_does_not_hide_a_death(tmp_path: Path) -> None:
    """A forked child keeps the descriptors open, so nothing is read of the end."""

    class Forking(Misbehaving):
        def fork_and_die(self) -> None:
            if os.fork():
                os._exit(5)
            time.sleep(60)

    notes = tmp_path / "notes"
    pool = gymllm.EnvPool(lambda: Forking(notes), 1, worker="process")
    with anyio.fail_after(20):
        async with pool.lease() as env:
            await env.reset()
            with pytest.raises(EnvCrashedError, match="exited with status 5"):
                await env.step("fork and die")
        await pool.aclose()


SCRIPT = """
import os, signal, sys, time, anyio, gymllm
class Mine(gymllm.Env):
    async def areset(self, *, seed=None, options=None):
        return "", {"pid": os.getpid()}
    async def astep(self, action):
        print(action, flush=True)
        import time
        time.sleep(60)
async def busy():
    import multiprocessing
    if len(sys.argv) > 1:  # a child of the pool's process that outlives it, and holds what it held
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3,))
    pool = gymllm.EnvPool(Mine, 1, worker="process")
    async with pool.lease() as env, anyio.create_task_group() as group:
        _, info = await env.reset()
        print(info["pid"], flush=True)
        group.start_soon(env.step, "x")
        await anyio.sleep(0.3)
        if len(sys.argv) > 1:
            child.start()
        os.kill(os.getpid(), signal.SIGKILL)
anyio.run(busy)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("arguments", [[], ["and a child"]])
async def test_processes_end_with_the_pools_even_in_mid_step(arguments: list[str]) -> None:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    with (tmp_file := tempfile.TemporaryFile()):  # not a pipe, which the child would hold open
        done = await anyio.run_process(command, check=False, stdout=tmp_file)
        tmp_file.seek(0)
        printed = tmp_file.read()
    assert done.returncode == -signal.SIGKILL
    pid = int(printed)
    with anyio.fail_after(5):
        while is_running(pid):  # noqa: ASYNC110 - another process' end has no event
            await anyio.sleep(0.005)


async def test_large_observations_come_whole_and_writable() -> None:
    class Pictures(gymllm.Env):
        waits = False

        def __init__(self) -> None:
            self.observation_space = Message()

        async def areset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> Any:
            image = self.np_random.integers(256, size=(600, 800, 3), dtype=np.uint8)
            parts = ({"type": "text", "text": "x" * 300_000}, {"type": "image", "image": image})
            return {"role": "user", "content": parts}, {}

        async def astep(self, action: str) -> Any:
            return "", 0.0, True, False, {"length": len(action)}

    here = Pictures().reset(seed=3)[0]
    pool = gymllm.EnvPool(Pictures, 1, worker="process")
    async with pool.lease() as env:
        there, _ = await env.reset(seed=3)
        assert there["content"][0] == here["content"][0]
        image = there["content"][1]["image"]
        np.testing.assert_array_equal(image, here["content"][1]["image"])
        image[:] = 0  # its own memory
        assert (await env.step("é" * 2_000_000)).info == {"length": 2_000_000}
    await pool.aclose()


async def test_shared_processes_wait_together_and_fall_together(tmp_path: Path) -> None:
    async with pool_of(tmp_path, 4, envs_per_process=2) as (pool, _), AsyncExitStack() as leases:
        envs = [await leases.enter_async_context(pool.lease()) for _ in range(4)]
        pids = [(await env.reset())[1]["pid"] for env in envs]
        assert sorted(pids.count(pid) for pid in set(pids)) == [2, 2]
        together = [env for env, pid in zip(envs, pids, strict=True) if pid == pids[0]]
        apart = [env for env, pid in zip(envs, pids, strict=True) if pid != pids[0]]
        async with anyio.create_task_group() as group:  # each waits until both do
            for env in together:
                group.start_soon(env.step, "meet")
        with pytest.raises(EnvCrashedError, match="killed by SIGKILL"):
            await together[0].step("kill")
        with pytest.raises(EnvCrashedError, match="killed by SIGKILL"):
            await together[1].step("fine")
        for env in apart:
            assert (await env.step("fine")).observation == "fine"
        for env in together:
            assert (await env.reset(seed=5))[0] == "seed 5"


async def test_a_cancelled_step_in_a_shared_process_is_cleaned_up_alone(tmp_path: Path) -> None:
    async with (
        pool_of(tmp_path, 2, envs_per_process=2, step_timeout_s=0.3) as (pool, notes),
        pool.lease() as env,
        pool.lease() as sibling,
    ):
        pids = [(await each.reset())[1]["pid"] for each in (env, sibling)]
        assert pids[0] == pids[1]
        with pytest.raises(EnvTimeoutError):
            await env.step("wait for ever")
        assert notes() == ["cleaned up"]
        assert (await sibling.step("fine")).observation == "fine"
        assert (await env.reset())[1]["pid"] == pids[0], "the process itself was well"


async def test_the_class_says_where_it_runs(tmp_path: Path) -> None:
    assert gymllm.EnvPool(Misbehaving, 1).worker == "process"  # type: ignore[arg-type]  # not made
    assert gymllm.EnvPool(Misbehaving, 1, worker="thread").worker == "thread"  # type: ignore[arg-type]
    assert gymllm.EnvPool("gymllm/FrozenLake-v0", 1).worker == "inline"


async def test_the_users_python_path_is_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool's own import path reaches the process, but not what the environment starts there."""

    class Path_(gymllm.Env):
        async def areset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[str, dict[str, Any]]:
            import only_here

            return only_here.NAME, {"path": os.environ.get("PYTHONPATH")}

        async def astep(self, action: str) -> Any: ...

    (tmp_path / "only_here.py").write_text("NAME = 'found'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for path in (None, "/somewhere"):
        if path:
            monkeypatch.setenv("PYTHONPATH", path)
        else:
            monkeypatch.delenv("PYTHONPATH", raising=False)
        pool = gymllm.EnvPool(Path_, 1, worker="process")
        async with pool.lease() as env:
            assert await env.reset() == ("found", {"path": path})
        await pool.aclose()


async def test_a_function_that_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()
    pool = gymllm.EnvPool(lambda: lock, 1, worker="process")  # type: ignore[arg-type,return-value]
    async with pool.lease() as env:
        with pytest.raises(EnvCrashedError, match=r"start: raised TypeError: cannot pickle"):
            await env.reset()
    await pool.aclose()


@pytest.mark.parametrize("per_process", [1, 2])
async def test_foreign_environments_run_there_too(per_process: int) -> None:
    alone = gymnasium.make("CartPole-v1")
    pool = gymllm.EnvPool(
        "CartPole-v1", 2, worker="process", text=False, envs_per_process=per_process
    )
    async with pool.lease() as env:
        observation, _ = await env.reset(seed=4)
        np.testing.assert_array_equal(observation, alone.reset(seed=4)[0])
        result, expected = await env.step(1), alone.step(1)
        np.testing.assert_array_equal(result.observation, expected[0])
        assert result.reward == expected[1]
    await pool.aclose()


DEAD_WITH_MESSAGES_UNREAD = """
import os, signal, time, anyio, gymllm
class Mine(gymllm.Env):
    async def areset(self, *, seed=None, options=None):
        return "", {"pid": os.getpid()}
    async def astep(self, action):
        return "", 0.0, False, False, {}
async def main():
    pool = gymllm.EnvPool(Mine, 2, worker="process")
    async with pool.lease() as env, pool.lease() as other:
        _, info = await env.reset()
        await other.reset()
        os.kill(info["pid"], signal.SIGKILL)
        time.sleep(0.2)  # the nursery says so, and this loop does not read it
        os.kill(os.getpid(), signal.SIGKILL)
anyio.run(main)
"""


async def test_a_nursery_ends_in_silence_where_its_messages_were_not_read() -> None:
    command = [sys.executable, "-c", DEAD_WITH_MESSAGES_UNREAD]
    with anyio.fail_after(20):  # to the end of stderr, which the nursery holds too
        done = await anyio.run_process(command, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stderr == b""
