"""From a stored entry to the messages that a client has sent: batches are split, payloads decompressed.

Owns what of an entry is carried: payload (also a null value), key, ordering key, properties, event time. Not carried:
the producer's name and number, the publish time, the schema's version, that a key was given as bytes (its base64 text
is the key), the bounds of batches and the compression. Of an encrypted message, or a part of one that was
sent in chunks, a client cannot send the same again: `NotCarried`.

Operators are shown the metadata in headers, and the payload as the producer made it, decompressed within a bound; a
batch is one answer with the payload of the whole batch, which the client divides. Source of the headers: Apache
Pulsar's admin client, which reads them.
"""

import base64
import importlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from struct import Struct
from struct import error as StructError
from typing import Annotated, Any, NamedTuple
from urllib.parse import quote

from ...operations.json_form import to_json
from ...store.errors import CorruptRecord, DuelogError
from ...store.message import ReceivedMessage, ScheduledMessage
from ...store.position import MessageId
from ..admin.http_request import HttpError, Reply
from ..protocol import entry
from ..protocol.commands import KeyValue
from ..protocol.entry import BATCH, CHUNK, HEADER_BYTES, unpack
from ..protocol.fields import DECODERS, SIGNED, ProtocolError, part
from ..protocol.frames import MAGIC, metadata_of

CODECS = ("NONE", "LZ4", "ZLIB", "ZSTD", "SNAPPY")
"""Compressions by their numbers in metadata."""

MOST_BYTES = 64 << 20
"""A payload that says it is larger is not decompressed: a few bytes can say anything."""

_OF_PYARROW = {"LZ4": "lz4_raw", "ZSTD": "zstd", "SNAPPY": "snappy"}


@part
class StoredMetadata:
    """MessageMetadata, as far as operators and other stores see it."""

    producer_name: Annotated[str, 1] = ""
    sequence_id: Annotated[int, 2] = 0
    publish_time: Annotated[int, 3] = 0
    properties: Annotated[Sequence[KeyValue], 4] = ()
    replicated_from: Annotated[str | None, 5] = None
    partition_key: Annotated[str | None, 6] = None
    compression: Annotated[int, 8] = 0
    uncompressed_size: Annotated[int, 9] = 0
    num_messages_in_batch: Annotated[int | None, 11, SIGNED] = None
    event_time: Annotated[int, 12] = 0
    encryption_keys: Annotated[Sequence[bytes], 13] = ()
    encryption_algo: Annotated[str | None, 14] = None
    encryption_param: Annotated[bytes | None, 15] = None
    schema_version: Annotated[bytes | None, 16] = None
    key_is_base64: Annotated[bool, 17] = False
    ordering_key: Annotated[bytes | None, 18] = None
    deliver_at_time: Annotated[int | None, 19, SIGNED] = None
    highest_sequence_id: Annotated[int, 24] = 0
    null_value: Annotated[bool, 25] = False
    uuid: Annotated[str | None, 26] = None
    num_chunks: Annotated[int | None, 27, SIGNED] = None
    total_chunk_size: Annotated[int | None, 28, SIGNED] = None
    chunk_id: Annotated[int | None, 29, SIGNED] = None
    null_partition_key: Annotated[bool, 30] = False


class CannotDecompress(DuelogError):
    """A payload's compression is unknown, it says that it is too large, or it is damaged; `kind` says which."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class CodecMissing(DuelogError):
    """A payload's compression needs a package that is not installed."""


def split_blob(blob: bytes) -> tuple[StoredMetadata, bytes]:
    """The metadata and the payload, compressed if it is. Raises ProtocolError."""
    try:
        metadata = bytes(metadata_of(memoryview(blob)))
        decoded: StoredMetadata = DECODERS[StoredMetadata](metadata, 0, len(metadata))
    except (IndexError, UnicodeDecodeError) as error:
        raise ProtocolError(f"malformed message metadata: {error}") from error
    return decoded, blob[(6 if blob[:2] == MAGIC else 0) + 4 + len(metadata) :]


def decompressed(metadata: StoredMetadata, payload: bytes) -> bytes:
    """The payload as the producer made it, as long as the metadata says. Raises CannotDecompress, CodecMissing."""
    number, size = metadata.compression, metadata.uncompressed_size
    if not number:
        return payload
    said = f"compression={number}, uncompressed_size={size}"
    if number >= len(CODECS):
        raise CannotDecompress(f"compression number {number}", f"{said}: no such compression is known")
    if size > MOST_BYTES:
        raise CannotDecompress("too large", f"{said}: more than {MOST_BYTES} bytes are not decompressed")
    name = CODECS[number]
    try:
        found = _decompress(name, payload, size) if size else b""  # no size is no limit to zlib
    except ImportError as error:
        raise CodecMissing(
            f"the payload is compressed by {name}, which needs pyarrow: pip install 'duelog[arrow]'"
        ) from error
    except (zlib.error, OSError, ValueError) as error:
        raise CannotDecompress("malformed", f"the payload is no {name}: {error}") from error
    if len(found) != size:
        raise CannotDecompress("malformed", f"the payload is no {name} of {size} bytes, but of {len(found)}")
    return found


def _decompress(name: str, payload: bytes, size: int) -> bytes:
    if name == "ZLIB":
        return zlib.decompressobj().decompress(payload, size)
    arrow = importlib.import_module("pyarrow")
    return bytes(arrow.decompress(payload, size, _OF_PYARROW[name], asbytes=True))


def opened(message: ReceivedMessage | ScheduledMessage) -> tuple[StoredMetadata, bytes]:
    """The metadata and the payload, compressed if it is. A program's message has made-up metadata."""
    payload = message.payload
    try:
        entry.unpack(payload)
        blob = payload[entry.HEADER_BYTES :]
    except CorruptRecord:
        number = message.message_id.entry_id
        blob = entry.blob_of_program(payload, message.key, message.properties, message.publish_ms, number)
    try:
        return split_blob(blob)
    except ProtocolError as error:
        raise HttpError(412, f"message {message.message_id} has metadata that cannot be read: {error}") from error


def reply_of(message: ReceivedMessage | ScheduledMessage, shown: MessageId) -> Reply:
    """The answer; shown: the id that it says."""
    metadata, payload = opened(message)
    headers = {"X-Pulsar-Message-ID": str(shown), **_headers(metadata, len(payload))}
    if metadata.compression and not metadata.encryption_keys:
        try:
            payload = decompressed(metadata, payload)
        except (CannotDecompress, CodecMissing) as error:
            raise HttpError(412, str(error)) from error
    return Reply(payload, headers={name: _text(value) for name, value in headers.items()})


def _headers(metadata: StoredMetadata, size: int) -> dict[str, Any]:
    name = CODECS[metadata.compression] if metadata.compression < len(CODECS) else str(metadata.compression)
    batch = metadata.num_messages_in_batch
    optional: dict[str, Any] = {
        "event-time": iso(metadata.event_time) if metadata.event_time else None,
        "deliver-at-time": None if metadata.deliver_at_time is None else iso(metadata.deliver_at_time),
        "num-batch-message": batch,
        "batch-size": None if batch is None else size,
        "null-value": metadata.null_value or None,
        "replicated-from": metadata.replicated_from,
        "partition-key": metadata.partition_key,
        "compression": name if metadata.compression else None,
        "uncompressed-size": metadata.uncompressed_size or None,
        "encryption-algo": metadata.encryption_algo,
        "Base64-encryption-keys": metadata.encryption_keys[0] if metadata.encryption_keys else None,
        "Base64-encryption-param": metadata.encryption_param,
        "Base64-schema-version-b64encoded": metadata.schema_version,
        "partition-key-b64-encoded": metadata.key_is_base64 or None,
        "Base64-ordering-key": metadata.ordering_key,
        "highest-sequence-id": metadata.highest_sequence_id or None,
        "uuid": metadata.uuid,
        "num-chunks-from-msg": metadata.num_chunks,
        "total-chunk-msg-size": metadata.total_chunk_size,
        "chunk-id": metadata.chunk_id,
        "null-partition-key": metadata.null_partition_key or None,
    }
    return {
        "X-Pulsar-publish-time": iso(metadata.publish_time),
        "X-Pulsar-producer-name": metadata.producer_name,
        "X-Pulsar-sequence-id": metadata.sequence_id,
        "X-Pulsar-Is-Encrypted": bool(metadata.encryption_keys),
        **{f"X-Pulsar-{name}": value for name, value in optional.items() if value is not None},
        **{f"X-Pulsar-PROPERTY-{_token(each.key)}": each.value for each in metadata.properties},
    }


def iso(ms: int) -> str:
    """Write a time as Pulsar's DateFormatter does, in UTC; a number that is no date as it is."""
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return str(ms)


def _text(value: object) -> str:
    """A header's value; what a header may not have is percent-encoded."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return quote(str(value), safe="".join(map(chr, range(0x20, 0x7F))))


def _token(name: str) -> str:
    """A part of a header's name, likewise."""
    return quote(name, safe="!#$&'*+-.^_`|~") or "%"


_SIZE = Struct(">I")
_MOST_SHOWN = 1 << 20
_MOST_MESSAGES = 100
_PREVIEW_BYTES = 256


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
    """Arguments of a client's `send`. content None: a null value; event_time 0: none."""

    content: bytes | None
    properties: dict[str, str]
    key: str | None = None
    ordering_key: str | None = None
    event_time: int = 0


class NotCarried(DuelogError):
    """An entry that cannot be sent again; it stays in its store. The text is the kind of the reason."""


def client_messages(
    payload: bytes, key: str | None, properties: Mapping[str, str], most: int | None = None
) -> list[ClientMessage]:
    """The messages of an entry: one, or those of a batch, in their order, at most so many.

    Raises NotCarried, CodecMissing.
    """
    try:
        header = unpack(payload)
    except CorruptRecord:
        return [ClientMessage(payload, dict(properties), key)]  # sent by a program, without the broker
    if header.flags & CHUNK:
        raise NotCarried("part of a message that was sent in chunks")
    try:
        return list(islice(_of_blob(payload[HEADER_BYTES:], is_batch=bool(header.flags & BATCH)), most))
    except CannotDecompress as error:
        raise NotCarried(error.kind) from error
    except (ProtocolError, IndexError, ValueError, StructError) as error:
        raise NotCarried("malformed") from error


def _of_blob(blob: bytes, *, is_batch: bool) -> Iterator[ClientMessage]:
    metadata, content = split_blob(blob)
    if metadata.encryption_keys or metadata.encryption_param is not None:
        raise NotCarried("encrypted")
    content = decompressed(metadata, content)
    if not is_batch:
        yield _message(metadata, content)
        return
    at = 0
    for _ in range(metadata.num_messages_in_batch or 1):
        (size,) = _SIZE.unpack_from(content, at)
        single: _Single = DECODERS[_Single](content, at + 4, at + 4 + size)
        at += 4 + size
        body = content[at : at + single.payload_size]
        if len(body) != single.payload_size:
            raise ProtocolError("a batch ends in the middle of a message")
        yield _message(single, body)
        at += single.payload_size


def shown_entry(payload: bytes, *, whole: bool) -> dict[str, Any] | None:
    """An entry as its client sent it, in JSON, for people; None: a program has sent it.

    `messages` has the first ones: 100 and a MiB of each if it is to be `whole`, else one and 256 bytes, and none that
    is compressed from more than a MiB. `count`: how many there are. `problem`: why they cannot be read.
    """
    try:
        header = unpack(payload)
    except CorruptRecord:
        return None
    found: dict[str, Any] = {"count": header.messages, "messages": [], "problem": None}
    try:
        metadata, _ = split_blob(payload[HEADER_BYTES:])
        found |= {
            "producer": metadata.producer_name,
            "sequence_id": metadata.sequence_id,
            "publish_ms": metadata.publish_time,
            "compression": CODECS[metadata.compression] if 0 < metadata.compression < len(CODECS) else None,
            "key": metadata.partition_key,
            "properties": {each.key: each.value for each in metadata.properties},
        }
        if not whole and metadata.uncompressed_size > _MOST_SHOWN:
            raise NotCarried(f"compressed, of {metadata.uncompressed_size:,} bytes: look at it alone")
        most, most_bytes = (_MOST_MESSAGES, _MOST_SHOWN) if whole else (1, _PREVIEW_BYTES)
        messages = client_messages(payload, None, {}, most)
    except (NotCarried, CodecMissing, ProtocolError) as error:
        return found | {"problem": str(error)}
    for message in messages:
        content = message.content or b""
        facts = {name: value for name, value in message._asdict().items() if name != "content"}
        found["messages"].append({**facts, "payload": to_json(content[:most_bytes]), "bytes": len(content)})
    return found


def _message(metadata: StoredMetadata | _Single, content: bytes) -> ClientMessage:
    ordering = metadata.ordering_key
    try:
        ordering_key = None if ordering is None else ordering.decode()
    except UnicodeDecodeError as error:
        raise NotCarried("ordering key that is no text") from error
    properties = {each.key: each.value for each in metadata.properties}
    given = None if metadata.null_value else content
    return ClientMessage(given, properties, metadata.partition_key, ordering_key, metadata.event_time)
