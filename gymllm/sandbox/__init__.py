"""Sandboxes: a work tree and the processes in it, apart from everything else on the host.

    interface.py     what every kind can do: Sandbox, Shell, Terminal, SandboxSpec, ExecResult, Limits, ...
    opening.py       open_sandbox(spec, kind); pool.py: SandboxPool, sandboxes made ahead
    local.py         the host's side; shell.py: a bash that stays; terminal.py: a program on a terminal;
                     output.py: reading, bounded
    editor.py        Editor: view and change text files inside; clip.py: output made fit to be shown
    launch.py        how each kind starts: bubblewrap, unshare, nothing
    supervisor.py    process 1 inside of each
    seccomp.py, cgroups.py, layers.py, state.py   system calls, limits, snapshots, what must be undone
    remote.py        what a container must give, and the sandbox over it; remote_*.py: its parts
    docker.py        containers of Docker or Podman; kubernetes.py: pods

`import gymllm` doesn't import it.
"""

from __future__ import annotations

from gymllm.sandbox.clip import clean as clean
from gymllm.sandbox.docker import DockerHost as DockerHost
from gymllm.sandbox.editor import EditError as EditError
from gymllm.sandbox.editor import Editor as Editor
from gymllm.sandbox.interface import ExecResult as ExecResult
from gymllm.sandbox.interface import FileEntry as FileEntry
from gymllm.sandbox.interface import Limits as Limits
from gymllm.sandbox.interface import Mount as Mount
from gymllm.sandbox.interface import Output as Output
from gymllm.sandbox.interface import Sandbox as Sandbox
from gymllm.sandbox.interface import SandboxSpec as SandboxSpec
from gymllm.sandbox.interface import Shell as Shell
from gymllm.sandbox.interface import Snapshot as Snapshot
from gymllm.sandbox.interface import Terminal as Terminal
from gymllm.sandbox.kubernetes import KubernetesHost as KubernetesHost
from gymllm.sandbox.opening import UnsafeSandboxWarning as UnsafeSandboxWarning
from gymllm.sandbox.opening import check_kind as check_kind
from gymllm.sandbox.opening import open_sandbox as open_sandbox
from gymllm.sandbox.pool import SandboxPool as SandboxPool

__all__ = [
    "DockerHost",
    "EditError",
    "Editor",
    "ExecResult",
    "FileEntry",
    "KubernetesHost",
    "Limits",
    "Mount",
    "Output",
    "Sandbox",
    "SandboxPool",
    "SandboxSpec",
    "Shell",
    "Snapshot",
    "Terminal",
    "UnsafeSandboxWarning",
    "check_kind",
    "clean",
    "open_sandbox",
]
