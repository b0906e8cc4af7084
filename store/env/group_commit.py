"""One commit for the work of several callers: the transaction, its retries, and what follows from it in memory.

The part of an environment that a leader runs (commit_queue.py). A unit of work that fails reaches its caller alone, and
the others are run again without it; a map that is full grows. Once LMDB has begun to commit, whatever is not known to
have come to its end, on disk or in memory, closes the environment for writing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import lmdb

from ..errors import DuelogError, ResourceShortage, StoreFailed, StoreFull
from ..files.datafile import InPlace
from ..files.failpoints import reach
from ..files.free_space import in_doubt, out_of_space
from ..files.system_errors import explain
from ..listener import StoreListener, call_supplied
from .commit_queue import Request
from .map_size import MapSize
from .memtable import Memtable
from .transaction import Transaction
from .upkeep import Upkeep


@dataclass(slots=True)
class CommitCounts:
    """Figures of an environment's commits so far: `requests` / `commits` says how many writers shared one."""

    commits: int = 0
    requests: int = 0
    entries: int = 0
    """Entries appended to ledgers."""
    total_ns: int = 0
    longest_ns: int = 0

    def add(self, requests: int, entries: int, elapsed_ns: int) -> None:
        """Count one commit. REQUIRES: the leader of the commit calls it."""
        self.commits += 1
        self.requests += requests
        self.entries += entries
        self.total_ns += elapsed_ns
        self.longest_ns = max(self.longest_ns, elapsed_ns)


class GroupCommit:
    """What of an environment commits. REQUIRES: one thread at a time."""

    path: Path
    name: str
    counts: CommitCounts
    in_place: InPlace
    _env: lmdb.Environment
    _map: MapSize
    _upkeep: Upkeep | None
    _last_run: bytes
    _memtable: Memtable | None
    before_commit: Callable[[], None] | None

    def __init__(self, listeners: Sequence[StoreListener]) -> None:
        self._listeners = listeners
        self._publishing = False
        """Between a commit and the end of what follows from it in memory."""
        self._failed: StoreFailed | None = None
        self._transaction: Transaction | None = None
        self._unsynced = False

    def _check_writable(self) -> None:
        raise NotImplementedError

    def _broke_off(self, error: BaseException) -> None:
        """Write nothing more where memory may not be what is on disk."""
        if self._publishing or isinstance(error, Exception):
            self.fail(error)

    def _commit_together(self, batch: list[Request]) -> None:
        """Give every request of `batch` its value or its error."""
        try:
            self._attempt(batch)
        finally:
            self._release()

    def _release(self) -> None:
        """Give the claims of the last attempt back."""
        if self._transaction is not None:
            self._transaction.release()
            self._transaction = None

    def _attempt(self, batch: list[Request]) -> None:
        if self._publishing and self._failed is None:  # a second interrupt came before `_broke_off`
            self.fail(KeyboardInterrupt())
        started = time.perf_counter_ns()
        left = batch
        while left:
            self._release()
            try:
                self._check_writable()
            except DuelogError as error:
                self._fail(left, error)
                return
            raw: lmdb.Transaction | None = None
            current: Request | None = None
            try:
                raw = self._env.begin(write=True)
                transaction = self._transaction = Transaction(raw, self._last_run, self._memtable)
                for current in left:
                    current.value = current.work(transaction)
                current = None
                transaction.flush()
                if self.before_commit is not None:
                    self.before_commit()
                reach("commit.before")
            except BaseException as error:
                if raw is not None:
                    raw.abort()
                if isinstance(error, lmdb.MapFullError):
                    if self._grow(left, error):
                        continue
                    return
                if not isinstance(error, Exception):
                    raise
                told = explain(self.path, error) if raw is None or isinstance(error, lmdb.Error) else error
                if raw is None and not isinstance(told, ResourceShortage):  # of a shortage nothing is in doubt then
                    told = self.fail(error)
                if current is None:
                    self._fail(left, told)
                    return
                current.error = told
                left = [request for request in left if request is not current]
                continue
            self._publishing = True
            try:
                raw.commit()
                self.in_place.verify(started)
            except lmdb.MapFullError as error:
                self._publishing = False
                if self._grow(left, error):
                    continue
                return
            except (lmdb.Error, FileNotFoundError) as error:
                self._publishing = False
                full = None if in_doubt(self._env) else out_of_space(self.path, error)
                self._fail(left, full or self.fail(error))
                return
            except BaseException:
                with suppress(lmdb.Error):  # with a transaction left open the environment could not be closed
                    raw.abort()
                raise
            self._unsynced = True
            self._last_run = transaction.last_run
            reach("commit.after")
            transaction.committed()
            for request in left:
                request.stored()
            self._publishing = False
            self._count(len(left), transaction.entries, time.perf_counter_ns() - started)
            return

    def _grow(self, left: list[Request], error: lmdb.MapFullError) -> bool:
        """Whether the map has grown; else every request has the error."""
        if self._map.grow():
            return True
        self._fail(left, StoreFull(self.path, f"the map of {self._map.bytes} bytes is full: {error}"))
        return False

    @staticmethod
    def _fail(requests: list[Request], error: BaseException) -> None:
        for request in requests:
            request.error = error

    def _count(self, requests: int, entries: int, elapsed_ns: int) -> None:
        self.counts.add(requests, entries, elapsed_ns)
        if self._upkeep is not None:
            self._upkeep.committed()
        for listener in self._listeners:
            call_supplied(listener.committed, self.name, elapsed_ns, requests, entries)

    def fail(self, error: BaseException) -> StoreFailed:
        """Close the environment for writing, for good: what is on disk, or in memory, is not known any more."""
        reason = str(error) or type(error).__name__
        if not isinstance(error, Exception):
            reason = f"{type(error).__name__} amid a commit: whether calls under way have stored theirs is in doubt"
        failed = StoreFailed(self.path, reason)
        failed.__cause__ = error
        self._failed = failed
        for listener in self._listeners:
            call_supplied(listener.failed, self.name, failed)
        return failed
