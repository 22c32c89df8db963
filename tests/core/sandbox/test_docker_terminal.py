"""Programs on terminals, in containers: the local ones' tests, with another `sandbox`."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import anyio
import pytest
import pytest_asyncio
from podman_service import IMAGE
from sandbox_helpers import processes_with
from test_terminal import (  # noqa: F401
    test_a_program_has_a_terminal_with_a_name_and_a_size,
    test_cancelled_reads_lose_nothing_and_closing_ends_them,
    test_it_hears_of_a_new_size,
    test_keys_reach_it_and_jobs_are_controlled,
    until,
)

from gymllm.errors import SandboxDiedError
from gymllm.sandbox import Sandbox, SandboxSpec, open_sandbox
from gymllm.sandbox.docker import DockerHost

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def sandbox(docker_host: DockerHost) -> AsyncGenerator[Sandbox]:
    async with await open_sandbox(SandboxSpec(image=IMAGE), docker_host) as sandbox:
        yield sandbox


async def test_a_missing_program_says_so(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminal(["no-such-program"])
    assert "not found" in await until(terminal, "no-such-program.*")
    await terminal.receive(5)
    assert (terminal.alive, terminal.exit_code) == (False, 127)


@pytest.mark.parametrize("how", ["terminal", "sandbox"])
async def test_closing_kills_what_runs_on_it(sandbox: Sandbox, how: str) -> None:
    terminal = await sandbox.terminal(["bash", "-c", "trap '' HUP; sleep 98.25 & sleep 98.25"])
    with anyio.fail_after(10):
        while len(processes_with("98.25")) < 3:  # noqa: ASYNC110
            await anyio.sleep(0.01)
    await (terminal.aclose() if how == "terminal" else sandbox.aclose())
    assert not processes_with("98.25")
    assert not terminal.alive
    with pytest.raises(SandboxDiedError):
        await terminal.receive(1)


async def test_a_long_environment_and_any_bytes_arrive(sandbox: Sandbox) -> None:
    argv = ["bash", "-c", 'printf "%s|%s" ${#LONG} "$0" | cat -v', b"\xff\n'"]
    terminal = await sandbox.terminal(argv, env={"LONG": "y" * 20_000})
    assert "20000|M-^?" in await until(terminal, "(?s)20000.*'")
