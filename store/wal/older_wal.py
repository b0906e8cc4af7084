"""The write-ahead log of older versions: a file of single messages, read once and removed.

    JOURNAL := slot slot group*
    slot    := crc:u32 version:u32 epoch:u64 size:u64 store_id:byte[16]                at 0 and at 4096
    group   := crc:u32 count:u32 epoch:u64 number:u32 length:u32 record[count]         at a multiple of 512
    record  := start_ms:i64 ledger:u64 due_ms:i64 entry:u32 length:u32 body

Little-endian. The newer of the slots that can be read counts. The groups of its epoch lie from 8192 on and are
numbered from 0; each was on disk before the next was written. `crc` covers what follows it, that of a group its place
(u64) and the store's id before that.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

from ..codec.checksum import crc32
from ..errors import DamagedStore, FormatMismatch

FILE_NAME = "JOURNAL"

_VERSION = 1
_SLOT = struct.Struct("<IQQ16s")
_GROUP = struct.Struct("<IQII")
_RECORD = struct.Struct("<qQqII")
_CRC = struct.Struct("<I")
_SLOTS = (0, 4096)
_GROUPS_AT = 8192
_ALIGNMENT = 512


class OlderRecord(NamedTuple):
    """A message: the partition, its log, when it is due, the entry id reserved for it, and its body."""

    start_ms: int
    ledger_id: int
    due_ms: int
    entry_id: int
    body: bytes


def read_older_wal(path: Path, store_id: bytes) -> list[OlderRecord]:
    """What the file in the store's directory `path` holds, in the order in which it was written; [] where none is.

    Some of it, or all, may be in the partitions. Raises DamagedStore: something is lost; FormatMismatch.
    """
    file = path / FILE_NAME
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return []
    epoch, size = _newest_slot(content, file, store_id)
    if len(content) < size:
        raise DamagedStore(file, f"ends at byte {len(content)} of {size}")
    records: list[OlderRecord] = []
    at, number = _GROUPS_AT, 0
    while (group := _read_group(content, at, store_id)) is not None and group[:2] == (epoch, number):
        records += _records(group[2])
        at += _CRC.size + _GROUP.size + len(group[2])
        at += -at % _ALIGNMENT
        number += 1
    for beyond in range(at, len(content), _ALIGNMENT):
        lost = _read_group(content, beyond, store_id)
        if lost is not None and lost[0] >= epoch:
            raise DamagedStore(
                file, f"group {number} of epoch {epoch}, at byte {at}, cannot be read, and group {lost[1]} follows"
            )
    return records


def _read_group(content: bytes, at: int, store_id: bytes) -> tuple[int, int, memoryview] | None:
    """Epoch, number and records of the group at a byte; None where none is there whole."""
    begins = at + _CRC.size + _GROUP.size
    if begins > len(content):
        return None
    _, epoch, number, length = _GROUP.unpack_from(content, at + _CRC.size)
    if begins + length > len(content):
        return None
    whole = memoryview(content)[at + _CRC.size : begins + length]
    seed = crc32(store_id, crc32(at.to_bytes(8, "little")))
    if crc32(whole, seed) != _CRC.unpack_from(content, at)[0]:
        return None
    return epoch, number, whole[_GROUP.size :]


def _records(content: memoryview) -> list[OlderRecord]:
    found: list[OlderRecord] = []
    at = 0
    while at < len(content):
        start_ms, ledger_id, due_ms, entry_id, length = _RECORD.unpack_from(content, at)
        at += _RECORD.size
        found.append(OlderRecord(start_ms, ledger_id, due_ms, entry_id, bytes(content[at : at + length])))
        at += length
    return found


def _newest_slot(content: bytes, file: Path, store_id: bytes) -> tuple[int, int]:
    """The newest epoch that the slots name, and the file's size. Raises DamagedStore, FormatMismatch."""
    newest = (0, 0)
    for at in _SLOTS:
        fields = content[at + _CRC.size : at + _CRC.size + _SLOT.size]
        if len(fields) < _SLOT.size or crc32(fields) != _CRC.unpack_from(content, at)[0]:
            continue
        version, epoch, size, found = _SLOT.unpack(fields)
        if found != store_id:
            raise DamagedStore(file, "belongs to another store")
        if version > _VERSION:
            raise FormatMismatch(file, "version", version, _VERSION)
        newest = max(newest, (epoch, size))
    if not newest[0]:
        raise DamagedStore(file, "does not begin like a write-ahead log")
    return newest
