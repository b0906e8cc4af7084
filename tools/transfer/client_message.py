"""From a stored entry to the messages that a client sends again: batches are split, payloads decompressed.

Owns what of an entry is carried: payload (also a null value), key, ordering key, properties, event time. Not carried:
the producer's name and number, the publish time, the schema's version, that a key was given as bytes (its base64 text
is the key), the bounds of batches and the compression. Of an encrypted message, or a part of one that was
sent in chunks, a client cannot send the same again: `NotCarried`.
"""

from collections.abc import Mapping, Sequence
from struct import Struct
from struct import error as StructError
from typing import Annotated, NamedTuple

from ...broker.operate.stored_blob import CannotDecompress, StoredMetadata, decompressed, split_blob
from ...broker.protocol.commands import KeyValue
from ...broker.protocol.entry import BATCH, CHUNK, HEADER_BYTES, unpack
from ...broker.protocol.fields import DECODERS, SIGNED, ProtocolError, part
from ...store.errors import CorruptRecord, DuelogError

_SIZE = Struct(">I")


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


def client_messages(payload: bytes, key: str | None, properties: Mapping[str, str]) -> list[ClientMessage]:
    """The messages of an entry: one, or those of a batch, in their order. Raises NotCarried, CodecMissing."""
    try:
        header = unpack(payload)
    except CorruptRecord:
        return [ClientMessage(payload, dict(properties), key)]  # sent by a program, without the broker
    if header.flags & CHUNK:
        raise NotCarried("part of a message that was sent in chunks")
    try:
        return _of_blob(payload[HEADER_BYTES:], is_batch=bool(header.flags & BATCH))
    except CannotDecompress as error:
        raise NotCarried(error.kind) from error
    except (ProtocolError, IndexError, ValueError, StructError) as error:
        raise NotCarried("malformed") from error


def _of_blob(blob: bytes, *, is_batch: bool) -> list[ClientMessage]:
    metadata, content = split_blob(blob)
    if metadata.encryption_keys or metadata.encryption_param is not None:
        raise NotCarried("encrypted")
    content = decompressed(metadata, content)
    if not is_batch:
        return [_message(metadata, content)]
    found, at = [], 0
    for _ in range(metadata.num_messages_in_batch or 1):
        (size,) = _SIZE.unpack_from(content, at)
        single: _Single = DECODERS[_Single](content, at + 4, at + 4 + size)
        at += 4 + size
        body = content[at : at + single.payload_size]
        if len(body) != single.payload_size:
            raise ProtocolError("a batch ends in the middle of a message")
        found.append(_message(single, body))
        at += single.payload_size
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
