"""The check of any environment, and of the time partitions: records, runs, frontiers, markers, snapshots, keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pyroaring import BitMap

from duelog.partitions.cancellations import members
from duelog.partitions.due_column import fired_entries
from duelog.partitions.partition import Partition, PartitionLog
from duelog.partitions.partition_set import PartitionSet
from duelog.partitions.timespan import parse_directory_name
from duelog.snapshot.stored import SnapshotInfo, SnapshotState, inspect_snapshots
from duelog.store.codec import format as fmt
from duelog.store.codec.format import LedgerRecord, PartitionRecord, PartitionState, Table, copied_key
from duelog.store.codec.frontier import FrontierRecord
from duelog.store.codec.run import Run
from duelog.store.codec.sent_ids import KeyRecord, dedup_key_of
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import Reads
from duelog.store.errors import CorruptEntry, CorruptRecord, DamagedStore
from duelog.store.log import catalog
from duelog.store.log.ledger import find_tail
from duelog.store.log.scan import RunFinder

from ..survey.contents import (
    SNAPSHOTS,
    Gap,
    dense_runs,
    kept_ledgers,
    read_logs,
    table_name,
    unreadable_bodies,
    verify_record,
    was_used,
)
from ..survey.withdrawals import Conditionals
from .finding import Finding, corrupt, error, warning


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
                    verify_record(key, value)
            except ValueError as reason:
                yield error("corrupt-record", address, str(reason))
            if table == Table.COPY and raw.get(copied_key(key)) is None:
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
    partitions = survey.partitions
    for number, (start_ms, record) in enumerate(survey.records.items()):
        if progress is not None:
            progress(number, len(survey.records))
        partition = partitions.get(start_ms)
        if record.state is PartitionState.DELETING:
            continue
        if partition is None:
            survey.all_read = False
            continue
        yield from _check_partition(survey, partition, record)


def _check_partition(survey: Survey, partition: Partition, record: PartitionRecord) -> list[Finding]:
    partitions = survey.partitions
    while True:
        generation = partition.generation
        try:
            with partitions.lease(partition):
                return list(_Partition(survey, partition, record).run())
        except (DamagedStore, CorruptRecord) as reason:
            registered = partitions.registered(partition)
            if registered and partition.generation != generation:
                continue  # its file went from under us when the next generation took over
            survey.all_read = False
            return [error("partition", partition.name, str(reason))] if registered else []


class _Partition:
    def __init__(self, survey: Survey, partition: Partition, record: PartitionRecord) -> None:
        self._survey = survey
        self._partition = partition
        self._record = record

    def run(self) -> Iterator[Finding]:
        survey, partition = self._survey, self._partition
        if survey.deep:
            yield from check_pages(partition.environment)
        # One transaction for the logs' names and their runs: a log that another process makes meanwhile is no finding.
        with partition.environment.read() as raw:
            yield from check_records(raw, partition.name, {*read_logs(raw).values()})
        references = 0
        for log in partition.logs():
            address = f"{partition.name}, topic {log.topic_id}, ledger {log.ledger_id}"
            tail, findings = self._entries(log)
            survey.tails[log.ledger_id] = tail
            survey.places[log.ledger_id] = log.topic_id, partition.start_ms
            yield from findings
            frontier = survey.frontiers.get((log.topic_id, partition.start_ms))
            if self._record.state is PartitionState.OPEN:
                yield from self._snapshots(log, tail)
            if frontier is None:
                continue
            if log.topic_id in survey.topics:
                references += not frontier.released
            if frontier.ledger_id != log.ledger_id:
                yield error("frontier-ledger", address, f"the frontier is of ledger {frontier.ledger_id}")
            if tail < frontier.absorbed_end:
                message = f"ends at entry {tail}, before its frontier at {frontier.absorbed_end}: entries were lost"
                yield error("lost-entries", address, message)
            if log.topic_id in survey.topics:
                yield from self._fired(log, tail, frontier, address)
        if self._record.state is PartitionState.CLOSED and references != self._record.references:
            message = f"{references} topics hold it, the catalog says {self._record.references}"
            yield error("holders", partition.name, message)

    def _entries(self, log: PartitionLog) -> tuple[int, list[Finding]]:
        """The end of a log, and what is wrong with its runs."""
        partition = self._partition
        found: list[Finding] = []
        with partition.environment.read() as raw:
            tail = find_tail(raw, partition.name, log.ledger_id)
            for run in check_runs(raw, partition.name, log.ledger_id):
                if isinstance(run, Finding):
                    found.append(run)
                    continue
                found += self._interval(run)
                self._survey.conditionals.add(run)
                if self._survey.deep:
                    found += map(corrupt, unreadable_bodies(run))
        return tail, found

    def _interval(self, run: Run) -> Iterator[Finding]:
        dues = run.dues()
        if int(dues.min()) < self._partition.start_ms or int(dues.max()) >= self._partition.end_ms:
            address = f"{run.environment}, ledger {run.ledger_id}, entries {run.first_entry} to {run.limit - 1}"
            message = f"due from {int(dues.min())} to {int(dues.max())}, outside the partition"
            yield error("due-outside-partition", address, message)

    def _snapshots(self, log: PartitionLog, tail: int) -> Iterator[Finding]:
        address = f"{self._partition.name}, ledger {log.ledger_id}"
        found = self._damaged(log)
        if any(each.state is SnapshotState.DAMAGED for each in found):
            again = {each.snapshot_id: each for each in self._damaged(log)}  # a writer may have been at it
            found = [again[each.snapshot_id] for each in found if each.snapshot_id in again]
        for each in found:
            if each.state is SnapshotState.DAMAGED:
                advice = "nothing is lost; `duelog snapshot rebuild` makes the next start quick again"
                yield warning("snapshot", f"{address}, snapshot {each.snapshot_id}", each.reason, advice)
            elif each.metadata is not None and each.metadata.tail > tail:
                message = f"snapshot {each.snapshot_id} covers {each.metadata.tail} entries, the log has {tail}"
                yield error("lost-entries", address, message)

    def _damaged(self, log: PartitionLog) -> list[SnapshotInfo]:
        return list(inspect_snapshots(self._partition.environment, log.ledger_id, read_parts=self._survey.deep))

    def _fired(self, log: PartitionLog, tail: int, frontier: FrontierRecord, address: str) -> Iterator[Finding]:
        """Compare what has fired by the frontier with the markers that are there."""
        survey, ledger_id = self._survey, log.ledger_id
        admitted = members(survey.raw, Table.ADMITTED, ledger_id)
        passed, damaged = fired_entries(self._partition.environment, frontier, tail, admitted)
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
        if partition is None or partition.state is not PartitionState.OPEN:
            continue  # it was closed meanwhile
        try:
            with survey.partitions.lease(partition), partition.environment.read() as raw:
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
