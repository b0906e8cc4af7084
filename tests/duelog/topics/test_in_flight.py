"""The limit of what one consumer holds, by scope: nothing is handed out over it, and what waits comes when it may."""

from __future__ import annotations

import threading

import pytest

from duelog import DelayedStore, ManualClock, Message, Policies, StoreConfig
from duelog.delivery.dispatcher import SubscriptionType
from duelog.errors import InvalidArgument
from duelog.store.policy.policy_records import PolicyRecord
from tests.conftest import OpenStore
from tests.duelog.consuming import received


def filled(store: DelayedStore, count: int, limit: int) -> None:
    """A topic with so many messages that are due, and a limit of the store."""
    store.set_policies(Policies(max_in_flight=limit))
    store.topic("t").send_batch([Message(b"%d" % number) for number in range(count)])


def test_one_shared_consumer_took_all_50000(open_store: OpenStore) -> None:
    """With a limit it takes so many, and others get the rest."""
    store = open_store()
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
    """As every policy."""
    with pytest.raises(InvalidArgument, match="max_in_flight"):
        store.update_policies(max_in_flight=-1)


def test_a_record_without_a_limit_is_one_that_the_version_before_reads() -> None:
    """Only what an earlier version would not obey is of the later one."""
    assert PolicyRecord(Policies(ttl_ms=5)).pack()[:9] == b"\x82\xa7version"
    assert PolicyRecord(Policies(ttl_ms=5)).pack()[9] == 2
    limited = PolicyRecord(Policies(ttl_ms=5), {"s": Policies(max_in_flight=1)})
    assert limited.pack()[9] == 3
    assert PolicyRecord.unpack(limited.pack()) == limited
