"""All time partitions of a store: created when first written to, opened when needed, closed when many.

A lease keeps a partition's environment open for reading or appending; without leases the least
recently used environment is closed once more than `max_open_partitions` are open. An append lease is
refused by a partition that is closing or closed, and a partition closes only without append leases.

A new partition is registered by the group of the write-ahead log that has its first run, and known from then on. It is
vacant (store/env/vacant.py) until the first commit of its environment makes its directory: built in staging/, which
every open clears, and renamed into place, so that it is complete and durable when it has its name.
"""

import resource
import threading
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from sortedcontainers import SortedDict

from ..store.codec import format as fmt
from ..store.codec.format import PartitionInfo, PartitionRecord, PartitionState
from ..store.codec.run import RunLimits
from ..store.config import GIB, StoreConfig
from ..store.env.body_file import body_files
from ..store.env.environment import Environment
from ..store.env.memtable import Follow, Memtable, Publication, Reads, refuse_ahead
from ..store.env.transaction import Transaction
from ..store.errors import ClosedError, DamagedStore, DayAway
from ..store.files.directory import discard_tree, make_directory, move, remove_tree
from ..store.files.failpoints import reach
from ..store.files.system_errors import explained
from ..store.listener import Listeners, StoreListener, tell
from ..store.log import catalog
from .away import Away, directory_in_use
from .partition import Partition, partition_path

_LEDGER_BLOCK, _MOST_LEDGERS = 64, 4_096
"""Ledger ids reserved at once for partition logs, twice as many each time; what a crash leaves is never given out."""


_MOST_WRITTEN = 64
"""Environments open at once that were written to, where no number is configured: LMDB keeps some 3 MB for each."""

_MOST_OPEN, _DESCRIPTORS_EACH = 1_024, 16
"""Most environments open at once where no number is configured, and for how many descriptors of the process one is."""

_ADDRESSES = 16 * 1024 * GIB
"""Address space of all that are open: an eighth of what a process has."""

_TRIES = 3
"""How often a partition is fetched that is given back before it is used."""


class LedgerNumbers:
    """Ids of ledgers for the logs of partitions, reserved in blocks. Thread-safe."""

    def __init__(self, main: Environment) -> None:
        self._main = main
        self._lock = threading.Lock()
        self._left: deque[int] = deque()
        self._block = _LEDGER_BLOCK

    def next(self) -> int:
        """Return an id that no ledger of the store has. Not inside a transaction of the main environment."""
        with self._lock:
            self._reserve(1)
            return self._left.popleft()

    def reserve(self, count: int) -> None:
        """Have so many ids at hand, by one group at most. Not inside a transaction of the main environment."""
        with self._lock:
            self._reserve(count)

    def _reserve(self, count: int) -> None:
        if len(self._left) < count:
            block = max(self._block, count)
            first = self._main.write(lambda transaction: catalog.take_numbers(transaction, catalog.LEDGERS, block))
            self._left.extend(range(first, first + block))
            self._block = min(2 * self._block, _MOST_LEDGERS)


@dataclass(frozen=True, slots=True)
class NewPartition:
    """Makes the directory of a partition, with its first generation (store/env/vacant.py).

    made: called once it is in its place and memory has heard of its first commit.

    REQUIRES: the partition is vacant, so that what is there already has nothing that the log has not.
    """

    store: Path
    path: Path
    """That of the generation."""
    info: PartitionInfo
    made: Callable[[], object]

    @contextmanager
    def directory(self) -> Iterator[Path]:
        target = self.path.parent
        staged = self.store / "staging" / f"{target.name}-{uuid.uuid4().hex[:8]}"
        try:
            with explained(target):
                staged.mkdir()  # what is in it is made durable, its place in staging/ need not be
            yield staged / self.path.name
            reach("directory.staged")
            with explained(target):
                make_directory(target.parent)
                if target.exists():
                    remove_tree(target)
                move(staged, target)
        except BaseException:
            discard_tree(staged)  # where the disk is full, it is not to take what is left
            raise
        reach("directory.renamed")

    def describe(self, transaction: Transaction) -> None:
        transaction.put(fmt.PARTITION_INFO_KEY, self.info.pack())
        transaction.after_commit(self.made)


def build_partition(store: Path, path: Path, info: PartitionInfo) -> None:
    """Build the directory `path` of a partition's first generation, without rows, in the directory of a store.

    Raises StoreFull, StoreUnavailable; then nothing is left, or what the next opening removes.
    """
    make = NewPartition(store, path, info, lambda: None)
    with closing(Environment(path, name="new partition", make=make)) as environment:
        environment.apply()


Watcher = Callable[[Partition, Environment], None]
"""Callback that hears of each environment that was opened."""


def most_open(config: StoreConfig) -> int:
    """How many environments may be open at once without a lease: what is configured, else what this process may have.

    One that is only read costs descriptors and addresses, and a look into it a fraction of opening it again.
    """
    if config.max_open_partitions is not None:
        return config.max_open_partitions
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_OPEN if descriptors == resource.RLIM_INFINITY else descriptors // _DESCRIPTORS_EACH
    return max(_MOST_WRITTEN, min(wanted, _MOST_OPEN, _ADDRESSES // config.map_bytes))


class OpenEnvironments:
    """The partitions of one store that are open, the least recently used first."""

    def __init__(
        self, lock: threading.Lock, most: int, most_written: int, make: Callable[[Partition], Environment]
    ) -> None:
        """`lock` guards leases; `most` may be open without one, of those that were written to `most_written`.

        make: opens and verifies a partition's environment.
        """
        self._lock = lock
        self._most = most
        self._most_written = most_written
        self._make = make
        self._open: OrderedDict[int, Partition] = OrderedDict()
        self._written: OrderedDict[int, Partition] = OrderedDict()
        """Those of them whose environments take commits."""
        self._watcher: Watcher | None = None
        self.closed = False
        """True once the store is closed: none is opened any more, also under a lease that was taken before."""

    def __len__(self) -> int:
        return len(self._open)

    def use(self, partition: Partition) -> bool:
        """Note that a partition is used; False: it is not open. REQUIRES: the lock, a lease."""
        if not partition.is_ready:
            return False
        self._open.move_to_end(partition.start_ms)
        if partition.start_ms in self._written:
            self._written.move_to_end(partition.start_ms)
        return True

    def open(self, partition: Partition) -> None:
        """Open the environment where it is not. REQUIRES: a lease. Raises ClosedError."""
        with partition.opening:
            if partition.is_ready:
                return
            if self.closed:
                raise ClosedError("store")
            if partition.closing:
                self.close(partition)
            environment = self._make(partition)
            try:
                with self._lock:
                    if environment.path != partition.path:
                        raise DamagedStore(environment.path, "was replaced by a newer generation")
                    self._open[partition.start_ms] = partition
                    partition.attach(environment)
                    if self._watcher is not None:
                        self._watcher(partition, environment)
                    surplus = self.surplus()
            except BaseException:
                if environment not in partition.environments():
                    environment.close()
                raise
        self.close_idle(surplus)

    def watch(self, watcher: Watcher | None) -> list[Partition]:
        """Set the watcher (`PartitionSet.watch`), and return the open partitions. REQUIRES: the lock."""
        self._watcher = watcher
        return list(self._open.values())

    def used(self, partition: Partition) -> None:
        """Note that a lease has ended: the partition may have been written to. REQUIRES: the lock."""
        if self._open.get(partition.start_ms) is partition and partition.takes_commits:
            self._written[partition.start_ms] = partition

    def surplus(self, unwanted: Partition | None = None) -> list[Partition]:
        """Choose partitions for `close_idle`: the least recently used without a lease. REQUIRES: the lock.

        unwanted: one that is closed first, though there is room for it.
        """
        surplus = len(self._open) - self._most
        if unwanted is not None and not unwanted.leases and unwanted.start_ms in self._open:
            self._open.move_to_end(unwanted.start_ms, last=False)
            surplus = max(surplus, 1)
        if surplus <= 0 and len(self._written) <= self._most_written:
            return []
        return [
            *self._idle(self._open, surplus),
            *self._idle(self._written, len(self._written) - self._most_written),
        ]

    def _idle(self, opened: OrderedDict[int, Partition], surplus: int) -> list[Partition]:
        idle = list(islice((partition for partition in opened.values() if not partition.leases), max(surplus, 0)))
        for partition in idle:
            partition.closing = True
            partition.forget_logs()
            self.forget(partition)
        return idle

    def close_idle(self, partitions: Sequence[Partition]) -> None:
        """Close partitions that no lease has opened again meanwhile."""
        for partition in partitions:
            with partition.opening:
                if partition.closing:
                    self.close(partition)

    def close(self, partition: Partition) -> None:
        """Close an environment. REQUIRES: no lease, or none that uses it."""
        partition.detach()
        self.forget(partition)

    def forget(self, partition: Partition) -> None:
        """Leave an environment to its leases."""
        if self._open.get(partition.start_ms) is partition:
            del self._open[partition.start_ms]
            self._written.pop(partition.start_ms, None)


class PartitionSet:
    """The partitions of one open store. Thread-safe."""

    def __init__(
        self,
        path: Path,
        main: Environment,
        config: StoreConfig,
        store_id: bytes,
        publication: Publication,
        *,
        read_only: bool = False,
        listeners: Sequence[StoreListener] = (),
    ) -> None:
        """`listeners` hear of partitions that come into being, and of the commits and failures of each."""
        self._path = path
        self._main = main
        self._config = config
        self._store_id = store_id
        self._publication = publication
        self._run_limits = RunLimits(config.run_entries, config.run_bytes)
        self._sets_apart = config.sets_bodies_apart
        self._read_only = read_only
        self._lock = threading.Lock()
        self._partitions: SortedDict[int, Partition] = SortedDict()
        self._coming: dict[int, Partition] = {}
        """Partitions with append leases, until a group registers them."""
        self.by_ledger: dict[int, Partition] = {}
        """Where logs were found last, by ledger id; a hint, which may be outdated."""
        self.max_open = most_open(config)
        self.max_written = config.max_open_partitions or _MOST_WRITTEN
        self._open = OpenEnvironments(self._lock, self.max_open, self.max_written, self._opened)
        self._ledger_numbers = LedgerNumbers(main)
        self._listeners = listeners
        self.before_commit: Callable[[], None] | None = None
        """Called by each environment before it commits."""
        self.fetch: Callable[[Partition], None] | None = None
        """Has an away partition be whole (away.py); None: nothing is fetched."""
        self.away: frozenset[int] = frozenset()
        """Starts of the partitions that are away; another set with each change."""
        self.relocating = threading.Lock()
        """Held while a partition changes its directory, and while a backup looks for its instant."""
        self.copying = threading.Lock()
        """Held while this process makes a backup or a manifest, one at a time: no day goes meanwhile."""

    def load(self, registered: Set[int] = frozenset()) -> None:
        """Read the catalog. Raises DamagedStore naming a partition whose directory is missing, and that is not vacant.

        registered: the partitions whose registration is in the write-ahead log. Those whose deletion is recorded are
        left out: opening finishes that.
        """
        with self._main.read() as raw:
            records = catalog.partitions(raw)
        for start_ms, record in records:
            if record.state is PartitionState.DELETING:
                continue
            path = directory_in_use(partition_path(self._path, start_ms, record.generation))
            is_there = (path / "data.mdb").is_file()
            if not is_there and (start_ms not in registered or body_files(path)):  # bodies come after the directory
                raise DamagedStore(path, "is registered in the catalog, and is missing")
            partition = self._new(start_ms, record.end_ms, record.generation, record.state, vacant=not is_there)
            self._partitions[start_ms] = partition

    def _new(
        self, start_ms: int, end_ms: int, generation: int, state: PartitionState, *, vacant: bool = False
    ) -> Partition:
        path = partition_path(self._path, start_ms, generation)
        partition = Partition(path, start_ms, end_ms, generation, state, Memtable(self._publication, self._run_limits))
        partition.vacant = vacant
        if not vacant:
            self._find(partition)
        self._set_apart(partition)
        return partition

    def _find(self, partition: Partition) -> None:
        """Have a partition be where it is on disk, in the directory of its generation or away."""
        generation = partition_path(self._path, partition.start_ms, partition.generation)
        path = directory_in_use(generation)
        self._locate(partition, path, None if path == generation else Away.read(path))

    def _locate(self, partition: Partition, path: Path, away: Away | None) -> None:
        partition.path, partition.away = path, away
        self.away = (self.away - {partition.start_ms}) | (set() if away is None else {partition.start_ms})

    def _set_apart(self, partition: Partition) -> None:
        """Have the bodies of large runs lie beside the environment, where it has a directory."""
        if self._sets_apart and not partition.vacant and partition.away is None:
            partition.memtable.directory = partition.path

    def __iter__(self) -> Iterator[Partition]:
        with self._lock:
            return iter(list(self._partitions.values()))

    def __len__(self) -> int:
        return len(self._partitions)

    def get(self, start_ms: int) -> Partition | None:
        """The partition that begins at `start_ms`, None when none is registered."""
        return self._partitions.get(start_ms)

    def unregistered(self) -> list[Path]:
        """Directories of partitions that the catalog does not know: a crash left them."""
        directories = sorted((self._path / "partitions").glob("*"))  # which were registered before they were made
        known = {partition.path.parent.name for partition in self}
        return [each for each in directories if each.name not in known and each.exists()]

    def open_count(self) -> int:
        return len(self._open)

    # -- leases ----------------------------------------------------------------------------------

    @contextmanager
    def lease(self, partition: Partition, *, partial: bool = False, keep: bool = True) -> Iterator[Partition]:
        """Keep the partition's environment open inside the block, and after it while it is among those used last.

        keep: False closes it after the block, where nobody else has a lease: it is not used again soon.

        One that is away is fetched before; `partial`: the rest of it will do, with its logs and their ends. Raises
        DayAway where nothing is fetched, and what fetching raises.
        """
        self.take(partition, partial=partial)
        try:
            yield partition
        finally:
            self.release(partition, keep=keep)

    @contextmanager
    def glance(self, partition: Partition) -> Iterator[Reads]:
        """Open a partition for recovery to read a few rows, without a lease. Raises DamagedStore."""
        if partition.is_open:
            with partition.environment.read() as raw:
                yield raw
            return
        few = partition.few_rows(self._store_id)
        if few is not None:
            yield few
            return
        walk = partition.walked != partition.path
        opened = Environment(partition.path, name=partition.name, read_only=True, lock=False, walk=walk)
        with closing(opened), opened.read() as raw:
            partition.walked = opened.path
            partition.verify_identity(self._store_id, raw)
            yield raw

    def at_hand(self, partition: Partition) -> None:
        """Fetch a partition that is away. Raises DayAway where nothing is fetched, and what fetching raises."""
        if partition.away is not None and self.registered(partition) and (away := partition.away) is not None:
            if self.fetch is None:
                raise DayAway(partition.path, f"is away, in {away.url}")
            self.fetch(partition)

    def take(self, partition: Partition, *, partial: bool = False) -> None:
        """Take a lease as `lease` does; `release` gives it back."""
        for _ in range(_TRIES):
            if not partial:
                self.at_hand(partition)
            with suppress(DayAway):
                self.acquire(partition, partial=partial)
                return
        self.acquire(partition, partial=partial)

    def acquire(self, partition: Partition, *, partial: bool = False) -> None:
        """Open the environment if need be and count a lease; `release` gives it back.

        Raises DayAway for a partition that is away, but where the rest of it will do (`partial`): nothing is fetched.
        """
        with self._lock:
            if self._open.closed:
                raise ClosedError("store")
            if self._partitions.get(partition.start_ms) is not partition or partition.state is PartitionState.DELETING:
                raise DamagedStore(partition.path, "was deleted")
            partition.leases += 1
            is_open = self._open.use(partition)
        try:
            if not is_open:
                self._open.open(partition)
            if partition.away is not None and not partial:
                raise DayAway(partition.path, "is away, and was not fetched")
        except BaseException:
            self.release(partition)
            raise

    def watch(self, watcher: Watcher | None) -> list[Partition]:
        """Have a backup told of each environment that is opened from now on, under the lock and before it is used.

        Returns the partitions that are open already, each with a lease that the caller gives back. None: none is told.
        """
        with self._lock:
            opened = self._open.watch(watcher)
            for partition in opened:
                partition.leases += 1
            return opened

    def held(
        self, wanted: Callable[[Partition], bool] | None = None, *, backwards: bool = False, partial: bool = False
    ) -> Iterator[Partition]:
        """Every partition, or every `wanted` one, by start, each under a lease while it is the current one.

        backwards: the last comes first. partial: as for `lease`. What is deleted meanwhile is left out. Raises
        DamagedStore for one that is registered and cannot be opened, and as `lease`.
        """
        for partition in reversed(list(self)) if backwards else self:
            if wanted is not None and not wanted(partition):
                continue
            try:
                self.take(partition, partial=partial)
            except DamagedStore:
                if self.registered(partition):
                    raise
                continue
            try:
                yield partition
            finally:
                self.release(partition)

    def registered(self, partition: Partition) -> bool:
        """True while the catalog has the partition, and its deletion has not begun."""
        return self._partitions.get(partition.start_ms) is partition and partition.state is not PartitionState.DELETING

    def release(self, partition: Partition, *, keep: bool = True) -> None:
        with self._lock:
            partition.leases -= 1
            self._let_go(partition)
            self._open.used(partition)
            surplus = self._open.surplus(None if keep else partition)
        if surplus:
            self._open.close_idle(surplus)

    def begin_append(self, due_ms: int, now_ms: int, topic_id: int) -> Partition | None:
        """Lease the partition of a due time to append to until `end_appends`, a new one if missing; None: it is closed.

        The environment is opened only where the end of the topic's log is not known.
        """
        start_ms = due_ms - due_ms % self._config.partition_ms
        partition = self._partitions.get(start_ms)
        if partition is not None:
            partition.refuse_failed()
            with self._lock:  # with which logs are forgotten
                is_open = not self._open.closed and partition.state is PartitionState.OPEN
                if leased := is_open and (partition.knows_logs or partition.has_read((topic_id,))):
                    partition.leases += 1
                    partition.appenders += 1
            if leased:
                if not partition.keeps_pages and start_ms - self._config.preload_ms <= now_ms:
                    partition.stop_evicting()
                return partition
        return self.begin_appends([start_ms], now_ms, [(topic_id,)])[0]

    def begin_appends(
        self, starts: Sequence[int], now_ms: int, topic_ids: Sequence[Collection[int]]
    ) -> list[Partition | None]:
        """Begin appends to many partitions, each of some topics.

        Raises StoreFailed for one whose environment has failed, with no lease given.
        """
        accepted: list[Partition | None] = []
        begun: list[Partition] = []
        needed: list[Partition] = []
        try:
            with self._lock:
                if self._open.closed:
                    raise ClosedError("store")
                for at, start_ms in enumerate(starts):
                    partition = self._partitions.get(start_ms) or self._coming_at(start_ms, now_ms)
                    if partition.state is not PartitionState.OPEN:
                        accepted.append(None)
                        continue
                    partition.refuse_failed()
                    partition.leases += 1
                    partition.appenders += 1
                    accepted.append(partition)
                    if not partition.has_read(topic_ids[at]) and not self._open.use(partition):
                        needed.append(partition)
                    if not partition.keeps_pages:
                        begun.append(partition)
            for partition in needed:
                self._open.open(partition)
            if self._coming:  # each has a log at the least
                self._ledger_numbers.reserve(len(self._coming))
        except BaseException:
            self.end_appends(accepted)
            raise
        for partition in begun:
            if partition.start_ms - self._config.preload_ms <= now_ms:
                partition.stop_evicting()
        return accepted

    def end_appends(self, partitions: Sequence[Partition | None]) -> None:
        with self._lock:
            for partition in partitions:
                if partition is not None:
                    partition.leases -= 1
                    partition.appenders -= 1
                    if partition.register is not None and not partition.appenders:
                        self._coming.pop(partition.start_ms, None)
            surplus = self._open.surplus()
        if surplus:
            self._open.close_idle(surplus)

    def stop_appends(self, partition: Partition) -> bool:
        """Refuse append leases from now on; False, nothing changed, while there is one."""
        with self._lock:
            if partition.appenders:
                return False
            partition.state = PartitionState.CLOSED
            return True

    def resume_appends(self, partition: Partition) -> None:
        """Undo `stop_appends` of a partition whose closing was not recorded."""
        with self._lock:
            partition.state = PartitionState.OPEN

    def unapplied(self) -> list[Partition]:
        """The partitions of which the write-ahead log has entries that are not applied yet. O(partitions)."""
        with self._lock:
            return [partition for partition in self._partitions.values() if partition.has_unapplied]

    def _opened(self, partition: Partition) -> Environment:
        environment = Environment(
            partition.path,
            name=partition.name,
            durability=self._config.local_durability,
            map_bytes=self._config.map_bytes,
            read_only=self._read_only,
            evicts=partition.state is PartitionState.OPEN and not partition.keeps_pages,
            listeners=self._listeners,
            memtable=partition.memtable,
            follow=self._follow(partition),
            before_commit=self.before_commit,
            make=self._making(partition) if partition.vacant else None,
            walk=partition.walked != partition.path,
        )
        try:
            with environment.read() as raw:
                if not environment.is_vacant:
                    partition.walked = environment.path
                    partition.verify_identity(self._store_id, raw)
                refuse_ahead(environment.path, raw, self._publication.position)
            return environment
        except BaseException:
            environment.close()
            raise

    def _follow(self, partition: Partition) -> Follow | None:
        """Return the reader of a partition's unapplied rows, where another process writes it."""
        return None

    # -- generations -------------------------------------------------------------------------------

    def replace(self, partition: Partition, generation: int) -> None:
        """Have leases of a partition from now on get the generation that the catalog names now.

        A lease that exists goes on with its environment, which is closed after the last of them.
        """
        with partition.opening, self._lock:
            self._replace(partition, generation)

    def _replace(self, partition: Partition, generation: int) -> None:
        partition.generation = generation
        self._find(partition)
        partition.outdated = partition.is_open
        self._let_go(partition)

    def relocate(self, partition: Partition, path: Path, away: Away | None) -> None:
        """Have leases from now on get the environment in another directory. REQUIRES: a lease, `relocating`."""
        with self._lock:
            self._locate(partition, path, away)
            partition.outdated = True

    def _let_go(self, partition: Partition) -> None:
        if partition.leases:
            return
        if partition.parked:
            partition.unpark()
        if partition.outdated:
            self._open.close(partition)

    # -- creation and removal ----------------------------------------------------------------------

    def _coming_at(self, start_ms: int, now_ms: int) -> Partition:
        """A new partition, which the first group that appends to it registers. REQUIRES: the lock."""
        if (coming := self._coming.get(start_ms)) is not None:
            return coming
        partition = self._new(start_ms, start_ms + self._config.partition_ms, 1, PartitionState.OPEN, vacant=True)
        partition.knows_logs = True
        partition.register = partial(self._register, partition, now_ms)
        self._coming[start_ms] = partition
        return partition

    def _register(self, partition: Partition, now_ms: int, transaction: Transaction) -> None:
        """The unit of work that registers a partition; the second of a group does nothing."""
        key = fmt.partition_key(partition.start_ms)
        if transaction.get(key) is None:
            record = PartitionRecord(partition.end_ms, partition.generation, partition.state, 0, now_ms)
            transaction.put(key, record.pack())
            transaction.after_commit(partial(self._registered, partition))

    def _registered(self, partition: Partition) -> None:
        with self._lock:
            self._coming.pop(partition.start_ms, None)
            self._partitions[partition.start_ms] = partition
            partition.register = None
        tell(self._listeners, StoreListener.partition_created, partition.start_ms)

    def _making(self, partition: Partition) -> NewPartition:
        info = PartitionInfo(
            fmt.FORMAT_VERSION, self._store_id, partition.start_ms, partition.end_ms, partition.generation
        )

        def made() -> None:
            partition.vacant, partition.walked = False, partition.path
            self._set_apart(partition)  # from now on it may have bodies that no other place has

        return NewPartition(self._path, partition.path, info, made)

    def retire(self, partition: Partition) -> bool:
        """Close a partition whose deletion is recorded, for good; False while there is a lease.

        It stays in the set until `forget`, so that it is not created again while its directory is removed.
        """
        with partition.opening, self._lock:
            if partition.leases:
                return False
            if partition.is_open:
                self._open.close(partition)
            return True

    def forget(self, partition: Partition) -> None:
        """Take a partition that was removed from disk and catalog out of the set."""
        with self._lock:
            self._partitions = SortedDict({at: each for at, each in self._partitions.items() if each is not partition})
            self.by_ledger.clear()
            self.away -= {partition.start_ms}

    def new_ledger(self) -> int:
        """A ledger id for a new partition log. Not inside a transaction of the main environment."""
        return self._ledger_numbers.next()

    def close(self) -> None:
        """Close every environment, for good; awaits reads, a backup, and what is being opened."""
        with self._lock:
            self._open.closed = True
            used = [partition for partition in self._partitions.values() if partition.is_open or partition.leases]
        for partition in used:
            with partition.opening:
                partition.detach()


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """The main environment and the time partitions of the store in `path`.

    read_only: another process may be writing. listeners: those of `main` and of `partitions`.
    """

    path: Path
    store_id: bytes
    config: StoreConfig
    read_only: bool
    main: Environment
    partitions: PartitionSet
    listeners: Listeners
