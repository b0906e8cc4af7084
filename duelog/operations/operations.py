"""The operations of an open store, which are asked for by name, with arguments and results in JSON.

The one place that says which operations there are: `OPERATIONS` is made from the class. Python is where an operation is
written (`Topic`, `Subscription`, `DelayedStore`); here it is offered, as it is, or by a method whose arguments and
results JSON has. Each is atomic where the engine's call is.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from duelog.store.duration import Duration, duration_ms
from duelog.store.errors import ConsumerBusy, DelayTooLong, InvalidArgument
from duelog.store.message import MAX_DUE_MS, Message, ReceivedMessage, ScheduledMessage
from duelog.store.names import SCHEME, validate_namespace_name
from duelog.store.position import MessageId

from .face_table import offered
from .json_form import to_json
from .operation import Ask, Operation, Right, operation
from .transacted import transact

if TYPE_CHECKING:
    from duelog.store.clock import Clock
    from duelog.store.config import StoreConfig
    from duelog.store.policy.policies import EffectivePolicies, Policies

    from ..stats import Connections
    from ..topic import Topic
    from ..topics.dead_letters import DeadLetter, Letters
    from ..topics.seeking import SeekTarget
    from ..transactions import Transaction
    from ..upkeep.maintenance import TickResult
    from ..upkeep.schedule import Schedule

_log = logging.getLogger("duelog.control")

_AFTER = re.compile(r"([0-9]{1,16}):(.*)")
_MOST_LISTED = 1_000
_MOST_LOOKED_AT = 10_000
_PREVIEW_BYTES = 256
"""Bytes of a payload that a page of messages has."""


class EntryReader(Protocol):
    """Shows a message as a client of another protocol has sent it."""

    def __call__(self, payload: bytes, *, whole: bool) -> dict[str, Any] | None:
        """In JSON, wholly or its beginning; None: it is none of that protocol."""


class Store(Protocol):
    """The calls of a DelayedStore that the operations use; it makes them, so they cannot import it.

    `*_: Any, **__: Any`: the arguments of `DelayedStore`.
    """

    topic_deleter: Callable[[str, bool], object] | None
    entry_reader: EntryReader | None

    @property
    def clock(self) -> Clock: ...
    @property
    def config(self) -> StoreConfig: ...
    def topic(self, name: str) -> Topic: ...
    def topics(self, namespace: str | None = None) -> Iterator[Topic]: ...
    def delete_topic(self, name: str) -> None: ...
    def connections(self) -> Connections: ...
    def tick(self) -> TickResult: ...
    def policies(self, *_: Any, **__: Any) -> Policies | None: ...
    def transaction(self) -> Transaction: ...
    def all_policies(self) -> dict[str, Policies]: ...
    def effective_policies(self, topic: str, subscription: str | None = None) -> EffectivePolicies: ...
    def update_policies(self, *_: Any, **__: Any) -> Policies: ...
    def dead_letters(self, *_: Any, **__: Any) -> Iterator[DeadLetter]: ...
    def requeue_dead_letters(self, letters: Letters, *, delay: Duration = 0) -> int: ...
    def purge_dead_letters(self, letters: Letters) -> int: ...


class Operations:
    """The operations of an open store. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def ask(self, name: str, arguments: Mapping[str, object]) -> object:
        """Return an operation's result in JSON, an iterator if it is streamed. Raises InvalidArgument; its errors."""
        known = OPERATIONS.get(name)
        if known is None:
            raise InvalidArgument("operation", name, f"expected one of {', '.join(sorted(OPERATIONS))}")
        return known.answer(self, arguments)

    # -- topics and subscriptions ----------------------------------------------------------------------

    @operation(Right.READ)
    def topics(self, namespace: str | None = None, limit: int | None = None) -> Iterator[str]:
        """Full names, in order."""
        for at, topic in enumerate(self._store.topics(namespace)):
            if at == limit:
                return
            yield topic.name

    create_topic = offered("Topic.create", Right.ADMIN)

    @operation(Right.ADMIN)
    def delete_topic(self, topic: str, force: bool = False) -> None:
        """force: though it is in use, by the clients of a broker or by consumers. Raises InvalidArgument: it is."""
        if self._store.topic_deleter is not None:
            self._store.topic_deleter(topic, force)
            return
        consumers = 0 if force else sum(each.consumers for each in self._store.topic(topic).stats().subscriptions)
        if consumers:
            raise InvalidArgument("topic", topic, f"consumers use it: {consumers}; force closes them")
        self._store.delete_topic(topic)

    subscriptions = offered("Topic.subscriptions")

    @operation(Right.CONSUME)
    def create_subscription(self, topic: str, subscription: str, position: str) -> bool:
        """position: "earliest" or "latest"."""
        target = self._store.topic(topic)
        if target.exists() and subscription in target.subscriptions():
            return False
        target.subscribe(subscription, type="shared", initial_position=position).close()
        return True

    @operation(Right.CONSUME)
    def delete_subscription(self, topic: str, subscription: str) -> None:
        self._store.topic(topic).unsubscribe(subscription)

    @operation(Right.CONSUME)
    def seek(self, topic: str, subscription: str, to: str | Mapping[str, int]) -> MessageId:
        """Go to "earliest", "latest", a position as text, {"due_ms": ...} or {"published_ms": ...}; the position."""
        target, place = self._store.topic(topic), _seek_target(to)
        admin = target.subscription(subscription)
        try:
            return admin.reset(place)
        except ConsumerBusy:
            type_ = admin.stats().type
            if type_ is None:
                raise
        with target.subscribe(subscription, type=type_) as consumer:  # type: ignore[arg-type]  # one that it has
            return consumer.seek(place)

    @operation(Right.CONSUME)
    def skip(self, topic: str, subscription: str, count: int) -> int:
        """Acknowledge the first messages that are due; how many."""
        return self._store.topic(topic).subscription(subscription).skip(count)

    @operation(Right.CONSUME)
    def expire(self, topic: str, subscription: str, older_than: float) -> int:
        """Acknowledge what has been due for so many seconds; how many."""
        before_ms = max(self._store.clock.now_ms() - duration_ms("older_than", older_than), 0)
        return self._store.topic(topic).subscription(subscription).expire(before_ms)

    @operation(Right.CONSUME)
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

    resume = offered("SubscriptionAdmin.resume")

    @operation(Right.CONSUME, looks=True)
    def peek(self, topic: str, subscription: str, count: int) -> Iterator[ReceivedMessage]:
        """Look at the first messages that are due and not acknowledged."""
        return iter(self._store.topic(topic).subscription(subscription).peek(count))

    # -- messages --------------------------------------------------------------------------------------

    @operation(Right.ADMIN)
    def transaction(self, operations: list[dict[str, Any]]) -> list[Any]:
        """Do all of these, or none: {"operation": NAME, ...} with arguments as of `Transaction`; their results."""
        return transact(self._store.transaction(), operations, in_json=True)

    @operation(Right.PRODUCE, like="Topic.send")
    def send(self, topic: str, payload: bytes, create: bool = False, **message: Any) -> dict[str, Any]:
        """Send one message. create: make the topic where there is none."""
        target = self._topic(topic, create)
        sent = target.send(payload, **message)
        due_ms = self._due_ms_of(target, sent)
        return {"message_id": str(sent), "topic": target.name, "due_ms": due_ms, "stored": sent.stored}

    def _topic(self, name: str, create: bool) -> Topic:
        """A topic to send to. Raises InvalidArgument where there is none and none is to be made."""
        topic = self._store.topic(name)
        if not create and not topic.exists():
            raise InvalidArgument("TOPIC", name, "there is no such topic; --create makes it")
        return topic

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

    @operation(Right.READ)
    def scheduled(
        self,
        topic: str,
        start_ms: int | None = None,
        end_ms: int | None = None,
        limit: int | None = None,
        newest_first: bool = False,
    ) -> Iterator[ScheduledMessage]:
        """List messages that are not due, by due time."""
        return self._store.topic(topic).scheduled(start_ms, end_ms, limit, newest_first=newest_first)

    @operation(Right.READ)
    def count(
        self, topic: str, start_ms: int | None = None, end_ms: int | None = None, prefix: str | None = None
    ) -> int:
        """Count messages that are not due, of a range of due times, with keys that begin with a prefix."""
        return self._store.topic(topic).count(start_ms, end_ms, prefix=prefix)

    @operation(Right.READ)
    def scheduled_page(
        self,
        topic: str,
        start_ms: int | None = None,
        end_ms: int | None = None,
        limit: int = 50,
        after: str | None = None,
        payload_bytes: int = _PREVIEW_BYTES,
    ) -> dict[str, Any]:
        """List those as `scheduled`, a page of them; its `next` is the `after` of the page that follows, None: the end.

        Of each payload come the first bytes, and `bytes` says how many there are. `client` has what a client of the
        broker sent, null: a program sent it.
        """
        if isinstance(payload_bytes, bool) or not isinstance(payload_bytes, int) or payload_bytes < 0:
            raise InvalidArgument("payload_bytes", payload_bytes, "expected an int of at least 0")
        found, following = scheduled_page(self._store.topic(topic), start_ms, end_ms, limit, after)
        return {"messages": [self._shown(each, payload_bytes) for each in found], "next": following}

    @operation(Right.READ)
    def message(self, topic: str, message_id: MessageId) -> dict[str, Any]:
        """Look one up: its state, its place in the main log once it has fired, and itself unless it is gone."""
        target = self._store.topic(topic)
        state = target.state(message_id)
        position = None if state == "unknown" else target.position_of(message_id)
        found = target.get(message_id)
        return {
            "state": state,
            "position": to_json(position),
            "message": None if found is None else self._shown(found, len(found.payload), whole=True),
        }

    def _shown(
        self, message: ScheduledMessage | DeadLetter, payload_bytes: int, *, whole: bool = False
    ) -> dict[str, Any]:
        """A message with the first bytes of its payload, and how many there are; `client`: as its client sent it."""
        reader = self._store.entry_reader
        return {
            **to_json(replace(message, payload=message.payload[:payload_bytes])),
            "bytes": len(message.payload),
            "client": None if reader is None else reader(message.payload, whole=whole),
        }

    @operation(Right.PRODUCE)
    def cancel(self, topic: str, ids: Sequence[MessageId]) -> list[str]:
        """Cancel messages in one transaction; each outcome: cancelled, already cancelled, fired, unknown."""
        return [outcome.value for outcome in self._store.topic(topic).cancel_batch(ids)]

    @operation(Right.PRODUCE)
    def reschedule(
        self, topic: str, ids: Sequence[MessageId], deliver_at: int | None = None, deliver_after: float | None = None
    ) -> list[MessageId | None]:
        """Give messages another due time in one transaction; each new id, None: too late, cancelled or unknown."""
        target = self._store.topic(topic)
        return list(target.reschedule_batch(ids, deliver_at=deliver_at, deliver_after=deliver_after))

    # -- figures, upkeep, policies ---------------------------------------------------------------------

    figures = offered("DelayedStore.stats", looks=True)
    topic_figures = offered("Topic.stats")
    partitions = offered("DelayedStore.partitions", looks=True)
    kept_by = offered("DelayedStore.kept_by", looks=True)
    snapshots = offered("DelayedStore.snapshots", looks=True)
    save_snapshots = offered("DelayedStore.save_snapshots")
    overview = offered("DelayedStore.overview", looks=True)
    timeline = offered("DelayedStore.timeline")
    timeline_by_topic = offered("DelayedStore.timeline_by_topic", looks=True)
    topic_rows = offered("DelayedStore.topic_rows")
    calendar = offered("DelayedStore.calendar", looks=True)
    receiving = offered("DelayedStore.receiving", looks=True)
    tasks = offered("SubscriptionAdmin.tasks", looks=True)
    start_job = offered("Jobs.start", Right.ADMIN)
    jobs = offered("Jobs.all", Right.ADMIN, looks=True)
    job = offered("Jobs.get", Right.ADMIN, looks=True)
    cancel_job = offered("Jobs.cancel", Right.ADMIN)

    @operation(Right.READ)
    def retries(self, topic: str, subscription: str, limit: int = 50) -> dict[str, Any]:
        """List the retries to come of a subscription, by due time; `complete`: False where there may be others.

        At most `limit`, of the first 10,000 messages that are not due.
        """
        _check_limit(limit, 0, _MOST_LOOKED_AT)
        found: list[ScheduledMessage] = []
        looked_at = 0
        for each in self._store.topic(topic).scheduled(limit=_MOST_LOOKED_AT):
            looked_at += 1
            if each.addressee == subscription and each.retries:
                found.append(each)
                if len(found) > limit:
                    break
        complete = looked_at < _MOST_LOOKED_AT and len(found) <= limit
        return {"messages": [self._shown(each, _PREVIEW_BYTES) for each in found[:limit]], "complete": complete}

    @operation(Right.ADMIN, looks=True)
    def connections(self, listed: bool = True) -> Connections:
        """Who is connected; listed: False: no more than the limits and how many there are."""
        found = self._store.connections()
        return found if listed else replace(found, connections=(), parts=())

    @operation(Right.ADMIN)
    def tick(self) -> dict[str, Any]:
        """Do what is due now; what was done, and when the next thing is due."""
        done = self._store.tick()
        return {**to_json(replace(done, suspended=())), "suspended": list(map(str, done.suspended))}

    @operation(Right.ADMIN, looks=True, like="DelayedStore.policies")
    def policies(self, **scope: str | None) -> dict[str, Any] | None:
        """Show the policies set at just this scope; without a scope, those of every scope by its name."""
        if all(each is None for each in scope.values()):
            return {scope: asdict(each) for scope, each in self._store.all_policies().items()}
        policies = self._store.policies(**scope)
        return None if policies is None else asdict(policies)

    @operation(Right.READ)
    def effective(self, topic: str, subscription: str | None = None) -> dict[str, Any]:
        """Show the policies in force, and the scope at which each value was set."""
        policies = self._store.effective_policies(topic, subscription)
        return {"values": {name: getattr(policies, name) for name in policies.set_at}, "set_at": dict(policies.set_at)}

    @operation(Right.ADMIN, like="DelayedStore.policies")
    def update_policies(self, values: Mapping[str, Any], **scope: str | None) -> Policies:
        """Set policies, None: unset, and leave the others; what is set there then."""
        if not isinstance(values, Mapping):
            raise InvalidArgument("values", values, "expected values by policy")
        from duelog.store.policy.policies import POLICY_FIELDS  # noqa: PLC0415 - the engine's, which a client does without

        for name in values.keys() - POLICY_FIELDS:
            raise InvalidArgument("policy", name, f"expected one of {', '.join(POLICY_FIELDS)}")
        return self._store.update_policies(**scope, **values)

    remove_policies = offered("DelayedStore.remove_policies")

    # -- dead letters ----------------------------------------------------------------------------------

    @operation(Right.CONSUME, looks=True, like="DelayedStore.dead_letters")
    def dead_letters(self, namespace: str | None = None, **letters: Any) -> Iterator[DeadLetter]:
        """List dead letters, oldest first. namespace: of the topics that they come from."""
        within = "" if namespace is None else f"{SCHEME}{validate_namespace_name(namespace)}/"
        return (letter for letter in self._store.dead_letters(**letters) if letter.topic.startswith(within))

    @operation(Right.CONSUME, looks=True, like=dead_letters)
    def dead_letter_page(self, limit: int = 100, **letters: Any) -> dict[str, Any]:
        """List the first of those as `dead_letters`, of each payload its beginning, as `scheduled_page`."""
        _check_limit(limit)
        found = list(islice(self.dead_letters(**letters), limit + 1))
        return {"letters": [self._shown(each, _PREVIEW_BYTES) for each in found[:limit]], "more": len(found) > limit}

    @operation(Right.CONSUME, like=dead_letters)
    def requeue_dead_letters(self, ids: Sequence[str] | None = None, delay: float = 0, **letters: Any) -> int:
        """Deliver again those of these ids among what the others leave, None: all of that; how many."""
        return self._store.requeue_dead_letters(_chosen(self.dead_letters(**letters), ids), delay=delay)

    @operation(Right.CONSUME, like=dead_letters)
    def purge_dead_letters(self, ids: Sequence[str] | None = None, **letters: Any) -> int:
        """Drop them for good; how many."""
        return self._store.purge_dead_letters(_chosen(self.dead_letters(**letters), ids))

    # -- schedules -------------------------------------------------------------------------------------

    @operation(Right.PRODUCE, like="Topic.every")
    def every(self, topic: str, name: str, create: bool = False, **schedule: Any) -> Schedule:
        """Set a schedule, by `Topic.every`. create: make the topic where there is none."""
        return self._topic(topic, create).every(name, **schedule)

    @operation(Right.READ)
    def schedules(self, topic: str | None = None) -> Iterator[Schedule]:
        """List the schedules of a topic by name, or of all topics."""
        for one in self._store.topics() if topic is None else [self._store.topic(topic)]:
            yield from one.schedules()

    pause_schedule = offered("Topic.pause_schedule")
    resume_schedule = offered("Topic.resume_schedule")
    remove_schedule = offered("Topic.remove_schedule")

    # -- imports ---------------------------------------------------------------------------------------

    @operation(Right.READ)
    def find(self, topic: str, key: str) -> ScheduledMessage | None:
        """Find the pending message of a deduplication key; None: there is none."""
        return self._store.topic(topic).find(key)

    has_topic = offered("Topic.exists")
    keys = offered("Topic.keys")
    cancel_key = offered("Topic.cancel_key")
    cancel_keys = offered("Topic.cancel_keys")

    @operation(Right.READ)
    def limits(self) -> dict[str, int]:
        """The facts that an import needs before it sends: the store's time and its largest message."""
        return {"now_ms": self._store.clock.now_ms(), "max_message_bytes": self._store.config.max_message_bytes}

    @operation(Right.PRODUCE)
    def check_delays(self, topic: str, delays: Sequence[Sequence[Any]]) -> dict[str, Any] | None:
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

    @operation(Right.PRODUCE)
    def send_messages(
        self,
        topic: str,
        messages: Sequence[Message],
        allow_past: bool = False,
        producer: str | None = None,
        first: int = 0,
    ) -> int:
        """Send a batch, numbered from `first` on where a producer is named; how many that one had stored before."""
        target = self._store.topic(topic)
        if producer is None:
            target.send_batch(messages, allow_past=allow_past)
            return 0
        numbered = target.producer(producer)
        last = numbered.last_sequence_id
        numbered.send_batch(messages, first_sequence_id=first, allow_past=allow_past)
        return min(max(last + 1 - first, 0), len(messages))  # from 0 on without a gap: batches come in order


OPERATIONS: Mapping[str, Operation] = {
    name: member.operation for name, member in vars(Operations).items() if hasattr(member, "operation")
}
"""The operations by name."""


class Asked(Operations):
    """The operations of a store that another process has open, or that is asked in the same words: by JSON."""

    def __init__(self, ask: Ask) -> None:
        """`ask` is a client's, or that of the `Operations` of a store in this process."""
        self._ask = ask

    def ask(self, name: str, arguments: Mapping[str, object]) -> Any:
        """Have an operation done by name, with arguments and result in JSON."""
        return self._ask(name, arguments)


def _asked(operation: Operation) -> Callable[..., Any]:
    return lambda asked, *given, **named: operation.ask(asked.ask, *given, **named)


for _name, _operation in OPERATIONS.items():
    setattr(Asked, _name, _asked(_operation))


def scheduled_page(
    topic: Topic, start_ms: int | None, end_ms: int | None, limit: int, after: str | None
) -> tuple[list[ScheduledMessage], str | None]:
    """The messages due in [start, end) behind a page before; and the `after` of the next page, None: that is all.

    Raises InvalidArgument.
    """
    behind = None
    if after is not None:
        match = _AFTER.fullmatch(after) if isinstance(after, str) else None
        if match is None or (due_ms := int(match[1])) > MAX_DUE_MS:
            raise InvalidArgument("after", after, "expected `next` of the page before")
        if not (isinstance(start_ms, int) and due_ms < start_ms):
            start_ms, behind = due_ms, MessageId.parse(match[2])
    _check_limit(limit)
    found = list(topic.scheduled(start_ms, end_ms, limit + 1, after=behind))
    last = found[limit - 1] if len(found) > limit else None
    return found[:limit], None if last is None else f"{last.due_ms}:{last.message_id}"


def _check_limit(limit: object, least: int = 1, most: int = _MOST_LISTED) -> None:
    if isinstance(limit, bool) or not isinstance(limit, int) or not least <= limit <= most:
        raise InvalidArgument("limit", limit, f"expected {least} to {most}")


def _chosen(held: Iterator[DeadLetter], ids: Sequence[str] | None) -> list[DeadLetter]:
    """The letters of some ids. Raises InvalidArgument for an id that none has."""
    if ids is None:
        return list(held)
    wanted = set(map(str, ids))
    letters = [letter for letter in held if str(letter.message_id) in wanted]
    known = {str(letter.message_id) for letter in letters}
    for each in ids:
        if str(each) not in known:
            raise InvalidArgument("ID", each, "no dead letter has this id")
    return letters


def _seek_target(to: object) -> SeekTarget:
    from ..topics.seeking import PublishedAt  # noqa: PLC0415 - the engine's, which a client does without

    if isinstance(to, str):
        return to if to in ("earliest", "latest") else MessageId.parse(to)
    if isinstance(to, Mapping) and len(to) == 1:
        ((name, value),) = to.items()
        if isinstance(value, int) and name in ("due_ms", "published_ms"):
            return value if name == "due_ms" else PublishedAt(value)
    raise InvalidArgument(
        "to", to, 'expected "earliest", "latest", a position, {"due_ms": ...} or {"published_ms": ...}'
    )
