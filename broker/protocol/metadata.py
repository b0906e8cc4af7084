"""MessageMetadata, as far as the broker reads it. It is never written: a blob is kept and forwarded as it came."""

from __future__ import annotations

from typing import Annotated

from .fields import DECODERS, SIGNED, part
from .wire import ProtocolError


@part
class MessageMetadata:
    """What a producer says about the entry that it sends."""

    producer_name: Annotated[str, 1]
    sequence_id: Annotated[int, 2]
    publish_time: Annotated[int, 3]
    """Milliseconds since 1970, by the producer's clock."""
    partition_key: Annotated[str | None, 6] = None
    num_messages_in_batch: Annotated[int | None, 11, SIGNED] = None
    """Of a batch, which may be of one; None: this is no batch, but one message."""
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
