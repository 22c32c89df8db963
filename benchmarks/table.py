"""Rows of a benchmark: printed as they are measured, and once more as JSON at the end."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field


@dataclass
class Table:
    """What was measured."""

    rows: list[dict[str, object]] = field(default_factory=list[dict[str, object]])

    def add(self, what: str, value: float | str, unit: str = "", goal: str = "") -> None:
        """Adds a row and prints it."""
        shown = value if isinstance(value, str) else float(f"{value:.4g}")
        self.rows.append({"what": what, "value": shown, "unit": unit, "goal": goal})
        print(f"{what:68} {shown!s:>12} {unit:10} {goal}", flush=True)

    def add_times(self, what: str, seconds: list[float], goal: str = "") -> None:
        """Adds the median and the 99th percentile of times, in milliseconds."""
        ordered = sorted(seconds)
        self.add(f"{what}, p50", statistics.median(ordered) * 1e3, "ms", goal)
        self.add(f"{what}, p99", ordered[int(len(ordered) * 0.99)] * 1e3, "ms")

    def print_json(self) -> None:
        """The last line."""
        print(json.dumps({"rows": self.rows}))
