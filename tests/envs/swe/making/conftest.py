"""A package made on the spot, in a cache of its own, with the pytest of the tests themselves: no network."""

from __future__ import annotations

import functools
import subprocess
import sysconfig
from pathlib import Path

import pytest

from gymllm.sandbox.launch import bwrap_path
from gymllm_envs.swe.making.packages import PACKAGES, Package

SHAPES = '''"""Shapes."""


class Box:
    def __init__(self, width, height=1, *, filled=True):
        self.width, self.height, self.filled = width, height, filled

    def area(self):
        """Of the inside."""
        return self.width * self.height

    def fits(self, other):
        if not self.filled:
            return True
        return self.width >= other.width and self.height >= other.height


def total(boxes, start=0):
    for box in boxes:
        start += box.area()  # each
    return start


def largest(boxes):
    if not boxes:
        raise ValueError("no boxes")
    return sorted(boxes, key=Box.area)[-1]


def waits(n):
    while n > 0:
        n -= 1
    return n


def unreached(n):
    return n + 1
'''
TESTS = """import random
import pytest
from shapes import Box, largest, total, waits


def test_area():
    assert Box(2, 3).area() == 6
    assert Box(2).area() == 2


@pytest.mark.parametrize("sides, wanted", [((1, 1), True), ((3, 1), False), ((1, 3), False)])
def test_fits(sides, wanted):
    assert Box(2, 2).fits(Box(*sides)) is wanted


def test_empty_fits():
    assert Box(1, 1, filled=False).fits(Box(9, 9))


def test_total():
    assert total([Box(1, 2), Box(3, 4)]) == 14
    assert total([], 5) == 5


class TestLargest:
    def test_largest(self):
        assert largest([Box(1, 2), Box(3, 4), Box(2, 2)]).width == 3

    def test_none(self):
        with pytest.raises(ValueError):
            largest([])


def zero(n):
    assert n == 0


def test_waits():
    zero(waits(3))


def test_names():
    assert Box.__name__ == "Box"


def test_fails_always():
    assert False


def test_depends_on_the_hash_seed():
    assert list({"a", "b", "c", "d", "e", "f"})[0] == list({"a", "b", "c", "d", "e", "f"})[0]
    assert hash("gymllm") % 2 == 1
"""
SHAPES_PACKAGE = Package(
    name="shapes",
    version="1.0",
    sha256="",
    licence="MIT",
    sources=("shapes",),
    tests=("tests",),
)


@functools.cache
def why_not() -> str:
    """What bwrap says on a host that lets nobody make namespaces; empty where it runs."""
    argv = [bwrap_path(), "--unshare-all", "--ro-bind", "/", "/", "true"]
    tried = subprocess.run(argv, capture_output=True, text=True, check=False)
    return tried.stderr.strip() or "bwrap failed" if tried.returncode else ""


@pytest.fixture
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """The package, as if it had been downloaded."""
    if why_not():
        pytest.skip(f"bwrap can't run here: {why_not()}")
    folder = tmp_path / "cache" / "swe" / "trees" / "shapes-1.0"
    (folder / "tests").mkdir(parents=True)
    (folder / "shapes.py").write_text(SHAPES)
    (folder / "tests" / "test_shapes.py").write_text(TESTS)
    monkeypatch.setenv("GYMLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(PACKAGES, "shapes", SHAPES_PACKAGE)
    monkeypatch.setattr("gymllm_envs.swe.making.package_maker._BATCH", 2)
    site = Path(sysconfig.get_paths()["purelib"])
    for module in ("making.running", "trees"):
        monkeypatch.setattr(f"gymllm_envs.swe.{module}.site_folder", lambda extra=(): site)
    return SHAPES_PACKAGE
