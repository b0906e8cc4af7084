"""The session: every command in every state, split at every byte, and bytes that are none."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog.broker.protocol import commands, fields
from duelog.broker.protocol.fields import ProtocolError
from duelog.broker.protocol.frames import BEFORE_CONNECT, FRAME_ROOM, head
from duelog.broker.protocol.states import FLAGS, Session, State
from tests.broker.protocol.test_commands import CLASSES, instance

BLOB = b"\0\0\0\0payload"


class Talk:
    """A session, and what it wrote."""

    def __init__(self, state: State = State.START, max_message_size: int = 1 << 20) -> None:
        self.written: list[commands.Command] = []
        self.session = Session(self.written.append, 0, server_version="duelog", max_message_size=max_message_size)
        if state is not State.START:
            self.says(commands.Connect("test", protocol_version=19))
        if state is State.READY:
            self.session.accept()
        if state is State.CLOSED:
            self.session.close()
        self.written.clear()

    def says(self, *said: commands.Command) -> list[commands.Command]:
        """Commands that come of commands, all in one piece."""
        return self.feed(stream(*said))

    def feed(self, data: bytes) -> list[commands.Command]:
        """Commands that come of bytes."""
        self.session.feed(data, 0)
        found = []
        while (received := self.session.next()) is not None:
            command, blob = received
            assert bytes(blob) == (BLOB if isinstance(command, commands.Send) else b"")
            found.append(command)
        return found


def stream(*said: commands.Command) -> bytes:
    """The frames of commands."""
    parts = []
    for each in said:
        blob = BLOB if isinstance(each, (commands.Send, commands.Message)) else b""
        parts.append(head(each, len(blob)) + blob)
    return b"".join(parts)


BOTH_WAYS: set[type[commands.Command]] = {commands.Ping, commands.Pong}
MAY_COME: dict[State, set[type[commands.Command]]] = {
    State.START: {commands.Connect},
    State.CONNECTING: BOTH_WAYS,
    State.READY: {cls for cls in CLASSES if not issubclass(cls, commands.BrokerCommand)}
    - {commands.Connect, commands.AuthResponse},
}


def test_each_command_in_each_state() -> None:
    """It comes out, or it closes the session; a closed one takes nothing."""
    for cls in CLASSES:
        for state in State:
            check_command_in_state(cls, state)


def check_command_in_state(cls: type[commands.Command], state: State) -> None:
    """Check what becomes of one command."""
    command = instance(cls, Random(0))
    talk = Talk(state)
    if state is State.CLOSED:
        assert talk.says(command) == []
    elif cls in MAY_COME[state]:
        came = talk.says(command)
        assert came == ([] if cls is commands.Ping else [command])
        assert talk.written == ([commands.Pong()] if cls is commands.Ping else [])
    else:
        with pytest.raises(ProtocolError):
            talk.says(command)
        assert talk.session.state is State.CLOSED
        assert talk.says(commands.Connect("again")) == []


def test_a_conversation_split_at_every_byte_is_the_same() -> None:
    """Two pieces, cut anywhere; and single bytes."""
    said = [
        commands.Ping(),
        commands.Producer("t", 1, 2),
        commands.Send(1, 0),
        commands.Flow(1, 1000),
        commands.Ack(1, commands.AckType.CUMULATIVE, [commands.MessageIdData(5, 6, 7, 8, [9])]),
    ]
    data = stream(*said)
    for at in range(len(data) + 1):
        talk = Talk(State.READY)
        assert talk.feed(data[:at]) + talk.feed(data[at:]) == said[1:]
    talk = Talk(State.READY)
    assert [each for at in range(len(data)) for each in talk.feed(data[at : at + 1])] == said[1:]
    assert talk.written == [commands.Pong()]


def test_connected_says_the_smaller_version_and_what_the_broker_can_do() -> None:
    """21 is the highest that is known."""
    for offered, agreed in ((0, 0), (13, 13), (21, 21), (99, 21)):
        talk = Talk()
        flags = commands.FeatureFlags(supports_auth_refresh=True)
        talk.says(commands.Connect("Pulsar-CPP-v3", protocol_version=offered, feature_flags=flags))
        talk.session.accept()
        assert talk.written == [commands.Connected("duelog", agreed, 1 << 20, FLAGS)]
        assert (talk.session.client_version, talk.session.flags) == ("Pulsar-CPP-v3", flags)


def test_the_broker_can_exactly_four_things_beyond_its_version() -> None:
    """Flags 1, 4, 5 and 7."""
    assert fields.ENCODERS[commands.FeatureFlags](FLAGS).hex() == "0801200128013801"


def test_authentication_takes_as_many_challenges_as_the_broker_has() -> None:
    """Each is answered once; an answer beside one closes the connection."""
    talk = Talk(State.CONNECTING)
    for _ in range(2):
        talk.session.challenge(commands.AuthData("token", b"?"))
        assert talk.says(commands.AuthResponse("v")) == [commands.AuthResponse("v")]
    talk.session.accept()
    assert [type(each) for each in talk.written] == [commands.AuthChallenge] * 2 + [commands.Connected]
    talk.session.challenge(commands.AuthData("token"))
    assert talk.says(commands.Flow(1, 1), commands.AuthResponse("v")) == [
        commands.Flow(1, 1),
        commands.AuthResponse("v"),
    ]
    with pytest.raises(ProtocolError, match="no challenge"):
        talk.says(commands.AuthResponse("v"))


def test_frames_are_small_before_the_connection_is_ready() -> None:
    """64 KiB; then the largest message and room for its command."""
    for state, limit in ((State.START, BEFORE_CONNECT), (State.READY, (1 << 20) + FRAME_ROOM)):
        talk = Talk(state)
        assert talk.feed(limit.to_bytes(4, "big")) == []
        talk = Talk(state)
        with pytest.raises(ProtocolError):
            talk.feed((limit + 1).to_bytes(4, "big"))


def test_a_send_has_a_message() -> None:
    """A frame that ends with its command."""
    with pytest.raises(ProtocolError, match="without a message"):
        Talk(State.READY).feed(head(commands.Send(1, 2)))


def test_a_client_that_was_heard_or_is_not_read_is_not_taken_for_dead() -> None:
    """A part of a frame is a sign of life; silence begins when it is read again; a check that comes late asks first."""
    heard, unread, late = Talk(State.READY), Talk(State.READY), Talk(State.READY)
    heard.session.check(30)
    heard.session.feed(b"\0", 50)
    assert (heard.session.check(60), heard.session.check(80)) == (80, 110)
    unread.session.check(30)
    for now in range(40, 200, 20):
        unread.session.check(now, reading=False)
    assert unread.session.check(209) == 210
    assert late.session.check(500) == 530
    assert [len(each.written) for each in (heard, unread, late)] == [2, 1, 1]


@settings(max_examples=300)
@given(st.sampled_from(State), st.integers(0, 2**32))
def test_no_bytes_raise_anything_but_a_protocol_error(state: State, seed: int) -> None:
    """Noise, commands, commands with bytes changed; nothing is kept beyond what came."""
    random = Random(seed)
    fed = bytearray()
    for _ in range(random.randrange(7)):
        is_noise = random.random() < 0.3
        fed += random.randbytes(60) if is_noise else stream(instance(random.choice(CLASSES), random))
    for _ in range(random.randrange(4)):
        if fed:
            fed[random.randrange(len(fed))] = random.randrange(256)
    talk = Talk(state)
    try:
        talk.session.feed(bytes(fed), 0)
        while talk.session.next() is not None:
            pass
    except ProtocolError:
        assert talk.session.state is State.CLOSED
    assert talk.session._frames.kept <= len(fed)
