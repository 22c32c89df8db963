"""An MCP server of its own process for the tests: `stdio`, or a port of 127.0.0.1."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio
from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("for tests", log_level="ERROR")
waiting: dict[str, anyio.Event] = {}


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b


@server.tool(structured_output=False)
def echo(text: str) -> str:
    return text


@server.tool()
def fails() -> str:
    raise ValueError("it is broken")


@server.tool(structured_output=False)
def picture() -> list[object]:
    return ["A dot:", Image(data=b"\x89PNG12345", format="png")]


@server.tool(structured_output=False)
async def meet(name: str, other: str) -> str:
    """Returns when the other one is here too."""
    waiting.setdefault(name, anyio.Event()).set()
    await waiting.setdefault(other, anyio.Event()).wait()
    return f"{name} met {other}"


def note(path: str, text: str) -> None:
    Path(path).write_text(text)


@server.tool(structured_output=False)
async def hang(started: str) -> str:
    """Says in a file that it began."""
    note(started, str(os.getpid()))
    try:
        await anyio.sleep_forever()
    finally:
        note(started, "cancelled")
    return ""


@server.tool(structured_output=False)
def process() -> str:
    return f"{os.getpid()} {os.environ.get('GIVEN')} {os.getcwd()}"


if len(sys.argv) > 2 and sys.argv[2] == "fewer":
    server.remove_tool("echo")

if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        print("hello from stderr", file=sys.stderr)  # noqa: T201
        server.run("stdio")
    elif sys.argv[1] == "broken":
        sys.exit("no such database")
    elif sys.argv[1] == "flaky":  # every other start fails
        if not Path(sys.argv[2]).exists():
            note(sys.argv[2], "")
            sys.exit("not yet")
        Path(sys.argv[2]).unlink()
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
