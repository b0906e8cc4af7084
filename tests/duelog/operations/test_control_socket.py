"""The control socket: commands reach an open store, of this user alone, within bounds; and leave nothing behind."""

from __future__ import annotations

import base64
import errno
import json
import logging
import os
import resource
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock, Message, MessageId, StoreConfig, SystemClock, Topic
from duelog.markers.firing.suspensions import Suspension
from duelog.operations import control_server
from duelog.operations.control_client import ControlClient, Refused
from duelog.operations.control_lines import Disconnected, address_in
from duelog.operations.operation import Right
from duelog.operations.operations import OPERATIONS, Asked, Operations
from duelog.store.errors import StoreUnavailable
from tests.packaging.tree import ROOT

PAY = base64.b64encode(b"pay").decode()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DelayedStore]:
    """A store that listens; checked and closed at the end."""
    with DelayedStore.open(tmp_path / "store") as opened:
        yield opened
        if not opened.closed:
            assert list(opened.check()) == []


@pytest.fixture
def client(store: DelayedStore) -> Iterator[ControlClient]:
    """A client of it."""
    with connect(store.path) as found:
        yield found


def connect(path: Path) -> ControlClient:
    """A client of a store that listens."""
    found = ControlClient.connect(path)
    assert found is not None
    return found


def raw(path: Path) -> socket.socket:
    """A connection that has been greeted."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(20)
    with address_in(path) as address:
        connection.connect(address)
    assert json.loads(line_of(connection)) == {"duelog": 1}
    return connection


def line_of(connection: socket.socket) -> bytes:
    """The next line; nothing: the other end has closed."""
    line = b""
    while not line.endswith(b"\n") and (byte := connection.recv(1)):
        line += byte
    return line


def control_of(store: DelayedStore) -> control_server.ControlServer:
    """The socket's server."""
    found = store._engine.control
    assert found is not None
    return found


# -- who is heard ----------------------------------------------------------------------------------


def test_the_socket_is_the_owners_alone_and_goes_with_the_store(store: DelayedStore) -> None:
    """Mode 0600 while the store is open; afterwards there is none, and no process answers."""
    mode = os.stat(store.path / "CONTROL").st_mode
    assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o600)
    store.close()
    assert not (store.path / "CONTROL").exists()
    assert ControlClient.connect(store.path) is None


def test_a_client_of_another_user_is_refused(store: DelayedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the file's mode says, the peer's user is looked at."""
    monkeypatch.setattr(control_server, "_is_trusted", lambda connection: False)
    with pytest.raises(Refused, match="this user may not"):
        connect(store.path)
    assert control_of(store)._clients == {}


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="the system does not tell whose a connection is")
def test_the_peers_user_is_compared_with_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same user, and root; no other."""
    ends = socket.socketpair()
    assert control_server._is_trusted(ends[0])
    monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    assert control_server._is_trusted(ends[0]) == (os.getuid() == 0)
    monkeypatch.setattr(struct, "unpack", lambda *_: (1, 54_321, 1))
    assert not control_server._is_trusted(ends[0])
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
    before = threading.active_count()
    with DelayedStore.open(tmp_path / "store", config, clock=clock):
        assert (tmp_path / "store" / "CONTROL").exists() == there
        assert threading.active_count() - before == there
    with DelayedStore.open(tmp_path / "store", config, read_only=True, clock=clock):
        assert threading.active_count() == before


# -- where a socket can be -------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_path_longer_than_a_sockets_limit_is_reached(tmp_path: Path) -> None:
    """108 bytes are a Unix socket's limit; by the directory's descriptor any path will do."""
    path = tmp_path / ("d" * 120) / "store"
    path.parent.mkdir()
    with DelayedStore.open(path) as store, connect(path) as client:
        assert client.ask("create_topic", {"topic": "t"}) is True
        assert [topic.name for topic in store.topics()] == ["persistent://public/default/t"]
    assert not (path / "CONTROL").exists()


def test_what_a_killed_process_left_is_no_hindrance(tmp_path: Path) -> None:
    """A socket without a process: commands open the store, and the next process listens in its place."""
    path = tmp_path / "store"
    DelayedStore.open(path).close()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path / "CONTROL"))
    assert ControlClient.connect(path) is None
    with DelayedStore.open(path), connect(path) as client:
        assert list(client.ask("topics", {})) == []  # type: ignore[call-overload]


def test_a_directory_that_takes_no_socket_is_logged_and_the_store_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system without sockets; and a file of this name, which is left alone."""
    path = tmp_path / "store"
    DelayedStore.open(path, StoreConfig(control=False)).close()
    (path / "CONTROL").write_text("mine")
    with caplog.at_level(logging.WARNING, "duelog.control"), DelayedStore.open(path) as store:
        store.topic("t").send(b"x")
    assert "CONTROL is no socket" in caplog.text
    assert (path / "CONTROL").read_text() == "mine"
    (path / "CONTROL").unlink()

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", refuse)
    caplog.clear()
    with DelayedStore.open(path) as store:
        store.topic("t").send(b"x")
        assert store._engine.control is None
    assert "takes no commands while it is open: [Errno 1] Operation not permitted" in caplog.text


def test_a_child_after_fork_keeps_no_client_waiting(store: DelayedStore) -> None:
    """It closes the parent's sockets, and to end there does not take the parent's away."""
    child = os.fork()
    if not child:
        closed = all(each.fileno() == -1 for each in control_of(store)._sockets)
        store.close()
        os._exit(0 if closed else 1)
    assert os.waitpid(child, 0)[1] == 0
    with connect(store.path) as client:
        assert client.ask("create_topic", {"topic": "t"}) is True


# -- what is asked ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"nonsense\n", "no JSON"),
        (b"\xff\xfe\n", "no JSON"),
        (b"[" * 100_000 + b"\n", "no JSON"),
        (b'{"ask": "send", "with": {"deliver_after": NaN}}\n', "NaN is no number"),
        (b"[]\n", "expected {"),
        (b'{"ask": 1}\n', "expected {"),
        (b'{"ask": "tick", "with": []}\n', "expected an object"),
        (b'{"ask": "backup", "with": {"dest": "/tmp/x"}}\n', "operation='backup': expected one of ack, cancel"),
        (b'{"ask": "close"}\n', "operation='close'"),
        (b'{"ask": "_store"}\n', "operation='_store'"),
        (b'{"ask": "tick", "with": {"path": "/"}}\n', "unexpected keyword argument 'path'"),
        (b'{"ask": "send", "with": {"topic": "t"}}\n', "missing a required argument: 'payload'"),
        (b'{"ask": "send", "with": {"topic": "t", "payload": ""}}\n', "TOPIC='t': there is no such topic"),
        (b'{"ask": "send", "with": {"topic": "t", "payload": "#", "create": true}}\n', "payload='#': expected base64"),
        (b'{"ask": "send", "with": {"topic": 1, "payload": ""}}\n', "topic=1: expected a str"),
        (b'{"ask": "cancel", "with": {"topic": "t", "ids": "1:1"}}\n', "ids='1:1': expected a list"),
        (b'{"ask": "topics", "with": {"namespace": 1}}\n', "namespace=1: expected a str"),
        (b'{"ask": "update_policies", "with": {"values": {"self": 1}}}\n', "policy='self': expected one of active"),
        (b'{"ask": "seek", "with": {"topic": "t", "subscription": "s", "to": {"due_ms": []}}}\n', "to={'due_ms': []}"),
        (b'{"ask": "receive"}\n', "subscribe first"),
        (b'{"ask": "purge_dead_letters", "with": {"ids": "1:1"}}\n', "ids='1:1': expected a list"),
        (b'{"ask": "requeue_dead_letters", "with": {"ids": [[]]}}\n', "ID=[]: no dead letter has this id"),
        (b'{"ask": "requeue_dead_letters", "with": {"delay": "1h"}}\n', "delay='1h': expected seconds"),
        (b'{"ask": "send_messages", "with": {"topic": "t", "messages": {}}}\n', "messages={}: expected a list"),
        (
            b'{"ask": "send_messages", "with": {"topic": "t", "messages": [{"payload": "", "ttl": 1}]}}\n',
            "messages[0]=",
        ),
        (b'{"ask": "send_messages", "with": {"topic": "t", "messages": [{"payload": 1}]}}\n', "messages[0]: payload=1"),
        (b'{"ask": "keys", "with": {"topic": "t", "prefix": 1}}\n', "public/default/t' does not exist"),
        (b'{"ask": "dead_letters", "with": {"older_than": []}}\n', "older_than=[]: expected seconds"),
        (b'{"ask": "every", "with": {"topic": "t", "name": 1, "cron": "@daily", "create": true}}\n', "schedule=1"),
    ],
)
def test_what_cannot_be_understood_is_answered_and_nothing_is_done(
    store: DelayedStore, sent: bytes, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line that names the field and the value; the connection goes on, and no error of duelog's own is logged."""
    with raw(store.path) as connection:
        connection.sendall(sent)
        assert said in json.loads(line_of(connection))["error"]["message"]
        connection.sendall(b'{"ask": "figures"}\n')
        assert json.loads(line_of(connection))["result"]["topics"] == 0
    assert caplog.records == []


def test_figures_of_a_store_with_suspended_upkeep_are_told(
    store: DelayedStore, client: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a suspended part is told by its text: an exception is no value of JSON."""
    suspended = Suspension("trim", None, None, None, "reason", OSError("no space"), 1, 2, 3, 4)
    found = replace(store.stats(), suspended=(suspended,))
    monkeypatch.setattr(DelayedStore, "stats", lambda _: found)
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
    cancel = OPERATIONS["cancel"]
    assert (cancel.right, cancel.parameters, cancel.result) == (
        Right.PRODUCE, {"topic": str, "ids": Sequence[MessageId]}, list[str]
    )  # fmt: skip


def test_what_is_asked_elsewhere_comes_as_the_typed_method_returns_it(
    store: DelayedStore, client: ControlClient
) -> None:
    """Every operation that looks, after some that change: messages, letters, schedules, policies, ids are equal."""
    asked, here = Asked(client.ask), Operations(store, None)  # type: ignore[arg-type]  # nothing waits here
    sent = asked.send("t", b"pay", deliver_after=3600, properties={"a": "b"}, dedup_key="k", create=True)
    asked.send_messages("t", [Message(b"x", key="k"), Message(b"y", deliver_after=60, dedup_key="l")])
    asked.create_subscription("t", "s", "earliest")
    asked.every("t", "n", payload=b"p", cron="@daily", properties={"a": "b"})
    with store.topic("u").subscribe("s") as dying:
        store.topic("u").send(b"x")
        dying.dead_letter(dying.receive(1)[0], "by hand")
    looks: list[tuple[str, tuple[object, ...]]] = [
        ("update_policies", ({"ttl_ms": 3_600_000}, None, "t")), ("topics", ()), ("subscriptions", ("t",)),
        ("has_topic", ("t",)), ("scheduled", ("t",)), ("keys", ("t",)), ("find", ("t", "k")), ("find", ("t", "none")),
        ("peek", ("t", "s", 2)),
        ("schedules", ()), ("schedules", ("t",)), ("pause_schedule", ("t", "n")), ("dead_letters", ()),
        ("partitions", ()), ("policies", ()), ("policies", (None, "t")),
        ("effective", ("t",)), ("tick", ()), ("save_snapshots", ()), ("limits", ()), ("seek", ("t", "s", "latest")),
    ]  # fmt: skip
    for name, given in looks:
        ours, theirs = getattr(here, name)(*given), getattr(asked, name)(*given)
        if OPERATIONS[name].streamed:
            ours, theirs = list(ours), list(theirs)
            assert ours, name
        if name == "limits":
            ours["now_ms"] = theirs["now_ms"]
        assert theirs == ours, name
    assert asked.cancel("t", [MessageId.parse(sent["message_id"]), MessageId(9999, 0)]) == ["cancelled", "unknown"]
    asked.subscribe("v", "r", create=True)
    store.topic("v").send(b"y", key="k")
    (received,) = asked.receive(timeout=20)
    assert (received.payload, received.key, asked.ack([received.position])) == (b"y", "k", 1)


def test_figures_of_a_subscription_that_has_acknowledged_nothing_are_read(
    store: DelayedStore, client: ControlClient
) -> None:
    """Its position stands before the first entry of a ledger."""
    store.topic("t").subscribe("s").close()
    assert Asked(client.ask).topic_figures("t") == store.topic("t").stats()


def test_something_else_is_asked_while_an_answer_is_being_streamed(store: DelayedStore, client: ControlClient) -> None:
    """`duelog stats` asks for the figures of each topic while it lists them: no answer is taken for another's."""
    for name in "abc":
        store.topic(name).create()
    found: Any = client.ask("topics", {})
    figures: list[Any] = [client.ask("topic_figures", {"topic": name}) for name in found]
    assert [each["name"][-1] for each in figures] == ["a", "b", "c"]
    left: Any = client.ask("topics", {})
    next(left)
    unknown: Any = client.ask("peek", {"topic": "nosuch", "subscription": "s", "count": 1})
    with pytest.raises(Refused, match="nosuch"):
        next(unknown)
    assert [len(list(client.ask("topics", {"limit": 2}))), len(list(left))] == [2, 2]  # type: ignore[call-overload]


def test_a_waiting_client_gets_a_message_that_is_sent_meanwhile(store: DelayedStore, client: ControlClient) -> None:
    """It sleeps until the topic changes; what it did not acknowledge goes to the next consumer when it has gone."""
    client.ask("subscribe", {"topic": "t", "subscription": "s", "create": True})
    sender = threading.Timer(0.05, store.topic("t").send, [b"pay"])
    sender.start()
    found: Any = client.ask("receive", {"max_messages": 5})
    (message,) = found
    sender.join()
    assert (message["payload"], message["position"].count(":")) == (PAY, 1)
    assert client.ask("receive", {"timeout": 0}) == []
    (thread,) = control_of(store)._clients.values()
    client.close()
    thread.join(20)
    with connect(store.path) as other:
        other.ask("subscribe", {"topic": "t", "subscription": "s", "type": "shared"})
        assert len(other.ask("receive", {"timeout": 20})) == 1  # type: ignore[arg-type]
        assert other.ask("ack", {"positions": [message["position"]]}) == 1


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
            client.ask("subscribe", {"topic": "t", "subscription": "s", "create": True})
            assert client.ask("receive", {"timeout": 0.01}) == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def test_closing_the_store_ends_clients_that_wait(store: DelayedStore, client: ControlClient) -> None:
    """A receiver without a timeout is told, and the close does not wait for it."""
    client.ask("subscribe", {"topic": "t", "subscription": "s", "create": True})
    closer = threading.Timer(0.05, store.close)
    closer.start()
    with pytest.raises((Refused, Disconnected), match=r"is closed|it has ended"):
        client.ask("receive", {})
    closer.join()
    assert control_of(store)._clients == {}


# -- bounds ----------------------------------------------------------------------------------------


def test_a_line_has_a_limit(tmp_path: Path) -> None:
    """A request that does not end is cut off at the largest message and a MiB; its connection is closed."""
    ended, config = (BrokenPipeError, ConnectionResetError), StoreConfig(max_message_bytes=1_000)
    path = tmp_path / "store"
    with DelayedStore.open(path, config), raw(path) as client, pytest.raises(ended):
        client.sendall(b"x" * 8_000_000)


def test_so_many_clients_and_no_more(store: DelayedStore) -> None:
    """The next one is told at once; when one has gone there is a place again."""
    clients = [connect(store.path) for _ in range(control_server.MOST_CLIENTS)]
    with pytest.raises(Refused, match="16 commands are being answered"):
        connect(store.path)
    threads = list(control_of(store)._clients.values())
    for each in clients:
        each.close()
    for thread in threads:
        thread.join(20)
    connect(store.path).close()


def test_a_silent_client_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is one that sends half a request and stays: nothing of it is done."""
    monkeypatch.setattr(control_server, "IDLE_S", 0.05)
    with DelayedStore.open(tmp_path / "store") as store:
        for begun in (b"", b'{"ask": "create_topic", "with": {"topic": "t"}}'):
            with raw(store.path) as client:
                client.sendall(begun)
                assert b"TimeoutError" in line_of(client)
                assert client.recv(1) == b""
        assert list(store.topics()) == []


def test_a_client_that_does_not_read_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is not kept for ever, and others are answered meanwhile."""
    monkeypatch.setattr(control_server, "STALLED_S", 0.1)
    with DelayedStore.open(tmp_path / "store") as store:
        topic = store.topic("t")
        for _ in range(8):
            topic.send(b"x" * 1_000_000, deliver_after=3600)
        with raw(store.path) as client:
            client.sendall(b'{"ask": "scheduled", "with": {"topic": "t"}}\n')
            (thread,) = control_of(store)._clients.values()
            with connect(store.path) as other:
                assert len(list(other.ask("topics", {}))) == 1  # type: ignore[call-overload]
            thread.join(20)
            assert not thread.is_alive()


# -- kills -----------------------------------------------------------------------------------------

OPENED = """
import os, signal, socket, sys
sys.path.append({root!r})
from duelog import DelayedStore
from duelog.operations import control_server
from duelog.operations.operations import Operations
point = {point!r}
def die(): os.kill(os.getpid(), signal.SIGKILL)
if point == "before":
    Operations.send = lambda self, topic, payload, create: die()
answers = control_server._answers
def killed(operations, line):
    for answer in answers(operations, line):
        if b"message_id" in answer and point != "before":
            if point == "middle":
                yield answer[:len(answer) // 2]
            die()
        yield answer
control_server._answers = killed
store = DelayedStore.open({path!r})
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.kill
@pytest.mark.parametrize("point", ["before", "after", "middle"])
def test_a_process_killed_in_the_middle_of_an_answer_leaves_a_whole_store(tmp_path: Path, point: str) -> None:
    """The client says that it does not know; the message is there once or not at all; the socket is no hindrance."""
    path = tmp_path / "store"
    code = OPENED.format(root=str(ROOT), path=str(path), point=point)
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        said = "no answer from the process that has this store open"
        with connect(path) as client, pytest.raises(Disconnected, match=said):
            client.ask("send", {"topic": "t", "payload": PAY, "create": True})
    assert (path / "CONTROL").exists()
    assert ControlClient.connect(path) is None
    with DelayedStore.open(path) as store:
        with store.topic("t").subscribe("s") as consumer:
            found = consumer.receive(5, timeout=0)
        assert [message.payload for message in found] == ([] if point == "before" else [b"pay"])
        assert list(store.check()) == []
        connect(path).close()


CLIENT = """
import os, signal, sys
sys.path.append({root!r})
from pathlib import Path
from duelog.operations.control_client import ControlClient
client = ControlClient.connect(Path({path!r}))
client.ask("subscribe", {{"topic": "t", "subscription": "s"}})
client.ask("receive", {{"timeout": 0}})
{last}
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.kill
@pytest.mark.parametrize(
    "last",
    [
        "",
        """client._connection.sendall(b'{"ask": "delete_topic", "with": {"topic": "t"}}')""",
        """client._connection.sendall(b'{"ask": "receive", "with": {}}\\\\n')""",
    ],
    ids=["idle", "half-a-request", "waiting"],
)
def test_a_client_killed_in_the_middle_of_a_request_has_done_nothing_by_halves(store: DelayedStore, last: str) -> None:
    """A line without its end is no request; what the client held is handed out again, and its place is free."""
    store.topic("t").subscribe("s").close()
    store.topic("t").send(b"pay")
    code = CLIENT.format(root=str(ROOT), path=str(store.path), last=last)
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    for thread in list(control_of(store)._clients.values()):
        thread.join(20)
        assert not thread.is_alive()
    with store.topic("t").subscribe("s") as consumer:
        assert [message.payload for message in consumer.receive(5, timeout=20)] == [b"pay"]


def test_a_copy_of_the_store_has_no_socket(store: DelayedStore, tmp_path: Path) -> None:
    """A backup is a store of its own, which no process has open."""
    store.topic("t").send(b"x")
    store.backup(tmp_path / "copy")
    assert not (tmp_path / "copy" / "CONTROL").exists()


def test_a_message_that_cannot_be_read_back_was_sent(
    store: DelayedStore, client: ControlClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is stored: an error would have it sent again. When it is due is left out, and why is logged."""

    def fail(*_: object) -> None:
        raise StoreUnavailable(store.path, "Input/output error", errno.EIO)

    with monkeypatch.context() as patched:
        patched.setattr(Topic, "get", fail)
        sent: Any = client.ask("send", {"topic": "t", "payload": PAY, "deliver_after": 3600, "create": True})
    assert sent["due_ms"] is None
    (stored,) = store.topic("t").scheduled()
    assert sent["message_id"] == str(stored.message_id)
    assert [record.message for record in caplog.records] == [
        f"message {sent['message_id']} is stored, and could not be read back"
    ]
