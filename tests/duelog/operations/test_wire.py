"""The socket: other processes reach an open store, of this user alone, within bounds; and leave nothing behind."""

import base64
import errno
import logging
import os
import random
import resource
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duelog import DelayedStore, ManualClock, Message, MessageId, Policies, StoreConfig, SystemClock, Topic
from duelog.errors import ClosedError, Disconnected, InvalidArgument, InvalidMessage, UnknownTopic
from duelog.markers.firing.suspensions import Suspension
from duelog.operations import wire, wire_peer, wire_server, wire_values
from duelog.operations.face_table import FaceOperation
from duelog.operations.json_form import from_json, to_json
from duelog.operations.operation import Right
from duelog.operations.operations import OPERATIONS, Asked, Operations
from duelog.operations.wire import ERROR, Frames, Refused, address_in, buffer, framed
from duelog.operations.wire_client import Connection
from duelog.operations.wire_loop import _ROUNDS, WireLoop
from duelog.operations.wire_peer import WirePeer
from duelog.store.errors import StoreUnavailable
from duelog.store.position import position_at
from tests.conftest import present, raising
from tests.duelog.sending.putting import Held
from tests.duelog.side_by_side import in_wal
from tests.proof import length

FUZZED = length("DUELOG_WIRE_FUZZED", 300, 10_000)
PAY = base64.b64encode(b"pay").decode()


class Watched(set[WirePeer]):
    """Connections, of which it is heard when one is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()

    def discard(self, peer: object) -> None:
        """Tell who waits."""
        with self.changed:
            super().discard(peer)
            self.changed.notify_all()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DelayedStore]:
    """A store that listens; checked and closed at the end."""
    with DelayedStore.open(tmp_path / "store") as opened:
        control_of(opened)._peers = Watched()
        yield opened
        if not opened.closed:
            assert list(opened.check()) == []


@pytest.fixture
def client(store: DelayedStore) -> Iterator[Connection]:
    """A client of it."""
    with connect(store.path) as found:
        yield found


def connect(path: Path) -> Connection:
    """A client of a store that listens."""
    return present(Connection.to(path))


def raw(path: Path) -> socket.socket:
    """A connection that has been greeted."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(20)
    with address_in(path) as address:
        connection.connect(address)
    assert answer_of(connection)[:2] == ["duelog", 2]
    return connection


def answer_of(connection: socket.socket, *, raw: bool = False) -> Any:
    """The next frame's value, an error made of it unless `raw`; None: the other end has closed."""
    frames, bodies = Frames(1 << 30), list[memoryview]()
    while not bodies:
        found = frames.receive(connection, buffer()[:1])
        if found is None:
            return None
        bodies = found
    value = wire_values.unpack(bodies[0])
    if value[1] == ERROR and not raw:
        value[2] = wire_values.error_of(value[2])
    return value


def ask(connection: socket.socket, *request: object) -> Any:
    """Ask for an operation, and read the next answer."""
    connection.sendall(framed(wire_values.pack(list(request))))
    return answer_of(connection)


def gone(store: DelayedStore, left: int = 0) -> None:
    """Wait until no more connections are left."""
    peers = control_of(store)._peers
    assert isinstance(peers, Watched)
    with peers.changed:
        assert peers.changed.wait_for(lambda: len(peers) <= left, 20)


def control_of(store: DelayedStore) -> wire_server.WireServer:
    """The socket's server."""
    return present(store._engine.control)


def test_the_socket_is_the_owners_alone_and_goes_with_the_store(store: DelayedStore) -> None:
    """Mode 0600 while the store is open; afterwards there is none, and no process answers."""
    mode = os.stat(store.path / "CONTROL").st_mode
    assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o600)
    store.close()
    assert not (store.path / "CONTROL").exists()
    assert Connection.to(store.path) is None


def test_a_client_of_another_user_is_refused(store: DelayedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the file's mode says, the peer's user is looked at."""
    monkeypatch.setattr(wire_server, "_is_trusted", lambda connection: False)
    with pytest.raises(Disconnected, match="this user may not"):
        connect(store.path)
    assert control_of(store)._peers == set()


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="the system does not tell whose a connection is")
def test_the_peers_user_is_compared_with_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same user, and root; no other."""
    ends = socket.socketpair()
    assert wire_server._is_trusted(ends[0])
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    assert wire_server._is_trusted(ends[0]) == (os.getuid() == 0)
    monkeypatch.setattr(struct, "unpack", lambda *_: (1, 54_321, 1))
    assert not wire_server._is_trusted(ends[0])
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    ("settings", "clock", "there"),
    [({}, SystemClock(), True), ({"control": False}, SystemClock(), False), ({}, ManualClock(10**12), False),
     ({"control": True}, ManualClock(10**12), True)],
    ids=["system", "off", "manual", "on"],
)  # fmt: skip
def test_control_false_has_no_socket_and_no_thread(tmp_path: Path, settings: Any, clock: Any, there: bool) -> None:
    """With the system clock there is one unless it is switched off; a store that is only looked at never has one."""
    config = StoreConfig(background=False, **settings)
    before = set(threading.enumerate())
    with DelayedStore.open(tmp_path / "store", config, clock=clock):
        assert (tmp_path / "store" / "CONTROL").exists() == there
        assert len(set(threading.enumerate()) - before) == 2 * there
    with DelayedStore.open(tmp_path / "store", config, read_only=True, clock=clock):
        assert set(threading.enumerate()) <= before


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_path_longer_than_a_sockets_limit_is_reached(tmp_path: Path) -> None:
    """108 bytes are a Unix socket's limit; by the directory's descriptor any path will do."""
    path = tmp_path / ("d" * 120) / "store"
    path.parent.mkdir()
    with DelayedStore.open(path) as store, connect(path) as client:
        assert client.ask("create_topic", {"topic": "t"}) is True
        assert [topic.name for topic in store.topics()] == ["persistent://public/default/t"]
    assert not (path / "CONTROL").exists()


def test_what_a_killed_process_left_is_no_hindrance(path: Path) -> None:
    """A socket without a process: commands open the store, and the next process listens in its place."""
    DelayedStore.open(path).close()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path / "CONTROL"))
    assert Connection.to(path) is None
    with DelayedStore.open(path), connect(path) as client:
        assert list(client.ask("topics", {})) == []


def test_a_directory_that_takes_no_socket_is_logged_and_the_store_works(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system without sockets; and a file of this name, which is left alone."""
    DelayedStore.open(path, StoreConfig(control=False)).close()
    (path / "CONTROL").write_text("mine")
    with caplog.at_level(logging.WARNING, "duelog.control"), DelayedStore.open(path) as store:
        store.topic("t").send(b"x")
    assert "CONTROL is no socket" in caplog.text
    assert (path / "CONTROL").read_text() == "mine"
    (path / "CONTROL").unlink()
    monkeypatch.setattr(os, "chmod", raising(PermissionError(1, "Operation not permitted")))
    caplog.clear()
    with DelayedStore.open(path) as store:
        store.topic("t").send(b"x")
        assert store._engine.control is None
    assert "takes no commands while it is open: [Errno 1] Operation not permitted" in caplog.text


def test_a_child_after_fork_keeps_no_client_waiting(store: DelayedStore) -> None:
    """It closes the parent's sockets, and to end there does not take the parent's away."""
    child = os.fork()
    if not child:
        control = control_of(store)
        closed = all(each.fileno() == -1 for each in (*control._listeners, control._loop._waker))
        store.close()
        os._exit(0 if closed else 1)
    assert os.waitpid(child, 0)[1] == 0
    with connect(store.path) as client:
        assert client.ask("create_topic", {"topic": "t"}) is True


NOT_UNDERSTOOD: list[tuple[str, dict[str, Any], str]] = [
    ("backup", {"dest": "/tmp/x"}, "operation='backup': expected one of calendar, cancel"),
    ("close", {}, "operation='close'"),
    ("_store", {}, "operation='_store'"),
    ("tick", {"path": "/"}, "unexpected keyword argument 'path'"),
    ("send", {"topic": "t"}, "missing a required argument: 'payload'"),
    ("send", {"topic": "t", "payload": ""}, "TOPIC='t': there is no such topic"),
    ("send", {"topic": "t", "payload": "#", "create": True}, "payload='#': expected base64"),
    ("send", {"topic": 1, "payload": ""}, "topic=1: expected a str"),
    ("cancel", {"topic": "t", "ids": "1:1"}, "ids='1:1': expected a list"),
    ("topics", {"namespace": 1}, "namespace=1: expected a str"),
    ("update_policies", {"values": {"self": 1}}, "policy='self': expected one of active"),
    ("seek", {"topic": "t", "subscription": "s", "to": {"due_ms": []}}, "to={'due_ms': []}"),
    ("purge_dead_letters", {"ids": "1:1"}, "ids='1:1': expected a list"),
    ("requeue_dead_letters", {"ids": [[]]}, "ID=[]: no dead letter has this id"),
    ("requeue_dead_letters", {"delay": "1h"}, "delay='1h': expected seconds"),
    ("send_messages", {"topic": "t", "messages": {}}, "messages={}: expected a list"),
    ("send_messages", {"topic": "t", "messages": [{"payload": "", "color": 1}]}, "messages[0]="),
    ("send_messages", {"topic": "t", "messages": [{"payload": 1}]}, "messages[0]: payload=1"),
    ("keys", {"topic": "t", "prefix": 1}, "topic 't' does not exist"),
    ("dead_letters", {"older_than": []}, "older_than=[]: expected seconds"),
    ("every", {"topic": "t", "name": 1, "cron": "@daily", "create": True}, "schedule=1"),
    ("Topic.send", {"payload": b"x"}, "target=[]: Topic.send has another"),
    ("Topic.put", {}, "operation='Topic.put'"),
    ("DelayedStore.tick", {}, "operation='DelayedStore.tick'"),
    ("DelayedStore.stats", {"path": "/"}, "unexpected keyword argument 'path'"),
    ("Subscription.ack", {}, "target=[]: Subscription.ack has another"),
    ("kept_by", {"start_ms": [[]]}, "start_ms=[[]]: no time partition begins there"),
    ("snapshots", {"start_ms": []}, "start_ms=[]: no time partition begins there"),
    ("scheduled_page", {"topic": "t", "payload_bytes": {}}, "payload_bytes={}: expected an int"),
    ("next", {}, "arguments=[]: expected [number of a request]"),
    ("drop", {}, "arguments=[]: expected [number of a request]"),
    ("Topic.subscribe", {}, "consumer=None: expected another number"),
]


def test_what_cannot_be_understood_is_answered_and_nothing_is_done(
    store: DelayedStore, caplog: pytest.LogCaptureFixture
) -> None:
    """One error that names the field and the value; the connection goes on, and no error of duelog's own is logged."""
    for name, named, said in NOT_UNDERSTOOD:
        with raw(store.path) as connection:
            number, kind, error = ask(connection, 7, name, [], [], named)
            assert (number, kind) == (7, ERROR)
            assert said in str(error)
            assert ask(connection, 8, "figures", [], [], {})[2]["topics"] == 0
    assert caplog.records == []


NO_REQUESTS: list[bytes] = [
    b"", b"nonsense", b"\xc1", b"\x95\x00\xa4tick\x90\x90\x80", b"\x95\xa1a\xa4tick\x90\x90\x80", b"\x92\x01\x02",
    b"\xdd\xff\xff\xff\xff", b"\x91" * 3_000, wire_values.pack([1, "tick", {}, [], {}]),
]  # fmt: skip


def test_a_frame_that_is_no_request_ends_its_connection(store: DelayedStore, caplog: pytest.LogCaptureFixture) -> None:
    """The peer is told why; others go on, and nothing is logged."""
    for sent in NO_REQUESTS:
        with raw(store.path) as connection, connect(store.path) as other:
            connection.sendall(framed(sent))
            number, kind, error = answer_of(connection)
            assert (number, kind, type(error).__name__) == (0, ERROR, "InvalidArgument")
            assert answer_of(connection) is None
            assert other.ask("topics", {}) is not None
        assert caplog.records == []


def test_figures_of_a_store_with_suspended_upkeep_are_told(
    store: DelayedStore, client: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a suspended part is told by its text: an exception is no value of JSON."""
    suspended = Suspension("trim", None, None, None, "reason", OSError("no space"), 1, 2, 3, 4)
    found = replace(store.stats(), suspended=(suspended,))
    monkeypatch.setattr(store, "stats", lambda: found)
    figures: Any = client.ask("figures", {})
    assert [(each["task"], each["error"]) for each in figures["suspended"]] == [("trim", "no space")]


def test_the_table_says_of_each_operation_who_may_ask_and_what_it_takes_and_gives() -> None:
    """Made from the typed methods: none is without a right, and every argument and result has a type."""
    assert set(OPERATIONS) == {name for name in vars(Operations) if name[0] != "_"} - {"ask", "close"}
    for name, operation in OPERATIONS.items():
        assert (operation.name, set(operation.parameters)) == (name, set(operation.signature.parameters))
        assert isinstance(operation.right, Right)
        assert operation.result is not None
    assert {name for name, each in OPERATIONS.items() if each.streamed} == {
        "dead_letters", "keys", "peek", "scheduled", "schedules", "topics"
    }  # fmt: skip
    assert not {"purge_dead_letters", "send", "seek", "tick"} & {
        name for name, each in OPERATIONS.items() if each.looks
    }
    cancel = OPERATIONS["cancel"]
    assert (cancel.right, cancel.parameters, cancel.result) == (
        Right.PRODUCE, {"topic": str, "ids": Sequence[MessageId]}, list[str]
    )  # fmt: skip


def test_a_message_in_json_keeps_every_field() -> None:
    """A field that a Message gets is one of its JSON too: its time to live was once left out."""
    message = Message(b"x", deliver_after=3, key="k", properties={"a": "b"}, ttl=60, dedup_key="d", dedup_for=5)
    for each in (message, Message(b"x", deliver_at=10**13, dedup_key="d", replace=True)):
        assert from_json(Message, to_json(each), "message") == each


def test_what_is_asked_elsewhere_comes_as_the_typed_method_returns_it(store: DelayedStore, client: Connection) -> None:
    """Every operation that looks, after some that change: messages, letters, schedules, policies, ids are equal."""
    asked, here = Asked(client.ask), Operations(store)
    sent = asked.send("t", b"pay", deliver_after=3600, properties={"a": "b"}, dedup_key="k", create=True)
    asked.send_messages("t", [Message(b"x", key="k"), Message(b"y", deliver_after=60, dedup_key="l")])
    asked.create_subscription("t", "s", "earliest")
    asked.every("t", "n", payload=b"p", cron="@daily", properties={"a": "b"})
    with store.topic("u").subscribe("s") as dying:
        store.topic("u").send(b"x")
        dying.dead_letter(dying.receive(1)[0], "by hand")
    looks: list[tuple[str, tuple[object, ...] | dict[str, object]]] = [
        ("update_policies", {"values": {"ttl_ms": 3_600_000}, "topic": "t"}), ("topics", ()), ("subscriptions", ("t",)),
        ("has_topic", ("t",)), ("scheduled", ("t",)), ("keys", ("t",)), ("find", ("t", "k")), ("find", ("t", "none")),
        ("peek", ("t", "s", 2)),
        ("schedules", ()), ("schedules", ("t",)), ("pause_schedule", ("t", "n")), ("dead_letters", ()),
        ("partitions", ()), ("calendar", ()), ("kept_by", (store.partitions()[0].start_ms,)), ("topic_rows", ()),
        ("receiving", ()), ("connections", ()), ("connections", (False,)),
        ("tasks", ("t", "s")), ("retries", ("t", "s")),
        ("snapshots", (store.partitions()[0].start_ms,)), ("jobs", ()),
        ("timeline", (store.clock.now_ms(), 60_000, 90, "t")),
        ("timeline_by_topic", (store.clock.now_ms() // 60_000 * 60_000, 60_000, 90)),
        ("scheduled_page", ("t", None, None, 1)),
        ("message", ("t", MessageId.parse(sent["message_id"]))), ("policies", ()), ("policies", {"topic": "t"}),
        ("effective", ("t",)), ("tick", ()), ("save_snapshots", ()), ("limits", ()), ("seek", ("t", "s", "latest")),
    ]  # fmt: skip
    for name, arguments in looks:
        given, named = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
        ours, theirs = getattr(here, name)(*given, **named), getattr(asked, name)(*given, **named)
        if OPERATIONS[name].streamed:
            ours, theirs = list(ours), list(theirs)
            assert ours, name
        if isinstance(OPERATIONS[name], FaceOperation):
            ours = to_json(ours)
        for moving in {"limits": ["now_ms"], "tick": ["next_due_ms"]}.get(name, ()):  # a flush may fall due in between
            ours[moving] = theirs[moving]
        assert theirs == ours, name
    assert asked.cancel("t", [MessageId.parse(sent["message_id"]), MessageId(9999, 0)]) == ["cancelled", "unknown"]


@given(
    st.lists(
        st.builds(
            Message,
            st.one_of(st.binary(max_size=3), st.integers(0, 70_000).map(bytes), st.just("pay")),
            deliver_after=st.sampled_from([None, None, 0, 2.5]),
            dedup_key=st.sampled_from([None, None, "k"]),
            replace=st.sampled_from([False, False, True]),
        ),
        max_size=4,
    )
)
def test_batches_on_the_wire_are_what_they_were(messages: list[Message]) -> None:
    """Messages as columns, and payloads, whatever their sizes and fields."""
    for sent in (messages, [message.payload for message in messages]):
        for rest in ([], [5]):
            frame = wire_values.request(7, "x", ["t"], [sent, *rest], {"a": 1}, [])
            number, name, target, (batch, *further), named = wire_values.unpack(frame[wire.HEAD.size :])
            assert wire.HEAD.unpack_from(frame) == (len(frame) - wire.HEAD.size,)
            assert (number, name, target, further, named) == (7, "x", ["t"], rest, {"a": 1})
            assert list(batch) == sent


@pytest.mark.parametrize("field", ["key", "deliver_after", "dedup_key", "replace"])
def test_a_field_that_is_equal_to_anything_is_not_dropped_from_a_batch(
    store: DelayedStore, client: Connection, field: str
) -> None:
    """Compared with what a message has that is nothing but its payload it was that, and sent."""
    given = [Message(b"x", **{field: mock.ANY}), Message(b"y")]
    with pytest.raises(InvalidMessage, match=field):
        client.call("Topic.send_batch", ["t"], [given])
    assert not store.topic("t").exists()


def test_a_page_of_scheduled_messages_is_followed_by_the_next(store: DelayedStore, client: Connection) -> None:
    """Each comes once, also where several are due at one instant, with the first bytes of its payload."""
    at_ms = store.clock.now_ms() + 3_600_000
    store.topic("t").send_batch([Message(b"%d" % number * 400, deliver_at=at_ms) for number in range(5)])
    asked, after, found = Asked(client.ask), None, []
    while True:
        page = asked.scheduled_page("t", limit=2, after=after, payload_bytes=8)
        found += page["messages"]
        if (after := page["next"]) is None:
            break
    assert [(each["payload"], each["bytes"]) for each in found] == [(to_json(b"%d" % n * 8), 400) for n in range(5)]
    with pytest.raises(InvalidArgument, match="limit=0"):
        asked.scheduled_page("t", limit=0)
    for wrong in ("soon:1", "1:", "1", "9" * 16 + ":1:1", 5):
        with pytest.raises(InvalidArgument):
            asked.scheduled_page("t", after=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "wrong"), [("scheduled_page", {"after": 5}), ("retries", {"subscription": "s", "limit": "two"})]
)
def test_a_page_of_what_is_no_place_or_number_is_refused_and_no_error_of_the_server(
    store: DelayedStore, name: str, wrong: dict[str, Any]
) -> None:
    """As any other argument in JSON that is not what it has to be."""
    store.topic("t").send(b"x", deliver_after=60)
    with pytest.raises(InvalidArgument, match=f"{list(wrong)[-1]}="):
        Operations(store).ask(name, {"topic": "t", **wrong})


def test_something_else_is_asked_while_an_answer_is_being_streamed(store: DelayedStore, client: Connection) -> None:
    """`duelog stats` asks for the figures of each topic while it lists them: no answer is taken for another's."""
    for name in "abc":
        store.topic(name).create()
    found: Any = client.ask("topics", {})
    figures: list[Any] = [client.ask("topic_figures", {"topic": name}) for name in found]
    assert [each["name"][-1] for each in figures] == ["a", "b", "c"]
    left: Any = client.ask("topics", {})
    next(left)
    with pytest.raises(UnknownTopic, match="nosuch"):
        client.ask("peek", {"topic": "nosuch", "subscription": "s", "count": 1})
    assert [len(list(client.ask("topics", {"limit": 2}))), len(list(left))] == [2, 2]


def test_a_waiting_client_gets_a_message_that_is_sent_meanwhile(store: DelayedStore, client: Connection) -> None:
    """It sleeps until the topic changes; what it did not acknowledge goes to the next consumer when it has gone."""
    client.call("Topic.subscribe", ["t"], [1, "s"])
    sender = threading.Timer(0.05, store.topic("t").send, [b"pay"])
    sender.start()
    assert client.call("Subscription.receive", [1], [5, None]).payloads == [b"pay"]
    sender.join()
    assert client.call("Subscription.receive", [1], [1, 0]) is None
    client.close()
    with connect(store.path) as other:
        gone(store, 1)
        other.call("Topic.subscribe", ["t"], [1, "s"], {"type": "shared"})
        messages = other.call("Subscription.receive", [1], [1, 20_000])
        assert other.call("Subscription.ack", [1], [[position_at(each) for each in messages.places]]) == 1


def test_a_send_that_waits_for_the_disk_keeps_nothing_else_waiting(store: DelayedStore, client: Connection) -> None:
    """One thread writes, and the other reads: messages are pushed, and further sends are one group."""
    store.topic("t").send(b"due")
    with connect(store.path) as other:
        other.call("Topic.subscribe", ["t"], [1, "s"])
        held, groups = Held(store), len(in_wal(store))
        sent = [client.start("Topic.send", ["t"], [b"first"])]
        assert held.reached.wait(10)
        assert other.call("Subscription.receive", [1], [1, None]).payloads == [b"due"]
        sent += [other.start("Topic.send", ["t"], [b"x"]) for _ in range(5)]
        for _ in range(_ROUNDS + 2):  # the last is read in a turn after theirs, which has put them into the outbox
            assert other.call("Topic.exists", ["t"])
        held.let_go.set()
        assert len({call.wait() for call in sent}) == 6
    assert len(in_wal(store)) - groups == 2


def test_a_process_with_more_descriptors_than_select_takes_is_reached_too(tmp_path: Path) -> None:
    """A broker with many connections has as many."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < 2_048:
        pytest.skip(f"at most {most} descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before, 2_048), most))
    try:
        with ExitStack() as taken, open(os.devnull) as nothing:
            for _ in range(1_024):
                taken.callback(os.close, os.dup(nothing.fileno()))
            store = taken.enter_context(DelayedStore.open(tmp_path / "store"))
            client = taken.enter_context(connect(store.path))
            client.call("Topic.subscribe", ["t"], [1, "s"])
            assert client.call("Subscription.receive", [1], [1, 10]) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def test_a_wait_of_more_days_than_epoll_takes_ends_no_service() -> None:
    """A client that had waited for a message of in 40 days, and left, stopped all: the thread turned in an error."""
    failures, served = list[Exception](), threading.Event()
    loop = WireLoop(failures.append, int, lambda: None)
    ours, theirs = socket.socketpair()

    def serve(_: int) -> None:
        ours.recv(1)
        served.set()

    with ours, theirs:
        loop.at(time.monotonic() + 40 * 86_400, lambda: None)
        loop.selector.register(ours, selectors.EVENT_READ, serve)
        loop.start()
        theirs.send(b"x")
        assert served.wait(20)
        loop.end(lambda: None)
    assert failures == []


def test_a_credit_may_wait_for_as_long_as_a_number_says(store: DelayedStore, caplog: pytest.LogCaptureFixture) -> None:
    """Of 300 hexadecimal digits of milliseconds too, which are no float: each look at it was an error of duelog."""
    with raw(store.path) as client:
        ask(client, 1, "Topic.subscribe", ["t"], [1, "s"], {})
        client.sendall(framed(wire_values.pack([2, "Subscription.receive", [1], [1, 16**300], {}])))
        assert ask(client, 3, "Topic.exists", ["t"], [], {}) == [3, 0, True]
        store.topic("t").send(b"x")
        assert answer_of(client)[:2] == [2, 0]
    assert caplog.records == []


def test_closing_the_store_ends_clients_that_wait(store: DelayedStore, client: Connection) -> None:
    """A receiver without a timeout is told, and the close does not wait for it."""
    client.call("Topic.subscribe", ["t"], [1, "s"])
    receiving = client.start("Subscription.receive", [1], [1, None])
    assert client.call("Topic.exists", ["t"])  # so the request before it has been read
    store.close()
    with pytest.raises((ClosedError, Refused), match=r"is closed|is closing it"):
        receiving.wait()
    assert control_of(store)._peers == set()


def test_a_line_has_a_limit(tmp_path: Path) -> None:
    """A request that does not end is cut off at the largest message and a MiB; its connection is closed."""
    ended, config = (BrokenPipeError, ConnectionResetError), StoreConfig(max_message_bytes=1_000)
    path = tmp_path / "store"
    with DelayedStore.open(path, config), raw(path) as client, pytest.raises(ended):
        client.sendall(b"x" * 8_000_000)


def test_so_many_clients_and_no_more(store: DelayedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is told at once; when one has gone there is a place again."""
    monkeypatch.setattr(wire_server, "MOST_CLIENTS", 3)
    clients = [connect(store.path) for _ in range(3)]
    with pytest.raises(Disconnected, match="3 clients are connected"):
        connect(store.path)
    clients.pop().close()
    gone(store, 2)
    connect(store.path).close()


def test_a_peer_that_leaves_a_frame_unfinished_is_dropped_and_a_silent_one_is_not(
    store: DelayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of what it began is done. It is found out also while another waits for messages for long."""
    monkeypatch.setattr(wire_peer, "STALLED_S", 0.05)
    monkeypatch.setattr(wire_server, "_PAUSE_S", 0.02)
    with raw(store.path) as silent, raw(store.path) as client, raw(store.path) as waits:
        ask(waits, 1, "Topic.subscribe", ["w"], [1, "s"], {})
        waits.sendall(framed(wire_values.pack([2, "Subscription.receive", [1], [1, 60_000], {}])))
        client.sendall(framed(wire_values.pack([1, "Topic.create", ["t"], [], {}]))[:-1])
        assert answer_of(client) is None
        assert ask(silent, 1, "Topic.exists", ["t"], [], {})[2] is False


def test_a_client_that_does_not_read_is_dropped(store: DelayedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers are not kept for ever, and others are answered meanwhile; more requests are not read."""
    monkeypatch.setattr(wire_peer, "STALLED_S", 0.1)
    monkeypatch.setattr(wire_server, "_PAUSE_S", 0.02)
    monkeypatch.setattr(wire_peer, "MOST_UNREAD_BYTES", 1 << 20)
    topic = store.topic("t")
    sent = topic.send(b"x" * 1_000_000, deliver_after=3600)
    with raw(store.path) as client:
        requests = [framed(wire_values.pack([number, "Topic.get", ["t"], [sent], {}])) for number in range(1, 65)]
        client.sendall(b"".join(requests))  # it may be dropped before there was time for several
        with connect(store.path) as other:
            assert len(list(other.ask("topics", {}))) == 1
            gone(store, 1)


def test_frames_at_random_do_nothing_and_others_are_answered(store: DelayedStore) -> None:
    """Requests with bytes changed, cut off, or made up, each on a connection of its own; the server lives on."""
    chance = random.Random(30)
    messages = wire_values.columns([Message(b"x", deliver_after=1), Message(b"y", key="k")])
    requests = [
        wire_values.pack([1, "Topic.send_batch", ["t"], [messages], {}]),
        wire_values.pack([2, "Topic.send", ["t"], [b"x"], {"numbers": ["p", 1, 1]}]),
        wire_values.pack([3, "Topic.subscribe", ["t"], [1, "s"], {"type": "shared"}]),
        wire_values.pack([4, "Subscription.receive", [1], [10, 5], {}]),
        wire_values.pack([5, "Subscription.ack", [1], [[MessageId(1, 0), MessageId(1, 5)]], {}]),
        wire_values.pack([6, "DelayedStore.set_policies", [], [Policies(ttl_ms=5)], {"topic": "t"}]),
        wire_values.pack([7, "next", [], [3], {}]),
    ]
    for _ in range(FUZZED):
        with raw(store.path) as client:
            for _ in range(chance.randrange(1, 6)):
                data = bytearray(framed(chance.choice(requests)))
                for _ in range(chance.choice((0, 1, 1, 2, 8))):
                    data[chance.randrange(len(data))] = chance.randrange(256)
                with suppress(OSError):  # it has been ended
                    client.sendall(data[: chance.choice((len(data), chance.randrange(len(data))))])
    with connect(store.path) as other:
        assert other.call("Topic.exists", ["u"]) is False
    gone(store)


def test_a_copy_of_the_store_has_no_socket(store: DelayedStore, tmp_path: Path) -> None:
    """A backup is a store of its own, which no process has open."""
    store.topic("t").send(b"x")
    store.backup(tmp_path / "copy")
    assert not (tmp_path / "copy" / "CONTROL").exists()


def test_a_message_that_cannot_be_read_back_was_sent(
    store: DelayedStore, client: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """It is stored: an error would have it sent again. When it is due is left out, and why is logged."""
    with patch.object(Topic, "get", raising(StoreUnavailable(store.path, "Input/output error", errno.EIO))):
        sent: Any = client.ask("send", {"topic": "t", "payload": PAY, "deliver_after": 3600, "create": True})
    assert sent["due_ms"] is None
    (stored,) = store.topic("t").scheduled()
    assert sent["message_id"] == str(stored.message_id)
    assert [record.message for record in caplog.records] == [
        f"message {sent['message_id']} is stored, and could not be read back"
    ]
