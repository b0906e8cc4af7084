"""Requests about namespaces that another broker serves.

LOOKUP is redirected to the owner, as are requests over HTTP. Any broker answers for the number of partitions, schemas
and lists, as with Pulsar: it asks the owner, with the client's credentials. Producers and consumers are refused with
ServiceNotReady, at which clients look up again; watches with NotAllowedError, at which clients ask from time to time.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from aiohttp import ClientError, ClientSession, ClientTimeout

from ...store.errors import InvalidArgument
from ..listing.memory_limits import DualMemoryLimiter
from ..protocol import commands
from ..protocol.commands import LookupKind, LookupResponse
from ..protocol.failures import Refused, ServerError
from ..protocol.fields import Command
from ..protocol.peer import Peer
from .broker_link import ClientLinks, Dialer, Forwarding
from .placement import KnownBrokers, PlacedBroker, PlacementFile, namespace_of_topic

Handler = Callable[[Any, Any, memoryview], Awaitable[None] | None]

_ASK_S = 5.0
"""Timeout of a question to another broker over HTTP."""

_PASSED_ON = " by way of a broker"
"""Ends the client's version in a question that a broker has passed on: it is not passed on again."""


class Ownership:
    """The placement as one broker applies it. Runs on the event loop's thread."""

    def __init__(
        self, file: PlacementFile, name: str, dialer: Dialer, limiter: DualMemoryLimiter, max_lookups: int
    ) -> None:
        """name: of this broker in the table. Raises InvalidArgument."""
        if name not in file.table.brokers:
            known = ", ".join(file.table.brokers)
            raise InvalidArgument("placementBroker", name, f"expected a broker of {file.path}: {known}")
        self.file = file
        self._name = name
        self._dialer = dialer
        self._links: dict[int, ClientLinks] = {}
        self._forwarding = Forwarding(KnownBrokers((), file), self._links_of, max_lookups, limiter)

    def owner(self, namespace: str) -> PlacedBroker | None:
        """The other broker that serves `tenant/namespace`; None: this one. Refused: TopicNotFound, none does."""
        owner = self.file.table.owner(namespace)
        if owner is None:
            raise Refused(ServerError.TOPIC_NOT_FOUND, f"no broker is placed to serve namespace {namespace}")
        return None if owner.name == self._name else owner

    def is_own(self, namespace: str) -> bool:
        owner = self.file.table.owner(namespace)
        return owner is not None and owner.name == self._name

    def http_owner(self, namespace: str) -> str | None:
        """The address that serves a namespace over HTTP; None: this broker does. Refused: the table has none."""
        owner = self.owner(namespace)
        if owner is not None and owner.http_url is None:
            text = f"broker {owner.name} has namespace {namespace}, and the placement says no http_url of it"
            raise Refused(ServerError.SERVICE_NOT_READY, text)
        return None if owner is None else owner.http_url

    async def tenant_elsewhere(self, tenant: str, authorization: str) -> Mapping[str, Any] | None:
        """`TenantInfo` of a tenant, from the first other broker that has it; None: no broker that can be reached has.

        authorization: the header of the request for which it is asked; brokers check it.
        """
        urls = [each.http_url for each in self.file.table.brokers.values() if each.name != self._name and each.http_url]
        headers = {"Authorization": authorization} if authorization else {}
        timeout = ClientTimeout(_ASK_S)
        async with ClientSession(headers=headers, timeout=timeout) as session:
            for url in urls:
                address = f"{url.rstrip('/')}/admin/v2/tenants/{quote(tenant, safe='')}"
                context = self._dialer.context or True
                with suppress(ClientError, TimeoutError, OSError, ValueError):
                    async with session.get(address, ssl=context, allow_redirects=False) as answer:
                        if answer.status == 200 and isinstance(found := await answer.json(), dict):
                            return found
        return None

    def placed(self, handlers: Mapping[type[Command], Handler]) -> dict[type[Command], Handler]:
        """Handlers that serve what this broker owns by the given ones, and the rest as described above."""
        others: dict[type[Command], Callable[[Peer, Any, PlacedBroker], Awaitable[None] | None]] = {
            commands.Lookup: self._redirect,
            commands.PartitionedMetadata: self._forward,
            commands.GetSchema: self._forward,
            commands.GetOrCreateSchema: self._forward,
            commands.GetTopics: self._list,
            commands.Producer: self._refuse,
            commands.Subscribe: self._refuse,
            commands.WatchTopicList: self._refuse_watch,
        }
        return {**handlers, **{kind: self._choose(handlers[kind], other) for kind, other in others.items()}}

    def _choose(self, own: Handler, other: Callable[[Peer, Any, PlacedBroker], Awaitable[None] | None]) -> Handler:
        def handle(peer: Peer, command: Any, blob: memoryview) -> Awaitable[None] | None:
            is_named = isinstance(command, commands.GetTopics | commands.WatchTopicList)
            namespace = command.namespace if is_named else namespace_of_topic(command.topic)
            owner = None if namespace is None else self.owner(namespace)
            return own(peer, command, blob) if owner is None else other(peer, command, owner)

        return handle

    def _redirect(self, peer: Peer, command: commands.Lookup, owner: PlacedBroker) -> None:
        tls = owner.tls_url or (owner.url if owner.address.tls else "")
        plain = "" if owner.address.tls else owner.url
        peer.send(LookupResponse(command.request_id, url=plain, url_tls=tls, response=LookupKind.REDIRECT))

    def _forward(self, peer: Peer, command: Any, owner: PlacedBroker) -> Awaitable[None]:
        self._check_first(peer, owner)
        return self._forwarding.answer(peer, command)

    def _list(self, peer: Peer, command: commands.GetTopics, owner: PlacedBroker) -> Awaitable[None]:
        self._check_first(peer, owner)
        return self._forwarding.topics(peer, command)

    def _refuse(self, peer: Peer, command: commands.Producer | commands.Subscribe, owner: PlacedBroker) -> None:
        text = f"{command.topic} is not served by this broker: broker {owner.name} does; look it up again"
        raise Refused(ServerError.SERVICE_NOT_READY, text)

    def _refuse_watch(self, peer: Peer, command: commands.WatchTopicList, owner: PlacedBroker) -> None:
        text = f"namespace {command.namespace} is served by broker {owner.name}: only that one watches it"
        raise Refused(ServerError.NOT_ALLOWED, text)

    def _check_first(self, peer: Peer, owner: PlacedBroker) -> None:
        if peer.client_version.endswith(_PASSED_ON):
            text = f"brokers do not agree on who owns it: this one has broker {owner.name} in its placement"
            raise Refused(ServerError.SERVICE_NOT_READY, text)

    def _links_of(self, peer: Peer) -> ClientLinks:
        found = self._links.get(peer.number)
        if found is None:

            def connect() -> commands.Connect:
                return replace(peer.connect, client_version=peer.client_version + _PASSED_ON)

            found = self._links[peer.number] = ClientLinks(self._dialer, connect)
        return found

    def gone(self, peer: Peer) -> None:
        found = self._links.pop(peer.number, None)
        if found is not None:
            found.close()
