"""Directories of partitions in the places where they belong, before anything of them is opened.

A directory says of itself which store, partition and generation it is of; where it does not, the runs in it say which
partition. One that lies elsewhere is put back. One that belongs to no free place, because another is rightly there or
because it is of another store, goes to `quarantine/` in the store, which nothing else touches: nothing is removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...partitions.partition import partition_path
from ...partitions.timespan import parse_directory_name
from ...store.codec import format as fmt
from ...store.codec.format import PartitionInfo
from ...store.codec.run import Run, RunKind
from ...store.errors import CorruptEntry, CorruptRecord, DuelogError
from ...store.files import pages
from ...store.files.directory import make_directory, move
from .repair_report import Account

QUARANTINE = "quarantine"
_ON_ITS_WAY = "placing-"


class Place(NamedTuple):
    """Where a directory lies: start of the partition, generation."""

    start_ms: int
    generation: int


def put_back(path: Path, store_id: bytes, account: Account) -> None:
    """Have every generation lie where it belongs. REQUIRES: nothing is open. O(directories)."""
    taken: set[Place] = set()
    misplaced: list[tuple[Path, Place | None]] = []
    for directory in sorted([*path.glob("partitions/*/g*"), *path.glob(f"{QUARANTINE}/{_ON_ITS_WAY}*")]):
        if not directory.is_dir():
            continue
        lies = _place_of(directory)
        of_store, belongs = _belongs(directory, lies)
        if of_store in (None, store_id) and lies is not None and belongs in (None, lies):
            taken.add(lies)
        else:
            misplaced.append((directory, belongs if of_store in (None, store_id) else None))
    # All leave their places before the first is put back, and not by way of staging/, which opening clears.
    moves: list[tuple[Path, Place]] = []
    for directory, belongs in misplaced:
        if belongs is None or belongs in taken:
            apart = _apart(path, directory, "")
            account.say(f"{directory.relative_to(path)}: belongs to no free place, now {apart.relative_to(path)}")
        else:
            taken.add(belongs)
            moves.append((_apart(path, directory, _ON_ITS_WAY), belongs))
    for directory, place in moves:
        target = partition_path(path, place.start_ms, place.generation)
        make_directory(target.parent)
        move(directory, target)
        account.say(f"{target.relative_to(path)}: put back, it lay elsewhere")


def _apart(path: Path, directory: Path, prefix: str) -> Path:
    """Move a directory to the quarantine; one on its way stays, if an earlier repair has brought it that far."""
    if prefix and directory.parent.name == QUARANTINE:
        return directory
    number = 1
    name = f"{prefix}{directory.parent.name}-{directory.name}"
    while (target := path / QUARANTINE / f"{name}-{number}").exists():
        number += 1
    make_directory(target.parent)
    move(directory, target)
    return target


def _place_of(directory: Path) -> Place | None:
    try:
        return Place(parse_directory_name(directory.parent.name), int(directory.name[1:]))
    except ValueError:
        return None


def _belongs(directory: Path, lies: Place | None) -> tuple[bytes | None, Place | None]:
    """(the store, the place) that a directory belongs to, None for what it does not say."""
    try:
        for key, value in _records(directory):
            try:
                if key == fmt.PARTITION_INFO_KEY:
                    info = PartitionInfo.unpack(fmt.unseal(key, value))
                    return info.store_id, Place(info.start_ms, info.generation)
                run = Run("", key, value)
            except (CorruptRecord, CorruptEntry):
                continue
            if run.kind == RunKind.MESSAGES:  # the description is gone, or cannot be read
                return None, Place(run.base_ms, 1 if lies is None else lies.generation)
    except (DuelogError, OSError):
        pass
    return None, None


def _records(directory: Path) -> Iterator[tuple[bytes, bytes]]:
    """The description and the runs, as far as their bytes can be reached; LMDB reads none of them."""
    if (directory / "data.mdb").is_file():
        for key, value in pages.read_values(directory):
            if key == fmt.PARTITION_INFO_KEY or (key[:1] == fmt.RUN_PREFIX and len(key) == fmt.RUN_KEY_BYTES):
                yield key, value
