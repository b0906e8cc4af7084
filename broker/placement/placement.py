"""The placement table: brokers, and which of them serves a namespace.

    default = "a"                              # serves what is not named below; may be left out

    [brokers.a]
    url = "pulsar://localhost:6650"            # or pulsar+ssl://; proxies and other brokers connect to it
    tls_url = "pulsar+ssl://localhost:6651"    # for clients that use TLS
    http_url = "http://localhost:8080"         # where requests over HTTP are sent on to
    store = "/var/lib/duelog/a"                # for commands that read stores; relative to the file

    [tenants]
    acme = "b"

    [namespaces]
    "acme/orders" = "a"

A namespace counts more than its tenant, a tenant more than the default. A file that ends in .json has the same as JSON.
Pure values: no connection, no time.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...store.errors import InvalidArgument
from ...store.names import validate_namespace_name

_SERVICE_URL = re.compile(r"(pulsar(?:\+ssl)?)://(\[[0-9A-Fa-f:.]+\]|[^\s/,:\[\]]+):([0-9]{1,5})/?")
_HTTP_URL = re.compile(r"https?://[^\s/]+/?")


class Address(NamedTuple):
    """Where a broker is reached."""

    host: str
    port: int
    tls: bool = False

    @classmethod
    def parse(cls, text: str, name: str = "url") -> Address:
        """Read `pulsar://host:port` or `pulsar+ssl://host:port`. Raises InvalidArgument for `name`."""
        match = _SERVICE_URL.fullmatch(text)
        if match is None or not 0 < int(match[3]) <= 65_535:
            raise InvalidArgument(name, text, "expected pulsar://host:port or pulsar+ssl://host:port")
        return cls(match[2].strip("[]").lower(), int(match[3]), match[1] != "pulsar")

    @property
    def place(self) -> str:
        """`host:port`."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"pulsar{'+ssl' * self.tls}://{self.place}"


@dataclass(frozen=True, slots=True)
class PlacedBroker:
    """A broker of the table."""

    name: str
    url: str
    tls_url: str | None = None
    http_url: str | None = None
    store: Path | None = None

    @property
    def address(self) -> Address:
        """Of `url`."""
        return Address.parse(self.url)


@dataclass(frozen=True, slots=True)
class Placement:
    """The whole table."""

    brokers: Mapping[str, PlacedBroker]
    default: str | None = None
    tenants: Mapping[str, str] = field(default_factory=dict)
    namespaces: Mapping[str, str] = field(default_factory=dict)

    def owner(self, namespace: str) -> PlacedBroker | None:
        """The broker that serves `tenant/namespace`; None: no broker does."""
        tenant = namespace.partition("/")[0]
        name = self.namespaces.get(namespace) or self.tenants.get(tenant) or self.default
        return None if name is None else self.brokers[name]

    def stores(self) -> dict[str, Path]:
        """By name of the broker, the directory of its store, where the table says so."""
        return {name: each.store for name, each in self.brokers.items() if each.store is not None}


def read_placement(path: Path) -> Placement:
    """The table of a file. Raises InvalidArgument, which names what is wrong, and OSError."""
    return parse_placement(path.read_text(encoding="utf-8", errors="strict"), path)


def parse_placement(text: str, path: Path) -> Placement:
    """The table that a text is; `path` says in which form, and what its paths are relative to."""
    try:
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise InvalidArgument("placement", str(path), f"cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise InvalidArgument("placement", str(path), "expected a table")
    unknown = sorted(found.keys() - {"default", "brokers", "tenants", "namespaces"})
    if unknown:
        raise InvalidArgument(unknown[0], found[unknown[0]], f"{path} has a setting that is not known")
    brokers = {name: _broker(name, value, path) for name, value in _table(found, "brokers").items()}
    if not brokers:
        raise InvalidArgument("brokers", {}, f"{path} names no broker")
    places: dict[str, str] = {}
    for broker in brokers.values():
        for url in filter(None, (broker.url, broker.tls_url)):
            other = places.setdefault(Address.parse(url).place, broker.name)
            if other != broker.name:
                raise InvalidArgument(f"brokers.{broker.name}.url", url, f"is an address of broker {other!r} as well")
    tenants, namespaces = _table(found, "tenants"), _table(found, "namespaces")
    default = found.get("default")
    named = {f"tenants.{name}": value for name, value in tenants.items()}
    named |= {f"namespaces.{name}": value for name, value in namespaces.items()}
    for where, name in (({} if default is None else {"default": default}) | named).items():
        if not isinstance(name, str) or name not in brokers:
            raise InvalidArgument(where, name, f"expected the name of a broker of {path}: {', '.join(brokers)}")
    for namespace in namespaces:
        validate_namespace_name(namespace)
    return Placement(brokers, default, tenants, namespaces)


def _table(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = found.get(name, {})
    if not isinstance(value, dict):
        raise InvalidArgument(name, value, "expected a table")
    return value


def _broker(name: str, value: object, path: Path) -> PlacedBroker:
    where = f"brokers.{name}"
    if not isinstance(value, dict):
        raise InvalidArgument(where, value, "expected a table with url")
    for key, given in value.items():
        if key not in {"url", "tls_url", "http_url", "store"}:
            raise InvalidArgument(f"{where}.{key}", given, f"{path} has a setting that is not known")
        if not isinstance(given, str):
            raise InvalidArgument(f"{where}.{key}", given, "expected a text")
    if "url" not in value:
        raise InvalidArgument(f"{where}.url", None, "every broker has one")
    Address.parse(value["url"], f"{where}.url")
    if "tls_url" in value and not Address.parse(value["tls_url"], f"{where}.tls_url").tls:
        raise InvalidArgument(f"{where}.tls_url", value["tls_url"], "expected pulsar+ssl://host:port")
    if "http_url" in value and _HTTP_URL.fullmatch(value["http_url"]) is None:
        raise InvalidArgument(f"{where}.http_url", value["http_url"], "expected http://host:port")
    store = None if "store" not in value else path.absolute().parent / value["store"]
    http_url = value.get("http_url")
    return PlacedBroker(name, value["url"], value.get("tls_url"), http_url and http_url.rstrip("/"), store)
