"""This broker: where it is reached, /lookup/v2, and its health, configuration and version at /admin/v2/brokers."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from ...delayed_store import DelayedStore
from ..listing.memory_limits import NAMES, DynamicSettings
from ..lookup.resources import Resources
from ..lookup.topic_lookup import Urls
from .http_request import HttpError, Reply, Request, existing_namespace
from .routing import Need, Route

_BROKERS = "/admin/v2/brokers"


@dataclass(slots=True)
class Addresses:
    """URLs of the binary protocol and of administration; empty: not that way. Known once the broker listens."""

    pulsar: str = ""
    pulsar_tls: str = ""
    http: str = ""
    https: str = ""

    @property
    def broker_id(self) -> str:
        """`host:port`, by which Pulsar's tools name a broker."""
        found = self.http or self.https or self.pulsar or self.pulsar_tls
        return found.partition("://")[2]


@dataclass(eq=False)
class Brokers:
    """For the event loop's thread alone. settings: the configuration, by the names that it has in a file."""

    _store: DelayedStore
    _cluster: str
    _addresses: Addresses
    _settings: Mapping[str, object]
    _changeable: DynamicSettings

    def routes(self) -> list[Route]:
        super_, login, one = Need.SUPERUSER, Need.LOGIN, _BROKERS + "/configuration/{name}"
        return [
            Route("GET", _BROKERS, self.brokers, "Brokers: this one", super_),
            Route("GET", _BROKERS + "/{cluster}", self.brokers, "Brokers of a cluster", super_),
            Route("GET", _BROKERS + "/leaderBroker", self.leader, "This broker", super_),
            Route("GET", _BROKERS + "/health", self.health, "Whether the broker can work: ok", login),
            Route("GET", _BROKERS + "/ready", self.health, "Likewise", login),
            Route("GET", "/status.html", self.health, "Likewise, without credentials", Need.NOTHING),
            Route("GET", _BROKERS + "/version", self.version, "The version", login),
            Route("GET", _BROKERS + "/configuration", self.names, "Settings that may be changed", super_),
            Route("GET", _BROKERS + "/configuration/values", self.values, "Settings that were changed", super_),
            Route("GET", _BROKERS + "/configuration/runtime", self.runtime, "All settings", super_),
            Route("POST", one + "/{value}", self.set, "Change a setting of the running broker", super_),
            Route("DELETE", one, self.delete, "Have a setting be as the configuration says", super_),
        ]

    async def brokers(self, request: Request) -> list[str]:
        require_cluster(request, self._cluster)
        return [self._addresses.broker_id]

    async def leader(self, request: Request) -> dict[str, str]:
        return {"serviceUrl": self._addresses.http or self._addresses.https, "brokerId": self._addresses.broker_id}

    async def health(self, request: Request) -> Reply:
        """Reads from the store and looks whether it can still write; 503 if it cannot."""

        def work() -> None:
            self._store.documents.get("health")

        await asyncio.to_thread(work)
        failed = [each for each in self._store.suspended() if each.task == "store"]
        if failed:
            raise HttpError(503, f"nothing is written until the broker starts anew: {failed[0].error}")
        return Reply(b"ok", "text/plain")

    async def version(self, request: Request) -> Reply:
        return Reply(f"duelog-{version('duelog')}".encode(), "text/plain")

    async def names(self, request: Request) -> list[str]:
        return list(NAMES)

    async def values(self, request: Request) -> dict[str, str]:
        return self._changeable.values()

    async def runtime(self, request: Request) -> dict[str, Any]:
        """By name, as texts; what is secret is not told."""
        found = {name: _text(name, value) for name, value in self._settings.items()}
        return {**found, **self._changeable.values()}

    async def set(self, request: Request) -> None:
        await self._changeable.set(request.path["name"], request.path["value"])

    async def delete(self, request: Request) -> None:
        await self._changeable.delete(request.path["name"])


def require_cluster(request: Request, cluster: str) -> None:
    """Raise HttpError 404 for a path that names another cluster than this one."""
    if request.path.get("cluster", cluster) != cluster:
        raise HttpError(404, f"cluster {request.path['cluster']} does not exist; this one is {cluster}")


def _text(name: str, value: object) -> str:
    if "Secret" in name and value is not None:
        return "*****"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value))
    return "" if value is None else str(value)


_TOPIC = "/lookup/v2/{kind}/persistent/{tenant}/{namespace}/{topic}"
_BUNDLE = b"0x00000000_0xffffffff"


@dataclass(eq=False)
class RestLookup:
    """For the event loop's thread alone. urls: of the binary protocol, by listener name."""

    _resources: Resources
    _urls: Mapping[str, Urls]
    _addresses: Addresses

    def routes(self) -> list[Route]:
        """The resource's routes; earlier clients say destination for topic."""
        found = []
        for kind in ("topic", "destination"):
            path = _TOPIC.replace("{kind}", kind)
            found += [
                Route("GET", path, self.lookup, "Where a topic is served", Need.EITHER, ("listenerName",)),
                Route("GET", path + "/bundle", self.bundle, "Which part of its namespace a topic is in", Need.EITHER),
            ]
        return found

    async def lookup(self, request: Request) -> dict[str, str]:
        """C++ clients look for every address of `LookupData`, also an empty one. Never makes a topic."""
        self._require(request)
        listener = request.query.get("listenerName", "")
        urls = self._urls.get(listener)
        if urls is None:
            raise HttpError(412, f"listenerName={listener!r}: no such listener is configured")
        return {
            "brokerUrl": urls.plain,
            "brokerUrlTls": urls.tls,
            "httpUrl": self._addresses.http,
            "httpUrlTls": self._addresses.https,
            "nativeUrl": urls.plain,
        }

    async def bundle(self, request: Request) -> Reply:
        self._require(request)
        return Reply(_BUNDLE, "text/plain")

    def _require(self, request: Request) -> None:
        _ = request.topic  # refused where it is none
        existing_namespace(self._resources, request)
