"""Search in the text files of a folder, ranked by BM25.

SQLite's FTS5 does the work: it comes with Python, ranks in C and reads nothing from the network. The
package bm25s was tried: where JAX is installed, importing it starts JAX's back end, which in a
trainer's process takes the accelerator's memory.
"""

from __future__ import annotations

import os
import re
import sqlite3
import stat
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from gymllm.clip import clip
from gymllm.errors import ConfigError
from gymllm_agents.tools.tool import Tool, ToolError

MOST_WORDS = 32
"""Of a query; the rest is not looked at."""
LONGEST_QUERY = 2000
_WORD = re.compile(r"\w+")
_BINARY_SAMPLE = 8192


@final
@dataclass(frozen=True, kw_only=True)
class _Settings:
    folder: Path
    passage_chars: int
    max_file_bytes: int


def local_search(
    folder: str | Path,
    *,
    k: int = 5,
    name: str = "search",
    description: str = "Searches a collection of documents for passages with the words of a query.",
    passage_chars: int = 800,
    max_file_bytes: int = 4_000_000,
    timeout_s: float | None = 10.0,
    max_result_chars: int = 8000,
) -> Tool:
    """Makes a tool that finds passages, with file name and line, in the text files below a folder.

    The files are read here, once: tools of the same folder share an index in memory while one of them
    is in use, and what changes in the files meanwhile is not seen. Words are compared without case,
    accents and English endings; text written without blanks, as Chinese is, is found by whole runs
    only. The order of the results depends on nothing but the files and the query. What is hidden,
    binary, not UTF-8 or too large is left out, and so are links that lead out of the folder.

    Args:
        folder: Searched with everything below.
        k: Most passages a result, >= 1.
        name: What the model calls it.
        description: What the model is told of it; best says what the documents are.
        passage_chars: Most characters of a passage, >= 40. Passages are whole lines, where those fit.
        max_file_bytes: Larger files are left out.
        timeout_s: As in `Tool`. None searches on the event loop.
        max_result_chars: As in `Tool`.

    Raises:
        ConfigError: No such folder, no text in it, or a setting out of range.
    """
    if k < 1:
        raise ConfigError(f"k of {name!r} must be >= 1, got {k}.")
    if passage_chars < 40:
        raise ConfigError(f"passage_chars of {name!r} must be >= 40, got {passage_chars}.")
    try:
        resolved = Path(folder).resolve(strict=True)
    except OSError as error:
        raise ConfigError(f"{str(folder)!r} can't be searched: {error.strerror}.") from error
    if not resolved.is_dir():
        raise ConfigError(f"{str(folder)!r} can't be searched: it is not a folder.")
    settings = _Settings(
        folder=resolved, passage_chars=passage_chars, max_file_bytes=max_file_bytes
    )
    # Made under the lock, so that episodes that begin together read the files once.
    with _LOCK:
        index = _INDEXES.get(settings)
        if index is None:
            index = _INDEXES[settings] = _Index(settings)

    def search(arguments: Mapping[str, object]) -> str:
        return index.search(str(arguments["query"]), k)

    return Tool(
        name=name,
        description=description,
        parameters={
            "type": "object",
            "properties": {"query": {"type": "string", "description": "Words to look for."}},
            "required": ["query"],
        },
        function=search,
        timeout_s=timeout_s,
        max_result_chars=max_result_chars,
    )


@final
class _Index:
    """The passages of a folder, in a database in memory."""

    def __init__(self, settings: _Settings) -> None:
        self._lock = threading.Lock()
        # Any thread may search, one at a time.
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        weakref.finalize(self, self._database.close)
        try:
            self._database.execute(
                "CREATE VIRTUAL TABLE passages USING fts5(file UNINDEXED, line UNINDEXED, text, "
                "tokenize = 'porter unicode61 remove_diacritics 2')"
            )
        except sqlite3.OperationalError as error:
            raise ConfigError(f"This Python's SQLite has no full-text search: {error}.") from error
        found = 0
        for path, text in _texts(settings):
            file = path.relative_to(settings.folder).as_posix()
            rows = [(file, line, said) for line, said in _passages(text, settings.passage_chars)]
            self._database.executemany("INSERT INTO passages VALUES (?, ?, ?)", rows)
            found += len(rows)
        if not found:
            raise ConfigError(
                f"{str(settings.folder)!r} has no text to search: no file in it is UTF-8 text of at "
                f"most {settings.max_file_bytes} bytes."
            )

    def search(self, query: str, k: int) -> str:
        """The best passages, each below its file and line.

        Raises:
            ToolError: No words in the query.
        """
        words = _WORD.findall(query[:LONGEST_QUERY])[:MOST_WORDS]
        if not words:
            raise ToolError("the query has no words to look for.")
        # Quoted, so that nothing in a query is taken for FTS5's own syntax.
        match = " OR ".join(f'"{word}"' for word in words)
        with self._lock:
            rows: list[tuple[str, int, str]] = self._database.execute(
                "SELECT file, line, text FROM passages WHERE passages MATCH ? "
                "ORDER BY bm25(passages), rowid LIMIT ?",
                (match, k),
            ).fetchall()
        if not rows:
            return f"Nothing found for: {clip(' '.join(words), 200)}"
        return "\n\n".join(f"{file}:{line}\n{text}" for file, line, text in rows)


_INDEXES: weakref.WeakValueDictionary[_Settings, _Index] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


def _texts(settings: _Settings) -> Iterator[tuple[Path, str]]:
    """The folder's text files in the order of their names."""
    for folder, folders, files in os.walk(settings.folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            if not name.startswith(".") and path.resolve().is_relative_to(settings.folder):
                text = _text(path, settings.max_file_bytes)
                if text:
                    yield path, text


def _text(path: Path, max_bytes: int) -> str:
    """A file's text; empty if it has none that could be searched."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > max_bytes:
            return ""  # a pipe would never end
        data = path.read_bytes()
        return "" if b"\0" in data[:_BINARY_SAMPLE] else data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return ""


def _passages(text: str, most: int) -> Iterator[tuple[int, str]]:
    """Pieces of at most `most` characters, each with the number of its first line.

    A piece ends at an empty line once it is half full, else before the line that does not fit.
    """
    piece: list[str] = []
    size = first = 0
    for number, line in enumerate(text.splitlines(), start=1):
        for start in range(0, len(line) or 1, most):
            part = line[start : start + most]
            if piece and (size + len(part) + 1 > most or (not part.strip() and size > most // 2)):
                yield first, "\n".join(piece)
                piece, size = [], 0
            if not piece and not part.strip():
                continue
            first = first if piece else number
            piece.append(part)
            size += len(part) + 1
    if piece:
        yield first, "\n".join(piece).rstrip()
