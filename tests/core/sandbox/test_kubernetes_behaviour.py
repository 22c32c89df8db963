"""What the local sandbox's tests ask of it, asked of pods; then what is a pod's own in a `Sandbox`.

Left out: what is the local sandbox's own (a read-only system, a bounded disk, layers).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
import pytest_asyncio

pytest.importorskip("kubernetes", reason='needs pip install "gymllm[kubernetes]"')
pytest.importorskip("aiohttp")

from kubernetes_server import FakeCluster
from sandbox_helpers import processes_with, said
from test_exec import (  # noqa: F401
    test_a_program_that_is_not_there_is_127,
    test_a_signal_is_told,
    test_a_timeout_keeps_partial_output_and_kills_the_session,
    test_after_the_end_it_says_so,
    test_arguments_are_checked,
    test_background_children_do_not_hold_it_up,
    test_cancelled_it_kills_what_it_has_started,
    test_endless_output_keeps_both_ends_and_counts_the_rest,
    test_large_input_that_is_read_late_or_never,
    test_many_at_once,
    test_streams_exit_code_input_environment_and_directory,
)
from test_files import (  # noqa: F401
    test_links_lead_nowhere_outside,
    test_odd_names,
    test_the_base_is_never_changed,
    test_what_cannot_be_read,
    test_write_read_list,
)
from test_shell import (  # noqa: F401
    test_a_cancelled_command_is_ended_before_the_next,
    test_a_shell_that_is_ended_says_so_and_restarts,
    test_a_timeout_kills_the_command_and_keeps_the_shell,
    test_a_timeout_spares_earlier_background_jobs,
    test_any_bytes_arrive_as_they_are,
    test_background_output_neither_wedges_nor_is_lost,
    test_cancelled_at_every_await,
    test_closed_while_a_command_runs,
    test_closing_every_descriptor_hangs_nobody,
    test_endless_output_is_bounded,
    test_nothing_takes_it_out_of_step,
    test_nul_bytes_are_refused,
    test_shells_of_one_sandbox_share_its_tree_and_nothing_else,
    test_state_is_kept,
)

from gymllm.errors import SandboxDiedError, SandboxError
from gymllm.sandbox import Sandbox, SandboxPool, SandboxSpec, Shell, open_sandbox
from gymllm.sandbox.kubernetes import KubernetesHost

pytestmark = pytest.mark.asyncio

SPEC = SandboxSpec(image="python:3", memory_mb=64, file_mb=32)


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as cluster:
        yield cluster
        assert not cluster.pods


@pytest.fixture
def host(cluster: FakeCluster, tmp_path: Path) -> KubernetesHost:
    return KubernetesHost(kubeconfig=cluster.kubeconfig(tmp_path / "config"), patience_s=5)


@pytest_asyncio.fixture
async def sandbox(base: Path, host: KubernetesHost) -> AsyncGenerator[Sandbox]:
    async with await open_sandbox(replace(SPEC, base=base), host) as sandbox:
        yield sandbox


@pytest_asyncio.fixture
async def shell(sandbox: Sandbox) -> Shell:
    return await sandbox.shell()


async def test_snapshot_and_restore(sandbox: Sandbox, cluster: FakeCluster) -> None:
    await said(sandbox, "rm a.txt; echo c > pkg/c; ln -s /etc/passwd l; chmod 755 pkg/c")
    snapshot = await sandbox.snapshot()
    assert snapshot.archive is not None
    await said(sandbox, "echo later > later; rm pkg/c; sleep 100 &")
    shell = await sandbox.shell()
    (before,) = cluster.names()
    await sandbox.restore(snapshot)
    assert not shell.alive
    assert cluster.names() != [before]
    assert await said(sandbox, "ls . pkg; cat pkg/c; stat -c %a pkg/c; readlink l") == (
        ".:\nl\npkg\n\npkg:\nb.txt\nc\nc\n755\n/etc/passwd\n"
    )
    snapshot.discard()


async def test_closing_leaves_no_pod_and_no_process(
    host: KubernetesHost, cluster: FakeCluster
) -> None:
    async with await open_sandbox(SPEC, host) as sandbox:
        shell = await sandbox.shell()
        await shell.run("sleep 79.01 & (setsid sleep 79.02 &)")
    assert not cluster.pods
    assert not processes_with("79.0")


async def test_an_eviction_midway_is_a_dead_sandbox(
    host: KubernetesHost, cluster: FakeCluster
) -> None:
    async with await open_sandbox(SPEC, host) as sandbox:
        shell = await sandbox.shell()
        (name,) = cluster.names()
        async with anyio.create_task_group() as tasks:

            async def command() -> None:
                with pytest.raises(SandboxDiedError):
                    await sandbox.exec(["sh", "-c", "echo begun; sleep 60"])

            tasks.start_soon(command)
            with anyio.fail_after(5):
                while not processes_with("echo begun; sleep 60"):  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            await anyio.to_thread.run_sync(cluster.evict, name)
        with pytest.raises(SandboxDiedError):
            await shell.run("true")
        assert not sandbox.alive
    async with await open_sandbox(SPEC, host) as sandbox:
        (name,) = cluster.names()
        await anyio.to_thread.run_sync(cluster.evict, name)
        with pytest.raises(SandboxDiedError, match="Evicted: The node was low on resource"):
            await sandbox.exec(["true"])


async def test_a_connection_that_breaks_is_an_error_and_no_exit_code(
    host: KubernetesHost, cluster: FakeCluster
) -> None:
    async with await open_sandbox(SPEC, host) as sandbox:
        shell = await sandbox.shell()
        async with anyio.create_task_group() as tasks:

            async def command() -> None:
                with pytest.raises(SandboxError):
                    await sandbox.exec(["sleep", "79.03"])

            tasks.start_soon(command)
            with anyio.fail_after(5):
                while not processes_with("79.03"):  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            await anyio.to_thread.run_sync(cluster.stop)
            await anyio.to_thread.run_sync(cluster.restart)
        assert await said(sandbox, "echo lives") == "lives\n"
        with anyio.fail_after(5):
            while processes_with("79.03"):  # noqa: ASYNC110
                await anyio.sleep(0.01)
        if not shell.alive:
            await shell.restart()
        else:
            assert (await shell.run("true")).shell_died
            await shell.restart()
        assert bytes((await shell.run("echo on")).stdout) == b"on\n"


async def test_the_pool_makes_pods_ahead(host: KubernetesHost, cluster: FakeCluster) -> None:
    slow = replace(SPEC, image="slow")
    cluster.slow_pull("slow")

    async def opener(spec: SandboxSpec) -> Sandbox:
        return await open_sandbox(spec, host)

    async with SandboxPool(ahead=2, opener=opener) as pool:
        pool.prepare(slow)
        pool.prepare(SPEC)
        with anyio.fail_after(10):
            while pool.fresh(SPEC) < 2:  # noqa: ASYNC110
                await anyio.sleep(0.005)
        async with pool.lease(SPEC) as sandbox:
            assert await said(sandbox, "echo used > f; cat f") == "used\n"
        async with pool.lease(SPEC) as other:
            assert await said(other, "ls") == ""
        assert pool.fresh(slow) == 0
    assert not cluster.pods


async def test_a_terminal_in_a_pod(sandbox: Sandbox) -> None:
    terminal = await sandbox.terminal(columns=97, rows=31)
    await terminal.send(b"stty size; cat a.txt; exit 5\n")
    seen = b""
    with anyio.fail_after(10):
        while terminal.alive:
            seen += await terminal.receive(1)
    assert b"31 97" in seen
    assert b"from the base" in seen
    assert terminal.exit_code == 5
