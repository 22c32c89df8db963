"""The API of a cluster: the official client's calls in threads, with patience; and what is done once.

The client is synchronous. Its calls are short and run in threads, under a limiter of this cluster's own; what
lasts (a watch, a program's streams) is elsewhere and needs none or one.

Whose pod is it? Each has a label with its owner: this kernel's boot and process namespace, the process, its
start time. The first start in a namespace removes

- pods whose owner was a process here that is gone;
- pods of anybody that have ended by themselves some time ago.

Owners on other machines can't be asked, and no clock or heartbeat is trusted: their pods are let be. They
end by themselves, at `wall_s` or `KubernetesHost.oldest_s`, and are removed later. So a pod of a run that
lives is never taken from it.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import cast

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from gymllm.errors import SandboxStartError
from gymllm.sandbox.kubernetes import KubernetesHost
from gymllm.sandbox.kubernetes_client import Api, ApiError, Call, Response, fetch
from gymllm.sandbox.kubernetes_pod import (
    OWNER_LABEL,
    POLICY_NAME,
    Json,
    PodState,
    network_policy,
    pod_state,
)
from gymllm.sandbox.kubernetes_watch import PodWatch
from gymllm.sandbox.state import is_alive, owner_name

_PAGE = 500
_KEPT_ENDED = timedelta(minutes=10)
"""For so long an owner elsewhere may still ask why its pod has ended."""


def owner() -> str:
    """Of this process's pods; a label's value."""
    return f"{_machine()}-{owner_name(os.getpid())}"


def _machine() -> str:
    """This process namespace, of this boot: where a process id means what it means here."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:16]


def is_abandoned(pod: PodState, now: datetime) -> bool:
    """Whether anyone may remove it; see the module."""
    machine, _, process = pod.owner.partition("-")
    if machine == _machine() and not is_alive(process):
        return True
    with suppress(ValueError):
        return bool(pod.finished_at) and now - datetime.fromisoformat(pod.finished_at) > _KEPT_ENDED
    return False


class Cluster:
    """A namespace of a cluster, for one event loop."""

    def __init__(self, host: KubernetesHost) -> None:
        self.host = host
        self.api = Api(host)
        self.namespace = self.api.namespace
        self.calls = anyio.CapacityLimiter(host.calls_at_once)
        self.connecting = anyio.CapacityLimiter(host.calls_at_once)
        """Of programs; apart, so that neither holds up the other."""
        self.watch = PodWatch(lambda: _Source(self))
        self.no_policy = ""
        """Why there is no network policy; empty if there is one."""
        self.left: set[str] = set()
        """Pods of ours that could not be deleted when they should have been."""
        self._once = anyio.Lock()
        self._prepared = False
        self._turns: dict[str, anyio.CapacityLimiter] = {}

    async def call(self, call: Call, *args: object, **options: object) -> Json:
        """Calls, again while the API is away or too busy, within the host's patience.

        Raises:
            ApiError: It says no, or nothing for too long.
        """
        ends = anyio.current_time() + self.host.patience_s
        pause = 0.1
        while True:
            try:
                run = partial(fetch, call, *args, **options)
                return await anyio.to_thread.run_sync(run, limiter=self.calls)
            except ApiError as error:
                wait = error.retry_after_s
                if wait is None:
                    wait = pause * random.uniform(0.5, 1)
                if not error.passes or anyio.current_time() + wait > ends:
                    raise
                await anyio.sleep(wait)
                pause = min(2 * pause, 5.0)

    async def pod(self, name: str) -> PodState | None:
        """Asks for a pod; None if there is none."""
        try:
            return pod_state(
                await self.call(self.api.core.read_namespaced_pod, name, self.namespace)
            )
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def delete(self, name: str, *, uid: str = "", force: bool = False) -> bool:
        """Deletes a pod; whether there was one."""
        body: dict[str, object] = {"gracePeriodSeconds": 0} if force else {}
        if uid:
            body["preconditions"] = {"uid": uid}
        try:
            await self.call(self.api.core.delete_namespaced_pod, name, self.namespace, body=body)
        except ApiError as error:
            if error.status in (404, 409):  # 409: another of that name by now
                return False
            raise
        return True

    async def last_event(self, name: str) -> str:
        """What the cluster has noted last about a pod; empty if it doesn't say."""
        try:
            listed = await self.call(
                self.api.core.list_namespaced_event,
                self.namespace,
                field_selector=f"involvedObject.name={name}",
            )
        except ApiError:
            return ""
        items = cast("list[Json]", listed.get("items") or [])
        if not items:
            return ""
        last = max(items, key=lambda item: str(item.get("lastTimestamp") or ""))
        return f"{last.get('reason')}: {last.get('message')}"

    @asynccontextmanager
    async def turn(self, image: str) -> AsyncGenerator[None]:
        """Waits until a pod of this image may start."""
        limiter = self._turns.get(image)
        if limiter is None:
            limiter = self._turns[image] = anyio.CapacityLimiter(self.host.starts_at_once)
        try:
            async with limiter:
                yield
        finally:
            left = limiter.statistics()
            if not left.borrowed_tokens and not left.tasks_waiting:
                self._turns.pop(image, None)

    async def prepare(self) -> None:
        """Removes what vanished owners left, and sees to the network policy. Once.

        Raises:
            SandboxStartError: We may not list pods here.
        """
        async with self._once:
            if not self._prepared:
                try:
                    await self.reap()
                except ApiError as error:
                    raise SandboxStartError(
                        f"kubernetes: pods of namespace {self.namespace!r} can't be listed: {error}."
                    ) from error
                await self._make_policy()
                self._prepared = True

    async def delete_left(self) -> None:
        """Tries again to delete what is left."""
        while self.left:
            name = self.left.pop()
            try:
                await self.delete(name)
            except BaseException as error:
                self.left.add(name)
                if isinstance(error, ApiError):
                    return
                raise

    async def reap(self) -> list[str]:
        """Removes what was left behind; its names. Doesn't wait until they are gone."""
        more: str | None = None
        found: list[PodState] = []
        while more != "":
            page = await self.call(
                self.api.core.list_namespaced_pod,
                self.namespace,
                label_selector=OWNER_LABEL,
                limit=_PAGE,
                **({"_continue": more} if more else {}),
            )
            found += [pod_state(pod) for pod in cast("list[Json]", page.get("items") or [])]
            about = cast("Json", page.get("metadata") or {})
            more = str(about.get("continue") or "")
        now = datetime.now(UTC)
        gone = [pod for pod in found if is_abandoned(pod, now)]

        async def remove(pod: PodState) -> None:
            with suppress(ApiError):  # the next start tries again
                await self.delete(pod.name, uid=pod.uid)

        async with anyio.create_task_group() as tasks:
            for pod in gone:
                tasks.start_soon(remove, pod, name=f"removes the pod {pod.name}")
        return [pod.name for pod in gone]

    async def _make_policy(self) -> None:
        networking = self.api.networking
        wanted = network_policy()
        try:
            there = await self.call(
                networking.read_namespaced_network_policy, POLICY_NAME, self.namespace
            )
        except ApiError as error:
            try:
                if error.status not in (403, 404):
                    raise
                there = await self.call(
                    networking.create_namespaced_network_policy, self.namespace, body=wanted
                )
            except ApiError as refused:
                # Another run may have made it in between, and be the only one that may look.
                self.no_policy = "" if refused.reason == "AlreadyExists" else str(refused)
                return
        spec = cast("Json", there.get("spec") or {})
        if (
            spec.get("ingress")
            or spec.get("egress")
            or spec.get("podSelector") != cast("Json", wanted["spec"]).get("podSelector")
        ):
            self.no_policy = (
                f"the policy {POLICY_NAME!r} that is there isn't ours: it lets some through"
            )


class _Source:
    """The API, for the thread that watches."""

    def __init__(self, cluster: Cluster) -> None:
        self._api = cluster.api
        self._selector = f"{OWNER_LABEL}={owner()}"
        self._response: Response | None = None
        self._hung_up = False

    def pods(self) -> tuple[str, list[Json]]:
        listed = fetch(
            self._api.core.list_namespaced_pod, self._api.namespace, label_selector=self._selector
        )
        about = cast("Json", listed.get("metadata") or {})
        return str(about.get("resourceVersion") or ""), cast(
            "list[Json]", listed.get("items") or []
        )

    def events(self, version: str) -> Iterator[Json]:
        return self._api.pod_events(self._selector, version, self._opened)

    def _opened(self, response: Response) -> None:
        self._response = response
        if self._hung_up:
            self.hang_up()

    def hang_up(self) -> None:
        self._hung_up = True
        with suppress(ValueError, RuntimeError, OSError):  # it isn't open, or not any more
            if self._response is not None:
                self._response.shutdown()


_clusters: RunVar[dict[KubernetesHost, Cluster]] = RunVar("gymllm_kubernetes_clusters")


async def cluster_of(host: KubernetesHost) -> Cluster:
    """One for each host and event loop; prepared."""
    try:
        known = _clusters.get()
    except LookupError:
        known = dict[KubernetesHost, Cluster]()
        _clusters.set(known)
    cluster = known.get(host)
    if cluster is None:
        # In a thread: a configuration may run a program to get its token.
        made = await anyio.to_thread.run_sync(Cluster, host)
        cluster = known.setdefault(host, made)
    await cluster.prepare()
    await cluster.delete_left()
    return cluster
