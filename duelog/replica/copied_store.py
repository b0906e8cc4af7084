"""A store that is read from its copy: the main environment, and partitions one at a time, as of one group of the log.

Nothing is restored that is not asked for, and the machine that serves the store is asked nothing. An environment comes
from the files of the newest manifest, and gets the rows that the log has for it behind them. A `CopiedEnvironment` says
how, and can be sent to another machine, which fetches it by itself: it needs the bucket, and no common file system.

What is fetched lies in temporary directories, and has the form of a store that is closed.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from zlib import crc32

from duelog.opening import Identity, fill, write_identity
from duelog.partitions.partition import partition_path
from duelog.partitions.partition_set import build_partition
from duelog.partitions.timespan import directory_name
from duelog.store.batches import batches
from duelog.store.codec import format as fmt
from duelog.store.codec.format import PartitionInfo, PartitionRecord, PartitionState
from duelog.store.codec.run import RunLimits
from duelog.store.config import MIB, StoreConfig
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import Memtable, Publication
from duelog.store.env.transaction import LmdbTransaction
from duelog.store.errors import ReplicaDamaged, ReplicaRefused
from duelog.store.files.directory import remove_tree
from duelog.store.files.system_errors import explained
from duelog.store.log import catalog
from duelog.store.wal.environment_rows import EnvironmentRows, rows_by_environment
from duelog.store.wal.segment import MAIN, RowKind
from duelog.store.wal.wal_reader import DIRECTORY

from .bucket import MANIFESTS, Bucket
from .file_download import put_file
from .identity import copied_identity
from .manifest import MAIN_START, Manifest, ReplicaFile, read_manifest
from .restoring import ReplicaLog

_SLICE_BYTES = 64 * MIB
_PARTITIONS = fmt.prefix(fmt.Table.PARTITION)

Catalog = Mapping[int, PartitionRecord]
"""The record of each partition, by start."""

Rows = dict[int, EnvironmentRows]
"""Rows of groups of the log, by environment."""


class CopiedEnvironment(NamedTuple):
    """An environment of a store as of a group of the log, and where in the copy it is. Picklable.

    manifest: its files are those of this environment. place: of the last group; None: the newest. record: of the
    partition, with the generation of its files; None: it is the main environment. after: groups behind this place have
    rows that the files lack; None: none has.
    """

    url: str
    manifest: Manifest
    place: int | None
    start_ms: int = MAIN_START
    record: PartitionRecord | None = None
    after: int | None = None

    def fetch(self, store: Path, heard: Callable[[Rows], None] = lambda rows: None) -> ReplicaLog:
        """Put it into the store in a directory; the log, as far as it was read.

        heard: is told of the rows of all environments. Raises ReplicaDamaged, ReplicaRefused, ReplicaUnreachable,
        DamagedStore, StoreFull.
        """
        bucket, manifest, record, start_ms = Bucket(self.url), self.manifest, self.record, self.start_ms
        log = ReplicaLog(bucket, manifest.store_id, manifest, group=self.place)
        path, name = store / "main", "main"
        with explained(store):
            if record is not None:
                path, name = partition_path(store, start_ms, record.generation), f"partition {directory_name(start_ms)}"
                if not manifest.files:  # it was made behind the manifest
                    info = PartitionInfo(fmt.FORMAT_VERSION, manifest.store_id, start_ms, record.end_ms, 1)
                    build_partition(store, path, info)
            for file in manifest.files:
                put_file(bucket, file, path, flush=False)
            if self.after is not None:
                slices = batches(log.more(), lambda group: len(group.content), _SLICE_BYTES)
                for rows in _applied(path, name, start_ms, self.after, map(rows_by_environment, slices)):
                    heard(rows)
        return log


def _applied(path: Path, name: str, start_ms: int, after: int, slices: Iterable[Rows]) -> Iterator[Rows]:
    """Rows in slices, once those of groups behind a place are applied to the environment in `path`."""
    config = StoreConfig()
    memtable = Memtable(Publication(), RunLimits(config.run_entries, config.run_bytes))
    with closing(Environment(path, name=name, durability="none", memtable=memtable)) as environment:
        for rows in slices:
            if start_ms in rows:
                with environment.read() as raw:
                    fill(path, name, raw, memtable, rows[start_ms].after(after))
                environment.apply()
            yield rows


class CopiedStore(NamedTuple):
    """The main environment of a store, fetched from its copy, in a directory that is a store without partitions.

    Its catalog says which partitions there are; `parts` has those that are not being deleted, by start. behind: starts
    of those that have been compacted since their files were put. place: of the last group of the log. time_ms: it was
    written by then.
    """

    path: Path
    main: CopiedEnvironment
    parts: Mapping[int, CopiedEnvironment]
    behind: frozenset[int]
    place: int
    time_ms: int

    @property
    def catalog(self) -> Catalog:
        """The records of `parts`."""
        return {start_ms: part.record for start_ms, part in self.parts.items() if part.record is not None}


@contextmanager
def open_copy(url: str) -> Iterator[CopiedStore]:
    """Fetch the main environment, as new as the copy has it, for the block.

    A manifest that is damaged, or whose file of it is, is passed over for the one before. Raises InvalidArgument,
    ReplicaRefused, ReplicaDamaged, ReplicaUnreachable, StoreFull.
    """
    bucket = Bucket(url)
    identity = copied_identity(bucket)
    damaged: list[str] = []
    for seq in reversed(bucket.manifests()):
        with TemporaryDirectory(prefix="duelog-copy-") as made:
            path = Path(made)
            try:
                copied = _fetch_main(path, url, Identity(*identity), read_manifest(bucket, seq))
            except ReplicaDamaged as error:
                if error.name.startswith("log/"):
                    raise
                damaged.append(str(error))
                continue
            yield copied
            return
    if damaged:
        raise ReplicaDamaged(url, MANIFESTS, "has no manifest that is whole: " + "; ".join(damaged))
    raise ReplicaRefused(url, "has no manifest yet: `duelog replica status` tells what there is")


def _fetch_main(path: Path, url: str, identity: Identity, manifest: Manifest) -> CopiedStore:
    if manifest.store_id != identity.store_id:
        raise ReplicaRefused(url, f"the manifest at {manifest.seq} is of another store")
    last: dict[int, int] = {}
    removed: dict[int, int] = {}
    """By start: the place of the last group with rows of a partition, and of that which removed one."""

    def heard(slice_: Rows) -> None:
        last.update((start_ms, rows.last) for start_ms, rows in slice_.items() if rows)
        for place, row in slice_[MAIN].others if MAIN in slice_ else ():
            if row.kind == RowKind.DELETE and row.key.startswith(_PARTITIONS):
                removed[fmt.trailing_u64(row.key)] = place

    _begin_store(path, identity)
    files: dict[int, tuple[ReplicaFile, ...]] = {}
    for file in manifest.files:
        files[file.start_ms] = (*files.get(file.start_ms, ()), file)
    main = CopiedEnvironment(url, manifest._replace(files=files[MAIN_START]), None, after=0)
    log = main.fetch(path, heard)
    main, parts = main._replace(place=log.place), {}
    with closing(Environment(path / "main", name="main", durability="none")) as environment:
        with environment.read() as raw:
            registered = dict(catalog.partitions(raw))
        records = dict(registered)
        for start_ms, record in registered.items():
            if record.state is not PartitionState.DELETING:
                begun = removed.get(start_ms)
                there = files.get(start_ms, ()) if begun is None else ()
                applied = max((file.applied for file in there if file.ledger is None), default=-1)
                after = (begun or 0) if last.get(start_ms, -1) > applied else None
                records[start_ms] = known = record._replace(generation=there[0].generation if there else 1)
                of_part = manifest._replace(files=there)
                parts[start_ms] = CopiedEnvironment(url, of_part, log.place, start_ms, known, after)
        behind = frozenset(start_ms for start_ms in parts if records[start_ms] != registered[start_ms])
        _register(environment, records)
    return CopiedStore(path, main, parts, behind, log.place, log.time_ms)


def _begin_store(path: Path, identity: Identity) -> None:
    for name in ("partitions", "staging", "trash", DIRECTORY):
        (path / name).mkdir(parents=True, exist_ok=True)  # not flushed: nothing here outlives a power cut
    write_identity(path, identity)


def _register(main: Environment, records: Catalog) -> None:
    """Have a main environment say that there are these partitions, and no others."""

    def work(transaction: LmdbTransaction) -> None:
        for start_ms, _ in catalog.partitions(transaction.raw):
            if start_ms not in records:
                transaction.delete(fmt.partition_key(start_ms))
        for start_ms, record in records.items():
            transaction.put(fmt.partition_key(start_ms), record.pack())

    main.commit(work)


class Excerpt(NamedTuple):
    """The part of a store that one task reads: the main environment, and a partition or none. Picklable.

    main: None: it is not needed. catalog: the partitions that main is to tell of. kept: the directory of the
    `CopiedStore`; where that is still there, main is taken from it.
    """

    main: CopiedEnvironment | None
    catalog: Catalog
    part: CopiedEnvironment | None
    kept: str

    @contextmanager
    def fetched(self) -> Iterator[Path]:
        """Fetch it for the block, into a directory that is a store of this and nothing else.

        Raises ReplicaDamaged, ReplicaRefused, ReplicaUnreachable, DamagedStore, StoreFull.
        """
        with TemporaryDirectory(prefix="duelog-copy-", dir=_scratch()) as made:
            path = Path(made)
            for environment in (self.main, self.part):
                if environment is not None:
                    _begin_store(path, Identity(environment.manifest.store_id, environment.manifest.partition_ms))
            if self.main is not None:
                self._take_main(self.main, path)
                with closing(Environment(path / "main", name="main", durability="none")) as main:
                    _register(main, self.catalog)
            if self.part is not None:
                self.part.fetch(path)
            yield path

    def _take_main(self, main: CopiedEnvironment, path: Path) -> None:
        """Have a copy of the main environment, which a machine fetches once for all tasks of a Spark application."""
        kept, scratch = Path(self.kept), _scratch()
        if not kept.exists() and scratch is not None:
            content = crc32(f"{main.url} {main.manifest.seq} {main.place}".encode())
            kept = Path(scratch) / f"duelog-main-{main.manifest.store_id.hex()}-{content:08x}"
            if not kept.exists():
                made = kept.with_name(f"{kept.name}-{uuid.uuid4().hex}")
                main.fetch(made)
                try:
                    os.rename(made, kept)
                except OSError:  # another task has been quicker
                    remove_tree(made)
        if kept.exists():
            shutil.copytree(kept / "main", path / "main")
        else:
            main.fetch(path)


def _scratch() -> str | None:
    """The directory of a Spark application on this machine, which goes with it; None: the usual one of the system."""
    return (os.environ.get("SPARK_LOCAL_DIRS") or "").split(",")[0] or None
