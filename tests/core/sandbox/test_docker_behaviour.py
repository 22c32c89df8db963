"""What the local sandbox's tests ask of it, asked of containers: the same functions, another `sandbox`.

Left out: what is the local sandbox's own (a read-only system, a bounded disk, layers).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio
from podman_service import IMAGE
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
from test_neighbours import SPY
from test_shell import (  # noqa: F401
    test_a_cancelled_command_is_ended_before_the_next,
    test_a_shell_that_ignores_interrupts_is_killed_and_told,
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

from gymllm.sandbox import Sandbox, SandboxSpec, Shell, open_sandbox
from gymllm.sandbox.docker import DockerHost

pytestmark = pytest.mark.asyncio(loop_scope="module")

# As it was at first, but for the processes that hold the container and its helper up.
_RESET = """for entry in $(ps -A -o pid=,args= | grep -E '^ *[0-9]+ (sleep [0-9][0-9]?[.]?[0-9]*$|yes|cat)' |
  cut -c1-7); do kill -9 $entry; done
cd / && rm -rf /workspace/* /workspace/.[!.]* && mkdir /workspace/pkg
echo from the base >/workspace/a.txt; echo b >/workspace/pkg/b.txt
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(docker_host: DockerHost) -> AsyncGenerator[list[Sandbox]]:
    """The container that the tests use in turn: a start for each would be half of their time."""
    made: list[Sandbox] = []
    yield made
    for sandbox in made:
        await sandbox.aclose()


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(base: Path, docker_host: DockerHost, shared: list[Sandbox]) -> Sandbox:
    if not shared or not shared[-1].alive:
        spec = SandboxSpec(image=IMAGE, base=base, file_mb=32, memory_mb=256)
        shared.append(await open_sandbox(spec, docker_host))
    else:
        await shared[-1].exec(["sh", "-c", _RESET])
    return shared[-1]


@pytest_asyncio.fixture(loop_scope="module")
async def shell(sandbox: Sandbox) -> AsyncGenerator[Shell]:
    shell = await sandbox.shell()
    yield shell
    await shell.aclose()


@pytest.mark.parametrize("status", ["9" * 5000, "x"])
async def test_a_forged_status_is_one_or_none(sandbox: Sandbox, status: str) -> None:
    shell = await sandbox.shell()
    await shell.run(SPY % (status, 254), timeout_s=5)
    done = await shell.run("echo told", timeout_s=5)
    assert b"told\n" in bytes(done.stdout)
    assert done.exit_code in range(256)
    await shell.aclose()
