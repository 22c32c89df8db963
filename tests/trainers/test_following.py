"""`gymllm-train` in two processes on loopback, as a user starts it: parameters, deaths, refusals.

Tests that start several runs take minutes where nothing is compiled yet, and are marked slow.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

PATIENCE_S = 600
DEATH_S = 60
"""How soon the death of one process must have ended the other."""
_SMALL = """
    --warm-start.no-enabled --warm-start.vocab-size 300 --env.kwargs.size 3 --rollout.max-turns 3
    --rollout.group-size 2 --rollout.max-lag 0 --rollout.concurrency 4 --learner.groups-per-step 2
    --learner.deterministic --learner.smaller-shapes 0 --learner.row-tokens 384 --engine.slots 4
    --engine.small-batch 4 --engine.prefill-tokens 64 --optimizer.learning-rate 1e-3
    --optimizer.eps 1e-3 --metrics.wandb off
"""
SMALL = _SMALL.split()
"""A run whose programs compile soon; eps lets rounding stay as small in a parameter as in its gradient."""


class Process:
    """One of a run's processes. Its output is read as it comes."""

    def __init__(self, folder: Path, arguments: list[str], *, devices: int = 1) -> None:
        flags = f"--xla_force_host_platform_device_count={devices}"
        self._running = subprocess.Popen(
            [sys.executable, "-m", "gymllm_trainers", *arguments],
            cwd=folder,
            env=os.environ
            | {
                "XLA_FLAGS": flags,
                "JAX_PLATFORMS": "cpu",
                "XDG_CACHE_HOME": str(folder.parent / "cache"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._output: list[str] = []
        self._changed = threading.Condition()
        self._over = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._running.stdout is not None
        for line in self._running.stdout:
            with self._changed:
                self._output.append(line)
                self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._running.stdout.close()

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return "".join(self._output)

    def until(self, text: str) -> None:
        """Waits until it has printed that."""
        with self._changed:
            came = self._changed.wait_for(
                lambda: text in self.output or self._over, timeout=PATIENCE_S
            )
        assert came, self.output[-3000:]
        assert text in self.output, self.output[-3000:]

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        self._running.send_signal(number)

    def end(self, timeout_s: float = PATIENCE_S) -> int:
        """Waits for its end; returns the exit code."""
        code = self._running.wait(timeout_s)
        with self._changed:
            assert self._changed.wait_for(lambda: self._over, timeout=PATIENCE_S)
        return code

    def kill(self) -> None:
        """Ends it, if it still runs."""
        self._running.kill()
        self._running.wait()
        self._reader.join()


class Starter:
    """Starts processes in one folder, and ends those that are left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[Process] = []

    def one(self, *arguments: str, devices: int = 2) -> Process:
        """A run in one process."""
        process = Process(self.folder, list(arguments), devices=devices)
        self._processes.append(process)
        return process

    def two(self, *arguments: str, others: tuple[str, ...] = ()) -> tuple[Process, Process]:
        """A run in two; `others` are arguments of the second alone."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        join = ["--processes.coordinator", address, "--processes.num-processes", "2"]

        def start(number: int, *more: str) -> Process:
            own = [*join, "--processes.process-id", str(number)]
            return self.one(*own, *arguments, *more, devices=1)

        return start(0), start(1, *others)

    def weights(self, name: str) -> dict[str, np.ndarray]:
        """The model that a run has written."""
        return load_file(self.folder / "runs" / name / "model" / "model.safetensors")

    def checkpoints(self, name: str) -> list[str]:
        """Names of a run's checkpoints, oldest first."""
        folder = self.folder / "runs" / name / "checkpoints"
        return sorted(path.name for path in folder.glob("step_*"))

    def close(self) -> None:
        """Ends what still runs."""
        for process in self._processes:
            process.kill()


@pytest.fixture
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    # What is compiled in one test is there in the next.
    started = Starter(tmp_path_factory.mktemp("processes"))
    yield started
    started.close()


def assert_close(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert np.abs(array - other[name]).max() < 1e-5, name


def assert_apart(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert max(np.abs(array - other[name]).max() for name, array in one.items()) > 1e-4


# ------------------------------------------------------------------ what can't begin


def test_processes_with_other_settings_are_refused_by_name(starter: Starter) -> None:
    both = starter.two("--name", "r", *SMALL, others=("--algorithm.preset", "rloo", "--steps", "7"))
    for process in both:
        assert process.end() == 2
        assert "process 1: it was started with other settings" in process.output
        assert "algorithm.preset is 'rloo', but '" in process.output
        assert "steps is 7, but 40 in process 0" in process.output
    assert not (starter.folder / "runs" / "r").exists()


def test_what_stops_the_leader_is_said_by_the_follower(starter: Starter) -> None:
    leader, follower = starter.two("--model.name", "./nowhere", "--metrics.wandb", "off")
    assert leader.end() == 2
    assert re.search(r"No model at \S*nowhere", leader.output)
    assert follower.end() == 1
    said = r"process 0, which leads, was stopped by an error: No model at \S*nowhere"
    assert re.search(said, follower.output)
    assert "Traceback" not in leader.output + follower.output


def test_a_reference_in_one_processs_memory_is_refused(starter: Starter) -> None:
    kept = ("--algorithm.kl-coef", "0.1", "--learner.reference-on-host")
    leader, follower = starter.two("--name", "r", *SMALL, *kept)
    assert leader.end() == 2
    assert follower.end() in (1, 2)
    assert "needs all of the reference in one process, and there are 2" in leader.output
    assert "Traceback" not in leader.output + follower.output


# ------------------------------------------------------------------ what is trained


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--model.lora-rank", "2")], ids=["whole", "adapters"])
def test_two_processes_train_to_the_parameters_of_one(
    starter: Starter, more: tuple[str, ...]
) -> None:
    for name, steps in (("two", "2"), ("less", "1")):
        leader, follower = starter.two("--name", name, "--steps", steps, *SMALL, *more)
        assert leader.end() == 0, leader.output[-3000:]
        assert follower.end() == 0, follower.output[-3000:]
        assert "process 1 of 2: ended with the run" in follower.output
    alone = starter.one("--name", "one", "--steps", "2", *SMALL, *more)
    assert alone.end() == 0, alone.output[-3000:]
    assert_close(starter.weights("two"), starter.weights("one"))
    assert_apart(starter.weights("two"), starter.weights("less"))
    # What two processes have saved goes on in one, and the other way round.
    back = starter.one("--resume", "runs/two", "--steps", "3")
    assert back.end() == 0, back.output[-3000:]
    leader, follower = starter.two("--resume", "runs/one", "--steps", "3")
    assert leader.end() == follower.end() == 0, leader.output[-3000:]
    assert "step 3/3" in back.output
    assert "step 3/3" in leader.output
    assert "step 2/3" not in back.output + leader.output
    assert_close(starter.weights("two"), starter.weights("one"))
    if more:
        adapters = [
            load_file(starter.folder / "runs" / name / "adapters" / "adapter_model.safetensors")
            for name in ("two", "one")
        ]
        assert_close(*adapters)


@pytest.mark.slow
def test_examples_are_imitated_alike_in_two_processes(starter: Starter) -> None:
    with (starter.folder / "chats.jsonl").open("w") as file:
        for number in range(8):
            chat = [
                {"role": "user", "content": f"Two and {number}?"},
                {"role": "assistant", "content": f"{number + 2}."},
            ]
            print(json.dumps({"messages": chat}), file=file)
    sft = "--algorithm.preset sft --supervised.files chats.jsonl --supervised.examples-per-step 4 "
    sft += "--warm-start.no-enabled --warm-start.vocab-size 300 --optimizer.eps 1e-3 --metrics.wandb off"
    leader, follower = starter.two("--name", "two", "--steps", "3", *sft.split())
    assert leader.end() == follower.end() == 0, leader.output[-3000:]
    alone = starter.one("--name", "one", "--steps", "3", *sft.split())
    assert alone.end() == 0, alone.output[-3000:]
    assert_close(starter.weights("two"), starter.weights("one"))
    for process in (leader, alone):
        assert re.search(r"step 3/3  loss \d\.\d+  learning rate \d\.\d\de-\d\d", process.output)


# ------------------------------------------------------------------ how it ends


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 1], ids=["leader", "follower"])
def test_a_death_ends_the_run_which_goes_on_from_its_checkpoint(
    starter: Starter, dead: int
) -> None:
    both = starter.two("--name", "r", "--steps", "1000", "--checkpoint.every", "1", *SMALL)
    both[0].until("step 3/")
    both[dead].send(signal.SIGKILL)
    other = both[1 - dead]
    assert other.end(DEATH_S) != 0
    assert re.search("process.* died", other.output), other.output[-3000:]
    if dead == 1:
        assert "start all of them again with --resume" in other.output
        assert re.search(r"the last one is of step \d|step_\d{8}", other.output)
        assert "gymllm-eval" not in other.output
    last = int(starter.checkpoints("r")[-1].removeprefix("step_"))
    leader, follower = starter.two("--resume", "runs/r", "--steps", str(last + 2))
    assert leader.end() == follower.end() == 0, leader.output[-3000:]
    done = [int(step) for step in re.findall(r"^step (\d+)/", leader.output, re.MULTILINE)]
    assert done == [last + 1, last + 2]


def test_ctrl_c_is_for_the_leader(starter: Starter) -> None:
    leader, follower = starter.two("--name", "r", "--steps", "1000", *SMALL)
    leader.until("step 2/")
    follower.send(signal.SIGINT)
    follower.until("process 1 of 2 ends when process 0 does; once more ends it now")
    leader.send(signal.SIGINT)
    assert leader.end() == follower.end() == 130, leader.output[-3000:]
    assert "Interrupted at step" in leader.output
    assert "process 1 of 2: ended, as process 0 was interrupted" in follower.output
    steps = re.findall(r"^step (\d+)/", leader.output, re.MULTILINE)
    assert starter.checkpoints("r") == [f"step_{int(steps[-1]):08d}"]
