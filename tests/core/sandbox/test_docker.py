"""Docker and Podman: starts and ends, what is enforced, what is left behind, images, snapshots."""

# ruff: noqa: ASYNC110 - what the daemon does tells nobody that it is done

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from podman_service import EMPTY_IMAGE, IMAGE, PLAIN_IMAGE
from sandbox_helpers import processes_with

from gymllm.errors import (
    ConfigError,
    MissingExtraError,
    SandboxDiedError,
    SandboxError,
    SandboxFileError,
    SandboxStartError,
)
from gymllm.sandbox import Mount, Sandbox, SandboxPool, SandboxSpec, open_sandbox
from gymllm.sandbox.docker import MACHINE, DockerHost, machine_name

docker = pytest.importorskip("docker", reason='needs pip install "gymllm[docker]"')
pytestmark = pytest.mark.asyncio

SPEC = SandboxSpec(image=IMAGE, memory_mb=128, file_mb=16, pids=64)


@pytest.fixture
def api(docker_host: DockerHost) -> Iterator[docker.APIClient]:
    client = docker.APIClient(base_url=docker_host.url)
    yield client
    client.close()


def left(api: docker.APIClient) -> list[str]:
    ours = {"label": f"{MACHINE}={machine_name()}"}
    containers = [found["Id"] for found in api.containers(all=True, filters=ours)]
    return containers + [found["Id"] for found in api.images(filters=ours)]


async def said(sandbox: Sandbox, script: str, timeout_s: float = 20) -> str:
    done = await sandbox.exec(["sh", "-c", script], timeout_s=timeout_s)
    return (bytes(done.stdout) + bytes(done.stderr)).decode()


# Starting and ending


async def test_close_leaves_nothing(docker_host: DockerHost, api: docker.APIClient) -> None:
    async with await open_sandbox(SPEC, docker_host):
        pass  # connected
    before = len(os.listdir("/proc/self/fd"))
    async with await open_sandbox(SPEC, docker_host) as sandbox:
        assert len(left(api)) == 1
        shell = await sandbox.shell()
        await shell.run("sleep 61.01 &")
        await sandbox.exec(["sleep", "61.02"], timeout_s=0.05)
        for _ in range(16):
            await sandbox.exec(["true"])
    await sandbox.aclose()
    assert not shell.alive
    assert left(api) == []
    assert not processes_with("61.0")
    assert len(os.listdir("/proc/self/fd")) < before + 15  # the SDK keeps up to ten connections


async def test_cancelled_at_any_time_leaves_nothing(
    docker_host: DockerHost, api: docker.APIClient
) -> None:
    for step in range(8):
        with anyio.move_on_after(0.002 * 2**step):
            async with await open_sandbox(SPEC, docker_host) as sandbox:
                await (await sandbox.shell()).run("sleep 61.03 & sleep 61.03")
    assert left(api) == []
    assert not processes_with("61.03")


async def test_docker_is_a_kind_by_the_environment(
    docker_host: DockerHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker_host.url)
    async with await open_sandbox(SPEC, "docker") as sandbox:
        assert await said(sandbox, "echo there; pwd") == "there\n/workspace\n"


async def test_no_daemon_no_sdk_no_image(
    docker_host: DockerHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nowhere = DockerHost(url=f"unix://{tmp_path}/none")
    with pytest.raises(SandboxStartError, match=r"answers at unix://.*/none.*DOCKER_HOST"):
        await open_sandbox(SPEC, nowhere)
    with pytest.raises(SandboxStartError, match=r"localhost/absent.*'never'.*docker pull"):
        await open_sandbox(SandboxSpec(image="localhost/absent"), docker_host)
    for name in [name for name in sys.modules if name.startswith("gymllm.sandbox.docker_api")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(MissingExtraError, match=r'pip install "gymllm\[docker\]"'):
        await open_sandbox(SPEC, DockerHost(url=f"unix://{tmp_path}/other"))


async def test_what_a_container_cannot_do_is_refused(
    docker_host: DockerHost, tmp_path: Path
) -> None:
    for spec, word in (
        (SandboxSpec(), "image"),
        (SandboxSpec(image=IMAGE, layers=(tmp_path,)), "layers"),
        (SandboxSpec(image=IMAGE, hidden=("/usr/lib",)), "hidden"),
        (SandboxSpec(image=IMAGE, env={"a b": "c"}), "env"),
    ):
        with pytest.raises(ConfigError, match=f"sandbox.{word}"):
            await open_sandbox(spec, docker_host)
    with pytest.raises(ConfigError, match=r"image='x'.*'docker' and 'kubernetes'"):
        await open_sandbox(SandboxSpec(image="x"))
    for wrong in ({"url": "ssh://there"}, {"starts_at_once": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            DockerHost(**wrong)


async def test_the_config_needs_no_sdk() -> None:
    code = "import gymllm.sandbox, sys; print('docker' in sys.modules, 'kubernetes' in sys.modules)"
    done = await anyio.run_process([sys.executable, "-c", code])
    assert done.stdout == b"False False\n"


# What is enforced


async def test_limits_are_in_force(docker_host: DockerHost) -> None:
    async with await open_sandbox(SPEC, docker_host) as sandbox:
        limits = sandbox.limits
        assert "128 MB" in limits.memory
        assert "64" in limits.pids
        assert "1 of a core" in limits.cpus
        assert any("disk" in lack for lack in limits.lacks)
        shown = await said(
            sandbox,
            "grep -E 'Cap(Eff|Bnd)|NoNewPrivs|Seccomp:' /proc/self/status; ls /sys/class/net; "
            "dd if=/dev/zero of=/tmp/x bs=1M count=32 2>&1 | grep -o 'No space.*'; "
            "env | grep -c PYTEST",
        )
        assert " ".join(shown.split()) == (
            "CapEff: 0000000000000000 CapBnd: 0000000000000000 NoNewPrivs: 1 Seccomp: 2 lo "
            "No space left on device 0"
        )
        done = await sandbox.exec(["sh", "-c", "x=$(yes | head -c 500000000); echo on"])
        assert (done.exit_code, done.signal) != (0, None)
        assert await said(sandbox, "echo lives") == "lives\n"


async def test_what_fills_the_process_table_is_ended(docker_host: DockerHost) -> None:
    async with await open_sandbox(SPEC, docker_host) as sandbox:
        shell = await sandbox.shell()
        done = await shell.run("f() { f | f & }; f; sleep 62.01", timeout_s=0.5)
        assert done.timed_out
        if done.shell_died:
            await shell.restart()
        assert bytes((await shell.run("echo on")).stdout).endswith(b"on\n")
    # In one of its own: what a bomb leaves in its last breath may fill the first for good.
    async with await open_sandbox(SPEC, docker_host) as sandbox:
        fill = "sh -c 'while :; do sleep 62.02 & done' 2>/dev/null; exec sleep 62.02"
        done = await sandbox.exec(["sh", "-c", fill], timeout_s=0.5)
        assert done.timed_out
        assert not processes_with("62.02")
        assert await said(sandbox, "echo on") == "on\n"


async def test_a_full_process_table_is_data(docker_host: DockerHost) -> None:
    async with await open_sandbox(SPEC, docker_host) as sandbox:
        fill = "sh -c 'while :; do sleep 62.05 & done' 2>/dev/null; sleep 62.05 & exit 3"
        codes = [(await sandbox.exec(["sh", "-c", fill])).exit_code for _ in range(6)]
        assert codes[0] in (2, 3, 126)
        assert set(codes[-2:]) <= {2, 126}, codes  # 2: the command's own sh has no process for it
        with pytest.raises(SandboxFileError, match="full of processes"):
            await sandbox.write("f", b"x")
        assert sandbox.alive


async def test_wall_limit_ends_it_all(docker_host: DockerHost) -> None:
    spec = SandboxSpec(image=IMAGE, wall_s=0.8)
    async with await open_sandbox(spec, docker_host) as sandbox:
        with pytest.raises(SandboxDiedError, match=r"wall_s=0\.8"):
            await sandbox.exec(["sleep", "63.04"])
        assert not sandbox.alive


async def test_a_container_ends_by_itself(docker_host: DockerHost) -> None:
    async with await open_sandbox(SandboxSpec(image=IMAGE, wall_s=1), docker_host) as sandbox:

        async def until_it_ends() -> None:
            while True:
                await sandbox.exec(["true"])

        with anyio.fail_after(10), pytest.raises(SandboxDiedError):
            await until_it_ends()


async def test_killed_from_outside_it_says_so(
    docker_host: DockerHost, api: docker.APIClient
) -> None:
    async with await open_sandbox(SPEC, docker_host) as sandbox:
        shell = await sandbox.shell()
        async with anyio.create_task_group() as tasks:

            async def kill() -> None:
                while not processes_with("63.05"):
                    await anyio.sleep(0.01)
                await anyio.to_thread.run_sync(api.kill, left(api)[0])

            tasks.start_soon(kill)
            with pytest.raises(SandboxDiedError):
                await sandbox.exec(["sleep", "63.05"])
        assert not sandbox.alive
        assert not shell.alive
        with pytest.raises(SandboxDiedError):
            await shell.run("true")
        with pytest.raises(SandboxDiedError):
            await sandbox.snapshot()


async def test_a_command_that_kills_all_it_can_hurts_only_itself(docker_host: DockerHost) -> None:
    async with await open_sandbox(SPEC, docker_host) as sandbox:
        await sandbox.write("kept", b"x")
        done = await sandbox.exec(["sh", "-c", "kill -9 -1; kill -9 $PPID; sleep 9"], timeout_s=5)
        assert (done.exit_code, done.signal) == (None, 9)
        assert await sandbox.read("kept") == b"x"
        done = await sandbox.exec(["sleep", "63.06"], timeout_s=0.1)  # the keeper starts again
        assert done.timed_out
        assert not processes_with("63.06")


async def test_commands_in_turn_share_a_sh_and_nothing_else(docker_host: DockerHost) -> None:
    async with await open_sandbox(SPEC, docker_host) as sandbox:
        parent = "cut -d ' ' -f 4 /proc/self/stat"
        first = await said(sandbox, f"exec {parent}")
        assert await said(sandbox, f"exec {parent}") == first
        # Whoever is left behind could write into the output of the next: that gets streams of its own.
        script = "(sleep 66.01; echo late; echo late >&2) & echo $!"
        pid = (await said(sandbox, script)).strip()
        done = await sandbox.exec(["sh", "-c", f"kill {pid}; sleep 0.05; echo mine"])
        assert bytes(done.stdout) == b"mine\n"
        await sandbox.exec(["sh", "-c", "setsid sleep 66.02 >/dev/null 2>&1 </dev/null &"])
        assert await said(sandbox, f"exec {parent}") != await said(sandbox, f"exec {parent}")
        assert len(processes_with("66.02")) == 1  # nobody else's end is its own
        done = await sandbox.exec(["sleep", "66.03"], timeout_s=0.1)
        assert done.timed_out
        assert len(processes_with("66.02")) == 1


async def test_a_sh_that_was_killed_while_it_waited_is_replaced(docker_host: DockerHost) -> None:
    async with await open_sandbox(SPEC, docker_host) as sandbox:
        shell = await sandbox.shell()
        for _ in range(3):
            await sandbox.write("f", b"x")
            await shell.run("kill -9 $(ps -A -o pid=,args= | grep 'IFS= read' | cut -c1-7)")
            assert await sandbox.read("f") == b"x"


# What others have left


async def test_the_next_process_removes_what_a_killed_one_has_left(
    docker_host: DockerHost, api: docker.APIClient
) -> None:
    code = f"""
import anyio
from gymllm.sandbox import SandboxSpec, open_sandbox
from gymllm.sandbox.docker import DockerHost

async def main():
    sandbox = await open_sandbox(SandboxSpec(image={IMAGE!r}), DockerHost(url={docker_host.url!r}))
    await sandbox.snapshot()
    print("there", flush=True)
    await anyio.sleep_forever()

anyio.run(main)
"""
    with subprocess.Popen(  # noqa: ASYNC220 - a fork
        [sys.executable, "-c", code], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert await anyio.to_thread.run_sync(child.stdout.readline) == b"there\n"
        async with await open_sandbox(SPEC, docker_host):
            # A fresh use of the daemon: `pull` makes it another host.
            async with await open_sandbox(SPEC, DockerHost(url=docker_host.url)):
                assert len(left(api)) == 4
            child.send_signal(signal.SIGKILL)
            child.wait()
            assert len(left(api)) == 3
            other = DockerHost(url=docker_host.url, starts_at_once=2)
            async with await open_sandbox(SPEC, other) as sandbox:
                assert len(left(api)) == 2  # ours
                assert await said(sandbox, "echo on") == "on\n"
    assert left(api) == []


async def test_at_exit_nothing_is_left(docker_host: DockerHost, api: docker.APIClient) -> None:
    code = f"""
import anyio
from gymllm.sandbox import SandboxSpec, open_sandbox
from gymllm.sandbox.docker import DockerHost

async def main():
    sandbox = await open_sandbox(SandboxSpec(image={IMAGE!r}), DockerHost(url={docker_host.url!r}))
    await sandbox.snapshot()

anyio.run(main)
"""
    done = await anyio.run_process([sys.executable, "-W", "error", "-c", code])
    assert done.returncode == 0
    assert left(api) == []


# Images


async def test_a_pull_that_hangs_holds_up_nobody(docker_host: DockerHost) -> None:
    host = DockerHost(url=docker_host.url, pulls_at_once=1)
    asked = anyio.Event()

    async def silent_registry(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            asked.set()
            await anyio.sleep_forever()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    slow = SandboxSpec(image=f"127.0.0.1:{port}/slow")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, silent_registry)
        tasks.start_soon(open_sandbox, slow, host)
        tasks.start_soon(open_sandbox, slow, host)
        with anyio.fail_after(20):
            await asked.wait()
            async with await open_sandbox(SPEC, host) as sandbox:
                assert await said(sandbox, "echo quick") == "quick\n"
        tasks.cancel_scope.cancel()


async def test_an_image_that_cannot_be_fetched_says_why(docker_host: DockerHost) -> None:
    host = DockerHost(url=docker_host.url)
    with pytest.raises(SandboxStartError, match=r"127\.0\.0\.1:1/none:1.*can't be fetched"):
        await open_sandbox(SandboxSpec(image="127.0.0.1:1/none:1"), host)


async def test_what_the_daemon_refuses_is_told(docker_host: DockerHost) -> None:
    for spec, said in (
        (SandboxSpec(image="not an image"), "invalid reference"),
        (SandboxSpec(image=IMAGE, user="nobody-knows"), "nobody-knows"),
        (SandboxSpec(image=EMPTY_IMAGE), "need a POSIX sh"),
    ):
        with pytest.raises(SandboxStartError, match=said):
            await open_sandbox(spec, docker_host)


async def test_an_image_with_nothing_but_sh(docker_host: DockerHost, base: Path) -> None:
    spec = SandboxSpec(image=PLAIN_IMAGE)
    async with await open_sandbox(spec, docker_host) as sandbox:
        lacks = " ".join(sandbox.limits.lacks)
        assert "bash" in lacks
        assert "tar" in lacks
        shell = await sandbox.shell(env={"WHO": "it's"})
        await shell.run("cd /srv; x=1; f() { echo f$1; }")
        done = await shell.run("pwd; echo $x $WHO; f 2; read y; echo '<'$y'>'\n(exit 3)")
        assert bytes(done.stdout) == b"/srv\n1 it's\nf2\n<>\n"
        assert done.exit_code == 3
        await shell.run("sleep 64.01 &")
        for endless in ("echo begun; sleep 64.02", "echo begun; while :; do :; done"):
            done = await shell.run(endless, timeout_s=0.2)
            assert done.timed_out
            assert not done.shell_died
            assert bytes(done.stdout).startswith(b"begun\n")
            assert bytes((await shell.run("echo $x")).stdout) == b"1\n"
        assert len(processes_with("64.01")) == 1
        assert not processes_with("64.02")
        done = await shell.run("exit 4")
        assert (done.shell_died, done.exit_code) == (True, 4)
    with pytest.raises(SandboxError, match="has no tar"):
        await open_sandbox(SandboxSpec(image=PLAIN_IMAGE, base=base), docker_host)


# Trees


async def test_snapshot_restore_and_fork(
    docker_host: DockerHost, api: docker.APIClient, base: Path, tmp_path: Path
) -> None:
    (tmp_path / "data").write_text("mounted")
    mounts = (Mount(source=tmp_path / "data", target="/opt/data"),)
    spec = SandboxSpec(image=IMAGE, base=base, mounts=mounts)
    async with await open_sandbox(spec, docker_host) as sandbox:
        script = "cat a.txt pkg/b.txt /opt/data; echo x 2>/dev/null >/opt/data || echo read-only"
        assert await said(sandbox, script) == "from the base\nb\nmountedread-only\n"
        await said(sandbox, "rm a.txt; echo c >pkg/c; ln -s /etc l; mkdir -p /srv/x; sleep 65.01 &")
        first = await sandbox.snapshot()
        shell = await sandbox.shell()
        await said(sandbox, "echo later >later; rm pkg/c")
        await sandbox.restore(first)
        assert not shell.alive
        assert not processes_with("65.01")
        assert await said(sandbox, "ls . pkg /srv; cat pkg/c") == (
            ".:\nl\npkg\n\n/srv:\nx\n\npkg:\nb.txt\nc\nc\n"
        )
        async with await open_sandbox(SandboxSpec(image=first.image), docker_host) as fork:
            assert await said(fork, "ls") == "l\npkg\n"
    assert len(left(api)) == 1
    first.discard()
    first.discard()
    assert left(api) == []


async def test_a_local_snapshot_is_refused(docker_host: DockerHost, tmp_path: Path) -> None:
    from gymllm.sandbox.interface import Snapshot

    async with await open_sandbox(SPEC, docker_host) as sandbox:
        with pytest.raises(ConfigError, match="local one's snapshot"):
            await sandbox.restore(Snapshot(base=tmp_path))


async def test_another_user_runs_the_commands(docker_host: DockerHost) -> None:
    spec = SandboxSpec(image=IMAGE, user="user", workdir="/srv")
    async with await open_sandbox(spec, docker_host) as sandbox:
        assert await said(sandbox, "id -u; touch /etc/x 2>/dev/null || echo no") == "1000\nno\n"
        await sandbox.write("mine", b"x")
        assert await said(sandbox, "stat -c %u mine") == "1000\n"


async def test_the_pool_keeps_containers_ready(
    docker_host: DockerHost, api: docker.APIClient
) -> None:
    async def opener(spec: SandboxSpec) -> Sandbox:
        return await open_sandbox(spec, docker_host)

    async with SandboxPool(ahead=1, opener=opener) as pool:
        pool.prepare(SPEC)
        with anyio.fail_after(10):
            while not pool.fresh(SPEC):
                await anyio.sleep(0.01)
        async with pool.lease(SPEC) as sandbox:
            assert await said(sandbox, "echo on") == "on\n"
    assert left(api) == []


async def test_it_runs_on_trio_too(docker_host: DockerHost) -> None:
    import trio

    async def main() -> bytes:
        async with await open_sandbox(SPEC, docker_host) as sandbox:
            shell = await sandbox.shell()
            await shell.run("x=1")
            await sandbox.write("f", b"y" * 300_000)
            return bytes((await shell.run("echo $x; wc -c <f")).stdout)

    assert await anyio.to_thread.run_sync(trio.run, main) == b"1\n300000\n"
