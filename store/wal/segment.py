"""A segment: one file of the write-ahead log, groups of rows for several environments made durable by one flush each.

    segment := header group*                              groups from byte 4096 on, each at a multiple of 512
    header  := crc:u32 version:u32 size:u64 store_id:byte[16]
    group   := crc:u32 number:u64 sequence:u32 flushed:u32 count:u32 length:u32 row[count]
    row     := kind:u8 start_ms:i64 key_length:u32 length:u32 key value

Little-endian. A segment has a number, which its file is named after; `number` of a group is that of the segment when
the group was written. A segment whose rows are all applied is renamed to a higher number and overwritten from its
beginning, so what follows the last group is an older group, a torn one, or zeros. The groups of a number are counted
from 0 in `sequence`; those below `flushed` were on disk before this one was written. A group without rows is the last:
the log goes on in the segment of the next number. `start_ms` is the partition's, -1 for the main environment, -2 for
a batch, whose value says it (run_lengths.py). `crc` covers what follows it, after the group's place (u64) and
the store's id, since a value may hold such a file.

A group that cannot be read ends the segment where no group after it says that it was flushed; else it is damage. A
damaged last group is taken for torn: bit rot there looks the same.

The file is zeros of its full size from the beginning, for growing it has the file system write its own log at each
flush. Groups begin at sectors: one in which flushed bytes lie is never written again.
"""

import os
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from ..codec.bodies import Buffer
from ..codec.checksum import crc32
from ..codec.format import split_run_key
from ..codec.run import Run, is_apart, place_apart
from ..errors import BrokenInvariant, DamagedStore, FormatMismatch
from ..files.system_calls import forget_pages
from .segment_file import MOST_DIRECT_BYTES, SECTOR, SegmentFile, make_file

SEGMENT_VERSION = 4
"""Version of a segment that is begun; 3 has rows DELETE and SUBTRACT, and rows UNITE of entry ids, 4 bodies apart."""

READ_VERSIONS = (2, 3, 4)
"""Versions that are read; one of another is refused."""

MAIN = -1
"""In place of a partition's start: the main environment."""

SEVERAL = -2
"""In place of a partition's start: those that a batch names."""

_HEADER = struct.Struct("<IQ16s")
_GROUP = struct.Struct("<QIIII")
_ROW = struct.Struct("<BqII")
pack_row = _ROW.pack
"""Packs the beginning of a row: its kind, its partition's start, and the bytes of its key and of its value."""
_CRC = struct.Struct("<I")
_PLACE = struct.Struct("<Q")

_GROUPS_AT = 4096
_FIRST_BYTES = 16 * 1024
"""Bytes that a reader of single groups reads first: most are no longer."""

_ENDING_BYTES = SECTOR
"""Bytes kept for the group that ends a segment."""

EMPTY_BYTES = _GROUPS_AT + _ENDING_BYTES
"""Size of a segment that takes only the group that ends it."""


class RowKind(IntEnum):
    """The effect of a row on its environment."""

    RUN = 1
    """A run of a ledger is inserted."""
    RECORD = 2
    """A small record is stored; the value is its fields."""
    UNITE = 3
    """A roaring bitmap is united with that of a record (bits.py)."""
    BATCH = 4
    """Runs of several ledgers are inserted: a scattered batch."""
    DELETE = 5
    """A small record is removed; the value is empty."""
    SUBTRACT = 6
    """The members of a roaring bitmap are taken from that of a record; one that has no others is removed."""


class Row(NamedTuple):
    """A row of a group."""

    kind: int
    start_ms: int
    key: bytes
    value: Buffer


class Apart(NamedTuple):
    """Bodies in the body file of a ledger of the partition that begins at `start_ms`: from byte `at` on, so many."""

    start_ms: int
    ledger_id: int
    at: int
    length: int


class GroupContent(NamedTuple):
    """The rows of a group as they are written: how many, and their bytes.

    apart: where bodies lie in body files, in the order of the rows.
    """

    row_count: int
    content: Buffer
    apart: Sequence[Apart] = ()

    @classmethod
    def of(cls, rows: Sequence[Row]) -> "GroupContent":
        """The content of a group of these rows."""
        parts: list[Buffer] = []
        for kind, start_ms, key, value in rows:
            parts += (pack_row(kind, start_ms, len(key), len(value)), key, value)
        return cls(len(rows), b"".join(parts))

    @property
    def size(self) -> int:
        """Upper bound of the bytes that they take in a segment as one group."""
        return _CRC.size + _GROUP.size + SECTOR + len(self.content)

    def heads(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Iterate over kind, start, and the bytes at which key and value begin, and the row ends, of each of them."""
        return _heads(self.row_count, self.content)

    def rows(self) -> Iterator[Row]:
        """Iterate over them, in order."""
        content, copy = self.content, b""
        for kind, start_ms, begin, middle, end in self.heads():
            if kind == RowKind.BATCH:  # it is large
                yield Row(kind, start_ms, bytes(content[begin:middle]), content[middle:end])
            else:
                copy = copy or bytes(content)  # slices of it are bytes
                yield Row(kind, start_ms, copy[begin:middle], copy[middle:end])

    @property
    def names_bodies(self) -> bool:
        """True where bodies of some rows lie in body files."""
        runs = (self.content[middle:end] for kind, _, _, middle, end in self.heads() if kind == RowKind.RUN)
        return any(map(is_apart, runs))


def _heads(row_count: int, content: Buffer) -> Iterator[tuple[int, int, int, int, int]]:
    at = 0
    for _ in range(row_count):
        kind, start_ms, key_length, length = _ROW.unpack_from(content, at)
        begin = at + _ROW.size
        middle = begin + key_length
        at = middle + length
        yield kind, start_ms, begin, middle, at


_NO_ROWS = GroupContent(0, b"")
"""The content of the group that ends a segment."""


class Group(NamedTuple):
    """A group that was read whole."""

    number: int
    sequence: int
    flushed: int
    row_count: int
    content: memoryview

    @property
    def position(self) -> int:
        """Its place in the log."""
        return place_of(self.number, self.sequence)

    @property
    def written(self) -> GroupContent:
        """Its rows as they are written."""
        return GroupContent(self.row_count, self.content)

    def heads(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Iterate over its rows as `GroupContent.heads` does."""
        return _heads(self.row_count, self.content)

    def rows(self) -> Iterator[Row]:
        """Iterate over its rows, in order."""
        return self.written.rows()


def capacity_of(size: int) -> int:
    """The largest group, by `GroupContent.size`, that a segment of `size` bytes takes."""
    return size - EMPTY_BYTES


def place_of(number: int, sequence: int) -> int:
    """The place of a group in the log, as one number: later groups have higher ones."""
    return number << 32 | sequence


def file_name(number: int) -> str:
    """Name of the file of a segment."""
    return f"{number:012d}.wal"


def numbers_in(directory: Path) -> list[int]:
    """The numbers of the segments in a directory, ascending."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(int(name[:-4]) for name in names if name.endswith(".wal") and name[:-4].isdecimal())


class Segment:
    """A segment open for appending. For one thread at a time."""

    def __init__(
        self, directory: Path, number: int, store_id: bytes, size: int, *, at: int | None = None, sequence: int = 0
    ) -> None:
        """Use the file of `number` in a directory, made of `size` bytes where there is none. Raises OSError.

        at, sequence: where the groups of one that was read end: only its end is appended to it.
        None: it is begun. Raises DamagedStore, FormatMismatch.
        """
        self._path = directory / file_name(number)
        self.number = number
        self._store_id = store_id
        if not self._path.exists():
            _make(self._path, store_id, size)
        self._file = SegmentFile(self._path)
        try:
            versions = READ_VERSIONS if at is not None else (SEGMENT_VERSION,)
            self.version, self.size = _read_header(self._file.read(_GROUPS_AT), self._path, store_id, versions)
        except BaseException:
            self._file.close()
            raise
        self._at = _GROUPS_AT if at is None else at
        self._sequence = self._flushed = sequence
        self.ended = False
        """True once its last group was appended."""
        self._is_ending = False
        """True from the first byte of its last group on: an interrupt leaves it to be appended again, where it is."""
        self._limit = self.size - _ENDING_BYTES if at is None else 0
        """The byte before which groups end; 0: none but the last is appended any more."""

    @property
    def used(self) -> int:
        """Bytes of the groups."""
        return self._at - _GROUPS_AT

    @property
    def position(self) -> int:
        """The place of the next group (`place_of`)."""
        return place_of(self.number, self._sequence)

    def fits(self, size: int) -> bool:
        """True where a group of `size` bytes (`GroupContent.size`) can be appended, and the last one after it."""
        return self._at + size <= self._limit

    def append(self, rows: GroupContent, *, flush: bool) -> "RawGroup":
        """Append a group, and wait until it is on disk where `flush`. Raises OSError; the segment is of no use then.

        One that was interrupted (KeyboardInterrupt) may be there or not: no other may follow it.
        """
        row_count, content, apart = rows
        header = _GROUP.pack(self.number, self._sequence, self._flushed, row_count, len(content))
        crc = crc32(content, crc32(header, _seed(self._at, self._store_id)))
        group = b"".join((_CRC.pack(crc), header, content))
        if self._at + len(group) > self.size:
            raise BrokenInvariant(f"{self._path}: a group of {len(group)} bytes does not fit at {self._at}")
        raw = RawGroup(place_of(self.number, self._sequence), self._at, row_count, group, apart=apart)
        follows, sequence = _aligned(self._at + len(group)), self._sequence + 1
        if flush and self._flushed == self._sequence:
            self._file.write_through(group, self._at)
        else:
            self._file.write(group, self._at)
            if flush:
                self._file.flush()
        flushed = sequence if flush else self._flushed
        self._at, self._sequence, self._flushed, self.ended = follows, sequence, flushed, not row_count
        return raw

    def end(self, *, flush: bool) -> None:
        """Append the group that says that the log goes on in the next segment; once it has begun, no other fits.

        One that was interrupted may be called again. Raises OSError.
        """
        self._is_ending, self._limit = True, 0
        self.append(_NO_ROWS, flush=flush)

    @property
    def is_empty(self) -> bool:
        """True while it has no group, nor a part of one."""
        return not (self._sequence or self._is_ending)

    @property
    def is_flushed(self) -> bool:
        """True while every group is known to be on disk."""
        return self._flushed == self._sequence

    def flush(self) -> None:
        """Wait until every group is on disk. Raises OSError."""
        sequence = self._sequence
        self._file.flush()
        self._flushed = max(self._flushed, sequence)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


class SegmentContent(NamedTuple):
    """The content of a segment: its groups in order; `ended`: the log goes on in the next one; `size`: the file's."""

    groups: list[Group]
    ended: bool
    size: int
    unflushed: int
    """The byte from which on groups may not be on disk: none behind them says that they were flushed."""
    end: int
    """The byte after the last group."""


def read_segment(directory: Path, number: int, store_id: bytes) -> SegmentContent:
    """Read a segment from its beginning. O(bytes).

    Raises DamagedStore: a group that was flushed cannot be read; FormatMismatch; FileNotFoundError.
    """
    path = directory / file_name(number)
    content = path.read_bytes()
    _, size = _read_header(content, path, store_id, READ_VERSIONS)
    if len(content) < size:
        raise DamagedStore(path, f"ends at byte {len(content)} of {size}")
    groups: list[Group] = []
    begins: list[int] = []
    unflushed = at = _GROUPS_AT
    while (group := read_group(content, at, store_id, number)) is not None and group.sequence == len(groups):
        begins.append(at)
        unflushed = begins[group.flushed]
        at = _aligned(at + _CRC.size + _GROUP.size + len(group.content))
        if not group.row_count:
            return SegmentContent(groups, ended=True, size=size, unflushed=unflushed, end=at)
        groups.append(group)
    for beyond in _places_of(content, number, at + SECTOR):
        lost = read_group(content, beyond, store_id, number)
        if lost is not None and lost.flushed > len(groups):
            raise DamagedStore(
                path, f"group {len(groups)} at byte {at} cannot be read, and was flushed before group {lost.sequence}"
            )
    return SegmentContent(groups, ended=False, size=size, unflushed=unflushed, end=at)


def _places_of(content: bytes, number: int, begin: int) -> list[int]:
    """The places from `begin` on, a multiple of the alignment, where a group of a segment `number` may be."""
    sectors = np.frombuffer(content, np.uint8, (len(content) - begin) // SECTOR * SECTOR, begin)
    fields = sectors.reshape(-1, SECTOR)[:, _CRC.size : _CRC.size + _PLACE.size]
    found = np.ascontiguousarray(fields).view("<u8")[:, 0] == number
    return (np.flatnonzero(found) * SECTOR + begin).tolist()


def salvage(directory: Path, number: int, store_id: bytes) -> list[Group]:
    """Every group in a segment that can be read, whatever is damaged around it, by number and sequence. O(bytes).

    Without what a crash left behind the group that ends a segment: nothing told that it was stored.
    """
    try:
        content = (directory / file_name(number)).read_bytes()
    except FileNotFoundError:
        return []
    places = range(_GROUPS_AT, len(content), SECTOR)
    groups = [group for at in places if (group := read_group(content, at, store_id, None)) is not None]
    ends = {group.number: group.sequence for group in groups if not group.row_count}
    kept = (group for group in groups if group.sequence < ends.get(group.number, group.sequence + 1))
    return sorted(kept, key=lambda group: group.position)


def read_group(
    content: bytes | memoryview, at: int, store_id: bytes, number: int | None, place: int | None = None
) -> Group | None:
    """The group of a segment `number` at a byte; None where none is there whole. number None: of any number.

    place: the byte of the segment that byte `at` of `content` is, where that is not the whole segment.
    """
    begins = at + _CRC.size + _GROUP.size
    if begins > len(content):
        return None
    found, sequence, flushed, count, length = _GROUP.unpack_from(content, at + _CRC.size)
    if begins + length > len(content) or found != (found if number is None else number):
        return None
    whole = memoryview(content)[at + _CRC.size : begins + length]
    if crc32(whole, _seed(at if place is None else place, store_id)) != _CRC.unpack_from(content, at)[0]:
        return None
    return Group(found, sequence, flushed, count, whole[_GROUP.size :])


class SegmentFollower:
    """Reads a segment on while it is written, by this process or another. For one thread at a time."""

    def __init__(self, directory: Path, number: int, store_id: bytes) -> None:
        self._path = directory / file_name(number)
        self._number = number
        self._store_id = store_id
        self._at = _GROUPS_AT
        self.groups: list[Group] = []
        """The groups read so far, in order."""
        self.ended = False

    def follow(self) -> None:
        """Read on. Raises FileNotFoundError where the file was renamed: its groups are applied."""
        with self._path.open("rb") as file:
            while not self.ended and (group := self._next(file)) is not None:
                if group.row_count:
                    self.groups.append(group)
                else:
                    self.ended = True

    def _next(self, file: BinaryIO) -> Group | None:
        file.seek(self._at)
        head = file.read(_CRC.size + _GROUP.size)
        if len(head) < _CRC.size + _GROUP.size or _GROUP.unpack_from(head, _CRC.size)[0] != self._number:
            return None
        content = head + file.read(_GROUP.unpack_from(head, _CRC.size)[4])
        group = read_group(content, 0, self._store_id, self._number, self._at)
        if group is None or group.sequence != len(self.groups):
            return None
        self._at = _aligned(self._at + len(content))
        return group


class RawGroup(NamedTuple):
    """A group as it lies in a segment: its place, the byte that it begins at, its row count, and all of its bytes.

    bodies: those that its rows name in body files, in the order of the rows, of one that has them with it; as it is
    read from a log object they follow its own bytes in `content`. apart: where they lie, of one just appended.
    """

    position: int
    at: int
    row_count: int
    content: bytes | memoryview
    bodies: Sequence[Buffer] = ()
    apart: Sequence[Apart] = ()

    @property
    def size(self) -> int:
        """Bytes of all of it."""
        if not self.apart and not self.bodies:  # as most have none
            return len(self.content)
        return len(self.content) + sum([each.length for each in self.apart]) + sum(map(len, self.bodies))

    def is_intact(self, store_id: bytes) -> bool:
        """Return whether its bytes are those that were written; the bodies that it names are not looked at."""
        return self._group(store_id) is not None

    def bodies_apart(self) -> Sequence[Apart]:
        """Where its rows have bodies in body files, in their order. REQUIRES: it is intact."""
        rows = GroupContent(self.row_count, memoryview(self.content)[_CRC.size + _GROUP.size :]).rows()
        return self.apart or [
            Apart(row.start_ms, split_run_key(row.key)[0], *place_apart(row.value))
            for row in rows
            if row.kind == RowKind.RUN and is_apart(row.value)
        ]

    def whole(self, store_id: bytes, damaged: Callable[[str], object]) -> Group | None:
        """The group that it is, with its bodies in its rows; None: its bytes are not those that were written.

        damaged: is told of bodies that do not match their checksums; they stay, as one message is no reason to refuse
        all others.
        """
        group = self._group(store_id)
        if group is None:
            return None
        own = _CRC.size + _GROUP.size + len(group.content)
        if own == len(self.content) and not self.bodies:  # no group names bodies that are all empty
            return group
        bodies = memoryview(b"".join((self.content[own:], *self.bodies)))
        if not group.written.names_bodies:
            return None if bodies else group
        rows, taken = list(group.rows()), 0

        def take(_: int, __: int, length: int) -> memoryview:
            nonlocal taken
            taken += length
            return bodies[taken - length : taken]

        for at, row in enumerate(rows):
            if row.kind == RowKind.RUN and is_apart(row.value):
                run = Run("log", row.key, memoryview(row.value), take)
                for entry_id, reason in run.damaged_bodies():
                    damaged(f"entry {run.ledger_id}:{entry_id}: {reason}")
                rows[at] = row._replace(value=run.whole())
        return group._replace(content=memoryview(GroupContent.of(rows).content)) if taken == len(bodies) else None

    def _group(self, store_id: bytes) -> Group | None:
        return read_group(self.content, 0, store_id, self.position >> 32, self.at)


class SegmentReader:
    """Reads the groups of a segment one by one, also while they are written, and keeps none. For one thread at a time.

    The file stays open: renamed, it is the same one. A large group is not verified: its checksum stays with it.
    """

    def __init__(self, path: Path, number: int, store_id: bytes) -> None:
        """Raises FileNotFoundError."""
        self._number = number
        self._store_id = store_id
        self._at = _GROUPS_AT
        self.sequence = 0
        """That of the next group."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> RawGroup | None:
        """The next group, one without rows where the log goes on in the next segment; None: it is not there whole."""
        head = _CRC.size + _GROUP.size
        content = os.pread(self._descriptor, _FIRST_BYTES, self._at)
        if len(content) < head:
            return None
        number, sequence, _, row_count, length = _GROUP.unpack_from(content, _CRC.size)
        if number != self._number or sequence != self.sequence:
            return None
        size = head + length
        content = content[:size] if size <= len(content) else os.pread(self._descriptor, size, self._at)
        raw = RawGroup(place_of(number, sequence), self._at, row_count, content)
        is_direct = size <= MOST_DIRECT_BYTES  # written past the page cache, which may have an older page
        if len(content) < size or (is_direct and not raw.is_intact(self._store_id)):
            return None
        self._at = _aligned(self._at + size)
        self.sequence += 1
        return raw

    def go_to(self, sequence: int, end: int) -> None:
        """Have the next read be of the group of a sequence, before which one ends at a byte; of the first at any."""
        self._at, self.sequence = _aligned(end) if sequence else _GROUPS_AT, sequence

    def look_again(self) -> None:
        """Have the next read go to the disk: a page that was cached may be older than a write past the cache."""
        forget_pages(self._descriptor)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _aligned(at: int) -> int:
    return at + -at % SECTOR


def _seed(at: int, store_id: bytes) -> int:
    """Begin the checksum of a group with its place, so that a payload that holds a WAL is none."""
    return crc32(_PLACE.pack(at) + store_id)


def _read_header(content: bytes, path: Path, store_id: bytes, versions: Collection[int]) -> tuple[int, int]:
    """Check a header, and return the version and the size that it says. Raises DamagedStore, FormatMismatch."""
    fields = content[_CRC.size : _CRC.size + _HEADER.size]
    if len(fields) < _HEADER.size or crc32(fields) != _CRC.unpack_from(content, 0)[0]:
        raise DamagedStore(path, "does not begin like a segment of the write-ahead log")
    version, size, owner = _HEADER.unpack(fields)
    if owner != store_id:
        raise DamagedStore(path, "belongs to another store")
    if version not in versions:
        raise FormatMismatch(path, "version", version, SEGMENT_VERSION)
    return int(version), int(size)


def _make(path: Path, store_id: bytes, size: int) -> None:
    fields = _HEADER.pack(SEGMENT_VERSION, size, store_id)
    make_file(path, _CRC.pack(crc32(fields)) + fields, size)


def empty_segment(directory: Path, number: int, store_id: bytes) -> None:
    """Replace a segment by one that has no group, and space for the one that ends it only. Raises OSError.

    A power cut leaves the one or the other.
    """
    _make(directory / file_name(number), store_id, EMPTY_BYTES)


def write_segment(directory: Path, number: int, store_id: bytes, groups: Sequence[Group], *, ended: bool) -> Path:
    """Make a segment of a copy of a store, with groups one after the other, wherever they were; its file, on disk.

    ended: the log goes on in the next. Raises OSError.
    """
    size = _aligned(EMPTY_BYTES + sum(group.written.size for group in groups))
    segment = Segment(directory, number, store_id, size)
    try:
        for group in groups:
            segment.append(group.written, flush=False)
        if ended:
            segment.end(flush=False)
        segment.flush()
    finally:
        segment.close()
    return directory / file_name(number)
