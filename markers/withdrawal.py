"""Cancelling and rescheduling: what has not fired is taken back, with a truthful answer.

The answer comes from the transaction that records it: the entry is cancelled if the frontier in that
transaction has not passed it, and nothing is on its way into the main log meanwhile (pending_entries.py).

What has a deduplication key takes its record along: the transaction that cancels a message frees its key, or points it
to the message that takes its place.

Rescheduling cancels the old entry and appends the message to the partition of its new due time in one transaction; a
new due time that has come already needs no partition, the message goes into the main log.

Recurring messages, and those that replace others, follow one another under a record of the caller's (`Succession`): one
transaction changes the record, cancels the message before where it is still to be replaced, appends the next one, and
appends those to the main log whose time has passed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..partitions.partition import Partition
from ..store.clock import Clock
from ..store.codec.sent_ids import IN_MAIN, KeyRecord, dedup_key_of, sent_key
from ..store.env.environment import Environment
from ..store.env.reader_gate import ReaderGate
from ..store.env.transaction import Transaction, Work
from ..store.log.managed_ledger import ManagedLedger
from ..store.position import MessageId, Position
from .lookup import find_marker
from .pending_entries import Destination, FoundEntries, Outcome, PendingEntries, Successors


@dataclass(eq=False, repr=False)
class Withdrawals:
    """Takes messages back from the partition logs of a store. Thread-safe; requests are committed in groups.

    `_gate` is the one that firing is alone in.
    """

    _main: Environment
    _gate: ReaderGate
    _clock: Clock
    _entries: PendingEntries

    @contextmanager
    def cancelling(
        self, log: ManagedLedger, ids: Sequence[MessageId], *, keyed: bool = False, known: Partition | None = None
    ) -> Iterator[Work[list[Outcome]]]:
        """The unit of work that cancels messages of a topic; the outcome of each. To be written within the block.

        keyed: some may have deduplication keys, which are free then. known: the partition that all are in.

        CANCELLED and ALREADY_CANCELLED: it is never delivered. FIRED: it is in the main log. UNKNOWN: the
        topic has no such message, or none any more.
        """
        with self._gate.reading(), self._entries.located(log, ids, known, bodies=keyed) as (logs, outcomes):
            # a key whose message cannot be read holds no more once that is cancelled, recorded or not
            keys = _keys(_bodies(logs)) if keyed else {}

            def work(transaction: Transaction) -> list[Outcome]:
                for found in logs:
                    self._entries.cancel(transaction, log.topic_id, found, outcomes)
                for row, key in keys.items():
                    if outcomes[row] is Outcome.CANCELLED:
                        _free(transaction, sent_key(log.topic_id, key), ids[row])
                return outcomes

            yield work

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

    @contextmanager
    def rescheduling(
        self, log: ManagedLedger, ids: Sequence[MessageId], dues: Sequence[int]
    ) -> Iterator[Work[list[MessageId | None]]]:
        """The unit of work that gives messages of a topic new due times (epoch ms). To be written within the block.

        Gives their new ids, None where it is too late. Each message is then delivered once, under one of its two ids.
        Raises CorruptEntry (a body cannot be read).
        """
        with self._gate.reading():
            now_ms = self._clock.now_ms()
            with self._entries.located(log, ids, bodies=True) as (logs, outcomes):
                for found in logs:
                    if found.unreadable:
                        raise found.unreadable[0]
                bodies = _bodies(logs)
                if self._entries.are_new(Successors(log.topic_id, ids, dues, bodies), now_ms):
                    states = self._entries.states(log.topic_id, logs, outcomes)
                    bodies = {row: body for row, body in bodies.items() if states[row] is None}  # others need none
                keys = _keys(bodies)
                new = Successors(log.topic_id, ids, dues, bodies)
                with self._entries.destinations(new, now_ms) as destinations:
                    starts = {to.log.ledger_id: to.partition.start_ms for to in destinations}
                    placed = {row for to in destinations for row in to.rows}
                    direct = [row for row in bodies if row not in placed]

                    def work(transaction: Transaction) -> list[MessageId | None]:
                        for found in logs:
                            self._entries.cancel(transaction, log.topic_id, found, outcomes)
                        taken = {row for row, outcome in enumerate(outcomes) if outcome is Outcome.CANCELLED}
                        results: dict[int, MessageId] = {}
                        for to in destinations:
                            rows = [row for row in to.rows if row in taken]
                            results |= self._entries.append(transaction, to, new, rows)
                        now = [row for row in direct if row in taken]
                        if now:
                            results |= append_due(transaction, log, dict.fromkeys(now, now_ms), bodies, now_ms)
                        for row, key in keys.items():
                            if row in results:
                                _move(transaction, sent_key(log.topic_id, key), ids[row], results[row], starts)
                        return [results.get(row) for row in range(len(ids))]

                    yield work


def _bodies(logs: Sequence[FoundEntries]) -> dict[int, bytes]:
    return {row: body for found in logs for row, body in found.bodies.items()}


def _keys(bodies: Mapping[int, bytes]) -> dict[int, str]:
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


NOTHING = MessageId(0, 0)
"""The predecessor of a conditional entry that replaces nothing: no ledger has this id."""

Record = Callable[[Transaction, tuple[MessageId, int] | None, bool], bool]
"""A unit of work that changes the caller's record; False: nothing is to happen.

It is given the new message's id and due time, and whether the message before is withdrawn, that is, had not fired.
"""


class Passed(NamedTuple):
    """A message whose due time has passed."""

    due_ms: int
    body: bytes


class Placed(NamedTuple):
    """Where a message is: the start of its partition, IN_MAIN for the main log, and its id."""

    start_ms: int
    message_id: MessageId


class Replacing(NamedTuple):
    """Messages of one topic that are sent together, some of them in the place of others.

    olds: by row, what is cancelled for the message, and the partition that this is in. passing: rows whose message is
    cancelled as well, for another of them takes its place.
    """

    log: ManagedLedger
    dues: Sequence[int]
    bodies: Sequence[bytes]
    olds: Mapping[int, tuple[MessageId, Partition]]
    passing: AbstractSet[int]


_Found = tuple[list[FoundEntries], list[Outcome]]


@dataclass(eq=False, repr=False)
class Succession:
    """Lets messages follow one another. Thread-safe. `_gate` is the one that firing is alone in."""

    _main: Environment
    _gate: ReaderGate
    _clock: Clock
    _entries: PendingEntries

    def is_pending(self, log: ManagedLedger, message_id: MessageId) -> bool:
        with self._gate.reading(), self._entries.located(log, [message_id]) as (logs, outcomes):
            return self._entries.states(log.topic_id, logs, outcomes)[0] is None

    def succeed(
        self,
        log: ManagedLedger,
        old: MessageId | None,
        due_ms: int | None,
        body: bytes,
        record: Record,
        passed: Sequence[Passed] = (),
    ) -> bool:
        """Cancel `old` where it has not fired, schedule a message with `body` at `due_ms`, and `record` it; atomic.

        old None: nothing is cancelled. due_ms None: nothing is scheduled; a time that has passed meanwhile is at once.
        passed: messages that are appended to the main log with it, for their time has passed. False, with nothing
        done: `record` said so. Raises StoreFull, StoreFailed; then nothing is done either.
        """
        olds = [] if old is None else [old]
        with self._gate.reading():
            now_ms = self._clock.now_ms()
            dues = [] if due_ms is None else [max(due_ms, now_ms + 1)]
            new = Successors(log.topic_id, olds or [NOTHING], dues, {} if due_ms is None else {0: body})
            with (
                self._entries.located(log, olds) as (logs, outcomes),
                self._entries.destinations(new, now_ms) as destinations,
            ):

                def work(transaction: Transaction) -> bool:
                    withdrawn = (
                        None in self._entries.states_in(transaction.raw, log.topic_id, logs, outcomes)
                        if olds
                        else False
                    )
                    added = None
                    for to in destinations:
                        added = MessageId(to.log.ledger_id, to.partition.end_of(transaction, to.log)), dues[0]
                    if not record(transaction, added, withdrawn):
                        return False
                    for found in logs:
                        self._entries.cancel(transaction, log.topic_id, found, outcomes)
                    for to in destinations:
                        self._entries.append(transaction, to, new, to.rows)
                    if passed:
                        dues_passed = np.array([each.due_ms for each in passed], dtype=np.int64)
                        log.append_messages(transaction, dues_passed, [each.body for each in passed], now_ms)
                    return True

                return self._main.write(work)

    @contextmanager
    def replacing(
        self, batches: Sequence[Replacing], record: Callable[[Transaction, list[list[Placed]]], None]
    ) -> Iterator[Work[tuple[list[list[Placed]], list[int]]]]:
        """The unit that cancels messages of several topics where they have not fired, and sends others in their place.

        To be written within the block. `record` is a unit of work, given where the messages of each batch are. Gives
        that, and how many of each batch's `olds` were cancelled. Raises what `record` does.
        """
        with self._gate.reading(), ExitStack() as leases:
            now_ms = self._clock.now_ms()
            steps = [self._begin(batch, now_ms, leases) for batch in batches]

            def work(transaction: Transaction) -> tuple[list[list[Placed]], list[int]]:
                placed = [
                    self._take_place(transaction, batch, *step, now_ms)
                    for batch, step in zip(batches, steps, strict=True)
                ]
                record(transaction, placed)
                outcomes = [[outcome for _, each in found for outcome in each] for found, _, _ in steps]
                return placed, [each.count(Outcome.CANCELLED) for each in outcomes]

            yield work

    def _begin(
        self, batch: Replacing, now_ms: int, leases: ExitStack
    ) -> tuple[list[_Found], Successors, list[Destination]]:
        """Locate the replaced messages, and the logs that their successors go to, under `leases`."""
        log, olds = batch.log, batch.olds
        by_partition: dict[Partition, list[MessageId]] = {}
        for old, partition in olds.values():
            by_partition.setdefault(partition, []).append(old)
        found = [
            leases.enter_context(self._entries.located(log, ids, partition)) for partition, ids in by_partition.items()
        ]
        ids = [olds[row][0] if row in olds else NOTHING for row in range(len(batch.dues))]
        new = Successors(log.topic_id, ids, batch.dues, dict(enumerate(batch.bodies)))
        return found, new, leases.enter_context(self._entries.destinations(new, now_ms))

    def _take_place(
        self,
        transaction: Transaction,
        batch: Replacing,
        found: Sequence[_Found],
        new: Successors,
        destinations: Sequence[Destination],
        now_ms: int,
    ) -> list[Placed]:
        topic_id, rows = batch.log.topic_id, range(len(batch.dues))
        for logs, outcomes in found:
            for each in logs:
                self._entries.cancel(transaction, topic_id, each, outcomes)
        placed: dict[int, Placed] = {}
        for to in destinations:
            ids = self._entries.append(transaction, to, new, to.rows, batch.passing)
            placed |= {row: Placed(to.partition.start_ms, message_id) for row, message_id in ids.items()}
        direct = {row: batch.dues[row] for row in rows if row not in placed}
        if direct:
            ids = append_due(transaction, batch.log, direct, dict(enumerate(batch.bodies)), now_ms)
            placed |= {row: Placed(IN_MAIN, message_id) for row, message_id in ids.items()}
        return [placed[row] for row in rows]
