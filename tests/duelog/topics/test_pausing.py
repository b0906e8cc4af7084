"""Pausing a subscription: from inside and outside, for ever and until a time, over restarts."""

from __future__ import annotations

import threading
from datetime import UTC, datetime

import pytest

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.errors import InvalidArgument, UnknownSubscription
from duelog.store.codec import format as fmt
from duelog.store.log import catalog
from duelog.tools.store_check import check_store
from tests.conftest import START_MS, OpenStore
from tests.duelog.consuming import received


def test_a_pause_ends_by_itself_at_its_time_also_after_a_restart(open_store: OpenStore, clock: ManualClock) -> None:
    """Not a millisecond before, and then without a call."""
    store = open_store()
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


def test_a_later_pause_takes_the_place_of_an_earlier_one(open_store: OpenStore, clock: ManualClock) -> None:
    """For ever in place of a time, a time in place of for ever, and resumed in place of both."""
    store = open_store()
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
    """What would come is no time to look again."""
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


def test_check_finds_the_end_of_a_pause_of_no_subscription(open_store: OpenStore) -> None:
    """An older version that removes a subscription leaves it behind."""
    store = open_store()
    store._engine.storage.main.write(lambda transaction: transaction.put(fmt.pause_key(9), fmt.pack_u64(5)))
    store.close()
    assert [finding.code for finding in check_store(store.path)] == ["pause-without-subscription"]
