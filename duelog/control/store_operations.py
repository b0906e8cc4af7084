"""Operations of an open store by name, with arguments and results as JSON has them.

The one place that says which operations there are, for a store in this process and by the control socket alike. Each
is atomic where the engine's call is; what has an attached consumer belongs to one `Operations`, one client's.
"""

from __future__ import annotations

import base64
import binascii
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from inspect import signature
from typing import Any, Protocol

from duelog.store.clock import Clock
from duelog.store.config import StoreConfig
from duelog.store.duration import Duration, duration_ms
from duelog.store.errors import ClosedError, ConsumerBusy, DelayTooLong, DuelogError, InvalidArgument
from duelog.store.message import Message, ReceivedMessage, ScheduledMessage
from duelog.store.policy.policies import POLICY_FIELDS, EffectivePolicies, Policies, PolicyValue
from duelog.store.position import MessageId

from ..stats import PartitionStats, StoreStats
from ..subscription import Subscription
from ..topic import Topic
from ..topics.dead_letters import DeadLetter, Letters
from ..topics.seeking import PublishedAt, SeekTarget
from ..upkeep.maintenance import TickResult
from ..upkeep.schedule import Misfires, Schedule

_log = logging.getLogger("duelog.control")

STREAMED = frozenset({"dead_letters", "keys", "peek", "scheduled", "schedules", "topics"})
"""Operations whose result is a sequence that is made while it is read."""

NAMES = STREAMED | {
    "ack", "cancel", "cancel_key", "check_delays", "create_subscription", "create_topic", "delete_subscription",
    "delete_topic", "effective", "every", "expire", "figures", "find", "has_topic", "leave", "limits", "partitions",
    "pause", "pause_schedule", "policies", "purge_dead_letters", "receive", "remove_policies", "remove_schedule",
    "requeue_dead_letters", "reschedule", "resume", "resume_schedule", "save_snapshots", "seek", "send",
    "send_messages", "skip", "subscribe", "subscriptions", "tick", "topic_figures", "update_policies",
}  # fmt: skip
"""The operations; each is a method of `Operations`."""

_MESSAGE_FIELDS = {"payload", "deliver_at", "deliver_after", "key", "properties", "dedup_key", "dedup_for", "replace"}

_AT_ONCE = 16
_MOST_RECEIVED = 1_000
_MOST_RECEIVED_BYTES = 4 << 20
"""After so much payload one answer to `receive` ends."""


class Store(Protocol):
    """The calls of a DelayedStore that the operations use; it makes them, so they cannot import it."""

    topic_deleter: Callable[[str, bool], object] | None

    @property
    def clock(self) -> Clock: ...
    @property
    def config(self) -> StoreConfig: ...
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
    def dead_letters(
        self,
        topic: str | None = None,
        subscription: str | None = None,
        *,
        reason: str | None = None,
        key: str | None = None,
        older_than: Duration | None = None,
    ) -> Iterator[DeadLetter]: ...
    def requeue_dead_letters(self, letters: Letters, *, delay: Duration = 0) -> int: ...
    def purge_dead_letters(self, letters: Letters) -> int: ...
    def remove_policies(
        self, *, namespace: str | None = None, topic: str | None = None, subscription: str | None = None
    ) -> bool: ...


class Waiter(Protocol):
    """How a receiver waits: until it is woken, for so long."""

    def clear(self) -> None:
        """Forget what has woken it."""

    def wake(self) -> None:
        """Wake the receiver; from any thread."""

    def wait(self, seconds: float | None) -> bool:
        """False: the client has gone."""


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

    def delete_topic(self, topic: str, force: bool = False) -> None:
        """force: though it is in use, by the clients of a broker or by consumers. Raises InvalidArgument: it is."""
        if self._store.topic_deleter is not None:
            self._store.topic_deleter(topic, force)
            return
        consumers = 0 if force else sum(each.consumers for each in self._store.topic(topic).stats().subscriptions)
        if consumers:
            raise InvalidArgument("topic", topic, f"consumers use it: {consumers}; force closes them")
        self._store.delete_topic(topic)

    def subscriptions(self, topic: str) -> list[str]:
        return self._store.topic(topic).subscriptions()

    def create_subscription(self, topic: str, subscription: str, position: str) -> bool:
        """position: "earliest" or "latest"."""
        target = self._store.topic(topic)
        if target.exists() and subscription in target.subscriptions():
            return False
        target.subscribe(subscription, type="shared", initial_position=position).close()
        return True

    def delete_subscription(self, topic: str, subscription: str) -> None:
        self._store.topic(topic).unsubscribe(subscription)

    def seek(self, topic: str, subscription: str, to: str | Mapping[str, int]) -> str:
        """Go to "earliest", "latest", a position as text, {"due_ms": ...} or {"published_ms": ...}; the position."""
        target, place = self._store.topic(topic), seek_target(to)
        admin = target.subscription(subscription)
        try:
            return str(admin.reset(place))
        except ConsumerBusy:
            type_ = admin.stats().type
            if type_ is None:
                raise
        with target.subscribe(subscription, type=type_) as consumer:  # type: ignore[arg-type]  # one that it has
            return str(consumer.seek(place))

    def skip(self, topic: str, subscription: str, count: int) -> int:
        """Acknowledge the first messages that are due; how many."""
        return self._store.topic(topic).subscription(subscription).skip(count)

    def expire(self, topic: str, subscription: str, older_than: float) -> int:
        """Acknowledge what has been due for so many seconds; how many."""
        before_ms = max(self._store.clock.now_ms() - duration_ms("older_than", older_than), 0)
        return self._store.topic(topic).subscription(subscription).expire(before_ms)

    def pause(
        self, topic: str, subscription: str, until_ms: int | None = None, seconds: float | None = None
    ) -> int | None:
        """Hand nothing out until a time, for so many seconds, or until it is resumed; the time, None: until then."""
        if until_ms is not None and seconds is not None:
            raise InvalidArgument("seconds", seconds, f"until_ms={until_ms} is given too; one of the two")
        if seconds is not None:
            until_ms = self._store.clock.now_ms() + duration_ms("seconds", seconds)
        self._store.topic(topic).subscription(subscription).pause(until_ms)
        return until_ms

    def resume(self, topic: str, subscription: str) -> None:
        """Hand out again."""
        self._store.topic(topic).subscription(subscription).resume()

    def peek(self, topic: str, subscription: str, count: int) -> Iterator[dict[str, object]]:
        """The first messages that are due and not acknowledged."""
        return map(received_json, self._store.topic(topic).subscription(subscription).peek(count))

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
        ttl: float | None = None,
        dedup_key: str | None = None,
        dedup_for: float | None = None,
        replace: bool = False,
        create: bool = False,
    ) -> dict[str, object]:
        """payload: base64. create: make the topic where there is none."""
        target = self._store.topic(topic)
        if not create and not target.exists():
            raise InvalidArgument("TOPIC", topic, "there is no such topic; --create makes it")
        sent = target.send(
            payload_of("payload", payload),
            deliver_at=deliver_at,
            deliver_after=deliver_after,
            key=key,
            properties=properties,
            allow_past=allow_past,
            ttl=ttl,
            dedup_key=dedup_key,
            dedup_for=dedup_for,
            replace=replace,
        )
        return {"message_id": str(sent), "topic": target.name, "due_ms": self._due_ms_of(target, sent)}

    @staticmethod
    def _due_ms_of(target: Topic, sent: MessageId) -> int | None:
        """When a message that has just been stored is due, for people to read; None: that cannot be found out.

        It is stored whatever is raised here: an error would have it sent again.
        """
        try:
            stored = target.get(sent)
        except Exception:  # a delivery that came first, deletion of the topic, closing of the store, a disk that fails
            _log.exception("message %s is stored, and could not be read back", sent)
            return None
        return None if stored is None else stored.due_ms

    def scheduled(
        self, topic: str, start_ms: int | None = None, end_ms: int | None = None, limit: int | None = None
    ) -> Iterator[dict[str, object]]:
        """Messages that are not due, by due time."""
        return map(scheduled_json, self._store.topic(topic).scheduled(start_ms, end_ms, limit))

    def cancel(self, topic: str, ids: Sequence[str]) -> list[str]:
        """Cancel messages; the outcome of each."""
        return [outcome.value for outcome in self._store.topic(topic).cancel_batch(message_ids_of(ids))]

    def reschedule(
        self, topic: str, ids: Sequence[str], deliver_at: int | None = None, deliver_after: float | None = None
    ) -> list[str | None]:
        """The new id of each; None: too late, cancelled or unknown."""
        new_ids = self._store.topic(topic).reschedule_batch(
            message_ids_of(ids), deliver_at=deliver_at, deliver_after=deliver_after
        )
        return [None if new_id is None else str(new_id) for new_id in new_ids]

    # -- receiving -------------------------------------------------------------------------------------

    def subscribe(
        self, topic: str, subscription: str, type: str = "exclusive", create: bool = False
    ) -> dict[str, object]:
        """Attach this client's one consumer. create: make the subscription, and the topic, where there is none."""
        if self._consumer is not None:
            raise InvalidArgument("subscription", subscription, f"already receiving from {self._consumer.name!r}")
        target = self._store.topic(topic)
        if not create and not target.exists():
            raise InvalidArgument("TOPIC", topic, "there is no such topic; --create makes it")
        is_new = not target.exists() or subscription not in target.subscriptions()
        if is_new and not create:
            reason = f"{target.name} has no such subscription; --create makes it"
            raise InvalidArgument("SUBSCRIPTION", subscription, reason)
        self._consumer = target.subscribe(subscription, type=type)  # type: ignore[arg-type]  # it is checked there
        self._consumer.add_waker(self._waiter.wake)
        return {"topic": target.name, "created": is_new}

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
        messages: list[dict[str, object]] = []
        size, most = 0, min(max_messages, _MOST_RECEIVED)
        while len(messages) < most and size < _MOST_RECEIVED_BYTES:
            try:
                batch, again_ms = consumer.poll(min(most - len(messages), _AT_ONCE))
            except DuelogError:
                if messages:  # they have been handed out; what stops the store is raised when it is asked again
                    break
                raise
            if not batch:
                return messages or again_ms
            messages += map(received_json, batch)
            size += sum(len(message.payload) for message in batch)
        return messages

    def ack(self, positions: Sequence[str]) -> int:
        """Acknowledge received messages, durably; how many were not acknowledged before."""
        return self._attached().ack(message_ids_of(positions), durable=True)

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
        figures = self._store.topic(topic).stats()
        subscriptions = [
            {**asdict(subscription), "mark_delete": str(subscription.mark_delete)}
            for subscription in figures.subscriptions
        ]
        return {**asdict(figures), "subscriptions": subscriptions}

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
        """The policies set at just this scope; without a scope, those of every scope by its name."""
        if namespace is topic is subscription is None:
            return {scope: asdict(each) for scope, each in self._store.all_policies().items()}
        policies = self._store.policies(namespace=namespace, topic=topic, subscription=subscription)
        return None if policies is None else asdict(policies)

    def effective(self, topic: str, subscription: str | None = None) -> dict[str, object]:
        """The policies in force, and the scope at which each value was set."""
        policies = self._store.effective_policies(topic, subscription)
        return {"values": {name: getattr(policies, name) for name in POLICY_FIELDS}, "set_at": dict(policies.set_at)}

    def update_policies(
        self,
        values: Mapping[str, PolicyValue | None],
        namespace: str | None = None,
        topic: str | None = None,
        subscription: str | None = None,
    ) -> dict[str, object]:
        """Set fields, None: unset; what is set there then."""
        if not isinstance(values, Mapping):
            raise InvalidArgument("values", values, "expected values by policy")
        for name in values.keys() - POLICY_FIELDS:
            raise InvalidArgument("policy", name, f"expected one of {', '.join(POLICY_FIELDS)}")
        return asdict(
            self._store.update_policies(namespace=namespace, topic=topic, subscription=subscription, **values)
        )

    def remove_policies(
        self, namespace: str | None = None, topic: str | None = None, subscription: str | None = None
    ) -> bool:
        return self._store.remove_policies(namespace=namespace, topic=topic, subscription=subscription)

    # -- dead letters ----------------------------------------------------------------------------------

    def dead_letters(
        self,
        topic: str | None = None,
        subscription: str | None = None,
        reason: str | None = None,
        key: str | None = None,
        older_than: float | None = None,
    ) -> Iterator[dict[str, object]]:
        """Dead letters, by `DelayedStore.dead_letters`."""
        letters = self._store.dead_letters(topic, subscription, reason=reason, key=key, older_than=older_than)
        return map(letter_json, letters)

    def requeue_dead_letters(
        self,
        ids: Sequence[str] | None = None,
        delay: float = 0,
        topic: str | None = None,
        subscription: str | None = None,
        reason: str | None = None,
        key: str | None = None,
        older_than: float | None = None,
    ) -> int:
        """Deliver again those of these ids among what the others leave, None: all of that; how many."""
        letters = self._store.dead_letters(topic, subscription, reason=reason, key=key, older_than=older_than)
        return self._store.requeue_dead_letters(_chosen(letters, ids), delay=delay)

    def purge_dead_letters(
        self,
        ids: Sequence[str] | None = None,
        topic: str | None = None,
        subscription: str | None = None,
        reason: str | None = None,
        key: str | None = None,
        older_than: float | None = None,
    ) -> int:
        """Drop them for good; how many."""
        letters = self._store.dead_letters(topic, subscription, reason=reason, key=key, older_than=older_than)
        return self._store.purge_dead_letters(_chosen(letters, ids))

    # -- schedules -------------------------------------------------------------------------------------

    def every(
        self,
        topic: str,
        name: str,
        payload: str = "",
        cron: str | None = None,
        interval: float | None = None,
        timezone: str = "UTC",
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        until: int | None = None,
        count: int | None = None,
        jitter: float = 0,
        misfires: Misfires = "first",
        grace: float | None = None,
        create: bool = False,
    ) -> dict[str, object]:
        """Set a schedule, by `Topic.every`. payload: base64. create: make the topic where there is none."""
        target = self._store.topic(topic)
        if not create and not target.exists():
            raise InvalidArgument("TOPIC", topic, "there is no such topic; --create makes it")
        made = target.every(
            name,
            cron=cron,
            interval=interval,
            timezone=timezone,
            payload=payload_of("payload", payload),
            key=key,
            properties=properties,
            until=until,
            count=count,
            jitter=jitter,
            misfires=misfires,
            grace=grace,
        )
        return schedule_json(made)

    def schedules(self, topic: str | None = None) -> Iterator[dict[str, object]]:
        """Those of a topic by name, or of all topics."""
        for one in self._store.topics() if topic is None else [self._store.topic(topic)]:
            yield from map(schedule_json, one.schedules())

    def pause_schedule(self, topic: str, name: str) -> dict[str, object] | None:
        """Take its pending occurrence back, until it is resumed; None: there is no such schedule."""
        schedule = self._store.topic(topic).pause_schedule(name)
        return None if schedule is None else schedule_json(schedule)

    def resume_schedule(self, topic: str, name: str) -> dict[str, object] | None:
        """Go on with the first occurrence after now; None: there is no such schedule."""
        schedule = self._store.topic(topic).resume_schedule(name)
        return None if schedule is None else schedule_json(schedule)

    def remove_schedule(self, topic: str, name: str) -> bool:
        """End it and take its pending occurrence back; False: there is no such schedule."""
        return self._store.topic(topic).remove_schedule(name)

    # -- imports ---------------------------------------------------------------------------------------

    def limits(self) -> dict[str, int]:
        """The facts that an import needs before it sends: the store's time and its largest message."""
        return {"now_ms": self._store.clock.now_ms(), "max_message_bytes": self._store.config.max_message_bytes}

    def has_topic(self, topic: str) -> bool:
        return self._store.topic(topic).exists()

    def check_delays(self, topic: str, delays: Sequence[Sequence[Any]]) -> dict[str, object] | None:
        """Find the first pair of deliver_at and deliver_after that a delay policy refuses; None: none."""
        if not self._store.effective_policies(topic).max_delivery_delay_ms:
            return None
        check = self._store.topic(topic).sender.check
        for at, pair in enumerate(delays):
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise InvalidArgument(f"delays[{at}]", pair, "expected deliver_at and deliver_after")
            try:
                check(Message(b"", deliver_at=pair[0], deliver_after=pair[1]), allow_past=True)
            except DelayTooLong as error:
                return {"at": at, "asked_ms": error.asked_ms, "reason": error.reason}
        return None

    def send_messages(
        self,
        topic: str,
        messages: Sequence[Mapping[str, object]],
        allow_past: bool = False,
        producer: str | None = None,
        first: int = 0,
    ) -> int:
        """Send a batch, numbered from `first` on where a producer is named; how many that one had stored before."""
        if not isinstance(messages, list):
            raise InvalidArgument("messages", messages, "expected a list")
        batch = [_message(f"messages[{at}]", each) for at, each in enumerate(messages)]
        target = self._store.topic(topic)
        if producer is None:
            target.send_batch(batch, allow_past=allow_past)
            return 0
        numbered = target.producer(producer)
        last = numbered.last_sequence_id
        numbered.send_batch(batch, first_sequence_id=first, allow_past=allow_past)
        return min(max(last + 1 - first, 0), len(batch))  # from 0 on without a gap: batches come in order

    def keys(self, topic: str, prefix: str = "") -> Iterator[str]:
        """Deduplication keys of pending messages, by `Topic.keys`."""
        return self._store.topic(topic).keys(prefix)

    def find(self, topic: str, key: str) -> dict[str, object] | None:
        """The pending message of a deduplication key, by `Topic.find`; None: there is none."""
        message = self._store.topic(topic).find(key)
        return None if message is None else scheduled_json(message)

    def cancel_key(self, topic: str, key: str) -> bool:
        """Cancel the pending message of a deduplication key, by `Topic.cancel_key`; False: there is none."""
        return self._store.topic(topic).cancel_key(key)


def _chosen(held: Iterator[DeadLetter], ids: Sequence[str] | None) -> list[DeadLetter]:
    """The letters of some ids. Raises InvalidArgument for an id that none has."""
    if ids is None:
        return list(held)
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise InvalidArgument("ids", ids, "expected a list of ids, or null")
    wanted = set(map(str, ids))
    letters = [letter for letter in held if str(letter.message_id) in wanted]
    known = {str(letter.message_id) for letter in letters}
    for each in ids:
        if str(each) not in known:
            raise InvalidArgument("ID", each, "no dead letter has this id")
    return letters


def _message(field: str, fields: object) -> Message:
    if not isinstance(fields, Mapping) or not {"payload"} <= fields.keys() <= _MESSAGE_FIELDS:
        raise InvalidArgument(
            field, fields, f"expected an object with payload, and of {', '.join(sorted(_MESSAGE_FIELDS))}"
        )
    return Message(**{**fields, "payload": payload_of(f"{field}: payload", fields["payload"])})


def seek_target(to: object) -> SeekTarget:
    """Where to go in a log. Raises InvalidArgument."""
    if isinstance(to, str):
        return to if to in ("earliest", "latest") else MessageId.parse(to)
    if isinstance(to, Mapping) and len(to) == 1:
        ((name, value),) = to.items()
        if isinstance(value, int) and name in ("due_ms", "published_ms"):
            return value if name == "due_ms" else PublishedAt(value)
    raise InvalidArgument(
        "to", to, 'expected "earliest", "latest", a position, {"due_ms": ...} or {"published_ms": ...}'
    )


def message_ids_of(texts: object) -> list[MessageId]:
    """Ids from their texts. Raises InvalidArgument."""
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise InvalidArgument("ids", texts, "expected a list of ids")
    return [MessageId.parse(text) for text in texts]


def payload_of(field: str, text: object) -> bytes:
    """Bytes from base64. Raises InvalidArgument."""
    try:
        return base64.b64decode(text, validate=True)  # type: ignore[arg-type]
    except (binascii.Error, TypeError, ValueError):
        raise InvalidArgument(field, text, "expected base64") from None


def scheduled_json(message: ScheduledMessage) -> dict[str, object]:
    """A message that is not due."""
    return {
        "message_id": str(message.message_id),
        "payload": base64.b64encode(message.payload).decode(),
        "key": message.key,
        "properties": message.properties,
        "due_ms": message.due_ms,
        "publish_ms": message.publish_ms,
        "occurrence": None if message.occurrence is None else message.occurrence._asdict(),
        "topic": message.topic,
        "dedup_key": message.dedup_key,
    }


def received_json(message: ReceivedMessage) -> dict[str, object]:
    """A message that was handed out."""
    return {
        "payload": base64.b64encode(message.payload).decode(),
        "key": message.key,
        "properties": message.properties,
        "message_id": str(message.message_id),
        "position": str(message.position),
        "due_ms": message.due_ms,
        "publish_ms": message.publish_ms,
        "occurrence": None if message.occurrence is None else message.occurrence._asdict(),
        "redelivery_count": message.redelivery_count,
        "retries": message.retries,
        "addressee": message.addressee,
        "topic": message.topic,
        "subscription": message.subscription,
    }


def letter_json(letter: DeadLetter) -> dict[str, object]:
    """A dead letter."""
    return {
        **{each.name: getattr(letter, each.name) for each in fields(letter)},
        "payload": base64.b64encode(letter.payload).decode(),
        "message_id": str(letter.message_id),
        "position": str(letter.position),
        "occurrence": None if letter.occurrence is None else letter.occurrence._asdict(),
    }


def schedule_json(schedule: Schedule) -> dict[str, object]:
    """A schedule, and the one that it replaced."""
    return {
        **{each.name: getattr(schedule, each.name) for each in fields(schedule)},
        "payload": base64.b64encode(schedule.payload).decode(),
        "next_id": None if schedule.next_id is None else str(schedule.next_id),
        "replaced": None if schedule.replaced is None else schedule_json(schedule.replaced),
    }
