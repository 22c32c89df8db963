"""Pods: their ends, what others have left, the network policy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest

pytest.importorskip("kubernetes", reason='needs pip install "gymllm[kubernetes]"')
pytest.importorskip("aiohttp")

from kubernetes_fixtures import SPEC, cluster, host, running
from kubernetes_server import FakeCluster

from gymllm.errors import (
    SandboxDiedError,
    SandboxError,
    SandboxStartError,
)
from gymllm.sandbox.kubernetes import KubernetesHost, start_pod
from gymllm.sandbox.kubernetes_cluster import cluster_of, owner

pytestmark = pytest.mark.asyncio
__all__ = ["cluster", "host"]  # fixtures

# Ends


async def test_an_evicted_pod_says_why(cluster: FakeCluster, host: KubernetesHost) -> None:
    async with running(host) as pod:
        stream = await pod.open(["sleep", "60"])
        await anyio.to_thread.run_sync(cluster.evict, pod.name)
        with anyio.fail_after(5):
            while await stream.receive() is not None:
                pass
        await stream.aclose()
        assert not await pod.alive()
        with pytest.raises(SandboxDiedError, match=r"Evicted: The node was low on resource"):
            await pod.open(["true"])
    assert not cluster.pods


async def test_a_pod_that_was_deleted_says_so(cluster: FakeCluster, host: KubernetesHost) -> None:
    async with running(host) as pod:
        other = await cluster_of(host)
        await other.delete(pod.name, force=True)
        assert not await pod.alive()
        with pytest.raises(SandboxDiedError, match="somebody has deleted it"):
            await pod.open(["true"])


@pytest.mark.parametrize(("wall_s", "match"), [(0.6, "wall_s"), (None, "DeadlineExceeded")])
async def test_it_ends_by_itself(
    cluster: FakeCluster, host: KubernetesHost, wall_s: float | None, match: str
) -> None:
    host = host if wall_s else replace(host, oldest_s=1)
    async with running(host, replace(SPEC, wall_s=wall_s)) as pod:
        stream = await pod.open(["sleep", "60"])
        with anyio.fail_after(5):
            while await stream.receive() is not None:
                pass
            await stream.aclose()
            while await pod.alive():  # noqa: ASYNC110
                await anyio.sleep(0.01)
        with pytest.raises(SandboxDiedError, match=match):
            await pod.open(["true"])


async def test_a_dead_node_does_not_hold_up_the_end(
    cluster: FakeCluster, host: KubernetesHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gymllm.sandbox.kubernetes_container._END_TIMEOUT_S", 0.1)
    async with running(host):
        cluster.node_dead = True
    assert not cluster.pods


async def test_what_could_not_be_deleted_is_told_and_deleted_by_a_later_start(
    cluster: FakeCluster, host: KubernetesHost
) -> None:
    cluster.forbidden.add(("delete", "pods"))
    pod = await start_pod(SPEC, host)
    with pytest.raises(SandboxError, match=r"cannot delete.*Later starts"):
        await pod.remove()
    cluster.bad_images["bad"] = ("ErrImagePull", "no such image")
    with pytest.raises(SandboxStartError, match="no such image"):
        await start_pod(replace(SPEC, image="bad"), host)
    assert len(cluster.pods) == 2
    cluster.forbidden.clear()
    async with running(host) as pod:
        with anyio.fail_after(5):
            while cluster.names() != [pod.name]:  # noqa: ASYNC110
                await anyio.sleep(0.005)


# What others have left


def _left(cluster: FakeCluster, name: str, owner: str, **status: Any) -> None:
    async def put() -> None:
        about = {"name": name, "namespace": "boxes", "uid": name, "labels": {"gymllm.owner": owner}}
        cluster.add({"metadata": about, "spec": {"terminationGracePeriodSeconds": 1}} | status)

    cluster.do(put())


async def test_only_what_nobody_owns_is_removed(cluster: FakeCluster, host: KubernetesHost) -> None:
    machine = owner().partition("-")[0]
    now = datetime.now(UTC)
    ended = [
        {"status": {"phase": "Failed", "containerStatuses": [{"state": {"terminated": at}}]}}
        for at in (
            {"finishedAt": (now - timedelta(minutes=20)).isoformat(timespec="seconds")},
            {"finishedAt": (now - timedelta(minutes=2)).isoformat(timespec="seconds")},
        )
    ]
    _left(cluster, "of-a-dead-process-here", f"{machine}-{os.getpid()}-1")
    _left(cluster, "ours", owner())
    _left(cluster, "of-our-parent", f"{machine}-{_name(os.getppid())}")
    _left(cluster, "of-another-machine", f"{'0' * 16}-{os.getpid()}-1")
    _left(cluster, "ended-long-ago-elsewhere", f"{'0' * 16}-1-1", **ended[0])
    _left(cluster, "ended-just-now-elsewhere", f"{'0' * 16}-1-1", **ended[1])
    _left(cluster, "of-nobody", "")
    async with running(host) as pod:
        with anyio.fail_after(5):
            while len(cluster.pods) > 6:  # noqa: ASYNC110 - the deletions take their time
                await anyio.sleep(0.005)
        assert sorted(cluster.names()) == sorted(
            [
                "ended-just-now-elsewhere",
                "of-another-machine",
                "of-nobody",
                "of-our-parent",
                "ours",
                pod.name,
            ]
        )
    paged = [request for request in cluster.requests if "limit=" in request]
    assert len(paged) == 1


def _name(pid: int) -> str:
    from gymllm.sandbox.state import owner_name

    return owner_name(pid)


async def test_lists_are_read_page_by_page(
    cluster: FakeCluster, host: KubernetesHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gymllm.sandbox.kubernetes_cluster._PAGE", 2)
    machine = owner().partition("-")[0]
    for number in range(5):
        _left(cluster, f"left-{number}", f"{machine}-{os.getpid()}-1")
    async with running(host):
        pass
    with anyio.fail_after(5):
        while cluster.pods:  # noqa: ASYNC110
            await anyio.sleep(0.005)


async def test_pods_of_a_killed_process_are_removed_by_the_next(
    cluster: FakeCluster, host: KubernetesHost
) -> None:
    script = f"""if True:
        import anyio, sys
        from pathlib import Path
        from gymllm.sandbox import SandboxSpec
        from gymllm.sandbox.kubernetes import KubernetesHost, start_pod
        async def main():
            pod = await start_pod(SandboxSpec(image="python:3"),
                                  KubernetesHost(kubeconfig=Path({str(host.kubeconfig)!r})))
            stream = await pod.open(["sleep", "60"])
            print(pod.name, flush=True)
            await anyio.sleep_forever()
        anyio.run(main)
    """
    child = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    name = await anyio.to_thread.run_sync(child.stdout.readline)
    assert name.strip() in cluster.names()
    (left,) = cluster.pods.values()
    assert left.container is not None
    async with running(host):  # its owner lives: nothing is taken from it
        assert len(cluster.pods) == 2
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    again = replace(host, start_timeout_s=20)  # another host to us: it looks again
    async with running(again):
        with anyio.fail_after(5):
            while len(cluster.pods) > 1:  # noqa: ASYNC110
                await anyio.sleep(0.005)
    assert not left.container.running()


# The network


async def test_a_network_policy_is_made_once(cluster: FakeCluster, host: KubernetesHost) -> None:
    async with running(host) as pod, running(host):
        assert "gymllm-no-network" in pod.limits.network
    ((space, name),) = cluster.policies
    assert (space, name) == ("boxes", "gymllm-no-network")
    assert cluster.policies[space, name]["spec"]["policyTypes"] == ["Ingress", "Egress"]
    async with running(replace(host, starts_at_once=2)) as pod:
        assert pod.limits.network
    assert sum("POST /apis" in request for request in cluster.requests) == 1


@pytest.mark.parametrize("verbs", [("get", "create"), ("create",)])
async def test_without_a_policy_it_says_that_one_is_needed(
    cluster: FakeCluster, host: KubernetesHost, verbs: tuple[str, ...]
) -> None:
    cluster.forbidden |= {(verb, "networkpolicies") for verb in verbs}
    async with running(host) as pod:
        assert not pod.limits.network
        assert any("NetworkPolicy" in lack and "cannot" in lack for lack in pod.limits.lacks)


async def test_a_policy_that_lets_through_is_not_taken_for_ours(
    cluster: FakeCluster, host: KubernetesHost
) -> None:
    async with running(host):
        pass
    cluster.policies["boxes", "gymllm-no-network"]["spec"]["egress"] = [{}]
    async with running(replace(host, starts_at_once=2)) as pod:
        assert any("lets some through" in lack for lack in pod.limits.lacks)
