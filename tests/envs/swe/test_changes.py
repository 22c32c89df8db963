"""What of an overlay's upper folder counts, and layers that are made from it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gymllm_envs.swe.changes import (
    MAX_CHANGED_BYTES,
    MAX_CHANGED_FILES,
    Changes,
    Merged,
    patch_of,
    read_changes,
    why_left_out,
    write_layer,
)

HIDDEN = frozenset({"pkg/checks/a.py", "tests/test_a.py"})


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    for path in ("pkg/a.py", "pkg/sub/b.py", "pkg/sub/c.py", "tests/test_a.py", "pkg/checks/a.py"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f"# {path}\n")
    return folder


@pytest.fixture
def upper(tmp_path: Path) -> Path:
    folder = tmp_path / "upper"
    folder.mkdir()
    return folder


def whiteout(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mknod(path, stat.S_IFCHR, 0)


@pytest.mark.parametrize(
    "path",
    [
        *("tests/test_a.py", "tests/data.json", "pkg/test/x", "pkg/testing/x.py", "test_x.py"),
        *("pkg/x_test.py", "tests.py", "test.py", "conftest.py", "pkg/conftest.py", "x_tests.py"),
        *("pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "setup.py", "pyproject.toml"),
        *(
            "sitecustomize.py",
            "src/usercustomize.py",
            "x.pth",
            "pkg/a.pyc",
            "pkg/a.so",
            "x.egg-link",
        ),
        *(".git/config", "pkg/__pycache__/a.py", ".venv/x", "x.egg-info/PKG-INFO", "e.dist-info/x"),
        *("json.py", "src/json.py", "unittest/case.py", "pytest/__init__.py", "src/_pytest/x.py"),
        *("pluggy.py", "json.cpython-311.py", "pkg/checks/a.py", "pkg/checks", "pkg", "tests"),
        *("a\nb.py", "a\x1b.py", "\udcff.py", "a\u202eb.py"),
    ],
)
def test_left_out(path: str) -> None:
    assert why_left_out(path, HIDDEN)


@pytest.mark.parametrize(
    "path",
    [
        *("pkg/a.py", "pkg/json.py", "pkg/checks/b.py", "é.py", "a b.py", "README", "latest.py"),
        *("pkg/contest.py", "Conftest.py", "pkg/testament.py", "data/tests.json", "pkg/setup/x.py"),
        *("src/pkg/unittest/x.py", "-rf", "pkg/data.egg", "tests2/x.py"),
    ],
)
def test_counted(path: str) -> None:
    assert why_left_out(path, HIDDEN) == ""


def test_written_deleted_and_unchanged_files(base: Path, upper: Path) -> None:
    (upper / "pkg").mkdir()
    (upper / "pkg/a.py").write_text("new\n")
    (upper / "pkg/new.bin").write_bytes(b"\xff")
    (upper / "pkg/sub").mkdir()
    (upper / "pkg/sub/b.py").write_text("# pkg/sub/b.py\n")
    whiteout(upper / "pkg/sub/c.py")
    whiteout(upper / "pkg/never")
    whiteout(upper / "tests")
    changes = read_changes(upper, Merged(base), HIDDEN)
    assert changes.files == {"pkg/a.py": b"new\n", "pkg/new.bin": b"\xff", "pkg/sub/c.py": None}
    assert changes.left_out == {"tests/test_a.py": "a test"}
    assert not changes.refused


def test_a_folder_made_anew_deletes_what_was_in_it(base: Path, upper: Path) -> None:
    (upper / "pkg/sub").mkdir(parents=True)
    try:
        os.setxattr(upper / "pkg/sub", "user.overlay.opaque", b"y")
    except OSError:
        pytest.skip("this file system has no attributes of users")
    (upper / "pkg/sub/b.py").write_text("b\n")
    changes = read_changes(upper, Merged(base))
    assert changes.files == {"pkg/sub/b.py": b"b\n", "pkg/sub/c.py": None}


def test_links_pipes_and_odd_names(base: Path, upper: Path) -> None:
    (upper / "pkg").mkdir()
    (upper / "pkg/a.py").symlink_to("/etc/passwd")
    (upper / "pkg/sub").symlink_to("/etc")
    os.mkfifo(upper / "pkg/pipe")
    Path(os.fsdecode(os.fsencode(upper) + b"/\xff\n")).write_text("x")
    changes = read_changes(upper, Merged(base))
    assert changes.files == {}
    assert changes.left_out == {
        "pkg/a.py": "a link",
        "pkg/sub": "a link",
        "pkg/pipe": "no regular file",
        "\\udcff\\n": "a name that can't be written",
    }


def test_too_much(base: Path, upper: Path) -> None:
    with open(upper / "one", "wb") as file:
        file.truncate(MAX_CHANGED_BYTES + 1)
    assert read_changes(upper, Merged(base)).left_out == {"one": "too large"}
    for name in ("two", "three"):
        with open(upper / name, "wb") as file:
            file.truncate(MAX_CHANGED_BYTES // 2 + 1)
    assert "16 MB were changed" in read_changes(upper, Merged(base)).refused


def test_too_many(base: Path, upper: Path) -> None:
    for number in range(MAX_CHANGED_FILES + 1):
        (upper / str(number)).touch()
    assert "more than 2000 files" in read_changes(upper, Merged(base)).refused


def test_layers_over_a_base(base: Path, tmp_path: Path) -> None:
    write_layer({"pkg/a.py": b"1", "pkg/sub/b.py": None, "new/x": b"x"}, tmp_path / "one")
    write_layer({"pkg/a.py": b"2", "new/x": None}, tmp_path / "two")
    merged = Merged(base, (tmp_path / "one", tmp_path / "two"))
    assert merged.read("pkg/a.py") == b"2"
    assert merged.read("pkg/sub/b.py") is None
    assert merged.read("new/x") is None
    assert merged.text("pkg/sub/c.py") == "# pkg/sub/c.py\n"
    assert set(merged.files("pkg/sub")) == {"pkg/sub/c.py"}
    assert merged.read("pkg") is None
    assert merged.read("pkg/a.py/x") is None


def test_a_module_becomes_a_package_and_back(base: Path, tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    write_layer({"pkg/a.py": None, "pkg/a/__init__.py": b"x", "pkg/sub": b"now a file"}, layer)
    merged = Merged(base, (layer,))
    assert merged.read("pkg/a/__init__.py") == b"x"
    assert merged.read("pkg/sub") == b"now a file"
    assert merged.read("pkg/sub/b.py") is None


def test_patches_are_for_reading(base: Path) -> None:
    files = {"pkg/a.py": b"new\n", "pkg/new.bin": b"\xff", "pkg/sub/c.py": None}
    patch = patch_of(Changes(files=files), Merged(base))
    assert "-# pkg/a.py\n+new\n" in patch
    assert "+++ /dev/null" in patch
    assert "(binary file pkg/new.bin)\n" in patch
    long = patch_of(Changes(files={"x": b"y\n" * 200_000}), Merged(base))
    assert len(long) < 201_000
    assert "more characters" in long
