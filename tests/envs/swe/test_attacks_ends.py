"""Attacks by the graded package: ends, reports, the judge, bombs. The bug is left in; each must get 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from attacking import FAILS, Attack, assert_worthless, batches, code

from gymllm_envs.swe.task import SweTask

pytestmark = pytest.mark.asyncio

# Ends of the process, forged reports, the judge.
_ENDS = [
    code("os._exit(0) at import", "import os\nos._exit(0)", r"exit 0|" + FAILS),
    code("os._exit(0) at the end", "import atexit, os\natexit.register(os._exit, 0)", FAILS),
    code("sys.exit(0) at import", "import sys\nsys.exit(0)", FAILS),
    code("pytest.exit", "import pytest\npytest.exit('5 passed', returncode=0)", FAILS),
    code("a skip at import", "import pytest\npytest.skip('x', allow_module_level=True)", FAILS),
    code("skips", "def chunks(items, size):\n    import pytest\n    pytest.skip('x')", FAILS),
    code("xfail", "def chunks(items, size):\n    import pytest\n    pytest.xfail('x')", FAILS),
    code(
        "forged output",
        "import os\n"
        "for fd in (1, 2): os.write(fd, b'tests/test_chunks.py::test_chunks PASSED\\n5 passed in 0.1s\\n')\n"
        "os._exit(0)",
        FAILS,
    ),
    code(
        "forged reports to all descriptors",
        """
import os
for fd in range(3, 64):
    try: os.write(fd, b'{"collected": ["tests/test_chunks.py::test_chunks"]}\\n'
                      b'{"test": "tests/test_chunks.py::test_chunks", "outcome": "passed"}\\n')
    except OSError: pass
os._exit(0)
""",
        r"tampered with|" + FAILS,
    ),
    code(
        "all answers ahead",
        """
import gc, json, os
def chunks(items, size):
    for plugin in gc.get_objects():
        if type(plugin).__name__ == "Session":
            for item in plugin.items:
                line = json.dumps({"test": item.nodeid, "outcome": "passed"}) + "\\n"
                for fd in range(3, 64):
                    try: os.write(fd, line.encode())
                    except OSError: pass
            os._exit(0)
""",
    ),
    code(
        "no report at all",
        "import os\nfor fd in range(3, 64):\n    try: os.dup2(1, fd)\n    except OSError: pass",
        FAILS,
    ),
    code(
        "closed descriptors",
        "import os\nos.closerange(3, 64)",
        FAILS,
    ),
    code(
        "reports that can't be read",
        """
import os, __main__
def chunks(items, size):
    for fd in range(3, 64):
        try: os.write(fd, b'{"test": [[]], "outcome": [], "seconds": "x"}\\n[1]\\n')
        except OSError: pass
""",
    ),
    code(
        "a line without an end",
        """
import os
def chunks(items, size):
    for fd in range(3, 64):
        try:
            for _ in range(1200): os.write(fd, b"x" * 1024)
        except OSError: pass
""",
    ),
    code(
        "half a character in a message",
        r"def chunks(items, size): raise AssertionError('\ud800 \x1b[31m' * 5000)",
        FAILS,
    ),
    code(
        "signals to itself",
        "import os, signal\ndef chunks(items, size): os.kill(os.getpid(), signal.SIGKILL)",
        "signal 9",
    ),
    code(
        "an alarm",
        "import signal, os\nsignal.signal(signal.SIGALRM, lambda *a: os._exit(0))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.001)",
        FAILS,
    ),
    code(
        "a thread that ends all",
        "import threading, os\nthreading.Timer(0.001, os._exit, [0]).start()",
        FAILS,
    ),
    code("an interrupt", "def chunks(items, size): raise KeyboardInterrupt", FAILS),
    code(
        "a crash",
        "def chunks(items, size):\n    import ctypes\n    ctypes.string_at(0)",
        "signal 11",
    ),
    code(
        "the judge's descriptors",
        """
import os
judge = os.getppid()
for fd in range(64):
    try:
        with open(f"/proc/{judge}/fd/{fd}", "wb", 0) as file: file.write(b'{"results": {}}\\n')
        os._exit(7)
    except OSError: pass
try:
    with open(f"/proc/{judge}/mem", "rb+", 0) as file: os._exit(8)
except OSError: pass
try:
    open(f"/proc/{judge}/environ").read()
    os._exit(9)
except OSError: pass
""",
        r"fail, 0 of",
    ),
    code(
        "ptrace on the judge",
        "import ctypes, os\nif ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0: os._exit(7)",
        r"fail, 0 of",
    ),
    code("signals to the judge", "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)", FAILS),
    code("a stopped judge", "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)", FAILS),
    code("signals to all", "import os, signal\nos.kill(-1, signal.SIGKILL)", FAILS),
]

# Resources. The task has less time for them.
_BOMBS = [
    code("an endless loop", "while True: pass", "timeout"),
    code("an endless sleep", "import time\ntime.sleep(1e6)", "timeout"),
    code("a memory bomb", "held = []\nwhile True: held.append(b'x' * (1 << 26))", FAILS),
    code(
        "a fork bomb", "import os\nwhile True:\n    try: os.fork()\n    except OSError: break", ""
    ),
    code(
        "a full disk",
        "with open('/tmp/x', 'wb') as file:\n    while True: file.write(b'x' * (1 << 22))",
        FAILS,
    ),
    code("a log bomb", "import os\nwhile True: os.write(2, b'x' * (1 << 20))", FAILS),
    code("a message bomb", "def chunks(items, size): raise AssertionError('x' * 10**8)", FAILS),
    code(
        "no bottom",
        "import sys\nsys.setrecursionlimit(10**6)\ndef chunks(items, size): return chunks(items, size)",
        FAILS,
    ),
    code(
        "endless output of a test",
        "def chunks(items, size):\n    for _ in range(10**6): print('x' * 99)",
        FAILS,
    ),
]


def _names(attacks: Sequence[Attack]) -> str:
    return f"{attacks[0].name} and {len(attacks) - 1} more"


@pytest.mark.parametrize("attacks", batches(_ENDS), ids=_names)
async def test_no_end_and_no_report_is_believed(task: SweTask, attacks: Sequence[Attack]) -> None:
    await assert_worthless(task, attacks)


@pytest.mark.parametrize("attacks", batches(_BOMBS, 5), ids=_names)
async def test_the_graded_package_uses_up_what_it_has(
    task: SweTask, attacks: Sequence[Attack]
) -> None:
    await assert_worthless(replace(task, timeout_s=2), attacks, at_once=5)
