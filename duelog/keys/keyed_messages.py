"""Sending, finding and cancelling by a deduplication key.

A key stands for one message of its topic. It holds as long as that message is pending, and at least for the time that
the send asked for, also if the message has fired by then. Cancelling the message frees the key at once; rescheduling
gives it to the message under its new id. While a key holds, a send with it stores nothing and answers with the id of
the message that is there, unless it is to replace it: then one transaction cancels the pending message and sends the
other. A message with a key never waits in the main log (`inline_delay_ms`), so that it can be taken back.

A send that stores is one look into the main environment dearer, and a record: a row of the group that stores the
message. A send that replaces appends to the partition first, then both are one transaction of the main environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Self

from duelog.markers.lookup import read_entry
from duelog.markers.pending_entries import Outcome
from duelog.markers.succession import Succession
from duelog.markers.withdrawal import Withdrawals
from duelog.partitions.partition import Partition
from duelog.partitions.partition_set import PartitionSet
from duelog.store.codec.body import encode_one
from duelog.store.codec.format import PartitionState
from duelog.store.codec.sent_ids import DEDUP, KeyRecord, sent_key
from duelog.store.duration import Duration, duration_ms
from duelog.store.env.transaction import Transaction
from duelog.store.errors import DamagedStore, InvalidArgument, UnknownTopic
from duelog.store.listener import StoreListener
from duelog.store.message import Message, ScheduledMessage
from duelog.store.names import TopicName
from duelog.store.position import MessageId

from ..sending.delay_policies import DelayPolicies
from ..sending.log_append import PlaceRecord
from ..sending.sender import Sender
from ..topics.topic_list import Topics
from ..topics.topic_state import TopicState
from .topic_keys import TopicKeys, checked_key


class Dedup(NamedTuple):
    """What a send asks for: its key, how long it holds at least, and whether it takes the place of what is pending."""

    key: str
    hold_ms: int
    replace: bool

    @classmethod
    def checked(cls, key: object, hold: Duration | None, replace: bool) -> Self | None:
        """What a caller gave; None: no key. Raises InvalidArgument."""
        if key is None:
            if hold is not None:
                raise InvalidArgument("dedup_for", hold, "goes with dedup_key")
            if replace:
                raise InvalidArgument("replace", replace, "goes with dedup_key")
            return None
        return cls(checked_key(key), 0 if hold is None else duration_ms("dedup_for", hold), replace)


def _packed(until_ms: int, start_ms: int, ledger_id: int, entry_id: int) -> bytes:
    return KeyRecord(start_ms, ledger_id, entry_id, until_ms).pack()


class _Changed(Exception):
    """The record of a key was changed between the look and the transaction."""


class KeyedMessages:
    """The messages with keys of an open store. Thread-safe."""

    def __init__(
        self,
        topics: Topics,
        partitions: PartitionSet,
        policies: DelayPolicies,
        keys: TopicKeys,
        sender: Sender,
        withdrawals: Withdrawals,
        succession: Succession,
        listeners: Sequence[StoreListener],
        max_message_bytes: int,
    ) -> None:
        self._topics = topics
        self._partitions = partitions
        self._policies = policies
        self._keys = keys
        self._sender = sender
        self._withdrawals = withdrawals
        self._succession = succession
        self._listeners = listeners
        self._max_bytes = max_message_bytes

    def send(
        self, name: TopicName, message: Message, dedup: Dedup, writing_at: Callable[[], int], *, allow_past: bool
    ) -> MessageId:
        """As `Topic.send`. `writing_at` gives the time of a store that can be written to."""
        due_ms, body = encode_one(message, writing_at(), self._max_bytes, {DEDUP: dedup.key}, allow_past=allow_past)
        topic = self._topics.get_or_create(name, writing_at())
        with self._keys.lock(topic, dedup.key):
            now_ms = writing_at()
            record, pending = self._keys.look(topic, dedup.key)
            if record is not None and not dedup.replace and (pending is not None or record.until_ms > now_ms):
                return record.message_id
            due_ms, overridden = self._policies.apply_one(name, due_ms, now_ms)
            topic.has_keys = True
            until_ms = now_ms + dedup.hold_ms if dedup.hold_ms else 0
            key = sent_key(topic.topic_id, dedup.key)
            message_id = None
            while record is not None and pending is not None and message_id is None:
                message_id = self._replace(topic, record, pending, due_ms, body, key, until_ms)
                if message_id is None:
                    record, pending = self._keys.look(topic, dedup.key)
            if message_id is None:
                placed = PlaceRecord(key, partial(_packed, until_ms))
                message_id = self._sender.send_one(topic, due_ms, body, now_ms, placed)
        if overridden:
            self._policies.stored(name, overridden)
        return message_id

    def _replace(
        self,
        topic: TopicState,
        old: KeyRecord,
        partition: Partition,
        due_ms: int,
        body: bytes,
        key: bytes,
        until_ms: int,
    ) -> MessageId | None:
        """The id; None, with nothing sent: the key is not of `old` any more."""

        def record(transaction: Transaction, start_ms: int, message_id: MessageId) -> None:
            if topic.deleted:
                raise UnknownTopic(str(topic.name))
            if transaction.get(key) != old.pack():
                raise _Changed
            transaction.put(key, KeyRecord(start_ms, *message_id, until_ms).pack())

        try:
            message_id, cancelled = self._succession.replace(topic.log, old.message_id, partition, due_ms, body, record)
        except _Changed:
            return None
        topic.count_sent(1)
        for listener in self._listeners:
            listener.cancelled(topic.name, int(cancelled))
        return message_id

    def cancel(self, topic: TopicState, key: str) -> bool:
        """As `Topic.cancel_key`."""
        with self._keys.lock(topic, checked_key(key, "key")):
            while True:
                record = self._keys.record(topic, key)
                partition = None if record is None else self._partitions.get(record.start_ms)
                if record is None or partition is None or partition.state is not PartitionState.OPEN:
                    return False
                ids, keyed = [record.message_id], record.until_ms > 0
                try:
                    (outcome,) = self._withdrawals.cancel(topic.log, ids, keyed=keyed, known=partition)
                except DamagedStore:
                    if self._partitions.registered(partition):
                        raise
                    return False  # all of it had fired
                if outcome is Outcome.CANCELLED or self._keys.record(topic, key) == record:
                    break  # else its message was rescheduled meanwhile
        cancelled = outcome is Outcome.CANCELLED
        for listener in self._listeners:
            listener.cancelled(topic.name, int(cancelled))
        return cancelled

    def keys(self, topic: TopicState, prefix: str) -> Iterator[str]:
        """As `Topic.keys`."""
        return self._keys.names(topic, checked_key(prefix, "prefix") if prefix else "")

    def find(self, topic: TopicState, key: str) -> ScheduledMessage | None:
        """As `Topic.find`."""
        record, partition = self._keys.look(topic, checked_key(key, "key"))
        if record is None or partition is None:
            return None
        try:
            with self._partitions.lease(partition):
                return read_entry(partition.environment, record.message_id, str(topic.name))
        except DamagedStore:
            if self._partitions.registered(partition):
                raise
            return None  # it has fired, and was deleted, meanwhile
