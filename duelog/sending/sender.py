"""From messages to durable entries: routed by due time, packed, and appended to the write-ahead log as one group.

Those that are due already go into the main log, the rest into the time partitions of their due times. The thread that
sends packs the runs of partitions before it queues, since the leader of a group holds up all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from duelog.partitions.partition import Partition, PartitionLog
from duelog.partitions.partition_set import PartitionSet
from duelog.partitions.timespan import group_by_log, group_by_owner
from duelog.store.codec.bodies import Bodies
from duelog.store.codec.body import EncodedBatch
from duelog.store.codec.run import Int64s, RunLimits, fields_of_message
from duelog.store.config import KIB, StoreConfig
from duelog.store.errors import BrokenInvariant, InvalidArgument, UnknownTopic
from duelog.store.held import Held
from duelog.store.log.managed_ledger import Segment
from duelog.store.policy.pending_quotas import PendingQuotas, Wanted
from duelog.store.position import MessageId, MessageIds
from duelog.store.wal.segment import MAIN
from duelog.store.wal.write_batch import WriteBatch

from ..topics.topic_state import TopicState
from .delay_policies import DelayPolicies
from .log_append import (
    AddressedBatch,
    Also,
    DelayedBatch,
    GroupAlso,
    Part,
    PlaceAlso,
    Places,
    ScatteredAppend,
    Stored,
    at_places,
    refuse_deleted,
)
from .wal_writer import WalWriter, Work

Place = tuple[int, int]
"""Ledger id and entry id."""

T = TypeVar("T")

_ROW_BYTES = 128
"""Most bytes of a run in the log besides bodies and columns."""

_COLUMN_BYTES = 12

_ALSO_BYTES = 32
"""Most bytes of the id of a numbered message."""

_GROUP_BYTES = 4 * KIB
"""Bytes of a group besides its runs: its frame, and the numbers of a producer."""


class Sender:
    """Writes encoded messages. Thread-safe."""

    def __init__(
        self,
        partitions: PartitionSet,
        config: StoreConfig,
        run_limits: RunLimits,
        wal_writer: WalWriter | None,
        policies: DelayPolicies,
        quotas: PendingQuotas,
    ) -> None:
        """`wal_writer`: None where the store is read-only. `policies` hear of what is durable."""
        self._quotas = quotas
        self._partitions = partitions
        self._span_ms = config.partition_ms
        self._inline_ms = config.inline_delay_ms
        self._run_limits = run_limits
        self._sets_apart = config.sets_bodies_apart
        self._wal_writer = wal_writer
        self._policies = policies
        self._largest_group = 0 if wal_writer is None else wal_writer.largest_group
        self.group_bytes = self._largest_group - _GROUP_BYTES
        """Bytes of bodies and rows that one group takes."""

    def send(self, topic: TopicState, batch: EncodedBatch, now_ms: int, also: Also | None = None) -> MessageIds:
        """Append a batch; the ids in the order of the messages, once all of them are durable.

        They are one group of the write-ahead log, all of them or none is there after a crash, up to
        `WalWriter.largest_group` bytes; more than that are several groups. `also` writes more in each of them.
        Raises QuotaExceeded, with nothing stored.
        """
        if not len(batch):
            return MessageIds.run(0, 0, 0)
        ids: list[MessageIds] = []
        with Held() as held:
            self.within_quota(held, [topic], None, batch.dues, now_ms)
            for start, limit in self.pieces(batch, 0 if also is None else _ALSO_BYTES):
                piece = batch if limit - start == len(batch) else batch.part(start, limit)
                messages = AddressedBatch([topic], None, piece, now_ms)
                with Held() as leases:
                    work = self._work(leases, messages, None if also is None else at_places(also, range(start, limit)))
                    ids.append(self.write(work))
                self.count_sent(messages)
        return ids[0] if len(ids) == 1 else MessageIds.joined(ids)

    def within_quota(
        self,
        held: Held,
        topics: Sequence[TopicState],
        owners: Places | None,
        dues: Int64s,
        now_ms: int,
        *,
        refused: bool = True,
    ) -> None:
        """Hold the quotas of messages with these due times while they are sent; `owners` as of AddressedBatch.

        refused: whether they can be exceeded.
        """
        if not self._policies.limits_pending:
            return
        later = dues > now_ms
        if owners is None:
            counts = [int(np.count_nonzero(later))]
        else:
            counts = np.bincount(owners[later], minlength=len(topics)).tolist()
        wanted = [Wanted(topic.topic_id, topic.name, count) for topic, count in zip(topics, counts, strict=True)]
        held.enter(self._quotas.sending(wanted, refused=refused))

    def check_place(self, topic: TopicState) -> None:
        """Raise QuotaExceeded where no message more of a topic may be pending."""
        if self._policies.limits_pending:
            self._quotas.check(Wanted(topic.topic_id, topic.name, 1))

    def pieces(self, batch: EncodedBatch, more: int) -> list[tuple[int, int]]:
        """Where a batch is cut that one group does not take; `more`: bytes that are written besides each message."""
        bodies, most = Bodies.of(batch.bodies), self.group_bytes
        row_bytes = _ROW_BYTES + _COLUMN_BYTES + more
        if bodies.total() + row_bytes * len(bodies) <= most:
            return [(0, len(bodies))]
        ends = np.cumsum(bodies.sizes() + row_bytes)
        pieces, start = [], 0
        while start < len(bodies):
            before = int(ends[start - 1]) if start else 0
            limit = max(int(np.searchsorted(ends, before + most, side="right")), start + 1)
            pieces.append((start, limit))
            start = limit
        return pieces

    def send_all(self, messages: AddressedBatch, also: GroupAlso | None = None) -> MessageIds:
        """Append messages of several topics as one group; the ids in the order of the messages.

        `also` writes more in the group. Raises InvalidArgument, with nothing stored, where one group does not take
        them, and QuotaExceeded.
        """
        with Held() as held:
            return self.write(self.sending(held, messages, also))

    def write(self, work: Work[T]) -> T:
        """Write a unit of work as one group of the write-ahead log (`WalWriter.write`)."""
        if self._wal_writer is None:
            raise BrokenInvariant("a read-only store is written to")
        return self._wal_writer.write(work)

    def sending(self, held: Held, messages: AddressedBatch, also: GroupAlso | None = None) -> Work[MessageIds]:
        """The unit of work of `send_all`, written before `held` ends; what it sends is counted then."""
        topics, owners, batch, now_ms = messages
        self.within_quota(held, topics, owners, batch.dues, now_ms)
        work = self._work(held, messages, also)
        held.stored.append(partial(self.count_sent, messages))
        return work

    def count_sent(self, messages: AddressedBatch) -> None:
        """Count a batch that is durable."""
        topics, owners, batch, _ = messages
        if owners is None:
            self._policies.stored(topics[0].name, batch.overridden)
            topics[0].count_sent(len(batch))
            return
        for topic, count in zip(topics, np.bincount(owners, minlength=len(topics)).tolist(), strict=True):
            topic.count_sent(count)
        if batch.overridden is not None:
            counts = np.bincount(owners[batch.overridden], minlength=len(topics))
            for at in counts.nonzero()[0].tolist():
                self._policies.stored(topics[at].name, int(counts[at]))

    def refuse_too_large(self, batch: EncodedBatch, owners: Places) -> None:
        """Raise InvalidArgument where `send_all` might not take a batch, for it may be more than a group takes."""
        count, size = len(batch), Bodies.of(batch.bodies).total()
        for dedup in (batch.dedups or {}).values():
            size += _ROW_BYTES + 4 * len(dedup.key)
        most = self._largest_group
        if size + _COLUMN_BYTES * count <= most:
            logs = len(np.unique(batch.dues // self._span_ms * (int(owners.max()) + 1) + owners)) if count else 0
            runs = 2 * logs + count // self._run_limits.entries + 2 * size // self._run_limits.bytes
            size += _ROW_BYTES * (runs + 1)
        size += _COLUMN_BYTES * count
        if size > most:
            raise InvalidArgument("messages", count, f"they take {size} bytes, a group of messages at most {most}")

    def _work(self, held: Held, messages: AddressedBatch, also: GroupAlso | None) -> Work[MessageIds]:
        """The unit of work that appends a batch; what it packs is packed now, since a leader holds up all others."""
        direct, delayed, order = self._route(held, messages)
        if delayed is not None and not direct and also is None:
            scattered = ScatteredAppend.of(delayed, self._run_limits, apart=self._sets_apart)
            if scattered is not None:
                return lambda group: MessageIds(scattered(group), order)
        parts = [*direct, *(() if delayed is None else delayed.parts(self._run_limits))]
        spread = 0 if delayed is None else delayed.size

        def work(group: WriteBatch) -> MessageIds:
            group.spread = spread
            ids = MessageIds(self._write(group, parts, messages.now_ms), order)
            if also is not None:
                starts = {log.ledger_id: log.partition.start_ms for _, log, _, _ in parts if log is not None}
                also(group, Stored(ids, starts))
            return ids

        return work

    def _route(self, held: Held, messages: AddressedBatch) -> tuple[list[Part], DelayedBatch | None, Places | None]:
        """Split a batch into parts for main logs and partitions; also the order of its messages, None: as given."""
        topics, owners, batch, now_ms = messages
        if self._inline_ms:  # what is due soon waits in the main log (PIP-448)
            batch.delayed = batch.dues > now_ms + self._inline_ms
            if batch.dedups:
                keyed = list(batch.dedups)
                batch.delayed[keyed] = batch.dues[keyed] > now_ms
        count, delayed = len(batch), int(np.count_nonzero(batch.delayed))
        direct, order = np.empty(0, dtype=np.intp), np.empty(0, dtype=np.intp)
        direct_groups: list[tuple[int, int, int]] = []
        groups: list[tuple[int, int, int, int]] = []
        if delayed < count:
            direct, direct_groups = group_by_owner(owners, (~batch.delayed).nonzero()[0])
        if delayed == count:
            order, groups = group_by_log(owners, batch.dues, self._span_ms)
        elif delayed:
            later = batch.delayed.nonzero()[0]
            order, groups = group_by_log(None if owners is None else owners[later], batch.dues[later], self._span_ms)
            order = later[order]
        alone = len(groups) + len(direct_groups) == 1
        order = np.concatenate((direct, order))
        if not alone:
            batch = batch.rows(order)
        bodies = Bodies.of(batch.bodies)
        parts = [
            Part(topics[owner], None, batch.dues[low:high], bodies[low:high]) for owner, low, high in direct_groups
        ]
        ahead = len(direct)
        delayed_batch = None
        if groups:
            delayed_batch = self._to_partitions(held, topics, groups, batch.dues[ahead:], bodies[ahead:], now_ms)
        return parts, delayed_batch, None if alone else order

    def _to_partitions(
        self,
        held: Held,
        topics: Sequence[TopicState],
        groups: Sequence[tuple[int, int, int, int]],
        dues: Int64s,
        bodies: Bodies,
        now_ms: int,
    ) -> DelayedBatch:
        """Messages in the order of their groups (start_ms, owner, start, limit), with the logs that they are for."""
        topic_ids: dict[int, list[int]] = {}
        for start_ms, owner, _, _ in groups:
            topic_ids.setdefault(start_ms, []).append(topics[owner].topic_id)
        partitions = self._partitions.begin_appends(list(topic_ids), now_ms, list(topic_ids.values()))
        held.ends.append(partial(self._partitions.end_appends, partitions))
        logs: list[PartitionLog | None] = []
        for partition, ids in zip(partitions, topic_ids.values(), strict=True):
            if partition is None:
                logs += [None] * len(ids)
            else:
                logs += partition.logs_to_append(ids, self._partitions.new_ledger)
        cuts = [(start_ms, low, high) for start_ms, _, low, high in groups]
        return DelayedBatch(cuts, [topics[owner] for _, owner, _, _ in groups], logs, dues, bodies)

    def _write(self, group: WriteBatch, parts: Sequence[Part], now_ms: int) -> list[Segment]:
        """Append the parts of a batch in a group."""
        written: list[Segment] = []
        for topic, log, dues, messages in parts:
            refuse_deleted((topic,))
            if log is None:
                written += topic.log.append_messages(group, dues, messages, now_ms)  # type: ignore[arg-type]
                continue
            rows = group.to(log.partition.start_ms, log.partition.memtable)
            first = log.partition.add(rows, log, dues, messages, self._run_limits)
            written.append(Segment(log.ledger_id, first, len(dues)))
        return written

    def send_one(
        self,
        topic: TopicState,
        due_ms: int,
        body: bytes,
        now_ms: int,
        also: PlaceAlso | None = None,
        *,
        may_be_inline: bool = True,
    ) -> MessageId:
        """Append one message, without the overhead of a batch; `also` writes more in its group.

        may_be_inline: False keeps it out of the main log while it is not due, so that it can be taken back.
        """
        if self._policies.limits_pending and due_ms > now_ms:
            with self._quotas.sending([Wanted(topic.topic_id, topic.name, 1)]):
                return self._send_alone(topic, due_ms, body, now_ms, also, may_be_inline=may_be_inline)
        return self._send_alone(topic, due_ms, body, now_ms, also, may_be_inline=may_be_inline)

    def _send_alone(
        self, topic: TopicState, due_ms: int, body: bytes, now_ms: int, also: PlaceAlso | None, *, may_be_inline: bool
    ) -> MessageId:
        inline_ms = self._inline_ms if may_be_inline else 0
        is_delayed = due_ms > now_ms + inline_ms
        partition = self._partitions.begin_append(due_ms, now_ms, topic.topic_id) if is_delayed else None
        if partition is None:  # or it is closed
            place = self.write(self._direct(topic, due_ms, body, now_ms, also))
        else:
            try:
                place = self.write(self._delayed(topic, partition, due_ms, body, also))
            finally:
                self._partitions.end_appends((partition,))
        topic.count_sent(1)
        return MessageId(*place)

    def sending_one(self, held: Held, topic: TopicState, due_ms: int, body: bytes, now_ms: int) -> Work[Place]:
        """The unit of work of `send_one`, written before `held` ends; what it sends is counted then.

        REQUIRES: `within_quota`.
        """
        held.stored.append(partial(topic.count_sent, 1))
        is_delayed = due_ms > now_ms + self._inline_ms
        partition = self._partitions.begin_append(due_ms, now_ms, topic.topic_id) if is_delayed else None
        if partition is None:
            return self._direct(topic, due_ms, body, now_ms, None)
        held.ends.append(partial(self._partitions.end_appends, (partition,)))
        return self._delayed(topic, partition, due_ms, body, None)

    @staticmethod
    def _direct(topic: TopicState, due_ms: int, body: bytes, now_ms: int, also: PlaceAlso | None) -> Work[Place]:
        """The unit of work that appends one message to the main log."""
        fields = fields_of_message(due_ms, due_ms, body, early=due_ms > now_ms)

        def work(group: WriteBatch) -> Place:
            if topic.deleted:
                raise UnknownTopic(str(topic.name))
            place = topic.log.append_message(group, due_ms, fields, body, now_ms)
            if also is not None:
                also(group, MAIN, *place)
            return place

        return work

    def _delayed(
        self, topic: TopicState, partition: Partition, due_ms: int, body: bytes, also: PlaceAlso | None
    ) -> Work[Place]:
        """The unit of work that appends one message to a partition. REQUIRES: an append lease until it is decided."""
        log = partition.log_to_append(topic.topic_id, self._partitions.new_ledger)
        start_ms, memtable = partition.start_ms, partition.memtable
        fields = fields_of_message(start_ms, due_ms, body)

        def work(group: WriteBatch) -> Place:
            if topic.deleted:
                raise UnknownTopic(str(topic.name))
            rows = group.to(start_ms, memtable)
            place = log.ledger.ledger_id, partition.add_message(rows, log, due_ms, fields, body)
            if also is not None:
                also(group, start_ms, *place)
            return place

        return work

    def close(self) -> None:
        """Refuse further batches; those that were begun are written."""
        if self._wal_writer is not None:
            self._wal_writer.close()
