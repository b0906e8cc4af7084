"""/admin/v2/namespaces, tenants and clusters: which there are, what is in them, who administers and may use them.

A topic is deleted with all that is kept of it: messages, schemas, epochs, settings, partitions.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from ...delayed_store import DelayedStore
from ...store.errors import InvalidArgument, UnknownTopic
from ...store.names import TopicName, validate_namespace_name
from ..admin.brokers import Addresses, require_cluster
from ..admin.http_request import HttpError, Reply, Request, existing_namespace, one_of, texts_of, value_of
from ..admin.routing import NAMESPACE, TOPIC, Need, Route
from ..listing.topic_listing import Listed, TopicListing
from ..lookup.resources import NamespaceSettings, Resources, path_of
from ..lookup.topic_address import TopicAddress, partition_name
from ..lookup.topic_facts import TopicFacts
from ..protocol.commands import TopicsMode
from .namespace_policies import NamespacePolicies, actions_of


@dataclass(eq=False)
class TopicRemoval:
    """For the event loop's thread alone.

    users: how many producers and consumers a topic has. disconnect: closes them. forget: drops its figures.
    """

    _store: DelayedStore
    _resources: Resources
    _facts: TopicFacts
    _users: Callable[[str], int]
    disconnect: Callable[[str], object]
    _forget: Callable[[str], object]

    async def delete(self, address: TopicAddress, *, force: bool) -> None:
        """Delete a topic, or a partitioned one with its partitions.

        Raises UnknownTopic, InvalidArgument (it has producers or consumers; force closes them).
        """
        partitions = self._resources.partitions(address.name)
        if partitions:
            names = [partition_name(address.name, number) for number in range(partitions)]
        elif await asyncio.to_thread(self._store.topic(str(address.name)).exists):
            names = [address.name]
        else:
            raise UnknownTopic(str(address.name))
        for name in names:
            if not force and (users := self._users(str(name))):
                raise InvalidArgument("topic", str(name), f"producers and consumers use it: {users}; force closes them")
        if partitions:
            await self._resources.partitioned.remove(path_of(address.name))
        await self._delete(names)
        if address.partition < 0:
            await self._resources.deduplication.remove(path_of(address.name))
            if partitions:  # what is set for it beside its partitions
                await asyncio.to_thread(self._store.remove_policies, topic=str(address.name))

    async def delete_all(self, namespace: str) -> None:
        """Delete every topic of a namespace, also of producers and consumers that are there."""
        for path in list(self._resources.partitioned.names(f"{namespace}/")):
            await self._resources.partitioned.remove(path)
            await asyncio.to_thread(self._store.remove_policies, topic=path)
        await self._delete(await self.names(namespace))
        for path in list(self._resources.deduplication.names(f"{namespace}/")):
            await self._resources.deduplication.remove(path)
        await asyncio.to_thread(self._facts.forget_all, namespace)

    async def names(self, namespace: str) -> list[TopicName]:
        return await asyncio.to_thread(lambda: [TopicName.parse(topic.name) for topic in self._store.topics(namespace)])

    async def _delete(self, names: Sequence[TopicName]) -> None:
        for name in names:
            self.disconnect(str(name))
            await asyncio.to_thread(self._forget_and_delete, str(name))
            self.disconnect(str(name))  # those that came meanwhile have a topic that is no more
            self._forget(str(name))

    def _forget_and_delete(self, name: str) -> None:
        self._facts.forget(name)
        try:
            self._store.delete_topic(name)
        except UnknownTopic:
            return  # another was quicker


BUNDLES = {"boundaries": ["0x00000000", "0xffffffff"], "numBundles": 1}
"""A namespace is served as one: Pulsar's tools ask for the parts."""


async def topics_reply(listing: TopicListing, namespace: str) -> Reply:
    """List full names in order, as JSON, within the limits of memory that lists over the wire have.

    A heap permit is held while the list is made, a direct one until the answer has left or its connection is gone.
    Raises PermitError where there is no permit in time.
    """

    async def size_of(listed: Listed) -> int:
        return listed.size

    async with AsyncExitStack() as until_left:
        with listing.gate:
            async with listing.within_limits(namespace, TopicsMode.PERSISTENT, until_left, size_of) as listed:
                body = await asyncio.to_thread(json.dumps, listed.names, ensure_ascii=False)
        return Reply(body.encode(), "application/json", until_left=until_left.pop_all())


@dataclass(eq=False)
class Namespaces:
    """For the event loop's thread alone.

    list: answers with a namespace's topics. tenant_elsewhere: `TenantInfo` of another broker, by the tenant's name and
    an Authorization header.
    """

    _store: DelayedStore
    _resources: Resources
    _policies: NamespacePolicies
    _removal: TopicRemoval
    _list: Callable[[str], Awaitable[Reply]]
    _cluster: str
    _tenant_elsewhere: Callable[[str, str], Awaitable[Mapping[str, Any] | None]] | None = None

    def routes(self) -> list[Route]:
        tenant, role = Need.TENANT, NAMESPACE + "/permissions/{role}"
        return [
            Route("GET", "/admin/v2/namespaces/{tenant}", self.of_tenant, "Namespaces of a tenant", tenant),
            Route("GET", NAMESPACE, self.get, "All that is set for a namespace", tenant),
            Route("PUT", NAMESPACE, self.create, "Create a namespace", tenant, body="object"),
            Route("DELETE", NAMESPACE, self.delete, "Delete a namespace", tenant, query=("force",)),
            Route("GET", NAMESPACE + "/topics", self.topics, "Topics of a namespace", Need.EITHER, query=("mode",)),
            Route("GET", NAMESPACE + "/bundles", self.bundles, "Parts of a namespace: one", Need.EITHER),
            Route("GET", NAMESPACE + "/permissions", self.permissions, "What roles may do", tenant),
            Route("GET", TOPIC + "/permissions", self.topic_permissions,
                  "What roles may do: as its namespace says", tenant),
            Route("POST", role, self.grant, "Grant a role actions, in place of earlier ones", tenant, body="array"),
            Route("DELETE", role, self.revoke, "Take all actions from a role", tenant),
            Route("GET", NAMESPACE + "/replication", self.replication, "Clusters of a namespace: this one", tenant),
            Route("POST", NAMESPACE + "/replication", self.replicate, "Only this cluster", tenant, body="array"),
        ]  # fmt: skip

    async def of_tenant(self, request: Request) -> list[str]:
        """`tenant/namespace`, in order."""
        administrators_of(self._resources, request)
        return [*self._resources.namespaces.names(f"{request.path['tenant']}/")]

    async def get(self, request: Request) -> dict[str, Any]:
        namespace = existing_namespace(self._resources, request)
        own = await self._policies.all_of(namespace)
        return {
            "auth_policies": {
                "namespace_auth": self._permissions(namespace),
                "destination_auth": {},
                "subscription_auth_roles": {},
            },
            "replication_clusters": [self._cluster],
            "bundles": BUNDLES,
            "deleted": False,
            **own,
        }

    async def create(self, request: Request) -> None:
        """The tenant has to exist; the body, `Policies`, may set what is offered here. 409 if there is one."""
        namespace = request.namespace
        await self._take_tenant(request)
        administrators_of(self._resources, request)
        body = _policies_of(request)
        self._require_cluster(texts_of(body, "replication_clusters"))
        changes = self._policies.changes(namespace, body)
        if not await self._resources.namespaces.add(namespace, NamespaceSettings()):
            raise HttpError(409, f"namespace {namespace} exists")
        try:
            for change in changes:
                await change()
        except BaseException:  # a namespace that does not have what was asked for is not left behind
            await self._resources.namespaces.remove(namespace)
            raise

    async def delete(self, request: Request) -> None:
        """409 if it has topics, unless they go too."""
        namespace = request.namespace
        if self._resources.namespaces.get(namespace) is None and not await self._removal.names(namespace):
            raise HttpError(404, f"namespace {namespace} does not exist")
        await self.remove(namespace, force=request.flag("force"))

    async def remove(self, namespace: str, *, force: bool) -> None:
        """Delete a namespace. Without it nothing comes into being there, so it goes before its topics do."""
        before = self._resources.namespaces.get(namespace)
        await self._resources.namespaces.remove(namespace)
        try:
            if not force:
                found = [str(name) for name in await self._removal.names(namespace)]
                found += self._resources.partitioned.names(f"{namespace}/")
                if found:
                    raise HttpError(409, f"namespace {namespace} has topics: {found[0]}; force=true deletes them")
            await self._removal.delete_all(namespace)
        except BaseException:
            if before is not None:
                await self._resources.namespaces.add(namespace, before)
            raise
        await asyncio.to_thread(self._store.remove_policies, namespace=namespace)

    async def topics(self, request: Request) -> Reply | list[str]:
        """Full names in order; partitions by their own names."""
        namespace = existing_namespace(self._resources, request)
        mode = one_of("mode", request.query.get("mode", "ALL").upper(), ("PERSISTENT", "NON_PERSISTENT", "ALL"))
        if mode == "NON_PERSISTENT":
            return []
        return await self._list(namespace)

    async def bundles(self, request: Request) -> dict[str, Any]:
        existing_namespace(self._resources, request)
        return BUNDLES

    # -- permissions ---------------------------------------------------------------------------------

    async def permissions(self, request: Request) -> dict[str, list[str]]:
        return self._permissions(existing_namespace(self._resources, request))

    async def topic_permissions(self, request: Request) -> dict[str, list[str]]:
        """Those of the namespace: as in Pulsar they count for each of its topics."""
        existing_namespace(self._resources, request)
        return self._permissions(request.topic.name.namespace_name)

    async def grant(self, request: Request) -> None:
        """Actions are produce and consume."""
        namespace, role = existing_namespace(self._resources, request), request.path["role"]
        granted = actions_of("actions", {"actions": request.json()})
        if not granted:
            raise HttpError(412, "the body: expected a list of actions, produce and consume")
        await self._change(namespace, lambda before: replace(before, permissions={**before.permissions, role: granted}))

    async def revoke(self, request: Request) -> None:
        """A role that has none is left as it is."""
        role = request.path["role"]
        await self._change(
            existing_namespace(self._resources, request),
            lambda before: replace(
                before, permissions={name: each for name, each in before.permissions.items() if name != role}
            ),
        )

    async def replication(self, request: Request) -> list[str]:
        existing_namespace(self._resources, request)
        return [self._cluster]

    async def replicate(self, request: Request) -> None:
        """Pulsar's tools set this when they make a namespace."""
        existing_namespace(self._resources, request)
        self._require_cluster(texts_of({"clusters": request.json()}, "clusters"))

    # -- what all need -------------------------------------------------------------------------------

    def _permissions(self, namespace: str) -> dict[str, list[str]]:
        return {role: sorted(actions) for role, actions in self._resources.granted(namespace).items()}

    async def _change(self, namespace: str, change: Any) -> None:
        await self._resources.namespaces.change(namespace, lambda before: before and change(before))

    async def _take_tenant(self, request: Request) -> None:
        """Tenants are of each broker: the owner of a namespace takes one that only another knows over from there."""
        tenant = request.path["tenant"]
        if self._tenant_elsewhere is None or self._resources.tenants.get(tenant) is not None:
            return
        found = await self._tenant_elsewhere(tenant, request.authorization)
        if found is not None:
            await self._resources.tenants.add(tenant, list(texts_of(found, "adminRoles")))

    def _require_cluster(self, clusters: list[str]) -> None:
        for each in clusters:
            if each != self._cluster:
                raise HttpError(412, f"cluster {each!r}: this one is {self._cluster}, and nothing is replicated")


def administrators_of(resources: Resources, request: Request) -> list[str]:
    """The administrators of a path's tenant. HttpError 404 if there is none."""
    found = resources.tenants.get(request.path["tenant"])
    if found is None:
        raise HttpError(404, f"tenant {request.path['tenant']} does not exist")
    return found


def _policies_of(request: Request) -> dict[str, Any]:
    """The body: `Policies`, or nothing, which Java's client sends as an empty text. HttpError 412 for others."""
    found = request.json()
    if found is None or found == "":
        return {}
    body = request.object()
    value_of(body, "bundles", dict, {})
    return body


_TENANT = "/admin/v2/tenants/{tenant}"


@dataclass(eq=False)
class Tenants:
    """Who administers what."""

    _resources: Resources
    _namespaces: Namespaces
    _cluster: str
    _addresses: Addresses

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/admin/v2/clusters", self.clusters, "Clusters: this one", Need.LOGIN),
            Route("GET", "/admin/v2/clusters/{cluster}", self.cluster, "Addresses of a cluster", Need.LOGIN),
            Route("GET", "/admin/v2/tenants", self.names, "Names of tenants", Need.SUPERUSER),
            Route("GET", _TENANT, self.get, "Administrators and clusters of a tenant", Need.TENANT),
            Route("PUT", _TENANT, self.create, "Create a tenant", Need.SUPERUSER, body="object"),
            Route("POST", _TENANT, self.update, "Replace what is set for a tenant", Need.SUPERUSER, body="object"),
            Route("DELETE", _TENANT, self.delete, "Delete a tenant", Need.SUPERUSER, query=("force",)),
        ]

    async def clusters(self, request: Request) -> list[str]:
        return [self._cluster]

    async def cluster(self, request: Request) -> dict[str, Any]:
        require_cluster(request, self._cluster)
        here = self._addresses
        return {
            "serviceUrl": here.http or None,
            "serviceUrlTls": here.https or None,
            "brokerServiceUrl": here.pulsar or None,
            "brokerServiceUrlTls": here.pulsar_tls or None,
        }

    async def names(self, request: Request) -> list[str]:
        return [*self._resources.tenants.names()]

    async def get(self, request: Request) -> dict[str, Any]:
        return {"adminRoles": administrators_of(self._resources, request), "allowedClusters": [self._cluster]}

    async def create(self, request: Request) -> None:
        """409 if there is one."""
        name = request.path["tenant"]
        try:
            validate_namespace_name(f"{name}/n")
        except InvalidArgument as error:
            raise HttpError(412, f"tenant={name!r}: {error.reason}") from error
        if not await self._resources.tenants.add(name, self._settings(request)):
            raise HttpError(409, f"tenant {name} exists")

    async def update(self, request: Request) -> None:
        """404 if there is none. `null` in place of the settings, or of the roles, is 412: it would take them all."""
        administrators_of(self._resources, request)
        if request.object().get("adminRoles", []) is None:
            raise HttpError(412, "adminRoles=null: expected a list of texts")
        after = self._settings(request)
        await self._resources.tenants.change(request.path["tenant"], lambda before: None if before is None else after)

    async def delete(self, request: Request) -> None:
        """409 if it has namespaces, unless they go too."""
        administrators_of(self._resources, request)
        tenant, force = request.path["tenant"], request.flag("force")
        namespaces = [*self._resources.namespaces.names(f"{tenant}/")]
        if namespaces and not force:
            raise HttpError(
                409, f"tenant {tenant} has namespaces: {', '.join(namespaces[:5])}; force=true deletes them"
            )
        for namespace in namespaces:
            await self._namespaces.remove(namespace, force=True)
        await self._resources.tenants.remove(tenant)

    def _settings(self, request: Request) -> list[str]:
        body = request.object(optional=True)
        for cluster in texts_of(body, "allowedClusters"):
            if cluster != self._cluster:
                raise HttpError(412, f"allowedClusters={cluster!r}: this cluster is {self._cluster}, and the only one")
        return list(dict.fromkeys(texts_of(body, "adminRoles")))
