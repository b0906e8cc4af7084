"""Appends of batches: the parts of a batch by log, and what else is written in the group that stores them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from duelog.partitions.partition import PartitionLog, StagedLog
from duelog.store.codec.bodies import Bodies
from duelog.store.codec.body import EncodedBatch
from duelog.store.codec.run import Int64s, RunLimits
from duelog.store.codec.run_lengths import ScatteredBatch, fits_runs, largest_group
from duelog.store.errors import UnknownTopic
from duelog.store.log.ledger import PackedMessages
from duelog.store.position import MessageIds
from duelog.store.wal.segment import MAIN
from duelog.store.wal.write_batch import WriteBatch, is_large

from ..topics.topic_state import TopicState

Places = npt.NDArray[np.intp]

Segments = Sequence[tuple[int, int, int]]
"""(ledger id, first entry id, count) of the messages of a batch, in order."""


class AddressedBatch(NamedTuple):
    """Messages of several topics that are sent together at `now_ms`.

    owners: whose each message is, as a place in `topics`; None: all are of the one topic.
    """

    topics: Sequence[TopicState]
    owners: Places | None
    batch: EncodedBatch
    now_ms: int

    def topic_of(self, place: int) -> TopicState:
        """The topic of the message at a place of the batch."""
        return self.topics[0 if self.owners is None else self.owners[place]]

    def rows(self, places: Places) -> AddressedBatch:
        """Select messages by their places in the batch; without `dedups`."""
        owners = None if self.owners is None else self.owners[places]
        return self._replace(owners=owners, batch=self.batch.rows(places))


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


PlaceAlso = Callable[[WriteBatch, int, int, int], None]
"""A `GroupAlso` for one message: its partition's start (MAIN for the main log), ledger id and entry id."""


def at_place(also: Also) -> PlaceAlso:
    """Bind `also` to the one message of a batch."""

    def work(group: WriteBatch, start_ms: int, ledger_id: int, entry_id: int) -> None:
        starts = {} if start_ms == MAIN else {ledger_id: start_ms}
        also(group, range(1), Stored(MessageIds.run(ledger_id, entry_id, 1), starts))

    return work


def at_places(also: Also, places: range) -> GroupAlso:
    """Bind `also` to the places of a part of a batch."""
    return lambda group, stored: also(group, places, stored)


class Part(NamedTuple):
    """Messages of one topic for one log; None: for the main log."""

    topic: TopicState
    log: PartitionLog | None
    dues: Int64s
    messages: Sequence[bytes] | PackedMessages


class DelayedBatch(NamedTuple):
    """Messages for logs of time partitions: groups (start_ms, start, limit) of them, one for each log.

    topics, logs: of each group; log None says that its partition has closed: they are due.
    """

    groups: Sequence[tuple[int, int, int]]
    topics: Sequence[TopicState]
    logs: Sequence[PartitionLog | None]
    dues: Int64s
    bodies: Bodies

    @property
    def size(self) -> int:
        """Bytes of the bodies."""
        return int(self.bodies.sizes().sum())

    def parts(self, limits: RunLimits) -> list[Part]:
        """Each group, packed as runs."""
        dues, bodies, parts = self.dues, self.bodies, []
        packed = PackedMessages.each(dues, bodies, self.groups, limits)
        for topic, log, (_, low, high), messages in zip(self.topics, self.logs, self.groups, packed, strict=True):
            parts.append(Part(topic, log, dues[low:high], bodies[low:high] if log is None else messages))
        return parts


class ScatteredAppend:
    """A batch that is a single row of the group, as a unit of work; the segments of its ids are its value.

    A row for each log would cost some 90 us of Python a log. REQUIRES: append leases until it is decided.
    """

    def __init__(self, delayed: DelayedBatch, logs: Sequence[PartitionLog]) -> None:
        self._topics = list(dict.fromkeys(delayed.topics))
        self._logs = logs
        self._dues = [delayed.dues[low:high] for _, low, high in delayed.groups]
        ledgers = [log.ledger_id for log in logs]
        self._batch = ScatteredBatch.pack(delayed.dues, delayed.bodies, delayed.groups, ledgers)

    @classmethod
    def of(cls, delayed: DelayedBatch, limits: RunLimits, *, apart: bool) -> ScatteredAppend | None:
        """Pack a batch; None: it is for one log, as a run costs less, a partition has closed, or a log exceeds a run.

        None, too, where `apart` and the messages of a log are so large that their bodies go to a file.
        """
        if len(delayed.groups) < 2:
            return None
        if apart and is_large(largest_group(delayed.bodies, delayed.groups), delayed.size):
            return None
        logs = [log for log in delayed.logs if log is not None]
        if len(logs) < len(delayed.groups) or not fits_runs(delayed.bodies, delayed.groups, limits):
            return None
        return cls(delayed, logs)

    def __call__(self, group: WriteBatch) -> Segments:
        refuse_deleted(self._topics)
        batch, firsts = self._batch, []
        for log, dues in zip(self._logs, self._dues, strict=True):
            if log.registered:
                firsts.append(group.stage(log, StagedLog).took(dues))
            else:
                partition = log.partition
                firsts.append(partition.take(group.to(partition.start_ms, partition.memtable), log, dues))
        batch.place(firsts)
        group.add_batch(batch, [log.partition.memtable for log in self._logs])
        return list(zip(batch.ledger_ids, firsts, batch.counts, strict=True))


def refuse_deleted(topics: Iterable[TopicState]) -> None:
    """Raise UnknownTopic where one of them is deleted."""
    for topic in topics:
        if topic.deleted:
            raise UnknownTopic(str(topic.name))
