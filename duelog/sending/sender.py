"""From messages to durable entries.

Those that are due already go into the main log, the rest into the time partitions of their due times,
all of them side by side. The thread that sends packs the runs of all partitions before any is written: threads that
pack and write would take the interpreter from each other, these only wait for the disk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from duelog.partitions.partition_set import PartitionSet
from duelog.partitions.timespan import group_by_partition
from duelog.store.codec.bodies import Bodies
from duelog.store.codec.body import EncodedBatch
from duelog.store.config import StoreConfig
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from duelog.store.errors import UnknownTopic
from duelog.store.log.ledger import PackedMessages, RunLimits
from duelog.store.log.managed_ledger import Segment
from duelog.store.position import MessageId, MessageIds

from ..topics.topic_state import TopicState
from .delay_policies import DelayPolicies
from .wal_writer import WalWriter
from .worker_pool import WorkerPool, run_in_turn

_PACKED_AT_ONCE_BYTES = 16 << 20
"""A larger batch is packed partition by partition as it is written, so that it is not in memory once more."""

Write = Callable[[Transaction], None]
Also = Callable[[Transaction, Sequence[int]], None]
"""Writes more in the transaction that stores some rows of a batch; a unit of work, so it may run again."""


def _bind(also: Also | None, rows: Sequence[int]) -> Write | None:
    return None if also is None else lambda transaction: also(transaction, rows)


class Sender:
    """Writes encoded messages. Thread-safe."""

    def __init__(
        self,
        main: Environment,
        partitions: PartitionSet,
        config: StoreConfig,
        run_limits: RunLimits,
        pool: WorkerPool,
        wal_writer: WalWriter | None,
        policies: DelayPolicies,
    ) -> None:
        """`pool` writes the parts of a batch. `wal_writer` None: what is sent one by one is appended one by one.

        `policies` hear of what is on disk; they have been applied.
        """
        self._main = main
        self._partitions = partitions
        self._span_ms = config.partition_ms
        self._inline_ms = config.inline_delay_ms
        self._run_limits = run_limits
        self._wal_writer = wal_writer
        self._policies = policies
        self._waits_for_nothing = config.durability == "none"
        self._pool = pool

    def send(self, topic: TopicState, batch: EncodedBatch, now_ms: int, also: Also | None = None) -> MessageIds:
        """Append a batch; returns the ids in the order of the messages once all of them are durable.

        The messages for one partition, and those for the main log, are each one transaction. When one
        fails the others stand, and the first error is raised after all have ended. `also` writes more in each
        of them, given the rows of the batch it is about.
        """
        if topic.deleted:
            raise UnknownTopic(str(topic.name))
        count = len(batch)
        if not count:
            return MessageIds.run(0, 0, 0)
        if self._inline_ms:  # what is due soon waits in the main log (PIP-448)
            batch.delayed = batch.dues > now_ms + self._inline_ms
        delayed = int(np.count_nonzero(batch.delayed))
        if not delayed:
            return MessageIds(self._append(topic, None, batch, now_ms, _bind(also, range(count))))
        groups: list[tuple[int | None, int, int]]
        if delayed == count:
            order, found = group_by_partition(batch.dues, self._span_ms)
            groups = list(found)
        else:
            direct, later = (~batch.delayed).nonzero()[0], batch.delayed.nonzero()[0]
            order, found = group_by_partition(batch.dues[later], self._span_ms)
            order = np.concatenate((direct, later[order]))
            ahead = len(direct)
            groups = [(None, 0, ahead), *((start_ms, ahead + low, ahead + high) for start_ms, low, high in found)]
        if len(groups) == 1:
            return MessageIds(self._append(topic, groups[0][0], batch, now_ms, _bind(also, range(count))))
        batch = batch.rows(order)
        at_once = Bodies.of(batch.bodies).total() <= _PACKED_AT_ONCE_BYTES
        jobs: list[Callable[[], list[Segment]]] = []
        for start_ms, low, high in groups:
            part, packed = batch.part(low, high), None
            if start_ms is not None and at_once:  # by this thread: those that write only wait for the disk
                packed = PackedMessages(part.dues, Bodies.of(part.bodies), start_ms, self._run_limits)
            extra = _bind(also, order[low:high].tolist()) if also is not None else None
            jobs.append(functools.partial(self._append, topic, start_ms, part, now_ms, extra, packed))
        written = self._run_all(jobs)
        return MessageIds([segment for segments in written for segment in segments], order)

    def send_one(self, topic: TopicState, due_ms: int, body: bytes, now_ms: int) -> MessageId:
        """Append one message: `send` without what a batch needs."""
        if topic.deleted:
            raise UnknownTopic(str(topic.name))
        if due_ms > now_ms + self._inline_ms:
            partition = self._partitions.begin_append(due_ms - due_ms % self._span_ms, now_ms)
            if partition is not None:
                try:
                    if self._wal_writer is not None:
                        return MessageId(*self._wal_writer.append(partition, topic.topic_id, due_ms, body))
                    return MessageId(
                        *partition.append(
                            topic.topic_id, (due_ms,), (body,), self._run_limits, self._partitions.new_ledger
                        )
                    )
                finally:
                    self._partitions.end_append(partition)
        dues = np.array((due_ms,), dtype=np.int64)
        batch = EncodedBatch(dues, dues > now_ms, [body])
        return MessageId(*self._append_direct(topic, batch, now_ms, None)[0][:2])

    def _append(
        self,
        topic: TopicState,
        start_ms: int | None,
        batch: EncodedBatch,
        now_ms: int,
        also: Write | None,
        packed: PackedMessages | None = None,
    ) -> list[Segment]:
        """Append what belongs into one environment; `start_ms` None: into the main log."""
        segments = self._append_to(topic, start_ms, batch, now_ms, also, packed)
        self._policies.stored(topic.name, batch.overridden)
        return segments

    def _append_to(
        self,
        topic: TopicState,
        start_ms: int | None,
        batch: EncodedBatch,
        now_ms: int,
        also: Write | None,
        packed: PackedMessages | None,
    ) -> list[Segment]:
        partition = None if start_ms is None else self._partitions.begin_append(start_ms, now_ms)
        if partition is None:  # or it has closed meanwhile, so its messages are due
            return self._append_direct(topic, batch, now_ms, also)
        try:
            messages, limits, new_ledger = packed or batch.bodies, self._run_limits, self._partitions.new_ledger
            ledger_id, first = partition.append(topic.topic_id, batch.dues, messages, limits, new_ledger, also=also)
        finally:
            self._partitions.end_append(partition)
        return [Segment(ledger_id, first, len(batch))]

    def _append_direct(self, topic: TopicState, batch: EncodedBatch, now_ms: int, also: Write | None) -> list[Segment]:
        def work(transaction: Transaction) -> list[Segment]:
            if also is not None:
                also(transaction)
            return topic.log.append_messages(transaction, batch.dues, batch.bodies, now_ms)

        return self._main.write(work)

    def _run_all(self, jobs: Sequence[Callable[[], list[Segment]]]) -> list[list[Segment]]:
        """Run every job, side by side where they wait for the disk; raises the first error once all have ended."""
        return run_in_turn(jobs) if self._waits_for_nothing else self._pool.run(jobs)

    def close(self) -> None:
        """Take no more batches; those that were begun are written."""
        if self._wal_writer is not None:
            self._wal_writer.close()
        self._pool.close()
