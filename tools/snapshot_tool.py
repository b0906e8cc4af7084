"""Snapshots of a store that no process has open: list them, verify them, make them anew from the logs.

A snapshot is only a shortcut of the next start; what is wrong with one never costs a message. Rebuilding is for a store
whose snapshots are damaged or of another version and whose next start should be quick all the same, and for reading
every entry of the pending partitions once.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .. import StoreConfig
from ..opening import StoreLock, open_main
from ..partitions.away import directory_in_use
from ..partitions.timespan import parse_directory_name
from ..snapshot.rebuild import Rebuilt, rebuild_log
from ..snapshot.restore import require_usable
from ..snapshot.snapshot_format import SnapshotInfo, SnapshotState, Unusable, inspect_snapshots
from ..snapshot.writer import remove_snapshots
from ..store.clock import SystemClock
from ..store.codec.format import PartitionRecord, PartitionState
from ..store.codec.frontier import FrontierRecord
from ..store.env.environment import Environment
from ..store.errors import InvalidArgument, UnknownTopic
from ..store.log import catalog
from ..store.names import TopicName
from ..store.wal.followed_wal import FollowedWal
from ..survey.contents import topic_names
from ..upkeep.quarantine import Quarantine
from .columns.scan_rows import Logs, logs_of
from .columns.sealed import Sealed, open_generation, open_main_to_read
from .values import require_store, stored_identity


class FoundSnapshot(NamedTuple):
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


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    require_store(path)
    lock = StoreLock(path)
    lock.take()
    try:
        yield
    finally:
        lock.release()


def _partitions(path: Path, main: Environment, name: str | None) -> list[tuple[Sealed, PartitionRecord]]:
    """Registered partitions that are not being deleted, or the one of that name. Raises InvalidArgument.

    Those that are away have no snapshot.
    """
    with main.read() as raw:
        found = [row for row in catalog.partitions(raw) if row[1].state is not PartitionState.DELETING]
    here = [(Sealed.of(path, *row), row[1]) for row in found]
    here = [row for row in here if directory_in_use(row[0].path) == row[0].path]
    if name is None:
        return here
    start_ms = parse_directory_name(name)
    chosen = [row for row in here if row[0].start_ms == start_ms]
    if not chosen:
        raise InvalidArgument("--partition", name, "there is none; `duelog partitions` lists those there are")
    return chosen


def _topic_names(main: Environment, topic: str | None) -> dict[int, str]:
    """Names by topic id, of one topic or of all that are there. Raises UnknownTopic, InvalidArgument."""
    with main.read() as raw:
        names = topic_names(raw)
    if topic is None:
        return names
    wanted = str(TopicName.parse(topic))
    if wanted not in names.values():
        raise UnknownTopic(wanted)
    return {topic_id: name for topic_id, name in names.items() if name == wanted}


def list_snapshots(
    path: Path, *, partition: str | None = None, topic: str | None = None, verify: bool = False
) -> list[FoundSnapshot]:
    """Snapshots of a store by what their metadata says, of one partition (its name) and topic, or of all.

    Reads no part, and works beside a writing process. verify: read and verify every part; StoreLocked is raised where
    a process has the store open. Raises InvalidArgument, UnknownTopic, DamagedStore.
    """
    found = []
    with _locked(path) if verify else nullcontext(), open_main_to_read(path) as (identity, main):
        names, wal = _topic_names(main, topic), FollowedWal(path, identity.store_id)
        for sealed, record in _partitions(path, main, partition):
            follow = wal if record.state is PartitionState.OPEN else None
            with open_generation(sealed, identity.store_id, follow) as environment:
                for topic_id, ledger_id, entries in logs_of(environment):
                    if topic is not None and topic_id not in names:
                        continue
                    with main.read() as raw:
                        frontier = catalog.frontier(raw, topic_id, sealed.start_ms) or FrontierRecord.start(ledger_id)
                    for info in inspect_snapshots(environment, ledger_id, read_parts=verify):
                        reason, told = _why_not(info, frontier, entries, sealed, record), info.metadata
                        usable = info.state is SnapshotState.COMPLETE and not reason
                        found.append(FoundSnapshot(
                            sealed.partition, names.get(topic_id), ledger_id, info.snapshot_id, info.state.value,
                            usable, reason, info.parts, info.stored_bytes, told and told.entries, told and told.tail,
                            entries, told and told.created_ms,
                        ))  # fmt: skip
    return found


def _why_not(
    info: SnapshotInfo, frontier: FrontierRecord, entries: int, sealed: Sealed, record: PartitionRecord
) -> str:
    """Why the next start would not use a snapshot; empty: it would, if it is complete."""
    if info.metadata is None:
        return info.reason
    try:
        require_usable(info.metadata, frontier, entries, sealed.start_ms, info.metadata.bucket_ms)
    except Unusable as error:
        return str(error)
    return info.reason if record.state is PartitionState.OPEN else "the partition is closed"


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
    report, read = RebuildReport([]), 0
    with ExitStack() as stack:
        stack.enter_context(_locked(path))
        identity = stored_identity(path)
        config = StoreConfig(partition_ms=identity.partition_ms)
        main = stack.enter_context(closing(open_main(path, config, identity, read_only=False)))
        names, quarantine = _topic_names(main, topic), Quarantine(main)
        # Those that a killed process left vacant have no snapshot.
        partitions = [row for row in _partitions(path, main, partition) if row[0].path.exists()]
        logs: dict[int, Logs] = {}  # of which snapshots are made: of topics that are there, in open partitions
        for sealed, record in partitions:
            with open_generation(sealed, identity.store_id, write=True) as environment:
                here = logs_of(environment) if record.state is PartitionState.OPEN else []
                logs[sealed.start_ms] = [log for log in here if log[0] in names]
        total = sum(entries for here in logs.values() for _, _, entries in here)

        def further(entries: int) -> None:
            nonlocal read
            read += entries
            progress(read, total)

        further(0)
        for sealed, record in partitions:
            with open_generation(sealed, identity.store_id, write=True) as environment:
                if record.state is not PartitionState.OPEN:
                    report.removed += remove_snapshots(environment)
                used_ms = bucket_ms or _bucket_ms(environment)
                for topic_id, ledger_id, _ in logs[sealed.start_ms]:
                    found = rebuild_log(
                        main,
                        environment,
                        topic_id,
                        ledger_id,
                        start_ms=sealed.start_ms,
                        bucket_ms=used_ms,
                        part_bytes=StoreConfig().snapshot_part_bytes,
                        created_ms=SystemClock().now_ms(),
                        quarantine=quarantine.add,
                        progress=further,
                    )
                    quarantine.flush()
                    report.logs.append(RebuiltLog(sealed.partition, names[topic_id], found))
    return report


def _bucket_ms(environment: Environment) -> int:
    known = [info.metadata.bucket_ms for info in inspect_snapshots(environment) if info.metadata is not None]
    return known[-1] if known else StoreConfig().bucket_ms
