"""Sealed generations: what jobs that read whole partitions may open, without a lock and beside a running store.

A generation is sealed once the catalog says that its partition is CLOSED. Nothing writes to its file any more:
compaction replaces it by another directory, deletion removes it, `duelog repair` wants the store for itself. So a
descriptor of it can be handed to another process, which needs neither the main environment nor any lock. A store may be
named by its copy in object storage; then a task is handed what it fetches.

A generation that has gone since it was listed is DamagedStore at opening, never an empty result. One that goes while
it is open can be read to its end.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple, Self, TypeVar

from ...opening import Identity, open_main
from ...partitions.away import Away, directory_in_use
from ...partitions.partition import Partition, partition_path
from ...partitions.timespan import directory_name
from ...replica.copied_store import CopiedEnvironment, CopiedStore, Excerpt
from ...store.codec.format import PartitionRecord, PartitionState
from ...store.config import StoreConfig
from ...store.env.body_file import length_of
from ...store.env.environment import Environment
from ...store.env.memtable import Reads
from ...store.errors import CorruptRecord, DamagedStore, DayAway
from ...store.log import catalog
from ...store.wal.followed_wal import FollowedWal
from ...store.wal.segment import MAIN
from ..values import require_store, stored_identity

T = TypeVar("T")


class Sealed(NamedTuple):
    """A sealed generation of a partition, as the catalog and the file system had it at one time. Picklable."""

    store: str
    start_ms: int
    end_ms: int
    generation: int
    file_bytes: int

    @classmethod
    def of(cls, store: Path, start_ms: int, record: PartitionRecord) -> Self:
        """A generation of the catalog, closed or open; `file_bytes` 0: its file is not there."""
        sealed = cls(os.fspath(store.absolute()), start_ms, record.end_ms, record.generation, 0)
        return sealed._replace(file_bytes=sealed.size() or 0)

    def size(self) -> int | None:
        """Bytes of its files now; None: they are not there."""
        try:
            return length_of(self.path)
        except FileNotFoundError:
            return None

    @property
    def path(self) -> Path:
        return partition_path(Path(self.store), self.start_ms, self.generation)

    def refuse_away(self) -> Self:
        """Raise DayAway where its messages are in the store's copy alone, whose URL takes the place of the store."""
        path = directory_in_use(self.path)
        if path != self.path:
            url = Away.read(path).url
            raise DayAway(path, f"is in {url} alone: give that in place of the store")
        return self

    @property
    def partition(self) -> str:
        """The name of the partition's directory: `20261120T000000Z`."""
        return directory_name(self.start_ms)

    @property
    def name(self) -> str:
        """Its name in errors and findings."""
        return f"partition {self.partition}"


def identity_of(store: Path) -> Identity:
    """Read the STORE file of an existing store. Raises InvalidArgument, FormatMismatch, DamagedStore."""
    require_store(store)
    return stored_identity(store)


@contextmanager
def open_main_to_read(store: Path) -> Iterator[tuple[Identity, Environment]]:
    """The main environment, under LMDB's reader locks, beside a process that writes it; not in that process.

    With what the write-ahead log has of it.
    """
    identity = identity_of(store)
    config = StoreConfig(partition_ms=identity.partition_ms)
    follow = FollowedWal(store, identity.store_id).of(MAIN)
    with closing(open_main(store, config, identity, follow=follow, read_only=True)) as main:
        yield identity, main


def sealed_generations(store: Path) -> list[Sealed]:
    """The sealed generations of a store by start, from one read transaction of the catalog.

    Raises DamagedStore for a registered one whose file is not there, DayAway where it is in the copy.
    """
    return read_sealed(store, lambda _raw, _identity, generations: generations)


def read_sealed(store: Path, work: Callable[[Reads, Identity, list[Sealed]], T]) -> T:
    """Have `work` done in one read transaction of the main environment, with the generations sealed as of it.

    It is run again where one of them has gone meanwhile because the store deleted or replaced it; so it changes
    nothing. Keep it short. Raises DamagedStore for a registered generation whose file is not there.
    """
    with open_main_to_read(store) as (identity, main):
        while True:
            with main.read() as raw:
                partitions = catalog.partitions(raw)
                try:
                    return work(raw, identity, sealed_in(store, partitions))
                except DamagedStore as error:
                    damage = error
            with main.read() as raw:
                if catalog.partitions(raw) == partitions:
                    raise damage


def sealed_in(store: Path, partitions: list[tuple[int, PartitionRecord]]) -> list[Sealed]:
    """The sealed ones of a catalog's partitions, within a read transaction that is open already."""
    closed = [Sealed.of(store, *row) for row in partitions if row[1].state is PartitionState.CLOSED]
    for sealed in closed:
        if not sealed.file_bytes:
            sealed.refuse_away()
            raise DamagedStore(sealed.path, "is registered in the catalog, and is missing")
    return closed


@contextmanager
def open_generation(
    sealed: Sealed, store_id: bytes, wal: FollowedWal | None = None, *, write: bool = False
) -> Iterator[Environment]:
    """The environment of a generation inside the block: a sealed one without locks, of the size it was listed with.

    wal: that of the store, for an open partition, which is read under locks with what the log has of it. write: for
    the holder of the store's lock.
    Raises DamagedStore for one that is missing, short, or of another store, partition or generation.
    """
    path, file_bytes = sealed.path, sealed.size()
    if wal is None and file_bytes is None:
        raise DamagedStore(path, "is missing: deleted or replaced since the job began")
    if wal is None and file_bytes != sealed.file_bytes:
        raise DamagedStore(path / "data.mdb", f"is {file_bytes} bytes, was {sealed.file_bytes} when the job began")
    follow = None if wal is None else wal.of(sealed.start_ms)
    has_lock = write or wal is not None
    opened = Environment(path, name=sealed.name, read_only=not write, lock=has_lock, follow=follow)
    with closing(opened) as environment:
        state = PartitionState.CLOSED if wal is None else PartitionState.OPEN
        partition = Partition(path, sealed.start_ms, sealed.end_ms, sealed.generation, state)
        try:
            if not environment.is_vacant:
                with environment.read() as raw:
                    partition.verify_identity(store_id, raw)
        except CorruptRecord as error:
            raise DamagedStore(path, str(error)) from error
        yield environment


_URL = re.compile(r"(s3|s3a|gs|az|abfs|abfss|file|memory):/{1,3}(.*)")


def copy_url(store: Path | str) -> str | None:
    """The URL of a copy that a store is named by; None: it is a directory. A Path has taken out slashes.

    >>> copy_url(Path("s3://bucket/orders")), copy_url(Path("data"))
    ('s3://bucket/orders', None)
    """
    found = _URL.fullmatch(str(store))
    if found is None:
        return None
    return f"{found[1]}://{'/' if found[1] in ('file', 'memory') else ''}{found[2]}"


def store_name(store: Path) -> str:
    """The name of a store as it is shown: the URL of its copy, or the directory."""
    return copy_url(store) or str(store)


def copied_partitions(copy: CopiedStore) -> Iterator[tuple[Sealed, PartitionState, CopiedEnvironment]]:
    """Each partition of a copy as its catalog has it, its state, and where it is fetched from."""
    for start_ms, part in copy.parts.items():
        record = copy.catalog[start_ms]
        size = sum(file.size for file in part.manifest.files)
        yield Sealed(part.url, start_ms, record.end_ms, record.generation, size), record.state, part


def excerpt(copy: CopiedStore, start_ms: int) -> Excerpt:
    """The part of a store that a task on one partition reads, and main with that partition alone."""
    return Excerpt(copy.main, {start_ms: copy.catalog[start_ms]}, copy.parts[start_ms], str(copy.path))
