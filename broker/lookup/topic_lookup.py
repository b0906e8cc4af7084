"""LOOKUP and PARTITIONED_METADATA: where a topic is, and how many partitions it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...store.errors import DuelogError
from ..protocol.commands import (
    Lookup,
    LookupKind,
    LookupResponse,
    MetadataResult,
    PartitionedMetadata,
    PartitionedMetadataResponse,
)
from ..protocol.failures import Refused, ServerError, server_error
from ..protocol.peer import Peer
from ..security.permissions import Action
from .resources import Resources
from .topic_access import TopicAccess
from .topic_address import TopicAddress

UNKNOWN_LISTENER = "the broker do not have test listener"
"""C++ clients take ServiceNotReady for an unknown listener only with this text in it; else they drop the connection."""


class Urls(NamedTuple):
    """Addresses of the broker: `pulsar://host:port` and `pulsar+ssl://host:port`; empty: not that way."""

    plain: str
    tls: str = ""


class TopicLookup:
    """Answers questions about names. Of the event loop's thread."""

    def __init__(self, access: TopicAccess, resources: Resources, urls: Mapping[str, Urls]) -> None:
        """urls: by listener name, "" for clients that name none."""
        self._access = access
        self._resources = resources
        self._urls = urls

    def lookup(self, peer: Peer, command: Lookup) -> None:
        """Answer with this broker's addresses. Never makes a topic, and does not ask whether there is one."""
        try:
            self._access.admit(peer.role, command.topic, *Action)
            urls = self._urls.get(command.listener or "")
            if urls is None:
                text = f"{UNKNOWN_LISTENER}: {command.listener!r} is not configured"
                raise Refused(ServerError.SERVICE_NOT_READY, text)
        except Refused as error:
            answer = LookupResponse(
                command.request_id, response=LookupKind.FAILED, error=error.error, message=error.message
            )
        else:
            answer = LookupResponse(
                command.request_id,
                url=urls.plain,
                url_tls=urls.tls,
                response=LookupKind.CONNECT,
                authoritative=True,
            )
        peer.send(answer)

    async def partitions(self, peer: Peer, command: PartitionedMetadata) -> None:
        """Answer with the number of partitions, 0 for a plain topic.

        One that does not exist is answered as the namespace would make it, and a partitioned one is made now; a plain
        one when it gets its first producer or consumer.
        """
        try:
            address = self._access.admit(peer.role, command.topic, *Action)
            partitions = await self._count(address, create=command.auto_create)
        except (Refused, DuelogError) as error:
            answer = PartitionedMetadataResponse(
                command.request_id, response=MetadataResult.FAILED, error=server_error(error), message=str(error)
            )
        else:
            answer = PartitionedMetadataResponse(
                command.request_id, partitions=partitions, response=MetadataResult.SUCCESS
            )
        peer.send(answer)

    async def _count(self, address: TopicAddress, *, create: bool) -> int:
        partitions = self._resources.partitions(address.name)
        if partitions or await self._access.exists(address):
            return partitions
        policy = self._resources.auto_creation(address.name.namespace_name)
        known_partition = 0 <= address.partition < self._resources.partitions(address.base)
        if not create or not (policy.allowed or known_partition):
            raise Refused(ServerError.TOPIC_NOT_FOUND, f"topic {address.name} does not exist")
        if policy.partitions and address.partition < 0:
            return await self._access.make_partitioned(address, policy.partitions)
        return 0
