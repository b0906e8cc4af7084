"""Prometheus' text format: lines by metric, each name with its help and kind once.

Written here rather than by prometheus_client, whose objects for each sample take ten times as long: a broker of ten
thousand topics has hundreds of thousands of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from math import isfinite

from prometheus_client.core import Metric

from .latencies import Durations
from .metric_names import BY_NAME, Named

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def label(name: str, value: str) -> str:
    """A label and its value."""
    if "\\" in value or '"' in value or "\n" in value:
        value = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{name}="{value}"'


def labels(values: dict[str, str]) -> str:
    """Labels as they stand between braces."""
    return ",".join(label(name, value) for name, value in values.items())


def number(value: float) -> str:
    """A value."""
    if isinstance(value, int):
        return str(value)
    return repr(value) if isfinite(value) else {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}[repr(value)]


OTHERS = "others"
"""The topic, subscription or namespace of sums of all that have no series of their own; no name of one of them."""


class Shown:
    """Which topics and namespaces have series of their own, so that a page is bounded; first come, first shown."""

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
        """The value of a label: the name of a topic that was admitted, or OTHERS."""
        return name if not self._most or name in self._topics else OTHERS

    def namespace(self, name: str) -> str:
        """The value of a label."""
        if not self._most or len(self._namespaces) < self._most:
            self._namespaces.add(name)
        return name if name in self._namespaces else OTHERS


class Page:
    """What is written so far."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}

    def lines(self, name: str) -> list[str]:
        """The lines of a metric, to be added to. Raises KeyError for a name that is not in the list of names."""
        found = self._lines.get(name)
        if found is None:
            named = BY_NAME[name]
            found = self._lines[name] = [_head(named)]
        return found

    def add(self, name: str, within: str, value: float) -> None:
        """A sample; within: its labels."""
        self.lines(name).append(f"{name}{{{within}}} {number(value)}\n")

    def add_durations(self, name: str, within: str, durations: Durations) -> None:
        """A histogram of seconds."""
        lines = self.lines(name)
        lines.extend(f'{name}_bucket{{{within},le="{bound}"}} {count}\n' for bound, count in durations.cumulative())
        lines.append(f"{name}_count{{{within}}} {durations.count}\n{name}_sum{{{within}}} {number(durations.sum_s)}\n")

    def add_families(self, families: Iterable[Metric]) -> None:
        """Metrics of prometheus_client."""
        for family in families:
            if family.type == "unknown":
                continue
            name = f"{family.name}_total" if family.type == "counter" else family.name
            for sample in family.samples:
                # In this format what says since when a counter counts is a gauge of its own.
                own = sample.name if sample.name.endswith("_created") else name
                self.lines(own).append(f"{sample.name}{{{labels(sample.labels)}}} {number(sample.value)}\n")

    def encode(self) -> bytes:
        """The page. Other threads go on between its metrics."""
        found = []
        for lines in self._lines.values():
            found.append("".join(lines).encode())
            time.sleep(0)
        return b"".join(found)


def _head(named: Named) -> str:
    text = named.description.replace("\\", "\\\\").replace("\n", "\\n")
    return f"# HELP {named.name} {text}\n# TYPE {named.name} {named.kind}\n"
