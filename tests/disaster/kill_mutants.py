"""Wrong engines, patched into one child of the kill test only, that the test must find out.

Each does a pair of steps in the wrong order, or acknowledges before the disk has it, and reaches the engine's own
failpoint between the two. The patches wrap the engine instead of copying it, so that they go on being about the
engine as it is.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyroaring import BitMap

from duelog import opening
from duelog.cleanup import adoption, log_claims
from duelog.cleanup.deletion import deletable
from duelog.markers.firing.firing import Firing
from duelog.partitions.partition_set import PartitionSet
from duelog.sending.wal_segments import Checkpoint
from duelog.store.codec.format import Table, counter_key, pack_u64
from duelog.store.files.directory import move_to_trash
from duelog.store.files.failpoints import reach
from duelog.store.log import catalog
from duelog.store.wal.segment import GroupContent, Row, RowKind
from duelog.store.wal.write_ahead_log import WriteAheadLog
from duelog.store.wal.write_batch import single_rows
from duelog.subscription import Subscription
from duelog.upkeep import maintenance, reclaiming


def _patch(owner: object, name: str, wrap: Callable[[Any], Any]) -> None:
    """Put `wrap(what is there)` in the place of an attribute."""
    setattr(owner, name, wrap(getattr(owner, name)))


class _Withholding:
    """A transaction that keeps the frontiers to itself."""

    def __init__(self, transaction: Any, withheld: dict[bytes, bytes]) -> None:
        self._transaction = transaction
        self._withheld = withheld

    def put(self, key: bytes, fields: bytes) -> None:
        if key[0] == Table.FRONTIER:
            self._withheld[key] = fields
        else:
            self._transaction.put(key, fields)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transaction, name)


class _Discard(Exception):
    """Ends a transaction of which nothing is wanted."""


class _SplitMain:
    """Firing's way to store, in which markers and frontiers are two transactions of the main environment."""

    def __init__(self, main: Any, frontier_first: bool) -> None:
        self._main = main
        self._frontier_first = frontier_first

    def write(self, work: Callable[[Any], Any], **options: Any) -> Any:
        withheld: dict[bytes, bytes] = {}

        def markers(transaction: Any) -> Any:
            withheld.clear()
            return work(_Withholding(transaction, withheld))

        def discard(transaction: Any) -> None:
            markers(transaction)
            raise _Discard

        def frontiers(transaction: Any) -> None:
            for key, fields in withheld.items():
                transaction.put(key, fields)

        if not self._frontier_first:
            value = self._main.write(markers)
            reach("fire.after")
            self._main.write(frontiers)
            return value
        try:
            self._main.write(discard)
        except _Discard:
            self._main.write(frontiers)
        reach("fire.after")
        return self._main.write(markers)


def _split_firing(frontier_first: bool) -> None:

    def wrap(commit: Any) -> Any:
        def split(self: Any, *arguments: Any) -> None:
            storage = self._storage
            self._storage = replace(storage, main=_SplitMain(storage.main, frontier_first))
            try:
                commit(self, *arguments)
            finally:
                self._storage = storage

        return split

    _patch(Firing, "_commit", wrap)


def frontier_after_markers() -> None:
    """The markers are committed, then the frontier: a crash between fires the same messages again."""
    _split_firing(frontier_first=False)


def frontier_before_markers() -> None:
    """The frontier is committed, then the markers: a crash between loses messages."""
    _split_firing(frontier_first=True)


class _MovesFirst:
    """The main environment as deletion sees it: the directory is in trash/ before the record is written."""

    def __init__(self, main: Any, path: Path, directory: Path) -> None:
        self._main = main
        self._path = path
        self._directory = directory

    def write(self, work: Callable[[Any], Any], **options: Any) -> Any:
        if self._directory.exists():
            move_to_trash(self._path, self._directory)
            reach("delete.moved")
        return self._main.write(work, **options)

    def flush(self) -> None:
        self._main.flush()


def trash_before_record() -> None:
    """A partition's directory is moved to trash/ before its deletion is recorded."""

    def wrap(delete: Any) -> Any:
        def move_first(storage: Any, partition: Any) -> bool:
            if partition.start_ms not in deletable(storage.main):
                return False
            main: Any = _MovesFirst(storage.main, storage.path, partition.path.parent)
            wrong: bool = delete(replace(storage, main=main), partition)
            return wrong

        return move_first

    _patch(maintenance, "delete_partition", wrap)


def vacant_ones_forgotten() -> None:
    """The checkpoint makes no directory, and releases the segment with the registrations all the same."""
    _patch(PartitionSet, "unapplied", lambda all_of: lambda self: [each for each in all_of(self) if not each.vacant])


def ack_before_disk() -> None:
    """`ack(durable=True)` does not wait for the disk."""

    def wrap(acknowledge: Any) -> Any:
        def hasty(self: Any, work: Any, *, durable: bool = False, counted: bool = True) -> Any:
            return acknowledge(self, work, counted=counted)

        return hasty

    _patch(Subscription, "_acknowledge", wrap)


def no_sweep() -> None:
    """Opening does not finish what a crash left."""
    _patch(opening, "sweep", lambda _: lambda path, main: None)


def remove_before_record() -> None:
    """The old generation is removed when the new one has its name, before the catalog names that."""

    def wrap(move_: Any) -> Any:
        def move_and_remove(source: Path, target: Path) -> None:
            move_(source, target)
            for generation in target.parent.iterdir():
                if generation != target:
                    shutil.rmtree(generation)

        return move_and_remove

    _patch(adoption, "move", wrap)


def drop_what_anybody_has_acknowledged() -> None:
    """Compaction drops what some subscription has acknowledged, not every one."""

    def wrap(by_all: Any) -> Any:
        def by_anybody(cursors: Any, ledger_id: int, tail: int) -> BitMap:
            return BitMap.union(BitMap(), *(by_all([cursor], ledger_id, tail) for cursor in cursors))

        return by_anybody

    _patch(log_claims, "acknowledged_by_all", wrap)
    _patch(adoption, "_taken_back", lambda _: lambda raw, topic_id, relied_on: None)
    _patch(reclaiming.Adopting, "_gone_back", lambda _: lambda self, relied_on: None)


def released_before_applying() -> None:
    """The record of the oldest segment moves on before the partitions have its rows."""

    def wrap(finish: Any) -> Any:
        def record_first(self: Any) -> None:
            oldest = pack_u64(self.segment + 1)
            self._main.commit(lambda transaction: transaction.put(counter_key(catalog.WAL), oldest))
            self._main.sync()
            reach("wal.released")
            finish(self)

        return record_first

    _patch(Checkpoint, "finish", wrap)


def no_replay() -> None:
    """Opening leaves what the write-ahead log holds where it is, and goes on behind it."""
    for name in ("fill_main", "fill_partitions"):
        _patch(opening.Replay, name, lambda _: lambda *arguments: None)


def replays_what_is_applied() -> None:
    """Opening takes every row of the write-ahead log for unapplied."""
    _patch(opening, "applied_position", lambda _: lambda raw: -1)


def group_in_parts() -> None:
    """The rows of a send are a group each, but for those with the numbers of a producer."""

    def wrap(append: Any) -> Any:
        def one_by_one(self: Any, rows: Any, *, flush: bool) -> Any:
            parts = [GroupContent.of([row]) for row in single_rows(rows.rows())]
            numbered = any(row.kind == RowKind.UNITE and row.key[0] == Table.SEQUENCE for row in rows.rows())
            if numbered or not self.active.fits(sum(part.size for part in parts)):
                return append(self, rows, flush=flush)
            for part in parts[:-1]:
                append(self, part, flush=flush)
                reach("wal.ended")  # rare elsewhere
            return append(self, parts[-1], flush=flush)

        return one_by_one

    _patch(WriteAheadLog, "append", wrap)


def _appending_without(left_out: Callable[[Row], bool]) -> None:
    def wrap(append: Any) -> Any:
        def without_some(self: Any, rows: Any, *, flush: bool) -> Any:
            return append(self, GroupContent.of([row for row in rows.rows() if not left_out(row)]), flush=flush)

        return without_some

    _patch(WriteAheadLog, "append", wrap)


def numbers_left_out() -> None:
    """The numbers of a named producer are known in memory, and not in the group that stores their messages."""
    _appending_without(lambda row: row.key[:1] == bytes([Table.SEQUENCE]))


def keys_left_out() -> None:
    """The record of a deduplication key is known in memory, and not in the group that stores its message."""
    _appending_without(lambda row: row.key[:1] == bytes([Table.KEY]))


def _replaying_without(left_out: Callable[[Row], bool]) -> None:
    _patch(opening, "add_row", lambda add: lambda memtable, row: None if left_out(row) else add(memtable, row))


def deletions_forgotten() -> None:
    """Opening does not delete what the write-ahead log says is deleted."""
    _replaying_without(lambda row: row.kind == RowKind.DELETE)


def bits_forgotten() -> None:
    """Opening leaves out what the write-ahead log changes in a bitmap of entries."""
    _replaying_without(lambda row: row.kind in (RowKind.UNITE, RowKind.SUBTRACT) and row.key[0] != Table.SEQUENCE)


def apply(name: str) -> None:
    """Make this process's engine wrong in the way `name`."""
    globals()[name]()
