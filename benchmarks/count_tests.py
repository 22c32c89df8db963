"""Counts the agents' tests, and the examples that hypothesis writes for those of properties, as JSON.

A process of its own, for pytest rewrites modules that nothing has imported yet. `python count_tests.py
FOLDER` prints {"tests", "properties": {file: tests}, "examples": {file: most examples of one run}}.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


class Counted:
    """What pytest has found."""

    def __init__(self) -> None:
        self.tests = 0
        self.properties: Counter[str] = Counter()
        self.examples: Counter[str] = Counter()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Counts them."""
        self.tests = len(items)
        for item in items:
            examples = _examples(getattr(item, "obj", None))
            if examples:
                file = item.path.relative_to(ROOT).as_posix()
                self.properties[file] += 1
                self.examples[file] += examples


def _examples(test: Callable[..., object] | None) -> int:
    """Most examples that hypothesis writes for a test; 0 if it writes none."""
    import hypothesis

    # Hypothesis has no public name for a test's own settings.
    own = getattr(test, "_hypothesis_internal_use_settings", None)
    if hypothesis.is_hypothesis_test(test):
        return (own or hypothesis.settings()).max_examples
    inner = inspect.getsource(test) if test else ""
    if "@given(" not in inner:
        return 0
    written = re.search(r"max_examples=(\d+)", inner)  # in a function inside of the test
    return int(written[1]) if written else hypothesis.settings().max_examples


def main(folder: str) -> None:
    """Prints the counts."""
    counted = Counted()
    arguments = ["--collect-only", "-q", f"--rootdir={ROOT}", "-c", str(ROOT / "pyproject.toml")]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        code = pytest.main([*arguments, folder], plugins=[counted])
    if code != pytest.ExitCode.OK:
        raise SystemExit(shown.getvalue())
    print(json.dumps(vars(counted)))


if __name__ == "__main__":
    main(sys.argv[1])
