"""The plan of a scan of sealed generations, cut into slices that tasks read on their own.

Everything that comes from the main environment is read here, in one read transaction: which generations there are,
what their topics are called, which entries never fire. A slice carries what its task needs of it, is picklable, and
its task touches the generation's directory only.
"""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

from ...opening import Identity
from ...partitions import cancellations
from ...partitions.timespan import parse_directory_name
from ...store.codec import format as fmt
from ...store.codec.format import Table
from ...store.codec.frontier import FrontierRecord
from ...store.env.environment import Environment
from ...store.env.memtable import Reads
from ...store.errors import InvalidArgument
from ...store.log import catalog
from ...store.log.ledger import find_tail
from ...store.message import MAX_DUE_MS
from ...store.names import TopicName
from .sealed import Sealed, open_generation, read_sealed


class Sizes(NamedTuple):
    """About how much one task reads: entries, or bytes of a file."""

    entries: int = 1 << 20
    bytes: int = 64 << 20


USUAL = Sizes()


class LogRange(NamedTuple):
    """Entries [start, limit) of one partition log.

    topic: its full name; None: the topic was deleted. cancelled, admitted: serialised bitmaps of what main says of
    the log's entries (cancelled or replaced; conditional ones that may fire), None where not asked for. frontier, of a
    scan of what is pending: what has fired; None: nothing. known: entries from here on count only if they are admitted.
    """

    topic_id: int
    topic: str | None
    ledger_id: int
    start: int
    limit: int
    cancelled: bytes | None = None
    admitted: bytes | None = None
    frontier: FrontierRecord | None = None
    known: int = 0


class Slice(NamedTuple):
    """The part of a scan that one task reads: ranges of the logs of one sealed generation."""

    sealed: Sealed
    store_id: bytes
    ranges: tuple[LogRange, ...]

    @property
    def entries(self) -> int:
        return sum(each.limit - each.start for each in self.ranges)


class Wanted(NamedTuple):
    """The rows that a scan is asked for; those outside it are not read.

    topics: full names; partitions: directory names; None: all. due_from_ms is inclusive, due_until_ms exclusive.
    """

    topics: frozenset[str] | None = None
    partitions: frozenset[str] | None = None
    due_from_ms: int = 0
    due_until_ms: int = MAX_DUE_MS + 1

    @classmethod
    def of(
        cls,
        topics: Collection[str] | None = None,
        partitions: Collection[str] | None = None,
        due_from_ms: int | None = None,
        due_until_ms: int | None = None,
    ) -> Self:
        """Checked: topic names in any form, partition names. Raises InvalidArgument."""
        if partitions is not None:
            for name in partitions:
                parse_directory_name(name)
        if due_from_ms is not None and due_until_ms is not None and due_until_ms < due_from_ms:
            raise InvalidArgument("due_until_ms", due_until_ms, f"is before due_from_ms={due_from_ms}")
        return cls(
            None if topics is None else frozenset(str(TopicName.parse(name)) for name in topics),
            None if partitions is None else frozenset(partitions),
            0 if due_from_ms is None else due_from_ms,
            MAX_DUE_MS + 1 if due_until_ms is None else due_until_ms,
        )

    @property
    def every_due(self) -> bool:
        """True where no due time is left out, that of entries that cannot be read included."""
        return self.due_from_ms <= 0 and self.due_until_ms > MAX_DUE_MS

    def has_partition(self, sealed: Sealed) -> bool:
        if self.partitions is not None and sealed.partition not in self.partitions:
            return False
        return sealed.start_ms < self.due_until_ms and self.due_from_ms < sealed.end_ms


def plan_scan(store: Path, wanted: Wanted | None = None, *, claims: bool = False, sizes: Sizes = USUAL) -> list[Slice]:
    """Slices of everything `wanted` that is sealed.

    `claims`: read what main says of cancelled and admitted entries too. O(partition logs).
    """

    def plan(raw: Reads, identity: Identity, generations: list[Sealed]) -> list[Slice]:
        return plan_in(raw, identity.store_id, generations, wanted or Wanted(), claims, sizes)

    return read_sealed(store, plan)


def plan_in(
    raw: Reads, store_id: bytes, generations: Iterable[Sealed], wanted: Wanted, claims: bool, sizes: Sizes = USUAL
) -> list[Slice]:
    """The same in a read transaction of the caller's (`read_sealed`)."""
    found: list[Slice] = []
    for sealed in generations:
        if wanted.has_partition(sealed):
            with open_generation(sealed, store_id) as environment:
                logs = logs_of(environment)
            ranges = _ranges(raw, logs, wanted, claims)
            found += [Slice(sealed, store_id, part) for part in cut(ranges, sealed.file_bytes, sizes)]
    return found


Logs = list[tuple[int, int, int]]
"""(topic id, ledger id, tail) of partition logs."""


def logs_of(environment: Environment) -> Logs:
    """(topic id, ledger id, tail) of every partition log of a generation. The tail is one past the last entry."""
    with environment.read() as raw:
        found = catalog.rows(raw, fmt.prefix(Table.LOG))
        logs = [(fmt.trailing_u32(key), fmt.unpack_u64(fields)) for key, fields in found]
        return [(topic_id, ledger_id, find_tail(raw, environment.name, ledger_id)) for topic_id, ledger_id in logs]


def _ranges(raw: Reads, logs: Logs, wanted: Wanted, claims: bool) -> Iterator[LogRange]:
    for topic_id, ledger_id, tail in logs:
        topic = catalog.topic_name(raw, topic_id)
        if not tail or (wanted.topics is not None and topic not in wanted.topics):
            continue
        if claims:
            cancelled = cancellations.members(raw, Table.CANCELLED, ledger_id).serialize()
            admitted = cancellations.members(raw, Table.ADMITTED, ledger_id).serialize()
            yield LogRange(topic_id, topic, ledger_id, 0, tail, cancelled, admitted)
        else:
            yield LogRange(topic_id, topic, ledger_id, 0, tail)


def cut(ranges: Iterable[LogRange], file_bytes: int, sizes: Sizes) -> Iterator[tuple[LogRange, ...]]:
    """The ranges in parts of at most as many entries as `sizes` allow, their bytes at the file's average.

    file_bytes: the length of the file that they all lie in.
    """
    ranges = list(ranges)
    entries = sum(each.limit - each.start for each in ranges)
    most = max(1, min(sizes.entries, entries * sizes.bytes // max(file_bytes, 1)))
    most = -(-entries // max(1, -(-entries // most)))  # the last part is no smaller than the others
    part: list[LogRange] = []
    room = most
    for each in ranges:
        start = each.start
        while start < each.limit:
            limit = min(each.limit, start + room)
            part.append(each._replace(start=start, limit=limit))
            room -= limit - start
            start = limit
            if not room:
                yield tuple(part)
                part, room = [], most
    if part:
        yield tuple(part)
