"""One time partition: a half-open interval of due time, one LMDB environment, a log for each topic.

A partition object outlives its environment, which the partition set opens when it is needed and
closes when too many are open, and its generation, which compaction replaces by the next one. Appends of
one partition are serialised by its environment; `listener` hears of each in commit order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ..store.codec import format as fmt
from ..store.codec.bodies import Bodies
from ..store.codec.format import MAX_ENTRY_ID, PartitionInfo, PartitionState
from ..store.codec.run import Int64s
from ..store.env.environment import Environment
from ..store.env.transaction import Transaction
from ..store.errors import BrokenInvariant, DamagedStore
from ..store.files.page_scan import refuse_broken
from ..store.files.system_errors import explained
from ..store.log import catalog
from ..store.log.ledger import Dues, Ledger, PackedMessages, Replaced, RunLimits, StagedLedger, find_tail
from .timespan import directory_name

_MANY_DUES = 1_024
"""Due times read one by one after which the pages they were read from are given back: up to 64 MB."""

Listener = Callable[["PartitionLog", int, Int64s], None]
"""Called by the leader of a commit with (log, first entry id, due times); takes leaf locks only."""


Wanted = tuple[int, int, bytes]
"""A message that wants a place: topic id, due time, body."""


class PartitionLog:
    """One topic's ledger inside a partition."""

    __slots__ = ("ledger", "registered", "reserved", "topic_id")

    def __init__(self, topic_id: int, ledger: Ledger, registered: bool) -> None:
        self.topic_id = topic_id
        self.ledger = ledger
        self.registered = registered
        """Whether the partition's log table has it, on disk."""
        self.reserved: list[tuple[int, bytes]] = []
        """Due times and bodies of the entries reserved after the last, which the next commit writes."""

    @property
    def ledger_id(self) -> int:
        return self.ledger.ledger_id


def partition_path(store: Path, start_ms: int, generation: int) -> Path:
    """Directory of a generation of a partition."""
    return store / "partitions" / directory_name(start_ms) / f"g{generation:06d}"


class Partition:
    """A registered time partition. Made and handed out by PartitionSet."""

    def __init__(self, path: Path, start_ms: int, end_ms: int, generation: int, state: PartitionState) -> None:
        self.path = path
        self.start_ms = start_ms
        self.end_ms = end_ms
        self.generation = generation
        self.state = state
        self.name = f"partition {directory_name(start_ms)}"
        self.listener: Listener | None = None
        self.dues_read = 0
        """Due times read one by one since pages were last given back; each may have mapped 16 pages."""
        self.keeps_pages = False
        """Whether what is written to the open environment stays in the page cache (`stop_evicting`)."""
        self._scanned: Path | None = None
        """The generation whose pages this process has looked at."""
        self.leases = 0
        self.appenders = 0
        self.outdated = False
        """Whether the open environment is of a generation before `generation`."""
        self._environment: Environment | None = None
        self._parked: list[Environment] = []
        self._logs: dict[int, PartitionLog] = {}
        self._lock = threading.Lock()

    @property
    def environment(self) -> Environment:
        """The open environment. REQUIRES: a lease."""
        environment = self._environment
        if environment is None:
            raise DamagedStore(self.path, "is not open")
        return environment

    @property
    def is_open(self) -> bool:
        return self._environment is not None

    def attach(self, environment: Environment) -> None:
        """Use an environment. One of an older generation that is in use stays open until `unpark`."""
        with self._lock:
            if self._environment is not None:
                self._parked.append(self._environment)
            self._environment = environment
            self.keeps_pages = False
            self.outdated = False
            self._logs = {}

    def environments(self) -> list[Environment]:
        """Every environment that is open."""
        environment = self._environment
        return [*self._parked] if environment is None else [*self._parked, environment]

    def unpark(self) -> None:
        """Close environments of older generations, and forget them. REQUIRES: no lease."""
        for environment in self._parked:
            environment.close()
        with self._lock:
            self._parked = []

    def detach(self) -> None:
        """Close every environment, and then forget them and what was read from them: closed once is closed for good."""
        for environment in self.environments():
            environment.close()
        with self._lock:
            self._environment, self._parked = None, []
            self.outdated = False
            self._logs = {}

    def stop_evicting(self) -> None:
        """Have what is written stay in the page cache: the partition has begun, it is read soon. REQUIRES: a lease."""
        self.environment.stop_evicting()
        self.keeps_pages = True

    def give_back_pages(self) -> None:
        """Have the pages that many due times were read from no longer count as memory of this process.

        Does not wait: they stay while the environment is in use. REQUIRES: a lease.
        """
        if self.dues_read >= _MANY_DUES and self.environment.give_back_pages():
            self.dues_read = 0

    def log(self, topic_id: int) -> PartitionLog | None:
        """The topic's log, None when it has none here. REQUIRES: a lease. O(log n) at first use.

        Where another process writes it is read anew each time.
        """
        if self.environment.read_only:
            return self._read_log(topic_id)
        self.environment.apply_deferred()
        log = self._logs.get(topic_id)
        if log is None:
            with self._lock:
                log = self._logs.get(topic_id) or self._read_log(topic_id)
        return log

    def logs(self) -> list[PartitionLog]:
        """Every log that has an entry. REQUIRES: a lease. O(logs)."""
        with self.environment.read() as raw:
            ids = [fmt.trailing_u32(key) for key, _ in catalog.rows(raw, fmt.prefix(fmt.Table.LOG))]
        return [log for log in map(self.log, ids) if log is not None]

    def _read_log(self, topic_id: int) -> PartitionLog | None:
        key = fmt.log_key(topic_id)
        with self.environment.read() as raw:
            value = raw.get(key)
            if value is None:
                return None
            ledger_id = fmt.unpack_u64(fmt.unseal(key, value))
            entries = find_tail(raw, self.name, ledger_id)
        log = PartitionLog(topic_id, Ledger(ledger_id, entries), registered=True)
        if not self.environment.read_only:
            self._logs[topic_id] = log
        return log

    def append(
        self,
        topic_id: int,
        dues: Dues,
        bodies: Sequence[bytes] | PackedMessages,
        limits: RunLimits,
        new_ledger: Callable[[], int],
        replaced: Replaced | None = None,
        also: Callable[[Transaction], None] | None = None,
    ) -> tuple[int, int]:
        """Append messages to the topic's log; returns (ledger id, first entry id) once they are durable.

        Packed messages have their due times with them. `new_ledger` allocates the id of a log's first ledger; `also`
        writes more in the same transaction (it may run more than once). REQUIRES: an append lease. Raises StoreFull,
        StoreFailed.
        """
        log = self._logs.get(topic_id)
        if log is None:
            with self._lock:
                log = self._logs.get(topic_id) or self._read_log(topic_id)
                if log is None:
                    log = self._logs[topic_id] = PartitionLog(topic_id, Ledger(new_ledger()), registered=False)

        def work(transaction: Transaction) -> int:
            if not log.registered:
                transaction.put(fmt.log_key(topic_id), fmt.pack_u64(log.ledger_id))
            staged = self._stage(transaction, log, limits)
            if also is not None:
                also(transaction)
            if isinstance(bodies, PackedMessages):
                return staged.add_packed(bodies)
            return staged.add_messages(dues, bodies, self.start_ms, replaced)

        return log.ledger_id, self.environment.write(work)

    def _stage(self, transaction: Transaction, log: PartitionLog, limits: RunLimits) -> StagedLedger:
        """What a transaction appends to the log."""

        def heard(first: int, appended: Dues) -> None:
            log.registered = True
            listener = self.listener
            if listener is not None:
                listener(log, first, np.asarray(appended, dtype=np.int64))

        return transaction.stage(log, lambda: StagedLedger(log.ledger, limits, heard))

    def reserve(self, wanted: Sequence[Wanted], limits: RunLimits) -> list[tuple[int, int] | None]:
        """Reserve entry ids now and have the next commit write the messages: (ledger id, entry id), not durable yet.

        None for one that has to be appended: the first of a log, and all while a commit is under way or there is a
        listener. The caller makes the others durable elsewhere, or the store is to fail. REQUIRES: an append lease.
        Raises StoreFailed, ClosedError.
        """
        environment = self.environment

        def reserve() -> list[tuple[int, int] | None] | None:
            if self.listener is not None:
                return None
            return [self._reserve(environment, topic_id, due_ms, body, limits) for topic_id, due_ms, body in wanted]

        return environment.unless_committing(reserve) or [None] * len(wanted)

    def _reserve(
        self, environment: Environment, topic_id: int, due_ms: int, body: bytes, limits: RunLimits
    ) -> tuple[int, int] | None:
        log = self._logs.get(topic_id)
        if log is None or not log.registered:
            return None
        reserved = log.reserved
        entry_id = log.ledger.entries + len(reserved)
        if entry_id >= MAX_ENTRY_ID:
            return None
        if not reserved:
            environment.defer(lambda transaction: self._apply_reserved(transaction, log, limits))
        reserved.append((due_ms, body))
        return log.ledger.ledger_id, entry_id

    def _apply_reserved(self, transaction: Transaction, log: PartitionLog, limits: RunLimits) -> None:
        """Append the reserved entries. Invariant: every entry gets the id that was reserved for it."""
        if not log.reserved:  # the reserving thread was interrupted
            return
        dues = np.array([due_ms for due_ms, _ in log.reserved], dtype=np.int64)
        bodies = Bodies.of([body for _, body in log.reserved])
        first = self._stage(transaction, log, limits).add_messages(dues, bodies, self.start_ms)
        if first != log.ledger.entries:
            raise BrokenInvariant(f"{self.name}: entry {log.ledger.entries} was reserved, {first} is next")
        transaction.after_commit(log.reserved.clear)

    @property
    def has_unapplied(self) -> bool:
        """Whether there are reserved entries that are not committed yet."""
        return self._environment is not None and self._environment.has_unapplied

    def verify_pages(self) -> None:
        """Refuse a file that is missing or, at its first opening, whose pages do not hold together (page_scan.py).

        Raises DamagedStore.
        """
        with explained(self.path):
            if not (self.path / "data.mdb").is_file():
                raise DamagedStore(self.path, "is registered in the catalog, and is missing")
        if self._scanned != self.path:
            refuse_broken(self.path)
            self._scanned = self.path

    def verify_identity(self, store_id: bytes, environment: Environment | None = None) -> None:
        """Refuse a directory that belongs to another store, partition or generation. Raises DamagedStore.

        environment: one that is to be attached; None: the one in use.
        """
        fields = (environment or self.environment).get(fmt.PARTITION_INFO_KEY)
        if fields is None:
            raise DamagedStore(self.path, "has no partition record")
        expected = PartitionInfo(fmt.FORMAT_VERSION, store_id, self.start_ms, self.end_ms, self.generation)
        found = PartitionInfo.unpack(fields)
        if found != expected:
            raise DamagedStore(self.path, f"is {found}, the catalog says {expected}")
