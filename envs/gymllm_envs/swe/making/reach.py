"""Which tests run which lines of a package, from one run of its suite; and which tests can be relied on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gymllm.errors import EnvError
from gymllm_envs.swe.making.mutation import Function, Source, functions
from gymllm_envs.swe.making.packages import Package
from gymllm_envs.swe.making.running import Outcome, PackageSandbox, Run

SUITE_CPU_S = 120.0
"""For a whole suite under coverage; the slowest takes a tenth."""


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What was found out about a package's suite."""

    tests: Mapping[str, Outcome]
    """Those that passed each time, whatever their order and the hash seed."""
    lines: Mapping[str, Mapping[int, frozenset[str]]]
    """Source file to line to those of them that run it."""
    uncollected: frozenset[str]
    """Test files that can't be imported even in the released tree."""
    overhead_s: float
    """What a run takes besides its tests: imports, collection."""

    def of_line(self, file: str, line: int, function: Function) -> frozenset[str]:
        """The tests that run a line; if it is none that was counted, those that enter its function."""
        lines = self.lines.get(file, {})
        return lines[line] if line in lines else self.of_function(file, function)

    def of_function(self, file: str, function: Function) -> frozenset[str]:
        """The tests that run any of a function's own lines."""
        lines = self.lines.get(file, {})
        body = function.node.body
        last = body[-1].end_lineno or body[-1].lineno
        reached = [lines[n] for n in range(body[0].lineno, last + 1) if n in lines]
        return frozenset[str]().union(*reached)

    def seconds(self, tests: Iterable[str]) -> float:
        """What they took of a core, together, imports included."""
        return self.overhead_s + sum(self.tests[test].seconds for test in tests)


async def find_reach(sandbox: PackageSandbox) -> Reach:
    """Runs the suite twice: under coverage, then shuffled with another hash seed.

    Raises:
        EnvError: Nothing passes.
    """
    package = sandbox.package
    covered = Run(targets=package.tests, reach=True, cpu_s=SUITE_CPU_S)
    shuffled = Run(targets=package.tests, shuffle=1, cpu_s=SUITE_CPU_S)
    (first,) = await sandbox.run([covered], hash_seed=1)
    (second,) = await sandbox.run([shuffled], hash_seed=2)
    reliable = first.having("passed") & second.having("passed")
    if first.ended != "done" or second.ended != "done" or not reliable:
        raise EnvError(
            f"the tests of {package.sdist} can't be used: their runs ended {first.ended!r} and "
            f"{second.ended!r}, {len(reliable)} passed in both. {first.complaints[-1000:]}"
        )
    lines = {
        file: {line: frozenset(tests) & reliable for line, tests in by_line.items()}
        for file, by_line in first.reach.items()
    }
    return Reach(
        tests={name: test for name, test in second.tests.items() if name in reliable},
        lines=lines,
        uncollected=frozenset(first.uncollected),
        overhead_s=max(0.0, second.seconds - sum(t.seconds for t in second.tests.values())),
    )


def source_files(package: Package, folder: Path) -> list[str]:
    """The modules of a package that bugs can be put in, from the tree's root."""
    root = folder / package.source_root
    found: list[Path] = []
    for name in package.sources:
        module = root / f"{name}.py"
        found += [module] if module.is_file() else sorted((root / name).rglob("*.py"))
    paths = [path.relative_to(folder).as_posix() for path in found]
    tests = tuple(f"{test}/" for test in package.tests)
    return [path for path in paths if not path.startswith(tests) and "/test" not in path]


def functions_in(folder: Path, file: str) -> list[tuple[Source, Function]]:
    """A module's functions; none if its text is of a kind that edits could garble."""
    data = (folder / file).read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return []
    if "\r" in text or "\f" in text or text.startswith("\ufeff"):
        return []
    source = Source(text)
    return [(source, function) for function in functions(source)]
