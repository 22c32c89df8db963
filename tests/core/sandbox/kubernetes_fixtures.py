"""What the tests of pods share."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import pytest
from kubernetes_server import FakeCluster

from gymllm.sandbox import SandboxSpec
from gymllm.sandbox.kubernetes import KubernetesHost, start_pod
from gymllm.sandbox.kubernetes_container import PodContainer
from gymllm.sandbox.kubernetes_exec import PodProcess

SPEC = SandboxSpec(image="python:3", memory_mb=64, file_mb=32, cpus=0.5, env={"A": "x $(B) $$"})


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as cluster:
        yield cluster


@pytest.fixture
def host(cluster: FakeCluster, tmp_path: Path) -> KubernetesHost:
    return KubernetesHost(kubeconfig=cluster.kubeconfig(tmp_path / "config"), patience_s=5)


@asynccontextmanager
async def running(host: KubernetesHost, spec: SandboxSpec = SPEC) -> AsyncGenerator[PodContainer]:
    pod = await start_pod(spec, host)
    assert isinstance(pod, PodContainer)
    try:
        yield pod
    finally:
        await pod.remove()


async def told(stream: PodProcess) -> tuple[bytes, bytes, int | None]:
    """Both outputs of a program, and its exit code."""
    kept = {1: b"", 2: b""}
    try:
        with anyio.fail_after(10):
            while (got := await stream.receive()) is not None:
                kept[got[0]] += got[1]
        return kept[1], kept[2], await stream.exit_code()
    finally:
        with anyio.CancelScope(shield=True):
            await stream.aclose()


async def run(pod: PodContainer, script: str) -> bytes:
    """What a script prints."""
    out, err, _ = await told(await pod.open(["sh", "-c", script]))
    return out + err


@contextmanager
def no_traces() -> Iterator[None]:
    """Compares our descriptors and threads before and after, but for the pool of connections."""

    def threads() -> list[str]:
        return [t.name for t in threading.enumerate() if "watches" in t.name]

    def descriptors() -> list[str]:
        found: list[str] = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                found.append(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                continue
        return [path for path in found if "eventfd" in path]

    before = threads(), len(descriptors())
    yield
    assert (threads(), len(descriptors())) == before
