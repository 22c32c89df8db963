"""Makes a task file: so many tasks, spread over packages; and the small one that is made at first use.

make_tasks ── a PackageMaker for each package, `jobs` at a time ──> Attempt ──> a line of the file
default_tasks ── the same, once, into the cache
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import anyio

from gymllm.errors import ConfigError, EnvError, GymLLMError, SandboxError
from gymllm_envs.swe.changes import Changes
from gymllm_envs.swe.grading import gold_changes, grade, working_canaries
from gymllm_envs.swe.making.cache import cache_folder, locked
from gymllm_envs.swe.making.package_maker import Attempt, PackageMaker
from gymllm_envs.swe.making.packages import PACKAGES, package_named
from gymllm_envs.swe.making.site import PINNED
from gymllm_envs.swe.task import SweTask, read_tasks, to_row, write_tasks
from gymllm_envs.swe.trees import prepare

DEFAULT_PACKAGES = ("toolz", "inflection", "isodate", "funcy", "webcolors", "parse")
"""Small ones, whose tests are quick."""
DEFAULT_COUNT = 24

Rewrite = Callable[[SweTask], Awaitable[str]]


def counted(number: int, noun: str) -> str:
    """The number with its noun: 1 task, 2 tasks."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclass(kw_only=True)
class Made:
    """How far it is: what a progress line says, and what is left in the end."""

    count: int
    """Of tasks, wanted."""
    tasks: list[SweTask] = field(default_factory=list[SweTask])
    """Those of earlier runs, too."""
    before: int = 0
    """How many were there before."""
    dropped: dict[str, int] = field(default_factory=dict[str, int])
    """Reason to how many bugs."""
    operators: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Operator to bugs tried and kept."""
    failed: dict[str, GymLLMError] = field(default_factory=dict[str, GymLLMError])
    """Packages that could not be used."""
    began: float = field(default_factory=time.monotonic)

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self.began

    @property
    def packages(self) -> int:
        return len({task.sdist for task in self.tasks})

    def line(self) -> str:
        """Where it stands, in a line."""
        new, tried = len(self.tasks) - self.before, sum(t for t, _ in self.operators.values())
        said = (
            f"{len(self.tasks)} of {counted(self.count, 'task')}, {counted(self.packages, 'package')}, "
            f"{counted(tried, 'bug')} tried"
        )
        if new and len(self.tasks) < self.count:
            left_s = self.wall_s / new * (self.count - len(self.tasks))
            return f"{said}, {self.wall_s:.0f} s, about {left_s:.0f} s left"
        return f"{said}, {self.wall_s:.0f} s"

    def add(self, attempt: Attempt) -> None:
        """Counts an attempt."""
        tried, kept = self.operators.get(attempt.operator, (0, 0))
        self.operators[attempt.operator] = (tried + 1, kept + (attempt.task is not None))
        if attempt.task is not None:
            self.tasks.append(attempt.task)
        else:
            self.dropped[attempt.reason] = self.dropped.get(attempt.reason, 0) + 1


async def make_tasks(
    out: Path,
    *,
    count: int,
    packages: Sequence[str] = (),
    seed: int = 0,
    jobs: int = 2,
    progress: Callable[[Made], None] = lambda made: None,
    rewrite: Rewrite | None = None,
) -> Made:
    """Makes tasks until the file holds `count`; goes on where an earlier call has stopped.

    Each task is in the file as soon as it is made; in the end they are sorted by package.

    Args:
        out: The file. One that is there must have been made with the same seed.
        count: Of tasks, with those in the file.
        packages: Names in `PACKAGES`; all if empty. They get equal shares, as far as they have enough.
        seed: Of all choices. The same seed makes the same tasks, but for what a busy host times out.
        jobs: Packages at a time; each keeps a core busy.
        progress: Called after each bug.
        rewrite: Given a task, answers its problem statement in other words.

    Raises:
        ConfigError: An argument can't be used, or the file is of another seed.
        UnknownNameError: No such package.
        MissingExtraError: bubblewrap isn't installed.
        EnvError: No package can be used; says why the first one can't.
    """
    for name, value in (("count", count), ("jobs", jobs)):
        if value < 1:
            raise ConfigError(f"{name} must be >= 1, got {value}.")
    names = list(dict.fromkeys(packages or PACKAGES))
    made = Made(count=count, tasks=_earlier(out, seed))
    made.before = len(made.tasks)
    makers = {
        name: PackageMaker(package_named(name), seed=seed, first=_tried(made.tasks, name))
        for name in names
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_tasks(out, made.tasks)
    try:
        while len(made.tasks) < count:
            shares = _shares(made, [n for n, m in makers.items() if not m.exhausted])
            if not shares:
                break
            await _round(out, made, makers, shares, jobs, progress, rewrite)
    finally:
        order = {name: place for place, name in enumerate(PACKAGES)}
        made.tasks.sort(key=lambda t: (order.get(t.repo, len(order)), _candidate(t)))
        write_tasks(out, made.tasks)
    if not made.tasks and made.failed:
        raise next(iter(made.failed.values()))
    return made


async def _round(
    out: Path,
    made: Made,
    makers: Mapping[str, PackageMaker],
    shares: Mapping[str, int],
    jobs: int,
    progress: Callable[[Made], None],
    rewrite: Rewrite | None,
) -> None:
    """Has each package make its share."""
    limiter = anyio.CapacityLimiter(jobs)
    unusable: list[GymLLMError] = []

    async def tell(attempt: Attempt) -> None:
        if attempt.task is not None:
            task = await _finished(attempt.task, rewrite)
            reason = "" if task is not None else "grading disagrees"
            attempt = replace(attempt, task=task, reason=reason)
        if attempt.task is not None:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(to_row(attempt.task), ensure_ascii=False) + "\n")
        made.add(attempt)
        progress(made)

    async def one(name: str) -> None:
        async with limiter:
            try:
                await makers[name].make(shares[name], tell)
            except (EnvError, SandboxError) as problem:
                made.failed[name], makers[name].exhausted = problem, True
            except GymLLMError as problem:  # as with all others: an extra is missing
                unusable.append(problem)
                tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for name in shares:
            tasks.start_soon(one, name, name=f"make tasks of {name}")
    if unusable:
        raise unusable[0]


async def _finished(task: SweTask, rewrite: Rewrite | None) -> SweTask | None:
    """What is done for a task that counts; None if grading, which has the last word, disagrees."""
    working = await working_canaries(task)
    # A function whose tests have canaries gets another name, so all that are asked for must have some.
    partly = {_function(test) for test in task.fail_to_pass if test not in working}
    canaries = tuple(test for test in working if _function(test) not in partly)
    graded = await _graded(replace(task, canaries=canaries))
    if graded is None or rewrite is None:
        return graded
    return replace(graded, problem_statement=await rewrite(graded))


async def _graded(task: SweTask) -> SweTask | None:
    """The task without the tests that grading doesn't find; None if gold isn't 1, or nothing isn't 0."""
    gold = gold_changes(task, await prepare(task))
    verdict = await grade(task, gold)
    if not verdict.resolved:  # names that depend on the order of a set, say
        results = {**verdict.fail_to_pass, **verdict.pass_to_pass}
        there = {test for test, result in results.items() if result == "passed"}
        f2p, p2p, canaries = (
            tuple(test for test in tests if test in there)
            for tests in (task.fail_to_pass, task.pass_to_pass, task.canaries)
        )
        if not f2p or not p2p:
            return None
        task = replace(task, fail_to_pass=f2p, pass_to_pass=p2p, canaries=canaries)
        if not (await grade(task, gold)).resolved:
            return None
    nothing = await grade(task, Changes())
    fails = all(result == "failed" for result in nothing.fail_to_pass.values())
    return task if fails and not nothing.tampered else None


def _function(test: str) -> str:
    """A test's name without its parameters."""
    return test.partition("[")[0]


def _shares(made: Made, names: Sequence[str]) -> dict[str, int]:
    """How many more each package makes, so that in the end all have as many."""
    have = {name: sum(task.repo == name for task in made.tasks) for name in names}
    shares = dict.fromkeys(names, 0)
    for _ in range(made.count - len(made.tasks)):
        if not names:
            break
        least = min(names, key=lambda name: have[name] + shares[name])
        shares[least] += 1
    return {name: share for name, share in shares.items() if share}


def _earlier(out: Path, seed: int) -> list[SweTask]:
    """The tasks that an earlier call has left in the file."""
    if not out.exists():
        return []
    text = out.read_text(encoding="utf-8")
    whole, newline, torn = text.rpartition("\n")
    if torn and newline:  # it was killed in the middle of a line
        out.write_text(whole + newline, encoding="utf-8")
    if not whole.strip():
        return []
    tasks = read_tasks(out)
    seeds = {task.extra.get("seed") for task in tasks}
    if seeds != {seed}:
        raise ConfigError(
            f"{str(out)!r} holds tasks made with seed {', '.join(map(str, seeds))}, got seed {seed}. "
            "Name another file, or that seed to go on."
        )
    return tasks


def _tried(tasks: Sequence[SweTask], name: str) -> int:
    return max((_candidate(task) for task in tasks if task.repo == name), default=0)


def _candidate(task: SweTask) -> int:
    return cast(int, task.extra.get("candidate", 0))


def default_tasks(progress: Callable[[Made], None] | None = None) -> Path:
    """The file with the default tasks, made at first use, which takes a minute or two.

    Whoever calls it while another process makes it waits for that one.

    Args:
        progress: Called after each bug; by default lines go to standard error.

    Raises:
        EnvError: The packages can't be downloaded.
        MissingExtraError: bubblewrap isn't installed.
    """
    folder = cache_folder() / "tasks"
    path = folder / f"default-{_recipe()}.jsonl"
    if path.exists():
        return path
    with locked(path):
        if not path.exists():
            unfinished = path.with_suffix(".part")
            shown = progress or Progress("Making the tasks of gymllm/SWE-v0, this once")
            made = anyio.run(_make_default, unfinished, shown)
            why = next(iter(made.failed.values()), f"only {len(made.tasks)} could be made.")
            if len(made.tasks) < DEFAULT_COUNT // 2:
                raise EnvError(
                    f"The default tasks could not all be made: {why} What was made is kept; try again."
                )
            if made.failed:  # a package that can't be had here: the others made up for it
                sys.stderr.write(f"{', '.join(made.failed)} left out: {why}\n")
            unfinished.rename(path)
    return path


async def _make_default(out: Path, progress: Callable[[Made], None]) -> Made:
    return await make_tasks(
        out, count=DEFAULT_COUNT, packages=DEFAULT_PACKAGES, progress=progress, jobs=2
    )


_NO_MATTER = frozenset({"cache", "cli", "rewriting", "sdists", "site"})
"""Modules that change no task."""


def _recipe() -> str:
    """Names what the default tasks depend on: other packages, Python or code make them anew."""
    digest = hashlib.sha256(repr((sys.version_info[:2], PINNED, DEFAULT_COUNT)).encode())
    for name in DEFAULT_PACKAGES:
        digest.update(repr(PACKAGES[name]).encode())
    for module in sorted(Path(__file__).parent.glob("*.py")):
        if module.stem not in _NO_MATTER:
            digest.update(module.read_bytes())
    return digest.hexdigest()[:16]


class Progress:
    """Shows how far it is, on standard error: on a terminal one line that changes, else some lines."""

    def __init__(self, title: str) -> None:
        self._title, self._last, self._shown = title, time.monotonic(), False
        self._terminal = sys.stderr.isatty()
        self._say(f"{title}.\n")

    def __call__(self, made: Made) -> None:
        """Shows it, if it is time."""
        done = len(made.tasks) >= made.count
        if self._terminal:
            self._say(f"\r\x1b[K{made.line()}" + ("\n" if done else ""))
        elif done or time.monotonic() - self._last > 5:
            self._last = time.monotonic()
            self._say(made.line() + "\n")

    def _say(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
