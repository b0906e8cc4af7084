"""From a stored entry to the messages that a client has sent: batches are split, payloads decompressed.

Owns what of an entry is carried: payload (also a null value), key, ordering key, properties, event time. Not carried:
the producer's name and number, the publish time, the schema's version, that a key was given as bytes (its base64 text
is the key), the bounds of batches and the compression. Of an encrypted message, or a part of one that was
sent in chunks, a client cannot send the same again: `NotCarried`.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from struct import Struct
from struct import error as StructError
from typing import Annotated, Any, NamedTuple

from ...operations.json_form import to_json
from ...store.errors import CorruptRecord, DuelogError
from ..protocol.commands import KeyValue
from ..protocol.entry import BATCH, CHUNK, HEADER_BYTES, unpack
from ..protocol.fields import DECODERS, SIGNED, ProtocolError, part
from .stored_blob import (
    CODECS,
    CannotDecompress,
    CodecMissing,
    StoredMetadata,
    decompressed,
    split_blob,
)

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
