"""The messages that one consumer may hold, and for how long; pauses, for ever and until a time."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta

import pytest

from duelog import DelayedStore, ManualClock, Message, Policies, StoreConfig, Subscription
from duelog.delivery.dispatcher import SubscriptionType
from duelog.errors import InvalidArgument, UnknownSubscription
from duelog.store.codec import format as fmt
from duelog.store.log import catalog
from duelog.store.policy.policy_records import PolicyRecord
from duelog.tools.store_check import check_store
from tests.conftest import START_MS, OpenStore
from tests.duelog.consuming import received


def filled(store: DelayedStore, count: int, limit: int) -> None:
    """A topic with so many messages that are due, and a limit of the store."""
    store.set_policies(Policies(max_in_flight=limit))
    store.topic("t").send_batch([Message(b"%d" % number) for number in range(count)])


def test_one_shared_consumer_took_all_50000(store: DelayedStore) -> None:
    """With a limit it takes so many, and others get the rest."""
    store.set_policies(Policies(max_in_flight=1_000), topic="t")
    topic = store.topic("t")
    topic.send_payloads([b""] * 50_000)
    with topic.subscribe("s", type="shared") as first, topic.subscribe("s", type="shared") as second:
        assert len(received(first, 50_000)) == 1_000
        assert first.receive(50_000) == []
        assert len(received(second, 50_000)) == 1_000


@pytest.mark.parametrize("type_", ["exclusive", "failover", "shared", "key_shared"])
def test_what_is_acknowledged_or_given_back_makes_space(store: DelayedStore, type_: SubscriptionType) -> None:
    """In the log's order, and no more than that."""
    filled(store, 10, 3)
    with store.topic("t").subscribe("s", type=type_) as consumer:
        batch = consumer.receive(10)
        assert [message.payload for message in batch] == [b"0", b"1", b"2"]
        assert consumer.receive(1) == []
        consumer.ack(batch[0])
        assert received(consumer) == [b"3"]
        consumer.nack(batch[1:], delay=0)
        assert received(consumer) == [b"1", b"2"]
        assert consumer.receive(1) == []


def test_the_narrowest_scope_limits_and_a_change_counts_at_once(store: DelayedStore) -> None:
    """A subscription's zero turns its topic's limit off; one that is lowered takes nothing back."""
    filled(store, 10, 1)
    store.update_policies(topic="t", max_in_flight=2)
    store.update_policies(topic="t", subscription="free", max_in_flight=0)
    with store.topic("t").subscribe("free") as free, store.topic("t").subscribe("s") as limited:
        assert len(received(free)) == 10
        assert len(received(limited)) == 2
        store.update_policies(topic="t", max_in_flight=4)
        assert len(received(limited)) == 2
        store.update_policies(topic="t", max_in_flight=1)
        assert limited.receive(10) == []
        assert limited.stats().unacknowledged == 4
    effective = store.effective_policies("t", "s")
    assert effective.set_at["max_in_flight"] == "topic persistent://public/default/t"


def test_a_message_that_was_held_too_long_counts_no_more(store: DelayedStore, clock: ManualClock) -> None:
    """The consumer itself gets it again, as one of those that it holds."""
    filled(store, 4, 2)
    store.update_policies(ack_timeout_ms=50)
    with store.topic("t").subscribe("s", type="shared") as consumer:
        assert received(consumer) == [b"0", b"1"]
        clock.advance(50)
        assert received(consumer) == [b"0", b"1"]


def test_a_message_that_lived_long_enough_counts_no_more(store: DelayedStore, clock: ManualClock) -> None:
    """A time to live ends it while it is held."""
    filled(store, 2, 2)
    store.update_policies(ttl_ms=1_000)
    with store.topic("t").subscribe("s") as consumer:
        assert received(consumer) == [b"0", b"1"]
        clock.advance(5_000)
        store.topic("t").send(b"new")
        store.tick()
        assert received(consumer) == [b"new"]


def test_a_reader_has_no_limit(store: DelayedStore) -> None:
    """It need not acknowledge anything."""
    filled(store, 5, 2)
    with store.topic("t").reader() as reader:
        assert len(received(reader)) == 5


def test_a_receiver_at_its_limit_wakes_when_another_thread_acknowledges(open_store: OpenStore) -> None:
    """It need not look again by itself."""
    store = open_store(config=StoreConfig(background=True))
    filled(store, 2, 1)
    with store.topic("t").subscribe("s", type="shared") as consumer:
        (first,) = consumer.receive(5)
        found: list[bytes] = []
        thread = threading.Thread(target=lambda: found.extend(m.payload for m in consumer.receive(5)))
        thread.start()
        consumer.ack(first)
        thread.join(10)
        assert found == [b"1"]


def test_a_limit_that_is_none_is_refused_by_name(store: DelayedStore) -> None:
    """Like every policy."""
    with pytest.raises(InvalidArgument, match="max_in_flight"):
        store.update_policies(max_in_flight=-1)


def test_a_record_without_a_limit_is_one_that_the_version_before_reads() -> None:
    """Only what an earlier version would not obey is of the later one."""
    assert PolicyRecord(Policies(ttl_ms=5)).pack()[:9] == b"\x82\xa7version"
    assert PolicyRecord(Policies(ttl_ms=5)).pack()[9] == 2
    limited = PolicyRecord(Policies(ttl_ms=5), {"s": Policies(max_in_flight=1)})
    assert limited.pack()[9] == 3
    assert PolicyRecord.unpack(limited.pack()) == limited


def holding(store: DelayedStore, count: int = 2, timeout_ms: int = 1_000) -> Subscription:
    """A consumer of so many messages that may be held for so long."""
    store.set_policies(Policies(ack_timeout_ms=timeout_ms))
    consumer = store.topic("t").subscribe("s", type="shared")
    store.topic("t").send_payloads([b"%d" % number for number in range(count)])
    return consumer


def test_what_is_extended_comes_again_when_that_is_over(store: DelayedStore, clock: ManualClock) -> None:
    """The others by the timeout; a second extension takes the place of the first."""
    consumer = holding(store)
    first, _ = consumer.receive(2)
    clock.advance(900)
    assert consumer.extend(first) == 1
    clock.advance(100)
    assert received(consumer) == [b"1"]
    clock.advance(800)
    assert consumer.extend([first], timedelta(seconds=5)) == 1
    clock.advance(4_999)
    assert received(consumer) == [b"1"]
    clock.advance(1)
    assert [message.redelivery_count for message in consumer.receive(2)] == [1]


def test_a_shorter_time_than_the_timeout_counts_too(store: DelayedStore, clock: ManualClock) -> None:
    """A consumer knows better; who waits is told when to look."""
    consumer = holding(store)
    messages = consumer.receive(2)
    assert consumer.extend(messages, 0.01) == 2
    assert consumer.poll() == ([], START_MS + 10)
    clock.advance(10)
    assert received(consumer) == [b"0", b"1"]


def test_only_what_is_still_held_is_extended(store: DelayedStore, clock: ManualClock) -> None:
    """Not what was acknowledged, given back, taken back, or is another's; and the next delivery has the timeout."""
    consumer = holding(store, 4)
    acked, given, overdue, kept = consumer.receive(4)
    with store.topic("t").subscribe("s", type="shared") as other:
        assert other.extend(kept) == 0
    consumer.ack(acked)
    consumer.extend(given, 60)
    consumer.nack(given, delay=0)
    assert consumer.extend([acked, given]) == 0
    consumer.extend([kept], 60)
    clock.advance(1_000)
    assert received(consumer) == [b"1", b"2"]
    clock.advance(1_000)
    assert received(consumer) == [b"1", b"2"]
    assert consumer.extend([overdue, kept]) == 2
    assert consumer.ack(kept) == 1


def test_without_a_timeout_there_is_nothing_to_extend(store: DelayedStore, clock: ManualClock) -> None:
    """It is held for ever as it is, and says how many it holds."""
    consumer = holding(store, timeout_ms=0)
    messages = consumer.receive(2)
    assert consumer.extend(messages, 0.001) == 2
    clock.advance(1_000_000)
    assert consumer.receive() == []


def test_a_pause_ends_by_itself_at_its_time_also_after_a_restart(
    open_store: OpenStore, store: DelayedStore, clock: ManualClock
) -> None:
    """Not a millisecond before, and then without a call."""
    store.topic("t").send(b"x")
    store.topic("t").subscribe("s").pause(datetime.fromtimestamp((START_MS + 1_000) / 1_000, UTC))
    store.close()
    store = open_store()
    with store.topic("t").subscribe("s") as consumer:
        assert (consumer.paused, consumer.stats().paused_until_ms) == (True, START_MS + 1_000)
        clock.advance(999)
        assert consumer.poll() == ([], START_MS + 1_000)
        clock.advance(1)
        assert not consumer.paused
        assert (consumer.stats().paused, consumer.stats().paused_until_ms) == (False, None)
        assert received(consumer) == [b"x"]


def test_a_later_pause_takes_the_place_of_an_earlier_one(open_store: OpenStore, store: DelayedStore) -> None:
    """For ever in place of a time, a time in place of for ever, and resumed in place of both."""
    store.topic("t").subscribe("s").close()
    for until_ms in (START_MS + 5, None, START_MS + 9):
        store.topic("t").subscription("s").pause(until_ms)
        store.close()
        store = open_store()
        stats = store.topic("t").subscription("s").stats()
        assert (stats.paused, stats.paused_until_ms) == (True, until_ms)
    store.topic("t").subscription("s").resume()
    store.close()
    store = open_store()
    assert not store.topic("t").subscription("s").stats().paused


def test_a_time_that_has_passed_is_refused_and_nothing_is_paused(store: DelayedStore) -> None:
    """The error names the field and the value."""
    with store.topic("t").subscribe("s") as consumer:
        for wrong in (START_MS, 1_000, datetime(2026, 1, 1), "noon"):
            with pytest.raises(InvalidArgument, match="until"):
                consumer.pause(wrong)  # type: ignore[arg-type]
        assert not consumer.paused


def test_a_paused_subscription_with_an_overdue_redelivery_does_not_spin(store: DelayedStore) -> None:
    """A redelivery that would come is no time to look again."""
    with store.topic("t").subscribe("s") as consumer:
        store.topic("t").send(b"x")
        consumer.nack(consumer.receive(), delay=0)
        consumer.pause()
        batch, again_ms = consumer.poll()
        assert batch == []
        assert again_ms is None or again_ms > START_MS


def test_what_is_held_may_be_acknowledged_while_it_is_paused(store: DelayedStore) -> None:
    """And what is given back waits until it goes on."""
    with store.topic("t").subscribe("s") as consumer:
        store.topic("t").send_payloads([b"a", b"b"])
        first, second = consumer.receive(2)
        consumer.pause()
        assert consumer.ack(first) == 1
        consumer.nack(second, delay=0)
        assert consumer.receive() == []
        consumer.resume()
        assert received(consumer) == [b"b"]


def test_a_receiver_wakes_when_the_subscription_is_resumed_from_outside(open_store: OpenStore) -> None:
    """By a thread that has no consumer."""
    store = open_store(config=StoreConfig(background=True))
    with store.topic("t").subscribe("s") as consumer:
        consumer.pause()
        store.topic("t").send(b"x")
        found: list[bytes] = []
        thread = threading.Thread(target=lambda: found.extend(m.payload for m in consumer.receive()))
        thread.start()
        store.topic("t").subscription("s").resume()
        thread.join(10)
        assert found == [b"x"]


def test_a_reader_is_paused_in_memory(store: DelayedStore, clock: ManualClock) -> None:
    """It has no record."""
    store.topic("t").send(b"x")
    with store.topic("t").reader() as reader:
        reader.pause(START_MS + 5)
        assert reader.receive() == []
        clock.advance(5)
        assert received(reader) == [b"x"]


def test_the_end_of_a_pause_goes_with_its_subscription(store: DelayedStore) -> None:
    """Removed alone, or with its topic."""
    for name in ("a", "b"):
        store.topic("t").subscribe(name).close()
        store.topic("t").subscription(name).pause(START_MS + 5)
    admin = store.topic("t").subscription("a")
    store.topic("t").unsubscribe("a")
    with pytest.raises(UnknownSubscription):
        admin.pause()
    store.delete_topic("t")
    with store._engine.storage.main.read() as raw:
        assert list(catalog.rows(raw, fmt.prefix(fmt.Table.PAUSE))) == []


def test_check_finds_the_end_of_a_pause_of_no_subscription(store: DelayedStore) -> None:
    """An older version that removes a subscription leaves it behind."""
    store._engine.storage.main.write(lambda transaction: transaction.put(fmt.pause_key(9), fmt.pack_u64(5)))
    store.close()
    assert [finding.code for finding in check_store(store.path)] == ["pause-without-subscription"]
