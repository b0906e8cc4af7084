"""Administration of a store in a directory: opened by this process, or asked of the one that has it open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ... import Policies, ReceivedMessage, ScheduledMessage
from ...broker.lookup.topic_address import shown_subscription, stored_subscription
from ...stats import PartitionStats
from ...store.errors import InvalidArgument, UnknownSubscription
from ...store.names import TopicName
from ...store.policy.policies import PolicyValue
from ...store.position import MessageId
from ..asking import Ask, asked, received_message, scheduled_message
from .operations import STORE_FIGURES, Administration, Effective, Scope, SubscriptionFigures, TopicFigures


@contextmanager
def open_directory(path: Path, *, writes: bool) -> Iterator[Administration]:
    """The store in a directory, for as long as the block runs."""
    with asked(path, writes=writes) as ask:
        yield DirectorySide(ask, path)


class DirectorySide:
    """By the operations of an open store."""

    def __init__(self, ask: Ask, path: Path) -> None:
        self._ask = ask
        self.name = str(path.absolute())

    def _do(self, operation: str, **arguments: object) -> Any:
        return self._ask(operation, arguments)

    def topics(self, namespace: str | None) -> Iterator[str]:
        yield from self._do("topics", namespace=namespace)

    def create_topic(self, topic: str) -> bool:
        return bool(self._do("create_topic", topic=topic))

    def delete_topic(self, topic: str, *, force: bool) -> None:
        self._do("delete_topic", topic=topic, force=force)

    def store_figures(self) -> dict[str, int]:
        """What only the process that has the store open for writing knows (its commits, its indexes) is left out."""
        figures = self._do("figures")
        return {name: figures[name] for name in STORE_FIGURES}

    def partitions(self) -> list[PartitionStats]:
        return [PartitionStats(**each) for each in self._do("partitions")]

    def topic_figures(self, topic: str) -> TopicFigures:
        found = self._do("topic_figures", topic=topic)
        subscriptions = [
            SubscriptionFigures(
                shown_subscription(each["name"]), *(each[name] for name in SubscriptionFigures._fields[1:])
            )
            for each in found["subscriptions"]
        ]
        names = ("name", "pending", "fired", "entries", "ledgers", "stored_bytes")
        return TopicFigures(**{name: found[name] for name in names}, subscriptions=subscriptions)

    def scheduled(self, topic: str, start_ms: int | None, end_ms: int | None, limit: int) -> list[ScheduledMessage]:
        found = self._do("scheduled", topic=topic, start_ms=start_ms, end_ms=end_ms, limit=limit)
        return [_decoded(scheduled_message(each)) for each in found]

    def cancel(self, topic: str, ids: Sequence[MessageId]) -> list[str]:
        return list(self._do("cancel", topic=topic, ids=list(map(str, ids))))

    def cancel_key(self, topic: str, key: str) -> bool:
        return bool(self._do("cancel_key", topic=topic, key=key))

    def reschedule(
        self, topic: str, ids: Sequence[MessageId], deliver_at: int | None, deliver_after: float | None
    ) -> list[MessageId | None]:
        given = {"ids": list(map(str, ids)), "deliver_at": deliver_at, "deliver_after": deliver_after}
        return [
            None if each is None else MessageId.parse(each) for each in self._do("reschedule", topic=topic, **given)
        ]

    def subscriptions(self, topic: str) -> list[str]:
        return sorted(map(shown_subscription, self._do("subscriptions", topic=topic)))

    def create_subscription(self, topic: str, subscription: str, position: str) -> bool:
        stored = _stored(subscription)
        return bool(self._do("create_subscription", topic=topic, subscription=stored, position=position))

    def delete_subscription(self, topic: str, subscription: str) -> None:
        self._do("delete_subscription", topic=topic, subscription=self._existing(topic, subscription))

    def seek(self, topic: str, subscription: str, to: str | Mapping[str, int]) -> str | None:
        return str(self._do("seek", topic=topic, subscription=self._existing(topic, subscription), to=to))

    def skip(self, topic: str, subscription: str, count: int) -> int:
        return int(self._do("skip", topic=topic, subscription=self._existing(topic, subscription), count=count))

    def expire(self, topic: str, subscription: str, older_than: float) -> int:
        stored = self._existing(topic, subscription)
        return int(self._do("expire", topic=topic, subscription=stored, older_than=older_than))

    def peek(self, topic: str, subscription: str, count: int) -> Iterator[ReceivedMessage]:
        stored = self._existing(topic, subscription)
        return map(received_message, self._do("peek", topic=topic, subscription=stored, count=count))

    def _existing(self, topic: str, subscription: str) -> str:
        """The stored name of a subscription. Raises UnknownSubscription with the name as it was given."""
        stored = _stored(subscription)
        if stored not in self._do("subscriptions", topic=topic):
            raise UnknownSubscription(str(TopicName.parse(topic)), subscription)
        return stored

    def policies(self, scope: Scope) -> dict[str, Policies]:
        found = self._do("policies", **scope._asdict())
        if scope == Scope():
            return {name: Policies(**each) for name, each in found.items()}
        return {} if found is None else {f"namespace {scope.namespace}": Policies(**found)}

    def effective(self, scope: Scope) -> Effective:
        here = self._do("policies", **scope._asdict())
        found = self._do("effective", topic=scope.topic, subscription=scope.subscription)
        name = str(TopicName.parse(str(scope.topic)))
        return Effective(name, None if here is None else Policies(**here), found["values"], found["set_at"])

    def update_policies(self, scope: Scope, values: Mapping[str, PolicyValue | None]) -> Policies:
        return Policies(**self._do("update_policies", values=dict(values), **scope._asdict()))

    def remove_policies(self, scope: Scope) -> bool:
        return bool(self._do("remove_policies", **scope._asdict()))


def _stored(subscription: str) -> str:
    try:
        return stored_subscription(subscription)
    except Exception as error:
        raise InvalidArgument("SUBSCRIPTION", subscription, str(error)) from error


def _decoded(message: ScheduledMessage) -> ScheduledMessage:
    """What a client sent, of an entry of the broker; a batch, and what cannot be read, as it is stored."""
    try:
        from ...broker.operate.stored_metadata import CodecMissing
        from .client_message import NotCarried, client_messages
    except ModuleNotFoundError:  # duelog[broker] is not installed
        return message
    try:
        found = client_messages(message.payload, message.key, message.properties)
    except (NotCarried, CodecMissing):
        return message
    if len(found) != 1:
        return message
    (only,) = found
    return replace(message, payload=only.content or b"", key=only.key, properties=only.properties)
