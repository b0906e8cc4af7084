"""From a stored entry to the messages that a client sends again: batches are split, payloads decompressed.

Owns what of an entry is carried: payload (also a null value), key, ordering key, properties, event time. Not carried:
the producer's name and number, the publish time, the schema's version, that a key was given as bytes (its base64 text
is the key), the bounds of batches and the compression. Of an encrypted message, or a part of one that was
sent in chunks, a client cannot send the same again: `NotCarried`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from struct import Struct
from struct import error as StructError
from typing import Annotated, NamedTuple

from ...broker.protocol.entry import BATCH, CHUNK, HEADER_BYTES, unpack
from ...broker.protocol.fields import DECODERS, SIGNED, part
from ...broker.protocol.frames import MAGIC, metadata_of
from ...broker.protocol.parts import KeyValue
from ...broker.protocol.wire import ProtocolError
from ...store.errors import CorruptRecord, DuelogError

CODECS = {1: "lz4_raw", 2: "zlib", 3: "zstd", 4: "snappy"}
"""Compression by its number in metadata, as pyarrow calls it; zlib is Python's."""

_SIZE = Struct(">I")


@part
class _Metadata:
    """MessageMetadata, as far as a message that is sent again needs it."""

    properties: Annotated[Sequence[KeyValue], 4] = ()
    partition_key: Annotated[str | None, 6] = None
    compression: Annotated[int, 8] = 0
    uncompressed_size: Annotated[int, 9] = 0
    messages: Annotated[int | None, 11, SIGNED] = None
    event_time: Annotated[int, 12] = 0
    encryption: Annotated[bytes | None, 15] = None
    ordering_key: Annotated[bytes | None, 18] = None
    null_value: Annotated[bool, 25] = False


@part
class _Single:
    """SingleMessageMetadata: what stands before each message of a batch."""

    payload_size: Annotated[int, 3, SIGNED]
    properties: Annotated[Sequence[KeyValue], 1] = ()
    partition_key: Annotated[str | None, 2] = None
    event_time: Annotated[int, 5] = 0
    ordering_key: Annotated[bytes | None, 7] = None
    null_value: Annotated[bool, 9] = False


class ClientMessage(NamedTuple):
    """What a client's `send` is given. content None: a null value; event_time 0: none."""

    content: bytes | None
    properties: dict[str, str]
    key: str | None = None
    ordering_key: str | None = None
    event_time: int = 0


class NotCarried(DuelogError):
    """An entry that cannot be sent again; it stays in its store. The text is the kind of the reason."""


class CodecMissing(DuelogError):
    """A payload's compression needs a package that is not installed."""


def client_messages(payload: bytes, key: str | None, properties: Mapping[str, str]) -> list[ClientMessage]:
    """The messages of an entry: one, or those of a batch, in their order. Raises NotCarried, CodecMissing."""
    try:
        header = unpack(payload)
    except CorruptRecord:
        return [ClientMessage(payload, dict(properties), key)]  # sent by a program, without the broker
    if header.flags & CHUNK:
        raise NotCarried("part of a message that was sent in chunks")
    blob = memoryview(payload)[HEADER_BYTES:]
    try:
        return _of_blob(blob, is_batch=bool(header.flags & BATCH))
    except (ProtocolError, IndexError, ValueError, OSError, StructError, zlib.error) as error:  # OSError: pyarrow's
        raise NotCarried("malformed") from error


def _of_blob(blob: memoryview, *, is_batch: bool) -> list[ClientMessage]:
    raw = bytes(metadata_of(blob))
    metadata: _Metadata = DECODERS[_Metadata](raw, 0, len(raw))
    if metadata.encryption is not None:
        raise NotCarried("encrypted")
    at = (6 if bytes(blob[:2]) == MAGIC else 0) + 4 + len(raw)
    content = _decompressed(bytes(blob[at:]), metadata)
    if not is_batch:
        return [_message(metadata, content)]
    found, at = [], 0
    for _ in range(metadata.messages or 1):
        (size,) = _SIZE.unpack_from(content, at)
        single: _Single = DECODERS[_Single](content, at + 4, at + 4 + size)
        at += 4 + size
        body = content[at : at + single.payload_size]
        if len(body) != single.payload_size:
            raise ProtocolError("a batch ends in the middle of a message")
        found.append(_message(single, body))
        at += single.payload_size
    return found


def _message(metadata: _Metadata | _Single, content: bytes) -> ClientMessage:
    ordering = metadata.ordering_key
    try:
        ordering_key = None if ordering is None else ordering.decode()
    except UnicodeDecodeError as error:
        raise NotCarried("ordering key that is no text") from error
    properties = {each.key: each.value for each in metadata.properties}
    given = None if metadata.null_value else content
    return ClientMessage(given, properties, metadata.partition_key, ordering_key, metadata.event_time)


def _decompressed(content: bytes, metadata: _Metadata) -> bytes:
    size = metadata.uncompressed_size
    if metadata.compression == 0:
        return content
    codec = CODECS.get(metadata.compression)
    if codec is None:
        raise NotCarried(f"compression number {metadata.compression}")
    if codec == "zlib":
        found = zlib.decompressobj().decompress(content, size) if size else b""
    else:
        try:
            import pyarrow as pa
        except ImportError as error:
            raise CodecMissing(f"a payload is compressed by {codec}; pip install 'duelog[drain]'") from error
        found = pa.Codec(codec).decompress(content, size, asbytes=True) if size else b""
    if len(found) != size:
        raise ProtocolError(f"a payload of {size} bytes is {len(found)} decompressed")
    return found
