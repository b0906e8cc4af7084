"""Looking stored messages and markers up, by id or by due time, without delivering them and without a delay index."""

from collections.abc import Callable, Iterator
from itertools import chain

import numpy as np

from ..partitions.cancellations import members
from ..partitions.due_column import DueBatch, scan_dues
from ..partitions.partition import Partition, PartitionLog
from ..partitions.partition_set import PartitionSet, Storage
from ..store.codec.body import decode_body, occurrence_of, retry_of
from ..store.codec.format import PartitionState, Table
from ..store.codec.frontier import FrontierRecord
from ..store.codec.run import Int64s, RunKind, UInt32s
from ..store.codec.sent_ids import dedup_key_in
from ..store.env.environment import Environment
from ..store.errors import CorruptEntry
from ..store.log import catalog
from ..store.log.managed_ledger import ManagedLedger
from ..store.log.scan import RunFinder, runs
from ..store.message import MAX_DUE_MS, ScheduledMessage
from ..store.position import MessageId, Position

_PAGE = 1_000


def find_partition(partitions: PartitionSet, topic_id: int, ledger_id: int) -> Partition | None:
    """The partition whose log of the topic is `ledger_id`; None: it is no partition log, or deleted.

    O(partitions) at first.
    """
    hint = partitions.by_ledger.get(ledger_id)
    for partition in chain(() if hint is None else (hint,), partitions):
        if partition.knows(topic_id, ledger_id) and partitions.registered(partition):
            partitions.by_ledger[ledger_id] = partition
            return partition
    for partition in partitions.held(partial=True):
        log = partition.log(topic_id)
        if log is not None and log.ledger_id == ledger_id:
            return partition
    return None


def read_entry(environment: Environment, message_id: MessageId, topic: str) -> ScheduledMessage | None:
    """The message at `message_id` of an environment; None when there is none, or it is a marker.

    Raises CorruptEntry.
    """
    with environment.read() as raw:
        return _read(RunFinder(raw, environment.name), message_id, topic)


def _read(finder: RunFinder, message_id: MessageId, topic: str) -> ScheduledMessage | None:
    run = finder.find(message_id.ledger_id, message_id.entry_id)
    if run is None or run.kind != RunKind.MESSAGES:
        return None
    index = message_id.entry_id - run.first_entry
    body = run.body(index)
    if body is None:
        return None
    try:
        publish_ms, payload, key, properties, extra = decode_body(body)
        occurrence = occurrence_of(extra)
        retries, addressee, failure = retry_of(extra or {})
    except ValueError as error:
        raise CorruptEntry(run.environment, run.ledger_id, message_id.entry_id, str(error)) from error
    due_ms, dedup_key = run.due(index), dedup_key_in(extra)
    return ScheduledMessage(
        message_id, payload, key, properties or {}, due_ms, publish_ms, topic, occurrence, dedup_key,
        addressee, retries, failure,
    )  # fmt: skip


def marker_target(main: Environment, position: Position) -> MessageId | None:
    """The id of the message at which a marker of a main log points; None: no marker stands there."""
    with main.read() as raw:
        run = RunFinder(raw, main.name).find(*position)
        if run is None or run.kind != RunKind.MARKERS:
            return None
        return MessageId(run.target, int(run.targets()[position.entry_id - run.first_entry]))


def find_marker(
    main: Environment, log: ManagedLedger, target: MessageId, due_ms: int, last: Position
) -> Position | None:
    """Where the marker of a fired entry lies in the topic's main log; None: that was trimmed.

    due_ms: no marker of it was written before. last: the newest marker of entries of the same log. O(runs of the
    ledgers that were written from then on), in most cases those of one.
    """
    for ledger in log.ledgers():
        if ledger.ledger_id > last.ledger_id:
            break
        if ledger.closed and ledger.closed_ms < due_ms:
            continue
        with main.read() as raw:
            for run in runs(raw, main.name, ledger.ledger_id, 0, ledger.entries):
                if isinstance(run, CorruptEntry) or run.kind != RunKind.MARKERS or run.target != target.ledger_id:
                    continue
                found = np.flatnonzero(run.targets() == target.entry_id)
                if len(found):
                    return Position(run.ledger_id, run.first_entry + int(found[0]))
    return None


def scheduled(
    storage: Storage,
    topic_id: int,
    topic: str,
    *,
    start_ms: int,
    limit_ms: int,
    quarantine: Callable[[CorruptEntry], object],
    after: MessageId | None = None,
    backwards: bool = False,
) -> Iterator[ScheduledMessage]:
    """Messages due in [start_ms, limit_ms) that have not fired, in firing order, partition by partition.

    after: a message due at `start_ms`; it and those of its instant that come before it are left out. backwards: the
    last to fire come first.

    Reads the due column of one partition at a time (12 bytes a message of the range in memory), bodies as
    they are asked for. Cancelled ones are left out. What fires meanwhile may be seen.
    """
    for log, entries, dues in _unfired_logs(storage, topic_id, start_ms, limit_ms, backwards):
        wanted = entries[::-1] if backwards else entries
        if after is not None and log.ledger_id == after.ledger_id:
            wanted = entries[(dues > start_ms) | (entries > after.entry_id)]
        for at in range(0, len(wanted), _PAGE):
            yield from _bodies(log, wanted[at : at + _PAGE], topic, quarantine)


def count_scheduled(storage: Storage, topic_id: int, start_ms: int, limit_ms: int) -> int:
    """Count the messages that `scheduled` has, without their bodies."""
    found = _unfired_logs(storage, topic_id, start_ms, limit_ms, backwards=False)
    return sum(len(entries) for _, entries, _ in found)


def furthest_due_ms(storage: Storage, topic_id: int) -> int | None:
    """When the last of the messages that `scheduled` has is due; None: there is none. Reads few due columns.

    Of a partition that is away, which is not fetched for it, its last millisecond.
    """
    for partition in storage.partitions.held(
        lambda each: each.state is PartitionState.OPEN, backwards=True, partial=True
    ):
        log = partition.log(topic_id)
        if log is None:
            continue
        if partition.away is not None:
            with storage.main.read() as raw:
                if log.ledger.entries > len(members(raw, Table.CANCELLED, log.ledger_id)):
                    return partition.end_ms - 1
            continue
        _, dues = unfired(storage.main, log)
        if len(dues):
            return int(dues[-1])
    return None


def _unfired_logs(
    storage: Storage, topic_id: int, start_ms: int, limit_ms: int, backwards: bool
) -> Iterator[tuple[PartitionLog, UInt32s, Int64s]]:
    """The topic's log in each partition of a range of due times, with what `unfired` has of it."""

    def asked_for(partition: Partition) -> bool:
        return partition.state is PartitionState.OPEN and partition.start_ms < limit_ms and partition.end_ms > start_ms

    for partition in storage.partitions.held(asked_for, backwards=backwards):
        log = partition.log(topic_id)
        if log is not None:
            yield log, *unfired(storage.main, log, start_ms, limit_ms)


def unfired(
    main: Environment, log: PartitionLog, start_ms: int = 0, limit_ms: int = MAX_DUE_MS + 1
) -> tuple[UInt32s, Int64s]:
    """Entry ids and due times of a log's messages that have not fired and are not cancelled, by due time.

    Those due in [start_ms, limit_ms). 12 bytes a message. REQUIRES: a lease on the partition.
    """
    partition, ledger_id = log.partition, log.ledger_id
    with main.read() as raw:
        frontier = catalog.frontier(raw, log.topic_id, partition.start_ms) or FrontierRecord.start(ledger_id)
        admitted = members(raw, Table.ADMITTED, ledger_id)
        cancelled = members(raw, Table.CANCELLED, ledger_id)
    found_entries: list[UInt32s] = [np.empty(0, np.uint32)]
    found_dues: list[Int64s] = [np.empty(0, np.int64)]
    for batch in scan_dues(partition.environment, ledger_id, 0, log.ledger.entries, admitted):
        if not isinstance(batch, DueBatch):
            continue
        first, dues = batch
        entries = np.arange(first, first + len(dues), dtype=np.uint32)
        wanted = (dues >= start_ms) & (dues < limit_ms) & ~frontier.has_fired(entries, dues)
        found_entries.append(entries[wanted])
        found_dues.append(dues[wanted])
    entries, dues = np.concatenate(found_entries), np.concatenate(found_dues)
    if cancelled:
        keep = ~np.isin(entries, np.array(cancelled, dtype=np.uint32))
        entries, dues = entries[keep], dues[keep]
    order = np.lexsort((entries, dues))
    return entries[order], dues[order]


def _bodies(
    log: PartitionLog, entries: UInt32s, topic: str, quarantine: Callable[[CorruptEntry], object]
) -> list[ScheduledMessage]:
    found, name, ledger_id = [], log.partition.name, log.ledger_id
    with log.partition.environment.read() as raw:
        finder = RunFinder(raw, name)
        for entry_id in entries.tolist():
            try:
                message = _read(finder, MessageId(ledger_id, entry_id), topic)
            except CorruptEntry as error:
                quarantine(CorruptEntry(name, ledger_id, entry_id, error.reason))
                continue
            if message is not None:
                found.append(message)
    return found
