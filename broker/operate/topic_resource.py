"""Topics: listing, creating, partitions, deleting, unloading, and single messages by id or time.

Source of paths and bodies: Apache Pulsar's admin REST, persistent topics.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...delayed_store import DelayedStore
from ...store.errors import InvalidArgument
from ...store.message import MAX_DUE_MS, ReceivedMessage
from ...store.names import SCHEME
from ...store.position import MAX_ID, MessageId
from ...topic import Topic
from ...topics.seeking import PublishedAt, SeekTarget
from ..admin.http_request import HttpError, Reply, Request, checked_integer, existing_namespace, one_of
from ..admin.routing import NAMESPACE, TOPIC, TOPICS, Need, Route
from ..consume import feed
from ..lookup.resources import Resources, path_of
from ..lookup.topic_address import TopicAddress, partition_name
from ..lookup.topic_lookup import TopicAccess
from ..tenancy.namespace_policies import hand_down, topic_scope
from ..tenancy.namespaces import TopicRemoval
from .client_message import reply_of

WHOLES = (NAMESPACE, NAMESPACE + "/{bundle}")
"""How Pulsar's tools name all topics of a namespace: by itself, or by its one bundle."""

MOST_PEEKED = 10_000
"""Messages of which each may be looked at: those before it are read on the way."""

_BUNDLE = "0x00000000_0xffffffff"


@dataclass(eq=False)
class TopicFinder:
    """Finds them. Of the event loop's thread."""

    _store: DelayedStore
    _resources: Resources

    def namespace(self, request: Request) -> str:
        """`tenant/namespace`, which exists. Raises HttpError 404, and 412 for a bundle that is not all of it."""
        namespace, bundle = existing_namespace(self._resources, request), request.path.get("bundle", _BUNDLE)
        if bundle != _BUNDLE:
            raise HttpError(412, f"bundle={bundle!r:.200}: a namespace is one, {_BUNDLE}")
        return namespace

    async def of_namespace(self, request: Request) -> list[Topic]:
        """All topics of a namespace, partitions each by itself. Raises HttpError 404."""
        namespace = self.namespace(request)
        return await asyncio.to_thread(lambda: list(self._store.topics(namespace)))

    def address(self, request: Request) -> TopicAddress:
        """A topic that need not exist, in a namespace that does. Raises HttpError 404, Refused."""
        self.namespace(request)
        return request.topic

    def topic(self, address: TopicAddress) -> Topic:
        return self._store.topic(str(address.name))

    def partition_topics(self, address: TopicAddress) -> list[Topic]:
        """The topics that hold a partitioned topic's partitions, which need not exist; else none."""
        numbers = range(self._resources.partitions(address.name))
        return [self._store.topic(str(partition_name(address.name, number))) for number in numbers]

    async def one(self, request: Request) -> Topic:
        """A topic that exists. Raises HttpError 404, and 405 for a partitioned one."""
        address = self.address(request)
        partitions = self._resources.partitions(address.name)
        if partitions:
            reason = f"{address.name} is partitioned: ask for one of {partition_name(address.name, 0)} and so on"
            raise HttpError(405, reason)
        (found,) = await self._existing(address, [self.topic(address)])
        return found

    async def every(self, request: Request) -> list[Topic]:
        """The topic, or the partitions of it that exist: at least one. Raises HttpError 404."""
        address = self.address(request)
        return await self._existing(address, self.partition_topics(address) or [self.topic(address)])

    async def _existing(self, address: TopicAddress, topics: list[Topic]) -> list[Topic]:
        found = await asyncio.to_thread(lambda: [topic for topic in topics if topic.exists()])
        if not found:
            raise HttpError(404, f"topic {address.name} does not exist")
        return found


MAX_PARTITIONS = 10_000
_AT_ONCE = 100

_NON_PERSISTENT = "/admin/v2/non-persistent/{tenant}/{namespace}"


@dataclass(eq=False)
class TopicResource:
    """For the event loop's thread alone.

    list: answers with a namespace's topics. used: topics that have, or had, producers or consumers.
    """

    _store: DelayedStore
    _resources: Resources
    _access: TopicAccess
    _removal: TopicRemoval
    _list: Callable[[str], Awaitable[Reply]]
    _finder: TopicFinder
    _used: Callable[[], set[str]]

    def routes(self) -> list[Route]:
        forced = ("force", "deleteSchema", "authoritative")
        partitions = f"{TOPIC}/partitions"
        return [
            Route("GET", TOPICS, self.topics, "Topics of a namespace, partitions each by itself", Need.EITHER),
            Route("GET", f"{TOPICS}/partitioned", self.list_partitioned, "Partitioned topics", Need.EITHER),
            Route("GET", _NON_PERSISTENT, self.none, "Topics that are not persistent: none", Need.EITHER),
            Route("GET", f"{_NON_PERSISTENT}/partitioned", self.none, "Likewise, partitioned ones", Need.EITHER),
            Route("PUT", TOPIC, self.create, "Create a topic", Need.TENANT, body="object"),
            Route("DELETE", TOPIC, self.delete, "Delete a topic with all it holds", Need.TENANT, forced),
            Route("GET", partitions, self.metadata, "How many partitions", Need.EITHER, ("checkAllowAutoCreation",)),
            Route("PUT", partitions, self.create_partitioned, "Create all partitions", Need.TENANT, body="integer"),
            Route("POST", partitions, self.add_partitions, "Have more partitions", Need.TENANT, body="integer"),
            Route("DELETE", partitions, self.delete_partitioned, "Delete all partitions", Need.TENANT, forced),
            Route("POST", f"{TOPIC}/createMissedPartitions", self.repair, "Create missing partitions", Need.TENANT),
            Route("PUT", f"{TOPIC}/unload", self.unload, "Have clients look the topic up anew", Need.TENANT),
            *(
                Route("PUT", f"{whole}/unload", self.unload_namespace, "The same, of all topics", Need.TENANT)
                for whole in WHOLES
            ),
            Route("GET", f"{TOPIC}/examinemessage", self.examine, "The n-th message of the main log, or from its end",
                  Need.CONSUME, ("initialPosition", "messagePosition")),
            Route("GET", f"{TOPIC}/lastMessageId", self.last_message_id, "Id of the last message", Need.CONSUME),
            Route("GET", f"{TOPIC}/messageid/{{timestamp}}", self.published_at,
                  "Id of the first message published then (ms) or later", Need.CONSUME),
            Route("GET", f"{TOPIC}/ledger/{{ledger}}/entry/{{entry}}", self.message, "A stored message", Need.CONSUME),
        ]  # fmt: skip

    # -- names -----------------------------------------------------------------------------------------

    async def topics(self, request: Request) -> Any:
        return await self._list(self._finder.namespace(request))

    async def list_partitioned(self, request: Request) -> Any:
        names = self._resources.partitioned.names(f"{self._finder.namespace(request)}/")
        return [f"persistent://{name}" for name in names]

    async def none(self, request: Request) -> Any:
        """Pulsar's tools ask for these beside the persistent ones, and fail where they are refused."""
        self._finder.namespace(request)
        return []

    async def metadata(self, request: Request) -> Any:
        """0 partitions: it is a plain topic."""
        address = self._finder.address(request)
        partitions = self._resources.partitions(address.name)
        if not partitions and not await self._access.exists(address):
            policy = self._resources.auto_creation(address.name.namespace_name)
            if not request.flag("checkAllowAutoCreation") or not policy.allowed:
                raise HttpError(404, f"topic {address.name} does not exist")
            if policy.partitions and address.partition < 0:
                partitions = await self._access.make_partitioned(address, policy.partitions)
        return {"partitions": partitions, "deleted": False, "properties": {}}

    # -- creating --------------------------------------------------------------------------------------

    async def create(self, request: Request) -> None:
        """A plain topic, or a missing partition of a partitioned one."""
        address = self._finder.address(request)
        _refuse_properties(request.object(optional=True))
        partitions = self._resources.partitions(address.base)
        if address.partition >= max(partitions, 1) and partitions:
            raise HttpError(412, f"{address.name}: the topic has partitions 0 to {partitions - 1}")
        taken = self._resources.partitions(address.name)
        if taken or not await asyncio.to_thread(self._finder.topic(address).create):
            raise HttpError(409, f"topic {address.name} exists already")

    async def create_partitioned(self, request: Request) -> None:
        address, count = self._finder.address(request), _partitions_of(request)
        if address.partition >= 0:
            raise HttpError(412, f"{address.name}: a name that ends so is a partition's")
        names = [str(address.name), *(str(partition_name(address.name, number)) for number in range(count))]
        if await asyncio.to_thread(lambda: any(self._store.topic(name).exists() for name in names)):
            raise HttpError(409, f"{address.name}, or a topic that would be a partition of it, exists already")
        if not await self._resources.partitioned.add(path_of(address.name), count):
            raise HttpError(409, f"topic {address.name} exists already")
        await self._access.make_partitioned(address, count)
        await hand_down(self._store, topic_scope(self._resources, address.name))

    async def add_partitions(self, request: Request) -> None:
        """New partitions have the subscriptions that the others have, before producers know of them."""
        address, count = self._finder.address(request), _partitions_of(request)
        before = await self._require_partitioned(address)
        if count <= before:
            raise HttpError(412, f"partitions={count}: the topic has {before}, and may have more only")
        await self._create_partitions(address, count)
        await self._resources.partitioned.change(path_of(address.name), lambda known: known and max(count, known))
        await hand_down(self._store, topic_scope(self._resources, address.name))

    async def repair(self, request: Request) -> None:
        """Partitions that are missing, as a partitioned topic is created in two steps."""
        address = self._finder.address(request)
        await self._create_partitions(address, await self._require_partitioned(address))

    async def _create_partitions(self, address: TopicAddress, count: int) -> None:
        names = [str(partition_name(address.name, number)) for number in range(count)]

        def work() -> None:
            created = self._store.create_topics(names)
            topics = [self._store.topic(name) for name in names]
            subscriptions = {
                name for topic, new in zip(topics, created, strict=True) if not new for name in topic.subscriptions()
            }
            for topic, new in zip(topics, created, strict=True):
                for name in subscriptions if new else ():
                    topic.subscribe(name, type="shared").close()

        await asyncio.to_thread(work)

    async def _require_partitioned(self, address: TopicAddress) -> int:
        partitions = self._resources.partitions(address.name)
        if not partitions:
            exists = await self._access.exists(address)
            status, reason = (409, "is not partitioned") if exists else (404, "does not exist")
            raise HttpError(status, f"topic {address.name} {reason}")
        return partitions

    # -- deleting --------------------------------------------------------------------------------------

    async def delete(self, request: Request) -> None:
        """412 while clients are attached, unless `force`, which closes them."""
        await self._finder.one(request)
        await self._removal.delete(request.topic, force=request.flag("force"))

    async def delete_partitioned(self, request: Request) -> None:
        """Likewise, of all partitions: none is deleted while one of them has clients."""
        address = self._finder.address(request)
        await self._require_partitioned(address)
        await self._removal.delete(address, force=request.flag("force"))

    async def unload(self, request: Request) -> None:
        """Every producer and consumer is told that it is closed; clients open them anew."""
        for topic in await self._finder.every(request):
            self._removal.disconnect(topic.name)

    async def unload_namespace(self, request: Request) -> None:
        """Likewise, of all topics of a namespace, which stays where it is."""
        prefix = f"{SCHEME}{self._finder.namespace(request)}/"
        for name in self._used():
            if name.startswith(prefix):
                self._removal.disconnect(name)

    # -- messages --------------------------------------------------------------------------------------

    async def last_message_id(self, request: Request) -> Any:
        """-1 and -1: nothing may be read."""
        topic = await self._finder.one(request)
        position, batch_index = await asyncio.to_thread(lambda: feed.last_entry(topic, None))
        if position.entry_id < 0:
            position = MessageId(-1, -1)
        return {**id_json(position, request.topic), **({} if batch_index < 0 else {"batchIndex": batch_index})}

    async def published_at(self, request: Request) -> Any:
        """404: none was."""
        topic = await self._finder.one(request)
        time_ms = request.number("timestamp", 0, highest=MAX_DUE_MS)

        messages = await asyncio.to_thread(feed.read_from, topic, PublishedAt(time_ms))
        if not messages:
            raise HttpError(404, f"no message that may be read was published at {time_ms} ms or later")
        return id_json(messages.positions[0], request.topic)

    async def examine(self, request: Request) -> Reply:
        """`initialPosition` is latest or earliest; the farthest message where there are not so many. 412: none is."""
        topic = await self._finder.one(request)
        place = max(request.number("messagePosition", 1, highest=MOST_PEEKED), 1)
        initial = one_of("initialPosition", request.query.get("initialPosition") or "latest", ("latest", "earliest"))

        def work() -> Reply | None:
            found = _last_of(topic, "earliest", 1, place) if initial == "earliest" else _from_end(topic, place)
            return reply_of(found[0], found[0].position) if found else None

        answer = await asyncio.to_thread(work)
        if answer is None:
            raise HttpError(412, f"topic {topic.name} has no message that may be read")
        return answer

    async def message(self, request: Request) -> Reply:
        """By the id that came with it, or that of its receipt: a delayed one before it is due, too."""
        topic = await self._finder.one(request)
        message_id = MessageId(request.number("ledger", 0, highest=MAX_ID), request.number("entry", 0, highest=MAX_ID))

        def work() -> Reply | None:
            with suppress(InvalidArgument):  # an id that is none of the main log's
                messages = feed.read_from(topic, message_id)
                if messages and messages.positions[0] == message_id:
                    return reply_of(messages[0], message_id)
            stored = topic.get(message_id)
            return None if stored is None else reply_of(stored, message_id)

        found = await asyncio.to_thread(work)
        if found is None:
            raise HttpError(404, f"there is no message {message_id}")
        return found


def _last_of(topic: Topic, start: SeekTarget, keep: int, most: int | None = None) -> list[ReceivedMessage]:
    """The last `keep` of the first `most` messages that may be read from there on; most: None: of all."""
    kept: deque[ReceivedMessage] = deque(maxlen=keep)
    read = 0
    with topic.reader(start) as reader:
        while most is None or read < most:
            messages, _ = reader.poll_columns(_AT_ONCE if most is None else min(_AT_ONCE, most - read), fetches=True)
            if not messages:
                break
            reader.ack(messages)
            read += len(messages)
            kept.extend(messages.part(max(len(messages) - keep, 0), len(messages)))
    return list(kept)


def _from_end(topic: Topic, place: int) -> list[ReceivedMessage]:
    """The last `place` messages that may be read. Entries that hold none, or are not due, are passed over."""
    ledgers, back = topic.ledgers(), place
    while True:
        start: MessageId | None = None
        left = back
        for ledger in reversed(ledgers):
            if left <= ledger.entries:
                start = MessageId(ledger.ledger_id, ledger.entries - left)
                break
            left -= ledger.entries
        found = _last_of(topic, start or "earliest", place)
        if start is None or len(found) == place:
            return found
        back *= 2


def id_json(position: MessageId, address: TopicAddress) -> dict[str, int]:
    """A message id as Pulsar writes it."""
    return {"ledgerId": position.ledger_id, "entryId": position.entry_id, "partitionIndex": address.partition}


def _partitions_of(request: Request) -> int:
    """The body: a number, or an object with it."""
    found = request.json()
    if isinstance(found, dict):
        _refuse_properties(found.get("properties") or {})
        found = found.get("partitions")
    return checked_integer("partitions", found, 1, MAX_PARTITIONS)


def _refuse_properties(properties: object) -> None:
    if properties:
        raise HttpError(412, f"properties={properties!r:.200}: topics have none here")
