"""Sending to topics, and withdrawing from them: the checks, encodings and policies before an append.

Nothing is written before all of a call is checked. Messages of several topics are encoded, routed and packed as one
batch, nothing topic by topic. The public faces are `Topic` (topic.py) and `DelayedStore.send_batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from duelog.store.codec.body import EncodedBatch, encode_batch, encode_one, encode_payloads, encode_send
from duelog.store.duration import Duration
from duelog.store.errors import DelayTooLong, InvalidMessage
from duelog.store.message import Dedup, Message
from duelog.store.names import TopicName
from duelog.store.position import MessageId, MessageIds

from ..topics.producer_state import Producers
from ..topics.topic_list import Topics
from ..topics.topic_state import TopicState
from .delay_policies import DelayPolicies
from .keyed_messages import EncodedMessage, KeyedMessages
from .log_append import AddressedBatch, Also, GroupAlso, at_place, at_places
from .outbox import Done, Numbers, Outbox, Outgoing
from .sender import Sender

_KEY_BYTES = 512
"""Most bytes of the record of a key in the log."""


DeliverAt = Sequence[int | datetime] | npt.NDArray[np.integer[Any]] | datetime | int | None
"""Due times of payloads: for each (epoch ms and aware datetimes, or an integer array), or one for all."""


class TopicSender:
    """Sends to one topic, which comes into being with the first message. Thread-safe."""

    def __init__(self, name: TopicName, store: StoreSender) -> None:
        self._name = name
        self._store = store
        self._policies, self._sender, self._writing_at = store.policies, store.sender, store.writing_at
        self._max_bytes = store.max_message_bytes
        self._loaded: TopicState | None = None
        self._find_topic = self.topic
        """One object for all messages of this face."""

    def topic(self, now_ms: int) -> TopicState:
        """The topic, created where there is none."""
        state = self._loaded
        if state is None or state.deleted:
            state = self._loaded = self._store.topics.get_or_create(self._name, now_ms)
        return state

    def encode_one(
        self,
        payload: bytes | bytearray | memoryview,
        deliver_at: int | datetime | None,
        deliver_after: float | timedelta | None,
        key: str | None,
        properties: Mapping[str, str] | None,
        allow_past: bool,
        ttl: Duration | None,
        dedup: Dedup | None,
    ) -> EncodedMessage:
        """Check and encode one message as `Topic.send` does, before delay policies."""
        now_ms = self._writing_at()
        name = None if dedup is None else dedup.key
        due_ms, body = encode_send(
            payload, deliver_at, deliver_after, key, properties, now_ms, self._max_bytes, allow_past, ttl, name
        )
        return due_ms, body, now_ms

    def send(self, encoded: EncodedMessage, dedup: Dedup | None = None) -> MessageId:
        """Append one message, delay policies applied."""
        if dedup is not None:
            return self._store.keyed.send(self._name, encoded, dedup, self._writing_at)
        due_ms, body, now_ms = encoded
        due_ms, overridden = self._policies.apply_one(self._name, due_ms, now_ms)
        message_id = self._sender.send_one(self.topic(now_ms), due_ms, body, now_ms)
        if overridden:
            self._policies.stored(self._name, overridden)
        return message_id

    def check(self, message: Message, *, allow_past: bool = False) -> None:
        """Raise the error that `Topic.send` would, for a message that cannot be taken now."""
        now_ms = self._writing_at()
        Dedup.checked(message.dedup_key, message.dedup_for, message.replace, InvalidMessage)
        due_ms, _ = encode_one(message, now_ms, self._max_bytes, allow_past=allow_past)
        self._policies.apply_one(self._name, due_ms, now_ms)

    def check_place(self) -> None:
        """Raise QuotaExceeded where no message more may be pending."""
        self._sender.check_place(self.topic(self._writing_at()))

    def outgoing(
        self,
        encoded: EncodedMessage,
        token: object,
        done: Done,
        *,
        dedup: Dedup | None,
        numbers: Numbers | None = None,
        wanted: Callable[[Any], bool] | None = None,
    ) -> Outgoing:
        """Apply delay policies to one message, for `put`. Raises as `Topic.put`."""
        due_ms, body, now_ms = encoded
        try:
            due_ms, overridden = self._policies.apply_one(self._name, due_ms, now_ms)
        except DelayTooLong:
            if numbers is None or not self._is_stored(numbers):
                raise
            overridden = False  # it was taken, by other policies perhaps, and is not stored again
        find = self._find_topic
        return Outgoing(self._name, find, due_ms, now_ms, body, overridden, numbers, dedup, token, done, wanted)

    def put(self, item: Outgoing, *, wait: bool) -> bool:
        """The second half of `Topic.put`."""
        return self._store.outbox.put(item, wait=wait)

    def _is_stored(self, numbers: Numbers) -> bool:
        topic = self._store.topics.find(self._name)
        return topic is not None and not self._store.producers.of(topic, numbers.producer).unstored(
            numbers.first, numbers.last
        )

    def send_batch(self, messages: Iterable[Message], *, allow_past: bool) -> MessageIds:
        """See `Topic.send_batch`."""
        return self._send_all(*self.encode(messages, allow_past=allow_past))

    def send_payloads(
        self,
        payloads: Sequence[bytes],
        deliver_at: DeliverAt,
        deliver_after: float | timedelta | None,
        *,
        allow_past: bool,
    ) -> MessageIds:
        """See `Topic.send_payloads`."""
        return self._send_all(*self.encode_payloads(payloads, deliver_at, deliver_after, allow_past=allow_past))

    def encode_payloads(
        self,
        payloads: Sequence[bytes],
        deliver_at: DeliverAt = None,
        deliver_after: float | timedelta | None = None,
        *,
        allow_past: bool = False,
    ) -> tuple[EncodedBatch, int]:
        """Check and encode payloads as `Topic.send_payloads` does; as `encode`."""
        now_ms = self._writing_at()
        return (
            encode_payloads(payloads, deliver_at, deliver_after, now_ms, self._max_bytes, allow_past=allow_past),
            now_ms,
        )

    def _send_all(self, batch: EncodedBatch, now_ms: int) -> MessageIds:
        if not len(batch):
            return MessageIds.run(0, 0, 0)
        if batch.dedups:
            return self._send_keyed(self.topic(now_ms), batch, now_ms, policies=True)
        self.apply_policies(batch, now_ms)
        return self.write(batch, now_ms)

    def encode(self, messages: Iterable[Message], *, allow_past: bool = False) -> tuple[EncodedBatch, int]:
        """Check and encode messages as `Topic.send_batch` does, before delay policies; and the time it was done at."""
        now_ms = self._writing_at()
        return encode_batch(messages, now_ms, self._max_bytes, allow_past=allow_past), now_ms

    def apply_policies(self, batch: EncodedBatch, now_ms: int) -> None:
        """Give a batch the due times that the delay policies in force ask for. Raises DelayTooLong."""
        self._policies.apply(self._name, batch, now_ms)

    def write(self, batch: EncodedBatch, now_ms: int) -> MessageIds:
        """Append an encoded batch."""
        if batch.dedups:
            return self._send_keyed(self.topic(now_ms), batch, now_ms, policies=False)
        return self._sender.send(self.topic(now_ms), batch, now_ms)

    def _send_keyed(
        self, topic: TopicState, batch: EncodedBatch, now_ms: int, also: Also | None = None, *, policies: bool
    ) -> MessageIds:
        ids = []
        for start, limit in self._sender.pieces(batch, _KEY_BYTES):
            numbered = None if also is None else at_places(also, range(start, limit))
            part = AddressedBatch([topic], None, batch.part(start, limit), now_ms)
            ids.append(self._store.keyed.send_all(part, numbered, policies=policies))
        return MessageIds.joined(ids)

    def append(self, topic: TopicState, batch: EncodedBatch, now_ms: int, also: Also) -> MessageIds:
        """Append a batch for a producer, which holds its `topic`; `also` writes the numbers with it."""
        if batch.dedups:
            return self._send_keyed(topic, batch, now_ms, also, policies=True)
        if len(batch) == 1:
            due_ms, body = int(batch.dues[0]), batch.bodies[0]
            message_id = self._sender.send_one(topic, due_ms, body, now_ms, at_place(also))
            self._policies.stored(topic.name, batch.overridden)
            return MessageIds.run(*message_id, 1)
        return self._sender.send(topic, batch, now_ms, also)


@dataclass(frozen=True, eq=False, repr=False)
class StoreSender:
    """Sends to several topics of a store as one atomic group; they come into being with it. Thread-safe.

    writing_at: gives the time of a store that can be written to; it raises ClosedError, StoreFailed.
    """

    topics: Topics
    policies: DelayPolicies
    sender: Sender
    outbox: Outbox
    producers: Producers
    keyed: KeyedMessages
    writing_at: Callable[[], int]
    max_message_bytes: int

    def send(
        self,
        names: Sequence[TopicName],
        owners: Sequence[int],
        messages: Sequence[Message],
        *,
        allow_past: bool,
        also: GroupAlso | None = None,
    ) -> MessageIds:
        """See `DelayedStore.send_batch`. owners: the topic of each message, as an index into `names`, all different.

        Every name is one of an owner. `also` writes more in the group.
        """
        now_ms = self.writing_at()
        batch = encode_batch(messages, now_ms, self.max_message_bytes, allow_past=allow_past)
        if not len(batch):
            return MessageIds.run(0, 0, 0)
        column = np.array(owners, dtype=np.intp)
        if not batch.dedups:
            self.policies.apply_each(names, column, batch, now_ms)
        self.sender.refuse_too_large(batch, column)
        topics = self.topics.get_or_create_all(names, now_ms)
        addressed = AddressedBatch(topics, column if len(topics) > 1 else None, batch, now_ms)
        if batch.dedups:
            return self.keyed.send_all(addressed, also, policies=True)
        return self.sender.send_all(addressed, also)
