"""Appends whose logs are known before they are queued: what a group of such needs, without what gathers other work.

Most of what a send costs besides its flush is Python: a write batch, staged ledgers and their claims make it some 90 us
for a single message, and as much for each log of a scattered batch. So a group of nothing but appends to registered
logs that take more entries is appended in place. Else each is a unit of work like any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from duelog.partitions.partition import Partition, PartitionLog
from duelog.store.codec.run import Int64s, PackedRun, RunLimits, pack_message
from duelog.store.env.memtable import Memtable
from duelog.store.errors import UnknownTopic
from duelog.store.log.ledger import Ledger, PackedMessages
from duelog.store.log.managed_ledger import Segment
from duelog.store.position import MessageIds
from duelog.store.wal.segment import MAIN
from duelog.store.wal.write_batch import EnvironmentBatch, WriteBatch

from ..topics.topic_state import TopicState

MainRows = Callable[[WriteBatch], EnvironmentBatch]
Places = Sequence[tuple[int, int]]
"""(ledger id, first entry id) of each append of a unit of work."""


class Stored(NamedTuple):
    """Where the messages of a group are, once it is durable: their ids, and by ledger the partition's start.

    `starts` has no main logs.
    """

    ids: MessageIds
    starts: Mapping[int, int]


Also = Callable[[WriteBatch, range, Stored], None]
"""Writes more in the group that stores the messages at some places of a batch; a unit of work, so it may run again."""

GroupAlso = Callable[[WriteBatch, Stored], None]
"""As `Also`, of all the messages of a group."""


def at_places(also: Also, places: range) -> GroupAlso:
    """What is written with a part of a batch."""
    return lambda group, stored: also(group, places, stored)


class PlaceRecord:
    """A small record of the main environment that says where a message is; a row of the message's group."""

    __slots__ = ("key", "pack")

    def __init__(self, key: bytes, pack: Callable[[int, int, int], bytes]) -> None:
        """`pack` makes the fields of the partition's start (MAIN for the main log), ledger id and entry id."""
        self.key = key
        self.pack = pack


class LogAppend:
    """One run of messages for the end of one log."""

    __slots__ = ("memtable", "owner", "start_ms", "topic")

    count = 1
    """Messages in the run."""

    record: PlaceRecord | None = None
    """What is stored with it, of one message alone."""

    def __init__(self, topic: TopicState, owner: object, start_ms: int, memtable: Memtable) -> None:
        """`owner` is the log, of a claim; `start_ms` of its partition, or MAIN."""
        self.topic = topic
        self.owner = owner
        self.start_ms = start_ms
        self.memtable = memtable

    def ledger(self, count: int, size: int) -> Ledger | None:
        """The ledger that it is appended to, behind `count` messages of `size` bytes in the group.

        None: something else has to be decided. REQUIRES: the log is claimed.
        """
        raise NotImplementedError

    def sealed(self, key: bytes) -> bytes | bytearray:
        """The run's value under `key`."""
        raise NotImplementedError

    def appended(self, first: int) -> None:
        """Have memory know that it is durable, from the entry id `first` on."""
        raise NotImplementedError


class AppendWork:
    """A unit of work that consists of appends; what it is worth is made of where they were placed."""

    __slots__ = ()

    def appends(self) -> Sequence[LogAppend]:
        """One or more, in the order of their entries."""
        raise NotImplementedError

    def value(self, places: Places) -> object:
        raise NotImplementedError

    def __call__(self, group: WriteBatch) -> object:
        """Do it among others."""
        raise NotImplementedError


class LoneMessage(AppendWork, LogAppend):
    """A message that is sent singly; (ledger id, entry id) is its value."""

    __slots__ = ("body", "due_ms", "main_rows", "record")

    def __init__(
        self,
        topic: TopicState,
        owner: object,
        start_ms: int,
        memtable: Memtable,
        due_ms: int,
        body: bytes,
        main_rows: MainRows,
        record: PlaceRecord | None,
    ) -> None:
        """`main_rows` gives the rows of the main environment in a group."""
        super().__init__(topic, owner, start_ms, memtable)
        self.due_ms = due_ms
        self.body = body
        self.main_rows = main_rows
        self.record = record

    def appends(self) -> Sequence[LogAppend]:
        return (self,)

    def value(self, places: Places) -> tuple[int, int]:
        return places[0]

    def __call__(self, group: WriteBatch) -> tuple[int, int]:
        if self.topic.deleted:
            raise UnknownTopic(str(self.topic.name))
        place = self._add(group)
        if self.record is not None:
            self.main_rows(group).put(self.record.key, self.record.pack(self.start_ms, *place))
        return place

    def _add(self, group: WriteBatch) -> tuple[int, int]:
        raise NotImplementedError


class LoneDelayed(LoneMessage):
    """A message for a time partition. REQUIRES: an append lease until it is decided."""

    __slots__ = ("limits", "log", "partition")

    def __init__(
        self,
        topic: TopicState,
        partition: Partition,
        log: PartitionLog,
        limits: RunLimits,
        due_ms: int,
        body: bytes,
        main_rows: MainRows,
        record: PlaceRecord | None,
    ) -> None:
        super().__init__(topic, log, partition.start_ms, partition.memtable, due_ms, body, main_rows, record)
        self.partition = partition
        self.log = log
        self.limits = limits

    def ledger(self, count: int, size: int) -> Ledger | None:
        return _taking(self.log, count + 1)

    def sealed(self, key: bytes) -> bytes:
        return pack_message(key, self.start_ms, self.due_ms, self.body)

    def appended(self, first: int) -> None:
        _heard(self.partition, self.log, first, 1, np.array((self.due_ms,), dtype=np.int64))

    def _add(self, group: WriteBatch) -> tuple[int, int]:
        rows = group.to(self.start_ms, self.memtable)
        first = self.partition.add(rows, self.log, (self.due_ms,), (self.body,), self.limits)
        return self.log.ledger.ledger_id, first


class LoneDirect(LoneMessage):
    """A message for the main log: due already, or within the inline delay."""

    __slots__ = ("now_ms",)

    def __init__(
        self,
        topic: TopicState,
        memtable: Memtable,
        main_rows: MainRows,
        due_ms: int,
        body: bytes,
        now_ms: int,
        record: PlaceRecord | None,
    ) -> None:
        super().__init__(topic, topic.log, MAIN, memtable, due_ms, body, main_rows, record)
        self.now_ms = now_ms

    @property
    def _is_early(self) -> bool:
        return self.due_ms > self.now_ms

    def ledger(self, count: int, size: int) -> Ledger | None:
        return self.topic.log.ledger_for(count + 1, size + len(self.body))

    def sealed(self, key: bytes) -> bytes:
        return pack_message(key, self.due_ms, self.due_ms, self.body, early=self._is_early)

    def appended(self, first: int) -> None:
        self.topic.log.appended_one(len(self.body), self.due_ms if self._is_early else 0)

    def _add(self, group: WriteBatch) -> tuple[int, int]:
        dues = np.array((self.due_ms,), dtype=np.int64)
        (segment,) = self.topic.log.append_messages(self.main_rows(group), dues, [self.body], self.now_ms)
        return segment.ledger_id, segment.first_entry


def with_more(message: LoneMessage, also: PlaceRecord | GroupAlso | None) -> Callable[[WriteBatch], tuple[int, int]]:
    """A message that is sent singly, with what `also` writes; a record is its own."""
    if also is None or isinstance(also, PlaceRecord):
        return message

    def work(group: WriteBatch) -> tuple[int, int]:
        ledger_id, entry_id = place = message(group)
        starts = {} if message.start_ms == MAIN else {ledger_id: message.start_ms}
        also(group, Stored(MessageIds.run(ledger_id, entry_id, 1), starts))
        return place

    return work


class PackedAppend(LogAppend):
    """A packed run for a time partition. REQUIRES: an append lease until it is decided."""

    __slots__ = ("count", "dues", "log", "partition", "run")

    def __init__(
        self, topic: TopicState, partition: Partition, log: PartitionLog, run: PackedRun, dues: Int64s
    ) -> None:
        super().__init__(topic, log, partition.start_ms, partition.memtable)
        self.count = run.count
        self.partition = partition
        self.log = log
        self.run = run
        self.dues = dues

    @classmethod
    def each(
        cls, topic: TopicState, partition: Partition, log: PartitionLog, messages: PackedMessages
    ) -> Iterator[PackedAppend]:
        """Those of packed messages for one log."""
        start = 0
        for run in messages.runs:
            yield cls(topic, partition, log, run, messages.dues[start : start + run.count])
            start += run.count

    def ledger(self, count: int, size: int) -> Ledger | None:
        return _taking(self.log, count + self.count)

    def sealed(self, key: bytes) -> bytearray:
        return self.run.sealed(key)

    def appended(self, first: int) -> None:
        _heard(self.partition, self.log, first, self.count, self.dues)


class PackedBatch(AppendWork):
    """A batch for time partitions; the segments of ids of its messages are its value."""

    __slots__ = ("_appends", "_otherwise")

    def __init__(self, appends: Sequence[PackedAppend], otherwise: Callable[[WriteBatch], list[Segment]]) -> None:
        """`otherwise` does the same among other work."""
        self._appends = appends
        self._otherwise = otherwise

    def appends(self) -> Sequence[LogAppend]:
        return self._appends

    def value(self, places: Places) -> list[Segment]:
        return [
            Segment(ledger_id, first, append.count)
            for append, (ledger_id, first) in zip(self._appends, places, strict=True)
        ]

    def __call__(self, group: WriteBatch) -> list[Segment]:
        return self._otherwise(group)


def _taking(log: PartitionLog, count: int) -> Ledger | None:
    return log.ledger if log.registered and log.ledger.takes(count) else None


def _heard(partition: Partition, log: PartitionLog, first: int, count: int, dues: Int64s) -> None:
    log.ledger.entries = first + count
    listener = partition.listener
    if listener is not None:
        listener(log, first, dues)
