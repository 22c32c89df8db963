"""What a run leaves: of each step once, of each session its trace, and what the page holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymllm.task import Task
from gymllm.timeline import Timeline
from gymllm.trajectory import Ending, Trajectory
from gymllm_trainers.config import MetricsSettings, TrainConfig
from gymllm_trainers.metrics import read_metrics
from gymllm_trainers.run_files import SHOWN_TRAJECTORIES, RunFiles
from gymllm_trainers.run_folder import RunFolder

CONFIG = TrainConfig(metrics=MetricsSettings(wandb="off"))


def trajectory(index: int = 0) -> Trajectory:
    return Trajectory(
        task=Task(index=index, id=f"t{index}", seed=0),
        member=0,
        attempt=0,
        segments=(),
        turns=(),
        messages=(),
        ending=Ending.TERMINATED,
        reward=0.0,
    )


def session(folder: RunFolder, *, resume_step: int | None, steps: range) -> RunFiles:
    files = RunFiles(folder, CONFIG, Timeline(), resume_step=resume_step)
    for step in steps:
        files.trajectories(step, [trajectory(step)])
        files.metrics(step, {"reward/mean": 0.0})
    files.close(draw=False)
    return files


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder.create(tmp_path, "a", "")
    yield folder
    folder.unlock()


@pytest.mark.parametrize("resume_step", [0, 2])
def test_steps_after_the_one_resumed_from_are_on_record_once(folder, resume_step):
    session(folder, resume_step=None, steps=range(1, 5))
    again = RunFolder(folder.path)
    session(again, resume_step=resume_step, steps=range(resume_step + 1, 4))
    assert [record["step"] for record in read_metrics(again.metrics)] == [1, 2, 3]
    lines = {file.name: file.read_text().count("\n") for file in again.trajectories.iterdir()}
    assert lines == {f"step_00000{step}.jsonl": 1 for step in (1, 2, 3)}


def test_trace_of_the_session_before_stays(folder):
    session(folder, resume_step=None, steps=range(0))
    first = folder.trace.read_bytes()
    again = RunFolder(folder.path)
    session(again, resume_step=0, steps=range(1, 2))
    assert again.trace.name == "trace-2.perfetto-trace"
    assert again.trace.exists()
    assert folder.trace.read_bytes() == first


@pytest.mark.parametrize(
    ("count", "said"), [(3, "all 3"), (SHOWN_TRAJECTORIES + 6, "the last 64 of 70")]
)
def test_page_says_how_many_of_all_episodes_it_holds(folder, count, said):
    files = RunFiles(folder, CONFIG, Timeline(), resume_step=None)
    files.trajectories(1, [trajectory(index) for index in range(count)])
    files.close(draw=True)
    assert files.shown == said
    assert f"{said}; every one is in trajectories/" in folder.transcripts.read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_lines_of_a_step_wait_for_a_full_disk_while_later_ones_come(folder, capsys):
    files = RunFiles(folder, CONFIG, Timeline(), resume_step=None)
    folder.trajectories_file(1).parent.mkdir(exist_ok=True)
    folder.trajectories_file(1).symlink_to("/dev/full")
    for step in (1, 2, 3):
        files.trajectories(step, [trajectory(step)])
    said = capsys.readouterr().err
    assert "waits in memory" in said
    assert "lost" not in said
    files.close(draw=False)
    assert "1 lines of" in capsys.readouterr().err
    assert folder.trajectories_file(3).read_text().count("\n") == 1
