"""Messages as callers see them, and the due time that a message asks for.

``Message`` goes in, ``ReceivedMessage`` and ``ScheduledMessage`` come out. Making one checks nothing, so that it stays
cheap; ``send`` checks (``codec/body.py``) and names the field. Delay policies are applied later, by the engine.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, TypeAlias

from .duration import Duration, duration_ms, timedelta_ms
from .errors import InvalidArgument, InvalidMessage
from .position import MessageId, Place, Position, place_of, position_at

MAX_DUE_MS = 253_402_300_799_999
"""Latest due time: 9999-12-31T23:59:59.999Z, the last that a ``datetime`` can show."""

EARLIEST_DUE_MS = 1_000_000_000_000
"""Earliest due time that is taken unless the caller allows the past: 2001-09-09T01:46:40Z. As a number of milliseconds
what lies before it is more likely a number of seconds."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST = "9999-12-31T23:59:59.999Z"


@dataclass(slots=True)
class Message:
    """A message to send.

    payload: ``bytes``; a ``bytearray`` or ``memoryview`` is copied when it is sent.
    deliver_at: epoch ms or an aware ``datetime``. A time in the past is delivered at once; one before 2001 is refused
    unless the call that sends allows it (``allow_past``), as it is likely to be seconds.
    deliver_after: seconds or a ``timedelta``, counted from the store's time when it is sent. Not with deliver_at.
    key: what key-shared subscriptions spread by, at most 64 KiB of UTF-8.
    properties: text by name; an empty mapping is as good as None.
    ttl: seconds or a ``timedelta`` after its due time at which it expires: from then on it is not delivered. Whatever
    changes its due time (a policy, `reschedule`) moves that too. None: as long as policies say (`Policies.ttl_ms`).
    dedup_key, dedup_for, replace: as of `Topic.send`; of messages of one batch as if sent one after the other.

    What is finer than a millisecond is rounded up, so that no message is early.
    """

    payload: bytes | bytearray | memoryview
    _: KW_ONLY
    deliver_at: int | datetime | None = None
    deliver_after: Duration | None = None
    key: str | None = None
    properties: Mapping[str, str] | None = None
    ttl: Duration | None = None
    dedup_key: str | None = None
    dedup_for: Duration | None = None
    replace: bool = False


class Occurrence(NamedTuple):
    """An occurrence of a schedule: the schedule's name, and the time in epoch ms that its timetable says."""

    schedule: str
    nominal_ms: int


class _Kept:
    """The fields of a received message as they are kept: those that are objects are made at access.

    Ids are numbers (`place_of`), and "no properties" is None until its dict is asked for: objects that the garbage
    collector follows are the dearest part of handing out.
    """

    if not TYPE_CHECKING:  # which would refuse to set what is a property here
        __slots__ = ("_connection", "_expires_ms", "_failure", "_first_try", "_id_place", "_occurrence", "_place",
                     "_properties", "addressee", "due_ms", "key", "payload", "publish_ms", "redelivery_count",
                     "retries", "subscription", "topic")  # fmt: skip

    _id_place: Place
    _place: Place
    _properties: dict[str, str] | None
    _first_try: tuple[MessageId, int]
    _expires_ms: int
    _occurrence: Occurrence
    _failure: str
    _connection: int
    """The connection by which it came to a connected store (`Connection.count`)."""

    @property
    def properties(self) -> dict[str, str]:
        if self._properties is None:
            self._properties = {}
        return self._properties

    @properties.setter
    def properties(self, properties: dict[str, str]) -> None:
        self._properties = properties

    @property
    def message_id(self) -> MessageId:
        return position_at(self._id_place)

    @message_id.setter
    def message_id(self, message_id: MessageId) -> None:
        self._id_place = place_of(message_id)

    @property
    def position(self) -> Position:
        return position_at(self._place)

    @position.setter
    def position(self, position: Position) -> None:
        self._place = place_of(position)

    @property
    def first_try(self) -> tuple[MessageId, int] | None:
        return getattr(self, "_first_try", None)

    @property
    def expires_ms(self) -> int | None:
        return getattr(self, "_expires_ms", None)

    @property
    def occurrence(self) -> Occurrence | None:
        return getattr(self, "_occurrence", None)

    @property
    def failure(self) -> str | None:
        return getattr(self, "_failure", None)


@dataclass(init=False)
class ReceivedMessage(_Kept):
    """A message handed out by a subscription.

    message_id: the id that ``send`` gave. position: where in the main log the message, or its marker, stands.
    due_ms: when it was due; of a message without a delay, when it was published.
    publish_ms: the store's time when it was sent. redelivery_count: how often it was handed out before, since
    the store was opened. retries: how often it was handed out before `retry_later` postponed it. addressee: the only
    subscription that is to get it; None: all of them. first_try: of a message that `retry_later` postponed, the id
    and the time (epoch ms) of what was postponed first; None: it was not postponed.
    expires_ms: from when on it is not delivered any more, by a time to live of its own; None: it has none. occurrence:
    of a message that a schedule sent, its name and nominal time, after `retry_later` too; None: no schedule sent it.
    failure: why `retry_later` postponed it the last time, where that was said.
    """

    __slots__ = ()

    payload: bytes
    key: str | None
    properties: dict[str, str]
    message_id: MessageId
    position: Position
    due_ms: int
    publish_ms: int
    redelivery_count: int
    topic: str
    subscription: str
    retries: int
    addressee: str | None

    def __init__(
        self,
        payload: bytes,
        key: str | None,
        properties: dict[str, str] | None,
        message_id: MessageId,
        position: Position,
        due_ms: int,
        publish_ms: int,
        redelivery_count: int,
        topic: str,
        subscription: str,
        retries: int = 0,
        addressee: str | None = None,
    ) -> None:
        self.payload = payload
        self.key = key
        self._properties = properties
        self._id_place = place_of(message_id)
        self._place = place_of(position)
        self.due_ms = due_ms
        self.publish_ms = publish_ms
        self.redelivery_count = redelivery_count
        self.topic = topic
        self.subscription = subscription
        self.retries = retries
        self.addressee = addressee


@dataclass(slots=True)
class ScheduledMessage:
    """A stored message looked up by id or by due time, without being delivered; fields as ReceivedMessage.

    dedup_key: the deduplication key that it was sent with; None: without one. addressee, retries, failure: of a retry,
    for whom, after how many deliveries, and why the last of them failed.
    """

    message_id: MessageId
    payload: bytes
    key: str | None
    properties: dict[str, str]
    due_ms: int
    publish_ms: int
    topic: str
    occurrence: Occurrence | None = None
    dedup_key: str | None = None
    addressee: str | None = None
    retries: int = 0
    failure: str | None = None


class Identified(Protocol):
    """Anything that has a message's id: a received, a scheduled, a dead message."""

    @property
    def message_id(self) -> MessageId: ...


AnyId: TypeAlias = MessageId | Identified | str
"""Which message is meant: its id, the text of that, or the message itself."""


def id_of(given: AnyId) -> MessageId:
    """The id of the message that is meant. Raises InvalidArgument."""
    if isinstance(given, str):
        return MessageId.parse(given)
    found = given if isinstance(given, MessageId) else getattr(given, "message_id", None)
    if isinstance(found, MessageId):
        ledger_id, entry_id = found
        if type(ledger_id) is type(entry_id) is int:
            return found
        with suppress(TypeError):  # of numbers of numpy, as columns of ids have them
            return MessageId(operator.index(ledger_id), operator.index(entry_id))
    raise InvalidArgument("message_id", given, "expected a MessageId, its text ledger:entry, or a message")


def resolve_due_ms(message: Message, now_ms: int, *, allow_past: bool = False) -> int | None:
    """The due time that ``message`` asks for, up to ``MAX_DUE_MS``; None if it asks for no delay.

    ``now_ms`` is what deliver_after counts from, ``allow_past`` as in `due_at_ms`. Raises InvalidMessage naming
    ``deliver_at`` or ``deliver_after``.
    """
    return asked_due_ms(message.deliver_at, message.deliver_after, now_ms, allow_past=allow_past)


def asked_due_ms(
    at: int | datetime | None, after: float | timedelta | None, now_ms: int, *, allow_past: bool
) -> int | None:
    """The due time of `resolve_due_ms` for its `deliver_at` and `deliver_after`."""
    if at is not None:
        if after is not None:
            raise InvalidMessage("deliver_after", after, f"deliver_at={at!r} is given too: one of the two")
        return due_at_ms("deliver_at", at, allow_past=allow_past)
    if after is not None:
        delay_ms = duration_ms("deliver_after", after, InvalidMessage)
        if now_ms + delay_ms > MAX_DUE_MS:
            raise InvalidMessage("deliver_after", after, f"due after {_LATEST}")
        return now_ms + delay_ms
    return None


def due_at_ms(field: str, value: int | datetime, *, allow_past: bool) -> int:
    """A due time given by a caller, as `at_ms`; one before ``EARLIEST_DUE_MS`` is refused unless ``allow_past``."""
    ms = at_ms(field, value)
    if ms >= EARLIEST_DUE_MS or allow_past:
        return ms
    meant = ""
    if not isinstance(value, datetime) and EARLIEST_DUE_MS <= ms * 1000 <= MAX_DUE_MS:
        meant = f"; seconds for milliseconds? {ms} s are {_instant(ms * 1000)}"
    reason = f"is {_instant(ms)}, before {_instant(EARLIEST_DUE_MS)}{meant}; allow_past=True takes it as it is"
    raise InvalidMessage(field, value, reason)


def _instant(ms: int) -> str:
    return f"{_EPOCH + timedelta(milliseconds=ms):%Y-%m-%dT%H:%M:%SZ}"


def at_ms(field: str, value: int | datetime) -> int:
    """An instant given by a caller, in epoch ms, 0 to ``MAX_DUE_MS``; raises InvalidMessage naming ``field``."""
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise InvalidMessage(field, value, "a datetime without a time zone could mean any; give it a tzinfo")
        ms = timedelta_ms(value - _EPOCH)
    elif isinstance(value, bool):
        raise InvalidMessage(field, value, "expected int milliseconds since the epoch or an aware datetime")
    elif isinstance(value, float):
        raise InvalidMessage(field, value, "a float may mean seconds; expected int milliseconds since the epoch")
    else:
        try:
            ms = operator.index(value)
        except TypeError:
            raise InvalidMessage(
                field, value, "expected int milliseconds since the epoch or an aware datetime"
            ) from None
    if ms < 0:
        raise InvalidMessage(field, value, "before 1970-01-01T00:00:00Z")
    if ms > MAX_DUE_MS:
        raise InvalidMessage(field, value, f"after {_LATEST}; expected milliseconds since the epoch")
    return ms


# -- checks of the fields of a message that is sent: each refusal names the field and the value ------

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
