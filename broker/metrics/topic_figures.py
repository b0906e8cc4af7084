"""Figures of topics and subscriptions, under Pulsar's names: the broker's part of them beside the engine's.

The broker's part belongs to the loop's thread and is copied there, some topics at a time; the engine's part and the
text are made by a worker. Without series by topic, and for more topics than a page may have series of, the same
figures are added up by namespace.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from ...metrics import DELIVERED, delivered
from ...stats import SubscriptionStats, TopicSurvey
from ..consume.consumers import Consumers
from ..consume.pump import INDIVIDUAL, Dispatched
from ..produce.producers import Producers
from ..produce.sends import Figures
from .latencies import Durations, PublishDurations
from .metric_names import WRITE_BUCKETS
from .rates import READERS, InRate, OutRate, Rates
from .text_format import OTHERS, Page, Shown, label

T = TypeVar("T")

_SLICE = 200
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
        if number % _SLICE == _SLICE - 1:
            await asyncio.sleep(0)
        yield item


_OLDEST = "duelog_subscription_unacknowledged_age_seconds"
_DELIVERED = {name: f"{name.replace('.', '_')}_total" for name in DELIVERED}


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
        **{_DELIVERED[name]: value for name, value in delivered(stats).items()},
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
