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

from duelog import DelayedDeliveryPolicies, DelayedStore, ManualClock, Message, StoreConfig
from duelog.errors import DelayTooLong, DuelogError, InvalidArgument, InvalidMessage, StoreFailed
from duelog.partitions.partition import Partition
from duelog.sending.producer import Claim
from duelog.store.errors import BrokenInvariant
from duelog.store.files.failpoints import arm, disarm
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


@pytest.mark.parametrize("groups", [[1] * 9, [2, 3, 4], [4, 1, 4], [9]], ids=str)
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("moved", [0.0, 1.0])
def test_numbers_of_a_batch_that_a_crash_broke_off_are_stored_however_they_are_sent_again(
    open_store: OpenStore, tmp_path: Path, clock: ManualClock, groups: list[int], backwards: bool, moved: float
) -> None:
    """One by one, in other groups, in other order, with other due times: a number in a gap is not taken for stored."""
    store = open_store(config=replace(HOURS, durability="none"))
    left = 2

    def die() -> None:
        nonlocal left
        left -= 1
        if left == 0:  # two of the three hours are not there
            shutil.copytree(store.path, tmp_path / "died")
            raise Lost

    store.topic("t").producer("p")
    store.topic("other").send_batch(batch_of(3, lambda at: 1.5 + at))  # so that only commits of the batch come
    arm("commit.before", die)
    with pytest.raises(Lost):
        store.topic("t").producer("p").send_batch(batch_of(9, lambda at: 1.5 + at % 3), first_sequence_id=0)
    disarm()
    store = open_store(tmp_path / "died", config=HOURS)
    producer = store.topic("t").producer("p")
    assert producer.last_sequence_id == 6
    again = batch_of(9, lambda at: 1.5 + moved + at % 3)
    parts = [(sum(groups[:at]), sum(groups[: at + 1])) for at in range(len(groups))]
    stored = [
        start + at
        for start, limit in (reversed(parts) if backwards else parts)
        for at, message_id in enumerate(producer.send_batch(again[start:limit], first_sequence_id=start))
        if message_id is not None
    ]
    assert sorted(stored) == [1, 2, 4, 5, 7, 8]
    assert delivered(store, clock) == list(range(9))


def test_a_number_that_was_left_out_is_stored_when_it_comes(open_store: OpenStore, clock: ManualClock) -> None:
    """Numbers need not ascend, before a reopen or after it, nor when the partitions of others are gone."""
    store = open_store(config=HOURS)
    producer = store.topic("t").producer("p")
    for number in (70_000, 5, 131_072, 7):
        assert producer.send(Message(b"%d" % number, deliver_after=1), sequence_id=number) is not None
        assert producer.send(Message(b"%d" % number, deliver_after=9_000), sequence_id=number) is None
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

    answers: list[list[bool]] = []

    def send(first: int, hours: float) -> None:
        messages = [Message(b"%d" % number, deliver_after=3_600 * hours) for number in (first, first + 1)]
        answers.append([each is not None for each in producer.send_batch(messages, first_sequence_id=first)])

    arm("commit.before", hold)
    one = threading.Thread(target=send, args=(0, 1))
    one.start()
    assert committing.wait(60)
    others = [threading.Thread(target=send, args=(1, 2)), threading.Thread(target=send, args=(0, 2))]
    for other in others:
        other.start()
    go.set()
    for thread in (one, *others):
        thread.join()
    assert answers[0] == [True, True]
    assert sorted(answers[1:]) == [[False, False], [False, True]]
    assert delivered(store, clock) == [0, 1, 2]


def test_a_number_whose_commit_is_in_doubt_is_refused_until_the_store_is_opened_again(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """It is not sent to another partition meanwhile, where it would be a second time; other numbers are."""
    store = open_store(config=HOURS)
    producer = store.topic("t").producer("p")
    producer.send_batch(batch_of(2, lambda at: at + 1), first_sequence_id=0)

    def lose() -> None:
        raise Lost

    arm("commit.after", lose)
    with pytest.raises(Lost):
        producer.send(Message(b"2", deliver_after=3_600), sequence_id=2)
    disarm()
    with pytest.raises(StoreFailed):
        producer.send(Message(b"2", deliver_after=7_200), sequence_id=2)
    assert producer.send(Message(b"3", deliver_after=7_200), sequence_id=3) is not None
    store.close()
    store = open_store(config=HOURS)
    assert store.topic("t").producer("p").send(Message(b"2", deliver_after=7_200), sequence_id=2) is None
    assert delivered(store, clock) == [0, 1, 2, 3]


@pytest.mark.parametrize("begun", [True, False], ids=["committing", "not begun"])
def test_a_batch_that_goes_on_after_its_caller_was_interrupted_stores_nothing_twice(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """Another thread still writes a part of it when the numbers are sent again."""
    store = open_store(config=HOURS)
    producer = store.topic("t").producer("p")
    producer.send_batch(batch_of(2, lambda at: at + 1), first_sequence_id=10)
    caller, waits, go, ended = threading.current_thread(), threading.Event(), threading.Event(), threading.Event()
    append = Partition.append

    def hold() -> None:
        if threading.current_thread() is caller:
            waits.wait(60)
            raise KeyboardInterrupt
        waits.set()
        go.wait(60)

    def held(self: Partition, *args: object, **named: object) -> object:
        if not begun and threading.current_thread() is not caller and not waits.is_set():
            hold()
        try:
            return append(self, *args, **named)  # type: ignore[arg-type]
        finally:
            if threading.current_thread() is not caller and go.is_set():
                ended.set()

    monkeypatch.setattr(Partition, "append", held)

    def hold_caller() -> None:
        if threading.current_thread() is caller:
            hold()

    arm("commit.before", hold if begun else hold_caller)
    with pytest.raises(KeyboardInterrupt):
        producer.send_batch(batch_of(2, lambda at: at + 1), first_sequence_id=0)
    disarm()
    if begun:
        go.set()
    ids = producer.send_batch(batch_of(2, lambda at: 3), first_sequence_id=0)  # by this thread
    assert [each is not None for each in ids] == [True, not begun]
    go.set()
    assert ended.wait(60)
    assert delivered(store, clock) == [0, 0, 1, 1]  # numbers 10 and 11 say 0 and 1 too


def test_a_call_that_has_ended_cannot_store_numbers_that_another_has_claimed(open_store: OpenStore) -> None:
    """What it left to other threads is refused, also before the other call has stored them."""
    store = open_store()
    state = store.topic("t").producer("p")._producer
    main = store._engine.main
    ended, now = Claim(), Claim()
    with ended.calling:
        state.claim(ended, 0, 3)
        main.write(lambda transaction: state.write(transaction, ended, [1]))
    with now.calling:
        state.claim(now, None, 1)
        assert list(now.numbers) == [3]  # above those that were not stored
        now.numbers.clear()
        state.claim(now, 0, 4)
        assert list(now.numbers) == [0, 2, 3]
        with pytest.raises(DuelogError, match="has ended"):
            main.write(lambda transaction: state.write(transaction, ended, [2]))
        main.write(lambda transaction: state.write(transaction, now, [0, 2, 3]))
        with pytest.raises(BrokenInvariant):
            main.write(lambda transaction: state.write(transaction, now, [2]))


def test_a_number_that_is_stored_is_known_also_when_its_delay_is_refused_by_now(open_store: OpenStore) -> None:
    """Delay policies are for what is stored: a maximum that was lowered since has no say, a new number takes none."""
    store = open_store(config=HOURS)
    producer = store.topic("t").producer("p")
    batch = [Message(b"%d" % number, deliver_after=3_600) for number in range(3)]
    assert None not in producer.send_batch(batch[:2])
    store.set_policies(DelayedDeliveryPolicies(max_delivery_delay_ms=60_000), topic="t")
    assert producer.send(batch[1], sequence_id=1) is None
    assert producer.send_batch(batch[:2], first_sequence_id=0) == [None, None]
    with pytest.raises(DelayTooLong):
        producer.send_batch(batch, first_sequence_id=0)
    assert producer.send(Message(b"2")) is not None
    assert producer.last_sequence_id == 2
