"""Released source trees, from the source distributions of the package index that pip is set up for.

`pip download` of a source distribution runs its build to learn its dependencies; here nothing of it runs.
"""

from __future__ import annotations

import functools
import hashlib
import html
import io
import json
import os
import re
import ssl
import subprocess
import sys
import tarfile
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import cast

from gymllm.errors import ConfigError, EnvError
from gymllm_envs.swe.making.cache import cache_folder, folder_once
from gymllm_envs.swe.making.packages import Package, package_named

_LEFTOVERS = (".git", ".hg", ".svn", "__pycache__", ".pytest_cache", ".hypothesis", ".mypy_cache")


def tree(sdist: str) -> Path:
    """The folder with a package's source distribution, as it was released.

    Downloaded at first use; then kept. Nobody may write to it.

    Args:
        sdist: "name==version", of `PACKAGES`.

    Raises:
        UnknownNameError: No such package.
        ConfigError: Another version than the pinned one, or no "name==version".
        EnvError: It can't be downloaded, or isn't the pinned file.
    """
    name, equals, version = sdist.partition("==")
    if not equals:
        raise ConfigError(f'sdist must be "name==version", got {sdist!r}.')
    package = package_named(name)
    if version != package.version:
        raise ConfigError(
            f"Tasks of {name} {version} need another gymllm-envs: this one knows {package.sdist}. "
            "Make the tasks anew with gymllm-swe-tasks make."
        )
    folder = cache_folder() / "trees" / f"{package.name}-{package.version}"
    return folder_once(folder, lambda new: _unpack(package, _download(package), new))


def _unpack(package: Package, data: bytes, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            for member in archive:
                parts = Path(member.name).parts
                if not (member.isfile() or member.isdir()) or {*parts} & {*_LEFTOVERS}:
                    continue  # links: none of the packages needs one
                if member.name.endswith((".pyc", ".pyo", ".so")):
                    continue
                member.mode = 0o755 if member.isdir() else 0o644
                archive.extract(member, scratch, filter="data")
        (top,) = Path(scratch).iterdir()
        for entry in top.iterdir():
            entry.rename(folder / entry.name)
    if package.needs_metadata:
        # As an installation would: the package asks importlib.metadata for its version.
        about = folder / package.source_root / f"{package.name}-{package.version}.dist-info"
        about.mkdir(exist_ok=True)
        (about / "METADATA").write_bytes((folder / "PKG-INFO").read_bytes())


def _download(package: Package) -> bytes:
    try:
        data = _fetch(package)
    except (OSError, ValueError, HTTPException) as error:
        raise EnvError(
            f"The source distribution {package.sdist} can't be downloaded ({error}). Check the network, "
            "or name a package index that this machine reaches: pip config set global.index-url URL."
        ) from error
    got = hashlib.sha256(data).hexdigest()
    if got != package.sha256:
        raise EnvError(
            f"The source distribution {package.sdist} has sha256 {got}, expected {package.sha256}. The "
            "index serves another file: don't use it, and try the public one."
        )
    return data


def _fetch(package: Package) -> bytes:
    page = f"{_index()}/{re.sub(r'[-_.]+', '-', package.name).lower()}/"
    accept = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
    with _open(page, {"Accept": accept}) as response:
        body = response.read().decode()
        is_json = "json" in response.headers.get("content-type", "")
    if is_json:
        files = cast(list[dict[str, str]], json.loads(body)["files"])
        found = {file["filename"]: file["url"] for file in files}
    else:  # older indices speak only HTML
        links = re.findall(r'<a[^>]+href="([^"]+)"[^>]*>\s*([^<]+?)\s*</a>', body)
        found = {html.unescape(name): html.unescape(url) for url, name in links}
    if package.archive not in found:
        raise ValueError(f"{page} lists no {package.archive}")
    with _open(urllib.parse.urljoin(page, found[package.archive])) as response:
        return response.read()


def _open(url: str, headers: Mapping[str, str] | None = None) -> HTTPResponse:
    if not url.startswith(("https://", "http://")):
        raise ValueError(f"{url} is not an http address")
    certificates = os.environ.get("PIP_CERT") or _pip_config().get("cert")
    context = ssl.create_default_context(cafile=certificates or None)
    request = urllib.request.Request(url, headers=dict(headers or {}))
    return cast(HTTPResponse, urllib.request.urlopen(request, timeout=30, context=context))


def _index() -> str:
    index = os.environ.get("PIP_INDEX_URL") or _pip_config().get("index-url")
    if not index:
        index = _said("-c", "from pip._internal.models.index import PyPI; print(PyPI.simple_url)")
    if not index:
        raise ValueError(f"{sys.executable} has no pip, which knows the package index")
    return index.strip().rstrip("/")


@functools.cache
def _pip_config() -> dict[str, str]:
    """What pip's configuration files say, by key."""
    lines = re.findall(
        r"^(?:global|download)\.([\w-]+)='(.*)'$", _said("-m", "pip", "config", "list"), re.M
    )
    return dict(lines)


def _said(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout if done.returncode == 0 else ""
