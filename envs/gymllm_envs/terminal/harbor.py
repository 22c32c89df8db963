"""Task folders in Harbor's form, and in that of the first Terminal-Bench.

    Harbor                         Terminal-Bench
    task.toml                      task.yaml             limits, resources; the latter the instruction, too
    instruction.md
    environment/Dockerfile         Dockerfile
    tests/test.sh                  run-tests.sh, tests/  the former writes /logs/verifier/reward.txt or .json
    solution/solve.sh              solution.sh

Sandboxes have no network. A test script that fetches pytest only to run tests/test_outputs.py is replaced by
our own pytest on that file, and `TerminalTask.notes` says so; one that fetches anything else is refused.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from gymllm.errors import ConfigError, MissingExtraError
from gymllm_envs.terminal.dockerfile import needs_network
from gymllm_envs.terminal.task import TerminalTask

INSTALL = 'pip install "gymllm-envs[terminal]"'
TESTS = "/tests"
PYTEST_CHECK = (
    "PYTHONSAFEPATH=1 python3 -m pytest -q -p no:cacheprovider "
    "--junitxml=/logs/verifier/report.xml /tests/test_outputs.py"
)
_WITH = re.compile(
    r"(?:-w|--with)[ =]+([\w.\-]+)|\b(?:pip3?|uv pip|uv) (?:install|add) ([^&|;\n]+)"
)
_SIZE = re.compile(r"\s*([\d.]+)\s*([KMGT]?)i?B?\s*", re.IGNORECASE)
_SIZE_MB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024, "": 1 / 1024 / 1024}
_LARGEST_FILES_MB = 1024  # files are kept in memory

Section = Mapping[str, object]


def is_task_folder(folder: Path) -> bool:
    """Whether it is one task."""
    return (folder / "task.toml").is_file() or (folder / "task.yaml").is_file()


def read_folder(folder: Path) -> list[TerminalTask]:
    """Reads one task, or every task in a folder of such folders.

    Raises:
        ConfigError: There is none, or one is incomplete; says what is missing.
        MissingExtraError: task.yaml without PyYAML.
    """
    if is_task_folder(folder):
        return [_read(folder)]
    folders = sorted(path for path in folder.iterdir() if path.is_dir() and is_task_folder(path))
    if not folders:
        raise ConfigError(
            f"terminal tasks: {str(folder)!r} holds no folder with a task.toml or task.yaml in it."
        )
    return [_read(path) for path in folders]


def _read(folder: Path) -> TerminalTask:
    return _harbor(folder) if (folder / "task.toml").is_file() else _terminal_bench(folder)


def _harbor(folder: Path) -> TerminalTask:
    try:
        config = cast("Section", tomllib.loads(_text(folder, "task.toml")))
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(f"{folder / 'task.toml'}: {problem}.") from problem
    environment, verifier = _section(config, "environment"), _section(config, "verifier")
    if any((folder / "environment").glob("docker-compose.y*ml")):
        raise ConfigError(
            f"{folder}: it runs several containers (environment/docker-compose.yaml); a task here has one."
        )
    script, tests = _text(folder, "tests/test.sh"), folder / "tests"
    check, from_file, notes = f"bash {TESTS}/test.sh", True, ()
    if fetched := needs_network(script):
        check, from_file = PYTEST_CHECK, False
        notes = (_without_network(folder, tests, script, fetched),)
    return TerminalTask(
        id=folder.name,
        instruction=_text(folder, "instruction.md").strip(),
        image=str(environment.get("docker_image") or ""),
        dockerfile=_optional(folder / "environment" / "Dockerfile"),
        check=check,
        tests=tests.resolve(),
        reward_from_file=from_file,
        needs_pytest=not from_file,
        check_env=_texts(verifier.get("env")),
        solution=_optional_text(folder / "solution" / "solve.sh"),
        solution_folder=_optional(folder / "solution"),
        agent_timeout_s=_seconds(folder, _section(config, "agent"), "timeout_sec"),
        build_timeout_s=_seconds(folder, environment, "build_timeout_sec") or 600.0,
        check_timeout_s=_seconds(folder, verifier, "timeout_sec") or 600.0,
        memory_mb=_megabytes(folder, environment, "memory") or 2048,
        file_mb=min(_megabytes(folder, environment, "storage") or 1024, _LARGEST_FILES_MB),
        cpus=float(str(environment.get("cpus") or 1)),
        notes=notes,
    )


def _terminal_bench(folder: Path) -> TerminalTask:
    try:
        import yaml
    except ImportError as problem:
        raise MissingExtraError(f"task.yaml needs PyYAML: {INSTALL}.") from problem
    read = cast("object", yaml.safe_load(_text(folder, "task.yaml")))
    if not isinstance(read, dict) or not isinstance(read.get("instruction"), str):  # pyright: ignore[reportUnknownMemberType]
        raise ConfigError(f"{folder / 'task.yaml'}: it has no text as its instruction.")
    config = cast("Section", read)
    if config.get("parser_name", "pytest") != "pytest":
        raise ConfigError(
            f"{folder / 'task.yaml'}: only results of pytest can be read, not of "
            f"{config['parser_name']!r}."
        )
    tests, script = folder / "tests", _text(folder, "run-tests.sh")
    note = _without_network(folder, tests, script, "run-tests.sh")
    return TerminalTask(
        id=folder.name,
        instruction=str(config["instruction"]).strip(),
        dockerfile=_optional(folder / "Dockerfile"),
        check=PYTEST_CHECK,
        tests=tests.resolve(),
        needs_pytest=True,
        check_env={"TEST_DIR": TESTS},
        check_in_place=bool(config.get("run_tests_in_same_shell", False)),
        solution=_optional_text(folder / "solution.sh"),
        agent_timeout_s=_seconds(folder, config, "max_agent_timeout_sec"),
        check_timeout_s=_seconds(folder, config, "max_test_timeout_sec") or 180.0,
        notes=(note,),
    )


def _without_network(folder: Path, tests: Path, script: str, fetched: str) -> str:
    """How its tests run all the same.

    Raises:
        ConfigError: They can't.
    """
    wanted = [word for match in _WITH.finditer(script) for word in (match[1] or match[2]).split()]
    names = {re.split(r"[=<>~!\[]", word)[0] for word in wanted if not word.startswith("-")}
    others = sorted(names - {"pytest", "pytest-json-ctrf", "uv"})
    if not (tests / "test_outputs.py").is_file() or "pytest" not in script or others:
        needs = f"the packages {', '.join(others)}" if others else repr(fetched[:100])
        raise ConfigError(
            f"{folder}: its tests fetch {needs} and sandboxes have no network; put it into the image and "
            "mend the test script."
        )
    return "its tests run with gymllm's pytest: sandboxes have no network to fetch one"


def _text(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{folder}: {name} is needed and can't be read: {problem}.") from problem


def _optional(path: Path) -> Path | None:
    return path.resolve() if path.exists() else None


def _optional_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _section(config: Section, name: str) -> Section:
    value = config.get(name, {})
    return cast("Section", value) if isinstance(value, Mapping) else {}


def _texts(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        return {}
    return {str(k): str(v) for k, v in cast("Mapping[object, object]", value).items()}


def _seconds(folder: Path, section: Section, name: str) -> float | None:
    value = section.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{folder}: {name} must be seconds > 0, got {value!r}.")
    return float(value)


def _megabytes(folder: Path, section: Section, name: str) -> int | None:
    """`memory_mb = 2048`, or the older `memory = "2G"`."""
    if (value := _seconds(folder, section, f"{name}_mb")) is not None:
        return int(value)
    if (text := section.get(name)) is None:
        return None
    match = _SIZE.fullmatch(str(text))
    if match is None:
        raise ConfigError(f'{folder}: {name} must be a size such as "2G", got {text!r}.')
    return max(int(float(match[1]) * _SIZE_MB[match[2].upper()]), 1)
