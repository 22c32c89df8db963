"""Makes tasks of one package: a bug, the tests that tell, what is hidden; all seen twice before it counts."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from gymllm_envs.swe.making.hiding import hide
from gymllm_envs.swe.making.mutation import Function, Mutation, Source, choose, mutated, mutations
from gymllm_envs.swe.making.packages import Package
from gymllm_envs.swe.making.reach import Reach, find_reach, functions_in, source_files
from gymllm_envs.swe.making.running import Outcome, PackageSandbox, Run, RunResult
from gymllm_envs.swe.making.statement import problem_statement
from gymllm_envs.swe.patching import make_patch
from gymllm_envs.swe.task import SweTask

MOST_F2P, MOST_P2P = 12, 100
MOST_REACHING = 200
"""A line that more tests run is left alone: they can't all be tried."""
FEW_REACHING = 30
"""Lines that no more tests run are preferred."""
MOST_FAILING = 60
"""A bug that breaks more is too coarse."""
SLOW_S = 1.0
"""A test that takes longer isn't among those that must still pass."""
_ROUNDS = 3
"""How often a function is tried, at most; all others come before its next turn."""
_BATCH = 6
_MOST_IN_VAIN = 60
"""Bugs in a row that came to nothing, after which the package has no more to give."""
_NOT_A_FAILURE = ("MemoryError", "KeyboardInterrupt", "SystemExit")


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What became of one bug."""

    operator: str
    task: SweTask | None
    """None: it was dropped."""
    reason: str = ""
    """Why it was dropped."""


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    number: int
    file: str
    bug: Mutation
    text: str
    """The whole module, with the bug."""
    reaching: frozenset[str]


@dataclass(kw_only=True)
class _Proved:
    """A bug that some tests tell, as its second look needs it."""

    candidate: _Candidate
    failing: list[Outcome]
    fail_to_pass: list[str]
    pass_to_pass: list[str]
    hidden: dict[str, str]
    """Test files without the functions that fail, by path."""
    visible: list[str]
    """What the hidden files must still pass."""
    runs: list[Run] = field(default_factory=list[Run])


class PackageMaker:
    """Makes tasks of one package, the same ones for the same seed."""

    def __init__(self, package: Package, *, seed: int, first: int = 0) -> None:
        """Nothing runs yet.

        Args:
            package: Whose bugs are made.
            seed: Of all choices.
            first: The candidate to begin with: what an earlier run has tried is passed over.
        """
        self.package, self.seed = package, seed
        self.exhausted = False
        """There are no more candidates."""
        self._first = first
        self._reach: Reach | None = None
        self._candidates: Iterator[_Candidate] = iter(())

    async def make(self, count: int, tell: Callable[[Attempt], Awaitable[None]]) -> int:
        """Makes up to `count` tasks; returns how many it made.

        Args:
            count: At most.
            tell: Told of each attempt, in the order of the candidates.

        Raises:
            EnvError: The package can't be downloaded, or its tests don't run.
            SandboxError: A sandbox broke.
        """
        made = in_vain = 0
        async with await PackageSandbox.open(self.package) as sandbox:
            if self._reach is None:
                self._reach = await find_reach(sandbox)
                self._candidates = self._find_candidates(sandbox, self._reach)
            while made < count and not self.exhausted:
                batch = list(itertools.islice(self._candidates, _BATCH))
                self.exhausted = len(batch) < _BATCH
                for attempt in await self._attempts(sandbox, self._reach, batch):
                    if made < count:  # the rest would be other tasks than one made later by itself
                        await tell(attempt)
                        made += attempt.task is not None
                        in_vain = 0 if attempt.task else in_vain + 1
                self.exhausted = self.exhausted or in_vain >= _MOST_IN_VAIN
        return made

    def _find_candidates(self, sandbox: PackageSandbox, reach: Reach) -> Iterator[_Candidate]:
        """Bugs to try: each function once, then again; those that few tests reach first."""
        chance = random.Random(f"{self.package.sdist} {self.seed}")
        everything: list[tuple[str, Source, Function]] = [
            (file, source, function)
            for file in source_files(self.package, sandbox.folder)
            for source, function in functions_in(sandbox.folder, file)
            if reach.of_function(file, function)
        ]
        chance.shuffle(everything)
        everything.sort(key=lambda e: len(reach.of_function(e[0], e[2])) > FEW_REACHING)
        used: dict[str, int] = {}
        tried: set[tuple[str, Mutation]] = set()
        number = 0
        for _ in range(_ROUNDS):
            for file, source, function in everything:
                bugs = {
                    operator: [
                        bug
                        for bug in bugs
                        if (file, bug) not in tried
                        and 0 < len(reach.of_line(file, bug.line, function)) <= MOST_REACHING
                    ]
                    for operator, bugs in mutations(source, function).items()
                }
                text = None
                while text is None and (bug := choose(bugs, chance, used)):
                    tried.add((file, bug))
                    bugs[bug.operator].remove(bug)
                    text = mutated(source, bug)
                    if text is not None:
                        number += 1
                        if number > self._first:
                            reaching = reach.of_line(file, bug.line, function)
                            yield _Candidate(
                                number=number, file=file, bug=bug, text=text, reaching=reaching
                            )

    async def _attempts(
        self, sandbox: PackageSandbox, reach: Reach, batch: Sequence[_Candidate]
    ) -> list[Attempt]:
        runs = [
            Run(
                targets=_files(candidate.reaching),
                tests=tuple(sorted(candidate.reaching)),
                files={candidate.file: candidate.text},
                cpu_s=_limit(reach, candidate.reaching),
            )
            for candidate in batch
        ]
        results = await sandbox.run(runs, hash_seed=1)
        first_look = [
            self._first_look(sandbox, reach, candidate, result)
            for candidate, result in zip(batch, results, strict=True)
        ]
        proved = [found for found in first_look if isinstance(found, _Proved)]
        again = await sandbox.run([run for found in proved for run in found.runs], hash_seed=2)
        attempts: list[Attempt] = []
        for candidate, found in zip(batch, first_look, strict=True):
            operator = candidate.bug.operator
            if isinstance(found, str):
                attempts.append(Attempt(operator=operator, task=None, reason=found))
                continue
            mine, again = again[: len(found.runs)], again[len(found.runs) :]
            if reason := _disagreement(found, mine):
                attempts.append(Attempt(operator=operator, task=None, reason=reason))
            else:
                task = self._task(sandbox, reach, found)
                attempts.append(Attempt(operator=operator, task=task))
        return attempts

    def _first_look(
        self, sandbox: PackageSandbox, reach: Reach, candidate: _Candidate, result: RunResult
    ) -> _Proved | str:
        """What the reaching tests say of a bug: the tests of a task, or why there is none."""
        if result.ended != "done":
            return result.ended
        if set(result.uncollected) - reach.uncollected:
            return "import"
        failing = [result.tests[name] for name in sorted(result.having("failed"))]
        if not failing:
            return "survived"
        if len(failing) > MOST_FAILING:
            return "coarse"
        if any(test.failure is None or test.failure.error in _NOT_A_FAILURE for test in failing):
            return "broke its tests"
        chance = random.Random(f"{self.package.sdist} {self.seed} {candidate.number}")
        failed = {test.id for test in failing}
        passing = sorted(result.having("passed"))
        files = _files(failed)
        others = [t for t in reach.tests if t.startswith(files) and t not in candidate.reaching]
        chance.shuffle(passing)
        chance.shuffle(others)
        by_file: dict[str, set[int]] = {}
        for name in failed:
            file = reach.tests[name].file
            if file != name.partition("::")[0]:  # made on the way, from data or by a helper
                return "can't be hidden"
            by_file.setdefault(file, set()).add(reach.tests[name].line)
        hidden: dict[str, str] = {}
        for file, lines in by_file.items():
            text = _read(sandbox, file)
            left = hide(text, lines) if text is not None else None
            if left is None:
                return "can't be hidden"
            hidden[file] = left
        taken = {(file, line) for file, lines in by_file.items() for line in lines}
        # What passes of a function that is hidden is neither shown nor asked for: canaries rename it.
        quick = [
            t
            for t in (*passing, *others)
            if reach.tests[t].seconds < SLOW_S
            and (reach.tests[t].file, reach.tests[t].line) not in taken
        ]
        if not quick:
            return "nothing passes"
        shown = [
            t
            for t in reach.tests
            if t.startswith(files) and (reach.tests[t].file, reach.tests[t].line) not in taken
        ]
        found = _Proved(
            candidate=candidate,
            failing=failing,
            fail_to_pass=sorted(chance.sample(sorted(failed), min(MOST_F2P, len(failed)))),
            pass_to_pass=sorted(quick[:MOST_P2P]),
            hidden=hidden,
            visible=shown,
        )
        found.runs = _second_look(reach, found, chance)
        return found

    def _task(self, sandbox: PackageSandbox, reach: Reach, found: _Proved) -> SweTask:
        candidate = found.candidate
        released = _read(sandbox, candidate.file) or ""
        tests = {file: _read(sandbox, file) or "" for file in found.hidden}
        bug_patch = make_patch({candidate.file: released}, {candidate.file: candidate.text})
        hide_patch = make_patch(tests, found.hidden)
        digest = hashlib.sha256((bug_patch + hide_patch).encode()).hexdigest()[:8]
        secret = candidate.bug.function.rpartition(".")[2]
        located = [_located(test, reach.tests[test.id]) for test in found.failing]
        seconds = reach.seconds([*found.fail_to_pass, *found.pass_to_pass])
        return SweTask(
            id=f"{self.package.name}-{self.package.version}-{digest}",
            repo=self.package.name,
            problem_statement=problem_statement(self.package.sdist, located, tests, secret),
            fail_to_pass=tuple(found.fail_to_pass),
            pass_to_pass=tuple(found.pass_to_pass),
            patch=make_patch({candidate.file: candidate.text}, {candidate.file: released}),
            sdist=self.package.sdist,
            bug_patch=bug_patch,
            hide_patch=hide_patch,
            timeout_s=60.0 * math.ceil(1 + seconds / 3),  # at least 20 times as long
            extra={
                "operator": candidate.bug.operator,
                "function": f"{candidate.file}:{candidate.bug.function}",
                "candidate": candidate.number,
                "seed": self.seed,
                "licence": self.package.licence,
            },
        )


def _second_look(reach: Reach, found: _Proved, chance: random.Random) -> list[Run]:
    """Faulty and released tree in another order than before; then what is left of the test files.

    It is the second time for both: the first look was at the faulty tree, `find_reach` at the released one.
    """
    tests = (*found.fail_to_pass, *found.pass_to_pass)
    faulty = {found.candidate.file: found.candidate.text}
    runs = [
        Run(
            targets=_files(tests),
            tests=tests,
            files=files,
            shuffle=chance.randrange(1 << 30),
            cpu_s=_limit(reach, tests),
        )
        for files in (faulty, {})
    ]
    visible = Run(
        targets=tuple(found.hidden),
        tests=tuple(found.visible),
        files={**faulty, **found.hidden},
        cpu_s=_limit(reach, found.visible),
    )
    return [*runs, visible]


def _disagreement(found: _Proved, results: Sequence[RunResult]) -> str:
    """Why the second look doesn't confirm the first; drops tests of `pass_to_pass` that are not reliable."""
    faulty, mended, visible = results
    if any(result.ended != "done" for result in results):
        return "timeout the second time"
    wanted = set(found.fail_to_pass)
    if not (wanted <= faulty.having("failed") and wanted <= mended.having("passed")):
        return "flaky"
    kept = set(found.pass_to_pass) & faulty.having("passed") & mended.having("passed")
    found.pass_to_pass = sorted(kept)
    if not kept:
        return "nothing passes"
    if visible.having("passed") != set(found.visible):
        return "what is left of its tests fails"
    return ""


def _files(tests: Sequence[str] | frozenset[str] | set[str]) -> tuple[str, ...]:
    return tuple(sorted({test.partition("::")[0] for test in tests}))


def _limit(reach: Reach, tests: Sequence[str] | frozenset[str]) -> float:
    """Seconds of a core, some times what they took."""
    return 2.0 + 4.0 * reach.seconds(tests)


def _located(test: Outcome, released: Outcome) -> Outcome:
    return Outcome(
        id=test.id,
        outcome=test.outcome,
        seconds=test.seconds,
        file=released.file,
        line=released.line,
        failure=test.failure,
    )


def _read(sandbox: PackageSandbox, file: str) -> str | None:
    """A file of the released tree; None if it is none, or no text that can be edited."""
    try:
        text = (sandbox.folder / file).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return None if "\r" in text or "\f" in text else text
