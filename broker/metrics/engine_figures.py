"""The engine's metrics, counted for one store without an SDK: instruments that add up, and gauges that are read.

Series of a topic are by topic or, where there are to be none, by namespace; histograms are by namespace.
"""

import threading
import weakref
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from opentelemetry.metrics import Counter, Histogram

from ... import metrics as engine
from .metric_names import label_name, labels_of, prometheus_name
from .text_format import Page, Shown, label

Values = tuple[str, ...]
"""Values of a metric's labels, but for the cluster."""

_TOPIC, _NAMESPACE = "pulsar.topic", "pulsar.namespace"


class _Tally(Counter):
    """A sum by labels."""

    def __init__(self, spec: engine.Spec, attributes: Values) -> None:
        self._attributes = attributes
        self.series: dict[Values, float] = {}
        self._lock = threading.Lock()

    def add(self, amount: float, attributes: Any = None, context: Any = None) -> None:
        key = tuple(attributes[each] for each in self._attributes)
        with self._lock:
            self.series[key] = self.series.get(key, 0) + amount


class _Buckets(Histogram):
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
