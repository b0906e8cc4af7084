"""/admin/v2/tenants and /admin/v2/clusters: tenants, and the one cluster."""

from __future__ import annotations

from typing import Any

from ...store.errors import InvalidArgument
from ...store.names import validate_namespace_name
from ..admin.brokers import Addresses
from ..admin.http_request import HttpError, Request, texts_of
from ..admin.routing import Need, Route
from ..lookup.resources import Resources
from .namespaces import Namespaces

_TENANT = "/admin/v2/tenants/{tenant}"


class Tenants:
    """Who administers what."""

    def __init__(self, resources: Resources, namespaces: Namespaces, cluster: str, addresses: Addresses) -> None:
        self._resources = resources
        self._addresses = addresses
        self._namespaces = namespaces
        self._cluster = cluster

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
        if request.path["cluster"] != self._cluster:
            raise HttpError(404, f"cluster {request.path['cluster']} does not exist; this one is {self._cluster}")
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
        return {"adminRoles": self._found(request), "allowedClusters": [self._cluster]}

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
        self._found(request)
        if request.object().get("adminRoles", []) is None:
            raise HttpError(412, "adminRoles=null: expected a list of texts")
        after = self._settings(request)
        await self._resources.tenants.change(request.path["tenant"], lambda before: None if before is None else after)

    async def delete(self, request: Request) -> None:
        """409 if it has namespaces, unless they go too."""
        self._found(request)
        tenant, force = request.path["tenant"], request.flag("force")
        namespaces = [*self._resources.namespaces.names(f"{tenant}/")]
        if namespaces and not force:
            raise HttpError(
                409, f"tenant {tenant} has namespaces: {', '.join(namespaces[:5])}; force=true deletes them"
            )
        for namespace in namespaces:
            await self._namespaces.remove(namespace, force=True)
        await self._resources.tenants.remove(tenant)

    def _found(self, request: Request) -> list[str]:
        name = request.path["tenant"]
        found = self._resources.tenants.get(name)
        if found is None:
            raise HttpError(404, f"tenant {name} does not exist")
        return found

    def _settings(self, request: Request) -> list[str]:
        body = request.object(optional=True)
        for cluster in texts_of(body, "allowedClusters"):
            if cluster != self._cluster:
                raise HttpError(412, f"allowedClusters={cluster!r}: this cluster is {self._cluster}, and the only one")
        return list(dict.fromkeys(texts_of(body, "adminRoles")))
