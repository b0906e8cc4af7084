"""The metrics of PIP-442: what a limiter of topic lists uses, may use, and how long was waited for it.

prometheus_client's Summary has no quantiles, so the summaries are put together here.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from .limiter import DualMemoryLimiter, MemoryLimiter

BROKER_PREFIX = "pulsar_broker_topic_list_"
PROXY_PREFIX = "pulsar_proxy_topic_list_"


def collect(prefix: str, cluster: str, limiter: DualMemoryLimiter) -> Iterator[Metric]:
    """Twelve metrics, 26 series, named with `prefix`."""
    for kind, text, found in (
        ("heap", "topic lists being made", limiter.heap),
        ("direct", "frames with topic lists being written", limiter.direct),
    ):
        yield from _of_kind(f"{prefix}{kind}", text, cluster, found, limiter.created)


def _of_kind(prefix: str, text: str, cluster: str, limiter: MemoryLimiter, created: float) -> Iterator[Metric]:
    gauges = {
        "memory_used_bytes": (f"Memory in use for {text}, bytes", limiter.acquired),
        "memory_limit_bytes": (f"Memory that may be used for {text}, bytes; 0: any", limiter.max_permits),
        "queue_size": (f"Requests that wait for memory for {text}", limiter.queue_size),
        "queue_max_size": (f"Requests that may wait for memory for {text}; 0: any number", limiter.max_queue),
    }
    for name, (documentation, value) in gauges.items():
        gauge = GaugeMetricFamily(f"{prefix}_{name}", documentation, labels=["cluster"])
        gauge.add_metric([cluster], value)
        yield gauge
    name, labels = f"{prefix}_wait_time_ms", {"cluster": cluster}
    summary = Metric(name, f"Milliseconds that was waited for memory for {text}", "summary")
    for quantile, waited in limiter.waits.quantiles().items():
        summary.add_sample(name, {**labels, "quantile": str(quantile)}, waited)
    summary.add_sample(f"{name}_count", labels, limiter.waits.count)
    summary.add_sample(f"{name}_sum", labels, limiter.waits.sum_ms)
    summary.add_sample(f"{name}_created", labels, created)
    yield summary
    counter = CounterMetricFamily(
        f"{prefix}_timeout", f"Requests that got no memory in time for {text}", labels=["cluster"]
    )
    counter.add_metric([cluster], limiter.timeouts, created=created)
    yield counter
