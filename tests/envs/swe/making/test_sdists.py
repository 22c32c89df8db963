"""Source distributions: from the index that pip is set up for, checked, unpacked without running anything."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gymllm.errors import ConfigError, EnvError, UnknownNameError
from gymllm_envs.swe.making.packages import PACKAGES, Package
from gymllm_envs.swe.making.sdists import tree


def archive() -> bytes:
    """An sdist with what must not get out of it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as made:
        for name, data in (
            ("tiny-1.0/tiny.py", b"x = 1\n"),
            ("tiny-1.0/setup.py", b"raise SystemExit('ran')\n"),
            ("tiny-1.0/PKG-INFO", b"Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n"),
            ("tiny-1.0/.git/config", b"secret"),
            ("tiny-1.0/__pycache__/tiny.cpython-311.pyc", b"secret"),
        ):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o777
            made.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("tiny-1.0/passwd")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        made.addfile(link)
    return buffer.getvalue()


ARCHIVE = archive()
PAGES = {
    "json": lambda: json.dumps({"files": [{"filename": "tiny-1.0.tar.gz", "url": "../f/tiny.gz"}]}),
    "html": lambda: '<a href="../f/tiny.gz#sha256=0" data-x="1">tiny-1.0.tar.gz</a>',
    "other": lambda: json.dumps({"files": []}),
}


class Index(http.server.BaseHTTPRequestHandler):
    """A package index: /KIND/tiny/ is the package's page."""

    requests: list[str]

    def do_GET(self) -> None:
        self.server.seen.append(self.path)  # type: ignore[attr-defined]
        _, kind, what, *_ = self.path.split("/")
        body = ARCHIVE if what == "f" else PAGES[kind]().encode()
        self.send_response(200)
        is_json = kind != "html" and what != "f"
        media = "application/vnd.pypi.simple.v1+json" if is_json else "text/html"
        self.send_header("content-type", media)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[http.server.HTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index)
    server.seen = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("GYMLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/json")
    monkeypatch.setenv("PIP_CERT", "")
    monkeypatch.setattr("gymllm_envs.swe.making.sdists._pip_config", dict)
    use(monkeypatch, hashlib.sha256(ARCHIVE).hexdigest())
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def use(monkeypatch: pytest.MonkeyPatch, sha256: str) -> None:
    package = Package(
        name="tiny",
        version="1.0",
        sha256=sha256,
        licence="MIT",
        sources=("tiny",),
        tests=("tests",),
        needs_metadata=True,
    )
    monkeypatch.setitem(PACKAGES, "tiny", package)


@pytest.mark.parametrize("kind", ["json", "html"])
def test_tree_has_the_sources_and_nothing_else(
    index: http.server.HTTPServer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.server_port}/{kind}/")
    folder = tree("tiny==1.0")
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())
    assert files == ["PKG-INFO", "setup.py", "tiny-1.0.dist-info/METADATA", "tiny.py"]
    assert (folder / "tiny.py").stat().st_mode & 0o777 == 0o644
    assert folder.name == "tiny-1.0"


def test_many_at_once_download_it_once(index: http.server.HTTPServer) -> None:
    with ThreadPoolExecutor(6) as pool:
        folders = set(pool.map(tree, ["tiny==1.0"] * 6))
    assert len(folders) == 1
    assert tree("tiny==1.0") in folders
    assert len(index.seen) == 2  # type: ignore[attr-defined]  # the page and the file


def test_another_file_is_refused(
    index: http.server.HTTPServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(monkeypatch, "0" * 64)
    with pytest.raises(EnvError, match=r"sha256 .*, expected 0000"):
        tree("tiny==1.0")
    assert not [p for p in (tmp_path / "cache" / "swe" / "trees").iterdir() if p.is_dir()]


def test_a_file_that_the_index_lacks(
    index: http.server.HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.server_port}/other")
    with pytest.raises(EnvError, match=r"lists no tiny-1\.0\.tar\.gz.*pip config set"):
        tree("tiny==1.0")


def test_no_network_says_what_to_do(
    index: http.server.HTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(EnvError, match=r"tiny==1\.0 can't be downloaded .*Check the network"):
        tree("tiny==1.0")


def test_names_and_versions_that_are_not_known() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown package 'toolzz'.*Did you mean toolz"):
        tree("toolzz==1.0")
    with pytest.raises(ConfigError, match=r"this one knows toolz==\d"):
        tree("toolz==0.1")
    with pytest.raises(ConfigError, match="name==version"):
        tree("toolz")


def test_list_is_permissive_and_pinned() -> None:
    assert len(PACKAGES) >= 12
    for package in PACKAGES.values():
        assert package.licence in ("MIT", "BSD-3-Clause", "Apache-2.0", "PSF-2.0")
        assert len(package.sha256) == 64 or package.name in ("tiny", "sample")
        assert all("==" in requirement for requirement in package.requirements)
