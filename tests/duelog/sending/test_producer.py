"""Named producers: a number is stored once, whatever happened to the answer."""

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from duelog import DelayedDeliveryPolicies, DelayedStore, ManualClock, Message, MessageId, StoreConfig
from duelog.errors import DelayTooLong, InvalidArgument, InvalidMessage
from duelog.store.codec import format as fmt
from duelog.store.files.failpoints import arm, disarm
from duelog.store.log import catalog
from duelog.store.wal.write_batch import WriteBatch
from duelog.topics.producer_state import NumbersStored
from tests.conftest import OpenStore
from tests.duelog.store_state import payloads_after
from tests.model.driver import armed

HOURS = StoreConfig(partition_ms=3_600_000, ledger_max_entries=3)


class Lost(Exception):
    """The answer of a commit never came."""


def delivered(store: DelayedStore, clock: ManualClock) -> list[int]:
    """The numbers that payloads say, once everything is due."""
    return sorted(map(int, payloads_after(store, clock, 360_000_000)))


def batch_of(count: int, hours: Callable[[int], float]) -> list[Message]:
    """Messages that say their number, due at the hour that `hours` gives."""
    return [Message(b"%d" % number, deliver_after=hours(number) * 3_600) for number in range(count)]


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


def test_a_message_that_is_refused_takes_no_number(store: DelayedStore) -> None:
    """All of a batch is checked first; a number that is none is refused by name."""
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
    with armed("wal.before", die), pytest.raises(Lost):
        producer.send_batch(large(1.5), first_sequence_id=0)
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


def test_two_calls_that_send_one_number_at_once_store_it_once(open_store: OpenStore, clock: ManualClock) -> None:
    """The second waits for the first, and is told that the number is stored; batches that overlap too."""
    store = open_store(config=HOURS)
    producer = store.topic("t").producer("p")
    for hours in (1, 2):  # so that no group is written but those of the calls
        store.topic("other").send(b"x", deliver_after=3_600 * hours)
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


def test_a_group_stores_a_number_once_whatever_its_units_have_looked_up(store: DelayedStore) -> None:
    """Who sends it second looks again; so does one who looked before the group that stored it."""
    state = store.topic("t").producer("p")._producer
    write = store._engine.writer().write

    def twice(group: WriteBatch) -> None:
        state.write(group, [0, 3])
        assert list(state.following(group, 2)) == [4, 5]
        state.write(group, [3])

    with pytest.raises(NumbersStored):
        write(twice)
    assert list(state.unstored_of(0, 4)) == [0, 1, 2, 3]
    write(lambda group: state.write(group, [1]))
    assert list(state.unstored_of(0, 4)) == [0, 2, 3]
    with pytest.raises(NumbersStored):
        write(lambda group: state.write(group, [1, 2]))
    assert store.topic("t").producer("p").last_sequence_id == 1


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
