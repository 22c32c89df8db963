"""A run that is killed at any moment goes on from its last whole checkpoint, which can be exported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from gymllm_trainers import cli
from gymllm_trainers.checkpoint import Checkpointer
from gymllm_trainers.models import load_model

SETTINGS = {
    "env.kwargs.size": 2,
    "rollout.group-size": 2,
    "rollout.concurrency": 8,
    "engine.slots": 8,
    "engine.context-length": 256,
    "learner.groups-per-step": 1,
    "algorithm.zero-variance": "keep",
    "optimizer.state-dtype": "int8",
    "checkpoint.every": 1,
    "checkpoint.keep-every": 2,
    "metrics.wandb": "off",
}
FLAGS = [str(word) for name, value in SETTINGS.items() for word in (f"--{name}", value)]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    home = {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.Popen(
        [str(Path(sys.executable).with_name("gymllm-train")), *arguments],
        cwd=folder,
        env=os.environ | home,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_killed_run_goes_on_and_its_checkpoint_is_its_model(tmp_path, monkeypatch):
    arguments = ["--name", "job", "--steps", "500", "--warm-start.no-enabled", *FLAGS]
    with start(tmp_path, *arguments) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "step 5/500" in line:  # its checkpoint is being written now
                process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "".join(lines)
    run = tmp_path / "runs" / "job"
    saver = Checkpointer(run / "checkpoints", read_only=True)
    left = saver.latest()
    assert left is not None
    assert left >= 4  # the save of step 5 waited for that of step 4

    with start(tmp_path, "--resume", "runs/job", "--steps", str(left + 2)) as process:
        output = process.communicate(timeout=600)[0]
    assert process.returncode == 0, output
    assert saver.latest() == left + 2
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, left + 3))
    assert all(step % 2 == 0 or step > left for step in saver.steps())
    assert not list(run.glob("checkpoints/.writing-*"))

    monkeypatch.chdir(tmp_path)
    assert cli.export(["runs/job", "--out", "exported"]) == 0
    trained, exported = load_model(run / "model"), load_model(tmp_path / "exported")
    pairs = zip(jax.tree.leaves(trained.params), jax.tree.leaves(exported.params), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_array_equal(ours, theirs)
