"""What a SWE task is, and its file: JSON lines in SWE-bench's field names, with a few of our own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from gymllm.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SweTask:
    """A repository with a fault, a description of it, and the tests that say whether it is mended.

    The tree comes from one of two places: the source distribution of a package (`sdist`), with `bug_patch`
    put in and `hide_patch` taking out the tests that would tell; or a container image (`image`).
    """

    id: str
    """"instance_id" in files; unique among the tasks that are used together."""
    repo: str
    """The package or repository, for reading."""
    problem_statement: str
    fail_to_pass: tuple[str, ...]
    """Tests that fail now and pass once it is mended, as pytest names them from the tree's root."""
    pass_to_pass: tuple[str, ...] = ()
    """Tests that pass now and must still pass."""
    patch: str = ""
    """The gold patch: what mends it, as a unified diff from the tree that the agent is given."""

    # From a source distribution
    sdist: str = ""
    """"name==version"."""
    bug_patch: str = ""
    """From the package as released to the faulty one; sources only."""
    hide_patch: str = ""
    """From the faulty tree to the one that the agent is given; test files only."""
    canaries: tuple[str, ...] = ()
    """Those of `fail_to_pass` of which `gymllm_envs.swe.canaries` can make one that must fail."""
    timeout_s: float = 120.0
    """For the tests, all together; many times what they took."""

    # From an image
    image: str = ""
    workdir: str = "/testbed"
    base_commit: str = ""
    test_patch: str = ""
    """Brings the hidden tests, as a unified diff."""
    test_command: str = ""
    extra: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)
    """Fields of its file that are none of the above."""

    def __post_init__(self) -> None:
        if bool(self.sdist) == bool(self.image):
            raise ConfigError(
                f"task {self.id!r} needs either an sdist (name==version) or an image, got "
                f"sdist={self.sdist!r}, image={self.image!r}."
            )
        if not self.fail_to_pass:
            raise ConfigError(f"task {self.id!r} has no FAIL_TO_PASS: nothing could mend it.")


_NAMES = {
    "id": "instance_id",
    "fail_to_pass": "FAIL_TO_PASS",
    "pass_to_pass": "PASS_TO_PASS",
    "image": "image_name",
}
"""Ours to the file's, where they differ."""
_LISTS = ("fail_to_pass", "pass_to_pass", "canaries")
_TEXTS = ("id", "repo", "problem_statement", "patch", "sdist", "bug_patch", "hide_patch", "image")
_MORE_TEXTS = ("workdir", "base_commit", "test_patch", "test_command")


def write_tasks(path: Path, tasks: Iterable[SweTask]) -> None:
    """Writes a task file, whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        for task in tasks:
            file.write(json.dumps(to_row(task), ensure_ascii=False) + "\n")
    partial.replace(path)


def to_row(task: SweTask) -> dict[str, object]:
    """A task as its file has it; what is empty is left out."""
    row: dict[str, object] = dict(task.extra)
    for name in (*_TEXTS, *_MORE_TEXTS):
        if value := getattr(task, name):
            row[_NAMES.get(name, name)] = value
    for name in _LISTS:
        row[_NAMES.get(name, name)] = list(getattr(task, name))
    row["timeout_s"] = task.timeout_s
    if task.sdist:
        del row["workdir"]
    return row


def from_row(row: Mapping[str, object], where: str) -> SweTask:
    """Reads a row of a file.

    Args:
        row: Its fields. Lists may be JSON texts, as SWE-bench has them.
        where: The file and the line, for errors.

    Raises:
        ConfigError: A field is missing or of another type.
    """
    theirs = {
        _NAMES.get(name, name): name for name in (*_TEXTS, *_MORE_TEXTS, *_LISTS, "timeout_s")
    }
    fields: dict[str, object] = {}
    for name, value in row.items():
        ours = theirs.get(name)
        if ours is None:
            continue
        if ours in _LISTS:
            fields[ours] = _names(value, f"{where}: {name}")
        elif ours == "timeout_s":
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"{where}: {name} must be a number of seconds, got {value!r}.")
            fields[ours] = float(value)
        elif value is not None:
            if not isinstance(value, str):
                raise ConfigError(f"{where}: {name} must be a text, got {value!r}.")
            fields[ours] = value
    for needed in ("id", "problem_statement", "fail_to_pass"):
        if needed not in fields:
            raise ConfigError(f"{where} has no {_NAMES.get(needed, needed)}; is it a task?")
    fields.setdefault("repo", str(fields["id"]).rpartition("__")[0] or str(fields["id"]))
    extra = {name: value for name, value in row.items() if name not in theirs}
    try:
        return SweTask(**fields, extra=extra)  # type: ignore[arg-type]  # checked above
    except ConfigError as problem:
        raise ConfigError(f"{where}: {problem}") from problem


def _names(value: object, where: str) -> tuple[str, ...]:
    """A list of names, or the JSON text of one."""
    if isinstance(value, str):
        try:
            value = cast("object", json.loads(value)) if value.strip() else cast("object", [])
        except json.JSONDecodeError as problem:
            raise ConfigError(f"{where} must be a list of test names, got {value!r}.") from problem
    if isinstance(value, list):
        names = cast("list[object]", value)
        if all(isinstance(name, str) for name in names):
            return tuple(cast("list[str]", names))
    raise ConfigError(f"{where} must be a list of test names, got {value!r}.")


def read_tasks(path: Path) -> list[SweTask]:
    """Reads a task file: JSON lines, or one JSON list.

    Raises:
        ConfigError: There is no such file, it holds no tasks, or one that can't be read or two of one id.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as problem:
        raise ConfigError(f"the task file {str(path)!r} can't be read: {problem}.") from problem
    tasks: dict[str, SweTask] = {}
    for where, row in _rows(path, text):
        task = from_row(row, where)
        if task.id in tasks:
            raise ConfigError(f"{where}: there are two tasks called {task.id!r}.")
        tasks[task.id] = task
    if not tasks:
        raise ConfigError(f"the task file {str(path)!r} holds no tasks.")
    return list(tasks.values())


def _rows(path: Path, text: str) -> Iterable[tuple[str, Mapping[str, object]]]:
    if text.lstrip().startswith("["):
        found = [(f"{path}, entry {n}", entry) for n, entry in enumerate(_json(text, str(path)))]
    else:
        lines = ((f"{path}:{n}", line) for n, line in enumerate(text.split("\n"), 1))
        found = [(where, _json(line, where)) for where, line in lines if line.strip()]
    for where, row in found:
        if not isinstance(row, dict):
            raise ConfigError(f"{where} must be an object with a task's fields, got {row!r}.")
        yield where, cast("dict[str, object]", row)


def _json(text: str, where: str) -> list[object]:
    try:
        return cast("list[object]", json.loads(text))
    except json.JSONDecodeError as problem:
        raise ConfigError(f"{where} is no JSON: {problem}.") from problem
