"""The services of a broker, made for one store, and which of them answers which command."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

from ...delayed_store import DelayedStore
from ...store.errors import ClosedError
from ...store.names import TopicName
from ..admin.brokers import Addresses
from ..cluster.broker_link import Dialer, broker_context
from ..cluster.ownership import Ownership
from ..cluster.placement import PlacementFile
from ..configuration import BrokerConfig
from ..consume.consumers import Consumers
from ..listing.dynamic_settings import DynamicSettings, limits_of
from ..listing.memory_limits import DualMemoryLimiter
from ..listing.name_sets import NameSets
from ..listing.topic_listing import TopicListing
from ..listing.watchers import Watchers
from ..lookup.compatibility import Compatibility
from ..lookup.resources import AutoCreation, Defaults, Resources
from ..lookup.topic_address import TopicAddress
from ..lookup.topic_facts import TopicFacts
from ..lookup.topic_lookup import TopicAccess, TopicLookup, Urls
from ..metrics.exposition import Exposition
from ..metrics.rates import Rates
from ..operate.jobs import Jobs
from ..produce.producers import Producers
from ..protocol import commands
from ..protocol.commands import Command
from ..protocol.loop_calls import LoopCalls, Workers
from ..protocol.peer import Peer
from ..security.permissions import Permissions
from ..tenancy.namespaces import TopicNames
from ..tenancy.topic_removal import TopicRemoval
from .connection import Connection, Handler

_LIST_THREADS = 2
"""For topic lists: with more they would not be made quicker, and each has memory that it does not give back at once."""


class Services:
    """The services of one broker, wired to each other. Runs on the event loop's thread."""

    def __init__(
        self, store: DelayedStore, config: BrokerConfig, workers: Workers, command: Sequence[str] = ()
    ) -> None:
        """command: what runs `duelog`, before its arguments; none: there are no jobs."""
        self.workers = workers
        self._loop = asyncio.get_running_loop()
        calls = LoopCalls(self._loop)
        creation = AutoCreation(config.allow_auto_topic_creation, config.default_num_partitions)
        compatibility = Compatibility(config.schema_compatibility_strategy)
        defaults = Defaults(creation, config.broker_deduplication_enabled, compatibility)
        self.resources = Resources(store.documents, defaults)
        permissions = self.permissions = Permissions(
            self.resources if config.authorization_enabled else None, config.super_user_roles
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
        self._list_threads = ThreadPoolExecutor(_LIST_THREADS, "duelog-lists")
        list_workers = Workers(self._list_threads)
        self.listing = TopicListing(store, permissions, limiter, config, list_workers)
        self.topic_names = TopicNames(self.listing)
        self.name_sets = NameSets(store, list_workers, calls, config.max_topic_list_watchers_mem_size_mb << 20)
        self.watchers = Watchers(
            permissions, limiter, config, self.listing.gate, self.name_sets, list_workers, calls.loop
        )
        facts = self.facts = TopicFacts(store.documents, self.resources, access)
        clock = store.clock.now_ms
        self.producers = Producers(access.to_produce, facts, workers, calls, clock, config)
        self.consumers = Consumers(access.to_consume, facts, workers, calls, clock, config)
        self.addresses = Addresses()
        """Filled once the broker listens."""
        self.rates = Rates(self.producers, self.consumers, calls.loop, config.stats_update_frequency_in_secs)
        self.removal = TopicRemoval(
            store, self.resources, facts, self._users, self._disconnect, self.rates.forget_topic
        )
        self.jobs = Jobs(command, store.path, clock, store.tick)
        self.ownership = _ownership_of(config, limiter)
        """None: this broker serves every namespace."""
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
        for topic in {*self.producers.departed, *(group.topic.name for group in self.consumers.groups)}:
            if not ownership.is_own("/".join(TopicName.parse(topic)[:2])):
                self._disconnect(topic)

    def _users(self, topic: str) -> int:
        return len(self.producers.of_topic(topic)) + sum(map(len, self.consumers.of_topic(topic).values()))

    def _disconnect(self, topic: str) -> None:
        self.producers.close_topic(topic)
        self.consumers.close_topic(topic)

    def delete_topic(self, name: str, force: bool) -> None:
        """Delete a topic for a command of another process; waits, in any thread but the loop's.

        Raises what `TopicRemoval.delete` does, InvalidArgument, and ClosedError where the broker ends first.
        """
        deletion = self.removal.delete(TopicAddress.parse(str(TopicName.parse(name))), force=force)
        try:
            deleted = asyncio.run_coroutine_threadsafe(deletion, self._loop)
        except RuntimeError as error:  # the loop is closed
            deletion.close()
            raise ClosedError("the broker") from error
        try:
            deleted.result()
        except CancelledError as error:
            raise ClosedError("the broker") from error

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

    async def listing_closed(self) -> None:
        await asyncio.to_thread(self._list_threads.shutdown, cancel_futures=True)


def _ownership_of(config: BrokerConfig, limiter: DualMemoryLimiter) -> Ownership | None:
    if config.placement_file is None or config.placement_broker is None:
        return None
    dialer = Dialer(broker_context(config.broker_client_trust_certs_file_path))
    file = PlacementFile(config.placement_file)
    return Ownership(file, config.placement_broker, dialer, limiter, config.max_concurrent_lookup_request)


def _plain(call: Callable[[Peer, Any], Awaitable[None] | None]) -> Handler:
    return lambda connection, command, _: call(connection, command)
