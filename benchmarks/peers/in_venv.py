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
    "transformers": ("torch==2.13.0 transformers accelerate", "transformers_generate.py"),
    "llama_cpp": ("llama-cpp-python==0.3.36", "llama_cpp_generate.py"),
    "trl": ("torch==2.13.0 trl==1.16.0", "trl_grpo.py"),
}
"""What pip installs, separated by blanks, and the script beside this file."""
INSTALL_LIMIT_S, RUN_LIMIT_S = 3600, 300


def run_in_venv(venvs: Path, name: str, *args: object, script: str = "") -> dict[str, float] | str:
    """The JSON object in the last line that a peer's script prints; or why there is none, in a line.

    `script` is another than the peer's usual one.
    """
    try:
        command = command_in_venv(venvs, name, *args, script=script)
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=RUN_LIMIT_S
        )
        return json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
        return why_not(error)


def command_in_venv(venvs: Path, name: str, *args: object, script: str = "") -> list[str]:
    """The command line that runs a peer's script, once it is installed.

    Raises:
        subprocess.SubprocessError: It can't be installed.
    """
    requirement, usual = PEERS[name]
    python = _python(venvs / name, requirement.split())
    return [str(python), str(Path(__file__).parent / (script or usual)), *map(str, args)]


def why_not(error: Exception) -> str:
    """The last line that an error has to say."""
    output = getattr(error, "stderr", None) or str(error) or type(error).__name__
    return str(output).strip().splitlines()[-1]


def _python(folder: Path, requirements: list[str]) -> Path:
    python, installed = folder / "bin" / "python", folder / "installed"
    if not installed.exists():
        venv.create(folder, with_pip=True, clear=True)
        install = [python, "-m", "pip", "install", "--quiet", *requirements]
        subprocess.run(install, check=True, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
        installed.touch()
    return python
