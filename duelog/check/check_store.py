"""Every invariant of a store, looked at from outside: problems come as values, nothing is changed.

Here: the catalog, the main logs with their markers, the subscriptions, and the write-ahead log. Partitions, and what
every environment has, are in check_partitions.py. Damage that kills a process that reads it through LMDB is the
business of `duelog check` (tools/store_check.py), which looks at the pages before anything is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import lmdb
from pyroaring import BitMap

from duelog.markers.firing.suspensions import Suspensions
from duelog.partitions.cancellations import members
from duelog.partitions.partition_set import PartitionSet
from duelog.store.codec import format as fmt
from duelog.store.codec.format import LedgerRecord, LedgerState, PartitionState, Table
from duelog.store.codec.run import Run, RunKind, UInt32s
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import APPLIED_KEY, Reads
from duelog.store.errors import CorruptEntry, CorruptRecord, DamagedStore, FormatMismatch
from duelog.store.log import catalog
from duelog.store.log.documents import Document
from duelog.store.log.ledger import applied_tail, find_tail
from duelog.store.position import Position
from duelog.store.wal.environment_rows import EnvironmentRows, rows_by_environment
from duelog.store.wal.segment import MAIN
from duelog.store.wal.wal_reader import DIRECTORY, read_beside

from ..survey.contents import keys, main_ledgers, topic_names, unreadable_bodies, was_used
from ..survey.withdrawals import Withdrawn, lost_admissions, lost_cancellations, passed_of, waited_for
from ..upkeep.quarantine import Quarantine
from .check_partitions import (
    Survey,
    check_keys,
    check_pages,
    check_partitions,
    check_records,
    check_runs,
    lost_partitions,
)
from .finding import Finding, corrupt, error, warning

_LATER = "open the store with the version of duelog that wrote it"


def check(
    path: Path,
    store_id: bytes,
    main: Environment,
    partitions: PartitionSet,
    suspensions: Suspensions,
    quarantine: Quarantine,
    *,
    read_only: bool,
    deep: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> Iterator[Finding]:
    """Findings of the open store in `path`; `deep` also reads every page and body. REQUIRES: Maintenance.lock.

    `suspensions` and `quarantine`: what this process knows that is not on disk. `read_only`: another process may write.
    `progress` is called with how many partitions have been read, and of how many.
    """
    yield from _suspended(suspensions)
    if read_only:
        yield from _check_wal(path, store_id, main, partitions)
    # One transaction for all of main, so that what another process or a producer writes meanwhile is no finding.
    # Partitions are read after it began, and hold whatever it knows of: entries are on disk before they fire.
    with main.read() as raw:
        survey = Survey(path, raw, main, partitions, deep=deep)
        if deep:
            yield from check_pages(main)
        yield from check_records(raw, main.name, main_ledgers(raw))
        try:
            yield from _catalog(survey)
            yield from _main_logs(survey)
            yield from check_partitions(survey, progress)
            yield from _withdrawals(survey)
            yield from _rescheduled(survey)
            if deep:
                yield from check_keys(survey)
            yield from _cursors(survey)
            yield from _counters(survey)
            yield from _quarantined(survey, quarantine)
        except ValueError as reason:
            yield error("corrupt-record", main.name, f"{reason}; what depends on it was not looked at")


def _suspended(suspensions: Suspensions) -> Iterator[Finding]:
    """Find the work that this process has stopped, if it is the one that writes."""
    for found in suspensions.all():
        message = f"is suspended since {found.since_ms}, after {found.failures} failures: {found.reason}"
        yield error("suspended", str(found), message, "mend the cause; it is tried again by itself")


def _catalog(survey: Survey) -> Iterator[Finding]:
    raw = survey.raw
    survey.records = dict(catalog.partitions(raw))
    survey.frontiers = {(topic_id, start_ms): record for topic_id, start_ms, record in catalog.frontiers(raw)}
    survey.topics = topic_names(raw)
    for key, fields in catalog.rows(raw, fmt.prefix(Table.LEDGER)):
        survey.ledgers[fmt.trailing_u64(key)] = fmt.leading_u32(key), LedgerRecord.unpack(fields)
    named = {
        fmt.name_of(key): fmt.TopicRecord.unpack(fields).topic_id
        for key, fields in catalog.rows(raw, fmt.prefix(Table.TOPIC))
    }
    for name in {*named, *survey.topics.values()}:
        if survey.topics.get(named.get(name, -1)) != name:
            yield error("topic", name, "its name and its number do not lead to each other")
    for topic_id, start_ms in survey.frontiers:
        address = f"topic {topic_id}, partition {start_ms}"
        if start_ms not in survey.records:
            yield error("frontier-without-partition", address, "names a partition that is not in the catalog")
    for ledger_id, (topic_id, ledger) in survey.ledgers.items():
        if topic_id not in survey.topics and ledger.state is not LedgerState.TRIMMING:
            yield error("ledger-without-topic", f"ledger {ledger_id}", f"topic {topic_id} does not exist")
    yield from lost_partitions(survey)
    for directory in survey.partitions.unregistered():
        if any(was_used(generation) for generation in directory.glob("g*")):
            continue  # found above
        advice = "it is removed when the store is next opened for writing"
        yield warning("orphan-directory", str(directory), "is not in the catalog", advice)


def _main_logs(survey: Survey) -> Iterator[Finding]:
    for topic_id, name in survey.topics.items():
        ledgers = catalog.ledgers(survey.raw, topic_id)
        if [record.state for _, record in ledgers].count(LedgerState.OPEN) != 1:
            yield error("open-ledgers", name, "has not exactly one open ledger")
        for ledger_id, record in ledgers:
            if record.state is not LedgerState.TRIMMING:
                yield from _ledger(survey, topic_id, name, ledger_id, record)


def _ledger(survey: Survey, topic_id: int, name: str, ledger_id: int, record: LedgerRecord) -> Iterator[Finding]:
    main = survey.main
    tail = survey.tails[ledger_id] = find_tail(survey.raw, main.name, ledger_id)
    if record.state is LedgerState.CLOSED and tail != record.entries:
        message = f"was closed with {record.entries} entries, has {tail}"
        yield error("ledger-length", f"{name}, ledger {ledger_id}", message)
    for run in check_runs(survey.raw, main.name, ledger_id):
        if isinstance(run, Finding):
            yield run
        elif run.kind == RunKind.MARKERS:
            yield from _check_markers(survey, run, topic_id)
        elif survey.deep:
            yield from map(corrupt, unreadable_bodies(run))


def _check_markers(survey: Survey, run: Run, topic_id: int) -> Iterator[Finding]:
    known = survey.markers.setdefault(run.target, BitMap())
    targets = BitMap(run.targets().tolist())
    address = f"main, ledger {run.ledger_id}, entries {run.first_entry} to {run.limit - 1}"
    doubled = known & targets
    if doubled or len(targets) < run.count:
        yield error("doubled-marker", address, f"markers of ledger {run.target} doubled: {list(doubled)[:10]}")
    known |= targets
    start_ms = run.base_ms
    frontier = survey.frontiers.get((topic_id, start_ms))
    if frontier is None or start_ms not in survey.records:
        yield error("dangling-marker", address, f"point into partition {start_ms}, which is gone")
        return
    if frontier.ledger_id != run.target:
        message = f"point into ledger {run.target}, the frontier is of ledger {frontier.ledger_id}"
        yield error("dangling-marker", address, message)
    entries, dues = run.targets(), run.dues()
    beyond = ~frontier.has_fired(entries, dues)
    if beyond.any():
        message = f"{int(beyond.sum())} markers point past the frontier of partition {start_ms}"
        yield error("marker-past-frontier", address, message)


def _withdrawals(survey: Survey) -> Iterator[Finding]:
    """Cancelled and admitted entries lie within logs of partitions."""
    for table in (Table.CANCELLED, Table.ADMITTED):
        logs = {fmt.leading_u64(key) for key in keys(survey.raw, fmt.prefix(table))}
        for ledger_id in sorted(logs):
            address = f"{table.name}, ledger {ledger_id}"
            entries = members(survey.raw, table, ledger_id)
            if ledger_id in survey.tails:
                if entries and entries.max() >= survey.tails[ledger_id]:
                    yield error("lost-entries", address, f"names entry {entries.max()}, past the end of the log")
            elif survey.all_read:
                yield error("withdrawn-without-log", address, "names a log that no partition has")


def _rescheduled(survey: Survey) -> Iterator[Finding]:
    """Rescheduled messages that would fire twice, or never."""
    withdrawn = Withdrawn(survey.raw)

    def fired(ledger_id: int, entries: UInt32s) -> BitMap | None:
        topic_id, start_ms = survey.places.get(ledger_id, (0, -1))
        partition = survey.partitions.get(start_ms)
        if partition is None:
            return None
        frontier = survey.frontiers.get((topic_id, start_ms))
        try:
            with survey.partitions.lease(partition):
                passed = passed_of(partition.environment, frontier, ledger_id, entries)
        except DamagedStore:  # a finding of its own, or deleted meanwhile
            return None
        return passed | survey.markers.get(ledger_id, BitMap())

    for ledger_id, entries in lost_cancellations(withdrawn, survey.conditionals, fired).items():
        message = f"{len(entries)} entries were rescheduled and are not cancelled: they would be delivered twice"
        yield error("lost-cancellation", f"CANCELLED, ledger {ledger_id}", message)
    certain = waited_for(survey.raw)
    for ledger_id, entries in lost_admissions(withdrawn, survey.conditionals, certain).items():
        message = f"{len(entries)} entries were rescheduled to here and are not admitted: they would never be delivered"
        yield error("lost-admission", f"ADMITTED, ledger {ledger_id}", message)


def _cursors(survey: Survey) -> Iterator[Finding]:
    subscriptions = set()
    for topic_id, name, record in list(catalog.cursors(survey.raw)):
        subscriptions.add(record.subscription_id)
        address = f"topic {topic_id}, subscription {name!r}"
        if topic_id not in survey.topics:
            yield error("cursor-without-topic", address, "its topic does not exist")
            continue
        ledgers = {ledger_id for ledger_id, (owner, _) in survey.ledgers.items() if owner == topic_id}
        mark_delete: Position = record.mark_delete
        if ledgers and mark_delete.ledger_id > max(ledgers):
            yield error("cursor", address, f"mark-delete {mark_delete} is past the main log")
        elif mark_delete.ledger_id in ledgers & survey.tails.keys() and (
            mark_delete.entry_id >= survey.tails[mark_delete.ledger_id]
        ):
            yield error("cursor", address, f"mark-delete {mark_delete} is past its ledger")
        for ledger_id, row in catalog.acked(survey.raw, record.subscription_id):
            acked = BitMap.deserialize(row)
            if ledger_id in survey.tails and acked and acked.max() >= survey.tails[ledger_id]:
                yield error("cursor", address, f"acknowledged entries past the end of ledger {ledger_id}")
        for ledger_id, failed in catalog.attempts(survey.raw, record.subscription_id):
            if ledger_id in survey.tails and max(failed) >= survey.tails[ledger_id]:
                yield error("cursor", address, f"failed deliveries past the end of ledger {ledger_id}")
    for key in keys(survey.raw, fmt.prefix(Table.ACKED)):
        number = fmt.leading_u32(key)
        if number not in subscriptions:
            subscriptions.add(number)
            message = "has acknowledged entries, and no record: what it is to get is not delivered"
            yield error("acked-without-subscription", f"subscription {number}", message)
    for table, what in ((Table.ATTEMPTS, "failed deliveries"), (Table.PAUSE, "the end of a pause")):
        for number in {fmt.leading_u32(key) for key in keys(survey.raw, fmt.prefix(table))} - subscriptions:
            code = f"{table.name.lower()}-without-subscription"
            yield error(code, f"subscription {number}", f"has {what}, and no record")


def _counters(survey: Survey) -> Iterator[Finding]:
    """Numbers that are in use must not be given out again."""
    used = {
        catalog.LEDGERS: max([*survey.ledgers, *survey.tails], default=0),
        catalog.TOPICS: max(survey.topics, default=0),
        catalog.SUBSCRIPTIONS: max((row.subscription_id for _, _, row in catalog.cursors(survey.raw)), default=0),
        catalog.DOCUMENTS: max(_document_versions(survey.raw), default=0),
    }
    for name, highest in used.items():
        fields = survey.main.get(fmt.counter_key(name))  # as of now: a log may be newer than the transaction
        following = 1 if fields is None else fmt.unpack_u64(fields)
        if following <= highest:
            yield error("counter", name, f"gives out {following} next, {highest} is in use")


def _document_versions(raw: Reads) -> Iterator[int]:
    """Versions of the documents that can be read; the others are findings of their own."""
    for key in keys(raw, fmt.prefix(Table.DOCUMENT)):
        with suppress(CorruptRecord):
            yield Document.unpack(fmt.unseal(key, raw.get(key, b""))).version


def _quarantined(survey: Survey, quarantine: Quarantine) -> Iterator[Finding]:
    addresses: dict[tuple[int, int], str] = {}
    for key, fields in catalog.rows(survey.raw, fmt.prefix(Table.SET_ASIDE)):
        addresses[fmt.leading_u64(key), fmt.trailing_u32(key)] = fields.decode(errors="replace")
    addresses.update({(ledger, entry): reason for ledger, entry, reason in quarantine.items()})
    for (ledger_id, entry_id), reason in sorted(addresses.items()):
        message = f"could not be read and was not delivered: {reason}"
        advice = "restore it from a backup, or run `duelog repair` to give it up"
        yield error("set-aside", f"ledger {ledger_id}, entry {entry_id}", message, advice)


# -- the write-ahead log -----------------------------------------------------------------------


def _check_wal(path: Path, store_id: bytes, main: Environment, partitions: PartitionSet) -> Iterator[Finding]:
    """Find what would keep the write-ahead log from being replayed; for a store that another process may write.

    That an environment lacks what the log holds is no finding: opening the store replays it. Nothing false is found
    beside a writer, because the log is read before any environment.
    """
    try:
        groups = read_beside(path, store_id, lambda: catalog.oldest_segment(main)).groups
    except DamagedStore as found:
        yield error("wal", str(found.path), found.reason)
        return
    except FormatMismatch as found:
        yield error("wal", str(found.path), f"{found.field} is {found.found}, {found.expected} is known here", _LATER)
        return
    except CorruptRecord:  # found elsewhere
        return
    for start_ms, rows in rows_by_environment(groups).items():
        if start_ms == MAIN:
            yield from _gap(path, main, rows)
            continue
        partition = partitions.get(start_ms)
        if partition is not None and partition.state is PartitionState.OPEN:
            try:
                with partitions.lease(partition):
                    yield from _gap(path, partition.environment, rows)
            except DamagedStore:  # found elsewhere
                continue


def _gap(path: Path, environment: Environment, rows: EnvironmentRows) -> Iterator[Finding]:
    """The first log of an environment that ends before what the write-ahead log holds of it."""
    try:
        with environment.read() as raw:
            value = raw.get(APPLIED_KEY)
            applied = -1 if value is None else fmt.unpack_u64(fmt.unseal(APPLIED_KEY, value))
            for ledger in rows.after(applied).ledgers():
                gap = ledger.gap(applied_tail(raw, environment.name, ledger.ledger_id))
                if gap is not None:
                    yield error(
                        "wal",
                        str(path / DIRECTORY),
                        f"holds entry {gap[0]} of ledger {ledger.ledger_id} in {environment.name}, which ends at entry "
                        f"{gap[1]}: entries were lost",
                    )
                    return
    except (CorruptEntry, CorruptRecord, lmdb.Error, ValueError):
        return
