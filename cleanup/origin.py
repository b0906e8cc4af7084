"""The origin record of a compacted generation, by which it is adopted or thrown away.

It stands in the generation itself, so that adoption needs nothing else, and stays there afterwards.

    origin record := generation:u32 transaction:u64 file_bytes:u64 entries:u64 body_bytes:u64 count:u32 relied[count]
    relied        := topic_id:u32 ledger_id:u64 size:u32 bitmap        roaring, `size` bytes

`generation`, `transaction` and `file_bytes` are of the source: its number, the number of its last LMDB transaction,
and the length of its file. `entries` and `body_bytes` count what was dropped. `relied` are the positions of main logs
because of whose acknowledgement, by every subscription, bodies were dropped.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ..store.errors import CorruptRecord

_ORIGIN = struct.Struct(">IQQQQI")
_RELIED = struct.Struct(">IQI")


class Relied(NamedTuple):
    """Positions of a topic's main-log ledger that were acknowledged by every subscription: a serialised bitmap."""

    topic_id: int
    ledger_id: int
    positions: bytes


class OriginRecord(NamedTuple):
    """The source of a generation, the amount dropped, and the acknowledgements that allowed it."""

    generation: int
    transaction: int
    file_bytes: int
    entries: int
    body_bytes: int
    relied_on: tuple[Relied, ...]

    def pack(self) -> bytes:
        """The record's fields."""
        head = _ORIGIN.pack(*self[:5], len(self.relied_on))
        return head + b"".join(_RELIED.pack(*row[:2], len(row.positions)) + row.positions for row in self.relied_on)

    @classmethod
    def unpack(cls, fields: bytes) -> OriginRecord:
        """The inverse of `pack`. Raises CorruptRecord."""
        try:
            generation, transaction, file_bytes, entries, body_bytes, count = _ORIGIN.unpack_from(fields)
            at = _ORIGIN.size
            relied_on = []
            for _ in range(count):
                topic_id, ledger_id, size = _RELIED.unpack_from(fields, at)
                at += _RELIED.size
                relied_on.append(Relied(topic_id, ledger_id, fields[at : at + size]))
                at += size
        except struct.error as error:
            raise CorruptRecord(f"origin record has {len(fields)} bytes: {error}") from error
        if at != len(fields):
            raise CorruptRecord(f"origin record has {len(fields)} bytes, expected {at}")
        return cls(generation, transaction, file_bytes, entries, body_bytes, tuple(relied_on))
