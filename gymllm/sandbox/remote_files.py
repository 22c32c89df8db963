"""Files of containers, by what any image has: `cat`, `head`, `stat`, `mkdir`, `mv`. And trees, by `tar`."""

from __future__ import annotations

import errno
import os
import re
import stat
import tarfile
from pathlib import Path
from typing import Literal

from gymllm.errors import SandboxFileError
from gymllm.sandbox.interface import FileEntry
from gymllm.sandbox.remote_programs import quoted

_AS_A_TOOL = b"export LC_ALL=C\n"
"""Its messages are read below."""

_READ = b"""path=%s
if [ -f "$path" ]; then
  size=$(wc -c <"$path") || exit 1
  if [ "$size" -gt %d ]; then echo "$size bytes: File too large" >&2; exit 1; fi
  exec head -c %d <"$path"
fi
[ ! -d "$path" ] || { echo "it: Is a directory" >&2; exit 1; }
stat -L -- "$path" >/dev/null || exit 1
echo "no regular file: Invalid argument" >&2
exit 1
"""

# Counted before it is put in place: the connection may end midway.
_WRITE = b"""path=%s
made=%s
folder=${path%%/*}
mkdir -p -- "${folder:-/}" || exit 1
[ -L "$path" ] || [ ! -d "$path" ] || { echo "it: Is a directory" >&2; exit 1; }
if cat >"$made" && chmod %o "$made" && [ "$(wc -c <"$made")" -eq %d ]; then
  [ ! -L "$path" ] || [ ! -d "$path" ] || rm -f -- "$path"
  mv -f -- "$made" "$path" && exit
fi
rm -f -- "$made"
exit 1
"""

# No name holds a slash: two of them enclose each, whatever else is in it. `set --` keeps the command lines
# short.
_LIST = b"""cd -- %s || exit 1
count=0
set --
for name in * .[!.]* ..?*; do
  [ -e "$name" ] || [ -L "$name" ] || continue
  count=$((count + 1))
  if [ $count -gt %d ]; then echo "more than %d entries: File too large" >&2; exit 1; fi
  set -- "$@" "$name"
  if [ $# = 200 ]; then stat -c '%%f %%s /%%n/' -- "$@"; set --; fi
done
[ $# = 0 ] || stat -c '%%f %%s /%%n/' -- "$@"
exit 0
"""
_LONGEST_NAME = 255
_OF_OTHER_LIBRARIES = {  # musl's
    "Symbolic link loop": errno.ELOOP,
    "Filename too long": errno.ENAMETOOLONG,
    "No such file": errno.ENOENT,  # dash
    "nonexistent directory": errno.ENOENT,
}


def check(path: str) -> None:
    """Refuses what no system would take.

    Raises:
        SandboxFileError: It is empty, holds a NUL byte, or a name in it is too long.
    """
    if "\0" in path or not path:
        raise SandboxFileError(errno.EINVAL, "not a path", path)
    if any(len(os.fsencode(name)) > _LONGEST_NAME for name in path.split("/")):
        raise SandboxFileError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)


def read(path: bytes, max_bytes: int) -> bytes:
    return _AS_A_TOOL + _READ % (quoted(path), max_bytes, max_bytes + 1)


def write(path: bytes, temporary: bytes, size: int, mode: int) -> bytes:
    return _AS_A_TOOL + _WRITE % (quoted(path), quoted(temporary), mode, size)


def list_folder(path: bytes, max_entries: int) -> bytes:
    return _AS_A_TOOL + _LIST % (quoted(path), max_entries, max_entries)


def pack(path: bytes) -> bytes:
    """The tree as a tar file to stdout."""
    return _AS_A_TOOL + b"exec tar -C %s -cf - .\n" % quoted(path)


def unpack(path: bytes, *, fresh: bool) -> bytes:
    """A tar file from stdin over the tree, or in its place. Whose files they were isn't asked."""
    empty = b"cd -- %s && rm -rf -- * .[!.]* ..?* && cd / || exit 1\n" if fresh else b"%.0s"
    return _AS_A_TOOL + empty % quoted(path) + b"exec tar -C %s -xof -\n" % quoted(path)


def entries(listed: bytes) -> list[FileEntry]:
    """By name, as the local sandbox lists them."""
    found = [
        FileEntry(
            name=os.fsdecode(name),
            kind=_kind(int(mode, 16)),
            size_bytes=int(size),
            mode=stat.S_IMODE(int(mode, 16)),
        )
        for mode, size, name in re.findall(rb"([0-9a-f]+) ([0-9]+) /([^/]+)/\n", listed)
    ]
    return sorted(found, key=lambda entry: entry.name)


def _kind(mode: int) -> Literal["file", "directory", "link", "other"]:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "directory"
    return "link" if stat.S_ISLNK(mode) else "other"


def problem(said: bytes, path: str) -> SandboxFileError:
    """From a tool's message, which ends in the system's words for an error."""
    lines = said.decode(errors="replace").strip().splitlines() or ["no answer"]
    for line in lines:
        words = line.rpartition(": ")[2]
        for number in errno.errorcode:
            if os.strerror(number) == words:
                return SandboxFileError(number, line.rpartition(": ")[0].rpartition(": ")[2], path)
        if words in _OF_OTHER_LIBRARIES:
            return SandboxFileError(_OF_OTHER_LIBRARIES[words], words, path)
    return SandboxFileError(errno.EIO, lines[-1], path)


def make_tar(folder: Path, to: Path) -> None:
    """A folder of the host, for `unpack`."""
    with tarfile.open(to, "w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(folder, arcname=".")
