"""MCP servers as tools: real ones, over stdio and over HTTP, also when they die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import anyio
import pytest

from gymllm.errors import ClosedError, ConfigError, MissingExtraError, UnknownNameError
from gymllm_agents import McpServer, Tool
from gymllm_agents.tools import mcp_connection

SCRIPT = str(Path(__file__).parent / "mcp_server_script.py")


def named(server: McpServer) -> dict[str, Tool]:
    return {tool.name: tool for tool in server.tools}


def stdio(**settings) -> McpServer:
    return McpServer(sys.executable, args=[SCRIPT, "stdio"], **settings)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def http_process(port: int, *more: str) -> Generator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, SCRIPT, str(port), *more])
    try:
        for _ in range(500):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None
            threading.Event().wait(0.02)
        yield process
    finally:
        process.kill()
        process.wait(10)


async def pid_of(server: McpServer) -> int:
    return int((await named(server)["process"]({})).text.split()[0])


async def until(condition: Callable[[], object]) -> None:
    """Waits for another process, which has no events of ours to set."""
    with anyio.fail_after(10):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.005)


def content(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@asynccontextmanager
async def over(transport: str) -> AsyncGenerator[McpServer]:
    if transport == "stdio":
        async with stdio() as server:
            yield server
        return
    port = free_port()
    with http_process(port):
        async with McpServer(url=f"http://127.0.0.1:{port}/mcp") as server:
            yield server


@pytest.mark.asyncio
@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_the_tools_of_a_server_work(transport, tmp_path):
    async with over(transport) as server:
        tools = named(server)
        assert tools["add"].description == "Adds two numbers."
        assert tools["add"].parameters == {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"default": 1, "type": "integer"}},
            "required": ["a"],
        }
        assert (await tools["add"]({"a": "3"})).text == "4"
        assert (await tools["echo"]({"text": "é\n😀"})).text == "é\n😀"
        assert (await tools["picture"]({})).text == "A dot:\n[image image/png, 9 bytes]"
        failed = await tools["fails"]({})
        assert failed.failed
        assert "Error executing tool fails" in failed.text
        unknown = await tools["add"]({"a": 1, "bb": 2})
        assert unknown.text == (
            "Error: add has no argument 'bb'; it takes: a, b. Did you mean 'b'?"
        )
        assert "valid integer" in (await tools["add"]({"a": "x"})).text

        # Calls meet in the server, so they run at the same time; from whatever task.
        met = await asyncio.gather(
            tools["meet"]({"name": "a", "other": "b"}), tools["meet"]({"name": "b", "other": "a"})
        )
        assert [result.text for result in met] == ["a met b", "b met a"]

        # Cancelling a call, or its running out of time, leaves the session as it was.
        started = tmp_path / "started"
        pid = 0
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(tools["hang"], {"started": str(started)})
                await until(lambda: content(started))
                pid = int(content(started))
                scope.cancel()
        assert (await tools["echo"]({"text": "alive"})).text == "alive"
        assert await pid_of(server) == pid
        await until(lambda: content(started) == "cancelled")  # the server is told of it, too


@pytest.mark.asyncio
async def test_a_process_that_dies_fails_its_calls_and_the_next_one_starts_another(tmp_path):
    threads = threading.active_count()
    async with stdio(env={"GIVEN": "yes"}, cwd=tmp_path) as server:
        tools = named(server)
        first, given, where = (await tools["process"]({})).text.split()
        assert (given, where) == ("yes", str(tmp_path))
        results = {}

        async def call(name: str) -> None:
            results[name] = await tools["hang"]({"started": str(tmp_path / name)})

        async with anyio.create_task_group() as group:
            for name in ("a", "b"):
                group.start_soon(call, name)
                await until(lambda name=name: content(tmp_path / name) == first)
            os.kill(int(first), signal.SIGKILL)
        for result in results.values():
            assert result.failed
            assert result.text.startswith("Error: the connection to the tool's server was lost")
        pids = await asyncio.gather(*(pid_of(server) for _ in range(3)))
        assert len(set(pids)) == 1  # one reconnection for all
        assert pids[0] != int(first)
        os.kill(pids[0], signal.SIGKILL)
        await until(lambda: not running(pids[0]))
        # Who asks first may not have the time; the process starts all the same, and once.
        hasty = replace(tools["process"], timeout_s=0.05)
        assert (await hasty({})).text == "Error: process took longer than 0.05 s."
        assert await pid_of(server) not in (int(first), pids[0])
        last = await pid_of(server)
    assert not running(last)
    assert threading.active_count() <= threads
    assert [task for task in asyncio.all_tasks() if "mcp" in task.get_name()] == []
    closed = await tools["echo"]({"text": ""})
    assert closed.text == "Error: the tool's server was closed."


@pytest.mark.asyncio
async def test_a_process_that_does_not_come_back_at_once_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(mcp_connection, "FIRST_BACKOFF_S", 0.01)
    mark = tmp_path / "mark"
    mark.touch()
    flaky = McpServer(sys.executable, args=[SCRIPT, "flaky", str(mark)], reconnect_tries=2)
    async with flaky as server:
        first = await pid_of(server)
        os.kill(first, signal.SIGKILL)
        await until(lambda: server._connection is None or server._connection.over)
        assert await pid_of(server) != first
    async with McpServer(sys.executable, args=[SCRIPT, "stdio"], reconnect_tries=1) as server:
        os.kill(await pid_of(server), signal.SIGKILL)
        server._args = (SCRIPT, "broken")
        while "lost during" in (told := (await named(server)["echo"]({"text": ""})).text):
            pass  # it was not yet known to be dead
        assert told.startswith(
            "Error: the tool's server can't be reached: MCPError: Connection closed"
        )
        assert told.endswith("no such database")


@pytest.mark.asyncio
async def test_an_http_server_that_dies_and_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(mcp_connection, "FIRST_BACKOFF_S", 0.01)
    port = free_port()
    with http_process(port) as process:
        server = McpServer(url=f"http://127.0.0.1:{port}/mcp", headers={"X-Token": "secret"})
        await server.__aenter__()
        tools = named(server)
        results = []

        async def call() -> None:
            results.append(await tools["hang"]({"started": str(tmp_path / "started")}))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await until(lambda: content(tmp_path / "started"))
            process.kill()
        assert results[0].text.startswith("Error: the connection to the tool's server was lost")
        gone = await tools["echo"]({"text": "anyone?"})
        assert gone.failed
        assert "the tool's server can't be reached: ConnectError" in gone.text
    with http_process(port, "fewer"):
        assert (await tools["add"]({"a": 1})).text == "2"
        assert (await tools["echo"]({"text": "a"})).text == (
            "Error: the server no longer has the tool 'echo'."
        )
    # Idle when it died: what was never sent is sent again, without a word.
    with http_process(port):
        assert (await tools["echo"]({"text": "back"})).text == "back"
        await server.__aexit__(None, None, None)
    assert [task for task in asyncio.all_tasks() if "mcp" in task.get_name()] == []


class OldServer:
    """An MCP server of 2025 over HTTP: it has sessions, and can forget them."""

    def __init__(self) -> None:
        self.sessions: set[str] = set()
        self.calls = 0
        self.may_answer, self.was_asked = threading.Event(), threading.Event()
        self.may_answer.set()
        old = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                self.answer(405, None)

            def do_DELETE(self) -> None:
                old.sessions.discard(self.headers.get("mcp-session-id", ""))
                self.answer(200, None)

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self.session = self.headers.get("mcp-session-id", "")
                if asked["method"] == "initialize":
                    self.session = f"session-{len(old.sessions)}-{time.monotonic_ns()}"
                    old.sessions.add(self.session)
                elif asked["method"] == "server/discover":
                    return self.answer(400, None)
                elif self.session not in old.sessions:
                    return self.answer(404, None)
                if "id" not in asked:
                    return self.answer(202, None)
                return self.answer(200, {"id": asked["id"], "result": old.result(asked)})

            def answer(self, status: int, message: dict[str, object] | None) -> None:
                body = b"" if message is None else json.dumps({"jsonrpc": "2.0"} | message).encode()
                self.send_response(status)
                if message is not None:
                    self.send_header("content-type", "application/json")
                    self.send_header("mcp-session-id", self.session)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/mcp"

    def result(self, asked: dict[str, dict[str, object]]) -> dict[str, object]:
        if asked["method"] == "initialize":
            return {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "old", "version": "1"},
            }
        if asked["method"] == "tools/list":
            anything = {"type": "object"}
            return {"tools": [{"name": "count", "inputSchema": anything}]}
        self.calls += 1
        self.was_asked.set()
        assert self.may_answer.wait(10)
        return {"content": [], "structuredContent": {"count": self.calls}}


@pytest.fixture
def old_server() -> Generator[OldServer]:
    old = OldServer()
    thread = threading.Thread(target=old.http.serve_forever, args=(0.01,))
    thread.start()
    yield old
    old.may_answer.set()
    old.http.shutdown()
    old.http.server_close()
    thread.join(10)


@pytest.mark.asyncio
async def test_a_session_that_an_old_server_forgot_is_opened_again(old_server):
    async with McpServer(url=old_server.url) as server:
        (count,) = server.tools
        assert (await count({"any": "name"})).text == '{"count": 1}'
        old_server.sessions.clear()
        # The server ran nothing, so the calls are made again without a word.
        results = await asyncio.gather(count({}), count({}))
        assert sorted(result.text for result in results) == ['{"count": 2}', '{"count": 3}']
        assert len(old_server.sessions) == 1
    assert old_server.sessions == set()  # the goodbye was said


@pytest.mark.asyncio
@pytest.mark.parametrize("answers", [True, False])
async def test_a_lost_session_is_kept_for_the_call_in_it(old_server, answers):
    results = []
    async with anyio.create_task_group() as group:
        async with McpServer(url=old_server.url) as server:
            (count,) = server.tools

            async def call() -> None:
                results.append(await count({}))

            old_server.may_answer.clear()
            group.start_soon(call)
            await until(old_server.was_asked.is_set)
            old_server.sessions.clear()
            group.start_soon(call)
            await until(lambda: old_server.calls == 2)
            if answers:
                old_server.may_answer.set()
                await until(lambda: len(results) == 2)
        with anyio.fail_after(3):
            await until(lambda: len(results) == 2)
    assert [result.failed for result in results] == [not answers] * 2


@pytest.mark.asyncio
async def test_some_tools_under_other_names():
    async with stdio(prefix="fs_", only=["echo", "add"], max_result_chars=9) as server:
        assert [tool.name for tool in server.tools] == ["fs_echo", "fs_add"]
        cut = await named(server)["fs_echo"]({"text": "0123456789ab"})
        assert cut.text == "012345\n[... 3 characters left out ...]\n9ab"
        slow = stdio(only=["hnag"])
        with pytest.raises(UnknownNameError, match=r"Unknown tool of the MCP server .*mean hang"):
            await slow.__aenter__()
        with pytest.raises(ConfigError, match="is entered already"):
            await server.__aenter__()


@pytest.mark.asyncio
async def test_a_timeout_of_a_call_is_told(tmp_path):
    async with stdio(timeout_s=0.3) as server:
        late = await named(server)["hang"]({"started": str(tmp_path / "started")})
        assert late.text == "Error: hang took longer than 0.3 s."
        assert (await named(server)["echo"]({"text": "alive"})).text == "alive"


@pytest.mark.asyncio
async def test_what_does_not_start_says_why():
    with pytest.raises(
        ConfigError, match=r"(?s)did not start: .*stderr ends with:\nno such database"
    ):
        await McpServer(sys.executable, args=[SCRIPT, "broken"]).__aenter__()
    with pytest.raises(ConfigError, match="did not start: FileNotFoundError"):
        await McpServer("no-such-command").__aenter__()
    with pytest.raises(ConfigError, match="did not start: ConnectError"):
        await McpServer(url=f"http://127.0.0.1:{free_port()}/mcp").__aenter__()
    silent = McpServer(
        sys.executable, args=["-c", "input(); input()"], connect_timeout_s=0.2, reconnect_tries=1
    )
    with pytest.raises(ConfigError, match=r"it did not answer within 0.2 s"):
        await silent.__aenter__()


@pytest.mark.asyncio
async def test_an_error_in_the_block_comes_out_as_it_is():
    pids: list[int] = []

    async def breaks() -> None:
        async with stdio() as server:
            pids.append(await pid_of(server))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await breaks()
    assert not running(pids[0])


@pytest.mark.asyncio
async def test_cancelling_the_block_ends_the_process():
    pid = 0
    with anyio.CancelScope() as scope:
        async with stdio() as server:
            pid = await pid_of(server)
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert not running(pid)


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError, match="either a command or a url"):
        McpServer()
    with pytest.raises(ConfigError, match="either a command or a url"):
        McpServer("a", url="b")
    with pytest.raises(ConfigError, match="connect_timeout_s"):
        McpServer("a", connect_timeout_s=0)
    with pytest.raises(ConfigError, match="reconnect_tries"):
        McpServer("a", reconnect_tries=0)
    with pytest.raises(ClosedError, match="inside `async with`"):
        _ = McpServer("a").tools


@pytest.mark.asyncio
async def test_a_missing_package_names_its_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymllm_agents.tools.mcp_connection", None)
    with pytest.raises(MissingExtraError, match=r'pip install "gymllm-agents\[mcp\]"'):
        await McpServer("a").__aenter__()


def test_importing_the_agents_brings_no_mcp():
    program = "import sys, gymllm_agents; sys.exit('mcp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
