"""Rows of a data set, from a file, a folder, or the hub."""

from __future__ import annotations

import csv
import importlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import cast

from gymllm.errors import ConfigError, EnvError, MissingExtraError

Row = Mapping[str, object]

_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+\Z")
_EXTRA = 'pip install "gymllm-envs[hub]"'
_TASK_FILES = {
    "patch": "gold.patch",
    "test_patch": "test.patch",
    "eval_script": "eval.sh",
    "problem_statement": "problem_statement.md",
}
"""Fields that swebench 5 keeps as files of a task's folder."""


def read_rows(source: Path | str, split: str) -> Iterator[tuple[str, Row]]:
    """Every row, with where it is, for errors.

    Args:
        source: A file (JSON lines, a JSON list, Parquet, CSV); a folder of such files, or of swebench 5's
            task folders (`tasks/<id>/task.yaml`); or the name of a data set on the hub.
        split: Which part of a folder or data set. Of a folder's files, those whose names begin with it, if
            any do.

    Raises:
        ConfigError: There is nothing of the kind, or it can't be read.
        MissingExtraError: A package that reads it isn't installed.
        EnvError: The hub doesn't answer.
    """
    path = Path(source)
    if path.is_dir():
        return _folder(path, split)
    if path.exists() or path.suffix in _SUFFIXES:
        return _file(path)
    if _HUB_NAME.match(str(source)):
        return _hub(str(source), split)
    raise ConfigError(
        f"tasks={str(source)!r} is no file, no folder, and no name of a data set (owner/name)."
    )


def _folder(path: Path, split: str) -> Iterator[tuple[str, Row]]:
    if any((path / "tasks").glob("*/task.yaml")):
        yield from _task_folders(path, split)
        return
    files = sorted(p for p in path.rglob("*") if p.suffix in _SUFFIXES and p.is_file())
    files = [
        p for p in files if re.match(rf"{re.escape(split)}\b|{re.escape(split)}_", p.name)
    ] or files
    if not files:
        raise ConfigError(
            f"the folder {str(path)!r} holds neither {', '.join(_SUFFIXES)} files nor tasks/*/task.yaml."
        )
    for file in files:
        yield from _file(file)


def _task_folders(path: Path, split: str) -> Iterator[tuple[str, Row]]:
    try:
        import yaml
    except ImportError as problem:
        raise MissingExtraError(f"Folders of tasks need PyYAML: {_EXTRA}.") from problem
    for folder in sorted((path / "tasks").iterdir()):
        if not (folder / "task.yaml").is_file():
            continue
        try:
            row = cast("dict[str, object]", yaml.safe_load((folder / "task.yaml").read_text()))
            row |= cast("dict[str, object]", json.loads((folder / "tests.json").read_text()))
            for name, file in _TASK_FILES.items():
                with (folder / file).open(newline="") as opened:  # a patch may hold \r\n
                    row[name] = opened.read()
        except (OSError, ValueError, TypeError, yaml.YAMLError) as problem:
            raise ConfigError(
                f"the task folder {str(folder)!r} can't be read: {problem}."
            ) from problem
        if row.get("split", split) == split:
            yield str(folder), row


def _file(path: Path) -> Iterator[tuple[str, Row]]:
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"the task file {str(path)!r} can't be read: {problem}.") from problem
    if path.suffix == ".csv":
        csv.field_size_limit(sys.maxsize)  # patches are longer than its 128 KB
        yield from _rows_of(path, "row", csv.DictReader(text.splitlines(keepends=True)))
    elif text.lstrip().startswith("["):
        yield from _rows_of(path, "entry", cast("list[object]", _json(text, str(path))))
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                where = f"{path}:{number}"
                yield _checked(where, _json(line, where))


def _parquet(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as problem:
        raise MissingExtraError(f"Parquet files need pyarrow: {_EXTRA}.") from problem
    try:
        rows = cast("list[object]", parquet.read_table(path).to_pylist())
    except Exception as problem:  # pyarrow's own errors have no common root but this
        raise ConfigError(f"the task file {str(path)!r} can't be read: {problem}.") from problem
    yield from _rows_of(path, "row", rows)


def _hub(name: str, split: str) -> Iterator[tuple[str, Row]]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as problem:
        raise MissingExtraError(
            f"Data sets of the hub need the datasets package: {_EXTRA}."
        ) from problem
    try:
        rows = cast("Iterable[object]", datasets.load_dataset(name, split=split))
    except ValueError as problem:  # no such split; says which there are
        raise ConfigError(f"the data set {name!r} has no part {split!r}: {problem}") from problem
    except Exception as problem:  # of several packages; offline and not found among them
        raise EnvError(
            f"The data set {name!r} can't be had from the hub: {problem}. Without network, download it "
            "elsewhere and give its folder or file."
        ) from problem
    yield from _rows_of(Path(name), "row", rows)


def _rows_of(path: Path, what: str, rows: Iterable[object]) -> Iterator[tuple[str, Row]]:
    for number, row in enumerate(rows):
        yield _checked(f"{path}, {what} {number}", row)


def _checked(where: str, row: object) -> tuple[str, Row]:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where} must be an object with a task's fields, got {row!r}.")
    return where, cast("Row", row)


def _json(text: str, where: str) -> object:
    try:
        return cast("object", json.loads(text))
    except json.JSONDecodeError as problem:
        raise ConfigError(f"{where} is no JSON: {problem}.") from problem
