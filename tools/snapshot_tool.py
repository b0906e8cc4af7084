"""Snapshots of a store that no process has open: list them, verify them, make them anew from the logs.

A snapshot is only a shortcut of the next start; what is wrong with one never costs a message. Rebuilding is for a store
whose snapshots are damaged or of another version and whose next start should be quick all the same, and for reading
every entry of the pending partitions once.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from .. import StoreConfig
from ..opening import StoreLock, open_main
from ..partitions.away import directory_in_use
from ..partitions.partition import Partition, partition_path
from ..partitions.timespan import directory_name, parse_directory_name
from ..snapshot.rebuild import Rebuilt, rebuild_log
from ..snapshot.restore import require_usable
from ..snapshot.snapshot_format import SnapshotInfo, SnapshotState, Unusable, inspect_snapshots
from ..snapshot.writer import remove_snapshots
from ..store.clock import SystemClock
from ..store.codec import format as fmt
from ..store.codec.format import PartitionRecord, PartitionState
from ..store.codec.frontier import FrontierRecord
from ..store.env.environment import Environment
from ..store.errors import InvalidArgument, UnknownTopic
from ..store.log import catalog
from ..store.log.ledger import find_tail
from ..store.names import TopicName
from ..store.wal.followed_wal import FollowedWal
from ..store.wal.segment import MAIN
from ..upkeep.quarantine import Quarantine
from .values import require_store, stored_identity


@dataclass(frozen=True, slots=True)
class FoundSnapshot:
    """A snapshot of a topic's log in a partition. `usable`: the next start would restore from it.

    topic: None when the topic was deleted. reason: why it is not complete, or not usable.
    """

    partition: str
    topic: str | None
    ledger_id: int
    snapshot_id: int
    state: str
    usable: bool
    reason: str
    parts: int
    stored_bytes: int
    entries: int | None
    tail: int | None
    log_entries: int
    created_ms: int | None


class RebuiltLog(NamedTuple):
    """One topic's log in one partition: see snapshot.rebuild.Rebuilt."""

    partition: str
    topic: str
    found: Rebuilt


@dataclass(slots=True)
class RebuildReport:
    """Findings and deeds of `rebuild_snapshots`; `removed`: snapshots of partitions that have none (closed ones)."""

    logs: list[RebuiltLog]
    removed: int = 0

    @property
    def damaged(self) -> int:
        """Entries, or runs of entries, that cannot be read."""
        return sum(len(log.found.damaged) for log in self.logs)


class _Log(NamedTuple):
    topic_id: int
    topic: str | None
    ledger_id: int
    entries: int


class _Offline:
    """A store's environments, opened one by one."""

    def __init__(self, path: Path, main: Environment, store_id: bytes, wal: FollowedWal | None) -> None:
        """`wal`: what another process may not have applied yet; None: nothing is written beside."""
        self.main = main
        self._path = path
        self._store_id = store_id
        self._wal = wal

    @classmethod
    @contextmanager
    def open(cls, path: Path, *, lock: bool) -> Iterator[Self]:
        """With the store's lock, for writing; without, to look beside a writing process."""
        require_store(path)
        with ExitStack() as stack:
            if lock:
                held = StoreLock(path)
                stack.callback(held.release)
                held.take()
            identity = stored_identity(path)
            config = StoreConfig(partition_ms=identity.partition_ms)
            wal = None if lock else FollowedWal(path, identity.store_id)
            follow = None if wal is None else wal.of(MAIN)
            main = open_main(path, config, identity, follow=follow, read_only=not lock)
            stack.callback(main.close)
            yield cls(path, main, identity.store_id, wal)

    def partitions(self, name: str | None) -> list[tuple[int, PartitionRecord]]:
        """Registered partitions that are not being deleted, or the one of that name. Raises InvalidArgument.

        Those that a killed process left vacant, or that are away, have no snapshot.
        """
        with self.main.read() as raw:
            found = [row for row in catalog.partitions(raw) if row[1].state is not PartitionState.DELETING]
        paths = {row[0]: partition_path(self._path, row[0], row[1].generation) for row in found}
        found = [row for row in found if directory_in_use(paths[row[0]]) == paths[row[0]]]
        if self._wal is None:
            found = [row for row in found if paths[row[0]].exists()]
        if name is None:
            return found
        start_ms = parse_directory_name(name)
        chosen = [row for row in found if row[0] == start_ms]
        if not chosen:
            raise InvalidArgument("--partition", name, "there is none; `duelog partitions` lists those there are")
        return chosen

    def topic_id(self, topic: str | None) -> int | None:
        """Raises UnknownTopic, InvalidArgument."""
        if topic is None:
            return None
        name = str(TopicName.parse(topic))
        with self.main.read() as raw:
            record = catalog.find_topic(raw, name)
        if record is None:
            raise UnknownTopic(name)
        return record.topic_id

    @contextmanager
    def environment(self, start_ms: int, record: PartitionRecord) -> Iterator[Environment]:
        """A partition's environment, of this store. Raises DamagedStore."""
        path = partition_path(self._path, start_ms, record.generation)
        partition = Partition(path, start_ms, record.end_ms, record.generation, record.state)
        follow = None
        if self._wal is not None and record.state is PartitionState.OPEN:
            follow = self._wal.of(start_ms)
        with closing(
            Environment(path, name=partition.name, read_only=self._wal is not None, follow=follow)
        ) as environment:
            partition.verify_identity(self._store_id, environment)
            yield environment

    def logs(self, environment: Environment, topic_id: int | None) -> list[_Log]:
        """The logs in a partition, or the one of a topic."""
        with environment.read() as raw, self.main.read() as main:
            found = []
            for key, fields in catalog.rows(raw, fmt.prefix(fmt.Table.LOG)):
                of_topic, ledger_id = fmt.trailing_u32(key), fmt.unpack_u64(fields)
                if topic_id in (None, of_topic):
                    entries = find_tail(raw, environment.name, ledger_id)
                    found.append(_Log(of_topic, catalog.topic_name(main, of_topic), ledger_id, entries))
        return found

    def frontier(self, log: _Log, start_ms: int) -> FrontierRecord:
        with self.main.read() as raw:
            return catalog.frontier(raw, log.topic_id, start_ms) or FrontierRecord.start(log.ledger_id)


def list_snapshots(path: Path, *, partition: str | None = None, topic: str | None = None) -> list[FoundSnapshot]:
    """Snapshots of a store by what their metadata says, of one partition (its name) and topic, or of all.

    Reads no part, and works beside a writing process. Raises InvalidArgument, UnknownTopic, DamagedStore.
    """
    with _Offline.open(path, lock=False) as store:
        return list(_found(store, partition, topic, read_parts=False))


def verify_snapshots(path: Path, *, partition: str | None = None, topic: str | None = None) -> list[FoundSnapshot]:
    """The same with every part read and verified. Raises StoreLocked as well: a process has the store open."""
    with _Offline.open(path, lock=True) as store:
        return list(_found(store, partition, topic, read_parts=True))


def _found(store: _Offline, partition: str | None, topic: str | None, *, read_parts: bool) -> Iterator[FoundSnapshot]:
    topic_id = store.topic_id(topic)
    for start_ms, record in store.partitions(partition):
        with store.environment(start_ms, record) as environment:
            for log in store.logs(environment, topic_id):
                frontier = store.frontier(log, start_ms)
                for info in inspect_snapshots(environment, log.ledger_id, read_parts=read_parts):
                    yield _describe(info, log, frontier, start_ms, record.state)


def _describe(
    info: SnapshotInfo, log: _Log, frontier: FrontierRecord, start_ms: int, state: PartitionState
) -> FoundSnapshot:
    metadata, reason = info.metadata, info.reason
    if metadata is not None:
        if state is not PartitionState.OPEN:
            reason = "the partition is closed"
        try:
            require_usable(metadata, frontier, log.entries, start_ms, metadata.bucket_ms)
        except Unusable as error:
            reason = str(error)
    return FoundSnapshot(
        directory_name(start_ms),
        log.topic,
        info.ledger_id,
        info.snapshot_id,
        info.state.value,
        info.state is SnapshotState.COMPLETE and not reason,
        reason,
        info.parts,
        info.stored_bytes,
        None if metadata is None else metadata.entries,
        None if metadata is None else metadata.tail,
        log.entries,
        None if metadata is None else metadata.created_ms,
    )


Progress = Callable[[int, int], object]
"""Told (entries read so far, entries in all)."""


def rebuild_snapshots(
    path: Path,
    *,
    partition: str | None = None,
    topic: str | None = None,
    bucket_ms: int | None = None,
    progress: Progress = lambda read, total: None,
) -> RebuildReport:
    """Make the snapshots of every open partition anew from its logs, or of one partition (its name) or topic.

    Reads every entry and verifies its checksum. bucket_ms: of the configuration that the store is used with (None:
    that of the snapshots there are, else the default); a snapshot made with another is not used.
    Raises StoreLocked (a process has the store open), InvalidArgument, UnknownTopic, DamagedStore, StoreFull.
    """
    with _Offline.open(path, lock=True) as store:
        topic_id = store.topic_id(topic)
        partitions = store.partitions(partition)
        logs: dict[int, list[_Log]] = {}  # of which snapshots are made: of topics that are there, in open partitions
        for start_ms, record in partitions:
            with store.environment(start_ms, record) as environment:
                here = store.logs(environment, topic_id) if record.state is PartitionState.OPEN else []
                logs[start_ms] = [log for log in here if log.topic is not None]
        total = sum(log.entries for here in logs.values() for log in here)
        report = RebuildReport([])
        quarantine = Quarantine(store.main)
        read = 0

        def further(entries: int) -> None:
            nonlocal read
            read += entries
            progress(read, total)

        progress(0, total)
        for start_ms, record in partitions:
            with store.environment(start_ms, record) as environment:
                if record.state is not PartitionState.OPEN:
                    report.removed += remove_snapshots(environment)
                used_ms = bucket_ms or _bucket_ms(environment)
                for log in logs[start_ms]:
                    found = rebuild_log(
                        store.main,
                        environment,
                        log.topic_id,
                        log.ledger_id,
                        start_ms=start_ms,
                        bucket_ms=used_ms,
                        part_bytes=StoreConfig().snapshot_part_bytes,
                        created_ms=SystemClock().now_ms(),
                        quarantine=quarantine.add,
                        progress=further,
                    )
                    quarantine.flush()
                    report.logs.append(RebuiltLog(directory_name(start_ms), str(log.topic), found))
        return report


def _bucket_ms(environment: Environment) -> int:
    known = [info.metadata.bucket_ms for info in inspect_snapshots(environment) if info.metadata is not None]
    return known[-1] if known else StoreConfig().bucket_ms
