"""Cancelling and rescheduling: what has not fired is taken back, with a truthful answer.

The answer comes from the transaction that records it: the entry is cancelled if the frontier in that
transaction has not passed it, and nothing is on its way into the main log meanwhile (pending_entries.py).

What has a deduplication key takes its record along: the transaction that cancels a message frees its key, or points it
to the message that takes its place.

Rescheduling appends the message to the partition of its new due time as a conditional entry; then one main transaction
cancels the old entry and admits the new one. At any crash exactly one of the two fires. A new due time that has come
already needs no partition: the message goes into the main log in that same transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np

from ..partitions.partition import Partition
from ..store.clock import Clock
from ..store.codec.sent_ids import IN_MAIN, KeyRecord, dedup_key_of, sent_key
from ..store.env.environment import Environment
from ..store.env.reader_gate import ReaderGate
from ..store.env.transaction import Transaction
from ..store.errors import CorruptEntry
from ..store.log.managed_ledger import ManagedLedger
from ..store.position import MessageId, Position
from .lookup import find_marker
from .pending_entries import FoundEntries, Outcome, PendingEntries


class Withdrawals:
    """Takes messages back from the partition logs of a store. Thread-safe; requests are committed in groups."""

    def __init__(self, main: Environment, gate: ReaderGate, clock: Clock, entries: PendingEntries) -> None:
        """`gate`: the one that firing is alone in."""
        self._main = main
        self._gate = gate
        self._clock = clock
        self._entries = entries

    def cancel(
        self, log: ManagedLedger, ids: Sequence[MessageId], *, keyed: bool = False, known: Partition | None = None
    ) -> list[Outcome]:
        """Cancel messages of a topic; the outcome of each, in order, once it is durable.

        keyed: some may have deduplication keys, which are free then. known: the partition that all are in.

        CANCELLED and ALREADY_CANCELLED: it is never delivered. FIRED: it is in the main log. UNKNOWN: the
        topic has no such message, or none any more. Raises StoreFull, StoreFailed; then nothing is cancelled.
        """
        with self._gate.reading(), self._entries.located(log, ids, known) as (logs, outcomes):
            if not logs:
                return outcomes
            keys = self._keys_of(logs) if keyed else {}

            def work(transaction: Transaction) -> None:
                for found in logs:
                    self._entries.cancel(transaction, log.topic_id, found, outcomes)
                for row, key in keys.items():
                    if outcomes[row] is Outcome.CANCELLED:
                        _free(transaction, sent_key(log.topic_id, key), ids[row])

            self._entries.sync(logs)
            self._main.write(work)
            return outcomes

    def _keys_of(self, logs: Sequence[FoundEntries]) -> dict[int, str]:
        """The deduplication keys of entries, as far as they can be read, by the row of the request."""
        bodies: dict[int, bytes] = {}
        for found in logs:
            with suppress(CorruptEntry):  # a key whose message is cancelled holds no more, recorded or not
                bodies.update(self._entries.bodies_of(found))
        return _keys(bodies)

    def states(
        self, log: ManagedLedger, ids: Sequence[MessageId], known: Partition | None = None
    ) -> list[Outcome | None]:
        """Return the outcomes that `cancel` would give, None for a message that it would cancel. Changes nothing."""
        with self._gate.reading(), self._entries.located(log, ids, known) as (logs, outcomes):
            return self._entries.states(log.topic_id, logs, outcomes)

    def marker(self, log: ManagedLedger, message_id: MessageId) -> Position | None:
        """Where the marker of a message of a partition log is; None: it has not fired, was cancelled, or is gone."""
        with self._gate.reading(), self._entries.located(log, [message_id]) as (logs, _):
            fired = self._entries.fired(log.topic_id, logs)
        if fired is None:
            return None
        due_ms, last = fired
        return find_marker(self._main, log, message_id, due_ms - self._clock.lead_ms, last)

    def reschedule(self, log: ManagedLedger, ids: Sequence[MessageId], dues: Sequence[int]) -> list[MessageId | None]:
        """Give messages of a topic new due times (epoch ms); their new ids, None where it is too late.

        All of them in one main transaction; each message is then delivered once, under one of its two ids.
        Raises StoreFull, StoreFailed (nothing is rescheduled), CorruptEntry (a body cannot be read).
        """
        with self._gate.reading():
            now_ms = self._clock.now_ms()
            with self._entries.located(log, ids) as (logs, outcomes):
                bodies: dict[int, bytes] = {}
                for found in logs:
                    bodies.update(self._entries.bodies_of(found))
                keys = _keys(bodies)
                with self._entries.appended(log.topic_id, ids, dues, bodies, now_ms) as new:
                    self._entries.sync(logs)
                    starts = {appended.ledger_id: appended.partition.start_ms for appended in new}
                    placed = {row for appended in new for row in appended.rows}
                    direct = [row for row in bodies if row not in placed]

                    def work(transaction: Transaction) -> dict[int, MessageId]:
                        for found in logs:
                            self._entries.cancel(transaction, log.topic_id, found, outcomes)
                        taken = {row for row, outcome in enumerate(outcomes) if outcome is Outcome.CANCELLED}
                        results: dict[int, MessageId] = {}
                        for appended in new:
                            results |= self._entries.admit(transaction, log.topic_id, appended, taken)
                        now = [row for row in direct if row in taken]
                        if now:
                            results |= append_due(transaction, log, dict.fromkeys(now, now_ms), bodies, now_ms)
                        for row, key in keys.items():
                            if row in results:
                                _move(transaction, sent_key(log.topic_id, key), ids[row], results[row], starts)
                        return results

                    results = self._main.write(work)
                    return [results.get(row) for row in range(len(ids))]


def _keys(bodies: Mapping[int, bytes]) -> dict[int, str]:
    """The deduplication keys of messages by row."""
    found = ((row, dedup_key_of(body)) for row, body in bodies.items())
    return {row: key for row, key in found if key is not None}


def _free(transaction: Transaction, key: bytes, old: MessageId) -> None:
    """Remove a key's record if it is of message `old`, and would hold although that is cancelled.

    Another one has no effect any more; it is left, since removing it dirties pages far from each other.
    """
    fields = transaction.get(key)
    if fields is not None and (record := KeyRecord.unpack(fields)).until_ms and record.message_id == old:
        transaction.delete(key)


def _move(transaction: Transaction, key: bytes, old: MessageId, new: MessageId, starts: Mapping[int, int]) -> None:
    """Have a key's record, if it is of message `old`, be of the one that takes its place."""
    fields = transaction.get(key)
    if fields is not None and (record := KeyRecord.unpack(fields)).message_id == old:
        start_ms = starts.get(new.ledger_id, IN_MAIN)
        transaction.put(key, KeyRecord(start_ms, *new, record.until_ms).pack())


def append_due(
    transaction: Transaction, log: ManagedLedger, dues: Mapping[int, int], bodies: dict[int, bytes], now_ms: int
) -> dict[int, MessageId]:
    """Append messages that are due by now to the main log; `dues` and their ids by row."""
    times = np.array(list(dues.values()), dtype=np.int64)
    segments = log.append_messages(transaction, times, [bodies[row] for row in dues], now_ms)
    new_ids = [
        MessageId(segment.ledger_id, segment.first_entry + offset)
        for segment in segments
        for offset in range(segment.length)
    ]
    return dict(zip(dues, new_ids, strict=True))
