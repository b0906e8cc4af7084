"""One time partition: a half-open interval of due time, one LMDB environment, a log for each topic.

A partition object outlives its environment, which the partition set opens when it is needed and
closes when too many are open, and its generation, which compaction replaces by the next one. Appends of
one partition are serialised by its environment; `listener` hears of each in commit order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from ..store.codec import format as fmt
from ..store.codec.format import PartitionInfo, PartitionState
from ..store.codec.frontier import HELD
from ..store.codec.run import Int64s, Run, RunLimits, seal_run
from ..store.env.environment import Environment
from ..store.env.memtable import Memtable, Publication, Reads
from ..store.env.transaction import Staging, Transaction
from ..store.env.vacant import VACANT
from ..store.errors import ClosedError, CorruptEntry, DamagedStore, StoreFailed
from ..store.files.pages import read_few
from ..store.log import catalog
from ..store.log.ledger import Ledger, PackedMessages, Replaced, end_after, find_tail, insert_messages, insert_packed
from ..store.wal.segment import MAIN
from .away import Away
from .timespan import directory_name

_MANY_DUES = 1_024
"""Due times read one by one after which the pages they were read from are given back: up to 64 MB."""

_MOST_LOGS = 1_024
"""Logs that a partition remembers while its environment is closed, so that it need not be open to be appended to."""

Listener = Callable[["PartitionLog", int, Int64s], None]
"""Called by the leader of a commit with (log, first entry id, due times); takes leaf locks only."""


class PartitionLog:
    """One topic's ledger inside a partition."""

    __slots__ = ("ledger", "ledger_id", "partition", "registered", "topic_id")

    def __init__(self, partition: Partition, topic_id: int, ledger: Ledger, registered: bool) -> None:
        self.partition = partition
        self.topic_id = topic_id
        self.ledger = ledger
        self.ledger_id = ledger.ledger_id
        self.registered = registered
        """True once the partition's log table has it, durably."""


class StagedLog:
    """A log as a transaction leaves it, and what memory then hears of it."""

    __slots__ = ("_appended", "_log", "_lone", "end")

    def __init__(self, log: PartitionLog) -> None:
        self._log = log
        self.end = log.ledger.entries
        """The id of the next entry."""
        self._appended: list[tuple[int, Int64s | list[int]]] = []
        self._lone: list[int] | None = None
        """Due times of messages appended one by one since a batch: memory hears of them at once."""

    def took_one(self, due_ms: int) -> None:
        """Count an entry that was appended."""
        if self._lone is None:
            self._lone = []
            self._appended.append((self.end, self._lone))
        self._lone.append(due_ms)
        self.end += 1

    def took(self, dues: Int64s) -> int:
        """Count entries that are appended, and return the first id. Raises InvalidArgument: the ledger has no ids left.

        dues: when they fire; HELD of those that never do.
        """
        first, self._lone = self.end, None
        self.end = end_after(self._log.ledger.ledger_id, first, len(dues))
        self._appended.append((first, dues))
        return first

    def committed(self) -> None:
        """Have memory know that the entries are durable. For the leader, in the order of appends."""
        log, partition = self._log, self._log.partition
        for first, dues in self._appended:
            log.registered = True
            log.ledger.entries = first + len(dues)
            partition.received += len(dues)
            if partition.listener is not None:
                partition.listener(log, first, np.asarray(dues, dtype=np.int64))


def partition_path(store: Path, start_ms: int, generation: int) -> Path:
    """Directory of a generation of a partition."""
    return store / f"partitions/{directory_name(start_ms)}/g{generation:06d}"


def environment_path(store: Path, start_ms: int) -> Path:
    """Directory of the environment that a row of the log is for; a partition that is compacted has all of its rows."""
    return store / "main" if start_ms == MAIN else partition_path(store, start_ms, 1)


class Partition:
    """A registered time partition. Made and handed out by PartitionSet."""

    def __init__(
        self,
        path: Path,
        start_ms: int,
        end_ms: int,
        generation: int,
        state: PartitionState,
        memtable: Memtable | None = None,
    ) -> None:
        """`memtable`: None where nothing is written."""
        self.path = path
        self.memtable = Memtable(Publication(), RunLimits()) if memtable is None else memtable
        self.start_ms = start_ms
        self.end_ms = end_ms
        self.generation = generation
        self.state = state
        self.name = f"partition {directory_name(start_ms)}"
        self.vacant = False
        """True until its directory is made (store/env/vacant.py), in the process that writes."""
        self.away: Away | None = None
        """The objects that have its rows, where this machine has given them back (away.py)."""
        self.readers: dict[object, Callable[[], object]] = {}
        """Who reads messages of it, and is called when it has come back: as long as there is one it does not go."""
        self.register: Callable[[Transaction], None] | None = None
        """The unit of work that registers it in the catalog; None: it is registered."""
        self.listener: Listener | None = None
        self.dues_read = 0
        """Due times read one by one since pages were last given back; each may have mapped 16 pages."""
        self.received = 0
        """Entries appended by this process."""
        self.keeps_pages = False
        """True where written pages stay in the page cache, also once its environment is opened (`stop_evicting`)."""
        self.walked: Path | None = None
        """The generation whose pages this process has looked at, or made."""
        self.leases = 0
        self.appenders = 0
        self.outdated = False
        """True while the open environment is of a generation before `generation`."""
        self.opening = threading.Lock()
        """Held while the environment is opened, or closed for want of leases."""
        self.closing = False
        """True while the environment is about to be closed: a lease has to open it again."""
        self._failed: StoreFailed | None = None
        """Why an environment that was closed had failed, before or as it was closed."""
        self._environment: Environment | None = None
        self.parked: list[Environment] = []
        """Environments of older generations that are in use."""
        self.knows_logs = False
        """True while all logs are in memory: this process made the partition, and has forgotten none since."""
        self._logs: dict[int, PartitionLog] = {}
        self._lock = threading.Lock()

    @property
    def environment(self) -> Environment:
        """The open environment. REQUIRES: a lease. Raises ClosedError: the store was closed meanwhile."""
        environment = self._environment
        if environment is None:
            raise ClosedError("store")
        return environment

    @property
    def is_open(self) -> bool:
        return self._environment is not None

    @property
    def takes_commits(self) -> bool:
        """True where the open environment was written to, or is about to be."""
        return self._environment is not None and self._environment.takes_commits

    @property
    def is_ready(self) -> bool:
        """True while the environment is open, of the current generation, and stays open."""
        return self._environment is not None and not self.outdated and not self.closing

    def attach(self, environment: Environment) -> None:
        """Use an environment. One of an older generation that is in use stays open until `unpark`."""
        with self._lock:
            if self._environment is not None:
                self.parked.append(self._environment)
                self._environment.is_parked = True  # before rows that it lacks leave the memtable
            environment.failed = self._failed
            self._environment = environment
            self.outdated = False

    def refuse_failed(self) -> None:
        """Raise StoreFailed where a commit has failed: nothing more is applied until the store is opened again."""
        environment = self._environment
        failed = self._failed if environment is None else environment.failed
        if failed is not None:
            raise failed

    def environments(self) -> list[Environment]:
        environment = self._environment
        return [*self.parked] if environment is None else [*self.parked, environment]

    def unpark(self) -> None:
        """Close environments of older generations, and forget them. REQUIRES: no lease."""
        for environment in self.parked:
            environment.close()
        with self._lock:
            self.parked = []

    def detach(self) -> None:
        """Close every environment, and then forget them and what was read from them: closed once is closed for good."""
        for environment in self.environments():
            environment.close()
            self._failed = self._failed or environment.failed
        with self._lock:
            self._environment, self.parked = None, []
            self.outdated = self.closing = False

    def forget_logs(self) -> None:
        """Forget the ends of logs where they are many. REQUIRES: no lease, nor can there be one meanwhile."""
        if len(self._logs) > _MOST_LOGS:
            self._logs, self.knows_logs = {}, False

    def stop_evicting(self) -> None:
        """Have what is written stay in the page cache: the partition has begun, it is read soon. REQUIRES: a lease."""
        self.keeps_pages = True
        if self._environment is not None:
            self._environment.stop_evicting()

    def give_back_pages(self) -> None:
        """Have the pages that many due times were read from no longer count as memory of this process.

        Does not wait: they stay while the environment is in use. REQUIRES: a lease.
        """
        if self.dues_read >= _MANY_DUES and self.environment.give_back_pages():
            self.dues_read = 0

    def log(self, topic_id: int) -> PartitionLog | None:
        """The topic's log, None when it has none here. REQUIRES: a lease. O(log n) at first use.

        Where another process writes, each call reads it again.
        """
        log = self._logs.get(topic_id)
        if log is None:
            with self._lock:
                log = self._logs.get(topic_id)
                if log is None and not self.knows_logs:
                    with self.environment.read() as raw:
                        log = self._find_log(raw, topic_id)
        return log

    def known_log(self, topic_id: int) -> PartitionLog | None:
        """The topic's log as far as it is in memory and has an entry."""
        log = self._logs.get(topic_id)
        return log if log is not None and log.registered else None

    def knows(self, topic_id: int, ledger_id: int) -> bool:
        """Return whether `known_log` is this ledger."""
        log = self._logs.get(topic_id)
        return log is not None and log.registered and log.ledger.ledger_id == ledger_id

    def logs(self) -> list[PartitionLog]:
        """Every log that has an entry. REQUIRES: a lease. O(logs)."""
        with self.environment.read() as raw:
            ids = [fmt.trailing_u32(key) for key, _ in catalog.rows(raw, fmt.prefix(fmt.Table.LOG))]
        return [log for log in map(self.log, ids) if log is not None]

    def _find_log(self, raw: Reads, topic_id: int) -> PartitionLog | None:
        fields = catalog.fields_of(raw, fmt.log_key(topic_id))
        if fields is None:
            return None
        ledger_id = fmt.unpack_u64(fields)
        log = PartitionLog(self, topic_id, Ledger(ledger_id, find_tail(raw, self.name, ledger_id)), registered=True)
        if not self.environment.read_only:
            self._logs[topic_id] = log
        return log

    def has_read(self, topic_ids: Iterable[int]) -> bool:
        """True where `log_to_append` and `logs_to_append` of these topics need no environment."""
        return self.knows_logs or all(map(self._logs.__contains__, topic_ids))

    def log_to_append(self, topic_id: int, new_ledger: Callable[[], int]) -> PartitionLog:
        """The topic's log, or one that its first entry registers. REQUIRES: an append lease.

        `new_ledger` allocates the id of a log's ledger.
        """
        return self._logs.get(topic_id) or self.logs_to_append((topic_id,), new_ledger)[0]

    def logs_to_append(self, topic_ids: Sequence[int], new_ledger: Callable[[], int]) -> list[PartitionLog]:
        """Return the logs of several topics, as `log_to_append`; they are looked up in one read transaction."""
        if not all(map(self._logs.__contains__, topic_ids)):
            with self._lock:
                missing = [topic_id for topic_id in topic_ids if topic_id not in self._logs]
                if not self.knows_logs:
                    with self.environment.read() as raw:
                        missing = [topic_id for topic_id in missing if self._find_log(raw, topic_id) is None]
                for topic_id in missing:
                    self._logs[topic_id] = PartitionLog(self, topic_id, Ledger(new_ledger()), registered=False)
        return [self._logs[topic_id] for topic_id in topic_ids]

    def end_of(self, transaction: Staging, log: PartitionLog) -> int:
        """Return the id of a log's next entry in a transaction."""
        return transaction.stage(log, StagedLog).end

    def take(self, transaction: Transaction, log: PartitionLog, dues: Int64s) -> int:
        """`StagedLog.took`; a log's first entry registers it, and the partition."""
        staged = transaction.stage(log, StagedLog)
        if not log.registered and staged.end == log.ledger.entries:
            if self.register is not None:
                self.register(transaction.main)
            transaction.put(fmt.log_key(log.topic_id), fmt.pack_u64(log.ledger_id))
        return staged.took(dues)

    def add_message(
        self,
        transaction: Transaction,
        log: PartitionLog,
        heard_ms: int,
        fields: bytes,
        body: bytes,
    ) -> int:
        """Append one message (`fields_of_message`) to a log; as `add`."""
        staged = transaction.stage(log, StagedLog)
        first = staged.end
        if not log.registered or first >= fmt.MAX_ENTRY_ID:
            self.take(transaction, log, np.full(1, heard_ms, dtype=np.int64))
        else:
            staged.took_one(heard_ms)
        key = fmt.run_key(log.ledger.ledger_id, first)
        transaction.insert_run(key, seal_run(key, fields, (body,)), 1)
        return first

    def add(
        self,
        transaction: Transaction,
        log: PartitionLog,
        dues: Int64s,
        messages: Sequence[bytes] | PackedMessages,
        limits: RunLimits,
        replaced: Replaced | None = None,
        heard: Int64s | None = None,
    ) -> int:
        """Append messages to a log in a transaction; returns the id of the first entry.

        replaced: the messages are conditional, and the transaction admits them. heard: their due times in memory, HELD
        of those that never fire. REQUIRES: an append lease until it ends. Packed messages have their due times with
        them.
        """
        if isinstance(messages, PackedMessages):
            dues = messages.dues
        ledger_id, first = log.ledger_id, self.take(transaction, log, dues if heard is None else heard)
        if isinstance(messages, PackedMessages):
            insert_packed(transaction, ledger_id, first, messages)
        else:
            insert_messages(transaction, ledger_id, first, dues, messages, self.start_ms, limits, replaced)
        return first

    def skip_to(self, transaction: Transaction, log: PartitionLog, last: int, value: bytes) -> None:
        """Have a log go on behind the id `last`, which gets the run `value` (pack_skip), and no other before it.

        The transaction cancels them all.
        """
        staged = transaction.stage(log, StagedLog)
        staged.end = last
        staged.took(np.full(1, HELD, dtype=np.int64))
        transaction.insert_run(fmt.run_key(log.ledger_id, last), value, 1)

    @property
    def has_unapplied(self) -> bool:
        """True while the write-ahead log has what a checkpoint stores: entries, or that the partition is there."""
        return self.vacant or bool(self.memtable)

    def verify_identity(self, store_id: bytes, raw: Reads) -> None:
        """Refuse rows that belong to another store, partition or generation. Raises DamagedStore, CorruptRecord."""
        fields = catalog.fields_of(raw, fmt.PARTITION_INFO_KEY)
        if fields is None:
            raise DamagedStore(self.path, "has no partition record")
        expected = PartitionInfo(fmt.FORMAT_VERSION, store_id, self.start_ms, self.end_ms, self.generation)
        info = PartitionInfo.unpack(fields)
        if info != expected:
            raise DamagedStore(self.path, f"is {info}, the catalog says {expected}")

    def few_rows(self, store_id: bytes) -> Reads | None:
        """Read the few rows of a partition that is not open; None where there are many. Raises as `verify_identity`.

        None also where a run has more columns than were read of it, or is damaged.
        """
        if self.vacant:
            return VACANT.begin(buffers=True)
        few = read_few(self.path)
        if few is None:
            return None
        self.verify_identity(store_id, cast(Reads, few))
        try:
            for key, value in few.rows:
                if key.startswith(fmt.RUN_PREFIX):
                    Run(self.name, key, value)
        except CorruptEntry:
            return None
        return cast(Reads, few)
