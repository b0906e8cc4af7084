"""A stored message as Pulsar shows it to operators: its metadata in headers, its payload as the producer made it.

A batch is one answer with the payload of the whole batch, which the client divides.

Source of the headers: Apache Pulsar's admin client, which reads them.
"""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from ...store.errors import CorruptRecord
from ...store.message import ReceivedMessage, ScheduledMessage
from ...store.position import MessageId
from ..admin.http_request import HttpError, Reply
from ..protocol import entry
from ..protocol.fields import ProtocolError
from .stored_metadata import CODECS, CannotDecompress, CodecMissing, StoredMetadata, decompressed, split_blob


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
        "event-time": _iso(metadata.event_time) if metadata.event_time else None,
        "deliver-at-time": None if metadata.deliver_at_time is None else _iso(metadata.deliver_at_time),
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
        "X-Pulsar-publish-time": _iso(metadata.publish_time),
        "X-Pulsar-producer-name": metadata.producer_name,
        "X-Pulsar-sequence-id": metadata.sequence_id,
        "X-Pulsar-Is-Encrypted": bool(metadata.encryption_keys),
        **{f"X-Pulsar-{name}": value for name, value in optional.items() if value is not None},
        **{f"X-Pulsar-PROPERTY-{_token(each.key)}": each.value for each in metadata.properties},
    }


def _iso(ms: int) -> str:
    """As Pulsar's DateFormatter, in UTC; a number that is no date as it is."""
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
