"""A copy of a store while it is in use, as of one instant.

What a sender was told is stored, fired, acknowledged on disk or cancelled by then is so in the copy; what came after
is not in it. The manifest comes last: a directory without one is no complete backup. STORE comes right before it, so
that nothing else can be taken for a store either.

While this process writes the store, deletion and adoption of its partitions wait for the end of the copy.

The instant (`PointInTime`): a store is many LMDB environments and a WAL, each with commits of its own. A read
transaction is held in every one of them; the instant is when the one of the main environment begins, and it counts if
no partition has had a commit, and the WAL no group, between the beginning of its own transaction and a look after that
instant. Else it is tried again: a look at a hundred partitions takes some tenths of a ms. So nothing is stopped, and it
is the same whether this process writes the store or another does. What is seen is what a crash at that instant would
have left for the next opening, and needs no other repair than that.

Where this process writes, a partition that is not open cannot change: it is held when it is opened, be it by a sender
or in order to be copied, so that a backup does not need a descriptor for every day there is. Where another process
writes, every partition is held from the beginning: it may be deleted or replaced meanwhile, and its files stay.
"""

import json
import os
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from duelog.opening import refuse_standby
from duelog.partitions.away import Away
from duelog.partitions.partition import Partition, partition_path
from duelog.store.codec import format as fmt
from duelog.store.codec.format import PartitionState
from duelog.store.env.environment import Environment
from duelog.store.env.held_read import HeldRead
from duelog.store.env.memtable import ReadTransaction, Unapplied, applied_position
from duelog.store.errors import BrokenInvariant, DamagedStore, DuelogError, InvalidArgument, StoreBusy
from duelog.store.files.directory import make_directory, refuse_inside, sync_directory, write_file
from duelog.store.log import catalog
from duelog.store.wal.segment import MAIN, Group
from duelog.store.wal.wal_reader import WalFollower, read_beside, write_wal
from duelog.store.wal.write_batch import add_row

from .engine import Engine

_WAL_KEY = fmt.counter_key(catalog.WAL)
_PATIENCE_S = 60.0
"""How long an instant between two commits is looked for."""

_Generation = tuple[int, str]
"""Start of a partition, and the name of the directory of its generation."""


class HeldPartition(NamedTuple):
    """A partition under a lease, the view of it that is copied, and where the rows before are, if it is away."""

    partition: Partition
    environment: Environment
    read: HeldRead
    away: Away | None


class PointInTime:
    """The environments of a store as of one instant; `close` lets them go."""

    def __init__(self, engine: Engine) -> None:
        """Find the instant. Raises StoreBusy, DamagedStore, FormatMismatch, StoreFailed, ClosedError.

        REQUIRES: deletion and adoption are held back, and no other backup is made by this process.
        """
        self._engine = engine
        self._partitions = engine.storage.partitions
        self._wal = WalFollower(engine.storage.path, engine.storage.store_id)
        self._held: dict[_Generation, HeldPartition] = {}
        self._left: set[_Generation] | None = None
        """Generations still to be copied; None: not known yet."""
        self._unheld: DuelogError | None = None
        """Why a partition that was opened is not held."""
        self.partition_count = 0
        self.taken_ms = 0
        """The store's time at the instant."""
        self.wal: list[Group] = []
        """Groups in the write-ahead log at the instant, some of them applied."""
        read_beside(
            engine.storage.path, engine.storage.store_id, lambda: catalog.oldest_segment(engine.storage.main)
        )  # refuses damage
        self.oldest_segment: int | None = None
        """The first segment of the log that the copy needs; None: it has none."""
        self.main = engine.storage.main.hold()
        try:
            with self._partitions.relocating:
                self._hold_each(self._partitions.watch(self._opened))
            if engine.storage.read_only:
                self._hold_all()
            self._find_instant()
        except BaseException:
            self.close()
            raise

    # -- the instant -------------------------------------------------------------------------------

    def _find_instant(self) -> None:
        until = time.monotonic() + _PATIENCE_S
        while True:
            with self._partitions.relocating:
                if self._is_instant():
                    return
            if time.monotonic() > until:
                raise StoreBusy(
                    self._engine.storage.path, f"no instant between two commits was found in {_PATIENCE_S:.0f} s"
                )

    def _is_instant(self) -> bool:
        for held in list(self._held.values()):
            if held.read.moved():
                held.read.renew()
        self.wal = self._wal.follow()
        self.taken_ms = self._engine.clock.now_ms()
        self.main.renew()
        if self._engine.storage.read_only:  # the writing process may remove them
            for read in (self.main, *(held.read for held in self._held.values())):
                read.keep_bodies()
        if self._wal.follow()[-1:] != self.wal[-1:] or any(held.read.moved() for held in list(self._held.values())):
            return False
        main = ReadTransaction(self.main.raw, _registrations(self.wal, applied_position(self.main.raw)))
        rows = [row for row in catalog.partitions(main) if row[1].state is not PartitionState.DELETING]
        rests = {partition.start_ms: partition.path.name for partition in self._partitions if partition.away}
        generations = {
            (start_ms, rests.get(start_ms) or partition_path(Path(), start_ms, record.generation).name)
            for start_ms, record in rows
        }
        if self._engine.storage.read_only:
            replaced = [each for each, held in self._held.items() if held.environment.in_place.is_replaced]
            if replaced or generations - self._held.keys():
                for each in replaced:  # it has gone and come since (away.py)
                    self._let_go(each)
                self._hold_all()
                return False
        self._left, self.partition_count = generations, len(generations)
        oldest = self.main.raw.get(_WAL_KEY)
        self.oldest_segment = None if oldest is None else fmt.unpack_u64(fmt.unseal(_WAL_KEY, oldest))
        return True

    # -- holding -----------------------------------------------------------------------------------

    def _hold_each(self, leased: list[Partition]) -> None:
        try:
            while leased:
                self._hold(leased.pop())
        finally:
            for partition in leased:
                self._partitions.release(partition)

    def _hold_all(self) -> None:
        for partition in self._partitions:
            try:
                self._partitions.acquire(partition, partial=True)
            except DamagedStore:
                if self._partitions.registered(partition):
                    raise
                continue
            self._hold(partition)

    def _hold(self, partition: Partition) -> None:
        """Hold a partition that is under a lease of ours, which goes back with it, or at once if it is held already."""
        environment = partition.environment
        generation = partition.start_ms, environment.path.name
        try:
            if generation not in self._held and not partition.outdated:
                self._held[generation] = HeldPartition(partition, environment, environment.hold(), partition.away)
                return
        except BaseException:
            self._partitions.release(partition)
            raise
        self._partitions.release(partition)

    def _opened(self, partition: Partition, environment: Environment) -> None:
        """A partition was opened, by any thread, and is not used yet. Under the lock of the partitions."""
        generation = partition.start_ms, environment.path.name
        if self._left is None or generation in self._left:
            try:
                self._held[generation] = HeldPartition(partition, environment, environment.hold(), partition.away)
                partition.leases += 1
            except DuelogError as error:
                self._unheld = error

    # -- giving them out ---------------------------------------------------------------------------

    def partitions(self) -> Iterator[HeldPartition]:
        """Each partition there was, held until the next is asked for; those first that are held already.

        Without those that were vacant, which lie in the log. Raises DamagedStore.
        """
        if self._left is None:
            raise BrokenInvariant("the partitions of an instant are asked for before it is found")
        while self._left:
            generation = next((each for each in self._left if each in self._held), None)
            if generation is None:
                generation = min(self._left)
                self._open(generation)
            held = self._held[generation]
            if not held.read.is_vacant:
                yield held
            self._left.discard(generation)
            self._let_go(generation)

    def _open(self, generation: _Generation) -> None:
        start_ms, name = generation
        partition = self._partitions.get(start_ms)
        if partition is None:
            raise DamagedStore(partition_path(self._engine.storage.path, start_ms, 1).parent / name, "is missing")
        with self._partitions.lease(partition, partial=True):
            if generation not in self._held:
                raise self._unheld or DamagedStore(partition.path, f"is not generation {name}")

    def _let_go(self, generation: _Generation) -> None:
        held = self._held.pop(generation)
        held.read.release()
        self._partitions.release(held.partition)

    def close(self) -> None:
        """Let everything go that is held. A second call does nothing."""
        for partition in self._partitions.watch(None):
            self._partitions.release(partition)
        self.main.release()
        for generation in list(self._held):
            self._let_go(generation)


def _registrations(groups: Iterable[Group], applied: int) -> Unapplied:
    """Read which partitions there are from groups that are not applied to the main environment."""
    unapplied, prefix = Unapplied.nothing(), fmt.prefix(fmt.Table.PARTITION)
    for group in groups:
        if group.position > applied:
            for row in group.rows():
                if row.start_ms == MAIN and row.key.startswith(prefix):
                    add_row(unapplied, row)
    return unapplied


MANIFEST = "BACKUP"
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BackupResult:
    """The content of a backup: partitions, bytes of its files, and the store's time at its instant."""

    path: Path
    partitions: int
    file_bytes: int
    taken_ms: int


def back_up(engine: Engine, destination: Path) -> BackupResult:
    """Copy an open store into `destination`, absent or empty.

    Raises InvalidArgument, StoreFull, StoreBusy, DamagedStore, and StoreFailed or ClosedError for a store that is.
    """
    refuse_inside("dest", destination, engine.storage.path)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise InvalidArgument("dest", str(destination), "expected an empty directory, or none")
    refuse_standby("dest", destination)
    make_directory(destination)
    held = engine.upkeep.maintenance.deletions_held()
    with engine.storage.partitions.copying, held, closing(PointInTime(engine)) as point:
        try:
            return _copy_all(engine, point, destination)
        except BaseException:
            for child in destination.iterdir():
                shutil.rmtree(child) if child.is_dir() else child.unlink()
            raise


def _copy_all(engine: Engine, point: PointInTime, destination: Path) -> BackupResult:
    for name in ("partitions", "staging", "trash"):
        make_directory(destination / name)
    files = _copy(engine.storage.main, point.main, destination / "main")
    point.main.release()
    for partition, environment, read, away in point.partitions():
        if away is None:
            target = partition_path(destination, partition.start_ms, 1).with_name(environment.path.name)
            files += _copy(environment, read, target)
        else:
            from .replica.tiers import fetch_whole  # noqa: PLC0415 - only a store with days in a copy needs it

            target = partition_path(destination, partition.start_ms, partition.generation)
            fetch_whole(engine.shipping, partition, away, read.raw, target)
            files.append(target / "data.mdb")
    if point.oldest_segment is not None:
        files += write_wal(destination, engine.storage.store_id, point.wal, point.oldest_segment)
    write_file(destination / "STORE", (engine.storage.path / "STORE").read_bytes())
    sync_directory(destination)
    files.append(destination / "STORE")
    listed = {str(path.relative_to(destination)): describe(path) for path in files}
    manifest = {"format": fmt.FORMAT_VERSION, "store_id": engine.storage.store_id.hex(), "taken_ms": point.taken_ms}
    write_file(destination / MANIFEST, json.dumps({**manifest, "files": listed}, indent=1).encode() + b"\n")
    return BackupResult(destination, point.partition_count, sum(size for size, _ in listed.values()), point.taken_ms)


def _copy(environment: Environment, read: HeldRead, target: Path) -> list[Path]:
    """Copy an environment; the files of the copy. LMDB's first: body files have all that it names, and perhaps more."""
    make_directory(target)
    environment.copy(target, read)
    return [target / "data.mdb", *read.copy_bodies(target)]


def describe(path: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file that this process does not have open."""
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            crc = zlib.crc32(piece, crc)
        return os.fstat(file.fileno()).st_size, crc
