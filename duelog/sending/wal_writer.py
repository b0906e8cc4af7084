"""The WAL writer: what all threads send and change is appended to the write-ahead log in groups, one flush for each.

The first of the threads that write leads (store/env/commit_queue.py). It runs the units of work of all in one write
batch, which gives the entries their ids, appends the rows as one group, flushes, and has memory know them: memtables,
delay indexes, readers of main logs. The rows are applied to LMDB later, by a checkpoint, when the segment is full or
`CHECKPOINT_MS` after its first group. A unit of work may run more than once, as in a transaction of LMDB.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from duelog.store.config import KIB, StoreConfig
from duelog.store.env.body_file import append_bodies
from duelog.store.env.commit_queue import CommitCounts, CommitQueue, Request
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import Memtable
from duelog.store.env.transaction import Transaction
from duelog.store.errors import ClosedError, DuelogError, InvalidArgument, ResourceShortage, StoreFailed, StoreFull
from duelog.store.files.failpoints import reach
from duelog.store.files.process import here
from duelog.store.files.system_errors import explain
from duelog.store.listener import StoreListener, tell
from duelog.store.log.documents import MAX_VALUE_BYTES
from duelog.store.wal.segment import capacity_of
from duelog.store.wal.write_batch import WriteBatch

from .wal_segments import WalSegments

T = TypeVar("T")
Work = Callable[[WriteBatch], T]

_FIRED_BYTES = 512
"""Most bytes of a group for an entry that fires alone in its log."""

_ADDED_BYTES = 64 * KIB
"""Most bytes stored with a message beyond its counted size."""


_MOST_NAMED = 4_096
"""Body files that a writer remembers the names of."""


class _Action:
    """Something that the leader does alone, between two groups."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call


def _making_space(units: list[Request]) -> list[Request]:
    return [unit for unit in units if unit.makes_space]


class WalWriter:
    """Appends to the write-ahead log of a store. Thread-safe."""

    def __init__(
        self,
        main: Environment,
        memtable: Memtable,
        segments: WalSegments,
        config: StoreConfig,
        listeners: Sequence[StoreListener],
        keep_bodies: Callable[[Path], None],
    ) -> None:
        """`memtable` is that of `main`. keep_bodies: is told of a body file before the first group that names it."""
        self._main = main
        self.memtable = memtable
        self.segments = segments
        """The segments that groups go to."""
        self.largest_group = max(capacity_of(config.wal_bytes), config.max_message_bytes + _ADDED_BYTES)
        """Bytes of rows that one group takes at most; any message is taken."""
        self._largest_unit = max(self.largest_group, MAX_VALUE_BYTES + _ADDED_BYTES)
        """Bytes of rows of one unit of work at most; any document is taken."""
        self.largest_firing = min(config.fire_batch, self.largest_group // _FIRED_BYTES)
        """Entries that one group fires at most."""
        self._queue = CommitQueue(self._admit, self._commit_group, self._broke_off)
        self._body_files: set[str] = set()
        """Body files whose names this process has brought to disk."""
        self._unpublished = False
        """Set from the first byte of a group until memory knows it; for good where that broke off."""
        self.counts = CommitCounts()
        self._closed = False
        self._process = here.pid
        self._listeners = listeners
        self._keep_bodies = keep_bodies

    def write(self, work: Work[T]) -> T:
        """Run `work` and return its value once the rows of its group are as durable as the store's durability says.

        Raises what `work` raises, with nothing stored; InvalidArgument where the rows are more than `largest_group`;
        StoreFull, StoreFailed, ClosedError.
        """
        value: T = self._queue.run(work)
        return value

    def change(self, work: Callable[[Transaction], T], *, alone: bool, makes_space: bool) -> T:
        """Run `work` as `write` does; see `Environment.write`."""
        value: T = self._queue.run(work, alone=alone, makes_space=makes_space)
        return value

    # -- leading -----------------------------------------------------------------------------------

    def _admit(self) -> None:
        if self._main.failed is not None:
            raise self._main.failed
        if here.pid != self._process:
            raise ClosedError("store (opened by another process)")

    def _broke_off(self, error: BaseException) -> None:
        """Refuse all writes once memory may differ from the disk."""
        if self._unpublished or isinstance(error, Exception):
            self._fail(error)

    def _fail(self, error: BaseException) -> StoreFailed:
        """Stop the store: what memory may have a part of is not applied either."""
        failed = self.memtable.publication.failed = self._main.fail(error)
        return failed

    def _commit_group(self, requests: list[Request]) -> None:
        """Give every request its value or its error."""
        if self._unpublished and self._main.failed is None:  # a second interrupt came before `_broke_off`
            self._broke_off(KeyboardInterrupt())
        groups: list[list[Request]] = [[]]
        for request in requests:
            if type(request.work) is _Action:
                try:
                    self._admit()  # the store may have failed since it was queued
                    request.work.call()
                    request.stored()
                except Exception as error:
                    request.error = error
            elif request.alone:
                groups.append([request])
            else:
                groups[0].append(request)
        for group in groups:
            left = group
            while left:
                left = self._commit(left)

    def _commit(self, units: list[Request]) -> list[Request]:
        """Commit units of work as one group, and return those that have to be tried again.

        The steps, in order: the work of each unit, which gives entries their ids; the size; space in the segment; the
        bodies of large runs, flushed; the group is appended, and flushed; memory hears of it; the callers; listeners.
        From the first byte of the group to the end of its publication whatever breaks off, an interrupt too, stops the
        store: the group may be on disk, and memory does not know. A unit that raises gets its error alone, and the
        others are run again without it.
        """
        if self._closed or self._main.failed is not None:  # by one of the same requests
            for unit in units:
                unit.error = self._main.failed or ClosedError("store")
            return []
        started = time.perf_counter_ns()
        batch = WriteBatch(self._main, self.memtable)
        current: Request | None = None
        try:
            for current in units:
                current.value = current.work(batch)
            current = None
            content, weight, position = batch.content, batch.weight, 0
            if weight:
                size = content.size
                if len(units) > 1 and size + sum([each.length for each in content.apart]) > self.largest_group:
                    return self._halves(units)
                if size > self._largest_unit:
                    current = units[0]
                    raise InvalidArgument("messages", size, f"bytes, more than a group of {self._largest_unit} takes")
                if not self.segments.fits(size, weight):
                    batch.end_reads()  # a growing map waits for readers
                    reserve = len(_making_space(units)) == len(units)
                    if not (reserve and self.segments.fits_reserve(size)):
                        try:
                            self.segments.make_space(size, weight, reserve=reserve)
                        except StoreFull as error:
                            return self._refuse_senders(units, error)
                        return units
                if batch.bodies:
                    try:
                        self._write_bodies(batch)
                    except (StoreFull, ResourceShortage) as error:
                        return self._refuse_senders(units, error)
                reach("wal.before")
                self._unpublished = True
                position = self.segments.append(content, weight)
                reach("wal.after")
            self._unpublished = True
            batch.publish(position)
            for unit in units:
                unit.stored()
            self._unpublished = False
            elapsed_ns = time.perf_counter_ns() - started
            self.counts.add(len(units))
            tell(self._listeners, StoreListener.committed, "wal", elapsed_ns, len(units), batch.entries)
            return []
        except OSError as error:
            failed = self._fail(error)
            for unit in units:
                unit.error = failed
            return []
        except Exception as error:
            if self._unpublished:
                raise
            for unit in units if current is None else [current]:
                unit.error = error
            return [] if current is None else [unit for unit in units if unit is not current]
        finally:
            batch.close()

    def _refuse_senders(self, units: list[Request], error: DuelogError) -> list[Request]:
        """Give units of work an error; those that make space are tried again without the others."""
        making_space = _making_space(units)
        if len(making_space) == len(units):
            raise error
        for unit in units:
            unit.error = error
        return making_space

    def _write_bodies(self, batch: WriteBatch) -> None:
        """Write what goes to body files, side by side. Raises StoreFull, ResourceShortage, OSError."""
        self.segments.require_space(sum(staged.end - staged.at for staged in batch.bodies.values()))
        try:
            append_bodies(batch.bodies, self._body_files)
        except OSError as error:
            shortage = explain(Path(next(iter(batch.bodies))), error)
            if isinstance(shortage, (StoreFull, ResourceShortage)):
                raise shortage from error
            raise
        for path in batch.bodies.keys() - self._body_files:
            self._keep_bodies(Path(path))
        if len(self._body_files) >= _MOST_NAMED:  # days come and go: those in use are flushed once more
            self._body_files.clear()
        self._body_files.update(batch.bodies)

    def _halves(self, units: list[Request]) -> list[Request]:
        """Commit the first half; the rest."""
        middle = len(units) // 2
        first = units[:middle]
        while first:
            first = self._commit(first)
        return units[middle:]

    # -- segments and checkpoints ------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until every group is on disk, whatever the store's durability. Raises StoreFailed."""
        self.segments.flush()

    def checkpoint(self, now_ms: int) -> None:
        """Flush, and begin or end a checkpoint, if it is time. Raises StoreFull, StoreFailed."""
        self.segments.flush_if_due(now_ms)
        if self.segments.is_applied:
            self._queue.run(_Action(self.segments.finish_applied))
        if self.segments.is_due(now_ms):
            self._queue.run(_Action(self.segments.begin_next))

    def stop(self, error: Exception) -> None:
        """Have nothing be written any more, behind all that is. Raises StoreFailed where that was so before."""
        self._queue.run(_Action(lambda: self._fail(error)))

    def apply_all(self) -> None:
        """Have everything be applied, and the log be empty. Raises StoreFull, StoreFailed."""
        self._queue.run(_Action(self.segments.apply_all))

    def close(self) -> None:
        """Refuse further work, and apply the unapplied rows.

        Where that cannot be (no space, a failed disk) it stays in the log, and is applied when the store is opened.
        """
        if here.pid != self._process:
            self._closed = True
            return  # the log, and the leader, is the parent's
        try:
            with suppress(DuelogError, OSError):
                if not self._closed:  # else a close before was interrupted: the next opening applies what it left
                    self._queue.run(_Action(self._close))
        finally:
            self._closed = True
            self.segments.close()

    def _close(self) -> None:
        self._closed = True
        self.segments.end()
