"""Prometheus' text format: lines by metric, each name with its help and kind once.

Written here rather than by prometheus_client, whose objects for each sample take ten times as long: a broker of ten
thousand topics has hundreds of thousands of them.
"""

import time
from collections.abc import Iterable
from itertools import accumulate
from math import isfinite

from prometheus_client.core import Metric

from .latencies import BOUNDS_S, Durations
from .metric_names import BY_NAME

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def label(name: str, value: str) -> str:
    """Write a label and its value."""
    if "\\" in value or '"' in value or "\n" in value:
        value = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{name}="{value}"'


def labels(values: dict[str, str]) -> str:
    """Write labels as they stand between braces."""
    return ",".join(label(name, value) for name, value in values.items())


def number(value: float) -> str:
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
        self.lines(name).append(f"{name}{suffix}{{{within}}} {number(value)}\n")

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
