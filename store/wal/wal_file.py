"""The file of the write-ahead log: messages for several partitions made durable together, by one write and one flush.

    wal     := slot slot group*
    slot    := crc:u32 version:u32 epoch:u64 size:u64 store_id:byte[16]                at 0 and at 4096
    group   := crc:u32 count:u32 epoch:u64 number:u32 length:u32 record[count]         at a multiple of 512
    record  := start_ms:i64 ledger:u64 due_ms:i64 entry:u32 length:u32 body

Little-endian. `start_ms` is the partition's, `size` the file's, `length` of a group that of its records; `crc` covers
what follows it, that of a group its place (u64) and the store's id before that, since a payload may hold such a file.
The groups of an epoch are numbered from 0 and lie one after the other from 8192 on. A checkpoint begins a new epoch
once every entry is applied: it writes the slot that the last one did not, and its groups overwrite those of the last.

A group is on disk before the next is written. So what a power cut leaves is groups of the newest epoch, perhaps one
that is torn, and what is older; a group of that epoch after one that cannot be read is damage. A damaged last group
is taken for torn: bit rot there looks the same.

The file is zeros of its full size from the beginning, for growing it has the file system write its own log at each
flush. Groups begin at sectors: one in which acknowledged bytes lie is never written again.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..codec.checksum import crc32
from ..errors import BrokenInvariant, DamagedStore, FormatMismatch
from ..files.datafile import InPlace
from ..files.directory import move
from ..files.system_errors import explained

FILE_NAME = "JOURNAL"
_UNMADE_NAME = "JOURNAL.tmp"
JOURNAL_VERSION = 1

_SLOT = struct.Struct("<IQQ16s")
_GROUP = struct.Struct("<IQII")
_RECORD = struct.Struct("<qQqII")
_CRC = struct.Struct("<I")
_PLACE = struct.Struct("<Q")
RECORD_BYTES = _RECORD.size
"""What a record takes besides its body."""

_SLOT_BYTES = 4096
_GROUPS_AT = 2 * _SLOT_BYTES
_ALIGNMENT = 512
"""A sector: none is written again while what lies in it counts."""


Fields = tuple[int, int, int, int, bytes]
"""Those of a `WalRecord`."""


class WalRecord(NamedTuple):
    """A message of the WAL: the partition, the log, the entry id reserved for it, and what it is."""

    start_ms: int
    ledger_id: int
    due_ms: int
    entry_id: int
    body: bytes


class WalFile:
    """A WAL open for writing. For one thread at a time."""

    def __init__(self, path: Path, store_id: bytes, size: int) -> None:
        """Open the WAL in the store's directory `path`, or make one of `size` bytes.

        One that is there is to be read (`read_wal`) and begun anew before anything is appended. Raises StoreFull,
        StoreUnavailable, DamagedStore, FormatMismatch.
        """
        self._path = path / FILE_NAME
        self._store_id = store_id
        with explained(path):
            if not self._path.exists():
                _make(self._path, store_id, size)
            with self._path.open("rb") as file:
                self._epoch, self._end = _newest_slot(file.read(_GROUPS_AT), self._path, store_id)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        self._in_place = InPlace(self._path)
        self._at = self._end
        self._number = 0

    def fits(self, size: int) -> bool:
        """Whether records of so many bytes together can be appended as one group."""
        return self._at + _CRC.size + _GROUP.size + size <= self._end

    def append(self, records: Sequence[Fields]) -> None:
        """Append a group and wait until it is on disk. Raises OSError; the WAL is of no use after that.

        An interrupted one (KeyboardInterrupt) may be there or not, and the next takes its place.
        """
        content = b"".join(
            [
                part
                for start_ms, ledger_id, due_ms, entry_id, body in records
                for part in (_RECORD.pack(start_ms, ledger_id, due_ms, entry_id, len(body)), body)
            ]
        )
        header = _GROUP.pack(len(records), self._epoch, self._number, len(content))
        crc = crc32(content, crc32(header, _seed(self._at, self._store_id)))
        group = b"".join((_CRC.pack(crc), header, content))
        if self._at + len(group) > self._end:
            raise BrokenInvariant(f"{self._path}: a group of {len(group)} bytes does not fit at {self._at}")
        follows = _aligned(self._at + len(group))
        self._write(group, self._at)
        self._number, self._at = self._number + 1, follows  # nothing between that an interrupt could come to

    def restart(self) -> None:
        """Begin a new epoch. REQUIRES: everything in the WAL is durable in its partition. Raises OSError."""
        self._at = self._end  # an interrupted one is done again
        self._write(_slot(self._epoch + 1, self._end, self._store_id), (self._epoch + 1) % 2 * _SLOT_BYTES)
        self._epoch += 1
        self._number, self._at = 0, _GROUPS_AT

    def _write(self, content: bytes, at: int) -> None:
        if os.pwrite(self._descriptor, content, at) != len(content):
            raise OSError(errno.EIO, "a write was cut short", os.fspath(self._path))
        os.fdatasync(self._descriptor)
        self._in_place.verify(time.perf_counter_ns())

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def remove_unmade(path: Path) -> None:
    """Remove what a crash left of a WAL that was being made in the store in `path`."""
    (path / _UNMADE_NAME).unlink(missing_ok=True)


def read_wal(path: Path, store_id: bytes) -> list[WalRecord]:
    """What the WAL of the store in `path` holds, in the order in which it was written; nothing where none is there.

    Some of it, or all, may be in the partitions already. Beside a writing process too. Raises DamagedStore: something
    is lost; FormatMismatch: a later version wrote it.
    """
    file = path / FILE_NAME
    before: _Damage | None = None
    while True:
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return []
        found = _read_groups(content, file, store_id)
        if not isinstance(found, _Damage):
            return found
        if found == before:  # else it was read while it was written
            raise DamagedStore(
                file,
                f"group {found.number} of epoch {found.epoch}, at byte {found.at}, cannot be read, and group "
                f"{found.follows} follows",
            )
        before = found


class WalFollower:
    """What the WAL of the store in `path` holds, read on while it is written, by this process or another.

    For one thread at a time.
    """

    def __init__(self, path: Path, store_id: bytes) -> None:
        self._file = path / FILE_NAME
        self._store_id = store_id
        self._epoch = self._number = 0
        self._at = _GROUPS_AT
        self.records: list[WalRecord] = []
        """Those of the newest epoch, in the order in which they were written."""

    def follow(self) -> bool:
        """Read what was written since; False, in some ten us: nothing was, and `records` are all there were just now.

        Raises DamagedStore, FormatMismatch.
        """
        try:
            with self._file.open("rb") as file:
                epoch, _ = _newest_slot(file.read(_GROUPS_AT), self._file, self._store_id)
                if epoch != self._epoch:  # everything before is in its partition
                    self._epoch, self._number, self._at = epoch, 0, _GROUPS_AT
                    self.records = []
                    return self._read_on(file) or True
                return self._read_on(file)
        except FileNotFoundError:
            return False

    def _read_on(self, file: BinaryIO) -> bool:
        begun = self._number
        while True:
            file.seek(self._at)
            head = file.read(_CRC.size + _GROUP.size)
            if len(head) < _CRC.size + _GROUP.size:
                return self._number > begun
            content = head + file.read(_GROUP.unpack_from(head, _CRC.size)[3])
            group = _read_group(content, 0, self._store_id, self._epoch, place=self._at)
            if group is None or group[:2] != (self._epoch, self._number):
                return self._number > begun or (group is not None and group.epoch > self._epoch)
            self.records += group.records()
            self._at = _aligned(self._at + len(content))
            self._number += 1


def write_wal(path: Path, store_id: bytes, records: Sequence[WalRecord], size: int = 0) -> Path:
    """Make the WAL of a copy of a store in `path`, which has none, with `records` in it; its file.

    size: its bytes, where `records` do not need more. Raises StoreFull.
    """
    needed = sum(RECORD_BYTES + len(record.body) for record in records)
    wal = WalFile(path, store_id, max(size, _aligned(_GROUPS_AT + _CRC.size + _GROUP.size + needed)))
    try:
        wal.restart()
        wal.append(records)
    finally:
        wal.close()
    return path / FILE_NAME


def salvage(path: Path, store_id: bytes) -> list[WalRecord]:
    """Every message of the WAL in `path` that can be read, in the order written, whatever is damaged around it.

    Of earlier epochs too, where they are not written over: those are in their partitions. Nothing where no WAL is.
    O(bytes).
    """
    try:
        content = (path / FILE_NAME).read_bytes()
    except FileNotFoundError:
        return []
    places = range(_GROUPS_AT, len(content), _ALIGNMENT)
    groups = [group for at in places if (group := _read_group(content, at, store_id)) is not None]
    groups.sort(key=lambda group: group[:2])
    return [record for group in groups for record in group.records()]


class _Damage(NamedTuple):
    epoch: int
    number: int
    at: int
    crc: int
    follows: int


def _read_groups(content: bytes, file: Path, store_id: bytes) -> list[WalRecord] | _Damage:
    epoch, size = _newest_slot(content, file, store_id)
    if len(content) < size:
        raise DamagedStore(file, f"ends at byte {len(content)} of {size}")
    records: list[WalRecord] = []
    at, number = _GROUPS_AT, 0
    while (group := _read_group(content, at, store_id, epoch)) is not None and group[:2] == (epoch, number):
        records += group.records()
        at = _aligned(at + _CRC.size + _GROUP.size + len(group.content))
        number += 1
    for beyond in range(at, len(content), _ALIGNMENT):
        lost = _read_group(content, beyond, store_id, epoch)
        if lost is not None:
            return _Damage(epoch, number, at, crc32(content[at:beyond]), lost.number)
    return records


class _Group(NamedTuple):
    epoch: int
    number: int
    messages: int
    content: memoryview

    def records(self) -> list[WalRecord]:
        found: list[WalRecord] = []
        at = 0
        for _ in range(self.messages):
            start_ms, ledger_id, due_ms, entry_id, length = _RECORD.unpack_from(self.content, at)
            at += _RECORD.size
            found.append(WalRecord(start_ms, ledger_id, due_ms, entry_id, bytes(self.content[at : at + length])))
            at += length
        return found


def _read_group(
    content: bytes, at: int, store_id: bytes, epoch: int | None = None, *, place: int | None = None
) -> _Group | None:
    """The group of this epoch or the next, of any if None, at a byte; None where none is there whole.

    place: the byte of the WAL that byte `at` of `content` is, where that is not the whole WAL.
    """
    begins = at + _CRC.size + _GROUP.size
    if begins > len(content):
        return None
    count, found, number, length = _GROUP.unpack_from(content, at + _CRC.size)
    if begins + length > len(content) or (epoch is not None and found not in (epoch, epoch + 1)):
        return None
    whole = memoryview(content)[at + _CRC.size : begins + length]
    if crc32(whole, _seed(at if place is None else place, store_id)) != _CRC.unpack_from(content, at)[0]:
        return None
    return _Group(found, number, count, whole[_GROUP.size :])


def _aligned(at: int) -> int:
    return at + -at % _ALIGNMENT


def _seed(at: int, store_id: bytes) -> int:
    """What the checksum of a group begins with: a payload that holds a WAL is none."""
    return crc32(store_id, crc32(_PLACE.pack(at)))


def _slot(epoch: int, size: int, store_id: bytes) -> bytes:
    fields = _SLOT.pack(JOURNAL_VERSION, epoch, size, store_id)
    return _CRC.pack(crc32(fields)) + fields


def _newest_slot(slots: bytes, path: Path, store_id: bytes) -> tuple[int, int]:
    """The newest epoch that the slots name, and the size. Raises DamagedStore, FormatMismatch."""
    newest = (0, 0)
    for at in (0, _SLOT_BYTES):
        fields = slots[at + _CRC.size : at + _CRC.size + _SLOT.size]
        if len(fields) < _SLOT.size or crc32(fields) != _CRC.unpack_from(slots, at)[0]:
            continue
        version, epoch, size, found = _SLOT.unpack(fields)
        if found != store_id:
            raise DamagedStore(path, "belongs to another store")
        if version > JOURNAL_VERSION:
            raise FormatMismatch(path, "version", version, JOURNAL_VERSION)
        newest = max(newest, (epoch, size))
    if not newest[0]:
        raise DamagedStore(path, "does not begin like a write-ahead log")
    return newest


def _make(path: Path, store_id: bytes, size: int) -> None:
    """A WAL of zeros, so that no write to it has the file system allocate blocks or write its own journal."""
    temporary = path.with_name(_UNMADE_NAME)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        content = _slot(1, size, store_id).ljust(size, b"\0")
        if os.write(descriptor, content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(temporary))
        os.fsync(descriptor)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    move(temporary, path)
