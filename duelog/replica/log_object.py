"""A log object: groups of the write-ahead log as they lie in object storage. docs/format.md, "Replica".

    object := magic:byte[8] version:u16 kind:u8 codec:u8 store_id:byte[16] epoch:u64 seq:u64 begin:u64 end:u64
              time_ms:i64 prev_crc:u32 owner_length:u16 count:u32 owner group[count] crc:u32
    group  := place:u64 rows:u32 length:u32 byte[length]

Little-endian. It has all groups with places from `begin` on, before `end`. `begin` is the `end` of the object before;
another says that groups between the two were never shipped. `prev_crc` is the crc of the object before, 0 of the first.
`time_ms`: every group was written by then. `owner` names one opening of the store. kind 1 are groups; 2 to 4 are kept
for heartbeats, fences and resignations. codec 0: as they are.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from duelog.store.codec.checksum import crc32
from duelog.store.errors import ReplicaDamaged
from duelog.store.wal.segment import Group, place_of

MAGIC = b"DUELOGLO"
VERSION = 1
GROUPS = 1
"""Kind of an object that has groups."""

_HEADER = struct.Struct("<8sHBB16sQQQQqIHI")
_GROUP = struct.Struct("<QII")
_CRC = struct.Struct("<I")


class LogObject(NamedTuple):
    """The content of a log object."""

    store_id: bytes
    epoch: int
    seq: int
    begin: int
    end: int
    time_ms: int
    prev_crc: int
    owner: str
    groups: Sequence[Group]

    def pack(self) -> bytes:
        """The bytes of the object."""
        owner = self.owner.encode()
        header = _HEADER.pack(
            MAGIC,
            VERSION,
            GROUPS,
            0,
            self.store_id,
            self.epoch,
            self.seq,
            self.begin,
            self.end,
            self.time_ms,
            self.prev_crc,
            len(owner),
            len(self.groups),
        )
        parts: list[bytes | memoryview] = [header, owner]
        for group in self.groups:
            parts += (_GROUP.pack(group.position, group.row_count, len(group.content)), group.content)
        content = b"".join(parts)
        return content + _CRC.pack(crc32(content))


def crc_of(content: bytes) -> int:
    """The checksum that a packed object ends with."""
    crc: int = _CRC.unpack_from(content, len(content) - _CRC.size)[0]
    return crc


def unpack(url: str, name: str, content: bytes) -> LogObject:
    """Read a log object. Raises ReplicaDamaged, which names it."""
    if len(content) < _HEADER.size + _CRC.size or content[:8] != MAGIC:
        raise ReplicaDamaged(url, name, "is no log object")
    if crc32(memoryview(content)[: -_CRC.size]) != crc_of(content):
        raise ReplicaDamaged(url, name, "does not match its checksum")
    _, version, kind, codec, store_id, epoch, seq, begin, end, time_ms, prev_crc, owner_length, count = (
        _HEADER.unpack_from(content)
    )
    if (version, kind, codec) != (VERSION, GROUPS, 0):
        raise ReplicaDamaged(url, name, f"is of version {version}, kind {kind}, codec {codec}: a later duelog reads it")
    at = _HEADER.size + owner_length
    owner = content[_HEADER.size : at].decode()
    whole, groups = memoryview(content), []
    for _ in range(count):
        place, rows, length = _GROUP.unpack_from(content, at)
        at += _GROUP.size
        groups.append(Group(place >> 32, place & 0xFFFFFFFF, 0, rows, whole[at : at + length]))
        at += length
    return LogObject(store_id, epoch, seq, begin, end, time_ms, prev_crc, owner, groups)


__all__ = ["GROUPS", "MAGIC", "VERSION", "LogObject", "crc_of", "place_of", "unpack"]
