"""From messages to durable entries: routed by due time, packed, and appended to the write-ahead log as one group.

Those that are due already go into the main log, the rest into the time partitions of their due times. The thread that
sends packs the runs of partitions before it queues, since the leader of a group holds up all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from duelog.partitions.partition import Partition, PartitionLog
from duelog.partitions.partition_set import PartitionSet
from duelog.partitions.timespan import group_by_partition
from duelog.store.codec.bodies import Bodies
from duelog.store.codec.body import EncodedBatch
from duelog.store.codec.run import Int64s, RunLimits
from duelog.store.config import StoreConfig
from duelog.store.errors import BrokenInvariant, UnknownTopic
from duelog.store.log.ledger import PackedMessages
from duelog.store.log.managed_ledger import Segment
from duelog.store.position import MessageId, MessageIds
from duelog.store.wal.write_batch import WriteBatch

from ..topics.topic_state import TopicState
from .delay_policies import DelayPolicies
from .wal_writer import WalWriter

Places = npt.NDArray[np.intp]

Also = Callable[[WriteBatch, range], None]
"""Writes more in the group that stores the messages at some places of a batch; a unit of work, so it may run again."""

_ROW_BYTES = 128
"""What a run takes in the log besides bodies and columns, at most."""

_COLUMN_BYTES = 12


def _at(also: Also, places: range) -> Callable[[WriteBatch], None]:
    return lambda group: also(group, places)


class _Part(NamedTuple):
    """Messages of one topic for one log; `partition` None: for the main log."""

    topic: TopicState
    partition: Partition | None
    log: PartitionLog | None
    dues: Int64s
    messages: Sequence[bytes] | PackedMessages
    entries: int


class Sender:
    """Writes encoded messages. Thread-safe."""

    def __init__(
        self,
        partitions: PartitionSet,
        config: StoreConfig,
        run_limits: RunLimits,
        wal_writer: WalWriter | None,
        policies: DelayPolicies,
    ) -> None:
        """`wal_writer`: None where the store is read-only. `policies` hear of what is durable."""
        self._partitions = partitions
        self._span_ms = config.partition_ms
        self._inline_ms = config.inline_delay_ms
        self._run_limits = run_limits
        self._wal = wal_writer
        self._policies = policies

    @property
    def _wal_writer(self) -> WalWriter:
        if self._wal is None:
            raise BrokenInvariant("a read-only store is written to")
        return self._wal

    def send(self, topic: TopicState, batch: EncodedBatch, now_ms: int, also: Also | None = None) -> MessageIds:
        """Append a batch; the ids in the order of the messages, once all of them are durable.

        They are one group of the write-ahead log, all of them or none is there after a crash, up to
        `WalWriter.largest_group` bytes; more than that are several groups. `also` writes more in each of them.
        """
        if not len(batch):
            return MessageIds.run(0, 0, 0)
        ids: list[MessageIds] = []
        for start, limit in self._pieces(batch):
            piece = batch if limit - start == len(batch) else batch.part(start, limit)
            extra = None if also is None else _at(also, range(start, limit))
            ids += self._send_group([(topic, piece)], now_ms, extra)
        return ids[0] if len(ids) == 1 else MessageIds.joined(ids)

    def _pieces(self, batch: EncodedBatch) -> list[tuple[int, int]]:
        """Where a batch is cut that one group does not take."""
        bodies, most = Bodies.of(batch.bodies), self._wal_writer.largest_group
        each = _ROW_BYTES + _COLUMN_BYTES
        if bodies.total() + each * len(bodies) <= most:
            return [(0, len(bodies))]
        ends = np.cumsum(bodies.sizes() + each)
        pieces, start = [], 0
        while start < len(bodies):
            before = int(ends[start - 1]) if start else 0
            limit = max(int(np.searchsorted(ends, before + most, side="right")), start + 1)
            pieces.append((start, limit))
            start = limit
        return pieces

    def send_all(self, batches: Sequence[tuple[TopicState, EncodedBatch]], now_ms: int) -> list[MessageIds]:
        """Append batches of several topics as one group; the ids of each in the order of its messages.

        Raises InvalidArgument, with nothing stored, where one group does not take them.
        """
        return self._send_group(batches, now_ms, None)

    def _send_group(
        self,
        batches: Sequence[tuple[TopicState, EncodedBatch]],
        now_ms: int,
        also: Callable[[WriteBatch], None] | None,
    ) -> list[MessageIds]:
        with ExitStack() as leases:
            parts: list[_Part] = []
            counts: list[int] = []
            orders: list[Places | None] = []
            for topic, batch in batches:
                routed, order = self._route(topic, batch, now_ms, leases)
                parts += routed
                counts.append(len(routed))
                orders.append(order)
            written = self._wal_writer.write(lambda group: self._write(group, parts, now_ms, also))
        found, at = [], 0
        for (topic, batch), count, order in zip(batches, counts, orders, strict=True):
            segments = [segment for part in written[at : at + count] for segment in part]
            found.append(MessageIds(segments, order))
            self._policies.stored(topic.name, batch.overridden)
            at += count
        return found

    def _route(
        self, topic: TopicState, batch: EncodedBatch, now_ms: int, leases: ExitStack
    ) -> tuple[list[_Part], Places | None]:
        """The parts of a batch, one for each log, and the places of their messages in it; None: in order."""
        count = len(batch)
        if self._inline_ms:  # what is due soon waits in the main log (PIP-448)
            batch.delayed = batch.dues > now_ms + self._inline_ms
        delayed = int(np.count_nonzero(batch.delayed))
        if not delayed:
            return [_Part(topic, None, None, batch.dues, batch.bodies, count)], None
        if delayed == count:
            order, groups = group_by_partition(batch.dues, self._span_ms)
            ahead = 0
        else:
            direct, later = (~batch.delayed).nonzero()[0], batch.delayed.nonzero()[0]
            order, groups = group_by_partition(batch.dues[later], self._span_ms)
            order = np.concatenate((direct, later[order]))
            ahead = len(direct)
        alone = len(groups) == 1 and not ahead
        if not alone:
            batch = batch.rows(order)
        parts = []
        if ahead:
            parts.append(_Part(topic, None, None, batch.dues[:ahead], batch.bodies[:ahead], ahead))
        dues, bodies = batch.dues[ahead:], Bodies.of(batch.bodies)[ahead:]
        partitions = self._partitions.begin_appends([start_ms for start_ms, _, _ in groups], now_ms, topic.topic_id)
        leases.callback(self._partitions.end_appends, partitions)
        packed = PackedMessages.each(dues, bodies, groups, self._run_limits)
        new_ledger = self._partitions.new_ledger
        for partition, (_, low, high), messages in zip(partitions, groups, packed, strict=True):
            if partition is None:  # it has closed meanwhile, so its messages are due
                parts.append(_Part(topic, None, None, dues[low:high], bodies[low:high], high - low))
                continue
            log = partition.log_to_append(topic.topic_id, new_ledger)
            parts.append(_Part(topic, partition, log, messages.dues, messages, high - low))
        return parts, None if alone else order

    def _write(
        self, group: WriteBatch, parts: Sequence[_Part], now_ms: int, also: Callable[[WriteBatch], None] | None
    ) -> list[list[Segment]]:
        """A unit of work of the write-ahead log."""
        written = []
        for topic, partition, log, dues, messages, count in parts:
            if topic.deleted:
                raise UnknownTopic(str(topic.name))
            if partition is None or log is None:
                rows = self._wal_writer.main_rows(group)
                written.append(topic.log.append_messages(rows, dues, messages, now_ms))  # type: ignore[arg-type]
                continue
            rows = group.to(partition.start_ms, partition.memtable)
            first = partition.add(rows, log, dues, messages, self._run_limits)
            written.append([Segment(log.ledger_id, first, count)])
        if also is not None:
            also(group)
        return written

    def send_one(self, topic: TopicState, due_ms: int, body: bytes, now_ms: int) -> MessageId:
        """Append one message: `send` without what a batch needs."""
        if due_ms > now_ms + self._inline_ms:
            start_ms = due_ms - due_ms % self._span_ms
            partition = self._partitions.begin_append(start_ms, now_ms, topic.topic_id)
            if partition is not None:
                try:
                    log = partition.log_to_append(topic.topic_id, self._partitions.new_ledger)

                    def add(group: WriteBatch) -> int:
                        if topic.deleted:
                            raise UnknownTopic(str(topic.name))
                        rows = group.to(start_ms, partition.memtable)
                        return partition.add(rows, log, (due_ms,), (body,), self._run_limits)

                    return MessageId(log.ledger_id, self._wal_writer.write(add))
                finally:
                    self._partitions.end_append(partition)
        dues = np.array((due_ms,), dtype=np.int64)
        part = _Part(topic, None, None, dues, [body], 1)
        (segments,) = self._wal_writer.write(lambda group: self._write(group, [part], now_ms, None))
        return MessageId(*segments[0][:2])

    def close(self) -> None:
        """Take no more; those that were begun are written."""
        if self._wal is not None:
            self._wal.close()
