"""The screen of a run: fits, adds up, never raises."""

from __future__ import annotations

import io
import os
import re
import sys

import pytest
from rich.console import Console

from gymllm.timeline import Timeline
from gymllm_trainers.display import Display, RunView, render, sparkline, step_line


def test_reader_that_leaves_does_not_end_the_run(monkeypatch):
    read, write = os.pipe()
    os.close(read)
    out = os.fdopen(write, "w")
    monkeypatch.setattr(sys, "stdout", out)
    view = make_view()
    before = len(view.rewards)
    with Display(view, live=False) as display:
        for _ in range(2):
            display.step_done()
    monkeypatch.undo()
    assert len(view.rewards) == before + 2, "the run's view is kept up"
    out.write("more")
    with pytest.raises(BrokenPipeError):  # there was nobody to read the two lines
        out.close()


def make_view(**changes: object) -> RunView:
    timeline = Timeline()
    for resource in ("engine/slot 0", "engine/slot 1", "learner", "environments"):
        clock = timeline.clock(resource)
        for state in ("decoding", "prefill", "waiting: groups", "publishing", "compiling", "idle"):
            clock.enter(state)
    view = RunView(
        name="frozenlake-1",
        steps=120,
        timeline=timeline,
        phase="training",
        step=40,
        reward=0.632,
        turns=8.25,
        episode_tokens=412.0,
        generated_per_s=5123.0,
        trained_per_s=8100.0,
        lag_mean=0.7,
        lag_max=2,
        groups_in_flight=12,
        failures=1,
    )
    view.rewards.extend(step / 40 for step in range(40))
    for name, value in changes.items():
        setattr(view, name, value)
    return view


def drawn(view: RunView, width: int = 80, height: int = 24) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=False)
    with console.capture() as capture:
        console.print(render(view, width=width, height=height))
    return capture.get().splitlines()


def test_screen_fits_a_small_terminal_and_shows_everything():
    lines = drawn(make_view())
    assert len(lines) <= 23, "a line is left for the shell"
    assert all(len(line) <= 80 for line in lines)
    shown = "\n".join(lines)
    for text in ("step 40/120", "0.632", "8.2", "412", "5,123 tok/s", "8,100 tok/s", "0.7, max 2"):
        assert text in shown
    for text in ("12 groups", "failed 1", "engine", "learner", "environments", "training"):
        assert text in shown
    assert "…" not in shown


@pytest.mark.parametrize(("width", "height"), [(40, 10), (80, 12), (200, 60), (20, 5)])
def test_screen_is_drawn_at_any_size(width, height):
    assert drawn(make_view(), width, height)


def test_view_of_a_run_that_has_not_begun_is_drawn():
    shown = "\n".join(drawn(RunView(name="a", steps=0, timeline=Timeline())))
    assert "step 0/0" in shown


def test_shares_on_the_screen_add_up_to_100():
    by_resource: dict[str, float] = {}
    resource = ""
    for line in drawn(make_view(), height=60)[7:]:
        match = re.match(r"│ (\S*) .*?(\d+\.\d) +\d+\.\d", line)
        if match:
            resource = match.group(1) or resource
            by_resource[resource] = by_resource.get(resource, 0) + float(match.group(2))
    assert set(by_resource) == {"engine", "learner", "environments"}
    assert all(total == pytest.approx(100) for total in by_resource.values()), by_resource


def test_without_a_terminal_each_step_is_a_line():
    file = io.StringIO()
    view = make_view()
    with Display(view, console=Console(file=file)) as display:
        display.phase("warm start")
        display.phase("warm start")
        display.phase("training")
        display.step_done()
    lines = file.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].endswith("] warm start")
    assert lines[2] == step_line(view)
    assert "\x1b" not in file.getvalue()


def test_with_a_terminal_the_last_screen_stays():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, height=24)
    with Display(make_view(), console=console) as display:
        display.step_done()
    assert "40/120" in file.getvalue()
    assert file.getvalue().rstrip().endswith("\x1b[?25h"), "the cursor is shown again"


def test_broken_view_and_closed_console_raise_nothing():
    view = make_view(reward="not a number", step=None)
    shown: list[str] = []
    for force_terminal in (True, False):
        file = io.StringIO()
        with Display(view, console=Console(file=file, force_terminal=force_terminal)) as display:
            display.phase("training")
        shown.append(file.getvalue())
    assert "step None/120 (no display: " in shown[0]
    assert shown[1].endswith("] training\n")
    file.close()
    view = make_view()
    before = len(view.rewards)
    with Display(view, console=Console(file=file)) as display:
        display.step_done()
    assert len(view.rewards) == before + 1


def test_live_display_can_be_turned_off():
    file = io.StringIO()
    with Display(
        make_view(), console=Console(file=file, force_terminal=True), live=False
    ) as display:
        display.step_done()
    assert len(file.getvalue().splitlines()) == 1


def test_sparkline_spans_its_values_and_its_room():
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert sparkline([1.0, 1.0], 10) == "▅▅"
    assert sparkline([], 10) == ""
    assert sparkline([float("nan"), 1.0], 10) == "▅"
    long = sparkline([step / 1000 for step in range(1000)], 20)
    assert len(long) == 20
    assert long == "".join(sorted(long))
