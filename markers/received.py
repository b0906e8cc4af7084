"""Making the messages that are handed out, of the bodies of their entries: the hottest path of receiving."""

from __future__ import annotations

from ..store.codec.body import decode_body
from ..store.message import ReceivedMessage
from ..store.position import MessageId, Place

_SMALL_BYTES = 16_384
"""Bodies up to this size are worth a second copy where that saves decoding them."""


class MessageMaker:
    """Makes the messages of one batch. Not thread-safe.

    Bare bodies (nothing but publish time and payload) of one size that were published together begin with the same
    bytes: what stands before the payload is decoded for the first of them, and compared for the others.
    """

    __slots__ = ("_head", "_head_bytes", "_publish_ms", "_size", "_subscription", "_topic")

    def __init__(self, topic: str, subscription: str) -> None:
        self._topic = topic
        self._subscription = subscription
        self._head = b""
        self._head_bytes = self._publish_ms = 0
        self._size = -1
        """Of the last bare body that was decoded."""

    def make(self, body: bytes | memoryview, message_id: Place, position: Place, due_ms: int) -> ReceivedMessage:
        """The message of a body whose checksum was checked. Raises ValueError as `decode_body` does."""
        message: ReceivedMessage = object.__new__(ReceivedMessage)  # its constructor takes three times as long
        size = len(body)
        if size == self._size and (data := bytes(body)).startswith(self._head):
            message.payload = data[self._head_bytes :]
            message.publish_ms = self._publish_ms
            message.key = message._properties = message.addressee = None
            message.retries = 0
        else:
            self._decode(message, body)
        message._id_place = message_id
        message._place = position
        message.due_ms = due_ms
        message.redelivery_count = 0
        message.topic = self._topic
        message.subscription = self._subscription
        return message

    def _decode(self, message: ReceivedMessage, body: bytes | memoryview) -> None:
        message.publish_ms, message.payload, message.key, message._properties, extra = decode_body(body)
        if extra is not None:
            message.retries, message.addressee = _retry_facts(extra)
            if "first" in extra:
                message._first_try = _first_try(extra["first"])
            return
        message.retries, message.addressee = 0, None
        if message.key is None and message._properties is None and len(body) <= _SMALL_BYTES:
            self._size = len(body)
            self._head_bytes = self._size - len(message.payload)  # the payload is the last of a bare body
            self._head = bytes(body[: self._head_bytes])
            self._publish_ms = message.publish_ms


def _retry_facts(extra: dict[str, object]) -> tuple[int, str | None]:
    retries, addressee = extra.get("retries", 0), extra.get("addressee")
    if not isinstance(retries, int) or not (addressee is None or isinstance(addressee, str)):
        raise ValueError(f"retry facts {extra!r} of a body are malformed")
    return retries, addressee


def _first_try(first: object) -> tuple[MessageId, int]:
    if type(first) is not list or [type(part) for part in first] != [int, int, int]:
        raise ValueError(f"retry facts {first!r} of a body are malformed")
    ledger_id, entry_id, first_ms = first
    return MessageId(ledger_id, entry_id), first_ms
