"""What several test modules of sandboxes use."""

from __future__ import annotations

import os
from pathlib import Path

from gymllm.sandbox.local import LocalSandbox


async def said(sandbox: LocalSandbox, script: str, timeout_s: float = 20) -> str:
    """What a script prints, both streams."""
    done = await sandbox.exec(["bash", "-c", script + "\n"], timeout_s=timeout_s)
    return (bytes(done.stdout) + bytes(done.stderr)).decode(errors="replace")


def processes_with(word: str) -> list[int]:
    """Pids on the host whose command line holds this word."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if word.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                    found.append(int(name))
            except OSError:
                continue
    return found


def cgroups_of(owner: str) -> list[Path]:
    return [Path(found) for found, _, _ in os.walk("/sys/fs/cgroup") if f"gymllm-{owner}-" in found]
