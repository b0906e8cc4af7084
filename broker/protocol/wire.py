"""Protobuf's wire format: varints, tags, and stepping over unknown fields.

Decoding functions take the bytes and an offset and give the value and the offset behind it. They read past the end of
a field that is too short; who calls them compares the last offset with the end, and takes IndexError for a field that
is cut off. Groups are not supported: no command has any.
"""

from __future__ import annotations

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types, the low three bits of a tag."""

MOST_FIELD_NUMBER = (1 << 29) - 1
_WORD = 1 << 64
_SHORT = [bytes([value]) for value in range(128)] + [
    bytes([value & 0x7F | 0x80, value >> 7]) for value in range(128, 1 << 14)
]
"""Varints of one and two bytes, made once: request ids, tags and lengths are nearly always among them."""


class ProtocolError(Exception):
    """Bytes from the peer break the protocol; its connection is closed."""


def varint(value: int) -> bytes:
    """A number of 64 bits; a negative one as two's complement, in ten bytes."""
    if 0 <= value < 1 << 14:
        return _SHORT[value]
    if value < 0:
        value += _WORD
    if not 0 <= value < _WORD:
        raise ValueError(f"{value} does not fit into 64 bits")
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def tag(number: int, wire_type: int) -> bytes:
    """The tag that precedes a field."""
    return varint(number << 3 | wire_type)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """An unsigned number of 64 bits, and the offset behind it."""
    value = data[at]
    at += 1
    if value < 0x80:
        return value, at
    return read_rest(data, at, value)


def read_rest(data: bytes, at: int, first: int) -> tuple[int, int]:
    """A varint whose first byte, `first`, is read already and says that more follow."""
    value = first & 0x7F
    shift = 7
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (_WORD - 1), at
        shift += 7
        if shift > 63:
            raise ProtocolError("a varint has more than ten bytes")


def skip(data: bytes, at: int, field_tag: int) -> int:
    """The offset behind a field, whose tag is read already."""
    if not 1 <= field_tag >> 3 <= MOST_FIELD_NUMBER:
        raise ProtocolError(f"{field_tag >> 3} is no field number")
    kind = field_tag & 7
    if kind == VARINT:
        return read_varint(data, at)[1]
    if kind == BYTES:
        size, at = read_varint(data, at)
        return at + size
    if kind == FIXED64:
        return at + 8
    if kind == FIXED32:
        return at + 4
    raise ProtocolError(f"wire type {kind} is not supported")
