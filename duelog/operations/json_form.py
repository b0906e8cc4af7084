"""Values of operations in JSON: one writer and one reader, for the control socket and for what is printed.

Ids and positions are text, `LEDGER:ENTRY`; payloads base64; enumerations their values; dataclasses and named tuples
objects with their fields. A `Message` has only the fields that say something.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from duelog.store.errors import InvalidArgument
from duelog.store.message import Message, Occurrence, ReceivedMessage
from duelog.store.position import MessageId

_FIRST = (bytes, ReceivedMessage)
"""Kinds that a value is read as where other kinds would do too."""

_SENT = tuple(Message.__dataclass_fields__)

_RECEIVED = ("payload", "key", "properties", "message_id", "position", "due_ms", "publish_ms", "occurrence",
             "redelivery_count", "retries", "addressee", "topic", "subscription")  # fmt: skip


def to_json(value: object) -> Any:
    """Write a value.

    >>> to_json([MessageId(17, 3), b"pay", None])
    ['17:3', 'cGF5', None]
    """
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode()
    if isinstance(value, (MessageId, BaseException)):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {name: to_json(each) for name, each in value.items()}
    if isinstance(value, Message):
        given = {name: getattr(value, name) for name in _SENT}
        return {name: to_json(each) for name, each in given.items() if each is not None and each is not False}
    if isinstance(value, ReceivedMessage):
        return {name: to_json(getattr(value, name)) for name in _RECEIVED}
    if is_dataclass(value):
        return {each.name: to_json(getattr(value, each.name)) for each in fields(value)}
    if hasattr(value, "_asdict"):
        return to_json(value._asdict())
    return list(map(to_json, value))  # type: ignore[call-overload]  # a list or a tuple


def from_json(kind: Any, value: Any, field: str) -> Any:
    """Read a value of an annotated kind; plain values are left for the engine to check. Raises InvalidArgument."""
    if value is None:
        return None
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        kinds = [each for each in arguments if each is not NoneType]
        return from_json(kinds[0], value, field) if len(kinds) == 1 or kinds[0] in _FIRST else value
    if isinstance(origin, type) and issubclass(origin, Sequence):
        if not isinstance(value, list):
            raise InvalidArgument(field, value, "expected a list")
        found = [from_json(arguments[0], each, f"{field}[{at}]") for at, each in enumerate(value)]
        return tuple(found) if origin is tuple else found
    if kind is bytes:
        return _bytes(field, value)
    if kind is MessageId:
        return MessageId.parse(value)
    if kind is Message:
        return _message(field, value)
    if kind is ReceivedMessage:
        return [_received(each) for each in value] if isinstance(value, list) else _received(value)
    if isinstance(kind, type) and hasattr(kind, "_fields"):
        return kind(**value)
    if is_dataclass(kind):
        hints = _hints(kind)  # type: ignore[arg-type]
        told = {name: from_json(each, value[name], name) for name, each in hints.items() if name in value}
        return kind(**told)  # type: ignore[operator]
    return value


def camel(name: str) -> str:
    """Write a field's name as REST does.

    >>> camel("due_ms")
    'dueMs'
    """
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}


def _bytes(field: str, text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise InvalidArgument(field, text, "expected base64") from None


def _message(field: str, found: Any) -> Message:
    if not isinstance(found, Mapping) or not {"payload"} <= found.keys() <= set(_SENT):
        raise InvalidArgument(field, found, f"expected an object with payload, and of {', '.join(sorted(_SENT))}")
    return Message(**{**found, "payload": _bytes(f"{field}: payload", found["payload"])})


def _received(found: Mapping[str, Any]) -> ReceivedMessage:
    places = {name: MessageId.parse(found[name]) for name in ("message_id", "position")}
    given = {**found, **places, "payload": _bytes("payload", found["payload"])}
    occurrence = given.pop("occurrence")
    message = ReceivedMessage(**given)
    if occurrence is not None:
        message._occurrence = Occurrence(**occurrence)
    return message
