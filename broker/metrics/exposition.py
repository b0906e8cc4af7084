"""`/metrics`: the engine's, the broker's, those of PIP-442 and of the process, in Prometheus' text format.

One page is in memory at a time. What asks while one is made gets that one; the next is made when the last one has left
for all who asked, or was not taken in time. The loop's thread copies what belongs to it, some at a time; a worker reads
the store and writes the text.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
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
from .connection_figures import ConnectionCounts, ConnectionFigures
from .engine_figures import EngineFigures
from .latencies import Durations, PublishDurations, passed_since
from .loop_lag import LoopLag
from .rates import Rates
from .text_format import Page, Shown, label, labels
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


class Exposition:
    """Counts what passes, and makes the page. Of the event loop's thread, but for what workers are given."""

    def __init__(
        self,
        store: DelayedStore,
        cluster: str,
        producers: Producers,
        consumers: Consumers,
        rates: Rates,
        limiter: DualMemoryLimiter,
        calls: LoopCalls,
        workers: Workers,
        *,
        by_topic: bool,
        max_topics: int = 0,
    ) -> None:
        """max_topics: topics and subscriptions that have series of their own; 0: all of them."""
        self._store = store
        self._cluster = cluster
        self._in_cluster = label("cluster", cluster)
        self._producers = producers
        self._consumers = consumers
        self._rates = rates
        self._limiter = limiter
        self._calls = calls
        self._workers = workers
        self._by_topic = by_topic
        self._max_topics = max_topics
        self._published = PublishDurations()
        self._dispatched = Durations()
        self._lag = LoopLag(calls.loop)
        self._process = ProcessCollector(registry=None)
        self._scrape_s = 0.0
        self._scrape: _Scrape | None = None
        self.connections: Callable[[], Iterable[ConnectionFigures]] = tuple
        self.connection_counts: Callable[[], ConnectionCounts] = lambda: ConnectionCounts(0, 0, 0)
        self.watching: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)
        """Watchers of topic lists, bytes of names that they keep, changes that wait for them."""
        self._engine = EngineFigures(cluster, by_topic=by_topic)
        self._store_metrics: StoreMetrics | None = None
        self._unlisten: Callable[[], object] = lambda: None

    def start(self) -> None:
        """Begin to count. Raises what the store raises, where it takes nothing."""
        self._store_metrics = self._store.report_to(self._engine)
        self._unlisten = self._store.on_topics(self._topics_changed)
        self._producers.sends.received = self._received
        self._consumers.tell_dispatched(self._sent)
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

    # -- what passes ---------------------------------------------------------------------------------

    def _received(self, producer: OpenProducer, came: list[float]) -> None:
        self._published.add(producer.topic_name, time.monotonic(), came)

    def _sent(self, messages: ReceivedMessages) -> None:
        """Count how late entries are that are sent the first time."""
        dues = messages.due_ms
        if any(messages.redelivery_counts):
            dues = [due for due, count in zip(dues, messages.redelivery_counts, strict=True) if not count]
        if dues:
            self._dispatched.add_group(passed_since(self._store.clock.now_ms(), dues, 0.001))

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
            last = None if scrape is None else scrape.left
            scrape = self._scrape = _Scrape(asyncio.get_running_loop().create_task(self._make_after(last)))
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

    async def _make_after(self, last: asyncio.Event | None) -> bytes:
        if last is not None:
            await last.wait()
        return await self._make()

    async def _make(self) -> bytes:
        began, metrics = time.monotonic(), self._store_metrics
        copies = await copy_topics(self._producers, self._consumers, self._rates, self._published)
        page, shown = Page(), Shown(self._max_topics)
        self._write_traffic(page)
        await self._write_connections(page)
        page.add("duelog_broker_scrape_seconds", self._in_cluster, self._scrape_s)

        def write() -> bytes:
            parts: list[Callable[[], object]] = [lambda: self._write_store(page, shown)]
            if metrics is not None:
                surveyed = metrics.survey()
                parts.append(
                    lambda: write_topics(page, self._cluster, surveyed, copies, shown, by_topic=self._by_topic)
                )
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
        """What is of no topic: durations, errors, totals."""
        within, sends = self._in_cluster, self._producers.sends
        page.add_durations("duelog_broker_publish_seconds", within, self._published.total)
        page.add_durations("duelog_broker_dispatch_seconds", within, self._dispatched)
        page.add_durations("duelog_broker_event_loop_lag_seconds", within, self._lag.durations)
        page.add("duelog_broker_event_loop_lag_longest_seconds", within, self._lag.longest_s)
        before = self._published.before
        name = "pulsar_broker_publish_latency"
        lines = page.lines(name)
        for quantile in _QUANTILES:
            value = before.quantile(quantile) * 1_000
            lines.append(f'{name}{{{within},quantile="{quantile}"}} {value if before.count else "NaN"}\n')
        total = self._published.total
        lines.append(f"{name}_count{{{within}}} {total.count}\n{name}_sum{{{within}}} {total.sum_s * 1_000!r}\n")
        page.lines("duelog_broker_send_errors_total")
        for error, count in sends.errors.items():
            page.add("duelog_broker_send_errors_total", f"{within},{label('error', error.name.lower())}", count)
        page.add("duelog_broker_blocked_sends", within, sends.blocked_entries)
        page.add("duelog_broker_unanswered_sends", within, self._producers.unanswered)

    async def _write_connections(self, page: Page) -> None:
        within = self._in_cluster
        counts = self.connection_counts()
        paused: dict[str, int] = {}
        queued = longest = requests = active = 0
        for active, each in enumerate(self.connections(), 1):
            if not active % _SLICE:
                await asyncio.sleep(0)
            queued += each.queued_bytes
            longest = max(longest, each.queued_bytes)
            requests += each.pending_requests
            for reason in each.paused:
                paused[reason] = paused.get(reason, 0) + 1
        page.add("pulsar_active_connections", within, active)
        page.add("pulsar_connection_created_total_count", within, counts.admitted + counts.refused)
        page.add("pulsar_connection_create_success_count", within, counts.admitted)
        page.add("pulsar_connection_create_fail_count", within, counts.refused)
        page.add("pulsar_connection_closed_total_count", within, counts.closed)
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
        """What is of the whole store. For a worker."""
        within, path = self._in_cluster, self._store.path
        failed = any(each.task == "store" for each in self._store.suspended())
        page.add("duelog_store_failed", within, int(failed))
        namespaces: dict[str, int] = {}
        page.lines("pulsar_topics_count")
        for topic in self._store.topics():
            namespace = shown.namespace(TopicName.parse(topic.name).namespace_name)
            namespaces[namespace] = namespaces.get(namespace, 0) + 1
        page.add("pulsar_broker_topics_count", within, sum(namespaces.values()))
        for namespace, count in namespaces.items():
            of_one = labels({"cluster": self._cluster, "namespace": namespace})
            page.add("pulsar_topics_count", of_one, count)
        parts = disk_parts(path)
        page.add("duelog_store_size_bytes", within, sum(parts.values()))
        page.lines("duelog_store_part_size_bytes")
        for part, size in parts.items():
            page.add("duelog_store_part_size_bytes", labels({"cluster": self._cluster, "part": part}), size)
        disk = os.statvfs(path)
        page.add("duelog_disk_size_bytes", within, disk.f_blocks * disk.f_frsize)
        page.add("duelog_disk_free_bytes", within, disk.f_bavail * disk.f_frsize)
