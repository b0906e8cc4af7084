"""Deduplication keys: a topic has one message at a time of each; in batches as if each message were sent alone."""

import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duelog import (
    DUPLICATE,
    DelayedDeliveryPolicies,
    DelayedStore,
    ManualClock,
    Message,
    MessageId,
    Policies,
    StoreConfig,
    Topic,
)
from duelog.errors import DelayTooLong, InvalidArgument, InvalidMessage, QuotaExceeded
from duelog.sending.outbox import PutOutcome
from duelog.store.codec import format as fmt
from duelog.store.codec.format import Table
from duelog.store.log import catalog
from tests.conftest import START_MS, OpenStore, in_threads, present, tick_after
from tests.duelog.sending.putting import Heard
from tests.duelog.sending.putting import together as as_one_group
from tests.duelog.store_state import payloads, payloads_after
from tests.proof import length

FACES = True

CONFIG = StoreConfig(partition_ms=3_600_000, ledger_max_entries=3, background=False, durability="none")
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
    for wrong in ({}, {"keys": ["k"], "prefix": "k"}, {"keys": "order/000"}, {"keys": ["order/000", ""]}):
        with pytest.raises(InvalidArgument, match="key"):
            topic.cancel_keys(**wrong)
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


TOPICS = ("t", "u")
EXAMPLES = length("DUELOG_KEYED_BATCHES", 5, 10)
"""Sequences of batches for each way of sending."""


class Asked(NamedTuple):
    """One message of a batch."""

    topic: str
    key: str | None
    delay: float
    hold: float | None
    replace: bool

    def message(self, payload: bytes, at_once: float) -> Message:
        """A message without a key that is due before `at_once` is due now."""
        if self.key is None:
            return Message(payload, deliver_after=self.delay if self.delay >= at_once else 0)
        return Message(payload, deliver_after=self.delay, dedup_key=self.key, dedup_for=self.hold, replace=self.replace)


ASKED = st.builds(
    Asked,
    st.sampled_from(TOPICS),
    st.sampled_from((None, "k", "k", "l", "m")),
    st.sampled_from((0, 10, 30, 4_000, 90_000)),
    st.sampled_from((None, None, 20, 5_000)),
    st.booleans(),
)
Step = list[Asked] | int
STEPS = st.lists(st.lists(ASKED, max_size=8) | st.sampled_from((10_000, 20_000, 3_600_000)), max_size=6)


def asked(message: Message) -> dict[str, Any]:
    """The arguments of a send of it alone, besides its payload."""
    names = ("deliver_after", "dedup_key", "dedup_for", "replace")
    return {name: getattr(message, name) for name in names}


def by_one(store: DelayedStore, batch: list[tuple[str, Message]]) -> list[MessageId]:
    """Each sent alone."""
    return [store.topic(topic).send(each.payload, **asked(each)) for topic, each in batch]


def together(store: DelayedStore, batch: list[tuple[str, Message]]) -> list[MessageId]:
    """One batch of all."""
    return store.send_batch(batch)


def by_topic(store: DelayedStore, batch: list[tuple[str, Message]]) -> list[MessageId]:
    """A batch for each topic."""
    ids: dict[int, MessageId] = {}
    for name in TOPICS:
        places = [place for place, (topic, _) in enumerate(batch) if topic == name]
        ids |= dict(zip(places, store.topic(name).send_batch([batch[place][1] for place in places]), strict=True))
    return [ids[place] for place in range(len(batch))]


def without_waiting(store: DelayedStore, batch: list[tuple[str, Message]]) -> list[MessageId]:
    """All of them put in before the first is written: the outbox's thread is held up."""
    futures = []
    with held_up(store):
        for topic, each in batch:
            futures.append(store.topic(topic).send_async(each.payload, **asked(each)))
    return [future.result(60) for future in futures]


class held_up:
    """Messages put in meanwhile are one group, but for one that takes up the thread."""

    def __init__(self, store: DelayedStore) -> None:
        self._go, self._store = threading.Event(), store

    def __enter__(self) -> None:
        def wait(_: object) -> None:
            self._go.wait(60)

        self._store.topic("other").put(b"", done=wait)

    def __exit__(self, *_: object) -> None:
        self._go.set()


def seen(store: DelayedStore, ids: list[tuple[str, MessageId]]) -> object:
    """The visible messages, ids by their places."""
    first: dict[tuple[str, MessageId], int] = {}
    for place, each in enumerate(ids):
        first.setdefault(each, place)
    topics = []
    for name in TOPICS:
        topic = store.topic(name)
        if topic.exists():
            found = {key: topic.find(key) for key in topic.keys()}  # noqa: SIM118
            assert None not in found.values()
            scheduled = sorted((each.due_ms, each.payload) for each in topic.scheduled())
            by_key = {key: first[name, each.message_id] for key, each in found.items() if each is not None}
            topics.append((name, scheduled, by_key, topic.stats().entries))
    return [first[each] for each in ids], [store.topic(name).state(each) for name, each in ids], topics


def delivered_by_topic(store: DelayedStore, clock: ManualClock) -> list[list[bytes]]:
    """Payloads by topic, once everything is due; subscribed to first, as what fires for nobody may be trimmed."""
    with ExitStack() as stack:
        consumers = [stack.enter_context(store.topic(name).subscribe("s")) for name in TOPICS]
        tick_after(store, clock, 100_000_000)
        return [sorted(payloads(consumer)) for consumer in consumers]


@pytest.mark.parametrize(
    ("send", "inline_ms"),
    [(together, 0), (together, 15_000), (by_topic, 0), (without_waiting, 0)],
    ids=["store", "inline", "topic", "async"],
)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS)
def test_messages_sent_together_are_as_if_each_were_sent_alone(
    send: Callable[[DelayedStore, list[tuple[str, Message]]], list[MessageId]], inline_ms: int, steps: list[Step]
) -> None:
    """Ids, states, what each key is of, what is pending and what is delivered; over restarts, and nothing is found.

    But that a message without a key does not wait inline where one beside it takes another's place.
    """
    config = replace(CONFIG, inline_delay_ms=inline_ms)
    where = Path(tempfile.mkdtemp())
    try:
        clocks = [ManualClock(START_MS), ManualClock(START_MS)]
        stores = [DelayedStore.open(where / str(at), config, clock=clock) for at, clock in enumerate(clocks)]
        ids: list[list[tuple[str, MessageId]]] = [[], []]
        number = 0
        for step in steps:
            if isinstance(step, int):
                for clock, store in zip(clocks, stores, strict=True):
                    tick_after(store, clock, step)
                continue
            batch = [
                (each.topic, each.message(b"%d" % (number + at), 15 if inline_ms else 0))
                for at, each in enumerate(step)
            ]
            number += len(batch)
            for way, store, own in zip((by_one, send), stores, ids, strict=True):
                own.extend(zip([topic for topic, _ in batch], way(store, batch), strict=True))
            assert seen(stores[0], ids[0]) == seen(stores[1], ids[1])
        for store in stores:
            store.close()
        stores = [DelayedStore.open(where / str(at), config, clock=clock) for at, clock in enumerate(clocks)]
        assert seen(stores[0], ids[0]) == seen(stores[1], ids[1])
        assert delivered_by_topic(stores[0], clocks[0]) == delivered_by_topic(stores[1], clocks[1])
        for store in stores:
            assert list(store.check(deep=True)) == []
            store.close()
    finally:
        shutil.rmtree(where)


def test_a_batch_looks_its_keys_up_once(store: DelayedStore, topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two read transactions of the main environment, however many keys there are, and one group."""
    messages = [Message(b"x", deliver_after=7_200, dedup_key=f"k{number}") for number in range(500)]
    first = topic.send_batch(messages[:250])
    reads, groups = [0], [0]
    main, writer = store._engine.storage.main, store._engine.writer()
    read, write = main.read, writer.write

    def counted_read() -> Any:
        reads[0] += 1
        return read()

    def counted_write(work: Any) -> Any:
        groups[0] += 1
        return write(work)

    monkeypatch.setattr(main, "read", counted_read)
    monkeypatch.setattr(writer, "write", counted_write)
    ids = topic.send_batch(messages)
    assert ids[:250] == first
    assert len(set(ids)) == 500
    assert groups == [1]
    assert reads[0] < 10


@pytest.mark.inside
def test_a_put_hears_the_id_that_its_key_is_of(open_store: OpenStore, store: DelayedStore, topic: Topic) -> None:
    """With messages that have numbers and with others, in the order in which they were put in."""
    first = topic.send(b"0", deliver_after=7_200, dedup_key="k")
    heard: list[tuple[Any, PutOutcome]] = []
    with held_up(store):
        topic.put(b"1", deliver_after=7_200, token=1, done=heard.extend)
        topic.put(b"2", token=2, numbers=("p", 1, 1), done=heard.extend)
        topic.put(b"3", token=3, deliver_after=60, dedup_key="k", done=heard.extend)
        topic.put(b"4", token=4, deliver_after=60, dedup_key="l", done=heard.extend)
        topic.put(b"5", token=5, deliver_after=60, dedup_key="l", replace=True, done=heard.extend)
        topic.put(b"6", token=6, numbers=("p", 1, 1), done=heard.extend)
    store.close()
    assert [token for token, _ in heard] == [1, 2, 3, 4, 5, 6]
    assert heard[2][1] == first
    store = open_store(config=CONFIG)
    found = present(store.topic("t").find("l"))
    assert (found.payload, found.message_id) == (b"5", heard[4][1])
    assert store.topic("t").state(heard[3][1]) == "cancelled"  # type: ignore[arg-type]
    assert store.topic("t").producer_number("p") == 1
    assert list(store.check(deep=True)) == []


def test_threads_that_send_batches_of_the_same_keys_store_one_message_of_each(
    store: DelayedStore, topic: Topic
) -> None:
    """In any order of keys, with sends that are not waited for, cancellations and rescheduling between them."""

    def work(number: int) -> None:
        for at in range(12):
            keys = [f"k{(at * number + each) % 7}" for each in range(7)]
            topic.send_batch(
                [Message(b"x", deliver_after=7_200 + at, dedup_key=key, replace=at % 3 == 2) for key in keys]
            )
            topic.send_async(b"x", deliver_after=9_000, dedup_key=keys[0], replace=at % 4 == 1).result(60)
            topic.cancel_key(keys[1])
            found = topic.find(keys[2])
            if found is not None:
                topic.reschedule(found.message_id, deliver_after=10_000)

    in_threads(partial(work, number) for number in range(1, 5))
    found = {key: topic.find(key) for key in topic.keys()}  # noqa: SIM118
    assert {each.message_id for each in topic.scheduled()} == {each.message_id for each in found.values() if each}
    assert list(store.check(deep=True)) == []


def test_a_quota_counts_what_a_batch_with_keys_adds(store: DelayedStore) -> None:
    """Not what is answered or replaced; a batch that is too much is refused whole."""
    store.set_policies(Policies(max_pending=3), topic="t")
    topic = store.topic("t")

    def message(key: str, *, replaces: bool = False) -> Message:
        return Message(b"x", deliver_after=7_200, dedup_key=key, replace=replaces)

    ids = topic.send_batch([message("a"), message("b"), message("c"), message("a")])
    assert topic.send_batch([message("a"), message("b")]) == ids[:2]
    topic.send_batch([message(key, replaces=True) for key in "abc"])
    for batch in ([message("d")], [message("a", replaces=True), message("d")]):
        with pytest.raises(QuotaExceeded):
            topic.send_batch(batch)
    assert sorted(topic.keys()) == ["a", "b", "c"]


def test_a_policy_has_no_say_in_what_keys_of_a_batch_hold_back(store: DelayedStore, topic: Topic) -> None:
    """A maximum that was lowered refuses a batch for what it would store."""
    held = Message(b"x", deliver_after=7_200, dedup_key="k")
    ids = topic.send_batch([held])
    store.set_policies(DelayedDeliveryPolicies(max_delivery_delay_ms=60_000), topic="t")
    assert topic.send_batch([held, Message(b"y", deliver_after=30, dedup_key="l")])[0] == ids[0]
    for wrong in (replace(held, dedup_key="m"), replace(held, replace=True)):
        with pytest.raises(DelayTooLong):
            topic.send_batch([Message(b"z", dedup_key="z"), wrong])
    assert sorted(topic.keys()) == ["k", "l"]


BAD_KEYS: list[tuple[dict[str, Any], str]] = [
    ({"dedup_key": ""}, "dedup_key"),
    ({"dedup_key": 17}, "dedup_key"),
    ({"dedup_key": "k" * 257}, "dedup_key"),
    ({"dedup_key": "\ud800"}, "dedup_key"),
    ({"dedup_for": 10}, "dedup_for"),
    ({"replace": True}, "replace"),
    ({"dedup_key": "k", "dedup_for": -1}, "dedup_for"),
    ({"dedup_key": "k", "dedup_for": "10"}, "dedup_for"),
]


@pytest.mark.inside
def test_a_key_that_cannot_be_taken_is_refused_by_name(store: DelayedStore) -> None:
    """Nothing is stored, whichever way it is sent, and the topic has not come into being."""
    for arguments, field in BAD_KEYS:
        with pytest.raises(InvalidMessage) as caught:
            store.send_batch([("t", Message(b"x")), ("t", Message(b"x", **arguments))])
        assert caught.value.field == f"messages[1].{field}"
        topic = store.topic("t")
        ways: list[Callable[..., object]] = [topic.send, topic.send_async, partial(topic.put, done=print)]
        for way in ways:
            with pytest.raises(InvalidArgument, match=f"^{field}="):
                way(b"x", **arguments)
    assert not store.topic("t").exists()


@pytest.mark.inside
def test_a_message_with_a_number_and_a_key_is_stored_once_by_either(store: DelayedStore, topic: Topic) -> None:
    """The number is stored with the message that replaces another, and with none where the key holds; beside others."""
    producer, heard = topic.producer("p"), Heard()
    with pytest.raises(InvalidMessage, match="dedup_key"):
        producer.send(Message(b"x", dedup_key="k"), sequence_id=9)
    first = topic.send(b"0", deliver_after=60, dedup_key="k")
    puts = [(b"1", 1, "k", False), (b"2", 2, "k", True), (b"3", 2, "k", True), (b"4", 4, None, False)]

    def put_all() -> None:
        for payload, number, key, replaces in puts:
            named: dict[str, Any] = {"dedup_key": key, "replace": replaces, "numbers": ("p", number, number)}
            topic.put(payload, deliver_after=60, **named, done=heard)

    as_one_group(store, put_all)
    held, replacing, repeated, plain = heard.outcomes(4)
    assert isinstance(held, MessageId)
    assert (held, held.stored, repeated) == (first, False, DUPLICATE)
    as_one_group(store, put_all)
    assert heard.outcomes(8)[4:] == [DUPLICATE] * 4
    assert [each.message_id for each in topic.scheduled()] == [replacing, plain]
    assert producer.last_sequence_id == 4


def test_a_batch_with_keys_that_no_group_takes_is_several(open_store: OpenStore) -> None:
    """Decided on as one that a group takes; one of several topics is refused whole."""
    store = open_store(config=replace(CONFIG, wal_bytes=1 << 20))
    topic = store.topic("t")
    messages = [Message(bytes(1 << 20), deliver_after=60, dedup_key=f"k{number % 7}") for number in range(8)]
    ids = topic.send_batch(messages)
    assert len(set(ids)) == 7
    assert ids[7] == ids[0]
    assert topic.send_batch(messages) == ids
    with pytest.raises(InvalidArgument, match="a group of messages at most"):
        store.send_batch([("u", message) for message in messages])
    assert not store.topic("u").exists()


def test_what_is_replaced_within_a_batch_is_never_delivered(
    store: DelayedStore, topic: Topic, clock: ManualClock
) -> None:
    """By the process that sent it, whose index has not been read anew; it is cancelled, and counted as such."""
    topic.send(b"", deliver_after=1)
    tick_after(store, clock, 1_000)  # the index is in memory
    ids = topic.send_batch(
        [Message(b"%d" % number, deliver_after=60 + number, dedup_key="k", replace=True) for number in range(3)]
    )
    assert [topic.state(each) for each in ids] == ["cancelled", "cancelled", "scheduled"]
    assert topic.stats().pending == 1
    assert delivered_by_topic(store, clock)[0] == [b"", b"2"]
    assert list(store.check(deep=True)) == []
