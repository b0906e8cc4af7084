"""Deduplication keys: a topic has one message at a time of each, found, replaced and cancelled by it."""

from dataclasses import replace
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig, Topic
from duelog.errors import InvalidArgument
from duelog.store.codec import format as fmt
from duelog.store.codec.format import Table
from duelog.store.log import catalog
from tests.conftest import OpenStore, present
from tests.duelog.store_state import payloads_after

FACES = True

CONFIG = StoreConfig(partition_ms=3_600_000, ledger_max_entries=3, background=False)
ROOT = Path(__file__).parents[3]


def keys_of(store: DelayedStore, table: Table = Table.KEY) -> int:
    """Records of keys that there are."""
    with store._engine.storage.main.read() as raw:
        return len(list(catalog.rows(raw, fmt.prefix(table))))


def delivered(store: DelayedStore, clock: ManualClock) -> list[bytes]:
    """Payloads, once everything is due."""
    return payloads_after(store, clock, 360_000_000)


def test_what_replaces_another_and_was_due_before_keeps_its_due_time(topic: Topic, clock: ManualClock) -> None:
    """Like one that replaces nothing; it was due now, and lived longer than its time to live says."""
    dues = []
    for key, waits in (("a", True), ("b", False)):
        if waits:
            topic.send(b"x", deliver_after=60, dedup_key=key)
        sent = topic.send(b"y", deliver_at=clock.now_ms() - 100, dedup_key=key, replace=True)
        found = present(topic.get(sent))
        dues.append(found.due_ms)
    assert dues == [clock.now_ms() - 100] * 2


def test_finding_a_message_by_its_key_is_no_scan(
    store: DelayedStore, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither finding nor cancelling reads a message but its own, or a partition but its own."""
    topic.send_batch([Message(b"%d" % number, deliver_after=7_200 + number) for number in range(2_000)])
    topic.send(b"this", deliver_after=10_000, dedup_key="k")
    topic.send(b"that", deliver_after=50_000, dedup_key="l")
    opened: list[int] = []
    acquire = store._engine.storage.partitions.acquire

    def noted(partition: object, **_: bool) -> None:
        opened.append(getattr(partition, "start_ms"))  # noqa: B009
        acquire(partition)  # type: ignore[arg-type]

    monkeypatch.setattr(store._engine.storage.partitions, "acquire", noted)
    monkeypatch.setattr("duelog.markers.lookup.scan_dues", None)
    assert present(topic.find("k")).payload == b"this"
    assert topic.cancel_key("k")
    assert len(set(opened)) == 1


def test_keys_are_cancelled_together_and_by_their_beginning(store: DelayedStore, topic: Topic) -> None:
    """The keys that had a pending message are returned; more than one transaction takes; nothing where one is none."""
    keys = [f"order/{number:03}" for number in range(300)]
    topic.send_batch([Message(b"x", deliver_after=7_200, dedup_key=key) for key in [*keys, "other"]])
    for given in ({}, {"keys": ["k"], "prefix": "k"}, {"keys": "order/000"}, {"keys": ["order/000", ""]}):
        with pytest.raises(InvalidArgument, match="key"):
            topic.cancel_keys(**given)
    assert topic.count(prefix="order/") == 300
    assert topic.cancel_keys(["order/001", "nobody's", "order/000"]) == ["order/001", "order/000"]
    assert topic.cancel_keys(prefix="order/") == keys[2:]
    assert (topic.cancel_keys(prefix="order/"), list(topic.keys()), topic.count()) == ([], ["other"], 1)


def test_a_send_says_whether_it_has_stored_its_message_or_found_one(store: DelayedStore, topic: Topic) -> None:
    """Alone, in a batch, by a future, in a transaction, and by a producer's number."""
    first = topic.send(b"0", deliver_after=60, dedup_key="k")
    again = topic.send(b"1", deliver_after=60, dedup_key="k")
    batch = topic.send_batch([Message(b"2", deliver_after=60, dedup_key=key) for key in ("l", "k", "l")])
    with store.transaction() as transaction:
        results = [transaction.send(topic, b"3", deliver_after=60, dedup_key=key) for key in ("m", "k")]
    futures = [topic.send_async(b"4", deliver_after=60, dedup_key=key).result(20) for key in ("k", "n")]
    numbered = [present(topic.producer("p").send(Message(b"5"), sequence_id=7)) for _ in range(2)]
    assert (again, batch[2], numbered[1]) == (first, batch[0], numbered[0])
    assert [each.stored for each in (first, again, *batch)] == [True, False, True, False, False]
    assert [each.value.stored for each in results] == [True, False]
    assert [each.stored for each in futures] == [False, True]
    assert [each.stored for each in numbered] == [True, False]


def test_a_key_waits_in_its_partition_where_others_wait_inline(open_store: OpenStore, clock: ManualClock) -> None:
    """So that it can be cancelled, however short its delay is."""
    store = open_store(config=replace(CONFIG, inline_delay_ms=60_000))
    topic = store.topic("t")
    topic.send(b"0", deliver_after=10, dedup_key="k")
    topic.send(b"1", deliver_after=10)
    assert topic.cancel_key("k")
    assert delivered(store, clock) == [b"1"]


def test_records_of_keys_do_not_pile_up(
    store: DelayedStore, topic: Topic, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a partition has closed they go; those of other days and those that still hold stay."""
    monkeypatch.setattr("duelog.upkeep.reclaiming._PAGE", 20)
    for number in range(50):
        topic.send(b"x", deliver_after=10, dedup_key=f"fired-{number}")
    topic.send(b"x", deliver_after=10, dedup_key="held", dedup_for=90_000)
    topic.send(b"x", deliver_after=80_000, dedup_key="pending")
    for wait_ms in (7_200_000, 60_000):
        clock.advance(wait_ms)
        topic.send(b"due")  # so that a ledger is trimmed
        store.tick()
    assert keys_of(store) == 2
    assert topic.find("pending") is not None
    assert list(store.check(deep=True)) == []
