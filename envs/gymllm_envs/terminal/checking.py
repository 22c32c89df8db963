"""The reward of what an agent has left: a checker that runs in a fresh sandbox, on the tree alone.

    agent's sandbox: all killed, the tree copied, the sandbox gone
      └─ task.run, if any: a sandbox of its own, in which what the agent has made may run
           └─ the checker: a sandbox of its own, tests at /tests, nothing of the agent's running

Nothing of the agent's home, shell, environment or processes gets there, only its tree. Tasks about processes
are checked in place, and say so. What breaks here raises; a checker that fails or hangs is a reward of 0.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import anyio
from anyio import to_thread
from anyio.lowlevel import RunVar

from gymllm.errors import EnvError, SandboxError, SandboxFileError
from gymllm.sandbox import ExecResult, Mount, Sandbox, SandboxSpec, Snapshot, open_sandbox
from gymllm.sandbox.clip import clean, clip
from gymllm_envs.terminal.building import (
    LOGS,
    MAKE_LOGS,
    TESTS,
    Kind,
    Prepared,
    has_mounts,
    log_mount,
    pytest_mounts,
)
from gymllm_envs.terminal.task import TerminalTask

LONGEST_OUTPUT = 4_000
_SCRIPT = (
    *("bash", "--noprofile", "--norc", "-c"),
    # The agent may have taken the directory away: that is its fault, and no reason not to check.
    'cd -- "$1" 2>/dev/null || cd -- "$2" 2>/dev/null; eval "$3"',
    "bash",
)
# A link in the tree to what only the checker has would be compared with itself.
_FIND_LINKS = (
    'find "$1" -type l -print0 | xargs -0 -r -n 500 readlink -f -- '
    "| grep -E '^(/tests|/logs|/proc|/tmp/\\.logs)(/|$)' | head -n 3; exit 0"
)
_MOST_REWARD_BYTES = 64 * 1024
_RUN_OUTPUT = "/tmp/run.out"
_KILL_TRIES = 20
_COUNTS = re.compile(
    rb'<testsuite\b[^>]*?\berrors="(\d+)" failures="(\d+)" skipped="(\d+)" tests="(\d+)"'
)

_checking: RunVar[anyio.CapacityLimiter] = RunVar("gymllm_terminal_checks")


@dataclass(frozen=True, kw_only=True)
class Check:
    """What a checker found."""

    reward: float
    """Within 0 and 1."""
    reason: str
    """In words."""
    exit_code: int | None = None
    output: str = ""
    """What the checker said; it may tell what the tests look for."""
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    """Those that the checker gave names."""
    in_place: bool = False


async def kill_all(sandbox: Sandbox) -> None:
    """Kills everything that was started in a sandbox, at once; it lives on."""
    for _ in range(_KILL_TRIES):
        done = await sandbox.exec(["sh", "-c", "kill -9 -1; exit 0"], cwd="/", timeout_s=5)
        # 126: no process is free. The signal goes to all in one call, so no bomb outruns it.
        if done.exit_code != 126:
            return
        await anyio.sleep(0.01)


async def check(prepared: Prepared, sandbox: Sandbox, kind: Kind, live_tests: Path | None) -> Check:
    """Says what an episode was worth, and closes its sandbox.

    Args:
        prepared: The task.
        sandbox: The agent's.
        kind: Of sandbox.
        live_tests: The folder that is /tests in the agent's sandbox, for checks in place.

    Raises:
        SandboxError: A sandbox broke.
        EnvError: The checker is at fault.
    """
    try:
        if prepared.task.check_in_place:
            if prepared.task.tests is not None and live_tests is not None:
                copy = functools.partial(shutil.copytree, dirs_exist_ok=True)
                await to_thread.run_sync(copy, prepared.task.tests, live_tests)
            async with _limit():
                return replace(await _judge(prepared, sandbox, kind), in_place=True)
        await kill_all(sandbox)
        try:
            snapshot = await sandbox.snapshot()
        except SandboxFileError as problem:
            if problem.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            return Check(reward=0.0, reason=f"the tree can't be copied: {problem.strerror}")
    finally:
        with anyio.CancelScope(shield=True):
            await sandbox.aclose()
    snapshots = [snapshot]
    try:
        async with _limit():
            return await _check_apart(prepared, kind, snapshots)
    finally:
        with anyio.CancelScope(shield=True):
            for made in reversed(snapshots):
                await to_thread.run_sync(made.discard)


def mounts_of(prepared: Prepared, kind: Kind) -> tuple[tuple[Mount, ...], dict[str, str]]:
    """What a sandbox that is checked in needs to be shown, tests not included."""
    if not has_mounts(kind):
        return (), {}
    mounts, env = pytest_mounts() if prepared.task.needs_pytest else ((), {})
    return (log_mount(), *mounts), env


def _limit() -> anyio.CapacityLimiter:
    """Checks at once, two a core: more would run into their time limits together."""
    try:
        return _checking.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(2 * (os.cpu_count() or 1))
        _checking.set(limiter)
        return limiter


async def _check_apart(prepared: Prepared, kind: Kind, snapshots: list[Snapshot]) -> Check:
    ran: ExecResult | None = None
    task = prepared.task
    if task.run:
        async with await _open(prepared.spec, snapshots[-1], kind) as runner:
            ran = await runner.exec(
                _script(task, task.run), cwd="/", timeout_s=task.check_timeout_s
            )
            await kill_all(runner)
            snapshots.append(await runner.snapshot())
    mounts, _ = mounts_of(prepared, kind)
    if task.tests is not None and has_mounts(kind):
        mounts += (Mount(source=task.tests, target=TESTS),)
    spec = replace(prepared.spec, mounts=mounts)
    async with await _open(spec, snapshots[-1], kind) as fresh:
        return await _judge(prepared, fresh, kind, ran)


async def _open(spec: SandboxSpec, snapshot: Snapshot, kind: Kind) -> Sandbox:
    if snapshot.image:
        return await open_sandbox(replace(spec, image=snapshot.image), kind)
    if snapshot.archive is None:
        return await open_sandbox(replace(spec, base=snapshot.base, layers=snapshot.layers), kind)
    sandbox = await open_sandbox(spec, kind)
    try:
        await sandbox.restore(snapshot)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await sandbox.aclose()
        raise
    return sandbox


async def _judge(
    prepared: Prepared, sandbox: Sandbox, kind: Kind, ran: ExecResult | None = None
) -> Check:
    """Runs the checker in this sandbox."""
    task = prepared.task
    _, env = mounts_of(prepared, kind)
    env = {**env, **task.check_env}
    if not has_mounts(kind):
        make = f"rm -rf {LOGS}/verifier; mkdir -p {LOGS}/verifier"
        made = await sandbox.exec(["sh", "-c", make], cwd="/")
        if task.tests is not None:
            await _bring(sandbox, task.tests)
    else:
        made = await sandbox.exec(MAKE_LOGS, cwd="/")
    if made.exit_code != 0:
        raise SandboxError(f"Task {task.id!r}: no {LOGS}: {clean(bytes(made.stderr)).strip()}")
    if not task.check_in_place:
        links = await sandbox.exec(["sh", "-c", _FIND_LINKS, "sh", task.tree], cwd="/")
        if links.timed_out:
            return Check(reward=0.0, reason="the tree's links can't be looked through in time")
        if led := clean(bytes(links.stdout)).split("\n")[0]:
            return Check(reward=0.0, reason=f"a link in the tree leads to {clip(led, 200)}")
    if ran is not None:
        await sandbox.write(_RUN_OUTPUT, bytes(ran.stdout))
        env["RUN_EXIT_CODE"] = "" if ran.exit_code is None else str(ran.exit_code)
    done = await sandbox.exec(
        _script(task, task.check), cwd="/", env=env, timeout_s=task.check_timeout_s
    )
    said = clean(bytes(done.stdout) + bytes(done.stderr)).strip()
    if done.exit_code in (126, 127) and said.startswith("sandbox: "):
        raise SandboxError(f"Task {task.id!r}: its checker can't be run: {clip(said, 500)}")
    found = Check(
        reward=0.0, reason="", exit_code=done.exit_code, output=clip(said, LONGEST_OUTPUT)
    )
    if done.timed_out:
        return replace(found, reason=f"the checker took longer than {task.check_timeout_s:g} s")
    if done.exit_code is None:
        return replace(found, reason=f"the checker was killed by signal {done.signal}")
    await kill_all(sandbox)  # or what it has left could still write the reward
    if task.needs_pytest:
        return await _by_report(sandbox, found)
    if not task.reward_from_file and done.exit_code != 0:
        return replace(found, reason="the checker says no")
    return await _by_files(sandbox, found, required=task.reward_from_file, name=task.id)


def _script(task: TerminalTask, script: str) -> list[str]:
    return [*_SCRIPT, task.workdir or task.tree, task.tree, script]


async def _bring(sandbox: Sandbox, tests: Path) -> None:
    for folder, _, names in os.walk(tests):
        for name in names:
            path = anyio.Path(folder, name)
            mode = (await path.stat()).st_mode & 0o777
            target = f"{TESTS}/{path.relative_to(tests)}"
            await sandbox.write(target, await path.read_bytes(), mode=mode)


async def _by_report(sandbox: Sandbox, found: Check) -> Check:
    """pytest's report: an exit code alone might come from what it has imported."""
    said = await _read(sandbox, "report.xml")
    counts = _COUNTS.search(said or b"")
    if counts is None:
        return replace(found, reason="pytest left no report")
    errors, failures, skipped, tests = map(int, counts.groups())
    passed = tests - errors - failures - skipped
    good = found.exit_code == 0 and passed > 0 and not errors + failures
    reason = f"{passed} of {tests} tests passed"
    return replace(found, reward=float(good), reason=reason)


async def _by_files(sandbox: Sandbox, found: Check, *, required: bool, name: str) -> Check:
    """/logs/verifier/reward.json, else reward.txt."""
    as_json, as_text = [await _read(sandbox, file) for file in ("reward.json", "reward.txt")]
    rewards: dict[str, float] = {}
    value: float | None = None
    if as_json is not None:
        with suppress(ValueError, RecursionError):
            read = json.loads(as_json)
            if isinstance(read, dict):
                rewards = _numbers(cast("dict[str, object]", read))
        named = list(rewards.values())
        value = rewards.get("reward", named[0] if len(named) == 1 else None)
    if value is None and as_text is not None:
        with suppress(ValueError):
            value = float(as_text.decode("ascii", "replace").strip()[:64])
    if value is None or not math.isfinite(value):
        if not required and as_json is None and as_text is None:
            return replace(found, reward=1.0, reason="the checker says yes")
        if found.exit_code != 0:
            return replace(found, reason="the checker failed and left no reward")
        raise EnvError(f"Task {name!r}: its checker left no number in {LOGS}/verifier: {found}.")
    reward = min(max(value, 0.0), 1.0)
    reason = f"the checker says {value:g}"
    if reward != value:
        reason += f", taken as {reward:g}"
    return replace(found, reward=reward, reason=reason, rewards=rewards)


def _numbers(read: Mapping[str, object]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in read.items()
        if isinstance(value, int | float) and abs(value) < 1e300
    }


async def _read(sandbox: Sandbox, name: str) -> bytes | None:
    try:
        return await sandbox.read(f"{LOGS}/verifier/{name}", max_bytes=_MOST_REWARD_BYTES)
    except SandboxFileError:
        return None
