"""Processes that can't join the others say so in a sentence, and end."""

from __future__ import annotations

import socket
import subprocess
import sys


def train(coordinator: str, process_id: int) -> subprocess.CompletedProcess[str]:
    flags = ["--coordinator", coordinator, "--num-processes", "2", "--start-timeout-s", "2"]
    flags = [flag.replace("--", "--processes.") for flag in flags]
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "gymllm_trainers",
            *flags,
            "--processes.process-id",
            str(process_id),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_process_that_is_alone_says_so() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    done = train(coordinator, 1)
    assert done.returncode == 1
    assert f"process 1 of 2 couldn't join the others at {coordinator} within 2 s" in done.stderr


def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        done = train(f"localhost:{taken.getsockname()[1]}", 0)
    assert done.returncode == 1
    assert "process 0 can't listen on port" in done.stderr
    assert "Choose another port" in done.stderr
