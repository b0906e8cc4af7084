"""Named producers: a number is stored once, whatever happened to the answer."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from duelog import DelayedDeliveryPolicies, DelayedStore, ManualClock, Message, MessageId, StoreConfig
from duelog.errors import DelayTooLong, DuelogError, InvalidArgument, InvalidMessage, StoreFailed, StoreFull
from duelog.sending.wal_segments import WalSegments
from duelog.store.codec import format as fmt
from duelog.store.errors import BrokenInvariant
from duelog.store.files.failpoints import arm, disarm
from duelog.store.log import catalog
from duelog.topics.producer_state import Claim
from tests.conftest import OpenStore

HOURS = StoreConfig(partition_ms=3_600_000, ledger_max_entries=3)


class Lost(Exception):
    """The answer of a commit never came."""


def delivered(store: DelayedStore, clock: ManualClock) -> list[int]:
    """The numbers that payloads say, once everything is due."""
    clock.advance(360_000_000)
    with store.topic("t").subscribe("s") as consumer:
        store.tick()
        return sorted(int(message.payload) for message in consumer.receive(1_000))


def batch_of(count: int, hours: Callable[[int], float]) -> list[Message]:
    """Messages that say their number, due at the hour that `hours` gives."""
    return [Message(b"%d" % number, deliver_after=hours(number) * 3_600) for number in range(count)]


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
    assert producer.send(Message(b"a", deliver_after=1_800), sequence_id=10) == first
    assert producer.send(Message(b"b")) is not None
    assert producer.last_sequence_id == 11
    assert topic.producer("other").send(Message(b"c"), sequence_id=10) is not None
    assert sorted(message.payload for message in topic.subscribe("s").receive(10)) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("seed", range(8))
def test_a_batch_that_was_broken_off_is_stored_once_by_sending_it_again(
    open_store: OpenStore, clock: ManualClock, seed: int
) -> None:
    """It was stored, or not, or is in doubt: sent again it is there once."""
    chance = random.Random(seed)
    store = open_store(config=HOURS)
    topic = store.topic("t")
    producer = topic.producer("p")
    number = 0
    for _ in range(12):
        batch = [Message(b"%d" % (number + at), deliver_after=chance.choice([0, 600, 4_000, 9_000])) for at in range(5)]
        left = chance.randrange(1, 3)

        def break_off() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Lost

        point = chance.choice(["wal.before", "wal.after"])
        arm(point, break_off)
        try:
            with suppress(Lost, StoreFailed):
                producer.send_batch(batch, first_sequence_id=number)
        finally:
            disarm()
        if point == "wal.after" or chance.random() < 0.5:  # a commit in doubt asks for a reopen
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
    first = topic.producer("p").send(Message(b"x", deliver_after=2), sequence_id=5)
    clock.advance(10_000)
    consumer.ack(consumer.receive())
    clock.advance(1_000)
    store.tick()
    assert store.partitions() == []
    store.close()
    store = open_store(config=StoreConfig(partition_ms=1_000, ledger_max_entries=1))
    producer = store.topic("t").producer("p")
    assert producer.last_sequence_id == 5
    assert producer.send(Message(b"x", deliver_after=2), sequence_id=5) in (first, None)


def test_after_a_crash_the_send_of_a_known_number_answers_with_the_id_to_cancel_by(
    open_store: OpenStore, clock: ManualClock, tmp_path: Path
) -> None:
    """The process dies before it has heard of its ids; it sends the same again, is given them, and cancels one."""
    store = open_store(config=HOURS)
    batch = batch_of(80, lambda number: 1 + number % 5)
    store.topic("t").producer("p").send_batch([*batch, Message(b"80")])
    shutil.copytree(store.path, tmp_path / "crashed")
    store = open_store(tmp_path / "crashed", config=HOURS)
    topic = store.topic("t")
    ids = topic.producer("p").send_batch([*batch, Message(b"80")], first_sequence_id=0)
    found = [None if each is None else topic.get(each) for each in ids]
    assert [each and int(each.payload) for each in found] == list(range(81))
    assert ids[7] is not None
    assert topic.cancel(ids[7])
    assert delivered(store, clock) == [number for number in range(81) if number != 7]


def test_ids_of_numbers_go_when_what_they_are_of_is_gone(open_store: OpenStore, clock: ManualClock) -> None:
    """Records do not pile up: of a partition and a ledger that are deleted nothing is left; the number stays known."""
    config = replace(HOURS, partition_ms=1_000, ledger_max_entries=1)
    store = open_store(config=config)
    topic = store.topic("t")
    consumer = topic.subscribe("s")
    producer = topic.producer("p")
    gone = producer.send_batch([Message(b"0", deliver_after=2), Message(b"1")])
    kept = producer.send(Message(b"2", deliver_after=2_000), sequence_id=3)
    assert None not in gone
    clock.advance(10_000)
    consumer.ack(consumer.receive())
    consumer.ack(consumer.receive())
    for _ in range(2):
        clock.advance(60_001)
        topic.send(b"more")
        consumer.ack(consumer.receive())
        store.tick()
    assert producer.send_batch([Message(b"again")] * 4, first_sequence_id=0)[::3] == [None, kept]
    with store._engine.storage.main.read() as raw:
        assert len(list(catalog.rows(raw, fmt.prefix(fmt.Table.NUMBERED)))) == 2  # those of numbers 2 and 3


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


@pytest.mark.parametrize("groups", [[1] * 9, [2, 3, 4], [4, 1, 4], [9]], ids=str)
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("moved", [0.0, 1.0])
def test_numbers_of_a_large_batch_that_a_crash_broke_off_are_stored_however_they_are_sent_again(
    open_store: OpenStore, tmp_path: Path, clock: ManualClock, groups: list[int], backwards: bool, moved: float
) -> None:
    """One by one, in other groups, in other order, with other due times: a number that is not there is stored."""
    config = replace(HOURS, durability="none", wal_bytes=16 << 10, max_message_bytes=40_000)
    store = open_store(config=config)

    def die() -> None:
        partitions = store._engine.storage.partitions
        if any(log.ledger.entries for each in partitions for log in each._logs.values()):  # the first group of three
            shutil.copytree(store.path, tmp_path / "died")
            raise Lost

    def large(delay: float) -> list[Message]:
        return [
            replace(each, payload=bytes(each.payload).ljust(30_000)) for each in batch_of(9, lambda at: delay + at % 3)
        ]

    producer = store.topic("t").producer("p")
    arm("wal.before", die)
    try:
        with pytest.raises(Lost):
            producer.send_batch(large(1.5), first_sequence_id=0)
    finally:
        disarm()
    store = open_store(tmp_path / "died", config=config)
    producer = store.topic("t").producer("p")
    assert producer.last_sequence_id == 2
    again = large(1.5 + moved)
    parts = [(sum(groups[:at]), sum(groups[: at + 1])) for at in range(len(groups))]
    ids = {
        start + at: message_id
        for start, limit in (reversed(parts) if backwards else parts)
        for at, message_id in enumerate(producer.send_batch(again[start:limit], first_sequence_id=start))
    }
    found = {number: None if each is None else store.topic("t").get(each) for number, each in ids.items()}
    assert {number: each and int(each.payload) for number, each in found.items()} == {at: at for at in range(9)}
    assert delivered(store, clock) == list(range(9))


def test_numbers_that_found_no_space_are_sent_again(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that failed claims them no more; what it would have written later is refused."""
    store = open_store(config=replace(HOURS, wal_bytes=16 << 10))
    producer = store.topic("t").producer("p")
    with monkeypatch.context() as patch:

        def refuse(*_: object, **__: object) -> None:
            raise StoreFull(store.path, "no room, says the test")

        patch.setattr(WalSegments, "fits", lambda *_: False)
        patch.setattr(WalSegments, "fits_reserve", lambda *_: True)
        patch.setattr(WalSegments, "make_space", refuse)
        for _ in range(2):
            with pytest.raises(StoreFull):
                producer.send_batch(batch_of(3, lambda at: at), first_sequence_id=0)
        assert producer.last_sequence_id == -1
    ids = producer.send_batch(batch_of(3, lambda at: at), first_sequence_id=0)
    assert None not in ids
    assert producer.send_batch(batch_of(3, lambda at: at), first_sequence_id=0) == ids
    assert delivered(store, clock) == [0, 1, 2]


def test_a_number_that_was_left_out_is_stored_when_it_comes(open_store: OpenStore, clock: ManualClock) -> None:
    """Numbers need not ascend, before a reopen or after it, nor when the partitions of others are gone."""
    store = open_store(config=HOURS)
    producer = store.topic("t").producer("p")
    for number in (70_000, 5, 131_072, 7):
        first = producer.send(Message(b"%d" % number, deliver_after=1), sequence_id=number)
        assert first is not None
        assert producer.send(Message(b"%d" % number, deliver_after=9_000), sequence_id=number) == first
    store.close()
    store = open_store(config=HOURS)
    producer = store.topic("t").producer("p")
    assert producer.last_sequence_id == 131_072
    for number in (0, 6, 69_999, 200_000):
        assert producer.send(Message(b"%d" % number, deliver_after=9_000), sequence_id=number) is not None
    assert producer.send(Message(b"200001")) is not None
    assert delivered(store, clock) == [0, 5, 6, 7, 69_999, 70_000, 131_072, 200_000, 200_001]


def test_two_calls_that_send_one_number_at_once_store_it_once(open_store: OpenStore, clock: ManualClock) -> None:
    """The second waits for the first, and is told that the number is stored; batches that overlap too."""
    store = open_store(config=HOURS)
    producer = store.topic("t").producer("p")
    committing, go = threading.Event(), threading.Event()

    def hold() -> None:
        disarm()
        committing.set()
        go.wait(60)

    answers: list[list[MessageId | None]] = []

    def send(first: int, hours: float) -> None:
        messages = [Message(b"%d" % number, deliver_after=3_600 * hours) for number in (first, first + 1)]
        answers.append(producer.send_batch(messages, first_sequence_id=first))

    arm("wal.before", hold)
    one = threading.Thread(target=send, args=(0, 1))
    one.start()
    assert committing.wait(60)
    others = [threading.Thread(target=send, args=(1, 2)), threading.Thread(target=send, args=(0, 2))]
    for other in others:
        other.start()
    go.set()
    for thread in (one, *others):
        thread.join()
    third = next(ids for ids in answers if ids[0] != answers[0][0])
    assert answers.count(answers[0]) == 2
    assert third[0] == answers[0][1]
    assert third[1] not in (None, *answers[0])
    assert delivered(store, clock) == [0, 1, 2]


def test_a_number_whose_group_is_in_doubt_is_refused_until_the_store_is_opened_again(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """Every other number is too; then it is known to be stored."""
    store = open_store(config=HOURS)
    producer = store.topic("t").producer("p")
    producer.send_batch(batch_of(2, lambda at: at + 1), first_sequence_id=0)

    def lose() -> None:
        raise Lost

    arm("wal.after", lose)
    try:
        with pytest.raises(Lost):
            producer.send(Message(b"2", deliver_after=3_600), sequence_id=2)
    finally:
        disarm()
    for number in (2, 3):
        with pytest.raises(StoreFailed):
            producer.send(Message(b"%d" % number, deliver_after=7_200), sequence_id=number)
    store.close()
    store = open_store(config=HOURS)
    known = store.topic("t").producer("p").send(Message(b"2", deliver_after=7_200), sequence_id=2)
    assert known is not None
    message = store.topic("t").get(known)
    assert message is not None
    assert message.payload == b"2"
    assert delivered(store, clock) == [0, 1, 2]


def test_a_call_that_has_ended_cannot_store_numbers_that_another_has_claimed(open_store: OpenStore) -> None:
    """Numbers left to other threads are refused, also before the other call has stored them."""
    store = open_store()
    state = store.topic("t").producer("p")._producer
    wal_writer = store._engine.sending.wal_writer
    assert wal_writer is not None
    ended, now = Claim(), Claim()
    with ended.calling:
        state.claim(ended, 0, 3)
        wal_writer.write(lambda group: state.write(group, ended, [1]))
    with now.calling:
        state.claim(now, None, 1)
        assert list(now.numbers) == [3]  # above those that were not stored
        now.numbers.clear()
        state.claim(now, 0, 4)
        assert list(now.numbers) == [0, 2, 3]
        with pytest.raises(DuelogError, match="has ended"):
            wal_writer.write(lambda group: state.write(group, ended, [2]))
        wal_writer.write(lambda group: state.write(group, now, [0, 2, 3]))
        with pytest.raises(BrokenInvariant):
            wal_writer.write(lambda group: state.write(group, now, [2]))


def test_a_number_that_is_stored_is_known_also_when_its_delay_is_refused_by_now(open_store: OpenStore) -> None:
    """Delay policies are for what is stored: a maximum that was lowered since has no say, a new number takes none."""
    store = open_store(config=HOURS)
    producer = store.topic("t").producer("p")
    batch = [Message(b"%d" % number, deliver_after=3_600) for number in range(3)]
    ids = producer.send_batch(batch[:2])
    assert None not in ids
    store.set_policies(DelayedDeliveryPolicies(max_delivery_delay_ms=60_000), topic="t")
    assert producer.send(batch[1], sequence_id=1) == ids[1]
    assert producer.send_batch(batch[:2], first_sequence_id=0) == ids
    with pytest.raises(DelayTooLong):
        producer.send_batch(batch, first_sequence_id=0)
    assert producer.send(Message(b"2")) is not None
    assert producer.last_sequence_id == 2
