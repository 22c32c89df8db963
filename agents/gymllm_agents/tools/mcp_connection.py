"""One connection to an MCP server, held open by a task of its own.

The `mcp` package's transports and sessions are made of anyio task groups, which must be left by the
task that entered them. So a task holds them, and calls come from any other.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar, cast, final

import anyio
import httpx2
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import CONNECTION_CLOSED, CallToolResult
from mcp_types import Tool as Described

from gymllm_agents.tools.text import as_error

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams  # no public module has it

Answer = TypeVar("Answer")

FIRST_BACKOFF_S = 0.1
CLOSE_S = 5.0
"""Bounds the goodbye to an HTTP server; that to a process is bounded by the mcp package."""
END_S = 1.0
"""How long a call whose connection was lost waits to hear why."""
MOST_PAGES = 100
LOG_BYTES = 1 << 20
TAIL_CHARS = 2000
_SESSION_TERMINATED = "Session terminated"
"""What the mcp package makes of a 404 in a session: the server doesn't know it, so it ran nothing."""


@final
@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the server is: a command or a URL."""

    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] | None = None
    cwd: Path | None = None
    url: str = ""
    headers: Mapping[str, str] | None = None


class ConnectionLostError(Exception):
    """The connection went away during a call."""

    def __init__(self, *, unsent: bool) -> None:
        """Says how far the call came.

        Args:
            unsent: The server can't have run it.
        """
        super().__init__()
        self.unsent = unsent


@final
class Connection:
    """Connects, stays until it is lost or closed, and is not used again."""

    def __init__(self, source: Source, *, timeout_s: float, tries: int) -> None:
        """Prepares one; `hold` connects.

        Args:
            source: Where the server is.
            timeout_s: For each try.
            tries: Most tries, with growing pauses between them.
        """
        self.tools: tuple[Described, ...] = ()
        self.ready = anyio.Event()
        """Set when it is connected, or failed to."""
        self.gone = anyio.Event()
        """Set when nothing is left of it."""
        self.failure = ""
        """Why it could not connect, or was lost; empty else."""
        self.over = False
        """Not to be used for another call."""
        self._source, self._timeout_s, self._tries = source, timeout_s, tries
        self._client: Client | None = None
        self._stop = anyio.Event()
        self._scope: anyio.CancelScope | None = None
        self._in_flight = 0
        self._refused = False
        self._hung_up = False
        self._log: TextIO | None = None

    async def hold(self) -> None:
        """Connects, then waits for the end. Run it as a task; raises nothing but cancellation."""
        try:
            with contextlib.ExitStack() as files:
                if self._source.command:
                    # Appends, so that it can be emptied while the server writes.
                    self._log = files.enter_context(
                        tempfile.TemporaryFile("a+", encoding="utf-8", errors="replace")
                    )
                for number in range(self._tries):
                    if number:
                        with anyio.move_on_after(FIRST_BACKOFF_S * 2 ** (number - 1)):
                            await self._stop.wait()
                    if self._stop.is_set() or await self._try():
                        break
                if not self.ready.is_set() and self._log is not None:
                    self.failure += self._said_on_stderr()
        finally:
            self.over, self._client, self._log = True, None, None
            self.ready.set()
            self.gone.set()

    def close(self) -> None:
        """Ends it; `hold` returns when all is closed."""
        self.over = True
        self._stop.set()
        if not self.ready.is_set() and self._scope is not None:
            self._scope.cancel()

    async def call(self, name: str, arguments: Mapping[str, object]) -> CallToolResult:
        """Calls a tool.

        Raises:
            ConnectionLostError: No answer will come.
            MCPError: The server refused the call.
        """
        self._bound_log()
        return await self._ask(lambda client: client.call_tool(name, dict(arguments)))

    async def list_again(self) -> None:
        """Asks what tools there are now: HTTP servers come and go without a connection's notice.

        Raises:
            ConnectionLostError: No answer will come.
            MCPError: The server refused to say.
        """
        self.tools = await self._ask(_all_tools)

    async def _ask(self, request: Callable[[Client], Awaitable[Answer]]) -> Answer:
        if self._client is None or self.over:
            raise ConnectionLostError(unsent=True)
        self._in_flight += 1
        try:
            return await request(self._client)
        except MCPError as error:
            terminated = error.message == _SESSION_TERMINATED
            if error.code != CONNECTION_CLOSED and not terminated:
                raise
            self.over = True
            if not terminated:
                with anyio.move_on_after(END_S):
                    await self.gone.wait()
            raise ConnectionLostError(unsent=terminated or self._refused) from error
        except (anyio.ClosedResourceError, anyio.BrokenResourceError) as error:
            self.over = True
            raise ConnectionLostError(unsent=False) from error
        finally:
            self._in_flight -= 1
            if self.over and not self._in_flight:
                self._stop.set()

    async def _try(self) -> bool:
        """Whether it came to be connected, or can't be; returns at its end."""
        deadline = anyio.current_time() + self._timeout_s
        self._hung_up = False
        try:
            with anyio.CancelScope(deadline=deadline) as self._scope:
                transport = self._process() if self._source.command else self._http()
                async with Client(transport) as client:
                    self.tools = await _all_tools(client)
                    self._client, self.failure = client, ""
                    self._scope.deadline = math.inf
                    self.ready.set()
                    if not self._hung_up:
                        await self._stop.wait()
                    self._client, self.over = None, True
                    self._scope.deadline = anyio.current_time() + CLOSE_S
            if not self.ready.is_set():
                self.failure = f"it did not answer within {self._timeout_s:g} s"
        except Exception as error:  # the transport's, or the server's; a group of them, mostly
            first = _first(error)
            self.failure = as_error(first)
            self._refused = isinstance(first, httpx2.ConnectError | httpx2.ConnectTimeout)
            if isinstance(first, FileNotFoundError | PermissionError | NotADirectoryError):
                return True
        return self.ready.is_set()

    @contextlib.asynccontextmanager
    async def _process(self) -> AsyncGenerator[TransportStreams]:
        """A server process. Unlike the mcp package's, it is noticed at once when it ends."""
        assert self._log is not None
        parameters = StdioServerParameters(
            command=self._source.command,
            args=list(self._source.args),
            env=None if self._source.env is None else dict(self._source.env),
            cwd=self._source.cwd,
        )
        async with stdio_client(parameters, errlog=self._log) as (read, write):
            send, receive = anyio.create_memory_object_stream[SessionMessage | Exception](0)

            async def forward() -> None:
                with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    async with send:
                        async for message in read:
                            await send.send(message)
                self._hung_up = True
                if self.ready.is_set():  # else this try failed, and the next one may not
                    self.over = True
                    self._stop.set()

            async with anyio.create_task_group() as group, receive:
                group.start_soon(forward, name="mcp: from the server")
                yield receive, write
                group.cancel_scope.cancel()

    @contextlib.asynccontextmanager
    async def _http(self) -> AsyncGenerator[TransportStreams]:
        # No limit on reads: a call has its own, and may well take longer than any here.
        timeout = httpx2.Timeout(self._timeout_s, read=None)
        async with (
            httpx2.AsyncClient(headers=self._source.headers, timeout=timeout) as http,
            streamable_http_client(self._source.url, http_client=http) as streams,
        ):
            yield streams

    def _bound_log(self) -> None:
        """Empties what a talkative server wrote to stderr, before it fills the disk."""
        if self._log is not None and os.fstat(self._log.fileno()).st_size > LOG_BYTES:
            os.ftruncate(self._log.fileno(), 0)

    def _said_on_stderr(self) -> str:
        assert self._log is not None
        self._log.seek(0)
        said = self._log.read()[-TAIL_CHARS:].strip()
        return f". Its stderr ends with:\n{said}" if said else ""


async def _all_tools(client: Client) -> tuple[Described, ...]:
    tools: list[Described] = []
    cursor: str | None = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor, cache_mode="refresh")
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            break
    return tuple(tools)


def _first(error: BaseException) -> BaseException:
    """What began it: task groups gather errors, of which the first brought down the others."""
    while isinstance(error, BaseExceptionGroup):
        error = cast(BaseExceptionGroup[BaseException], error).exceptions[0]
    return error
