"""The stored form of a message, and the hash that orders keys."""

from __future__ import annotations

import pytest

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
from duelog.store.errors import CorruptRecord


def metadata(**fields: object) -> MessageMetadata:
    """Metadata of a producer "p" at time 7."""
    return MessageMetadata(producer_name="p", sequence_id=1, publish_time=7, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"test", 0xBA6BD213),
        (b"hello", 0x248BFA47),
        (b"hello, world", 0x149BBB7F),
        (b"The quick brown fox jumps over the lazy dog", 0x2E4FF723),
    ],
)
def test_murmur3_gives_the_published_values(data: bytes, expected: int) -> None:
    """Each length of a tail, from none to three bytes."""
    assert murmur3_32(data) == expected


def test_a_hash_has_no_sign_and_is_never_zero() -> None:
    """Zero stands for a message without a key."""
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
