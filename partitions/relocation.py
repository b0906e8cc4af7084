"""Relocation: a partition goes away, and comes back (away.py has the order of writes)."""

import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple, Self

import lmdb
import numpy as np
import numpy.typing as npt

from ..store.codec import format as fmt
from ..store.codec.run import Int64s, Run, pack_skip, skipped_before
from ..store.env.body_file import body_files
from ..store.env.environment import Environment
from ..store.env.held_read import HeldRead
from ..store.env.memtable import applied_position
from ..store.env.transaction import LmdbTransaction
from ..store.errors import BrokenInvariant, DamagedStore
from ..store.files.directory import (
    discard_tree,
    move,
    move_to_trash,
    remove_tree,
    sync_directory,
    write_file,
)
from ..store.files.failpoints import reach
from ..store.files.system_errors import explained
from ..store.log import catalog
from ..store.log.ledger import applied_tail, find_tails, named_bodies
from .away import AWAY, Away, directory_in_use, rests
from .partition import Partition, partition_path
from .partition_set import PartitionSet
from .timespan import directory_name

_BYTES_A_COMMIT = 1 << 24
_SNAPSHOTS = (fmt.Table.SNAPSHOT_PART, fmt.Table.SNAPSHOT_META)


@contextmanager
def applied_rows(environment: Environment) -> Iterator[lmdb.Transaction]:
    """Read what is applied to an environment, without what the log has besides."""
    held: HeldRead = environment.hold()
    try:
        yield held.raw
    finally:
        held.release()


def _rows(raw: lmdb.Transaction) -> Iterator[tuple[bytes, bytes]]:
    """Every row but those of snapshots, which are made again."""
    for key, value in raw.cursor():
        if key[0] not in _SNAPSHOTS:
            yield bytes(key), bytes(value)


def _logs(raw: lmdb.Transaction) -> list[int]:
    return [fmt.unpack_u64(fields) for _, fields in catalog.rows(raw, fmt.prefix(fmt.Table.LOG))]


class Ends(NamedTuple):
    """Where the logs of a partition end in an environment: ledger ids, and the id of each one's next entry."""

    ledgers: npt.NDArray[np.uint64]
    ends: Int64s

    @classmethod
    def of(cls, raw: lmdb.Transaction, name: str) -> Self:
        """Those of what `raw` reads. 2 us a log."""
        _, ledgers = catalog.log_columns(raw)
        return cls(ledgers, find_tails(raw, name, ledgers))


def build_rest(raw: lmdb.Transaction, name: str, start_ms: int, directory: Path, away: Away, ends: Ends) -> None:
    """Build a rest of what `raw` reads: all behind `ends`. Raises StoreFull, CorruptEntry, DamagedStore."""
    tails = dict(zip(ends.ledgers.tolist(), ends.ends.tolist(), strict=True))
    for ledger_id in _logs(raw):
        tails.setdefault(ledger_id, 0)

    def begin(transaction: LmdbTransaction) -> None:
        for key, value in takewhile(lambda row: row[0] < fmt.RUN_PREFIX, _rows(raw)):
            transaction.raw.put(key, value)
        for ledger_id, end in sorted(tails.items()):
            if end:
                key = fmt.run_key(ledger_id, end - 1)
                transaction.insert_run(key, pack_skip(key, start_ms, end - 1), 1)

    with closing(Environment(directory, name=name, durability="none", create=True)) as rest:
        rest.commit(begin)
    join(raw, name, directory)
    write_file(directory / AWAY, away.pack())


def join(raw: lmdb.Transaction, name: str, directory: Path) -> None:
    """Put small records, and the runs behind the ends of logs, into an environment that has what is before those.

    Raises DamagedStore where runs between the two are missing, CorruptEntry, StoreFull.
    """
    with closing(Environment(directory, name=name, durability="none")) as whole:
        with applied_rows(whole) as before:
            tails = {ledger_id: applied_tail(before, name, ledger_id) for ledger_id in _logs(raw)}
        rows = _rows(raw)
        while some := list(_some(rows)):
            tails = whole.commit(partial(_join_rows, some, name, directory, tails))
    for ledger_id, end in tails.items():
        if end != applied_tail(raw, name, ledger_id):
            raise DamagedStore(directory, f"ledger {ledger_id} ends at {end}, before what was appended to it")


def _some(rows: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """The rows of one commit."""
    size = 0
    while size < _BYTES_A_COMMIT and (row := next(rows, None)) is not None:
        size += len(row[1])
        yield row


def _join_rows(
    rows: list[tuple[bytes, bytes]],
    name: str,
    directory: Path,
    before: dict[int, int],
    transaction: LmdbTransaction,
) -> dict[int, int]:
    """Store small records, and the runs behind the ends of logs; the ends afterwards."""
    tails = dict(before)
    for key, value in rows:
        if key < fmt.RUN_PREFIX:
            transaction.raw.put(key, value)
            continue
        run = Run(name, key, value)
        end = tails[run.ledger_id]
        if run.first_entry >= end:
            if run.first_entry - skipped_before(value) != end:
                raise DamagedStore(directory, f"ledger {run.ledger_id} ends at {end}, and goes on at {run.first_entry}")
            transaction.insert_run(key, value, run.count)
            tails[run.ledger_id] = run.limit
    return tails


def give_back(
    store: Path, partitions: PartitionSet, partition: Partition, generation: int, away: Away, ends: Ends
) -> bool:
    """Give back the rows of a generation of a partition that are in the objects of `away`, where logs end at `ends`.

    False, and nothing is done: it names bodies in a file that is none of them, is at another generation by now, or the
    store is being copied. Raises StoreFull, CorruptEntry, DamagedStore, StoreFailed.
    """
    staged = store / "staging" / f"away-{directory_name(partition.start_ms)}-{uuid.uuid4().hex[:8]}"
    with partitions.lease(partition, partial=True), partitions.relocating:
        environment = partition.environment
        if partitions.copying.locked():  # the copy may hold this directory, whose name the day has again when it comes
            return False
        if partition.outdated or environment.is_vacant or partition.generation != generation:
            return False
        if partition.memtable.directory is not None:
            return False  # a body may be on its way to the directory
        before = environment.path
        last = int(next((each.name[1:] for each in rests(before.parent)), "0"))
        target = before.with_name(f"a{last + 1:06d}")
        try:
            with environment.superseded(), applied_rows(environment) as raw:
                there = {piece.ledger: piece.size for piece in away.pieces}
                is_named = bool(partition.memtable and body_files(before))  # by a row that an opening before has left
                if is_named or not named_bodies(raw, partition.name, before).items() <= there.items():
                    raise _OtherBodies
                if applied_position(raw) < away.applied:
                    raise BrokenInvariant(f"{partition.name} lacks rows that its objects have")
                build_rest(raw, partition.name, partition.start_ms, staged, away, ends)
                reach("away.staged")
                with _switching(store, partition, environment):
                    move(staged, target)
                    reach("away.beside")
                    if partition.away is None:
                        move_to_trash(store, before)
                    partitions.relocate(partition, target, away)
                reach("away.gone")
        except _OtherBodies:
            return False
        finally:
            discard_tree(staged)
        _remove(store, before)
    return True


def come_back(store: Path, partitions: PartitionSet, partition: Partition, away: Away, staged: Path) -> None:
    """Have a partition that is away be in the directory of its generation again, unless it has another one by now.

    staged: a directory in staging/ with the rows of all objects of `away`, joined; it is taken. Raises DamagedStore
    where they are not those before the rest, StoreFull, StoreFailed.
    """
    with partitions.lease(partition, partial=True), partitions.relocating:
        environment = partition.environment
        if partition.away is not away or partition.outdated:
            return
        with environment.superseded():
            with applied_rows(environment) as raw:
                join(raw, partition.name, staged)
            sync_directory(staged)
            reach("away.joined")
            target = partition_path(store, partition.start_ms, partition.generation)
            with _switching(store, partition, environment):
                move(staged, target)
                partitions.relocate(partition, target, None)
            reach("away.back")
        for rest in rests(target.parent):
            _remove(store, rest)


class _OtherBodies(Exception):
    """The partition names bodies in a file that no object is."""


@contextmanager
def _switching(store: Path, partition: Partition, environment: Environment) -> Iterator[None]:
    """Have the environment in use fail where the block is broken off, and another directory counts by then."""
    try:
        with explained(environment.path):
            yield
    except BaseException as error:
        generation = partition_path(store, partition.start_ms, partition.generation)
        if environment.path == partition.path != directory_in_use(generation):
            environment.fail(error)
        raise


def _remove(store: Path, directory: Path) -> None:
    """Remove a directory that does not count any more; the next opening removes what is left of it."""
    with suppress(OSError):
        remove_tree(move_to_trash(store, directory))
