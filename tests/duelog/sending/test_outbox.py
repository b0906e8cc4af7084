"""send_async: futures, order, bounded memory, back-pressure, and what closing does."""

import _thread
import os
import signal
import threading
from concurrent.futures import Future, wait
from typing import Any
from unittest.mock import patch

import pytest

from duelog import DelayedStore, MessageId, StoreConfig, Topic
from duelog.errors import ClosedError, DuelogError, InvalidMessage, ResourceShortage
from tests.conftest import OpenStore, raising
from tests.duelog.sending.putting import Held

LIMIT_S = 60


Outcomes = list[tuple[Any, Any]]


@pytest.fixture
def small(open_store: OpenStore) -> DelayedStore:
    """A store that takes 4,000 bytes in flight, with a topic."""
    store = open_store(config=StoreConfig(max_in_flight_bytes=4_000))
    store.topic("t").send(b"first")
    return store


def test_futures_have_the_ids_and_a_topic_keeps_the_order(topic: Topic) -> None:
    """Messages of one thread are in the log in its order."""
    futures = [topic.send_async(str(number).encode()) for number in range(500)]
    ids = [future.result(LIMIT_S) for future in futures]
    assert ids == sorted(set(ids))
    with topic.subscribe("s") as consumer:
        batch = consumer.receive(1_000)
        assert [int(message.payload) for message in batch] == list(range(500))
        consumer.ack(batch)


def test_a_sender_waits_while_the_bound_is_reached_and_not_longer(small: DelayedStore) -> None:
    """The bound holds in bytes; what has been written makes room."""
    held = Held(small)
    topic = small.topic("t")
    futures: list[Future[MessageId]] = []
    taken = 0
    while topic.put(b"x" * 500, done=_nothing, wait=False):
        taken += 1
    assert taken
    assert 0 < small._engine.sending.outbox._bytes <= 4_000
    sent = threading.Event()

    def send() -> None:
        futures.append(topic.send_async(b"x" * 1_000))
        sent.set()

    thread = threading.Thread(target=send)
    thread.start()
    assert held.reached.wait(LIMIT_S)
    assert not sent.is_set()
    held.let_go.set()
    assert sent.wait(LIMIT_S)
    thread.join()
    wait(futures, LIMIT_S)
    assert all(future.exception() is None for future in futures)
    assert small._engine.sending.outbox._bytes == 0


def _nothing(results: Outcomes) -> None:
    pass


def test_of_threads_that_put_together_one_writes_and_close_waits_for_it(small: DelayedStore) -> None:
    """What another puts in meanwhile it writes too."""
    outbox, sender = small._engine.sending.outbox, small.topic("t").sender
    heard: Outcomes = []

    def put(*tokens: int) -> bool:
        encoded = sender.encode_one(b"x", None, None, None, None, False, None, None)
        items = [sender.outgoing(encoded, token, heard.extend, dedup=None) for token in tokens]
        return outbox.put_together(items, sum(item.size for item in items))

    assert put(0, 1)
    assert not put(2)
    closing = threading.Thread(target=small.close)
    closing.start()
    outbox.write()
    closing.join(LIMIT_S)
    assert [(token, type(outcome)) for token, outcome in heard] == [(at, MessageId) for at in range(3)]
    assert outbox._bytes == 0
    with pytest.raises(ClosedError):
        put(3)


def test_a_child_closes_what_it_has_inherited_without_waiting_for_the_parents_thread(small: DelayedStore) -> None:
    """It waited for ever once the parent had used `send_async`, or had a client that sends."""
    small.topic("t").send_async(b"x").result(LIMIT_S)
    child = os.fork()
    if not child:
        signal.alarm(20)
        small.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_message_larger_than_the_bound_is_taken_alone(small: DelayedStore) -> None:
    """It would wait for ever else."""
    assert small.topic("t").send_async(b"x" * 10_000).result(LIMIT_S)


def test_a_callback_may_send_when_the_bound_is_reached(small: DelayedStore) -> None:
    """The threads that make room never wait for it."""
    topic, done = small.topic("t"), threading.Event()

    def again(_: Future[MessageId]) -> None:
        more = [topic.send_async(b"y" * 3_000) for _ in range(5)]
        more[-1].add_done_callback(lambda _: done.set())

    topic.send_async(b"x" * 3_000).add_done_callback(again)
    assert done.wait(LIMIT_S)


def test_a_future_cancelled_in_time_takes_its_message_back(small: DelayedStore) -> None:
    """One that waits behind a commit is never written."""
    held = Held(small)
    topic = small.topic("t")
    first = topic.send_async(b"a")
    assert held.reached.wait(LIMIT_S)
    second = topic.send_async(b"b")
    assert second.cancel()
    assert not first.cancel()
    held.let_go.set()
    assert first.result(LIMIT_S)
    topic.send(b"c")
    with topic.subscribe("s") as consumer:
        assert [message.payload for message in consumer.receive(9)] == [b"first", b"a", b"c"]


def test_close_writes_what_is_in_flight_and_refuses_what_comes_after(open_store: OpenStore) -> None:
    """No future is left without an answer."""
    store = open_store()
    topic = store.topic("t")
    futures = [topic.send_async(b"x", deliver_after=60) for _ in range(100)]
    store.close()
    assert all(future.done() and future.exception() is None for future in futures)
    with pytest.raises(ClosedError):
        topic.send_async(b"late")
    store = open_store()
    assert len(list(store.topic("t").scheduled())) == 100


def test_what_cannot_be_taken_is_refused_at_once(small: DelayedStore) -> None:
    """By the call, not by a future that nobody may look at."""
    with pytest.raises(InvalidMessage):
        small.topic("t").send_async("text")  # type: ignore[arg-type]


def test_an_error_of_the_write_is_in_every_future_of_its_batch(small: DelayedStore) -> None:
    """A topic deleted under the messages' feet, say."""
    held = Held(small)
    topic = small.topic("t")
    futures = [topic.send_async(b"x"), topic.send_async(b"y")]
    held._write = raising(RuntimeError("made up"))
    held.let_go.set()
    assert all(isinstance(future.exception(LIMIT_S), RuntimeError) for future in futures)


def test_closing_the_store_in_a_callback_is_refused_and_does_not_deadlock(store: DelayedStore) -> None:
    """The callback runs in a thread that closing waits for: it gets an error, and the store stays open."""
    held = Held(store)
    future = store.topic("t").send_async(b"x")
    assert held.reached.wait(LIMIT_S)
    raised: list[BaseException] = []
    called = threading.Event()

    def close(_: Future[MessageId]) -> None:
        try:
            store.close()
        except DuelogError as error:
            raised.append(error)
        finally:
            called.set()

    future.add_done_callback(close)
    held.let_go.set()
    assert called.wait(LIMIT_S)
    assert "callback" in str(raised[0])
    assert not store.closed
    assert store.topic("t").send_async(b"y").result(LIMIT_S)


def test_a_message_whose_thread_cannot_be_started_is_refused_and_not_written_later(small: DelayedStore) -> None:
    """Nothing stays in flight, and those after it are written, each once."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    topic = small.topic("t")
    with patch.object(_thread, "start_new_thread", refuse), pytest.raises(ResourceShortage, match="thread"):
        topic.send_async(b"refused")
    assert small._engine.sending.outbox._bytes == 0
    for number in range(3):
        topic.send_async(b"%d" % number).result(LIMIT_S)
    with topic.subscribe("s") as consumer:
        assert [message.payload for message in consumer.receive(10)] == [b"first", b"0", b"1", b"2"]


@pytest.mark.parametrize("complete", ["result", "error"])
def test_a_send_async_future_that_its_caller_completed_loses_no_accepted_message(
    small: DelayedStore, complete: str
) -> None:
    """Its message is written, and those behind it; closing waits for them."""
    held, topic = Held(small), small.topic("t")
    first = topic.send_async(b"a")
    assert held.reached.wait(LIMIT_S)
    completed, last = topic.send_async(b"b"), topic.send_async(b"c")
    if complete == "result":
        completed.set_result(MessageId(1, 1))
    else:
        completed.set_exception(ValueError("made up"))
    held.let_go.set()
    assert first.result(LIMIT_S) < last.result(LIMIT_S)
    assert topic.send_async(b"d").result(LIMIT_S)
    with topic.subscribe("s") as consumer:
        assert [message.payload for message in consumer.receive(9)] == [b"first", b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_future_that_is_done_already_leaves_none_of_its_flush_unresolved(small: DelayedStore, fails: bool) -> None:
    """A future completed while its message is being written holds up no other of the group, success or error."""
    held, topic = Held(small), small.topic("t")
    topic.put(b"x", done=_nothing)
    assert held.reached.wait(LIMIT_S)
    futures = [topic.send_async(b"%d" % number) for number in range(4)]
    write = held._write

    def complete_first(work: object) -> Any:
        if futures[0].running():
            futures[0].set_result(MessageId(1, 1))
            futures[1].add_done_callback(_exit)
            if fails:
                raise RuntimeError("made up")
        return write(work)  # type: ignore[arg-type]

    held._write = complete_first
    held.let_go.set()
    assert not wait(futures, LIMIT_S).not_done
    assert all(isinstance(future.exception(), RuntimeError) is fails for future in futures[1:])


def _exit(_: Future[MessageId]) -> None:
    raise SystemExit
