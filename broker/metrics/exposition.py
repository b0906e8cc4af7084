"""`/metrics`: the metrics of the engine, the broker, PIP-442 and the process, in Prometheus' text format.

One page is in memory at a time. A scrape that begins while a page is made gets that one; the next page is made when the
last has left for all who asked, or was not taken in time. The loop's thread copies its own figures, some at a time; a
worker reads the store and writes the text: by hand, as prometheus_client's objects for each sample take ten times as
long, and a broker of ten thousand topics has hundreds of thousands of samples.

The engine's metrics are counted for one store without an SDK: instruments that add up, and gauges that are read. Series
of topics have Pulsar's names. Where there are to be none, and for more topics than a page may have series of, the same
figures are added up by namespace; histograms always are.

Names are Pulsar's where it has one for the same thing, so that boards made for it show a broker of this kind too. The
engine's own are those of `duelog.metrics`, as OpenTelemetry's exporters write them: dots are underscores, the unit is a
part of the name, counters end in `_total`. What has a Pulsar name is not there twice. docs/metrics.md says the same to
people.
"""

import asyncio
import logging
import os
import threading
import time
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from itertools import accumulate
from math import isfinite
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from opentelemetry import metrics as otel
from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from ... import metrics as engine
from ...delayed_store import DelayedStore
from ...stats import SubscriptionStats, TopicSurvey
from ...store.errors import DuelogError
from ...store.files.directory import disk_parts
from ...store.names import TopicName
from ...store.received_messages import ReceivedMessages
from ...topics.topic_events import TopicEvent
from ..consume.consumers import Consumers
from ..consume.pump import INDIVIDUAL, Dispatched
from ..listing.memory_limits import BROKER_PREFIX, FIGURES, DualMemoryLimiter
from ..produce.producers import Producers
from ..produce.sends import Figures, OpenProducer
from ..protocol.loop_calls import LoopCalls, Workers
from .rates import BOUNDS_S, READERS, Durations, InRate, LoopLag, OutRate, PublishDurations, Rates

CLUSTER = ("cluster",)
NAMESPACE = ("cluster", "namespace")
TOPIC = ("cluster", "namespace", "topic")
SUBSCRIPTION = (*TOPIC, "subscription")


class Named(NamedTuple):
    """A metric. labels: without le and quantile; where series are by namespace, without topic and subscription."""

    name: str
    kind: str
    labels: tuple[str, ...]
    description: str


_UNITS = {"s": "_seconds", "By": "_bytes"}

PULSAR_NAMES = {engine.DELAYED, engine.BACKLOG, engine.INDEX}
"""Instruments of the engine that have a name of Pulsar's here."""


def prometheus_name(spec: engine.Spec) -> str:
    """The name of one of the engine's instruments."""
    return spec.name.replace(".", "_") + _UNITS.get(spec.unit, "") + ("_total" if spec.kind == "counter" else "")


def label_name(attribute: str) -> str:
    """The label of an attribute of the engine's: its last word."""
    return attribute.rpartition(".")[2]


def labels_of(spec: engine.Spec) -> tuple[str, ...]:
    """The labels of an instrument: the store is known by its cluster; histograms, many series each, have no topic."""
    names = [label_name(each) for each in spec.attributes if each not in {"duelog.store", "pulsar.cluster"}]
    if spec.kind == "histogram" and "topic" in names:
        names.remove("topic")
    return (*CLUSTER, *names)


ENGINE = tuple(
    Named(prometheus_name(spec), spec.kind, labels_of(spec), spec.description)
    for spec in engine.SPECS
    if spec.name not in PULSAR_NAMES and spec.name != engine.RUNNING  # a broker runs no handlers
)

WRITE_BUCKETS = ("le_0_5", "le_1", "le_5", "le_10", "le_20", "le_50", "le_100", "le_200", "le_1000", "overflow")

BROKER = (
    Named("pulsar_topics_count", "gauge", NAMESPACE, "Topics of the namespace"),
    Named("pulsar_subscriptions_count", "gauge", TOPIC, "Subscriptions"),
    Named("pulsar_producers_count", "gauge", TOPIC, "Producers that are open"),
    Named("pulsar_consumers_count", "gauge", TOPIC, "Consumers that are open, readers among them"),
    Named("pulsar_rate_in", "gauge", TOPIC, "Messages that came, a second"),
    Named("pulsar_rate_out", "gauge", TOPIC, "Messages sent to consumers, a second"),
    Named("pulsar_throughput_in", "gauge", TOPIC, "Bytes that came, a second"),
    Named("pulsar_throughput_out", "gauge", TOPIC, "Bytes sent to consumers, a second"),
    Named("pulsar_average_msg_size", "gauge", TOPIC, "Bytes of a message that came in the last period"),
    Named("pulsar_storage_write_rate", "gauge", TOPIC, "Entries written, a second; a batch is one"),
    Named("pulsar_in_messages_total", "counter", TOPIC, "Messages that came"),
    Named("pulsar_in_bytes_total", "counter", TOPIC, "Bytes that came"),
    Named("pulsar_storage_size", "gauge", TOPIC, "Bytes of what is stored: the main log, and what waits for its time"),
    Named("pulsar_msg_backlog", "gauge", TOPIC, "Backlog of all subscriptions, what is delayed included"),
    Named("pulsar_delayed_message_index_size_bytes", "gauge", TOPIC, "Memory of the topic's delay indexes, estimated"),
    *(
        Named(f"pulsar_storage_write_latency_{each}", "gauge", TOPIC, "SENDs of the last period by ms to their receipt")
        for each in WRITE_BUCKETS
    ),
    Named("pulsar_storage_write_latency_count", "gauge", TOPIC, "SENDs of the last period that have their receipt"),
    Named("pulsar_storage_write_latency_sum", "gauge", TOPIC, "Milliseconds that they took together"),
    Named("pulsar_subscription_back_log", "gauge", SUBSCRIPTION, "Messages not acknowledged, delayed ones included"),
    Named("pulsar_subscription_back_log_no_delayed", "gauge", SUBSCRIPTION, "Messages fired and not acknowledged"),
    Named("pulsar_subscription_delayed", "gauge", SUBSCRIPTION, "Messages of the subscription not due yet"),
    Named("pulsar_subscription_in_replay", "gauge", SUBSCRIPTION, "Messages that wait to be sent again"),
    Named("pulsar_subscription_unacked_messages", "gauge", SUBSCRIPTION, "Messages that consumers hold"),
    Named("pulsar_subscription_blocked_on_unacked_messages", "gauge", SUBSCRIPTION, "1: nothing is sent, too many are"),
    Named("pulsar_subscription_consumers_count", "gauge", SUBSCRIPTION, "Consumers of the subscription"),
    Named("pulsar_subscription_msg_rate_out", "gauge", SUBSCRIPTION, "Messages sent, a second"),
    Named("pulsar_subscription_msg_throughput_out", "gauge", SUBSCRIPTION, "Bytes sent, a second"),
    Named("pulsar_subscription_msg_rate_redeliver", "gauge", SUBSCRIPTION, "Messages sent again, a second"),
    Named("pulsar_subscription_msg_ack_rate", "gauge", SUBSCRIPTION, "Acknowledgements taken, a second"),
    Named("pulsar_out_messages_total", "counter", SUBSCRIPTION, "Messages sent"),
    Named("pulsar_out_bytes_total", "counter", SUBSCRIPTION, "Bytes sent"),
    Named("pulsar_broker_topics_count", "gauge", CLUSTER, "Topics of the broker"),
    Named("pulsar_broker_subscriptions_count", "gauge", CLUSTER, "Subscriptions of topics in use"),
    Named("pulsar_broker_producers_count", "gauge", CLUSTER, "Producers that are open"),
    Named("pulsar_broker_consumers_count", "gauge", CLUSTER, "Consumers that are open"),
    Named("pulsar_broker_rate_in", "gauge", CLUSTER, "Messages that came, a second"),
    Named("pulsar_broker_rate_out", "gauge", CLUSTER, "Messages sent to consumers, a second"),
    Named("pulsar_broker_throughput_in", "gauge", CLUSTER, "Bytes that came, a second"),
    Named("pulsar_broker_throughput_out", "gauge", CLUSTER, "Bytes sent to consumers, a second"),
    Named("pulsar_broker_storage_size", "gauge", CLUSTER, "Bytes stored of topics in use"),
    Named("pulsar_broker_msg_backlog", "gauge", CLUSTER, "Backlog of topics in use, what is delayed included"),
    Named("pulsar_broker_publish_latency", "summary", CLUSTER, "Milliseconds from a SEND to its receipt, last period"),
    Named("pulsar_active_connections", "gauge", CLUSTER, "Connections of clients"),
    Named("pulsar_connection_created_total_count", "gauge", CLUSTER, "Connections that clients made"),
    Named("pulsar_connection_create_success_count", "gauge", CLUSTER, "Connections that were let in"),
    Named("pulsar_connection_create_fail_count", "gauge", CLUSTER, "Connections over a limit, refused"),
    Named("pulsar_connection_closed_total_count", "gauge", CLUSTER, "Connections that ended"),
    Named("duelog_broker_publish_seconds", "histogram", CLUSTER, "Time from a SEND to its receipt"),
    Named("duelog_broker_dispatch_seconds", "histogram", CLUSTER, "Time from due, or stored, to first sent"),
    Named("duelog_broker_send_errors_total", "counter", (*CLUSTER, "error"), "SENDs refused, by the error told"),
    Named("duelog_broker_duplicates_total", "counter", CLUSTER, "SENDs that were stored already"),
    Named("duelog_broker_redelivered_total", "counter", CLUSTER, "Messages sent again"),
    Named("duelog_broker_acknowledged_total", "counter", CLUSTER, "Acknowledgements taken; a cumulative one is one"),
    Named("duelog_broker_unanswered_sends", "gauge", CLUSTER, "SENDs that wait for their answer"),
    Named("duelog_broker_blocked_sends", "gauge", CLUSTER, "SENDs that wait for the engine to have capacity"),
    Named("duelog_broker_pending_requests", "gauge", CLUSTER, "Requests under way, SENDs and acknowledgements apart"),
    Named("duelog_broker_write_queue_bytes", "gauge", CLUSTER, "Bytes that wait to be written to clients"),
    Named("duelog_broker_write_queue_longest_bytes", "gauge", CLUSTER, "Those of the connection with the most"),
    Named("duelog_broker_paused_connections", "gauge", (*CLUSTER, "reason"), "Connections not read, by reason"),
    Named("duelog_broker_topic_list_watchers", "gauge", CLUSTER, "Watchers of topic lists"),
    Named("duelog_broker_topic_list_watched_names_bytes", "gauge", CLUSTER, "Memory of names that watchers keep"),
    Named("duelog_broker_topic_list_waiting_changes", "gauge", CLUSTER, "Changes that wait to be sent to watchers"),
    Named("duelog_broker_event_loop_lag_seconds", "histogram", CLUSTER, "How late the event loop is for a timer"),
    Named("duelog_broker_event_loop_lag_longest_seconds", "gauge", CLUSTER, "The longest in the last period"),
    Named("duelog_broker_scrape_seconds", "gauge", CLUSTER, "What the scrape before this one took"),
    Named("duelog_store_failed", "gauge", CLUSTER, "1: nothing is written until the store is opened again"),
    Named("duelog_store_size_bytes", "gauge", CLUSTER, "Disk space of the store"),
    Named("duelog_store_part_size_bytes", "gauge", (*CLUSTER, "part"), "What of it is of each part of the store"),
    Named("duelog_disk_size_bytes", "gauge", CLUSTER, "Size of the file system that the store is on"),
    Named("duelog_disk_free_bytes", "gauge", CLUSTER, "What of it this process may still use"),
)  # fmt: skip

LIMITS = tuple(
    Named(f"{BROKER_PREFIX}{kind}_{name}", metric, CLUSTER, f"PIP-442, {kind}: {text}")
    for kind in ("heap", "direct")
    for name, metric, text, _ in FIGURES
)

PROCESS = (
    Named("process_virtual_memory_bytes", "gauge", (), "Address space of the process"),
    Named("process_resident_memory_bytes", "gauge", (), "Memory of the process"),
    Named("process_start_time_seconds", "gauge", (), "When the process began, seconds since 1970"),
    Named("process_cpu_seconds_total", "counter", (), "Processor time of the process"),
    Named("process_open_fds", "gauge", (), "Open file descriptors"),
    Named("process_max_fds", "gauge", (), "File descriptors that may be open"),
)

METRICS = (*BROKER, *ENGINE, *LIMITS, *PROCESS)

BY_NAME = {each.name: each for each in METRICS}

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def label(name: str, value: str) -> str:
    """Write a label and its value."""
    if "\\" in value or '"' in value or "\n" in value:
        value = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{name}="{value}"'


def labels(values: dict[str, str]) -> str:
    """Write labels as they stand between braces."""
    return ",".join(label(name, value) for name, value in values.items())


def shown_number(value: float) -> str:
    """Write a value."""
    if isinstance(value, int):
        return str(value)
    return repr(value) if isfinite(value) else {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}[repr(value)]


OTHERS = "others"
"""The topic, subscription or namespace of sums of all that have no series of their own; no name of one of them."""


class Shown:
    """Topics and namespaces that have series of their own, so that a page is bounded; first come, first shown."""

    def __init__(self, most: int) -> None:
        """most: topics and subscriptions together, and namespaces; 0: no limit."""
        self._most = most
        self._topics: set[str] = set()
        self._count = 0
        self._namespaces: set[str] = set()

    def admit(self, topic: str, subscriptions: int) -> bool:
        """Show a topic with so many subscriptions, if there is room for all of it."""
        if not self._most or self._count + 1 + subscriptions <= self._most:
            self._count += 1 + subscriptions
            self._topics.add(topic)
        return topic in self._topics

    def topic(self, name: str) -> str:
        """Return the name of a topic that was admitted, else OTHERS."""
        return name if not self._most or name in self._topics else OTHERS

    def namespace(self, name: str) -> str:
        """Return the name of a namespace that is shown or for which there is room, else OTHERS."""
        if not self._most or len(self._namespaces) < self._most:
            self._namespaces.add(name)
        return name if name in self._namespaces else OTHERS


class Page:
    """A page being written."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}

    def lines(self, name: str) -> list[str]:
        """Return the lines of a metric, to be added to. Raises KeyError for a name that the list of names lacks."""
        lines = self._lines.get(name)
        if lines is None:
            named = BY_NAME[name]
            lines = self._lines[name] = [f"# HELP {name} {named.description}\n# TYPE {name} {named.kind}\n"]
        return lines

    def add(self, name: str, within: str, value: float, suffix: str = "") -> None:
        """Add a sample. within: its labels. suffix: of its name, beside the metric's."""
        self.lines(name).append(f"{name}{suffix}{{{within}}} {shown_number(value)}\n")

    def add_histogram(
        self, name: str, within: str, bounds: Iterable[float], counts: Iterable[int], total: float
    ) -> None:
        """Add a histogram. counts: by bucket, one more than there are bounds. total: the sum of the values."""
        up_to = list(accumulate(counts))
        for bound, count in zip([*bounds, "+Inf"], up_to, strict=True):
            self.add(name, f'{within},le="{bound}"', count, "_bucket")
        self.add(name, within, up_to[-1], "_count")
        self.add(name, within, total, "_sum")

    def add_durations(self, name: str, within: str, durations: Durations) -> None:
        self.add_histogram(name, within, BOUNDS_S, durations.counts, durations.sum_s)

    def add_families(self, families: Iterable[Metric]) -> None:
        for family in families:
            if family.type != "unknown":
                name = f"{family.name}_total" if family.type == "counter" else family.name
                for sample in family.samples:
                    self.add(name, labels(sample.labels), sample.value, sample.name.removeprefix(name))

    def encode(self) -> bytes:
        """Return the page. Other threads go on between its metrics."""
        parts = []
        for lines in self._lines.values():
            parts.append("".join(lines).encode())
            time.sleep(0)
        return b"".join(parts)


Values = tuple[str, ...]
"""Values of a metric's labels, but for the cluster."""

_TOPIC, _NAMESPACE = "pulsar.topic", "pulsar.namespace"


class _Tally(otel.Counter):
    """A sum by labels."""

    def __init__(self, spec: engine.Spec, attributes: Values) -> None:
        self._attributes = attributes
        self.series: dict[Values, float] = {}
        self._lock = threading.Lock()

    def add(self, amount: float, attributes: Any = None, context: Any = None) -> None:
        key = tuple(attributes[each] for each in self._attributes)
        with self._lock:
            self.series[key] = self.series.get(key, 0) + amount


class _Buckets(otel.Histogram):
    """Counts by bucket, and at their end the sum of the values, by labels."""

    def __init__(self, spec: engine.Spec, attributes: Values) -> None:
        self._attributes = attributes
        self.bounds = engine.BOUNDARIES.get(spec.unit, engine.COUNTS)
        self.series: dict[Values, npt.NDArray[np.float64]] = {}
        self._bounds = np.array(self.bounds)
        self._lock = threading.Lock()

    def record(self, amount: float, attributes: Any = None, context: Any = None) -> None:
        with self._lock:
            counts = self._of(attributes)
            counts[bisect_left(self.bounds, amount)] += 1
            counts[-1] += amount

    def record_all(self, values: npt.NDArray[np.float64], attributes: Mapping[str, str]) -> None:
        counted = np.bincount(np.searchsorted(self._bounds, values), minlength=len(self.bounds) + 1)
        with self._lock:
            counts = self._of(attributes)
            counts[:-1] += counted
            counts[-1] += values.sum()

    def _of(self, attributes: Mapping[str, str]) -> npt.NDArray[np.float64]:
        key = tuple(attributes[each] for each in self._attributes)
        counts = self.series.get(key)
        if counts is None:
            counts = self.series[key] = np.zeros(len(self.bounds) + 2)
        return counts


class EngineFigures(engine.Instruments):
    """The instruments of one store. Thread-safe."""

    listening = True

    def __init__(self, cluster: str, *, by_topic: bool) -> None:
        self._cluster = label("cluster", cluster)
        self.stores = weakref.WeakSet()
        self._tallies: dict[str, _Tally] = {}
        self._buckets: dict[str, _Buckets] = {}
        self._labels: dict[str, Values] = {}
        for spec in engine.SPECS:
            wanted = {each for each in labels_of(spec) if by_topic or each != "topic"} - {"cluster"}
            attributes = self._labels[spec.name] = tuple(each for each in spec.attributes if label_name(each) in wanted)
            if spec.kind == "histogram":
                self._buckets[spec.name] = _Buckets(spec, attributes)
            elif spec.kind == "counter" and spec.name not in engine.OBSERVED:
                self._tallies[spec.name] = _Tally(spec, attributes)
        self.counters = {**self._tallies}
        self.histograms = {**self._buckets}

    def record_all(self, name: str, values: npt.NDArray[np.float64], attributes: engine.Attributes) -> None:
        self._buckets[name].record_all(values, attributes)

    def forget_topic(self, topic: str) -> None:
        for name, tally in self._tallies.items():
            if _TOPIC in self._labels[name]:
                at = self._labels[name].index(_TOPIC)
                for key in [each for each in list(tally.series) if each[at] == topic]:
                    tally.series.pop(key, None)

    # -- the page ------------------------------------------------------------------------------------

    def write(self, page: Page, store: engine.StoreMetrics, shown: Shown) -> None:
        """Write all but what a survey of the topics gives. May wait for the disk."""
        for spec in engine.SPECS:
            if spec.name in engine.OF_TOPICS:
                continue
            name, attributes = prometheus_name(spec), self._labels[spec.name]
            sums: dict[Values, Any] = {}
            for own, value in self._series(spec, store):
                labels = dict(zip(attributes, own, strict=True))
                if _TOPIC in labels:
                    labels[_TOPIC] = shown.topic(labels[_TOPIC])
                if _NAMESPACE in labels:
                    labels[_NAMESPACE] = shown.namespace(labels[_NAMESPACE])
                key = tuple(labels.values())
                sums[key] = sums[key] + value if key in sums else value
            if spec.kind == "counter" and not attributes:
                sums.setdefault((), 0)
            page.lines(name)
            for key, value in sums.items():
                pairs = zip(attributes, key, strict=True)
                within = ",".join([self._cluster, *(label(label_name(attribute), each) for attribute, each in pairs)])
                if spec.kind == "histogram":
                    *counts, total = value.tolist()
                    page.add_histogram(name, within, self._buckets[spec.name].bounds, map(int, counts), total)
                else:
                    page.add(name, within, value)

    def _series(self, spec: engine.Spec, store: engine.StoreMetrics) -> Iterable[tuple[Values, Any]]:
        if spec.kind == "histogram":
            return list(self._buckets[spec.name].series.items())
        if spec.name in self._tallies:
            return list(self._tallies[spec.name].series.items())
        return [
            (tuple(str((each.attributes or {})[name]) for name in self._labels[spec.name]), each.value)
            for each in store.observe(spec.name)
        ]


T = TypeVar("T")

_TOPICS_A_TURN = 200
"""Topics that are copied in one turn of the loop."""

_YIELD = 20
"""Topics after which a worker lets other threads have the interpreter: every millisecond or so."""

_NOTHING, _NO_IN, _NO_OUT = Durations(), InRate(), OutRate()


@dataclass(slots=True)
class SubscriptionCopy:
    """The broker's part of a subscription's figures."""

    consumers: int = 0
    unacked: int = 0
    blocked: bool = False
    sent: Dispatched = field(default_factory=Dispatched)
    rate: OutRate = _NO_OUT


@dataclass(slots=True)
class TopicCopy:
    """The broker's part of a topic's figures."""

    producers: int = 0
    consumers: int = 0
    received: Figures = field(default_factory=Figures)
    rate_in: InRate = _NO_IN
    rate_out: OutRate = _NO_OUT
    durations: Durations = _NOTHING
    subscriptions: dict[str, SubscriptionCopy] = field(default_factory=dict)
    """By name; READERS: readers, and subscriptions that were deleted."""


async def copy_topics(
    producers: Producers, consumers: Consumers, rates: Rates, durations: PublishDurations
) -> dict[str, TopicCopy]:
    """Copy the broker's part of every topic that has had producers or consumers. The loop goes on meanwhile."""
    copies: dict[str, TopicCopy] = {}
    async for topic in _slices(list(producers.departed)):
        copies[topic] = TopicCopy(
            producers=len(producers.of_topic(topic)),
            received=rates.received(topic),
            rate_in=rates.published(topic),
            durations=durations.last.get(topic, _NOTHING),
        )
    async for group in _slices(consumers.groups):
        topic = group.topic.name
        of_topic = copies.setdefault(topic, TopicCopy())
        of_topic.consumers += len(group.consumers)
        of_topic.rate_out = rates.dispatched(topic)
        copied = of_topic.subscriptions.setdefault(group.name if group.durable else READERS, SubscriptionCopy())
        for consumer in group.consumers:
            copied.sent.add(consumer.figures)
        if group.durable:
            copied.consumers, copied.blocked = len(group.consumers), group.blocked
            copied.unacked = group.unacked if group.type in INDIVIDUAL else 0
            copied.rate = rates.of_subscription(topic, group.name)
    async for topic, departed in _slices(list(consumers.departed.items())):
        of_topic = copies.setdefault(topic, TopicCopy())
        for name, sent in departed.items():
            copied = of_topic.subscriptions.setdefault(name, SubscriptionCopy(rate=rates.of_subscription(topic, name)))
            copied.sent.add(sent)
    return copies


async def _slices(items: Iterable[T]) -> AsyncIterator[T]:
    for number, item in enumerate(items):
        if number % _TOPICS_A_TURN == _TOPICS_A_TURN - 1:
            await asyncio.sleep(0)
        yield item


_OLDEST = "duelog_subscription_unacknowledged_age_seconds"
_DELIVERED = {name: f"{name.replace('.', '_')}_total" for name in engine.DELIVERED}


class _Sums:
    """Figures of one topic, or added up of many."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.of_subscriptions: dict[str, float] = {}
        self.durations = Durations()

    def add(self, topic: TopicSurvey, copy: TopicCopy) -> None:
        values = self.values
        for name, value in _of_topic(topic, copy).items():
            values[name] = values.get(name, 0) + value
        self.durations.join(copy.durations)

    def add_subscriptions(self, topic: TopicSurvey, copy: TopicCopy) -> None:
        values = self.of_subscriptions
        for stats in topic.subscriptions:
            for name, value in _of_subscription(topic, stats, copy).items():
                before = values.get(name, 0)
                values[name] = max(before, value) if name == _OLDEST else before + value

    def write(self, page: Page, within: str, subscription: str = "") -> None:
        """subscription: its label, where series of subscriptions have one."""
        for name, value in self.values.items():
            page.add(name, within, value)
        for name, value in self.of_subscriptions.items():
            page.add(name, f"{within}{subscription}", value)
        rate, throughput = self.values.get("pulsar_rate_in", 0.0), self.values.get("pulsar_throughput_in", 0.0)
        page.add("pulsar_average_msg_size", within, throughput / rate if rate else 0.0)
        if count := self.durations.count:
            for name, bucket in zip(WRITE_BUCKETS, self.durations.write_buckets(), strict=True):
                page.add(f"pulsar_storage_write_latency_{name}", within, bucket)
            page.add("pulsar_storage_write_latency_count", within, count)
            page.add("pulsar_storage_write_latency_sum", within, self.durations.sum_s * 1_000)


def _of_topic(topic: TopicSurvey, copy: TopicCopy) -> dict[str, float]:
    delayed = sum(topic.in_partitions + stats.inline for stats in topic.subscriptions)
    return {
        "pulsar_subscriptions_count": len(topic.subscriptions),
        "pulsar_producers_count": copy.producers,
        "pulsar_consumers_count": copy.consumers,
        "pulsar_rate_in": copy.rate_in.messages,
        "pulsar_rate_out": copy.rate_out.messages,
        "pulsar_throughput_in": copy.rate_in.bytes,
        "pulsar_throughput_out": copy.rate_out.bytes,
        "pulsar_storage_write_rate": copy.rate_in.entries,
        "pulsar_in_messages_total": copy.received.messages,
        "pulsar_in_bytes_total": copy.received.bytes,
        "pulsar_storage_size": topic.stored_bytes,
        "pulsar_msg_backlog": sum(stats.backlog for stats in topic.subscriptions) + delayed,
        "pulsar_delayed_message_index_size_bytes": topic.index_bytes,
        "duelog_topic_pending": topic.pending,
        "duelog_messages_sent_total": topic.sent,
    }


def _of_subscription(topic: TopicSurvey, stats: SubscriptionStats, copy: TopicCopy) -> dict[str, float]:
    known = copy.subscriptions.get(stats.name) or SubscriptionCopy()
    delayed = topic.in_partitions + stats.inline
    return {
        "pulsar_subscription_back_log": stats.backlog + delayed,
        "pulsar_subscription_back_log_no_delayed": stats.backlog,
        "pulsar_subscription_delayed": delayed,
        "pulsar_subscription_in_replay": stats.redelivering,
        "pulsar_subscription_unacked_messages": known.unacked,
        "pulsar_subscription_blocked_on_unacked_messages": int(known.blocked),
        "pulsar_subscription_consumers_count": known.consumers,
        "pulsar_subscription_msg_rate_out": known.rate.messages,
        "pulsar_subscription_msg_throughput_out": known.rate.bytes,
        "pulsar_subscription_msg_rate_redeliver": known.rate.redelivered,
        "pulsar_subscription_msg_ack_rate": known.rate.acked,
        "pulsar_out_messages_total": known.sent.messages,
        "pulsar_out_bytes_total": known.sent.bytes,
        _OLDEST: stats.oldest_unacknowledged_ms / 1000,
        **{_DELIVERED[name]: value for name, value in engine.delivered(stats).items()},
    }


_OF_BROKER = (
    "subscriptions_count", "producers_count", "consumers_count", "rate_in", "rate_out", "throughput_in",
    "throughput_out", "storage_size", "msg_backlog",
)  # fmt: skip
"""Figures of topics whose sums the broker has, named `pulsar_broker_` and so on."""


def write_topics(
    page: Page,
    cluster: str,
    surveyed: Iterable[TopicSurvey],
    copies: dict[str, TopicCopy],
    shown: Shown,
    *,
    by_topic: bool,
) -> None:
    """Write the figures of topics, namespaces and the broker. For a worker: other threads go on meanwhile.

    shown: is told of the topics that have series of their own; the others of a namespace are summed.
    """
    in_cluster = label("cluster", cluster)
    broker = _Sums()
    namespaces: dict[str, _Sums] = {}
    for number, topic in enumerate(surveyed):
        if number % _YIELD == _YIELD - 1:
            time.sleep(0)
        name, namespace = str(topic.name), topic.name.namespace_name
        copy = copies.get(name) or TopicCopy()
        broker.add(topic, copy)
        if by_topic and shown.admit(name, len(topic.subscriptions)):
            sums = _Sums()
            sums.add(topic, copy)
            within = f"{in_cluster},{label('namespace', namespace)},{label('topic', name)}"
            sums.write(page, within)
            for stats in topic.subscriptions:
                of_one = f"{within},{label('subscription', stats.name)}"
                for metric, value in _of_subscription(topic, stats, copy).items():
                    page.add(metric, of_one, value)
        else:
            sums = namespaces.setdefault(shown.namespace(namespace), _Sums())
            sums.add(topic, copy)
            sums.add_subscriptions(topic, copy)
    of_others, of_subscriptions = ("", "")
    if by_topic:
        of_others, of_subscriptions = f",{label('topic', OTHERS)}", f",{label('subscription', OTHERS)}"
    for namespace, sums in namespaces.items():
        sums.write(page, f"{in_cluster},{label('namespace', namespace)}{of_others}", of_subscriptions)
    for name in _OF_BROKER:
        page.add(f"pulsar_broker_{name}", in_cluster, broker.values.get(f"pulsar_{name}", 0))
    received, sent = Figures(), Dispatched()
    for copy in copies.values():
        received.add(copy.received)
        for each in copy.subscriptions.values():
            sent.add(each.sent)
    page.add("duelog_broker_duplicates_total", in_cluster, received.duplicates)
    page.add("duelog_broker_redelivered_total", in_cluster, sent.redelivered)
    page.add("duelog_broker_acknowledged_total", in_cluster, sent.acked)


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
        self._store_metrics: engine.StoreMetrics | None = None
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
