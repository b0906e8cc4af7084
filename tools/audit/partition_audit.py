"""The audit of one partition: a plain function of its generation and what the main environment says of it.

Of sealed partitions the command line calls it in a loop, Spark's tasks call it on other machines: arguments and result
are picklable. It opens the generation without locks, touches nothing else, and changes nothing.

An open partition is read under LMDB's locks beside a writing process, with what the write-ahead log has of it: headers
only, as of that moment. What the facts say has fired lies in entries that never change, so losses are told exactly here
too; what is pending is of the moment of reading, not of the facts.

`tally_log` judges one log by its columns, whether they come from a generation's runs or from an export's rows. It knows
topics and partitions by number only; store_audit.py names them.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, Self, TypeVar

import lmdb
import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from ...check.check_store import LATE_MS
from ...cleanup.log_claims import bitmap_of
from ...replica.copied_store import Excerpt
from ...snapshot.snapshot_format import SnapshotInfo, SnapshotState, inspect_snapshots
from ...store.codec import format as fmt
from ...store.codec.format import PartitionState, Table
from ...store.codec.frontier import UNREADABLE_DUE, FrontierRecord
from ...store.codec.run import Int64s
from ...store.env.environment import Environment
from ...store.errors import CorruptRecord, DamagedStore, ReplicaDamaged
from ...store.wal.followed_wal import FollowedWal
from ...survey.contents import read_record, table_name
from ..columns.scan_rows import LogRange, batches, mask
from ..columns.sealed import Sealed, open_generation
from ..store_check import check_file
from .audit_tables import DAY_MS, HOUR_MS, RetentionRow
from .facts import ranges_text, records_before

NO_ENTRY = -1

Mask = npt.NDArray[np.bool_]


class LogTask(NamedTuple):
    """The facts of the main environment about one log. Picklable, so that a task on another machine can carry it.

    judged: whether losses can be told (its records are whole). kept_since_ms: markers of whatever was due after it are
    in `marked`, if there are any.
    """

    topic_id: int
    frontier: FrontierRecord
    judged: bool
    kept_since_ms: int
    cancelled: BitMap
    admitted: BitMap
    marked: BitMap
    acknowledged: BitMap

    @classmethod
    def unknown(cls, topic_id: int, ledger_id: int, cancelled: BitMap, admitted: BitMap) -> Self:
        """A log of which nothing has fired."""
        return cls(topic_id, FrontierRecord.start(ledger_id), True, -1, cancelled, admitted, BitMap(), BitMap())


class Batch(NamedTuple):
    """Entries [first_entry, first_entry + len(dues)). `sizes`: bytes of the bodies, 0 for a dropped one."""

    first_entry: int
    dues: Int64s
    sizes: Int64s
    conditional: Mask


class Issue(NamedTuple):
    """Something wrong with entries of the log; `entry_id` NO_ENTRY: not one in particular."""

    code: str
    entry_id: int
    message: str
    entries: int


class LogResult(NamedTuple):
    """The tally of one log. `unfired`: entries that have not fired, with the first ids for people.

    `overdue`: those of them that were due `LATE_MS` before the time of the audit or earlier, the first at `oldest_ms`.

    `days`: without the name of the topic, which a task does not know.
    """

    topic_id: int
    ledger_id: int
    entries: int
    unfired: int
    some_unfired: str
    days: list[RetentionRow]
    hours: Counter[int]
    issues: list[Issue]
    overdue: int
    oldest_ms: int


class _Tally:
    def __init__(self, task: LogTask, as_of_ms: int) -> None:
        self._task = task
        self._as_of_ms = as_of_ms
        self.days: dict[int, RetentionRow] = {}
        self.hours: Counter[int] = Counter()
        self.covered = BitMap()
        self.live_fired = 0
        self.overdue = 0
        self.oldest_ms = as_of_ms
        self.unfired = BitMap()
        self.lost = BitMap()
        self.maybe_lost = BitMap()
        self.stray = BitMap()

    def add(self, batch: Batch) -> None:
        task = self._task
        first, dues, sizes, conditional = batch
        limit = first + len(dues)
        self.covered.add_range(first, limit)
        ids = np.arange(first, limit, dtype=np.int64)
        cancelled = mask(task.cancelled, first, limit)
        marked = mask(task.marked, first, limit)
        acknowledged = mask(task.acknowledged, first, limit)
        present = sizes > 0
        withheld = conditional & ~mask(task.admitted, first, limit)
        passed = task.frontier.has_fired(ids, dues) & ~withheld
        fired = passed & ~cancelled
        pending = ~passed & ~cancelled & ~withheld & task.judged
        missing = fired & ~marked & present
        self.live_fired += int(fired.sum())
        provable = missing & (dues > task.kept_since_ms)
        self.lost |= bitmap_of(ids[provable])
        self.maybe_lost |= bitmap_of(ids[missing & ~provable])
        stray = marked & ~fired
        self.stray |= bitmap_of(ids[stray])
        waiting = pending & present
        self.unfired |= bitmap_of(ids[waiting])
        hours, counts = np.unique(dues[waiting] // HOUR_MS * HOUR_MS, return_counts=True)
        self.hours.update(dict(zip(hours.tolist(), counts.tolist(), strict=True)))
        # A fired message whose marker is gone was acknowledged by every subscription: its ledger is trimmed.
        done = (marked & acknowledged) | (missing & ~provable) | (fired & ~marked & ~present)
        overdue = waiting & (dues <= self._as_of_ms)
        long_due = dues[waiting & (dues <= self._as_of_ms - LATE_MS)]
        self.overdue += len(long_due)
        self.oldest_ms = int(long_due.min(initial=self.oldest_ms))
        masks = (waiting, overdue, fired, done & fired, cancelled, withheld & ~cancelled, ~present)
        self._add_days(dues, sizes, masks)

    def _add_days(self, dues: Int64s, sizes: Int64s, masks: tuple[Mask, ...]) -> None:
        days = dues // DAY_MS
        first = int(days.min())
        length = int(days.max()) - first + 1
        at = days - first
        counts = np.bincount(at, minlength=length)
        sums = np.bincount(at, sizes, length).astype(np.int64)
        oldest = np.full(length, np.iinfo(np.int64).max)
        newest = np.full(length, -1, dtype=np.int64)
        np.minimum.at(oldest, at, dues)
        np.maximum.at(newest, at, dues)
        columns = (counts, sums, oldest, newest, *(np.bincount(at[mask], minlength=length) for mask in masks))
        for index in np.flatnonzero(counts).tolist():
            day = RetentionRow("", (first + index) * DAY_MS, *(int(column[index]) for column in columns))
            known = self.days.get(day.day_ms)
            self.days[day.day_ms] = day if known is None else known.plus(day)


def between(breaks: Mask) -> Iterator[tuple[int, int]]:
    """[start, limit) of rows that belong together; breaks: True where a cut is after a row, for each but the last."""
    return itertools.pairwise([0, *(np.flatnonzero(breaks) + 1).tolist(), len(breaks) + 1])


def consecutive(
    ids: Int64s, dues: Int64s, sizes: Int64s, conditional: Mask, reasons: Mapping[int, str]
) -> Iterator[Batch | Issue]:
    """Rows of one log cut into batches where entries are missing; rows that cannot be read, for `reasons`, as issues.

    A row with UNREADABLE_DUE stands for a run that cannot be read.
    """
    unreadable = dues == UNREADABLE_DUE
    damaged = np.array(sorted(reasons), dtype=np.int64)
    for start, limit in between((np.diff(ids) != 1) | unreadable[1:] | unreadable[:-1]):
        for row in damaged[np.searchsorted(damaged, start) : np.searchsorted(damaged, limit)].tolist():
            yield Issue("corrupt-entry", int(ids[row]), reasons[row], 0 if unreadable[row] else 1)
        if not unreadable[start]:
            yield Batch(int(ids[start]), dues[start:limit], sizes[start:limit], conditional[start:limit])


def tally_log(batches: Iterable[Batch | Issue], task: LogTask, as_of_ms: int) -> LogResult:
    """The result of one log, whose entries come in order, what cannot be read as an Issue. O(entries), columns only.

    Of an Issue, `entry_id` is where the damage begins; it ends where the next batch does.
    """
    tally = _Tally(task, as_of_ms)
    issues: list[Issue] = []
    holes = BitMap()
    absorbed_end = task.frontier.absorbed_end
    expected = 0
    damaged = False
    for batch in batches:
        if isinstance(batch, Issue):
            issues.append(batch)
            damaged |= batch.code == "corrupt-entry" and not batch.entries
            continue
        first = batch.first_entry
        if first > expected:
            between = BitMap()
            between.add_range(expected, first)
            holes |= between
            if not damaged and not between <= task.cancelled:
                message = f"entries from {expected} to before {first} are gone"
                issues.append(Issue("missing-entries", expected, message, first - expected))
        damaged = False
        if first < expected:
            issues.append(Issue("corrupt-entry", first, f"entries up to {expected - 1} come before it", 0))
            continue
        tally.add(batch)
        expected = first + len(batch.dues)
    if damaged:
        holes.add_range(expected, 1 << 32)  # how many entries the last run had is not known
    elif expected < absorbed_end:
        message = f"the log ends at entry {expected}, {absorbed_end} were there when it last fired"
        holes.add_range(expected, absorbed_end)
        issues.append(Issue("missing-entries", expected, message, absorbed_end - expected))
    issues += _judge(task, tally, holes)
    return LogResult(
        task.topic_id,
        task.frontier.ledger_id,
        len(tally.covered),
        len(tally.unfired),
        ranges_text(tally.unfired),
        [tally.days[day_ms] for day_ms in sorted(tally.days)],
        tally.hours,
        [each if each.entries else each._replace(entries=1) for each in issues],
        tally.overdue,
        tally.oldest_ms,
    )


def _judge(task: LogTask, tally: _Tally, holes: BitMap) -> Iterable[Issue]:
    dangling = task.marked - tally.covered - holes
    if dangling:
        message = f"markers point at entries that were never there: {ranges_text(dangling)}"
        yield Issue("dangling-marker", dangling.min(), message, len(dangling))
    if not task.judged:
        return
    if tally.stray:
        message = f"markers of entries that were cancelled or have not fired: {ranges_text(tally.stray)}"
        yield Issue("stray-marker", tally.stray.min(), message, len(tally.stray))
    if tally.lost:
        message = f"due, passed by the frontier, and without a marker: entries {ranges_text(tally.lost)}"
        yield Issue("lost", tally.lost.min(), message, len(tally.lost))
    known = task.frontier.fired
    never = tally.live_fired - known - len(tally.lost)
    if never > 0:
        message = (
            f"{tally.live_fired:,} messages lie before the frontier, {known:,} have fired; markers were trimmed, "
            f"so which ones is not known, but they are among entries {ranges_text(tally.maybe_lost)}"
        )
        yield Issue("lost", NO_ENTRY, message, never)


T = TypeVar("T")

PATIENCE_S = 1.0
"""A snapshot that is being written has grown or is complete after this long."""


class PartitionTask(NamedTuple):
    """The audit of one partition, to be done anywhere that its generation can be read from.

    logs: those of which something has fired. withdrawn: (entries cancelled, entries admitted) by ledger, of logs that
    may lie in it and of which nothing has. verify: read every page and body too, not only headers. copied: how it is
    fetched from the store's copy; None: `sealed` says where it is.
    """

    sealed: Sealed
    store_id: bytes
    as_of_ms: int
    verify: bool
    logs: tuple[LogTask, ...]
    withdrawn: Mapping[int, tuple[BitMap, BitMap]]
    copied: Excerpt | None = None


class PartitionResult(NamedTuple):
    """The result for one partition. `unreadable`: why nothing of it was looked at; empty: it was."""

    start_ms: int
    unreadable: str
    file_bytes: int
    logs: list[LogResult]
    issues: list[Issue]


def audit_partition(task: PartitionTask, wal: FollowedWal | None = None, patience_s: float = 0) -> PartitionResult:
    """Audit one partition. O(headers), with `verify` O(bytes). Raises nothing for what the files hold.

    wal: what is not applied of the store, for an open partition, whose bodies are not read; None: it is sealed.
    patience_s: how long an unfinished snapshot of an open one is watched.
    """
    sealed = task.sealed
    if task.copied is not None:
        return _audit_copied(task, task.copied)
    try:
        if task.verify and (problems := [found.message for found in check_file(sealed.path)]):
            return PartitionResult(sealed.start_ms, "; ".join(problems[:5]), sealed.file_bytes, [], [])
        with open_generation(sealed, task.store_id, wal) as environment:
            logs, issues = audit_environment(environment, task._replace(verify=task.verify and wal is None))
            if wal is not None:
                issues += _incomplete_snapshots(environment, patience_s)
            elif any(inspect_snapshots(environment)):
                message = "snapshots were left when the partition closed"
                issues.append(Issue("incomplete-snapshot", NO_ENTRY, message, 0))
            file_bytes = sealed.file_bytes if wal is None else environment.file_bytes()
            return PartitionResult(sealed.start_ms, "", file_bytes, logs, issues)
    except (DamagedStore, CorruptRecord, lmdb.Error) as error:
        return PartitionResult(sealed.start_ms, str(error) or type(error).__name__, sealed.file_bytes, [], [])


def _audit_copied(task: PartitionTask, copied: Excerpt) -> PartitionResult:
    sealed = task.sealed
    try:
        with copied.fetched() as path:
            ((_, record),) = copied.catalog.items()
            wal = FollowedWal(path, task.store_id) if record.state is PartitionState.OPEN else None
            found = Sealed.of(path, sealed.start_ms, record)
            return audit_partition(task._replace(sealed=found, copied=None), wal)
    except (ReplicaDamaged, DamagedStore) as error:
        return PartitionResult(sealed.start_ms, str(error), sealed.file_bytes, [], [])


def audit_environment(environment: Environment, task: PartitionTask) -> tuple[list[LogResult], list[Issue]]:
    """The logs of an open environment, sealed or under locks, and what is wrong with its records."""
    issues: list[Issue] = []
    found: dict[int, int] = {}
    with environment.read() as raw:
        # A snapshot says of itself whether it is whole, and runs are read below.
        for key, value in records_before(raw, fmt.prefix(Table.SNAPSHOT_PART)):
            try:
                _, record = read_record(key, value)
                if key[0] == Table.LOG:
                    found[fmt.trailing_u32(key)] = record
            except ValueError as error:
                issues.append(Issue("corrupt-record", NO_ENTRY, f"{table_name(key)} {key.hex()}: {error}", 0))
    known = {log.topic_id: log for log in task.logs}
    results = []
    for topic_id, ledger_id in sorted(found.items()):
        log = known.pop(topic_id, None)
        if log is not None and log.frontier.ledger_id != ledger_id:
            message = f"its log is ledger {ledger_id}, the frontier is of ledger {log.frontier.ledger_id}"
            issues.append(Issue("missing-entries", NO_ENTRY, message, 0))
            log = None
        if log is None:
            log = LogTask.unknown(topic_id, ledger_id, *task.withdrawn.get(ledger_id, (BitMap(), BitMap())))
        results.append(tally_log(log_batches(environment, ledger_id, task.verify), log, task.as_of_ms))
    if not issues:
        for log in known.values():  # the log table has none of them
            results.append(tally_log([], log, task.as_of_ms))
    return results, issues


def log_batches(environment: Environment, ledger_id: int, verify: bool) -> Iterator[Batch | Issue]:
    """The entries of a log, each batch in a read transaction of its own; `verify`: bodies too are looked at."""
    left: tuple[LogRange, ...] = (LogRange(0, None, ledger_id, 0, fmt.MAX_ENTRY_ID),)
    while left:
        with environment.read() as raw:
            batch = next(batches(raw, environment.name, left, bodies=verify), None)
            if batch is None:
                return
            reasons, row = dict(batch.damage()), 0
            for piece in batch.pieces if verify else ():
                if piece.run is not None:
                    at = row - piece.first_entry
                    reasons |= {at + entry_id: reason for entry_id, reason in piece.run.damaged_bodies()}
                row += piece.high - piece.low
            columns = batch.entry_ids(), batch.dues, batch.body_spans()[1], batch.conditional()
            left = batch.rest()
        yield from consecutive(*columns, reasons)


def _incomplete_snapshots(environment: Environment, patience_s: float) -> list[Issue]:
    """Snapshots that are torn or damaged and that no process is writing."""

    def look() -> list[SnapshotInfo]:
        snapshots = inspect_snapshots(environment, read_parts=True)
        return [info for info in snapshots if info.state is not SnapshotState.COMPLETE]

    return [
        Issue(
            "incomplete-snapshot", NO_ENTRY, f"snapshot {info.snapshot_id} of ledger {info.ledger_id}: {info.reason}", 0
        )
        for info in still_there(look, patience_s)
    ]


def still_there(look: Callable[[], list[T]], patience_s: float) -> list[T]:
    """Look, and look again after that long: what both find. In one look only, a process may be at it. 0: one look."""
    found = look()
    if found and patience_s:
        time.sleep(patience_s)
        again = look()
        found = [each for each in found if each in again]
    return found
