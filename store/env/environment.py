"""One LMDB environment with group commits, a map that grows, and the guards that LMDB needs.

Writers commit as a group (commit_queue.py): the first in the queue leads, runs all queued work in one transaction,
commits once and wakes the other writers; then the next one waiting leads.

Contract of a unit of work (a callable that gets a Transaction): it changes nothing but the transaction,
because it may run more than once (another unit failed, or the map was full and the transaction is dead);
effects in memory belong into `after_commit` callbacks, which the leader runs in commit order before the
next transaction begins. It takes no lock that a thread holds while waiting for `write`.

Guards (docs/design.md, "What LMDB demands"): begin and commit happen in one thread; a child process
after fork is refused; a commit that raised is in doubt and closes the environment for writing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import lmdb

from ..codec.format import RUN_PREFIX, unseal
from ..config import Durability
from ..errors import BrokenInvariant, ClosedError, ReadOnly, StoreFailed
from ..files import pages
from ..files.datafile import InPlace
from ..files.directory import occupied_bytes
from ..files.process import here
from ..files.system_errors import explain
from ..listener import StoreListener
from . import page_cache
from .commit_queue import CommitQueue, Request
from .file_opening import open_lmdb
from .group_commit import CommitCounts, GroupCommit
from .held_read import HeldRead
from .map_size import MapSize
from .memtable import Follow, Memtable, Reads, ReadTransaction, applied_position
from .reader_gate import ReaderGate
from .transaction import Transaction
from .upkeep import Upkeep

T = TypeVar("T")
Work = Callable[[Transaction], T]


class Environment(GroupCommit):
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
        evicts: bool = False,
        listeners: Sequence[StoreListener] = (),
        memtable: Memtable | None = None,
        follow: Follow | None = None,
        before_commit: Callable[[], None] | None = None,
    ) -> None:
        """Open `path`, a directory; `name` is what errors and findings call it.

        `lock` False, with `read_only` alone: no reader is registered, so that a directory that this process may not
        write can be read, by as many readers as there are. Only of a file that is not written any more: beside a
        writer it reads wrong rows silently.
        `evicts`: what is written does not stay in the page cache, until `stop_evicting` is called (eviction.py).
        `listeners` hear of its commits and of its failure. `memtable`: what the write-ahead log has of it;
        `follow`: how that is read where another process writes it;
        `before_commit` is called by the leader of each commit, before LMDB commits.
        Raises DamagedStore when the data file is missing, empty, no LMDB file, or truncated so that
        reading it would kill the process.
        """
        super().__init__(listeners)
        if not lock and not read_only:
            raise BrokenInvariant(f"{name}: a writer without locks")
        self.path = path
        self.name = name
        self.counts = CommitCounts()
        self._process = here.pid
        self._durability = durability
        self._memtable = memtable
        self._follow = follow
        self.before_commit = before_commit
        """Called by the leader of each commit, before LMDB commits."""
        self._read_only = read_only
        self._committing = threading.Lock()
        self._queue = CommitQueue(self._check_writable, self._commit_group, self._broke_off)
        self._closed = False
        self._released = False
        self._gate = ReaderGate()
        self._syncing = threading.Lock()
        self._upkeep = None
        self._env, last, map_bytes = open_lmdb(
            path, map_bytes=map_bytes, durability=durability, read_only=read_only, create=create, lock=lock
        )
        try:
            self._last_run = max(last, RUN_PREFIX)
            self.in_place = InPlace(f"{path}/data.mdb")
            self._map = MapSize(self._env, self._gate, map_bytes)
            if not read_only:
                self._upkeep = Upkeep(path, self._env, self._map.map_anew, synced=durability != "none", evicts=evicts)
        except BaseException:
            self._env.close()  # else this process could not open it again
            raise

    # -- reading -------------------------------------------------------------------------------

    @contextmanager
    def read(self) -> Iterator[Reads]:
        """A read transaction whose values are memoryviews, valid inside the `with` block only.

        Keep it short: a reader keeps every page that was freed since it began. No `write` inside.
        """
        unapplied = self._memtable.view if self._memtable else None  # before the transaction begins
        look = None if self._follow is None else self._follow()
        while True:
            with self._gate.reading():
                self._check_open()
                raw = self._begin_read()
                if raw is not None:
                    try:
                        with raw:
                            if look is not None:
                                unapplied = look(applied_position(raw)) or None
                            yield raw if unapplied is None else ReadTransaction(raw, unapplied)
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
        except lmdb.PanicError as error:  # the root page could not be written: LMDB refuses reads as well
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

    @property
    def has_unapplied(self) -> bool:
        """Whether the write-ahead log has rows that are not applied yet."""
        return bool(self._memtable)

    def apply(self) -> None:
        """Have what is unapplied committed. Raises as `write`, and it stays unapplied."""
        if self._memtable:
            self.write(lambda _: None)

    def _commit_group(self, batch: list[Request]) -> None:
        with self._committing:
            self._commit_together(batch)

    def give_back_pages(self) -> bool:
        """Have what was read through the map no longer count as memory of this process; it may stay in the page cache.

        For after reading much that will not be read again soon. Does not wait: False, and nothing is done, while a
        thread reads, copies or commits.
        """
        if not self._committing.acquire(blocking=False):
            return False
        try:
            self._check_open()
            return self._map.map_anew()
        finally:
            self._committing.release()

    def stop_evicting(self) -> None:
        """From now on what is written stays in the page cache: it will be read soon. There is no way back."""
        if self._upkeep is not None:
            self._upkeep.stop_evicting()

    def sync(self) -> None:
        """Make every commit so far durable whatever `durability` is. Raises StoreFailed, StoreFull."""
        if self._durability == "commit":
            return
        with self._gate.reading(), self._syncing:  # a call that finds nothing to do waits for the sync that does it
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

    def unused_bytes(self) -> int:
        """Of the data file, in pages that no row takes: what commits use before the file grows, but for a few."""
        with self._gate.reading():
            self._check_open()
            pages = self._env.stat()
            used = pages["branch_pages"] + pages["leaf_pages"] + pages["overflow_pages"]
            return int((self._env.info()["last_pgno"] + 1 - used) * pages["psize"])

    def hold(self) -> HeldRead:
        """What is applied now, until it is released. Raises as `read`."""
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
        for _ in page_cache.prefetch(self.path / "data.mdb"):  # else each page that was dropped is waited for
            pass
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
            raise ReadOnly(self.name)

    def close(self) -> None:
        """Close once readers and writers are out. A second call does nothing, or what an interrupt kept from it."""
        if here.pid != self._process:
            self._closed = True  # the readers that it would wait for are the parent's
            return
        with self._gate.alone():
            self._closed = True
        with self._committing:
            if self._released:
                return
            try:
                if self._durability != "commit" and not self._read_only and self._failed is None:
                    self._env.sync(True)
            except lmdb.Error as error:
                self.fail(error)
            finally:
                self._env.close()
                self._released = True
