"""Firing: when messages are due, their markers go into the main logs, with the frontiers, as one group or transaction.

All state that firing changes lies in the main environment, so a crash leaves markers, frontiers and the
clock mark together or none of them. The entries that markers point at are durable before: partition
environments are synced first where `durability` is not "commit".

Memory follows the disk: what is committed is confirmed by the commit itself, and what is not is given back, on every
way out. Where not even that comes to its end, the log is read back (loaded.py).

Only the owner's tick calls `load`, `fire`, `save` and `close_finished`, one at a time; `load` and `save` (loaded.py)
do some ten ms of work a call, so that what is due is fired in between. A log that cannot be fired, or a partition that
cannot be closed, is suspended, and the others go on.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pyroaring import BitMap

from ...partitions.partition import Partition
from ...partitions.partition_set import Storage
from ...snapshot.writer import remove_snapshots
from ...store.clock import StoreClock
from ...store.codec import format as fmt
from ...store.codec.format import PartitionRecord, PartitionState
from ...store.codec.frontier import FrontierRecord
from ...store.env.reader_gate import ReaderGate
from ...store.env.transaction import Transaction
from ...store.errors import CorruptEntry, DamagedStore, StoreFull
from ...store.files.failpoints import reach
from ...store.files.pages import refuse_broken
from ...store.listener import StoreListener, tell
from ...store.log import catalog
from ...store.log.managed_ledger import ManagedLedger
from .loaded import LoadedPartitions
from .pending_log import PendingLog, Taken
from .suspensions import Part


class FiringLog(NamedTuple):
    """The entries that one log fires, and the main log of their markers."""

    pending: PendingLog
    taken: Taken
    main_log: ManagedLedger


def _fire_part(log: PendingLog) -> Part:
    return Part("fire", log.topic_id, log.start_ms)


@dataclass(eq=False, repr=False)
class Firing:
    """Fires the due messages of the loaded partitions of a store.

    `_clock` never goes back behind the time of a firing.
    """

    _storage: Storage
    loaded: LoadedPartitions
    """The partitions in memory. They belong to the thread that fires, except methods that say otherwise."""
    _clock: StoreClock
    _most: int
    """Entries of a batch."""

    def __post_init__(self) -> None:
        self.suspensions = self.loaded.suspensions
        self._apart = False
        """True while each log is fired by a commit of its own, after a commit for several failed."""
        self._found_torn = False
        self.gate = ReaderGate()
        """Firing is alone in it; cancelling and rescheduling are inside for reading, so that nothing is on its way
        into the main log meanwhile and the recorded frontiers tell what has fired."""
        self.recorded_ms = 0
        """The clock mark on the disk, which may be a moment early; it never goes back. 0: nothing was recorded yet."""
        self.fired = 0
        """Messages fired since the store was opened."""

    # -- cancelling and rescheduling ---------------------------------------------------------------

    @property
    def passed_ms(self) -> int:
        """No message that is due later has fired, whenever that was. REQUIRES: `gate` held for reading."""
        return max(self._clock.mark_ms, self.recorded_ms)

    def withdraw(
        self, start_ms: int, topic_id: int, cancelled: BitMap, entries: Sequence[int], dues: Sequence[int]
    ) -> None:
        """Entries are recorded as cancelled. dues: those of `entries`, which has them all; none where not known.

        REQUIRES: called as its commit ends, `gate` held for reading.
        """
        log = self.loaded.logs.get(start_ms, {}).get(topic_id)
        if log is None:
            return
        if not dues:  # it has begun to load since
            log.discard(cancelled)
        else:
            log.withdraw({each: due_ms for each, due_ms in zip(entries, dues, strict=True) if each in cancelled})

    # -- firing ------------------------------------------------------------------------------------

    def next_due_ms(self) -> int | None:
        """When the next message of a loaded partition is due, None when none is left.

        Puts the earliest bucket of the log concerned in order, before it is due.
        """
        self.loaded.recover()
        self.loaded.unsure = True
        next_ms, torn, ready = None, False, self.loaded.ready
        while (first := ready.first()) is not None:
            armed_ms, log = first
            due_ms: int | None = armed_ms
            if not self.suspensions or self.suspensions.retry_ms(_fire_part(log)) is None:
                try:
                    due_ms = log.exact_next_due_ms()
                except Exception:
                    torn = not log.whole  # else `fire` meets it too, and suspends the log
            if due_ms is not None and due_ms <= armed_ms:
                next_ms = armed_ms
                break
            ready.postpone(log, armed_ms, due_ms)
            ready.arm(log, log.next_due_ms())
        self.loaded.unsure = torn
        return next_ms

    def fire(self, now_ms: int, until_ms: int | None = None) -> int:
        """Fire one batch of at most `fire_batch` messages due by `now_ms`; returns how many, 0: nothing is to be fired.

        One transaction holds their markers, the frontiers and the clock mark. With `until_ms`, which is a moment later,
        those due by then are written as well, and become visible when they are due (`ManagedLedger.visible`).
        Raises StoreFull or StoreFailed with nothing fired.
        """
        with self.gate.alone():
            self.loaded.recover()
            self.loaded.unsure = True
            fired = self._fire(now_ms, now_ms if until_ms is None else max(until_ms, now_ms))
            self.loaded.unsure, self._found_torn = self._found_torn, False
            self.loaded.recover()
            if fired:
                self._clock.raise_to(now_ms)  # inside the gate: the next cancellation finds it no earlier
            return fired

    def _fire(self, now_ms: int, until_ms: int) -> int:
        while True:
            batch: list[FiringLog] = []
            came_up: list[PendingLog] = []
            capacity, ready = self._most, self.loaded.ready
            try:
                while capacity > 0 and not (batch and self._apart) and (log := ready.pop(until_ms)) is not None:
                    came_up.append(log)
                    taken, main_log = self._take(log, now_ms, until_ms, capacity)
                    if taken is not None and main_log is not None:
                        batch.append(FiringLog(log, taken, main_log))
                        capacity -= len(taken.entries)
                if not batch:
                    self._apart = False
                elif not self._commit_or_suspend(batch, now_ms):
                    continue
            except BaseException:
                self._give_back(batch)
                raise
            finally:
                for log in came_up:
                    self._arm_again(log)
            return sum(len(taken.entries) for _, taken, _ in batch)

    def _take(
        self, log: PendingLog, now_ms: int, until_ms: int, capacity: int
    ) -> tuple[Taken | None, ManagedLedger | None]:
        """Take the due entries of a log, with its main log; None: the log is suspended, or torn."""
        if self.suspensions and self.suspensions.is_suspended(_fire_part(log), now_ms):
            return None, None
        taken: Taken | None = None
        main_log: ManagedLedger | None = None
        try:
            main_log = self.loaded.main_log(log.topic_id)
            if main_log is not None and log.whole:
                taken = log.take(until_ms, capacity)
            self._report_unreadable(log)
        except Exception as error:
            if taken is not None:
                log.roll_back(taken)
            self._found_torn = self._found_torn or not log.whole
            self.suspensions.failed(_fire_part(log), error, now_ms)
            return None, None
        self._found_torn = self._found_torn or (taken is None and not log.whole)
        if taken is None and self.suspensions and log.whole:
            self.suspensions.succeeded(_fire_part(log), now_ms)
        return taken, main_log

    def _give_back(self, batch: Sequence[FiringLog]) -> None:
        """Leave the taken entries to be fired again, except those that were confirmed."""
        for log, taken, _ in reversed(batch):
            log.roll_back(taken)

    def _commit_or_suspend(self, batch: Sequence[FiringLog], now_ms: int) -> bool:
        """False: nothing was fired. A log alone is suspended; several are fired one by one, to find which it is."""
        try:
            self._commit(batch, now_ms)
        except StoreFull:
            raise
        except Exception as error:
            self._give_back(batch)
            if self.suspensions.is_fatal(error):
                raise
            if len(batch) == 1:
                self.suspensions.failed(_fire_part(batch[0][0]), error, now_ms)
            self._apart = True
            return False
        if self.suspensions:
            for log, _, _ in batch:
                self.suspensions.succeeded(_fire_part(log), now_ms)
        return True

    def _arm_again(self, log: PendingLog) -> None:
        """Have a log that came up come up again: when it is due, or, while it is suspended, when it is tried again."""
        retry_ms = self.suspensions.retry_ms(_fire_part(log)) if self.suspensions else None
        if retry_ms is not None:
            self.loaded.ready.arm(log, retry_ms)
        elif not log.whole:
            self._found_torn = True
        elif self.loaded.main_log(log.topic_id) is not None:
            self.loaded.ready.arm(log, log.next_due_ms())

    def _report_unreadable(self, log: PendingLog) -> None:
        for entry_id in log.unreadable():
            name = f"partition at {log.start_ms}"
            self.loaded.quarantine(CorruptEntry(name, log.ledger_id, entry_id, "its due time cannot be read"))

    def _commit(self, batch: Sequence[FiringLog], now_ms: int) -> None:
        by_ms = max(now_ms, *(int(taken.dues.max()) for _, taken, _ in batch))
        early_from_ms = now_ms if by_ms > now_ms else None  # some of it is not due yet, and is hidden until then
        records: list[FrontierRecord] = []

        def write(transaction: Transaction) -> None:
            records.clear()  # of a run before this one
            for log, taken, main_log in batch:
                entries, dues = taken.entries, taken.dues
                segments = main_log.append_markers(
                    transaction, log.ledger_id, log.start_ms, entries, dues, by_ms, early_from_ms
                )
                marker_entry = segments[-1].first_entry + segments[-1].length - 1
                record = taken.frontier._replace(marker_ledger=segments[-1].ledger_id, marker_entry=marker_entry)
                records.append(record)
                transaction.put(fmt.frontier_key(log.topic_id, log.start_ms), record.pack())
            transaction.put(fmt.counter_key(catalog.CLOCK), fmt.pack_u64(max(by_ms, self.recorded_ms, 0)))
            transaction.after_commit(lambda: self._confirm(batch, records, by_ms))

        reach("fire.before")
        self._storage.main.write(write, makes_space=True)
        reach("fire.after")
        for log, taken, _ in batch:
            tell(self._storage.listeners, StoreListener.fired, log.topic_id, taken.dues, now_ms)

    def _confirm(self, batch: Sequence[FiringLog], records: Sequence[FrontierRecord], by_ms: int) -> None:
        """Markers and frontiers are on disk: have memory say so, whatever becomes of the caller."""
        self.recorded_ms = max(by_ms, self.recorded_ms)
        for (log, taken, _), record in zip(batch, records, strict=True):
            log.confirm(record)
            self.fired += len(taken.entries)

    # -- closing -----------------------------------------------------------------------------------

    def close_finished(self, now_ms: int) -> Iterator[int]:
        """Close each loaded partition whose end has passed with nothing left to fire; gives each start at once."""
        self.loaded.recover()
        self.suspensions.keep("close", self.loaded.logs.__contains__)
        for start_ms in sorted(self.loaded.logs):
            partition = self._storage.partitions.get(start_ms)
            if partition is not None and partition.end_ms <= now_ms and self._may_close(partition):
                part, close = Part("close", start_ms=start_ms), functools.partial(self._close, partition, now_ms)
                if self.suspensions.run(part, now_ms, close, otherwise=False):
                    yield start_ms

    def next_close_ms(self) -> int | None:
        get = self._storage.partitions.get
        loaded = [partition for start in self.loaded.logs if (partition := get(start)) is not None]
        ends = (
            self.suspensions.not_before(Part("close", start_ms=partition.start_ms), partition.end_ms)
            for partition in loaded
            if self._may_close(partition)
        )
        return min((end_ms for end_ms in ends if end_ms is not None), default=None)

    def _may_close(self, partition: Partition) -> bool:
        """Not while it is loaded or a log is suspended, nor when it cannot be written to: its snapshots go first."""
        if self.loaded.is_loading(partition) or self.suspensions.holds(partition.start_ms):
            return False
        return partition.environment.failed is None

    def _close(self, partition: Partition, now_ms: int) -> bool:
        with self.gate.alone():
            if self._left(partition):
                return False
            recorded: list[bool] = []
            try:
                if not self._storage.partitions.stop_appends(partition) or self._left(partition):  # appended before
                    return False
                topic_ids, mark_ms = list(self.loaded.logs[partition.start_ms]), max(now_ms, self.recorded_ms)

                def work(transaction: Transaction) -> None:
                    record_closed(transaction, partition, topic_ids, self.loaded.main_log, mark_ms)
                    transaction.after_commit(lambda: recorded.append(True))

                partition.environment.apply()
                partition.environment.sync()
                refuse_broken(partition.path, every_header=True)  # a log that a page hides has not fired
                remove_snapshots(partition.environment, self._storage.config.snapshot_part_bytes)
                reach("close.before")
                self._storage.main.write(work, makes_space=True)
                reach("close.after")
            finally:
                if recorded:
                    self.loaded.unload(partition)
                else:
                    self._storage.partitions.resume_appends(partition)
            self._clock.raise_to(now_ms)  # inside the gate: the next cancellation finds it no earlier
            return True

    def _left(self, partition: Partition) -> bool:
        logs = self.loaded.logs[partition.start_ms]
        logs_left = [log for topic, log in list(logs.items()) if self.loaded.main_log(topic) is not None]
        return any(len(log) or not log.loaded or not log.whole for log in logs_left)


def record_closed(
    transaction: Transaction,
    partition: Partition,
    topic_ids: Iterable[int],
    main_log: Callable[[int], ManagedLedger | None],
    mark_ms: int,
) -> None:
    """Close a partition in the catalog, held by each topic whose last marker is in a ledger that is kept.

    A topic without a marker, one whose ledgers have been trimmed past it, or one that was deleted, holds nothing.
    `mark_ms` becomes the clock mark.
    """
    references = 0
    for topic_id in topic_ids:
        key = fmt.frontier_key(topic_id, partition.start_ms)
        fields = transaction.get(key)
        if fields is None:
            continue
        record = FrontierRecord.unpack(fields)
        log = main_log(topic_id)
        held = log is not None and record.marker_ledger >= log.first_in(transaction)
        transaction.put(key, record._replace(released=int(not held)).pack())
        references += held
    fields = transaction.get(fmt.partition_key(partition.start_ms))
    if fields is None:
        raise DamagedStore(partition.path, "is not in the catalog")
    closed = PartitionRecord.unpack(fields)._replace(state=PartitionState.CLOSED, references=references)
    transaction.put(fmt.partition_key(partition.start_ms), closed.pack())
    transaction.put(fmt.counter_key(catalog.CLOCK), fmt.pack_u64(max(mark_ms, 0)))
