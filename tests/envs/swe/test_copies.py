"""Copies of a task's package on this machine are found, and aren't there in its sandbox."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import sample
from playing import bash, play

from gymllm_envs.swe import trees
from gymllm_envs.swe.copies import folders_with_copies
from gymllm_envs.swe.task import SweTask


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    sample.write_package(folder)
    return folder


def test_a_program_that_brings_the_package_is_found(base: Path, tmp_path: Path) -> None:
    system = tmp_path / "system"
    shutil.copytree(base / "src" / "sample", system / "tool" / "vendored" / "sample")
    older = system / "tool" / "vendored" / "sample" / "chunks.py"
    older.write_text(older.read_text().replace("stop", "end"))
    (system / "other" / "sample").mkdir(parents=True)
    (system / "other" / "sample" / "chunks.py").write_text("def chunks():\n    return 3\n")
    (system / "other" / "sample.py").write_text("VOICE = 3\n")
    found = folders_with_copies(sample.PACKAGE, base, (str(system),))
    assert found == (str(system / "tool" / "vendored" / "sample"),)


def test_of_a_module_the_folder_is_hidden(base: Path, tmp_path: Path) -> None:
    package = dataclasses.replace(sample.PACKAGE, sources=("chunks",), source_root="src/sample")
    place = tmp_path / "system" / "tool" / "chunks.py"
    place.parent.mkdir(parents=True)
    shutil.copy(base / "src" / "sample" / "chunks.py", place)
    (tmp_path / "system" / "other").mkdir()
    (tmp_path / "system" / "other" / "chunks.py").write_text("import os\n")
    assert folders_with_copies(package, base, (str(tmp_path / "system"),)) == (str(place.parent),)


@pytest.mark.asyncio
async def test_what_was_found_is_empty_in_the_sandbox(
    task: SweTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Any folder of the system does.
    monkeypatch.setattr(trees, "folders_with_copies", lambda *_: ("/usr/share/zoneinfo",))
    played = await play(task, bash("ls -A /usr/share/zoneinfo | wc -l"))
    assert played.observations[1] == "0"
