"""Writing snapshots into a partition's environment, in bounded transactions, beside producers.

The order is what makes a crash harmless: parts, then the metadata in a transaction after the last of them, then the
snapshot before goes, its metadata first. So metadata that can be read stands for a complete snapshot, at any instant
and after any crash, and from the first snapshot on there always is one.

A snapshot has the cancellations and admissions that memory had when its index was cut. A power cut must not take them
back from the log and leave them in the snapshot: a message cancelled here and admitted there would be in neither. So
they are on disk before the metadata: an environment flushes the log before it commits, where that was not done yet.

Snapshots of small logs share transactions, up to the size of one part, so that a thousand topics are not two thousand
commits. What a crash left of a snapshot (parts without metadata) is removed when the log's next one is written.

Does not decide when a snapshot is due, and holds no lock: a commit at a time is shared with appends.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..partitions.index.index_cut import Piece
from ..store.batches import batches
from ..store.codec.format import Table, snapshot_meta_key, snapshot_part_key, split_snapshot_key
from ..store.codec.frontier import FrontierRecord
from ..store.env.environment import Environment
from ..store.env.memtable import Reads
from ..store.env.transaction import LmdbTransaction
from ..store.files.failpoints import reach
from .snapshot_format import Metadata, PackedPart, PartRecord, pack_parts, seal_part, snapshot_ids, snapshot_keys

_REMOVED_PARTS = 16
"""Parts' worth of bytes removed in one transaction."""
_REMOVED_KEYS = 512
"""Most keys removed in one transaction."""


class Cut(NamedTuple):
    """A delay index as of one instant, which a snapshot is made of.

    `pieces` hold the entries below `tail` that come after the frontier's C and were not cancelled, all of them; none
    of the entries below `tail` was late (appended at or before C) and not yet fired.
    """

    start_ms: int
    bucket_ms: int
    tail: int
    frontier: FrontierRecord
    pieces: Sequence[Piece]

    @property
    def ledger_id(self) -> int:
        return self.frontier.ledger_id

    @property
    def stored_bytes(self) -> int:
        return sum(len(piece.bitmap) for piece in self.pieces)


class SnapshotWritten(NamedTuple):
    """A complete snapshot."""

    ledger_id: int
    snapshot_id: int
    tail: int
    parts: int
    stored_bytes: int
    entries: int


def write_snapshot(environment: Environment, cut: Cut, part_bytes: int, created_ms: int) -> SnapshotWritten:
    """Write one snapshot and remove those before it. Raises StoreFull, StoreFailed; then those before still stand."""
    (written,) = filter(None, write_snapshots(environment, [cut], part_bytes, created_ms))
    return written


def write_snapshots(
    environment: Environment,
    cuts: Iterable[Cut],
    part_bytes: int,
    created_ms: int,
) -> Iterator[SnapshotWritten | None]:
    """Write snapshots of many logs of one partition, one transaction at each step; None: it completes no snapshot.

    The caller may do other things between steps, or drop the iterator: then what is begun is as after a crash.
    """
    for group in batches(cuts, lambda cut: cut.stored_bytes, part_bytes):
        yield from _write_group(environment, group, part_bytes, created_ms)


class _Writing:
    """A snapshot that is being written."""

    def __init__(self, environment: Environment, cut: Cut, part_bytes: int) -> None:
        self.cut = cut
        in_order = sorted(cut.pieces, key=lambda piece: piece.start_ms)  # what an index has nearest is cut last
        self.parts = pack_parts(in_order, part_bytes)
        self.records: list[PartRecord] = []
        with environment.read() as raw:
            complete = snapshot_ids(raw, Table.SNAPSHOT_META, cut.ledger_id)
            begun = snapshot_ids(raw, Table.SNAPSHOT_PART, cut.ledger_id)
        self.snapshot_id = max((0, *complete, *begun)) + 1
        self.key = snapshot_meta_key(cut.ledger_id, self.snapshot_id)
        self.torn = set(begun) - set(complete)
        """Ids of snapshots that were never completed."""

    def metadata(self, created_ms: int) -> Metadata:
        cut, frontier = self.cut, self.cut.frontier
        return Metadata(
            cut.bucket_ms,
            cut.start_ms,
            cut.tail,
            frontier.due_ms,
            frontier.entry_id,
            frontier.absorbed_end,
            max(created_ms, 0),
            tuple(self.records),
        )


def _write_group(
    environment: Environment, group: list[Cut], part_bytes: int, created_ms: int
) -> Iterator[SnapshotWritten | None]:
    writings = [_Writing(environment, cut, part_bytes) for cut in group]
    with environment.read() as raw:
        torn = [
            row
            for writing in writings
            for row in _keys(raw, writing.cut.ledger_id)
            if split_snapshot_key(row[0])[1] in writing.torn
        ]
    for _ in _remove(environment, torn, part_bytes):
        yield None
    parts = ((writing, part) for writing in writings for part in writing.parts)
    for batch in batches(parts, lambda each: each[1].stored_bytes, part_bytes):
        _put_parts(environment, batch)
        yield None

    def complete(transaction: LmdbTransaction) -> None:
        for writing in writings:
            transaction.put(writing.key, writing.metadata(created_ms).pack())

    environment.commit(complete)
    reach("snapshot.meta")
    for writing in writings:
        metadata = writing.metadata(created_ms)
        yield SnapshotWritten(
            writing.cut.ledger_id,
            writing.snapshot_id,
            metadata.tail,
            len(metadata.parts),
            metadata.stored_bytes,
            metadata.entries,
        )
    with environment.read() as raw:
        replaced = [
            row
            for writing in writings
            for row in _keys(raw, writing.cut.ledger_id)
            if split_snapshot_key(row[0])[1] != writing.snapshot_id
        ]
    for _ in _remove(environment, replaced, part_bytes):
        yield None


def _put_parts(environment: Environment, batch: list[tuple[_Writing, PackedPart]]) -> None:
    sealed = []
    for writing, part in batch:
        key = snapshot_part_key(writing.cut.ledger_id, writing.snapshot_id, len(writing.records))
        value, record = seal_part(key, part)
        writing.records.append(record)
        sealed.append((key, value))

    def put(transaction: LmdbTransaction) -> None:
        for key, value in sealed:
            transaction.raw.put(key, value)

    environment.commit(put)
    reach("snapshot.part")


# -- removing --------------------------------------------------------------------------------------


def remove_snapshots(environment: Environment, part_bytes: int = 1 << 20) -> int:
    """Remove every snapshot in a partition; returns how many parts and metadata there were.

    Bounded transactions, none where there is nothing. Raises StoreFull, StoreFailed.
    """
    with environment.read() as raw:
        every = list(_keys(raw, None))
    return sum(_remove(environment, every, part_bytes))


def _keys(raw: Reads, ledger_id: int | None) -> Iterator[tuple[bytes, int]]:
    for table in (Table.SNAPSHOT_META, Table.SNAPSHOT_PART):
        yield from snapshot_keys(raw, table, ledger_id)


def _remove(environment: Environment, found: list[tuple[bytes, int]], part_bytes: int) -> Iterator[int]:
    """Remove (key, bytes of its value), all metadata before any part; yields the count of each transaction."""
    found.sort(key=lambda pair: pair[0][0] != Table.SNAPSHOT_META)
    for batch in batches(found, lambda pair: pair[1], _REMOVED_PARTS * part_bytes, _REMOVED_KEYS):

        def delete(transaction: LmdbTransaction, batch: list[tuple[bytes, int]] = batch) -> int:
            return sum(transaction.delete(key) for key, _ in batch)

        yield environment.commit(delete)
