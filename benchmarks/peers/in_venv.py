"""Runs a peer's script in a virtual environment that is made and filled first if there is none."""

from __future__ import annotations

import json
import subprocess
import venv
from pathlib import Path

PEERS = {
    "gymnasium": ("gymnasium", "gymnasium_vector.py"),
    "gem": ("gem-llm", "gem_latency.py"),
    "tunix": ("google-tunix", "tunix_episodes.py"),
}
"""What pip installs, and the script beside this file."""
INSTALL_LIMIT_S, RUN_LIMIT_S = 1800, 300


def run_in_venv(venvs: Path, name: str, *args: object, script: str = "") -> dict[str, float] | str:
    """The JSON object in the last line that a peer's script prints; or why there is none, in a line.

    `script` is another than the peer's usual one.
    """
    requirement, usual = PEERS[name]
    try:
        python = _python(venvs / name, requirement)
        command = [python, Path(__file__).parent / (script or usual), *map(str, args)]
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=RUN_LIMIT_S
        )
        return json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
        output = getattr(error, "stderr", None) or str(error)
        return str(output).strip().splitlines()[-1]


def _python(folder: Path, requirement: str) -> Path:
    python, installed = folder / "bin" / "python", folder / "installed"
    if not installed.exists():
        venv.create(folder, with_pip=True, clear=True)
        install = [python, "-m", "pip", "install", "--quiet", requirement]
        subprocess.run(install, check=True, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
        installed.touch()
    return python
