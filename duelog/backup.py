"""A copy of a store while it is in use.

The main environment is copied first, then the partitions: whatever the copied catalog, frontiers and markers know of
is in partitions that are copied later. The other order would lose what was sent in between. What a partition holds
beyond that is in the copy too, as messages sent while the backup was made, and fires when it is due. Numbers that
were given out meanwhile are not given out again by the copy. The manifest comes last: a directory without one is no
complete backup. STORE comes right before it, so that nothing else can be taken for a store either.

Partitions that come into being meanwhile are left out; those that are deleted are held back where this process writes
the store, and where another one does, the backup begins again if it misses one.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

from duelog.partitions.partition import partition_path
from duelog.store import catalog
from duelog.store import format as fmt
from duelog.store.directory import make_directory, sync_directory, write_file
from duelog.store.environment import Environment
from duelog.store.errors import DamagedStore, InvalidArgument
from duelog.store.format import PartitionState
from duelog.store.journal import read_journal, write_journal
from duelog.store.transaction import Transaction

from .engine import Engine

MANIFEST = "BACKUP"
_ATTEMPTS = 8
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BackupResult:
    """What a backup holds: partitions, bytes of its files, and the store's time when it began."""

    path: Path
    partitions: int
    file_bytes: int
    taken_ms: int


def back_up(engine: Engine, destination: Path) -> BackupResult:
    """Copy an open store into `destination`, absent or empty. Raises InvalidArgument, StoreFull, DamagedStore."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise InvalidArgument("dest", str(destination), "expected an empty directory, or none")
    if destination.is_relative_to(engine.path):
        raise InvalidArgument("dest", str(destination), "lies inside the store")
    make_directory(destination)
    with engine.maintenance.deletions_held():
        for attempt in range(_ATTEMPTS):
            try:
                return _Backup(engine, destination).run()
            except _PartitionGone as error:
                if attempt + 1 == _ATTEMPTS:
                    raise DamagedStore(error.path, "was deleted while it was to be copied, again and again") from None
            except BaseException:
                _clear(destination)
                raise
    raise DamagedStore(destination, "no attempt was made")


class _PartitionGone(Exception):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path


def _clear(destination: Path) -> None:
    for child in destination.iterdir():
        shutil.rmtree(child) if child.is_dir() else child.unlink()


class _Backup:
    def __init__(self, engine: Engine, destination: Path) -> None:
        self._engine = engine
        self._destination = destination

    def run(self) -> BackupResult:
        engine, destination = self._engine, self._destination
        _clear(destination)
        for name in ("partitions", "staging", "trash"):
            make_directory(destination / name)
        taken_ms = engine.clock.now_ms()
        # Before the partitions, which get what it loses. Where this process writes, they get all of it to be copied.
        journaled = read_journal(engine.path, engine.store_id) if engine.read_only else []
        self._copy(engine.main, destination / "main")
        main = Environment(destination / "main", name="main", map_bytes=engine.config.map_bytes)
        try:
            with main.read() as raw:
                found = [row for row in catalog.partitions(raw) if row[1].state is not PartitionState.DELETING]
            for start_ms, record in found:
                self._copy_partition(start_ms, partition_path(destination, start_ms, record.generation))
            self._skip_numbers(main)
        finally:
            main.close()
        files = sorted(path for path in destination.rglob("data.mdb"))
        if journaled:
            files.append(write_journal(destination, engine.store_id, journaled))
        _write_copy(engine.path / "STORE", destination / "STORE")
        files.append(destination / "STORE")
        listed = {str(path.relative_to(destination)): describe(path) for path in files}
        manifest = {"format": fmt.FORMAT_VERSION, "store_id": engine.store_id.hex(), "taken_ms": taken_ms}
        write_file(destination / MANIFEST, json.dumps({**manifest, "files": listed}, indent=1).encode() + b"\n")
        return BackupResult(destination, len(found), sum(size for size, _ in listed.values()), taken_ms)

    def _copy_partition(self, start_ms: int, target: Path) -> None:
        partitions = self._engine.partitions
        partition = partitions.get(start_ms)
        if partition is None:
            raise _PartitionGone(target)
        try:
            with partitions.lease(partition):
                # The next generation may lack what the copied cursors have not acknowledged yet.
                if partition.environment.path.name != target.name:
                    raise _PartitionGone(target)
                self._copy(partition.environment, target)
        except DamagedStore:
            if partitions.registered(partition):
                raise
            raise _PartitionGone(target) from None

    def _copy(self, environment: Environment, target: Path) -> None:
        make_directory(target)
        environment.sync()
        environment.copy(target)

    def _skip_numbers(self, main: Environment) -> None:
        """Have the copy give out no number that a log in a copied partition has already.

        A log may have been made, for a topic that may have been made, after the main environment was copied.
        """
        names = (catalog.LEDGERS, catalog.TOPICS)
        values = {name: self._engine.main.get(fmt.counter_key(name)) for name in names}

        def raise_them(transaction: Transaction) -> None:
            for name, value in values.items():
                if value is not None:
                    transaction.put(fmt.counter_key(name), value)

        main.write(raise_them)


def _write_copy(source: Path, target: Path) -> None:
    write_file(target, source.read_bytes())
    sync_directory(target.parent)


def describe(path: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file that this process does not have open."""
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            crc = zlib.crc32(piece, crc)
        return os.fstat(file.fileno()).st_size, crc
