"""What `duelog.connect` promises beside the behaviour that it shares with an open store."""

import asyncio
import errno
import inspect
import itertools
import linecache
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn, cast
from unittest.mock import patch

import pytest

import duelog
from duelog import (
    DelayedStore,
    Documents,
    ManualClock,
    Message,
    ReceivedMessage,
    StoreConfig,
    Subscription,
    SubscriptionAdmin,
    Topic,
    Worker,
    aio,
)
from duelog.connected import connected_store
from duelog.connected.connected_store import ConnectedSubscription
from duelog.errors import (
    ClosedError,
    Disconnected,
    DocumentChanged,
    DuelogError,
    InvalidArgument,
    OnlyInProcess,
    StoreFailed,
    TransactionConflict,
)
from duelog.operations import wire, wire_calls, wire_client, wire_peer, wire_server, wire_values
from duelog.operations.face_table import FACE, NOT_OFFERED
from duelog.operations.operation import signature_of
from duelog.operations.wire import Frames
from duelog.operations.wire_client import Call, Connection
from duelog.operations.wire_peer import WirePeer
from duelog.partitions.producer_numbers import split_key
from duelog.sending.outbox import Outbox
from duelog.sending.producer import Producer
from duelog.store.codec.format import Table
from tests.conftest import applied, present, raising
from tests.duelog.unwoken import interrupt_of_sleeping
from tests.store.commits import until

BASES = {each.__name__: each for each in (DelayedStore, Documents, Topic, Producer, Subscription, SubscriptionAdmin)}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DelayedStore]:
    """A store that is open in this process, on the machine's clock."""
    with DelayedStore.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def connected(store: DelayedStore) -> Iterator[DelayedStore]:
    """A connection to it."""
    with duelog.connect(store.path) as found:
        yield found


def test_each_method_of_the_face_is_offered_or_says_that_it_is_not() -> None:
    """Every public name of a class is in the table, or among those not offered, or written in the connected class."""
    kinds = [each for each in vars(connected_store).values() if inspect.isclass(each) and each.__name__[0] == "C"]
    connected = {base.__name__: kind for kind in kinds for base in kind.__bases__ if base.__name__ in BASES}
    assert set(connected) == set(BASES)
    for owner, base in BASES.items():
        public = {name for name in vars(base) if name[0] != "_"} - {"open"}
        assert public - set(vars(connected[owner])) == ({"name"} if owner == "Topic" else set())
    assert {row.owner for row in FACE.values()} == set(BASES)
    assert all(hasattr(BASES[row.owner], row.method) for row in FACE.values())
    assert all(hasattr(BASES[owner], name) for owner, names in NOT_OFFERED.items() for name in names.split())


def test_what_only_the_process_has_says_so_by_name(connected: DelayedStore) -> None:
    """The clock, what drives it, files and callbacks."""
    with pytest.raises(OnlyInProcess, match=r"DelayedStore\.tick: only the process that has the store open") as caught:
        connected.tick()
    assert caught.value.name == "DelayedStore.tick"
    with pytest.raises(OnlyInProcess, match=r"DelayedStore\.clock"):
        _ = connected.clock
    with pytest.raises(OnlyInProcess, match=r"Topic\.put"):
        connected.topic("t").put(b"x", done=print)


def test_nobody_serves_is_one_line_that_says_how(tmp_path: Path) -> None:
    """Of a directory that is none, too."""
    with pytest.raises(
        Disconnected, match=rf"^{tmp_path}/data: no process serves this store; `duelog serve {tmp_path}"
    ):
        duelog.connect(tmp_path / "data")
    with pytest.raises(Disconnected, match=r"`duelog serve DIRECTORY --listen localhost:1` does"):
        duelog.connect("duelog://localhost:1/")
    with pytest.raises(InvalidArgument, match="place=5: expected the path"):
        duelog.connect(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"place='http://x': expected a directory, duelog://host:port"):
        duelog.connect("http://x")


GREETING = wire.framed(wire_values.pack([wire.GREETED, wire.VERSION, {}]))


@pytest.mark.parametrize(
    "pieces",
    [
        [b"SSH-2.0-OpenSSH_9.6\r\n"],
        [wire.framed(b"")],
        [wire.framed(b"\xc1")],
        [wire.framed(wire_values.pack(5))],
        [wire.framed(wire_values.pack([wire.GREETED, 3, {}]))],
        [wire.framed(wire_values.pack([0, wire.ERROR, 5]))],
        [GREETING, wire.framed(wire_values.pack(5))],
        [GREETING, wire.framed(wire_values.pack([1, wire.ERROR, 5]))],
    ],
)
def test_what_answers_and_is_no_store_is_named_by_its_address(pieces: list[bytes]) -> None:
    """Another program, or another version: some were a TypeError, others did not say where."""
    with socket.create_server(("localhost", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection, suppress(ConnectionError):
                for number, piece in enumerate(pieces):
                    if number:
                        connection.recv(1 << 16)
                    connection.sendall(piece)
                while connection.recv(1 << 16):
                    """What the client still asks."""

        thread = threading.Thread(target=answer)
        thread.start()
        place = f"duelog://localhost:{server.getsockname()[1]}"
        try:
            with pytest.raises(Disconnected, match=f"^{place}: "):
                duelog.connect(place, reconnect=0)
        finally:
            thread.join()


def test_a_process_that_is_starting_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `wait`, also where one that was ending refused at first; without a process for so long alone."""
    opened: list[DelayedStore] = []
    answers: Iterator[Any] = iter([None, Disconnected("it closes")])

    def connect(path: Path, patience_s: float) -> Any:
        if opened:
            return real(path, patience_s)
        if (answer := next(answers)) is not None:
            raise answer
        return None

    def sleep(seconds: float) -> None:
        if next(turns) == 1:
            opened.append(DelayedStore.open(tmp_path))

    real, turns = wire_client.Connection.to, iter(range(10))
    monkeypatch.setattr(wire_client.Connection, "to", connect)
    monkeypatch.setattr(connected_store, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep))
    with duelog.connect(tmp_path, wait=30) as store:
        assert not store.closed
    opened.pop().close()
    answers = iter([Disconnected("it closes"), None])
    with pytest.raises(Disconnected, match="it closes"):
        duelog.connect(tmp_path)
    with pytest.raises(Disconnected, match="no process serves"):
        duelog.connect(tmp_path, wait=0)


def test_a_receiver_gets_what_becomes_due_while_it_waits(store: DelayedStore, connected: DelayedStore) -> None:
    """And nothing when its time is over; it holds no more than it asked for."""
    topic = connected.topic("t")
    with topic.subscribe("s") as consumer:
        assert consumer.receive(timeout=0.01) == []
        topic.send_batch([Message(b"a", deliver_after=0.05), Message(b"b", deliver_after=0.05)])
        (message,) = consumer.receive(timeout=20)
        assert (message.payload, store.topic("t").subscription("s").stats().unacknowledged) == (b"a", 1)
        assert [each.payload for each in consumer.receive(5, timeout=20)] == [b"b"]
        assert consumer.ack([message]) == 1


def test_threads_wait_side_by_side_and_each_message_goes_to_one(store: DelayedStore, connected: DelayedStore) -> None:
    """Requests of one connection are answered in any order."""
    with connected.topic("t").subscribe("s", type="shared") as consumer:
        found: list[bytes] = []
        threads = [
            threading.Thread(target=lambda: found.extend(each.payload for each in consumer.receive(timeout=20)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for number in range(4):
            store.topic("t").send(b"%d" % number)
        assert connected.topic("t").exists()
        for thread in threads:
            thread.join()
    assert sorted(found) == [b"0", b"1", b"2", b"3"]


def test_a_receiver_waits_no_longer_than_it_says_behind_one_that_waits_for_longer(store: DelayedStore) -> None:
    """Two threads of one consumer: the second had its answer when the first had."""
    with duelog.connect(store.path) as connected, connected.topic("t").subscribe("s", type="shared") as consumer:
        receive = cast(ConnectedSubscription, consumer).receive_async
        waits = receive()
        assert receive(timeout=0).result(20) == []
        assert receive(timeout=0.01).result(20) == []
        with pytest.raises(InvalidArgument, match="max_messages=0"):
            receive(0).result(20)
        store.topic("t").send(b"x")
        assert [each.payload for each in waits.result(20)] == [b"x"]


def test_a_client_without_a_descriptor_as_it_connects_again_tries_once_more(tmp_path: Path) -> None:
    """Its thread ended by that, and every call waited for ever."""
    store = DelayedStore.open(tmp_path / "store")
    with duelog.connect(store.path) as connected:
        assert not connected.topic("t").exists()
        refused: list[int] = []

        def refuse(*_: object) -> NoReturn:
            refused.append(1)
            raise OSError(errno.EMFILE, "Too many open files")

        with patch.object(socket, "socket", refuse):
            store.close()
            until(lambda: len(refused) > 1)
        with DelayedStore.open(store.path):
            assert not connected.topic("t").exists()


def test_what_a_closed_connection_held_is_handed_out_again(store: DelayedStore) -> None:
    """At once, counted as delivered; its iterators and subscriptions are closed."""
    store.topic("t").send(b"x")
    connected = duelog.connect(store.path)
    consumer = connected.topic("t").subscribe("s", type="shared")
    assert len(consumer.receive(timeout=20)) == 1
    connected.close()
    with pytest.raises(ClosedError):
        consumer.receive()
    with store.topic("t").subscribe("s", type="shared") as other:
        (message,) = other.receive(timeout=20)
        assert message.redelivery_count == 1


def test_a_child_after_fork_is_refused_with_both_pids(connected: DelayedStore) -> None:
    """It connects for itself."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            connected.topic("t").send(b"x")
        except ClosedError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    said = os.read(read, 1_000).decode()
    assert f"connected by process {os.getpid()}; process {child}" in said
    connected.topic("t").send(b"y")


def test_a_store_on_a_manual_clock_is_reached_where_it_listens(tmp_path: Path) -> None:
    """A receiver does not wait, as in the process: nothing moves the clock."""
    config, clock = StoreConfig(control=True, background=False), ManualClock(1_790_000_000_000)
    with DelayedStore.open(tmp_path / "store", config, clock=clock) as store, duelog.connect(store.path) as connected:
        consumer = connected.topic("t").subscribe("s")
        connected.topic("t").send(b"x", deliver_after=5)
        assert consumer.receive() == []
        clock.advance(5_000)
        assert [message.payload for message in consumer.receive()] == [b"x"]


def test_messages_are_pushed_ahead_where_that_is_asked_for(store: DelayedStore) -> None:
    """One by one without a round trip each; acknowledgements go together, and are there when it closes."""
    store.topic("t").subscribe("s", type="shared").close()
    store.topic("t").send_payloads([b"%d" % number for number in range(1_000)])
    with duelog.connect(store.path, prefetch=100) as connected:
        consumer = connected.topic("t").subscribe("s", type="shared")
        found = []
        for _ in range(950):
            (message,) = consumer.receive(timeout=20)
            found.append(message.payload)
            assert consumer.ack(message) == 1
        assert consumer.ack(message) == 0
        held = store.topic("t").subscription("s").stats().unacknowledged
        consumer.close(failed=False)
    assert (found, held <= 200) == ([b"%d" % number for number in range(950)], True)
    with store.topic("t").subscribe("s", type="shared") as other:
        left = other.receive(100, timeout=20)
        assert [(each.payload, each.redelivery_count) for each in left] == [
            (b"%d" % number, 0) for number in range(950, 1_000)
        ]
        assert other.receive(timeout=0) == []


def test_a_client_keeps_nothing_of_messages_that_were_settled(store: DelayedStore) -> None:
    """Their positions stayed for ever where they were acknowledged durably or cumulatively, given back or up."""
    store.topic("t").send_payloads([b"x"] * 70)
    with duelog.connect(store.path, prefetch=10) as connected:
        consumer = cast(ConnectedSubscription, connected.topic("t").subscribe("s"))
        ways: list[Callable[[ReceivedMessage], object]] = [
            consumer.ack,
            lambda message: consumer.ack(iter([message])),
            lambda message: consumer.ack(deque([message.position]), durable=True),
            lambda message: consumer.nack(message, delay=3_600) == consumer.ack(iter([message])),
            lambda message: consumer.retry_later(message, 3_600),
            consumer.dead_letter,
        ]
        for way in ways:
            (message,) = consumer.receive(timeout=20)
            assert consumer._held == {message.position}
            way(message)
            assert not consumer._held
        messages = consumer.receive(10, timeout=20)
        consumer.ack_cumulative(messages[-2])
        assert consumer._held == {messages[-1].position}
        with pytest.raises(InvalidArgument, match="messages"):
            consumer.ack([[1]])
        consumer.close()
    with store.topic("t").subscribe("s") as other:
        assert len(other.receive(100, timeout=20)) == 70 - len(ways) - len(messages) + 1


@pytest.mark.parametrize("prefetch", [0, 10])
def test_what_came_by_a_connection_that_ended_takes_back_no_later_delivery(tmp_path: Path, prefetch: int) -> None:
    """Though the server closed in order, so that both deliveries have one count; what was pushed comes once."""
    with DelayedStore.open(tmp_path / "store") as store:
        store.topic("t").send_payloads([b"x", b"y"])
        client = duelog.connect(tmp_path / "store", prefetch=prefetch)
        consumer = client.topic("t").subscribe("s")
        (old,) = consumer.receive(timeout=20)
    with DelayedStore.open(tmp_path / "store") as store, client:
        (new,) = consumer.receive(timeout=20)
        assert (new.payload, new.redelivery_count) == (old.payload, old.redelivery_count) == (b"x", 0)
        assert (consumer.holds(old), consumer.nack(old), consumer.nack([old])) == (False, 0, 0)
        calls: list[Callable[[], object]] = [lambda: consumer.retry_later(old, 1), lambda: consumer.dead_letter(old)]
        for call in calls:
            with pytest.raises(Disconnected, match="it comes again"):
                call()
        assert consumer.holds(new)
        assert [message.payload for message in consumer.receive(timeout=20)] == [b"y"]
        assert consumer.ack([old.position], durable=True) == 1
        assert consumer.nack(new) == 0
        assert store.topic("t").stats().sent == 0


AT_LAST = 5
"""So many calls come to no further line one after the other; now and then another thread reads in place of a call."""


def reading_alone(connected: DelayedStore) -> Connection:
    """A connection whose own thread reads nothing, as a call was alone again and again."""
    for _ in range(20):
        connected.topic("t").exists()
    connection: Connection = connected._connection  # type: ignore[attr-defined]
    return connection


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection's thread that leaves reading to calls, however long the machine takes between them."""
    monkeypatch.setattr(wire_client, "_QUIET_S", 60.0)


@pytest.mark.usefixtures("unhurried")
def test_a_call_alone_reads_its_own_answer_and_one_among_others_does_not(
    store: DelayedStore, connected: DelayedStore
) -> None:
    """No other thread wakes first; while a receiver waits that reads, another call's answer comes by it."""
    connection = reading_alone(connected)
    before = connection._attended
    for _ in range(20):
        connected.topic("t").send(b"x")
    assert connection._attended - before == 20
    consumer = connected.topic("u").subscribe("s")
    receiver = threading.Thread(target=lambda: consumer.ack(consumer.receive(timeout=20)))
    receiver.start()
    until(lambda: connection._reader is not None)
    connected.topic("u").send(b"x")
    receiver.join()
    assert store.topic("u").subscription("s").stats().acknowledged == 1


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("amid", [False, True])
def test_an_interrupt_while_a_call_waits_changes_nothing_and_one_amid_an_answer_begins_a_connection(
    store: DelayedStore, connected: DelayedStore, monkeypatch: pytest.MonkeyPatch, amid: bool
) -> None:
    """Bytes that have come would be lost; what was under way is decided as ever, and calls go on."""
    connection, receive = reading_alone(connected), Frames.receive
    consumer = connected.topic("t").subscribe("s")

    def interrupted(self: Frames, *given: Any) -> Any:
        found = receive(self, *given)
        if self is connection._frames and threading.current_thread() is threading.main_thread():
            monkeypatch.setattr(Frames, "receive", receive)
            raise KeyboardInterrupt
        return found

    def interrupt_amid() -> None:
        until(lambda: connection._reader is not None)
        monkeypatch.setattr(Frames, "receive", interrupted)
        store.topic("t").send(b"x")

    def interrupt(*_: object) -> None:
        if connection._reader is not None:
            raise KeyboardInterrupt

    interrupting = threading.Thread(target=interrupt_amid)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        if amid:
            interrupting.start()
        else:  # again and again: one that comes as the thread falls asleep does not wake it
            signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        with pytest.raises(KeyboardInterrupt):
            consumer.receive()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    if amid:
        interrupting.join()
    assert connected.topic("t").exists()
    assert connection.count == amid
    if not amid:
        store.topic("t").send(b"x")
    assert [message.payload for message in consumer.receive(timeout=20)] == [b"x"]


@pytest.mark.parametrize("waits_by", ["reading", "another that reads", "pushed messages"])
def test_an_interrupt_that_does_not_wake_a_waiting_receiver_is_heard_all_the_same(
    store: DelayedStore, waits_by: str
) -> None:
    """One that comes as it falls asleep; nothing else would have ended the wait."""
    with duelog.connect(store.path, prefetch=10 * (waits_by == "pushed messages")) as connected, ExitStack() as open_:
        if waits_by == "another that reads":
            other = connected.topic("u").subscribe("s")
            connection: Connection = connected._connection  # type: ignore[attr-defined]
            reader = threading.Thread(target=other.receive)
            open_.callback(reader.join)
            open_.callback(store.topic("u").send, b"y")
            reader.start()
            until(lambda: connection._calls)
        consumer = connected.topic("t").subscribe("s")
        interrupt_of_sleeping(consumer.receive, lambda: store.topic("t").send(b"x"))
        store.topic("t").send(b"x")
        assert [message.payload for message in consumer.receive(timeout=20)] == [b"x"]


@pytest.mark.usefixtures("unhurried")
def test_an_interrupt_anywhere_in_a_call_that_reads_leaves_the_reading_to_others(connected: DelayedStore) -> None:
    """At each line of what begins and ends it: nobody would have read again."""
    connection, answers = reading_alone(connected), list[bool]()
    codes = {function.__code__ for function in (Connection._attend, Connection._pass_on, Connection._read)}
    at, whole = 1, 0
    for rounds in itertools.count(1):
        left, place = at, ""

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left, place
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
            if frame.f_code in codes and event in ("call", "line") and not line.startswith(("with ", "try:")):
                left, place = left - 1, line
                if not left:
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            connected.topic("t").exists()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        other = threading.Thread(target=lambda: answers.append(connected.topic("t").exists()), daemon=True)
        other.start()
        other.join(timeout=30)
        assert len(answers) == rounds, f"nobody reads after an interrupt at {place}"
        at, whole = (at, whole + 1) if left > 0 else (at + 1, 0)
        if whole == AT_LAST:
            break
        reading_alone(connected)
    assert at > 20
    assert connection._reader is None


def test_an_interrupt_amid_a_request_begins_a_connection_as_the_next_would_be_taken_for_its_rest(
    store: DelayedStore, connected: DelayedStore
) -> None:
    """A message with the bytes of other requests in it was stored."""
    topic, connection = connected.topic("t"), reading_alone(connected)
    consumer, whole, frames = store.topic("t").subscribe("s"), connection._socket, list[bytes]()

    class Interrupted:
        shutdown = whole.shutdown

        def sendall(self, data: bytes) -> None:
            frames.append(data)
            whole.sendall(data[:10_000])
            raise KeyboardInterrupt

    connection._socket = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        topic.send(b"x" * 20_000)
    connection._socket = whole
    rest = frames[0][10_000 + frames[0].index(b"xxx") :]  # behind the beginning of its own request
    topic.send(rest)
    assert [message.payload for message in consumer.receive(5, timeout=0)] == [rest]
    assert connection.count == 1


@pytest.mark.usefixtures("unhurried")
def test_an_interrupt_amid_the_answer_to_another_threads_call_leaves_that_to_be_decided(
    store: DelayedStore, connected: DelayedStore
) -> None:
    """At each line of taking it: the other thread waited for ever, as its call was no longer under way."""
    connection, answers = reading_alone(connected), list[bool]()
    consumer = connected.topic("t").subscribe("s")
    codes = {function.__code__ for function in (Connection._take, Call.finish)}

    def ask() -> None:
        until(lambda: connection._reader is not None)
        answers.append(connected.topic("t").exists())

    at, whole = 1, 0
    for rounds in itertools.count(1):
        left = at

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code in codes and event == "line":
                left -= 1
                if not left:
                    raise KeyboardInterrupt
            return trace

        other = threading.Thread(target=ask, daemon=True)
        other.start()
        sys.settrace(trace)
        try:
            consumer.receive(timeout=0.3)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        other.join(timeout=30)
        assert answers == [True] * rounds
        at, whole = (at, whole + 1) if left > 0 else (at + 1, 0)
        if whole == AT_LAST:
            break
        reading_alone(connected)
    assert at > 10


def test_a_receiver_of_pushed_messages_waits_and_is_woken(store: DelayedStore) -> None:
    """By a message that becomes due, by its time, by the end of its subscription."""
    with duelog.connect(store.path, prefetch=10) as connected:
        consumer = connected.topic("t").subscribe("s")
        assert consumer.receive(timeout=0.01) == []
        store.topic("t").send(b"x", deliver_after=0.05)
        assert [message.payload for message in consumer.receive(5, timeout=20)] == [b"x"]
        closing = threading.Timer(0.05, consumer.close)
        closing.start()
        with pytest.raises(ClosedError):
            consumer.receive()
        closing.join()


def test_a_receiver_of_pushed_messages_hears_each_time_that_nobody_serves(tmp_path: Path) -> None:
    """A question that could not be asked is not waited for: before, the second call waited for ever."""
    with DelayedStore.open(tmp_path / "store") as store:
        consumer = duelog.connect(store.path, prefetch=10, reconnect=0).topic("t").subscribe("s")
        assert consumer.receive(timeout=0.01) == []
    for _ in range(3):
        with pytest.raises(DuelogError):
            consumer.receive(timeout=20)


@pytest.mark.parametrize("prefetch", [0, 10])
def test_a_subscription_closes_quietly_where_nobody_serves_any_more(tmp_path: Path, prefetch: int) -> None:
    """What it held is handed to others as it is; so it is of acknowledgements that were on their way."""
    with DelayedStore.open(tmp_path / "store") as store:
        store.topic("t").send(b"x")
        consumer = duelog.connect(store.path, prefetch=prefetch, reconnect=0).topic("t").subscribe("s")
        (message,) = consumer.receive(timeout=20)
    if prefetch:
        consumer.ack(message)
    consumer.close()
    assert consumer.closed


def test_a_subscription_goes_on_by_a_new_connection_though_the_one_before_is_given_up_late(
    store: DelayedStore, connected: DelayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exclusive one was refused, as its own consumer of before had it still, and closed itself."""
    detach, subscribe, asked = wire_calls._Consumer.detach, wire_calls.WireCalls._subscribe, threading.Event()

    def late(consumer: Any, **named: Any) -> None:
        assert asked.wait(20)
        threading.Event().wait(0.1)  # the pool comes to the new one meanwhile
        detach(consumer, **named)

    def again(calls: Any, *arguments: Any, **named: Any) -> bool:
        begun = subscribe(calls, *arguments, **named)
        asked.set()
        return begun

    consumer = connected.topic("t").subscribe("s")
    monkeypatch.setattr(wire_calls._Consumer, "detach", late)
    monkeypatch.setitem(wire_calls._QUICK, "Topic.subscribe", partial(again, method="Topic.subscribe"))
    connected._connection._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
    store.topic("t").send(b"x")
    assert [message.payload for message in consumer.receive(timeout=20)] == [b"x"]


def test_attaching_waits_for_a_consumer_that_is_given_up_of_the_same_subscription_and_no_other(
    store: DelayedStore, connected: DelayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All waited for each, in the threads that do everything else: a consumer that hung held up the whole server."""
    detach, given_up, attached = wire_calls._Consumer.detach, threading.Event(), list[str]()

    def late(consumer: Any, **named: Any) -> None:
        assert given_up.wait(60)
        detach(consumer, **named)

    with duelog.connect(store.path) as gone:
        gone.topic("t").subscribe("s")
        monkeypatch.setattr(wire_calls._Consumer, "detach", late)
    try:
        until(lambda: not any(client.consumers for client in store.connections().connections))
        waiting = [
            threading.Thread(target=lambda: attached.append(connected.topic("t").subscribe("s", type="shared").topic))
            for _ in range(20)
        ]
        for thread in waiting:
            thread.start()
        until(lambda: len(connected._connection._calls) == 20)  # type: ignore[attr-defined]
        other = threading.Thread(target=lambda: connected.topic("u").subscribe("s"))
        other.start()
        other.join(20)
        assert not other.is_alive()
        assert attached == []
    finally:
        given_up.set()
    for thread in waiting:
        thread.join(20)
    assert len(attached) == 20


def test_closing_a_subscription_tells_that_acknowledgements_on_their_way_failed(
    store: DelayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed all the same."""
    store.topic("t").send(b"x")
    with duelog.connect(store.path, prefetch=10) as connected:
        consumer = connected.topic("t").subscribe("s")
        monkeypatch.setattr(consumer, "_settle", raising(StoreFailed(store.path, "no disk")))
        consumer.ack(consumer.receive(timeout=20))
        with pytest.raises(StoreFailed, match="no disk"):
            consumer.close()
        assert consumer.closed
        assert store.topic("t").subscription("s").stats().consumers == 0


def test_a_future_of_a_message_that_cannot_be_taken_is_none(connected: DelayedStore) -> None:
    """It is refused at the call, as in the process; the others come to their ids."""
    topic = connected.topic("t")
    with pytest.raises(InvalidArgument, match="payload"):
        topic.send_async("text")  # type: ignore[arg-type]
    futures = [topic.send_async(b"%d" % number) for number in range(500)]
    ids = [future.result(20) for future in futures]
    assert ids == sorted(set(ids))


def test_more_requests_than_may_be_under_way_and_more_bytes_than_the_outbox_takes_are_all_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server does not read on meanwhile; the order of the messages is that of the calls.

    Messages that come in one turn while nothing is in flight are no more than the bound either.
    """
    monkeypatch.setattr(wire_peer, "MOST_REQUESTS", 8)
    put_together, sizes = Outbox.put_together, list[int]()

    def put(self: Outbox, items: Any, size: int) -> bool:
        sizes.append(size)
        return put_together(self, items, size)

    monkeypatch.setattr(Outbox, "put_together", put)
    with (
        DelayedStore.open(tmp_path / "store", StoreConfig(max_in_flight_bytes=2_000)) as store,
        duelog.connect(store.path) as connected,
        store.topic("t").subscribe("s") as consumer,
    ):
        payloads = [b"%d" % number + b"x" * 500 for number in range(300)]
        futures = [connected.topic("t").send_async(payload) for payload in payloads]
        ids = [future.result(20) for future in futures]
        assert ids == sorted(set(ids))
        assert [message.payload for message in consumer.receive(300, timeout=20)] == payloads
    assert 0 < max(sizes) <= 2_000


def test_a_connected_store_for_asyncio(store: DelayedStore) -> None:
    """Sends side by side, receivers that wait without a thread, a cancelled one that loses nothing, transactions."""

    async def run() -> None:
        async with aio.DelayedStore.connect(store.path) as connected:
            topic = connected.topic("t")
            async with await topic.subscribe("s") as consumer:
                waiting = asyncio.ensure_future(consumer.receive(5))
                await asyncio.sleep(0)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
                ids = await asyncio.gather(*(topic.send(b"%d" % number) for number in range(20)))
                assert len(set(ids)) == 20
                found: list[bytes] = []
                while len(found) < 20:
                    batch = await consumer.receive(20, timeout=20)
                    found += [message.payload for message in batch]
                    await consumer.ack(batch, durable=True)
                assert sorted(found) == sorted(b"%d" % number for number in range(20))
                async with connected.transaction() as transaction:
                    transaction.send("t", b"x")
                async for message in consumer:
                    assert message.payload == b"x"
                    break
            assert [each.name async for each in connected.topics()] == [topic.name]
            assert await connected.documents.put("k", b"v") == 1
            assert (await topic.stats()).sent == 21
        assert not store.closed

    asyncio.run(run())


def test_a_receiver_that_is_woken_often_leaves_one_look_to_come(store: DelayedStore, connected: DelayedStore) -> None:
    """A look for each wake-up would fill the memory of a store whose topics change often."""
    with connected.topic("t").subscribe("s", type="shared") as consumer:
        (message,) = store.topic("t").send(b"x") and consumer.receive(timeout=20)
        consumer.nack(message, delay=3_600)
        waiting = threading.Thread(target=consumer.receive, args=[1, 5])
        waiting.start()
        for number in range(200):
            store.topic("t").subscription("s").pause(None)
            store.topic("t").subscription("s").resume()
            assert connected.topic("t").exists(), number
        control = present(store._engine.control)
        assert len(control._loop._timers) < 100  # of 400 wake-ups
        store.topic("t").send(b"y")
        waiting.join(20)
        assert not waiting.is_alive()


def test_the_numbers_of_a_connection_that_does_not_come_back_are_forgotten(
    store: DelayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one that is there, and of producers that a program names, are not."""
    monkeypatch.setattr(wire_calls, "FORGET_S", 0.05)
    store.topic("t").producer("mine").send(Message(b"x"))
    with duelog.connect(store.path) as stays:
        stays.topic("t").send(b"x")
        for _ in range(5):
            with duelog.connect(store.path) as comes:
                comes.topic("t").send(b"x")
                comes.topic("t").send_batch([Message(b"y"), Message(b"z", deliver_after=60)])
        assert within(lambda: len(producers(store)) == 2)
        assert "mine" in producers(store)
        assert stays.topic("t").send(b"x")
    assert store.topic("t").producer_number("mine") == 0


def test_the_numbers_of_connections_to_a_process_that_ended_are_forgotten(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some time after the store is open again, unless they come back: else each restart would leave some for ever."""
    with DelayedStore.open(path) as store, duelog.connect(path) as connected:
        store.topic("t").producer("mine").send(Message(b"x"))
        connected.topic("t").send(b"x")
        with connected.transaction() as transaction:
            transaction.send("t", b"y")
    monkeypatch.setattr(wire_calls, "FORGET_S", 0.05)
    monkeypatch.setattr(wire_server, "FORGET_S", 0.05)
    with DelayedStore.open(path) as store:
        assert within(lambda: producers(store) == {"mine"})


def test_a_server_without_a_descriptor_for_another_client_serves_those_that_it_has(
    store: DelayedStore, connected: DelayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It listens again later: before, its thread slept at each turn, and nobody was answered."""
    slept: list[float] = []
    refused = threading.Event()
    accept = socket.socket.accept

    def refuse_once(listener: socket.socket) -> Any:
        if refused.is_set():
            return accept(listener)
        refused.set()
        raise OSError(errno.EMFILE, "no descriptor left")

    monkeypatch.setattr(socket.socket, "accept", refuse_once)
    monkeypatch.setattr(wire_server, "time", SimpleNamespace(monotonic=time.monotonic, sleep=slept.append))
    monkeypatch.setattr(wire_server, "_PAUSE_S", 0.01)
    with duelog.connect(store.path) as other:
        assert refused.is_set()
        assert other.topic("t").create()
    assert connected.topic("t").exists()
    assert slept == []


def test_nothing_is_kept_of_a_transaction_or_a_topic_that_a_client_has_used(
    store: DelayedStore, connected: DelayedStore
) -> None:
    """Signatures are those of classes: of methods of an object they would keep the object."""

    def use(name: str) -> int:
        connected.topic(name).send_batch([Message(b"x"), Message(b"y")])
        with connected.transaction() as transaction:
            transaction.send(name, b"z")
        return signature_of.cache_info().currsize

    assert use("t") == use("u") == use("v")


def within(holds: Callable[[], bool]) -> bool:
    """Wait until something holds; False: it does not come to hold."""
    end = time.monotonic() + 60
    while not holds():
        if time.monotonic() > end:
            return False
        threading.Event().wait(0.005)
    return True


def producers(store: DelayedStore) -> set[str]:
    """The producers whose numbers are stored."""
    applied(store)
    with store._engine.storage.main.read() as raw:
        keys = [bytes(key) for key, _ in raw.cursor()]
    return {split_key(key)[1] for key in keys if key[0] == Table.SEQUENCE}


@pytest.fixture
def lost(connected: DelayedStore, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], Any]:
    """Calls something whose first answer is lost: its connection ends instead; the result, or the Disconnected."""
    send = WirePeer._send

    def cut_off(peer: WirePeer, *_: object) -> None:
        monkeypatch.setattr(WirePeer, "_send", send)
        peer._service.loop.later(peer.part)

    def call(work: Callable[[], object]) -> object:
        assert connected.topic("t").exists() in (True, False)  # it is connected again
        monkeypatch.setattr(WirePeer, "_send", cut_off)
        try:
            return work()
        except Disconnected as error:
            return error

    return call


def test_a_call_whose_answer_was_lost_is_decided_by_its_number(
    store: DelayedStore, connected: DelayedStore, lost: Callable[[Callable[[], object]], Any]
) -> None:
    """It is done once; what cannot be told any more is an id."""
    topic = connected.topic("t")
    first = topic.send(b"w", deliver_after=60, dedup_key="w")
    assert lost(lambda: topic.send(b"x")).stored
    assert (
        lost(lambda: topic.send(b"x", deliver_after=60, dedup_key="x", replace=True))
        == present(topic.find("x")).message_id
    )
    batch = [Message(b"y", deliver_after=60, dedup_key=key) for key in ("y", "z")]
    assert lost(lambda: topic.send_batch(batch)).stored
    assert lost(lambda: connected.send_batch([("u", Message(b"a")), ("v", Message(b"b"))])).stored
    assert lost(lambda: topic.cancel_key("y")) is True
    assert lost(lambda: topic.cancel_key("nobody's")) is False
    assert lost(lambda: topic.reschedule(first, deliver_after=90)).stored
    assert lost(lambda: topic.reschedule(first, deliver_after=90)) is None
    assert store.topic("t").stats().sent == 5
    assert [store.topic(name).stats().sent for name in "uv"] == [1, 1]
    assert sorted(topic.keys()) == ["w", "x", "z"]
    assert lost(lambda: connected.documents.put("d", b"1", expected=None)).stored
    assert present(store.documents.get("d")) == (b"1", 1)
    with pytest.raises(DocumentChanged, match="version 1 is there, none was expected"):
        lost(lambda: connected.documents.put("d", b"2", expected=None))
    assert lost(lambda: connected.documents.delete("d", expected=1)).stored
    assert store.documents.get("d") is None


def test_a_transaction_whose_answer_was_lost_is_stored_once_without_its_results(
    store: DelayedStore, connected: DelayedStore, lost: Callable[[Callable[[], object]], Any]
) -> None:
    """Documents too; one that is refused is refused; a program that numbers its own is told as much."""

    def store_it(key: str, number: int | None = None) -> Any:
        with connected.transaction() as transaction:
            if number is not None:
                transaction.number("importer", number)
            sent = transaction.send("t", b"x")
            transaction.cancel_key("t", key, required=key != "none")
            transaction.put_document("d", b"1")
        return sent

    connected.topic("t").create()
    with pytest.raises(Disconnected, match="results were lost"):
        _ = lost(lambda: store_it("none")).value
    with pytest.raises(TransactionConflict):
        lost(lambda: store_it("k"))
    assert store.topic("t").get(store_it("none", 7).value) is not None
    with pytest.raises(Disconnected, match="results were lost"):
        _ = store_it("none", 7).value
    assert store.topic("t").stats().sent == 2
    assert present(store.documents.get("d")).version == 2


def test_a_call_that_cannot_be_decided_says_what_is_in_doubt(
    connected: DelayedStore, lost: Callable[[Callable[[], object]], Any]
) -> None:
    """Its name; what only looks, or may be done twice, is done again."""
    topic = connected.topic("t")
    sent = topic.send(b"x", deliver_after=60, dedup_key="k")
    assert lost(lambda: present(topic.find("k")).message_id) == sent
    assert lost(lambda: topic.cancel(sent)) is True
    assert lost(lambda: topic.every("s", cron="@daily").name) == "s"
    for call, name in (
        (lambda: topic.fire_now(sent), "Topic.fire_now"),
        (lambda: topic.cancel_keys(["k"]), "Topic.cancel_keys"),
    ):
        error = lost(call)
        assert (error.in_doubt, error.stored) == (name, False)


def test_a_client_says_who_it_is_again_to_a_server_that_came_anew(tmp_path: Path) -> None:
    """Its name, by default the program's; a worker is known by what its tasks tell; too long a name is refused."""
    with DelayedStore.open(tmp_path / "store") as opened, duelog.connect(tmp_path / "store") as unnamed:
        (told,) = opened.connections().connections
        assert (told.name, told.kind) == (os.path.basename(sys.argv[0]), "program")
        with pytest.raises(InvalidArgument, match="200 characters"):
            unnamed._connection.call("introduce", (), [0, "n" * 201, "1"])  # type: ignore[attr-defined]
        client = duelog.connect(tmp_path / "store", name="web")
    with DelayedStore.open(tmp_path / "store") as opened, client:
        client.topic("t").create()
        assert {each.name for each in opened.connections().connections} >= {"web"}
        worker = Worker(client, name="w")
        worker.task("t")(print)
        with worker:
            for _ in range(6_000):
                if {"worker"} <= {each.kind for each in opened.connections().connections}:
                    break
                threading.Event().wait(0.005)
            else:
                raise AssertionError(opened.connections())


def test_a_send_that_is_given_up_may_be_stored_and_says_so(
    store: DelayedStore, lost: Callable[[Callable[[], object]], Any]
) -> None:
    """It was told as one that was not begun, as it would have been asked again had there been time."""
    with duelog.connect(store.path, reconnect=0) as impatient:
        error = lost(lambda: impatient.topic("t").send(b"x"))
    assert (error.in_doubt, error.stored) == ("Topic.send", False)
    assert store.topic("t").stats().sent == 1


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system cannot say how long")
def test_a_machine_that_is_out_of_reach_ends_its_connection_in_half_a_minute(store: DelayedStore) -> None:
    """Whether data are under way or not; the system's own bounds are hours."""
    port = store.listen("localhost", 0, admit=lambda *_: lambda *_: None)
    with duelog.connect(f"duelog://localhost:{port}") as client:
        option = client._connection._socket.getsockopt  # type: ignore[attr-defined]
        names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        idle, between, count, unanswered_ms = (option(socket.IPPROTO_TCP, getattr(socket, name)) for name in names)
    assert (idle + between * count, unanswered_ms) == (30, 30_000)
