"""A broker: its services, made for one store, which of them answers which command, its listeners and its routes."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import fields
from functools import partial
from importlib.metadata import version
from itertools import islice
from typing import Any, TypeVar

from ...delayed_store import DelayedStore
from ...stats import MOST_CLIENTS, ClientPart, ClientStats, Connections, LimitUse
from ...store.config import MIB, StoreConfig
from ...store.errors import ClosedError, InvalidArgument
from ...store.names import TopicName
from ..admin.application import Application, is_loopback
from ..admin.brokers import Addresses, Brokers, RestLookup
from ..admin.http_request import Reply, Request
from ..admin.routing import Need, Route, with_document
from ..cluster.broker_link import Dialer, broker_context
from ..cluster.ownership import Ownership
from ..cluster.placement import PlacementFile
from ..configuration import EVERYWHERE, BrokerConfig
from ..consume.consumers import Consumers
from ..listing.memory_limits import DualMemoryLimiter, DynamicSettings, limits_of
from ..listing.topic_listing import TopicListing
from ..listing.watchers import NameSets, Watchers
from ..lookup.compatibility import Compatibility
from ..lookup.resources import AutoCreation, Defaults, Resources
from ..lookup.topic_address import TopicAddress
from ..lookup.topic_facts import TopicFacts
from ..lookup.topic_lookup import TopicAccess, TopicLookup, Urls
from ..metrics.exposition import CONTENT_TYPE, Exposition
from ..metrics.rates import Rates
from ..operate.schedule_resource import ScheduleResource
from ..operate.subscription_resource import SubscriptionResource
from ..operate.topic_resource import TopicFinder, TopicResource
from ..operate.topic_stats import StatsResource, StoreResource, TopicFigures
from ..page.operation_resource import OperationResource, asking
from ..page.page_server import PageFiles
from ..produce.producers import Producers
from ..protocol import commands
from ..protocol.commands import Command
from ..protocol.loop_calls import LoopCalls, Workers
from ..protocol.peer import Peer
from ..security.authentication import WireAdmission, authentication_of
from ..security.permissions import Action, Permissions
from ..tenancy.namespace_policies import NamespacePolicies
from ..tenancy.namespaces import Namespaces, Tenants, TopicRemoval, topics_reply
from ..tenancy.rest_schemas import RestSchemas
from .connection import Connection, Handler, Login
from .service import Listeners, Service, why_not

T = TypeVar("T")

_LIST_THREADS = 2
"""For topic lists: with more they would not be made quicker, and each has memory that it does not give back at once."""


class Services:
    """The services of one broker, wired to each other. Runs on the event loop's thread."""

    def __init__(self, store: DelayedStore, config: BrokerConfig, workers: Workers) -> None:
        self._loop = asyncio.get_running_loop()
        calls = LoopCalls(self._loop)
        creation = AutoCreation(config.allow_auto_topic_creation, config.default_num_partitions)
        compatibility = Compatibility(config.schema_compatibility_strategy)
        defaults = Defaults(creation, config.broker_deduplication_enabled, compatibility)
        self.resources = Resources(store.documents, defaults)
        permissions = self.permissions = Permissions(
            self.resources if config.authorization_enabled else None, config.super_user_roles, config.viewer_roles
        )
        access = self.access = TopicAccess(store, self.resources, permissions)
        self.urls = {
            name: Urls(found.get("pulsar", ""), found.get("pulsar+ssl", ""))
            for name, found in config.listeners().items()
        }
        """Addresses for clients, by listener name; the one without a name is filled once the broker listens."""
        self.lookup = TopicLookup(access, self.resources, self.urls)
        limits = config.list_limits()
        limiter = self.limiter = DualMemoryLimiter(*limits_of(limits), calls.loop)
        self.dynamic = DynamicSettings(store.documents, limits, limiter)
        self.list_threads = ThreadPoolExecutor(_LIST_THREADS, "duelog-lists")
        list_workers = Workers(self.list_threads)
        self.listing = TopicListing(store, permissions, limiter, config, list_workers)
        self.name_sets = NameSets(store, list_workers, calls, config.max_topic_list_watchers_mem_size_mb << 20)
        self.watchers = Watchers(
            permissions, limiter, config, self.listing.gate, self.name_sets, list_workers, calls.loop
        )
        facts = self.facts = TopicFacts(store.documents, self.resources, access)
        clock = store.clock.now_ms
        self.producers = Producers(partial(access.open, Action.PRODUCE), facts, workers, calls, clock, config)
        self.consumers = Consumers(partial(access.open, Action.CONSUME), facts, workers, calls, clock, config)
        self.addresses = Addresses()
        """Filled once the broker listens."""
        self.rates = Rates(self.producers, self.consumers, calls.loop, config.stats_update_frequency_in_secs)
        self.removal = TopicRemoval(
            store, self.resources, facts, self._users, self._disconnect, self.rates.forget_topic
        )
        self.ownership = _ownership_of(config, limiter)
        """None: this broker serves every namespace."""
        self.operations = OperationResource(
            asking(store),
            permissions,
            (lambda namespace: None) if self.ownership is None else self.ownership.http_owner,
            self.resources.namespaces.names,
        )
        self.listeners: Iterable[Connection] = ()
        """The connections, once the broker listens."""
        self.exposition = Exposition(
            store,
            config.cluster_name,
            self.producers,
            self.consumers,
            self.rates,
            limiter,
            calls,
            workers,
            by_topic=config.expose_topic_level_metrics_in_prometheus,
            max_topics=config.max_topics_in_prometheus,
        )
        self.exposition.watching = lambda: (len(self.watchers), self.name_sets.kept_bytes, self.watchers.waiting)

    def handlers(self) -> dict[type[Command], Handler]:
        producers, consumers = self.producers, self.consumers
        without_blob: dict[type[Command], Callable[[Peer, Any], Awaitable[None] | None]] = {
            commands.PartitionedMetadata: self.lookup.partitions,
            commands.Lookup: self.lookup.lookup,
            commands.GetTopics: self.listing.topics,
            commands.WatchTopicList: self.watchers.watch,
            commands.WatchTopicListClose: self.watchers.close,
            commands.GetSchema: self.facts.get_schema,
            commands.GetOrCreateSchema: self.facts.get_or_create_schema,
            commands.Producer: producers.open,
            commands.CloseProducer: producers.close,
            commands.Subscribe: consumers.open,
            commands.Flow: consumers.flow,
            commands.Ack: consumers.ack,
            commands.Redeliver: consumers.redeliver,
            commands.Seek: consumers.seek,
            commands.GetLastMessageId: consumers.last_message_id,
            commands.Unsubscribe: consumers.unsubscribe,
            commands.CloseConsumer: consumers.close,
            commands.ConsumerStats: consumers.stats,
        }
        made: dict[type[Command], Handler] = {
            commands.Send: producers.send,
            **{each: _plain(call) for each, call in without_blob.items()},
        }
        return made if self.ownership is None else self.ownership.placed(made)

    def placement_changed(self) -> None:
        """Have producers, consumers and watchers of what another broker serves now go there."""
        ownership = self.ownership
        if ownership is None:
            return
        self.watchers.moved(ownership.is_own)
        for topic in self.used():
            if not ownership.is_own("/".join(TopicName.parse(topic)[:2])):
                self._disconnect(topic)

    def used(self) -> set[str]:
        """Full names of the topics that have, or had, producers or consumers."""
        return {*self.producers.departed, *(group.topic.name for group in self.consumers.groups)}

    def _users(self, topic: str) -> int:
        return len(self.producers.of_topic(topic)) + sum(map(len, self.consumers.of_topic(topic).values()))

    def _disconnect(self, topic: str) -> None:
        self.producers.close_topic(topic)
        self.consumers.close_topic(topic)

    def delete_topic(self, name: str, force: bool) -> None:
        """Delete a topic for a command of another process; waits, in any thread but the loop's.

        Raises what `TopicRemoval.delete` does, InvalidArgument, and ClosedError where the broker ends first.
        """
        self._on_loop(self.removal.delete(TopicAddress.parse(str(TopicName.parse(name))), force=force))

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the event loop to do it, in any other thread. Raises ClosedError where the broker ends first."""
        try:
            done = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:  # the loop is closed
            work.close()
            raise ClosedError("the broker") from error
        try:
            return done.result()
        except CancelledError as error:
            raise ClosedError("the broker") from error

    def connections(self) -> Connections:
        """Clients of the binary protocol, and the memory of topic lists; waits, in any thread but the loop's."""
        return self._on_loop(self._connections())

    async def _connections(self) -> Connections:
        semaphores = (("topic lists being made", self.limiter.heap), ("topic lists being sent", self.limiter.direct))
        limits = [LimitUse(name, each.acquired, each.max_permits) for name, each in semaphores]
        listed = list(self.listeners)
        parts = islice((part for each in listed for part in self._parts(each)), MOST_CLIENTS)
        return Connections(tuple(map(self._client, listed[:MOST_CLIENTS])), tuple(parts), tuple(limits), len(listed))

    def _parts(self, connection: Connection) -> Iterator[ClientPart]:
        address = connection.address
        for producer in self.producers.of_connection(connection.number):
            if producer.state == "ready":
                came, count = self.rates.of_producer(producer), producer.figures.messages
                name, topic = producer.name, producer.topic_name
                yield ClientPart(address, name, topic, None, None, None, count, came.messages, came.bytes)
        for each in self.consumers.of_connection(connection.number):
            if each.group is not None:
                sent, topic = self.rates.of_consumer(each), each.group.topic.name
                yield ClientPart(address, each.name, topic, each.group.name, each.permits, each.unacked,
                                 each.figures.messages, sent.messages, sent.bytes)  # fmt: skip

    def _client(self, connection: Connection) -> ClientStats:
        producers = self.producers.of_connection(connection.number)
        consumers = self.consumers.of_connection(connection.number)
        topics = {each.topic_name for each in producers} | {each.command.topic for each in consumers}
        return ClientStats(
            connection.client_version,
            "",
            "pulsar",
            connection.address,
            connection.since_ms,
            len(producers),
            len(consumers),
            sum(each.permits for each in consumers),
            sum(each.unacked for each in consumers),
            sum(each.figures.messages for each in producers if each.state == "ready"),
            sum(each.figures.messages for each in consumers),
            tuple(sorted(topics)),
        )

    def gone(self, connection: Connection) -> None:
        self.producers.gone(connection)
        self.consumers.gone(connection)
        self.limiter.gone(connection)
        self.watchers.gone(connection)
        if self.ownership is not None:
            self.ownership.gone(connection)

    def close_listing(self) -> None:
        """The broker ends: nothing is listed or watched any more."""
        self.limiter.close()
        self.watchers.close_all()


def _ownership_of(config: BrokerConfig, limiter: DualMemoryLimiter) -> Ownership | None:
    if config.placement_file is None or config.placement_broker is None:
        return None
    dialer = Dialer(broker_context(config.broker_client_trust_certs_file_path))
    file = PlacementFile(config.placement_file)
    return Ownership(file, config.placement_broker, dialer, limiter, config.max_concurrent_lookup_request)


def _plain(call: Callable[[Peer, Any], Awaitable[None] | None]) -> Handler:
    return lambda connection, command, _: call(connection, command)


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

    def __init__(self, store: DelayedStore, config: BrokerConfig, listen: tuple[str, int] | None = None) -> None:
        """listen: host and port at which `duelog.connect` is served too."""
        self._listen_at = listen
        self.address = ""
        """Where `duelog.connect` is served."""
        super().__init__(config)
        self._store = store
        self._config = config
        self._executor = ThreadPoolExecutor(config.worker_threads, "duelog-broker")
        self._services: Services | None = None
        self.application: Application | None = None

    async def _start(self) -> None:
        config, store = self._config, self._store
        asyncio.get_running_loop().set_default_executor(self._executor)
        authentication = authentication_of(config)
        services = self._services = Services(store, config, Workers(self._executor))
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
        services.listeners = listeners
        services.exposition.connections = lambda: (each.figures for each in listeners)
        services.exposition.connection_counts = lambda: listeners.counts
        services.urls[""] = await self._listen(listeners)
        if self._listen_at is not None:
            host, port = self._listen_at
            tls = None if self._certificate is None else self._certificate.context
            admission = WireAdmission(authentication, services.permissions, store.clock.now_ms)
            try:
                bound = store.listen(host, port, tls=tls, admit=admission)
            except OSError as error:
                raise InvalidArgument("--listen", f"{host}:{port}", why_not(error, host)) from error
            name = f"[{host}]" if ":" in host else host
            self.address = f"duelog{'' if tls is None else '+ssl'}://{name}:{bound}"
        ownership = services.ownership
        if ownership is not None:
            self._refresh(ownership.file.refresh, config.placement_refresh_seconds, services.placement_changed)
        self.application = Application(
            routes_of(store, services, config),
            authentication,
            services.permissions,
            (lambda namespace: None) if ownership is None else ownership.http_owner,
            is_local=is_loopback(config.bind_address),
        )
        addresses = services.addresses
        addresses.pulsar, addresses.pulsar_tls = self.urls
        addresses.http, addresses.https = await self._listen_http(self.application, config.max_http_server_connections)
        store.topic_deleter = services.delete_topic
        store.other_connections = services.connections
        if config.bind_address in EVERYWHERE and not config.authentication_providers:
            _log.warning(
                "every machine that reaches %s may use the broker: it asks for no credentials", config.reachable_address
            )

    async def stop(self) -> None:
        """Accept nothing more, answer what is in flight, tell clients, let connections end. A second call is nothing.

        Every acknowledgement that was taken is the store's then.
        """
        self._store.topic_deleter = self._store.other_connections = None
        if self._services is not None:
            self._services.operations.watching.close()
        await self._stop_http()
        listeners, services = self._listeners, self._services
        self._listeners = self._services = None
        if services is not None:
            services.exposition.stop()
            services.close_listing()
        if listeners is not None and services is not None:
            within_s = self._config.shutdown_timeout_seconds
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
            await asyncio.to_thread(services.list_threads.shutdown, cancel_futures=True)
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as ending:  # the loop goes on while the broker's threads end
            await loop.run_in_executor(ending, self._executor.shutdown)
        loop.set_default_executor(ThreadPoolExecutor())  # for who goes on in this loop, as a leader that follows does


def routes_of(store: DelayedStore, services: Services, config: BrokerConfig) -> list[Route]:
    """Make every route."""
    resources, access, removal = services.resources, services.access, services.removal
    addresses, cluster = services.addresses, config.cluster_name
    topics = partial(topics_reply, services.listing)
    policies = NamespacePolicies(store, resources, access)
    elsewhere = None if services.ownership is None else services.ownership.tenant_elsewhere
    namespaces = Namespaces(store, resources, policies, removal, topics, cluster, elsewhere)
    settings = {config.in_file(each.name): getattr(config, each.name) for each in fields(config)}
    producers, consumers = services.producers, services.consumers
    finder = TopicFinder(store, resources)
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
        *TopicResource(store, resources, access, removal, topics, finder, services.used).routes(),
        *SubscriptionResource(finder, consumers, store.clock.now_ms).routes(),
        *StatsResource(finder, figures).routes(),
        *ScheduleResource(finder).routes(),
        *StoreResource(store, producers, consumers, services.rates).routes(),
        *services.operations.routes(),
        *PageFiles().routes(),
    ]
    routes.append(_metrics(services.exposition, config))
    return with_document(routes)


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
