"""The placement table, its file, and the brokers it names: which of them serves a namespace.

    default = "a"                              # serves what is not named below; may be left out

    [brokers.a]
    url = "pulsar://localhost:6650"            # or pulsar+ssl://; proxies and other brokers connect to it
    tls_url = "pulsar+ssl://localhost:6651"    # for clients that use TLS
    http_url = "http://localhost:8080"         # where requests over HTTP are sent on to
    store = "/var/lib/duelog/a"                # for commands that read stores; relative to the file

    [brokers.b]
    replica = "s3://backups/b"                 # in place of url and tls_url: where the leader of this copy is

    [tenants]
    acme = "b"

    [namespaces]
    "acme/orders" = "a"

A namespace counts more than its tenant, a tenant more than the default. A file that ends in .json has the same as JSON.

A table is read again when its file changes. A file that cannot be read is logged once, and the last table stays. Moving
a namespace rewrites one line of the file.

Each object of a copy's log names the addresses of the leader that made it. The newest one is looked for as often as the
file; where the bucket cannot be reached that is logged once, and the last addresses stay.
"""

import fcntl
import json
import logging
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from ...replica.bucket import Bucket, check_url
from ...replica.log_object import read_object
from ...store.errors import DuelogError, InvalidArgument
from ...store.files.directory import write_file
from ...store.names import validate_namespace_name
from ..protocol.failures import Refused, ServerError
from ..protocol.loop_calls import KeptUp

_log = logging.getLogger("duelog.broker")

_SERVICE_URL = re.compile(r"(pulsar(?:\+ssl)?)://(\[[0-9A-Fa-f:.]+\]|[^\s/,:\[\]]+):([0-9]{1,5})/?")
_HTTP_URL = re.compile(r"https?://[^\s/]+/?")
_HEADER = re.compile(r"\s*\[[^\[\]]+\]\s*(#.*)?")
_NAMESPACES = re.compile(r"\s*\[\s*namespaces\s*\]\s*(#.*)?")


class Address(NamedTuple):
    """The address of a broker."""

    host: str
    port: int
    tls: bool = False

    @classmethod
    def parse(cls, text: str, name: str = "url") -> Self:
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
    """Empty: the copy has named no leader yet."""
    tls_url: str | None = None
    http_url: str | None = None
    store: Path | None = None
    replica: str | None = None

    @property
    def address(self) -> Address:
        """Refused: ServiceNotReady, where it is not known yet."""
        if not self.url:
            raise Refused(ServerError.SERVICE_NOT_READY, self.not_found)
        return Address.parse(self.url)

    @property
    def not_found(self) -> str:
        """Why its address is not known yet; empty: it is known."""
        return "" if self.url else f"broker {self.name}: the copy {self.replica} has named no leader yet"


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
        if broker.replica and (other := places.setdefault(broker.replica.rstrip("/"), broker.name)) != broker.name:
            raise InvalidArgument(f"brokers.{broker.name}.replica", broker.replica, f"is the copy of broker {other!r}")
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
        raise InvalidArgument(where, value, "expected a table with url or replica")
    for key, given in value.items():
        if key not in {"url", "tls_url", "http_url", "store", "replica"}:
            raise InvalidArgument(f"{where}.{key}", given, f"{path} has a setting that is not known")
        if not isinstance(given, str):
            raise InvalidArgument(f"{where}.{key}", given, "expected a text")
    if "replica" in value:
        check_url(f"{where}.replica", value["replica"])
        for key in ("url", "tls_url"):
            if key in value:
                reason = "does not go with replica: the copy says where its leader is"
                raise InvalidArgument(f"{where}.{key}", value[key], reason)
    elif "url" not in value:
        raise InvalidArgument(f"{where}.url", None, "every broker has one, or replica")
    else:
        Address.parse(value["url"], f"{where}.url")
    if "tls_url" in value and not Address.parse(value["tls_url"], f"{where}.tls_url").tls:
        raise InvalidArgument(f"{where}.tls_url", value["tls_url"], "expected pulsar+ssl://host:port")
    if "http_url" in value and _HTTP_URL.fullmatch(value["http_url"]) is None:
        raise InvalidArgument(f"{where}.http_url", value["http_url"], "expected http://host:port")
    store = None if "store" not in value else path.absolute().parent / value["store"]
    http_url = value.get("http_url")
    http_url = http_url and http_url.rstrip("/")
    return PlacedBroker(name, value.get("url", ""), value.get("tls_url"), http_url, store, value.get("replica"))


class CopyLeader:
    """The leader of a copy, by the newest object of the log there."""

    def __init__(self, url: str) -> None:
        """Raises InvalidArgument, also where obstore is missing; ReplicaUnreachable."""
        self.urls: tuple[str, ...] = ()
        """Where it serves Pulsar clients; empty: not known yet."""
        self._bucket = Bucket(url)
        self._number = 0
        self._is_out_of_reach = False

    def look(self) -> bool:
        """Look who leads now; False: nothing else is known than before. Waits for the bucket; for one thread at a time.

        Where the bucket cannot be read, which is logged once, or names no address, what is known stays: the fence of a
        new leader names none, as that serves nobody yet.
        """
        before, bucket = self.urls, self._bucket
        try:
            numbers = bucket.span(self._number or max(bucket.manifests(), default=0))
            if numbers and numbers[-1] != self._number:
                address = read_object(bucket, numbers[-1]).maker.address
                urls = tuple(url for url in address.split(",") if url.startswith("pulsar"))
                for url in urls:
                    Address.parse(url)
                self._number, self.urls = numbers[-1], urls or before
            self._is_out_of_reach = False
        except DuelogError as error:
            if not self._is_out_of_reach:
                stays = " and ".join(before) or "not known"
                _log.warning("%s does not say where its leader is, which stays %s: %s", bucket.url, stays, error)
            self._is_out_of_reach = True
        if self.urls != before:
            _log.info("%s: its leader is at %s", bucket.url, " and ".join(self.urls))
        return self.urls != before


class PlacementFile(KeptUp[Placement]):
    """A table that is kept up with its file and with who leads the copies it names. Any thread may read `table`."""

    def __init__(self, path: Path) -> None:
        """Read it; the first `refresh` looks who leads. Raises InvalidArgument, OSError, ReplicaUnreachable."""
        self.path = path
        self._leaders: dict[str, CopyLeader] = {}
        super().__init__(self._read_table, path)

    @property
    def table(self) -> Placement:
        """The table, with the addresses of leaders in place of `replica`."""
        return self.value

    def refresh(self) -> bool:
        """Read it again if the file has changed, and look who leads; False: it is the one before.

        Waits for the disk and for buckets, for all of them at once.
        """
        changed = super().refresh()
        if self._leaders:
            with ThreadPoolExecutor(len(self._leaders), "duelog-placement") as threads:
                moved = list(threads.map(CopyLeader.look, self._leaders.values()))
            self.value = self._led(self.value)
            changed |= any(moved)
        return changed

    def _read_table(self) -> Placement:
        table = read_placement(self.path)
        copies = [each.replica for each in table.brokers.values() if each.replica is not None]
        self._leaders = {url: self._leaders.get(url) or CopyLeader(url) for url in copies}
        return self._led(table)

    def _led(self, table: Placement) -> Placement:
        """The table with what is known of leaders."""

        def placed(broker: PlacedBroker) -> PlacedBroker:
            urls = () if broker.replica is None else self._leaders[broker.replica].urls
            tls_url = next((url for url in urls if url.startswith("pulsar+ssl:")), None)
            return replace(broker, url=urls[0], tls_url=tls_url) if urls else broker

        return replace(table, brokers={name: placed(each) for name, each in table.brokers.items()})


def place_namespace(path: Path, namespace: str, broker: str) -> Placement:
    """Have a broker serve a namespace from now on: one line of the file is changed, the rest stays as it is.

    The file is replaced as a whole and durably; two callers at one moment, in two processes too, change it one after
    the other. Raises InvalidArgument, OSError.
    """
    # The lock is the directory's: the file is another one each time it changes.
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return _place(path, namespace, broker)
    finally:
        os.close(descriptor)


def _place(path: Path, namespace: str, broker: str) -> Placement:
    text = path.read_text(encoding="utf-8")
    before = parse_placement(text, path)
    if broker not in before.brokers:
        raise InvalidArgument("broker", broker, f"expected a broker of {path}: {', '.join(before.brokers)}")
    wanted = replace(before, namespaces={**before.namespaces, namespace: broker})
    if path.suffix == ".json":
        found = json.loads(text)
        found.setdefault("namespaces", {})[namespace] = broker
        text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    else:
        text = _with_line(text, namespace, broker)
    after = parse_placement(text, path)
    if after != wanted:
        raise InvalidArgument("placement", str(path), f'write "{namespace}" = "{broker}" into [namespaces] by hand')
    write_file(path, text.encode())
    return after


def _with_line(text: str, namespace: str, broker: str) -> str:
    """TOML with `namespace` placed; every other line as it was."""
    entry = f"{json.dumps(namespace)} = {json.dumps(broker)}"
    ours = re.compile(rf"""\s*["']{re.escape(namespace)}["']\s*=""")
    lines = text.splitlines()
    header = next((at for at, line in enumerate(lines) if _NAMESPACES.fullmatch(line)), None)
    if header is None:
        return "\n".join([*lines, "", "[namespaces]", entry, ""])
    end = next((at for at in range(header + 1, len(lines)) if _HEADER.fullmatch(lines[at])), len(lines))
    for at in range(header + 1, end):
        if ours.match(lines[at]):
            lines[at] = entry
            return "\n".join([*lines, ""])
    lines.insert(header + 1, entry)
    return "\n".join([*lines, ""])


class KnownBrokers:
    """Brokers that may be connected to: those of the configuration and those of the table. No others."""

    def __init__(self, urls: Iterable[str], file: PlacementFile | None = None) -> None:
        """Raises InvalidArgument."""
        self._told = list(dict.fromkeys(map(Address.parse, urls)))
        self._file = file
        self._turn = 0

    def all(self) -> Iterator[Address]:
        """Every broker whose address is known, none twice."""
        brokers = [] if self._file is None else self._file.table.brokers.values()
        yield from dict.fromkeys([*self._told, *(each.address for each in brokers if each.url)])

    def not_found(self) -> list[str]:
        """Say of each broker whose address is not known yet why that is."""
        brokers = [] if self._file is None else self._file.table.brokers.values()
        return [each.not_found for each in brokers if each.not_found]

    def for_namespace(self, namespace: str | None) -> list[Address]:
        """The brokers to be asked about `tenant/namespace`, one after the other until one can be reached.

        None: about anything. Refused: TopicNotFound, where the table names no owner; ServiceNotReady, where the address
        of the owner is not known yet.
        """
        if self._file is None or namespace is None:
            found = list(self.all())
            self._turn += 1
            at = self._turn % max(len(found), 1)
            return [*found[at:], *found[:at]]
        owner = self._file.table.owner(namespace)
        if owner is None:
            raise Refused(ServerError.TOPIC_NOT_FOUND, f"no broker is placed to serve namespace {namespace}")
        return [owner.address]

    def at(self, place: str) -> Address | None:
        """The known broker at `host:port`, with or without a scheme; None: it is none."""
        place = place.rpartition("://")[2].rstrip("/").lower()
        return next((each for each in self.all() if each.place == place), None)

    def named(self, url: str | None, url_tls: str | None) -> Address | None:
        """The known broker at one of the addresses that a broker has told; None: it is none."""
        if self._file is not None:
            for broker in self._file.table.brokers.values():
                if {url, url_tls} & {broker.url, broker.tls_url} - {None, ""}:
                    return broker.address
        return self.at(url or "") or self.at(url_tls or "")


def namespace_of_topic(topic: str) -> str | None:
    """`tenant/namespace` of a topic's name, as far as it has one: a broker says what is wrong with others."""
    scheme, mark, rest = topic.partition("://")
    parts = (rest if mark else scheme).split("/")
    if len(parts) == 1 and not mark:
        return "public/default"
    return f"{parts[0]}/{parts[1]}" if len(parts) >= 3 else None
