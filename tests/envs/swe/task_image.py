"""An image as SWE-bench's are, made of this machine's own files, with small repositories in it.

    /testbed   the faulty tree; its git has the mended one in a later commit, in the reflog, under a tag
    /smith     the mended tree, as images of SWE-smith have it
    /r2e       the faulty tree, with its hidden tests in /r2e_tests and run_tests.sh

No registry is asked.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

NAME = "localhost/gymllm-swe-test"
SECRET = "a_word_of_the_solution_7392"
FAULTY = "def halve(n):\n    return n // 3\n\n\ndef double(n):\n    return 2 * n\n"
MENDED = FAULTY.replace("n // 3", f"n // 2  # {SECRET}")
TESTS = (
    "from halving.core import double, halve\n\n\ndef test_double():\n    assert double(4) == 8\n"
)
TESTS += "\n\ndef test_zero():\n    assert halve(0) == 0\n"
HIDDEN = f"{TESTS}\n\ndef test_seven():\n    assert halve(7) == 3\n"
HIDDEN += "\n\ndef test_nine():\n    assert halve(9) == 4\n"
_RUN_TESTS = "python -W ignore -m pytest -rA -p no:cacheprovider r2e_tests\n"

_TOOLS = (
    *("sh", "bash", "env", "cat", "head", "mkdir", "mv", "rm", "ls", "stat", "sleep", "wc", "ps"),
    *("grep", "sort", "true", "echo", "mkfifo", "ln", "yes", "chmod", "id", "touch", "tee", "tr"),
    *("date", "dd", "cut", "seq", "kill", "setsid", "tar", "git", "find", "sha256sum", "mktemp"),
    *("patch", "sed", "cp", "nohup", "truncate", "tail"),
)
_ENVIRONMENT = "opt/miniconda3/envs/testbed"
_PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py")
_LEFT_OUT = re.compile(
    r"/(test|tests|idlelib|tkinter|ensurepip|lib2to3|pydoc_data|turtledemo|site-packages|"
    r"config-[^/]*)(/|$)|\.a$|\.opt-\d\.pyc$"
)


def packed() -> bytes:
    """The image's files, as `docker import` takes them."""
    buffer = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, mode in ((".", 0o755), ("tmp", 0o1777), ("root", 0o700), ("etc", 0o755)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            tar.addfile(entry)
        _text(tar, "etc/passwd", "root:x:0:0:root:/root:/bin/sh\n")
        _add_programs(tar)
        _add_python(tar)
        root = Path(folder)
        _add_repository(tar, root / "testbed")
        (root / "r2e").mkdir()
        tree(root / "r2e", FAULTY, TESTS)
        (root / "r2e/run_tests.sh").write_text(_RUN_TESTS)
        tree(root / "smith", MENDED, HIDDEN)
        for name in ("r2e", "smith"):
            tar.add(root / name, arcname=name, filter=_root_owns)
        _text(tar, "r2e_tests/__init__.py", "")
        _text(tar, "r2e_tests/test_1.py", HIDDEN)
    return buffer.getvalue()


def tree(folder: Path, source: str, tests: str) -> None:
    """A small project."""
    (folder / "halving").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "halving/__init__.py").write_text("")
    (folder / "halving/core.py").write_text(source)
    (folder / "tests/test_core.py").write_text(tests)
    (folder / "tests/conftest.py").write_text("")
    (folder / "conftest.py").write_text("")


def _add_repository(tar: tarfile.TarFile, folder: Path) -> None:
    tree(folder, FAULTY, TESTS)

    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
        subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)

    git("init")
    git("add", "-A")
    git("commit", "-m", "base")
    git("tag", "v1.0")
    (folder / "halving/core.py").write_text(MENDED)
    git("commit", "-am", "mended")
    git("tag", "v1.1")
    git("branch", "future")
    git("reset", "--hard", "v1.0")
    git("gc")
    tar.add(folder, arcname="testbed", filter=_root_owns)


def _add_programs(tar: tarfile.TarFile) -> None:
    found = {tool: shutil.which(tool, path="/usr/local/bin:/usr/bin:/bin") for tool in _TOOLS}
    files = {f"bin/{tool}": os.path.realpath(path) for tool, path in found.items() if path}
    files[f"{_ENVIRONMENT}/bin/python3"] = os.path.realpath(sys.executable)
    extensions = Path(sys.base_prefix).glob("lib/python3.*/lib-dynload/*.so")
    for path in [*files.values(), *map(str, extensions)]:
        needs = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
        for library in re.findall(r"(/\S+\.so\S*)", needs):
            files[library.lstrip("/")] = os.path.realpath(library)
    for name, path in files.items():
        entry = tar.gettarinfo(path, arcname=name)
        entry.uid = entry.gid = 0
        entry.mode = 0o755
        entry.type, entry.linkname = tarfile.REGTYPE, ""
        entry.size = os.path.getsize(path)
        with open(path, "rb") as file:
            tar.addfile(entry, file)


def _add_python(tar: tarfile.TarFile) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = f"{_ENVIRONMENT}/lib/{version}"
    tar.add(Path(sys.base_prefix, "lib", version), arcname=library, filter=_kept)
    for package in _PACKAGES:
        found = importlib.util.find_spec(package)
        assert found is not None, package
        origin = Path(str(found.origin))
        source = origin.parent if origin.name == "__init__.py" else origin
        tar.add(source, arcname=f"{library}/site-packages/{source.name}", filter=_root_owns)
    pluggy = importlib.metadata.version("pluggy")  # pytest asks
    place = f"{library}/site-packages/pluggy-{pluggy}.dist-info/METADATA"
    _text(tar, place, f"Metadata-Version: 2.1\nName: pluggy\nVersion: {pluggy}\n")
    _text(
        tar,
        f"{_ENVIRONMENT}/bin/pytest",
        f"#!/{_ENVIRONMENT}/bin/python3\nimport pytest, sys\nsys.exit(pytest.main())\n",
    )
    link = tarfile.TarInfo(f"{_ENVIRONMENT}/bin/python")
    link.type, link.linkname = tarfile.SYMTYPE, "python3"
    tar.addfile(link)


def _text(tar: tarfile.TarFile, name: str, text: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(text.encode()), 0o755
    tar.addfile(entry, io.BytesIO(text.encode()))


def _kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if _LEFT_OUT.search(entry.name) else _root_owns(entry)


def _root_owns(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    entry.uid = entry.gid = 0
    return entry
