"""What a patch is worth: hidden tests in a fresh sandbox, on a tree that the host has put together.

    Changes (files, nothing else) ── layer over the faulty package, its tests as released, with canaries
        ── judge.py, in a sandbox of its own ── worker.py: pytest and the graded code
        ── report ── Verdict

A verdict of 0 is the patch's fault. What is the fault of the machine raises, and the episode has failed. To
tell them apart, when a run brings its own sandbox down, the same is tried without the patch.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import anyio
from anyio import to_thread

from gymllm.errors import SandboxDiedError, SandboxError
from gymllm.sandbox import Mount, Sandbox, open_sandbox
from gymllm.sandbox.clip import clean
from gymllm.sandbox.state import state
from gymllm_envs.swe.canaries import add_canaries, all_copies, inherited
from gymllm_envs.swe.changes import Changes, patch_of, write_layer
from gymllm_envs.swe.making.running import interpreter_name
from gymllm_envs.swe.patching import apply_patch
from gymllm_envs.swe.task import SweTask
from gymllm_envs.swe.trees import WORKDIR, TaskTree, prepare

INSIDE = "/opt/gymllm/grade"
_MOST_REPORT_BYTES = 16 << 20
_MORE_FOR_THE_JUDGE_S = 10
_MANY_GUESSES = 27
"""Where a guess has better odds, what is resolved is graded twice."""
_LIMITS = {"memory_mb": 2048, "pids": 128, "file_mb": 256}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What hidden tests say of a patch."""

    resolved: bool
    """All that failed pass, all that passed still do, and nothing was tampered with."""
    fail_to_pass: Mapping[str, str]
    """Test to "passed", "failed", "skipped" or "missing"."""
    pass_to_pass: Mapping[str, str]
    messages: Mapping[str, str] = field(default_factory=dict[str, str])
    """What tests that failed said."""
    tampered: str = ""
    """Not empty: how the patch was caught forging."""
    reason: str = ""
    """Not empty: why it is not resolved, in a sentence."""
    patch: str = ""
    """What was graded, as a unified diff."""
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])
    """Changed paths that don't count, and why."""
    wall_s: float = 0.0

    unproven: bool = False
    """Not all tests that must fail have run: those that passed count only if it is resolved."""

    def reward(self, *, partial: bool = False) -> float:
        """1 if it is resolved, else 0; or, with `partial`, mended tests' share times kept ones'."""
        if self.resolved or not partial or self.tampered or self.unproven:
            return float(self.resolved)
        return share_passed(self.fail_to_pass) * share_passed(self.pass_to_pass)


def share_passed(results: Mapping[str, str]) -> float:
    """The share of tests that passed; 1 where there are none."""
    return sum(r == "passed" for r in results.values()) / len(results) if results else 1.0


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What a judge reported."""

    results: Mapping[str, str]
    messages: Mapping[str, str]
    tampered: str
    ended: str
    doubtful: bool = False
    """The machine may have ended it (it was busy, or short of memory): trying again may help."""


def gold_changes(task: SweTask, made: TaskTree) -> Changes:
    """What the task's own patch changes.

    Raises:
        PatchError: It doesn't fit.
    """
    files = apply_patch(task.patch, made.given.text)
    return Changes(files={p: None if t is None else t.encode() for p, t in files.items()})


async def grade(task: SweTask, changes: Changes, *, rng: random.Random | None = None) -> Verdict:
    """Grades a patch.

    Args:
        task: From a source distribution.
        changes: As `read_changes` has them, or `gold_changes`.
        rng: Draws the canaries; by default nobody can know which.

    Raises:
        SandboxError: The tests could not be run, whatever the patch.
    """
    began = time.monotonic()
    made = await prepare(task)
    rng = rng or random.SystemRandom()
    if changes.refused:
        run = _Run(results={}, messages={}, tampered="", ended=changes.refused)
        return _verdict(task, changes, made, run, {})
    verdict, guesses = await _graded(task, changes, made, rng)
    if verdict.resolved and 1 < guesses < _MANY_GUESSES:
        verdict, _ = await _graded(task, changes, made, rng)  # other names, copies and order
    return replace(verdict, wall_s=time.monotonic() - began)


async def _graded(
    task: SweTask, changes: Changes, made: TaskTree, rng: random.Random
) -> tuple[Verdict, int]:
    """One run, and in how many ways a forger could have guessed which tests are the real ones."""
    layer: dict[str, bytes | None] = dict(changes.files)
    names: dict[str, str] = {}
    renamed: dict[str, str] = {}
    guesses = 1
    for file in test_files(task):
        source = _source(task, made, file)
        copied = _own(source, task.canaries, _in(file, _all(task)))
        with_canaries = add_canaries(file, source, copied, rng)
        layer[file] = with_canaries.source.encode()
        names |= with_canaries.names
        renamed |= with_canaries.renamed
        guesses *= with_canaries.guesses
    called = _called(_all(task), renamed)
    run = await _run(task, made, layer, [*called.values(), *names])
    results = {test: run.results.get(name, "missing") for test, name in called.items()}
    messages = {test: run.messages.get(name, "") for test, name in called.items()}
    of_canaries = {name: run.results.get(name, "missing") for name in names}
    run = replace(run, results=results | of_canaries, messages=messages)
    return _verdict(task, changes, made, run, names), guesses


def _called(tests: Sequence[str], renamed: Mapping[str, str]) -> dict[str, str]:
    """What tests are called in the graded tree: one function's tests for all parameters are renamed alike."""
    functions = {old.partition("[")[0]: new.partition("[")[0] for old, new in renamed.items()}
    called: dict[str, str] = {}
    for test in tests:
        function, bracket, parameters = test.partition("[")
        called[test] = f"{functions.get(function, function)}{bracket}{parameters}"
    return called


def _in(file: str, tests: Sequence[str]) -> list[str]:
    return [test for test in tests if test.partition("::")[0] == file]


def _own(source: str, tests: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Those of the tests in `wanted` whose functions no other of them has from its class's base."""
    shared = inherited(source, wanted)
    names = {test: test.partition("[")[0].rpartition("::")[2] for test in tests if test in wanted}
    return [test for test, name in names.items() if name not in shared]


def _all(task: SweTask) -> tuple[str, ...]:
    return (*task.fail_to_pass, *task.pass_to_pass)


def _source(task: SweTask, made: TaskTree, file: str) -> str:
    source = made.faulty.text(file)
    if source is None:
        raise SandboxError(f"task {task.id} names tests in {file}, which {task.sdist} hasn't.")
    return source


def test_files(task: SweTask) -> list[str]:
    """The files that hold a task's tests, from the tree's root."""
    return list(dict.fromkeys(test.partition("::")[0] for test in _all(task)))


def _verdict(
    task: SweTask,
    changes: Changes,
    made: TaskTree,
    run: _Run,
    canaries: Mapping[str, str],
) -> Verdict:
    f2p = {test: run.results.get(test, "missing") for test in task.fail_to_pass}
    p2p = {test: run.results.get(test, "missing") for test in task.pass_to_pass}
    tampered = run.tampered
    everything = [*f2p.values(), *p2p.values()]
    all_passed = bool(everything) and all(result == "passed" for result in everything)
    for name, original in canaries.items():
        # A copy may pass where its test fails: with the fault, or another, the result is what it expects.
        forged = not original or run.results.get(original) == "passed"
        if forged and run.results.get(name) in {"passed", "skipped"}:
            tampered = tampered or f"a test that must fail did not: {run.results[name]}"
    if all_passed and any(run.results.get(name) != "failed" for name in canaries):
        tampered = tampered or "tests that must fail were not run"
    # One that is missing says nothing of forgery: the graded code may have brought the file's import down.
    unproven = any(run.results.get(name, "missing") == "missing" for name in canaries)
    reason = ""
    if changes.refused:
        reason = changes.refused
    elif tampered:
        reason = f"tampered with: {tampered}"
    elif not all_passed:
        still = sum(result != "passed" for result in f2p.values())
        broken = sum(result != "passed" for result in p2p.values())
        reason = f"{still} of {len(f2p)} tests still fail, {broken} of {len(p2p)} others are broken"
        if run.ended != "done":
            reason += f" ({run.ended})"
    return Verdict(
        resolved=all_passed and not tampered,
        fail_to_pass=f2p,
        pass_to_pass=p2p,
        messages={t: m for t, m in run.messages.items() if (t in f2p or t in p2p) and m},
        tampered=tampered,
        reason=reason,
        patch=patch_of(changes, made.given),
        left_out=changes.left_out,
        unproven=unproven,
    )


async def _run(
    task: SweTask, made: TaskTree, layer: Mapping[str, bytes | None], tests: Sequence[str]
) -> _Run:
    order: dict[str, object] = {
        "files": test_files(task),
        "tests": list(tests),
        "root": WORKDIR,
        "python_path": list(made.python_path),
        "pytest_args": list(made.package.pytest_arguments),
        "timeout_s": task.timeout_s,
    }
    run = await _judged(made, layer, order)
    if run is not None and not run.doubtful:
        return run
    # Once more, with more time: others may have kept the machine busy.
    order["timeout_s"] = 2 * task.timeout_s
    run = await _judged(made, layer, order)
    if run is not None:
        return run
    own = {file: _source(task, made, file).encode() for file in test_files(task)}
    if await _judged(made, own, order) is None:
        raise SandboxError(
            f"The tests of task {task.id} can't be run here, with or without a patch: the sandbox goes "
            "down. See its limits of memory and processes."
        )
    # Without the patch they run. If they don't with it even now, it is the patch.
    gone = _Run(results={}, messages={}, tampered="", ended="its sandbox went down")
    return await _judged(made, layer, order) or gone


async def _judged(
    made: TaskTree, layer: Mapping[str, bytes | None], order: Mapping[str, object]
) -> _Run | None:
    """One run of the judge; None if its sandbox broke meanwhile.

    Raises:
        SandboxError: pytest didn't start, before there was any graded code.
    """
    folder = await to_thread.run_sync(_new_folder)
    try:
        graded = folder / "layer"
        await to_thread.run_sync(_write, layer, graded)
        inside = Mount(source=Path(__file__).with_name("inside"), target=INSIDE)
        spec = made.spec(made.bug, graded, mounts=(inside,), **_LIMITS)
        async with await open_sandbox(spec) as sandbox:
            try:
                done = await sandbox.exec(
                    [interpreter_name(), "-I", "-S", "-B", f"{INSIDE}/judge.py"],
                    input=json.dumps(order).encode(),
                    timeout_s=cast(float, order["timeout_s"]) + _MORE_FOR_THE_JUDGE_S,
                    max_output_bytes=_MOST_REPORT_BYTES,
                )
                log = await _log(sandbox) if b'"ready": true' not in done.stdout.head[:99] else ""
            except SandboxDiedError:
                return None
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(lambda: shutil.rmtree(folder, ignore_errors=True))
    lines = bytes(done.stdout).splitlines()
    if not lines or json.loads(lines[0]) != {"ready": True}:
        said = bytes(done.stderr).decode(errors="replace")[-1000:]
        raise SandboxError(f"pytest could not be started to grade: {log}{said}".strip())
    if len(lines) < 2:  # the judge was killed, for want of memory or by the graded code
        return None
    report = cast("dict[str, object]", json.loads(lines[1]))
    return _read_report(report, cast(float, order["timeout_s"]))


def _new_folder() -> Path:
    try:
        folder = state().unique("graded")  # if we are killed, the next process clears it away
        folder.mkdir(parents=True)
    except OSError as problem:
        raise SandboxError(f"no folder for what is graded: {problem}") from problem
    return folder


def _write(layer: Mapping[str, bytes | None], target: Path) -> None:
    try:
        write_layer(layer, target)
    except OSError as problem:
        raise SandboxError(f"the patch can't be written to {target}: {problem}") from problem


def _read_report(report: Mapping[str, object], timeout_s: float) -> _Run:
    results = cast("dict[str, dict[str, str]]", report["results"])
    ended = cast(str, report["ended"])
    idle = ended == "timeout" and cast(float, report["cpu_s"]) < timeout_s / 2
    # Exit statuses 0 and 1 are pytest's own; 1 for tests that failed, as canaries do.
    return _Run(
        results={test: one["outcome"] for test, one in results.items()},
        messages={test: clean(one["message"].encode()) for test, one in results.items()},
        tampered=cast(str, report["tampered"]),
        ended="done" if ended in {"exit 0", "exit 1"} else ended,
        doubtful=idle or ended == "signal 9",
    )


async def _log(sandbox: Sandbox) -> str:
    try:
        return (await sandbox.read("/tmp/worker.log")).decode(errors="replace")[-2000:]
    except (SandboxError, OSError):
        return ""


async def working_canaries(task: SweTask) -> tuple[str, ...]:
    """The task's F2P tests that may be renamed, and all of whose changed copies fail on the mended tree.

    A renamed one must still tell the faulty tree from the mended one. Those without copies are among
    them: nobody can tell which these are.

    Raises:
        SandboxError: The tests could not be run.
    """
    made = await prepare(task)
    layer: dict[str, bytes | None] = {}
    copies: dict[str, Sequence[str]] = {}
    renamed: dict[str, str] = {}
    for file in test_files(task):
        source = _source(task, made, file)
        tests = _own(source, _in(file, task.fail_to_pass), _in(file, _all(task)))
        trial = all_copies(source, tests)
        layer[file] = trial.source.encode()
        copies |= trial.copies
        renamed |= trial.renamed
    wanted = [*renamed.values(), *(name for names in copies.values() for name in names)]
    gold = gold_changes(task, made)
    mended = await _run(task, made, {**gold.files, **layer}, wanted)
    faulty = await _run(task, made, layer, list(renamed.values()))
    return tuple(
        test
        for test, name in renamed.items()
        if mended.results.get(name) == "passed"
        and faulty.results.get(name) == "failed"
        and all(mended.results.get(copy) == "failed" for copy in copies[test])
    )
