"""`open_sandbox`: one function for every kind; starts are rate-limited."""

from __future__ import annotations

import os
import warnings

import anyio
from anyio.lowlevel import RunVar

from gymllm.errors import UnknownNameError
from gymllm.sandbox.interface import SandboxSpec
from gymllm.sandbox.launch import KINDS
from gymllm.sandbox.local import LocalSandbox

_starting: RunVar[anyio.CapacityLimiter] = RunVar("gymllm_sandboxes_starting")


class UnsafeSandboxWarning(UserWarning):
    """Commands run with all that you may do on this machine."""


async def open_sandbox(spec: SandboxSpec | None = None, kind: str = "local") -> LocalSandbox:
    """Starts a sandbox.

    `async with await open_sandbox(spec) as sandbox: ...` closes it. No more than four a core start at once.
    A sandbox ends with the thread that has started it.

    Args:
        spec: What it is made from; an empty work tree if None.
        kind: "local", bubblewrap; "unshare", weaker, see `sandbox.limits`; "unsafe-local", none at all.

    Raises:
        UnknownNameError: No such kind.
        MissingExtraError: bubblewrap isn't installed. Never runs anything unsandboxed instead.
        SandboxStartError: The system refused; says what it answered.
    """
    if kind not in KINDS:
        raise UnknownNameError("kind of sandbox", kind, KINDS)
    if kind == "unsafe-local":
        warnings.warn(
            "kind='unsafe-local' isolates nothing: commands can read, change and send whatever you can.",
            UnsafeSandboxWarning,
            stacklevel=2,
        )
    try:
        limiter = _starting.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(4 * (os.cpu_count() or 1))
        _starting.set(limiter)
    sandbox = LocalSandbox(spec or SandboxSpec(), kind)
    async with limiter:
        await sandbox.start()
    return sandbox
