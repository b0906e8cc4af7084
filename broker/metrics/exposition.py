"""`/metrics`: the metrics of the engine, the broker, PIP-442 and the process, in Prometheus' text format.

One page is in memory at a time. A scrape that begins while a page is made gets that one; the next page is made when the
last has left for all who asked, or was not taken in time. The loop's thread copies its own figures, some at a time; a
worker reads the store and writes the text.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from prometheus_client import ProcessCollector

from ...delayed_store import DelayedStore
from ...store.errors import DuelogError
from ...store.files.directory import disk_parts
from ...store.names import TopicName
from ..consume.consumers import Consumers
from ..listing.memory_limits import BROKER_PREFIX, DualMemoryLimiter
from ..produce.producers import Producers
from ..produce.sends import OpenProducer
from ..protocol.loop_calls import LoopCalls, Workers
from .engine_figures import EngineFigures
from .latencies import Durations, LoopLag, PublishDurations
from .rates import Rates
from .text_format import Page, Shown, label
from .topic_figures import copy_topics, write_topics

if TYPE_CHECKING:
    from ...metrics import StoreMetrics
    from ...store.received_messages import ReceivedMessages
    from ...topics.topic_events import TopicEvent

_log = logging.getLogger("duelog.broker")

_QUANTILES = (0.0, 0.5, 0.95, 0.99, 0.999, 0.9999, 1.0)
_SLICE = 1_000
"""Connections that are looked at in one turn of the loop."""


class _Scrape:
    """A page, and those who ask for it."""

    def __init__(self, making: asyncio.Task[bytes]) -> None:
        self.making = making
        self.readers = 0
        self.left = asyncio.Event()
        """Set while nobody reads it."""


@dataclass(eq=False)
class Exposition:
    """Counts sends and dispatches, and makes the page. Of the event loop's thread, but for the work of workers.

    max_topics: topics and subscriptions that have series of their own; 0: all of them.
    """

    _store: DelayedStore
    _cluster: str
    _producers: Producers
    _consumers: Consumers
    _rates: Rates
    _limiter: DualMemoryLimiter
    _calls: LoopCalls
    _workers: Workers
    _: KW_ONLY
    by_topic: bool
    max_topics: int = 0

    def __post_init__(self) -> None:
        self._in_cluster = label("cluster", self._cluster)
        self._published = PublishDurations()
        self._dispatched = Durations()
        self._lag = LoopLag(self._calls.loop)
        self._process = ProcessCollector(registry=None)
        self._scrape_s = 0.0
        self._scrape: _Scrape | None = None
        self.connections: Callable[[], Iterable[tuple[int, int, Collection[str]]]] = tuple
        """By connection: bytes queued, requests under way, and why it is not read."""
        self.connection_counts: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)
        """Connections admitted, refused and closed since the start."""
        self.watching: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)
        """Watchers of topic lists, bytes of names that they keep, changes that wait for them."""
        self._engine = EngineFigures(self._cluster, by_topic=self.by_topic)
        self._store_metrics: StoreMetrics | None = None
        self._unlisten: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Begin to count. Raises what the store raises, where it takes nothing."""
        self._store_metrics = self._store.report_to(self._engine)
        self._unlisten = self._store.on_topics(self._topics_changed)
        self._producers.sends.received = self._received
        self._consumers.dispatched = self._sent
        self._lag.start()
        self._rates.on_period += [self._published.turn, self._lag.turn]
        self._rates.start()

    def stop(self) -> None:
        """Count no more. A second call is nothing."""
        self._lag.stop()
        self._rates.stop()
        self._unlisten()
        if self._store_metrics is not None:
            self._store_metrics.close()
        self._producers.sends.received = None

    # -- counting ------------------------------------------------------------------------------------

    def _received(self, producer: OpenProducer, came: list[float]) -> None:
        self._published.add(producer.topic_name, time.monotonic(), came)

    def _sent(self, messages: ReceivedMessages) -> None:
        """Count how late entries are that are sent the first time."""
        dues = messages.due_ms
        if any(messages.redelivery_counts):
            dues = [due for due, count in zip(dues, messages.redelivery_counts, strict=True) if not count]
        if dues:
            self._dispatched.add_passed(self._store.clock.now_ms(), dues, 0.001)

    def _topics_changed(self, events: list[TopicEvent]) -> None:
        """Forget topics that were deleted. A thread of the engine calls."""
        deleted = [event.name for event in events if event.kind == "deleted"]
        if deleted:
            self._calls.post(lambda: self._forget(deleted))

    def _forget(self, topics: list[str]) -> None:
        for topic in topics:
            self._rates.forget_topic(topic)
            self._engine.forget_topic(topic)

    # -- the page ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def page(self) -> AsyncIterator[bytes]:
        """The page, until the body ends: the next one is made then."""
        scrape = self._scrape
        if scrape is None or scrape.making.done():
            left = None if scrape is None else scrape.left

            async def make() -> bytes:
                if left is not None:
                    await left.wait()
                return await self._make()

            scrape = self._scrape = _Scrape(asyncio.create_task(make()))
        scrape.readers += 1
        scrape.left.clear()
        try:
            yield await asyncio.shield(scrape.making)
        finally:
            scrape.readers -= 1
            if not scrape.readers:
                scrape.left.set()
                if self._scrape is scrape and scrape.making.done():
                    self._scrape = None

    async def _make(self) -> bytes:
        began, metrics = time.monotonic(), self._store_metrics
        copies = await copy_topics(self._producers, self._consumers, self._rates, self._published)
        page, shown = Page(), Shown(self.max_topics)
        self._write_traffic(page)
        await self._write_connections(page)
        page.add("duelog_broker_scrape_seconds", self._in_cluster, self._scrape_s)

        def write() -> bytes:
            parts: list[Callable[[], object]] = [lambda: self._write_store(page, shown)]
            if metrics is not None:
                surveyed = metrics.survey()
                parts.append(lambda: write_topics(page, self._cluster, surveyed, copies, shown, by_topic=self.by_topic))
                parts.append(lambda: self._engine.write(page, metrics, shown))
            for part in parts:
                try:
                    part()
                except (DuelogError, OSError) as error:  # the others are needed all the more
                    _log.warning("a part of /metrics is left out: %s", error)
            page.add_families(self._process.collect())
            return page.encode()

        page.add_families(self._limiter.collect(BROKER_PREFIX, self._cluster))
        found = await self._workers(write)
        self._scrape_s = time.monotonic() - began
        return found

    def _write_traffic(self, page: Page) -> None:
        """Write durations, errors and totals over all topics."""
        within, sends = self._in_cluster, self._producers.sends
        page.add_durations("duelog_broker_publish_seconds", within, self._published.total)
        page.add_durations("duelog_broker_dispatch_seconds", within, self._dispatched)
        page.add_durations("duelog_broker_event_loop_lag_seconds", within, self._lag.durations)
        page.add("duelog_broker_event_loop_lag_longest_seconds", within, self._lag.longest_s)
        before = self._published.before
        name = "pulsar_broker_publish_latency"
        for quantile in _QUANTILES:
            page.add(name, f'{within},quantile="{quantile}"', before.quantile(quantile) * 1_000)
        total = self._published.total
        page.add(name, within, total.count, "_count")
        page.add(name, within, total.sum_s * 1_000, "_sum")
        page.lines("duelog_broker_send_errors_total")
        for error, count in sends.errors.items():
            page.add("duelog_broker_send_errors_total", f"{within},{label('error', error.name.lower())}", count)
        page.add("duelog_broker_blocked_sends", within, sends.blocked_entries)
        page.add("duelog_broker_unanswered_sends", within, self._producers.unanswered)

    async def _write_connections(self, page: Page) -> None:
        within = self._in_cluster
        admitted, refused, closed = self.connection_counts()
        paused: Counter[str] = Counter()
        queued = longest = requests = active = 0
        for active, (queued_bytes, pending, reasons) in enumerate(self.connections(), 1):
            if not active % _SLICE:
                await asyncio.sleep(0)
            queued += queued_bytes
            longest = max(longest, queued_bytes)
            requests += pending
            paused.update(reasons)
        page.add("pulsar_active_connections", within, active)
        page.add("pulsar_connection_created_total_count", within, admitted + refused)
        page.add("pulsar_connection_create_success_count", within, admitted)
        page.add("pulsar_connection_create_fail_count", within, refused)
        page.add("pulsar_connection_closed_total_count", within, closed)
        page.add("duelog_broker_pending_requests", within, requests)
        page.add("duelog_broker_write_queue_bytes", within, queued)
        page.add("duelog_broker_write_queue_longest_bytes", within, longest)
        watchers, kept_bytes, waiting = self.watching()
        page.add("duelog_broker_topic_list_watchers", within, watchers)
        page.add("duelog_broker_topic_list_watched_names_bytes", within, kept_bytes)
        page.add("duelog_broker_topic_list_waiting_changes", within, waiting)
        page.lines("duelog_broker_paused_connections")
        for reason, count in paused.items():
            page.add("duelog_broker_paused_connections", f"{within},{label('reason', reason)}", count)

    def _write_store(self, page: Page, shown: Shown) -> None:
        """Write the figures of the whole store. For a worker."""
        within, path = self._in_cluster, self._store.path
        failed = any(each.task == "store" for each in self._store.suspended())
        page.add("duelog_store_failed", within, int(failed))
        page.lines("pulsar_topics_count")
        names = (TopicName.parse(topic.name) for topic in self._store.topics())
        namespaces = Counter(shown.namespace(name.namespace_name) for name in names)
        page.add("pulsar_broker_topics_count", within, sum(namespaces.values()))
        for namespace, count in namespaces.items():
            page.add("pulsar_topics_count", f"{within},{label('namespace', namespace)}", count)
        parts = disk_parts(path)
        page.add("duelog_store_size_bytes", within, sum(parts.values()))
        page.lines("duelog_store_part_size_bytes")
        for part, size in parts.items():
            page.add("duelog_store_part_size_bytes", f"{within},{label('part', part)}", size)
        disk = os.statvfs(path)
        page.add("duelog_disk_size_bytes", within, disk.f_blocks * disk.f_frsize)
        page.add("duelog_disk_free_bytes", within, disk.f_bavail * disk.f_frsize)
