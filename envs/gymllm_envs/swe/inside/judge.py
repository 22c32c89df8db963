"""Has a worker run tests one by one and says what came of each. Runs in a fresh sandbox.

The worker imports the graded code, so nothing that it says is believed further than this: it answers about
the test that it was just told to run, once. Which of them must fail (canaries) it is never told. The worker
can't write where this process writes, or see its memory.

    stdin   one JSON object: `Order`
    stdout  JSON lines: {"ready": true} once pytest is there, before any graded code is; then one `Report`
"""

# ruff: noqa: T201 - stdout is how it reports

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import TypedDict, cast

_MOST_LINE_BYTES = 1 << 20
_MOST_MESSAGE_CHARS = 2000
_CHILDREN = "GYMLLM_PYTHONPATH"
_PR_SET_DUMPABLE = 4


class Order(TypedDict):
    """What is to be run."""

    files: list[str]
    """Test files, from the tree's root."""
    tests: list[str]
    """pytest's names of those wanted, canaries among them."""
    root: str
    python_path: list[str]
    pytest_args: list[str]
    timeout_s: float


class Result(TypedDict):
    """What came of one test."""

    outcome: str
    """passed, failed, skipped."""
    message: str


class Report(TypedDict):
    """What came of all. Tests that aren't in it were not there, or not answered for."""

    results: dict[str, Result]
    tampered: str
    """Not empty: how the worker was caught."""
    ended: str
    """How the worker ended: "timeout", "exit N", "signal N", "killed"."""
    cpu_s: float
    """What the worker, and what it waited for, has used."""


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
                [sys.executable, "-P", "-s", "-S", "-B", f"{here}/worker.py", str(told), str(said)],
                # The order of sets is in the names of some tests: always the same. The modules' path is
                # for what tests start; the worker itself looks into the standard library first.
                env={
                    **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
                    "PYTHONHASHSEED": "0",
                    _CHILDREN: os.environ.get("PYTHONPATH", ""),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(told, said),
                start_new_session=True,
                cwd=order["root"],
            )
        os.close(told)
        os.close(said)
        self._pid_fd = os.pidfd_open(self.process.pid)
        self.ends = time.monotonic() + order["timeout_s"]
        self._buffer = b""

    def send(self, message: object) -> None:
        """Tells it something. It is gone: `receive` says so.

        Raises:
            TimeoutError: It doesn't listen, and has had its time.
        """
        line = json.dumps(message).encode() + b"\n"
        os.set_blocking(self.tell, False)
        with contextlib.suppress(BrokenPipeError):
            while line:
                left = self.ends - time.monotonic()
                if left <= 0 or not select.select([], [self.tell], [], left)[1]:
                    raise TimeoutError
                line = line[os.write(self.tell, line[: select.PIPE_BUF]) :]

    def receive(self) -> dict[str, object] | None:
        """The next thing it says; None when it is gone.

        Raises:
            TimeoutError: It has had its time.
            TamperedError: No message.
        """
        while b"\n" not in self._buffer:
            left = max(0.0, self.ends - time.monotonic())
            ready = select.select([self.hear, self._pid_fd], [], [], left)[0]
            if not ready:
                raise TimeoutError
            # It may have ended while a child of it holds the pipe open.
            if self.hear not in ready or not self._read():
                return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        with contextlib.suppress(ValueError, RecursionError):
            said: object = json.loads(line)
            if isinstance(said, dict):
                return cast("dict[str, object]", said)
        raise TamperedError(f"the report holds what isn't a report: {line[:80]!r}")

    def _read(self) -> bool:
        """Takes what there is; False at its end."""
        data = os.read(self.hear, 1 << 16)
        self._buffer += data
        if len(self._buffer) > _MOST_LINE_BYTES:
            raise TamperedError("the report holds a line without an end")
        return bool(data)

    def said_more(self) -> bool:
        """Whether it has said something that nobody has asked for."""
        if not self._buffer and select.select([self.hear], [], [], 0)[0]:
            self._read()
        return bool(self._buffer)

    def end(self) -> tuple[str, float]:
        """Waits for its end a little, kills it, and says how it ended and the seconds of CPU it took."""
        wait_s = min(5.0, max(0.0, self.ends - time.monotonic()))
        gone = bool(select.select([self._pid_fd], [], [], wait_s)[0])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        _, status, used = os.wait4(self.process.pid, 0)
        code = self.process.returncode = os.waitstatus_to_exitcode(status)
        cpu_s = used.ru_utime + used.ru_stime
        if not gone:
            return "killed", cpu_s
        return (f"signal {-code}" if code < 0 else f"exit {code}"), cpu_s


def check_whole(said: dict[str, object]) -> None:
    """Raises TamperedError where the worker has seen that the test machinery was changed."""
    if said.get("tampered"):
        raise TamperedError(str(said["tampered"])[:500])


def names_in(said: dict[str, object]) -> list[str]:
    """The tests that the worker has found, in pytest's order."""
    check_whole(said)
    collected = said.get("collected", [])
    if not isinstance(collected, list):
        raise TamperedError(f"the list of tests is none: {str(said)[:80]}")
    names = [name for name in cast("list[object]", collected) if isinstance(name, str)]
    return list(dict.fromkeys(names))


def answer_in(said: dict[str, object], name: str) -> Result:
    """What came of the test that was asked for."""
    check_whole(said)
    outcome = said.get("outcome")
    if said.get("test") != name or outcome not in ("passed", "failed", "skipped"):
        raise TamperedError(f"an answer about {str(said.get('test'))[:80]!r}, asked was {name!r}")
    message = str(said.get("message", ""))[:_MOST_MESSAGE_CHARS]
    return {
        "outcome": str(outcome),
        "message": message.encode("utf-8", "replace").decode(),  # lone halves of characters
    }


def run_all(order: Order, worker: Worker, results: dict[str, Result]) -> None:
    """Has everything run that is wanted and there.

    Raises:
        TimeoutError: The time was over.
        TamperedError: The worker was caught.
    """
    told = {key: order[key] for key in ("files", "root", "python_path", "pytest_args")}
    worker.send(told)
    said = worker.receive()
    wanted = set(order["tests"])
    tests = [name for name in names_in(said or {}) if name in wanted]
    for number, name in enumerate(tests):
        if worker.said_more():
            raise TamperedError(f"results before {name} was run")
        worker.send({"run": name, "next": (*tests[number + 1 :][:1], None)[0]})
        said = worker.receive()
        if said is None:
            return
        results[name] = answer_in(said, name)
    if worker.said_more():
        raise TamperedError("results before the last test was over")
    worker.send({"end": True})
    said = worker.receive()
    if said is not None:
        raise TamperedError(str(said.get("tampered") or "results after the last test")[:500])


def judge(order: Order, worker: Worker) -> Report:
    """Has everything run, and writes down how it went."""
    results: dict[str, Result] = {}
    tampered, ended = "", ""
    try:
        run_all(order, worker, results)
    except TimeoutError:
        ended = "timeout"
    except TamperedError as caught:
        tampered = str(caught).encode("utf-8", "replace").decode()
    how, cpu_s = worker.end()
    return {"results": results, "tampered": tampered, "ended": ended or how, "cpu_s": cpu_s}


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
        print(json.dumps({"ready": False, "ended": worker.end()[0]}), flush=True)
        return
    print(json.dumps({"ready": True}), flush=True)
    print(json.dumps(judge(order, worker)), flush=True)


if __name__ == "__main__":
    main()
