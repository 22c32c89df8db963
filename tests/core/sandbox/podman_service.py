"""A Podman of our own to test against: its API socket, its storage, an image made of this machine's files."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sandbox_helpers import processes_with

from gymllm.sandbox.state import is_alive, owner_name

IMAGE = "localhost/gymllm-test"
PLAIN_IMAGE = "localhost/gymllm-plain"
"""Without bash, setsid and tar."""
EMPTY_IMAGE = "localhost/gymllm-empty"
_TOOLS = (
    *("sh", "env", "cat", "head", "mkdir", "mv", "rm", "ls", "stat", "sleep", "wc", "ps", "grep"),
    *("sort", "true", "echo", "mkfifo", "ln", "yes", "chmod", "id", "touch", "tee", "stty", "tty"),
    *("date", "dd", "cut", "seq", "kill"),
)
_MORE_TOOLS = ("bash", "setsid", "tar")
_CONTAINERS_CONF = """[containers]
default_ulimits = ["nofile=20000:20000", "nproc=8192:8192"]
netns = "none"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
exit_command_delay = 1
"""
_START_TIMEOUT_S = 20.0


def why_not() -> str:
    """Why there can be no Podman here; empty if there can."""
    if sys.platform != "linux":
        return "Podman's service runs on Linux"
    if os.getuid() != 0:
        return "Podman's service is tested as root"
    for program in ("podman", "runc"):
        if shutil.which(program) is None:
            return f"{program} isn't installed: apt-get install podman runc"
    for tool in _TOOLS + _MORE_TOOLS:
        if shutil.which(tool, path="/usr/bin:/bin") is None:
            return f"the test's image is made of this machine's programs; there is no {tool}"
    return ""


@contextmanager
def podman_service() -> Iterator[str]:
    """Its socket's address; kills and removes everything at the end."""
    for old in Path(tempfile.gettempdir()).glob("gp-*-*-*"):  # of tests that were killed
        if not is_alive("-".join(old.name.split("-")[1:3])):
            _clear(old)
    # Short: a socket's path is bounded.
    folder = Path(tempfile.mkdtemp(prefix=f"gp-{owner_name(os.getpid())}-"))
    (folder / "containers.conf").write_text(_CONTAINERS_CONF)
    storage = f'[storage]\ndriver = "{{}}"\ngraphroot = "{folder}/root"\nrunroot = "{folder}/run"\n'
    env = {
        **os.environ,
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        "TMPDIR": str(folder),
    }
    try:
        for driver in ("overlay", "vfs"):
            (folder / "storage.conf").write_text(storage.format(driver))
            works = subprocess.run(["podman", "info"], env=env, capture_output=True, check=False)
            if works.returncode == 0:
                break
            shutil.rmtree(folder / "root", ignore_errors=True)
        address = f"unix://{folder}/s"
        with (folder / "log").open("wb") as log:
            service = subprocess.Popen(
                ["podman", "system", "service", "--time=0", address],
                env=env,
                cwd=folder,  # conmon notes here that a container ran out of memory
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            ends = time.monotonic() + _START_TIMEOUT_S
            while not (folder / "s").exists():
                if service.poll() is not None or time.monotonic() > ends:
                    raise RuntimeError((folder / "log").read_text()[-2000:])
                time.sleep(0.02)
            make_images(address)
            yield address
        finally:
            subprocess.run(
                ["podman", "rm", "--all", "--force", "--time", "0"],
                env=env,
                capture_output=True,
                check=False,
            )
            os.killpg(service.pid, signal.SIGKILL)
            service.wait()
    finally:
        _clear(folder)


def make_images(address: str) -> None:
    """From this machine's own programs and their libraries: no registry is asked."""
    import docker

    api = docker.APIClient(base_url=address)
    try:
        for image, tools in (
            (EMPTY_IMAGE, ()),
            (PLAIN_IMAGE, _TOOLS),
            (IMAGE, _TOOLS + _MORE_TOOLS),
        ):
            api.import_image_from_data(_root_of(tools), repository=image, tag="latest")
    finally:
        api.close()


def _root_of(tools: tuple[str, ...]) -> bytes:
    files: dict[str, str] = {}
    for tool in tools:
        path = shutil.which(tool, path="/usr/bin:/bin")
        assert path is not None, tool
        files[f"bin/{tool}"] = os.path.realpath(path)
        needs = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
        for library in re.findall(r"(/\S+\.so\S*)", needs):
            files[library.lstrip("/")] = os.path.realpath(library)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, mode in (("tmp", 0o1777), ("root", 0o700), ("etc", 0o755), ("srv", 0o777)):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, mode
            tar.addfile(folder)
        users = b"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/srv:/bin/sh\n"
        passwd = tarfile.TarInfo("etc/passwd")
        passwd.size = len(users)
        tar.addfile(passwd, io.BytesIO(users))
        for name, path in files.items():
            entry = tar.gettarinfo(path, arcname=name)
            entry.uid = entry.gid = 0
            entry.mode = 0o755
            with open(path, "rb") as file:
                tar.addfile(entry, file)
    return packed.getvalue()


def _clear(folder: Path) -> None:
    """Podman's monitors clean up a second after a container's end, and would mount it all again."""
    while pids := processes_with(str(folder)):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for path in sorted((path for path in mounted if path.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "-l", path], check=False)
    shutil.rmtree(folder, ignore_errors=True)
