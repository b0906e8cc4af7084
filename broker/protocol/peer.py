"""A client's connection as the rooms that serve its commands see it."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from .commands import Connect
from .fields import Command


class Peer(Protocol):
    """One connection. All of it belongs to the event loop's thread."""

    number: int
    """Tells connections of one broker apart; never used again."""
    address: str
    role: str | None
    """The authenticated role; None: the broker asks for no credentials."""

    @property
    def client_version(self) -> str:
        """The client's version from CONNECT, `Pulsar-CPP-v3.5.1` for example."""

    @property
    def connect(self) -> Connect:
        """The client's CONNECT, with the credentials that it gave last."""

    @property
    def protocol_version(self) -> int:
        """The smaller one of both sides."""

    @property
    def closed(self) -> bool:
        """True once the connection is gone; commands sent to it are dropped."""

    @property
    def writable(self) -> bool:
        """True while the write queue is below its high mark; messages are sent only then."""

    def send(self, command: Command, blob: bytes | memoryview | None = None) -> None:
        """Queue a command, with the blob of a MESSAGE. Never waits."""

    def send_frames(self, frames: bytes, blob: bytes | memoryview | None = None) -> None:
        """Queue encoded commands: whole frames, or one up to `blob`, which is not copied."""

    def close(self, reason: str) -> None:
        """End the connection when what is queued has left."""

    def on_writable(self, call: Callable[[], object]) -> None:
        """Call once, when the write queue has fallen below its low mark."""

    def on_left(self, call: Callable[[], object]) -> None:
        """Call once, when all that is queued now has left the process, or the connection is gone; perhaps at once."""

    def pause_reading(self, reason: str) -> None:
        """Read nothing more until every reason is given to `resume_reading`."""

    def resume_reading(self, reason: str) -> None: ...

    def ping(self, within_s: float) -> Awaitable[bool]:
        """Send a PING; true if the client answers in time."""
