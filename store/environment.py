"""One LMDB environment with shared commits, a map that grows, and the guards that LMDB needs.

Writers share commits (commit_queue.py): the first in the queue leads, runs the work of everybody who
queued up behind it in one transaction, commits once and wakes them; then the next one waiting leads.

Contract of a unit of work (a callable that gets a Transaction): it changes nothing but the transaction,
because it may run more than once (another unit failed, or the map was full and the transaction is dead);
effects in memory belong into `after_commit` callbacks, which the leader runs in commit order before the
next transaction begins. It takes no lock that anybody holds while waiting for `write`.

Guards (docs/design.md, "What py-lmdb demands"): begin and commit happen in one thread; a child process
after fork is refused; a commit that raised is in doubt and closes the environment for writing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import lmdb

from . import page_cache, pages
from .commit_counts import CommitCounts
from .commit_queue import CommitQueue, Request
from .config import Durability
from .directory import occupied_bytes
from .errors import BrokenInvariant, ClosedError, DuelogError, ResourceShortage, StoreFailed, StoreFull
from .failpoints import reach
from .format import RUN_PREFIX, unseal
from .held_read import HeldRead
from .map_size import MapSize
from .opening import open_lmdb
from .process import here
from .reader_gate import ReaderGate
from .room import in_doubt, no_room
from .system_errors import explain
from .transaction import Transaction
from .upkeep import Upkeep

T = TypeVar("T")
Work = Callable[[Transaction], T]


class Environment:
    """An open LMDB environment. Thread-safe."""

    def __init__(
        self,
        path: Path,
        *,
        name: str,
        durability: Durability = "commit",
        map_bytes: int = 1 << 34,
        read_only: bool = False,
        create: bool = False,
        lock: bool = True,
        drops_behind: bool = False,
    ) -> None:
        """Open `path`, a directory; `name` is what errors and findings call it.

        `lock` False, with `read_only` alone: no reader is registered, so that a directory that this process may not
        write can be read, by as many readers as there are. Only of a file that nobody writes any more: beside a
        writer it reads wrong rows silently.
        `drops_behind`: what is written does not stay in the page cache, until `keep_pages` is called (behind.py).
        Raises DamagedStore when the data file is missing, empty, no LMDB file, or truncated so that
        reading it would kill the process.
        """
        if not lock and not read_only:
            raise BrokenInvariant(f"{name}: a writer without locks")
        self.path = path
        self.name = name
        self.counts = CommitCounts()
        self.observe_commit: Callable[[int, int], None] | None = None
        """Called after each commit with (duration ns, requests served); for metrics."""
        self._process = here.pid
        self._durability = durability
        self._read_only = read_only
        self._env, last, map_bytes = open_lmdb(
            path, map_bytes=map_bytes, durability=durability, read_only=read_only, create=create, lock=lock
        )
        self._last_run = max(last, RUN_PREFIX)
        self._committing = threading.Lock()
        self._queue = CommitQueue(self._check_writable, self._serve, self._broke_off)
        self._publishing = False
        """Between a commit and the end of what follows from it in memory."""
        self._failed: StoreFailed | None = None
        self.on_failure: Callable[[StoreFailed], None] = lambda failed: None
        """Told, by any thread, that nothing more is written; takes leaf locks only."""
        self._closed = False
        self._gate = ReaderGate()
        self._map = MapSize(self._env, self._gate, map_bytes)
        self._deferred: list[Work[None]] = []
        self._unsynced = False
        self._syncing = threading.Lock()
        self._upkeep = None
        if not read_only:
            self._upkeep = Upkeep(
                path, self._env, self._map.map_anew, synced=durability != "none", drops_behind=drops_behind
            )

    # -- reading -------------------------------------------------------------------------------

    @contextmanager
    def read(self) -> Iterator[lmdb.Transaction]:
        """A read transaction whose values are memoryviews, valid inside the `with` block only.

        Keep it short: a reader keeps every page that was freed since it began. No `write` inside.
        What was deferred is written first: raises as `write`, where there is any.
        """
        if self._deferred:
            self.settle()
        while True:
            with self._gate.reading():
                self._check_open()
                raw = self._begin_read()
                if raw is not None:
                    try:
                        with raw:
                            yield raw
                    except lmdb.Error as error:
                        raise explain(self.path, error) from error
                    return
            if self._gate.held:
                raise BrokenInvariant(f"{self.name}: the map has to grow for a read inside a read")
            self._map.follow()

    def _begin_read(self) -> lmdb.Transaction | None:
        """None: the writing process has grown the file past this process's map."""
        try:
            return self._env.begin(buffers=True)
        except lmdb.MapResizedError:
            return None
        except lmdb.PanicError as error:  # the root page could not be written: LMDB lets nobody read either
            raise (self._failed or self.fail(error)) from error
        except lmdb.Error as error:
            raise explain(self.path, error) from error

    def get(self, key: bytes) -> bytes | None:
        """Fields of a small record, in a read transaction of its own. Raises CorruptRecord."""
        with self.read() as raw:
            value = raw.get(key)
            return None if value is None else unseal(key, value)

    # -- writing -------------------------------------------------------------------------------

    def write(self, work: Work[T]) -> T:
        """Run `work` in a transaction, commit it together with that of others, and return its value.

        When it returns, the transaction is as durable as the environment's `durability` says. An
        exception of `work` itself reaches its caller alone, and nothing of it is stored.
        Raises StoreFull (nothing stored, may be tried again), StoreFailed, ClosedError.
        """
        if self._gate.held:
            raise BrokenInvariant(f"{self.name}: write inside a read transaction")
        value: T = self._queue.run(work)
        return value

    def unless_committing(self, action: Callable[[], T | None]) -> T | None:
        """Do something of little work between two commits; None: one is under way, and nothing was done.

        Raises StoreFailed, ClosedError.
        """
        self._check_writable()
        return self._queue.unless_led(action)

    def defer(self, work: Work[None]) -> None:
        """Have `work`, which does not fail, run at the beginning of the next commit, whoever asks for that.

        For what is durable elsewhere: closing drops it. REQUIRES: inside `unless_committing`.
        """
        self._deferred.append(work)

    @property
    def owes(self) -> bool:
        """Whether work was deferred and is not committed yet."""
        return bool(self._deferred)

    def settle(self) -> None:
        """Have what was deferred committed; not inside a read. Raises as `write`, and what was deferred stays so."""
        if self._deferred and not self._gate.held:
            self.write(lambda _: None)

    def _serve(self, batch: list[Request]) -> None:
        with self._committing:
            self._commit_together(batch)

    def _broke_off(self, error: BaseException, served: bool) -> None:
        """Where memory may not be what is on disk any more, nothing more is written."""
        if self._publishing or (isinstance(error, Exception) and not served):
            self.fail(error)

    def _commit_together(self, batch: list[Request]) -> None:
        """Give every request of `batch` its value or its error."""
        started = time.perf_counter_ns()
        left = batch
        while left:
            try:
                self._check_writable()
                raw = self._env.begin(write=True)
            except (lmdb.Error, DuelogError, MemoryError) as error:
                found = explain(self.path, error)  # nothing was begun, so of a shortage nothing is in doubt
                self._fail(left, found if found is error or isinstance(found, ResourceShortage) else self.fail(error))
                return
            transaction = Transaction(raw, self._last_run)
            current: Request | None = None
            try:
                for work in self._deferred:
                    work(transaction)
                for current in left:
                    current.value = current.work(transaction)
                current = None
                transaction.flush()
                reach("commit.before")
            except lmdb.MapFullError as error:
                raw.abort()
                if not self._map.grow():
                    self._fail(left, StoreFull(self.path, f"the map of {self._map.bytes} bytes is full: {error}"))
                    return
                continue
            except BaseException as error:
                raw.abort()
                if not isinstance(error, Exception):
                    raise
                told = explain(self.path, error) if isinstance(error, lmdb.Error) else error
                if current is None:
                    self._fail(left, told)
                    return
                current.error = told
                left = [request for request in left if request is not current]
                continue
            self._publishing = True
            try:
                raw.commit()
            except lmdb.MapFullError as error:
                self._publishing = False
                if not self._map.grow():
                    self._fail(left, StoreFull(self.path, f"the map of {self._map.bytes} bytes is full: {error}"))
                    return
                continue
            except lmdb.Error as error:
                self._publishing = False
                full = None if in_doubt(self._env) else no_room(self.path, error)
                self._fail(left, full or self.fail(error))
                return
            self._unsynced = True
            self._deferred = []
            self._last_run = transaction.last_run
            reach("commit.after")
            transaction.committed()
            for request in left:
                request.done = True
            self._publishing = False
            self._count(len(left), transaction.entries, time.perf_counter_ns() - started)
            return

    @staticmethod
    def _fail(requests: list[Request], error: BaseException) -> None:
        for request in requests:
            request.error = error

    def _count(self, requests: int, entries: int, elapsed_ns: int) -> None:
        self.counts.add(requests, entries, elapsed_ns)
        if self._upkeep is not None:
            self._upkeep.committed()
        if self.observe_commit is not None:
            self.observe_commit(elapsed_ns, requests)

    def fail(self, error: BaseException) -> StoreFailed:
        """Close the environment for writing, for good: what is on disk, or in memory, is not known any more."""
        failed = StoreFailed(self.path, str(error) or type(error).__name__)
        failed.__cause__ = error
        self._failed = failed
        self.on_failure(failed)
        return failed

    def give_back_pages(self) -> bool:
        """Have what was read through the map no longer count as memory of this process; it may stay in the page cache.

        For whoever has read much that will not be read again soon. Waits for nobody: False, and nothing is done,
        while somebody reads, copies or commits.
        """
        if not self._committing.acquire(blocking=False):
            return False
        try:
            self._check_open()
            return self._map.map_anew()
        finally:
            self._committing.release()

    def keep_pages(self) -> int:
        """From now on what is written stays in the page cache: it will be read soon. There is no way back.

        Returns how many bytes from the beginning of data.mdb were dropped since it was opened.
        """
        return 0 if self._upkeep is None else self._upkeep.keep_pages()

    def sync(self) -> None:
        """Make every commit so far durable whatever `durability` is. Raises StoreFailed, StoreFull."""
        if self._durability == "commit":
            return
        with self._syncing:  # who finds nothing to do must not return before the sync that does it
            if not self._unsynced:
                return
            self._check_writable()
            self._unsynced = False
            try:
                self._env.sync(True)
            except lmdb.Error as error:
                self._unsynced = True
                raise self.fail(error) from error

    # -- as a file -----------------------------------------------------------------------------

    def find_problems(self) -> list[str]:
        """What is wrong with the pages of the data file, as of one commit (see pages.find_problems). O(pages).

        Reads the file beside LMDB, so that it does not die of what it finds; until it is done no page is reused.
        Raises DamagedStore.
        """
        while True:
            with self.read() as raw:
                found = pages.find_problems(self.path, raw.id())
            if found is not None:
                return found

    def hold(self) -> HeldRead:
        """What is committed now, without what was deferred, until it is released. Raises as `read`."""
        self._gate.enter()
        try:
            self._check_open()
            return HeldRead(self._env, self._gate, self._begin_read, self._map.follow)
        except BaseException:
            self._gate.leave()
            raise

    def copy(self, path: Path, held: HeldRead) -> None:
        """Copy what `held`, of this environment, sees into `path`, an existing empty directory, compacted and on disk.

        Beside readers and writers. Raises StoreFull.
        """
        page_cache.fetch_all(self.path / "data.mdb")  # else each page that was dropped is waited for
        held.copy(path)

    # -- life ----------------------------------------------------------------------------------

    @property
    def failed(self) -> StoreFailed | None:
        """The error that closed the environment for writing, if there was one."""
        return self._failed

    @property
    def read_only(self) -> bool:
        """Whether another process may write what is read here."""
        return self._read_only

    @property
    def map_bytes(self) -> int:
        return self._map.bytes

    def file_bytes(self) -> int:
        """Bytes that the data file occupies on disk (blocks; sparse tails do not count); 0 once it was removed."""
        return occupied_bytes(self.path / "data.mdb")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(self.name)
        if here.pid != self._process:
            raise ClosedError(f"{self.name} (opened by process {self._process}, used by its child {here.pid})")

    def _check_writable(self) -> None:
        if self._closed or here.pid != self._process:
            self._check_open()
        if self._failed is not None:
            raise self._failed
        if self._read_only:
            raise ClosedError(f"{self.name} is open read-only; for writing it")

    def close(self) -> None:
        """Close once readers and writers are out. A second call does nothing."""
        if here.pid != self._process:
            self._closed = True  # the readers that it would wait for are the parent's
            return
        with self._gate.alone():
            if self._closed:
                return
            self._closed = True
        with self._committing:
            self._close()

    def _close(self) -> None:
        if self._durability != "commit" and not self._read_only and self._failed is None:
            try:
                self._env.sync(True)
            except lmdb.Error as error:
                self.fail(error)
        self._env.close()
