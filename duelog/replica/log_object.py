"""A log object: groups of the write-ahead log as they lie in object storage. docs/format.md, "Replica".

    object := magic:byte[8] version:u16 kind:u8 codec:u8 store_id:byte[16] epoch:u64 seq:u64 begin:u64 end:u64
              time_ms:i64 prev_crc:u32 owner_length:u16 count:u32 owner index[count] crc:u32 group*
    index  := place:u64 at:u64 length:u32 crc:u32

Little-endian. It has all groups with rows and places from `begin` on, before `end`. `begin` is the `end` of the object
before; another says that groups between the two were never shipped. `prev_crc` is the crc of the object before, 0 of
the first. `time_ms`: every group was written by then. `owner` says who made it (`Owner`). `kind`:

- 1: groups.
- 2: a heartbeat: nothing was written for a third of the lease.
- 3: a fence: who makes it leads from there on, in a higher epoch. Places of the new leader begin at its `end`.
- 4: the leader has closed the store, and holds its lease no longer.

A group is the bytes that it has in its segment, from byte `at` on, with the checksum that its writer made, and behind
them, of codec 1, the bodies that its rows name in body files, in the order of the rows; `crc` is that checksum again.
So shipping reads no payload, and what is restored is what was sent: the checksum of the object covers all that lies
before it, the groups cover themselves, and their runs each body. In codec 0 every group has its bodies in it.
"""

import logging
import struct
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, Self

from duelog.store.codec.checksum import crc32
from duelog.store.errors import ReplicaDamaged
from duelog.store.wal.segment import Group, RawGroup

from .bucket import Bucket, log_name

_log = logging.getLogger("duelog.replica")

MAGIC = b"DUELOGLO"
VERSION = 1
_CODEC = 1
GROUPS, HEARTBEAT, FENCE, RESIGNED = 1, 2, 3, 4
"""Kinds of objects."""

_HEADER = struct.Struct("<8sHBB16sQQQQqIHI")
_INDEX = struct.Struct("<QQII")
_CRC = struct.Struct("<I")


Parts = Sequence[bytes | bytearray | memoryview]
"""Bytes in parts, which are not copied together."""


class Owner(NamedTuple):
    """The maker of a log object: one opening of a store, its lease (0: it holds none), where clients find it."""

    opening: str
    lease_ms: int = 0
    address: str = ""

    def __str__(self) -> str:
        return f"{self.opening} {self.lease_ms} {self.address}" if self.lease_ms else self.opening

    @classmethod
    def of(cls, text: str) -> Self:
        """The inverse of `str`."""
        opening, lease_ms, address = (*text.split(" ", 2), "", "")[:3]
        return cls(opening, int(lease_ms) if lease_ms.isdecimal() else 0, address)


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
    raw: Sequence[RawGroup] = ()
    kind: int = GROUPS
    crc: int = 0
    """Its checksum, of one that was read."""

    @property
    def maker(self) -> Owner:
        return Owner.of(self.owner)

    def pack(self) -> Parts:
        """The bytes of the object, in parts that follow each other; the first has all but the groups."""
        owner = self.owner.encode()
        header = _HEADER.pack(
            MAGIC,
            VERSION,
            self.kind,
            _CODEC,
            self.store_id,
            self.epoch,
            self.seq,
            self.begin,
            self.end,
            self.time_ms,
            self.prev_crc,
            len(owner),
            len(self.raw),
        )
        indices = [_INDEX.pack(raw.position, raw.at, raw.size, _CRC.unpack_from(raw.content)[0]) for raw in self.raw]
        head = b"".join((header, owner, *indices))
        return [head + _CRC.pack(crc32(head)), *(part for raw in self.raw for part in (raw.content, *raw.bodies))]


def crc_of(content: bytes | bytearray | memoryview) -> int:
    """The checksum of a packed object, which tells it from others: it covers the checksums of its groups."""
    crc: int = _CRC.unpack_from(content, _head_bytes(content))[0]
    return crc


def _head_bytes(content: bytes | bytearray | memoryview) -> int:
    owner_length, count = _HEADER.unpack_from(content)[-2:]
    return _HEADER.size + int(owner_length) + int(count) * _INDEX.size


def find_object(bucket: Bucket, seq: int) -> LogObject | None:
    """The log object of a number; None: there is none. Raises ReplicaDamaged, ReplicaUnreachable."""
    content = bucket.read(seq)
    return None if content is None else unpack(bucket.url, log_name(seq), content)[0]


def read_object(bucket: Bucket, seq: int) -> LogObject:
    """The log object of a number, which is there. Raises as `find_object`."""
    found = find_object(bucket, seq)
    if found is None:
        raise ReplicaDamaged(bucket.url, log_name(seq), "is missing")
    return found


def unpack(url: str, name: str, content: bytes) -> tuple[LogObject, list[Group]]:
    """Read a log object, and verify its groups. Raises ReplicaDamaged, which names it."""
    made = unpack_head(url, name, content)
    groups = list(unpack_groups(url, name, content, made.store_id))
    return made._replace(raw=[raw for raw, _ in _raw_groups(content)]), groups


def unpack_head(url: str, name: str, content: bytes) -> LogObject:
    """Read a log object without its groups. Raises ReplicaDamaged."""
    if len(content) < _HEADER.size or content[:8] != MAGIC:
        raise ReplicaDamaged(url, name, "is no log object")
    head = _head_bytes(content)
    if len(content) < head + _CRC.size or crc32(memoryview(content)[:head]) != crc_of(content):
        raise ReplicaDamaged(url, name, "does not match its checksum")
    _, version, kind, codec, store_id, epoch, seq, begin, end, time_ms, prev_crc, owner_length, _ = _HEADER.unpack_from(
        content
    )
    if version != VERSION or codec > _CODEC or kind not in (GROUPS, HEARTBEAT, FENCE, RESIGNED):
        raise ReplicaDamaged(url, name, f"is of version {version}, kind {kind}, codec {codec}: a later duelog reads it")
    owner = content[_HEADER.size : _HEADER.size + owner_length].decode()
    return LogObject(store_id, epoch, seq, begin, end, time_ms, prev_crc, owner, (), kind, crc_of(content))


def unpack_groups(url: str, name: str, content: bytes, store_id: bytes) -> Iterator[Group]:
    """Verify the groups of a log object one by one. REQUIRES: its head is read. Raises ReplicaDamaged.

    A body that lies apart and does not match its checksum is told in the log: it may be that of the sender's disk.
    """
    damaged = partial(_log.error, "%s: %s has damaged messages: %s", url, name)
    at = _head_bytes(content) + _CRC.size
    for raw, crc in _raw_groups(content):
        group = raw.whole(store_id, damaged)
        if group is None or group.position != raw.position or _CRC.unpack_from(raw.content)[0] != crc:
            raise ReplicaDamaged(url, name, f"does not match its checksum, in group {raw.position}")
        at += len(raw.content)
        yield group
    if at != len(content):
        raise ReplicaDamaged(url, name, f"has {len(content)} bytes, not {at}")


def _raw_groups(content: bytes) -> Iterator[tuple[RawGroup, int]]:
    """The groups of a log object, and the checksums that its index says of them."""
    whole, head = memoryview(content), _head_bytes(content)
    at = head + _CRC.size
    for place, begins, length, crc in _INDEX.iter_unpack(whole[_HEADER.size + _HEADER.unpack_from(content)[-2] : head]):
        yield RawGroup(place, begins, 0, whole[at : at + length]), crc
        at += length
