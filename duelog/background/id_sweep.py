"""Removes records of keys and of numbered messages whose messages are gone, a page at a time.

A send, a cancellation and firing leave such a record where it is: it says itself what it is worth (its partition is
closed, its ledger is gone). So that they do not pile up, all are looked at when a partition was closed or deleted or
a ledger trimmed; then not again for a hundred times as long as that took, so it takes a hundredth of one processor at
most. Where there is no such record a pass is one look into the main environment.
"""

from __future__ import annotations

import time

from duelog.partitions.partition_set import PartitionSet
from duelog.store.codec import format as fmt
from duelog.store.codec.format import PartitionState, Table
from duelog.store.codec.sent_ids import IN_MAIN, KeyRecord, unpack_numbered
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from duelog.store.errors import CorruptRecord

from ..topics.topic_list import Topics

_PAGE = 2_000
"""Records looked at in one transaction: some ms."""

_PAUSE_MS = 60_000
_PAUSE_TIMES = 100


class IdSweep:
    """Passes over the records of an open store. Run by the upkeep alone."""

    def __init__(self, main: Environment, partitions: PartitionSet, topics: Topics) -> None:
        self._main = main
        self._partitions = partitions
        self._topics = topics
        self.is_wanted = False
        """Whether something has gone since the last pass began."""
        self._next: bytes | None = None
        """Where the pass under way goes on; None: none is."""
        self._took_s = 0.0
        self._not_before_ms = 0

    def run(self, now_ms: int) -> bool:
        """Look at a page, if it is time; whether there is more. Raises StoreFull, StoreFailed."""
        if self._next is None:
            if not self.is_wanted or now_ms < self._not_before_ms:
                return False
            self.is_wanted, self._took_s = False, 0.0
        started = time.perf_counter()
        stale, following = self._page(self._next or fmt.prefix(Table.KEY), now_ms)
        if stale:
            self._main.write(lambda transaction: _remove(transaction, stale))
        self._next = following
        self._took_s += time.perf_counter() - started
        if following is None:
            self._not_before_ms = now_ms + max(_PAUSE_MS, int(self._took_s * 1000 * _PAUSE_TIMES))
        return following is not None

    def _page(self, start: bytes, now_ms: int) -> tuple[dict[bytes, bytes], bytes | None]:
        """The stale records of a page, and where the next begins. What is unapplied is fresh."""
        stale: dict[bytes, bytes] = {}
        with self._main.read() as raw:
            cursor = raw.cursor()
            more = cursor.set_range(start)
            for _ in range(_PAGE):
                if not more or (key := bytes(cursor.key()))[0] not in (Table.KEY, Table.NUMBERED):
                    return stale, None
                try:
                    fields = fmt.unseal(key, cursor.value())
                    if self._is_stale(key, fields, now_ms):
                        stale[key] = fields
                except CorruptRecord:
                    pass  # a finding of `check`
                more = cursor.next()
            return stale, bytes(cursor.key()) if more else None

    def _is_stale(self, key: bytes, fields: bytes, now_ms: int) -> bool:
        """Whether nothing is asked of a record any more. Raises CorruptRecord."""
        if key[0] == Table.KEY:
            record = KeyRecord.unpack(fields)
            partition = self._partitions.get(record.start_ms)
            return record.until_ms <= now_ms and (partition is None or partition.state is not PartitionState.OPEN)
        rows = unpack_numbered(fmt.trailing_u64(key), fields)
        return all(self._is_gone(fmt.leading_u32(key), row.start_ms, row.ledger_id) for _, row in rows)

    def _is_gone(self, topic_id: int, start_ms: int, ledger_id: int) -> bool:
        if start_ms != IN_MAIN:
            return self._partitions.get(start_ms) is None
        topic = self._topics.by_id(topic_id)
        return topic is None or ledger_id < topic.log.first_ledger


def _remove(transaction: Transaction, stale: dict[bytes, bytes]) -> None:
    """Remove records that are still what they were; one that was written meanwhile is of another message."""
    for key, fields in stale.items():
        if transaction.get(key) == fields:
            transaction.delete(key)
