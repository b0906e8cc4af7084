"""Firing batch: markers of what is due in several logs, with their frontiers and the clock mark, stored together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...store.codec import format as fmt
from ...store.codec.frontier import FrontierRecord
from ...store.env.transaction import StagingTransaction
from ...store.log import catalog
from ...store.log.managed_ledger import ManagedLedger
from .pending_log import PendingLog, Taken

CLOCK_KEY = fmt.counter_key(catalog.CLOCK)


class FiringLog(NamedTuple):
    """The entries that one log fires, and the main log of their markers."""

    pending: PendingLog
    taken: Taken
    main_log: ManagedLedger


class FiringBatch:
    """A unit of work, of a commit of the main environment or of a group of the write-ahead log; it may run again."""

    def __init__(
        self, logs: Sequence[FiringLog], now_ms: int, recorded_ms: int, stored: Callable[[FiringBatch], None]
    ) -> None:
        """`recorded_ms` is the clock mark on disk; `stored` is called as the commit, or the group, ends."""
        self.logs = logs
        self.by_ms = max(now_ms, *(int(log.taken.dues.max()) for log in logs))
        """The time at which it counts as fired."""
        self.early_from_ms = now_ms if self.by_ms > now_ms else None
        """The time now, where some of it is not due yet: it is hidden until then."""
        self.mark_ms = max(self.by_ms, recorded_ms)
        self.records: list[FrontierRecord] = []
        """The new frontier of each log."""
        self._stored = stored

    def __call__(self, transaction: StagingTransaction) -> None:
        self.begin()
        for pending, taken, main_log in self.logs:
            segments = main_log.append_markers(
                transaction,
                pending.ledger_id,
                pending.start_ms,
                taken.entries,
                taken.dues,
                self.by_ms,
                self.early_from_ms,
            )
            last = segments[-1]
            transaction.put(*self.frontier(pending, taken, last.ledger_id, last.first_entry + last.length - 1))
        transaction.put(*self.clock())
        transaction.after_commit(self.stored)

    def begin(self) -> None:
        """Reset before a retry."""
        self.records = []

    def frontier(self, pending: PendingLog, taken: Taken, ledger_id: int, entry_id: int) -> tuple[bytes, bytes]:
        """The next log's frontier, by where its last marker is, as a small record."""
        self.records.append(taken.frontier._replace(marker_ledger=ledger_id, marker_entry=entry_id))
        return fmt.frontier_key(pending.topic_id, pending.start_ms), self.records[-1].pack()

    def clock(self) -> tuple[bytes, bytes]:
        return CLOCK_KEY, fmt.pack_u64(max(self.mark_ms, 0))

    def stored(self) -> None:
        """Confirm in memory what is on disk, whatever becomes of the caller."""
        self._stored(self)
