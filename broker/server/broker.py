"""A broker: a store, its services, its listeners and the routes of its administration, from start to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import fields
from importlib.metadata import version
from typing import Any

from ...delayed_store import DelayedStore
from ...store.config import MIB, StoreConfig
from ...store.errors import InvalidArgument
from ..admin.application import Application
from ..admin.brokers import Brokers, RestLookup
from ..admin.http_request import Reply, Request
from ..admin.routing import Need, OpenApi, Route
from ..configuration import EVERYWHERE, BrokerConfig
from ..metrics.exposition import Exposition
from ..metrics.text_format import CONTENT_TYPE
from ..operate.schedule_resource import ScheduleResource
from ..operate.store_resource import StoreResource
from ..operate.subscription_resource import SubscriptionResource
from ..operate.topic_finder import TopicFinder
from ..operate.topic_resource import TopicResource
from ..operate.topic_stats import StatsResource, TopicFigures
from ..protocol.loop_calls import Workers
from ..security.authentication import authentication_of
from ..security.wire_admission import WireAdmission
from ..tenancy.namespace_policies import NamespacePolicies, PolicyStore
from ..tenancy.namespaces import Namespaces, Tenants
from ..tenancy.rest_schemas import RestSchemas
from .connection import Login
from .listening import Listeners
from .service import Service
from .services import Services

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


class Broker(Service):
    """Serves an open store; the store stays its caller's."""

    def __init__(
        self,
        store: DelayedStore,
        config: BrokerConfig,
        command: Sequence[str] = (),
        listen: tuple[str, int] | None = None,
    ) -> None:
        """command: what runs `duelog`, before its arguments, for jobs of administration; none: there are no jobs.

        listen: host and port at which `duelog.connect` is served too.
        """
        self._listen_at = listen
        self.address = ""
        """Where `duelog.connect` is served."""
        super().__init__(config)
        self._command = command
        self._store = store
        self._config = config
        self._executor = ThreadPoolExecutor(config.worker_threads, "duelog-broker")
        self._services: Services | None = None
        self.application: Application | None = None

    async def _start(self) -> None:
        config, store = self._config, self._store
        asyncio.get_running_loop().set_default_executor(self._executor)
        authentication = authentication_of(config)
        services = self._services = Services(store, config, Workers(self._executor), self._command)
        delays = config.delay_policies()
        if delays:
            await asyncio.to_thread(lambda: store.update_policies(**delays))
        await services.resources.load()
        await services.dynamic.load()
        services.exposition.start()
        listeners = Listeners(
            config,
            services.handlers(),
            server_version=f"duelog-{version('duelog')}",
            gone=services.gone,
            admission=lambda _, session, fail: Login(
                authentication, session, store.clock.now_ms, config.authentication_refresh_check_seconds, fail
            ),
        )
        services.exposition.connections = lambda: (each.figures for each in listeners)
        services.exposition.connection_counts = lambda: listeners.counts
        services.urls[""] = await self._listen(listeners)
        if self._listen_at is not None:
            host, port = self._listen_at
            tls = None if self._certificate is None else self._certificate.context
            admission = WireAdmission(authentication, services.permissions, store.clock.now_ms)
            bound = store.listen(host, port, tls=tls, admit=admission)
            self.address = f"duelog{'' if tls is None else '+ssl'}://{host}:{bound}"
        ownership = services.ownership
        if ownership is not None:
            self._refresh(ownership.file.refresh, config.placement_refresh_seconds, services.placement_changed)
        self.application = Application(
            routes_of(store, services, config),
            authentication,
            services.permissions,
            (lambda namespace: None) if ownership is None else ownership.http_owner,
        )
        addresses = services.addresses
        addresses.pulsar, addresses.pulsar_tls = self.urls
        addresses.http, addresses.https = await self._listen_http(self.application, config.max_http_server_connections)
        store.topic_deleter = services.delete_topic
        if config.bind_address in EVERYWHERE and not config.authentication_providers:
            _log.warning(
                "every machine that reaches %s may use the broker: it asks for no credentials", config.reachable_address
            )

    async def stop(self) -> None:
        """Accept nothing more, answer what is in flight, tell clients, let connections end. A second call is nothing.

        Every acknowledgement that was taken is the store's then.
        """
        self._store.topic_deleter = None
        await self._stop_http()
        listeners, services = self._listeners, self._services
        self._listeners = self._services = None
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
    settings = {config.in_file(each.name): getattr(config, each.name) for each in fields(config)}
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
