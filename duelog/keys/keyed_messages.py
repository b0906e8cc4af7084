"""Sending, finding and cancelling by a deduplication key.

A key stands for one message of its topic. It holds as long as that message is pending, and at least for the time that
the send asked for, also if the message has fired by then. Cancelling the message frees the key at once; rescheduling
gives it to the message under its new id. While a key holds, a send with it stores nothing and answers with the id of
the message that is there, unless it is to replace it: then one transaction cancels the pending message and sends the
other. A message with a key never waits in the main log (`inline_delay_ms`), so that it can be taken back.

A send that stores is one look into the main environment dearer, and a record: a row of the group that stores the
message. Several are sent together, and one that replaces is sent, by keyed_batches.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from duelog.markers.lookup import read_entry
from duelog.markers.pending_entries import Outcome
from duelog.markers.withdrawal import Withdrawals
from duelog.partitions.partition_set import PartitionSet
from duelog.store.codec.body import EncodedBatch, encode_one
from duelog.store.codec.format import PartitionState
from duelog.store.codec.message_fields import Dedup, checked_dedup_key
from duelog.store.codec.sent_ids import KeyRecord, sent_key
from duelog.store.errors import DamagedStore
from duelog.store.listener import StoreListener, call_supplied
from duelog.store.message import Message, ScheduledMessage
from duelog.store.names import TopicName
from duelog.store.position import MessageId

from ..sending.delay_policies import DelayPolicies
from ..sending.log_append import PlaceRecord
from ..sending.sender import Sender
from ..topics.topic_list import Topics
from ..topics.topic_state import TopicState
from .keyed_batches import KeyedBatches, answer, until_ms
from .topic_keys import TopicKeys


def _packed(until: int, start_ms: int, ledger_id: int, entry_id: int) -> bytes:
    return KeyRecord(start_ms, ledger_id, entry_id, until).pack()


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
        batches: KeyedBatches,
        listeners: Sequence[StoreListener],
        max_message_bytes: int,
    ) -> None:
        self._topics = topics
        self._partitions = partitions
        self._policies = policies
        self._keys = keys
        self._sender = sender
        self._withdrawals = withdrawals
        self._batches = batches
        self.send_all = batches.send_all
        """What sends several."""
        self._listeners = listeners
        self._max_bytes = max_message_bytes

    def send(
        self, name: TopicName, message: Message, dedup: Dedup, writing_at: Callable[[], int], *, allow_past: bool
    ) -> MessageId:
        """As `Topic.send`. `writing_at` gives the time of a store that can be written to."""
        now_ms = writing_at()
        due_ms, body = encode_one(message, now_ms, self._max_bytes, allow_past=allow_past)
        topic = self._topics.get_or_create(name, now_ms)
        key = sent_key(topic.topic_id, dedup.key)
        with self._keys.lock(key):
            now_ms = writing_at()
            looked = self._keys.look(topic, key)
            message_id = answer(looked, dedup, now_ms)
            if message_id is not None:
                return message_id
            if looked[1] is not None:  # it is replaced
                one = EncodedBatch(np.array([due_ms]), np.array([due_ms > now_ms]), [body], dedups={0: dedup})
                owner = np.zeros(1, dtype=np.intp)
                return self._batches.send_locked(
                    [topic], owner, one, {0: key}, now_ms, policies=True, known={key: looked}
                )[0]
            due_ms, overridden = self._policies.apply_one(name, due_ms, now_ms)
            topic.has_keys = True
            placed = PlaceRecord(key, partial(_packed, until_ms(dedup, now_ms)))
            message_id = self._sender.send_one(topic, due_ms, body, now_ms, placed)
        if overridden:
            self._policies.stored(name, overridden)
        return message_id

    def cancel(self, topic: TopicState, key: str) -> bool:
        """As `Topic.cancel_key`."""
        place = sent_key(topic.topic_id, checked_dedup_key(key, "key"))
        with self._keys.lock(place):
            while True:
                record = self._keys.record(place)
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
                if outcome is Outcome.CANCELLED or self._keys.record(place) == record:
                    break  # else its message was rescheduled meanwhile
        cancelled = outcome is Outcome.CANCELLED
        for listener in self._listeners:
            call_supplied(listener.cancelled, topic.name, int(cancelled))
        return cancelled

    def keys(self, topic: TopicState, prefix: str) -> Iterator[str]:
        """As `Topic.keys`."""
        return self._keys.names(topic, checked_dedup_key(prefix, "prefix") if prefix else "")

    def find(self, topic: TopicState, key: str) -> ScheduledMessage | None:
        """As `Topic.find`."""
        record, partition = self._keys.look(topic, sent_key(topic.topic_id, checked_dedup_key(key, "key")))
        if record is None or partition is None:
            return None
        try:
            with self._partitions.lease(partition):
                return read_entry(partition.environment, record.message_id, str(topic.name))
        except DamagedStore:
            if self._partitions.registered(partition):
                raise
            return None  # it has fired, and was deleted, meanwhile
