"""Permissions of roles; and tokens, permissions, certificates of `duelog.connect` over TCP."""

import base64
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import msgpack
import pytest

import duelog
from duelog import DelayedStore, Message
from duelog.broker.configuration import BrokerConfig
from duelog.broker.security.authentication import WireAdmission, authentication_of
from duelog.broker.security.permissions import Action, Permissions
from duelog.errors import Disconnected, InvalidArgument, NotAllowed
from duelog.operations import wire_peer, wire_server, wire_values
from duelog.operations.operation import Right
from duelog.operations.wire import ERROR, RESULT, framed
from duelog.operations.wire_calls import Guard
from duelog.operations.wire_values import pack
from tests.broker.security.certificates import write_pair
from tests.broker.security.test_authentication import SECRET, token
from tests.duelog.operations.test_wire import answer_of, ask, control_of
from tests.ports import free_port
from tests.store.commits import until


class Granted:
    """Grants of one namespace."""

    def administrators(self, tenant: str) -> list[str]:
        return []

    def granted(self, namespace: str) -> dict[str, list[Action]]:
        rights = {"sender": [Action.PRODUCE], "receiver": [Action.CONSUME]}
        return rights if namespace == "public/default" else {}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DelayedStore]:
    """A store that is open in this process, on the machine's clock."""
    with DelayedStore.open(tmp_path / "store") as opened:
        yield opened


def admission(store: DelayedStore, *, tokens: bool = True) -> WireAdmission:
    """What a broker with tokens, and permissions, has."""
    key = f"data:;base64,{base64.b64encode(SECRET).decode()}"
    config = BrokerConfig(authentication_providers=("token",), token_secret_key=key) if tokens else BrokerConfig()
    permissions = Permissions(Granted() if tokens else None, superusers=["root"])
    return WireAdmission(authentication_of(config), permissions, store.clock.now_ms)


def held(role: str, **claims: int) -> str:
    """The token of a role."""
    return token(**{"sub": role, **claims}).decode()  # type: ignore[arg-type]  # claims, not its other arguments


def test_without_authentication_whoever_reaches_the_port_has_all_of_the_face(store: DelayedStore) -> None:
    """As the broker's own port; batches, receiving, documents."""
    port = store.listen("localhost", 0, admit=admission(store, tokens=False))
    with duelog.connect(f"duelog://localhost:{port}/") as connected:
        topic = connected.topic("t")
        topic.send_batch([Message(b"x" * 100_000) for _ in range(20)])
        with topic.subscribe("s") as consumer:
            assert consumer.ack(consumer.receive(20, timeout=20)) == 20
        connected.documents.put("k", b"v")
        assert [each.name for each in connected.topics()] == [topic.name]


def test_a_role_may_what_its_namespace_grants_it(store: DelayedStore) -> None:
    """Sending, receiving, neither, everything; and which is said."""
    place = f"duelog://localhost:{store.listen('localhost', 0, admit=admission(store))}"
    with (
        duelog.connect(place, token=held("sender")) as sender,
        duelog.connect(place, token=held("receiver")) as receiver,
        duelog.connect(place, token=held("root")) as root,
    ):
        sender.topic("t").send(b"x")
        with pytest.raises(NotAllowed, match="role 'sender' may not consume in namespace public/default"):
            sender.topic("t").subscribe("s")
        with pytest.raises(NotAllowed, match="role 'sender' may not produce in namespace a/b"):
            sender.topic("a/b/t").send(b"x")
        with receiver.topic("t").subscribe("s") as consumer:
            (message,) = consumer.receive(timeout=20)
            assert consumer.ack(message) == 1
        with pytest.raises(NotAllowed, match="role 'receiver' may not produce"):
            receiver.topic("t").send(b"x")
        for refused in (receiver.stats, lambda: receiver.documents.get("k"), lambda: list(receiver.topics())):
            with pytest.raises(NotAllowed, match="may not do what concerns the whole store"):
                refused()
        assert root.stats().topics == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [(None, "credentials are missing"), ("nonsense", "the token is refused"), (held("root", exp=1), "expired")],
)
def test_credentials_that_prove_nothing_are_refused(store: DelayedStore, given: str | None, said: str) -> None:
    """At once, and not tried again."""
    port = store.listen("localhost", 0, admit=admission(store))
    with pytest.raises(NotAllowed, match=said):
        duelog.connect(f"duelog://localhost:{port}", token=given)


def test_a_connection_ends_with_its_credentials_and_what_it_had_goes_to_others(store: DelayedStore) -> None:
    """It kept its consumers and what they held, and a receiver that waited still got a message."""
    expired = False

    def guard(right: Right, topic: str | None) -> None:
        if expired:
            raise NotAllowed("the token is refused: it has expired")

    def admit(method: str, credentials: bytes) -> Guard:
        guard(Right.NONE, None)
        return guard

    def receive() -> None:
        try:
            outcomes.append(waiting.receive())
        except NotAllowed as error:
            outcomes.append(str(error))

    store.topic("t").send(b"x")
    outcomes = list[object]()
    with duelog.connect(f"duelog://localhost:{store.listen('localhost', 0, admit=admit)}") as connected:
        consumer, waiting = connected.topic("t").subscribe("s", type="shared"), connected.topic("u").subscribe("s")
        assert len(consumer.receive(timeout=20)) == 1
        receiver = threading.Thread(target=receive)
        receiver.start()
        until(lambda: any(part.permits for part in store.connections().parts))
        expired = True
        with store.topic("t").subscribe("s", type="shared") as other:
            assert [message.payload for message in other.receive(timeout=20)] == [b"x"]
        store.topic("u").send(b"y")
        receiver.join()
        assert outcomes == ["the token is refused: it has expired"]
        with pytest.raises(NotAllowed, match="has expired"):
            connected.topic("t").send(b"z")


def test_nothing_is_done_for_a_peer_that_has_not_said_who_it_is(store: DelayedStore) -> None:
    """It is told so; a long frame of it ends the connection."""
    port = store.listen("localhost", 0, admit=admission(store))
    with socket.create_connection(("localhost", port)) as peer:
        peer.settimeout(20)
        assert answer_of(peer)[0] == "duelog"
        number, kind, error = ask(peer, 1, "Topic.send", ["t"], [b"x"], {})
        assert (number, kind, str(error)) == (1, ERROR, "credentials are missing: the first request is hello")
        peer.sendall(framed(pack([2, "hello", [], ["token", b"x" * 100_000], {}])))
        assert "a frame has at most" in str(answer_of(peer)[2])
    assert list(store.topics()) == []


def test_what_a_peer_that_is_not_known_names_is_not_made(store: DelayedStore) -> None:
    """Twenty bytes name four million ids: they kept all connections waiting, and took 460 MB."""
    port = store.listen("localhost", 0, admit=admission(store))
    many = msgpack.packb([1, "x", [], [msgpack.ExtType(2, pack([0, 0, 4_000_000]))], {}])
    with socket.create_connection(("localhost", port)) as peer, mock.patch.object(wire_values, "message_ids") as made:
        peer.settimeout(20)
        assert answer_of(peer)[0] == "duelog"
        peer.sendall(framed(many))
        assert "credentials are missing" in str(answer_of(peer)[2])
    made.assert_not_called()


def test_credentials_are_checked_one_at_a_time_and_what_comes_behind_waits_for_that(store: DelayedStore) -> None:
    """A thousand wrong passwords in one piece took all the threads in which others' requests are done."""
    checking, proven, at_once = threading.Semaphore(0), threading.Semaphore(0), list[int]()
    admit = admission(store)

    def check(method: str, credentials: bytes) -> Guard:
        at_once.append(1)
        checking.release()
        assert proven.acquire(timeout=20)
        at_once.pop()
        return admit(method, credentials)

    port = store.listen("localhost", 0, admit=check)
    wrong = [framed(pack([number, "hello", [], ["token", b"x"], {}])) for number in range(1, 5)]
    right = framed(pack([5, "hello", [], ["token", held("root").encode()], {}]))
    asked = framed(pack([6, "Topic.exists", ["t"], [], {}]))
    with socket.create_connection(("localhost", port)) as peer:
        peer.settimeout(20)
        assert answer_of(peer)[0] == "duelog"
        peer.sendall(b"".join([*wrong, right, asked]))
        for number in range(1, 6):
            assert checking.acquire(timeout=20)
            with duelog.connect(store.path) as other:
                assert not other.topic("t").exists()
            assert len(at_once) == 1
            proven.release()
            assert answer_of(peer)[:2] == [number, RESULT if number == 5 else ERROR]
        assert answer_of(peer) == [6, RESULT, False]


def test_a_peer_that_goes_on_without_saying_who_it_is_is_ended(
    store: DelayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that are refused keep no connection: with 4,096 of those nobody else would be let in."""
    monkeypatch.setattr(wire_peer, "STALLED_S", 0.05)
    monkeypatch.setattr(wire_server, "_PAUSE_S", 0.02)
    port = store.listen("localhost", 0, admit=admission(store))
    with socket.create_connection(("localhost", port)) as peer:
        peer.settimeout(20)
        deadline = time.monotonic() + 60
        with suppress(OSError):  # sent to one that has ended
            while answer_of(peer) is not None:
                peer.sendall(framed(pack([1, "Topic.exists", ["t"], [], {}])))
                assert time.monotonic() < deadline


def test_an_encrypted_connection_is_trusted_by_its_certificate(store: DelayedStore, tmp_path: Path) -> None:
    """Large batches both ways, by threads that read and write at once; without trust it is refused."""
    certificate, key = write_pair(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    place = f"duelog+ssl://localhost:{store.listen('localhost', 0, tls=context, admit=admission(store))}"
    with pytest.raises(Disconnected, match="cannot be trusted"):
        duelog.connect(place, token=held("root"))
    with duelog.connect(place, token=held("root"), tls_trust=certificate) as connected:
        topic = connected.topic("t")
        with topic.subscribe("s", type="shared") as consumer:

            def send() -> None:
                for number in range(5):
                    topic.send_batch([Message(b"%d:%d" % (number, each) + b"x" * 5_000) for each in range(100)])

            senders = [threading.Thread(target=send) for _ in range(3)]
            for sender in senders:
                sender.start()
            found = 0
            while found < 1_500:
                batch = consumer.receive(500, timeout=20)
                assert batch
                found += consumer.ack(batch)
            for sender in senders:
                sender.join()


def test_a_client_that_goes_before_it_is_taken_is_no_error(
    store: DelayedStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At an encrypted address, as by something that looks for open ports: it was logged as an error of duelog."""
    certificate, key = write_pair(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    port = store.listen("localhost", 0, tls=context, admit=admission(store))
    place = f"duelog+ssl://localhost:{port}"
    duelog.connect(place, token=held("root"), tls_trust=certificate).close()
    taken, gone = threading.Event(), threading.Event()

    def wait() -> None:
        taken.set()
        gone.wait(20)

    control_of(store)._loop.later(wait)  # nobody is taken meanwhile
    assert taken.wait(20)
    with socket.create_connection(("localhost", port)) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it ends by a reset
    gone.set()
    with duelog.connect(place, token=held("root"), tls_trust=certificate) as connected:
        assert not connected.topic("t").exists()
    assert caplog.records == []


def test_an_address_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    """So are a token for a directory, and an address where nobody listens."""
    for place in ("duelog://localhost", "duelog://localhost:0", "duelog+ssl://localhost:65536"):
        with pytest.raises(InvalidArgument, match=rf"place='{re.escape(place)}': expected duelog://host:port"):
            duelog.connect(place)
    for field in ("name", "tls_trust"):
        with pytest.raises(InvalidArgument, match=f"{field}=5: expected a"):
            duelog.connect("duelog://localhost:1", **{field: 5})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="token=None: goes with an address"):
        duelog.connect(tmp_path, token="x")
    with pytest.raises(Disconnected, match="no process serves this store"):
        duelog.connect(f"duelog://localhost:{free_port()}")
