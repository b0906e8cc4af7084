"""One partition log against what the main environment says of it: what is lost, and how many are what.

Works on columns, a batch of consecutive entries at a time, whether they come from a generation's runs or from an
export's rows. Knows topics and partitions by number only; the audit's survey names them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from ...check.check_lateness import LATE_MS
from ...cleanup.log_claims import bitmap_of, ids_of
from ...store.codec.frontier import FrontierRecord
from ...store.codec.run import Int64s
from ...survey.markers import ranges_text
from .tables import DAY_MS, HOUR_MS, RetentionRow

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
    def unknown(cls, topic_id: int, ledger_id: int, cancelled: BitMap, admitted: BitMap) -> LogTask:
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
    hours: list[tuple[int, int]]
    issues: list[Issue]
    overdue: int
    oldest_ms: int


def _mask(entries: BitMap, start: int, limit: int) -> Mask:
    found = np.zeros(limit - start, dtype=np.bool_)
    if entries:
        wanted = BitMap()
        wanted.add_range(start, limit)
        found[ids_of(entries & wanted) - np.uint32(start)] = True
    return found


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
        cancelled = _mask(task.cancelled, first, limit)
        marked = _mask(task.marked, first, limit)
        acknowledged = _mask(task.acknowledged, first, limit)
        present = sizes > 0
        withheld = conditional & ~_mask(task.admitted, first, limit)
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
        columns = [np.bincount(at[mask], minlength=length) for mask in masks]
        for index in np.flatnonzero(counts).tolist():
            day = RetentionRow(
                "",
                (first + index) * DAY_MS,
                int(counts[index]),
                int(sums[index]),
                int(oldest[index]),
                int(newest[index]),
                *(int(column[index]) for column in columns),
            )
            known = self.days.get(day.day_ms)
            self.days[day.day_ms] = day if known is None else known.plus(day)


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
            holes.add_range(expected, first)
            if not damaged:
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
        sorted(tally.hours.items()),
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
