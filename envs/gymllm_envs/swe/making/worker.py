"""Runs inside the sandbox of a package: its tests, over and over, each time in a fork of this process.

A program of its own: of gymllm nothing is there, only pytest and coverage. Reads one JSON object from its
standard input and answers with one JSON line for each run:

    {"arguments": [...], "sources": [...], "runs": [{"files": {...}, "tests": [...], ...}, ...]}

`files` are put in place before a run and as they were after it. pytest is imported once, the package under
test anew in each run.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import random
import resource
import select
import signal
import sys
import tempfile
import time
import types
from collections.abc import Generator
from pathlib import Path
from typing import Any, TextIO

import pytest

ROOT = os.getcwd()
MOST_TEXT = 4000
"""Of one failure's message, in characters."""


class Reporter:
    """A pytest plug-in: runs the tests that are wanted, in the wanted order, and says how each went."""

    def __init__(self, run: dict[str, Any], sources: list[str], to: TextIO) -> None:
        self.wanted: list[str] | None = run.get("tests")
        self.shuffle: int | None = run.get("shuffle")
        self.deselected = tuple(run.get("deselected", ()))
        self.to, self.coverage = to, None
        self.failure: dict[str, Any] = {}
        if run.get("reach"):
            # The other core of Python 3.14 knows no contexts.
            os.environ["COVERAGE_CORE"] = "ctrace"
            import coverage

            self.coverage = coverage.Coverage(data_file=None, include=sources, config_file=False)
            self.coverage.start()

    def say(self, **fields: Any) -> None:
        self.to.write(json.dumps(fields) + "\n")
        self.to.flush()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        kept = [i for i in items if not self.deselected or not i.nodeid.startswith(self.deselected)]
        if self.wanted is not None:
            wanted = set(self.wanted)
            kept = [item for item in kept if item.nodeid in wanted]
        if self.shuffle is not None:
            # By files, and within each: their fixtures aren't set up for each test anew.
            chance = random.Random(self.shuffle)
            files = list(dict.fromkeys(item.path for item in kept))
            chance.shuffle(files)
            chance.shuffle(kept)
            kept.sort(key=lambda item: files.index(item.path))
        items[:] = kept

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.say(uncollected=report.nodeid, message=str(report.longrepr)[-MOST_TEXT:])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.failure, self.outcome = {}, "passed"
        if self.coverage:
            self.coverage.switch_context(item.nodeid)
        began = cpu_seconds()
        answer = yield
        seconds = cpu_seconds() - began
        if self.coverage:
            self.coverage.switch_context("")
        place = {} if self.wanted is not None and self.outcome == "passed" else where(item)
        self.say(test=item.nodeid, outcome=self.outcome, seconds=seconds, **self.failure, **place)
        return answer

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:
            self.outcome = "failed"
            if call.excinfo is not None and not self.failure:
                self.failure = about(item, call.excinfo)
        elif report.skipped and self.outcome == "passed":
            self.outcome = "skipped"
        return report

    def reach(self) -> dict[str, dict[str, list[str]]]:
        """Source file to line to the tests that ran it."""
        assert self.coverage is not None
        self.coverage.stop()
        data = self.coverage.get_data()
        found: dict[str, dict[str, list[str]]] = {}
        for file in data.measured_files():
            lines = data.contexts_by_lineno(file)
            kept = {str(n): [t for t in tests if t] for n, tests in lines.items()}
            found[relative(file)] = {n: tests for n, tests in kept.items() if tests}
        return found


def cpu_seconds() -> float:
    """Of this process and the children it has waited for: unlike wall, the same on a busy host."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def relative(path: str) -> str:
    """A path from the tree's root, wherever the tests have gone."""
    return os.path.relpath(path, ROOT)


def code_of(item: pytest.Item) -> types.CodeType | None:
    """The code of a test's own function."""
    function = inspect.unwrap(getattr(item, "function", None) or (lambda: None))
    return getattr(function, "__code__", None)


def where(item: pytest.Item) -> dict[str, Any]:
    """The file and the line at which a test's function begins, decorators included."""
    code = code_of(item)
    if code is None:
        return {}
    return {"file": relative(code.co_filename), "line": code.co_firstlineno}


def about(item: pytest.Item, excinfo: pytest.ExceptionInfo[BaseException]) -> dict[str, Any]:
    """What failed, where in the test, and with which parameters."""
    own = code_of(item)
    # Helpers of the same file may be what raised: the test is told from where it called them.
    lines = [e.lineno + 1 for e in excinfo.traceback if e.frame.code.raw is own]
    parameters: dict[str, str] = {}
    for name, value in getattr(getattr(item, "callspec", None), "params", {}).items():
        try:
            parameters[name] = repr(value)[:400]
        except Exception:  # of the package under test, perhaps the faulty one
            parameters[name] = "..."
    try:
        message = str(excinfo.value)[:MOST_TEXT]
    except Exception:
        message = ""
    return {
        "error": excinfo.typename,
        "message": message,
        "failed_at": lines[-1] if lines else 0,
        "parameters": parameters,
        "depth": len(excinfo.traceback),
    }


def child(run: dict[str, Any], request: dict[str, Any], to: TextIO) -> None:
    """Runs pytest; never returns."""
    os.setsid()
    memory = int(request["memory_mb"]) << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    cpu_s = math.ceil(run["cpu_s"])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    sys.path[:0] = request["paths"]
    reporter = Reporter(run, request["sources"], to)
    status = int(pytest.main([*request["arguments"], *run["targets"]], plugins=[reporter]))
    reach = reporter.reach() if run.get("reach") else {}
    reporter.say(status=status, reach=reach)
    os._exit(0)


def put(path: str, data: bytes) -> None:
    """Writes a file with a time of its own, or bytecode of another version would pass for its own."""
    Path(path).write_bytes(data)
    moment = int.from_bytes(os.urandom(4)) >> 1
    os.utime(path, (moment, moment))


def warm_up() -> None:
    """Has pytest import all that it needs to report a failure, once for all forks."""
    with tempfile.TemporaryDirectory() as folder:
        test = Path(folder, "test_warm_up.py")
        test.write_text("def test_warm_up():\n    assert {1: [2]} == {1: [3]}\n")
        arguments = (
            "-c",
            os.devnull,
            "--rootdir",
            folder,
            "--noconftest",
            "-p",
            "no:cacheprovider",
        )
        pytest.main([*arguments, str(test)])
    sys.modules.pop("test_warm_up", None)


def one_run(run: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Forks, and collects what the fork says, until it ends or its time is over."""
    before: dict[str, bytes] = {}
    for path, text in run.get("files", {}).items():
        before[path] = Path(path).read_bytes()
        put(path, text.encode())
    read_end, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read_end)
        try:
            child(run, request, os.fdopen(write_end, "w"))
        finally:
            os._exit(9)
    os.close(write_end)
    said, timed_out = b"", False
    ends = time.monotonic() + float(run["timeout_s"])
    while True:
        ready, _, _ = select.select([read_end], [], [], max(0.0, ends - time.monotonic()))
        if not ready:
            timed_out = True
            break
        data = os.read(read_end, 1 << 20)
        if not data:
            break
        said += data
    os.close(read_end)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # gone, or not yet a group of its own
        os.kill(pid, signal.SIGKILL)
    _, status, used = os.wait4(pid, 0)
    timed_out = timed_out or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU)
    for path, data in before.items():
        put(path, data)
    return answer(said, timed_out, used.ru_utime + used.ru_stime)


def answer(said: bytes, timed_out: bool, seconds: float) -> dict[str, Any]:
    """What a run has said, in one record. `ended`: "done", "timeout" or "crash"."""
    tests: list[dict[str, Any]] = []
    result: dict[str, Any] = {"ended": "timeout" if timed_out else "crash", "tests": tests}
    result.update(uncollected=[], reach={}, seconds=seconds, status=None)
    for line in said.decode().split("\n")[:-1]:
        fields = json.loads(line)
        if "test" in fields:
            tests.append(fields)
        elif "uncollected" in fields:
            result["uncollected"].append(fields)
        elif "status" in fields:
            result.update(ended="done", **fields)
    return result


def main() -> None:
    """Answers a request."""
    request = json.loads(sys.stdin.buffer.read())
    answers = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    sys.dont_write_bytecode, sys.pycache_prefix = False, "/tmp/bytecode"
    warm_up()
    for run in request["runs"]:
        line = json.dumps(one_run(run, request)).encode() + b"\n"
        while line:
            line = line[os.write(answers, line) :]


if __name__ == "__main__":
    main()
