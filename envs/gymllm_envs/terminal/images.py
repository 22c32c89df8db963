"""Images of tasks' Dockerfiles, built by the daemon that then runs them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from gymllm.errors import ConfigError, EnvError, MissingExtraError
from gymllm.sandbox.clip import clip
from gymllm_envs.terminal.task import TerminalTask

if TYPE_CHECKING:
    import docker


def build_image(task: TerminalTask, url: str) -> tuple[str, str]:
    """Has the daemon build a task's image; the image's name, and its work directory.

    Args:
        task: With a Dockerfile, whose folder is the context.
        url: The daemon's address; empty for what the environment says.

    Raises:
        ConfigError: It can't be built, or has no work directory.
        EnvError: The daemon doesn't answer.
        MissingExtraError: The SDK isn't installed.
    """
    try:
        import docker
        import docker.errors
    except ImportError as problem:
        raise MissingExtraError(
            'Containers need the docker SDK: pip install "gymllm[docker]".'
        ) from problem
    assert task.dockerfile is not None
    context = task.dockerfile.parent
    tag = f"localhost/gymllm-terminal:{hashlib.sha256(str(context).encode()).hexdigest()[:16]}"
    client = docker.DockerClient(base_url=url) if url else docker.from_env()  # pyright: ignore[reportUnknownMemberType]
    said: list[str] = []
    problem = ""
    try:
        # To the end, also after an error: the connection is only then given back.
        for row in _rows(client, context, task, tag):
            said.append(row.get("stream") or "")
            problem = problem or row.get("error") or ""
        workdir = "" if problem else _workdir(client, tag)
    except docker.errors.DockerException as error:
        raise EnvError(f"{task.dockerfile}: the daemon did not build it: {error}.") from error
    finally:
        client.close()  # pyright: ignore[reportUnknownMemberType]
    if problem:
        lines = clip("".join(said)[-1000:].strip(), 1000)
        raise ConfigError(f"{task.dockerfile}: it can't be built: {problem}\n{lines}")
    if workdir in ("", "/"):
        raise ConfigError(f"{task.dockerfile}: it has no WORKDIR; give it one.")
    return tag, workdir


def _rows(
    client: docker.DockerClient, context: Path, task: TerminalTask, tag: str
) -> Iterator[dict[str, str]]:
    assert task.dockerfile is not None
    return cast(
        "Iterator[dict[str, str]]",
        client.api.build(  # pyright: ignore[reportUnknownMemberType]
            path=str(context),
            dockerfile=task.dockerfile.name,
            tag=tag,
            rm=True,
            forcerm=True,
            decode=True,
            timeout=int(task.build_timeout_s),
        ),
    )


def _workdir(client: docker.DockerClient, tag: str) -> str:
    found = cast("dict[str, Any]", client.api.inspect_image(tag))  # pyright: ignore[reportUnknownMemberType]
    config = cast("dict[str, str]", found.get("Config") or {})
    return config.get("WorkingDir") or ""
