"""Metrics: instruments of opentelemetry-api, and what feeds them.

`SPECS` is the list of them, and docs/metrics.md says the same to people. The instruments are made once a process, for
all stores that it opens, on the meter provider in force; without an SDK they do nothing, and what would cost anything
for each message is left out. Counters and histograms are fed by the batch, from hooks of the engine. Gauges are read
at collection: one survey of a store for all of them.

Stores open read-only report nothing: the process that writes does.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Counter, Histogram, Meter, Observation

from duelog.markers.firing.firing import Firing
from duelog.partitions.partition_set import Storage
from duelog.partitions.timespan import directory_name
from duelog.store.clock import StoreClock
from duelog.store.codec.run import Int64s
from duelog.store.errors import DuelogError
from duelog.store.listener import StoreListener
from duelog.store.names import TopicName

from .opening import OpenState
from .stats import Figures, SubscriptionStats, TopicSurvey
from .topics.topic_list import Topics

_TOPIC = ("pulsar.cluster", "pulsar.namespace", "pulsar.topic")
_SUBSCRIPTION = (*_TOPIC, "pulsar.subscription")
_STORE = ("duelog.store",)


class Spec(NamedTuple):
    """An instrument: kind is "counter", "histogram" or "gauge" (observed at collection)."""

    name: str
    kind: str
    unit: str
    attributes: tuple[str, ...]
    description: str


REJECTED = "pulsar.broker.topic.messages.delayed.rejected"
OVERRIDDEN = "pulsar.broker.topic.messages.fixed.delay.overridden"
FIRED = "duelog.messages.fired"
LATENESS = "duelog.messages.lateness"
CANCELLED = "duelog.messages.cancelled"
RESCHEDULED = "duelog.messages.rescheduled"
SENT = "duelog.messages.sent"
RECEIVED = "duelog.messages.received"
REDELIVERED = "duelog.messages.redelivered"
ACKNOWLEDGED = "duelog.messages.acknowledged"
DEAD_LETTERED = "duelog.messages.dead_lettered"
EXPIRED = "duelog.messages.expired"
DELAYED = "duelog.subscription.delayed"
BACKLOG = "duelog.subscription.backlog"
OLDEST = "duelog.subscription.unacknowledged.age"
RUNNING = "duelog.subscription.running.time"
PENDING = "duelog.topic.pending"
INDEX = "duelog.topic.index.size"
PARTITIONS = "duelog.partitions"
PARTITION_SIZE = "duelog.partition.size"
PARTITIONS_DELETED = "duelog.partitions.deleted"
LEDGERS_TRIMMED = "duelog.ledgers.trimmed"
ENTRIES_TRIMMED = "duelog.entries.trimmed"
CORRUPT = "duelog.entries.corrupt"
SNAPSHOTS = "duelog.snapshots"
SNAPSHOT_SIZE = "duelog.snapshot.size"
SNAPSHOT_DURATION = "duelog.snapshot.duration"
SUSPENDED = "duelog.suspended"
SUSPENDED_TIME = "duelog.suspended.time"
FIRING_LAG = "duelog.firing.lag"
COMMIT_DURATION = "duelog.commit.duration"
COMMIT_ENTRIES = "duelog.commit.entries"
COMMIT_REQUESTS = "duelog.commit.requests"
REPLICA_LAG = "duelog.replica.lag"
REPLICA_LAG_SIZE = "duelog.replica.lag.size"
REPLICA_LAG_GROUPS = "duelog.replica.lag.groups"
REPLICA_PUTS = "duelog.replica.puts"
REPLICA_PUT_DURATION = "duelog.replica.put.duration"
REPLICA_FAILURES = "duelog.replica.failures"
REPLICA_MANIFEST_AGE = "duelog.replica.manifest.age"
REPLICA_EPOCH = "duelog.replica.epoch"
REPLICA_ROLE = "duelog.replica.role"
REPLICA_AWAY = "duelog.replica.away.size"
REPLICA_DIVERGED = "duelog.replica.diverged"

DELIVERED = (RECEIVED, REDELIVERED, ACKNOWLEDGED, DEAD_LETTERED, EXPIRED)
"""Counters of a subscription, each a field of its statistics of the name's last word."""

OF_TOPICS = (SENT, *DELIVERED, DELAYED, BACKLOG, OLDEST, RUNNING, PENDING, INDEX)
"""Gauges, and counters read as gauges are, that a survey of the topics gives; one of the partitions has the others."""

OBSERVED = frozenset((SENT, *DELIVERED, REPLICA_PUTS, REPLICA_PUT_DURATION, REPLICA_FAILURES))
"""Counters that are read at collection: counting costs no call of an instrument."""

OF_REPLICA = (
    REPLICA_LAG, REPLICA_LAG_SIZE, REPLICA_LAG_GROUPS, REPLICA_PUTS, REPLICA_PUT_DURATION, REPLICA_FAILURES,
    REPLICA_MANIFEST_AGE, REPLICA_EPOCH, REPLICA_ROLE, REPLICA_AWAY, REPLICA_DIVERGED,
)  # fmt: skip
"""Gauges of a store that has a copy; others report none of them."""

_ENVIRONMENT = (*_STORE, "duelog.environment")

SPECS = (
    Spec(REJECTED, "counter", "{message}", _TOPIC, "Messages refused for a delay over the maximum (PIP-437)"),
    Spec(OVERRIDDEN, "counter", "{message}", _TOPIC, "Messages whose own delay a fixed one replaced (PIP-437)"),
    Spec(FIRED, "counter", "{message}", _TOPIC, "Messages fired, or seen due in the main log"),
    Spec(LATENESS, "histogram", "s", _TOPIC, "Time of firing less due time; 0 of what was written a moment early"),
    Spec(CANCELLED, "counter", "{message}", _TOPIC, "Messages cancelled"),
    Spec(RESCHEDULED, "counter", "{message}", _TOPIC, "Messages given another due time"),
    Spec(SENT, "counter", "{message}", _TOPIC, "Messages sent to the topic, and durable"),
    Spec(RECEIVED, "counter", "{message}", _SUBSCRIPTION, "Messages handed to consumers, each time again"),
    Spec(REDELIVERED, "counter", "{message}", _SUBSCRIPTION, "Messages handed out that had been handed out before"),
    Spec(ACKNOWLEDGED, "counter", "{message}", _SUBSCRIPTION, "Messages acknowledged by consumers, or skipped"),
    Spec(DEAD_LETTERED, "counter", "{message}", _SUBSCRIPTION, "Messages moved to the dead-letter topic"),
    Spec(EXPIRED, "counter", "{message}", _SUBSCRIPTION, "Messages acknowledged by time to live"),
    Spec(DELAYED, "gauge", "{message}", _SUBSCRIPTION, "Messages of the subscription not due yet"),
    Spec(BACKLOG, "gauge", "{message}", _SUBSCRIPTION, "Messages fired and not acknowledged"),
    Spec(OLDEST, "gauge", "s", _SUBSCRIPTION, "How long the oldest message of the backlog has been due; 0: none is"),
    Spec(RUNNING, "gauge", "s", _SUBSCRIPTION, "How long the longest running handler of workers has run; 0: none does"),
    Spec(PENDING, "gauge", "{message}", _TOPIC, "Messages of the topic not due yet, wherever they wait"),
    Spec(INDEX, "gauge", "By", _TOPIC, "Memory of the topic's delay indexes, estimated"),
    Spec(PARTITIONS, "gauge", "{partition}", (*_STORE, "duelog.partition.state"), "Time partitions by state"),
    Spec(PARTITION_SIZE, "gauge", "By", (*_STORE, "duelog.partition"), "Disk space of a time partition, by its start"),
    Spec(PARTITIONS_DELETED, "counter", "{partition}", _STORE, "Time partitions deleted"),
    Spec(LEDGERS_TRIMMED, "counter", "{ledger}", _STORE, "Ledgers of main logs trimmed"),
    Spec(ENTRIES_TRIMMED, "counter", "{entry}", _STORE, "Entries of main logs trimmed with them"),
    Spec(CORRUPT, "counter", "{entry}", _STORE, "Entries quarantined because they cannot be read"),
    Spec(SNAPSHOTS, "counter", "{snapshot}", _STORE, "Snapshots of delay indexes written"),
    Spec(SNAPSHOT_SIZE, "histogram", "By", _STORE, "Size of a snapshot"),
    Spec(SNAPSHOT_DURATION, "histogram", "s", _STORE, "Work on a snapshot since the one before it was written"),
    Spec(SUSPENDED, "gauge", "{part}", (*_STORE, "duelog.task"), "Parts of the upkeep that failed and are suspended"),
    Spec(SUSPENDED_TIME, "gauge", "s", (*_STORE, "duelog.task"), "How long the longest of them has been suspended"),
    Spec(FIRING_LAG, "gauge", "s", _STORE, "How long the message that is due first has been due; 0: none is"),
    Spec(COMMIT_DURATION, "histogram", "s", _ENVIRONMENT, "Time of a group commit, its work included"),
    Spec(COMMIT_ENTRIES, "histogram", "{entry}", _ENVIRONMENT, "Entries (messages, markers) of a commit that has any"),
    Spec(COMMIT_REQUESTS, "histogram", "{request}", _ENVIRONMENT, "Callers of a group commit"),
    Spec(REPLICA_LAG, "gauge", "s", _STORE, "How long the oldest change not in the copy has waited; 0: none has"),
    Spec(REPLICA_LAG_SIZE, "gauge", "By", _STORE, "Changes that are not in the copy"),
    Spec(REPLICA_LAG_GROUPS, "gauge", "{group}", _STORE, "Groups of the log that are not in the copy"),
    Spec(REPLICA_PUTS, "counter", "{object}", _STORE, "Log objects put into the copy"),
    Spec(REPLICA_PUT_DURATION, "counter", "s", _STORE, "Time that putting them has taken, to divide by their number"),
    Spec(REPLICA_FAILURES, "counter", "{failure}", _STORE, "Tries to ship that failed, answers that were lost"),
    Spec(REPLICA_MANIFEST_AGE, "gauge", "s", _STORE, "Time since the newest manifest of the copy was taken"),
    Spec(REPLICA_EPOCH, "gauge", "{epoch}", _STORE, "Epoch in which this store leads: one more with each takeover"),
    Spec(REPLICA_ROLE, "gauge", "1", _STORE, "1: this store leads; 0: it refuses work, since another may lead"),
    Spec(REPLICA_AWAY, "gauge", "By", _STORE, "Time partitions that are in the copy alone (max_local_bytes)"),
    Spec(REPLICA_DIVERGED, "gauge", "{tail}", _STORE, "Tails that were set aside here as another led, and are there"),
)  # fmt: skip


def delivered(stats: SubscriptionStats) -> dict[str, int]:
    """The counters of a subscription."""
    return {name: getattr(stats, name.rpartition(".")[2]) for name in DELIVERED}


_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0, 600.0, 3600.0)
_BYTES = tuple(float(1 << bits) for bits in range(10, 33, 2))
COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0, 10_000.0, 50_000.0)
BOUNDARIES = {"s": _SECONDS, "By": _BYTES}
"""Bucket boundaries of a histogram, by its unit: an SDK's own are for milliseconds."""

Attributes = dict[str, str]
"""Attributes of a measurement. Each set of values is one object as long as its store is open."""


class Instruments:
    """The instruments of `SPECS` on one meter. Gauges report the stores that are registered and not gone."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.stores: weakref.WeakSet[StoreMetrics] = weakref.WeakSet()
        self.counters: dict[str, Counter] = {}
        self.histograms: dict[str, Histogram] = {}
        for spec in SPECS:
            if spec.name in OBSERVED:
                meter.create_observable_counter(spec.name, [self._callback(spec.name)], spec.unit, spec.description)
            elif spec.kind == "counter":
                self.counters[spec.name] = meter.create_counter(spec.name, spec.unit, spec.description)
            elif spec.kind == "histogram":
                self.histograms[spec.name] = meter.create_histogram(
                    spec.name,
                    spec.unit,
                    spec.description,
                    explicit_bucket_boundaries_advisory=BOUNDARIES.get(spec.unit, COUNTS),
                )
            else:
                meter.create_observable_gauge(spec.name, [self._callback(spec.name)], spec.unit, spec.description)

    def record_all(self, name: str, values: npt.NDArray[np.float64], attributes: Attributes) -> None:
        record = self.histograms[name].record
        for value in values.tolist():
            record(value, attributes)

    @property
    def listening(self) -> bool:
        """True when an SDK is in force: the meter, or the provider behind it, is not the API's own."""
        api = "opentelemetry.metrics"
        if not type(self._meter).__module__.startswith(api):
            return True
        return not type(metrics.get_meter_provider()).__module__.startswith(api)

    def _callback(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [observation for store in list(self.stores) for observation in store.observe(name)]

        return observe


class _Shared:
    lock = threading.Lock()
    instruments: Instruments | None = None


def instruments() -> Instruments:
    """The process's instruments, made at first use on the global meter provider (which may be set later)."""
    with _Shared.lock:
        if _Shared.instruments is None:
            _Shared.instruments = Instruments(metrics.get_meter("duelog"))
        return _Shared.instruments


@dataclass(eq=False, repr=False)
class StoreMetrics(StoreListener):
    """Reports of one store: counters and histograms at each event, gauges at collection. `close` ends them.

    Appended to the listeners of the store when all its parts are there. Gauges report nothing once `_state` is closed,
    and in a child process.
    """

    _storage: Storage
    _state: OpenState
    _topics: Topics
    _firing: Firing
    _clock: StoreClock
    _figures: Figures
    _shared: Instruments

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._survey: dict[str, list[Observation]] = {}
        self._store: Attributes = {"duelog.store": str(self._storage.path)}
        self._environments = {
            kind: {**self._store, "duelog.environment": kind} for kind in ("main", "partition", "wal")
        }
        self._labels: dict[TopicName, Attributes] = {}
        self._shared.stores.add(self)

    def close(self) -> None:
        self._shared.stores.discard(self)
        if self in self._storage.listeners:
            self._storage.listeners.remove(self)

    def report_to(self, instruments: Instruments) -> Self:
        """Have the store report to other instruments as well, until the returned object is closed."""
        also = replace(self, _shared=instruments)
        self._storage.listeners.append(also)
        return also

    def survey(self) -> Iterator[TopicSurvey]:
        if not self._state.closed:
            yield from self._figures.survey()

    # -- events --------------------------------------------------------------------------------------

    def committed(self, environment: str, elapsed_ns: int, requests: int, entries: int) -> None:
        """Every partition counts as one kind of environment."""
        attributes = self._environments.get(environment) or self._environments["partition"]
        histograms = self._shared.histograms
        histograms[COMMIT_DURATION].record(elapsed_ns / 1e9, attributes)
        histograms[COMMIT_REQUESTS].record(requests, attributes)
        if entries:
            histograms[COMMIT_ENTRIES].record(entries, attributes)

    def fired(self, topic_id: int, dues: Int64s, now_ms: int) -> None:
        """Lateness is a figure of each message, so it is left out where no SDK is in force."""
        topic = self._topics.by_id(topic_id) if self._shared.listening else None
        if topic is None:
            return
        attributes = self._of(topic.name)
        self._shared.counters[FIRED].add(len(dues), attributes)
        late_ms = np.maximum(now_ms - dues, 0)  # some are written ahead of their time
        self._shared.record_all(LATENESS, late_ms / 1000, attributes)

    def cancelled(self, topic: TopicName, count: int) -> None:
        self._add(CANCELLED, topic, count)

    def rescheduled(self, topic: TopicName, count: int) -> None:
        self._add(RESCHEDULED, topic, count)

    def rejected(self, topic: TopicName, count: int) -> None:
        self._add(REJECTED, topic, count)

    def overridden(self, topic: TopicName, count: int) -> None:
        self._add(OVERRIDDEN, topic, count)

    def snapshot_written(self, stored_bytes: int, elapsed_ns: int) -> None:
        self._shared.counters[SNAPSHOTS].add(1, self._store)
        self._shared.histograms[SNAPSHOT_SIZE].record(stored_bytes, self._store)
        self._shared.histograms[SNAPSHOT_DURATION].record(elapsed_ns / 1e9, self._store)

    def ledger_trimmed(self, entries: int) -> None:
        self._shared.counters[LEDGERS_TRIMMED].add(1, self._store)
        self._shared.counters[ENTRIES_TRIMMED].add(entries, self._store)

    def partition_deleted(self, start_ms: int) -> None:
        self._shared.counters[PARTITIONS_DELETED].add(1, self._store)

    def quarantined(self) -> None:
        self._shared.counters[CORRUPT].add(1, self._store)

    def _add(self, name: str, topic: TopicName, count: int) -> None:
        if count:
            self._shared.counters[name].add(count, self._of(topic))

    def _of(self, topic: TopicName) -> Attributes:
        labels = self._labels.get(topic)
        if labels is None:
            labels = self._labels[topic] = {
                "pulsar.cluster": self._storage.config.cluster,
                "pulsar.namespace": topic.namespace_name,
                "pulsar.topic": str(topic),
            }
        return labels

    # -- read by gauges ------------------------------------------------------------------------------

    def observe(self, name: str) -> list[Observation]:
        """Return the present values of a gauge. Reading the same gauge again surveys the store again."""
        if name in (SUSPENDED, SUSPENDED_TIME):  # also where the store cannot be surveyed
            return self._suspended(name)
        if name in OF_REPLICA:
            return self._replica(name)
        with self._lock:
            if name not in self._survey:
                try:
                    self._state.check()
                    self._survey |= self._look() if name in OF_TOPICS else self._look_at_partitions()
                except DuelogError:  # closed meanwhile, or in a child process: there is nothing to report
                    return []
            return self._survey.pop(name)

    def _suspended(self, name: str) -> list[Observation]:
        now_ms = self._clock.now_ms()
        times: dict[str, list[float]] = {}
        for suspension in self._firing.suspensions.all():
            times.setdefault(suspension.task, []).append(max(now_ms - suspension.since_ms, 0) / 1000)
        return [
            Observation(len(values) if name == SUSPENDED else max(values), {**self._store, "duelog.task": task})
            for task, values in times.items()
        ]

    def _replica(self, name: str) -> list[Observation]:
        found = None if self._state.closed else self._figures.replica()
        if found is None:
            return []
        values: dict[str, float] = {
            REPLICA_LAG: found.lag_ms / 1000,
            REPLICA_LAG_SIZE: found.lag_bytes,
            REPLICA_LAG_GROUPS: found.lag_groups,
            REPLICA_PUTS: found.puts,
            REPLICA_PUT_DURATION: found.put_seconds,
            REPLICA_FAILURES: found.failures,
            REPLICA_EPOCH: found.epoch,
            REPLICA_ROLE: found.leads,
            REPLICA_AWAY: self._figures.away_bytes(),
            REPLICA_DIVERGED: found.diverged,
        }
        if found.manifest_age_ms is not None:
            values[REPLICA_MANIFEST_AGE] = found.manifest_age_ms / 1000
        return [Observation(values[name], self._store)] if name in values else []

    def _look(self) -> dict[str, list[Observation]]:
        observations: dict[str, list[Observation]] = {name: [] for name in OF_TOPICS}
        for topic in self._figures.survey():
            attributes = self._of(topic.name)
            observations[INDEX].append(Observation(topic.index_bytes, attributes))
            observations[PENDING].append(Observation(topic.pending, attributes))
            observations[SENT].append(Observation(topic.sent, attributes))
            for stats in topic.subscriptions:
                named = {**attributes, "pulsar.subscription": stats.name}
                observations[DELAYED].append(Observation(topic.in_partitions + stats.inline, named))
                observations[BACKLOG].append(Observation(stats.backlog, named))
                observations[OLDEST].append(Observation(stats.oldest_unacknowledged_ms / 1000, named))
                if stats.longest_running_ms is not None:
                    observations[RUNNING].append(Observation(stats.longest_running_ms / 1000, named))
                for name, value in delivered(stats).items():
                    observations[name].append(Observation(value, named))
        return observations

    def _look_at_partitions(self) -> dict[str, list[Observation]]:
        observations = {FIRING_LAG: [Observation(self._figures.firing_lag_ms() / 1000, self._store)]}
        states = dict.fromkeys(("future", "current", "closed"), 0)
        observations[PARTITION_SIZE] = []
        for partition in self._figures.of_partitions():
            states[partition.state] = states.get(partition.state, 0) + 1
            labels = {**self._store, "duelog.partition": directory_name(partition.start_ms)}
            observations[PARTITION_SIZE].append(Observation(partition.disk_bytes, labels))
        observations[PARTITIONS] = [
            Observation(count, {**self._store, "duelog.partition.state": state}) for state, count in states.items()
        ]
        return observations


def serve_prometheus(port: int = 9464, address: str = "127.0.0.1") -> None:
    """Have the process's metrics scraped by Prometheus on `http://address:port/metrics`; once a process.

    Sets OpenTelemetry's global meter provider, so it is for programs that have none. Needs
    `pip install 'duelog[prometheus]'`; raises ImportError without it, OSError where the port is taken.
    """
    from opentelemetry.exporter.prometheus import PrometheusMetricReader  # noqa: PLC0415 - an extra
    from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415
    from prometheus_client import start_http_server  # noqa: PLC0415

    start_http_server(port, address)
    metrics.set_meter_provider(MeterProvider(metric_readers=[PrometheusMetricReader()]))
