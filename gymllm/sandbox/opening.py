"""`open_sandbox`: one function for every kind; starts are rate-limited."""

from __future__ import annotations

import functools
import os
import warnings

import anyio
from anyio.lowlevel import RunVar

from gymllm.errors import ConfigError, UnknownNameError
from gymllm.sandbox.docker import DockerHost, open_docker
from gymllm.sandbox.interface import Sandbox, SandboxSpec
from gymllm.sandbox.kubernetes import KubernetesHost, start_pod
from gymllm.sandbox.launch import KINDS
from gymllm.sandbox.local import LocalSandbox
from gymllm.sandbox.remote import RemoteSandbox

ALL_KINDS = (*KINDS, "docker", "kubernetes")
_starting: RunVar[anyio.CapacityLimiter] = RunVar("gymllm_sandboxes_starting")


class UnsafeSandboxWarning(UserWarning):
    """Commands run with all that you may do on this machine."""


async def open_sandbox(
    spec: SandboxSpec | None = None, kind: str | DockerHost | KubernetesHost = "local"
) -> Sandbox:
    """Starts a sandbox.

    `async with await open_sandbox(spec) as sandbox: ...` closes it. Starts are limited: of local ones to
    four a core at once, of the others to what their host says. A local sandbox ends with the thread that
    has started it.

    Args:
        spec: What it is made from; an empty work tree if None. Containers need its `image`.
        kind: "local", bubblewrap; "unshare", weaker, see `sandbox.limits`; "unsafe-local", none at all;
            "docker", also Podman, a `DockerHost()`; "kubernetes", a `KubernetesHost()`.

    Raises:
        UnknownNameError: No such kind.
        ConfigError: The spec asks for what this kind can't do.
        MissingExtraError: bubblewrap, or the SDK, isn't installed. Never runs anything unsandboxed instead.
        SandboxStartError: The system, or the daemon, refused; says what it answered.
    """
    spec = spec or SandboxSpec()
    check_kind(kind)
    if kind == "docker":
        kind = DockerHost()
    elif kind == "kubernetes":
        kind = KubernetesHost()
    if isinstance(kind, DockerHost):
        return await open_docker(spec, kind)
    if isinstance(kind, KubernetesHost):
        pod = RemoteSandbox(spec, "kubernetes", functools.partial(start_pod, host=kind))
        await pod.start()
        return pod
    return await _open_local(spec, kind)


def check_kind(kind: str | DockerHost | KubernetesHost) -> None:
    """That there is such a kind of sandbox; whether it can be had here shows when one is opened.

    Raises:
        UnknownNameError: There is none.
    """
    if isinstance(kind, str) and kind not in ALL_KINDS:
        raise UnknownNameError("kind of sandbox", kind, ALL_KINDS)


async def _open_local(spec: SandboxSpec, kind: str) -> LocalSandbox:
    for name in ("image", "user"):
        if getattr(spec, name):
            raise ConfigError(
                f"sandbox.{name}={getattr(spec, name)!r}: kind {kind!r} has none; "
                "the kinds 'docker' and 'kubernetes' do."
            )
    if kind == "unsafe-local":
        warnings.warn(
            "kind='unsafe-local' isolates nothing: commands can read, change and send whatever you can.",
            UnsafeSandboxWarning,
            stacklevel=3,
        )
    try:
        limiter = _starting.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(4 * (os.cpu_count() or 1))
        _starting.set(limiter)
    sandbox = LocalSandbox(spec, kind)
    async with limiter:
        await sandbox.start()
    return sandbox
