"""`Editor`: views and changes the text files of a sandbox, for models that edit by commands."""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import posixpath
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from gymllm.errors import ConfigError, SandboxFileError
from gymllm.sandbox.clip import clip, spell_out
from gymllm.sandbox.interface import FileEntry, Sandbox
from gymllm.sandbox.text_file import MOST_PLACES, TextFile

MAX_EDIT_BYTES = 4 * 1024 * 1024
"""Largest file that is viewed or changed."""
HISTORY_BYTES = 16 * 1024 * 1024
"""Of what files held before, all together; the oldest goes first."""
AROUND = 4
"""Lines shown before and after a change."""
_MOST_ENTRIES = 300
_MOST_INSIDE = 50
_NOT_LISTED = ("__pycache__", "node_modules")
_WHERE = 'f=$(readlink -f -- "$1") && printf "%s" "$f" && stat -L -c "/%a" -- "$f" 2>/dev/null'


class EditError(Exception):
    """What was asked can't be done; the message is for the model."""


@dataclass(frozen=True)
class _Before:
    """What a file held before a change, and what it was changed to."""

    path: str
    data: bytes | None
    """None: it wasn't there."""
    mode: int
    after: bytes
    """Its SHA-256."""


@final
class Editor:
    """Commands of an editor on a sandbox's files. Single owner; nothing to close.

    Paths are relative to `root` or absolute, inside of the sandbox. Lines are numbered from 1. Files are
    UTF-8 text; others are refused. Line ends (LF or CRLF) and modes are kept; a link's file is changed, not
    the link. Each command answers with a text for the model, of about `max_chars` characters at most.
    """

    def __init__(
        self, sandbox: Sandbox, *, root: str | None = None, max_chars: int = 16_000
    ) -> None:
        """Takes a sandbox, which it doesn't close.

        Args:
            sandbox: Where the files are.
            root: What relative paths begin at; None: its `workdir`.
            max_chars: Longest answer, in characters, >= 200; what is longer is clipped.
        """
        if max_chars < 200:
            raise ConfigError(f"An editor's max_chars must be >= 200, got {max_chars}.")
        self._sandbox, self._max_chars = sandbox, max_chars
        self._root = sandbox.workdir if root is None else root
        self._history: deque[_Before] = deque()
        self._history_bytes = 0

    async def view(self, path: str, view_range: Sequence[int] | None = None) -> str:
        """A file's lines with their numbers, or what a folder holds, two levels deep.

        Args:
            path: Of a file or folder.
            view_range: First and last line, from 1, both included; -1 is the file's last.

        Raises:
            EditError: There is none, it can't be read, or has no such lines.
            SandboxDiedError: The sandbox is gone.
        """
        where = self._absolute(path)
        try:
            data = await self._sandbox.read(where, max_bytes=MAX_EDIT_BYTES)
        except SandboxFileError as error:
            if error.errno != errno.EISDIR:
                raise await self._refused(path, error) from error
            if view_range is not None:
                raise EditError(f"{_named(path)} is a folder; view_range is for files.") from None
            return await self._folder(path, where)
        file = _decoded(path, data)
        lines = file.lines
        if not lines:
            return f"{_named(path)} is empty."
        first, last = self._range(path, view_range, len(lines))
        return self._numbered(lines, first, last)

    async def create(self, path: str, file_text: str) -> str:
        """Writes a file, in place of what was there.

        Raises:
            EditError: It can't be written.
            SandboxDiedError: The sandbox is gone.
        """
        where, mode = await self._place(path)
        before = None
        if mode is not None:
            try:
                before = await self._sandbox.read(where, max_bytes=MAX_EDIT_BYTES)
            except SandboxFileError as error:
                raise await self._refused(path, error) from error
        data = _encoded(file_text)
        await self._change(path, where, before, data, 0o644 if mode is None else mode)
        lines = _count(len(TextFile(file_text).lines), "line")
        if before is None:
            return f"Wrote {_named(path)}, {lines}."
        return f"Wrote {_named(path)}, {lines}, over what it held before."

    async def str_replace(self, path: str, old_str: str, new_str: str = "") -> str:
        """Puts another text in the place of one that is in the file exactly once.

        Raises:
            EditError: It isn't there, or more than once; or the file can't be changed.
            SandboxDiedError: The sandbox is gone.
        """
        where, mode, data, file = await self._open(path)
        old, new = old_str.replace("\r\n", "\n"), new_str.replace("\r\n", "\n")
        if not old:
            raise EditError("old_str is empty; give the text to replace, or use insert.")
        if old == new:
            raise EditError("old_str and new_str are the same; nothing was changed.")
        places = file.places(old)
        if not places:
            why = spell_out(file.why_not_there(old))
            raise EditError(clip(f"old_str is not in {_named(path)}. {why}", self._max_chars))
        if len(places) > 1:
            numbers = ", ".join(dict.fromkeys(str(file.line_of(place)) for place in places))
            more = " or more" if len(places) == MOST_PLACES else ""
            raise EditError(
                f"old_str is in {_named(path)} {len(places)}{more} times, at lines {numbers}; it must be "
                "there once. Add lines before or after it."
            )
        start = places[0]
        changed = file.replaced(start, start + len(old), new)
        await self._change(path, where, data, _encoded(changed.raw), mode)
        return self._changed(path, changed, start, start + len(new))

    async def insert(self, path: str, insert_line: int, insert_text: str) -> str:
        """Puts lines behind the line of a number; behind 0 is before the first.

        Raises:
            EditError: There is no such line, or the file can't be changed.
            SandboxDiedError: The sandbox is gone.
        """
        where, mode, data, file = await self._open(path)
        lines = file.lines
        if not 0 <= insert_line <= len(lines):
            raise EditError(
                f"insert_line must be from 0 to {len(lines)}, the lines of {_named(path)}, got "
                f"{insert_line}."
            )
        if not insert_text:
            raise EditError("insert_text is empty; nothing was changed.")
        at = min(sum(len(line) + 1 for line in lines[:insert_line]), len(file.text))
        new = insert_text.replace("\r\n", "\n")
        new = new if new.endswith("\n") else f"{new}\n"
        open_end = at > 0 and file.text[at - 1] != "\n"  # the last line has no end
        added = f"\n{new[:-1]}" if open_end else new
        changed = file.replaced(at, at, added)
        await self._change(path, where, data, _encoded(changed.raw), mode)
        start = at + open_end
        return self._changed(path, changed, start, start + len(new) - 1)

    async def undo_edit(self, path: str) -> str:
        """Takes back this editor's last change of a file, as often as there are changes.

        Raises:
            EditError: There is none, or something else has changed the file since.
            SandboxDiedError: The sandbox is gone.
        """
        where, mode = await self._place(path)
        last = next((one for one in reversed(self._history) if one.path == where), None)
        if last is None:
            raise EditError(f"There is no change of {_named(path)} to take back.")
        now = None
        if mode is not None:
            with contextlib.suppress(SandboxFileError):
                now = await self._sandbox.read(where, max_bytes=MAX_EDIT_BYTES)
        if now is None or _digest(now) != last.after:
            raise EditError(
                f"{_named(path)} has been changed since by something else, so the last edit can't be "
                "taken back."
            )
        if last.data is None:
            await self._sandbox.exec(["rm", "-f", "--", where])
        else:
            await self._write(path, where, last.data, last.mode)
        self._history.remove(last)
        self._history_bytes -= len(last.data or b"")
        if last.data is None:
            return f"Took back the last edit: {_named(path)} is gone, as before."
        return f"Took back the last edit of {_named(path)}."

    def _absolute(self, path: str) -> str:
        if not path or "\0" in path:
            raise EditError("path must be the path of a file or folder, and is empty or has NULs.")
        return posixpath.normpath(posixpath.join(self._root, path))

    def _range(self, path: str, view_range: Sequence[int] | None, count: int) -> tuple[int, int]:
        if view_range is None:
            return 1, count
        if len(view_range) != 2:
            raise EditError(
                f"view_range must be [first, last], two line numbers, got {list(view_range)[:8]}."
            )
        first, last = view_range
        last = count if last == -1 else last
        if not 1 <= first <= count:
            raise EditError(
                f"view_range must begin from 1 to {count}, the lines of {_named(path)}, got {first}."
            )
        if last < first:
            raise EditError(f"view_range must not end before it begins, got {[first, last]}.")
        return first, min(last, count)

    async def _folder(self, path: str, where: str) -> str:
        try:
            entries, hidden = await self._entries(where)
        except SandboxFileError as error:
            raise await self._refused(path, error) from error
        shown: list[str] = []
        for entry in entries[:_MOST_ENTRIES]:
            shown.append(_entry(entry))
            if entry.kind != "directory" or len(shown) > _MOST_ENTRIES:
                continue
            inner: list[FileEntry] = []
            with contextlib.suppress(SandboxFileError):  # unreadable: its name is enough
                inner, unseen = await self._entries(posixpath.join(where, entry.name))
                hidden += unseen
            inside = [f"{_text(entry.name)}/{_entry(one)}" for one in inner[:_MOST_INSIDE]]
            if len(inner) > _MOST_INSIDE:
                inside.append(f"{_text(entry.name)}/ ... {len(inner) - _MOST_INSIDE} more")
            shown += inside
        if len(entries) > _MOST_ENTRIES:
            shown.append(f"... {len(entries) - _MOST_ENTRIES} more")
        note = f"; {hidden} hidden ones not shown" if hidden else ""
        return clip("\n".join([f"{_named(path)}, two levels{note}:", *shown]), self._max_chars)

    async def _entries(self, where: str) -> tuple[list[FileEntry], int]:
        """What a folder holds, and how much else is hidden."""
        entries = await self._sandbox.list(where)
        seen = [entry for entry in entries if not _is_hidden(entry)]
        return seen, len(entries) - len(seen)

    async def _place(self, path: str) -> tuple[str, int | None]:
        """A file's own place, links followed, and its mode; None if there is nothing."""
        where = self._absolute(path)
        found = await self._sandbox.exec(["sh", "-c", _WHERE, "sh", where], timeout_s=10.0)
        answer = bytes(found.stdout).decode("utf-8", "surrogateescape")
        if found.exit_code not in (0, 1):
            raise EditError(
                f"{_named(path)} can't be looked up: the sandbox answers {found.exit_code}."
            )
        if not answer:  # a folder on the way is missing, or is none; reading or writing says which
            return where, None
        if found.exit_code != 0:
            return answer, None
        real, _, mode = answer.rpartition("/")
        return real, int(mode, 8)

    async def _open(self, path: str) -> tuple[str, int, bytes, TextFile]:
        where, mode = await self._place(path)
        try:
            data = await self._sandbox.read(where, max_bytes=MAX_EDIT_BYTES)
        except SandboxFileError as error:
            raise await self._refused(path, error) from error
        return where, 0o644 if mode is None else mode, data, _decoded(path, data)

    async def _change(
        self, path: str, where: str, before: bytes | None, after: bytes, mode: int
    ) -> None:
        """Writes a file and remembers what it held."""
        if len(after) > MAX_EDIT_BYTES:
            raise EditError(
                f"{_named(path)} would have {len(after)} bytes, more than the {MAX_EDIT_BYTES} that can be "
                "edited; nothing was changed."
            )
        await self._write(path, where, after, mode)
        self._history.append(_Before(where, before, mode, _digest(after)))
        self._history_bytes += len(before or b"")
        while self._history_bytes > HISTORY_BYTES:
            oldest = self._history.popleft()
            self._history_bytes -= len(oldest.data or b"")

    async def _write(self, path: str, where: str, data: bytes, mode: int) -> None:
        try:
            await self._sandbox.write(where, data, mode=mode)
        except SandboxFileError as error:
            raise await self._refused(path, error) from error

    async def _refused(self, path: str, error: SandboxFileError) -> EditError:
        """Why a file can't be read or written, for the model."""
        if error.errno == errno.EFBIG:
            return EditError(
                f"{_named(path)} is larger than the {MAX_EDIT_BYTES} bytes that can be viewed or edited; use "
                "a command."
            )
        if error.errno == errno.EISDIR:
            return EditError(f"{_named(path)} is a folder, not a file.")
        if error.errno == errno.EINVAL:
            return EditError(f"{_named(path)} is no regular file.")
        if error.errno != errno.ENOENT:
            said = error.strerror or "unknown error"
            return EditError(f"{_named(path)} can't be read or written: {said}.")
        parent, _, name = self._absolute(path).rpartition("/")
        names: list[str] = []
        with contextlib.suppress(SandboxFileError):
            names = [_text(entry.name) for entry in await self._sandbox.list(parent or "/")]
        near = difflib.get_close_matches(name[:100], names[:2000], n=2, cutoff=0.6)
        hint = f" Did you mean {' or '.join(map(_named, near))}?" if near else ""
        return EditError(f"There is no {_named(path)}.{hint} Relative paths begin at {self._root}.")

    def _changed(self, path: str, file: TextFile, start: int, end: int) -> str:
        lines = file.lines
        if not lines:
            return f"Changed {_named(path)}; it is empty now."
        first = max(file.line_of(start) - AROUND, 1)
        last = min(file.line_of(end) + AROUND, len(lines))
        shown = self._numbered(lines, min(first, last), last)
        return f"Changed {_named(path)}. Lines {min(first, last)} to {last} are now:\n{shown}"

    def _numbered(self, lines: list[str], first: int, last: int) -> str:
        """Some lines with their numbers, from 1; as many as fit, the first in any case."""
        shown: list[str] = []
        length = 0
        for number in range(first, last + 1):
            line = f"{number:6}\t{spell_out(lines[number - 1])}"
            length += len(line) + 1
            if length > self._max_chars:
                if not shown:
                    shown.append(clip(line, self._max_chars))
                    number += 1
                if number <= last:
                    cut = sum(len(line) + 1 for line in lines[number - 1 : last])
                    left = f"lines {number} to {last}" if number < last else f"line {last}"
                    shown.append(f"[... {left}, {cut} characters, left out; give a view_range ...]")
                break
            shown.append(line)
        return "\n".join(shown)


def _decoded(path: str, data: bytes) -> TextFile:
    if b"\0" in data:
        raise EditError(f"{_named(path)} is binary: it holds NULs.")
    try:
        return TextFile(data.decode())
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise EditError(
            f"{_named(path)} is not UTF-8, which is the only encoding that can be edited: its byte "
            f"{error.start}, in line {line}, is 0x{data[error.start]:02x}."
        ) from None


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise EditError(
            f"the text holds half of a surrogate pair at character {error.start}; nothing was changed."
        ) from None


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _is_hidden(entry: FileEntry) -> bool:
    return entry.name.startswith(".") or entry.name in _NOT_LISTED


def _entry(entry: FileEntry) -> str:
    mark = {"directory": "/", "link": "@"}.get(entry.kind, "")
    return f"{_text(entry.name)}{mark}"


def _text(name: str) -> str:
    """A file's name for reading: odd bytes and line breaks shown as such."""
    name = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return spell_out(name).replace("\n", "\\n")


def _named(path: str) -> str:
    return clip(_text(path), 300)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
