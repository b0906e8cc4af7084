"""What `check` looks at in the time partitions: their logs against the frontiers, the markers and the snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from pyroaring import BitMap

from duelog.partitions.cancellations import members
from duelog.partitions.due_column import fired_entries
from duelog.partitions.partition import Partition, PartitionLog
from duelog.partitions.timespan import parse_directory_name
from duelog.snapshot.stored import SnapshotInfo, SnapshotState, inspect_snapshots
from duelog.store.codec import format as fmt
from duelog.store.codec.format import LedgerState, PartitionRecord, PartitionState, Table
from duelog.store.codec.frontier import FrontierRecord
from duelog.store.codec.run import Run
from duelog.store.errors import CorruptRecord, DamagedStore
from duelog.store.files import datafile
from duelog.store.log import catalog
from duelog.store.log.ledger import find_tail

from .check_records import check_bodies, check_pages, check_records, dense_runs
from .check_survey import Survey
from .finding import Finding, error, warning


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


def was_used(generation: Path) -> bool:
    """Whether a generation has had a commit after the one that describes it: with that come messages."""
    try:
        return datafile.inspect(generation).transaction > 1
    except DamagedStore:
        return False


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
            named = {fmt.unpack_u64(fields) for _, fields in catalog.rows(raw, fmt.prefix(Table.LOG))}
            yield from check_records(raw, partition.name, named)
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
        partition, environment = self._partition, self._partition.environment
        found: list[Finding] = []
        with environment.read() as raw:
            tail = find_tail(raw, partition.name, log.ledger_id)
            for run in dense_runs(raw, environment, log.ledger_id):
                if isinstance(run, Finding):
                    found.append(run)
                    continue
                found += self._interval(run)
                self._survey.conditionals.add(run)
                if self._survey.deep:
                    found += check_bodies(run)
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
        """What the frontier says has fired against the markers that are there."""
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
        kept = [
            ledger for ledger, row in catalog.ledgers(survey.raw, log.topic_id) if row.state is not LedgerState.TRIMMING
        ]
        if last is None or last.ledger_id < min(kept, default=0):
            return
        if last.ledger_id not in kept or last.entry_id >= survey.tails.get(last.ledger_id, 0) or not marked:
            yield error("lost-marker", address, f"its last marker {last} is gone")
