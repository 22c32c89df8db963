"""The editor: what models see, what changes, what is refused in which words."""

from __future__ import annotations

import random
import time

import pytest
from sandbox_helpers import said

from gymllm.errors import ConfigError, SandboxDiedError
from gymllm.sandbox import EditError, Editor
from gymllm.sandbox.editor import MAX_EDIT_BYTES
from gymllm.sandbox.local import LocalSandbox
from gymllm.sandbox.text_file import TextFile

pytestmark = pytest.mark.asyncio

FIVE = "one\ntwo\nthree\nfour\nfive\n"


@pytest.fixture
def editor(sandbox: LocalSandbox) -> Editor:
    return Editor(sandbox)


async def test_a_file_is_made_seen_changed_and_changed_back(
    editor: Editor, sandbox: LocalSandbox
) -> None:
    assert await editor.create("new/five.txt", FIVE) == "Wrote new/five.txt, 5 lines."
    assert await editor.view("new/five.txt", [2, 3]) == "     2\ttwo\n     3\tthree"
    assert (await editor.view("/workspace/new/five.txt")).splitlines()[-1] == "     5\tfive"
    changed = await editor.str_replace("new/five.txt", "three\n", "3\n3a\n")
    assert changed.splitlines()[:4] == [
        "Changed new/five.txt. Lines 1 to 6 are now:",
        "     1\tone",
        "     2\ttwo",
        "     3\t3",
    ]
    await editor.insert("new/five.txt", 0, "zero")
    assert await sandbox.read("new/five.txt") == b"zero\none\ntwo\n3\n3a\nfour\nfive\n"
    assert await editor.undo_edit("new/five.txt") == "Took back the last edit of new/five.txt."
    await editor.undo_edit("new/../new/five.txt")
    assert await sandbox.read("new/five.txt") == FIVE.encode()
    told = await editor.undo_edit("new/five.txt")
    assert told == "Took back the last edit: new/five.txt is gone, as before."
    with pytest.raises(EditError, match=r"There is no change of new/five\.txt to take back"):
        await editor.undo_edit("new/five.txt")
    assert await sandbox.list("new") == []


async def test_what_is_written_over_can_be_had_back(editor: Editor, sandbox: LocalSandbox) -> None:
    assert "over what it held before" in await editor.create("a.txt", "x")
    await editor.undo_edit("a.txt")
    assert await sandbox.read("a.txt") == b"from the base\n"


@pytest.mark.parametrize(
    ("before", "line", "text", "after"),
    [
        ("", 0, "a", "a\n"),
        ("a", 1, "b", "a\nb"),
        ("a\n", 1, "b\n", "a\nb\n"),
        ("a\nb", 1, "x\ny", "a\nx\ny\nb"),
        ("a\r\nb\r\n", 1, "x\ny", "a\r\nx\r\ny\r\nb\r\n"),
        ("a\r\nb", 2, "x\r\n", "a\r\nb\r\nx"),
        ("\n\n", 1, "x", "\nx\n\n"),
    ],
)
async def test_insert(
    editor: Editor, sandbox: LocalSandbox, before: str, line: int, text: str, after: str
) -> None:
    await sandbox.write("f", before.encode())
    await editor.insert("f", line, text)
    assert await sandbox.read("f") == after.encode()


async def test_line_ends_and_modes_stay(editor: Editor, sandbox: LocalSandbox) -> None:
    await sandbox.write("f", b"a\r\nb\r\nc\nd\r\n", mode=0o755)
    assert await editor.view("f") == "     1\ta\n     2\tb\n     3\tc\n     4\td"
    await editor.str_replace("f", "b\nc", "b1\nb2\nc")
    assert await sandbox.read("f") == b"a\r\nb1\r\nb2\r\nc\nd\r\n"
    (entry,) = [entry for entry in await sandbox.list() if entry.name == "f"]
    assert entry.mode == 0o755
    await editor.undo_edit("f")
    assert await sandbox.read("f") == b"a\r\nb\r\nc\nd\r\n"


async def test_a_links_file_is_changed(editor: Editor, sandbox: LocalSandbox) -> None:
    await said(sandbox, "mkdir d; echo one > d/real; ln -s d/real link; ln -s d dl")
    await editor.str_replace("link", "one", "two")
    await editor.str_replace("dl/real", "two", "three")
    assert await said(sandbox, "readlink link; cat d/real") == "d/real\nthree\n"
    await editor.undo_edit("d/real")
    await editor.undo_edit("link")
    assert await sandbox.read("d/real") == b"one\n"


async def test_a_change_from_elsewhere_is_not_undone(editor: Editor, sandbox: LocalSandbox) -> None:
    await editor.create("f", "a")
    await sandbox.write("f", b"b")
    with pytest.raises(EditError, match="has been changed since by something else"):
        await editor.undo_edit("f")
    assert await sandbox.read("f") == b"b"


async def test_undo_is_bounded(
    editor: Editor, sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gymllm.sandbox.editor.HISTORY_BYTES", 250)
    await editor.create("f", "x" * 100)
    for letter in "abcd":
        await editor.create("f", letter * 100)
    await editor.undo_edit("f")
    await editor.undo_edit("f")
    assert await sandbox.read("f") == b"b" * 100
    with pytest.raises(EditError, match="no change"):
        await editor.undo_edit("f")


CODE = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"


@pytest.mark.parametrize(
    ("old", "problem"),
    [
        ("(a, b):\n", "is in f 2 times, at lines 1, 5; it must be there once."),
        ("\treturn a + b", "But for blanks it is at line 2: copy the blanks exactly."),
        ("def sub(a,  b):\n  return a - b\n", "But for blanks it is at lines 5 to 6:"),
        ("     2\t    return a + b", "It is there without the line numbers"),
        (
            "def addd(a, b):",
            "The most similar lines, without the blanks around them:\n     1\tdef add(",
        ),
        ("class Nothing:", "No line is like it; view the file."),
        ("", "old_str is empty"),
    ],
)
async def test_a_text_that_is_not_there_once_is_explained(
    editor: Editor, sandbox: LocalSandbox, old: str, problem: str
) -> None:
    await sandbox.write("f", CODE.encode())
    with pytest.raises(EditError) as raised:
        await editor.str_replace("f", old, "x")
    assert problem in str(raised.value)
    assert await sandbox.read("f") == CODE.encode()


async def test_overlapping_places_are_several(editor: Editor) -> None:
    await editor.create("f", "aaa")
    with pytest.raises(EditError, match="2 times, at lines 1;"):
        await editor.str_replace("f", "aa", "b")
    with pytest.raises(EditError, match="the same; nothing was changed"):
        await editor.str_replace("f", "aaa", "aaa")


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (
            ("view", "a.tx"),
            r"There is no a.tx. Did you mean a.txt\? Relative paths begin at /workspace",
        ),
        (("view", "a.txt", [0, 1]), "must begin from 1 to 1, the lines of a.txt, got 0"),
        (("view", "a.txt", [2, 3]), "must begin from 1 to 1"),
        (("view", "a.txt", [1]), r"two line numbers, got \[1\]"),
        (("view", "five", [4, 2]), r"must not end before it begins, got \[4, 2\]"),
        (("view", "pkg", [1, 2]), "pkg is a folder; view_range is for files"),
        (("view", "a.txt/x"), "can't be read or written: Not a directory"),
        (("view", ""), "path must be the path of a file or folder"),
        (("view", "a\0b"), "has NULs"),
        (("view", "nul"), "nul is binary: it holds NULs"),
        (("view", "latin"), "latin is not UTF-8.*its byte 4, in line 2, is 0xe9"),
        (("view", "pipe"), "pipe is no regular file"),
        (("view", "big"), f"big is larger than the {MAX_EDIT_BYTES} bytes"),
        (("create", "pkg", "x"), "pkg is a folder"),
        (("create", "/usr/x", "x"), "can't be read or written"),
        (("create", "f", "x" * (MAX_EDIT_BYTES + 1)), "would have 4194305 bytes, more than"),
        (("create", "f", "\ud800"), "half of a surrogate pair at character 0"),
        (("str_replace", "nul", "a", "b"), "nul is binary"),
        (("str_replace", "nothing", "a", "b"), "There is no nothing"),
        (("insert", "five", 6, "x"), "insert_line must be from 0 to 5, the lines of five, got 6"),
        (("insert", "five", 1, ""), "insert_text is empty"),
        (("undo_edit", "five"), "There is no change of five to take back"),
    ],
)
async def test_what_cannot_be_done_is_said(
    editor: Editor, sandbox: LocalSandbox, command: tuple[object, ...], problem: str
) -> None:
    await sandbox.write("five", FIVE.encode())
    await sandbox.write("nul", b"a\0b")
    await sandbox.write("latin", b"abc\n\xe9\n")
    await said(sandbox, f"mkfifo pipe; truncate -s {MAX_EDIT_BYTES + 1} big")
    name, *arguments = command
    with pytest.raises(EditError, match=problem):
        await getattr(editor, str(name))(*arguments)


async def test_a_folder_is_listed_two_levels_deep(editor: Editor, sandbox: LocalSandbox) -> None:
    await said(
        sandbox,
        "mkdir -p .git many pkg/deep/er pkg/__pycache__; touch .x pkg/deep/c $'pkg/\\033[31m\\n'; "
        "ln -s a.txt link; cd many; touch $(seq 100 160)",
    )
    shown = (await editor.view(".")).splitlines()
    assert shown[0] == "., two levels; 3 hidden ones not shown:"
    assert shown[1:6] == ["a.txt", "link@", "many/", "many/100", "many/101"]
    assert "many/ ... 11 more" in shown
    assert shown[-4:] == ["pkg/", "pkg/\\x1b[31m\\n", "pkg/b.txt", "pkg/deep/"]


async def test_long_files_are_clipped_and_how_much_is_said(sandbox: LocalSandbox) -> None:
    editor = Editor(sandbox, max_chars=200)
    await sandbox.write("f", b"".join(b"line %d\n" % i for i in range(1000)))
    shown = await editor.view("f")
    assert len(shown) < 300
    assert shown.endswith("left out; give a view_range ...]")
    first = shown.count("\n") + 1
    assert f"[... lines {first} to 1000, " in shown
    await sandbox.write("g", b"x" * 5000)
    assert "[... 4807 characters left out ...]" in await editor.view("g")
    with pytest.raises(ConfigError, match="max_chars must be >= 200, got 10"):
        Editor(sandbox, max_chars=10)


async def test_views_hold_nothing_for_a_terminal(editor: Editor, sandbox: LocalSandbox) -> None:
    await sandbox.write("f", "\x1b]0;x\x07\r\u202e\n".encode())
    assert await editor.view("f") == "     1\t\\x1b]0;x\\x07\\x0d\\u202e"
    await sandbox.write("f", b"")
    assert await editor.view("f") == "f is empty."


async def test_a_sandbox_that_is_gone_is_no_edit_error(
    editor: Editor, sandbox: LocalSandbox
) -> None:
    await sandbox.aclose()
    with pytest.raises(SandboxDiedError):
        await editor.view("a.txt")


async def test_changes_at_random_are_those_of_a_list_of_lines() -> None:
    rng = random.Random(0)
    for _ in range(500):
        pieces = [rng.choice("abé") + rng.choice(["\n", "\r\n", "\r", ""]) for _ in range(8)]
        file = TextFile("".join(pieces))
        start = rng.randrange(len(file.text) + 1)
        end = rng.randrange(start, len(file.text) + 1)
        changed = file.replaced(start, end, "NEW")
        assert changed.text == f"{file.text[:start]}NEW{file.text[end:]}"
        assert changed.raw.replace("NEW", "").count("\r\n") <= file.raw.count("\r\n") + 1


async def test_a_miss_in_a_large_file_is_answered_quickly() -> None:
    rng = random.Random(0)
    lines = ["".join(rng.choices("abcdef (),=", k=150)) for _ in range(20_000)]
    began = time.process_time()
    assert TextFile("\n".join(lines)).why_not_there(lines[1][::-1])
    assert time.process_time() - began < 2  # 0.15 s on a slow core
