"""A proxy: listeners, the brokers it knows, and a web server with its figures, from the start to the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ..admin.application import Application
from ..admin.http_request import HttpError, Reply, Request
from ..admin.routing import Need, Route
from ..configuration import EVERYWHERE
from ..listing.dynamic_settings import limits_of
from ..listing.memory_limits import PROXY_PREFIX, DualMemoryLimiter
from ..protocol import commands
from ..protocol.failures import Refused
from ..protocol.peer import Peer
from ..protocol.states import Session
from ..security.authentication import Authentication
from ..security.permissions import Permissions
from ..server.connection import Connection, Fail
from ..server.listening import Listeners
from ..server.service import Service
from .broker_link import ClientLinks, Dialer, broker_context
from .forwarding import Forwarding
from .placement import Address, KnownBrokers, PlacementFile
from .proxy_configuration import ProxyConfig
from .proxy_connection import ProxyAdmission, ProxyFigures

_log = logging.getLogger("duelog.broker.proxy")

_REQUESTS = "Lookups, metadata, schemas and lists that brokers were asked for"
_PASSED_ON = "that were passed on between clients and brokers"


class Proxy(Service):
    """One address for several brokers."""

    def __init__(self, config: ProxyConfig) -> None:
        """Reads the placement table. Raises InvalidArgument, OSError, UnusableSecurity."""
        super().__init__(config)
        self._config = config
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
        await self._listen_http(Application(self._routes(), Authentication({}), Permissions()))
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
        made = ProxyAdmission(
            connection,
            session,
            fail,
            self._brokers,
            self._dialer,
            self.figures,
            partial(self._admissions.pop, connection.number, None),
        )
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
        failures = [each for each in found if each is not None]
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
