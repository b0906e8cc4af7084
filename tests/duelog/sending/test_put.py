"""Topic.put: who put messages in hears of a group at once, in order; numbers go with their messages, by one commit."""

import _thread
import logging
import threading
from asyncio import CancelledError
from collections.abc import Callable
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest

from duelog import DUPLICATE, DelayedDeliveryPolicies, DelayedStore, Message, MessageId, StoreConfig, Topic
from duelog.errors import DelayTooLong, DuelogError, InvalidArgument, InvalidMessage, StoreFull, UnknownTopic
from duelog.topics.producer_state import MOST_NUMBERS
from tests.conftest import OpenStore, present, raising
from tests.duelog.sending.putting import LIMIT_S, Heard, together
from tests.duelog.side_by_side import crashed, in_wal
from tests.model.driver import armed


def test_puts_of_any_topics_are_one_group_of_which_each_done_hears_once_in_order(store: DelayedStore) -> None:
    """The ids are those that a receiver sees; main log and partitions are one group of the write-ahead log."""
    topics = [store.topic(name) for name in ("a", "b", "c")]
    for topic in topics:
        topic.send(b"first", deliver_after=60)
    groups, one, other = len(in_wal(store)), Heard(), Heard()

    def put() -> None:
        for number in range(30):
            after = number if number % 2 else None
            done = one if number % 3 else other
            assert topics[number % 3].put(b"%d" % number, deliver_after=after, token=number, done=done)

    together(store, put)
    one.wait(20)
    other.wait(10)
    assert len(in_wal(store)) == groups + 1
    assert [len(one.groups), len(other.groups)] == [1, 1]
    assert [token for token, _ in one.results] == [number for number in range(30) if number % 3]
    assert [token for token, _ in other.results] == list(range(0, 30, 3))
    for number, message_id in one.results + other.results:
        assert isinstance(message_id, MessageId)
        assert present(topics[number % 3].get(message_id)).payload == b"%d" % number


def test_everything_that_send_takes_put_takes(store: DelayedStore, topic: Topic) -> None:
    """Due time, key and properties are those of the message."""
    heard = Heard()
    topic.put(bytearray(b"x"), deliver_after=5, key="k", properties={"a": "b"}, done=heard)
    topic.put(b"seconds", deliver_at=1_790_000_000, allow_past=True, done=heard)
    scheduled, _ = heard.outcomes(2)
    assert isinstance(scheduled, MessageId)
    found = present(topic.get(scheduled))
    assert (found.payload, found.key, found.properties) == (b"x", "k", {"a": "b"})
    assert found.due_ms == store.clock.now_ms() + 5_000
    with pytest.raises(InvalidMessage, match="seconds"):
        topic.put(b"seconds", deliver_at=1_790_000_000, done=heard)
    with pytest.raises(InvalidMessage):
        topic.put("text", done=heard)  # type: ignore[arg-type]


def test_without_capacity_put_says_so_and_does_nothing_until_a_group_is_done(open_store: OpenStore) -> None:
    """A refused message may be put again when `done` has been called."""
    store, heard = open_store(config=StoreConfig(max_in_flight_bytes=3_000)), Heard()
    topic = store.topic("t")
    taken: list[int] = []

    def put() -> None:
        for number in count():
            if not topic.put(b"x" * 500, token=number, done=heard, wait=False):
                return
            taken.append(number)

    together(store, put)
    heard.wait(len(taken))
    assert 0 < len(taken) < 6
    assert topic.put(b"x" * 500, token="again", done=heard, wait=False)
    assert heard.wait(len(taken) + 1)[-1][0] == "again"


@pytest.mark.parametrize("error", [ValueError, CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_done_callback_that_raises_systemexit_loses_no_accepted_message(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    """Nor does any other error, which is logged: others of its group, and what is put later, are written and heard."""
    store, heard = open_store(), Heard()
    topic = store.topic("t")

    def broken(results: Any) -> None:
        raise error

    def put() -> None:
        topic.put(b"a", done=broken)
        topic.put(b"b", done=heard)

    together(store, put)
    heard.wait(1)
    topic.put(b"c", done=broken)
    topic.put(b"d", done=heard)
    with caplog.at_level(logging.ERROR, "duelog"):
        store.close()
    assert error.__name__ in caplog.text
    assert len(heard.results) == 2
    with open_store().topic("t").subscribe("s") as consumer:
        assert [message.payload for message in consumer.receive(9)] == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_write_that_is_broken_off_is_told_and_what_is_put_after_it_is_written(
    store: DelayedStore, error: type[BaseException]
) -> None:
    """Those that were being written hear that they are in doubt; their number is stored by the next attempt."""
    heard = Heard()
    topic, send = store.topic("t"), store._engine.sending.sender.send_one

    def broken_off(*_: object) -> MessageId:
        store._engine.sending.sender.send_one = send  # type: ignore[method-assign]
        raise error

    store._engine.sending.sender.send_one = broken_off  # type: ignore[assignment]
    topic.put(b"a", done=heard, numbers=("p", 7, 7))
    outcome = heard.outcomes(1)[0]
    assert isinstance(outcome, DuelogError)
    assert error.__name__ in str(outcome)
    topic.put(b"a", done=heard, numbers=("p", 7, 7))
    topic.put(b"b", done=heard)
    store.close()
    assert [type(each) for each in heard.outcomes(3)[1:]] == [MessageId, MessageId]


def test_a_put_that_an_interrupt_ends_leaves_no_later_one_unwritten(open_store: OpenStore) -> None:
    """Its message may be stored or not; those after it are written, each once, though its thread was begun."""
    start = _thread.start_new_thread

    def interrupted(*arguments: Any) -> None:
        start(*arguments)
        raise KeyboardInterrupt

    store, heard = open_store(), Heard()
    topic = store.topic("t")
    with patch.object(_thread, "start_new_thread", interrupted), pytest.raises(KeyboardInterrupt):
        topic.put(b"b", done=heard)
    for payload in (b"c", b"d"):
        assert topic.put(payload, done=heard)
    store.close()
    assert store._engine.sending.outbox._bytes == 0
    assert 2 <= len(heard.results) <= 3


def test_what_does_not_fit_into_one_group_is_several_and_each_outcome_is_its_own(open_store: OpenStore) -> None:
    """The first group stands, the second finds no space: only its messages are told so."""
    store, heard = open_store(config=StoreConfig(wal_bytes=16 << 10, max_message_bytes=1_000)), Heard()
    topic = store.topic("t")
    topic.send(b"first")
    left = [2]

    def full() -> None:
        left[0] -= 1
        if not left[0]:
            raise StoreFull(store.path, "made up")

    with armed("wal.before", full):
        together(store, lambda: [topic.put(b"x" * 900, token=n, done=heard) for n in range(80)])
        outcomes = heard.outcomes(80)
    kinds = [[type(outcome) for _, outcome in group] for group in heard.groups]
    assert [set(kind) for kind in kinds[:2]] == [{MessageId}, {StoreFull}]
    with topic.subscribe("s") as consumer:
        assert len(consumer.receive(200)) == 1 + sum(isinstance(outcome, MessageId) for outcome in outcomes)


@pytest.mark.parametrize("alone", [False, True])
def test_a_topic_that_is_deleted_meanwhile_takes_no_other_along(store: DelayedStore, alone: bool) -> None:
    """The group is written again, topic by topic; the deleted one comes into being anew, as with any message."""
    heard = Heard()
    kept, gone = store.topic("kept"), store.topic("gone")
    gone.send(b"first")
    gone.subscribe("s").close()
    writer = store._engine.writer()
    write, deleted = writer.write, threading.Event()

    def delete_first(work: Any) -> Any:
        if not deleted.is_set():
            deleted.set()
            store.delete_topic("gone")
        return write(work)

    writer.write = delete_first  # type: ignore[method-assign]

    def put() -> None:
        if not alone:
            kept.put(b"a", token="a", done=heard, numbers=("p", 0, 0))
        gone.put(b"b", token="b", done=heard, numbers=None if alone else ("p", 0, 0))
        if not alone:
            kept.put(b"c", token="c", done=heard, numbers=("p", 1, 1))
            kept.put(b"c", token="again", done=heard, numbers=("p", 1, 1))

    together(store, put)
    results = heard.wait(1 if alone else 4)
    assert [token for token, _ in results] == ["b"] if alone else ["a", "b", "c", "again"]
    assert all(isinstance(outcome, MessageId) for token, outcome in results if token != "again")
    assert gone.subscriptions() == []
    assert gone.stats().entries == 1
    if not alone:
        assert dict(results)["again"] is DUPLICATE
        assert [kept.producer_number("p"), gone.producer_number("p")] == [1, 0]


class Unhashable:
    """To be called, and of no use as a key."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, results: Any) -> None:
        raise AssertionError


class HashRaises:
    """One whose hash is an error of its own, as of a frozen dataclass that holds a list."""

    def __hash__(self) -> int:
        raise TypeError("unhashable type: 'list'")

    def __call__(self, results: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize("done", [None, "text", Unhashable(), HashRaises()])
def test_a_done_that_cannot_be_used_is_refused_at_once(open_store: OpenStore, done: Any) -> None:
    """It would be found in the thread that writes."""
    with pytest.raises(InvalidArgument, match="done"):
        open_store().topic("t").put(b"x", done=done)


def test_a_number_that_is_stored_is_a_duplicate_however_it_comes_again(open_store: OpenStore) -> None:
    """In its own group, in a later one, by `producer`, and after the store was opened again."""
    store, heard = open_store(), Heard()
    topic = store.topic("t")
    together(store, lambda: [topic.put(b"x", token=n, numbers=("p", n, n), done=heard) for n in (0, 1, 1, 2, 0)])
    first = heard.outcomes(5)
    assert [outcome is DUPLICATE for outcome in first] == [False, False, True, False, True]
    topic.put(b"x", numbers=("p", 2, 2), done=heard)
    assert heard.outcomes(6)[-1] is DUPLICATE
    assert topic.producer("p").send(Message(b"x"), sequence_id=1) is None
    assert topic.producer("p").send(Message(b"x")) is not None
    assert topic.producer_number("p") == 3
    store.close()
    topic, heard = open_store().topic("t"), Heard()
    assert topic.producer_number("p") == 3
    topic.put(b"x", numbers=("p", 3, 3), done=heard)
    topic.put(b"x", numbers=("q", 3, 3), done=heard)
    assert heard.outcomes(2)[0] is DUPLICATE
    assert isinstance(heard.outcomes(2)[1], MessageId)


def test_a_range_is_one_message_and_a_duplicate_where_all_of_it_is_stored(store: DelayedStore, topic: Topic) -> None:
    """A range stored in part is stored: delivering twice goes before never."""
    heard = Heard()
    ranges = [(0, 9), (3, 5), (8, 12), (0, 12), (13, 13), (11, 14)]
    together(store, lambda: [topic.put(b"x", numbers=("p", *each), done=heard) for each in ranges])
    assert [outcome is not DUPLICATE for outcome in heard.outcomes(6)] == [True, False, True, False, True, True]
    assert topic.producer_number("p") == 14
    assert topic.producer("p").send(Message(b"x"), sequence_id=14) is None


def test_of_a_very_long_range_the_ends_count(topic: Topic) -> None:
    """It costs no more than another."""
    heard = Heard()
    for numbers in ((5, 5 + MOST_NUMBERS), (5, 2**61), (5, 2**61), (7, 7)):
        topic.put(b"x", numbers=("p", *numbers), done=heard)
    assert [outcome is DUPLICATE for outcome in heard.outcomes(4)] == [False, False, True, False]
    assert topic.producer_number("p") == 2**61


def test_numbers_that_are_no_numbers_are_refused(open_store: OpenStore) -> None:
    """By the call, with the field."""
    topic, heard = open_store().topic("t"), Heard()
    for numbers in (("p", 2, 1), ("p", -1, 0), ("p", 0, 2**62), ("p", True, 1), ("p", 0), ["p", 0, 0], ("p", 0.0, 1)):
        with pytest.raises(InvalidArgument, match="numbers"):
            topic.put(b"x", numbers=numbers, done=heard)  # type: ignore[arg-type]
    for name in ("", "a/b", 5):
        with pytest.raises(InvalidArgument, match="producer"):
            topic.put(b"x", numbers=(name, 0, 0), done=heard)  # type: ignore[arg-type]
    assert not topic.exists()


def test_a_number_that_found_no_space_may_be_put_again(store: DelayedStore, topic: Topic) -> None:
    """Neither the message nor the number is stored."""
    heard = Heard()
    topic.send(b"first")
    with armed("wal.before", _full(store.path)):
        together(store, lambda: [topic.put(b"x", numbers=("p", n, n), done=heard) for n in (0, 0, 1)])
        assert [type(outcome) for outcome in heard.outcomes(3)] == [StoreFull] * 3
    assert topic.producer_number("p") == -1
    topic.put(b"x", numbers=("p", 0, 1), done=heard)
    assert isinstance(heard.outcomes(4)[-1], MessageId)


def _full(path: Any) -> Callable[[], None]:
    return raising(StoreFull(path, "made up"))


def test_a_put_and_a_call_that_send_one_number_at_once_store_it_once(topic: Topic) -> None:
    """Whichever is first: the other learns that it is stored."""
    heard = Heard()
    producer = topic.producer("p")
    sending, go_on = threading.Event(), threading.Event()
    append = producer._sender.append

    def held(*arguments: Any) -> Any:
        sending.set()
        assert go_on.wait(LIMIT_S)
        return append(*arguments)

    producer._sender.append = held  # type: ignore[assignment]
    sent: list[MessageId | None] = []
    thread = threading.Thread(target=lambda: sent.append(producer.send(Message(b"x"), sequence_id=4)))
    thread.start()
    assert sending.wait(LIMIT_S)
    topic.put(b"x", numbers=("p", 4, 4), done=heard)
    go_on.set()
    thread.join()
    assert heard.outcomes(1) == [DUPLICATE] or sent == [None]  # who comes second learns no more than that
    assert len(topic.subscribe("s").receive(9, timeout=0)) == 1


def test_a_delay_that_a_policy_forbids_is_refused_but_for_what_is_stored(store: DelayedStore, topic: Topic) -> None:
    """A message that was taken by other policies is not refused when it comes again."""
    heard = Heard()
    topic.put(b"x", deliver_after=100, numbers=("p", 0, 0), done=heard)
    heard.wait(1)
    store.set_policies(DelayedDeliveryPolicies(max_delivery_delay_ms=1_000), topic="t")
    for numbers in (None, ("p", 1, 1), ("q", 0, 0)):
        with pytest.raises(DelayTooLong):
            topic.put(b"x", deliver_after=100, numbers=numbers, done=heard)
    topic.put(b"x", deliver_after=100, numbers=("p", 0, 0), done=heard)
    assert heard.outcomes(2)[-1] is DUPLICATE


def test_the_highest_number_is_told_read_only_too(open_store: OpenStore) -> None:
    """By what is in the write-ahead log alone, too; a topic that does not exist has none."""
    store, heard = open_store(), Heard()
    topic = store.topic("t")
    topic.send(b"x")
    assert topic.producer_number("p") == -1
    topic.put(b"x", numbers=("p", 3, 70_000), done=heard)
    heard.wait(1)
    with pytest.raises(InvalidArgument):
        topic.producer_number("")
    with pytest.raises(UnknownTopic):
        store.topic("other").producer_number("p")
    copy = crashed(store, store.path.with_name("copy"))
    reader = open_store(copy, read_only=True)
    assert [reader.topic("t").producer_number(name) for name in ("p", "q")] == [70_000, -1]
