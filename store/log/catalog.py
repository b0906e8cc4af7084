"""The catalog in the main environment: number allocators, topics, partitions, frontiers, cursors' rows.

Plain functions from a transaction to records and back; nothing is cached here, and that several
rows agree is up to their writers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..codec import format as fmt
from ..codec.format import (
    CursorRecord,
    FailedDeliveries,
    LedgerRecord,
    PartitionRecord,
    Table,
    TopicRecord,
    split_attempts_key,
    unpack_attempts,
)
from ..codec.frontier import FrontierRecord
from ..codec.run import UInt32s
from ..env.environment import Environment
from ..env.memtable import ABSENT, PAST, Entry, Reads, fields_over, overlaid, unapplied_records
from ..env.transaction import Transaction
from ..errors import CorruptRecord

LEDGERS = "next_ledger"
TOPICS = "next_topic"
SUBSCRIPTIONS = "next_subscription"
DOCUMENTS = "next_document"
CLOCK = "clock_mark"
WAL = "wal_segment"
"""The number of the oldest segment of the write-ahead log that is not applied."""

PASSED_OVER = "passed_over/"
"""In a partition, before the id of a log's ledger: how many of its ids takeovers have passed over."""

_PAGE, _PAGE_BYTES = 1_000, 1 << 20
"""Rows read in one transaction by the iterators over an environment, and bytes after which one ends."""


def take_numbers(transaction: Transaction, name: str, count: int = 1) -> int:
    """Allocate `count` consecutive numbers under the counter `name`; returns the first (1 at first use)."""
    key = fmt.counter_key(name)
    fields = transaction.get(key)
    first = 1 if fields is None else fmt.unpack_u64(fields)
    transaction.put(key, fmt.pack_u64(first + count))
    return first


class Rows(Protocol):
    """A transaction, or what was copied out of one: sealed values by key."""

    def get(self, key: bytes, /) -> Any: ...


def fields_of(raw: Rows, key: bytes) -> bytes | None:
    """The fields of one small record; None: there is none. Raises CorruptRecord."""
    value = raw.get(key)
    return None if value is None else fmt.unseal(key, value)


def rows(raw: Reads, prefix: bytes, start: bytes = b"", limit: bytes = PAST) -> Iterator[tuple[bytes, bytes]]:
    """(key, unsealed fields) of every record whose key begins with `prefix`, from `start`, before `limit`.

    Raises CorruptRecord at a damaged one.
    """
    merged = overlaid(_applied(raw, prefix, start, limit), unapplied_records(raw, prefix, start, limit), fields_over)
    return ((key, fields) for key, fields in merged if fields is not None)


def log_columns(raw: Reads) -> tuple[UInt32s, npt.NDArray[np.uint64]]:
    """The logs in a partition: topic ids, ascending, and ledger ids. For figures: checksums are not verified.

    Raises CorruptRecord.
    """
    prefix = fmt.prefix(Table.LOG)
    found = {key: value[: -fmt.CRC_BYTES] for key, value in _applied(raw, prefix)}
    for key, _ in unapplied_records(raw, prefix):
        fields = fields_of(raw, key)
        found.pop(key, None) if fields is None else found.update({key: fields})
    order = sorted(found)
    if any(len(fields) != 8 for fields in found.values()):
        raise CorruptRecord("a record of a log is not of 8 bytes")
    return (
        np.frombuffer(b"".join(order), [("table", "u1"), ("topic", ">u4")])["topic"].astype(np.uint32),
        np.frombuffer(b"".join(map(found.__getitem__, order)), ">u8").astype(np.uint64),
    )


def keys(raw: Reads, prefix: bytes) -> Iterator[bytes]:
    """Iterate over the keys of `rows`, whose records are not verified."""

    def is_there(key: bytes, value: bytes | memoryview | None, entry: Entry) -> bool:
        return entry is ABSENT or fields_over(key, value, entry) is not None

    merged = overlaid(_applied(raw, prefix), unapplied_records(raw, prefix), is_there)
    return (key for key, there in merged if there)


def _applied(
    raw: Reads, prefix: bytes, start: bytes = b"", limit: bytes = PAST
) -> Iterator[tuple[bytes, bytes | memoryview]]:
    """(key, value) of what LMDB holds."""
    cursor = raw.cursor()
    more = cursor.set_range(max(prefix, start))
    while more:
        key = bytes(cursor.key())
        if not key.startswith(prefix) or key >= limit:
            return
        yield key, cursor.value()
        more = cursor.next()


def pages(environment: Environment, prefix: bytes) -> Iterator[list[tuple[bytes, bytes]]]:
    """Iterate over rows of an environment in lists of at most 1,000, each read in a transaction of its own.

    Memory does not grow with the number of rows (PIP-442), nor with their sizes; rows added or removed meanwhile may or
    may not be listed.
    """
    start: bytes | None = prefix
    while start is not None:
        page: list[tuple[bytes, bytes]] = []
        left, following = _PAGE_BYTES, None
        with environment.read() as raw:
            for key, fields in rows(raw, prefix, start):
                page.append((key, fields))
                left -= len(fields)
                if len(page) == _PAGE or left <= 0:
                    following = key + b"\0"
                    break
        if page:
            yield page
        start = following


# -- topics ------------------------------------------------------------------------------------


def find_topic(raw: Reads, name: str) -> TopicRecord | None:
    """The record of a topic by full name, None when there is none."""
    fields = fields_of(raw, fmt.topic_key(name))
    return None if fields is None else TopicRecord.unpack(fields)


def topic_name(raw: Reads, topic_id: int) -> str | None:
    """The full name of a topic, None when there is none of that id (it was deleted)."""
    fields = fields_of(raw, fmt.topic_name_key(topic_id))
    return None if fields is None else fields.decode()


def add_topic(transaction: Transaction, name: str, now_ms: int) -> TopicRecord:
    """The record of topic `name`, created with a first, empty ledger where there is none."""
    key = fmt.topic_key(name)
    fields = transaction.get(key)
    if fields is not None:
        return TopicRecord.unpack(fields)
    record = TopicRecord(take_numbers(transaction, TOPICS), max(now_ms, 0))
    add_ledger(transaction, record.topic_id, now_ms)
    transaction.put(fmt.topic_name_key(record.topic_id), name.encode())
    transaction.put(key, record.pack())
    return record


def topic_names(environment: Environment, prefix: str = "") -> Iterator[tuple[str, TopicRecord]]:
    """(full name, record) of every topic whose full name begins with `prefix`, in order of name."""
    for page in pages(environment, fmt.topic_key(prefix)):
        for key, fields in page:
            yield fmt.name_of(key), TopicRecord.unpack(fields)


def oldest_segment(environment: Environment) -> int | None:
    """The number of the oldest segment of the write-ahead log that is needed; None: the log has not been begun."""
    fields = environment.get(fmt.counter_key(WAL))
    return None if fields is None else fmt.unpack_u64(fields)


# -- ledgers of main logs ----------------------------------------------------------------------


def add_ledger(transaction: Transaction, topic_id: int, now_ms: int) -> int:
    """Register a new, open ledger of a main log; returns its id."""
    ledger_id = take_numbers(transaction, LEDGERS)
    record = LedgerRecord(max(now_ms, 0), 0, 0, 0, fmt.LedgerState.OPEN)
    transaction.put(fmt.ledger_key(topic_id, ledger_id), record.pack())
    return ledger_id


def ledgers(raw: Reads, topic_id: int) -> list[tuple[int, LedgerRecord]]:
    """(ledger id, record) of a topic's main log, oldest first, those being removed included."""
    records = rows(raw, fmt.prefix(Table.LEDGER, topic_id))
    return [(fmt.trailing_u64(key), LedgerRecord.unpack(fields)) for key, fields in records]


# -- partitions and frontiers ------------------------------------------------------------------


def partitions(raw: Reads) -> list[tuple[int, PartitionRecord]]:
    """(start_ms, record) of every registered partition, by start."""
    records = rows(raw, fmt.prefix(Table.PARTITION))
    return [(fmt.trailing_u64(key), PartitionRecord.unpack(fields)) for key, fields in records]


def partition(raw: Reads, start_ms: int) -> PartitionRecord | None:
    """The record of the partition that begins at `start_ms`, None when none is registered."""
    fields = fields_of(raw, fmt.partition_key(start_ms))
    return None if fields is None else PartitionRecord.unpack(fields)


def frontier(raw: Reads, topic_id: int, start_ms: int) -> FrontierRecord | None:
    """The frontier of a topic's log in a partition, None when nothing of it has fired."""
    fields = fields_of(raw, fmt.frontier_key(topic_id, start_ms))
    return None if fields is None else FrontierRecord.unpack(fields)


def frontiers(raw: Reads, topic_id: int | None = None) -> Iterator[tuple[int, int, FrontierRecord]]:
    """(topic id, partition start_ms, record) of one topic or of all."""
    for key, fields in rows(raw, fmt.prefix(Table.FRONTIER, topic_id)):
        yield fmt.leading_u32(key), fmt.trailing_u64(key), FrontierRecord.unpack(fields)


# -- subscriptions -----------------------------------------------------------------------------


def cursors(raw: Reads, topic_id: int | None = None) -> Iterator[tuple[int, str, CursorRecord]]:
    """(topic id, subscription name, record) of one topic or of all."""
    for key, fields in rows(raw, fmt.prefix(Table.CURSOR, topic_id)):
        yield *fmt.split_named_key(key), CursorRecord.unpack(fields)


def acked(raw: Reads, subscription_id: int) -> Iterator[tuple[int, bytes]]:
    """(ledger id, serialised bitmap) of the entries acknowledged after the mark-delete position."""
    for key, fields in rows(raw, fmt.prefix(Table.ACKED, subscription_id)):
        yield fmt.trailing_u64(key), fields


def attempts(raw: Reads, subscription_id: int) -> Iterator[tuple[int, dict[int, FailedDeliveries]]]:
    """(ledger id, failed deliveries by entry id) of the messages of which a delivery failed, a block each."""
    for key, fields in rows(raw, fmt.prefix(Table.ATTEMPTS, subscription_id)):
        _, ledger_id, block = split_attempts_key(key)
        yield ledger_id, unpack_attempts(block, fields)


def pause_ends_ms(raw: Reads, subscription_id: int) -> int | None:
    """Time until which a subscription is paused, if it is; None: for ever."""
    fields = fields_of(raw, fmt.pause_key(subscription_id))
    return None if fields is None else fmt.unpack_u64(fields)


def remove_subscription(transaction: Transaction, subscription_id: int) -> None:
    """Delete a subscription's records beside its cursor: acknowledgements, failed deliveries, the end of a pause."""
    transaction.delete(fmt.pause_key(subscription_id))
    for table in (Table.ACKED, Table.ATTEMPTS):
        for key, _ in list(rows(transaction.raw, fmt.prefix(table, subscription_id))):
            transaction.delete(key)
