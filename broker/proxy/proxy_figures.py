"""What a proxy counts, and its metrics under the names of Pulsar's proxy."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..cluster.forwarding import LookupGate


class ProxyFigures:
    """Of the event loop's thread."""

    def __init__(self) -> None:
        self.new = 0
        """Connections that came."""
        self.spliced = 0
        """Connections that go through to a broker now."""
        self.pieces = self.bytes = 0
        """Of spliced connections, both ways."""

    def passed(self, size: int) -> None:
        """Count what was passed on."""
        self.pieces += 1
        self.bytes += size

    def collect(self, cluster: str, active: int, rejected: int, gate: LookupGate) -> Iterator[Metric]:
        """active, rejected: connections of clients that are there, and that were not let in."""
        gauges = {
            "pulsar_proxy_active_connections": ("Connections of clients", active),
            "pulsar_proxy_spliced_connections": ("Connections that go through to a broker", self.spliced),
        }
        counters = {
            "pulsar_proxy_new_connections": ("Connections that came", self.new),
            "pulsar_proxy_rejected_connections": ("Connections that were not let in", rejected),
            "pulsar_proxy_requests": (
                "Lookups, metadata, schemas and lists that brokers were asked for",
                gate.asked,
            ),
            "pulsar_proxy_failed_requests": ("Of these, those that got no answer of a broker", gate.failed),
            "pulsar_proxy_binary_ops": ("Pieces that were passed on between clients and brokers", self.pieces),
            "pulsar_proxy_binary_bytes": ("Bytes that were passed on between clients and brokers", self.bytes),
        }
        for name, (documentation, value) in gauges.items():
            gauge = GaugeMetricFamily(name, documentation, labels=["cluster"])
            gauge.add_metric([cluster], value)
            yield gauge
        for name, (documentation, value) in counters.items():
            counter = CounterMetricFamily(name, documentation, labels=["cluster"])
            counter.add_metric([cluster], value)
            yield counter
