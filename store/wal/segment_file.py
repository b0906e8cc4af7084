"""The file of a segment: made full of zeros, written at sectors through the page cache or past it, and flushed.

A group of few messages goes past the page cache, by one call that ends when it is on disk (O_DIRECT with O_DSYNC): a
write and an fdatasync have a thread that sends alone wait longer, a fifth of each send. Not every file system can do
that, nor every disk (one with sectors of 4 KiB): then it is written and flushed as larger groups are.
"""

import errno
import mmap
import os
import time
from pathlib import Path

from ..files.directory import InPlace, move
from ..files.system_calls import sync_data

SECTOR = 512
MOST_DIRECT_BYTES = 64 * 1024
_PIECE_BYTES = 1024 * 1024
"""Bytes that one call writes of a new file: one call for all of a large one takes several times as long."""


def make_file(path: Path, head: bytes, size: int) -> None:
    """Make a file of zeros behind a head, so that no write has the file system allocate blocks or write its own log."""
    temporary = path.with_suffix(".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        zeros = bytes(min(size, _PIECE_BYTES))
        piece, remaining = head.ljust(len(zeros), b"\0"), size
        while remaining:
            if os.write(descriptor, piece) != len(piece):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(temporary))
            remaining -= len(piece)
            piece = zeros[:remaining]
        os.fsync(descriptor)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    move(temporary, path)


class SegmentFile:
    """A file open for writing over what is there. For one thread at a time, but `flush`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._direct = -1
        try:
            self._in_place = InPlace(path)
            self._buffer = memoryview(mmap.mmap(-1, MOST_DIRECT_BYTES))  # begins at a page, as the disk wants it
            self._direct = _open_direct(path)
        except BaseException:
            self.close()
            raise

    def read(self, length: int) -> bytes:
        """Read the first bytes."""
        return os.pread(self._descriptor, length, 0)

    def write(self, content: bytes, at: int) -> None:
        """Write through the page cache; on disk when it is flushed. Raises OSError."""
        if os.pwrite(self._descriptor, content, at) != len(content):
            raise OSError(errno.EIO, "a write was cut short", os.fspath(self._path))

    def write_through(self, content: bytes, at: int) -> None:
        """Write at a sector, and wait until it is on disk; the rest of its last sector is zeros. Raises OSError.

        What was written before has to be flushed.
        """
        if self._write_direct(content, at):
            self._in_place.verify(time.perf_counter_ns())
        else:
            self.write(content, at)
            self.flush()

    def _write_direct(self, content: bytes, at: int) -> bool:
        """Write past the page cache; False, with nothing written, where that cannot be done."""
        length = -(-len(content) // SECTOR) * SECTOR
        if self._direct < 0 or length > MOST_DIRECT_BYTES:
            return False
        self._buffer[: len(content)] = content
        self._buffer[len(content) : length] = bytes(length - len(content))
        try:
            written = os.pwritev(self._direct, [self._buffer[:length]], at)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._close_direct()
            return False
        if written != length:
            raise OSError(errno.EIO, "a write was cut short", os.fspath(self._path))
        return True

    def flush(self) -> None:
        """Wait until what was written is on disk. Raises OSError."""
        sync_data(self._descriptor)
        self._in_place.verify(time.perf_counter_ns())

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._close_direct()

    def _close_direct(self) -> None:
        if self._direct >= 0:
            os.close(self._direct)
            self._direct = -1


def _open_direct(path: Path) -> int:
    """Open a descriptor for writes past the page cache; -1 where the file system, or the system, has none."""
    if not hasattr(os, "O_DIRECT"):
        return -1
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_DSYNC | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return -1
        raise
