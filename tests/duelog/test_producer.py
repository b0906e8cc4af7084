"""Named producers: a number is stored once, whatever happened to the answer."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest

from duelog import ManualClock, Message, StoreConfig
from duelog.errors import InvalidArgument, InvalidMessage, StoreFailed
from duelog.store.failpoints import arm, disarm
from tests.conftest import OpenStore

HOURS = StoreConfig(partition_ms=3_600_000, ledger_max_entries=3)


class Lost(Exception):
    """The answer of a commit never came."""


def test_a_number_that_is_stored_is_not_stored_again(open_store: OpenStore, clock: ManualClock) -> None:
    """Also after a reopen, and also when its relative due time would now be in another partition."""
    store = open_store(config=HOURS)
    producer = store.topic("t").producer("p")
    assert producer.last_sequence_id == -1
    first = producer.send(Message(b"a", deliver_after=1_800), sequence_id=10)
    assert first is not None
    store.close()
    clock.advance(3_600_000)
    store = open_store(config=HOURS)
    topic = store.topic("t")
    producer = topic.producer("p")
    assert producer.last_sequence_id == 10
    assert producer.send(Message(b"a", deliver_after=1_800), sequence_id=10) is None
    assert producer.send(Message(b"b")) is not None
    assert producer.last_sequence_id == 11
    assert topic.producer("other").send(Message(b"c"), sequence_id=10) is not None
    assert sorted(message.payload for message in topic.subscribe("s").receive(10)) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("seed", range(8))
def test_a_batch_broken_off_between_its_partitions_is_completed_by_sending_it_again(
    open_store: OpenStore, clock: ManualClock, seed: int
) -> None:
    """Some partitions committed and some not: the retry stores the missing ones and no other."""
    chance = random.Random(seed)
    store = open_store(config=HOURS)
    topic = store.topic("t")
    producer = topic.producer("p")
    number = 0
    for _ in range(12):
        batch = [Message(b"%d" % (number + at), deliver_after=chance.choice([0, 600, 4_000, 9_000])) for at in range(5)]
        left = chance.randrange(1, 6)

        def break_off() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Lost

        point = chance.choice(["commit.before", "commit.after"])
        arm(point, break_off)
        try:
            with suppress(Lost, StoreFailed):
                producer.send_batch(batch, first_sequence_id=number)
        finally:
            disarm()
        if point == "commit.after" or chance.random() < 0.5:  # a commit in doubt asks for a reopen
            store.close()
            store = open_store(config=HOURS)
            topic = store.topic("t")
            producer = topic.producer("p")
        clock.advance(chance.randrange(2_000_000))
        producer.send_batch(batch, first_sequence_id=number)
        number += len(batch)
    clock.advance(36_000_000)
    consumer = topic.subscribe("s")
    got: list[int] = []
    while received := consumer.receive(1_000):
        got += [int(message.payload) for message in received]
    assert sorted(got) == list(range(number))


def test_what_a_deleted_partition_knew_of_a_producer_is_kept(open_store: OpenStore, clock: ManualClock) -> None:
    """A number whose message was delivered, and whose partition is gone, is still known."""
    store = open_store(config=StoreConfig(partition_ms=1_000, ledger_max_entries=1))
    topic = store.topic("t")
    consumer = topic.subscribe("s")
    topic.producer("p").send(Message(b"x", deliver_after=2), sequence_id=5)
    clock.advance(10_000)
    consumer.ack(consumer.receive())
    clock.advance(1_000)
    store.tick()
    assert store.partitions() == []
    store.close()
    store = open_store(config=StoreConfig(partition_ms=1_000, ledger_max_entries=1))
    producer = store.topic("t").producer("p")
    assert producer.last_sequence_id == 5
    assert producer.send(Message(b"x", deliver_after=2), sequence_id=5) is None


def test_stores_of_one_process_do_not_share_numbers(open_store: OpenStore, tmp_path: Path) -> None:
    """A producer of the same name in another store has stored nothing."""
    for name in ("one", "two"):
        producer = open_store(tmp_path / name).topic("t").producer("p")
        assert producer.last_sequence_id == -1
        assert producer.send(Message(b"x"), sequence_id=3) is not None
        assert producer.send(Message(b"y"), sequence_id=7) is not None


def test_a_message_that_is_refused_takes_no_number(open_store: OpenStore) -> None:
    """All of a batch is checked first; a number that is none is refused by name."""
    store = open_store()
    producer = store.topic("t").producer("p")
    with pytest.raises(InvalidMessage):
        producer.send(Message("text"))  # type: ignore[arg-type]
    assert producer.send(Message(b"x")) is not None
    assert producer.last_sequence_id == 0
    with pytest.raises(InvalidArgument, match="sequence_id=-1"):
        producer.send(Message(b"x"), sequence_id=-1)
    with pytest.raises(InvalidArgument, match="producer"):
        store.topic("t").producer("a/b")
