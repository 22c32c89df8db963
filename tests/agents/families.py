"""Real vocabularies and chat templates, for tests: `load_family("qwen3")`.

scripts/fetch_tokenizers.py makes the folders; without it, or without a network, tests that use a
family are skipped. `conftest.py` puts this folder on the path, so `from families import ...` works.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol, cast

import pytest

from gymllm_agents import Tokenizer

_SCRIPT = Path(__file__).parents[2] / "scripts" / "fetch_tokenizers.py"


class _Family(Protocol):
    @property
    def stand_in(self) -> bool: ...


class _Fetcher(Protocol):
    """What is used of the script."""

    FAMILIES: Mapping[str, _Family]
    FetchError: type[Exception]

    def fetch(
        self, names: Iterable[str] = ..., *, into: Path | None = ..., report: Callable[[str], None]
    ) -> Path: ...
    def is_there(self, name: str, cache: Path) -> bool: ...
    def cache_folder(self) -> Path: ...
    def source_folder(self, package: str, cache: Path) -> Path: ...
    def read_gguf_fields(self, file: Path) -> dict[str, object]: ...


def _load_script() -> _Fetcher:
    spec = importlib.util.spec_from_file_location("fetch_tokenizers", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return cast(_Fetcher, module)


fetcher = _load_script()

FAMILIES: dict[str, Path] = {name: fetcher.cache_folder() / name for name in fetcher.FAMILIES}
"""The folder of each family, which `load_family` fills."""

STAND_INS = frozenset(name for name, family in fetcher.FAMILIES.items() if family.stand_in)
"""Families whose template and control tokens are real, but whose ordinary tokens are another's."""


@functools.cache
def family_folder(name: str) -> Path:
    """A family's folder, downloaded if need be; skips the test if that can't be done."""
    reason = _problem(name)
    if reason:
        pytest.skip(reason)
    return FAMILIES[name]


@functools.cache
def load_family(name: str) -> Tokenizer:
    """A family's tokenizer with its chat template; loaded once, so don't change it."""
    return Tokenizer.from_folder(family_folder(name))


@functools.cache
def source_folder(family: str, package: str) -> Path:
    """The files of a package that a family is made of or compared with."""
    return fetcher.source_folder(package, family_folder(family).parent)


@functools.cache
def hub_templates() -> dict[str, str]:
    """Chat templates of some seventy models, by name: those that llama.cpp has its own tests with."""
    folder = source_folder("llama3.1", "llama.cpp")
    return {file.stem: file.read_text("utf-8") for file in sorted(folder.glob("*.jinja"))}


_problems: list[str] = []


def _problem(name: str) -> str:
    """Why there is no such folder; empty if there is."""
    if _problems and not fetcher.is_there(name, fetcher.cache_folder()):
        return _problems[0]  # a network that was not there is not waited for again
    try:
        fetcher.fetch([name], report=lambda line: None)
    except fetcher.FetchError as error:
        _problems.append(str(error))
        return _problems[0]
    return ""
