"""The closing report and the reward curve."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from gymllm.timeline import Timeline
from gymllm_trainers import report
from gymllm_trainers.metrics import JsonlWriter
from gymllm_trainers.report import format_seconds, plot_rewards, print_report, time_shares
from gymllm_trainers.run_folder import RunFolder


class Clock:
    """Stands for `time.perf_counter_ns`, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 0
        monkeypatch.setattr("gymllm.timeline.timeline.time.perf_counter_ns", lambda: self.ns)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def printed(*, width: int = 100, **arguments: object) -> str:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        print_report(console=console, **arguments)  # type: ignore[arg-type] # tests give the right ones
    return capture.get()


def test_shares_are_exact_and_add_up(clock):
    timeline = Timeline()
    learner = timeline.clock("learner")
    for state, seconds in (("starting", 1), ("gradient", 1), ("waiting: groups", 1)):
        learner.enter(state)
        clock.ns += seconds * 10**9
    shares = time_shares(timeline)["learner"]
    assert sum(share.percent for share in shares) == pytest.approx(100, abs=1e-9)
    assert sorted(share.percent for share in shares) == [33.3, 33.3, 33.4]
    assert [share.seconds for share in shares] == [1, 1, 1]


def test_resources_of_one_kind_are_averaged(clock):
    timeline = Timeline()
    for slot, state in enumerate(("decoding", "waiting")):
        timeline.clock(f"engine/slot {slot}").enter(state)
    clock.ns += 4 * 10**9
    shares = {share.state: share for share in time_shares(timeline)["engine"]}
    assert shares["decoding"].seconds == shares["waiting"].seconds == 2
    assert shares["decoding"].percent == 50


def test_clock_that_has_not_moved_is_all_in_its_state(clock):
    timeline = Timeline()
    timeline.clock("learner")
    (share,) = time_shares(timeline)["learner"]
    assert (share.state, share.percent) == ("starting", 100)


def test_report_says_what_was_learnt_and_where_things_are(tmp_path, clock):
    folder = RunFolder.create(tmp_path, "a", "")
    writer = JsonlWriter(folder.metrics)
    for step in range(1, 21):
        writer.write(step, {"reward/mean": 0.2 if step <= 5 else 0.9})
    writer.close()
    timeline = Timeline()
    timeline.clock("learner")
    clock.ns += 10**9
    shown = printed(folder=folder, timeline=timeline, elapsed_s=125.0, notes=["warm start 31 s"])
    for text in ("Finished in 2 min 05 s", "20 steps", "reward 0.200 → 0.900", "warm start 31 s"):
        assert text in shown
    assert "starting" in shown
    assert "100.0" in shown
    assert f"Everything is in {folder.path}\n" in shown
    for path in (folder.config, folder.metrics, folder.trajectories):
        assert path.name in shown
    assert "trace.perfetto-trace" not in shown, "only what is there"
    assert "gymllm-eval" not in shown, "there is no model yet"
    assert "--resume" not in shown


def test_report_ends_with_what_to_type_next(tmp_path):
    folder = RunFolder.create(tmp_path, "a", "")
    shown = printed(folder=folder, timeline=Timeline(), elapsed_s=1.0, to_resume=True)
    assert shown.splitlines()[-1] == f"gymllm-train --resume {folder.path}"
    assert "gymllm-eval" not in shown
    assert "checkpoint" not in shown
    (folder.checkpoints / "step_00000002").mkdir(parents=True)
    shown = printed(folder=folder, timeline=Timeline(), elapsed_s=1.0, to_resume=True)
    assert shown.splitlines()[-2:] == [
        f"gymllm-eval --model {folder.path}",
        f"gymllm-train --resume {folder.path}",
    ]
    assert "checkpoints/step_00000002" in shown


def test_paths_are_never_folded_and_the_page_says_what_it_holds(tmp_path):
    folder = RunFolder.create(tmp_path, "a", "")
    (folder.wandb / ("offline-run-" + "x" * 90)).mkdir(parents=True)
    folder.transcripts.touch()
    shown = printed(
        folder=folder, timeline=Timeline(), elapsed_s=1.0, shown="the last 64 of 2048", width=60
    )
    assert f"wandb/offline-run-{'x' * 90}  wandb sync\n" in shown
    assert f"Everything is in {folder.path}\n" in shown
    assert "trajectories.html" in shown
    assert "the last 64 of 2048, open in a browser\n" in shown


def test_report_of_a_run_without_steps_is_printed(tmp_path):
    folder = RunFolder.create(tmp_path, "a", "")
    shown = printed(folder=folder, timeline=Timeline(), elapsed_s=1.0, headline="Stopped by Ctrl-C")
    assert "Stopped by Ctrl-C in 1.0 s, 0 steps" in shown


def test_report_never_raises(tmp_path, monkeypatch, capsys):
    folder = RunFolder.create(tmp_path, "a", "")
    folder.metrics.write_text("[1]\n")
    printed(folder=folder, timeline=Timeline(), elapsed_s=1.0)
    assert "report can't be printed" in capsys.readouterr().err


def test_reward_curve_is_a_picture(tmp_path):
    writer = JsonlWriter(tmp_path / "m.jsonl")
    for step, reward in enumerate((0.1, math.nan, 0.5), start=1):
        writer.write(step, {"reward/mean": reward})
    writer.write(4, {"other": 1.0})
    writer.close()
    assert plot_rewards(tmp_path / "m.jsonl", tmp_path / "reward.png", title="a")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw_draws_nothing(tmp_path):
    (tmp_path / "m.jsonl").write_text("")
    assert not plot_rewards(tmp_path / "m.jsonl", tmp_path / "reward.png")
    assert not (tmp_path / "reward.png").exists()


def test_smoothing_keeps_the_first_value_and_skips_nan():
    smoothed = report._smooth([report._Point(value, 1.0) for value in (1.0, math.nan, 1.0)])
    assert smoothed == pytest.approx([1.0, 1.0, 1.0])


def test_a_step_of_many_groups_counts_for_more():
    records = [{"r": 1.0, "groups/count": 3.0}, {"r": 0.0, "groups/count": 1.0}, {"other": 5.0}]
    curve = report._curve(records, "r")
    assert report._mean(curve) == 0.75
    assert report._smooth(curve, weight=0.5)[1] == pytest.approx((0.5 * 3) / (0.5 * 3 + 1))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(9.31, "9.3 s"), (125, "2 min 05 s"), (3600 * 3 + 601, "3 h 10 min"), (119.7, "2 min 00 s")],
)
def test_durations_read_as_a_person_says_them(seconds, text):
    assert format_seconds(seconds) == text
