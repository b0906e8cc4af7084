"""What sending is made of: messages are checked, encoded, given their due times by policies, and appended.

Nothing is written before all of a call is checked. Messages of several topics are encoded, routed and packed as one
batch, nothing topic by topic. The public faces are `Topic` (topic.py) and `DelayedStore.send_batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from duelog.store.codec.body import EncodedBatch, encode_batch, encode_one, encode_payloads, encode_send
from duelog.store.codec.message_fields import Dedup
from duelog.store.duration import Duration
from duelog.store.errors import DelayTooLong, InvalidMessage
from duelog.store.message import Message
from duelog.store.names import TopicName
from duelog.store.position import MessageId, MessageIds

from ..topics.producer_state import ProducerState
from ..topics.topic_list import Topics
from ..topics.topic_state import TopicState
from .delay_policies import DelayPolicies
from .log_append import Also, at_places
from .outbox import Done, Numbers, Outbox, Outgoing
from .sender import Places, Sender

_KEY_BYTES = 512
"""What the record of a key takes in the log, at most."""


class SendKeyed(Protocol):
    """As `Sender.send_all`, of a batch with deduplication keys (keys/keyed_messages.py)."""

    def __call__(
        self, topics: Sequence[TopicState], owners: Places | None, batch: EncodedBatch, now_ms: int, *, policies: bool
    ) -> MessageIds: ...


DeliverAt = Sequence[int] | npt.NDArray[np.integer[Any]] | datetime | int | None
"""Due times of payloads: for each (ints, or an integer array), or one for all."""


class TopicSender:
    """Sends to one topic, which comes into being with the first message. Thread-safe."""

    def __init__(
        self,
        name: TopicName,
        topics: Topics,
        policies: DelayPolicies,
        sender: Sender,
        outbox: Outbox,
        producer: Callable[[TopicState, str], ProducerState],
        keyed: SendKeyed,
        writing_at: Callable[[], int],
        max_message_bytes: int,
    ) -> None:
        """`writing_at` gives the time of a store that can be written to; it raises ClosedError, StoreFailed.

        `producer`, `keyed`: as of `PutWriter`.
        """
        self._name = name
        self._topics = topics
        self._policies = policies
        self._sender = sender
        self._outbox = outbox
        self._producer = producer
        self._keyed = keyed
        self._writing_at = writing_at
        self._max_bytes = max_message_bytes
        self._loaded: TopicState | None = None
        self._find_topic = self.topic
        """One object for all messages of this face."""

    def topic(self, now_ms: int) -> TopicState:
        """The topic, created where there is none."""
        state = self._loaded
        if state is None or state.deleted:
            state = self._loaded = self._topics.get_or_create(self._name, now_ms)
        return state

    def send(
        self,
        payload: bytes | bytearray | memoryview,
        deliver_at: int | datetime | None,
        deliver_after: float | timedelta | None,
        key: str | None,
        properties: Mapping[str, str] | None,
        allow_past: bool,
        ttl: Duration | None = None,
    ) -> MessageId:
        """As `Topic.send`."""
        now_ms = self._writing_at()
        due_ms, body = encode_send(
            payload, deliver_at, deliver_after, key, properties, now_ms, self._max_bytes, allow_past, ttl
        )
        due_ms, overridden = self._policies.apply_one(self._name, due_ms, now_ms)
        message_id = self._sender.send_one(self.topic(now_ms), due_ms, body, now_ms)
        if overridden:
            self._policies.stored(self._name, overridden)
        return message_id

    def check(self, message: Message, *, allow_past: bool = False) -> None:
        """Raise what `Topic.send` would of a message that cannot be taken now."""
        now_ms = self._writing_at()
        Dedup.checked(message.dedup_key, message.dedup_for, message.replace, InvalidMessage)
        due_ms, _ = encode_one(message, now_ms, self._max_bytes, allow_past=allow_past)
        self._policies.apply_one(self._name, due_ms, now_ms)

    def check_place(self) -> None:
        """Raise QuotaExceeded where no message more may be pending."""
        self._sender.check_place(self.topic(self._writing_at()))

    def outgoing(
        self,
        payload: bytes | bytearray | memoryview,
        deliver_at: int | datetime | None,
        deliver_after: float | timedelta | None,
        key: str | None,
        properties: Mapping[str, str] | None,
        allow_past: bool,
        token: object,
        done: Done,
        *,
        numbers: Numbers | None = None,
        dedup: Dedup | None = None,
        wanted: Callable[[Any], bool] | None = None,
        ttl: Duration | None = None,
    ) -> Outgoing:
        """Check one message, delay policies applied, for `put`. Raises as `Topic.put`."""
        now_ms = self._writing_at()
        due_ms, body = encode_send(
            payload,
            deliver_at,
            deliver_after,
            key,
            properties,
            now_ms,
            self._max_bytes,
            allow_past,
            ttl,
            None if dedup is None else dedup.key,
        )
        try:
            due_ms, overridden = self._policies.apply_one(self._name, due_ms, now_ms)
        except DelayTooLong:
            if numbers is None or not self._is_stored(numbers):
                raise
            overridden = False  # it was taken, by other policies perhaps, and is not stored again
        once = numbers or dedup
        return Outgoing(self._name, self._find_topic, due_ms, now_ms, body, overridden, once, token, done, wanted)

    def put(self, item: Outgoing, *, wait: bool) -> bool:
        """The second half of `Topic.put`."""
        return self._outbox.put(item, wait=wait)

    def _is_stored(self, numbers: Numbers) -> bool:
        topic = self._topics.find(self._name)
        return topic is not None and self._producer(topic, numbers.producer).has(numbers.first, numbers.last)

    def send_batch(self, messages: Iterable[Message], *, allow_past: bool) -> MessageIds:
        """As `Topic.send_batch`."""
        return self._send_all(*self.encode(messages, allow_past=allow_past))

    def send_payloads(
        self,
        payloads: Sequence[bytes],
        deliver_at: DeliverAt,
        deliver_after: float | timedelta | None,
        *,
        allow_past: bool,
    ) -> MessageIds:
        """As `Topic.send_payloads`."""
        now_ms = self._writing_at()
        batch = encode_payloads(payloads, deliver_at, deliver_after, now_ms, self._max_bytes, allow_past=allow_past)
        return self._send_all(batch, now_ms)

    def _send_all(self, batch: EncodedBatch, now_ms: int) -> MessageIds:
        if not len(batch):
            return MessageIds.run(0, 0, 0)
        if batch.dedups:
            return self._send_keyed(batch, now_ms, policies=True)
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
        """Append what `encode` gave, or the like."""
        if batch.dedups:
            return self._send_keyed(batch, now_ms, policies=False)
        return self._sender.send(self.topic(now_ms), batch, now_ms)

    def _send_keyed(self, batch: EncodedBatch, now_ms: int, *, policies: bool) -> MessageIds:
        pieces = [batch.part(start, limit) for start, limit in self._sender.pieces(batch, _KEY_BYTES)]
        topics = [self.topic(now_ms)]
        return MessageIds.joined([self._keyed(topics, None, piece, now_ms, policies=policies) for piece in pieces])

    def append(self, topic: TopicState, batch: EncodedBatch, now_ms: int, also: Also) -> MessageIds:
        """As `Sender.send`: to the topic as a producer knows it, with what `also` writes."""
        if len(batch) == 1:
            due_ms, body = int(batch.dues[0]), batch.bodies[0]
            message_id = self._sender.send_one(topic, due_ms, body, now_ms, at_places(also, range(1)))
            self._policies.stored(topic.name, batch.overridden)
            return MessageIds.run(*message_id, 1)
        return self._sender.send(topic, batch, now_ms, also)


class StoreSender:
    """Sends to several topics of a store as one atomic group; they come into being with it. Thread-safe."""

    def __init__(
        self,
        topics: Topics,
        policies: DelayPolicies,
        sender: Sender,
        keyed: SendKeyed,
        writing_at: Callable[[], int],
        max_message_bytes: int,
    ) -> None:
        """`keyed`, `writing_at`: as of `TopicSender`."""
        self._topics = topics
        self._policies = policies
        self._sender = sender
        self._keyed = keyed
        self._writing_at = writing_at
        self._max_bytes = max_message_bytes

    def send(
        self, names: Sequence[TopicName], owners: Sequence[int], messages: Sequence[Message], *, allow_past: bool
    ) -> MessageIds:
        """As `DelayedStore.send_batch`. owners: whose each message is, as a place in `names`, which are all different.

        Every name is one of an owner.
        """
        now_ms = self._writing_at()
        batch = encode_batch(messages, now_ms, self._max_bytes, allow_past=allow_past)
        if not len(batch):
            return MessageIds.run(0, 0, 0)
        column = np.array(owners, dtype=np.intp)
        if not batch.dedups:
            self._policies.apply_each(names, column, batch, now_ms)
        self._sender.refuse_too_large(batch, column)
        topics = self._topics.get_or_create_all(names, now_ms)
        if batch.dedups:
            return self._keyed(topics, column, batch, now_ms, policies=True)
        return self._sender.send_all(topics, column, batch, now_ms)
