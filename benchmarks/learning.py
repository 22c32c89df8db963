"""What each algorithm learns: gymllm-train's default job by every main preset, over a few seeds.

    python benchmarks/learning.py [--quick] [--presets grpo ppo ...] [--seeds 3] [--steps 40] [--runs FOLDER]

Runs are `gymllm-train` processes, one after another, each as a user would start it; one that is there
already, and whole, is not run again. A preset changes the algorithm and nothing else, unless `SETTINGS` says
what else it needs. The table has each preset's mean reward over the last `LAST` steps, every seed's on its
own, and the seconds a run took; the curves come in one picture.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from table import Table

from gymllm_trainers.algorithms.names import MAIN_PRESETS

PRESETS = ("default", *MAIN_PRESETS)
SETTINGS: dict[str, tuple[str, ...]] = {}
"""Flags that a preset is run with beside `--algorithm.preset`."""
LAST = 10
"""Steps at the end that the result is a mean over."""
SOLVED = 0.6
"""Mean reward of a seed that has learnt: the warm start plays at about 0.35 to 0.45."""


@dataclass(frozen=True)
class Run:
    """What one run came to."""

    rewards: npt.NDArray[np.float64]
    """Mean reward of each step's episodes."""
    groups: npt.NDArray[np.float64]
    """Groups that each is a mean over."""

    @property
    def start(self) -> float:
        """Mean reward of the first steps."""
        return self._mean(slice(0, 5))

    @property
    def end(self) -> float:
        """Mean reward of the last ones."""
        return self._mean(slice(-LAST, None))

    def _mean(self, part: slice) -> float:
        return float(np.average(self.rewards[part], weights=self.groups[part]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two presets, one seed, three steps")
    parser.add_argument("--presets", nargs="+", default=list(PRESETS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--runs", type=Path, help="where runs are kept; a temporary folder")
    parser.add_argument("--picture", type=Path, help="where the curves go, a PNG")
    options = parser.parse_args()
    if options.quick:
        options.presets, options.seeds, options.steps = options.presets[:2], 1, 3
    table = Table()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.runs or Path(temporary)
        found: dict[str, list[Run]] = {}
        # Seed by seed: whoever ends it early has every preset.
        for seed in range(options.seeds):
            for preset in options.presets:
                run = _run(folder, preset, seed, options.steps, table)
                if run is not None:
                    found.setdefault(preset, []).append(run)
    for preset, runs in found.items():
        ends = [run.end for run in runs]
        starts = [run.start for run in runs]
        each = ", ".join(f"{end:.2f}" for end in ends)
        table.add(f"{preset}: reward of the first 5 steps", float(np.mean(starts)))
        table.add(f"{preset}: reward of the last {LAST} steps", float(np.mean(ends)))
        table.add(f"{preset}: ... by seed", each)
        learnt = sum(end >= SOLVED for end in ends)
        table.add(f"{preset}: seeds that learnt (>= {SOLVED})", f"{learnt} of {len(ends)}")
    if options.picture and found:
        _draw(found, options.picture)
    table.print_json()


def _run(folder: Path, preset: str, seed: int, steps: int, table: Table) -> Run | None:
    """A run, taken up where it is there; None if it failed."""
    name = f"{preset}-{seed}"
    run = _read(folder / name, steps)
    if run is not None:
        return run
    command = [
        str(Path(sys.executable).with_name("gymllm-train")),
        *("--runs-dir", str(folder), "--name", name, "--seed", str(seed), "--steps", str(steps)),
        *("--metrics.no-display", "--metrics.wandb", "off", "--metrics.no-trajectories"),
        *("--algorithm.preset", preset, *SETTINGS.get(preset, ())),
    ]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-3:]
        table.add(f"{preset}, seed {seed}", f"failed: {' '.join(last)}")
    else:
        table.add(f"{preset}, seed {seed}: start and training", time.monotonic() - started, "s")
    return _read(folder / name, steps)


def _read(run: Path, steps: int) -> Run | None:
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return None
    records = [json.loads(line) for line in lines]
    if len(records) < steps:
        return None
    rewards = np.array([record["reward/mean"] for record in records])
    return Run(rewards, np.array([record["groups/count"] for record in records]))


def _smooth(run: Run, weight: float = 0.8) -> npt.NDArray[np.float64]:
    """Exponential moving average by groups."""
    smoothed = np.zeros(len(run.rewards))
    total = count = 0.0
    for step, (reward, groups) in enumerate(zip(run.rewards, run.groups, strict=True)):
        total = weight * total + (1 - weight) * groups * reward
        count = weight * count + (1 - weight) * groups
        smoothed[step] = total / count
    return smoothed


def _draw(found: dict[str, list[Run]], picture: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(5, len(found))
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(2.6 * columns, 2.3 * rows), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    for axes, (preset, runs) in zip(all_axes, found.items(), strict=False):
        curves = [_smooth(run) for run in runs]
        for curve in curves:
            axes.plot(np.arange(1, len(curve) + 1), curve, color="#2a78d6", alpha=0.35, linewidth=1)
        shortest = min(map(len, curves))
        mean = np.mean([curve[:shortest] for curve in curves], axis=0)
        axes.plot(np.arange(1, shortest + 1), mean, color="#2a78d6", linewidth=2)
        axes.set_title(preset, fontsize=9)
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in list(all_axes)[len(found) :]:
        axes.set_visible(False)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("reward, smoothed; each seed and their mean", fontsize=9)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)


if __name__ == "__main__":
    main()
