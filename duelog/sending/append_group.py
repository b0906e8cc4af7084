"""A group of nothing but appends: where each goes, its rows, and what memory hears of it once they are durable."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from duelog.markers.firing.firing_batch import FiringBatch
from duelog.store.codec.format import MAX_ENTRY_ID, log_key, pack_u64, run_key
from duelog.store.codec.run import Int64s, pack_markers
from duelog.store.codec.run_lengths import WholeRun
from duelog.store.env.claims import Claims
from duelog.store.env.memtable import Memtable
from duelog.store.log.ledger import MARKER_BYTES, MAX_RUN_ENTRIES
from duelog.store.log.managed_ledger import ManagedLedger
from duelog.store.wal.segment import MAIN, SEVERAL, Row, RowKind

from .log_append import AppendWork, FiringAppend, LoneDelayed, LoneDirect, ScatteredAppend, Segments


class AppendGroup:
    """Collects the appends of one group. For the leader of the WAL writer."""

    def __init__(self, claims: Claims, main: Memtable) -> None:
        """`main` is the memtable of the main environment."""
        self._claims = claims
        self._main = main
        self._owners: list[object] = []
        self._counts: dict[object, int] = {}
        """By claimed log: the messages that the group has for it."""
        self._bytes: dict[object, int] = {}
        self._added: list[Callable[[int], None]] = []
        """Has memory know a part of the group at a place; in the order of entries, as runs of a ledger follow."""
        self._records: list[tuple[Memtable, bytes, bytes]] = []
        self.rows: list[Row] = []

    @property
    def entries(self) -> int:
        """Messages in it."""
        return sum(self._counts.values())

    def add(self, work: AppendWork) -> object:
        """Give the messages their ids, and return the work's value. None: the work cannot be appended in place."""
        if isinstance(work, (LoneDelayed, LoneDirect)):
            return self._add_lone(work)
        if isinstance(work, ScatteredAppend):
            return self._add_batch(work)
        return self._add_firing(work.firing) if isinstance(work, FiringAppend) else None

    def _claim(self, owner: object) -> bool:
        self._owners.append(owner)  # first: an interrupt leaves no claim behind
        return self._claims.is_taken(owner, self)

    def _add_lone(self, message: LoneDelayed | LoneDirect) -> tuple[int, int] | None:
        owner = message.owner
        count, size = self._counts.get(owner, 0), self._bytes.get(owner, 0)
        if not count and (message.topic.deleted or not self._claim(owner)):
            return None
        ledger = message.ledger(count, size)
        if ledger is None:
            return None
        ledger_id, entry_id = ledger.ledger_id, ledger.entries + count
        key = run_key(ledger_id, entry_id)
        value = message.sealed(key)
        self._counts[owner], self._bytes[owner] = count + 1, size + len(value)
        self.rows.append(Row(RowKind.RUN, message.start_ms, key, value))
        self._added.append(partial(_publish_lone, message, ledger_id, WholeRun(entry_id, entry_id + 1, value)))
        record = message.record
        if record is not None:
            self._add_record(self._main, MAIN, record.key, record.pack(message.start_ms, ledger_id, entry_id))
        return ledger_id, entry_id

    def _add_record(self, memtable: Memtable, start_ms: int, key: bytes, fields: bytes) -> None:
        self.rows.append(Row(RowKind.RECORD, start_ms, key, fields))
        self._records.append((memtable, key, fields))

    def _add_batch(self, work: ScatteredAppend) -> Segments | None:
        if any(topic.deleted for topic in work.topics):
            return None
        batch, counts = work.batch, self._counts
        firsts: list[int] = []
        for partition, log, count in zip(work.partitions, work.logs, batch.counts, strict=True):
            before = counts.get(log, 0)
            if not before:
                if not self._claim(log):
                    return None
                if not log.registered:
                    key, fields = log_key(log.topic_id), pack_u64(log.ledger_id)
                    self._add_record(partition.memtable, partition.start_ms, key, fields)
            firsts.append(log.ledger.entries + before)
            counts[log] = before + count
        if max(firsts) + max(batch.counts) > MAX_ENTRY_ID:
            return None
        batch.place(firsts)
        self.rows.append(Row(RowKind.BATCH, SEVERAL, b"", batch.value))
        self._added.append(work.publish)
        return list(zip(batch.ledger_ids, firsts, batch.counts, strict=True))

    def _add_firing(self, firing: FiringBatch) -> bool | None:
        firing.begin()
        main = self._main
        for pending, taken, log in firing.logs:
            before, size, count = self._counts.get(log, 0), self._bytes.get(log, 0), len(taken.entries)
            if count > MAX_RUN_ENTRIES or not (before or self._claim(log)):
                return None
            ledger = log.ledger_for(before + count, size + MARKER_BYTES * count)
            if ledger is None:
                return None
            first = ledger.entries + before
            key = run_key(ledger.ledger_id, first)
            value = pack_markers(key, pending.ledger_id, pending.start_ms, taken.entries, taken.dues, firing.by_ms)
            self._counts[log], self._bytes[log] = before + count, size + len(value)
            self.rows.append(Row(RowKind.RUN, MAIN, key, value))
            run = WholeRun(first, first + count, value)
            self._added.append(partial(_publish_markers, log, main, run, taken.dues, firing.early_from_ms))
            self._add_record(main, MAIN, *firing.frontier(pending, taken, ledger.ledger_id, first + count - 1))
        self._add_record(main, MAIN, *firing.clock())
        self._added.append(lambda _: firing.stored())
        return True

    def publish(self, position: int) -> None:
        """The group at `position` is durable: the memtables get its rows, and memory hears of them."""
        with self._claims.publishing:  # all of a group, or nothing
            self._claims.torn = True
            for memtable, key, fields in self._records:
                memtable.position = position
                memtable.add_record(key, fields)
            for added in self._added:
                added(position)
            self._claims.torn = False

    def release(self) -> None:
        """Give all claims back; twice does nothing."""
        self._claims.release(self, self._owners)
        self._owners = []


def _publish_lone(message: LoneDelayed | LoneDirect, ledger_id: int, run: WholeRun, position: int) -> None:
    message.memtable.position = position
    message.memtable.add_run(ledger_id, run)
    message.appended(run.first)


def _publish_markers(
    log: ManagedLedger, main: Memtable, run: WholeRun, dues: Int64s, early_from_ms: int | None, position: int
) -> None:
    main.position = position
    main.add_run(log.end.ledger_id, run)
    if early_from_ms is not None:
        log.hide(dues, early_from_ms)
    log.appended(len(dues), len(run.value))
