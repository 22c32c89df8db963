"""Patches are made and applied as git does it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymllm_envs.swe.patching import PatchError, apply_patch, make_patch

TEXTS = st.lists(
    st.sampled_from(["a\n", "b\n", "c\r\n", "\n", "d\x0c\n", " e\n", "-f\n"]), max_size=12
).map("".join)
TAILS = st.sampled_from(["", "tail"])


@given(TEXTS, TAILS, TEXTS, TAILS)
def test_applying_what_was_made_gives_what_it_was_made_of(
    old: str, old_tail: str, new: str, new_tail: str
) -> None:
    before, after = {"x/f": old + old_tail}, {"x/f": new + new_tail}
    patch = make_patch(before, after)
    assert {**before, **apply_patch(patch, before.get)} == after


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a\nb\n", "a\nc\nb"),
        ("a", "a\n"),
        (None, "new\n"),
        ("gone\n", None),
        ("", "x"),
        ("é\n", "è\n"),
    ],
)
def test_git_applies_them_alike(tmp_path: Path, old: str | None, new: str | None) -> None:
    if old is not None:
        (tmp_path / "f").write_bytes(old.encode())
    patch = make_patch({} if old is None else {"f": old}, {"f": new})
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch.encode(), check=True)
    there = (tmp_path / "f").read_bytes().decode() if (tmp_path / "f").exists() else None
    assert there == new


def test_hunks_that_have_moved_are_found() -> None:
    patch = make_patch({"f": "1\n2\n3\n4\nx\n5\n6\n"}, {"f": "1\n2\n3\n4\ny\n5\n6\n"})
    moved = "0\n" * 7 + "1\n2\n3\n4\nx\n5\n6\n"
    assert apply_patch(patch, {"f": moved}.get) == {"f": moved.replace("x", "y")}


def test_renames_move_the_text() -> None:
    patch = (
        "diff --git a/old.py b/new.py\nsimilarity index 50%\nrename from old.py\nrename to new.py\n"
        "--- a/old.py\n+++ b/new.py\n@@ -1 +1 @@\n-a\n+b\n"
    )
    assert apply_patch(patch, {"old.py": "a\n"}.get) == {"old.py": None, "new.py": "b\n"}


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        ("hello", "no unified diff"),
        ("@@ -1 +1 @@\n-a\n+b\n", "before it names a file"),
        ("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-z\n+b\n", "doesn't fit f"),
        ("--- a/g\n+++ b/g\n@@ -1 +1 @@\n-z\n+b\n", "g, which is not there"),
        ("--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n a\n", "cut short"),
        ("diff --git a/f b/f\nGIT binary patch\nliteral 3\n", "binary"),
    ],
)
def test_what_does_not_fit_is_said(patch: str, says: str) -> None:
    with pytest.raises(PatchError, match=says):
        apply_patch(patch, {"f": "a\n"}.get)
