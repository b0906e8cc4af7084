"""One LMDB environment with a map that grows, and the guards that LMDB needs.

What changes a store goes by the write-ahead log (`write`); a commit of LMDB applies what the log has, or stores what
can be made again (`commit`).

Contract of a unit of work (a callable that gets a Transaction): it changes nothing but the transaction, because it may
run more than once (another unit of its group failed, or the map was full and the transaction is dead). Effects in
memory belong in `after_commit` callbacks, which run in commit order before the next transaction begins. It takes no
lock that a thread holds while waiting for `write`.

Guards (docs/design.md, "What LMDB demands"): begin and commit happen in one thread; a child process after fork is
refused; a commit that raised is in doubt and closes the environment for writing.
"""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import lmdb

from ..codec.format import RUN_PREFIX, unseal
from ..config import Durability
from ..errors import (
    BrokenInvariant,
    ClosedError,
    DayAway,
    ReadOnly,
    ResourceShortage,
    StoreFailed,
    StoreFull,
)
from ..files import pages
from ..files.directory import InPlace, make_directory, occupied_bytes, sync_directory
from ..files.failpoints import reach
from ..files.process import here
from ..files.system_errors import explain, explained, in_doubt, out_of_space, reserve_lock_file
from ..listener import StoreListener, tell
from . import page_cache
from .body_file import BodyMaps, BodyReader, body_files
from .commit_queue import CommitCounts
from .held_read import HeldRead
from .memtable import Follow, Memtable, ReadTransaction, Unapplied, applied_position
from .page_cache import Eviction
from .reader_gate import ReaderGate, Reading
from .transaction import LmdbTransaction, Transaction
from .vacant import VACANT, Making

MAX_MAP_BYTES = 1 << 44
"""Largest map that an environment grows to: virtual address space ends near 2**47."""

COMMITS_A_LOOK = 16
"""Commits between two looks at the length of the file, for eviction."""

_COMMITS_A_READER_CHECK = 1_000
"""Commits between two looks for readers that were killed inside a transaction: they would hold pages for ever."""

_NOTHING = Unapplied.nothing()

T = TypeVar("T")


class Superseded(Exception):
    """Another directory has taken the place of an environment: the next lease of its partition has it."""


class ChangeLog(Protocol):
    """The write-ahead log, by which the changes of a store go."""

    counts: CommitCounts

    def change(self, work: Callable[[Transaction], T], *, alone: bool, makes_space: bool) -> T:
        """Run `work` on the rows of the main environment in a group; see `Environment.write`."""

    def flush(self) -> None:
        """Wait until every group is on disk, whatever the store's durability. Raises StoreFailed."""


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
        evicts: bool = False,
        listeners: Sequence[StoreListener] = (),
        memtable: Memtable | None = None,
        follow: Follow | None = None,
        before_commit: Callable[[], None] | None = None,
        make: Making | None = None,
        walk: bool = False,
    ) -> None:
        """Open `path`, a directory; errors and findings call the environment `name`.

        lock: False, with `read_only` alone, registers no reader, so that a directory that this process may not write
            can be read, by any number of readers. Use it only for a file that nobody writes any more: beside a writer
            it reads wrong rows silently.
        evicts: drop written pages from the page cache until `stop_evicting` is called (page_cache.py).
        listeners: they hear of its commits and of its failure.
        memtable: the rows of the write-ahead log that are not applied to it yet.
        follow: reads those rows where another process writes them, and tells whether it has yet to make the directory.
        before_commit: called by the leader of each commit, before LMDB commits.
        make: makes the directory, in the first commit; until then the environment is vacant. None: it is there.
        walk: see that its pages hold together (`pages.refuse_broken`).

        Raises DamagedStore when the data file is missing, empty, no LMDB file, or truncated so that reading it would
        kill the process.
        """
        if not lock and not read_only:
            raise BrokenInvariant(f"{name}: a writer without locks")
        self.path = path
        self.name = name
        self._bodies = BodyMaps(os.fspath(path), is_read_only=read_only)
        self.counts = CommitCounts()
        self.before_commit = before_commit
        """Called by the leader of each commit, before LMDB commits."""
        self.log: ChangeLog | None = None
        """Takes the changes of an open store; None: they are commits of LMDB."""
        self._process = here.pid
        self.durability = durability
        self.read_only = read_only
        """True where another process may write what is read here."""
        self._listeners = listeners
        self._memtable = memtable
        self._follow = follow

        self._gate = ReaderGate()
        self._committing = threading.Lock()
        """Held while a commit is made, while pages are given back, and while the environment is closed."""
        self._syncing = threading.Lock()
        self._removing = threading.Lock()
        self._holds = 0
        """Held reads under way."""
        self._unwanted: set[int] = set()
        """Ledgers whose body files are to be removed."""
        self._unsynced = False
        self.failed: StoreFailed | None = None
        """The error that closed the environment for writing, if there was one."""
        self._closed = False
        self._released = False
        self._superseded = False
        self.is_parked = False
        """True once the environment of another directory takes commits in its place."""

        self._make = make
        self._evicts = evicts and not read_only and durability != "none"
        self._eviction: Eviction | None = None
        self._open_lmdb = partial(_open_lmdb, durability=durability, read_only=read_only, lock=lock)
        self._occupying = threading.Lock()
        self._env = VACANT
        self._last_run: bytes | None = None
        """Key of the last run, or a bound below every run; None: no commit has looked for it."""
        self.takes_commits = False
        """True once LMDB's environment is open for writing: such a one keeps pages of its own, up to some MB."""
        self.in_place: InPlace
        self._map_bytes = map_bytes
        if make is None and (follow is None or self._is_there() or not follow.is_registered()):
            try:
                self._occupy(create=create, walk=walk)
            except BaseException:
                self._env.close()  # else this process could not open it again
                raise
        else:
            self.in_place = InPlace(f"{path}/data.mdb")

    # -- vacant, and not ------------------------------------------------------------------------

    @property
    def is_vacant(self) -> bool:
        """True while it has no directory, as far as this process knows (vacant.py)."""
        return self._env is VACANT

    def _is_there(self) -> bool:
        return (self.path / "data.mdb").is_file()

    def _occupy(self, *, create: bool = False, walk: bool = False) -> None:
        """Go over to LMDB, in the directory that is there by now."""
        with self._occupying:
            if self._env is not VACANT:
                return
            self.in_place = InPlace(f"{self.path}/data.mdb")  # before it is opened: of two files it is none
            for_commits = create or (self.has_unapplied and not self.read_only)  # a checkpoint is to apply them
            self._env, self._map_bytes = self._open_lmdb(
                self.path, map_bytes=self._map_bytes, for_commits=for_commits, create=create, walk=walk
            )
            if for_commits:
                self._use_for_commits()

    def _use_for_commits(self) -> None:
        self._page_bytes: int = self._env.stat()["psize"]
        self._eviction = Eviction(self.path, 2 * self._page_bytes, self._remap) if self._evicts else None
        self.takes_commits = True

    def _open_for_commits(self) -> None:
        """Open LMDB's environment for writing where it is not, once no reader is inside. REQUIRES: `_committing`.

        Raises StoreFull, ResourceShortage: it may be tried again; and StoreFailed.
        """
        if self.takes_commits or self.is_vacant:
            return
        try:
            with self._gate.alone():
                self._env.close()  # LMDB does not have one open twice in a process
                try:
                    self._env, self._map_bytes = self._open_lmdb(self.path, map_bytes=self._map_bytes, for_commits=True)
                except BaseException:
                    self._env, _ = self._open_lmdb(self.path, map_bytes=self._map_bytes)
                    raise
            self.in_place.verify()
            self._use_for_commits()
        except (StoreFull, ResourceShortage):
            raise
        except BaseException as error:
            failed = self.fail(error)
            if isinstance(error, Exception):
                raise failed from error
            raise

    def _lmdb(self) -> lmdb.Environment:
        """LMDB's environment: of one that another process has made since, too."""
        if self._env is VACANT and self._follow is not None and self._is_there():
            self._occupy(walk=True)
        return self._env

    # -- reading -------------------------------------------------------------------------------

    def read(self, *, frozen: bool = False) -> "Read":
        """Open a read transaction for a block; its values are memoryviews, valid inside it only.

        frozen: rows that come to the log meanwhile are not seen. Keep it short: a reader keeps every page that was
        freed since it began. No `write` inside.
        """
        return Read(self, frozen)

    def _begin_read(self) -> lmdb.Transaction | None:
        """Begin a read transaction; None where the writing process has grown the file past this process's map."""
        try:
            return (self._lmdb() if self._env is VACANT else self._env).begin(buffers=True)
        except lmdb.MapResizedError:
            return None
        except lmdb.PanicError as error:  # the root page could not be written: LMDB refuses reads as well
            raise (self.failed or self.fail(error)) from error
        except lmdb.Error as error:
            raise explain(self.path, error) from error

    def get(self, key: bytes) -> bytes | None:
        """Read the fields of a small record, in a read transaction of its own. Raises CorruptRecord."""
        with self.read() as raw:
            value = raw.get(key)
            return None if value is None else unseal(key, value)

    # -- writing -------------------------------------------------------------------------------

    def write(self, work: Callable[[Transaction], T], *, alone: bool = False, makes_space: bool = False) -> T:
        """Run `work` in a transaction that takes effect together with that of others, and return its value.

        Of an open store it is a group of the write-ahead log. When it returns, the transaction is as durable as the
        environment's `durability` says. An exception of `work` itself reaches its caller alone, and nothing of it is
        stored. alone: no other work is in the group, what follows finds memory changed. makes_space: it may use what
        the log keeps for such work where there is no space for more.

        Raises StoreFull (nothing stored, may be tried again), StoreFailed, ClosedError.
        """
        if self.log is None:
            return self.commit(work)
        if self._closed or self._gate.held or here.pid != self._process:
            self._refuse_inside_read()
            self._check_open()
        return self.log.change(work, alone=alone, makes_space=makes_space)

    def _refuse_inside_read(self) -> None:
        if self._gate.held:
            gc.collect()  # it may be the garbage of a read that was interrupted as it ended
        if self._gate.held:
            raise BrokenInvariant(f"{self.name}: write inside a read transaction")

    def flush(self) -> None:
        """Wait until every change is on disk, whatever the durability. Raises StoreFailed, StoreFull."""
        if self.log is None:
            self.sync()
        elif self.durability != "commit":  # else each group was flushed
            self.log.flush()

    @property
    def has_unapplied(self) -> bool:
        """True while the write-ahead log has rows that are not applied yet."""
        return bool(self._memtable)

    def apply(self) -> None:
        """Commit the unapplied rows. Raises as `write`, and they stay unapplied."""
        if self._memtable or self._env is VACANT:
            self.commit(lambda _: None)

    def commit(self, work: Callable[[LmdbTransaction], T]) -> T:
        """Run `work` in a transaction of LMDB, which applies what is unapplied, and return its value.

        For what a log need not know: what it holds already, and what can be made again. The first one of a vacant
        environment makes its directory. Raises as `write`, and as `make`, with nothing stored.
        """
        self._refuse_inside_read()
        with self._committing:
            while True:
                self._check_writable()
                if self._superseded:
                    raise Superseded(self.name)
                started_ns = time.perf_counter_ns()
                try:
                    self._open_for_commits()
                    if self._env is VACANT and self._make is not None:
                        value, entries = self._commit_first(work, self._make)
                    else:
                        value, entries = self._commit(work, started_ns)
                except lmdb.MapFullError as error:
                    if not self._grow():
                        text = f"the map of {self._map_bytes} bytes is full: {error}"
                        raise StoreFull(self.path, text) from error
                    continue
                elapsed_ns = time.perf_counter_ns() - started_ns
                self.counts.add(1)
                self._care_for_file()
                tell(self._listeners, StoreListener.committed, self.name, elapsed_ns, 1, entries)
                return value

    @contextmanager
    def superseded(self) -> Iterator[None]:
        """Keep commits out within the block, and for good once it ends: they raise Superseded.

        For a copy elsewhere that takes its place; an exception of the block leaves it as it was.
        """
        with self._committing:
            self._check_writable()
            self._open_for_commits()  # the block may hold it
            yield
            self._superseded = True

    def _commit_first(self, work: Callable[[LmdbTransaction], T], make: Making) -> tuple[T, int]:
        """Commit to a new directory, which then gets its place: as `_commit`, in place of which it is called.

        Until it is in use nothing has happened: where that breaks off, all is made again by the next commit.
        """
        opened: lmdb.Environment | None = None
        try:
            with make.directory() as path:
                opened, self._map_bytes = self._open_lmdb(
                    path, map_bytes=self._map_bytes, for_commits=True, create=True
                )
                with opened.begin(write=True) as raw:
                    transaction = LmdbTransaction(raw, RUN_PREFIX, self._memtable)
                    make.describe(transaction)
                    value = self._work(work, transaction)
                if self.durability != "commit":
                    opened.sync(True)
        except BaseException as error:
            if opened is not None:
                opened.close()
            if isinstance(error, lmdb.Error) and not isinstance(error, lmdb.MapFullError):
                raise out_of_space(self.path.parent, error) or explain(self.path, error) from error
            raise
        try:
            self.in_place = InPlace(f"{self.path}/data.mdb")
            self._env = opened
            self._use_for_commits()
            reach("commit.after")
            transaction.committed()
        except BaseException as error:
            if self._env is not opened:
                opened.close()  # else this process could not open it again
            self.fail(error)
            raise
        return value, transaction.entries

    def _work(self, work: Callable[[LmdbTransaction], T], transaction: LmdbTransaction) -> T:
        value = work(transaction)
        transaction.apply()
        if self.before_commit is not None:
            self.before_commit()
        reach("commit.before")
        return value

    def _commit(self, work: Callable[[LmdbTransaction], T], started_ns: int) -> tuple[T, int]:
        """Commit once, and return the value with the number of entries. Raises MapFullError, with nothing stored.

        The steps, in order: the work; the rows that came in meanwhile; LMDB's commit; a look whether the file is still
        in its place; memory, by the callbacks of the transaction. Once LMDB has begun to commit, anything not known to
        have ended, on disk or in memory, closes the environment for writing.
        """
        raw: lmdb.Transaction | None = None
        try:
            raw = self._env.begin(write=True)
            if self._last_run is None:
                cursor = raw.cursor()
                self._last_run = max(cursor.key(), RUN_PREFIX) if cursor.last() else RUN_PREFIX
            transaction = LmdbTransaction(raw, self._last_run, self._memtable, BodyReader(self._bodies))
            value = self._work(work, transaction)
        except BaseException as error:
            if raw is not None:  # with a transaction left open all others would wait for ever
                raw.abort()
            if not isinstance(error, Exception) or isinstance(error, lmdb.MapFullError):
                raise
            if raw is not None and not isinstance(error, lmdb.Error):
                raise
            cause = explain(self.path, error)
            if raw is None and not isinstance(cause, ResourceShortage):  # a shortage leaves nothing in doubt
                cause = self.fail(error)
            raise cause from error
        committed = False
        try:
            raw.commit()
            committed = True
            self.in_place.verify(started_ns)
            self._unsynced = True
            self._last_run = transaction.last_run
            reach("commit.after")
            transaction.committed()
        except lmdb.MapFullError:
            raise
        except (lmdb.Error, FileNotFoundError) as error:
            full = None if committed or in_doubt(self._env) else out_of_space(self.path, error)
            raise full or self.fail(error) from error
        except BaseException as error:
            with suppress(lmdb.Error):  # with a transaction left open the environment could not be closed
                raw.abort()
            self.fail(error)
            raise
        return value, transaction.entries

    def fail(self, error: BaseException) -> StoreFailed:
        """Close the environment for writing, for good: the state on disk, or in memory, is not known any more."""
        reason = str(error) or type(error).__name__
        if not isinstance(error, Exception):
            reason = f"{type(error).__name__} amid a commit: whether calls under way have stored theirs is in doubt"
        failed = StoreFailed(self.path, reason)
        failed.__cause__ = error
        self.failed = failed
        tell(self._listeners, StoreListener.failed, self.name, failed)
        return failed

    def sync(self) -> None:
        """Make every commit of LMDB so far durable whatever `durability` is. Raises StoreFailed, StoreFull."""
        if self.durability == "commit":
            return
        with self._gate.reading(), self._syncing:  # a call that finds nothing to do waits for the sync that does it
            if not self._unsynced:
                return
            self._check_writable()
            self._unsynced = False
            try:
                self._env.sync(True)
            except BaseException as error:
                self._unsynced = True
                if isinstance(error, lmdb.Error):
                    raise self.fail(error) from error
                raise

    # -- the map and the page cache ------------------------------------------------------------

    def _grow(self) -> bool:
        """Double the map once no reader is inside; False at MAX_MAP_BYTES. REQUIRES: as `_remap`."""
        if self._map_bytes * 2 > MAX_MAP_BYTES:
            return False
        with self._gate.alone():
            self._map_bytes *= 2
            self._env.set_mapsize(self._map_bytes)
        return True

    def _remap(self) -> bool:
        """Have the pages that were read leave this process's memory; False, and nothing is done, while a thread reads.

        REQUIRES: commits and closing are kept out, and no write transaction is open.
        """
        with self._gate.alone_at_once() as alone:
            if alone:
                self._env.set_mapsize(self._map_bytes)  # LMDB maps the file again
                self._bodies.forget()
            return alone

    def _follow_growth(self) -> None:
        """Take over the size that the writing process has given the file, once no reader is inside."""
        with self._gate.alone():
            self._env.set_mapsize(0)

    def _care_for_file(self) -> None:
        """Evict pages and drop dead readers, once in several commits so that a small commit does not pay for it."""
        commits = self.counts.commits
        if self._eviction is not None and not commits % COMMITS_A_LOOK:
            self._eviction.look((self._env.info()["last_pgno"] + 1) * self._page_bytes)
        if not commits % _COMMITS_A_READER_CHECK:
            with suppress(lmdb.Error):  # the commit stands, whatever becomes of this
                self._env.reader_check()

    def give_back_pages(self) -> bool:
        """Have what was read through the map no longer count as memory of this process; it may stay in the page cache.

        For after reading much that will not be read again soon. Does not wait: False, and nothing is done, while a
        thread reads, copies or commits.
        """
        if not self._committing.acquire(blocking=False):
            return False
        try:
            self._check_open()
            return self._remap()
        finally:
            self._committing.release()

    def stop_evicting(self) -> None:
        """Leave what is written from now on in the page cache: it will be read soon. There is no way back."""
        self._evicts = False
        if self._eviction is not None:
            self._eviction.stop()

    # -- as a file -----------------------------------------------------------------------------

    def find_problems(self) -> list[str]:
        """List the faults of the data file's pages, as of one commit (see pages.find_problems). O(pages).

        Reads the file beside LMDB, so that it does not die of what it finds; until it is done no page is reused.
        Raises DamagedStore.
        """
        while True:
            with self.read() as raw:
                problems = [] if self.is_vacant else pages.find_problems(self.path, raw.id())
            if problems is not None:
                return problems

    def unused_bytes(self) -> int:
        """Bytes of the data file in pages without rows: commits use nearly all of them before the file grows."""
        with self._gate.reading():
            self._check_open()
            stat = self._env.stat()
            used = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
            return int((self._env.info()["last_pgno"] + 1 - used) * stat["psize"])

    def hold(self) -> HeldRead:
        """Hold the state of this moment, without unapplied rows, until it is released. Raises as `read`."""
        if not (self.takes_commits or self.read_only or self.is_vacant):
            with self._committing:
                self._check_open()
                if self.failed is None:
                    self._open_for_commits()  # else the first commit would wait for the release
        reading = Reading(self._gate, is_of_thread=False)
        reading.__enter__()
        with self._removing:  # before it sees runs whose bodies are to stay
            self._holds += 1
        try:
            self._check_open()
            return HeldRead(self._lmdb, reading, self._begin_read, self._follow_growth, self.path, self._release_bodies)
        except BaseException:
            reading.__exit__()
            self._release_bodies()
            raise

    def _release_bodies(self) -> None:
        with self._removing:
            self._holds -= 1
        self.remove_bodies(())

    def remove_bodies(self, ledger_ids: Iterable[int]) -> None:
        """Remove the body files of ledgers that have no run any more; those that are held, when they are released."""
        with self._removing:
            self._unwanted.update(ledger_ids)
            while self._unwanted and not self._holds:
                self._bodies.remove(self._unwanted.pop())

    def copy(self, path: Path, held: HeldRead) -> None:
        """Copy what `held`, of this environment, sees into `path`, an existing empty directory, compacted and on disk.

        Beside readers and writers. Raises StoreFull.
        """
        for _ in page_cache.prefetch(self.path / "data.mdb"):  # else each page that was dropped is waited for
            pass
        held.copy(path)

    # -- life ----------------------------------------------------------------------------------

    @property
    def map_bytes(self) -> int:
        return self._map_bytes

    def file_bytes(self) -> int:
        """Bytes that its files occupy on disk (blocks; sparse tails do not count); 0 once they were removed."""
        bodies = sum(map(occupied_bytes, body_files(self.path).values()))
        return occupied_bytes(self.path / "data.mdb") + bodies

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(self.name)
        if here.pid != self._process:
            raise ClosedError(f"{self.name} (opened by process {self._process}, used by its child {here.pid})")

    def _check_writable(self) -> None:
        if self._closed or here.pid != self._process:
            self._check_open()
        if self.failed is not None:
            raise self.failed
        if self.read_only:
            raise ReadOnly(self.name)

    def close(self) -> None:
        """Close once readers and writers are out. A second call does nothing, or finishes what was interrupted."""
        if here.pid != self._process:
            self._closed = True  # the readers that it would wait for are the parent's
            return
        with self._gate.alone():
            self._closed = True
        with self._committing:
            if self._released:
                return
            try:
                if self.durability != "commit" and self.takes_commits and self.failed is None:
                    self._env.sync(True)
            except lmdb.Error as error:
                self.fail(error)
            finally:
                self._env.close()
                self._bodies.forget()
                self._released = True


class Read(Reading):
    """A block with a read transaction of an environment (`Environment.read`), in place of a generator."""

    __slots__ = ("_environment", "_frozen", "_raw")

    def __init__(self, environment: Environment, frozen: bool) -> None:
        super().__init__(environment._gate)
        self._environment = environment
        self._frozen = frozen
        self._raw: lmdb.Transaction | None = None

    def __enter__(self) -> ReadTransaction:
        environment, memtable = self._environment, self._environment._memtable
        unapplied = _NOTHING if memtable is None else memtable.view  # before the transaction begins
        look = None if environment._follow is None else environment._follow()
        last = None
        while True:
            try:
                if self._frozen and look is None and memtable is not None:
                    with memtable.publishing:  # not inside the gate, which who has it may be waiting for
                        unapplied, last = memtable.view.copy(), memtable.publication.position
                super().__enter__()
                if environment._closed or here.pid != environment._process:
                    environment._check_open()
                self._raw = raw = environment._begin_read()
                if raw is not None and (last is None or applied_position(raw) <= last):
                    if environment._superseded and environment.is_parked:
                        raise DayAway(environment.path, "went or came as it was read")
                    if look is not None:
                        unapplied = look(applied_position(raw))
                        if environment.in_place.is_replaced:  # the log forgets what is applied to the other file
                            raise DayAway(environment.path, "went and came as it was read")
                    return ReadTransaction(raw, unapplied, BodyReader(environment._bodies))
            except BaseException as error:
                self.__exit__(None, error)
                raise
            self.__exit__()  # rows were added and applied since the copy was made, or the map has to grow
            if raw is None:
                if environment._gate.held:
                    raise BrokenInvariant(f"{environment.name}: the map has to grow for a read inside a read")
                environment._follow_growth()

    def __exit__(self, kind: object = None, error: BaseException | None = None, traceback: object = None) -> None:
        try:
            if self._raw is not None:
                self._raw.abort()
        finally:  # here, not by a call of Reading's: an interrupt that comes as that begins would leave the token
            self._gate.inside.pop(self._token, None)
            if self._gate.wanted:
                self._gate.notify()
        if isinstance(error, lmdb.Error):
            raise explain(self._environment.path, error) from error


def _open_lmdb(
    path: Path,
    *,
    map_bytes: int,
    durability: Durability,
    read_only: bool,
    lock: bool,
    for_commits: bool = False,
    create: bool = False,
    walk: bool = False,
) -> tuple[lmdb.Environment, int]:
    """Open the directory `path`, made if `create`; returns the environment and the size of its map.

    The arguments are those of Environment. for_commits: it is opened for writing. In the process that writes, what is
    opened for reading alone registers no reader, 18 of some 200 us: nobody else writes it, and LMDB does not have it
    open a second time. Raises DamagedStore, StoreUnavailable, StoreFull, AlreadyOpen.
    """
    with explained(path):
        if create:
            make_directory(path)
        else:
            data = pages.refuse_broken(path) if walk else pages.verify(path)
            map_bytes = max(map_bytes, data.file_bytes * 2)
        if for_commits:
            reserve_lock_file(path)
        try:
            environment = lmdb.open(
                os.fspath(path),
                map_size=map_bytes,
                max_dbs=0,
                readonly=not for_commits,
                create=create,
                lock=lock and (for_commits or read_only),
                sync=durability != "none",
                metasync=durability == "commit",
                meminit=False,
                readahead=False,
                max_readers=1024,
                max_spare_txns=4,
                lib_version=0,
            )
        except lmdb.Error as error:  # no permission, no address space, or another process has just removed it
            full = out_of_space(path, error) if create else None
            if full is not None:
                raise full from error
            raise
        try:
            if create:
                sync_directory(path)
            return environment, map_bytes
        except BaseException:
            environment.close()
            raise
