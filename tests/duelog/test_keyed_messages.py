"""Deduplication keys: a topic has one message at a time of each, found, replaced and cancelled by it."""

import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig, Topic
from duelog.errors import InvalidArgument
from duelog.store.codec import format as fmt
from duelog.store.codec.format import Table
from duelog.store.log import catalog
from tests.conftest import OpenStore, present

FACES = True

CONFIG = StoreConfig(partition_ms=3_600_000, ledger_max_entries=3, background=False)
ROOT = Path(__file__).parents[3]


def keys_of(store: DelayedStore, table: Table = Table.KEY) -> int:
    """Records of keys that there are."""
    with store._engine.storage.main.read() as raw:
        return len(list(catalog.rows(raw, fmt.prefix(table))))


def delivered(store: DelayedStore, clock: ManualClock) -> list[bytes]:
    """Payloads, once everything is due."""
    clock.advance(360_000_000)
    with store.topic("t").subscribe("s") as consumer:
        found: list[bytes] = []
        while messages := consumer.receive(1_000, timeout=0):
            found += [bytes(message.payload) for message in messages]
            consumer.ack(messages)
    return found


def test_a_key_that_holds_answers_with_the_first_ones_id(
    open_store: OpenStore, store: DelayedStore, topic: Topic, clock: ManualClock
) -> None:
    """Whatever day the second is for, over a restart, and by topic; a message without a key is another one."""
    first = topic.send(b"first", deliver_after=7_200, dedup_key="order-17", key="customer")
    assert topic.send(b"again", deliver_after=80_000, dedup_key="order-17") == first
    assert topic.send(b"without", deliver_after=7_200, key="order-17") != first
    assert store.topic("other").send(b"x", deliver_after=7_200, dedup_key="order-17") != first
    store.close()
    store = open_store(config=CONFIG)
    topic = store.topic("t")
    assert topic.send(b"again", dedup_key="order-17") == first
    found = present(topic.find("order-17"))
    assert (found.message_id, found.payload, found.key) == (first, b"first", "customer")
    assert delivered(store, clock) == [b"first", b"without"]


def test_a_key_is_free_when_its_message_has_fired(store: DelayedStore, topic: Topic, clock: ManualClock) -> None:
    """Without `dedup_for`: before its partition is closed, and after that; one that is due at once holds nothing."""
    ids = [topic.send(b"0", deliver_after=10, dedup_key="k")]
    clock.advance(10_000)
    store.tick()
    assert topic.find("k") is None
    assert not topic.cancel_key("k")
    ids.append(topic.send(b"1", deliver_after=10, dedup_key="k"))
    clock.advance(7_200_000)
    store.tick()
    ids += [topic.send(b"2", dedup_key="k"), topic.send(b"3", dedup_key="k")]
    assert len(set(ids)) == 4
    assert delivered(store, clock) == [b"0", b"1", b"2", b"3"]


def test_a_key_holds_for_as_long_as_was_asked_though_its_message_has_fired(
    open_store: OpenStore, store: DelayedStore, topic: Topic, clock: ManualClock
) -> None:
    """Seconds or a timedelta, from when it was sent; also one that is due at once, and over a restart."""
    delayed = topic.send(b"0", deliver_after=10, dedup_key="k", dedup_for=60)
    direct = topic.send(b"1", dedup_key="d", dedup_for=timedelta(minutes=1))
    clock.advance(59_999)
    store.tick()
    store.close()
    store = open_store(config=CONFIG)
    topic = store.topic("t")
    assert topic.send(b"2", dedup_key="k") == delayed
    assert topic.send(b"3", dedup_key="d") == direct
    assert topic.find("k") is None
    clock.advance(1)
    assert topic.send(b"4", deliver_after=10, dedup_key="k") not in (delayed, direct)
    assert topic.send(b"5", dedup_key="d") not in (delayed, direct)


@pytest.mark.parametrize("by", ["key", "id"])
def test_cancelling_frees_the_key_at_once(store: DelayedStore, topic: Topic, clock: ManualClock, by: str) -> None:
    """By the key or by the id, also where `dedup_for` has not passed; what is sent then is another message."""
    first = topic.send(b"0", deliver_after=7_200, dedup_key="k", dedup_for=90_000)
    assert topic.cancel_key("k") if by == "key" else topic.cancel(first)
    assert keys_of(store) == 0
    assert topic.find("k") is None
    assert not topic.cancel_key("k")
    second = topic.send(b"1", deliver_after=7_200, dedup_key="k")
    assert second != first
    assert not topic.cancel(first) or topic.find("k") is not None  # an old id says nothing of the key
    assert delivered(store, clock) == [b"1"]


def test_a_key_goes_with_its_message_when_that_is_rescheduled(
    open_store: OpenStore, store: DelayedStore, topic: Topic, clock: ManualClock
) -> None:
    """To another day, to now, and over a restart: the key is of the new id."""
    first = topic.send(b"0", deliver_after=7_200, dedup_key="k", dedup_for=7_200)
    moved = topic.reschedule(first, deliver_after=80_000)
    assert topic.send(b"1", dedup_key="k") == moved
    store.close()
    store = open_store(config=CONFIG)
    topic = store.topic("t")
    found = present(topic.find("k"))
    assert found.message_id == moved
    assert moved is not None
    now = topic.fire_now(moved)
    assert topic.find("k") is None
    assert topic.send(b"2", dedup_key="k") == now
    assert delivered(store, clock) == [b"0"]


def test_replacing_cancels_what_is_pending_and_sends_the_other(
    store: DelayedStore, topic: Topic, clock: ManualClock
) -> None:
    """To an earlier day, a later one, and to now; where nothing is pending it is a send."""
    ids = [topic.send(b"0", deliver_after=7_200, dedup_key="k", replace=True)]
    for number, delay in enumerate((80_000, 60, 3_600), 1):
        ids.append(topic.send(b"%d" % number, deliver_after=delay, dedup_key="k", replace=True))
        found = present(topic.find("k"))
        assert (found.message_id, found.payload) == (ids[-1], b"%d" % number)
    ids.append(topic.send(b"now", dedup_key="k", replace=True))
    assert topic.find("k") is None
    assert len(set(ids)) == 5
    assert [topic.state(each) for each in ids[:-1]] == ["cancelled"] * 4
    ids.append(topic.send(b"late", deliver_after=50, dedup_key="k", replace=True))
    assert list(store.check(deep=True)) == []
    assert delivered(store, clock) == [b"now", b"late"]


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

    def noted(partition: object) -> None:
        opened.append(getattr(partition, "start_ms"))  # noqa: B009
        acquire(partition)  # type: ignore[arg-type]

    monkeypatch.setattr(store._engine.storage.partitions, "acquire", noted)
    monkeypatch.setattr("duelog.markers.lookup.scan_dues", None)
    found = present(topic.find("k"))
    assert found.payload == b"this"
    assert topic.cancel_key("k")
    assert len(set(opened)) == 1


def test_keys_of_pending_messages_are_listed_by_their_beginning(
    store: DelayedStore, topic: Topic, clock: ManualClock
) -> None:
    """In order, of this topic alone, without those whose messages have fired or were cancelled."""
    for number in (2, 1, 3, 4):
        topic.send(b"x", deliver_after=7_200 if number != 4 else 5, dedup_key=f"order/{number}", dedup_for=90_000)
    topic.send(b"x", deliver_after=7_200, dedup_key="other")
    store.topic("u").send(b"x", deliver_after=7_200, dedup_key="order/9")
    assert topic.cancel_key("order/3")
    clock.advance(6_000)
    store.tick()
    assert list(topic.keys("order/")) == ["order/1", "order/2"]
    assert list(topic.keys()) == ["order/1", "order/2", "other"]
    assert list(topic.keys("p")) == []


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


def test_keys_of_a_deleted_topic_are_gone(store: DelayedStore) -> None:
    """A topic of the same name begins anew."""
    first = store.topic("t").send(b"0", deliver_after=7_200, dedup_key="k" * 256)
    store.delete_topic("t")
    assert keys_of(store) == 0
    assert store.topic("t").send(b"0", deliver_after=7_200, dedup_key="k" * 256) != first


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


@pytest.mark.inside
def test_a_key_holds_in_a_backup(
    open_store: OpenStore, store: DelayedStore, topic: Topic, clock: ManualClock, tmp_path: Path
) -> None:
    """A copy has the keys of the messages that it has."""
    first = topic.send(b"0", deliver_after=7_200, dedup_key="k")
    store.backup(tmp_path / "copy")
    topic.cancel_key("k")
    store.close()
    store = open_store(tmp_path / "copy", config=CONFIG)
    assert store.topic("t").send(b"1", dedup_key="k") == first
    assert delivered(store, clock) == [b"0"]


def test_a_read_only_store_finds_what_another_process_has_just_sent(tmp_path: Path, clock: ManualClock) -> None:
    """By its key, from the write-ahead log of the process that writes."""
    with DelayedStore.open(tmp_path / "store", CONFIG, clock=clock) as store:
        store.topic("t").send(b"0", deliver_after=90_000, dedup_key="k")
        program = (
            "import sys; sys.path.append(sys.argv[2])\n"
            "from duelog import DelayedStore, StoreConfig\n"
            "config = StoreConfig(partition_ms=3_600_000)\n"
            "with DelayedStore.open(sys.argv[1], config, read_only=True) as store:\n"
            "    found = store.topic('t').find('k')\n"
            "    print(found and found.payload.decode(), store.topic('t').find('l'))\n"
        )
        command = [sys.executable, "-c", program, str(tmp_path / "store"), str(ROOT)]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert told.stdout.split() == ["0", "None"], told.stderr
