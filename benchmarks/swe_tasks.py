"""What making SWE tasks costs: wall and CPU, and how many bugs of each operator are kept.

    python benchmarks/swe_tasks.py [--quick] [--count 200] [--jobs 2]

Downloads are counted where the cache is empty.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

import anyio

from gymllm_envs.swe.making.making import DEFAULT_PACKAGES, Made, Progress, make_tasks


def rows_of(made: Made, cpu_s: float, quick: bool) -> list[dict[str, object]]:
    """The table's rows."""
    tried = sum(tried for tried, _ in made.operators.values())
    count = len(made.tasks)
    rows: list[tuple[str, float, str, str]] = [
        ("validated tasks", count, "", f"{made.count}"),
        ("packages", made.packages, "", "" if quick else ">= 12"),
        ("wall", made.wall_s, "s", "" if quick else "< 1200 on 2 idle cores"),
        ("CPU, sandboxes included", cpu_s, "s", ""),
        ("CPU a task", cpu_s / max(1, count), "s", ""),
        ("bugs tried", tried, "", ""),
        ("kept, of the bugs tried", 100 * count / max(1, tried), "%", ""),
    ]
    rows += [
        (f"dropped: {reason}", n, "", "")
        for reason, n in sorted(made.dropped.items(), key=lambda row: -row[1])
    ]
    rows += [
        (f"kept of {operator}, tried {tried}", 100 * kept / tried, "%", "")
        for operator, (tried, kept) in sorted(made.operators.items())
    ]
    return [
        {"what": what, "value": float(f"{value:.4g}"), "unit": unit, "goal": goal}
        for what, value, unit, goal in rows
    ]


def cpu_seconds() -> float:
    """Of this process and all that it has waited for: sandboxes count once they are closed."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="20 tasks of the default packages")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    count = 20 if options.quick else options.count
    packages = DEFAULT_PACKAGES if options.quick else ()
    progress = Progress(f"Making {count} tasks")
    began = cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "tasks.jsonl")

        async def make() -> Made:
            return await make_tasks(
                out, count=count, packages=packages, jobs=options.jobs, progress=progress
            )

        made = anyio.run(make)
    rows = rows_of(made, cpu_seconds() - began, options.quick)
    for row in rows:
        print(f"{row['what']!s:44} {row['value']!s:>8} {row['unit']!s:3} {row['goal']}")
    for name, problem in made.failed.items():
        print(f"{name} could not be used: {problem}")
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
