"""The engine's metrics, counted for one store without an SDK: instruments that add up, and gauges that are read.

What has a topic is told by topic or, where there are to be no such series, by namespace; histograms by namespace.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from opentelemetry.metrics import Counter, Histogram

from ... import metrics as engine
from .metric_names import label_name, labels_of, prometheus_name
from .text_format import Page, Shown, label

Values = tuple[str, ...]
"""Of a metric's labels, but for the cluster."""

_TOPIC, _NAMESPACE = "pulsar.topic", "pulsar.namespace"


class _Tally(Counter):
    """A sum by labels."""

    def __init__(self, name: str, unit: str, description: str, attributes: Values) -> None:
        self.attributes = attributes
        self.sums: dict[Values, float] = {}
        self._lock = threading.Lock()

    def add(self, amount: float, attributes: Any = None, context: Any = None) -> None:
        """Add to the sum of these attributes."""
        key = tuple(attributes[each] for each in self.attributes)
        with self._lock:
            self.sums[key] = self.sums.get(key, 0) + amount


class _Buckets(Histogram):
    """Counts by bucket, and sums, by labels."""

    def __init__(self, name: str, unit: str, description: str, attributes: Values) -> None:
        self.instrument = name
        self.attributes = attributes
        self.bounds = engine.BOUNDARIES.get(unit, engine.COUNTS)
        self.found: dict[Values, tuple[npt.NDArray[np.int64], list[float]]] = {}
        """Counts, and the sum."""
        self._bounds = np.array(self.bounds)
        self._lock = threading.Lock()

    def record(self, amount: float, attributes: Any = None, context: Any = None) -> None:
        """Count one."""
        with self._lock:
            counts, total = self._of(attributes)
            counts[bisect_left(self.bounds, amount)] += 1
            total[0] += amount

    def record_all(self, values: npt.NDArray[np.float64], attributes: Mapping[str, str]) -> None:
        """Count many."""
        found = np.bincount(np.searchsorted(self._bounds, values), minlength=len(self.bounds) + 1)
        with self._lock:
            counts, total = self._of(attributes)
            counts += found
            total[0] += float(values.sum())

    def _of(self, attributes: Mapping[str, str]) -> tuple[npt.NDArray[np.int64], list[float]]:
        key = tuple(attributes[each] for each in self.attributes)
        found = self.found.get(key)
        if found is None:
            found = self.found[key] = (np.zeros(len(self.bounds) + 1, dtype=np.int64), [0.0])
        return found


class EngineFigures(engine.Instruments):
    """The instruments of one store. Thread-safe."""

    def __init__(self, cluster: str, *, by_topic: bool) -> None:
        self._cluster = label("cluster", cluster)
        self._by_topic = by_topic
        self.stores = weakref.WeakSet()
        self.counters = {}
        self.histograms = {}
        self._buckets: dict[str, _Buckets] = {}
        self._labels: dict[str, Values] = {}
        for spec in engine.SPECS:
            wanted = {each for each in labels_of(spec) if by_topic or each != "topic"}
            attributes = tuple(each for each in spec.attributes if label_name(each) in wanted - {"cluster"})
            self._labels[spec.name] = attributes
            made = (spec.name, spec.unit, spec.description, attributes)
            if spec.kind == "counter" and spec.name not in engine.OBSERVED:
                self.counters[spec.name] = _Tally(*made)
            elif spec.kind == "histogram":
                self.histograms[spec.name] = self._buckets[spec.name] = _Buckets(*made)

    @property
    def listening(self) -> bool:
        """They always are."""
        return True

    def record_all(self, name: str, values: npt.NDArray[np.float64], attributes: engine.Attributes) -> None:
        """Record many values in a histogram."""
        self._buckets[name].record_all(values, attributes)

    def forget_topic(self, topic: str) -> None:
        """The topic was deleted."""
        for counter in self.counters.values():
            if isinstance(counter, _Tally) and _TOPIC in counter.attributes:
                at = counter.attributes.index(_TOPIC)
                for key in [each for each in list(counter.sums) if each[at] == topic]:
                    counter.sums.pop(key, None)

    # -- the page ------------------------------------------------------------------------------------

    def write(self, page: Page, store: engine.StoreMetrics, shown: Shown) -> None:
        """Write all but what a survey of the topics gives. May wait for the disk."""
        for spec in engine.SPECS:
            if spec.name in engine.OF_TOPICS:
                continue
            name = prometheus_name(spec)
            lines = page.lines(name)
            if spec.kind == "histogram":
                self._write_histogram(name, lines, self._buckets[spec.name], shown)
                continue
            sums: dict[Values, float] = {}
            if spec.kind == "counter":
                counter = self.counters[spec.name]
                for own, value in list(counter.sums.items()) if isinstance(counter, _Tally) else ():
                    key = self._shown(spec.name, own, shown)
                    sums[key] = sums.get(key, 0) + value
                if not self._labels[spec.name]:
                    sums.setdefault((), 0)
            else:
                for each in store.observe(spec.name):
                    found = each.attributes or {}
                    own = tuple(str(found[attribute]) for attribute in self._labels[spec.name])
                    key = self._shown(spec.name, own, shown)
                    sums[key] = sums.get(key, 0) + each.value
            for key, value in sums.items():
                lines.append(f"{name}{{{self._within(spec.name, key)}}} {value!r}\n")

    def _shown(self, name: str, key: Values, shown: Shown) -> Values:
        """The key of the series that has the figures of a key."""
        values = dict(zip(self._labels[name], key, strict=True))
        if _TOPIC in values:
            values[_TOPIC] = shown.topic(values[_TOPIC])
        if _NAMESPACE in values:
            values[_NAMESPACE] = shown.namespace(values[_NAMESPACE])
        return tuple(values.values())

    def _within(self, name: str, key: Values) -> str:
        pairs = zip(self._labels[name], key, strict=True)
        return ",".join([self._cluster, *(label(label_name(attribute), value) for attribute, value in pairs)])

    def _write_histogram(self, name: str, lines: list[str], buckets: _Buckets, shown: Shown) -> None:
        found: dict[Values, tuple[npt.NDArray[np.int64], float]] = {}
        for own, (counts, total) in list(buckets.found.items()):
            key = self._shown(buckets.instrument, own, shown)
            before = found.get(key)
            found[key] = (counts, total[0]) if before is None else (before[0] + counts, before[1] + total[0])
        for key, (counts, seconds) in found.items():
            within = self._within(buckets.instrument, key)
            bounds = [*map(str, buckets.bounds), "+Inf"]
            lines.extend(
                f'{name}_bucket{{{within},le="{bound}"}} {count}\n'
                for bound, count in zip(bounds, accumulate(counts.tolist()), strict=True)
            )
            lines.append(f"{name}_count{{{within}}} {int(counts.sum())}\n{name}_sum{{{within}}} {seconds!r}\n")
