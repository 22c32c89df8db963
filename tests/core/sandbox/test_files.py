"""read, write, list; snapshots and layers."""

# ruff: noqa: ASYNC240 - looking at the host takes no time

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from sandbox_helpers import said

from gymllm.errors import ConfigError, SandboxFileError
from gymllm.sandbox import Mount, SandboxSpec, Snapshot, open_sandbox
from gymllm.sandbox.local import LocalSandbox

pytestmark = pytest.mark.asyncio


async def test_write_read_list(sandbox: LocalSandbox) -> None:
    data = bytes(range(256)) * 1000
    await sandbox.write("new/deep/x.bin", data, mode=0o755)
    assert await sandbox.read("new/deep/x.bin") == data
    assert await sandbox.read("/workspace/a.txt") == b"from the base\n"
    (entry,) = await sandbox.list("new/deep")
    assert (entry.name, entry.kind, entry.size_bytes, entry.mode) == (
        "x.bin",
        "file",
        256_000,
        0o755,
    )
    names = [(entry.name, entry.kind) for entry in await sandbox.list()]
    assert names == [("a.txt", "file"), ("new", "directory"), ("pkg", "directory")]
    await sandbox.write("a.txt", b"")
    assert await sandbox.read("a.txt") == b""


@pytest.mark.parametrize("name", ["a b", "-rf", "ä\n", "\udcff\udc80", "'\"$x`", "*", "x" * 255])
async def test_odd_names(sandbox: LocalSandbox, name: str) -> None:
    await sandbox.write(f"odd/{name}", name.encode(errors="surrogateescape"))
    assert [entry.name for entry in await sandbox.list("odd")] == [name]
    assert await sandbox.read(f"odd/{name}") == os.fsencode(name)


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("none", errno.ENOENT),
        ("pkg", errno.EISDIR),
        ("a.txt/x", errno.ENOTDIR),
        ("loop", errno.ELOOP),
        ("pipe", errno.EINVAL),
        ("/dev/zero", errno.EINVAL),
        ("big", errno.EFBIG),
        ("", errno.EINVAL),
        ("a\0b", errno.EINVAL),
        ("y" * 300, errno.ENAMETOOLONG),
    ],
)
async def test_what_cannot_be_read(sandbox: LocalSandbox, path: str, number: int) -> None:
    await said(sandbox, "mkfifo pipe; ln -s loop loop; head -c 2000 /dev/zero > big")
    with pytest.raises(SandboxFileError) as caught:
        await sandbox.read(path, max_bytes=1000)
    assert caught.value.errno == number


async def test_what_cannot_be_written_or_listed(sandbox: LocalSandbox) -> None:
    for path, number in (("/usr/x", errno.EROFS), ("pkg", errno.EISDIR), ("a.txt/x", None)):
        with pytest.raises(SandboxFileError) as caught:
            await sandbox.write(path, b"x")
        assert number in (None, caught.value.errno)
    with pytest.raises(SandboxFileError) as caught:
        await sandbox.list("a.txt")
    assert caught.value.errno == errno.ENOTDIR
    with pytest.raises(SandboxFileError, match="more than 1"):
        await sandbox.list(".", max_entries=1)


async def test_a_full_disk_leaves_the_old_file(sandbox: LocalSandbox) -> None:
    await said(sandbox, "head -c 100M /dev/zero > fill")
    with pytest.raises(SandboxFileError) as caught:
        await sandbox.write("a.txt", b"x" * 100_000)
    assert caught.value.errno == errno.ENOSPC
    assert await sandbox.read("a.txt") == b"from the base\n"
    assert [entry.name for entry in await sandbox.list()] == ["a.txt", "fill", "pkg"]


async def test_links_lead_nowhere_outside(sandbox: LocalSandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    up = "../" * 30
    for path in (str(secret), up + str(secret)[1:], "link", "folder/secret", "up/" + str(secret)):
        await said(sandbox, f"ln -sfn {secret} link; ln -sfn {tmp_path} folder; ln -sfn {up} up")
        with pytest.raises(SandboxFileError):
            await sandbox.read(path)
    with pytest.raises(SandboxFileError):
        await sandbox.write("folder/secret", b"forged")
    with pytest.raises(SandboxFileError):
        await sandbox.list("folder")
    await sandbox.write("link", b"replaced")
    assert await sandbox.read("link") == b"replaced"
    assert secret.read_text() == "of the host"
    assert b"user:x:1000" in await sandbox.read("/etc/passwd")


async def test_the_base_is_never_changed(sandbox: LocalSandbox, base: Path) -> None:
    await said(sandbox, "rm -rf pkg; echo changed > a.txt; touch new; chmod 777 .")
    assert (base / "a.txt").read_text() == "from the base\n"
    assert sorted(path.name for path in base.rglob("*")) == ["a.txt", "b.txt", "pkg"]


async def test_snapshot_restore_and_fork(sandbox: LocalSandbox) -> None:
    await said(
        sandbox,
        "rm a.txt; rm -r pkg; mkdir pkg; echo c > pkg/c; ln -s /etc/passwd l; mkfifo p; chmod 755 pkg/c",
    )
    first = await sandbox.snapshot()
    await said(sandbox, "echo later > later; rm pkg/c; echo x > /tmp/x; sleep 100 &")
    shell = await sandbox.shell()
    await sandbox.restore(first)
    assert not shell.alive
    assert await said(sandbox, "ls . pkg; cat pkg/c; ls /tmp") == ".:\nl\np\npkg\n\npkg:\nc\nc\n"
    assert "sleep" not in await said(sandbox, "ps ax -o args | grep '[s]leep'")
    await said(sandbox, "echo second > second")
    second = await sandbox.snapshot()
    assert len(second.layers) == 2
    third = await sandbox.snapshot()
    third.discard()
    assert [layer.exists() for layer in third.layers] == [True, False]
    spec = SandboxSpec(base=second.base, layers=second.layers)
    async with await open_sandbox(spec) as other:
        assert await said(other, "ls; stat -c %a pkg/c") == "l\np\npkg\nsecond\n755\n"


async def test_a_snapshot_of_a_container_is_refused(sandbox: LocalSandbox) -> None:
    with pytest.raises(ConfigError, match="container's snapshot"):
        await sandbox.restore(Snapshot(base=None, image="x"))
    assert await said(sandbox, "cat a.txt") == "from the base\n"


async def test_layers_and_read_only_mounts(base: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(name)
    (tmp_path / "file").write_text("mounted")
    spec = SandboxSpec(
        base=base,
        layers=(tmp_path / "one", tmp_path / "two"),
        mounts=(Mount(source=tmp_path / "file", target="/opt/data/file"),),
        workdir="/repo/here",
        env={"TOKEN": "given"},
    )
    async with await open_sandbox(spec) as sandbox:
        script = "pwd; cat a.txt pkg/b.txt /opt/data/file; echo $TOKEN; echo x > /opt/data/file"
        shown = await said(sandbox, script)
    assert shown.startswith("/repo/here\ntwob\nmountedgiven\n")
    assert "Read-only" in shown


async def test_a_snapshot_takes_no_more_than_it_may(sandbox: LocalSandbox) -> None:
    await sandbox.exec(["sh", "-c", "head -c 300000 /dev/zero >big; truncate -s 90M hole"])
    with pytest.raises(SandboxFileError) as caught:
        await sandbox.snapshot(max_bytes=200_000)
    assert caught.value.errno == errno.EFBIG
    await sandbox.exec(["rm", "hole", "big"])
    (await sandbox.snapshot(max_bytes=200_000)).discard()
