"""A connection's states: bytes in, commands out; which command may come when; when to ask whether the client is there.

start -> connecting -> ready -> closed. Knows neither socket nor clock: bytes, times (seconds of a clock that never
jumps) and what is to be written are handed in and out. Every method that reads may raise ProtocolError; the session is
closed then, and so is the connection to be.
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from enum import Enum

from . import commands
from .fields import CLASSES, Command, ProtocolError
from .frames import FRAME_ROOM, MAX_MESSAGE_SIZE, FrameCutter

PROTOCOL_VERSION = 21
"""The version of the protocol that the broker speaks."""

FLAGS = commands.FeatureFlags(
    supports_auth_refresh=True,
    supports_topic_watchers=True,
    supports_get_partitioned_metadata_without_auto_creation=True,
    supports_topic_watcher_reconcile=True,
)
"""Capabilities of the broker beyond its protocol version."""

_FROM_BROKER = frozenset(cls for cls in CLASSES.values() if issubclass(cls, commands.BrokerCommand))


class State(Enum):
    """Progress of the handshake."""

    START = "start"
    CONNECTING = "connecting"
    READY = "ready"
    CLOSED = "closed"


@dataclass(eq=False)
class Session:
    """The protocol's state of one connection."""

    _write: Callable[[Command], object]
    _started: float
    _: KW_ONLY
    server_version: str
    max_message_size: int = MAX_MESSAGE_SIZE
    keep_alive_s: float = 30
    handshake_s: float = 30

    def __post_init__(self) -> None:
        self.state = State.START
        self.connect = commands.Connect("")
        """The client's CONNECT, with the credentials that it gave last."""
        self.protocol_version = 0
        """The smaller one of both sides; 0 until the client has said its own."""
        self.flags = commands.FeatureFlags()
        """Capabilities of the client."""
        self._heard = self._started
        self._asked = False
        self._challenged = False
        self._frames = FrameCutter()

    @property
    def client_version(self) -> str:
        return self.connect.client_version

    def feed(self, data: bytes, now: float) -> None:
        self._heard = now
        self._asked = False
        if self.state is not State.CLOSED:
            self._frames.feed(data)

    def next(self) -> tuple[Command, memoryview] | None:
        """The next command and the blob of a SEND, None until more bytes come. A PING is answered here."""
        try:
            while self.state is not State.CLOSED and (frame := self._frames.cut()) is not None:
                command = commands.decode(frame.command)
                self._check(command, frame.blob)
                if type(command) is not commands.Ping:
                    return command, frame.blob
                self._write(commands.Pong())
        except ProtocolError:
            self.close()
            raise
        return None

    def _check(self, command: Command, blob: memoryview) -> None:
        """Raise ProtocolError for what may not come now; note who the client is."""
        kind = type(command)
        if self.state is State.START:
            if not isinstance(command, commands.Connect):
                raise ProtocolError(f"{kind.__name__} before Connect")
            self.state = State.CONNECTING
            self.connect = command
            self.protocol_version = min(PROTOCOL_VERSION, command.protocol_version)
            self.flags = command.feature_flags or commands.FeatureFlags()
        elif isinstance(command, commands.AuthResponse):
            if not self._challenged:
                raise ProtocolError("AuthResponse to no challenge")
            self._challenged = False
            given = command.response
            if given is not None:
                method = given.method or self.connect.auth_method_name
                self.connect = replace(self.connect, auth_method_name=method, auth_data=given.data)
        elif kind is commands.Connect:
            raise ProtocolError("a second Connect")
        elif kind in _FROM_BROKER:
            raise ProtocolError(f"a client does not send {kind.__name__}")
        elif self.state is State.CONNECTING and kind not in {commands.Ping, commands.Pong}:
            raise ProtocolError(f"{kind.__name__} before the connection is ready")
        elif kind is commands.Send and not blob:
            raise ProtocolError("Send without a message")

    # -- what the broker says --------------------------------------------------------------------

    def challenge(self, data: commands.AuthData) -> None:
        """Ask for credentials: in answer to CONNECT, or of a connection that is ready, once they have expired."""
        if self.state in {State.CONNECTING, State.READY}:
            self._challenged = True
            self._write(commands.AuthChallenge(self.server_version, data, self.protocol_version))

    def accept(self, connected: commands.Connected | None = None) -> None:
        """The client may be served. connected: what it is told instead of what this broker is."""
        if self.state is State.CONNECTING:
            self.state = State.READY
            self._frames.limit = self.max_message_size + FRAME_ROOM
            self._write(
                connected
                or commands.Connected(self.server_version, self.protocol_version, self.max_message_size, FLAGS)
            )

    def surrender(self) -> bytes:
        """Return the bytes received and not read, and close: another reads them."""
        rest = self._frames.surrender()
        self.close()
        return rest

    def close(self) -> None:
        self.state = State.CLOSED
        self._frames = FrameCutter()

    # -- time ------------------------------------------------------------------------------------

    def check(self, now: float, *, reading: bool = True) -> float:
        """Send a PING if the client has been silent; the time at which to come back.

        reading: False: the broker has stopped reading, and silence says nothing of the client.
        Raises ProtocolError: the client is gone, or did not finish its handshake.
        """
        if self.state is not State.READY:
            if self.state is not State.CLOSED and now >= self._started + self.handshake_s:
                self.close()
                raise ProtocolError(f"not connected after {self.handshake_s:g} s")
            return self._started + self.handshake_s
        if not reading:
            self._heard = now
            self._asked = False
        if now < self._heard + self.keep_alive_s:
            return self._heard + self.keep_alive_s
        if now >= self._heard + 2 * self.keep_alive_s and self._asked:
            self.close()
            raise ProtocolError(f"no answer to a Ping after {self.keep_alive_s:g} s")
        if not self._asked:
            self._asked = True
            self._heard = now - self.keep_alive_s
            self._write(commands.Ping())
        return self._heard + 2 * self.keep_alive_s
