"""Which sequence numbers a named producer has stored, so that one that is sent again is not stored again.

The main environment records exactly the numbers whose messages are stored: they are rows of the group of the
write-ahead log that stores these, so after any crash a number is recorded if and only if its message is there. No
record says anything of a number between two others: numbers may be left out, and of a batch that is several groups a
crash may leave the first.

Numbers lie in blocks of 65,536, each a roaring bitmap in a row of its own, and consecutive numbers cost one row of some
60 bytes a block. Older versions recorded in each partition the numbers of the messages there, under the same keys, so a
number is stored if any environment has it; what a partition has goes to the main environment when it is deleted.

Stores written before that have a record of another form, which is read and never written for new numbers: a watermark,
up to which every number is taken for stored, and single numbers above it.

    SEQUENCE := bitmap                     roaring, 64 bits, whole numbers; key: topic id, producer name, block u64
    PRODUCER := watermark:i64 bitmap       key: topic id, producer name
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pyroaring import BitMap64

from ..store.codec import format as fmt
from ..store.codec.format import Table
from ..store.env.memtable import Reads, unapplied_numbers
from ..store.env.transaction import Transaction
from ..store.errors import CorruptRecord
from ..store.log import catalog

BLOCK_BITS = 16

_WATERMARK = struct.Struct(">q")

NONE_STORED = -1
"""The watermark where there is none."""


class ProducerRecord(NamedTuple):
    """What is stored: the numbers of `above`, and every number up to `watermark`, which old stores alone have."""

    watermark: int
    above: BitMap64

    @property
    def last(self) -> int:
        """The highest number stored; -1: none."""
        return int(self.above.max()) if self.above else self.watermark

    def pack(self) -> bytes:
        """The fields of a PRODUCER record."""
        return _WATERMARK.pack(self.watermark) + bytes(self.above.serialize())

    @classmethod
    def unpack(cls, fields: bytes) -> ProducerRecord:
        """The inverse of `pack`. Raises CorruptRecord."""
        if len(fields) < _WATERMARK.size:
            raise CorruptRecord(f"producer record has {len(fields)} bytes")
        (watermark,) = _WATERMARK.unpack_from(fields)
        return cls(watermark, BitMap64.deserialize(fields[_WATERMARK.size :]))

    def merged(self, other: ProducerRecord) -> ProducerRecord:
        """What holds when both hold."""
        watermark = max(self.watermark, other.watermark)
        above = self.above | other.above
        above.remove_range(0, watermark + 1)
        return ProducerRecord(watermark, above)


def nothing() -> ProducerRecord:
    """What is known of a producer that has stored nothing; a new value each time, since bitmaps change in place."""
    return ProducerRecord(NONE_STORED, BitMap64())


def read(raw: Reads, topic_id: int, name: str) -> ProducerRecord:
    """What one environment has recorded of a producer; nothing() when that is nothing. O(blocks)."""
    key = fmt.producer_key(topic_id, name)
    value = raw.get(key)
    record = nothing() if value is None else ProducerRecord.unpack(fmt.unseal(key, value))
    numbers = BitMap64()
    for _, fields in catalog.rows(raw, fmt.sequence_prefix(topic_id, name)):
        numbers |= BitMap64.deserialize(fields)
    numbers |= unapplied_numbers(raw, fmt.sequence_prefix(topic_id, name))
    return record.merged(ProducerRecord(NONE_STORED, numbers))


def blocks(topic_id: int, name: str, numbers: BitMap64) -> Iterator[tuple[bytes, BitMap64]]:
    """Numbers by the key of the record that they are united with."""
    left = BitMap64(numbers)
    while left:
        block = left.min() >> BLOCK_BITS
        members = left & BitMap64(range(block << BLOCK_BITS, (block + 1) << BLOCK_BITS)) if len(left) > 1 else left
        members.run_optimize()
        yield fmt.sequence_key(topic_id, name, block), members
        left = left - members


def split_key(key: bytes) -> tuple[int, str, int]:
    """(topic id, producer name, block) of a key of SEQUENCE."""
    return fmt.leading_u32(key), key[5:-8].decode(), fmt.trailing_u64(key)


def all_rows(raw: Reads, topic_id: int | None = None) -> list[tuple[bytes, bytes]]:
    """(key, fields) of everything that an environment has recorded of producers, or of those of one topic."""
    tables = (Table.PRODUCER, Table.SEQUENCE)
    return [row for table in tables for row in catalog.rows(raw, fmt.prefix(table, topic_id))]


def take_over(transaction: Transaction, rows: Iterable[tuple[bytes, bytes]]) -> None:
    """Record in the main environment what another one had recorded, for topics that still exist."""
    for key, fields in rows:
        if catalog.topic_name(transaction.raw, fmt.leading_u32(key)) is None:
            continue
        known = transaction.get(key)
        transaction.put(key, fields if known is None else _both(Table(key[0]), known, fields))


def _both(table: Table, one: bytes, other: bytes) -> bytes:
    if table is Table.PRODUCER:
        return ProducerRecord.unpack(one).merged(ProducerRecord.unpack(other)).pack()
    numbers = BitMap64.deserialize(one) | BitMap64.deserialize(other)
    numbers.run_optimize()
    return bytes(numbers.serialize())


def remove(transaction: Transaction, topic_id: int) -> None:
    """Forget the producers of a topic."""
    for key, _ in all_rows(transaction.raw, topic_id):
        transaction.delete(key)
