"""What can be asked of an open store: operations by name, arguments and results as JSON has them.

The one place that says which operations there are, for a store in this process and by the control socket alike. Each
is atomic where the engine's call is; what has an attached consumer belongs to one `Operations`, one client's.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from inspect import signature
from typing import Protocol

from duelog.store.errors import ClosedError, ConsumerBusy, DuelogError, InvalidArgument
from duelog.store.message import ReceivedMessage, ScheduledMessage
from duelog.store.policy.policies import POLICY_FIELDS, EffectivePolicies, Policies, PolicyValue
from duelog.store.position import MessageId

from ..background.maintenance import TickResult
from ..stats import PartitionStats, StoreStats
from ..subscription import Subscription
from ..topic import Topic
from ..topics.seeking import PublishedAt, SeekTarget

STREAMED = frozenset({"topics", "scheduled", "peek"})
"""Operations whose result is a sequence that is made while it is read."""

NAMES = STREAMED | {
    "ack", "cancel", "create_subscription", "create_topic", "delete_subscription", "delete_topic", "effective",
    "expire", "figures", "leave", "partitions", "policies", "receive", "remove_policies", "reschedule",
    "save_snapshots", "seek", "send", "skip", "subscribe", "subscriptions", "tick", "topic_figures", "update_policies",
}  # fmt: skip
"""The operations; each is a method of `Operations`."""

_AT_ONCE = 16
_MOST_RECEIVED = 1_000
_MOST_RECEIVED_BYTES = 4 << 20
"""After so much payload one answer to `receive` ends."""


class Waiter(Protocol):
    """How a receiver waits: until it is woken, for so long."""

    def clear(self) -> None:
        """Forget what has woken it."""

    def wake(self) -> None:
        """Of any thread."""

    def wait(self, seconds: float | None) -> bool:
        """False: the client has gone."""


class Store(Protocol):
    """What is used of a DelayedStore."""

    def topic(self, name: str) -> Topic: ...
    def topics(self, namespace: str | None = None) -> Iterator[Topic]: ...
    def delete_topic(self, name: str) -> None: ...
    def stats(self) -> StoreStats: ...
    def partitions(self) -> list[PartitionStats]: ...
    def tick(self) -> TickResult: ...
    def flush(self) -> None: ...
    def save_snapshots(self) -> int: ...
    def policies(
        self, *, namespace: str | None = None, topic: str | None = None, subscription: str | None = None
    ) -> Policies | None: ...
    def all_policies(self) -> dict[str, Policies]: ...
    def effective_policies(self, topic: str, subscription: str | None = None) -> EffectivePolicies: ...
    def update_policies(
        self,
        /,
        *,
        namespace: str | None = None,
        topic: str | None = None,
        subscription: str | None = None,
        **values: PolicyValue | None,
    ) -> Policies: ...
    def remove_policies(
        self, *, namespace: str | None = None, topic: str | None = None, subscription: str | None = None
    ) -> bool: ...


class Operations:
    """One client's way to an open store. Not thread-safe."""

    def __init__(self, store: Store, waiter: Waiter) -> None:
        self._store = store
        self._waiter = waiter
        self._consumer: Subscription | None = None

    def ask(self, name: str, arguments: Mapping[str, object]) -> object:
        """The result of an operation; an iterator for those of STREAMED. Raises InvalidArgument, and what it raises."""
        if name not in NAMES:
            raise InvalidArgument("operation", name, f"expected one of {', '.join(sorted(NAMES))}")
        operation: Callable[..., object] = getattr(self, name)
        try:
            signature(operation).bind(**arguments)
        except TypeError as error:
            raise InvalidArgument("arguments", dict(arguments), f"{name}: {error}") from None
        return operation(**arguments)

    def close(self, *, failed: bool = True) -> None:
        """Leave: what was received and not acknowledged is handed out again. failed: see `Subscription.close`."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.remove_waker(self._waiter.wake)
            consumer.close(failed=failed)

    # -- topics and subscriptions ----------------------------------------------------------------------

    def topics(self, namespace: str | None = None, limit: int | None = None) -> Iterator[str]:
        """Full names, in order."""
        for at, topic in enumerate(self._store.topics(namespace)):
            if at == limit:
                return
            yield topic.name

    def create_topic(self, topic: str) -> bool:
        return self._store.topic(topic).create()

    def delete_topic(self, topic: str) -> None:
        self._store.delete_topic(topic)

    def subscriptions(self, topic: str) -> list[str]:
        return self._store.topic(topic).subscriptions()

    def create_subscription(self, topic: str, subscription: str, position: str) -> bool:
        """position: "earliest" or "latest"."""
        there = self._store.topic(topic)
        if there.exists() and subscription in there.subscriptions():
            return False
        there.subscribe(subscription, type="shared", initial_position=position).close()
        return True

    def delete_subscription(self, topic: str, subscription: str) -> None:
        self._store.topic(topic).unsubscribe(subscription)

    def seek(self, topic: str, subscription: str, to: str | Mapping[str, int]) -> str:
        """Go to "earliest", "latest", a position as text, {"due_ms": ...} or {"published_ms": ...}; the position."""
        there, target = self._store.topic(topic), _target(to)
        admin = there.subscription(subscription)
        try:
            return str(admin.reset(target))
        except ConsumerBusy:
            type_ = admin.stats().type
            if type_ is None:
                raise
        with there.subscribe(subscription, type=type_) as consumer:  # type: ignore[arg-type]  # one that it has
            return str(consumer.seek(target))

    def skip(self, topic: str, subscription: str, count: int) -> int:
        """Acknowledge the first messages that are due; how many."""
        return self._store.topic(topic).subscription(subscription).skip(count)

    def expire(self, topic: str, subscription: str, before_ms: int) -> int:
        """Acknowledge what was due before a time; how many."""
        return self._store.topic(topic).subscription(subscription).expire(before_ms)

    def peek(self, topic: str, subscription: str, count: int) -> Iterator[dict[str, object]]:
        """The first messages that are due and not acknowledged."""
        return map(_received, self._store.topic(topic).subscription(subscription).peek(count))

    # -- messages --------------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        payload: str,
        deliver_at: int | None = None,
        deliver_after: float | None = None,
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        allow_past: bool = False,
        create: bool = False,
    ) -> dict[str, object]:
        """payload: base64. create: make the topic where there is none."""
        target = self._store.topic(topic)
        if not create and not target.exists():
            raise InvalidArgument("TOPIC", topic, "there is no such topic; --create makes it")
        sent = target.send(
            _bytes("payload", payload),
            deliver_at=deliver_at,
            deliver_after=deliver_after,
            key=key,
            properties=properties,
            allow_past=allow_past,
        )
        stored = target.get(sent)
        due_ms = None if stored is None else stored.due_ms
        return {"message_id": str(sent), "topic": target.name, "due_ms": due_ms}

    def scheduled(
        self, topic: str, start_ms: int | None = None, end_ms: int | None = None, limit: int | None = None
    ) -> Iterator[dict[str, object]]:
        """Messages that are not due, by due time."""
        return map(_scheduled, self._store.topic(topic).scheduled(start_ms, end_ms, limit))

    def cancel(self, topic: str, ids: Sequence[str]) -> list[str]:
        """What became of each."""
        return [outcome.value for outcome in self._store.topic(topic).cancel_batch(_ids(ids))]

    def reschedule(
        self, topic: str, ids: Sequence[str], deliver_at: int | None = None, deliver_after: float | None = None
    ) -> list[str | None]:
        """The new id of each; None: too late, cancelled or unknown."""
        found = self._store.topic(topic).reschedule_batch(_ids(ids), deliver_at=deliver_at, deliver_after=deliver_after)
        return [None if each is None else str(each) for each in found]

    # -- receiving -------------------------------------------------------------------------------------

    def subscribe(self, topic: str, subscription: str, type: str = "exclusive", create: bool = False) -> dict[str, str]:
        """Attach this client's one consumer. create: make the subscription, and the topic, where there is none."""
        if self._consumer is not None:
            raise InvalidArgument("subscription", subscription, f"already receiving from {self._consumer.name!r}")
        there = self._store.topic(topic)
        if not create and not there.exists():
            raise InvalidArgument("TOPIC", topic, "there is no such topic; --create makes it")
        if not create and subscription not in there.subscriptions():
            reason = f"{there.name} has no such subscription; --create makes it"
            raise InvalidArgument("SUBSCRIPTION", subscription, reason)
        self._consumer = there.subscribe(subscription, type=type)  # type: ignore[arg-type]  # it is checked there
        self._consumer.add_waker(self._waiter.wake)
        return {"topic": there.name, "subscription": subscription}

    def receive(self, max_messages: int = 1, timeout: float | None = None) -> list[dict[str, object]]:
        """Messages that are due, once there is one; none: `timeout` seconds are over."""
        consumer = self._attached()
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or timeout < 0):
            raise InvalidArgument("timeout", timeout, "expected seconds, or null")
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._waiter.clear()
            found = self._due(consumer, max_messages)
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            if isinstance(found, list):
                return found
            if not consumer.may_wait or left == 0:
                return []
            again = None if found is None else max(found - consumer.clock.now_ms(), 0) / 1_000
            if not self._waiter.wait(min((each for each in (left, again) if each is not None), default=None)):
                raise ClosedError("the store, or the connection to it,")

    def _due(self, consumer: Subscription, max_messages: int) -> list[dict[str, object]] | int | None:
        """Messages; or when to look again, None: when woken. A few at a time, as they may be large."""
        if isinstance(max_messages, bool) or not isinstance(max_messages, int) or max_messages < 1:
            raise InvalidArgument("max_messages", max_messages, "expected an int of at least 1")
        found: list[dict[str, object]] = []
        size, most = 0, min(max_messages, _MOST_RECEIVED)
        while len(found) < most and size < _MOST_RECEIVED_BYTES:
            try:
                batch, again_ms = consumer.poll(min(most - len(found), _AT_ONCE))
            except DuelogError:
                if found:  # they have been handed out; what stops the store is raised when it is asked again
                    break
                raise
            if not batch:
                return found or again_ms
            found += map(_received, batch)
            size += sum(len(message.payload) for message in batch)
        return found

    def ack(self, positions: Sequence[str]) -> int:
        """Acknowledge received messages, durably; how many were not acknowledged before."""
        return self._attached().ack(_ids(positions), durable=True)

    def leave(self) -> None:
        """Give back what was received and not acknowledged, without counting it as failed."""
        self.close(failed=False)

    def _attached(self) -> Subscription:
        if self._consumer is None:
            raise InvalidArgument("operation", "receive", "subscribe first")
        return self._consumer

    # -- figures, upkeep, policies ---------------------------------------------------------------------

    def figures(self) -> dict[str, object]:
        return asdict(self._store.stats())

    def topic_figures(self, topic: str) -> dict[str, object]:
        found = self._store.topic(topic).stats()
        subscriptions = [{**asdict(each), "mark_delete": str(each.mark_delete)} for each in found.subscriptions]
        return {**asdict(found), "subscriptions": subscriptions}

    def partitions(self) -> list[dict[str, object]]:
        return list(map(asdict, self._store.partitions()))

    def tick(self) -> dict[str, object]:
        """Do what is due now; what was done, and when the next thing is due."""
        return {**asdict(done := self._store.tick()), "suspended": [str(each) for each in done.suspended]}

    def save_snapshots(self) -> int:
        """Save the delay indexes in memory of which the next start would have to read much; how many."""
        return self._store.save_snapshots()

    def policies(
        self, namespace: str | None = None, topic: str | None = None, subscription: str | None = None
    ) -> dict[str, object] | None:
        """What is set at just this scope; with no scope, by the name of each where something is set."""
        if namespace is topic is subscription is None:
            return {scope: asdict(each) for scope, each in self._store.all_policies().items()}
        found = self._store.policies(namespace=namespace, topic=topic, subscription=subscription)
        return None if found is None else asdict(found)

    def effective(self, topic: str, subscription: str | None = None) -> dict[str, object]:
        """What is in force, and where each value was set."""
        found = self._store.effective_policies(topic, subscription)
        return {"values": {name: getattr(found, name) for name in POLICY_FIELDS}, "set_at": dict(found.set_at)}

    def update_policies(
        self,
        values: Mapping[str, PolicyValue | None],
        namespace: str | None = None,
        topic: str | None = None,
        subscription: str | None = None,
    ) -> dict[str, object]:
        """Set fields, None: unset; what is set there then."""
        if not isinstance(values, Mapping) or values.keys() - POLICY_FIELDS:
            raise InvalidArgument("values", values, f"expected values of {', '.join(POLICY_FIELDS)}")
        return asdict(
            self._store.update_policies(namespace=namespace, topic=topic, subscription=subscription, **values)
        )

    def remove_policies(
        self, namespace: str | None = None, topic: str | None = None, subscription: str | None = None
    ) -> bool:
        return self._store.remove_policies(namespace=namespace, topic=topic, subscription=subscription)


def _target(to: object) -> SeekTarget:
    if isinstance(to, str):
        return to if to in ("earliest", "latest") else MessageId.parse(to)
    if isinstance(to, Mapping) and len(to) == 1:
        ((name, value),) = to.items()
        if isinstance(value, int) and name in ("due_ms", "published_ms"):
            return value if name == "due_ms" else PublishedAt(value)
    raise InvalidArgument(
        "to", to, 'expected "earliest", "latest", a position, {"due_ms": ...} or {"published_ms": ...}'
    )


def _ids(texts: object) -> list[MessageId]:
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise InvalidArgument("ids", texts, "expected a list of ids")
    return [MessageId.parse(text) for text in texts]


def _bytes(field: str, text: object) -> bytes:
    try:
        return base64.b64decode(text, validate=True)  # type: ignore[arg-type]
    except (binascii.Error, TypeError, ValueError):
        raise InvalidArgument(field, text, "expected base64") from None


def _scheduled(message: ScheduledMessage) -> dict[str, object]:
    return {
        "message_id": str(message.message_id),
        "payload": base64.b64encode(message.payload).decode(),
        "key": message.key,
        "properties": message.properties,
        "due_ms": message.due_ms,
        "publish_ms": message.publish_ms,
        "topic": message.topic,
    }


def _received(message: ReceivedMessage) -> dict[str, object]:
    return {
        "payload": base64.b64encode(message.payload).decode(),
        "key": message.key,
        "properties": message.properties,
        "message_id": str(message.message_id),
        "position": str(message.position),
        "due_ms": message.due_ms,
        "publish_ms": message.publish_ms,
        "redelivery_count": message.redelivery_count,
        "topic": message.topic,
        "subscription": message.subscription,
    }
