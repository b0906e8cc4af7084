"""A message that is sent singly: what a group of such needs, without what gathers work of any kind.

Most of what a single send costs besides its flush is Python: a write batch, staged ledgers and their claims make it
some 90 us, half the time of a send. So a group of single messages is appended in place, where nothing else has to be
decided: their logs are registered and take more entries. Else each is a unit of work like any.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from duelog.partitions.partition import Partition, PartitionLog
from duelog.store.codec.run import RunLimits
from duelog.store.env.memtable import Memtable
from duelog.store.errors import UnknownTopic
from duelog.store.log.ledger import Ledger
from duelog.store.wal.segment import MAIN
from duelog.store.wal.write_batch import EnvironmentBatch, WriteBatch

from ..topics.topic_state import TopicState

MainRows = Callable[[WriteBatch], EnvironmentBatch]


class LoneMessage:
    """A unit of work for one message; (ledger id, entry id) is its value."""

    __slots__ = ("body", "due_ms", "memtable", "owner", "start_ms", "topic")

    def __init__(
        self, topic: TopicState, owner: object, start_ms: int, memtable: Memtable, due_ms: int, body: bytes
    ) -> None:
        """`owner` is the log, of a claim; `start_ms` of its partition, or MAIN."""
        self.topic = topic
        self.owner = owner
        self.start_ms = start_ms
        self.memtable = memtable
        self.due_ms = due_ms
        self.body = body

    @property
    def base_ms(self) -> int:
        """What the run counts due times from."""
        raise NotImplementedError

    @property
    def is_early(self) -> bool:
        """Whether it is appended to a main log before it is due."""
        return False

    def ledger(self, count: int, size: int) -> Ledger | None:
        """The ledger that it is appended to, behind `count` messages of `size` bytes in the group.

        None: something else has to be decided. REQUIRES: the log is claimed.
        """
        raise NotImplementedError

    def appended(self, entry_id: int) -> None:
        """Have memory know that it is durable."""
        raise NotImplementedError

    def __call__(self, group: WriteBatch) -> tuple[int, int]:
        """Append it among others."""
        raise NotImplementedError


class LoneDelayed(LoneMessage):
    """A message for a time partition. REQUIRES: an append lease until it is decided."""

    __slots__ = ("limits", "log", "partition")

    def __init__(
        self, topic: TopicState, partition: Partition, log: PartitionLog, limits: RunLimits, due_ms: int, body: bytes
    ) -> None:
        super().__init__(topic, log, partition.start_ms, partition.memtable, due_ms, body)
        self.partition = partition
        self.log = log
        self.limits = limits

    @property
    def base_ms(self) -> int:
        return self.start_ms

    def ledger(self, count: int, size: int) -> Ledger | None:
        log = self.log
        return log.ledger if log.registered and log.ledger.takes(count + 1) else None

    def appended(self, entry_id: int) -> None:
        ledger = self.log.ledger
        ledger.entries = entry_id + 1
        listener = self.partition.listener
        if listener is not None:
            listener(self.log, entry_id, np.array((self.due_ms,), dtype=np.int64))

    def __call__(self, group: WriteBatch) -> tuple[int, int]:
        if self.topic.deleted:
            raise UnknownTopic(str(self.topic.name))
        rows = group.to(self.start_ms, self.memtable)
        first = self.partition.add(rows, self.log, (self.due_ms,), (self.body,), self.limits)
        return self.log.ledger.ledger_id, first


class LoneDirect(LoneMessage):
    """A message for the main log: due already, or within the inline delay."""

    __slots__ = ("now_ms", "wal_rows")

    def __init__(
        self, topic: TopicState, memtable: Memtable, main_rows: MainRows, due_ms: int, body: bytes, now_ms: int
    ) -> None:
        """`main_rows` gives the rows of the main environment in a group."""
        super().__init__(topic, topic.log, MAIN, memtable, due_ms, body)
        self.wal_rows = main_rows
        self.now_ms = now_ms

    @property
    def base_ms(self) -> int:
        return self.due_ms

    @property
    def is_early(self) -> bool:
        return self.due_ms > self.now_ms

    def ledger(self, count: int, size: int) -> Ledger | None:
        return self.topic.log.ledger_for(count + 1, size + len(self.body))

    def appended(self, entry_id: int) -> None:
        self.topic.log.appended_one(len(self.body), self.due_ms if self.is_early else 0)

    def __call__(self, group: WriteBatch) -> tuple[int, int]:
        if self.topic.deleted:
            raise UnknownTopic(str(self.topic.name))
        dues = np.array((self.due_ms,), dtype=np.int64)
        (segment,) = self.topic.log.append_messages(self.wal_rows(group), dues, [self.body], self.now_ms)
        return segment.ledger_id, segment.first_entry
