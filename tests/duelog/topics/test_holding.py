"""The messages that one consumer may hold, and for how long; pauses, for ever and until a time."""

import threading
from datetime import datetime, timedelta

import pytest

from duelog import DelayedStore, ManualClock, Message, Policies, StoreConfig, Subscription
from duelog.errors import InvalidArgument, UnknownSubscription
from duelog.store.codec import format as fmt
from duelog.store.log import catalog
from duelog.store.policy.policy_records import PolicyRecord
from duelog.tools.store_check import check_store
from tests.conftest import START_MS, OpenStore
from tests.duelog.store_state import received


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
        thread.join(60)
        assert found == [b"1"]


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
        thread.join(60)
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
