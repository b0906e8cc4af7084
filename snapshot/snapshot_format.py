"""The bytes of a snapshot: parts with the bitmaps of a delay index, and the metadata that makes them one.

    SNAPSHOT_PART ledger snapshot part -> sealed part
    SNAPSHOT_META ledger snapshot      -> sealed metadata

    part     := version:u16 spare:u16 pieces:u32 start:i64[pieces] entries:u32[pieces] end:u32[pieces] bitmaps
    metadata := version:u16 flags:u16 bucket_ms:u32 start_ms:u64 tail:u32 due_ms:i64 entry_id:i64 absorbed_end:u32
                entries:u64 stored_bytes:u64 created_ms:u64 parts:u32
                parts * (crc:u32 stored_bytes:u32 entries:u32)

A piece is a serialised roaring bitmap (the portable format) of entries due in the bucket that starts at `start`; the
bitmap of a large bucket is several pieces, by ranges of ids, in one part or in several. Bit 0 of `flags`, always set,
says that pieces stand in order of `start`, over all parts. `end` is where a bitmap ends, counted from where bitmaps
begin. Numbers in a part are little-endian, so that numpy reads columns where they lie; metadata is big-endian like
every small record. Both are sealed: a CRC-32 over key and value ends the value, so a part moved to another snapshot's
key is found. Metadata repeats each part's seal, size and count, so a part of the right key and the wrong contents is
found as well.

The frontier (`due_ms`, `entry_id`, `absorbed_end`) and `tail` are of the instant of the copy: the bitmaps hold exactly
the entries below `tail` that come after it and had not been cancelled. `version` comes first in both and is looked at
before anything else; an unknown one is no error, only a snapshot that cannot be used.
"""

import struct
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple, Self

import numpy as np
from pyroaring import BitMap

from ..partitions.index.buckets import PackedBucket
from ..partitions.index.index_cut import Piece
from ..partitions.index.window import MAX_ID
from ..store.batches import batches
from ..store.codec.checksum import crc32
from ..store.codec.format import (
    CRC_BYTES,
    Table,
    seal,
    snapshot_meta_key,
    snapshot_part_key,
    split_snapshot_key,
    trailing_u32,
    unseal,
)
from ..store.env.environment import Environment
from ..store.env.memtable import Reads
from ..store.errors import CorruptRecord

VERSION = 1

_PART = struct.Struct("<HHI")
_PIECE_BYTES = 16
_ORDERED = 1
_META = struct.Struct(">HHIQIqqIQQQI")
_PART_RECORD = struct.Struct(">III")
_SEAL = struct.Struct("<I")


SavedBucket = tuple[int, BitMap | PackedBucket]
"""Start of a bucket, and entries of it; several may be of one bucket."""


class Unusable(Exception):
    """A snapshot cannot be used, and why: torn, damaged, of another version, of another time."""


class PartRecord(NamedTuple):
    """The facts of one part in the metadata: its seal (the CRC-32 that ends its value), bytes of its value, entries."""

    crc: int
    stored_bytes: int
    entries: int


class Metadata(NamedTuple):
    """One snapshot. `entries` and `stored_bytes` are the sums over its parts."""

    bucket_ms: int
    start_ms: int
    """Start of the partition."""
    tail: int
    """Entries below it are covered."""
    due_ms: int
    entry_id: int
    absorbed_end: int
    """The frontier (C, T) at the instant of the copy: C is (due_ms, entry_id), T is absorbed_end."""
    created_ms: int
    parts: tuple[PartRecord, ...]

    @property
    def entries(self) -> int:
        return sum(part.entries for part in self.parts)

    @property
    def stored_bytes(self) -> int:
        return sum(part.stored_bytes for part in self.parts)

    def pack(self) -> bytes:
        head = _META.pack(
            VERSION,
            _ORDERED,
            self.bucket_ms,
            self.start_ms,
            self.tail,
            self.due_ms,
            self.entry_id,
            self.absorbed_end,
            self.entries,
            self.stored_bytes,
            self.created_ms,
            len(self.parts),
        )
        return head + b"".join(_PART_RECORD.pack(*part) for part in self.parts)

    @classmethod
    def unpack(cls, fields: bytes) -> Self:
        """Raises Unusable."""
        version = int.from_bytes(fields[:2], "big")
        if len(fields) < 2 or version != VERSION:
            raise Unusable(f"metadata of version {version}, this is {VERSION}")
        if len(fields) < _META.size:
            raise Unusable(f"metadata of {len(fields)} bytes")
        head = _META.unpack_from(fields)
        _, _, bucket_ms, start_ms, tail, due_ms, entry_id, absorbed_end, entries, stored, created_ms, count = head
        if len(fields) != _META.size + count * _PART_RECORD.size:
            raise Unusable(f"metadata of {len(fields)} bytes cannot list {count} parts")
        parts = tuple(PartRecord(*record) for record in _PART_RECORD.iter_unpack(fields[_META.size :]))
        metadata = cls(bucket_ms, start_ms, tail, due_ms, entry_id, absorbed_end, created_ms, parts)
        if (metadata.entries, metadata.stored_bytes) != (entries, stored):
            raise Unusable("metadata contradicts itself")
        return metadata


def read_metadata(raw: Reads, ledger_id: int, snapshot_id: int) -> Metadata:
    """Verified metadata of a snapshot. Raises Unusable."""
    key = snapshot_meta_key(ledger_id, snapshot_id)
    value = raw.get(key)
    if value is None:
        raise Unusable("no metadata")
    try:
        fields = unseal(key, value)
    except CorruptRecord as error:
        raise Unusable(str(error)) from error
    return Metadata.unpack(fields)


# -- parts ---------------------------------------------------------------------------------------


class PackedPart(NamedTuple):
    """A part without its seal."""

    fields: bytes
    entries: int

    @property
    def stored_bytes(self) -> int:
        return len(self.fields) + CRC_BYTES


def pack_parts(pieces: Sequence[Piece], part_bytes: int) -> Iterator[PackedPart]:
    """Parts of at most `part_bytes` that hold `pieces`, in order. REQUIRES part_bytes >= 1,024.

    O(bytes); a piece too large for a part is split, which costs about as much as making it did.
    """
    capacity = part_bytes - _PART.size - CRC_BYTES
    fitting = (half for piece in pieces for half in _split(piece, capacity - _PIECE_BYTES))
    return map(_pack_part, batches(fitting, lambda piece: _PIECE_BYTES + len(piece.bitmap), capacity))


def _split(piece: Piece, capacity: int) -> Iterator[Piece]:
    if len(piece.bitmap) <= capacity:
        yield piece
        return
    low = BitMap.deserialize(piece.bitmap)
    high = low.copy()
    middle = low[len(low) // 2]
    low.remove_range(middle, MAX_ID + 1)
    high.remove_range(0, middle)
    for half in (low, high):
        yield from _split(Piece(piece.start_ms, len(half), half.serialize()), capacity)


def _pack_part(pieces: list[Piece]) -> PackedPart:
    starts = np.array([piece.start_ms for piece in pieces], dtype="<i8")
    entries = np.array([piece.entries for piece in pieces], dtype="<u4")
    ends = np.cumsum([len(piece.bitmap) for piece in pieces]).astype("<u4")
    head = _PART.pack(VERSION, 0, len(pieces))
    bitmaps = [piece.bitmap for piece in pieces]
    fields = b"".join((head, starts.tobytes(), entries.tobytes(), ends.tobytes(), *bitmaps))
    return PackedPart(fields, int(entries.sum(dtype=np.int64)))


def seal_part(key: bytes, part: PackedPart) -> tuple[bytes, PartRecord]:
    """The value to store for a part, and what the metadata is to say of it."""
    value = seal(key, part.fields)
    return value, PartRecord(_SEAL.unpack(value[-CRC_BYTES:])[0], len(value), part.entries)


class Part:
    """A part that matches its checksum; a copy, which outlives the read transaction that `value` came from."""

    __slots__ = ("_value",)

    def __init__(self, key: bytes, value: bytes | memoryview, record: PartRecord) -> None:
        """Verify a part against its seal and against the metadata. Raises Unusable."""
        if len(value) != record.stored_bytes or _SEAL.unpack_from(value, len(value) - CRC_BYTES)[0] != record.crc:
            raise Unusable(f"part {key.hex()} is not the one that the metadata lists")
        self._value = memoryview(bytes(value))
        fields = self._value[:-CRC_BYTES]
        if crc32(fields, crc32(key)) != record.crc:  # of the copy: what is used later is what was verified
            raise Unusable(f"record {key.hex()} does not match its checksum")
        version = int.from_bytes(fields[:2], "little")
        if version != VERSION:
            raise Unusable(f"part {key.hex()} is of version {version}, this is {VERSION}")

    def buckets(self, tail: int) -> Iterator[tuple[int, PackedBucket]]:
        """(bucket start, its entries, all below `tail`) of each piece. No bitmap is made."""
        contents = self._value
        count = _PART.unpack_from(contents)[2]
        starts = np.frombuffer(contents, "<i8", count, _PART.size).tolist()
        entries = np.frombuffer(contents, "<u4", count, _PART.size + 8 * count).tolist()
        ends = np.frombuffer(contents, "<u4", count, _PART.size + 12 * count).tolist()
        first = _PART.size + _PIECE_BYTES * count
        begin = 0
        for start_ms, held, end in zip(starts, entries, ends, strict=True):
            yield start_ms, PackedBucket(bytes(contents[first + begin : first + end]), held, tail)
            begin = end


def read_part(
    environment: Environment, ledger_id: int, snapshot_id: int, metadata: Metadata, number: int
) -> Iterator[tuple[int, PackedBucket]]:
    """The buckets of one part of a snapshot. Raises Unusable. About a ms a MiB."""
    key = snapshot_part_key(ledger_id, snapshot_id, number)
    with environment.read() as raw:
        value = raw.get(key)
        if value is None:
            raise part_missing(number, metadata)
        part = Part(key, value, metadata.parts[number])
    return part.buckets(metadata.tail)


def part_missing(number: int, metadata: Metadata) -> Unusable:
    """The error of a snapshot one of whose parts is not there."""
    return Unusable(f"part {number} of {len(metadata.parts)} is missing")


# -- what is there ---------------------------------------------------------------------------------


def snapshot_ids(raw: Reads, table: Table, ledger_id: int) -> list[int]:
    """Ascending snapshot ids of a log in SNAPSHOT_META, or in SNAPSHOT_PART once for each part. O(keys)."""
    return [int.from_bytes(key[9:17], "big") for key, _ in snapshot_keys(raw, table, ledger_id)]


def snapshot_keys(raw: Reads, table: Table, ledger_id: int | None = None) -> Iterator[tuple[bytes, int]]:
    """(key, bytes of the value) of SNAPSHOT_META or SNAPSHOT_PART, of one log or of all. Reads no value."""
    prefix = bytes((table,)) + (b"" if ledger_id is None else ledger_id.to_bytes(8, "big"))
    cursor = raw.cursor()
    more = cursor.set_range(prefix)
    while more:
        key = bytes(cursor.key())
        if not key.startswith(prefix):
            return
        yield key, len(cursor.value())
        more = cursor.next()


# -- inspection, without using them -----------------------------------------------------------------


class SnapshotState(Enum):
    """State of a snapshot. Only a COMPLETE one is ever restored from; the next one's writer removes TORN ones."""

    COMPLETE = "complete"
    TORN = "torn"
    """Parts without metadata: the process ended while it was written."""
    DAMAGED = "damaged"
    """Metadata or a part does not verify, or is of a version that this library does not know."""


class SnapshotInfo(NamedTuple):
    """A snapshot found in a partition's environment; `metadata` is None where it cannot be read."""

    ledger_id: int
    snapshot_id: int
    state: SnapshotState
    reason: str
    """Why it is not complete; empty if it is."""
    parts: int
    """Parts found."""
    stored_bytes: int
    """Bytes of the parts found and the metadata."""
    metadata: Metadata | None


def inspect_snapshots(
    environment: Environment, ledger_id: int | None = None, *, read_parts: bool = False
) -> Iterator[SnapshotInfo]:
    """Iterate over every snapshot of a log, or of all logs of a partition, by log and id.

    `read_parts` reads every part and verifies its checksum (about 3 ms a million entries); else metadata only, and
    that all of its parts are there.
    """
    parts: dict[tuple[int, int], dict[int, int]] = {}
    complete: dict[tuple[int, int], int] = {}
    with environment.read() as raw:
        for key, size in snapshot_keys(raw, Table.SNAPSHOT_PART, ledger_id):
            parts.setdefault(split_snapshot_key(key), {})[trailing_u32(key)] = size
        for key, size in snapshot_keys(raw, Table.SNAPSHOT_META, ledger_id):
            complete[split_snapshot_key(key)] = size
    for of_ledger, snapshot_id in sorted({*parts, *complete}):
        sizes = parts.get((of_ledger, snapshot_id), {})
        stored_bytes = sum(sizes.values()) + complete.get((of_ledger, snapshot_id), 0)
        state, reason, metadata = SnapshotState.COMPLETE, "", None
        if (of_ledger, snapshot_id) not in complete:
            state, reason = SnapshotState.TORN, "it was not finished"
        else:
            try:
                with environment.read() as raw:
                    candidate = read_metadata(raw, of_ledger, snapshot_id)
                for number in range(len(candidate.parts)):
                    if read_parts:
                        read_part(environment, of_ledger, snapshot_id, candidate, number)
                    elif number not in sizes:
                        raise part_missing(number, candidate)
                metadata = candidate
            except Unusable as error:
                state, reason = SnapshotState.DAMAGED, str(error)
        yield SnapshotInfo(of_ledger, snapshot_id, state, reason, len(sizes), stored_bytes, metadata)
