"""An MCP server as a source of tools: a process that is started, or a URL."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, final

import anyio
import anyio.abc

from gymllm.errors import ClosedError, ConfigError, MissingExtraError, UnknownNameError
from gymllm_agents.tools.argument_schema import tidy_schema
from gymllm_agents.tools.tool import Tool, ToolError, check_names

if TYPE_CHECKING:
    from mcp_types import Tool as Described

    from gymllm_agents.tools.mcp_connection import Connection


@final
class McpServer:
    """Connects to an MCP server and offers its tools.

        async with McpServer("uvx", args=["mcp-server-time"]) as server:
            agents = ToolAgent.factory(tokenizer, tools=server.tools)

    Calls run at the same time over one connection, and may come from any task. Where the connection
    is lost, the calls in flight fail, which the model is told, and the next one connects again: a new
    process, or a new session. Enter and exit it in the same task, on the event loop that calls come
    from. Exit ends calls in flight and leaves no process, task or socket.
    """

    def __init__(
        self,
        command: str = "",
        *,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        url: str = "",
        headers: Mapping[str, str] | None = None,
        prefix: str = "",
        only: Sequence[str] | None = None,
        timeout_s: float = 30.0,
        max_result_chars: int = 4000,
        max_concurrent: int | None = None,
        connect_timeout_s: float = 30.0,
        reconnect_tries: int = 3,
    ) -> None:
        """Describes a server; entering connects.

        Args:
            command: Starts a server that talks on stdin and stdout.
            args: The command's arguments.
            env: Variables for it, besides a safe few of ours (PATH, HOME, USER, ...).
            cwd: Where it runs.
            url: Of a server that talks "streamable HTTP", instead of a command.
            headers: Sent with each request to the URL.
            prefix: Put before the tools' names.
            only: The names, without prefix, of the tools to offer; None for all.
            timeout_s: Seconds a call may take, reconnecting included. For another limit of one tool:
                `dataclasses.replace(tool, timeout_s=...)`.
            max_result_chars: As in `Tool`.
            max_concurrent: As in `Tool`, for each tool.
            connect_timeout_s: Seconds to start and list the tools, each time.
            reconnect_tries: Most tries of one reconnection. Entering tries once.

        Raises:
            ConfigError: Neither a command nor a URL, or both, or a setting out of range.
        """
        if bool(command) == bool(url):
            raise ConfigError(
                f"An McpServer has either a command or a url, got {command!r} and {url!r}."
            )
        if not connect_timeout_s > 0:
            raise ConfigError(f"connect_timeout_s must be > 0, got {connect_timeout_s}.")
        if reconnect_tries < 1:
            raise ConfigError(f"reconnect_tries must be >= 1, got {reconnect_tries}.")
        self._command, self._args, self._env = command, tuple(args), env
        self._cwd = None if cwd is None else Path(cwd)
        self._url, self._headers = url, headers
        self._prefix, self._only = prefix, None if only is None else tuple(only)
        self._timeout_s, self._max_result_chars = timeout_s, max_result_chars
        self._max_concurrent = max_concurrent
        self._connect_timeout_s, self._reconnect_tries = connect_timeout_s, reconnect_tries
        self._group: anyio.abc.TaskGroup | None = None
        self._connection: Connection | None = None
        self._retired: list[Connection] = []
        self._tools: tuple[Tool, ...] = ()

    @property
    def tools(self) -> tuple[Tool, ...]:
        """What it offered when it was entered, chosen and named as asked.

        Raises:
            ClosedError: It is not entered.
        """
        if self._group is None:
            raise ClosedError(f"The MCP server {self._label} has tools inside `async with` only.")
        return self._tools

    async def __aenter__(self) -> Self:
        """Connects and lists the tools.

        Raises:
            ConfigError: It does not start or answer; the message has the end of its stderr. Or a tool
                that was asked for is not there.
            MissingExtraError: The mcp package is not installed.
        """
        if self._group is not None:
            raise ConfigError(f"The MCP server {self._label} is entered already.")
        try:
            importlib.import_module("gymllm_agents.tools.mcp_connection")  # slow, and optional
        except ImportError as error:
            raise MissingExtraError(
                'MCP servers need the package mcp >= 2: pip install "gymllm-agents[mcp]"'
            ) from error
        self._group = await anyio.create_task_group().__aenter__()
        try:
            connection = self._connect(tries=1)
            await connection.ready.wait()
            if connection.failure:
                raise ConfigError(
                    f"The MCP server {self._label} did not start: {connection.failure}"
                )
            self._tools = tuple(self._tool(described) for described in self._chosen(connection))
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the connection, and with it the calls in flight. Takes a few seconds at most."""
        await self._close()

    @property
    def _label(self) -> str:
        return repr(self._url or " ".join([self._command, *self._args]))

    async def _close(self) -> None:
        group, self._group = self._group, None
        connections, self._retired = [*self._retired, self._connection], []
        self._connection = None
        for connection in connections:
            if connection is not None:
                connection.close()
        if group is not None:
            # Not told of the block's own error, which it would put into a group.
            await group.__aexit__(None, None, None)

    def _connect(self, *, tries: int) -> Connection:
        """Begins a connection, in a task of ours: a caller that is cancelled doesn't end it."""
        from gymllm_agents.tools.mcp_connection import Connection, Source

        assert self._group is not None
        source = Source(
            command=self._command,
            args=self._args,
            env=self._env,
            cwd=self._cwd,
            url=self._url,
            headers=self._headers,
        )
        # One that is over may still wait for the answer to a call that went well.
        if self._connection is not None:
            self._retired.append(self._connection)
        self._retired = [connection for connection in self._retired if not connection.gone.is_set()]
        self._connection = Connection(source, timeout_s=self._connect_timeout_s, tries=tries)
        self._group.start_soon(self._connection.hold, name=f"mcp: {self._label}")
        return self._connection

    def _chosen(self, connection: Connection) -> Sequence[Described]:
        if self._only is None:
            return connection.tools
        by_name = {described.name: described for described in connection.tools}
        for name in self._only:
            if name not in by_name:
                raise UnknownNameError(f"tool of the MCP server {self._label}", name, by_name)
        return [by_name[name] for name in self._only]

    def _tool(self, described: Described) -> Tool:
        name = self._prefix + described.name
        nothing: dict[str, object] = {"type": "object", "properties": {}, "required": []}
        parameters = nothing | tidy_schema(described.input_schema)

        def convert(arguments: Mapping[str, object]) -> Mapping[str, object]:
            # Values are the server's to check; many servers drop names they don't know in silence.
            if "properties" in described.input_schema:
                check_names(name, parameters, arguments)
            return arguments

        return Tool(
            name=name,
            description=described.description or described.title or "",
            parameters=parameters,
            function=functools.partial(self._call, described.name),
            timeout_s=self._timeout_s,
            max_result_chars=self._max_result_chars,
            max_concurrent=self._max_concurrent,
            convert=convert,
        )

    async def _call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Calls a tool of the server's.

        Raises:
            ToolError: The tool failed, or the server can't be reached.
        """
        from mcp import MCPError

        from gymllm_agents.tools.mcp_connection import ConnectionLostError
        from gymllm_agents.tools.mcp_result import result_text

        for again in (False, True):
            connection = await self._connected()
            try:
                if not _has(connection, name):
                    await connection.list_again()
                    if not _has(connection, name):
                        raise ToolError(f"the server no longer has the tool {name!r}.")
                result = await connection.call(name, arguments)
            except ConnectionLostError as error:
                if error.unsent and not again:
                    continue
                raise ToolError(
                    "the connection to the tool's server was lost during the call, which may or may "
                    "not have had its effect. The next call connects again."
                ) from None
            except MCPError as error:
                raise ToolError(error.message) from None
            text = result_text(result)
            if result.is_error:
                raise ToolError(text.removeprefix("Error: ") or "the tool failed without a word.")
            return text
        raise AssertionError("the second try returns or raises")

    async def _connected(self) -> Connection:
        """The connection; a new one if the last is over, which all who call meanwhile share."""
        if self._group is None:
            raise ToolError("the tool's server was closed.")
        connection = self._connection
        if connection is None or connection.over:
            connection = self._connect(tries=self._reconnect_tries)
        await connection.ready.wait()
        if connection.failure and not connection.tools:
            raise ToolError(f"the tool's server can't be reached: {connection.failure}")
        return connection


def _has(connection: Connection, name: str) -> bool:
    return any(described.name == name for described in connection.tools)
