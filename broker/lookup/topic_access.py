"""From the name in a command to a topic of the store: rights, namespaces, partitions, creation by policy.

The order of checks is the rule that a client without a right sees and changes nothing: name, right, then what exists.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from ...delayed_store import DelayedStore
from ...topic import Topic
from ..protocol.failures import Refused, ServerError
from ..protocol.peer import Peer
from ..security.permissions import Action, Permissions
from .namespace_settings import PartitionedTopic
from .resources import Resources, path_of
from .topic_address import TopicAddress, partition_name


class OpenedTopic(NamedTuple):
    """A topic that exists, and what its name said."""

    topic: Topic
    address: TopicAddress


class TopicAccess:
    """Finds and makes topics for connections. Of the event loop's thread."""

    def __init__(self, store: DelayedStore, resources: Resources, permissions: Permissions) -> None:
        self._store = store
        self._resources = resources
        self._permissions = permissions

    def admit(self, role: str | None, text: str, *actions: Action) -> TopicAddress:
        """The topic that a name means, for a role that may do one of the actions, in a namespace that exists.

        Refused: InvalidTopicName, NotAllowed, Authorization, TopicNotFound.
        """
        address = TopicAddress.parse(text)
        namespace = address.name.namespace_name
        self._permissions.require(role, namespace, *actions)
        if self._resources.namespaces.get(namespace) is None:
            raise Refused(ServerError.TOPIC_NOT_FOUND, f"namespace {namespace} does not exist")
        return address

    async def exists(self, address: TopicAddress) -> bool:
        """True if the topic exists, partitioned or not."""
        if self._resources.partitions(address.name):
            return True
        return await asyncio.to_thread(self._store.topic(str(address.name)).exists)

    async def open(self, role: str | None, text: str, action: Action, *, create: bool = True) -> OpenedTopic:
        """The topic for a producer or a consumer; made if `create` and its namespace's policy say so.

        Refused as in `admit`, and NotAllowed for a partitioned topic itself and partitions that it has not,
        TopicNotFound. Raises what the store does.
        """
        address = self.admit(role, text, action)
        partitions = self._resources.partitions(address.base)
        if partitions and not 0 <= address.partition < partitions:
            raise Refused(ServerError.NOT_ALLOWED, f"{address.name}: the topic has partitions 0 to {partitions - 1}")
        topic = self._store.topic(str(address.name))
        if not await asyncio.to_thread(topic.exists):
            allowed = partitions or self._resources.auto_creation(address.name.namespace_name).allowed
            if not create or not allowed:
                raise Refused(ServerError.TOPIC_NOT_FOUND, f"topic {address.name} does not exist")
            await asyncio.to_thread(topic.create)
        return OpenedTopic(topic, address)

    async def to_produce(self, peer: Peer, text: str) -> tuple[Topic, int]:
        """`open` for a producer: the topic, and its partition or -1."""
        topic, address = await self.open(peer.role, text, Action.PRODUCE)
        return topic, address.partition

    async def to_consume(self, peer: Peer, text: str, create: bool) -> tuple[Topic, int]:
        """`open` for a consumer: the topic, and its partition or -1."""
        topic, address = await self.open(peer.role, text, Action.CONSUME, create=create)
        return topic, address.partition

    async def make_partitioned(self, address: TopicAddress, partitions: int) -> int:
        """Create a partitioned topic with its partitions; return their number, an earlier one's if it exists."""
        names = [str(partition_name(address.name, number)) for number in range(partitions)]
        await self._resources.partitioned.add(path_of(address.name), PartitionedTopic(partitions))
        await asyncio.to_thread(self._store.create_topics, names)
        return self._resources.partitions(address.name)
