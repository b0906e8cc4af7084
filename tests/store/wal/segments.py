"""Segments of the write-ahead log for tests: rows told by their numbers, and what a power cut leaves of files."""

import errno
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from duelog.store.wal import segment_file
from duelog.store.wal.segment import Group, GroupContent, Row, RowKind, Segment, file_name
from duelog.store.wal.segment_file import SegmentFile
from duelog.store.wal.wal_reader import DIRECTORY

STORE_ID = bytes(range(16))
SIZE = 16 << 10
SECTOR = 512
GROUPS_AT = 4096


def row(number: int, value: bytes = b"value") -> Row:
    """One of many that differ."""
    return Row(RowKind.RUN, 86_400_000 * (number % 3), b"%08d" % number, value)


def numbers(groups: Sequence[Group]) -> list[list[int]]:
    """Which rows groups have."""
    return [[int(each.key) for each in group.rows()] for group in groups]


def write_at(file: Path, at: int, content: bytes) -> None:
    """Overwrite some bytes."""
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(content)


def flip(file: Path, at: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    with file.open("rb") as opened:
        opened.seek(at)
        (byte,) = opened.read(1)
    write_at(file, at, bytes([byte ^ 1 << bit]))


def make_segment(
    directory: Path, number: int, groups: Sequence[Sequence[int]], *, ended: bool = False, flush: bool = True
) -> Path:
    """A segment of groups of rows, told by their numbers; its file."""
    directory.mkdir(exist_ok=True)
    segment = Segment(directory, number, STORE_ID, SIZE)
    for group in groups:
        segment.append(GroupContent.of([row(each) for each in group]), flush=flush)
    if ended:
        segment.end(flush=flush)
    segment.close()
    return directory / file_name(number)


class Disk:
    """Writes to files of a log that are not flushed, so that a power cut may take any sector of them."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch, rng: random.Random) -> None:
        self._path = path
        self._rng = rng
        self._durable: dict[int, bytes] = {}
        self._pending: dict[int, list[tuple[int, bytes]]] = {}
        self.event: Callable[[], None] = lambda: None
        """Called after each write and before each flush."""
        self.refuses = False
        """True where the next flush fails, once."""
        self._write, self._write_direct, self._flush = os.pwrite, os.pwritev, os.fdatasync
        patch.setattr(os, "pwrite", self._pwrite)
        patch.setattr(os, "pwritev", self._pwritev)
        patch.setattr(os, "fdatasync", self._fdatasync)

    def _begun(self, descriptor: int, content: bytes, at: int) -> int:
        number = os.fstat(descriptor).st_ino
        if number not in self._durable:
            self._durable[number] = Path(f"/proc/self/fd/{descriptor}").read_bytes()
        self._pending.setdefault(number, []).append((at, content))
        return number

    def _pwrite(self, descriptor: int, content: bytes, at: int) -> int:
        self._begun(descriptor, content, at)
        written = self._write(descriptor, content, at)
        self.event()
        return written

    def _pwritev(self, descriptor: int, parts: list[memoryview], at: int) -> int:
        """Past the page cache: it alone is on disk when it has ended."""
        content = b"".join(parts)
        number = self._begun(descriptor, content, at)
        self.event()
        written = self._write_direct(descriptor, parts, at)
        self._pending[number].pop()
        durable = bytearray(self._durable[number])
        durable[at : at + len(content)] = content
        self._durable[number] = bytes(durable)
        self.event()
        return written

    def _fdatasync(self, descriptor: int) -> None:
        self.event()
        number = os.fstat(descriptor).st_ino
        pending, self._pending[number] = self._pending.get(number, []), []
        if self.refuses:  # the page cache keeps what was written, and takes it for clean
            self.refuses = False
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._flush(descriptor)
        if number in self._durable:
            durable = bytearray(self._durable[number])
            for at, content in pending:
                durable[at : at + len(content)] = content
            self._durable[number] = bytes(durable)

    def forget(self) -> None:
        """The files are all on disk as they are."""
        self._durable, self._pending = {}, {}

    def cut(self, target: Path) -> None:
        """Make a copy of the log as a power cut now could leave it: with any sectors of what is not flushed."""
        (target / DIRECTORY).mkdir(exist_ok=True)
        for old in (target / DIRECTORY).iterdir():
            old.unlink()
        for file in (self._path / DIRECTORY).iterdir():
            number = file.stat().st_ino
            content = bytearray(self._durable.get(number) or file.read_bytes())
            share = self._rng.choice((0.0, 0.2, 0.5, 0.8, 1.0))
            for at, written in self._pending.get(number, []):
                for start in range(0, len(written), SECTOR):
                    if self._rng.random() < share:
                        piece = written[start : start + SECTOR]
                        content[at + start : at + start + len(piece)] = piece
            (target / DIRECTORY / file.name).write_bytes(content)


def can_write_directly(directory: Path) -> bool:
    """True where the file system has writes past the page cache."""
    file = directory / "probe"
    file.touch()
    descriptor = segment_file._open_direct(file)
    if descriptor >= 0:
        os.close(descriptor)
    return descriptor >= 0


def through_page_cache(patch: pytest.MonkeyPatch) -> None:
    """Have no group be written past the page cache."""
    patch.setattr(SegmentFile, "_write_direct", lambda *_: False)
