"""A broker: a store, its services, its listeners and the routes of its administration, from start to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import fields
from importlib.metadata import version
from typing import Any, Protocol

from ...delayed_store import DelayedStore
from ...store.config import MIB, StoreConfig
from ...store.errors import InvalidArgument
from ..admin.application import Application
from ..admin.brokers import Brokers, RestLookup
from ..admin.http_request import Reply, Request
from ..admin.routing import Need, OpenApi, Route
from ..admin.web_server import WebServer
from ..lookup.topic_lookup import Urls
from ..metrics.exposition import Exposition
from ..metrics.text_format import CONTENT_TYPE
from ..operate.schedule_resource import ScheduleResource
from ..operate.store_resource import StoreResource
from ..operate.subscription_resource import SubscriptionResource
from ..operate.topic_finder import TopicFinder
from ..operate.topic_resource import TopicResource
from ..operate.topic_stats import StatsResource, TopicFigures
from ..protocol.loop_calls import Workers, keep_refreshing
from ..security.authentication import Authentication
from ..security.tls import Certificate
from ..tenancy.namespace_policies import NamespacePolicies, PolicyStore
from ..tenancy.namespaces import Namespaces
from ..tenancy.rest_schemas import RestSchemas
from ..tenancy.tenants import Tenants
from .configuration import EVERYWHERE, BrokerConfig, in_file
from .listening import Listeners, open_sockets
from .services import Services, authentication_of

_log = logging.getLogger("duelog.broker")

_ENTRY_BYTES = MIB // 8
"""Bytes of an entry beyond its message: a header, and a key of at most 64 KiB."""


def store_config(config: BrokerConfig, span_ms: int | None = None) -> StoreConfig:
    """The settings of the store that a broker serves; span_ms: of its partitions, of one that is there.

    Raises InvalidArgument.
    """
    known = {each.name for each in fields(StoreConfig)}
    for name, value in config.store.items():
        if name not in known:
            raise InvalidArgument(f"store.{name}", value, "no setting of a store")
    values: dict[str, Any] = {
        "cluster": config.cluster_name,
        "max_message_bytes": config.max_message_size + _ENTRY_BYTES,
    }
    if span_ms is not None:
        values["partition_ms"] = span_ms
    return StoreConfig(**{**values, **config.store})


GC_THRESHOLDS = (10_000, 20, 100)
"""Objects of messages come and go without cycles: looking for those so rarely saves a tenth of the processor's time."""


class Broker:
    """Serves an open store; the store stays its caller's."""

    def __init__(self, store: DelayedStore, config: BrokerConfig, command: Sequence[str] = ()) -> None:
        """command: what runs `duelog`, before its arguments, for jobs of administration; none: there are no jobs."""
        self._command = command
        self._store = store
        self._config = config
        self._executor = ThreadPoolExecutor(config.worker_threads, "duelog-broker")
        self._services: Services | None = None
        self._listeners: Listeners | None = None
        self._web: WebServer | None = None
        self._refreshing: list[asyncio.Task[None]] = []
        self.urls = Urls("")
        """Addresses that clients connect to, once it has started."""
        self.web_urls = Urls("")
        """Addresses of administration, once it has started."""
        self.application: Application | None = None

    async def start(self) -> None:
        """Listen. Raises UnusableSecurity, InvalidArgument, what the store raises; it is stopped then."""
        asyncio.get_running_loop().set_default_executor(self._executor)
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        config = self._config
        authentication = authentication_of(config)
        certificate = None
        if config.tls_certificate_file_path is not None and config.tls_key_file_path is not None:
            certificate = Certificate(config.tls_certificate_file_path, config.tls_key_file_path)
        services = self._services = Services(self._store, config, Workers(self._executor), self._command)
        delays = config.delay_policies()
        if delays:
            await asyncio.to_thread(lambda: self._store.update_policies(**delays))
        await services.resources.load()
        await services.dynamic.load()
        services.exposition.start()
        listeners = self._listeners = Listeners(
            config,
            services.handlers(),
            authentication,
            server_version=f"duelog-{version('duelog')}",
            clock=self._store.clock.now_ms,
            gone=services.gone,
        )
        services.exposition.connections = lambda: (each.figures for each in listeners)
        services.exposition.connection_counts = lambda: listeners.counts
        plain = tls = ""
        host = config.reachable_address
        if config.broker_service_port is not None:
            plain = f"pulsar://{host}:{await listeners.listen('broker_service_port')}"
        if certificate is not None and config.broker_service_port_tls is not None:
            tls = f"pulsar+ssl://{host}:{await listeners.listen('broker_service_port_tls', certificate.context)}"
        if certificate is not None:
            every_s = config.tls_cert_refresh_check_duration_sec
            self._refreshing.append(asyncio.create_task(keep_refreshing(certificate.refresh, every_s)))
        if services.ownership is not None:
            look = services.ownership.file.refresh
            following = keep_refreshing(look, config.placement_refresh_seconds, services.placement_changed)
            self._refreshing.append(asyncio.create_task(following))
        self.urls = services.urls[""] = Urls(plain, tls)
        self.web_urls = await self._listen_http(services, authentication, certificate, host)
        self._store.topic_deleter = services.delete_topic
        if config.bind_address in EVERYWHERE and not config.authentication_providers:
            _log.warning("every machine that reaches %s may use the broker: it asks for no credentials", host)

    async def _listen_http(
        self, services: Services, authentication: Authentication, certificate: Certificate | None, host: str
    ) -> Urls:
        config = self._config
        routes = routes_of(self._store, services, config)
        application = self.application = Application(
            routes,
            authentication,
            services.permissions,
            (lambda namespace: None) if services.ownership is None else services.ownership.http_owner,
        )
        self._web = WebServer(application, max_connections=config.max_http_server_connections)
        plain = tls = ""
        if config.web_service_port is not None:
            found, port = await open_sockets(config, "web_service_port")
            await self._web.serve(found)
            plain = f"http://{host}:{port}"
        if certificate is not None and config.web_service_port_tls is not None:
            found, port = await open_sockets(config, "web_service_port_tls")
            await self._web.serve(found, certificate.context)
            tls = f"https://{host}:{port}"
        addresses = services.addresses
        addresses.pulsar, addresses.pulsar_tls = self.urls
        addresses.http, addresses.https = plain, tls
        return Urls(plain, tls)

    async def stop(self) -> None:
        """Accept nothing more, answer what is in flight, tell clients, let connections end. A second call is nothing.

        Every acknowledgement that was taken is the store's then.
        """
        self._store.topic_deleter = None
        for task in self._refreshing:
            task.cancel()
        self._refreshing.clear()
        if self._web is not None:
            await self._web.close()
        listeners, services = self._listeners, self._services
        self._listeners = self._services = self._web = None
        if services is not None:
            services.exposition.stop()
            services.close_listing()
        if listeners is not None and services is not None:
            within_s = self._config.shutdown_timeout_seconds
            await services.jobs.close()
            listeners.stop_accepting()
            for connection in listeners:
                connection.pause_reading("shutdown")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(services.producers.answered(), within_s)
            services.producers.close_all()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(services.consumers.close_all(), within_s)
            await listeners.close(min(within_s, 5.0))
        if services is not None:
            await services.listing_closed()
        with ThreadPoolExecutor(1) as ending:  # the loop goes on while the broker's threads end
            await asyncio.get_running_loop().run_in_executor(ending, self._executor.shutdown)


class Service(Protocol):
    """A broker, or what else clients connect to."""

    urls: Urls
    web_urls: Urls

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


async def run_service(service: Service, announce: Callable[[Urls, Urls], object]) -> None:
    """Serve until the process gets SIGTERM or SIGINT. announce: told where, once clients can connect.

    Its second argument is where administration is, empty if nowhere.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    await service.start()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        announce(service.urls, service.web_urls)
        await ended.wait()
        _log.info("the end was asked for")
    finally:
        await service.stop()


class KeyValues(logging.Formatter):
    """One line a record, as `key=value`: time, level, logger, message, and what was raised."""

    def format(self, record: logging.LogRecord) -> str:
        values = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            values["error"] = self.formatException(record.exc_info)
        return " ".join(f"{key}={_quoted(value)}" for key, value in values.items())


def _quoted(text: str) -> str:
    if text and text.isprintable() and not set(text) & {" ", '"', "="}:
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(each if each.isprintable() else repr(each)[1:-1] for each in escaped) + '"'


def routes_of(store: DelayedStore, services: Services, config: BrokerConfig) -> list[Route]:
    """Make every route."""
    resources, access, addresses, cluster = (
        services.resources,
        services.access,
        services.addresses,
        config.cluster_name,
    )
    policies = NamespacePolicies(PolicyStore(store), resources, access)
    elsewhere = None if services.ownership is None else services.ownership.tenant_elsewhere
    namespaces = Namespaces(store, resources, policies, services.removal, services.topic_names, cluster, elsewhere)
    settings = {in_file(each.name): getattr(config, each.name) for each in fields(config)}
    workers, producers, consumers = services.workers, services.producers, services.consumers
    finder = TopicFinder(store, resources, workers)
    figures = TopicFigures(
        producers, consumers, services.rates, store.clock.now_ms, services.facts.deduplicates, addresses
    )
    routes = [
        *Tenants(resources, namespaces, cluster, addresses).routes(),
        *Brokers(store, cluster, addresses, settings, services.dynamic).routes(),
        *namespaces.routes(),
        *policies.routes(),
        *RestLookup(resources, services.urls, addresses).routes(),
        *RestSchemas(services.facts, resources).routes(),
        *TopicResource(store, services, finder).routes(),
        *SubscriptionResource(finder, consumers, workers, store.clock.now_ms).routes(),
        *StatsResource(finder, figures, workers).routes(),
        *ScheduleResource(finder, workers).routes(),
        *StoreResource(store, producers, consumers, services.rates, workers, services.jobs).routes(),
    ]
    routes.append(_metrics(services.exposition, config))
    return [*routes, *OpenApi(routes).routes()]


_SCRAPE_S = 30.0
"""Seconds that a client has to take /metrics in: the next page is not made before."""


def _metrics(exposition: Exposition, config: BrokerConfig) -> Route:
    """Make the route of /metrics, which asks for credentials where the broker does, unless it is set otherwise."""

    async def text(_: Request) -> Reply:
        async with AsyncExitStack() as stack:
            body = await stack.enter_async_context(exposition.page())
            return Reply(body, CONTENT_TYPE, until_left=stack.pop_all(), within_s=_SCRAPE_S)

    asks = config.authenticate_metrics_endpoint
    if asks is None:
        asks = bool(config.authentication_providers)
    need = Need.LOGIN if asks else Need.NOTHING
    return Route("GET", "/metrics", text, "Metrics in Prometheus' text format", need)
