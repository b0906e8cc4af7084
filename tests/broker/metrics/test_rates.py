"""Rates, from producers and consumers of fake connections on a loop whose time the test moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock
from duelog.broker.metrics import rates as rates_module
from duelog.broker.metrics.rates import InRate, OutRate, Rates
from duelog.broker.protocol.commands import CloseConsumer, CloseProducer, SubscriptionType
from tests.broker.consume.consuming import Consuming, ids
from tests.broker.peers import FakePeer, idle, soon
from tests.broker.produce.producing import Producing, blob_of
from tests.conftest import START_MS


class Both:
    """Producers and consumers of one topic, and their rates."""

    def __init__(self, path: Path) -> None:
        self.clock = ManualClock(START_MS)
        self.store = DelayedStore.open(path, clock=self.clock)
        self.producing = Producing(self.store)
        self.consuming = Consuming(self.store, self.clock)
        self.topic = self.producing.topic.name
        self.loop = self.consuming.bench.loop
        self.rates = Rates(self.producing.producers, self.consuming.consumers, self.loop, 10.0)
        self.producer, self.consumer = FakePeer(), FakePeer()


async def test_rates_are_of_the_last_period_and_counts_since_the_start(tmp_path: Path) -> None:
    """Messages of a batch count one by one; who is closed counts on."""
    both = Both(tmp_path / "store")
    rates, topic, peer = both.rates, both.topic, both.producer
    rates.start()
    await both.producing.opened(peer)
    kind = SubscriptionType.SHARED
    consumer_id = await both.consuming.subscribe(both.consumer, kind, permits=100)
    for number in range(5):
        both.producing.put(peer, number, num_messages_in_batch=4)
    await both.producing.stored()
    await idle()
    assert len(ids(both.consumer)) == 5
    await both.consuming.ack(both.consumer, consumer_id, *ids(both.consumer)[:3])
    assert rates.published(topic) == InRate()
    both.loop.advance(10.0)
    size = sum(len(bytes(blob_of(str(each), each, num_messages_in_batch=4))) for each in range(5))
    (producer,) = both.producing.producers.of_topic(topic)
    (consumer,) = both.consuming.consumers.of_topic(topic)["s"]
    assert rates.published(topic) == rates.of_producer(producer) == InRate(2.0, producer.figures.bytes / 10, 0.5)
    out = OutRate(2.0, size / 10, 0.0, 0.3)
    assert rates.dispatched(topic) == rates.of_subscription(topic, "s") == rates.of_consumer(consumer) == out
    await soon(both.consuming.consumers.close(both.consumer, CloseConsumer(consumer_id, 9)))
    both.producing.producers.close(peer, CloseProducer(1, 9))
    both.loop.advance(10.0)
    assert (rates.published(topic), rates.dispatched(topic)) == (InRate(), OutRate())
    assert rates.received(topic).messages == rates.sent(topic)["s"].messages == 20
    assert (rates.received(topic).entries, rates.sent(topic)["s"].acked) == (5, 3)
    rates.stop()
    assert not both.loop.timers or all(each.cancelled for each in both.loop.timers)
    rates.forget_topic(topic)
    rates.sample()
    assert (rates.received(topic).messages, rates.sent(topic)) == (0, {})
    both.store.close()


async def test_what_readers_were_sent_counts_for_the_topic_and_leaves_no_name_behind(tmp_path: Path) -> None:
    """Each reader has a name of its own: kept, they would be without bound."""
    both = Both(tmp_path / "store")
    both.consuming.send("a", "b")
    for number in range(3):
        reader = await both.consuming.subscribe(both.consumer, name=f"reader-{number}", permits=9, durable=False)
        await idle()
        await soon(both.consuming.consumers.close(both.consumer, CloseConsumer(reader, 9)))
    assert {name: each.messages for name, each in both.rates.sent(both.topic).items()} == {"": 6}
    both.loop.now += 2.0
    both.rates.sample()
    assert both.rates.dispatched(both.topic).messages == 3.0
    both.store.close()


async def test_the_loop_goes_on_while_many_topics_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slice in one turn, and the next period begins when it would have."""
    monkeypatch.setattr(rates_module, "_SLICE", 2)

    both = Both(tmp_path / "store")
    for number in range(5):
        await both.producing.opened(both.producer, number, f"p{number}", topic=f"persistent://public/default/t{number}")
    both.rates.start()
    both.producing.put(both.producer, 0, producer_id=4)
    both.loop.advance(10.0)
    assert both.rates.published("persistent://public/default/t4") == InRate()
    turns = 0
    while both.rates.published("persistent://public/default/t4") == InRate():
        both.loop.advance(0.0)
        turns += 1
    assert turns == 2
    assert [timer.at for timer in both.loop.timers if not timer.cancelled][-1] == 20.0
    both.store.close()
