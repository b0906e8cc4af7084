"""Checks of the fields of a message that is sent; each refusal names the field and the value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self

from ..duration import Duration, duration_ms
from ..errors import InvalidArgument, InvalidMessage

MAX_KEY_BYTES = 65_536
"""Longest key in UTF-8."""

MAX_DEDUP_KEY_BYTES = 256
"""Longest deduplication key in UTF-8: it is part of a key of LMDB."""


def checked_payload(payload: object, max_message_bytes: int) -> bytes:
    """Check a payload of at most `max_message_bytes`, and return it as bytes. Raises InvalidMessage."""
    if isinstance(payload, str):
        raise InvalidMessage("payload", payload, "expected bytes, not str: encode it, for example with .encode()")
    if not isinstance(payload, (bytes, bytearray, memoryview)):
        raise InvalidMessage("payload", payload, "expected bytes, bytearray or memoryview")
    size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    if size > max_message_bytes:
        raise too_large(size, max_message_bytes)
    return bytes(payload)


def checked_key(key: object) -> str | None:
    """Check a key, or None. Raises InvalidMessage."""
    if key is None:
        return None
    if not isinstance(key, str):
        raise InvalidMessage("key", key, "expected a str or None")
    size = _utf8_bytes("key", key)
    if size > MAX_KEY_BYTES:
        raise InvalidMessage("key", key, f"{size} bytes in UTF-8, over {MAX_KEY_BYTES}")
    return key


def checked_properties(properties: object) -> dict[str, str] | None:
    """Check properties, and return a copy, or None. Raises InvalidMessage."""
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
    """Check a time to live, and return it in ms. Raises InvalidMessage."""
    ttl_ms = duration_ms("ttl", ttl, InvalidMessage)
    if not ttl_ms:
        raise InvalidMessage("ttl", ttl, "it would expire when it is due, and never be delivered")
    return ttl_ms


def checked_dedup_key(key: object, field: str = "dedup_key", error: type[InvalidArgument] = InvalidArgument) -> str:
    """Check a deduplication key of a caller: 1 to 256 bytes of UTF-8. Raises `error`."""
    if not isinstance(key, str):
        raise error(field, key, "expected a str")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise error(field, key, "a lone surrogate has no UTF-8 form") from None
    if not 0 < size <= MAX_DEDUP_KEY_BYTES:
        raise error(field, key, f"{size} bytes in UTF-8, expected 1 to {MAX_DEDUP_KEY_BYTES}")
    return key


class Dedup(NamedTuple):
    """Deduplication of a send: the key, how long it holds at least, and whether it replaces the pending message."""

    key: str
    hold_ms: int
    replace: bool

    @classmethod
    def checked(
        cls, key: object, hold: Duration | None, replace: object, error: type[InvalidArgument] = InvalidArgument
    ) -> Self | None:
        """Check the arguments of a caller; None without a key. Raises `error`."""
        if key is None:
            if hold is not None:
                raise error("dedup_for", hold, "goes with dedup_key")
            if replace:
                raise error("replace", replace, "goes with dedup_key")
            return None
        hold_ms = 0 if hold is None else duration_ms("dedup_for", hold, error)
        return cls(checked_dedup_key(key, error=error), hold_ms, bool(replace))


def _utf8_bytes(field: str, text: str) -> int:
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidMessage(field, text, "a lone surrogate has no UTF-8 form") from None


def too_large(size: int, max_message_bytes: int) -> InvalidMessage:
    """The error for an encoded message of too many bytes."""
    return InvalidMessage("payload", size, f"the encoded message has this many bytes, over {max_message_bytes=}")
