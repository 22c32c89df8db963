"""What a run looks like while it runs: a live screen in a terminal, a line a step elsewhere."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType

from rich.console import Console, ConsoleRenderable, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gymllm.timeline import Timeline
from gymllm_trainers.report import format_seconds, shares_table, time_shares

_BARS = "▁▂▃▄▅▆▇█"


@dataclass(kw_only=True)
class RunView:
    """What the screen shows. The loop sets fields; the display reads them, four times a second."""

    name: str
    """The run's name."""
    steps: int
    """Steps to do in all."""
    timeline: Timeline
    phase: str = "starting"
    """What is going on, in a person's words ("warm start: 120/400", "training")."""
    step: int = 0
    """Steps done."""
    reward: float | None = None
    """Mean reward of the latest step."""
    rewards: deque[float] = field(default_factory=lambda: deque[float](maxlen=4096))
    """Mean reward of each step."""
    loss: float | None = None
    """Of the latest step, where examples are imitated: it is shown in the reward's place."""
    learning_rate: float = 0.0
    """Of that step."""
    turns: float = 0.0
    """Turns an episode, mean of the latest step."""
    episode_tokens: float = 0.0
    """Tokens an episode, mean of the latest step; where examples are imitated, those of the step."""
    generated_per_s: float = 0.0
    """Tokens a second that the engine generated."""
    trained_per_s: float = 0.0
    """Tokens a second that the learner trained on."""
    lag_mean: float = 0.0
    """Policy versions between a token's making and its training, mean of the latest step."""
    lag_max: int = 0
    """The largest of them."""
    groups_in_flight: int = 0
    """Groups begun and not yet trained on."""
    failures: int = 0
    """Episodes that failed and were replaced, so far."""
    started_s: float = field(default_factory=time.monotonic)
    """`time.monotonic` at the start."""


class _Console(Console):
    """A console whose reader may leave (`| head`): rich would end the program then."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Display:
    """Shows a `RunView` inside a `with` block. Never raises, and costs under a hundredth of a core.

    In a terminal a thread redraws at most four times a second; elsewhere each `step_done` prints a
    line.
    """

    def __init__(self, view: RunView, *, console: Console | None = None, live: bool = True) -> None:
        self._view = view
        self._console = console or _Console()
        self._wanted = live
        self._live: Live | None = None
        self._phase = ""

    def __enter__(self) -> Display:
        if self._wanted and self._console.is_terminal:
            try:
                self._live = Live(
                    get_renderable=self._render,
                    console=self._console,
                    refresh_per_second=4,
                    vertical_overflow="crop",
                )
                self._live.start()
            except Exception:
                self._live = None  # a console that can't be drawn on still gets lines
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            # Nothing here is worth losing a run's last words for.
            with suppress(Exception):
                self._live.stop()
            self._live = None

    def phase(self, phase: str) -> None:
        """Says what is going on now."""
        self._view.phase = phase
        if self._live is None and phase != self._phase:
            self._print(f"[{self._elapsed()}] {phase}")
        self._phase = phase

    def step_done(self) -> None:
        """Says that the view's fields are those of a new step."""
        if self._view.reward is not None:
            self._view.rewards.append(self._view.reward)
        if self._live is None:
            self._print(step_line(self._view))

    def _print(self, line: str) -> None:
        # A closed pipe or an odd encoding must not stop a run.
        with suppress(Exception):
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _elapsed(self) -> str:
        return format_seconds(time.monotonic() - self._view.started_s)

    def _render(self) -> ConsoleRenderable:
        try:
            return render(self._view, width=self._console.width, height=self._console.height)
        except Exception as error:
            return Text(f"step {self._view.step}/{self._view.steps} (no display: {error})")


def step_line(view: RunView) -> str:
    """A step as one line of text."""
    if view.loss is not None:
        return (
            f"step {view.step}/{view.steps}  loss {view.loss:.4f}  learning rate {view.learning_rate:.2e}  "
            f"tokens {view.episode_tokens:,.0f}  trained {view.trained_per_s:,.0f}/s"
        )
    reward = "-" if view.reward is None else f"{view.reward:.3f}"
    lag = f"lag {view.lag_mean:.1f} (max {view.lag_max})"
    return (
        f"step {view.step}/{view.steps}  reward {reward}  turns {view.turns:.1f}  "
        f"tokens {view.episode_tokens:.0f}  generated {view.generated_per_s:,.0f}/s  "
        f"trained {view.trained_per_s:,.0f}/s  {lag}  failures {view.failures}"
    )


def render(view: RunView, *, width: int = 80, height: int = 24) -> ConsoleRenderable:
    """The screen of a view; fits a terminal of 80 by 24 and grows with a wider one."""
    elapsed = time.monotonic() - view.started_s
    head = Table.grid(expand=True, padding=(0, 1))
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(justify="right", no_wrap=True)
    head.add_row(
        Text(f"step {view.step}/{view.steps}", "bold"),
        ProgressBar(total=max(1, view.steps), completed=view.step),
        Text(format_seconds(elapsed), "dim"),
    )
    room = max(10, width - 30)
    reward = Text("reward ")
    if view.loss is not None:
        reward = Text.assemble(
            "loss ", (f"{view.loss:.4f}", "bold green"), ("  learning rate ", "dim")
        )
        reward.append(f"{view.learning_rate:.2e}", "bold")
    elif view.reward is None:
        reward.append("-", "dim")
    else:
        reward.append(f"{view.reward:6.3f}  ", "bold green")
        reward.append(sparkline(list(view.rewards), room), "green")
    numbers = Table.grid(expand=True, padding=(0, 1))
    for ratio in (3, 5, 4, 3):
        numbers.add_column(ratio=ratio, no_wrap=True)
    numbers.add_row(
        _pair("turns", f"{view.turns:.1f}"),
        _pair("generated", f"{view.generated_per_s:,.0f} tok/s"),
        _pair("lag", f"{view.lag_mean:.1f}, max {view.lag_max}"),
        Text(),
    )
    numbers.add_row(
        _pair("tokens", f"{view.episode_tokens:,.0f}"),
        _pair("trained", f"{view.trained_per_s:,.0f} tok/s"),
        _pair("in flight", f"{view.groups_in_flight} groups"),
        _pair("failed", str(view.failures), "bold red" if view.failures else "bold"),
    )
    shares = time_shares(view.timeline)
    # 9 lines are the frame, the lines above the table, its head and a spare one for the shell.
    most = max(1, min(4, (height - 10) // max(1, len(shares))))
    parts: list[ConsoleRenderable] = [head, reward, numbers]
    if shares:
        parts += [Text(), shares_table(shares, most=most)]
    return Panel(
        Group(*parts),
        title=Text(view.name, "bold"),
        subtitle=Text(view.phase, "dim"),
        title_align="left",
        subtitle_align="left",
        border_style="blue",
    )


def sparkline(values: list[float], width: int) -> str:
    """Values as a row of at most `width` bars; more values than that are averaged in bins."""
    values = [value for value in values if value == value]
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    if high == low:
        return _BARS[len(_BARS) // 2] * len(values)
    top = len(_BARS) - 1
    return "".join(_BARS[round((value - low) / (high - low) * top)] for value in values)


def _pair(label: str, value: str, style: str = "bold") -> Text:
    return Text.assemble((f"{label} ", "dim"), (value, style))
