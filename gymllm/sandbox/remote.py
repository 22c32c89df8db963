"""Sandboxes in containers: what a container must give, and the `Sandbox` over it.

A back end (Docker, Kubernetes) implements `Container` and `ProcessStream`, about as much as every exec API
has. All else is here and in remote_shell.py, by small programs for a POSIX sh and its usual tools; the
image needs no Python.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from gymllm.sandbox.interface import Limits, SandboxSpec


class ProcessStream(Protocol):
    """One process in a container, attached to its standard streams. One sender and one receiver at a time.

    Both ends of a call may be cancelled; a cancelled `send` may have sent a part.
    """

    async def send(self, data: bytes) -> None:
        """To its standard input. Nobody needs its end: programs are told how much comes.

        Raises:
            SandboxDiedError: The connection is gone.
        """
        ...

    async def receive(self) -> tuple[int, bytes] | None:
        """1 or 2, and what it wrote there; with a terminal always 1. None at the end, also a broken one."""
        ...

    async def exit_code(self) -> int | None:
        """Once `receive` has returned None; None if nobody knows."""
        ...

    async def resize(self, rows: int, columns: int) -> None:
        """Of its terminal."""
        ...

    async def aclose(self) -> None:
        """Drops the connection; the process may live on. Safe to call twice. Never waits for the process."""
        ...


class Container(Protocol):
    """What a back end gives: a running container, its own until `remove`."""

    @property
    def name(self) -> str: ...

    @property
    def limits(self) -> Limits: ...

    async def open(self, argv: Sequence[str], *, tty: bool = False) -> ProcessStream:
        """Starts a program beside the others, attached, its standard input open.

        It has the container's own environment and directory: `RemoteSandbox` sets others itself, for not
        every API can, and sends what isn't UTF-8 through the program's input.

        Raises:
            SandboxDiedError: The container is gone.
            SandboxError: It could not be started: the image has no such program, or no process is free.
        """
        ...

    async def alive(self) -> bool:
        """Asks. False only if it is gone for good."""
        ...

    async def commit(self) -> str | None:
        """Keeps its files as an image and returns the name; None where the kind can't."""
        ...

    async def discard(self, image: str) -> None:
        """Removes an image that `commit` has made; silent if it is gone."""
        ...

    async def remove(self) -> None:
        """Kills all inside and leaves nothing; not its snapshots. Safe to call twice, and when it is gone."""
        ...


StartContainer = Callable[[SandboxSpec], Awaitable[Container]]
"""Starts a container for a spec and cleans up if that fails or is cancelled. The spec's workdir exists in
it; nothing else of the spec's files does: `RemoteSandbox` brings the base. It ends by itself at `wall_s`."""
