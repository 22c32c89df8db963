"""Pods as sandboxes: which cluster, and how pods are made there. Nothing here needs the `kubernetes` package.

    kubernetes.py            KubernetesHost: the settings; start_pod
    kubernetes_client.py     the official client: configuration, calls, errors
    kubernetes_cluster.py    calls in threads, retries; what vanished owners left; the network policy
    kubernetes_watch.py      one watch for all pods that are waited for
    kubernetes_pod.py        what a pod is made from, and what its state says
    kubernetes_exec.py       programs in a pod, over a WebSocket
    kubernetes_container.py  the `Container` of remote.py: start, open, remove

What the cluster must allow, in the namespace: pods (create, get, list, watch, delete), pods/exec (create,
get); better with networkpolicies (create, get) and events (list).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gymllm.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from gymllm.sandbox.interface import SandboxSpec
    from gymllm.sandbox.remote import Container

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Toleration:
    """A taint of nodes that pods put up with, as in a pod's `tolerations`."""

    key: str = ""
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""


@dataclass(frozen=True, kw_only=True)
class KubernetesHost:
    """A cluster and a namespace in it to run pods in."""

    kubeconfig: Path | None = None
    """None: $KUBECONFIG or ~/.kube/config if there is one, else the service account of our own pod."""
    context: str | None = None
    """Of the kubeconfig; its current one if None."""
    namespace: str | None = None
    """The context's, or our own pod's, if None."""
    node_selector: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    tolerations: tuple[Toleration, ...] = ()
    image_pull_secrets: tuple[str, ...] = ()
    image_pull_policy: Literal["", "Always", "IfNotPresent", "Never"] = ""
    """Empty: the cluster's own rule, which pulls `latest` every time."""
    runtime_class: str | None = None
    """Such as "gvisor" or "kata", where the cluster has one: a kernel of its own for hostile code."""
    user_namespaces: bool = False
    """`hostUsers: false`: root in the pod is nobody on its node. Where the cluster's nodes can."""
    priority_class: str | None = None
    cpu_request: float | None = None
    """Cores that the scheduler sets aside; the spec's limit if None. Less packs more pods on a node."""
    memory_request_mb: int | None = None
    """As `cpu_request`."""
    start_timeout_s: float = 600.0
    """From the request to a running pod, its image's pull included."""
    schedule_timeout_s: float = 60.0
    """How long a pod may find no node. A cluster that adds nodes on demand needs minutes."""
    starts_at_once: int = 16
    """Pods of one image that may be on their way. A slow pull holds up pods of its own image only."""
    calls_at_once: int = 16
    """Requests to the API at a time, each in a thread."""
    patience_s: float = 30.0
    """How long a request is repeated while the API is away, or says that it is too busy."""
    oldest_s: int = 24 * 3600
    """Every pod ends by itself at this age, its image's pull included, if it hasn't at the spec's `wall_s`:
    nobody else would end it if this whole machine vanished. More than your longest episode takes."""

    def __post_init__(self) -> None:
        if self.namespace is not None and not _NAME.fullmatch(self.namespace):
            raise ConfigError(
                f"kubernetes.namespace must be a name of a-z, 0-9 and -, got {self.namespace!r}."
            )
        for name in (
            "start_timeout_s",
            "schedule_timeout_s",
            "starts_at_once",
            "calls_at_once",
            "patience_s",
            "oldest_s",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"kubernetes.{name} must be > 0, got {getattr(self, name)}.")
        for name in ("cpu_request", "memory_request_mb"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"kubernetes.{name} must be > 0 or None, got {value}.")


async def start_pod(spec: SandboxSpec, host: KubernetesHost) -> Container:
    """Starts a pod, waits until it runs; leaves none if that fails or is cancelled.

    Args:
        spec: What it is made from; needs an image that has a POSIX sh and sleep.
        host: Where.

    Raises:
        MissingExtraError: The `kubernetes` package isn't installed.
        ConfigError: The spec asks for what pods can't have.
        SandboxStartError: The cluster refused, or had no room, image or time; says what it answered.
    """
    try:
        from gymllm.sandbox.kubernetes_container import start
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("kubernetes", "websocket", "urllib3"):
            raise
        raise MissingExtraError(
            'Pods as sandboxes need the official client: pip install "gymllm[kubernetes]".'
        ) from error
    return await start(spec, host)
