"""The whole default job at about a tenth of its size: real processes, interrupted, resumed, finished.

One run's life, in order: Ctrl-C in its warm start, resumed and finished, resumed with more steps and
interrupted in training, resumed and finished again. Each test looks at one of the moments between.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import jax
import pytest

from gymllm.trajectory import Trajectory
from gymllm.transcripts import read_jsonl
from gymllm_trainers.checkpoint import Checkpointer
from gymllm_trainers.config_files import read_yaml
from gymllm_trainers.models import load_model

SIZES = {
    "steps": 4,
    "env.kwargs.size": 2,
    "warm-start.episodes": 70,
    "rollout.group-size": 4,
    "rollout.concurrency": 16,
    "engine.slots": 8,
    "engine.context-length": 256,
    "learner.groups-per-step": 2,
    "learner.rows": 2,
    "checkpoint.every": 2,
    "metrics.wandb": "offline",
}
MAX_LAG = 2
FLAGS = [
    "--name",
    "job",
    *(str(word) for flag in SIZES.items() for word in (f"--{flag[0]}", flag[1])),
]


class Job:
    """`gymllm-train` as a person runs it, in a folder and with a cache of its own."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("WANDB")},
            "XDG_CACHE_HOME": str(folder / "cache"),
            "HOME": str(folder),
        }
        program = str(Path(sys.executable).with_name("gymllm-train"))
        self.output = ""
        self._process = subprocess.Popen(
            [program, *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        # Whatever hangs, ends.
        self._limit = threading.Timer(120, self._process.kill)
        self._limit.start()

    def wait_for(self, text: str) -> None:
        """Reads the output until a line has `text` in it."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output += line
            if text in line:
                return
        raise AssertionError(f"{text!r} never came:\n{self.output}")

    def interrupt(self) -> None:
        """What Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """Reads the rest of the output; returns the exit code."""
        assert self._process.stdout is not None
        self.output += self._process.stdout.read()
        return self._process.wait()

    def close(self) -> None:
        """Leaves nothing behind."""
        self._limit.cancel()
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@dataclass
class Moment:
    """What was there when a process had ended."""

    code: int
    seconds: float
    """From Ctrl-C, or from the start, to the end."""
    output: str
    run: Path
    """A copy of the run's folder."""
    metrics: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        lines = self.run / "metrics.jsonl"
        text = lines.read_text() if lines.exists() else ""
        self.metrics = [json.loads(line) for line in text.splitlines()]

    @property
    def checkpoint(self) -> int | None:
        return Checkpointer(self.run / "checkpoints").latest()

    def trajectories(self) -> dict[int, list[Trajectory]]:
        """Of each step."""
        files = sorted((self.run / "trajectories").glob("step_*.jsonl"))
        return {int(file.stem.removeprefix("step_")): list(read_jsonl(file)) for file in files}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


def live(folder: Path, name: str, arguments: list[str], *, interrupt_at: str = "") -> Moment:
    job = Job(folder, arguments)
    try:
        started = time.monotonic()
        if interrupt_at:
            job.wait_for(interrupt_at)
            started = time.monotonic()
            job.interrupt()
        code = job.end()
        seconds = time.monotonic() - started
    finally:
        job.close()
    copy = folder / name
    shutil.copytree(folder / "runs" / "job", copy, symlinks=True)
    return Moment(code, seconds, job.output, copy)


@pytest.fixture(scope="module")
def interrupted_early(folder: Path) -> Moment:
    return live(folder, "early", FLAGS, interrupt_at="scripted episodes")


@pytest.fixture(scope="module")
def finished(folder: Path, interrupted_early: Moment) -> Moment:
    # What is there after kill -9 in the second step: records, and no checkpoint to go on from.
    run = folder / "runs" / "job"
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.0}\n')
    for step in (1, 2):
        (run / "trajectories" / f"step_{step:06d}.jsonl").write_text("{}\n")
    return live(folder, "finished", ["--resume", "runs/job"])


@pytest.fixture(scope="module")
def interrupted_late(folder: Path, finished: Moment) -> Moment:
    arguments = ["--resume", "runs/job", "--steps", "1000", "--checkpoint.every", "0"]
    return live(folder, "late", arguments, interrupt_at="step 6/1000")


@pytest.fixture(scope="module")
def resumed(folder: Path, interrupted_late: Moment) -> Moment:
    assert interrupted_late.checkpoint is not None
    steps = str(interrupted_late.checkpoint + 2)
    return live(folder, "resumed", ["--resume", "runs/job", "--steps", steps])


@pytest.fixture(scope="module")
def interrupted_last(folder: Path, resumed: Moment) -> Moment:
    """Ctrl-C when every step is done and the rest is being written."""
    assert resumed.checkpoint is not None
    arguments = ["--resume", "runs/job", "--steps", str(resumed.checkpoint + 1)]
    return live(folder, "last", arguments, interrupt_at="writing the model")


@pytest.fixture(params=["finished", "resumed"])
def whole(request: pytest.FixtureRequest) -> Moment:
    """A run that ended by itself."""
    moment: Moment = request.getfixturevalue(request.param)
    assert moment.code == 0, moment.output
    return moment


def test_what_was_compiled_is_listed(whole: Moment) -> None:
    assert "programs compiled: learner gradient, learner step" in whole.output.replace("\n", " ")


# ---------------------------------------------------------------------- Ctrl-C


def test_ctrl_c_in_the_warm_start_ends_at_once_and_can_be_resumed(
    interrupted_early: Moment, finished: Moment
) -> None:
    assert interrupted_early.code == 130, interrupted_early.output
    assert interrupted_early.seconds < 6
    assert "Traceback" not in interrupted_early.output
    assert interrupted_early.checkpoint is None
    assert finished.code == 0, finished.output


def test_ctrl_c_in_training_leaves_a_checkpoint_of_the_last_step(interrupted_late: Moment) -> None:
    assert interrupted_late.code == 130, interrupted_late.output
    assert interrupted_late.seconds < 6
    assert "Traceback" not in interrupted_late.output
    steps = [int(record["step"]) for record in interrupted_late.metrics]
    assert steps == list(range(1, len(steps) + 1))
    # The step may have been taken and its numbers not written yet.
    assert interrupted_late.checkpoint in (steps[-1], steps[-1] + 1)
    assert "Interrupted at step" in interrupted_late.output


def test_ctrl_c_while_the_run_is_closing_loses_nothing(interrupted_last: Moment) -> None:
    assert interrupted_last.code == 130, interrupted_last.output
    assert interrupted_last.seconds < 6
    assert "Traceback" not in interrupted_last.output
    assert "Everything is in runs/job" in interrupted_last.output
    assert trace_of(interrupted_last).stat().st_size > 0
    assert interrupted_last.checkpoint == len(interrupted_last.metrics)


def test_interrupted_report_ends_with_how_to_go_on(
    interrupted_early: Moment, interrupted_late: Moment, finished: Moment
) -> None:
    for moment in (interrupted_early, interrupted_late):
        assert moment.output.rstrip().endswith("gymllm-train --resume runs/job")
    assert "gymllm-eval" not in interrupted_early.output, "there is nothing to evaluate yet"
    assert "gymllm-eval --model runs/job" in interrupted_late.output
    assert finished.output.rstrip().endswith("gymllm-eval --model runs/job")


def test_each_session_leaves_its_own_trace(
    interrupted_early: Moment, finished: Moment, interrupted_late: Moment
) -> None:
    names = [trace_of(moment).name for moment in (interrupted_early, finished, interrupted_late)]
    assert names == [f"trace{n}.perfetto-trace" for n in ("", "-2", "-3")]
    assert (
        trace_of(interrupted_early).read_bytes()
        == (finished.run / "trace.perfetto-trace").read_bytes()
    )


# ---------------------------------------------------------------------- what a run leaves


def trace_of(moment: Moment) -> Path:
    """The trace that the report names."""
    (name,) = re.findall(r"trace\S*\.perfetto-trace", moment.output)
    return moment.run / name


def test_every_step_is_on_record_once_and_finite(whole: Moment) -> None:
    steps = [int(record["step"]) for record in whole.metrics]
    assert steps == list(range(1, len(steps) + 1))
    assert whole.checkpoint == len(steps) == read_yaml(whole.run / "config.yaml")["steps"]
    for record in whole.metrics:
        assert all(math.isfinite(value) for value in record.values())
        # From six turns that can't be read, a tenth each, to the goal at once.
        assert -0.6 - 1e-9 <= record["reward/mean"] <= 1


def test_the_merged_configuration_is_saved(finished: Moment) -> None:
    saved = read_yaml(finished.run / "config.yaml")
    assert saved["env"]["kwargs"] == {"size": 2}
    assert saved["warm_start"]["episodes"] == 70
    assert saved["algorithm"]["preset"] == "default"
    assert saved["rollout"]["max_lag"] == MAX_LAG


def test_everything_that_is_promised_is_there(whole: Moment) -> None:
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    assert (whole.run / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert "left, down, right or up" in (whole.run / "trajectories.html").read_text()
    trace = Trace()
    trace.ParseFromString(trace_of(whole).read_bytes())
    names = {packet.track_event.name for packet in trace.packet}
    assert {"gradient", "decode", "prefill", "step"} <= names
    records = list((whole.run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert records
    assert all(record.stat().st_size > 0 for record in records)
    for promised in (
        "config.yaml",
        "metrics.jsonl",
        "reward.png",
        "trajectories.html",
        "checkpoints",
    ):
        assert promised in whole.output


def test_the_model_is_the_trained_policy(whole: Moment) -> None:
    model = load_model(str(whole.run / "model"))
    assert model.tokenizer.vocab_size == model.config.vocab_size
    start = load_model(str(next((whole.run.parent / "cache" / "gymllm" / "warm_start").iterdir())))
    assert jax.tree.structure(model.params) == jax.tree.structure(start.params)
    for after, before in zip(
        jax.tree.leaves(model.params), jax.tree.leaves(start.params), strict=True
    ):
        assert (after != before).any()


def test_the_time_shares_add_up_to_one(whole: Moment) -> None:
    for record in whole.metrics:
        for resource in ("learner", "engine"):
            shares = [v for name, v in record.items() if name.startswith(f"time/{resource}/")]
            assert sum(shares) == pytest.approx(1, abs=1e-3)


# ---------------------------------------------------------------------- what was trained on


def groups(trajectories: list[Trajectory]) -> dict[int, list[Trajectory]]:
    by_task: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_task.setdefault(trajectory.task.index, []).append(trajectory)
    return by_task


def test_groups_are_whole_and_no_task_comes_twice(whole: Moment) -> None:
    seen = Counter[int]()
    for step, trajectories in whole.trajectories().items():
        assert step <= len(whole.metrics)
        trained = 0
        for index, members in groups(trajectories).items():
            seen[index] += 1
            assert [t.member for t in members] == [0, 1, 2, 3]
            assert len({t.task.seed for t in members}) == 1
            trained += len({t.reward for t in members}) > 1
        assert trained == 2, "groups of a step, beside those whose rewards are all equal"
    assert max(seen.values()) == 1


def test_no_task_is_lost(finished: Moment) -> None:
    """Every task that was started is on record, or is to be played again."""
    assert finished.checkpoint is not None
    state = Checkpointer(finished.run / "checkpoints").restore_state(finished.checkpoint)
    played = {i for ts in finished.trajectories().values() for i in groups(ts)}
    assert played | set(state["again"]) == set(range(state["next_task"]))
    assert not played & set(state["again"])


def test_a_resume_goes_on_with_what_was_not_trained(
    interrupted_late: Moment, resumed: Moment
) -> None:
    step = interrupted_late.checkpoint
    assert step is not None
    state = Checkpointer(interrupted_late.run / "checkpoints").restore_state(step)
    before = {
        i for s, ts in interrupted_late.trajectories().items() if s <= step for i in groups(ts)
    }
    after = {i for s, ts in resumed.trajectories().items() if s > step for i in groups(ts)}
    assert len(resumed.metrics) == step + 2
    assert after
    assert not before & after
    assert after <= set(state["again"]) | set(range(state["next_task"], 10**6))
    # What was trained before is on record still.
    kept = {i for s, ts in resumed.trajectories().items() if s <= step for i in groups(ts)}
    assert kept == before


def test_no_token_older_than_max_lag_was_trained_on(whole: Moment) -> None:
    """The number of trained tokens is recounted from the trajectories."""
    lags = list[int]()
    for step, trajectories in whole.trajectories().items():
        record = whole.metrics[step - 1]
        count = stale = generated = 0
        for members in groups(trajectories).values():
            if len({t.reward for t in members}) == 1:
                continue
            for segment in (s for t in members for s in t.segments):
                lag = step - 1 - segment.versions
                assert (lag[segment.mask == 1] >= 0).all()
                lags += lag[segment.mask == 1].tolist()
                count += int(((segment.mask == 1) & (lag <= MAX_LAG))[1:].sum())
                stale += int(((segment.mask == 1) & (lag > MAX_LAG)).sum())
                generated += int(segment.mask.sum())
        assert record["learner/trained_tokens"] == count > 0
        assert record["learner/stale_share"] == pytest.approx(stale / generated)
    assert max(lags) >= 1, "work overlaps: some tokens are of an older policy"


def test_the_engine_and_the_learner_agree_on_fresh_tokens(whole: Moment) -> None:
    # The first step's tokens are all of the first policy, so nothing but rounding may differ.
    first = whole.metrics[0]
    assert first["learner/lag_max"] == 0
    assert first["learner/logprob_gap_max"] < 1e-4


def test_the_report_says_where_the_time_went(whole: Moment) -> None:
    assert "where the time goes" in whole.output
    assert re.search(r"Finished in \d", whole.output)
