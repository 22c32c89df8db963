"""Runs a package's tests in a sandbox: what `worker.py` is asked, and what it answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, cast

import anyio
from anyio import to_thread

from gymllm.errors import SandboxError
from gymllm.sandbox import Mount, Sandbox, SandboxSpec, open_sandbox
from gymllm_envs.swe.making.packages import Package
from gymllm_envs.swe.making.sdists import tree
from gymllm_envs.swe.making.site import site_folder
from gymllm_envs.swe.trees import SITE, WORKDIR, system_folders_to_hide

_WORKER = "/opt/gymllm/worker.py"
_MOST_ANSWER_BYTES = 256 << 20
_MEMORY_MB = 2048
PYTEST_ARGUMENTS = (
    *("-c", "/dev/null", "--rootdir", WORKDIR, "--noconftest", "-p", "no:cacheprovider"),
    *("-q", "--tb=native", "--continue-on-collection-errors"),
)
"""As the tests are graded: without the tree's own configuration."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a test failed."""

    error: str
    """The exception's type."""
    message: str
    line: int
    """In the test's file; 0 if it didn't get there."""
    parameters: Mapping[str, str]
    """Of a parametrised test, as Python writes them."""
    depth: int
    """Frames between pytest and what raised."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one test went."""

    id: str
    outcome: str
    """"passed", "failed" or "skipped"."""
    seconds: float
    """Of a core."""
    file: str
    line: int
    """Where its function begins; 0 and "" where that wasn't asked."""
    failure: Failure | None


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is to run: files to put in place, then these tests."""

    targets: tuple[str, ...]
    """Files and folders that are collected."""
    tests: tuple[str, ...] | None = None
    """Only these of them; None: all."""
    files: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    shuffle: int | None = None
    reach: bool = False
    cpu_s: float
    """Seconds of a core, after which it is killed; of wall, ten times as many: the host may be busy."""

    @property
    def timeout_s(self) -> float:
        return 30.0 + 10.0 * self.cpu_s


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What came of a `Run`."""

    ended: str
    """"done", "timeout" or "crash"."""
    tests: Mapping[str, Outcome]
    uncollected: tuple[str, ...]
    """Files whose import failed."""
    reach: Mapping[str, Mapping[int, tuple[str, ...]]]
    """Source file to line to the tests that ran it, if that was asked."""
    seconds: float
    """Of a core, imports included."""
    complaints: str = ""
    """What importing the uncollected files said."""

    @property
    def complete(self) -> bool:
        return self.ended == "done" and not self.uncollected

    def having(self, outcome: str) -> set[str]:
        """The tests that went so."""
        return {test.id for test in self.tests.values() if test.outcome == outcome}


class PackageSandbox:
    """A sandbox with a package's released tree. Use as `async with await PackageSandbox.open(package)`."""

    def __init__(self, package: Package, folder: Path, sandbox: Sandbox) -> None:
        self.package, self.folder, self._sandbox = package, folder, sandbox
        root = f"{WORKDIR}/{package.source_root}".rstrip("/")
        self._paths = (root, WORKDIR) if package.source_root else (WORKDIR,)
        self._sources = tuple(f"{root}/{s}{end}" for s in package.sources for end in (".py", "/*"))

    @classmethod
    async def open(cls, package: Package) -> Self:
        """Starts it; downloads what it needs.

        Raises:
            EnvError: Something can't be downloaded.
            MissingExtraError: bubblewrap isn't installed.
            SandboxStartError: The system refused.
        """
        folder = await to_thread.run_sync(tree, package.sdist)
        return cls(package, folder, await open_sandbox(await sandbox_spec(package, folder)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            await self._sandbox.aclose()

    async def run(self, runs: Sequence[Run], *, hash_seed: int) -> list[RunResult]:
        """Runs one after another, each in a process of its own.

        Args:
            runs: What to run.
            hash_seed: Of the interpreter: the order of sets differs with it.

        Raises:
            SandboxError: The sandbox, or the worker in it, broke.
        """
        request = {
            "arguments": [*PYTEST_ARGUMENTS, *self.package.pytest_arguments],
            "paths": self._paths,
            "sources": self._sources,
            "memory_mb": _MEMORY_MB,
            "runs": [_asked(run, self.package) for run in runs],
        }
        done = await self._sandbox.exec(
            [interpreter_name(), _WORKER],
            input=json.dumps(request).encode(),
            timeout_s=sum(run.timeout_s for run in runs) + 60,
            env={"PYTHONHASHSEED": str(hash_seed)},
            max_output_bytes=_MOST_ANSWER_BYTES,
        )
        lines = bytes(done.stdout).decode().splitlines()
        if len(lines) != len(runs):
            raise SandboxError(
                f"the tests' worker of {self.package.sdist} ended early (exit code {done.exit_code}, "
                f"signal {done.signal}): {bytes(done.stderr)[-2000:].decode(errors='replace')}"
            )
        return [_result(cast("dict[str, object]", json.loads(line))) for line in lines]


async def sandbox_spec(package: Package, folder: Path) -> SandboxSpec:
    """A sandbox with a tree of this package, the site folder and the worker."""
    site = await to_thread.run_sync(site_folder, package.requirements)
    return SandboxSpec(
        base=folder,
        mounts=(
            Mount(source=site, target=SITE),
            Mount(source=Path(__file__).with_name("worker.py"), target=_WORKER),
        ),
        hidden=await to_thread.run_sync(system_folders_to_hide),
        workdir=WORKDIR,
        env={"PYTHONPATH": SITE, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        memory_mb=_MEMORY_MB + 1024,
    )


def interpreter_name() -> str:
    """What our interpreter is called inside: it is first on PATH there."""
    return f"python{sys.version_info[0]}.{sys.version_info[1]}"


def _asked(run: Run, package: Package) -> dict[str, object]:
    return {
        "targets": run.targets,
        "tests": run.tests,
        "files": dict(run.files),
        "shuffle": run.shuffle,
        "reach": run.reach,
        "timeout_s": run.timeout_s,
        "cpu_s": run.cpu_s,
        "deselected": package.deselected,
    }


def _result(said: dict[str, object]) -> RunResult:
    tests = [_test(fields) for fields in cast("list[dict[str, object]]", said["tests"])]
    uncollected = cast("list[dict[str, str]]", said["uncollected"])
    reach = cast("dict[str, dict[str, list[str]]]", said["reach"])
    return RunResult(
        ended=cast(str, said["ended"]),
        tests={test.id: test for test in tests},
        uncollected=tuple(entry["uncollected"] for entry in uncollected),
        reach={
            file: {int(n): tuple(found) for n, found in lines.items()}
            for file, lines in reach.items()
        },
        seconds=cast(float, said["seconds"]),
        complaints="\n".join(entry["message"] for entry in uncollected),
    )


def _test(said: dict[str, object]) -> Outcome:
    failure = None
    if "error" in said:
        failure = Failure(
            error=cast(str, said["error"]),
            message=cast(str, said["message"]),
            line=cast(int, said["failed_at"]),
            parameters=cast("dict[str, str]", said["parameters"]),
            depth=cast(int, said["depth"]),
        )
    return Outcome(
        id=cast(str, said["test"]),
        outcome=cast(str, said["outcome"]),
        seconds=cast(float, said["seconds"]),
        file=cast(str, said.get("file", "")),
        line=cast(int, said.get("line", 0)),
        failure=failure,
    )
