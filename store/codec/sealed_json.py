"""Small records that people can read, of files and of objects in a bucket: JSON, with a checksum of its fields."""

import json
from collections.abc import Mapping
from typing import Any
from zlib import crc32


def pack_json(fields: Mapping[str, Any], indent: int | None = None) -> bytes:
    """The line, or with `indent` the lines, of a record."""
    return json.dumps({**fields, "crc": _checksum(fields)}, indent=indent).encode() + b"\n"


def unpack_json(content: bytes) -> tuple[dict[str, Any], bool]:
    """(fields of a record, True if they match their checksum). Raises ValueError: it is none."""
    try:
        fields: dict[str, Any] = json.loads(content)
        checksum = fields.pop("crc")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("no record") from error
    return fields, checksum == _checksum(fields)


def _checksum(fields: Mapping[str, Any]) -> int:
    return crc32(json.dumps(fields, sort_keys=True).encode())
