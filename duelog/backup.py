"""A copy of a store while it is in use, as of one instant (point_in_time.py).

What a sender was told is stored, fired, acknowledged on disk or cancelled by then is so in the copy; what came after
is not in it. The manifest comes last: a directory without one is no complete backup. STORE comes right before it, so
that nothing else can be taken for a store either.

While this process writes the store, deletion and adoption of its partitions wait for the end of the copy.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from duelog.partitions.partition import partition_path
from duelog.store.codec import format as fmt
from duelog.store.env.environment import Environment
from duelog.store.env.held_read import HeldRead
from duelog.store.errors import InvalidArgument
from duelog.store.files.directory import make_directory, refuse_inside, sync_directory, write_file
from duelog.store.wal.wal_reader import write_wal

from .engine import Engine
from .point_in_time import PointInTime

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
    make_directory(destination)
    with engine.backing_up, engine.upkeep.maintenance.deletions_held(), closing(PointInTime(engine)) as point:
        try:
            return _copy_all(engine, point, destination)
        except BaseException:
            for child in destination.iterdir():
                shutil.rmtree(child) if child.is_dir() else child.unlink()
            raise


def _copy_all(engine: Engine, point: PointInTime, destination: Path) -> BackupResult:
    for name in ("partitions", "staging", "trash"):
        make_directory(destination / name)
    _copy(engine.storage.main, point.main, destination / "main")
    point.main.release()
    partitions = 0
    for partition, environment, read in point.partitions():
        target = partition_path(destination, partition.start_ms, 1).with_name(environment.path.name)
        _copy(environment, read, target)
        partitions += 1
    files = sorted(path for path in destination.rglob("data.mdb"))
    if point.oldest_segment is not None:
        files += write_wal(destination, engine.storage.store_id, point.wal, point.oldest_segment)
    write_file(destination / "STORE", (engine.storage.path / "STORE").read_bytes())
    sync_directory(destination)
    files.append(destination / "STORE")
    listed = {str(path.relative_to(destination)): describe(path) for path in files}
    manifest = {"format": fmt.FORMAT_VERSION, "store_id": engine.storage.store_id.hex(), "taken_ms": point.taken_ms}
    write_file(destination / MANIFEST, json.dumps({**manifest, "files": listed}, indent=1).encode() + b"\n")
    return BackupResult(destination, partitions, sum(size for size, _ in listed.values()), point.taken_ms)


def _copy(environment: Environment, read: HeldRead, target: Path) -> None:
    make_directory(target)
    environment.copy(target, read)


def describe(path: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file that this process does not have open."""
    crc = 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            crc = zlib.crc32(piece, crc)
        return os.fstat(file.fileno()).st_size, crc
