"""A small package with a bug, so that tests need no download: its files, and the task that is made of it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import anyio

from gymllm_envs.swe.grading import working_canaries
from gymllm_envs.swe.making.packages import Package
from gymllm_envs.swe.patching import make_patch
from gymllm_envs.swe.task import SweTask

PACKAGE = Package(
    name="sample",
    version="1.0",
    sha256="",
    licence="MIT",
    source_root="src",
    sources=("sample",),
    tests=("tests",),
)
ONLY_IN_SOLUTION = "as-only-the-solution-says"
ONLY_IN_HIDDEN_TESTS = "as-only-hidden-tests-say"

_GOOD = f"""    stop = len(items)  # {ONLY_IN_SOLUTION}
    return [items[at : at + size] for at in range(0, stop, size)]
"""
_BAD = """    stop = len(items) - 1
    return [items[at : at + size] for at in range(0, stop, size)]
"""
_CHUNKS = (
    '''"""Cuts sequences into pieces."""


def chunks(items, size):
    """Pieces of `size` items; the last may be shorter."""
    if size < 1:
        raise ValueError(f"size must be >= 1, got {size}")
'''
    + _GOOD
)
_CHUNKS += '''

def flatten(nested):
    """One list of what is in the lists."""
    return [item for items in nested for item in items]
'''
_HIDDEN = f'''def test_chunks():
    """{ONLY_IN_HIDDEN_TESTS}"""
    assert chunks([1, 2, 3], 2) == [[1, 2], [3]]
    assert chunks([7], 1) == [[7]]


@pytest.mark.parametrize(("text", "pieces"), [("abc", ["ab", "c"]), ("a", ["a"])])
def test_chunks_of_text(text, pieces):
    assert chunks(text, 2) == pieces


'''
_HIDDEN_IN_CLASS = f'''
    def test_shares(self):
        """{ONLY_IN_HIDDEN_TESTS}"""
        self.assertEqual(Tally("aab").shares(2), [["a", "a"], ["b"]])
'''
FILES = {
    "README.md": "# sample\n\nCuts, counts and names.\n",
    "pyproject.toml": '[project]\nname = "sample"\nversion = "1.0"\n',
    "setup.cfg": "[tool:pytest]\naddopts = -ra\n",
    "src/sample/__init__.py": "from sample.chunks import chunks as chunks\n\n__version__ = '1.0'\n",
    "src/sample/chunks.py": _CHUNKS,
    "src/sample/tally.py": '''"""Counts things."""

from sample.chunks import chunks


class Tally:
    """How often each thing was there."""

    def __init__(self, items=()):
        self.items = list(items)

    def count(self, item):
        return self.items.count(item)

    def add(self, item):
        self.items.append(item)
        return self

    def shares(self, size):
        return chunks(sorted(self.items), size)

    def __len__(self):
        return len(self.items)
''',
    "src/sample/text.py": '''"""Names for files."""

import re


def slug(text, sep="-"):
    return re.sub(r"[^a-z0-9]+", sep, text.lower()).strip(sep)


def initials(text):
    return "".join(word[0] for word in text.split())
''',
    "tests/conftest.py": "import pytest\n\n\n@pytest.fixture\ndef unused():\n    return 1\n",
    "tests/helping.py": "def numbers(count):\n    return list(range(count))\n",
    "tests/test_chunks.py": f"""import pytest
from helping import numbers

from sample.chunks import chunks, flatten


{_HIDDEN}def test_chunks_needs_a_size():
    with pytest.raises(ValueError, match="got 0"):
        chunks([1], 0)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_flatten(count):
    assert flatten([numbers(count), [9]]) == [*numbers(count), 9]


def test_flatten_nothing():
    assert flatten([]) == []
""",
    "tests/test_tally.py": f"""import unittest

from sample.tally import Tally


class TestTally(unittest.TestCase):
    def setUp(self):
        self.tally = Tally("abba")

    def test_count(self):
        self.assertEqual(self.tally.count("a"), 2)
        self.assertEqual(self.tally.count("x"), 0)

    def test_add(self):
        self.assertEqual(self.tally.add("c").count("c"), 1)
        self.assertEqual(len(self.tally), 5)
{_HIDDEN_IN_CLASS}""",
    "tests/test_text.py": """from sample.text import initials, slug


class TestSlug:
    def test_words(self):
        assert slug("Hello, World!") == "hello-world"

    def test_separator(self):
        assert slug("a b", sep="_") == "a_b"

    def test_nothing(self):
        assert slug("!") == ""


def test_initials():
    assert initials("ab cd") == "ac"
""",
}
_FAILING = (
    "tests/test_chunks.py::test_chunks",
    "tests/test_chunks.py::test_chunks_of_text[abc-pieces0]",
    "tests/test_chunks.py::test_chunks_of_text[a-pieces1]",
    "tests/test_tally.py::TestTally::test_shares",
)
_PASSING = (
    "tests/test_chunks.py::test_chunks_needs_a_size",
    *(f"tests/test_chunks.py::test_flatten[{count}]" for count in (0, 1, 5)),
    "tests/test_tally.py::TestTally::test_count",
    "tests/test_text.py::TestSlug::test_words",
    "tests/test_text.py::test_initials",
)
MENDED = FILES["src/sample/chunks.py"]
FAULTY = MENDED.replace(_GOOD, _BAD)
MEND = "sed -i 's/len(items) - 1/len(items)/' src/sample/chunks.py"
"""A command that mends it."""


def write_package(folder: Path) -> None:
    """The package as released."""
    for path, text in FILES.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


def make_task() -> SweTask:
    """The task, its canaries tried out. Needs the package in its place."""
    chunks, tests, more = "src/sample/chunks.py", "tests/test_chunks.py", "tests/test_tally.py"
    hidden = {
        tests: FILES[tests].replace(_HIDDEN, ""),
        more: FILES[more].replace(_HIDDEN_IN_CLASS, ""),
    }
    assert FAULTY != MENDED
    assert not any(re.search(ONLY_IN_HIDDEN_TESTS, text) for text in hidden.values())
    task = SweTask(
        id="sample__chunks-1",
        repo="sample",
        problem_statement="chunks([7], 1) is empty: the last piece is lost when it has one item.",
        fail_to_pass=_FAILING,
        pass_to_pass=_PASSING,
        patch=make_patch({chunks: FAULTY}, {chunks: MENDED}),
        sdist=PACKAGE.sdist,
        bug_patch=make_patch({chunks: MENDED}, {chunks: FAULTY}),
        hide_patch=make_patch({path: FILES[path] for path in hidden}, hidden),
        timeout_s=20,
    )
    return dataclasses.replace(task, canaries=anyio.run(working_canaries, task))
