"""A proxy: its settings, its clients' connections, listeners, the brokers it knows, and a web server with its figures.

A broker decides whether a client gets in, by the client's own credentials. A client that names no broker asks
questions: a broker is connected to at once, so that what it says of the client's credentials is what the client hears.
A client that names one of the known brokers is spliced to it: bytes go both ways as they are, and each side is read
only while the other one takes what comes, so that what a proxy keeps of a connection is bounded.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import ClassVar, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ...store.errors import InvalidArgument
from ..admin.application import Application
from ..admin.http_request import HttpError, Reply, Request
from ..admin.routing import Need, Route
from ..configuration import EVERYWHERE, Count, Seconds, ServiceConfig
from ..listing.memory_limits import PROXY_PREFIX, DualMemoryLimiter, limits_of
from ..protocol import commands
from ..protocol.failures import Refused, ServerError
from ..protocol.frames import MAX_MESSAGE_SIZE, head
from ..protocol.peer import Peer
from ..protocol.states import Session
from ..security.authentication import Authentication
from ..security.permissions import Permissions
from ..server.connection import Connection, Fail
from ..server.service import Listeners, Service
from .broker_link import BrokerLink, ClientLinks, Dialer, Forwarding, broker_context
from .placement import Address, KnownBrokers, PlacementFile

_HIGH = 256 * 1024
"""Bytes that wait for a broker at which its client is not read."""

_LINGER_S = 5.0


@dataclass(slots=True)
class ProxyFigures:
    """Counts of a proxy."""

    new: int = 0
    """Connections that came."""
    spliced: int = 0
    """Connections that go through to a broker now."""
    pieces: int = 0
    bytes: int = 0
    """Passed on by spliced connections, both ways."""

    def passed(self, size: int) -> None:
        self.pieces += 1
        self.bytes += size


@dataclass(eq=False)
class Splice(asyncio.Protocol):
    """The broker's side. Of the event loop's thread.

    first: what is sent to the broker before anything of the client. count: told of bytes that were passed on.
    """

    _client: Connection
    _first: bytes
    _count: Callable[[int], object]
    _transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_HIGH)
        self._transport.write(self._first)

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._count(len(data))
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        client, transport = self._client, self._transport
        self._count(len(data))
        client.send_frames(data)
        if not client.writable and not client.closed and transport is not None:
            transport.pause_reading()
            client.on_writable(self._resume)

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self._client.pause_reading("broker")

    def resume_writing(self) -> None:
        self._client.resume_reading("broker")

    def connection_lost(self, exc: Exception | None) -> None:
        """The broker is gone: the client gets what came, and the end."""
        self._transport = None
        self._client.close("its broker has ended the connection")

    def close(self) -> None:
        """The client is gone: the broker gets what came, and the end."""
        if self._transport is not None:
            asyncio.get_running_loop().call_later(_LINGER_S, self._transport.abort)
            self._transport.close()


@dataclass(eq=False)
class ProxyAdmission:
    """The admission of one connection. Of the event loop's thread. gone: called once the connection is no more."""

    _connection: Connection
    _session: Session
    _fail: Fail
    _brokers: KnownBrokers
    _dialer: Dialer
    _figures: ProxyFigures
    _gone: Callable[[], object]
    role: str | None = field(default=None, init=False)
    """Brokers know it; the proxy does not ask."""
    _unanswered: set[BrokerLink] = field(default_factory=set, init=False)
    """Links that wait for credentials."""
    _splice: Splice | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.links = ClientLinks(self._dialer, lambda: self._session.connect, self._challenged)
        """To the brokers that the client has asked something of."""

    async def connect(self, command: commands.Connect) -> None:
        """Ask a broker, or become a connection to one."""
        try:
            if command.proxy_to_broker_url:
                await self._become(command, command.proxy_to_broker_url)
            else:
                await self._enter()
        except Refused as error:
            self._fail(error.error, error.message)

    async def _enter(self) -> None:
        link = await self.links.first(self._brokers.for_namespace(None))
        said = link.connected or commands.Connected("")
        flags = replace(
            said.feature_flags or commands.FeatureFlags(),
            supports_topic_watchers=False,  # of a connection that is spliced only
            supports_topic_watcher_reconcile=False,
        )
        self._session.accept(replace(said, feature_flags=flags))

    async def _become(self, command: commands.Connect, place: str) -> None:
        address = self._brokers.at(place)
        if address is None:
            raise Refused(ServerError.SERVICE_NOT_READY, f"{place[:200]} is no broker that this proxy connects to")
        first = head(replace(command, proxy_to_broker_url=None, original_principal=None))
        connection, figures = self._connection, self._figures
        splice = await self._dialer.dial(address, lambda: Splice(connection, first, figures.passed))
        if self._closed or connection.closed:
            splice.close()
            return
        self._splice = splice
        figures.spliced += 1
        connection.splice(splice.write)

    def _challenged(self, link: BrokerLink, challenge: commands.AuthChallenge) -> None:
        """Ask the client, once for all brokers that ask."""
        if not self._unanswered:
            self._session.challenge(challenge.challenge or commands.AuthData())
        self._unanswered.add(link)

    async def respond(self, command: commands.AuthResponse) -> None:
        links, self._unanswered = self._unanswered, set()
        for link in links:
            link.respond(command)

    def close(self) -> None:
        self._closed = True
        self.links.close()
        if self._splice is not None:
            self._figures.spliced -= 1
            self._splice.close()
        asyncio.get_running_loop().call_soon(self._gone)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig(ServiceConfig):
    """Settings of a proxy."""

    OTHER_NAMES: ClassVar[Mapping[str, str]] = {
        "broker_service_port": "servicePort",
        "broker_service_port_tls": "servicePortTls",
        "broker_max_connections": "maxConcurrentInboundConnections",
        "broker_max_connections_per_ip": "maxConcurrentInboundConnectionsPerIp",
        "max_concurrent_lookup_request": "maxConcurrentLookupRequests",
    }

    broker_urls: tuple[str, ...] = ()
    """Brokers that are asked, in turn, where no placement says which."""
    tls_hostname_verification_enabled: bool = True
    """True: a broker's certificate has to be for its name."""
    broker_max_connections: Count = 10_000
    """Connections over it are told so and closed."""
    broker_proxy_connect_timeout_ms: Count = 10_000
    """Timeout of a connection to a broker."""
    request_timeout_seconds: Seconds = 30
    """Timeout of a request to a broker."""
    shutdown_timeout_seconds: float = 5
    """Time that connections have to finish when the proxy ends."""
    max_message_size: Count = field(default=MAX_MESSAGE_SIZE, init=False)
    max_pending_requests: Count = field(default=1_000, init=False)

    def __post_init__(self) -> None:
        """Raises InvalidArgument."""
        super(ProxyConfig, self).__post_init__()
        if not self.broker_urls and self.placement_file is None:
            raise InvalidArgument("brokerUrls", [], "expected brokers, or a placementFile")
        for url in self.broker_urls:
            Address.parse(url, "brokerUrls")


_log = logging.getLogger("duelog.broker.proxy")

_REQUESTS = "Lookups, metadata, schemas and lists that brokers were asked for"
_PASSED_ON = "that were passed on between clients and brokers"


class Proxy(Service):
    """One address for several brokers."""

    def __init__(self, config: ProxyConfig, elsewhere: str = "") -> None:
        """Reads the placement table. elsewhere: of `Application`. Raises InvalidArgument, OSError, UnusableSecurity."""
        super().__init__(config)
        self._config = config
        self._elsewhere = elsewhere
        self._file = None if config.placement_file is None else PlacementFile(config.placement_file)
        self._brokers = KnownBrokers(config.broker_urls, self._file)
        context = broker_context(
            config.broker_client_trust_certs_file_path, check_names=config.tls_hostname_verification_enabled
        )
        self._dialer = Dialer(context, config.broker_proxy_connect_timeout_ms / 1_000, config.request_timeout_seconds)
        self.figures = ProxyFigures()
        self._admissions: dict[int, ProxyAdmission] = {}

    async def _start(self) -> None:
        config = self._config
        self.limiter = DualMemoryLimiter(*limits_of(config.list_limits()), asyncio.get_running_loop())
        requests = Forwarding(self._brokers, self._links, config.max_concurrent_lookup_request, self.limiter)
        self.gate = requests.gate
        await self._listen(
            Listeners(
                config,
                {
                    commands.Lookup: lambda peer, command, _: requests.lookup(peer, command),
                    commands.PartitionedMetadata: lambda peer, command, _: requests.answer(peer, command),
                    commands.GetSchema: lambda peer, command, _: requests.answer(peer, command),
                    commands.GetTopics: lambda peer, command, _: requests.topics(peer, command),
                },
                server_version=f"duelog-proxy-{version('duelog')}",
                gone=self.limiter.gone,
                admission=self._admission,
            )
        )
        await self._listen_http(
            Application(self._routes(), Authentication({}), Permissions(), elsewhere=self._elsewhere)
        )
        if self._file is not None:
            self._refresh(self._file.refresh, config.placement_refresh_seconds)
        if config.bind_address in EVERYWHERE:
            host = config.reachable_address
            _log.info("every machine that reaches %s may use the proxy; brokers ask for credentials", host)

    async def stop(self) -> None:
        """Accept nothing more; connections end once what is queued has left. A second call is nothing."""
        await self._stop_http()
        listeners, self._listeners = self._listeners, None
        if listeners is not None:
            listeners.stop_accepting()
            self.limiter.close()
            await listeners.close(self._config.shutdown_timeout_seconds)

    # -- connections -----------------------------------------------------------------------------

    def _admission(self, connection: Connection, session: Session, fail: Fail) -> ProxyAdmission:
        self.figures.new += 1
        gone = partial(self._admissions.pop, connection.number, None)
        made = ProxyAdmission(connection, session, fail, self._brokers, self._dialer, self.figures, gone)
        self._admissions[connection.number] = made
        return made

    def _links(self, peer: Peer) -> ClientLinks:
        return self._admissions[peer.number].links

    # -- over HTTP -------------------------------------------------------------------------------

    def _routes(self) -> list[Route]:
        return [
            Route("GET", "/metrics", self._metrics, "Figures in Prometheus' text format", Need.NOTHING),
            Route("GET", "/health", self._health, "Whether a broker can be reached through the proxy", Need.NOTHING),
            Route("GET", "/status.html", self._status, "Whether the proxy is there", Need.NOTHING),
        ]

    async def _metrics(self, _: Request) -> Reply:
        return Reply(generate_latest(self), content_type=CONTENT_TYPE_LATEST)

    def collect(self) -> Iterator[Metric]:
        """Every metric, under the names of Pulsar's proxy, for prometheus_client."""
        cluster, figures, gate, listeners = self._config.cluster_name, self.figures, self.gate, self._listeners
        if listeners is not None:
            for kind, name, text, value in (
                (GaugeMetricFamily, "active_connections", "Connections of clients", len(listeners)),
                (GaugeMetricFamily, "spliced_connections", "Connections that go through to a broker", figures.spliced),
                (CounterMetricFamily, "new_connections", "Connections that came", figures.new),
                (CounterMetricFamily, "rejected_connections", "Connections that were not let in", listeners.refused),
                (CounterMetricFamily, "requests", _REQUESTS, gate.asked),
                (CounterMetricFamily, "failed_requests", "Of these, those that got no answer of a broker", gate.failed),
                (CounterMetricFamily, "binary_ops", f"Pieces {_PASSED_ON}", figures.pieces),
                (CounterMetricFamily, "binary_bytes", f"Bytes {_PASSED_ON}", figures.bytes),
            ):
                family = kind(f"pulsar_proxy_{name}", text, labels=["cluster"])
                family.add_metric([cluster], value)
                yield family
        yield from self.limiter.collect(PROXY_PREFIX, cluster)

    async def _status(self, _: Request) -> Reply:
        return Reply(b"OK", content_type="text/html")

    async def _health(self, _: Request) -> Reply:
        """OK, or 503 and the brokers that cannot be reached."""
        found = await asyncio.gather(*map(self._failure_of, self._brokers.all()))
        failures = [*self._brokers.not_found(), *(each for each in found if each is not None)]
        if failures:
            raise HttpError(503, "; ".join(failures))
        return Reply(b"ok", content_type="text/plain")

    async def _failure_of(self, address: Address) -> str | None:
        try:
            await self._dialer.dial(address, _Probe)
        except Refused as error:
            return error.message
        return None


class _Probe(asyncio.Protocol):
    """A connection that is ended as soon as it is there."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
