"""Frames: bytes in pieces of any size, limits, and the blob's checksum."""

from __future__ import annotations

from random import Random

import crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duelog.broker.protocol import commands, frames
from duelog.broker.protocol.commands import Message, MessageIdData, SendReceipt
from duelog.broker.protocol.fields import ProtocolError


def cut_all(cutter: frames.FrameCutter) -> list[tuple[bytes, bytes]]:
    """Every frame that is complete."""
    found = []
    while (frame := cutter.cut()) is not None:
        found.append((frame.command, bytes(frame.blob)))
    return found


@given(st.integers(0, 2**32))
def test_frames_are_the_same_however_their_bytes_are_cut(seed: int) -> None:
    """Pieces of any size, asked for after each or after some of them."""
    random = Random(seed)
    blobs = [random.randbytes(random.choice((0, random.randrange(300)))) for _ in range(random.randrange(13))]
    sent = [commands.Send(1, number) for number in range(len(blobs))]
    stream = b"".join(frames.head(send, len(blob)) + blob for send, blob in zip(sent, blobs, strict=True))
    cutter, found, at = frames.FrameCutter(), [], 0
    while at < len(stream):
        size = random.choice((0, random.randrange(20), random.randrange(400)))
        cutter.feed(stream[at : at + size])
        at += size
        asked = random.randrange(3)
        if asked == 0:
            found += cut_all(cutter)
        elif asked == 1 and (frame := cutter.cut()) is not None:
            found.append((frame.command, bytes(frame.blob)))
    found += cut_all(cutter)
    assert [(commands.decode(command), blob) for command, blob in found] == list(zip(sent, blobs, strict=True))
    assert cutter.kept == 0


def test_frames_come_out_at_the_byte_that_completes_them() -> None:
    """Fed one byte at a time."""
    stream = frames.head(commands.Send(1, 2), 3) + b"abc" + frames.head(commands.Ping())
    cutter, complete = frames.FrameCutter(), []
    for at in range(len(stream)):
        cutter.feed(stream[at : at + 1])
        complete += [at] * len(cut_all(cutter))
    assert complete == [len(frames.head(commands.Send(1, 2), 3)) + 2, len(stream) - 1]


@pytest.mark.parametrize(
    "stream",
    [
        (101).to_bytes(4, "big"),
        (3).to_bytes(4, "big"),
        bytes(4),
        (100).to_bytes(4, "big") + (97).to_bytes(4, "big"),
        b"\xff" * 8,
        b"GET / HTTP/1.1\r\n",
    ],
)
def test_a_size_that_cannot_be_is_refused_before_its_bytes_come(stream: bytes) -> None:
    """Larger than allowed, smaller than its own command, or another protocol altogether."""
    cutter = frames.FrameCutter(100)
    cutter.feed(stream)
    with pytest.raises(ProtocolError):
        cutter.cut()


def test_a_frame_of_just_the_limit_is_taken() -> None:
    """The limit counts what stands behind the first size."""
    stream = frames.head(commands.Send(1, 2), 60) + bytes(60)
    cutter = frames.FrameCutter(len(stream) - 4)
    cutter.feed(stream)
    assert len(cut_all(cutter)) == 1


def test_a_large_frame_in_small_pieces_is_joined_once() -> None:
    """A megabyte in pieces of a hundred bytes: joined at each piece it would be five gigabytes."""
    size = 1 << 20
    stream = frames.head(commands.Send(1, 2), size) + bytes(size)
    cutter = frames.FrameCutter(2 * size)
    for at in range(0, len(stream) - 100, 100):
        cutter.feed(stream[at : at + 100])
        assert cutter.cut() is None
    assert len(cutter._more) > 10_000
    cutter.feed(stream[at + 100 :])
    assert [len(blob) for _, blob in cut_all(cutter)] == [size]


def test_what_was_cut_is_not_kept() -> None:
    """An idle connection holds nothing of what came before."""
    cutter = frames.FrameCutter()
    cutter.feed(frames.head(commands.Send(1, 2), 9_000) + bytes(9_000))
    assert len(cut_all(cutter)) == 1
    assert cutter._data == b""


@given(st.integers(0, 2**32))
def test_a_checksum_finds_a_changed_byte(seed: int) -> None:
    """Anywhere behind the checksum; without one there is nothing to find."""
    random = Random(seed)
    metadata, payload = (random.randbytes(random.randrange(100)) for _ in range(2))
    blob = frames.join_blob(metadata, payload)
    assert frames.checksum_matches(memoryview(blob))
    assert bytes(frames.metadata_of(memoryview(blob))) == metadata
    changed = bytearray(blob)
    changed[random.randrange(2, len(blob))] ^= random.randrange(1, 256)
    assert not frames.checksum_matches(memoryview(changed))
    assert frames.checksum_matches(memoryview(blob)[6:])
    assert bytes(frames.metadata_of(memoryview(blob)[6:])) == metadata


def test_the_checksum_is_the_one_that_clients_compute() -> None:
    """CRC-32C, known by its check value."""
    assert frames.join_blob(b"", b"").hex() == "0e0148674bc700000000"
    assert crc32c.crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("blob", [b"", b"\0\0\0", b"\0\0\0\5abcd", b"\x0e\x01", b"\x0e\x01abcd\0\0\0\1", b"\xff" * 4])
def test_a_blob_without_its_metadata_is_a_protocol_error(blob: bytes) -> None:
    """Cut off, or with a size that is more than there is."""
    with pytest.raises(ProtocolError):
        frames.metadata_of(memoryview(blob))


NUMBERS = st.integers(0, 2**64 - 1)
PARTITIONS = st.integers(-1, 2_000)


@given(NUMBERS, PARTITIONS, NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_a_frequent_receipt_is_the_one_that_the_table_of_commands_gives(
    producer: int, partition: int, sequence: int, highest: int, ledger: int, number: int
) -> None:
    """With and without a partition and a highest number."""
    expected = frames.head(SendReceipt(producer, sequence, MessageIdData(ledger, number, partition), highest))
    assert frames.ReceiptFrames(producer, partition).frame(sequence, highest, ledger, number) == expected


@given(
    NUMBERS,
    PARTITIONS,
    st.tuples(NUMBERS, NUMBERS),
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(-(2**63), 2**63 - 1)),
    st.none() | NUMBERS,
    st.integers(0, 2**31),
)
def test_a_frequent_message_is_the_one_that_the_table_of_commands_gives(
    consumer: int, partition: int, place: tuple[int, int], count: int, ack_set: list[int], epoch: int | None, size: int
) -> None:
    """With and without a count, a set of what remains, an epoch."""
    expected = frames.head(Message(consumer, MessageIdData(*place, partition), count, ack_set, epoch), size)
    assert frames.MessageHeads(consumer, partition).head(*place, count, ack_set, epoch, size) == expected
