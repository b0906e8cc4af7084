"""Frames, stored entries, the hash that orders keys, work for threads, and files that a broker follows."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from random import Random

import crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duelog.broker.protocol import commands, frames
from duelog.broker.protocol.commands import Message, MessageIdData, SendReceipt
from duelog.broker.protocol.entry import (
    BATCH,
    CHUNK,
    HEADER_BYTES,
    Header,
    MessageMetadata,
    blob_of_program,
    decode_metadata,
    hash_of,
    header_for,
    key_of,
    murmur3_32,
    pack,
    sticky_hash,
    unpack,
)
from duelog.broker.protocol.fields import ProtocolError
from duelog.broker.protocol.loop_calls import Workers, keep_refreshing
from duelog.errors import ClosedError
from duelog.store.errors import CorruptRecord
from tests.broker.protocol.blobs import join_blob


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


def test_a_frame_of_just_the_limit_is_taken_and_nothing_of_it_is_kept() -> None:
    """The limit counts what stands behind the first size; an idle connection holds nothing of what came before."""
    stream = frames.head(commands.Send(1, 2), 9_000) + bytes(9_000)
    cutter = frames.FrameCutter(len(stream) - 4)
    cutter.feed(stream)
    assert len(cut_all(cutter)) == 1
    assert cutter._data == b""


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


@given(st.integers(0, 2**32))
def test_a_checksum_finds_a_changed_byte(seed: int) -> None:
    """Anywhere behind the checksum; without one there is nothing to find."""
    random = Random(seed)
    metadata, payload = (random.randbytes(random.randrange(100)) for _ in range(2))
    blob = join_blob(metadata, payload)
    assert frames.checksum_matches(memoryview(blob))
    assert bytes(frames.metadata_of(memoryview(blob))) == metadata
    changed = bytearray(blob)
    changed[random.randrange(2, len(blob))] ^= random.randrange(1, 256)
    assert not frames.checksum_matches(memoryview(changed))
    assert frames.checksum_matches(memoryview(blob)[6:])
    assert bytes(frames.metadata_of(memoryview(blob)[6:])) == metadata


def test_the_checksum_is_the_one_that_clients_compute() -> None:
    """CRC-32C, known by its check value."""
    assert join_blob(b"", b"").hex() == "0e0148674bc700000000"
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


def metadata(**fields: object) -> MessageMetadata:
    """Metadata of a producer "p" at time 7."""
    return MessageMetadata(producer_name="p", sequence_id=1, publish_time=7, **fields)  # type: ignore[arg-type]


MURMUR3 = {
    b"": 0,
    b"test": 0xBA6BD213,
    b"hello": 0x248BFA47,
    b"hello, world": 0x149BBB7F,
    b"The quick brown fox jumps over the lazy dog": 0x2E4FF723,
}
"""Published values, of each length of a tail, from none to three bytes."""


def test_a_hash_is_the_published_one_without_a_sign_and_never_zero() -> None:
    """Zero stands for a message without a key."""
    assert {data: murmur3_32(data) for data in MURMUR3} == MURMUR3
    assert hash_of(b"test") == (0xBA6BD213 & 0x7FFFFFFF) % 65_536
    assert hash_of(b"") == 1
    assert all(1 <= hash_of(str(each).encode()) <= 65_535 for each in range(2_000))


def test_the_ordering_key_comes_before_the_partition_key() -> None:
    """And a key marked as base64 is decoded first; without a key there is no hash."""
    assert sticky_hash(metadata(partition_key="a", ordering_key=b"b")) == hash_of(b"b")
    assert sticky_hash(metadata(partition_key="a")) == hash_of(b"a")
    assert sticky_hash(metadata(partition_key="AP8=", key_is_base64=True)) == hash_of(b"\x00\xff")
    assert sticky_hash(metadata(partition_key="a", key_is_base64=True)) == hash_of(b"a")
    assert sticky_hash(metadata()) == 0


def test_a_header_comes_back_and_the_blob_is_untouched() -> None:
    """For batches, chunks and plain messages."""
    header = header_for(metadata(partition_key="k"), 3, is_batch=True)
    payload = pack(header, memoryview(b"\x0e\x01blob"))
    assert unpack(payload) == header == Header(BATCH, hash_of(b"k"), 3, 7)
    assert payload[HEADER_BYTES:] == b"\x0e\x01blob"
    assert header_for(metadata(), 1, is_batch=False, is_chunk=True).flags == CHUNK


@pytest.mark.parametrize("payload", [b"", b"\xd1" * 15, b"x" * 16, b"\xd1\x80" + b"\x01" * 14, b"\xd1\x00" + bytes(14)])
def test_what_a_program_stored_has_no_header(payload: bytes) -> None:
    """Too short, another first byte, unknown flags, no messages."""
    with pytest.raises(CorruptRecord):
        unpack(payload)


def test_a_key_is_kept_where_it_is_text() -> None:
    """Not one that stands for bytes, nor one that is too long for the store."""
    assert key_of(metadata(partition_key="k")) == "k"
    assert key_of(metadata(partition_key="aw==", key_is_base64=True)) is None
    assert key_of(metadata(partition_key="k" * 30_000)) is None
    assert key_of(metadata(ordering_key=b"k")) is None


def test_a_blob_of_a_program_reads_as_a_message_of_a_client() -> None:
    """Its key and publish time are in the metadata, the payload follows it."""
    blob = blob_of_program(b"payload", "k", {"a": "b"}, 12, 3)
    size = int.from_bytes(blob[:4], "big")
    found = decode_metadata(blob[4 : 4 + size])
    assert (found.producer_name, found.sequence_id, found.publish_time, found.partition_key) == ("duelog", 3, 12, "k")
    assert blob[4 + size :] == b"payload"


def test_work_that_comes_after_the_end_is_refused_and_breaks_nothing() -> None:
    """A request may be under way when the broker's threads end."""
    executor = ThreadPoolExecutor(1)
    workers = Workers(executor)
    executor.shutdown()
    workers.start(lambda: pytest.fail("it ran"))
    with pytest.raises(ClosedError):
        asyncio.run(workers(int))


async def test_a_look_that_fails_is_logged_and_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    """A file that goes away between two steps of a look must not leave an old certificate in use for ever."""
    looks: list[bool | None] = [None, False, True]
    done = asyncio.Event()

    def look() -> bool:
        found = looks.pop(0)
        if found is None:
            raise FileNotFoundError("broker.pem")
        return found

    task = asyncio.create_task(keep_refreshing(look, 0, done.set))
    await asyncio.wait_for(done.wait(), 30)
    task.cancel()
    await asyncio.wait([task])
    assert looks == []
    assert "broker.pem" in caplog.text
