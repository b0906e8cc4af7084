"""Administration of a store in a directory, opened by this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

from ... import DelayedStore, Policies, ScheduledMessage
from ...broker.lookup.topic_address import shown_subscription, stored_subscription
from ...stats import PartitionStats
from ...store.errors import InvalidArgument, UnknownSubscription
from ...store.policy.policies import POLICY_FIELDS, PolicyValue
from ...store.position import MessageId
from ..values import open_to_read, open_to_write
from .operations import STORE_FIGURES, Administration, Effective, Scope, SubscriptionFigures, TopicFigures


@contextmanager
def open_directory(path: Path, *, writes: bool) -> Iterator[Administration]:
    """The store in a directory, for as long as the block runs."""
    with open_to_write(path, create=False) if writes else open_to_read(path) as store:
        yield DirectorySide(store)


class DirectorySide:
    """By the public face of the engine."""

    def __init__(self, store: DelayedStore) -> None:
        self._store = store
        self.name = str(store.path)

    def topics(self, namespace: str | None) -> Iterator[str]:
        return (topic.name for topic in self._store.topics(namespace))

    def create_topic(self, topic: str) -> bool:
        return self._store.topic(topic).create()

    def delete_topic(self, topic: str) -> None:
        self._store.delete_topic(topic)

    def store_figures(self) -> dict[str, int]:
        """What only the process that has the store open for writing knows (its commits, its indexes) is left out."""
        figures = self._store.stats()
        return {name: getattr(figures, name) for name in STORE_FIGURES}

    def partitions(self) -> list[PartitionStats]:
        return self._store.partitions()

    def topic_figures(self, topic: str) -> TopicFigures:
        found = self._store.topic(topic).stats()
        subscriptions = [
            SubscriptionFigures(shown_subscription(each.name), each.backlog, str(each.mark_delete))
            for each in found.subscriptions
        ]
        return TopicFigures(
            found.name, found.pending, found.fired, found.entries, found.ledgers, found.stored_bytes, subscriptions
        )

    def scheduled(self, topic: str, start_ms: int | None, end_ms: int | None, limit: int) -> list[ScheduledMessage]:
        return list(map(_decoded, islice(self._store.topic(topic).scheduled(start_ms, end_ms), limit)))

    def cancel(self, topic: str, ids: Sequence[MessageId]) -> list[str]:
        return [outcome.value for outcome in self._store.topic(topic).cancel_batch(ids)]

    def reschedule(
        self, topic: str, ids: Sequence[MessageId], deliver_at: int | None, deliver_after: float | None
    ) -> list[MessageId | None]:
        return self._store.topic(topic).reschedule_batch(ids, deliver_at=deliver_at, deliver_after=deliver_after)

    def subscriptions(self, topic: str) -> list[str]:
        return sorted(map(shown_subscription, self._store.topic(topic).subscriptions()))

    def create_subscription(self, topic: str, subscription: str, position: str) -> bool:
        there = self._store.topic(topic)
        if there.exists() and _stored(subscription) in there.subscriptions():
            return False
        there.subscribe(_stored(subscription), type="shared", initial_position=position).close()
        return True

    def delete_subscription(self, topic: str, subscription: str) -> None:
        there = self._store.topic(topic)
        if _stored(subscription) not in there.subscriptions():
            raise UnknownSubscription(there.name, subscription)
        there.unsubscribe(_stored(subscription))

    def policies(self, scope: Scope) -> dict[str, Policies]:
        if scope == Scope():
            return self._store.all_policies()
        found = self._store.policies(**scope._asdict())
        return {} if found is None else {f"namespace {scope.namespace}": found}

    def effective(self, scope: Scope) -> Effective:
        here = self._store.policies(**scope._asdict())
        topic = self._store.topic(str(scope.topic)).name
        found = self._store.effective_policies(topic, scope.subscription)
        values = {name: getattr(found, name) for name in POLICY_FIELDS}
        return Effective(topic, here, values, dict(found.set_at))

    def update_policies(self, scope: Scope, values: Mapping[str, PolicyValue | None]) -> Policies:
        return self._store.update_policies(
            namespace=scope.namespace, topic=scope.topic, subscription=scope.subscription, **values
        )

    def remove_policies(self, scope: Scope) -> bool:
        return self._store.remove_policies(**scope._asdict())


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
