"""A group of nothing but appends: where each goes, its rows, and what memory hears of it once they are durable."""

from __future__ import annotations

from duelog.store.codec.format import MAX_ENTRY_ID, log_key, pack_u64, run_key
from duelog.store.codec.run_lengths import WholeRun
from duelog.store.env.claims import Claims
from duelog.store.env.memtable import Memtable
from duelog.store.wal.segment import MAIN, SEVERAL, Row, RowKind

from .log_append import AppendWork, LoneMessage, ScatteredAppend, Segments


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
        self._added: list[tuple[LoneMessage, int, WholeRun] | ScatteredAppend] = []
        """In the order of their entries: runs of a ledger follow each other in a memtable."""
        self._records: list[tuple[Memtable, bytes, bytes]] = []
        self.rows: list[Row] = []

    @property
    def entries(self) -> int:
        """Messages in it."""
        return sum(self._counts.values())

    def add(self, work: AppendWork) -> object:
        """Give messages their ids; what the work is worth then. None: something else has to be decided."""
        if isinstance(work, ScatteredAppend):
            return self._add_batch(work)
        return self._add_lone(work) if isinstance(work, LoneMessage) else None

    def _claim(self, owner: object) -> bool:
        self._owners.append(owner)  # first: an interrupt leaves no claim behind
        return self._claims.is_taken(owner, self)

    def _add_lone(self, message: LoneMessage) -> tuple[int, int] | None:
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
        self._added.append((message, ledger_id, WholeRun(entry_id, entry_id + 1, value)))
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
        self._added.append(work)
        return list(zip(batch.ledger_ids, firsts, batch.counts, strict=True))

    def publish(self, position: int) -> None:
        """The group at `position` is durable: the memtables get its rows, and memory hears of them."""
        with self._claims.publishing:  # all of a group, or nothing
            for memtable, key, fields in self._records:
                memtable.position = position
                memtable.add_record(key, fields)
            for added in self._added:
                if isinstance(added, ScatteredAppend):
                    added.publish(position)
                    continue
                message, ledger_id, run = added
                memtable = message.memtable
                memtable.position = position
                memtable.add_run(ledger_id, run)
                message.appended(run.first)

    def release(self) -> None:
        """Give all claims back; twice does nothing."""
        self._claims.release(self, self._owners)
        self._owners = []
