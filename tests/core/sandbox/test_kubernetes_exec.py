"""Programs in pods: both exec protocols, every byte, TLS, connections that break."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

pytest.importorskip("kubernetes", reason='needs pip install "gymllm[kubernetes]"')
pytest.importorskip("aiohttp")

from kubernetes_fixtures import cluster, host, no_traces, run, running, told
from kubernetes_protocol import V4, V5, Refusal
from kubernetes_server import TOKEN, FakeCluster
from websocket import WebSocket

from gymllm.errors import SandboxDiedError, SandboxError
from gymllm.sandbox.kubernetes import KubernetesHost
from gymllm.sandbox.kubernetes_exec import PodProcess

pytestmark = pytest.mark.asyncio
__all__ = ["cluster", "host"]  # fixtures


@pytest.mark.parametrize("protocols", [[V5, V4], [V4]])
async def test_streams_and_exit_code(
    cluster: FakeCluster, host: KubernetesHost, protocols: list[str]
) -> None:
    cluster.protocols = protocols
    async with running(host) as pod:
        stream = await pod.open(["sh", "-c", 'read -r line; echo "<$line>"; echo e >&2; exit 7'])
        assert stream.protocol == protocols[0]
        await stream.send(b"h\xc3\xa4\n")
        assert await told(stream) == ("<hä>\n".encode(), b"e\n", 7)
        assert await told(await pod.open(["true"])) == (b"", b"", 0)
        assert await told(await pod.open(["sh", "-c", "kill -9 $$"])) == (b"", b"", 137)


async def test_no_protocol_in_common(cluster: FakeCluster, host: KubernetesHost) -> None:
    async with running(host) as pod:
        cluster.protocols = ["v1.something.else"]
        with pytest.raises(SandboxError, match="none of the protocols"):
            await pod.open(["true"])


async def test_arguments_arrive_as_they_are(cluster: FakeCluster, host: KubernetesHost) -> None:
    words = ["", " a  b ", "&x=1", "%41+", "ä€😀", "'\"$(B)`\\", "a\nb", "-n", "*"]
    async with running(host) as pod:
        out, _, _ = await told(await pod.open(["printf", "<%s>\n", *words]))
        assert out.decode() == "".join(f"<{word}>\n" for word in words)


async def test_any_bytes_both_ways_whatever_the_pieces(
    cluster: FakeCluster, host: KubernetesHost
) -> None:
    data = random.Random(0).randbytes(700_000)
    async with running(host) as pod, anyio.create_task_group() as tasks:
        stream = await pod.open(["head", "-c", str(len(data))])

        async def send() -> None:
            rest = memoryview(data)
            for size in (1, 124, 125, 126, 65_535, 65_536, len(data)):
                await stream.send(bytes(rest[:size]))
                rest = rest[size:]

        tasks.start_soon(send)
        assert (await told(stream))[0] == data


async def test_a_send_that_is_cancelled_breaks_no_frame(
    cluster: FakeCluster, host: KubernetesHost
) -> None:
    size = 20_000_000
    async with running(host) as pod:
        stream = await pod.open(["sh", "-c", "read -r _; wc -c"])
        with anyio.move_on_after(0.2) as limit:
            await stream.send(b"\n" + b"x" * size)  # it reads nothing until it has a line
        del limit
        with anyio.move_on_after(0.2):
            await stream.send(b"y" * 1000)
        await stream.aclose()
        stream = await pod.open(["sleep", "60"])
        with anyio.move_on_after(0.2) as limit:
            await stream.send(b"x" * size)
        assert limit.cancelled_caught
        await stream.aclose()
        assert await run(pod, "echo on") == b"on\n"


async def test_a_program_that_is_not_there(cluster: FakeCluster, host: KubernetesHost) -> None:
    async with running(host) as pod:
        out, err, code = await told(await pod.open(["no-such-program"]))
        assert (out, code) == (b"", 127)
        assert b"executable file not found" in err


async def test_hundreds_of_programs_need_no_threads(
    cluster: FakeCluster, host: KubernetesHost
) -> None:
    async with running(host) as pod:

        def workers() -> int:
            return sum("AnyIO" in thread.name for thread in threading.enumerate())

        before = workers()
        streams: list[PodProcess] = []
        for _ in range(60):
            stream = await pod.open(["sh", "-c", 'while read -r x; do echo "$x"; done'])
            streams.append(stream)
        for number, stream in enumerate(streams):
            await stream.send(b"%d\n" % number)
        for number, stream in enumerate(streams):
            assert await stream.receive() == (1, b"%d\n" % number)
        assert workers() <= before + 1
        for stream in streams:
            await stream.aclose()


async def test_a_terminal(cluster: FakeCluster, host: KubernetesHost) -> None:
    async with running(host) as pod:
        stream = await pod.open(["sh"], tty=True)
        await stream.resize(31, 97)
        await stream.send(b"PS1=; [ -t 0 ] && stty size; echo err >&2\n")
        seen = b""
        with anyio.fail_after(5):
            while b"err\r\n" not in seen.replace(b"echo err", b""):
                got = await stream.receive()
                assert got is not None
                assert got[0] == 1
                seen += got[1]
        assert b"31 97\r\n" in seen
        await stream.send(b"exit 3\n")
        assert (await told(stream))[2] == 3


async def test_dropped_it_is_quiet_and_twice_is_fine(
    cluster: FakeCluster, host: KubernetesHost
) -> None:
    async with running(host) as pod:
        stream = await pod.open(["sleep", "60"])
        async with anyio.create_task_group() as tasks:

            async def wait() -> None:
                assert await stream.receive() is None

            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            await stream.aclose()
        await stream.aclose()
        assert await stream.exit_code() is None
        with pytest.raises(SandboxDiedError):
            await stream.send(b"x")


async def test_the_api_restarts_while_a_program_runs(
    cluster: FakeCluster, host: KubernetesHost
) -> None:
    async with running(host) as pod:
        stream = await pod.open(["sh", "-c", "echo begun; sleep 60"])
        assert await stream.receive() == (1, b"begun\n")
        await anyio.to_thread.run_sync(cluster.stop)
        with anyio.fail_after(5):
            assert await stream.receive() is None
        assert await stream.exit_code() is None  # nobody knows
        with pytest.raises(SandboxDiedError):
            await stream.send(b"x")
        await stream.aclose()
        async with anyio.create_task_group() as tasks:

            async def later() -> None:
                assert await run(pod, "echo on") == b"on\n"

            tasks.start_soon(later)
            await anyio.wait_all_tasks_blocked()
            await anyio.to_thread.run_sync(cluster.restart)
        assert await pod.alive()


async def test_an_api_that_is_away_is_no_dead_pod(
    cluster: FakeCluster, host: KubernetesHost
) -> None:
    async with running(replace(host, patience_s=0.2)) as pod:
        await anyio.to_thread.run_sync(cluster.stop)
        assert await pod.alive()
        with pytest.raises(SandboxError, match="can't be reached") as caught:
            await pod.open(["true"])
        assert not isinstance(caught.value, SandboxDiedError)
        await anyio.to_thread.run_sync(cluster.restart)


async def test_programs_may_be_forbidden(cluster: FakeCluster, host: KubernetesHost) -> None:
    async with running(host) as pod:
        cluster.forbidden.add(("get", "pods/exec"))
        with pytest.raises(SandboxError, match=r"pods/exec .* is forbidden"):
            await pod.open(["true"])


async def test_cancelled_while_it_connects(cluster: FakeCluster, host: KubernetesHost) -> None:
    with no_traces():
        async with running(host) as pod:
            for step in range(12):
                with anyio.move_on_after(step * 0.0005):
                    stream = await pod.open(["true"])
                    with anyio.CancelScope(shield=True):
                        await stream.aclose()
            cluster.refusals += [("GET exec", Refusal(503, "ServiceUnavailable", "busy"))] * 50
            with anyio.move_on_after(0.3) as limit:
                await pod.open(["true"])
            assert limit.cancelled_caught
            cluster.refusals.clear()


def _connected() -> tuple[PodProcess, socket.socket]:
    ours, theirs = socket.socketpair()
    opened = WebSocket()
    opened.sock = ours
    return PodProcess(opened, "pod"), theirs


def _frame(opcode: int, data: bytes, *, last: bool = True) -> bytes:
    """As a server sends it: not masked."""
    size = len(data)
    if size < 126:
        head = bytes([size])
    else:
        head = b"\x7e" + size.to_bytes(2) if size < 1 << 16 else b"\x7f" + size.to_bytes(8)
    return bytes([opcode | (0x80 if last else 0)]) + head + data


async def test_frames_in_any_pieces() -> None:
    stream, server = _connected()
    sent = (
        _frame(2, b"\1")
        + _frame(2, b"\1be", last=False)
        + _frame(9, b"are you there")
        + _frame(0, b"gun", last=True)
        + _frame(1, b"\2as text")
        + _frame(2, b"\1" + b"x" * 70_000)
        + _frame(2, b"\xff\1")
        + _frame(2, b'\3{"status":"Success"}')
    )
    rng = random.Random(0)
    with server:
        async with anyio.create_task_group() as tasks:

            async def send() -> None:
                rest = sent
                while rest:
                    size = rng.choice([1, 1, 2, 3, 50_000])
                    await anyio.wait_writable(server)
                    server.sendall(rest[:size])
                    rest = rest[size:]
                    await anyio.lowlevel.checkpoint()

            tasks.start_soon(send)
            assert await stream.receive() == (1, b"begun")
            assert await stream.receive() == (2, b"as text")
            assert await stream.receive() == (1, b"x" * 70_000)
            assert await stream.receive() is None
        assert await stream.exit_code() == 0
        server.setblocking(False)
        pong = server.recv(1000)
        assert (pong[0], pong[1]) == (0x8A, 0x80 | len(b"are you there"))
        await stream.aclose()


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\x82\x81maskx",
        b"\xf2\x01\x01",
        b"\x82\x7f" + b"\xff" * 8,
        _frame(8, b""),
        b"\x82\x05\1cut",
        b"",
    ],
)
async def test_a_server_that_speaks_nonsense_or_goes_is_the_end(nonsense: bytes) -> None:
    stream, server = _connected()
    server.sendall(nonsense)
    server.close()
    assert await stream.receive() is None
    assert await stream.exit_code() is None
    await stream.aclose()


@pytest.mark.parametrize(
    ("status", "code", "complaint"),
    [
        (b"no json", None, b"no json\n"),
        (b'{"status":"Failure","message":"OOM killed"}', 126, b"OOM killed\n"),
        (b'{"status":"Failure","message":"stat /x: no such file or directory"}', 127, None),
        (
            b'{"status":"Failure","reason":"NonZeroExitCode",'
            b'"details":{"causes":[{"reason":"ExitCode","message":"42"}]}}',
            42,
            b"",
        ),
    ],
)
async def test_what_a_status_says(status: bytes, code: int | None, complaint: bytes | None) -> None:
    stream, server = _connected()
    with server:
        server.sendall(_frame(2, b"\3" + status))
        _, err, ended = await told(stream)
    assert ended == code
    assert complaint is None or err == complaint


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate", folder / "key"
    make = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    make += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=test"]
    make += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([openssl, *make], check=True, capture_output=True)
    return certificate, key


async def test_over_tls(certified: tuple[Path, Path], tmp_path: Path) -> None:
    with FakeCluster(tls=certified) as cluster:
        authority = {"certificate-authority": str(certified[0])}
        config = cluster.kubeconfig(tmp_path / "config", **authority)
        data = random.Random(0).randbytes(300_000)
        async with running(KubernetesHost(kubeconfig=config)) as pod:
            stream = await pod.open(["head", "-c", str(len(data))])
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stream.send, data)
                assert (await told(stream))[0] == data
        stranger = cluster.kubeconfig(tmp_path / "stranger")
        with pytest.raises(SandboxError, match="CERTIFICATE_VERIFY_FAILED"):
            async with running(KubernetesHost(kubeconfig=stranger, patience_s=0.1)):
                pass


async def test_from_a_pod_of_the_cluster(
    certified: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "namespace").write_text("ours")
    account = "kubernetes.config.incluster_config.SERVICE"
    monkeypatch.setattr(f"{account}_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(f"{account}_CERT_FILENAME", str(certified[0]))
    monkeypatch.setattr(
        "gymllm.sandbox.kubernetes_client._IN_POD_NAMESPACE", tmp_path / "namespace"
    )
    with FakeCluster(tls=certified) as cluster:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(cluster.port))
        async with running(KubernetesHost()) as pod:
            assert await run(pod, "echo on") == b"on\n"
            assert cluster.bodies()[0]["metadata"]["namespace"] == "ours"


async def test_a_proxy_is_no_api(cluster: FakeCluster, host: KubernetesHost) -> None:
    """A connection that closes without an answer is told as such."""
    async with running(replace(host, patience_s=0.1)) as pod:
        cluster.refusals.append(("GET exec", Refusal(502, "", "<html>Bad gateway</html>")))
        cluster.refusals.append(("GET exec", Refusal(502, "", "<html>Bad gateway</html>")))
        with pytest.raises(SandboxError, match="Bad gateway"):
            await pod.open(["true"])
