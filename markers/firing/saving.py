"""When the delay indexes of begun partitions are saved, so that the next start need not replay their due columns.

What a start costs is the entries after each log's newest snapshot, all logs of a partition together. Snapshots are
written

- when that has grown to `snapshot_every_entries` in a partition, by appends;
- when a partition has been loaded and a tenth of that had to be replayed;
- when the store closes and it is a tenth of that or more (less is replayed in some ten ms, and costs nothing now).

Then the logs with the longest tails get a new snapshot, until a twentieth is left. They are removed when the partition
closes. A snapshot that cannot be written (a full disk) is no error: it is tried again a tenth later. After any other
error its partition's snapshots are suspended for a while.

One transaction at a time, by the thread that fires, between batches.
"""

import logging
import time
from collections.abc import Iterable, Iterator

from ...partitions.partition import Partition
from ...partitions.partition_set import Storage
from ...snapshot.writer import Cut, SnapshotWritten, write_snapshots
from ...store.errors import StoreFailed, StoreFull
from ...store.limited_log import LimitedLog
from ...store.listener import StoreListener, tell
from .pending_log import PendingLog
from .suspensions import Part, Suspensions

_log = logging.getLogger("duelog.maintenance")


class _Account:
    """Entries appended to a partition since it was loaded, and how many there are when a snapshot is due."""

    __slots__ = ("due_at", "heard", "told")

    def __init__(self, due_at: int) -> None:
        self.heard = 0
        """Only the leader of the partition's commits adds to it."""
        self.due_at = due_at
        self.told = False


class Saving:
    """Counts the entries that a start would replay, and writes snapshots. One thread, except `heard`."""

    def __init__(self, storage: Storage, suspensions: Suspensions) -> None:
        config, self._storage, self._suspensions = storage.config, storage, suspensions
        self._every = config.snapshot_every_entries
        self._little = max(config.snapshot_every_entries // 10, 1)
        self._part_bytes = config.snapshot_part_bytes
        self._accounts: dict[int, _Account] = {}
        self._job: tuple[int, Iterator[SnapshotWritten | None]] | None = None
        self._log = LimitedLog(_log)

    # -- account -----------------------------------------------------------------------------------

    def begin(self, start_ms: int) -> None:
        """A partition is about to hear of appends."""
        self._accounts[start_ms] = _Account(1 << 62)

    def heard(self, start_ms: int, count: int) -> bool:
        """Entries were appended to a partition; True when its snapshot has become due with them. O(1)."""
        account = self._accounts.get(start_ms)
        if account is None:
            return False
        account.heard += count
        if account.heard < account.due_at or account.told:
            return False
        account.told = True
        return True

    def loaded(self, start_ms: int, logs: Iterable[PendingLog]) -> None:
        replayed = sum(log.unsaved for log in logs)
        self._plan(start_ms, 0 if replayed >= self._little else self._every - replayed)

    def forget(self, start_ms: int) -> None:
        """Drop the unfinished snapshots of a partition that closed, or whose loading failed."""
        self._accounts.pop(start_ms, None)
        if self._job is not None and self._job[0] == start_ms:
            self._job = None

    def is_due(self) -> bool:
        """Return whether `step` has a log to save, suspended ones apart."""
        return self._job is not None or any(
            account.heard >= account.due_at and self._suspensions.retry_ms(Part("snapshot", start_ms=start_ms)) is None
            for start_ms, account in self._accounts.items()
        )

    def _plan(self, start_ms: int, entries: int) -> None:
        account = self._accounts.get(start_ms)
        if account is not None:
            account.due_at = account.heard + entries
            account.told = False

    # -- writing -----------------------------------------------------------------------------------

    def step(self, loaded: dict[int, tuple[Partition, list[PendingLog]]], now_ms: int) -> int:
        """Write one transaction of due snapshots; returns the number completed.

        `loaded`: the partitions whose logs are all loaded.
        """
        if self._job is None:
            for start_ms, (partition, logs) in loaded.items():
                account = self._accounts.get(start_ms)
                if account is None:  # an error broke its unloading off, which is tried again
                    continue
                is_suspended = self._suspensions.is_suspended(Part("snapshot", start_ms=start_ms), now_ms)
                if account.heard >= account.due_at and not is_suspended:
                    self._job = start_ms, self._save(partition, logs, now_ms)
                    break
            else:
                return 0
        start_ms, steps = self._job
        part = Part("snapshot", start_ms=start_ms)
        try:
            return int(next(steps) is not None)
        except StopIteration:
            self._suspensions.succeeded(part, now_ms)
            left = sum(log.unsaved for log in loaded[start_ms][1]) if start_ms in loaded else 0
            self._plan(start_ms, max(self._every - left, self._little))
        except (StoreFull, StoreFailed) as error:
            self._log.log(logging.WARNING, "no snapshot is written for now: %s", error)
            self._plan(start_ms, self._little)
        except Exception as error:
            self._job = None
            self._suspensions.failed(part, error, now_ms)
        self._job = None
        return 0

    def save_all(self, loaded: dict[int, tuple[Partition, list[PendingLog]]], now_ms: int) -> int:
        """Write snapshots that spare the next start a long replay, before the store closes; returns their number."""
        self._job = None
        written = 0
        for partition, logs in loaded.values():
            if sum(log.unsaved for log in logs) >= self._little:
                try:
                    written += sum(step is not None for step in self._save(partition, logs, now_ms))
                except (StoreFull, StoreFailed) as error:
                    self._log.log(logging.WARNING, "no snapshot was written, the next opening takes longer: %s", error)
                except Exception as error:
                    _log.error("%s: no snapshot was written: %r", partition.path, error, exc_info=error)
        return written

    def _save(self, partition: Partition, logs: list[PendingLog], now_ms: int) -> Iterator[SnapshotWritten | None]:
        by_ledger = {log.ledger_id: log for log in logs}
        spent_ns, started_ns = 0, time.perf_counter_ns()
        cuts = self._cuts(logs)
        for step in write_snapshots(partition.environment, cuts, self._part_bytes, now_ms):
            spent_ns += time.perf_counter_ns() - started_ns
            if step is not None:
                by_ledger[step.ledger_id].saved_tail = step.tail
                tell(self._storage.listeners, StoreListener.snapshot_written, step.stored_bytes, spent_ns)
                spent_ns = 0
            yield step
            started_ns = time.perf_counter_ns()

    def _cuts(self, logs: list[PendingLog]) -> Iterator[Cut]:
        """Copies of the indexes with the longest tails, each made when its turn comes."""
        left = sum(log.unsaved for log in logs)
        for log in sorted(logs, key=lambda log: log.unsaved, reverse=True):
            if left <= self._little // 2 or not log.unsaved:
                return
            left -= log.unsaved
            cut = log.cut()
            if cut is not None:
                yield cut
