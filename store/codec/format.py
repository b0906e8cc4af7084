"""Keys and small records of both kinds of environment: the one place where their bytes are laid down.

Every environment is one unnamed LMDB database whose keys begin with a table byte, so that a small
commit touches one tree and the runs of the newest ledger lie at the end of it. Keys are big-endian:
byte order is key order. The value of a small record is its packed fields followed by the CRC-32 of
key and fields; runs have a layout of their own (run.py).

docs/format.md is the grammar with a worked example. How a format is changed: CONTRIBUTING.md, "Changing the format on
disk".
"""

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple, Self

from ..errors import CorruptRecord
from ..position import ENTRY_MASK, Position
from .checksum import crc32

FORMAT_VERSION = 1
"""Version of everything below; stands in the STORE file and in each partition's info record."""

MAX_ENTRY_ID = ENTRY_MASK - 1
"""Entry ids are 32 bits wide, so that roaring bitmaps hold them; the last value is kept for limits."""


class Table(IntEnum):
    """First byte of every key."""

    COUNTER = 0x01  # both: name -> u64 (allocators, clock mark, places in the write-ahead log)
    TOPIC = 0x02  # main: full topic name -> TopicRecord
    TOPIC_NAME = 0x03  # main: topic id -> full topic name
    POLICY = 0x04  # main: scope name -> msgpack of the policies set there (policy_records.py)
    DOCUMENT = 0x05  # main: a program's key -> version, value (store/log/documents.py)
    PARTITION = 0x10  # main: partition start -> PartitionRecord
    LOG = 0x11  # partition: topic id -> ledger id
    PARTITION_INFO = 0x12  # partition: one record, PartitionInfo
    ORIGIN = 0x13  # partition: one record of a generation that compaction made, OriginRecord
    FRONTIER = 0x20  # main: topic id, partition start -> FrontierRecord
    LEDGER = 0x30  # main: topic id, ledger id -> LedgerRecord
    CURSOR = 0x31  # main: topic id, subscription name -> CursorRecord
    ACKED = 0x32  # main: subscription id, ledger id -> roaring bitmap
    ATTEMPTS = 0x33  # main: subscription id, ledger id, block -> failed deliveries
    PAUSE = 0x34  # main: subscription id -> u64, until when it is paused (epoch ms)
    CANCELLED = 0x40  # main: partition log's ledger id, block -> roaring bitmap
    ADMITTED = 0x41  # main: partition log's ledger id, block -> roaring bitmap of conditional entries that may fire
    SEQUENCE = 0x52  # main: topic id, producer name, block -> roaring bitmap
    KEY = 0x53  # main: topic id, deduplication key -> its message (sent_ids.py)
    NUMBERED = 0x54  # main: topic id, producer name, last number -> the ids of the messages (sent_ids.py)
    RECURRENCE = 0x55  # main: topic id, schedule name -> msgpack (duelog/upkeep/schedule.py)
    SET_ASIDE = 0x60  # main: ledger id, entry id -> reason
    SNAPSHOT_PART = 0x70  # partition: ledger id, snapshot id, part -> bitmaps (snapshot/snapshot_format.py)
    SNAPSHOT_META = 0x71  # partition: ledger id, snapshot id -> snapshot/snapshot_format.py: Metadata
    COPY = 0x80  # both: key of another record -> the same fields
    RUN = 0xF0  # both: ledger id, first entry id -> run


_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
_KEY_64 = struct.Struct(">BQ")
_KEY_32 = struct.Struct(">BI")
_KEY_32_64 = struct.Struct(">BIQ")
_KEY_64_32 = struct.Struct(">BQI")
_KEY_64_64 = struct.Struct(">BQQ")
_KEY_64_64_32 = struct.Struct(">BQQI")
_CRC = struct.Struct("<I")

CRC_BYTES = _CRC.size


def seal(key: bytes, fields: bytes) -> bytes:
    """The value to store for `fields` under `key`: the fields and a CRC-32 over both."""
    return fields + _CRC.pack(crc32(fields, crc32(key)))


def unseal(key: bytes, value: bytes | memoryview) -> bytes:
    """The fields of a sealed value. Raises CorruptRecord when the checksum does not match."""
    if len(value) < CRC_BYTES:
        raise CorruptRecord(f"record {key.hex()} has {len(value)} bytes")
    fields = bytes(value[:-CRC_BYTES])
    if _CRC.unpack_from(value, len(fields))[0] != crc32(fields, crc32(key)):
        raise CorruptRecord(f"record {key.hex()} does not match its checksum")
    return fields


def counter_key(name: str) -> bytes:
    return bytes((Table.COUNTER,)) + name.encode()


def topic_key(name: str) -> bytes:
    return bytes((Table.TOPIC,)) + name.encode()


def topic_name_key(topic_id: int) -> bytes:
    return _KEY_32.pack(Table.TOPIC_NAME, topic_id)


def policy_key(scope: str) -> bytes:
    return bytes((Table.POLICY,)) + scope.encode()


def document_key(name: bytes) -> bytes:
    return bytes((Table.DOCUMENT,)) + name


def partition_key(start_ms: int) -> bytes:
    return _KEY_64.pack(Table.PARTITION, start_ms)


def log_key(topic_id: int) -> bytes:
    return _KEY_32.pack(Table.LOG, topic_id)


PARTITION_INFO_KEY = bytes((Table.PARTITION_INFO,))
ORIGIN_KEY = bytes((Table.ORIGIN,))


def frontier_key(topic_id: int, start_ms: int) -> bytes:
    return _KEY_32_64.pack(Table.FRONTIER, topic_id, start_ms)


def ledger_key(topic_id: int, ledger_id: int) -> bytes:
    return _KEY_32_64.pack(Table.LEDGER, topic_id, ledger_id)


def cursor_key(topic_id: int, subscription: str) -> bytes:
    return _KEY_32.pack(Table.CURSOR, topic_id) + subscription.encode()


def acked_key(subscription_id: int, ledger_id: int) -> bytes:
    return _KEY_32_64.pack(Table.ACKED, subscription_id, ledger_id)


def pause_key(subscription_id: int) -> bytes:
    return _KEY_32.pack(Table.PAUSE, subscription_id)


def ledger_of_subscription(key: bytes) -> int:
    """The ledger id of a key of ACKED or ATTEMPTS."""
    return int(_U64.unpack(key[5:13])[0])


def schedule_key(topic_id: int, name: str) -> bytes:
    return _KEY_32.pack(Table.RECURRENCE, topic_id) + name.encode()


def sequence_prefix(topic_id: int, name: str) -> bytes:
    """Beginning shared by the keys of a producer's blocks, and by no others: a name holds no NUL, a block begins so."""
    return _KEY_32.pack(Table.SEQUENCE, topic_id) + name.encode() + b"\0"


def sequence_key(topic_id: int, name: str, block: int) -> bytes:
    return _KEY_32.pack(Table.SEQUENCE, topic_id) + name.encode() + _U64.pack(block)


def block_prefix(table: Table, ledger_id: int) -> bytes:
    """Beginning shared by the records of a log in CANCELLED, ADMITTED or SET_ASIDE."""
    return _KEY_64.pack(table, ledger_id)


def block_key(table: Table, ledger_id: int, block: int) -> bytes:
    """Key of a block of CANCELLED or ADMITTED."""
    return _KEY_64_32.pack(table, ledger_id, block)


def quarantine_key(ledger_id: int, entry_id: int) -> bytes:
    return _KEY_64_32.pack(Table.SET_ASIDE, ledger_id, entry_id)


def snapshot_part_key(ledger_id: int, snapshot_id: int, part: int) -> bytes:
    return _KEY_64_64_32.pack(Table.SNAPSHOT_PART, ledger_id, snapshot_id, part)


def snapshot_meta_key(ledger_id: int, snapshot_id: int) -> bytes:
    return _KEY_64_64.pack(Table.SNAPSHOT_META, ledger_id, snapshot_id)


def split_snapshot_key(key: bytes | memoryview) -> tuple[int, int]:
    """(ledger id, snapshot id) of the key of a snapshot's part or metadata."""
    _, ledger_id, snapshot_id = _KEY_64_64.unpack(key[: _KEY_64_64.size])
    return ledger_id, snapshot_id


def run_key(ledger_id: int, first_entry: int) -> bytes:
    return _KEY_64_32.pack(Table.RUN, ledger_id, first_entry)


def split_run_key(key: bytes | memoryview, at: int = 0) -> tuple[int, int]:
    """(ledger id, first entry id) of a run's key, which begins at a byte."""
    _, ledger_id, first_entry = _KEY_64_32.unpack_from(key, at)
    return ledger_id, first_entry


RUN_PREFIX = bytes((Table.RUN,))
RUN_KEY_BYTES = _KEY_64_32.size


def run_prefix(ledger_id: int) -> bytes:
    """Beginning shared by the keys of a ledger's runs, and by no others."""
    return _KEY_64.pack(Table.RUN, ledger_id)


def is_run_of(key: bytes | memoryview, ledger_id: int) -> bool:
    """True for a key of a run of the ledger."""
    return len(key) == RUN_KEY_BYTES and bytes(key[: _KEY_64.size]) == run_prefix(ledger_id)


def prefix(table: Table, number: int | None = None) -> bytes:
    """Beginning shared by the keys of a table, or by those of one 32-bit id in it."""
    return bytes((table,)) if number is None else _KEY_32.pack(table, number)


def leading_u32(key: bytes | memoryview) -> int:
    """The 32-bit number that a key has after its table byte: a topic or subscription id."""
    return int(_U32.unpack(key[1:5])[0])


def leading_u64(key: bytes | memoryview) -> int:
    """The 64-bit number that a key has after its table byte: a ledger id."""
    return int(_U64.unpack(key[1:9])[0])


def name_of(key: bytes) -> str:
    """The name that a key of COUNTER, TOPIC, POLICY or DOCUMENT has after its table byte."""
    return key[1:].decode()


def split_named_key(key: bytes, errors: str = "strict") -> tuple[int, str]:
    """(topic id, name) of a key of CURSOR or RECURRENCE; `errors` as of bytes.decode."""
    return leading_u32(key), key[5:].decode(errors=errors)


def trailing_u64(key: bytes | memoryview) -> int:
    """The 64-bit number that ends a key: a partition start or a ledger id."""
    return int(_U64.unpack(key[-8:])[0])


def trailing_u32(key: bytes | memoryview) -> int:
    """The 32-bit number that ends a key: a topic id or an entry id."""
    return int(_U32.unpack(key[-4:])[0])


def unpack_fields(layout: struct.Struct, fields: bytes, what: str) -> tuple[Any, ...]:
    """The fields of a record named `what`. Raises CorruptRecord when their length is not that of the layout."""
    if len(fields) != layout.size:
        raise CorruptRecord(f"{what} has {len(fields)} bytes, expected {layout.size}")
    return layout.unpack(fields)


def pack_u64(value: int) -> bytes:
    return _U64.pack(value)


def unpack_u64(fields: bytes) -> int:
    return int(unpack_fields(_U64, fields, "number")[0])


_TOPIC = struct.Struct(">IQ")


class TopicRecord(NamedTuple):
    """A topic of the catalog."""

    topic_id: int
    created_ms: int

    def pack(self) -> bytes:
        return _TOPIC.pack(*self)

    @classmethod
    def unpack(cls, fields: bytes) -> Self:
        return cls(*unpack_fields(_TOPIC, fields, "topic record"))


class PartitionState(IntEnum):
    """Recorded state of a time partition; future and current are both OPEN, the clock tells them apart."""

    OPEN = 0
    CLOSED = 1
    DELETING = 2


_PARTITION = struct.Struct(">QIBIQ")


class PartitionRecord(NamedTuple):
    """A time partition of the catalog.

    `references` counts, once it is CLOSED, the topics that have not released it; at zero it is deleted.
    """

    end_ms: int
    generation: int
    state: PartitionState
    references: int
    created_ms: int

    def pack(self) -> bytes:
        return _PARTITION.pack(*self)

    @classmethod
    def unpack(cls, fields: bytes) -> Self:
        end_ms, generation, state, references, created_ms = unpack_fields(_PARTITION, fields, "partition record")
        return cls(end_ms, generation, PartitionState(state), references, created_ms)


_PARTITION_INFO = struct.Struct(">H16sQQI")


class PartitionInfo(NamedTuple):
    """The identity that a partition's directory has in it, so that a copied or swapped one is found at open."""

    version: int
    store_id: bytes
    start_ms: int
    end_ms: int
    generation: int

    def pack(self) -> bytes:
        return _PARTITION_INFO.pack(*self)

    @classmethod
    def unpack(cls, fields: bytes) -> Self:
        return cls(*unpack_fields(_PARTITION_INFO, fields, "partition info"))


_LEDGER = struct.Struct(">QQIQB")


class LedgerState(IntEnum):
    """OPEN takes appends (the last of a topic), CLOSED is complete, TRIMMING is trimmed: its runs are being removed."""

    OPEN = 0
    CLOSED = 1
    TRIMMING = 2


class LedgerRecord(NamedTuple):
    """A ledger of a main log; `closed_ms`, `entries` and `stored_bytes` hold once it is no longer OPEN."""

    created_ms: int
    closed_ms: int
    entries: int
    stored_bytes: int
    state: LedgerState

    def pack(self) -> bytes:
        return _LEDGER.pack(*self)

    @classmethod
    def unpack(cls, fields: bytes) -> Self:
        created_ms, closed_ms, entries, stored_bytes, state = unpack_fields(_LEDGER, fields, "ledger record")
        return cls(created_ms, closed_ms, entries, stored_bytes, LedgerState(state))


_CURSOR = struct.Struct(">IQQIB")


class CursorRecord(NamedTuple):
    """A subscription: its id and its mark-delete position, of which `next_entry` is the entry after.

    `flags` bit 0: paused, for ever unless PAUSE has a time; bit 1: it holds dead letters.
    """

    subscription_id: int
    created_ms: int
    ledger_id: int
    next_entry: int
    flags: int

    @property
    def mark_delete(self) -> Position:
        return Position(self.ledger_id, self.next_entry - 1)

    def pack(self) -> bytes:
        return _CURSOR.pack(*self)

    @classmethod
    def unpack(cls, fields: bytes) -> Self:
        return cls(*unpack_fields(_CURSOR, fields, "cursor record"))


# -- failed deliveries: of one subscription, in one block of a main-log ledger, in the order of their entry ids ----

ATTEMPTS_BLOCK_BITS = 10
"""A block has 1,024 entries, so that one failed delivery rewrites at most 22 KiB."""

_ATTEMPTS_KEY = struct.Struct(">BIQI")
_ATTEMPTS_ROW = struct.Struct(">HIQQ")


class FailedDeliveries(NamedTuple):
    """Failed deliveries of one message: how many, and when the first and the last of them ended (epoch ms)."""

    times: int
    first_ms: int
    last_ms: int


def attempts_key(subscription_id: int, ledger_id: int, block: int) -> bytes:
    return _ATTEMPTS_KEY.pack(Table.ATTEMPTS, subscription_id, ledger_id, block)


def split_attempts_key(key: bytes) -> tuple[int, int, int]:
    """(subscription id, ledger id, block) of a key of ATTEMPTS."""
    _, subscription_id, ledger_id, block = _ATTEMPTS_KEY.unpack(key)
    return subscription_id, ledger_id, block


def pack_attempts(rows: Mapping[int, FailedDeliveries]) -> bytes:
    """Pack failed deliveries by entry id, all of one block, into the fields of a record."""
    mask = (1 << ATTEMPTS_BLOCK_BITS) - 1
    return b"".join(
        _ATTEMPTS_ROW.pack(entry_id & mask, min(row.times, 2**32 - 1), max(row.first_ms, 0), max(row.last_ms, 0))
        for entry_id, row in sorted(rows.items())
    )


def unpack_attempts(block: int, fields: bytes) -> dict[int, FailedDeliveries]:
    """The inverse of `pack_attempts`. Raises CorruptRecord."""
    if len(fields) % _ATTEMPTS_ROW.size or not fields:
        raise CorruptRecord(f"record of failed deliveries has {len(fields)} bytes, not rows of {_ATTEMPTS_ROW.size}")
    rows: dict[int, FailedDeliveries] = {}
    before = -1
    for offset, times, first_ms, last_ms in _ATTEMPTS_ROW.iter_unpack(fields):
        if not before < offset < 1 << ATTEMPTS_BLOCK_BITS or not times:
            raise CorruptRecord(f"record of failed deliveries has {times} of entry {offset} after entry {before}")
        before = offset
        rows[block << ATTEMPTS_BLOCK_BITS | offset] = FailedDeliveries(times, first_ms, last_ms)
    return rows


# -- the origin of a compacted generation, by which it is adopted or thrown away ------------------
#
# It stands in the generation itself, so that adoption needs nothing else, and stays there afterwards.
#
#     origin record := generation:u32 transaction:u64 file_bytes:u64 entries:u64 body_bytes:u64 count:u32 relied[count]
#     relied        := topic_id:u32 ledger_id:u64 size:u32 bitmap        roaring, `size` bytes
#
# `generation`, `transaction` and `file_bytes` are of the source: its number, the number of its last LMDB transaction,
# the length of its files. `entries` and `body_bytes` count what was dropped. `relied` are the positions of main logs
# because of whose acknowledgement, by every subscription, bodies were dropped.

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
        head = _ORIGIN.pack(*self[:5], len(self.relied_on))
        return head + b"".join(_RELIED.pack(*row[:2], len(row.positions)) + row.positions for row in self.relied_on)

    @classmethod
    def unpack(cls, fields: bytes) -> Self:
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


# -- copies: each small record stands twice, written and removed in the same transaction ------------
#
# Nothing but a transaction writes copies, and nothing but `check` and `repair` reads them. They lie under keys of their
# own, after all other small records, so that one page that went bad does not take both.

NOT_COPIED = frozenset((Table.PARTITION_INFO, Table.ORIGIN, Table.SNAPSHOT_PART, Table.SNAPSHOT_META))
"""Tables whose records stand once: they can be told from where they lie, or be made again from the log."""


def copy_key(key: bytes) -> bytes:
    """Key of the copy of the record under `key`."""
    return bytes((Table.COPY,)) + key


def copied_key(key: bytes) -> bytes:
    """Key of the record that the copy under `key` is of."""
    return key[1:]
