"""The WAL writer: sends of all threads are appended to the write-ahead log in groups, each with one flush.

The first of the threads that send leads (store/env/commit_queue.py). It runs the units of work of all in one write
batch, which gives the entries their ids, appends the rows as one group, flushes, and has memory know them: memtables,
delay indexes, readers of main logs. The rows are applied to LMDB later, by a checkpoint, when the segment is full or
`CHECKPOINT_MS` after its first group. A unit of work may run more than once, as in a transaction of LMDB.

"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar, cast

from duelog.markers.firing.firing_batch import FiringBatch
from duelog.store.config import KIB, StoreConfig
from duelog.store.env.claims import Claims, Conflict
from duelog.store.env.commit_queue import CommitQueue, Request
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import Memtable
from duelog.store.errors import ClosedError, DuelogError, InvalidArgument, StoreFailed, StoreFull
from duelog.store.files.failpoints import reach
from duelog.store.files.process import here
from duelog.store.listener import StoreListener, call_supplied
from duelog.store.wal.segment import MAIN, Row, capacity_of, group_bytes, row_weight
from duelog.store.wal.write_batch import EnvironmentBatch, WriteBatch

from .append_group import AppendGroup
from .log_append import AppendWork, FiringAppend
from .wal_segments import WalSegments

T = TypeVar("T")
Work = Callable[[WriteBatch], T]

_FIRED_BYTES = 512
"""Most bytes of a group for an entry that fires alone in its log."""

_ADDED_BYTES = 64 * KIB
"""Most bytes stored with a message beyond its counted size."""


class _Action:
    """Something that the leader does alone, between two groups."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call


class WalWriter:
    """Appends to the write-ahead log of a store. Thread-safe."""

    def __init__(
        self,
        main: Environment,
        memtable: Memtable,
        claims: Claims,
        segments: WalSegments,
        config: StoreConfig,
        listeners: Sequence[StoreListener],
    ) -> None:
        """`memtable` is that of `main`."""
        self._main = main
        self.memtable = memtable
        self._claims = claims
        self._segments = segments
        self.largest_group = max(capacity_of(config.wal_bytes), config.max_message_bytes + _ADDED_BYTES)
        """Bytes of rows that one group takes at most; any message is taken."""
        self.largest_firing = min(config.fire_batch, self.largest_group // _FIRED_BYTES)
        """Entries that one group fires at most."""
        self._queue = CommitQueue(self._admit, self._commit_group, self._broke_off)
        self._unpublished = False
        """Set from the first byte of a group until memory knows it; for good where that broke off."""
        self._closed = False
        self._process = here.pid
        self._listeners = listeners

    def write(self, work: Work[T]) -> T:
        """Run `work` and return its value once the rows of its group are as durable as the store's durability says.

        It gives what it wants to `main_rows` and `WriteBatch.to`. Raises what it raises, with nothing stored;
        InvalidArgument where the rows are more than `largest_group`; StoreFull, StoreFailed, ClosedError.
        """
        return cast(T, self._queue.run(work))

    def fire(self, firing: FiringBatch) -> None:
        """Store a firing, in the main environment where the log has no space: deliveries free some.

        Raises StoreFull, StoreFailed, ClosedError; then nothing has fired.
        """
        try:
            self.write(FiringAppend(firing, self.main_rows))
        except StoreFull:
            self._main.write(firing)

    def wait_for_groups(self) -> None:
        """Wait until every unit of work that was queued is decided. Raises StoreFailed, ClosedError."""
        self._queue.run(_Action(lambda: None))

    def main_rows(self, batch: WriteBatch) -> EnvironmentBatch:
        """The rows of the main environment in a batch."""
        return batch.to(MAIN, self.memtable, self._main.get)

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
        """Stop the store: a commit that waits for a claim of this writer gets none any more."""
        failed = self._claims.failed = self._main.fail(error)
        return failed

    def _commit_group(self, requests: list[Request]) -> None:
        """Give every request its value or its error."""
        if self._unpublished and self._main.failed is None:  # a second interrupt came before `_broke_off`
            self._broke_off(KeyboardInterrupt())
        units: list[Request] = []
        for request in requests:
            if self._main.failed is not None:
                request.error = self._main.failed
            elif isinstance(request.work, _Action):
                try:
                    request.work.call()
                    request.stored()
                except Exception as error:
                    request.error = error
            elif self._closed:
                request.error = ClosedError("store")
            else:
                units.append(request)
        if units and all(isinstance(unit.work, AppendWork) for unit in units) and self._commit_appends(units):
            return
        while units:
            units = self._commit(units)

    def _commit_appends(self, units: list[Request]) -> bool:
        """Append units in place, as one group. Returns False, with nothing done, where they have to run one by one."""
        started = time.perf_counter_ns()
        group = AppendGroup(self._claims, self.memtable)
        try:
            try:
                for unit in units:
                    value = group.add(unit.work)
                    if value is None:
                        return False
                    unit.value = value
            except Exception:  # units of work tell whose it is
                return False
            size, weight = group_bytes(group.rows), row_weight(group.rows)
            if not self._segments.fits(size, weight):
                if size > self.largest_group:
                    return False
                group.release()  # a commit that applies may append to the same logs
                self._segments.make_space(size, weight)
                return self._commit_appends(units)
            self._store(group.rows, group.publish, units)
            self._count(time.perf_counter_ns() - started, len(units), group.entries)
        except OSError as error:
            failed = self._fail(error)
            for unit in units:
                unit.error = failed
        except Exception as error:
            if self._unpublished:
                raise
            for unit in units:
                unit.error = error
        finally:
            self._release(group)
        return True

    def _store(self, rows: Sequence[Row], publish: Callable[[int], None], units: Sequence[Request]) -> None:
        """Append a group, and have memory know it once it is as durable as it is to be. Raises OSError, StoreFailed.

        What breaks it off, an interrupt too, stops the store: the group may be on disk, and memory does not know.
        """
        self._segments.sync_before(rows)
        reach("wal.before")
        self._unpublished = True
        position = self._segments.append(rows)
        reach("wal.after")
        publish(position)
        for unit in units:
            unit.stored()
        self._unpublished = False

    def _release(self, group: AppendGroup | WriteBatch) -> None:
        """Give the claims of a group back, but for one that broke off: its ids may be on disk."""
        if not self._unpublished:
            group.release()

    def _commit(self, units: list[Request]) -> list[Request]:
        """Commit units of work, as many as one group takes, and return the rest."""
        started = time.perf_counter_ns()
        batch = WriteBatch(self._claims)
        current: Request | None = None
        try:
            for current in units:
                current.value = current.work(batch)
            current = None
            rows = batch.flush()
            size = group_bytes(rows)
            if size > self.largest_group:
                if len(units) > 1:
                    batch.release()
                    return [*self._halves(units)]
                current = units[0]
                raise InvalidArgument("messages", size, f"bytes, more than a group of {self.largest_group} takes")
            if rows and not self._segments.fits(size, row_weight(rows)):
                batch.release()  # a commit that applies may append to the same logs
                self._segments.make_space(size, row_weight(rows))
                return units
            if rows:
                self._store(rows, batch.publish, units)
            else:
                for request in units:
                    request.stored()
            self._count(time.perf_counter_ns() - started, len(units), batch.entries)
            return []
        except Conflict as conflict:
            batch.release()
            self._claims.wait(conflict.owner)
            return units
        except OSError as error:
            failed = self._fail(error)
            for request in units:
                request.error = failed
            return []
        except Exception as error:
            if self._unpublished:
                raise
            for request in units if current is None else [current]:
                request.error = error
            return [] if current is None else [request for request in units if request is not current]
        finally:
            self._release(batch)

    def _count(self, elapsed_ns: int, requests: int, entries: int) -> None:
        for listener in self._listeners:
            call_supplied(listener.committed, "wal", elapsed_ns, requests, entries)

    def _halves(self, units: list[Request]) -> list[Request]:
        """Commit the first half; the rest."""
        middle = len(units) // 2
        first = units[:middle]
        while first:
            first = self._commit(first)
        return units[middle:]

    # -- segments and checkpoints ------------------------------------------------------------------

    def sync(self) -> None:
        """Have all groups be on disk where a commit that follows may tell of them. Raises StoreFailed."""
        self._segments.sync()

    def due_ms(self) -> int | None:
        """When `checkpoint` has something to do; None: never, as it is. Soon, also where the clock was set back."""
        return self._segments.due_ms()

    def checkpoint(self, now_ms: int) -> bool:
        """Flush, and begin or end a checkpoint, if it is time; False. Raises StoreFull, StoreFailed."""
        self._segments.flush_if_due(now_ms)
        if self._segments.is_applied:
            self._queue.run(_Action(self._segments.finish_checkpoint))
        if self._segments.is_due(now_ms):
            self._queue.run(_Action(self._segments.begin_next))
        return False

    def apply_all(self) -> None:
        """Have everything be applied, and the log be empty. Raises StoreFull, StoreFailed."""
        self._queue.run(_Action(self._segments.apply_all))

    def close(self) -> None:
        """Refuse further work, and apply the unapplied rows.

        Where that cannot be (no space, a failed disk) it stays in the log, and is applied when the store is opened.
        """
        if here.pid != self._process:
            self._closed = True
            return  # the log, and the leader, is the parent's
        try:
            with suppress(DuelogError, OSError):
                self._queue.run(_Action(self._close))
        finally:
            self._closed = True
            self._segments.close()

    def _close(self) -> None:
        self._closed = True
        self._segments.end()
