"""Copies an overlay's upper folder: a layer, with overlayfs' own marks for what was deleted or replaced.

The tree was written by whoever is in the sandbox and may change while it is copied. So every step opens
one name in an open folder and follows no link, and pipes and sockets are never opened.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import ExitStack, suppress
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CHUNK = 1 << 20
_MOST_LEVELS = 100
"""Two descriptors and two frames are held for each."""
_MOST_PATH_CHARS = 2000
"""The copy must be readable by its path."""
_MARKS = ("user.overlay.opaque", "user.overlay.whiteout", "user.overlay.whiteouts")


def copy_layer(
    source: Path, target: Path, *, max_bytes: int | None = None, held_bytes: int | None = None
) -> None:
    """Copies a tree, links as links, holes as holes, devices only where they mark a deletion.

    Args:
        source: The upper folder.
        target: A folder that doesn't exist yet.
        max_bytes: Most that is copied, each name counting for 1 KB beside what is in it.
        held_bytes: Most that the disk of the source can hold, a name for each 4 KB. Nobody can make the copy
            larger: by many names for one file, or by moving what was written to where we haven't been.

    Raises:
        OSError: The disk is full, a file is unreadable; EFBIG: there is more than `max_bytes`;
            ENAMETOOLONG: folders lie in folders without an end.
    """
    target.mkdir(mode=0o755)
    with ExitStack() as opened:
        top = os.open(source, _FOLDER)
        opened.callback(os.close, top)
        copied = os.open(target, _FOLDER)
        opened.callback(os.close, copied)
        _copy_folder(top, copied, _Room(max_bytes, held_bytes, copied))


class _Room:
    """How much may still be copied, and what has been, where it may come again."""

    def __init__(self, size_bytes: int | None, held_bytes: int | None, top: int) -> None:
        self._left = size_bytes
        self._held_left = held_bytes
        self._names_left = None if held_bytes is None else held_bytes // 4096
        self.top = top
        """The copy's folder."""
        self.linked: dict[tuple[int, int], str] = {}
        """Of files with several names: where in the copy the first of them is."""

    def take(self, size_bytes: int) -> None:
        """For a name, and for all that a file seems to hold."""
        if self._left is not None:
            self._left -= size_bytes
            if self._left < 0:
                raise OSError(errno.EFBIG, "more was written than may be copied")

    def take_name(self) -> None:
        self.take(1024)
        if self._names_left is not None:
            self._names_left -= 1
            if self._names_left < 0:
                raise OSError(errno.EFBIG, "more names came than there can be")

    def hold(self, size_bytes: int) -> None:
        """For what is in it indeed."""
        if self._held_left is not None:
            self._held_left -= size_bytes
            if self._held_left < 0:
                raise OSError(errno.EFBIG, "more was written meanwhile than there can be")


def _copy_folder(source: int, target: int, room: _Room, path: str = "") -> None:
    _copy_marks(source, target)
    if path.count("/") >= _MOST_LEVELS or len(path) > _MOST_PATH_CHARS:
        raise OSError(errno.ENAMETOOLONG, "folders lie too deep in folders to be copied")
    for name in os.listdir(source):
        with suppress(FileNotFoundError):  # gone meanwhile
            _copy_entry(source, target, f"{path}/{name}", os.lstat(name, dir_fd=source), room)


def _copy_entry(source: int, target: int, path: str, found: os.stat_result, room: _Room) -> None:
    name = path.rpartition("/")[2]
    room.take_name()
    kind = stat.S_IFMT(found.st_mode)
    if kind == stat.S_IFDIR:
        below = os.open(name, _FOLDER, dir_fd=source)
        try:
            os.mkdir(name, 0o700, dir_fd=target)
            copied = os.open(name, _FOLDER, dir_fd=target)
            try:
                _copy_folder(below, copied, room, path)
                os.fchmod(copied, stat.S_IMODE(found.st_mode))
                os.utime(copied, ns=(found.st_atime_ns, found.st_mtime_ns))
            finally:
                os.close(copied)
        finally:
            os.close(below)
    elif kind == stat.S_IFREG:
        _copy_file(source, target, path, room)
    elif kind == stat.S_IFLNK:
        os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
    elif kind == stat.S_IFCHR and found.st_rdev == 0:
        os.mknod(name, stat.S_IFCHR, 0, dir_fd=target)  # overlayfs: deleted here
    elif kind == stat.S_IFIFO:
        os.mkfifo(name, stat.S_IMODE(found.st_mode), dir_fd=target)


def _copy_file(source: int, target: int, path: str, room: _Room) -> None:
    name = path.rpartition("/")[2]
    fd = os.open(name, _FILE, dir_fd=source)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return
        file = (found.st_dev, found.st_ino)
        if first := room.linked.get(file):
            with suppress(OSError):  # EMLINK: so many names that it needs another copy
                os.link(first, name, src_dir_fd=room.top, dst_dir_fd=target)
                return
        room.take(found.st_size)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        copied = os.open(name, flags, 0o600, dir_fd=target)
        try:
            _copy_content(fd, copied, found.st_size, room)
            _copy_marks(fd, copied)
            os.fchmod(copied, stat.S_IMODE(found.st_mode) & 0o777)
            os.utime(copied, ns=(found.st_atime_ns, found.st_mtime_ns))
        finally:
            os.close(copied)
        if found.st_nlink > 1:
            room.linked[file] = path.lstrip("/")
    finally:
        os.close(fd)


def _copy_content(source: int, target: int, size: int, room: _Room) -> None:
    """A hole stays one: it takes nothing of the sandbox's disk, and shall take none of ours."""
    done = 0
    while done < size:
        try:
            start = os.lseek(source, done, os.SEEK_DATA)
            end = min(os.lseek(source, start, os.SEEK_HOLE), size)
        except OSError as problem:
            if problem.errno != errno.ENXIO:
                raise
            break  # a hole up to its end, or it was cut meanwhile
        os.lseek(source, start, os.SEEK_SET)
        os.lseek(target, start, os.SEEK_SET)
        done = start
        while done < end:
            room.hold(step := min(end - done, _CHUNK))
            sent = os.sendfile(target, source, None, step)
            if not sent:
                return
            done += sent
    os.ftruncate(target, size)


def _copy_marks(source: int, target: int) -> None:
    for name in _MARKS:
        with suppress(OSError):
            os.setxattr(target, name, os.getxattr(source, name))
