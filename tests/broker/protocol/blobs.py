"""Blobs as a client makes them."""

import crc32c

from duelog.broker.protocol.frames import MAGIC


def join_blob(metadata: bytes, payload: bytes) -> bytes:
    """A blob with its checksum."""
    covered = b"".join((len(metadata).to_bytes(4, "big"), metadata, payload))
    return b"".join((MAGIC, crc32c.crc32c(covered).to_bytes(4, "big"), covered))
