"""The tools that a run names: made once, shared by all its agents, closed at its end."""

from __future__ import annotations

import shlex
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """Where the tools bash, python and edit work."""

    kind: Literal["local", "docker", "kubernetes"] = "local"
    """local: namespaces of this machine; docker, also Podman: containers; kubernetes: pods."""
    image: str = ""
    """Of containers and pods, which need one."""
    memory_mb: int = 2048
    """Of the processes and files of one sandbox."""

    def __post_init__(self) -> None:
        if self.memory_mb <= 0:
            raise ConfigError(f"agent.sandbox.memory_mb must be > 0, got {self.memory_mb}.")
        if (self.kind == "local") == bool(self.image):
            has = "has no image" if self.image else "needs agent.sandbox.image"
            raise ConfigError(f"agent.sandbox.kind {self.kind} {has}, got {self.image!r}.")


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
async def open_tools(
    names: Iterable[str], sandbox: SandboxSettings | None = None
) -> AsyncGenerator[Toolbox]:
    """Makes the tools; MCP servers run until the block ends. Those in a sandbox share one in each episode.

    Args:
        names: As settings have them.
        sandbox: Of those that work in one; a local one if None.

    Raises:
        ConfigError: A tool can't be made: a folder is missing, a server or a sandbox won't start; or no tool
            works in the sandbox that is set.
        MissingExtraError: A package is not installed.
    """
    names, sandbox = dict.fromkeys(names), sandbox or SandboxSettings()
    if sandbox != SandboxSettings() and not set(names) & set(_IN_SANDBOX):
        raise ConfigError(
            f"agent.sandbox is set, but agent.tools has none of {', '.join(_IN_SANDBOX)}."
        )
    made: dict[str, tuple[Tool, ...]] = {}
    inside: dict[str, Tool] = {}
    async with AsyncExitStack() as stack:
        for name in names:
            check_tool_name(name)
            kind, _, argument = name.partition(":")
            if name in _PLAIN:
                made[name] = (_PLAIN[name](),)
            elif name in _IN_SANDBOX:
                if not inside:
                    from gymllm.sandbox import SandboxSpec

                    spec = SandboxSpec(image=sandbox.image, memory_mb=sandbox.memory_mb)
                    await check_sandbox(spec, kind=sandbox.kind)
                    inside = {tool.name: tool for tool in sandbox_tools(spec, kind=sandbox.kind)}
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
