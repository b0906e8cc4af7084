"""The write queue of one connection, handed to its transport in pieces of at most 64 KiB.

The transport keeps at most one piece, so that the bytes that have left the process are known, and those that a client
does not read are bounded here. Everything that is queued in one turn of the event loop leaves together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

PIECE = 64 * 1024
"""Bytes handed to a transport at once."""


class Writing(Protocol):
    """The part of a transport that the queue uses."""

    def write(self, data: bytes | bytearray | memoryview, /) -> None: ...

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


class WriteQueue:
    """Bytes queued for one transport. Runs on the event loop's thread."""

    __slots__ = ("_call_soon", "_chunks", "_high", "_low", "_marks", "_on_low", "_paused", "_scheduled",
                 "_stall", "_transport", "is_over", "left", "size")  # fmt: skip

    def __init__(
        self,
        transport: Writing,
        call_soon: Callable[[Callable[[], None]], object],
        *,
        high: int,
        low: int,
        on_low: Callable[[], None],
    ) -> None:
        """high, low: bytes; `on_low` is called once for every time that the queue was over `high`."""
        transport.set_write_buffer_limits(high=1, low=0)  # over TLS 0 bytes are as many as 0, and an empty one is full
        self._transport: Writing | None = transport
        self._call_soon = call_soon
        self._high = high
        self._low = low
        self._on_low = on_low
        self._chunks: deque[bytes | memoryview] = deque()
        self._marks: deque[tuple[int, Callable[[], object]]] = deque()
        """Values that `left` has to reach, each with the call to make then."""
        self.is_over = False
        """True from reaching the high mark until falling to the low one."""
        self._paused = False
        self._scheduled = False
        self.size = 0
        """Bytes that were not handed to the transport yet."""
        self.left = 0
        """Bytes that have left, to tell whether the client takes any."""
        self._stall = (0, 0.0)
        """The last seen `left`, and the time since which it has not grown."""

    @property
    def is_empty(self) -> bool:
        return not self.size and not self._paused

    def stalled_s(self, now: float) -> float:
        """For how long the client has taken nothing of what waits, as far as calls of this have seen."""
        if self.is_empty or self.left != self._stall[0]:
            self._stall = (self.left, now)
        return now - self._stall[1]

    def put(self, head: bytes, blob: bytes | memoryview | None = None) -> None:
        if self._transport is None:
            return
        self._chunks.append(head)
        self.size += len(head)
        if blob is not None:
            self._chunks.append(blob)
            self.size += len(blob)
        if self.size >= self._high:
            self.is_over = True
        if not self._scheduled and not self._paused:
            self._scheduled = True
            self._call_soon(self._flush)

    def on_left(self, call: Callable[[], object]) -> None:
        """Call once, when all that is queued now has left the process, or the connection is gone."""
        if self._transport is None or self.is_empty:
            call()
        else:
            self._marks.append((self.left + self.size, call))

    def pause(self) -> None:
        """The transport could not write all of a piece."""
        self._paused = True

    def resume(self) -> None:
        """The transport has written its piece."""
        self._paused = False
        self._flush()

    def drop(self) -> None:
        self._transport = None
        self._chunks.clear()
        self.size = 0
        self._paused = False
        self._tell()

    def _tell(self) -> None:
        """Make the calls whose mark is reached; all of them where the connection is gone."""
        while self._marks and (self._transport is None or self._marks[0][0] <= self.left):
            self._marks.popleft()[1]()

    def _flush(self) -> None:
        self._scheduled = False
        if self._marks and not self._paused:
            self._tell()
        while self.size and not self._paused and self._transport is not None:
            piece = self._take()
            self.left += len(piece)
            self._transport.write(piece)
            if self._marks and not self._paused:
                self._tell()
        if self.is_over and self.size <= self._low and self._transport is not None:
            self.is_over = False
            self._on_low()

    def _take(self) -> bytes | memoryview:
        chunks, taken, size = self._chunks, [], 0
        while chunks and size + len(chunks[0]) <= PIECE:
            chunk = chunks.popleft()
            taken.append(chunk)
            size += len(chunk)
        if not size:
            view = memoryview(chunks.popleft())
            taken.append(view[:PIECE])
            chunks.appendleft(view[PIECE:])
            size = PIECE
        self.size -= size
        return taken[0] if len(taken) == 1 else b"".join(taken)
