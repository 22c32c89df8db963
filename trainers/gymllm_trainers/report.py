"""What a run says when it is over: what it took, learnt and spent its time on; where things are."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from gymllm.timeline import Timeline
from gymllm_trainers.metrics import read_metrics
from gymllm_trainers.run_folder import RunFolder, warn


@dataclass(frozen=True, kw_only=True)
class Share:
    """How much of one resource's time went to one state."""

    state: str
    seconds: float
    percent: float
    """With one decimal; the percents of a resource add up to exactly 100.0."""


def time_shares(timeline: Timeline) -> dict[str, list[Share]]:
    """Where each resource's time went so far, largest share first (invariant 11).

    Resources that share the part of their name before "/" ("engine/slot 3") are one resource here:
    the seconds of a state are its mean over them.
    """
    totals_s: dict[str, dict[str, float]] = {}
    counts: dict[str, int] = {}
    for name, clock in sorted(timeline.clocks.items()):
        resource = name.split("/")[0]
        counts[resource] = counts.get(resource, 0) + 1
        states = totals_s.setdefault(resource, {})
        for state, seconds in clock.totals_s().items():
            states[state] = states.get(state, 0.0) + seconds
    return {
        resource: _shares({state: s / counts[resource] for state, s in states.items()})
        for resource, states in totals_s.items()
    }


def _shares(totals_s: Mapping[str, float]) -> list[Share]:
    whole = sum(totals_s.values())
    if whole <= 0:
        return [Share(state=state, seconds=0.0, percent=100.0) for state in list(totals_s)[:1]]
    # Tenths of a percent by largest remainder, so that the rounded parts still add up to 100.
    exact = {state: seconds / whole * 1000 for state, seconds in totals_s.items()}
    tenths = {state: int(value) for state, value in exact.items()}
    by_remainder = sorted(exact, key=lambda state: exact[state] - tenths[state], reverse=True)
    for state in by_remainder[: 1000 - sum(tenths.values())]:
        tenths[state] += 1
    return [
        Share(state=state, seconds=totals_s[state], percent=tenths[state] / 10)
        for state in sorted(totals_s, key=lambda state: -totals_s[state])
    ]


def shares_table(shares: Mapping[str, Sequence[Share]], *, most: int = 5) -> Table:
    """A table, a row for each state of each resource; past `most` the small ones are one row."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("where the time goes")
    table.add_column("state")
    table.add_column("%", justify="right")
    table.add_column("s", justify="right", style="dim")
    for resource, states in shares.items():
        rows = list(states)
        if len(rows) > most:
            rest = rows[most - 1 :]
            other = Share(
                state=f"{len(rest)} others",
                seconds=sum(share.seconds for share in rest),
                percent=round(sum(share.percent for share in rest), 1),
            )
            rows = [*rows[: most - 1], other]
        for place, share in enumerate(rows):
            table.add_row(
                Text(resource if place == 0 else "", "bold"),
                Text(share.state),
                f"{share.percent:.1f}",
                f"{share.seconds:.1f}",
            )
    return table


def print_report(
    *,
    folder: RunFolder,
    timeline: Timeline,
    elapsed_s: float,
    headline: str = "",
    reward_metric: str = "reward/mean",
    notes: Sequence[str] = (),
    shown: str = "",
    to_resume: bool = False,
    failed: bool = False,
    console: Console | None = None,
) -> None:
    """Prints the closing report. Never raises: a run that is over must not fail at its last line.

    Args:
        folder: The run's folder; only what is there is listed.
        timeline: The run's timeline.
        elapsed_s: What the run took.
        headline: How it ended ("stopped at step 12 by Ctrl-C"); default: finished.
        reward_metric: Name of the reward in metrics.jsonl.
        notes: Lines to add ("warm start 31 s, compilation 9 s").
        shown: Which episodes trajectories.html holds ("the last 64 of 2048").
        to_resume: Whether the run isn't done: its last line then says how to go on.
        failed: Whether an error ended it: then there is nothing yet to try out.
        console: Where to; default: standard output.
    """
    console = console or Console(highlight=False)
    try:
        report = _report(folder, timeline, elapsed_s, headline, reward_metric, notes)
        # Paths are never folded or cut off: they are there to be copied.
        console.print(report, crop=False)
        for line in [*_artefacts(folder, shown), "", *_next_commands(folder, to_resume, failed)]:
            console.print(line, crop=False, no_wrap=True, overflow="ignore")
    except Exception as error:
        warn(f"the report can't be printed ({error}); everything is in {folder.path}.")


def _report(
    folder: RunFolder,
    timeline: Timeline,
    elapsed_s: float,
    headline: str,
    reward_metric: str,
    notes: Sequence[str],
) -> Group:
    records = read_metrics(folder.metrics) if folder.metrics.exists() else []
    curve = _curve(records, reward_metric)
    lines = [Text(f"\n{headline or 'Finished'} in {format_seconds(elapsed_s)}", "bold green")]
    lines[0].append(f", {len(records)} steps on record", "default not bold")
    if curve:
        few = max(1, min(5, len(curve) // 4))
        lines.append(
            Text(f"reward {_mean(curve[:few]):.3f} → {_mean(curve[-few:]):.3f}")
            + Text(f"  (mean over the episodes of the first and the last {few} steps)", "dim")
        )
    lines += [Text(note) for note in notes]
    where = Text(f"Everything is in {folder.path}", no_wrap=True, overflow="ignore")
    return Group(*lines, "", shares_table(time_shares(timeline)), "", where)


def _next_commands(folder: RunFolder, to_resume: bool, failed: bool) -> list[str]:
    """What to type next, the likeliest last."""
    path = shlex.quote(str(folder.path))
    playable = folder.model.is_dir() or any(folder.checkpoints.glob("step_*"))
    commands = [f"gymllm-eval --model {path}"] if playable and not failed else []
    return commands + ([f"gymllm-train --resume {path}"] if to_resume else [])


def _artefacts(folder: RunFolder, shown: str) -> list[Text]:
    offline = sorted(folder.wandb.glob("offline-run-*")) if folder.wandb.is_dir() else []
    checkpoints = sorted(folder.checkpoints.glob("step_*")) if folder.checkpoints.is_dir() else []
    places: list[tuple[str, Path, str]] = [
        ("config", folder.config, ""),
        ("metrics", folder.metrics, ""),
        ("reward curve", folder.reward_plot, ""),
        (
            "trajectories",
            folder.transcripts,
            f"{shown}, open in a browser" if shown else "open in a browser",
        ),
        ("", folder.trajectories, "all of them, JSON lines"),
        ("trace", folder.trace, "open at ui.perfetto.dev"),
        ("W&B", offline[-1] if offline else folder.wandb, "wandb sync" if offline else ""),
        ("model", folder.model, ""),
        *[("checkpoint", path, "") for path in checkpoints[-1:]],
    ]
    there = [
        (label, str(p.relative_to(folder.path)), hint) for label, p, hint in places if p.exists()
    ]
    # One that is much longer than the others doesn't move their hints.
    room = min(40, max(len(path) for _, path, _ in there)) if there else 0
    return [
        Text.assemble((f"{label:<14}", "dim"), f"{path:<{room}}  " if hint else path, (hint, "dim"))
        for label, path, hint in there
    ]


def plot_rewards(
    metrics: Path, image: Path, *, title: str = "", reward_metric: str = "reward/mean"
) -> bool:
    """Draws the reward curve of a metrics file as a PNG.

    Returns:
        Whether there was anything to draw.
    """
    # Not pyplot: its state is global and tied to the main thread.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = [record for record in read_metrics(metrics) if reward_metric in record]
    if not records:
        return False
    steps = [record["step"] for record in records]
    curve = _curve(records, reward_metric)
    rewards = [point.reward for point in curve]
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, rewards, color="#2a78d6", alpha=0.35, linewidth=1, label="each step")
    axes.plot(steps, _smooth(curve), color="#2a78d6", linewidth=2, label="smoothed")
    axes.set(xlabel="step", ylabel=reward_metric, title=title)
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    figure.savefig(image)
    return True


@dataclass(frozen=True)
class _Point:
    """A step of the reward curve."""

    reward: float
    groups: float
    """Groups that the reward is a mean over. A step ends when enough groups had any variance, so one
    that meets many solved groups has more of them: steps that counted alike would say too little."""


def _curve(records: Sequence[Mapping[str, float]], reward_metric: str) -> list[_Point]:
    return [
        _Point(record[reward_metric], record.get("groups/count", 1.0))
        for record in records
        if reward_metric in record
    ]


def _mean(curve: Sequence[_Point]) -> float:
    return sum(point.reward * point.groups for point in curve) / sum(p.groups for p in curve)


def _smooth(curve: Sequence[_Point], weight: float = 0.7) -> list[float]:
    """Exponential moving average without the pull towards the first value; NaN is skipped."""
    smoothed: list[float] = []
    total = count = 0.0
    for point in curve:
        if point.reward == point.reward:
            total = weight * total + (1 - weight) * point.groups * point.reward
            count = weight * count + (1 - weight) * point.groups
        smoothed.append(total / count if count else point.reward)
    return smoothed


def format_seconds(seconds: float) -> str:
    """A duration as a person says it: 9.3 s, 2 min 05 s, 3 h 10 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
