"""Appends whose logs are known before they are queued: single messages, and batches of few messages for each log.

Most of what a send costs besides its flush is Python: a write batch, staged ledgers and their claims make it some 90 us
for a single message, and as much for each log of a scattered batch. So a group of nothing but such appends is appended
in place (append_group.py), where their logs take more entries. Else each is a unit of work like any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from duelog.markers.firing.firing_batch import FiringBatch
from duelog.partitions.partition import Partition, PartitionLog
from duelog.store.codec.bodies import Bodies
from duelog.store.codec.run import Int64s, RunLimits, pack_message
from duelog.store.codec.run_lengths import fits_runs
from duelog.store.codec.scattered import ScatteredBatch
from duelog.store.env.memtable import Memtable
from duelog.store.errors import UnknownTopic
from duelog.store.log.ledger import Ledger, PackedMessages
from duelog.store.position import MessageIds
from duelog.store.wal.segment import MAIN
from duelog.store.wal.write_batch import EnvironmentBatch, WriteBatch

from ..topics.topic_state import TopicState

MainRows = Callable[[WriteBatch], EnvironmentBatch]
Segments = Sequence[tuple[int, int, int]]
"""(ledger id, first entry id, count) of the messages of a batch, in order."""


class Stored(NamedTuple):
    """Where the messages of a group are, once it is durable: their ids, and by ledger the partition's start.

    `starts` has no main logs.
    """

    ids: MessageIds
    starts: Mapping[int, int]


Also = Callable[[WriteBatch, range, Stored], None]
"""Writes more in the group that stores the messages at some places of a batch; a unit of work, so it may run again."""

GroupAlso = Callable[[WriteBatch, Stored], None]
"""An `Also` for all the messages of a group."""


def at_places(also: Also, places: range) -> GroupAlso:
    """Bind `also` to the places of a part of a batch."""
    return lambda group, stored: also(group, places, stored)


class PlaceRecord:
    """A small record of the main environment that says where a message is; a row of the message's group."""

    __slots__ = ("key", "pack")

    def __init__(self, key: bytes, pack: Callable[[int, int, int], bytes]) -> None:
        """`pack` makes the fields of the partition's start (MAIN for the main log), ledger id and entry id."""
        self.key = key
        self.pack = pack


class AppendWork:
    """A unit of work that consists of appends to the ends of logs. A call does it among other work."""

    __slots__ = ()


class LoneMessage(AppendWork):
    """A message that is sent singly; (ledger id, entry id) is its value."""

    __slots__ = ("body", "due_ms", "main_rows", "memtable", "owner", "record", "start_ms", "topic")

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
        """`owner` is the log, of a claim; `start_ms` of its partition, or MAIN.

        `main_rows` gives the rows of the main environment in a group; `record` is stored with the message.
        """
        self.topic = topic
        self.owner = owner
        self.start_ms = start_ms
        self.memtable = memtable
        self.due_ms = due_ms
        self.body = body
        self.main_rows = main_rows
        self.record = record

    def _refuse_deleted(self) -> None:
        if self.topic.deleted:
            raise UnknownTopic(str(self.topic.name))

    def _put_record(self, group: WriteBatch, place: tuple[int, int]) -> None:
        if self.record is not None:
            self.main_rows(group).put(self.record.key, self.record.pack(self.start_ms, *place))


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
        """The ledger that it is appended to, behind `count` messages of `size` bytes in the group.

        None: the append has to be a unit of work. REQUIRES: the log is claimed.
        """
        log = self.log
        return log.ledger if log.registered and log.ledger.takes(count + 1) else None

    def sealed(self, key: bytes) -> bytes:
        """The run's value under `key`."""
        return pack_message(key, self.start_ms, self.due_ms, self.body)

    def appended(self, entry_id: int) -> None:
        """Have memory know that it is durable."""
        self.log.ledger.entries = entry_id + 1
        listener = self.partition.listener
        if listener is not None:
            listener(self.log, entry_id, np.array((self.due_ms,), dtype=np.int64))

    def __call__(self, group: WriteBatch) -> tuple[int, int]:
        self._refuse_deleted()
        rows = group.to(self.start_ms, self.memtable)
        first = self.partition.add(rows, self.log, (self.due_ms,), (self.body,), self.limits)
        place = self.log.ledger.ledger_id, first
        self._put_record(group, place)
        return place


class LoneDirect(LoneMessage):
    """A message for the main log: due already, or within the inline delay. Methods as those of `LoneDelayed`."""

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

    def appended(self, entry_id: int) -> None:
        self.topic.log.appended(1, len(self.body), self.due_ms if self._is_early else 0)

    def __call__(self, group: WriteBatch) -> tuple[int, int]:
        self._refuse_deleted()
        dues = np.array((self.due_ms,), dtype=np.int64)
        (segment,) = self.topic.log.append_messages(self.main_rows(group), dues, [self.body], self.now_ms)
        place = segment.ledger_id, segment.first_entry
        self._put_record(group, place)
        return place


def with_more(
    message: LoneDelayed | LoneDirect, also: PlaceRecord | GroupAlso | None
) -> Callable[[WriteBatch], tuple[int, int]]:
    """A message that is sent singly, with what `also` writes; a record is its own."""
    if also is None or isinstance(also, PlaceRecord):
        return message

    def work(group: WriteBatch) -> tuple[int, int]:
        ledger_id, entry_id = place = message(group)
        starts = {} if message.start_ms == MAIN else {ledger_id: message.start_ms}
        also(group, Stored(MessageIds.run(ledger_id, entry_id, 1), starts))
        return place

    return work


class FiringAppend(AppendWork):
    """The markers of a firing, with its frontiers and clock mark."""

    __slots__ = ("_main_rows", "firing")

    def __init__(self, firing: FiringBatch, main_rows: MainRows) -> None:
        """`main_rows` gives the rows of the main environment in a group."""
        self.firing = firing
        self._main_rows = main_rows

    def __call__(self, group: WriteBatch) -> None:
        self.firing(self._main_rows(group))


class Part(NamedTuple):
    """Messages of one topic for one log; `partition` None: for the main log."""

    topic: TopicState
    partition: Partition | None
    log: PartitionLog | None
    dues: Int64s
    messages: Sequence[bytes] | PackedMessages
    entries: int


class DelayedBatch(NamedTuple):
    """Messages for logs of time partitions: groups (start_ms, start, limit) of them, one for each log.

    topics, partitions, logs: of each group; log None says that its partition has closed: they are due.
    """

    groups: Sequence[tuple[int, int, int]]
    topics: Sequence[TopicState]
    partitions: Sequence[Partition | None]
    logs: Sequence[PartitionLog | None]
    dues: Int64s
    bodies: Bodies

    def parts(self, limits: RunLimits) -> list[Part]:
        """Each group, packed as runs."""
        dues, bodies, parts = self.dues, self.bodies, []
        packed = PackedMessages.each(dues, bodies, self.groups, limits)
        groups = zip(self.topics, self.partitions, self.logs, self.groups, packed, strict=True)
        for topic, partition, log, (_, low, high), messages in groups:
            if log is None:
                parts.append(Part(topic, None, None, dues[low:high], bodies[low:high], high - low))
            else:
                parts.append(Part(topic, partition, log, messages.dues, messages, high - low))
        return parts


class ScatteredAppend(AppendWork):
    """A batch that is a single row of the group; the segments of its ids are its value.

    REQUIRES: append leases until it is decided.
    """

    __slots__ = ("_dues", "_otherwise", "batch", "logs", "partitions", "topics")

    def __init__(
        self,
        topics: Sequence[TopicState],
        partitions: Sequence[Partition],
        logs: Sequence[PartitionLog],
        delayed: DelayedBatch,
        otherwise: Callable[[WriteBatch], Segments],
    ) -> None:
        """Pack `delayed`, all of whose logs exist; `otherwise` appends it among other work."""
        self.topics = topics
        self.partitions = partitions
        self.logs = logs
        ledgers = [log.ledger_id for log in logs]
        self.batch = ScatteredBatch.pack(delayed.dues, delayed.bodies, delayed.groups, ledgers)
        self._dues = delayed.dues
        self._otherwise = otherwise

    @classmethod
    def of(
        cls, delayed: DelayedBatch, limits: RunLimits, otherwise: Callable[[WriteBatch], Segments]
    ) -> ScatteredAppend | None:
        """None: a partition has closed, or the messages of a log exceed a run."""
        partitions = [partition for partition in delayed.partitions if partition is not None]
        logs = [log for log in delayed.logs if log is not None]
        if not len(partitions) == len(logs) == len(delayed.groups):
            return None
        if not fits_runs(delayed.bodies, delayed.groups, limits):
            return None
        return cls(list(dict.fromkeys(delayed.topics)), partitions, logs, delayed, otherwise)

    def __call__(self, group: WriteBatch) -> Segments:
        return self._otherwise(group)

    def publish(self, position: int) -> None:
        """The group at `position` is durable: memtables get the batch, and memory hears of it.

        REQUIRES: `Claims.publishing` is held.
        """
        batch = self.batch
        ends = zip(self.partitions, self.logs, batch.ledger_ids, batch.limits(), strict=True)
        for at, (partition, log, ledger_id, limit) in enumerate(ends):
            memtable = partition.memtable
            memtable.position = position
            memtable.add_run(ledger_id, batch)
            log.registered = True
            log.ledger.entries = limit
            if partition.listener is not None:
                partition.listener(log, batch.firsts[at], self._dues[batch.rows_of(at)])
