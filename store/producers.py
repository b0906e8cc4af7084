"""What a named producer has stored, so that what it sends again after a crash is not stored twice.

A record stands in every environment that the producer has written to, and is written in the same
transaction as its messages: the watermark (every sequence number up to it is stored somewhere) as it was
then, and the sequence numbers above it that are stored in this environment. The largest watermark of all
environments holds, and a number above it is stored if any environment has it. So a batch over several
partitions, some of which were committed before a crash, is told apart message by message.

    producer record := watermark:i64 bitmap        roaring, 64 bits; key: topic id, producer name
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import lmdb
from pyroaring import BitMap64

from . import catalog
from . import format as fmt
from .format import CorruptRecord, Table
from .transaction import Transaction

_WATERMARK = struct.Struct(">q")

NONE_STORED = -1
"""The watermark of a producer that has stored nothing."""


class ProducerRecord(NamedTuple):
    """Every sequence number up to `watermark` is stored, and those of `above`."""

    watermark: int
    above: BitMap64

    def pack(self) -> bytes:
        """The record's fields."""
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


def read(raw: lmdb.Transaction, topic_id: int, name: str) -> ProducerRecord:
    """What one environment knows of a producer; nothing() when it knows none."""
    key = fmt.producer_key(topic_id, name)
    value = raw.get(key)
    return nothing() if value is None else ProducerRecord.unpack(fmt.unseal(key, value))


def names(raw: lmdb.Transaction, topic_id: int | None = None) -> list[tuple[int, str, ProducerRecord]]:
    """(topic id, producer, record) of every producer that an environment knows, or of one topic."""
    found = catalog.rows(raw, fmt.prefix(Table.PRODUCER, topic_id))
    return [(fmt.trailing_u32(key[:5]), key[5:].decode(), ProducerRecord.unpack(fields)) for key, fields in found]


def merge(transaction: Transaction, topic_id: int, name: str, record: ProducerRecord) -> None:
    """Make an environment know what `record` says, besides what it knows."""
    key = fmt.producer_key(topic_id, name)
    fields = transaction.get(key)
    known = nothing() if fields is None else ProducerRecord.unpack(fields)
    transaction.put(key, known.merged(record).pack())
