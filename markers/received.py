"""Making the messages that are handed out, of the bodies of their entries: the hottest path of receiving."""

from __future__ import annotations

from collections.abc import Sequence

from ..store.codec.body import decode_body, occurrence_of
from ..store.position import MessageId, Place
from ..store.received_messages import Facts, ReceivedMessages

_SMALL_BYTES = 16_384
"""Bodies up to this size are worth a second copy where that saves decoding them."""


class MessageMaker:
    """Makes the messages of one batch, in slots that are reserved before. Not thread-safe.

    Bare bodies (nothing but publish time and payload) of one size that were published together begin with the same
    bytes: what stands before the payload is decoded for the first of them, and compared for the others.
    """

    __slots__ = ("_head", "_head_bytes", "_made", "_payloads", "_publish_ms", "_published", "_size")

    def __init__(self, topic: str, subscription: str) -> None:
        self._made = ReceivedMessages(topic, subscription)
        self._payloads: list[bytes | None] = self._made.payloads  # type: ignore[assignment]  # None: not made
        self._published = self._made.publish_ms
        self._head = b""
        self._head_bytes = self._publish_ms = 0
        self._size = -1
        """Of the last bare body that was decoded."""

    def __len__(self) -> int:
        """How many slots are reserved."""
        return len(self._payloads)

    def reserve(self, places: Sequence[Place], id_places: Sequence[Place], dues: Sequence[int]) -> int:
        """Slots for messages at `places` with these ids and due times; returns the first."""
        made, first, count = self._made, len(self._payloads), len(places)
        made.places += places
        made.id_places += id_places
        made.due_ms += dues
        made.keys += [None] * count
        made.redelivery_counts += [0] * count
        self._published += [0] * count
        self._payloads += [None] * count
        return first

    def place(self, slot: int) -> Place:
        """Where the message of a slot, or its marker, stands."""
        return self._made.places[slot]

    def make(self, slot: int, body: bytes | memoryview) -> None:
        """Make a message of a body whose checksum was checked. Raises ValueError as `decode_body` does."""
        if len(body) == self._size and (data := bytes(body)).startswith(self._head):
            self._payloads[slot] = data[self._head_bytes :]
            self._published[slot] = self._publish_ms
            return
        made = self._made
        publish_ms, payload, key, properties, extra = decode_body(body)
        if extra is not None:
            retries, addressee, failure = _retry_facts(extra)
            first_try = _first_try(extra["first"]) if "first" in extra else None
            expires_ms = made.due_ms[slot] + _ttl_ms(extra["ttl"]) if "ttl" in extra else None
            facts = Facts(properties, retries, addressee, first_try, expires_ms, occurrence_of(extra), failure)
            made.facts[made.places[slot]] = facts
        elif properties is not None:
            made.facts[made.places[slot]] = Facts(properties)
        elif key is None and len(body) <= _SMALL_BYTES:
            self._size = len(body)
            self._head_bytes = self._size - len(payload)  # the payload is the last of a bare body
            self._head = bytes(body[: self._head_bytes])
            self._publish_ms = publish_ms
        made.keys[slot] = key
        self._published[slot] = publish_ms
        self._payloads[slot] = payload

    def messages(self) -> ReceivedMessages:
        """Those that were made, by slot."""
        payloads = self._payloads
        if None not in payloads:
            return self._made
        return self._made.pick([slot for slot, payload in enumerate(payloads) if payload is not None])


def _retry_facts(extra: dict[str, object]) -> tuple[int, str | None, str | None]:
    retries, addressee, failure = extra.get("retries", 0), extra.get("addressee"), extra.get("failure")
    if not (isinstance(retries, int) and isinstance(addressee, str | None) and isinstance(failure, str | None)):
        raise ValueError(f"retry facts {extra!r} of a body are malformed")
    return retries, addressee, failure


def _ttl_ms(ttl_ms: object) -> int:
    if type(ttl_ms) is not int:
        raise ValueError(f"time to live {ttl_ms!r} of a body is malformed")
    return ttl_ms


def _first_try(first: object) -> tuple[MessageId, int]:
    if type(first) is not list or [type(part) for part in first] != [int, int, int]:
        raise ValueError(f"retry facts {first!r} of a body are malformed")
    ledger_id, entry_id, first_ms = first
    return MessageId(ledger_id, entry_id), first_ms
