"""Sandboxes in containers of Docker, or of Podman, whose socket speaks the same API.

The `docker` SDK makes the calls, in threads: no more than a few, pulls apart from the others. What runs in
a container is then read and fed from the event loop, by the connection of its exec alone: thousands of
shells need no thread. Containers and snapshots carry our name as a label; the next process that uses the
daemon from this machine removes those whose owner is gone.
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import platform
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, cast

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.lowlevel import RunVar

from gymllm.errors import (
    ConfigError,
    MissingExtraError,
    SandboxDiedError,
    SandboxError,
    SandboxStartError,
)
from gymllm.sandbox.docker_stream import DockerStream, take_socket
from gymllm.sandbox.interface import Limits, SandboxSpec
from gymllm.sandbox.remote import RemoteSandbox
from gymllm.sandbox.state import is_alive, owner_name

if TYPE_CHECKING:
    from gymllm.sandbox.docker_api import Api

Result = TypeVar("Result")

OWNER = "gymllm.owner"
MACHINE = "gymllm.machine"
_SNAPSHOTS = "localhost/gymllm-snapshot"
_CALLS_AT_ONCE = 16

# Process 1: a sh, for it takes in whoever loses its parents; ends after $1 seconds, if any. `sleep` may be
# killed from inside.
_STAY = """stay() { sleep "$1" || [ $? -gt 128 ] || exit 1; }
if [ "$1" = 0 ]; then while :; do stay 1000000; done; fi
end=$(($(date +%s) + $1))
while left=$((end - $(date +%s))); [ $left -gt 0 ]; do stay $left; done
"""


@dataclass(frozen=True, kw_only=True)
class DockerHost:
    """Which daemon, and how it is used."""

    url: str = ""
    """"unix:///run/docker.sock" or "tcp://host:port". Empty: DOCKER_HOST, or Docker's own default."""
    pull: Literal["missing", "never"] = "missing"
    """Whether images that aren't there are fetched."""
    starts_at_once: int = 8
    pulls_at_once: int = 2
    timeout_s: int = 120
    """For an answer to one call; pulls may be silent for as long."""
    capabilities: tuple[str, ...] = ()
    """Those that commands keep, such as "CHOWN": images whose scripts need root to be root."""
    runtime: str = ""
    """The daemon's runtime, such as "runsc"; empty: its default."""

    def __post_init__(self) -> None:
        for name in ("starts_at_once", "pulls_at_once", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"DockerHost.{name} must be > 0, got {getattr(self, name)}.")
        if self.url and not self.url.startswith(("unix://", "tcp://", "http://")):
            raise ConfigError(
                f"DockerHost.url must begin with unix:// or tcp://, got {self.url!r}. For a host behind "
                "ssh or TLS forward its socket: ssh -L /tmp/docker.sock:/run/docker.sock HOST."
            )


async def open_docker(spec: SandboxSpec, host: DockerHost) -> RemoteSandbox:
    """Starts a sandbox in a container of its own; `open_sandbox` calls it.

    Raises:
        MissingExtraError: The SDK isn't installed.
        SandboxStartError: No daemon answers, or it refuses; says what.
    """

    async def start(spec: SandboxSpec) -> DockerContainer:
        return await (await _daemon(host)).start(spec)

    sandbox = RemoteSandbox(spec, "docker", start)
    await sandbox.start()
    return sandbox


def machine_name() -> str:
    """Of this boot and process namespace, in which our pids mean something: clients share daemons."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return platform.node()


class DockerContainer:
    """A `Container` of a daemon."""

    def __init__(self, daemon: Daemon, name: str, limits: Limits) -> None:
        self._daemon, self.name, self.limits = daemon, name, limits

    async def open(self, argv: Sequence[str], *, tty: bool = False) -> DockerStream:
        def begin() -> DockerStream:
            made = self._daemon.api.exec_create(
                self.name, list(argv), stdin=True, stdout=True, stderr=True, tty=tty
            )
            started = self._daemon.api.exec_start(made["Id"], socket=True, tty=tty)
            return DockerStream(take_socket(started), self._exec_api(made["Id"]), tty=tty)

        try:
            return await self._daemon.call(begin)
        except SandboxError as problem:
            if not await self.alive():
                raise SandboxDiedError(f"The container {self.name} is gone.") from problem
            raise

    def _exec_api(self, exec_id: str) -> ExecApi:
        return ExecApi(self._daemon, exec_id)

    async def alive(self) -> bool:
        def running() -> bool:
            found = self._daemon.or_none(lambda: self._daemon.api.inspect_container(self.name))
            return found is not None and bool(
                cast("dict[str, object]", found["State"]).get("Running")
            )

        return await self._daemon.call(running)

    async def commit(self) -> str:
        return await self._daemon.call(functools.partial(self._daemon.commit, self.name))

    def discard(self, image: str) -> None:
        self._daemon.remove_image(image)

    async def remove(self) -> None:
        await self._daemon.call(functools.partial(self._daemon.remove_container, self.name))


class ExecApi:
    """What a stream asks of its exec."""

    def __init__(self, daemon: Daemon, exec_id: str) -> None:
        self._daemon, self._id = daemon, exec_id

    async def exit_code(self) -> int | None:
        found = None
        with suppress(SandboxError):  # its container is being removed
            found = await self._daemon.call(
                lambda: self._daemon.or_none(lambda: self._daemon.api.exec_inspect(self._id))
            )
        if found is None or found.get("Running"):
            return None
        return cast("int | None", found.get("ExitCode"))

    async def resize(self, rows: int, columns: int) -> None:
        await self._daemon.call(
            lambda: self._daemon.api.exec_resize(self._id, height=rows, width=columns)
        )


@dataclass
class _Waiting:
    """Who waits for what, in one event loop."""

    calls: anyio.CapacityLimiter
    starts: anyio.CapacityLimiter
    pulls: anyio.CapacityLimiter
    pulling: dict[str, anyio.Lock]


_waiting: RunVar[dict[DockerHost, _Waiting]] = RunVar("gymllm_docker")


class Daemon:
    """A daemon, as this process uses it. Its own methods block; `call` them."""

    def __init__(self, host: DockerHost, api: Api) -> None:
        self.host, self.api = host, api
        self.pid = os.getpid()
        self._labels = {OWNER: owner_name(self.pid), MACHINE: machine_name()}
        self._info = self.tried(api.info)
        self._images: set[str] = set()
        """Known to be there."""
        self._containers: set[str] = set()
        self._snapshots: set[str] = set()
        self.reap()
        atexit.register(self.remove_all)

    # From the event loop

    async def call(self, function: Callable[[], Result]) -> Result:
        """Runs it in a thread. Not cancelled midway: what it makes is handed over."""
        return await anyio.to_thread.run_sync(
            functools.partial(self.tried, function), limiter=self._here().calls
        )

    async def start(self, spec: SandboxSpec) -> DockerContainer:
        """Starts a container; the image is there by then, fetched once for all who want it."""
        here = self._here()
        for again in (False, True):
            await self._fetch(spec.image, here)
            async with here.starts:
                container = await self._start(spec)
            if container is not None:
                return container
            self._images.discard(spec.image)  # somebody has removed it
            if again:
                break
        raise SandboxStartError(f"The image {spec.image!r} goes away as soon as it is there.")

    async def _start(self, spec: SandboxSpec) -> DockerContainer | None:
        name = f"gymllm-{secrets.token_hex(8)}"
        try:
            if not await self.call(functools.partial(self._create, spec, name)):
                return None
            config = await self.call(functools.partial(self._run, name))
        except BaseException as problem:
            with anyio.CancelScope(shield=True), suppress(SandboxError):
                await self.call(functools.partial(self.remove_container, name))
            if isinstance(problem, SandboxError):
                hint = "" if '"sh"' not in str(problem) else " Images need a POSIX sh on PATH."
                raise SandboxStartError(
                    f"A container of {spec.image!r}: {problem}.{hint}"
                ) from problem
            raise
        return DockerContainer(self, name, self._limits(spec, config))

    async def _fetch(self, image: str, here: _Waiting) -> None:
        if image in self._images:
            return
        async with here.pulling.setdefault(image, anyio.Lock()):
            if image in self._images:
                return
            try:
                there = await self.call(lambda: self.or_none(lambda: self.api.inspect_image(image)))
            except SandboxError as problem:
                raise SandboxStartError(f"The image {image!r}: {problem}") from problem
            if there is None:
                if self.host.pull == "never":
                    raise SandboxStartError(
                        f"The image {image!r} isn't on the daemon and DockerHost.pull is 'never': "
                        f"fetch it with `docker pull {image}`."
                    )
                await anyio.to_thread.run_sync(
                    functools.partial(self._pull, image), limiter=here.pulls, abandon_on_cancel=True
                )
            self._images.add(image)

    def _here(self) -> _Waiting:
        try:
            all_hosts = _waiting.get()
        except LookupError:
            all_hosts: dict[DockerHost, _Waiting] = {}
            _waiting.set(all_hosts)
        if self.host not in all_hosts:
            all_hosts[self.host] = _Waiting(
                anyio.CapacityLimiter(_CALLS_AT_ONCE),
                anyio.CapacityLimiter(self.host.starts_at_once),
                anyio.CapacityLimiter(self.host.pulls_at_once),
                {},
            )
        return all_hosts[self.host]

    # Blocking

    def tried(self, function: Callable[[], Result]) -> Result:
        """The SDK's errors as ours."""
        from gymllm.sandbox.docker_api import api_errors

        try:
            return function()
        except api_errors() as problem:
            said = getattr(problem, "explanation", None) or problem
            raise SandboxError(f"the daemon says: {str(said).strip()}") from problem

    def or_none(self, function: Callable[[], Result]) -> Result | None:
        """None for what isn't there."""
        from gymllm.sandbox.docker_api import not_found

        try:
            return function()
        except not_found():
            return None

    def _create(self, spec: SandboxSpec, name: str) -> bool:
        memory = spec.memory_mb << 20
        options = self.api.create_host_config(
            binds={
                str(mount.source.resolve()): {"bind": mount.target, "mode": "ro"}
                for mount in spec.mounts
            },
            cap_add=list(self.host.capabilities),
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            network_mode="none",
            mem_limit=memory,
            memswap_limit=memory,
            pids_limit=spec.pids,
            nano_cpus=int(spec.cpus * 1e9),
            tmpfs={"/tmp": f"size={spec.file_mb}m,mode=1777,exec"},
            runtime=self.host.runtime or None,
        )
        wall_s = math.ceil(spec.wall_s) if spec.wall_s is not None else 0
        self._containers.add(name)
        made = self.or_none(
            lambda: self.api.create_container(
                spec.image,
                name=name,
                entrypoint=["sh", "-c", _STAY, "gymllm"],
                command=[str(wall_s)],
                working_dir=spec.workdir,
                user=spec.user or None,
                hostname="sandbox",
                labels=self._labels,
                host_config=options,
            )
        )
        if made is None:
            self._containers.discard(name)
        return made is not None

    def _run(self, name: str) -> dict[str, object]:
        self.api.start(name)
        return cast("dict[str, object]", self.api.inspect_container(name)["HostConfig"])

    def _pull(self, image: str) -> None:
        from gymllm.sandbox.docker_api import name_and_tag

        name, tag = name_and_tag(image)
        why = ""
        try:
            for line in self.tried(lambda: self.api.pull(name, tag=tag, stream=True, decode=True)):
                why = str(line.get("error") or why)
        except (SandboxError, OSError) as problem:
            why = str(problem)
        if why:
            raise SandboxStartError(
                f"The image {image!r} can't be fetched: {why}. Is its name right, and does the daemon "
                f"reach its registry? `docker pull {image}` tries again."
            )

    def commit(self, name: str) -> str:
        """An image of the container, with its labels."""
        tag = secrets.token_hex(8)
        image = f"{_SNAPSHOTS}:{tag}"
        self._snapshots.add(image)
        self.api.commit(name, repository=_SNAPSHOTS, tag=tag)
        self._images.add(image)
        return image

    def remove_image(self, image: str) -> None:
        self.tried(lambda: self.or_none(lambda: self.api.remove_image(image, force=True)))
        self._images.discard(image)
        self._snapshots.discard(image)

    def remove_container(self, name: str) -> None:
        """Kills what runs in it, too."""
        if name not in self._containers:
            return
        try:
            self.tried(
                lambda: self.or_none(lambda: self.api.remove_container(name, v=True, force=True))
            )
        except SandboxError as problem:
            if "already in progress" not in str(problem):  # somebody else removes it
                raise
        self._containers.discard(name)

    def remove_all(self) -> None:
        """What is left at the end of this process."""
        if os.getpid() != self.pid:
            return
        for name in tuple(self._containers):
            with suppress(SandboxError):
                self.tried(functools.partial(self.remove_container, name))
        for image in tuple(self._snapshots):
            with suppress(SandboxError):
                self.remove_image(image)
        self.api.close()

    def reap(self) -> None:
        """Removes what owners on this machine that are gone have left."""
        ours = {"label": f"{MACHINE}={self._labels[MACHINE]}"}
        for container in self.tried(lambda: self.api.containers(all=True, filters=ours)):
            if _is_left(container):
                with suppress(SandboxError):
                    found = str(container["Id"])
                    self.tried(
                        lambda found=found: self.api.remove_container(found, v=True, force=True)
                    )
        for image in self.tried(lambda: self.api.images(filters=ours)):
            if _is_left(image):
                with suppress(SandboxError):
                    found = str(image["Id"])
                    self.tried(lambda found=found: self.api.remove_image(found, force=True))

    def _limits(self, spec: SandboxSpec, config: dict[str, object]) -> Limits:
        """By what the daemon has noted of the container, and says that it can."""
        lacks = ["a limit on the disk, outside /tmp", "layers, hidden folders"]

        def enforced(field: str, able: Sequence[str], text: str, lack: str) -> str:
            if config.get(field) and any(self._info.get(name) for name in able):
                return text
            lacks.append(lack)
            return ""

        options = cast("list[str]", self._info.get("SecurityOptions") or [])
        seccomp = any("seccomp" in option for option in options)
        if not seccomp:
            lacks.append("a filter of system calls")
        kept = ", ".join(self.host.capabilities) or "no"
        return Limits(
            memory=enforced(
                "Memory",
                ("MemoryLimit",),
                f"{spec.memory_mb} MB, all processes, /tmp included (control group)",
                "a limit on memory",
            ),
            pids=enforced(
                "PidsLimit",
                ("PidsLimit",),
                f"{spec.pids} (control group)",
                "a limit on processes",
            ),
            cpus=enforced(
                "NanoCpus",
                ("CpuCfsQuota", "CPUCfsQuota"),
                f"{spec.cpus:g} of a core's time (control group)",
                "a limit on CPU",
            ),
            files=f"/tmp: {spec.file_mb} MB (tmpfs)",
            network="none: a network namespace of its own",
            syscalls=f"{kept} capabilities, no new privileges"
            + (", the daemon's seccomp filter" if seccomp else ""),
            lacks=tuple(lacks),
        )


def _is_left(labelled: dict[str, object]) -> bool:
    labels = cast("dict[str, str]", labelled.get("Labels") or {})
    return not is_alive(labels.get(OWNER, ""))


_daemons: dict[tuple[DockerHost, str], Daemon] = {}
_connecting = threading.Lock()


async def _daemon(host: DockerHost) -> Daemon:
    url = host.url or os.environ.get("DOCKER_HOST", "")
    known = _daemons.get((host, url))
    if known is not None and known.pid == os.getpid():
        await anyio.lowlevel.checkpoint()
        return known
    return await anyio.to_thread.run_sync(_connect, host, url)


def _connect(host: DockerHost, url: str) -> Daemon:
    try:
        from gymllm.sandbox.docker_api import connect
    except ImportError as problem:
        raise MissingExtraError(
            'Sandboxes of kind "docker" need the SDK: pip install "gymllm[docker]".'
        ) from problem
    with _connecting:  # one reaper
        known = _daemons.get((host, url))
        if known is None or known.pid != os.getpid():
            try:
                known = Daemon(host, connect(url, host.timeout_s))
            except SandboxError as problem:
                where = url or "Docker's default socket, unix:///var/run/docker.sock"
                raise SandboxStartError(
                    f"No Docker or Podman answers at {where}: {problem}. Start one (`systemctl start "
                    "docker`, or `podman system service --time=0 unix:///tmp/podman.sock`) and name its "
                    "socket in DOCKER_HOST or DockerHost(url=...)."
                ) from problem
            _daemons[host, url] = known
        return known
