"""From the name in a command to a topic of the store: rights, namespaces, partitions, creation by policy.

The order of checks is the rule that a client without a right sees and changes nothing: name, right, then what exists.
LOOKUP and PARTITIONED_METADATA answer where a topic is, and how many partitions it has.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ...delayed_store import DelayedStore
from ...topic import Topic
from ..protocol import commands
from ..protocol.failures import Refused, ServerError
from ..protocol.peer import Peer
from ..security.permissions import Action, Permissions
from .resources import Resources, path_of
from .topic_address import TopicAddress, partition_name

UNKNOWN_LISTENER = "the broker do not have test listener"
"""C++ clients take ServiceNotReady for an unknown listener only with this text in it; else they drop the connection."""


class Urls(NamedTuple):
    """Addresses of the broker: `pulsar://host:port` and `pulsar+ssl://host:port`; empty: not that way."""

    plain: str
    tls: str = ""


@dataclass(eq=False)
class TopicAccess:
    """Finds and makes topics for connections. Of the event loop's thread."""

    _store: DelayedStore
    _resources: Resources
    _permissions: Permissions

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
        if self._resources.partitions(address.name):
            return True
        return await asyncio.to_thread(self._store.topic(str(address.name)).exists)

    async def open(self, action: Action, peer: Peer, text: str, create: bool = True) -> tuple[Topic, int]:
        """The topic for a producer or a consumer, and its partition or -1.

        It is made if `create` and its namespace's policy say so.

        Refused as in `admit`, and NotAllowed for a partitioned topic itself and partitions that it has not,
        TopicNotFound. Raises what the store does.
        """
        address = self.admit(peer.role, text, action)
        partitions = self._resources.partitions(address.base)
        if partitions and not 0 <= address.partition < partitions:
            raise Refused(ServerError.NOT_ALLOWED, f"{address.name}: the topic has partitions 0 to {partitions - 1}")
        topic = self._store.topic(str(address.name))
        if not await asyncio.to_thread(topic.exists):
            allowed = partitions or self._resources.auto_creation(address.name.namespace_name).allowed
            if not create or not allowed:
                raise Refused(ServerError.TOPIC_NOT_FOUND, f"topic {address.name} does not exist")
            await asyncio.to_thread(topic.create)
        return topic, address.partition

    async def make_partitioned(self, address: TopicAddress, partitions: int) -> int:
        """Create a partitioned topic with its partitions; return their number, an earlier one's if it exists."""
        names = [str(partition_name(address.name, number)) for number in range(partitions)]
        await self._resources.partitioned.add(path_of(address.name), partitions)
        await asyncio.to_thread(self._store.create_topics, names)
        return self._resources.partitions(address.name)


@dataclass(eq=False)
class TopicLookup:
    """Answers questions about names. Of the event loop's thread. urls: by listener name, "" for clients without one."""

    _access: TopicAccess
    _resources: Resources
    _urls: Mapping[str, Urls]

    def lookup(self, peer: Peer, command: commands.Lookup) -> None:
        """Answer with this broker's addresses. Never makes a topic, and does not ask whether there is one.

        Raises Refused.
        """
        self._access.admit(peer.role, command.topic, *Action)
        urls = self._urls.get(command.listener or "")
        if urls is None:
            text = f"{UNKNOWN_LISTENER}: {command.listener!r} is not configured"
            raise Refused(ServerError.SERVICE_NOT_READY, text)
        peer.send(
            commands.LookupResponse(
                command.request_id, urls.plain, urls.tls, commands.LookupKind.CONNECT, authoritative=True
            )
        )

    async def partitions(self, peer: Peer, command: commands.PartitionedMetadata) -> None:
        """Answer with the number of partitions, 0 for a plain topic.

        One that does not exist is answered as the namespace would make it, and a partitioned one is made now; a plain
        one when it gets its first producer or consumer. Raises Refused.
        """
        address = self._access.admit(peer.role, command.topic, *Action)
        partitions = self._resources.partitions(address.name)
        if not partitions and not await self._access.exists(address):
            policy = self._resources.auto_creation(address.name.namespace_name)
            known_partition = 0 <= address.partition < self._resources.partitions(address.base)
            if not command.auto_create or not (policy.allowed or known_partition):
                raise Refused(ServerError.TOPIC_NOT_FOUND, f"topic {address.name} does not exist")
            if policy.partitions and address.partition < 0:
                partitions = await self._access.make_partitioned(address, policy.partitions)
        peer.send(commands.PartitionedMetadataResponse(command.request_id, partitions, commands.MetadataResult.SUCCESS))
