"""Adoption: a finished generation takes the place of the one that it was made from.

Only a process that holds the store's lock adopts: the one that has the store open, at its next tick, or the next one
to open it. The generation is moved to its final name, then one transaction of the main environment names it, then the
old one is removed; after a crash the catalog says which of the two is the partition, and opening removes the other.

What the generation was planned on is looked at again inside that transaction: the partition is closed and of the
generation that was copied, and every acknowledgement that bodies were dropped for still stands, for every
subscription there is by now. A generation for which that does not hold is thrown away: a subscription went back, or
one came into being that has still to read what was dropped.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from pyroaring import BitMap

from ..partitions.away import Away, directory_in_use
from ..partitions.partition import partition_path
from ..partitions.partition_set import PartitionSet
from ..partitions.timespan import directory_name
from ..store.codec import format as fmt
from ..store.codec.format import LedgerState, OriginRecord, PartitionInfo, PartitionRecord, PartitionState, Relied
from ..store.env.body_file import length_of
from ..store.env.environment import Environment
from ..store.env.memtable import Reads
from ..store.env.transaction import Transaction
from ..store.errors import CorruptRecord, DuelogError, StoreFull
from ..store.files.directory import move
from ..store.files.failpoints import reach
from ..store.log import catalog
from .compaction import READY, ready_generations
from .log_claims import acknowledged_by_all
from .sweep import throw_away

ReasonInMemory = Callable[[Sequence[Relied]], str | None]
"""Why the process that has the store open does not want the bodies gone that a generation relies on; None: it does."""


class Adopted(NamedTuple):
    """A generation that is its partition's now; sizes of its file and of the one before."""

    start_ms: int
    generation: int
    bytes_before: int
    bytes_after: int


class Refused(NamedTuple):
    """A finished generation that was thrown away, by the name of its directory."""

    name: str
    reason: str


def in_memory_nothing(relied_on: Sequence[Relied]) -> str | None:
    """The state on disk is complete while no process has the store open."""
    return None


def adopt_ready(
    path: Path,
    main: Environment,
    store_id: bytes,
    partitions: PartitionSet | None = None,
    reason_in_memory: ReasonInMemory = in_memory_nothing,
    *,
    at_most: int | None = None,
) -> list[Adopted | Refused]:
    """Adopt or throw away the finished generations of the store in `path`, or at most `at_most` of them.

    partitions: those of the open store, which go over to the new generations; None: none is open. One that this
    process may not move or read is left where it is, and so are all while a partition goes away, or comes.
    REQUIRES: the store's lock, no deletion or backup beside it. Raises StoreFull (what was not adopted stays for later)
    and StoreFailed.
    """
    done: list[Adopted | Refused] = []
    for directory in ready_generations(path):
        if len(done) == at_most:
            break
        with suppress(OSError), _in_place(partitions):
            done.append(_adopt(path, main, store_id, partitions, reason_in_memory, directory))
    with suppress(OSError):  # none there, or one has just come
        (path / "staging" / READY).rmdir()
    return done


@contextmanager
def _in_place(partitions: PartitionSet | None) -> Iterator[None]:
    """Keep partitions where they are. Raises BlockingIOError where one changes its directory."""
    if partitions is None:
        yield
        return
    if not partitions.relocating.acquire(blocking=False):
        raise BlockingIOError
    try:
        yield
    finally:
        partitions.relocating.release()


def _adopt(
    path: Path,
    main: Environment,
    store_id: bytes,
    partitions: PartitionSet | None,
    reason_in_memory: ReasonInMemory,
    directory: Path,
) -> Adopted | Refused:
    """Adopt or throw away one generation. Raises OSError and StoreFull with nothing done, StoreFailed."""

    def refuse(where: Path, reason: str) -> Refused:
        throw_away(path, where)
        return Refused(directory.name, reason)

    def record(transaction: Transaction) -> str | None:
        against = reason_against(transaction.raw, info, origin, store_id)
        if against is None:
            key = fmt.partition_key(info.start_ms)
            known = PartitionRecord.unpack(transaction.get(key) or b"")
            transaction.put(key, known._replace(generation=info.generation).pack())
            transaction.after_commit(lambda: recorded.append(True))
        return against

    recorded: list[bool] = []

    try:
        info, origin = _read(directory)
    except DuelogError as error:
        return refuse(directory, str(error))
    with main.read() as raw:
        reason = reason_against(raw, info, origin, store_id)
    if reason is None:
        reason = reason_in_memory(origin.relied_on)
    if reason is not None:
        return refuse(directory, reason)
    known = partition_path(path, info.start_ms, origin.generation)
    before, target = directory_in_use(known), partition_path(path, info.start_ms, info.generation)
    sizes = [length_of(generation) for generation in (before, directory)]
    if before != known:
        sizes[0] += Away.read(before).size
    throw_away(path, target)  # what an adoption whose transaction failed has left: nothing refers to it
    move(directory, target)
    partition = None if partitions is None else partitions.get(info.start_ms)
    try:
        reach("compact.published")
        try:
            reason = main.write(record, makes_space=True)
        except StoreFull:
            move(target, directory)
            raise
        if reason is not None:
            return refuse(target, reason)
        main.flush()  # what is not on disk for sure is not to be relied on by removing the old one
        reach("compact.adopted")
    finally:
        if recorded and partitions is not None and partition is not None:
            partitions.replace(partition, info.generation)
    throw_away(path, before)
    return Adopted(info.start_ms, info.generation, *sizes)


def _read(directory: Path) -> tuple[PartitionInfo, OriginRecord]:
    name = f"finished generation {directory.name}"
    with closing(Environment(directory, name=name, read_only=True, lock=False)) as environment:
        fields, origin = environment.get(fmt.PARTITION_INFO_KEY), environment.get(fmt.ORIGIN_KEY)
    if fields is None or origin is None:
        raise CorruptRecord(f"{name} does not say what it is")
    return PartitionInfo.unpack(fields), OriginRecord.unpack(origin)


def reason_against(raw: Reads, info: PartitionInfo, origin: OriginRecord, store_id: bytes) -> str | None:
    """Why a generation may not take over, by the main environment as `raw` sees it; None: it may."""
    record = catalog.partition(raw, info.start_ms)
    if record is None or record.state is PartitionState.DELETING:
        return "its partition was deleted"
    if record.state is not PartitionState.CLOSED:
        return f"partition {directory_name(info.start_ms)} is not closed"
    if record.generation != origin.generation:
        return f"it was made from generation {origin.generation}, the partition is at {record.generation}"
    expected = PartitionInfo(fmt.FORMAT_VERSION, store_id, info.start_ms, record.end_ms, record.generation + 1)
    if info != expected:
        return f"it is {info}, expected was {expected}"
    by_topic: dict[int, list[Relied]] = {}
    for relied in origin.relied_on:
        by_topic.setdefault(relied.topic_id, []).append(relied)
    for topic_id, rows in by_topic.items():
        if (reason := _taken_back(raw, topic_id, rows)) is not None:
            return reason
    return None


def _taken_back(raw: Reads, topic_id: int, relied_on: list[Relied]) -> str | None:
    """Return a topic's subscription that has not acknowledged the relied-on positions; None: there is none."""
    name = catalog.topic_name(raw, topic_id)
    if name is None:
        return None
    kept = {ledger_id for ledger_id, row in catalog.ledgers(raw, topic_id) if row.state is not LedgerState.TRIMMING}
    rows = [row for row in relied_on if row.ledger_id in kept]
    cursors = list(catalog.cursors(raw, topic_id))
    if rows and not cursors:
        return f"{name} has no subscription any more"
    for _, subscription, cursor in cursors:
        for row in rows:
            positions = BitMap.deserialize(row.positions)
            acked = catalog.fields_of(raw, fmt.acked_key(cursor.subscription_id, row.ledger_id))
            by_ledger = {} if acked is None else {row.ledger_id: acked}
            if positions - acknowledged_by_all([(cursor, by_ledger)], row.ledger_id, max(positions, default=-1) + 1):
                return f"subscription {subscription!r} of {name} has still to read what was dropped"
    return None
