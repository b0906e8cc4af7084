"""Records by which a message is found that was sent under a name: a deduplication key, a number of a producer.

    KEY      := start_ms:i64 ledger:u64 entry:u32 until_ms:u64    key: topic id, deduplication key
    NUMBERED := row*                                              key: topic id, producer name, NUL, last number u64
    row      := length:u32 start_ms:i64 ledger:u64 first:u32

`start_ms` is of the time partition that the message went into, -1 for the main log: what lay in a partition that is
gone is known to be gone. The rows of NUMBERED are of consecutive numbers, up to the one in the key; those of a row are
of consecutive entries.
"""

import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Self

from ..errors import CorruptRecord
from ..position import MessageId
from .body import DEDUP, decode_body
from .format import Table, leading_u32, prefix, trailing_u64, unpack_fields

IN_MAIN = -1
"""`start_ms` of a message in the main log."""

MOST_ROWS = 64
"""Rows of a record of numbers, at most: 1.5 KiB."""

_WITH_EXTRA = 0x95
"""First byte of a body of five fields."""

_KEY = struct.Struct(">qQIQ")
_ROW = struct.Struct(">IqQI")
_U64 = struct.Struct(">Q")


def dedup_key_of(body: bytes) -> str | None:
    """The deduplication key that a message was sent with; None: without one, or the body is none."""
    if not body or body[0] != _WITH_EXTRA:
        return None
    try:
        extra = decode_body(body)[4]
    except ValueError:
        return None
    return dedup_key_in(extra)


def dedup_key_in(extra: Mapping[str, object] | None) -> str | None:
    """The deduplication key in a body's `extra`; None: there is none."""
    key = None if extra is None else extra.get(DEDUP)
    return key if isinstance(key, str) else None


class KeyRecord(NamedTuple):
    """The message of a deduplication key.

    until_ms: until then (epoch ms) the key holds although the message has fired; 0: no longer than it is pending.
    """

    start_ms: int
    ledger_id: int
    entry_id: int
    until_ms: int

    @property
    def message_id(self) -> MessageId:
        return MessageId(self.ledger_id, self.entry_id)

    def pack(self) -> bytes:
        return _KEY.pack(*self)

    @classmethod
    def unpack(cls, fields: bytes) -> Self:
        """The inverse of `pack`. Raises CorruptRecord."""
        return cls(*unpack_fields(_KEY, fields, "record of a key"))


class NumberedRow(NamedTuple):
    """The messages of consecutive numbers that are consecutive entries of a log."""

    length: int
    start_ms: int
    ledger_id: int
    first_entry: int


def pack_numbered(rows: Sequence[NumberedRow]) -> bytes:
    """The fields of a NUMBERED record."""
    return b"".join(_ROW.pack(*row) for row in rows)


def unpack_numbered(last: int, fields: bytes) -> list[tuple[int, NumberedRow]]:
    """The inverse of `pack_numbered`: each row after the first of its numbers, given the last. Raises CorruptRecord."""
    if len(fields) % _ROW.size or not fields:
        raise CorruptRecord(f"record of numbered messages has {len(fields)} bytes, not rows of {_ROW.size}")
    rows = [NumberedRow(*row) for row in _ROW.iter_unpack(fields)]
    ends = list(accumulate(row.length for row in rows))
    if ends[-1] > last + 1 or not all(row.length for row in rows):
        raise CorruptRecord(f"record of numbered messages has {ends[-1]} up to number {last}")
    first = last + 1 - ends[-1]
    return [(first + end - row.length, row) for end, row in zip(ends, rows, strict=True)]


def sent_key(topic_id: int, name: str) -> bytes:
    """Key of the record of a deduplication key."""
    return prefix(Table.KEY, topic_id) + name.encode()


def numbered_prefix(topic_id: int, producer: str) -> bytes:
    """Beginning shared by the records of a producer's numbers, and by no others: a name holds no NUL."""
    return prefix(Table.NUMBERED, topic_id) + producer.encode() + b"\0"


def numbered_key(topic_id: int, producer: str, last: int) -> bytes:
    """Key of the record of the ids of numbers up to `last`."""
    return numbered_prefix(topic_id, producer) + _U64.pack(last)


def split_numbered_key(key: bytes) -> tuple[int, str, int]:
    """(topic id, producer name, last number) of a key of NUMBERED."""
    return leading_u32(key), key[5:-9].decode(), trailing_u64(key)
