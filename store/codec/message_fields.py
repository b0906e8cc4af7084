"""What the fields of a message that is sent may be: the check of each, which names the field and the value."""

from __future__ import annotations

from collections.abc import Mapping

from ..duration import Duration, duration_ms
from ..errors import InvalidMessage

MAX_KEY_BYTES = 65_536
"""Longest key in UTF-8."""


def checked_payload(payload: object, max_message_bytes: int) -> bytes:
    """A payload as bytes of at most so many. Raises InvalidMessage."""
    if isinstance(payload, str):
        raise InvalidMessage("payload", payload, "expected bytes, not str: encode it, for example with .encode()")
    if not isinstance(payload, (bytes, bytearray, memoryview)):
        raise InvalidMessage("payload", payload, "expected bytes, bytearray or memoryview")
    size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    if size > max_message_bytes:
        raise too_large(size, max_message_bytes)
    return bytes(payload)


def checked_key(key: object) -> str | None:
    """A key, or None. Raises InvalidMessage."""
    if key is None:
        return None
    if not isinstance(key, str):
        raise InvalidMessage("key", key, "expected a str or None")
    size = _utf8_bytes("key", key)
    if size > MAX_KEY_BYTES:
        raise InvalidMessage("key", key, f"{size} bytes in UTF-8, over {MAX_KEY_BYTES}")
    return key


def checked_properties(properties: object) -> dict[str, str] | None:
    """A copy of properties, or None. Raises InvalidMessage."""
    if properties is None:
        return None
    if type(properties) is not dict and not isinstance(properties, Mapping):
        raise InvalidMessage("properties", properties, "expected a mapping from str to str, or None")
    copy = dict(properties)
    for name, value in copy.items():
        if not isinstance(name, str):
            raise InvalidMessage("properties", name, "expected a str as name")
        if not isinstance(value, str):
            raise InvalidMessage(f"properties[{name!r}]", value, "expected a str")
        if not name.isascii():
            _utf8_bytes("properties", name)
        if not value.isascii():
            _utf8_bytes(f"properties[{name!r}]", value)
    return copy


def checked_ttl(ttl: Duration) -> int:
    """A time to live in ms. Raises InvalidMessage."""
    ttl_ms = duration_ms("ttl", ttl, InvalidMessage)
    if not ttl_ms:
        raise InvalidMessage("ttl", ttl, "it would expire when it is due, and never be delivered")
    return ttl_ms


def _utf8_bytes(field: str, text: str) -> int:
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidMessage(field, text, "a lone surrogate has no UTF-8 form") from None


def too_large(size: int, max_message_bytes: int) -> InvalidMessage:
    """The error for an encoded message of so many bytes."""
    return InvalidMessage("payload", size, f"the encoded message has this many bytes, over {max_message_bytes=}")
