"""Pods: their starts and settings, with the real client against an API server of the tests."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import anyio
import pytest

pytest.importorskip("kubernetes", reason='needs pip install "gymllm[kubernetes]"')
pytest.importorskip("aiohttp")

from kubernetes_fixtures import SPEC, cluster, host, no_traces, run, running
from kubernetes_protocol import Refusal
from kubernetes_server import FakeCluster

from gymllm.errors import (
    ConfigError,
    MissingExtraError,
    SandboxDiedError,
    SandboxStartError,
)
from gymllm.sandbox import SandboxSpec
from gymllm.sandbox.interface import Mount
from gymllm.sandbox.kubernetes import KubernetesHost, Toleration, start_pod
from gymllm.sandbox.kubernetes_cluster import is_abandoned, owner
from gymllm.sandbox.kubernetes_container import PodContainer
from gymllm.sandbox.kubernetes_pod import pod_state

pytestmark = pytest.mark.asyncio
__all__ = ["cluster", "host"]  # fixtures

# Starts and ends


async def test_a_pod_starts_runs_and_leaves_nothing(
    cluster: FakeCluster, host: KubernetesHost
) -> None:
    with no_traces():
        async with running(host) as pod:
            assert await run(pod, 'pwd; echo "$A"') == b"/workspace\nx $(B) $$\n"
            assert cluster.names() == [pod.name]
            assert await pod.alive()
            (process,) = [p.container for p in cluster.pods.values()]
            assert process is not None
        assert not cluster.pods
        assert not process.running()
        assert not await pod.alive()
        await pod.remove()
        with pytest.raises(SandboxDiedError, match="closed"):
            await pod.open(["true"])


async def test_what_a_pod_is_made_from(cluster: FakeCluster, host: KubernetesHost) -> None:
    more = replace(
        host,
        namespace="other",
        node_selector={"disk": "fast"},
        tolerations=(Toleration(key="gpu", operator="Exists"),),
        image_pull_secrets=("registry",),
        image_pull_policy="IfNotPresent",
        runtime_class="gvisor",
        priority_class="low",
        user_namespaces=True,
        cpu_request=0.1,
        oldest_s=50,
    )
    async with running(more, replace(SPEC, user="1000:100", wall_s=70)):
        (body,) = cluster.bodies()
    spec = body["spec"]
    (container,) = spec["containers"]
    assert body["metadata"]["namespace"] == "other"
    assert body["metadata"]["labels"]["gymllm.owner"] == owner()
    assert spec["restartPolicy"] == "Never"
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["hostUsers"] is False
    assert spec["activeDeadlineSeconds"] == 50
    assert spec["nodeSelector"] == {"disk": "fast"}
    assert spec["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert (spec["runtimeClassName"], spec["priorityClassName"]) == ("gvisor", "low")
    assert container["imagePullPolicy"] == "IfNotPresent"
    assert container["securityContext"] == {
        "runAsUser": 1000,
        "runAsGroup": 100,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["resources"] == {
        "limits": {"memory": "64Mi", "cpu": "500m", "ephemeral-storage": "32Mi"},
        "requests": {"memory": "64Mi", "cpu": "100m", "ephemeral-storage": "32Mi"},
    }


async def test_many_start_at_once_with_one_watch(
    cluster: FakeCluster, host: KubernetesHost
) -> None:
    pods: list[PodContainer] = []

    async def one() -> None:
        async with running(host) as pod:
            pods.append(pod)
            assert await run(pod, "echo on") == b"on\n"

    async with anyio.create_task_group() as tasks:
        for _ in range(12):
            tasks.start_soon(one)
    assert len({pod.name for pod in pods}) == 12
    assert not cluster.pods
    assert sum("watch=true" in request for request in cluster.requests) < 12


async def test_cancelled_at_any_time_leaves_no_pod(
    cluster: FakeCluster, host: KubernetesHost
) -> None:
    with no_traces():
        for step in range(20):
            with anyio.move_on_after(step * 0.0015):
                async with running(host) as pod:
                    await run(pod, "sleep 5")
        assert not cluster.pods


# What a cluster may answer


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("ImagePullBackOff", 'Back-off pulling image "python:3"'),
        ("ErrImagePull", "manifest unknown"),
        ("CreateContainerConfigError", "container has runAsNonRoot and image will run as root"),
    ],
)
async def test_an_image_that_cannot_be_had(
    cluster: FakeCluster, host: KubernetesHost, reason: str, message: str
) -> None:
    cluster.bad_images["python:3"] = (reason, message)
    with pytest.raises(SandboxStartError, match=f"{reason}: {re.escape(message)}"):
        await start_pod(SPEC, host)
    assert not cluster.pods


async def test_an_image_without_sleep_says_so(cluster: FakeCluster, host: KubernetesHost) -> None:
    async def use() -> None:
        # As the shell of such an image would: no `sleep` on its PATH.
        async with running(host, replace(SPEC, env={"PATH": "/nowhere"})) as pod:
            with anyio.fail_after(5):
                while await pod.alive():  # noqa: ASYNC110
                    await anyio.sleep(0.005)
            await pod.open(["true"])

    with pytest.raises((SandboxStartError, SandboxDiedError), match="process 1 ended with 127"):
        await use()
    assert not cluster.pods


async def test_no_node_has_room(cluster: FakeCluster, host: KubernetesHost) -> None:
    cluster.no_room = True
    with pytest.raises(SandboxStartError, match=r"Unschedulable: 0/1 nodes .* Insufficient memory"):
        await start_pod(SPEC, replace(host, schedule_timeout_s=0.05))
    assert not cluster.pods


async def test_a_quota_that_is_used_up(cluster: FakeCluster, host: KubernetesHost) -> None:
    cluster.quota = 1
    async with running(host):
        with pytest.raises(SandboxStartError, match="exceeded quota: few"):
            await start_pod(SPEC, host)
        assert len(cluster.pods) == 1


@pytest.mark.parametrize(("verb", "match"), [("create", "cannot create"), ("list", "cannot list")])
async def test_what_we_may_not_do_is_named(
    cluster: FakeCluster, host: KubernetesHost, verb: str, match: str
) -> None:
    cluster.forbidden.add((verb, "pods"))
    with pytest.raises(SandboxStartError, match=match):
        await start_pod(SPEC, host)


async def test_a_watch_that_is_forbidden_is_named(
    cluster: FakeCluster, host: KubernetesHost
) -> None:
    cluster.forbidden.add(("watch", "pods"))
    cluster.slow_pull("python:3")
    with pytest.raises(SandboxStartError, match=r"ContainerCreating|cannot watch"):
        await start_pod(SPEC, replace(host, start_timeout_s=0.3))
    cluster.forbidden.clear()


async def test_what_passes_is_tried_again(cluster: FakeCluster, host: KubernetesHost) -> None:
    cluster.refusals += [
        ("POST pods", Refusal(429, "TooManyRequests", "busy", after="0")),
        ("POST pods", Refusal(500, "InternalError", "etcd")),
        ("POST pods", Refusal(409, "Conflict", "the object has been modified: quota")),
        ("GET watch=", Refusal(429, "TooManyRequests", "busy", after="0")),
        ("GET exec", Refusal(503, "ServiceUnavailable", "busy")),
        ("DELETE pods", Refusal(500, "InternalError", "etcd")),
    ]
    async with running(host) as pod:
        assert await run(pod, "echo on") == b"on\n"
    assert not cluster.refusals
    assert not cluster.pods


async def test_patience_ends(cluster: FakeCluster, host: KubernetesHost) -> None:
    cluster.refusals += [("POST pods", Refusal(429, "TooManyRequests", "busy"))] * 50
    with pytest.raises(SandboxStartError, match=r"busy .429 TooManyRequests"):
        await start_pod(SPEC, replace(host, patience_s=0.3))


async def test_an_answer_that_is_lost_makes_no_second_pod(
    cluster: FakeCluster, host: KubernetesHost
) -> None:
    cluster.lose_created = 1
    async with running(host):
        assert len(cluster.pods) == 1
        assert sum(request.startswith("POST") for request in cluster.requests) == 3
    assert not cluster.pods


async def test_a_start_that_is_late_says_what_it_waits_for(
    cluster: FakeCluster, host: KubernetesHost
) -> None:
    cluster.slow_pull("python:3")
    cluster.events.append(
        {
            "involvedObject": {"name": "*"},
            "reason": "Pulling",
            "message": 'Pulling image "python:3"',
            "lastTimestamp": "2026-01-01T00:00:00Z",
        }
    )
    with pytest.raises(SandboxStartError, match=r"start_timeout_s=0.1: ContainerCreating; Pulling"):
        await start_pod(SPEC, replace(host, start_timeout_s=0.1))
    assert not cluster.pods


async def test_a_slow_pull_holds_up_its_own_image_only(
    cluster: FakeCluster, host: KubernetesHost
) -> None:
    host = replace(host, starts_at_once=1)
    slow = replace(SPEC, image="slow")
    cluster.slow_pull("slow")
    async with anyio.create_task_group() as tasks:

        async def late() -> None:
            async with running(host, slow):
                pass

        tasks.start_soon(late)
        tasks.start_soon(late)
        with anyio.fail_after(5):
            for _ in range(3):
                async with running(host):
                    pass
        assert [body["spec"]["containers"][0]["image"] for body in cluster.bodies()] == ["slow"]
        cluster.pulled("slow")
    assert not cluster.pods


async def test_the_api_restarts_while_a_pod_starts(
    cluster: FakeCluster, host: KubernetesHost
) -> None:
    cluster.slow_pull("python:3")
    async with anyio.create_task_group() as tasks:

        async def start() -> None:
            async with running(host) as pod:
                assert await run(pod, "echo on") == b"on\n"

        tasks.start_soon(start)
        with anyio.fail_after(5):
            while not cluster.pods:  # noqa: ASYNC110
                await anyio.sleep(0.005)
        await anyio.to_thread.run_sync(cluster.stop)
        cluster.pulled("python:3")
        await anyio.to_thread.run_sync(cluster.restart)
    assert not cluster.pods


async def test_a_watch_that_is_too_old_lists_anew(
    cluster: FakeCluster, host: KubernetesHost
) -> None:
    cluster.slow_pull("python:3")
    async with anyio.create_task_group() as tasks:

        async def start() -> None:
            async with running(host):
                pass

        tasks.start_soon(start)
        with anyio.fail_after(5):
            while not cluster.pods:  # noqa: ASYNC110
                await anyio.sleep(0.005)

        async def expire() -> None:
            cluster.forget_before = cluster.version + 1
            cluster.tick()
            cluster.tick()

        cluster.do(expire())
        cluster.pulled("python:3")


# Settings


async def test_what_pods_cannot_have_is_refused(host: KubernetesHost, tmp_path: Path) -> None:
    for spec, match in (
        (SandboxSpec(), "image"),
        (replace(SPEC, user="agent"), "number"),
        (replace(SPEC, hidden=("/tests",)), "hidden"),
        (replace(SPEC, mounts=(Mount(source=tmp_path, target="/x"),)), "mounts"),
    ):
        with pytest.raises(ConfigError, match=match):
            await start_pod(spec, host)
    for wrong in ({"namespace": "A_b"}, {"starts_at_once": 0}, {"cpu_request": 0.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            KubernetesHost(**wrong)  # type: ignore[arg-type]  # on purpose


async def test_without_the_client_it_names_the_extra(
    host: KubernetesHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("gymllm.sandbox.kubernetes_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(MissingExtraError, match=r"gymllm\[kubernetes\]"):
        await start_pod(SPEC, host)


async def test_no_cluster_is_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(SandboxStartError, match=r"KubernetesHost\(kubeconfig=\.\.\."):
        await start_pod(SPEC, KubernetesHost())
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SandboxStartError, match="no cluster is configured"):
        await start_pod(SPEC, KubernetesHost())


async def test_a_context_that_is_not_there(host: KubernetesHost) -> None:
    with pytest.raises(SandboxStartError, match="nowhere"):
        await start_pod(SPEC, replace(host, context="nowhere"))


async def test_a_wrong_token(cluster: FakeCluster, host: KubernetesHost, tmp_path: Path) -> None:
    config = tmp_path / "wrong"
    config.write_text(host.kubeconfig.read_text().replace("a-token", "stolen"))  # type: ignore[union-attr]
    with pytest.raises(SandboxStartError, match="401 Unauthorized"):
        await start_pod(SPEC, replace(host, kubeconfig=config))


async def test_it_runs_on_trio_too(cluster: FakeCluster, host: KubernetesHost) -> None:
    import trio

    async def main() -> bytes:
        async with running(host) as pod:
            return await run(pod, "echo on")

    assert await anyio.to_thread.run_sync(trio.run, main) == b"on\n"
    assert not cluster.pods


async def test_owners_are_labels() -> None:
    assert re.fullmatch(r"[A-Za-z0-9][-A-Za-z0-9_.]{0,61}[A-Za-z0-9]", owner())
    assert await anyio.to_thread.run_sync(owner) == owner()
    assert not is_abandoned(pod_state({"metadata": {"labels": {}}}), datetime.now(UTC))
