"""The write queue: pieces, marks, what is kept of it."""

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from duelog.broker.security.authentication import Certificate
from duelog.broker.server.connection import PIECE, WriteQueue
from tests.broker.security.certificates import write_pair


class Transport(asyncio.WriteTransport):
    """Takes a piece at once, or keeps it until `drain`."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.full = False
        self.queue: WriteQueue | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.pieces.append(bytes(data))
        if self.full and self.queue is not None:
            self.queue.pause()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert (high, low) == (1, 0)


def make(high: int = 1 << 20, low: int = 1 << 18) -> tuple[WriteQueue, Transport, list[Callable[[], None]], list[int]]:
    """(queue, transport, calls for the next turn of the loop, sizes at which `on_low` was called)."""
    transport, soon = Transport(), list[Callable[[], None]]()
    lows: list[int] = []
    queue = WriteQueue(transport, soon.append, high=high, low=low, on_low=lambda: lows.append(queue.size))
    transport.queue = queue
    return queue, transport, soon, lows


def run(soon: list[Callable[[], None]]) -> None:
    """One turn of the loop."""
    calls = soon[:]
    soon.clear()
    for call in calls:
        call()


@given(st.lists(st.tuples(st.binary(max_size=50), st.none() | st.integers(0, 3 * PIECE)), max_size=20), st.booleans())
def test_everything_leaves_in_order_in_pieces_of_at_most_64_kib(
    frames: list[tuple[bytes, int | None]], full: bool
) -> None:
    """At once, or one piece each time that the transport has room."""
    queue, transport, soon, _ = make()
    transport.full = full
    blobs = [None if size is None else bytes([number]) * size for number, (_, size) in enumerate(frames)]
    for (head, _), blob in zip(frames, blobs, strict=True):
        queue.put(head, None if blob is None else memoryview(blob))
    run(soon)
    while full and not queue.is_empty:
        queue.resume()
    assert b"".join(transport.pieces) == b"".join(
        head + (blob or b"") for (head, _), blob in zip(frames, blobs, strict=True)
    )
    assert all(len(piece) <= PIECE for piece in transport.pieces)
    assert queue.left == sum(map(len, transport.pieces))


def test_frames_of_one_turn_leave_in_one_piece() -> None:
    """A thousand receipts are one write."""
    queue, transport, soon, _ = make()
    for _ in range(1_000):
        queue.put(b"receipt")
    assert len(soon) == 1
    run(soon)
    assert len(transport.pieces) == 1


def test_a_queue_over_its_mark_tells_once_when_it_is_low_again() -> None:
    """However often it was put to meanwhile."""
    queue, transport, soon, lows = make(high=4 * PIECE, low=2 * PIECE)
    transport.full = True
    for _ in range(5):
        queue.put(bytes(PIECE))
    assert queue.is_over
    run(soon)
    assert (queue.size, lows) == (4 * PIECE, [])
    queue.resume()
    queue.put(bytes(PIECE))
    assert (queue.is_over, lows) == (True, [])
    queue.resume()
    queue.resume()
    assert (queue.is_over, lows) == (False, [2 * PIECE])
    while not queue.is_empty:
        queue.resume()
    assert lows == [2 * PIECE]


def test_a_queue_keeps_nothing_for_a_connection_that_is_gone() -> None:
    """And takes nothing more."""
    queue, transport, soon, lows = make()
    queue.put(bytes(2 << 20))
    queue.drop()
    queue.put(b"late")
    run(soon)
    assert (queue.size, transport.pieces, lows) == (0, [], [])


@given(st.lists(st.tuples(st.integers(1, 3 * PIECE), st.booleans()), min_size=1, max_size=8), st.integers(0, 40))
def test_what_was_queued_is_told_once_when_it_has_left_or_the_connection_is_gone(
    frames: list[tuple[int, bool]], resumes: int
) -> None:
    """A frame has left when the transport has written its last byte, not when it took it."""
    queue, transport, soon, _ = make()
    told: list[int] = []
    marks: dict[int, int] = {}
    for number, (size, full) in enumerate(frames):
        transport.full = full
        queue.put(bytes(size))
        marks[number] = queue.left + queue.size
        queue.on_left(lambda number=number: told.append(number))  # type: ignore[misc]
        run(soon)
    transport.full = True
    for _ in range(resumes):
        if queue.is_empty:
            break
        written = queue.left  # all that the transport took before has left now
        queue.resume()
        if not queue.is_empty:
            assert told == [number for number, mark in marks.items() if mark <= written]
    if queue.is_empty:
        assert len(told) == len(frames)
    queue.drop()
    assert told == list(range(len(frames)))
    queue.on_left(lambda: told.append(-1))
    assert told[-1] == -1


class Answering(asyncio.Protocol):
    """Answers what comes with two pieces, the second one in a later turn of the loop."""

    queue: WriteQueue

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        loop = asyncio.get_running_loop()
        self.queue = WriteQueue(
            cast(asyncio.Transport, transport), loop.call_soon, high=1_000, low=10, on_low=lambda: None
        )

    def data_received(self, data: bytes) -> None:
        self.queue.put(b"one")
        asyncio.get_running_loop().call_later(0.01, self.queue.put, b"two")

    def pause_writing(self) -> None:
        self.queue.pause()

    def resume_writing(self) -> None:
        self.queue.resume()


async def test_what_is_queued_for_a_connection_over_tls_leaves_though_nothing_comes(tmp_path: Path) -> None:
    """A transport over TLS that may buffer no byte at all counts as full when it is empty."""
    certificate, key = write_pair(tmp_path)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Answering, "127.0.0.1", 0, ssl=Certificate(certificate, key).context)
    context = ssl.create_default_context(cafile=str(certificate))
    port = server.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(b"?")
    try:
        assert await asyncio.wait_for(reader.readexactly(6), 60) == b"onetwo"
    finally:
        writer.close()
        await writer.wait_closed()
        server.close()
