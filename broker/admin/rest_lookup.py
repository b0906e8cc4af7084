"""/lookup/v2/topic: where a topic is served, for clients that ask over HTTP."""

from __future__ import annotations

from collections.abc import Mapping

from ..lookup.resources import Resources
from ..lookup.topic_lookup import Urls
from .addresses import Addresses
from .http_request import HttpError, Reply, Request
from .routing import Need, Route

_TOPIC = "/lookup/v2/{kind}/persistent/{tenant}/{namespace}/{topic}"
_BUNDLE = b"0x00000000_0xffffffff"


class RestLookup:
    """Of the event loop's thread."""

    def __init__(self, resources: Resources, urls: Mapping[str, Urls], addresses: Addresses) -> None:
        """urls: of the binary protocol, by listener name."""
        self._resources = resources
        self._urls = urls
        self._addresses = addresses

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
        """As `LookupData`: C++ clients look for every address, also an empty one. Never makes a topic."""
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
        """A namespace is one part."""
        self._require(request)
        return Reply(_BUNDLE, "text/plain")

    def _require(self, request: Request) -> None:
        topic = request.topic.name
        if self._resources.namespaces.get(topic.namespace_name) is None:
            raise HttpError(404, f"namespace {topic.namespace_name} does not exist")
