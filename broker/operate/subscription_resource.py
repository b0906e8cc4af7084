"""Subscriptions: listing, creating, deleting, skipping, expiring, moving, looking at messages.

On a partitioned topic, what needs no single message concerns all partitions. What is not due yet is no part of a
subscription's backlog: it is neither skipped nor expired, and comes at its time.

Source of paths and bodies: Apache Pulsar's admin REST, persistent topics.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ...store.errors import UnknownSubscription
from ...store.message import MAX_DUE_MS
from ...store.position import MAX_ID, MessageId
from ...subscription import SubscriptionAdmin
from ...topic import Topic
from ...topics.seeking import PublishedAt
from ..admin.http_request import HttpError, Reply, Request, checked_integer, one_of, value_of
from ..admin.routing import TOPIC, Route, need_of
from ..consume import feed
from ..consume.consumers import Consumers
from ..lookup.topic_address import shown_subscription
from .client_message import reply_of
from .topic_resource import MOST_PEEKED, WHOLES, TopicFinder

SUBSCRIPTION = TOPIC + "/subscription/{subscription}"
_AT_ONCE = 100

Found = tuple[Topic, SubscriptionAdmin]
"""A subscription that exists, with its topic."""


@dataclass(eq=False)
class SubscriptionResource:
    """For the event loop's thread alone. clock: the store's, in ms."""

    _finder: TopicFinder
    _consumers: Consumers
    _clock: Callable[[], int]

    def routes(self) -> list[Route]:
        every = TOPIC + "/all_subscription/expireMessages/{expireTimeInSeconds}"
        reset, count = f"{SUBSCRIPTION}/resetcursor", "{numMessages}"
        of_namespace = [
            route
            for whole in WHOLES
            for route in (
                Route("POST", f"{whole}/clearBacklog", self.clear, "Acknowledge all that is due", need_of("expire")),
                Route("POST", f"{whole}/clearBacklog/{{subscription}}", self.clear,
                      "Likewise, for subscriptions of this name", need_of("expire")),
                Route("POST", f"{whole}/unsubscribe/{{subscription}}", self.unsubscribe,
                      "Delete subscriptions of this name", need_of("delete_subscription")),
            )
        ]  # fmt: skip
        return [
            *of_namespace,
            Route("GET", f"{TOPIC}/subscriptions", self.names, "Names of the subscriptions", need_of("subscriptions")),
            Route("PUT", SUBSCRIPTION, self.create, "Create a subscription, at the end or at a message id",
                  need_of("create_subscription"), ("replicated", "authoritative"), "object"),
            Route("DELETE", SUBSCRIPTION, self.delete, "Delete a subscription", need_of("delete_subscription"),
                  ("force",)),
            Route("POST", f"{SUBSCRIPTION}/skip_all", self.skip_all, "Acknowledge all that is due", need_of("skip")),
            Route("POST", f"{SUBSCRIPTION}/skip/{count}", self.skip, "Acknowledge the first messages", need_of("skip")),
            Route("POST", SUBSCRIPTION + "/expireMessages/{expireTimeInSeconds}", self.expire,
                  "Acknowledge what has been due for so long", need_of("expire")),
            Route("POST", SUBSCRIPTION + "/expireMessages", self.expire_until,
                  "Acknowledge what lies up to a message id", need_of("expire"), body="object"),
            Route("POST", every, self.expire_all, "Likewise, for each subscription", need_of("expire")),
            Route("POST", f"{reset}/{{timestamp}}", self.reset_to_time, "Go to a publish time (ms)", need_of("seek")),
            Route("POST", reset, self.reset_to_message, "Go to a message id", need_of("seek"), body="object"),
            Route("GET", f"{SUBSCRIPTION}/position/{{messagePosition}}", self.peek,
                  "The n-th message, 1 the first, that is due and not acknowledged", need_of("peek")),
        ]  # fmt: skip

    async def names(self, request: Request) -> Any:
        topics = await self._finder.every(request)
        found = await asyncio.to_thread(lambda: {name for topic in topics for name in topic.subscriptions()})
        return sorted(map(shown_subscription, found))

    async def create(self, request: Request) -> None:
        """409: it is there. The body, if there is one, is a message id: the first message that it gets."""
        name, topics = request.subscription, await self._finder.every(request)
        if request.flag("replicated"):
            raise HttpError(412, "replicated=true: nothing is replicated here")
        body = request.json()
        if body in (None, {}, ""):
            body = "latest"
        if isinstance(body, dict) and body.get("properties"):
            raise HttpError(412, f"properties={body['properties']!r:.200}: subscriptions have none here")
        start = _position_of(body)
        if len(topics) > 1 and isinstance(start, MessageId):
            raise HttpError(405, "a message id is of one partition: create the subscription on that one")

        def work() -> bool:
            if any(name in topic.subscriptions() for topic in topics):
                return False
            for topic in topics:
                target = feed.existing(topic, start)
                topic.reader(target).close()  # raises before anything is made
                initial = target if isinstance(target, str) else "earliest"
                topic.subscribe(name, type="shared", initial_position=initial).close()
                if not isinstance(target, str):
                    topic.subscription(name).reset(target)
            return True

        if not await asyncio.to_thread(work):
            raise HttpError(409, f"subscription {shown_subscription(name)} exists already")

    async def delete(self, request: Request) -> None:
        """412 while it has consumers, unless `force`, which closes them."""
        found = [topic for topic, _ in await self._existing(request)]
        await self._delete(found, request.subscription, force=request.flag("force"))

    async def unsubscribe(self, request: Request) -> None:
        """On every topic of the namespace that has it, none is 204; 412 while one of them has consumers."""
        name, topics = request.subscription, await self._finder.of_namespace(request)
        found = await asyncio.to_thread(lambda: [topic for topic, _ in _subscriptions(topics, name)])
        await self._delete(found, name, force=False)

    async def _delete(self, topics: Sequence[Topic], name: str, *, force: bool) -> None:
        for topic in () if force else topics:
            if self._consumers.of_topic(topic.name).get(name):
                raise HttpError(412, f"subscription {shown_subscription(name)} of {topic.name} has consumers")
        for topic in topics:
            await self._consumers.alone(topic.name, name, partial(topic.unsubscribe, name), force=force)
            self._consumers.forget_subscription(topic.name, name)

    # -- backlog ---------------------------------------------------------------------------------------

    async def skip_all(self, request: Request) -> None:
        """Acknowledges what consumers hold, too, and what waits inline (PIP-448)."""
        await asyncio.to_thread(self._clear, await self._existing(request))

    async def clear(self, request: Request) -> None:
        """On every topic of the namespace; without a name each subscription."""
        wanted = request.subscription if "subscription" in request.path else None
        topics = await self._finder.of_namespace(request)
        await asyncio.to_thread(lambda: self._clear(_subscriptions(topics, wanted)))

    def _clear(self, found: Iterable[Found]) -> None:
        for topic, subscription in found:
            subscription.expire(self._clock() + 1)
            topic.clear_inline(subscription.name)

    async def skip(self, request: Request) -> None:
        """The first `numMessages` entries; a batch is one."""
        found = await self._one(request)
        count = request.number("numMessages", 0, lowest=0)

        def work() -> None:
            left = count
            while left and (skipped := found.skip(min(left, _AT_ONCE))):
                left -= skipped

        await asyncio.to_thread(work)

    async def expire(self, request: Request) -> None:
        """A delayed message has been due since its due time."""
        found = await self._existing(request)
        before_ms = self._before(request)
        await asyncio.to_thread(_expire, found, before_ms)

    async def expire_all(self, request: Request) -> None:
        topics, before_ms = await self._finder.every(request), self._before(request)
        await asyncio.to_thread(lambda: _expire(_subscriptions(topics), before_ms))

    async def expire_until(self, request: Request) -> None:
        """The message itself too, unless `excluded`; what is not due yet comes at its time."""
        found = await self._one(request)
        topic, body = await self._finder.one(request), request.json()
        start, excluded, in_batch = _reset_of(body)

        def work() -> None:
            target = feed.existing(topic, start)
            if target == "latest":
                found.expire(self._clock() + 1)
            if not isinstance(target, MessageId):
                return
            if excluded or not _is_last(topic, target, in_batch):
                target = target._replace(entry_id=target.entry_id - 1)
            while found.skip(_AT_ONCE, until=target):
                pass

        await asyncio.to_thread(work)

    def _before(self, request: Request) -> int:
        age_s = request.number("expireTimeInSeconds", 0, lowest=1, highest=MAX_DUE_MS // 1_000)
        return max(self._clock() - age_s * 1_000, 0)

    # -- positions -------------------------------------------------------------------------------------

    async def reset_to_time(self, request: Request) -> None:
        """To the first message published then or later; its consumers are closed, and subscribe anew."""
        found = await self._existing(request)
        target = PublishedAt(request.number("timestamp", 0, highest=MAX_DUE_MS))
        for topic, subscription in found:
            await self._alone(topic, subscription, partial(subscription.reset, target))

    async def reset_to_message(self, request: Request) -> None:
        """Inclusive, unless `excluded`. The receipt of a delayed message that has fired will do."""
        found = await self._one(request)
        topic, body = await self._finder.one(request), request.json()
        start, excluded, in_batch = _reset_of(body)

        def work() -> None:
            target = feed.existing(topic, start)
            if excluded and isinstance(target, MessageId) and _is_last(topic, target, in_batch):
                target = target._replace(entry_id=target.entry_id + 1)
            found.reset(target)

        await self._alone(topic, found, work)

    async def _alone(self, topic: Topic, subscription: SubscriptionAdmin, work: Callable[[], object]) -> None:
        await self._consumers.alone(topic.name, subscription.name, work, force=True)

    async def peek(self, request: Request) -> Reply:
        """The metadata is in headers, a batch in one piece. 404: there are fewer messages."""
        found = await self._one(request)
        place = request.number("messagePosition", 1, lowest=1, highest=MOST_PEEKED)
        messages = await asyncio.to_thread(lambda: found.peek(after=place - 1))
        if not messages:
            raise HttpError(404, f"there is no message {place}: fewer are due and not acknowledged")
        return await asyncio.to_thread(lambda: reply_of(messages[0], messages[0].position))

    # -- finding ---------------------------------------------------------------------------------------

    async def _one(self, request: Request) -> SubscriptionAdmin:
        topic = await self._finder.one(request)
        return await asyncio.to_thread(lambda: topic.subscription(request.subscription))

    async def _existing(self, request: Request) -> list[Found]:
        """On every partition that has it, one at least."""
        topics, name = await self._finder.every(request), request.subscription
        found = await asyncio.to_thread(lambda: list(_subscriptions(topics, name)))
        if not found:
            raise UnknownSubscription(str(request.topic.name), shown_subscription(name))
        return found


def _subscriptions(topics: Iterable[Topic], wanted: str | None = None) -> Iterator[Found]:
    """Yield the subscriptions of topics, or those of one name. Waits for the disk."""
    for topic in topics:
        for name in topic.subscriptions():
            if wanted in (None, name):
                yield topic, topic.subscription(name)


def _expire(found: Iterable[Found], before_ms: int) -> None:
    for _, subscription in found:
        subscription.expire(before_ms)


class _Reset(NamedTuple):
    """`ResetCursorData`: a message, whether it is excluded, and its place in its batch, -1: it is in none."""

    start: feed.Start
    excluded: bool = False
    in_batch: int = -1


def _reset_of(body: object) -> _Reset:
    """Java writes `excluded`, Pulsar's documentation `isExcluded`. Raises HttpError 412."""
    start = _position_of(body)
    if not isinstance(body, dict):
        return _Reset(start)
    excluded = any(value_of(body, name, bool, False) for name in ("excluded", "isExcluded"))
    return _Reset(start, excluded, value_of(body, "batchIndex", int, -1))


def _is_last(topic: Topic, position: MessageId, in_batch: int) -> bool:
    """Return True if a message is the last of its batch: an entry is acknowledged as a whole. Waits for the disk."""
    header = feed.header_at(topic, position) if in_batch >= 0 else None
    return header is None or in_batch + 1 >= header.messages


def _position_of(body: object) -> feed.Start:
    """A message id as Pulsar's clients write it; the largest numbers stand for the end, -1 for the beginning.

    The texts "earliest" and "latest" do, too. Raises HttpError 412.
    """
    if isinstance(body, str):
        return one_of("the body", body, ("earliest", "latest"))
    if not isinstance(body, dict):
        raise HttpError(412, 'the body: expected an object, a message id, or "earliest" or "latest"')
    ledger, number = (checked_integer(name, body.get(name), -1, 2**63 - 1) for name in ("ledgerId", "entryId"))
    if ledger == -1:
        return "earliest"
    if ledger >= MAX_ID:
        return "latest"
    return MessageId(ledger, max(number, 0))
