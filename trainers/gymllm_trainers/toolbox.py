"""The tools that a run names: made once, shared by all its agents, closed at its end."""

from __future__ import annotations

import shlex
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from gymllm.errors import ConfigError, UnknownNameError
from gymllm_agents import McpServer, Tool, calculator, local_search, sandbox_tools
from gymllm_agents.tools import SANDBOX_TOOLS, check_sandbox

Toolbox = Mapping[str, tuple[Tool, ...]]
"""The tools that each name stands for."""

_PLAIN: Mapping[str, Callable[[], Tool]] = {"calculator": calculator}
_IN_SANDBOX = {"sandbox": SANDBOX_TOOLS, **{name: (name,) for name in SANDBOX_TOOLS}}
_WITH_ARGUMENT = {"search": "a folder of text files", "mcp": "a command or a URL"}
TOOL_NAMES = (*_PLAIN, *_IN_SANDBOX, *(f"{kind}:..." for kind in _WITH_ARGUMENT))
"""What settings can name."""


def check_tool_name(name: str) -> None:
    """That a name is one of a tool, or of tools.

    Raises:
        UnknownNameError: It is none.
        ConfigError: It lacks what follows the colon.
    """
    if name in _PLAIN or name in _IN_SANDBOX:
        return
    kind, colon, argument = name.partition(":")
    if kind not in _WITH_ARGUMENT:
        raise UnknownNameError("tool", name, [*_PLAIN, *_IN_SANDBOX, *_WITH_ARGUMENT])
    if not (colon and argument.strip()):
        raise ConfigError(
            f"the tool {kind!r} needs {_WITH_ARGUMENT[kind]} behind a colon, got {name!r}."
        )
    if kind == "mcp":
        _mcp_server(argument)


@asynccontextmanager
async def open_tools(names: Iterable[str]) -> AsyncGenerator[Toolbox]:
    """Makes the tools; MCP servers run until the block ends. Those in a sandbox share one in each episode.

    Raises:
        ConfigError: A tool can't be made: a folder is missing, a server or a sandbox won't start.
        MissingExtraError: A package is not installed.
    """
    made: dict[str, tuple[Tool, ...]] = {}
    inside: dict[str, Tool] = {}
    async with AsyncExitStack() as stack:
        for name in dict.fromkeys(names):
            check_tool_name(name)
            kind, _, argument = name.partition(":")
            if name in _PLAIN:
                made[name] = (_PLAIN[name](),)
            elif name in _IN_SANDBOX:
                if not inside:
                    await check_sandbox()
                    inside = {tool.name: tool for tool in sandbox_tools()}
                made[name] = tuple(inside[one] for one in _IN_SANDBOX[name])
            elif kind == "search":
                made[name] = (local_search(argument),)
            else:
                server = await stack.enter_async_context(_mcp_server(argument))
                made[name] = server.tools
        yield made


def _mcp_server(argument: str) -> McpServer:
    argument = argument.strip()
    if argument.startswith(("http://", "https://")):
        return McpServer(url=argument)
    try:
        command, *arguments = shlex.split(argument)
    except ValueError as error:
        raise ConfigError(
            f"the command of an MCP server can't be read ({error}): {argument!r}."
        ) from error
    return McpServer(command, args=arguments)
