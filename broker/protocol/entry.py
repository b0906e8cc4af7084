"""The stored form of a message: a header of fixed width, then the blob exactly as the producer sent it.

The header has what the broker needs to hand a message out without reading its metadata: how many messages the blob
holds (permits count messages), the sticky hash (order by key), the publish time (seek by time). Messages that a program
put into a topic without the broker have no header; `blob_of_program` makes a blob that clients can read of one.

Owns the header's layout and the sticky hash. docs/format.md has a worked example.
"""

from base64 import b64decode
from binascii import Error as NoBase64
from functools import lru_cache
from struct import Struct
from typing import Annotated, NamedTuple

from ...store.errors import CorruptRecord
from .fields import BYTES, DECODERS, SIGNED, VARINT, ProtocolError, part, tag, varint


@part
class MessageMetadata:
    """MessageMetadata, as far as the broker reads it. It is never written: blobs are kept and forwarded unchanged."""

    producer_name: Annotated[str, 1]
    sequence_id: Annotated[int, 2]
    publish_time: Annotated[int, 3]
    """Milliseconds since 1970, by the producer's clock."""
    partition_key: Annotated[str | None, 6] = None
    num_messages_in_batch: Annotated[int | None, 11, SIGNED] = None
    """Messages of a batch, which may be one; None: a single message, no batch."""
    key_is_base64: Annotated[bool, 17] = False
    ordering_key: Annotated[bytes | None, 18] = None
    deliver_at_time: Annotated[int | None, 19, SIGNED] = None
    """Due time in milliseconds since 1970."""
    highest_sequence_id: Annotated[int, 24] = 0
    null_value: Annotated[bool, 25] = False


_decode = DECODERS[MessageMetadata]


def decode_metadata(data: bytes | memoryview) -> MessageMetadata:
    """The metadata of a blob; raises ProtocolError."""
    data = bytes(data)
    try:
        found: MessageMetadata = _decode(data, 0, len(data))
    except (IndexError, UnicodeDecodeError) as error:
        raise ProtocolError(f"malformed message metadata: {error}") from error
    return found


VERSION = 0xD1
"""First byte of a header: 0xD0 plus the version of its layout."""

BATCH = 0x01
"""Flag: the blob is a batch, whose messages have indexes, also a batch of one."""

CHUNK = 0x02
"""Flag: the blob is a part of a message."""

_FLAGS = BATCH | CHUNK
_FIRST = bytes([VERSION])
_HEADER = Struct(">BBHIQ")  # version, flags, sticky hash, messages, publish time in ms
HEADER_BYTES = _HEADER.size

HASH_RANGE = 65_536
"""Sticky hashes are 1 to 65,535; 0 stands for a message without a key."""

_MAX_KEY_BYTES = 65_535
_HASHES_KEPT = 65_536


class Header(NamedTuple):
    """The fields that precede a blob in storage."""

    flags: int
    sticky_hash: int
    messages: int
    publish_ms: int


def pack(header: Header, blob: bytes | bytearray | memoryview) -> bytes:
    """The payload that is stored for a blob. One copy of it."""
    return b"".join((_HEADER.pack(VERSION, *header), blob))


def unpack(payload: bytes | memoryview) -> Header:
    """The header of a payload; the blob is what follows. Raises CorruptRecord for one that the broker did not store."""
    if len(payload) < HEADER_BYTES:
        raise CorruptRecord(f"{len(payload)} bytes are no entry of the broker")
    version, flags, sticky_hash, messages, publish_ms = _HEADER.unpack_from(payload)
    if version != VERSION or flags & ~_FLAGS or not messages:
        raise CorruptRecord(f"version {version:#x}, flags {flags:#x}, {messages} messages: no entry of the broker")
    return Header(flags, sticky_hash, messages, publish_ms)


def is_chunk(payload: bytes) -> bool:
    """Return True if the payload is a part of a message, as clients send large ones."""
    return payload[:1] == _FIRST and len(payload) >= HEADER_BYTES and bool(payload[1] & CHUNK)


def header_for(metadata: MessageMetadata, messages: int, *, is_batch: bool, is_chunk: bool = False) -> Header:
    """The header for a blob with this metadata."""
    flags = (BATCH if is_batch else 0) | (CHUNK if is_chunk else 0)
    return Header(flags, sticky_hash(metadata), messages, metadata.publish_time)


def key_of(metadata: MessageMetadata) -> str | None:
    """The partition key as the stored message's key; None: it has none, or one that is no text or too long for it."""
    key = metadata.partition_key
    if key is None or metadata.key_is_base64 or len(key) * 3 > _MAX_KEY_BYTES:
        return None
    return key


def sticky_hash(metadata: MessageMetadata) -> int:
    """Hash the ordering key of a message, else its partition key; 0: it has neither.

    Source: Apache Pulsar, Murmur3_32Hash and StickyKeyConsumerSelector.
    """
    ordering_key = metadata.ordering_key
    if ordering_key is not None:
        return hash_of(ordering_key)
    key = metadata.partition_key
    if key is None:
        return 0
    if metadata.key_is_base64:
        try:
            return hash_of(b64decode(key))
        except (NoBase64, ValueError):
            pass  # says what it is not: the text is the key
    return hash_of(key.encode())


@lru_cache(maxsize=_HASHES_KEPT)
def hash_of(key: bytes) -> int:
    """The sticky hash of a key's bytes, 1 to 65,535."""
    return (murmur3_32(key) & 0x7FFFFFFF) % HASH_RANGE or 1


def murmur3_32(data: bytes) -> int:
    """MurmurHash3 x86 32 with seed 0, unsigned."""
    mask, hashed, size = 0xFFFFFFFF, 0, len(data)
    whole = size & ~3
    for at in range(0, whole, 4):
        block = int.from_bytes(data[at : at + 4], "little") * 0xCC9E2D51 & mask
        block = (block << 15 | block >> 17) * 0x1B873593 & mask
        hashed ^= block
        hashed = (hashed << 13 | hashed >> 19) & mask
        hashed = hashed * 5 + 0xE6546B64 & mask
    if whole < size:
        block = int.from_bytes(data[whole:], "little") * 0xCC9E2D51 & mask
        hashed ^= ((block << 15 | block >> 17) & mask) * 0x1B873593 & mask
    hashed ^= size
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B & mask
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 & mask
    return hashed ^ hashed >> 16


_PRODUCER = tag(1, BYTES) + varint(6) + b"duelog" + tag(2, VARINT)
_PUBLISH_TIME, _PROPERTIES, _KEY = tag(3, VARINT), tag(4, BYTES), tag(6, BYTES)
_PROPERTY_KEY, _PROPERTY_VALUE = tag(1, BYTES), tag(2, BYTES)


def blob_of_program(
    payload: bytes, key: str | None, properties: dict[str, str], publish_ms: int, sequence_id: int
) -> bytes:
    """A blob for a message that has no header: its metadata, without a checksum, and the payload."""
    metadata = _PRODUCER + varint(sequence_id) + _PUBLISH_TIME + varint(publish_ms)
    for name, value in properties.items():
        pair = _field(_PROPERTY_KEY, name) + _field(_PROPERTY_VALUE, value)
        metadata += _PROPERTIES + varint(len(pair)) + pair
    if key is not None:
        metadata += _field(_KEY, key)
    return b"".join((len(metadata).to_bytes(4, "big"), metadata, payload))


def _field(before: bytes, text: str) -> bytes:
    encoded = text.encode()
    return before + varint(len(encoded)) + encoded
