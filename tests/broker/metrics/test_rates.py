"""Rates, durations by bucket, quantiles and the loop's lateness, on a loop whose time the test moves."""

import random
from bisect import bisect_left
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from duelog import DelayedStore, ManualClock, Message
from duelog.broker.metrics import rates as rates_module
from duelog.broker.metrics.exposition import EngineFigures, Page, Shown, label, shown_number
from duelog.broker.metrics.rates import BOUNDS_S, Durations, InRate, LoopLag, OutRate, PublishDurations, Rates
from duelog.broker.protocol.commands import CloseConsumer, CloseProducer, SubscriptionType
from tests.broker.consume.consuming import Consuming, ids
from tests.broker.peers import Bench, FakePeer, idle, soon
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
    for at in range(5):
        both.producing.put(peer, at, num_messages_in_batch=4)
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
    for at in range(3):
        reader = await both.consuming.subscribe(both.consumer, name=f"reader-{at}", permits=9, durable=False)
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
    for at in range(5):
        await both.producing.opened(both.producer, at, f"p{at}", topic=f"persistent://public/default/t{at}")
    both.rates.start()
    both.producing.put(both.producer, 0, producer_id=4)
    both.loop.advance(10.0)
    assert both.rates.published("persistent://public/default/t4") == InRate()
    turns = 0
    while both.rates.published("persistent://public/default/t4") == InRate():
        both.loop.advance(0.0)
        turns += 1
    assert turns == 5  # ten places: each topic, and its producer
    assert [timer.at for timer in both.loop.timers if not timer.cancelled][-1] == 20.0
    both.store.close()


@pytest.mark.parametrize("seed", range(5))
def test_a_group_counts_as_its_members_one_by_one(seed: int) -> None:
    """In one bucket or over all of them, in any order, of seconds or of milliseconds."""
    rng = random.Random(seed)
    between = [sum(pair) / 2 for pair in pairwise((0.0, *BOUNDS_S, 7_200.0))]  # off the bounds: there a bit decides
    for unit_s in (1.0, 0.001):
        chosen = rng.sample(between, rng.choice([1, 2, len(between)]))
        now = 10_000.0 / unit_s
        began = [now - rng.choice(chosen) / unit_s for _ in range(rng.randrange(1, 300))]
        together, alone = Durations(), Durations()
        together.add_passed(now, began, unit_s)
        for each in began:
            alone.add((now - each) * unit_s)
        assert together.counts == alone.counts
        assert together.sum_s == pytest.approx(alone.sum_s)


def test_what_was_written_a_moment_early_was_not_late() -> None:
    """A due time after now is 0, and leaves the sum of the others."""
    durations = Durations()
    durations.add_passed(1_000.0, [1_005, 900], 0.001)
    assert durations.counts[0] == 1
    assert durations.sum_s == pytest.approx(0.1)


def test_quantiles_lie_in_the_bucket_where_they_are() -> None:
    """Without durations they are not a number."""
    durations = Durations()
    assert str(durations.quantile(0.5)) == "nan"
    values = sorted(random.Random(1).expovariate(50) for _ in range(1_000))
    for each in values:
        durations.add(each)
    for share in (0.0, 0.5, 0.95, 0.999, 1.0):
        exact = values[min(int(share * 1_000), 999)]
        at = bisect_left(BOUNDS_S, exact)
        assert BOUNDS_S[max(at - 2, 0)] <= durations.quantile(share) <= BOUNDS_S[at + 1]
    assert sum(durations.write_buckets()) == 1_000
    assert durations.write_buckets()[:3] == [
        sum(each <= 0.0005 for each in values),
        sum(0.0005 < each <= 0.001 for each in values),
        sum(0.001 < each <= 0.005 for each in values),
    ]


def test_a_period_s_durations_are_kept_until_the_next_is_over() -> None:
    """By topic; of a topic that nothing was sent to, nothing is kept."""
    published = PublishDurations()
    published.add("a", 1.0, [0.5, 0.6])
    assert (published.last, published.total.count) == ({}, 2)
    published.turn()
    assert (published.last["a"].count, published.before.count) == (2, 2)
    published.add("b", 1.0, [0.5])
    published.turn()
    assert (set(published.last), published.before.count, published.total.count) == ({"b"}, 1, 3)


def test_what_is_noted_is_counted_before_it_is_too_much() -> None:
    """Nothing asks for it, and the notes are bounded."""
    published = PublishDurations()
    for _ in range(1_005):
        published.add("a", 3.0, [2.0, 2.9995])
    assert sum(map(len, published._noted.values())) < 1_000
    found = published.total
    assert (found.count, found.write_buckets()[0], found.write_buckets()[8]) == (2_010, 0, 1_005)
    assert found.sum_s == pytest.approx(1_005 * 1.0005)


async def test_the_lateness_of_the_loop_is_what_passes_beyond_a_timer() -> None:
    """The longest is kept for a period and the one after."""
    loop = Bench().loop
    lag = LoopLag(loop)
    lag.start()
    loop.advance(0.25)
    loop.advance(0.75)
    assert lag.durations.count == 2
    assert (lag.longest_s, lag.durations.sum_s) == (0.5, 0.5)
    lag.turn()
    assert lag.longest_s == 0.5
    lag.turn()
    assert lag.longest_s == 0.0
    lag.stop()
    loop.advance(10.0)
    assert lag.durations.count == 2


@pytest.mark.parametrize("by_topic", [True, False])
def test_the_engine_s_counters_and_histograms_add_up_without_an_sdk(
    store: DelayedStore, clock: ManualClock, by_topic: bool
) -> None:
    """Fired messages and their lateness, by topic or by namespace; a topic that was deleted is not told any more."""
    figures = EngineFigures("west", by_topic=by_topic)
    metrics = store.report_to(figures)
    for name in ("a", "b"):
        store.topic(name).send_batch([Message(b"", deliver_after=1), Message(b"", deliver_after=1.5)])
    clock.advance(2_000)
    store.tick()

    def fired() -> dict[str | None, float]:
        page = Page()
        figures.write(page, metrics, Shown(0))
        families = {each.name: each for each in text_string_to_metric_families(page.encode().decode())}
        counts = {each.labels.get("le"): each.value for each in families["duelog_messages_lateness_seconds"].samples}
        assert (counts["0.2"], counts["0.5"], counts["1.0"], counts["+Inf"]) == (0, 2, 4, 4)
        return {each.labels.get("topic"): each.value for each in families["duelog_messages_fired"].samples}

    a, b = (f"persistent://public/default/{name}" for name in ("a", "b"))
    assert fired() == ({a: 2, b: 2} if by_topic else {None: 4})
    figures.forget_topic(a)
    assert fired() == ({b: 2} if by_topic else {None: 4})
    metrics.close()
    assert metrics not in metrics._storage.listeners


def test_text_is_escaped_and_numbers_are_prometheus_s() -> None:
    """A subscription's name may be anything."""
    assert label("a", 'x"\\\n') == 'a="x\\"\\\\\\n"'
    page = Page()
    page.add("pulsar_subscription_delayed", label("subscription", 'x"\\\n'), 3)
    (family,) = text_string_to_metric_families(page.encode().decode())
    assert [(sample.labels, sample.value) for sample in family.samples] == [({"subscription": 'x"\\\n'}, 3)]
    infinite = float("inf")
    assert [shown_number(each) for each in (1, 0.5, infinite, -infinite, np.nan)] == ["1", "0.5", "+Inf", "-Inf", "NaN"]
    with pytest.raises(KeyError):
        page.lines("duelog_unknown")
