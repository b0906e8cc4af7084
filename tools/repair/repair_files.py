"""Files and directories under repair, before LMDB opens anything: what is broken in them may kill the process.

A directory says of itself which store, partition and generation it is of; where it does not, the runs in it say which
partition. One that lies elsewhere is put back. One that belongs to no free place, because another is rightly there or
because it is of another store, goes to `quarantine/` in the store, which nothing else touches: nothing is removed.

A file with broken pages is written anew from what can be reached. The account of a repair has its steps, what it
discarded with the bytes, and what that means for messages.
"""

import base64
import json
import os
from collections.abc import Callable
from contextlib import closing, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from ... import Finding
from ...partitions.partition import partition_path
from ...partitions.timespan import parse_directory_name
from ...store.codec import format as fmt
from ...store.codec.format import PartitionInfo
from ...store.codec.run import Run, RunKind
from ...store.env.body_file import DIRECTORY as BODIES
from ...store.env.body_file import body_file, body_files
from ...store.env.environment import Environment
from ...store.env.transaction import LmdbTransaction as Transaction
from ...store.errors import BrokenInvariant, CorruptEntry, CorruptRecord, DamagedStore, DuelogError
from ...store.files.directory import make_directory, move, remove_tree, sync_directory
from ...store.files.pages import read_values
from ...survey.contents import was_used
from ..store_check import check_file

P = ParamSpec("P")
T = TypeVar("T")


class Discarded(NamedTuple):
    """Something that could not be read: `entry_id` None for a record of the catalog, `raw` as far as it is there."""

    environment: str
    ledger_id: int
    entry_id: int | None
    reason: str
    raw: bytes


@dataclass(slots=True)
class Tally:
    """One kind of thing: `found` before the repair, as far as anything tells of it, is `kept` and `discarded`."""

    found: int = 0
    kept: int = 0
    discarded: int = 0


@dataclass(slots=True)
class RepairReport:
    """The steps and the figures of a repair; empty where nothing was to be repaired.

    actions: its steps in words. given_up: lines of its file, each a record, an entry or a range of entries. left: what
    it could not mend. lost: messages that are not delivered any more to a subscription that they were for, each counted
    once. again: at most so many messages may be delivered though they were acknowledged. uncancelled: at most so many
    may be delivered though they were cancelled. subscriptions: those whose place was lost, with what became of them.
    kinds: how much of each kind was found, kept and discarded: records; entries of partitions, and of main logs, those
    of a range one by one; runs that belong to no log; entries that the write-ahead log has of partitions that are gone.
    """

    actions: list[str] = field(default_factory=list)
    given_up: int = 0
    left: list[Finding] = field(default_factory=list)
    lost: int = 0
    again: int = 0
    uncancelled: int = 0
    subscriptions: list[str] = field(default_factory=list)
    kinds: dict[str, Tally] = field(default_factory=dict)


class Account:
    """The report of a repair under way; what is discarded goes to the file at once."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self.report = RepairReport()

    def write(
        self, environment: Environment, step: Callable[Concatenate[Transaction, P], T], *args: P.args, **named: P.kwargs
    ) -> T:
        """Have a step done in one transaction, and noted once, though it may run more than once."""
        before = self.report
        size = self._output.stat().st_size if self._output.exists() else 0

        def noted(transaction: Transaction) -> T:
            self.report = deepcopy(before)
            if self._output.exists():
                os.truncate(self._output, size)
            return step(transaction, *args, **named)

        return environment.commit(noted)

    def say(self, action: str) -> None:
        self.report.actions.append(action)

    def count(self, kind: str, found: int, discarded: int) -> None:
        """Note how many of a kind were found, and how many of them are discarded."""
        if not 0 <= discarded <= found:
            raise BrokenInvariant(f"{discarded} {kind} are discarded, {found} were found")
        tally = self.report.kinds.setdefault(kind, Tally())
        tally.found += found
        tally.discarded += discarded
        tally.kept += found - discarded

    def discard(self, lost: Discarded) -> None:
        """Add a line to the file."""
        self.report.given_up += 1
        fields = {"environment": lost.environment, "ledger": lost.ledger_id, "entry": lost.entry_id}
        line = {**fields, "reason": lost.reason, "raw": base64.b64encode(lost.raw).decode()}
        with self._output.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def subscription(self, topic: str, name: str, fate: str) -> None:
        """Note what became of a subscription whose place was lost."""
        self.report.subscriptions.append(f"{topic}, subscription {name}: {fate}")
        self.say(self.report.subscriptions[-1])


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
    for directory, _ in misplaced:
        with suppress(OSError):  # not empty
            directory.parent.rmdir()
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
