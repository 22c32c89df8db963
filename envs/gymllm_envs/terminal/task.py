"""What a terminal task is, and its own file form: JSON lines.

    {"id": "greet", "instruction": "Write hello to greeting.txt.", "check": "grep -qx hello greeting.txt"}

Folders in Harbor's and Terminal-Bench's forms are read by `gymllm_envs.terminal.harbor`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from gymllm.errors import ConfigError, UnknownNameError

LONGEST_SCRIPT = 100_000


@dataclass(frozen=True, kw_only=True)
class CopyStep:
    """A line of a Dockerfile: files of the task's folder go into the tree."""

    sources: tuple[Path, ...]
    """Files and folders of the host; of a folder, what is in it."""
    target: str
    """Absolute; ends with "/" where it is a folder."""
    line: str


@dataclass(frozen=True, kw_only=True)
class RunStep:
    """A command that makes the tree."""

    command: str
    cwd: str
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    line: str = ""
    """Where it stands, for errors."""


@dataclass(frozen=True, kw_only=True)
class TerminalTask:
    """A tree to work in, what is to be done there, and a script that says whether it is."""

    id: str
    instruction: str
    tree: str = "/app"
    """The folder that the agent may change, and that is checked."""
    workdir: str = ""
    """Where commands start; the tree if empty."""
    image: str = ""
    """What containers start from."""
    dockerfile: Path | None = None
    """... or are built from; its folder is the context."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Text files of the tree, by path."""
    steps: tuple[CopyStep | RunStep, ...] = ()
    """Make the tree, where no image does."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    run: str = ""
    """A script that runs what the agent has made, before the check and apart from it: in a sandbox of its
    own, so that nothing of the agent's runs beside the checker. What it leaves in the tree is checked."""
    check: str = ""
    """A bash script. It exits with 0 for a reward of 1, or for what it wrote to /logs/verifier/reward.txt."""
    tests: Path | None = None
    """A folder that is shown at /tests while it is checked."""
    reward_from_file: bool = False
    """Harbor's manner: the files in /logs/verifier say the reward, whatever the exit code."""
    check_env: Mapping[str, str] = field(default_factory=dict[str, str])
    check_in_place: bool = False
    """Checked where the agent has worked, beside the processes that it has left: for servers and such."""
    needs_pytest: bool = False
    """The check runs pytest; ours is shown to it."""
    solution: str = ""
    """A bash script that solves it."""
    solution_folder: Path | None = None
    """What the script needs beside it."""
    agent_timeout_s: float | None = None
    """For the agent, where the environment isn't told another."""
    build_timeout_s: float = 600.0
    check_timeout_s: float = 60.0
    memory_mb: int = 1024
    cpus: float = 1.0
    file_mb: int = 256
    notes: tuple[str, ...] = ()
    """How it differs here from what its author wrote, in words."""

    def __post_init__(self) -> None:
        if not self.check.strip():
            raise ConfigError(f"terminal task {self.id!r}: there is no check; give a script.")
        for name in ("run", "check", "solution"):
            if len(getattr(self, name)) > LONGEST_SCRIPT:
                raise ConfigError(
                    f"terminal task {self.id!r}: {name} has more than {LONGEST_SCRIPT} characters."
                )


_TEXTS = ("id", "instruction", "tree", "workdir", "image", "setup", "run", "check", "solution")
_MAPPINGS = ("files", "env", "check_env")
_NUMBERS = ("agent_timeout_s", "build_timeout_s", "check_timeout_s", "memory_mb", "cpus", "file_mb")
FIELDS = (*_TEXTS, *_MAPPINGS, *_NUMBERS, "check_in_place")
"""What a line of the JSON form may have."""


def read_tasks(path: Path) -> list[TerminalTask]:
    """Reads a file of JSON lines.

    Raises:
        ConfigError: It can't be read, or a line is no task; says which and why.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"terminal tasks: {str(path)!r} can't be read: {problem}.") from problem
    tasks = [
        task_from_json(line, f"{path.name}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not tasks:
        raise ConfigError(f"terminal tasks: {str(path)!r} holds none.")
    return tasks


def task_from_json(line: str, where: str) -> TerminalTask:
    """One task of the JSON form.

    Raises:
        ConfigError: It is none.
    """
    try:
        read = json.loads(line)
    except ValueError as problem:
        raise ConfigError(f"{where}: not JSON ({problem}).") from problem
    if not isinstance(read, dict):
        raise ConfigError(f"{where}: a task must be a JSON object, got {line[:80]!r}.")
    row = cast("dict[str, object]", read)
    for name in row:
        if name not in FIELDS:
            raise UnknownNameError(f"field of a terminal task ({where})", name, FIELDS)
    for name in ("id", "instruction", "check"):
        if not row.get(name):
            raise ConfigError(f"{where}: the task has no {name!r}.")
    for name, value in row.items():
        if name in _TEXTS and not isinstance(value, str):
            raise ConfigError(f"{where}: {name!r} must be a text, got {value!r}.")
        if name in _NUMBERS and not (isinstance(value, int | float) and value > 0):
            raise ConfigError(f"{where}: {name!r} must be a number > 0, got {value!r}.")
        if name in _MAPPINGS and not _is_texts(value):
            raise ConfigError(f"{where}: {name!r} must be an object of texts, got {value!r}.")
    setup = str(row.pop("setup", ""))
    tree = str(row.get("tree", "/app"))
    if setup:
        step = RunStep(command=setup, cwd=tree, line=f"the setup of {row['id']}")
        row["steps"] = (step,)
    return TerminalTask(**row)  # pyright: ignore[reportArgumentType]  # looked at above


def _is_texts(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(text, str) for text in cast("dict[object, object]", value).values()
    )
