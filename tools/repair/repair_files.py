"""Files and directories under repair, before LMDB opens anything: what is broken in them may kill the process.

A directory says of itself which store, partition and generation it is of; where it does not, the runs in it say which
partition. One that lies elsewhere is put back. One that belongs to no free place, because another is rightly there or
because it is of another store, goes to `quarantine/` in the store, which nothing else touches: nothing is removed.

A file with broken pages is written anew from what can be reached.
"""

import os
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from ...partitions.partition import partition_path
from ...partitions.timespan import parse_directory_name
from ...store.codec import format as fmt
from ...store.codec.format import PartitionInfo
from ...store.codec.run import Run, RunKind
from ...store.env.body_file import DIRECTORY as BODIES
from ...store.env.body_file import body_file, body_files
from ...store.env.environment import Environment
from ...store.env.transaction import LmdbTransaction as Transaction
from ...store.errors import CorruptEntry, CorruptRecord, DamagedStore, DuelogError
from ...store.files.directory import make_directory, move, remove_tree, sync_directory
from ...store.files.pages import read_values
from ...survey.contents import was_used
from ..store_check import check_file
from .repair_report import Account

_QUARANTINE = "quarantine"
_ON_ITS_WAY = "placing-"


class Place(NamedTuple):
    """The place of a directory: start of the partition, generation."""

    start_ms: int
    generation: int


def generations(path: Path) -> list[tuple[Place, Path]]:
    """Directories of generations that lie where a partition's may, by start and generation."""
    found = [(_place_of(directory), directory) for directory in sorted((path / "partitions").glob("*/g*"))]
    return [(place, directory) for place, directory in found if place is not None and directory.is_dir()]


def _place_of(directory: Path) -> Place | None:
    try:
        return Place(parse_directory_name(directory.parent.name), int(directory.name[1:]))
    except ValueError:
        return None


def require_main(path: Path) -> None:
    """Raise DamagedStore where nothing of the main environment can be reached."""
    directory = path / "main"
    reached = read_values(directory) if (directory / "data.mdb").is_file() else ()
    if any(key != fmt.PARTITION_INFO_KEY for key, _ in reached):
        return
    partitions = sum(was_used(directory) for _, directory in generations(path))
    raise DamagedStore(
        directory,
        "holds nothing that can be read, and nothing else tells what has fired, what was cancelled and what "
        f"was read; nothing was changed. {partitions} partitions with messages are there: put main/ of a backup "
        "beside them, and repair again",
    )


def put_back(path: Path, store_id: bytes, account: Account) -> None:
    """Have every generation lie where it belongs. REQUIRES: nothing is open. O(directories)."""
    taken: set[Place] = set()
    misplaced: list[tuple[Path, Place | None]] = []
    for directory in sorted([*path.glob("partitions/*/g*"), *path.glob(f"{_QUARANTINE}/{_ON_ITS_WAY}*")]):
        if not directory.is_dir():
            continue
        lies = _place_of(directory)
        of_store, belongs = _belongs(directory, lies)
        if of_store not in (None, store_id):
            misplaced.append((directory, None))
        elif lies is not None and belongs in (None, lies):
            taken.add(lies)
        else:
            misplaced.append((directory, belongs))
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
        target = partition_path(path, *place)
        make_directory(target.parent)
        move(directory, target)
        account.say(f"{target.relative_to(path)}: put back, it lay elsewhere")


def _apart(path: Path, directory: Path, prefix: str) -> Path:
    """Move a directory to the quarantine; one on its way stays, if an earlier repair has brought it that far."""
    if prefix and directory.parent.name == _QUARANTINE:
        return directory
    number = 1
    name = f"{prefix}{directory.parent.name}-{directory.name}"
    while (target := path / _QUARANTINE / f"{name}-{number}").exists():
        number += 1
    make_directory(target.parent)
    move(directory, target)
    return target


def _belongs(directory: Path, lies: Place | None) -> tuple[bytes | None, Place | None]:
    """(the store, the place) that a directory belongs to, None for what it does not say."""
    try:
        for key, value in read_values(directory) if (directory / "data.mdb").is_file() else ():
            try:
                if key == fmt.PARTITION_INFO_KEY:
                    info = PartitionInfo.unpack(fmt.unseal(key, value))
                    return info.store_id, Place(info.start_ms, info.generation)
                if key[:1] == fmt.RUN_PREFIX and len(key) == fmt.RUN_KEY_BYTES:
                    run = Run("", key, value)
                    if run.kind == RunKind.MESSAGES:  # the description is gone, or cannot be read
                        return None, Place(run.base_ms, 1 if lies is None else lies.generation)
            except (CorruptRecord, CorruptEntry):
                continue
    except (DuelogError, OSError):
        pass
    return None, None


def rewrite_broken(path: Path, directory: Path, name: str, info: PartitionInfo, account: Account) -> None:
    """Write a file with broken pages, or none, anew from what can be reached of it."""
    if directory.exists() and not list(check_file(directory)):
        return
    values = list(read_values(directory)) if (directory / "data.mdb").is_file() else []
    staged = path / "staging" / f"repair-{name.replace(' ', '-')}"
    remove_tree(staged)
    make_directory(staged.parent)

    def fill(transaction: Transaction) -> None:
        transaction.put(fmt.PARTITION_INFO_KEY, info.pack())
        for key, value in values:
            if 0 < len(key) < 511 and key != fmt.PARTITION_INFO_KEY:
                transaction.raw.put(key, value)

    with closing(Environment(staged, name=name, create=True)) as environment:
        environment.commit(fill)
    for ledger_id, bodies in body_files(directory).items():
        make_directory(staged / BODIES)
        os.link(bodies, body_file(staged, ledger_id))
    if (staged / BODIES).exists():
        sync_directory(staged / BODIES)
    make_directory(directory.parent)
    if directory.exists():
        trash = path / "trash" / f"repair-{directory.parent.name}-{directory.name}"
        make_directory(trash.parent)
        remove_tree(trash)
        move(directory, trash)
    move(staged, directory)
    account.say(f"{name}: written anew with the {len(values)} records that could be reached")


def describe(environment: Environment, info: PartitionInfo, account: Account) -> None:
    """Have an environment say of itself which it is."""
    try:
        fields = environment.get(fmt.PARTITION_INFO_KEY)
    except CorruptRecord:
        fields = None
    if fields != info.pack():
        environment.commit(lambda transaction: transaction.put(fmt.PARTITION_INFO_KEY, info.pack()))
        account.say(f"{environment.name}: described anew")
