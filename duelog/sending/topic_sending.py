"""The sending half of a topic: checks, encodes, applies delay policies, and hands on to what writes.

Nothing is written before all of a call is checked. `Topic` (topic.py) is this and the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from duelog.store.codec.body import EncodedBatch, encode_batch, encode_one, encode_payloads, encode_send
from duelog.store.errors import BrokenInvariant
from duelog.store.message import Message
from duelog.store.names import TopicName, validate_subscription_name
from duelog.store.position import MessageId, MessageIds

from ..engine import Engine
from ..topics.topic_state import TopicState
from .outbox import Outgoing
from .producer import Producer, ProducerState


class SendingTopic:
    """A topic that can be sent to. Thread-safe."""

    def __init__(self, engine: Engine, name: TopicName) -> None:
        self._engine = engine
        self._name = name
        self._loaded: TopicState | None = None

    @property
    def name(self) -> str:
        """Full name: persistent://tenant/namespace/name."""
        return str(self._name)

    def send(
        self,
        payload: bytes | bytearray | memoryview,
        *,
        deliver_at: int | datetime | None = None,
        deliver_after: float | timedelta | None = None,
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        allow_past: bool = False,
    ) -> MessageId:
        """Append one message and return its id once it is as durable as the store's `durability` says.

        deliver_at: epoch ms or an aware datetime; deliver_after: seconds or a timedelta; not both, and
        neither for a message that is due at once. A due time in the past is due at once; one before 2001 (10**12 ms)
        is taken for seconds given as milliseconds and refused, unless `allow_past`.
        Raises InvalidMessage, DelayTooLong (a policy forbids the delay), StoreFull, StoreFailed; then nothing was
        appended.
        """
        engine, now_ms = self._engine, self._writing_at()
        limit = engine.config.max_message_bytes
        due_ms, body = encode_send(payload, deliver_at, deliver_after, key, properties, now_ms, limit, allow_past)
        due_ms, overridden = engine.policies.apply_one(self._name, due_ms, now_ms)
        message_id = engine.sender.send_one(self._state(now_ms), due_ms, body, now_ms)
        if overridden:
            engine.policies.stored(self._name, overridden)
        return message_id

    def send_async(
        self,
        payload: bytes | bytearray | memoryview,
        *,
        deliver_at: int | datetime | None = None,
        deliver_after: float | timedelta | None = None,
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        allow_past: bool = False,
    ) -> Future[MessageId]:
        """As `send`, without waiting for the disk: a future of the id.

        Messages sent so to one topic by one thread keep their order. It waits only while `max_in_flight_bytes`
        of messages are on their way. A message that cannot be taken is refused here; the future has StoreFull or
        StoreFailed. A future that is cancelled before its message is being written takes it back. `close` of
        the store writes what is on its way.
        """
        message = Message(payload, deliver_at=deliver_at, deliver_after=deliver_after, key=key, properties=properties)
        future = self.put(self.outgoing(message, allow_past=allow_past), wait=True)
        if future is None:
            raise BrokenInvariant("the outbox refuses a message that waits for room")
        return future

    def outgoing(self, message: Message, *, allow_past: bool = False) -> Outgoing:
        """Check one message, delay policies applied, for `put`. Raises as `send_async`."""
        engine, now_ms = self._engine, self._writing_at()
        due_ms, body = encode_one(message, now_ms, engine.config.max_message_bytes, allow_past=allow_past)
        due_ms, overridden = engine.policies.apply_one(self._name, due_ms, now_ms)
        return Outgoing(Future(), due_ms, now_ms, body, overridden)

    def put(self, item: Outgoing, *, wait: bool) -> Future[MessageId] | None:
        """The second half of `send_async`; with `wait` False None where there is no room now."""
        return self._engine.outbox.put(self, item, wait=wait)

    def _writing_at(self) -> int:
        """The time, of a store that can be written to."""
        self._engine.check_writable()
        return self._engine.clock.now_ms()

    def write(self, batch: EncodedBatch, now_ms: int) -> MessageIds:
        """Append what `encode` gave."""
        return self._engine.sender.send(self._state(now_ms), batch, now_ms)

    def send_batch(self, messages: Iterable[Message], *, allow_past: bool = False) -> list[MessageId]:
        """Append messages; returns their ids, in the order of the messages, once all are durable.

        All are checked before any is written. The messages of one time partition are one transaction, and
        the partitions are committed side by side: if one fails (StoreFull, StoreFailed) others may stand.
        `allow_past`: as in `send`, for all of them.
        Raises InvalidMessage naming the first that cannot be taken (`messages[3].deliver_at`), and DelayTooLong.
        """
        batch, now_ms = self.encode(messages, allow_past=allow_past)
        if not len(batch):
            return []
        self.apply_policies(batch, now_ms)
        return self._engine.sender.send(self._state(now_ms), batch, now_ms).to_list()

    def send_payloads(
        self,
        payloads: Sequence[bytes],
        *,
        deliver_at: Sequence[int] | npt.NDArray[np.integer[Any]] | datetime | int | None = None,
        deliver_after: float | timedelta | None = None,
        allow_past: bool = False,
    ) -> MessageIds:
        """`send_batch` for bulk: messages that are nothing but payloads, without an object for each.

        deliver_at: epoch ms for each payload (ints, or an integer array), or one time for all. deliver_after: for
        all. allow_past: as in `send`. Each of the ids returned is made when it is looked at. Raises as `send_batch`,
        naming `deliver_at[3]`.
        """
        now_ms = self._writing_at()
        limit = self._engine.config.max_message_bytes
        batch = encode_payloads(payloads, deliver_at, deliver_after, now_ms, limit, allow_past=allow_past)
        if not len(batch):
            return MessageIds.run(0, 0, 0)
        self.apply_policies(batch, now_ms)
        return self._engine.sender.send(self._state(now_ms), batch, now_ms)

    def encode(self, messages: Iterable[Message], *, allow_past: bool = False) -> tuple[EncodedBatch, int]:
        """Check and encode messages as `send_batch` does, before delay policies; and the time it was done at."""
        now_ms = self._writing_at()
        limit = self._engine.config.max_message_bytes
        return encode_batch(messages, now_ms, limit, allow_past=allow_past), now_ms

    def apply_policies(self, batch: EncodedBatch, now_ms: int) -> None:
        """Give a batch the due times that the delay policies in force ask for. Raises DelayTooLong."""
        self._engine.policies.apply(self._name, batch, now_ms)

    def producer(self, name: str) -> Producer:
        """A producer whose numbered messages are stored once however often they are sent. O(partitions).

        All producers of one name share their numbers. Raises InvalidArgument.
        """
        self._engine.check_writable()
        validate_subscription_name(name, "producer")
        state = self._state(self._engine.clock.now_ms())
        with state.producers_lock:
            known = state.producers.get(name)
            if known is None:
                known = state.producers[name] = ProducerState(self._engine, state.topic_id, name)
        return Producer(self._engine, self, state, known, name)

    def _state(self, now_ms: int) -> TopicState:
        state = self._loaded
        if state is None or state.deleted:
            state = self._loaded = self._engine.topics.get_or_create(self._name, now_ms)
        return state
