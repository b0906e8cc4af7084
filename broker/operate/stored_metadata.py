"""A stored blob taken apart: the metadata that a client wrote, and the payload, decompressed within a bound.

Owns which compressions there are and how much memory one payload may take. What a reader makes of it, or of a message
that cannot be read, is the reader's.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Sequence
from typing import Annotated

from ...store.errors import DuelogError
from ..protocol.commands import KeyValue
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
