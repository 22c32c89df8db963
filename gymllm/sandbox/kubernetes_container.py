"""One pod as a `Container`: start, programs, end."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

import anyio

from gymllm.errors import ConfigError, SandboxDiedError, SandboxError, SandboxStartError
from gymllm.sandbox.interface import Limits, SandboxSpec
from gymllm.sandbox.kubernetes import KubernetesHost
from gymllm.sandbox.kubernetes_client import ApiError
from gymllm.sandbox.kubernetes_cluster import Cluster, cluster_of, owner
from gymllm.sandbox.kubernetes_exec import PodProcess, start_program
from gymllm.sandbox.kubernetes_pod import POLICY_NAME, PodState, manifest
from gymllm.sandbox.kubernetes_watch import Follower

_END_TIMEOUT_S = 30.0


class PodContainer:
    """A pod of ours that runs."""

    def __init__(self, cluster: Cluster, pod: PodState, limits: Limits) -> None:
        self._cluster, self._pod, self._limits = cluster, pod, limits
        self._removed = False

    @property
    def name(self) -> str:
        return self._pod.name

    @property
    def limits(self) -> Limits:
        return self._limits

    async def open(self, argv: Sequence[str], *, tty: bool = False) -> PodProcess:
        ends = anyio.current_time() + self._cluster.host.patience_s
        pause = 0.1
        while True:
            try:
                return await start_program(self._cluster, self.name, argv, tty=tty)
            except ApiError as error:
                # 500 is also what is said of a pod that has just ended: the pod itself knows.
                why = await self._why_gone()
                if why is not None:
                    raise SandboxDiedError(why) from None
                wait = pause if error.retry_after_s is None else error.retry_after_s
                if not error.passes or anyio.current_time() + wait > ends:
                    raise SandboxError(
                        f"No program could be started in pod {self.name}: {error}."
                    ) from error
                await anyio.sleep(wait)
                pause = min(2 * pause, 5.0)

    async def alive(self) -> bool:
        return await self._why_gone() is None

    async def commit(self) -> str | None:
        return None  # the API has no such call

    def discard(self, image: str) -> None:
        raise AssertionError(f"pods make no images: {image!r}")

    async def remove(self) -> None:
        if not self._removed:
            with anyio.CancelScope(shield=True):
                try:
                    await remove(self._cluster, self.name, self._pod.uid)
                except ApiError as error:
                    self._cluster.left.add(self.name)
                    raise SandboxError(
                        f"Pod {self.name} could not be deleted: {error}. Later starts try again; at its "
                        "deadline it ends by itself."
                    ) from error
                self._cluster.left.discard(self.name)
            self._removed = True

    async def _why_gone(self) -> str | None:
        """Why the pod has ended; None if it lives, or nobody can say."""
        if self._removed:
            return "The sandbox was closed."
        try:
            pod = await self._cluster.pod(self.name)
        except ApiError:
            return None
        if pod is None or pod.uid != self._pod.uid:
            return f"Pod {self.name} is gone: somebody has deleted it."
        return f"Pod {self.name} has ended: {pod.failure}." if pod.over else None


async def start(spec: SandboxSpec, host: KubernetesHost) -> PodContainer:
    """Starts a pod; see `gymllm.sandbox.kubernetes.start_pod`."""
    _check(spec)
    cluster = await cluster_of(host)
    name = f"gymllm-{secrets.token_hex(8)}"
    async with cluster.turn(spec.image), cluster.watch.following(name) as follower:
        created = False
        try:
            with anyio.fail_after(host.start_timeout_s):
                await follower.next()  # the watch runs: nothing that follows is missed
                created = True  # maybe, whatever we hear
                await _create(cluster, name, spec)
                pod = await _until_running(cluster, name, follower)
        except BaseException as error:
            said = cluster.watch.trouble
            with anyio.CancelScope(shield=True):
                if isinstance(error, TimeoutError):
                    said = await _progress(cluster, name) or said
                if created:
                    await _forget(cluster, name)
            if isinstance(error, TimeoutError):
                raise SandboxStartError(
                    f"kubernetes: pod {name} of {spec.image!r} did not run within "
                    f"start_timeout_s={host.start_timeout_s}: {said or 'nothing was heard of it'}."
                ) from None
            if isinstance(error, ApiError):
                raise SandboxStartError(
                    f"kubernetes: no pod of {spec.image!r} in namespace {cluster.namespace!r}: {error}."
                ) from error
            raise
    return PodContainer(cluster, pod, _limits(spec, cluster.no_policy))


async def remove(cluster: Cluster, name: str, uid: str = "") -> None:
    """Deletes a pod and waits until it is gone, which means that its processes are dead.

    Raises:
        ApiError: The API said no, or nothing.
    """
    async with cluster.watch.following(name) as follower:
        if not await cluster.delete(name, uid=uid):
            return
        with anyio.move_on_after(_END_TIMEOUT_S):
            while True:
                # The first news may be of the time before it was made: only the API knows.
                if await follower.next() is None:
                    pod = await cluster.pod(name)
                    if pod is None or (uid and pod.uid != uid):
                        return
    # Its node is cut off or gone: nobody will ever confirm. The API forgets it.
    await cluster.delete(name, uid=uid, force=True)


async def _forget(cluster: Cluster, name: str) -> None:
    """Deletes what a start may have made; what can't be deleted now is left to later starts."""
    try:
        await remove(cluster, name)
    except ApiError:
        cluster.left.add(name)


async def _create(cluster: Cluster, name: str, spec: SandboxSpec) -> None:
    body = manifest(name, spec, cluster.host, owner())
    try:
        await cluster.call(cluster.api.core.create_namespaced_pod, cluster.namespace, body=body)
    except ApiError as error:
        # The name is random. If there is one, an answer to an earlier try was lost.
        if error.reason != "AlreadyExists":
            raise


async def _until_running(cluster: Cluster, name: str, follower: Follower) -> PodState:
    """Waits until programs can be started."""
    host = cluster.host
    unscheduled_since: float | None = None
    while True:
        limit = None
        if unscheduled_since is not None:
            limit = unscheduled_since + host.schedule_timeout_s - anyio.current_time()
        pod: PodState | None = None
        with anyio.move_on_after(limit) as waiting:
            pod = await follower.next()
        if waiting.cancelled_caught or pod is None:
            pod = await cluster.pod(name)
        if pod is None:
            raise SandboxStartError(f"kubernetes: pod {name} was deleted while it started.")
        if pod.running:
            return pod
        if pod.failure:
            raise SandboxStartError(f"kubernetes: pod {name} does not start: {pod.failure}.")
        if not pod.unschedulable:
            unscheduled_since = None
        elif unscheduled_since is None:
            unscheduled_since = anyio.current_time()
        elif anyio.current_time() - unscheduled_since >= host.schedule_timeout_s:
            raise SandboxStartError(
                f"kubernetes: no node takes pod {name} since schedule_timeout_s="
                f"{host.schedule_timeout_s}: {pod.unschedulable}."
            )


async def _progress(cluster: Cluster, name: str) -> str:
    """What a pod that is late waits for."""
    with anyio.move_on_after(5):
        try:
            pod = await cluster.pod(name)
        except ApiError as error:
            return str(error)
        event = await cluster.last_event(name)
        return "; ".join(said for said in (pod.progress if pod else "", event) if said)
    return ""


def _check(spec: SandboxSpec) -> None:
    if not spec.image:
        raise ConfigError(
            'sandbox.image must name an image for pods, such as "python:3.12-slim", got "".'
        )
    if spec.user and not re.fullmatch(r"[0-9]+(:[0-9]+)?", spec.user):
        raise ConfigError(
            f'sandbox.user must be a number, or two as in "1000:1000", for pods, got {spec.user!r}.'
        )
    if spec.mounts:
        raise ConfigError(
            f"sandbox.mounts: a pod's node has not the files of this host, got {spec.mounts!r}. "
            "Put them in the image, or `write` them."
        )
    if spec.hidden:
        raise ConfigError(
            f"sandbox.hidden: pods can't hide folders of their image, got {spec.hidden!r}."
        )


def _limits(spec: SandboxSpec, no_policy: str) -> Limits:
    lacks = [
        "a limit on processes: only the kubelet has one (podPidsLimit), which the cluster's owner sets",
    ]
    if no_policy:
        network = ""
        lacks.append(
            "a network that is off: a NetworkPolicy for pods with the label gymllm.owner is needed, "
            f"and could not be made: {no_policy}"
        )
    else:
        network = (
            f"the NetworkPolicy {POLICY_NAME!r} lets nothing in or out, "
            "if the cluster's network plug-in keeps policies"
        )
    return Limits(
        memory=f"{spec.memory_mb} MB for all processes, by the pod's control group",
        cpus=f"{spec.cpus} cores, by the pod's control group",
        files=(
            f"{spec.file_mb} MB of ephemeral storage: the kubelet looks now and then, "
            "and evicts the pod"
        ),
        network=network,
        syscalls="the runtime's default seccomp profile; no capabilities, no new privileges",
        lacks=tuple(lacks),
    )
