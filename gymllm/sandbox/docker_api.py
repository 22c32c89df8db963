"""The part of the `docker` SDK that is used, with types: it ships none. Importing this needs the SDK."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Protocol, cast

import docker  # pyright: ignore[reportMissingTypeStubs]  # it ships none
import docker.errors  # pyright: ignore[reportMissingTypeStubs]
import docker.utils  # pyright: ignore[reportMissingTypeStubs]
import requests

from gymllm.errors import SandboxError

_DEFAULT = "unix:///var/run/docker.sock"
Record = dict[str, object]


class Api(Protocol):
    """`docker.APIClient`."""

    def info(self) -> Record: ...
    def close(self) -> None: ...
    def create_host_config(self, **options: object) -> Record: ...
    def create_container(self, image: str, **options: object) -> Record: ...
    def start(self, container: str) -> None: ...
    def inspect_container(self, container: str) -> Record: ...
    def inspect_image(self, image: str) -> Record: ...
    def containers(self, *, all: bool, filters: dict[str, str]) -> list[Record]: ...
    def images(self, *, filters: dict[str, str]) -> list[Record]: ...
    def remove_container(self, container: str, *, v: bool, force: bool) -> None: ...
    def remove_image(self, image: str, *, force: bool) -> object: ...
    def commit(self, container: str, *, repository: str, tag: str) -> Record: ...
    def pull(
        self, repository: str, *, tag: str, stream: bool, decode: bool
    ) -> Iterable[Record]: ...
    def exec_create(
        self, container: str, cmd: list[str], *, stdin: bool, stdout: bool, stderr: bool, tty: bool
    ) -> dict[str, str]: ...
    def exec_start(self, exec_id: str, *, socket: bool, tty: bool) -> object: ...
    def exec_inspect(self, exec_id: str) -> Record: ...
    def exec_resize(self, exec_id: str, *, height: int, width: int) -> None: ...


def connect(url: str, timeout_s: int) -> Api:
    """A client of the daemon at this address, or at the SDK's default.

    Raises:
        SandboxError: Nobody answers there.
    """
    if (url or _DEFAULT).startswith("unix://"):
        # Asked without the SDK first, which leaves a socket open if nobody answers.
        try:
            with socket.socket(socket.AF_UNIX) as tried:
                tried.connect((url or _DEFAULT).removeprefix("unix://"))
        except OSError as problem:
            raise SandboxError(str(problem)) from problem
    try:
        client = docker.APIClient(base_url=url or None, version="auto", timeout=timeout_s)
    except api_errors() as problem:
        raise SandboxError(str(problem)) from problem
    return cast("Api", client)


def api_errors() -> tuple[type[Exception], ...]:
    return (docker.errors.DockerException, requests.exceptions.RequestException)


def not_found() -> type[Exception]:
    return docker.errors.NotFound


def name_and_tag(image: str) -> tuple[str, str]:
    name, tag = docker.utils.parse_repository_tag(image)
    return name, tag or "latest"
