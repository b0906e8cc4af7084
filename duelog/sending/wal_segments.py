"""The segments of an open store's write-ahead log: which is appended to, which is being applied, how large the next is.

A segment is followed by a larger one where it was full before it was due: up to `_BYTES_A_PARTITION` for each
environment that it has rows of, so that applying commits something worth a commit in each; one that has far less is
not applied before the next. A small one stays in the page cache. While partitions that it has rows of are vacant it is
not doubled: what fills it then are large runs, which go to body files once it is applied.

A checkpoint applies a full segment to LMDB, environment by environment.

Partitions are applied side by side, each in one commit, the main environment last; when all of them are on disk the
record of the oldest segment moves on (catalog.WAL), and the file may be used again. Meanwhile the next segment is
written, and its rows are applied along.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

from duelog.partitions.partition import Partition
from duelog.partitions.partition_set import PartitionSet
from duelog.store.clock import Clock
from duelog.store.codec import format as fmt
from duelog.store.config import KIB, MIB, StoreConfig
from duelog.store.env.environment import Environment, Superseded
from duelog.store.env.transaction import LmdbTransaction
from duelog.store.errors import DamagedStore, StoreFull
from duelog.store.files.failpoints import reach
from duelog.store.files.system_errors import explained, free_bytes, require_space
from duelog.store.log import catalog
from duelog.store.parallel_jobs import Jobs
from duelog.store.wal.segment import EMPTY_BYTES, SEGMENT_VERSION, GroupContent, RawGroup
from duelog.store.wal.write_ahead_log import WriteAheadLog

_log = logging.getLogger("duelog.config")
_UPGRADED = "%s: its log had version %d and has %d from now on: versions of duelog before this refuse the store"


class Checkpoint:
    """Applies a segment, and all before it. Begun once; `finish` may be called again after an error."""

    def __init__(self, main: Environment, partitions: PartitionSet, segment: int, ready: Callable[[], None]) -> None:
        """`ready` is called, by any thread, when `finish` has nothing left to wait for."""
        self._main = main
        self._partitions = partitions
        self.segment = segment
        unapplied = partitions.unapplied()
        self._keeps_open = len(unapplied) <= partitions.max_written  # else those would change all the time
        self._jobs = Jobs((partial(self._apply, partition) for partition in unapplied), ready)

    @property
    def is_ready(self) -> bool:
        """True when `finish` has nothing to wait for."""
        return self._jobs.are_tried

    def begin(self, threads: int) -> None:
        """Have `threads` threads apply the partitions; `finish` applies the rest."""
        self._jobs.start(threads)

    def finish(self) -> None:
        """Apply in this thread what no other has taken, and wait for the others. Raises StoreFull, StoreFailed.

        What could not be applied is tried again by the next call.
        """
        self._jobs.finish()
        for partition in self._partitions.held(lambda each: each.is_open, partial=True):
            partition.environment.sync()  # another commit may have applied its rows, and is not known to be on disk
        for partition in self._partitions:
            partition.refuse_failed()  # it may have been closed since, which the disk refused
        reach("wal.applied")
        oldest = fmt.pack_u64(self.segment + 1)

        def record(transaction: LmdbTransaction) -> None:
            transaction.put(fmt.counter_key(catalog.WAL), oldest)

        self._main.commit(record)
        self._main.sync()
        reach("wal.released")

    def cancel(self) -> None:
        """Leave unapplied partitions to the next opening, and wait for the threads."""
        self._jobs.cancel()

    def _apply(self, partition: Partition) -> None:
        applied = False
        while not applied:
            lease = self._partitions.lease(partition, partial=True, keep=self._keeps_open)
            try:
                with lease, suppress(Superseded):
                    partition.environment.apply()
                    partition.environment.sync()
                    applied = True
            except DamagedStore:
                if self._partitions.registered(partition):
                    raise
                return  # it was deleted since the checkpoint began: its rows are of no more use
        reach("wal.part")


CHECKPOINT_MS = 10_000
"""After so long a segment is applied, where a thread looks after the store."""

_LEAST_BYTES = MIB
_GROWTH = 4
"""A segment is at most so many times as large as the one before, where that is not applied first."""

_USUAL_BYTES = 8 * MIB
"""The most that a segment of few environments grows to."""

_BYTES_A_PARTITION = 256 * KIB
_BYTES_A_ROW = KIB
"""Bytes of the largest segment for each row allowed in it: a row takes some 600 of memory, however small."""

_KEPT_BYTES = MIB
"""Bytes of the disk kept for commits that make space."""

_RESERVE_BYTES = 64 * KIB
"""Bytes of a segment kept for what makes space: acknowledging, cancelling, firing and trimming go on without sends."""

_THREADS = 4
"""Threads that apply partitions side by side."""


class LogFollower(Protocol):
    """Hears of the log as it is written: a copy of the store elsewhere."""

    def appended(self, group: RawGroup) -> None:
        """A group was appended."""

    def drain(self) -> None:
        """Nothing is appended any more, and the segments are about to go."""

    def end(self) -> None:
        """The log is closed."""


class WalSegments:
    """The segments of one store. For the leader of the WAL writer, but for `sync`, `flush_if_due` and questions."""

    def __init__(
        self,
        main: Environment,
        partitions: PartitionSet,
        wal: WriteAheadLog,
        clock: Clock,
        config: StoreConfig,
        wake: Callable[[], None],
        *,
        unapplied: bool,
        background: bool,
        follower: LogFollower | None = None,
    ) -> None:
        """`wake` is called when `due_ms` has come forward. `unapplied`: recovery has left rows to be applied.

        `background`: a thread looks after the store; without it a checkpoint has ended when the call that began it
        returns.
        """
        self._main = main
        self._partitions = partitions
        self._wal = wal
        self._clock = clock
        self._most_bytes = config.wal_bytes
        self._most_rows = config.wal_bytes // _BYTES_A_ROW
        self._reserve_bytes = min(_RESERVE_BYTES, config.wal_bytes // 16)
        self._is_short = False
        """True while there is no space for another segment."""
        self._durability = config.local_durability
        self._relaxed_ms = config.relaxed_ms
        self._wake = wake
        self._background = background
        self._follower = follower
        self._recorded = wal.active is not None
        """True once the main environment records that the log was begun."""
        self._checkpoint: Checkpoint | None = None
        """The last that was begun."""
        self._begun_ms: int | None = clock.now_ms() if unapplied else None
        """When the first group of the segment was appended; None: it has none."""
        self._flushed_ms: int | None = None
        self._ended_bytes = 0
        """Bytes of the segments that ended since the last checkpoint was begun."""
        self._rows = 0
        """Rows of all groups since then."""

    # -- groups ------------------------------------------------------------------------------------

    def fits(self, size: int, rows: int) -> bool:
        """Return whether a group of `size` bytes and `rows` rows can be appended; else `make_space` makes space."""
        return self._recorded and self._takes(size, rows)

    def fits_reserve(self, size: int) -> bool:
        """Return whether it fits with the end that other groups leave free: where no segment can be begun."""
        return self._recorded and self._is_short and self._wal.fits(size)

    def _takes(self, size: int, rows: int) -> bool:
        fits = self._wal.fits(size + self._reserve_bytes)
        return fits and (not self._rows or self._rows + rows <= self._most_rows)

    def make_space(self, size: int, rows: int, *, reserve: bool) -> None:
        """Make sure that the segment takes a group of `size` bytes and `rows` rows. Raises as `begin_next`."""
        try:
            if not self._takes(size, rows):
                self.begin_next(size + self._reserve_bytes, reserve=reserve)
        except StoreFull:
            self._is_short = not self._takes(size, rows)
            if self._is_short and not (reserve and self._wal.fits(size)):
                raise
        active = self._wal.active
        if not self._recorded and active is not None:  # before anything is in it
            oldest = fmt.pack_u64(active.number)
            self._main.commit(lambda transaction: transaction.put(fmt.counter_key(catalog.WAL), oldest))
            self._main.sync()
            self._recorded = True

    def append(self, rows: GroupContent, weight: int) -> int:
        """Append a group, of a weight (`WriteBatch.weight`).

        Returns its place, once it is as durable as the store's durability says. REQUIRES: it fits. Raises OSError.
        """
        flush = self._durability == "commit" or (self._durability == "relaxed" and self._is_to_flush())
        wake = self._begun_ms is None or (self._durability == "relaxed" and not flush and self._is_flushed)
        group = self._wal.append(rows, flush=flush)
        self._rows += weight
        if self._follower is not None:
            self._follower.appended(group)
        if self._begun_ms is None:
            self._begun_ms = self._clock.now_ms()
        if wake:
            self._wake()
        return group.position

    @property
    def _is_flushed(self) -> bool:
        return self._wal.active is None or self._wal.active.is_flushed

    def _is_to_flush(self) -> bool:
        now_ms = self._clock.now_ms()
        if self._flushed_ms is None or not 0 <= now_ms - self._flushed_ms < self._relaxed_ms:
            self._flushed_ms = now_ms
            return True
        return False

    def sync(self) -> None:
        """Have all groups be on disk where a commit that follows may tell of them. Raises StoreFailed."""
        if self._durability == "relaxed":
            self.flush()

    def next_place(self) -> int:
        """The place of the next group (`place_of`): what is before it is written. Any thread may ask."""
        active = self._wal.active
        return 0 if active is None else active.position

    def oldest_segment(self) -> int:
        """The first segment that is not applied, or the one that is to be begun. Any thread may ask."""
        oldest, active = catalog.oldest_segment(self._main), self._wal.active
        if oldest is None:
            return 1 if active is None else active.number
        return oldest

    def fail(self, error: Exception) -> None:
        """Have nothing be written any more. Any thread may call it."""
        self._main.fail(error)

    def flush(self) -> None:
        """Wait until every group is on disk. Raises StoreFailed."""
        try:
            self._wal.flush()
        except OSError as error:
            raise self._main.fail(error) from error

    # -- segments and checkpoints ------------------------------------------------------------------

    def begin_next(self, group: int = 0, *, reserve: bool = False, last: bool = False) -> None:
        """Begin a segment that takes a group of `group` bytes, and a checkpoint of the one before.

        reserve: also where the disk has no space to apply more. last: it takes no group, for the store closes.

        Waits for the checkpoint before: producers are held back, and nothing is queued without bound. Raises as
        `Checkpoint.finish`; StoreFull.
        """
        active = self._wal.active
        size, goes_on = _LEAST_BYTES, False
        if active is not None:
            unapplied = self._partitions.unapplied()  # before some of them are applied
            touched = len(unapplied) + 1
            wait_ms = self._clock.now_ms() - (self._begun_ms or 0)
            if group and wait_ms < CHECKPOINT_MS and not self._wal.fits(group):  # it is full before it is due
                doubled = active.size if any(each.vacant for each in unapplied) else active.size * 2
                size = max(min(doubled, _USUAL_BYTES), touched * _BYTES_A_PARTITION)
                goes_on = 2 * (self._ended_bytes + active.size) < min(size, self._most_bytes)
                goes_on = goes_on and 2 * self._rows < self._most_rows
                if goes_on:  # a file is written in full when it is made
                    size = min(size, _GROWTH * active.size)
            else:
                size = max(active.size, _LEAST_BYTES) if group else active.size  # a clean close left one without space
        self.finish_checkpoint()
        size = EMPTY_BYTES if last else min(size, self._most_bytes)
        if group:
            size = self._size_with_space(size, group, reserve)
        with explained(self._main.path.parent):
            following = self._wal.prepare_segment(size, group)
        try:
            ended = self._wal.begin_segment(following)
            self._is_short = False
        except OSError as error:
            raise self._main.fail(error) from error
        if active is not None and active.version < SEGMENT_VERSION:
            _log.warning(_UPGRADED, self._main.path.parent, active.version, SEGMENT_VERSION)
        if goes_on and active is not None:
            self._ended_bytes += active.size
            return
        begun_ms, self._begun_ms, self._ended_bytes, self._rows = self._begun_ms, None, 0, 0
        if ended is not None and begun_ms is not None:
            self._checkpoint = Checkpoint(self._main, self._partitions, ended, self._wake)
            if self._background:
                self._checkpoint.begin(_THREADS)
            else:
                self.finish_checkpoint()

    def _size_with_space(self, size: int, group: int, reserve: bool) -> int:
        """A segment's size, less where there is no space to apply so much and what is not applied. Raises StoreFull.

        So a full disk stops sends while commits, which apply the log first, still go on: acknowledging makes space.
        """
        path, kept = self._main.path.parent, self._kept_bytes
        least = max(min(size, _LEAST_BYTES), group)
        if not reserve:
            require_space(path, 2 * least + kept, "to apply more of the log")
        return max(least, min(size, (free_bytes(path) - kept) // 2))

    @property
    def _kept_bytes(self) -> int:
        """Bytes of the disk for what is not applied, and for commits that make space."""
        active = self._wal.active
        unapplied = self._ended_bytes + (0 if active is None else active.size)
        return unapplied + _KEPT_BYTES - self._main.unused_bytes()

    def require_space(self, size: int) -> None:
        """Raise StoreFull where bodies of `size` bytes would take the space that is kept."""
        require_space(self._main.path.parent, size + self._kept_bytes, "for the bodies of a large run")

    def finish_checkpoint(self) -> None:
        """Wait for the checkpoint that was begun, if there is one. Raises as `Checkpoint.finish`."""
        checkpoint = self._checkpoint
        if checkpoint is not None:
            checkpoint.finish()
            self._wal.release(checkpoint.segment)
            self._checkpoint = None

    def finish_applied(self) -> None:
        """End the checkpoint if there is nothing left to wait for: another may have been begun since that was so."""
        if self.is_applied:
            self.finish_checkpoint()

    def due_ms(self) -> int | None:
        """When there is something to do (`is_due`, `is_applied`, `flush_if_due`); None: never, as it is.

        Soon, also where the clock was set back.
        """
        due_ms: int | None = None
        now_ms = self._clock.now_ms()
        if self.is_applied:
            return now_ms
        if self._begun_ms is not None:
            due_ms = min(self._begun_ms, now_ms) + CHECKPOINT_MS
        if self._durability == "relaxed" and not self._is_flushed:
            flush_ms = min(self._flushed_ms or now_ms, now_ms) + self._relaxed_ms
            due_ms = flush_ms if due_ms is None else min(due_ms, flush_ms)
        return due_ms

    def is_due(self, now_ms: int) -> bool:
        """Return whether the segment is to be applied by now."""
        if self._begun_ms is not None:
            self._begun_ms = min(self._begun_ms, now_ms)  # the clock may have been set back
        return self._begun_ms is not None and now_ms >= self._begun_ms + CHECKPOINT_MS

    @property
    def is_applied(self) -> bool:
        """True when the checkpoint that was begun has nothing left to wait for."""
        checkpoint = self._checkpoint
        return checkpoint is not None and checkpoint.is_ready

    def flush_if_due(self, now_ms: int) -> None:
        """Flush rows that have waited for `relaxed_ms`. Raises StoreFailed."""
        if self._flushed_ms is None or now_ms >= self._flushed_ms + self._relaxed_ms:
            self._flushed_ms = now_ms
            self.sync()

    def apply_all(self, *, last: bool = False) -> None:
        """Have everything be applied, and the log be empty; `last` as `begin_next`. Raises StoreFull, StoreFailed."""
        if self._begun_ms is not None:
            self.begin_next(last=last)
        self.finish_checkpoint()

    def end(self) -> None:
        """`apply_all`, and leave nothing of the log but an empty segment. Raises StoreFull, StoreFailed, OSError."""
        if self._follower is not None:
            self._follower.drain()
        self.apply_all(last=True)
        self._wal.leave_empty()

    def close(self) -> None:
        """Wait for the threads, and close the files."""
        if self._follower is not None:
            if self._main.failed is not None:  # `end` was not run; what was told before is shipped all the same
                self._follower.drain()
            self._follower.end()
        if self._checkpoint is not None:
            self._checkpoint.cancel()
        self._wal.close()
