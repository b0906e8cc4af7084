"""What an operator does with a store: one interface, implemented for a directory and for a server over HTTP.

The commands know this interface alone, so they print the same of both. A server's figures are of now, and its clients
see at once what it changes; a directory that a process has open can only be looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from ... import Policies, ReceivedMessage, ScheduledMessage
from ...stats import PartitionStats
from ...store.errors import DuelogError
from ...store.files.directory import DISK_PARTS
from ...store.policy.policies import PolicyValue
from ...store.position import MessageId


class ServerRefused(DuelogError):
    """A server's answer that is an error, or why there was none (status 0)."""

    def __init__(self, server: str, status: int, reason: str) -> None:
        super().__init__(f"{server}: {f'{status}: ' if status else ''}{reason}")
        self.status = status
        self.reason = reason


STORE_FIGURES = (
    "topics", "partitions", "pending", "set_aside", "disk_bytes", *(f"disk_{part}_bytes" for part in DISK_PARTS)
)  # fmt: skip
"""What a store says of itself, read-only too."""


class Scope(NamedTuple):
    """Where policies are set; all None: the store."""

    namespace: str | None = None
    topic: str | None = None
    subscription: str | None = None


class SubscriptionFigures(NamedTuple):
    """backlog: due and not acknowledged; mark_delete: all up to here is acknowledged. The others: `SubscriptionStats`.

    Those that only the process knows which has the store open are of nothing yet where no process has. None: a server
    does not say.
    """

    name: str
    backlog: int
    mark_delete: str
    consumers: int | None = None
    unacknowledged: int | None = None
    redelivering: int | None = None
    dead_lettered: int | None = None
    paused: bool | None = None


class TopicFigures(NamedTuple):
    """Figures of a topic. None: a server does not say (of a topic without subscriptions, what is pending)."""

    name: str
    pending: int | None
    fired: int | None
    entries: int
    ledgers: int
    stored_bytes: int
    subscriptions: list[SubscriptionFigures]


class Effective(NamedTuple):
    """The policies in force for a topic or subscription: what is set there, what counts, and where that was set."""

    topic: str
    here: Policies | None
    values: dict[str, PolicyValue | None]
    set_at: Mapping[str, str] | None
    """None: a server does not say."""


class Administration(Protocol):
    """A store, wherever it is. Names of subscriptions are as clients know them.

    Each method raises a DuelogError: UnknownTopic and the like of a directory, ServerRefused of a server.
    """

    name: str

    def topics(self, namespace: str | None) -> Iterator[str]:
        """Full names, in order; None: of all namespaces."""

    def create_topic(self, topic: str) -> bool:
        """False: it was there."""

    def delete_topic(self, topic: str, *, force: bool) -> None:
        """With its messages and subscriptions. force: though it has producers or consumers, which are closed."""

    def store_figures(self) -> dict[str, int]:
        """STORE_FIGURES."""

    def partitions(self) -> list[PartitionStats]:
        """Time partitions, by start."""

    def topic_figures(self, topic: str) -> TopicFigures:
        """Of one topic."""

    def scheduled(self, topic: str, start_ms: int | None, end_ms: int | None, limit: int) -> list[ScheduledMessage]:
        """Messages that are not due, by due time. Of a server, the first 4,096 bytes of each payload."""

    def cancel(self, topic: str, ids: Sequence[MessageId]) -> list[str]:
        """What became of each: cancelled, already cancelled, fired, unknown."""

    def cancel_key(self, topic: str, key: str) -> bool:
        """Cancel the pending message of a deduplication key; False: there is none. Not of a server."""

    def reschedule(
        self, topic: str, ids: Sequence[MessageId], deliver_at: int | None, deliver_after: float | None
    ) -> list[MessageId | None]:
        """The new id of each; None: too late, cancelled or unknown."""

    def subscriptions(self, topic: str) -> list[str]:
        """Of a topic."""

    def create_subscription(self, topic: str, subscription: str, position: str) -> bool:
        """At the "earliest" or "latest" message; False: it was there."""

    def delete_subscription(self, topic: str, subscription: str) -> None:
        """With what it has not acknowledged."""

    def seek(self, topic: str, subscription: str, to: str | Mapping[str, int]) -> str | None:
        """Go to "earliest", "latest", a position, {"due_ms": ...} or {"published_ms": ...}.

        The position; None: a server does not say.
        """

    def skip(self, topic: str, subscription: str, count: int) -> int | None:
        """Acknowledge the first messages that are due; how many, None: a server does not say."""

    def expire(self, topic: str, subscription: str, older_than: float) -> int | None:
        """Acknowledge what has been due for so many seconds; how many, None: a server does not say."""

    def peek(self, topic: str, subscription: str, count: int) -> Iterator[ReceivedMessage]:
        """The first messages that are due and not acknowledged; not of a server."""

    def policies(self, scope: Scope) -> dict[str, Policies]:
        """What is set: at a scope, or for the store: everywhere; by the scope's name."""

    def effective(self, scope: Scope) -> Effective:
        """Of a topic or a subscription."""

    def update_policies(self, scope: Scope, values: Mapping[str, PolicyValue | None]) -> Policies:
        """Set fields, None: unset; the others stay. What is set there then."""

    def remove_policies(self, scope: Scope) -> bool:
        """False: nothing was set there."""
