"""Every invariant of a store, looked at from outside: problems come as values, nothing is changed.

Damage that kills a process that reads it through LMDB is the business of `duelog check` (tools/store_check.py), which
looks at the pages before anything is opened. Messages behind their time (`check_lateness`) are warnings of that command
alone, since nothing of them is to be repaired.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import lmdb
from pyroaring import BitMap

from duelog.markers.firing.suspensions import Suspensions
from duelog.markers.lookup import unfired
from duelog.partitions.away import is_rest
from duelog.partitions.cancellations import members
from duelog.partitions.due_column import fired_entries
from duelog.partitions.partition import Partition, PartitionLog
from duelog.partitions.partition_set import PartitionSet
from duelog.partitions.timespan import parse_directory_name
from duelog.snapshot.snapshot_format import SnapshotInfo, SnapshotState, inspect_snapshots
from duelog.store.codec import format as fmt
from duelog.store.codec.format import LedgerRecord, LedgerState, PartitionRecord, PartitionState, Table, copied_key
from duelog.store.codec.frontier import FrontierRecord
from duelog.store.codec.run import Run, RunKind, UInt32s
from duelog.store.codec.sent_ids import KeyRecord, dedup_key_of
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import APPLIED_KEY, Reads, applied_rows, place_text
from duelog.store.errors import CorruptEntry, CorruptRecord, DamagedStore, DayAway, FormatMismatch
from duelog.store.log import catalog
from duelog.store.log.documents import Document
from duelog.store.log.ledger import applied_tail, find_tail
from duelog.store.log.scan import RunFinder
from duelog.store.position import Position
from duelog.store.wal.environment_rows import EnvironmentRows, rows_by_environment
from duelog.store.wal.segment import MAIN
from duelog.store.wal.wal_reader import DIRECTORY, WalContent, read_beside

from ..survey.contents import (
    SNAPSHOTS,
    Conditionals,
    Gap,
    Withdrawn,
    dense_runs,
    kept_ledgers,
    lost_admissions,
    lost_cancellations,
    main_ledgers,
    marker_runs,
    passed_of,
    read_logs,
    read_record,
    table_name,
    topic_names,
    unreadable_bodies,
    waited_for,
    was_used,
)
from ..upkeep.quarantine import Quarantine

REPAIR = "run `duelog repair` on a copy of the store, or restore a backup"


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem: `severity` is "error" (something is lost or wrong) or "warning" (something is left over).

    `code` names the kind, `address` says where, `message` what, `advice` what to do about it.
    """

    severity: str
    code: str
    address: str
    message: str
    advice: str


def error(code: str, address: str, message: str, advice: str = REPAIR) -> Finding:
    """Something is lost or wrong."""
    return Finding("error", code, address, message, advice)


def warning(code: str, address: str, message: str, advice: str) -> Finding:
    """Something is left over, and costs nothing but space or time."""
    return Finding("warning", code, address, message, advice)


def corrupt(entry: CorruptEntry) -> Finding:
    """An entry, or the run that begins with it, cannot be read."""
    address = f"{entry.environment}, ledger {entry.ledger_id}, entry {entry.entry_id}"
    return error("corrupt-entry", address, entry.reason)


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
    for found in suspensions.all():
        message = f"is suspended since {found.since_ms}, after {found.failures} failures: {found.reason}"
        yield error("suspended", str(found), message, "mend the cause; it is tried again by itself")
    if read_only:
        yield from _check_wal(path, store_id, main, partitions)
    # One transaction for all of main, so that what another process or a producer writes meanwhile is no finding.
    # Partitions are read after it began, and hold whatever it knows of: entries are on disk before they fire.
    with main.read(frozen=True) as raw:
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
        else:
            yield from _bodies(survey, run, lambda: is_kept(survey.main, topic_id, ledger_id))


def is_kept(main: Environment, topic_id: int, ledger_id: int) -> bool:
    """Return whether a ledger is not trimmed by now."""
    with main.read() as raw:
        record = dict(catalog.ledgers(raw, topic_id)).get(ledger_id)
    return record is not None and record.state is not LedgerState.TRIMMING


def _bodies(survey: Survey, run: Run, is_kept: Callable[[], bool]) -> Iterator[Finding]:
    """Bodies of a run that cannot be read: all that are damaged, or, where not `deep`, whether they are there.

    is_kept: whether no other process has removed them meanwhile.
    """
    try:
        if survey.deep:
            yield from map(corrupt, unreadable_bodies(run))
        elif run.bodies_at is not None and not run.bodies_fit:
            reason = "the body file ends before the bodies of its run"
            yield corrupt(CorruptEntry(run.environment, run.ledger_id, run.first_entry, reason))
    except DamagedStore as found:
        if is_kept():
            yield error("missing-bodies", str(found.path), found.reason)


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
        logs = {fmt.leading_u64(key) for key in catalog.keys(survey.raw, fmt.prefix(table))}
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
            with survey.partitions.lease(partition, partial=True):
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
    for key in catalog.keys(survey.raw, fmt.prefix(Table.ACKED)):
        number = fmt.leading_u32(key)
        if number not in subscriptions:
            subscriptions.add(number)
            message = "has acknowledged entries, and no record: what it is to get is not delivered"
            yield error("acked-without-subscription", f"subscription {number}", message)
    for table, what in ((Table.ATTEMPTS, "failed deliveries"), (Table.PAUSE, "the end of a pause")):
        for number in {fmt.leading_u32(key) for key in catalog.keys(survey.raw, fmt.prefix(table))} - subscriptions:
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
    for key in catalog.keys(raw, fmt.prefix(Table.DOCUMENT)):
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

    def read() -> WalContent:
        return read_beside(path, store_id, lambda: catalog.oldest_segment(main))

    try:
        wal = read()
        rows = rows_by_environment(wal.groups)
        applied = {main.name: (yield from _gap(path, main, rows.get(MAIN, EnvironmentRows())))}
        for partition in partitions:
            if partition.state is PartitionState.OPEN:
                of_it = rows.get(partition.start_ms, EnvironmentRows())
                with suppress(DamagedStore), partitions.lease(partition, partial=True):  # found elsewhere
                    applied[partition.name] = yield from _gap(path, partition.environment, of_it)
        if max(applied.values()) > wal.position:
            wal = read()  # it may have been written to since
        for name, position in applied.items():
            if position > wal.position:
                ends = place_text(wal.position)
                yield error("wal", name, f"has {place_text(position)} of the write-ahead log, which ends at {ends}")
    except DamagedStore as found:
        yield error("wal", str(found.path), found.reason)
    except FormatMismatch as found:
        yield error("wal", str(found.path), f"{found.field} is {found.found}, {found.expected} is known here", _LATER)
    except CorruptRecord:  # found elsewhere
        return


def _gap(path: Path, environment: Environment, rows: EnvironmentRows) -> Generator[Finding, None, int]:
    """The first log of an environment that ends before what the write-ahead log holds of it; gives what is applied."""
    applied = -1
    try:
        with environment.read() as raw:
            fields = catalog.fields_of(raw, APPLIED_KEY)
            applied = -1 if fields is None else fmt.unpack_u64(fields)
            for ledger in rows.after(applied).ledgers():
                gap = ledger.gap(applied_tail(raw, environment.name, ledger.ledger_id))
                if gap is not None:
                    yield error(
                        "wal",
                        str(path / DIRECTORY),
                        f"holds entry {gap[0]} of ledger {ledger.ledger_id} in {environment.name}, which ends at entry "
                        f"{gap[1]}: entries were lost",
                    )
                    break
    except (CorruptEntry, CorruptRecord, lmdb.Error, ValueError):
        pass
    return applied


@dataclass(eq=False, repr=False)
class Survey:
    """A check under way, and what it knows so far. `raw`: the one transaction of the main environment."""

    path: Path
    raw: Reads
    main: Environment
    partitions: PartitionSet
    deep: bool
    records: dict[int, PartitionRecord] = field(default_factory=dict)
    frontiers: dict[tuple[int, int], FrontierRecord] = field(default_factory=dict)
    topics: dict[int, str] = field(default_factory=dict)
    ledgers: dict[int, tuple[int, LedgerRecord]] = field(default_factory=dict)
    """Main-log ledger id -> topic id, record."""
    tails: dict[int, int] = field(default_factory=dict)
    """Ledger id -> number of entries, of main logs and then of partition logs."""
    markers: dict[int, BitMap] = field(default_factory=dict)
    """Partition log's ledger id -> entries that markers point at."""
    places: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Partition log's ledger id -> topic id, start of its partition."""
    conditionals: Conditionals = field(default_factory=Conditionals)
    """Conditional entries of all partition logs."""
    all_read: bool = True
    """Every registered partition could be read, and its logs are in `tails`."""


def _is_current(main: Environment, partition: Partition) -> bool:
    """Return whether a partition has not been deleted, nor its generation replaced, by now."""
    with main.read() as raw:
        record = catalog.partition(raw, partition.start_ms)
    is_there = record is not None and record.state is not PartitionState.DELETING
    return is_there and record is not None and record.generation == partition.generation


# -- any environment ---------------------------------------------------------------------------


def check_pages(environment: Environment) -> Iterator[Finding]:
    """Every page of the data file. O(pages)."""
    for problem in environment.find_problems():
        yield error("page", environment.name, problem)


def check_records(raw: Reads, name: str, ledgers: Collection[int]) -> Iterator[Finding]:
    """Every small record against its checksum, and runs that belong to none of `ledgers`. O(records + ledgers)."""
    known = {int(table) for table in Table}
    cursor = raw.cursor()
    more = cursor.first()
    while more:
        key, value = bytes(cursor.key()), cursor.value()
        table = key[0]
        if table == Table.RUN:
            ledger_id = fmt.leading_u64(key)
            if ledger_id not in ledgers:
                yield error("unknown-ledger", f"{name}, ledger {ledger_id}", "has entries, and is in no catalog")
            more = cursor.set_range(fmt.run_key(ledger_id + 1, 0))
            continue
        address = f"{name}, {table_name(key)} {key.hex()}"
        if table not in known:
            yield error("unknown-table", address, "no table of a store has this number")
        elif table not in SNAPSHOTS:
            try:
                if table == Table.COPY:  # what it says is told of the record that it is the copy of
                    fmt.unseal(key, value)
                else:
                    read_record(key, value)
            except ValueError as reason:
                yield error("corrupt-record", address, str(reason))
            if table == Table.COPY and applied_rows(raw).get(copied_key(key)) is None:
                yield error("lost-record", address, "is the copy of a record that is gone")
        more = cursor.next()


def check_runs(raw: Reads, name: str, ledger_id: int) -> Iterator[Run | Finding]:
    """The runs of a ledger, with a finding for each that is damaged, missing or overlaps."""
    for run in dense_runs(raw, name, ledger_id):
        if isinstance(run, Gap):
            message = f"entry {run.limit} follows entry {run.start - 1}"
            yield error("gap", f"{name}, ledger {ledger_id}", message)
        else:
            yield corrupt(run) if isinstance(run, CorruptEntry) else run


# -- partitions --------------------------------------------------------------------------------


def lost_partitions(survey: Survey) -> Iterator[Finding]:
    """Directories with messages that the catalog does not know: opening for writing refuses them.

    None is found of those that a writer makes meanwhile: one is registered before it is used, so a used one that is not
    in the survey's transaction is in the catalog of now.
    """
    path = survey.path / "partitions"
    for directory in sorted(path.iterdir()) if path.is_dir() else ():
        if _start_of(directory) in survey.records or not any(was_used(child) for child in directory.glob("g*")):
            continue
        with survey.main.read() as raw:
            known = dict(catalog.partitions(raw))
        if _start_of(directory) not in known and directory.exists():
            yield error("lost-partition", str(directory), "holds messages and is not in the catalog")


def _start_of(directory: Path) -> int | None:
    try:
        return parse_directory_name(directory.name)
    except ValueError:
        return None


def check_partitions(survey: Survey, progress: Callable[[int, int], object] | None = None) -> Iterator[Finding]:
    """Every registered partition; fills `survey.tails` with the ends of their logs."""
    for number, (start_ms, record) in enumerate(survey.records.items()):
        if progress is not None:
            progress(number, len(survey.records))
        if record.state is PartitionState.DELETING:
            continue
        partition = survey.partitions.get(start_ms)
        survey.all_read &= partition is not None
        generation = None
        while partition is not None and partition.generation != generation:
            generation = partition.generation
            try:
                with survey.partitions.lease(partition, partial=True):
                    found = list(_partition(survey, partition, record))
            except DayAway:  # it went or came as it was read
                generation = None
                continue
            except (DamagedStore, CorruptRecord) as reason:
                registered = survey.partitions.registered(partition)
                if registered and partition.generation != generation:
                    continue  # its file went from under us when the next generation took over
                survey.all_read = False
                found = [error("partition", partition.name, str(reason))] if registered else []
            yield from found
            break


def _partition(survey: Survey, partition: Partition, record: PartitionRecord) -> Iterator[Finding]:
    environment, closed = partition.environment, record.state is PartitionState.CLOSED
    if survey.deep:
        yield from check_pages(environment)
    # One transaction for the logs' names and their runs: a log that another process makes meanwhile is no finding.
    with environment.read() as raw:
        yield from check_records(raw, partition.name, {*read_logs(raw).values()})
    references = 0
    for log in partition.logs():
        address = f"{partition.name}, topic {log.topic_id}, ledger {log.ledger_id}"
        with environment.read() as raw:
            tail = find_tail(raw, partition.name, log.ledger_id)
            for run in check_runs(raw, partition.name, log.ledger_id):
                if isinstance(run, Finding):
                    yield run
                    continue
                dues = run.dues()
                first_ms, last_ms = int(dues.min()), int(dues.max())
                if first_ms < partition.start_ms or last_ms >= partition.end_ms:
                    place = f"{run.environment}, ledger {run.ledger_id}, entries {run.first_entry} to {run.limit - 1}"
                    message = f"due from {first_ms} to {last_ms}, outside the partition"
                    yield error("due-outside-partition", place, message)
                survey.conditionals.add(run)
                yield from _bodies(survey, run, lambda: _is_current(survey.main, partition))
        survey.tails[log.ledger_id] = tail
        survey.places[log.ledger_id] = log.topic_id, partition.start_ms
        frontier = survey.frontiers.get((log.topic_id, partition.start_ms))
        if not closed:
            yield from _snapshots(partition, log, tail, deep=survey.deep)
        if frontier is None:
            continue
        if log.topic_id in survey.topics:
            references += not frontier.released
        if frontier.ledger_id != log.ledger_id:
            yield error("frontier-ledger", address, f"the frontier is of ledger {frontier.ledger_id}")
        if tail < frontier.absorbed_end:
            message = f"ends at entry {tail}, before its frontier at {frontier.absorbed_end}: entries were lost"
            yield error("lost-entries", address, message)
        if log.topic_id in survey.topics and not is_rest(environment.path):
            yield from _fired(survey, partition, log, tail, frontier, address)
    if closed and references != record.references:
        message = f"{references} topics hold it, the catalog says {record.references}"
        yield error("holders", partition.name, message)


def _snapshots(partition: Partition, log: PartitionLog, tail: int, *, deep: bool) -> Iterator[Finding]:
    address = f"{partition.name}, ledger {log.ledger_id}"

    def look() -> list[SnapshotInfo]:
        return list(inspect_snapshots(partition.environment, log.ledger_id, read_parts=deep))

    found = look()
    if any(each.state is SnapshotState.DAMAGED for each in found):
        again = {each.snapshot_id: each for each in look()}  # a writer may have been at it
        found = [again[each.snapshot_id] for each in found if each.snapshot_id in again]
    for each in found:
        if each.state is SnapshotState.DAMAGED:
            advice = "nothing is lost; `duelog snapshot rebuild` makes the next start quick again"
            yield warning("snapshot", f"{address}, snapshot {each.snapshot_id}", each.reason, advice)
        elif each.metadata is not None and each.metadata.tail > tail:
            message = f"snapshot {each.snapshot_id} covers {each.metadata.tail} entries, the log has {tail}"
            yield error("lost-entries", address, message)


def _fired(
    survey: Survey, partition: Partition, log: PartitionLog, tail: int, frontier: FrontierRecord, address: str
) -> Iterator[Finding]:
    """Compare what has fired by the frontier with the markers that are there."""
    ledger_id = log.ledger_id
    admitted = members(survey.raw, Table.ADMITTED, ledger_id)
    passed, damaged = fired_entries(partition.environment, frontier, tail, admitted)
    if damaged:
        return  # the damage itself is a finding, and what it hides cannot be counted
    # Quarantined does not mean that it did not fire: a body is found unreadable when its marker is resolved.
    passed -= members(survey.raw, Table.CANCELLED, ledger_id)
    if len(passed) != frontier.fired:
        message = f"{frontier.fired} entries have fired, {len(passed)} lie before the frontier"
        yield error("fired-count", address, message)
    marked = survey.markers.get(ledger_id, BitMap())
    stray = marked - passed
    if stray:
        message = f"{len(stray)} markers of entries that have not fired: {list(stray)[:10]}"
        yield error("stray-marker", address, message)
    last = frontier.last_marker
    kept = kept_ledgers(survey.raw, log.topic_id)
    if last is None or last.ledger_id < min(kept, default=0):
        return
    if last.ledger_id not in kept or last.entry_id >= survey.tails.get(last.ledger_id, 0) or not marked:
        yield error("lost-marker", address, f"its last marker {last} is gone")


# -- deduplication keys ------------------------------------------------------------------------


def check_keys(survey: Survey) -> Iterator[Finding]:
    """Every record of a deduplication key whose message may be pending: that was sent with it. O(keys).

    What is left of messages in partitions that have closed has no effect. A message with a key and no record is no
    finding: its record may have been written after the transaction began in which the main environment is looked at.
    """
    by_start: dict[int, list[tuple[str, int, KeyRecord]]] = {}
    for key, fields in catalog.rows(survey.raw, fmt.prefix(Table.KEY)):
        record = KeyRecord.unpack(fields)
        known = survey.records.get(record.start_ms)
        if known is not None and known.state is PartitionState.OPEN:
            topic_id, name = fmt.split_named_key(key, "replace")
            by_start.setdefault(record.start_ms, []).append((name, topic_id, record))
    for start_ms, rows in by_start.items():
        partition = survey.partitions.get(start_ms)
        if partition is None or partition.state is not PartitionState.OPEN or partition.away is not None:
            continue  # it was closed meanwhile, or its messages lie in the copy
        try:
            with survey.partitions.lease(partition, partial=True), partition.environment.read() as raw:
                finder = RunFinder(raw, partition.name)
                for name, topic_id, record in rows:
                    if not _is_of(finder, record, name):
                        message = f"is recorded as that of {record.message_id}, which was not sent with it"
                        yield error("key", f"topic {topic_id}, key {name!r}", message)
        except (DamagedStore, CorruptRecord):
            continue  # found above


def _is_of(finder: RunFinder, record: KeyRecord, name: str) -> bool:
    """True where an entry was sent with a key, as far as it can be read."""
    try:
        run = finder.find(record.ledger_id, record.entry_id)
        body = None if run is None else run.body(record.entry_id - run.first_entry)
    except CorruptEntry:
        return True  # a finding of its own
    return run is not None and (body is None or dedup_key_of(body) == name)


LATE_MS = 60_000
"""A message is late, or overdue, when it fires, or has not fired, so long after it was due; `duelog audit` too."""


def check_lateness(main: Environment, partitions: PartitionSet, now_ms: int) -> Iterator[Finding]:
    """Findings by topic. O(due times of partitions that have begun, and markers in the main logs).

    Raises what reading a damaged store raises.
    """
    with main.read() as raw:
        names = topic_names(raw)
        begun = [
            start_ms
            for start_ms, record in catalog.partitions(raw)
            if record.state is PartitionState.OPEN and start_ms <= now_ms
        ]
        late = {topic_id: _late(raw, topic_id) for topic_id in names}
    overdue: dict[int, tuple[int, int]] = {}
    for partition in partitions.held(lambda each: each.start_ms in begun and each.away is None):
        for log in partition.logs():
            _, dues = unfired(main, log, limit_ms=now_ms - LATE_MS + 1)
            if len(dues):
                count, since_ms = overdue.get(log.topic_id, (0, now_ms))
                overdue[log.topic_id] = count + len(dues), min(since_ms, int(dues[0]))
    for topic_id, name in sorted(names.items(), key=lambda pair: pair[1]):
        if topic_id in overdue:
            count, since_ms = overdue[topic_id]
            message = f"{count} messages are due and have not fired, the oldest since {since_ms}"
            advice = "open the store; where a process has it open, its log and `store.suspended()` say what keeps them"
            yield warning("overdue", name, message, advice)
        count, timed = late[topic_id]
        if count:
            message = f"{count} of {timed} messages in the main log fired more than {LATE_MS // 1000} s late"
            advice = "no process had the store open when they were due, or firing stood still; see `duelog audit`"
            yield warning("late", name, message, advice)


def _late(raw: Reads, topic_id: int) -> tuple[int, int]:
    """How many messages of a topic fired late, of those in its main log whose firing has a time."""
    late = timed = 0
    for run in marker_runs(raw, kept_ledgers(raw, topic_id)):
        fired_ms = run.fired_ms()
        if fired_ms is not None:
            timed += run.count
            late += int((run.dues() <= fired_ms - LATE_MS).sum())
    return late, timed
