"""Has a worker run tests one by one and says what came of each. Runs in a fresh sandbox.

The worker imports the graded code, so nothing that it says is believed further than this: it answers about
the test that it was just told to run, once, in the order decided here, between which are tests that must
fail (canaries). The worker can't write where this process writes, or see its memory.

    stdin   one JSON object: `Order`
    stdout  JSON lines: {"ready": true} once pytest is there, before any graded code is; then one `Report`
"""

# ruff: noqa: T201 - stdout is how it reports

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from typing import TypedDict, cast

_MOST_LINE_BYTES = 1 << 20
_MOST_MESSAGE_CHARS = 2000
_PR_SET_DUMPABLE = 4


class Order(TypedDict):
    """What is to be run."""

    files: list[str]
    """Test files, from the tree's root."""
    tests: list[str]
    """pytest's names of those wanted; canaries too."""
    canaries: list[str]
    """Which of them must fail."""
    seed: int
    """Where the canaries are put between the others."""
    root: str
    python_path: list[str]
    pytest_args: list[str]
    timeout_s: float


class Result(TypedDict):
    """What came of one test."""

    outcome: str
    """passed, failed, skipped."""
    seconds: float
    message: str


class Report(TypedDict):
    """What came of all. Tests that aren't in it were not there, or not answered for."""

    results: dict[str, Result]
    tampered: str
    """Not empty: how the worker was caught."""
    ended: str
    """How the worker ended: "done", "timeout", "exit N", "signal N"."""


class TamperedError(Exception):
    """The worker said what an honest one can't say."""


class Worker:
    """The process that has the graded code, and the two pipes to it."""

    def __init__(self, order: Order) -> None:
        told, self.tell = os.pipe()
        self.hear, said = os.pipe()
        for fd in (told, said):
            os.set_inheritable(fd, True)
        here = os.path.dirname(os.path.abspath(__file__))
        with open("/tmp/worker.log", "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", f"{here}/worker.py", str(told), str(said)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(told, said),
                start_new_session=True,
                cwd=order["root"],
            )
        os.close(told)
        os.close(said)
        self.ends = time.monotonic() + order["timeout_s"]
        self._buffer = b""

    def send(self, message: object) -> None:
        """Tells it something. It is gone: `receive` says so."""
        line = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(BrokenPipeError):
            while line:
                line = line[os.write(self.tell, line) :]

    def receive(self) -> dict[str, object] | None:
        """The next thing it says; None when it is gone.

        Raises:
            TimeoutError: It has had its time.
            TamperedError: No message.
        """
        while b"\n" not in self._buffer:
            left = self.ends - time.monotonic()
            if left <= 0 or not select.select([self.hear], [], [], left)[0]:
                raise TimeoutError
            data = os.read(self.hear, 1 << 16)
            if not data:
                return None
            self._buffer += data
            if len(self._buffer) > _MOST_LINE_BYTES:
                raise TamperedError("the report holds a line without an end")
        line, _, self._buffer = self._buffer.partition(b"\n")
        with contextlib.suppress(ValueError, RecursionError):
            said: object = json.loads(line)
            if isinstance(said, dict):
                return cast("dict[str, object]", said)
        raise TamperedError(f"the report holds what isn't a report: {line[:80]!r}")

    @property
    def more(self) -> bool:
        """Whether it has said something that nobody has asked for."""
        return bool(self._buffer) or bool(select.select([self.hear], [], [], 0)[0])

    def end(self) -> str:
        """Waits for its end a little, kills it, and says how it ended."""
        try:
            status = self.process.wait(max(0.0, min(5.0, self.ends - time.monotonic())))
        except subprocess.TimeoutExpired:
            status = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if status is None:
            return "killed"
        return f"signal {-status}" if status < 0 else f"exit {status}"


def arranged(collected: list[str], order: Order) -> list[str]:
    """The wanted tests that are there, in pytest's order; each canary somewhere among those of its file."""
    rng = random.Random(order["seed"])
    wanted, canaries = set(order["tests"]), set(order["canaries"])
    by_file: dict[str, list[str]] = {}
    for name in dict.fromkeys(collected):
        if name in wanted:
            by_file.setdefault(name.partition("::")[0], []).append(name)
    tests: list[str] = []
    for names in by_file.values():
        placed = [name for name in names if name not in canaries]
        for name in names:
            if name in canaries:
                placed.insert(rng.randrange(len(placed) + 1), name)
        tests += placed
    return tests


def check_whole(said: dict[str, object]) -> None:
    """Raises TamperedError where the worker has seen that the test machinery was changed."""
    if said.get("tampered"):
        raise TamperedError(str(said["tampered"])[:500])


def names_in(said: dict[str, object]) -> list[str]:
    """The tests that the worker has found."""
    check_whole(said)
    collected = said.get("collected", [])
    if not isinstance(collected, list):
        raise TamperedError(f"the list of tests is none: {str(said)[:80]}")
    return [str(name) for name in cast("list[object]", collected)]


def judge(order: Order, worker: Worker) -> Report:
    """Has everything run."""
    report: Report = {"results": {}, "tampered": "", "ended": ""}
    try:
        worker.send(order)
        said = worker.receive()
        tests = arranged(names_in(said or {}), order)
        for number, name in enumerate(tests):
            if worker.more and worker.process.poll() is None:
                raise TamperedError(f"results before {name} was run")
            worker.send({"run": name, "next": (*tests[number + 1 :][:1], None)[0]})
            said = worker.receive()
            if said is None:
                break
            check_whole(said)
            if said.get("test") != name or said.get("outcome") not in {
                "passed",
                "failed",
                "skipped",
            }:
                raise TamperedError(f"an answer about {said.get('test')!r}, asked was {name!r}")
            report["results"][name] = {
                "outcome": str(said["outcome"]),
                "seconds": float(str(said.get("seconds", 0.0))),
                "message": str(said.get("message", ""))[:_MOST_MESSAGE_CHARS],
            }
        else:
            worker.send({"end": True})
            said = worker.receive()
            if said is not None:
                raise TamperedError(
                    str(said.get("tampered") or "results after the last test")[:500]
                )
        report["ended"] = worker.end()
    except TimeoutError:
        worker.end()
        report["ended"] = "timeout"
    except TamperedError as caught:
        report["tampered"], report["ended"] = str(caught), worker.end()
    return report


def main() -> None:
    """Judges."""
    # Another process of the same user could otherwise write to our descriptors through /proc.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    order: Order = json.load(sys.stdin)
    worker = Worker(order)
    try:
        ready = worker.receive() == {"ready": True}
    except (TimeoutError, TamperedError):
        ready = False
    if not ready:
        print(json.dumps({"ready": False, "ended": worker.end()}), flush=True)
        return
    print(json.dumps({"ready": True}), flush=True)
    print(json.dumps(judge(order, worker)), flush=True)


if __name__ == "__main__":
    main()
