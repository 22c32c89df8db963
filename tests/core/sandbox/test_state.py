"""What is left when the process that made sandboxes is killed, and who clears it away."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sandbox_helpers import cgroups_of, processes_with

from gymllm.sandbox.state import owner_name, reap, start_time

OWNER = """
import anyio, sys
from gymllm.sandbox import SandboxSpec, open_sandbox
async def main():
    sandbox = await open_sandbox(SandboxSpec())
    shell = await sandbox.shell()
    await shell.run("(setsid sleep 77.06 &); sleep 77.06 &")
    print("ready", flush=True)
    await anyio.sleep(60)
anyio.run(main)
"""


def test_sigkill_of_ourselves_leaves_no_process_and_the_next_start_clears_the_rest(
    tmp_path: Path,
) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, env=environment
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        name = owner_name(owner.pid)
        assert len(processes_with("77.06")) >= 2
        owner.kill()
    deadline = time.monotonic() + 5
    while processes_with("77.06") and time.monotonic() < deadline:
        os.sched_yield()
    assert not processes_with("77.06")
    root = tmp_path / f"gymllm-sandbox-{os.getuid()}"
    assert [path.name for path in root.iterdir()] == [name]
    had_groups = bool(cgroups_of(name))
    code = "from gymllm.sandbox.state import state; state()"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert list(root.iterdir()) == []
    assert not cgroups_of(name)
    assert had_groups or not cgroups_of("")


def test_the_reaper_kills_nobody_who_got_an_old_pid(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "77.07"]) as other:
        for owner in (f"{other.pid}-1", owner_name(other.pid)):
            noted = tmp_path / owner / "noted"
            noted.mkdir(parents=True)
            (noted / "0").write_text(f"pid {other.pid}-1\ncgroup {tmp_path}/none\nrubbish")
        gone = reap(tmp_path)
        assert [path.name for path in gone] == [f"{other.pid}-1"]
        assert start_time(other.pid) is not None
        other.kill()
    (tmp_path / "dead" / "noted").mkdir(parents=True)
    assert len(reap(tmp_path)) == 2


def test_threads_that_are_first_together_get_one_state(tmp_path: Path) -> None:
    code = (
        "import sys, tempfile, threading; tempfile.tempdir = sys.argv[1]\n"
        "from gymllm.sandbox.state import state\n"
        "gate, got = threading.Barrier(8), []\n"
        "def run(): gate.wait(); got.append(state().unique('graded'))\n"
        "threads = [threading.Thread(target=run) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "assert len(set(got)) == 8, got\n"
    )
    for _ in range(3):
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_groups_of_who_was_killed_before_anything_was_noted_are_removed(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from gymllm.sandbox import SandboxSpec
from gymllm.sandbox.cgroups import make_cgroups
from gymllm.sandbox.state import State
made = make_cgroups(SandboxSpec(), State(Path(sys.argv[1])))
print(*made.folders, sep="\\n", flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    groups = [Path(line) for line in done.stdout.split()]
    if not groups:
        pytest.skip("no control groups can be made here")
    stays = subprocess.Popen(["sleep", "77"])
    (groups[0] / "cgroup.procs").write_text(str(stays.pid))
    assert all(group.is_dir() for group in groups)
    assert len(reap(tmp_path)) == 1
    assert not any(group.exists() for group in groups)
    assert stays.wait() == -9
