"""What a pod is made from, and what its state says. Plain functions of what the API takes and gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from gymllm.sandbox.interface import SandboxSpec
from gymllm.sandbox.kubernetes import KubernetesHost

Json = Mapping[str, object]

OWNER_LABEL = "gymllm.owner"
POLICY_NAME = "gymllm-no-network"
_CONTAINER = "sandbox"

# Process 1. It dies on SIGTERM at once, so that a deleted pod is gone in milliseconds, and takes in orphans:
# a shell that waits reaps them. It keeps wall_s, since the cluster counts a pod's age with the image's pull;
# the pod's own deadline is for what stops it from doing so. Without a `sleep` in the image it ends.
_WAIT = """trap "exit 0" TERM
mkdir -p "$1"
if [ -n "$2" ]; then sleep "$2" & wait $! && exit 124; exit 127; fi
while sleep 3600 & wait $!; do :; done
exit 127"""


def manifest(name: str, spec: SandboxSpec, host: KubernetesHost, owner: str) -> Json:
    """The pod to create."""
    wall = "" if spec.wall_s is None else str(math.ceil(spec.wall_s))
    deadline_s = math.ceil(min((spec.wall_s or math.inf) + host.start_timeout_s, host.oldest_s))
    memory = f"{spec.memory_mb}Mi"
    limits = {"memory": memory, "cpu": _cores(spec.cpus), "ephemeral-storage": f"{spec.file_mb}Mi"}
    requests = limits | {
        "memory": f"{host.memory_request_mb or spec.memory_mb}Mi",
        "cpu": _cores(host.cpu_request or spec.cpus),
    }
    user, _, group = spec.user.partition(":")
    identity = {"runAsUser": int(user)} if user else {}
    if group:
        identity["runAsGroup"] = int(group)
    container: dict[str, object] = {
        "name": _CONTAINER,
        "image": spec.image,
        "command": ["/bin/sh", "-c", _WAIT, "sh", _literal(spec.workdir), wall],
        "workingDir": spec.workdir,
        "env": [{"name": key, "value": _literal(value)} for key, value in spec.env.items()],
        "resources": {"limits": limits, "requests": requests},
        "securityContext": {
            **identity,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if host.image_pull_policy:
        container["imagePullPolicy"] = host.image_pull_policy
    pod: dict[str, object] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # At 0 the API forgets a pod before its processes are dead, and nobody could wait for that.
        "terminationGracePeriodSeconds": 1,
        "activeDeadlineSeconds": deadline_s,
        # No server answers there: names fail at once where a network policy would let them hang.
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["127.0.0.1"]},
        "containers": [container],
        "nodeSelector": dict(host.node_selector),
        "tolerations": [
            {key: value for key, value in vars(toleration).items() if value}
            for toleration in host.tolerations
        ],
        "imagePullSecrets": [{"name": secret} for secret in host.image_pull_secrets],
    }
    if host.runtime_class is not None:
        pod["runtimeClassName"] = host.runtime_class
    if host.user_namespaces:
        pod["hostUsers"] = False
    if host.priority_class is not None:
        pod["priorityClassName"] = host.priority_class
    labels = {OWNER_LABEL: owner, "app.kubernetes.io/managed-by": "gymllm"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": labels,
            # Nobody may take a node from under an episode only to save nodes.
            "annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
        },
        "spec": pod,
    }


def network_policy() -> Json:
    """Nothing in, nothing out, for all pods with an owner."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": POLICY_NAME, "labels": {"app.kubernetes.io/managed-by": "gymllm"}},
        "spec": {
            "podSelector": {"matchExpressions": [{"key": OWNER_LABEL, "operator": "Exists"}]},
            "policyTypes": ["Ingress", "Egress"],
        },
    }


@dataclass(frozen=True, kw_only=True)
class PodState:
    """What the API said of a pod, as far as it matters here."""

    name: str
    uid: str
    owner: str
    phase: str
    running: bool
    """Programs can be started in it."""
    over: bool
    """It has ended, or is about to; for good, since nothing restarts it."""
    finished_at: str
    failure: str
    """Why it will never run, or why it has ended; empty if neither."""
    unschedulable: str
    """Why no node takes it, for now."""
    progress: str
    """What it waits for, in the cluster's words."""


# Reasons of a waiting container that no waiting ends, or that only a change in the registry does.
_HOPELESS = (
    "ErrImagePull",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
    "ImageInspectError",
    "RegistryUnavailable",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "CrashLoopBackOff",
)


def pod_state(pod: Json) -> PodState:
    """Reads a pod."""
    status = _object(pod, "status")
    phase = _text(status, "phase")
    statuses = _objects(status, "containerStatuses")
    state: Json = _object(statuses[0], "state") if statuses else {}
    waiting, ended = _object(state, "waiting"), _object(state, "terminated")
    deleting = bool(_text(pod, "metadata", "deletionTimestamp"))
    over = deleting or phase in ("Succeeded", "Failed") or bool(ended)

    failure = ""
    if _text(waiting, "reason") in _HOPELESS:
        failure = _said(waiting)
    elif phase in ("Succeeded", "Failed") or ended:
        failure = _said(status) or _said(ended) or phase
        if ended and ended.get("exitCode") is not None:
            failure += f" (its process 1 ended with {ended['exitCode']})"
        if ended.get("exitCode") == 124:
            failure = "it was older than the sandbox's wall_s"
    elif deleting:
        failure = "it was deleted"
    unschedulable, finished_at = "", _text(ended, "finishedAt")
    for condition in _objects(status, "conditions"):
        if not finished_at and phase in (
            "Succeeded",
            "Failed",
        ):  # evicted: its containers are forgotten
            finished_at = _text(condition, "lastTransitionTime")
        kind, answer = _text(condition, "type"), _text(condition, "status")
        if kind == "PodScheduled" and answer == "False":
            unschedulable = _said(condition)
        elif kind == "DisruptionTarget" and answer == "True" and over and not _said(status):
            failure = _said(condition)  # evicted or preempted: says by what
    return PodState(
        name=_text(pod, "metadata", "name"),
        uid=_text(pod, "metadata", "uid"),
        owner=_text(pod, "metadata", "labels", OWNER_LABEL),
        phase=phase,
        running=phase == "Running" and not over and bool(_object(state, "running")),
        over=over,
        finished_at=finished_at,
        failure=failure,
        unschedulable=unschedulable,
        progress=_said(waiting) or unschedulable or phase or "nothing yet",
    )


def _cores(cores: float) -> str:
    return f"{max(1, round(cores * 1000))}m"


def _literal(value: str) -> str:
    """Kubernetes replaces $(NAME) in commands and variables; $$ is how it spells $."""
    return value.replace("$", "$$")


def _said(part: Json) -> str:
    """Reason and message, as a cluster gives both."""
    return ": ".join(said for key in ("reason", "message") if (said := _text(part, key)))


def _text(part: Json, *path: str) -> str:
    for key in path[:-1]:
        part = _object(part, key)
    value = part.get(path[-1])
    return value if isinstance(value, str) else ""


def _object(part: Json, key: str) -> Json:
    value = part.get(key)
    return cast("Json", value) if isinstance(value, Mapping) else {}


def _objects(part: Json, key: str) -> list[Json]:
    value = part.get(key)
    return cast("list[Json]", value) if isinstance(value, list) else []
