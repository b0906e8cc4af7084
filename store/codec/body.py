"""The body of an entry that holds a message: its msgpack form, written and read.

    body = [publish_ms, payload, key | nil, properties | nil, extra | nil]    trailing nils are left out

A bare message is ``[publish_ms, payload]``. ``extra`` is a map from str to any msgpack value, for what the
library itself adds (a dead-lettered message's origin, the schedule of an occurrence); callers cannot set it. The due
time is not in the body: it stands in the run's header. Nor is a checksum: the run has one of every body, checked before
``decode_body``.

``encode_batch`` is the hottest path of sending: whatever a plain message does not need is out of its loop.
"""

import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import cast

import msgpack
import numpy as np
import numpy.typing as npt

from ..duration import Duration, duration_ms
from ..errors import InvalidArgument, InvalidMessage, checked_list
from ..message import (
    EARLIEST_DUE_MS,
    MAX_DUE_MS,
    Dedup,
    Message,
    Occurrence,
    checked_dedup_key,
    checked_key,
    checked_payload,
    checked_properties,
    checked_ttl,
    due_at_ms,
    resolve_due_ms,
    too_large,
)
from .bodies import Bodies

DEDUP = "dedup"
"""Name of the deduplication key in the `extra` of a body."""

_ARRAY_HEADS = [bytes([0x90 + count]) for count in range(6)]
_NIL = b"\xc0"

# [publish_ms as uint 64, payload as bin 8, bin 16]
_BARE_8, _BARE_16 = struct.Struct(">HQBB"), struct.Struct(">HQBH")
_BARE_FORM = 0x92CF
_BIN_8, _BIN_16 = 0xC4, 0xC5
_BARE_FROM_MS = 1 << 32
_BARE_TO_BYTES = (1 << 16) - 1
"""Sizes up to which msgpack's shortest forms of the two are these; of a payload under 256 bytes bin 8."""

Body = tuple[int, bytes, str | None, dict[str, str] | None, dict[str, object] | None]
"""publish_ms, payload, key, properties, extra."""


@dataclass(slots=True, eq=False)
class EncodedBatch:
    """A batch of checked messages as columns, in the order they were given.

    dues: int64, due time in ms as asked; of a message without a delay, ``now_ms``.
    delayed: bool, whether the due time is after ``now_ms``.
    bodies: the encoded bodies, as a list or as columns.
    overridden: bool, whether a fixed delay took the place of the delay that was asked for; None: of none.
    dedups: by their places, what those with deduplication keys ask for; None: there are none.
    """

    dues: npt.NDArray[np.int64]
    delayed: npt.NDArray[np.bool_]
    bodies: list[bytes] | Bodies
    overridden: npt.NDArray[np.bool_] | None = None
    dedups: dict[int, Dedup] | None = None

    def __len__(self) -> int:
        return len(self.bodies)

    def rows(self, rows: npt.NDArray[np.intp]) -> "EncodedBatch":
        """Select messages by their places in the batch; without `dedups`."""
        overridden = None if self.overridden is None else self.overridden[rows]
        return EncodedBatch(self.dues[rows], self.delayed[rows], Bodies.of(self.bodies).pick(rows.tolist()), overridden)

    def part(self, start: int, limit: int) -> "EncodedBatch":
        overridden = None if self.overridden is None else self.overridden[start:limit]
        dedups = self.dedups and {at - start: each for at, each in self.dedups.items() if start <= at < limit}
        dues, delayed = self.dues[start:limit], self.delayed[start:limit]
        return EncodedBatch(dues, delayed, self.bodies[start:limit], overridden, dedups)


class _Local(threading.local):
    def __init__(self) -> None:
        self.packer = msgpack.Packer(use_bin_type=True, autoreset=True)


_local = _Local()


def encode_batch(
    messages: Iterable[Message], now_ms: int, max_message_bytes: int, *, allow_past: bool = False
) -> EncodedBatch:
    """Check and encode ``messages``, published at ``now_ms``; all or none. ``allow_past``: see `due_at_ms`.

    Raises InvalidMessage for the first that cannot be taken, with a field such as ``messages[3].deliver_at``, and
    InvalidArgument where ``messages`` is one message or no sequence. Thread-safe.
    """
    if isinstance(messages, (Message, str, bytes)) or not isinstance(messages, Iterable):
        raise InvalidArgument("messages", messages, "expected a sequence of Message")
    bodies: list[bytes] = []
    dues: list[int] = []
    add_body, add_due = bodies.append, dues.append
    packed_now = _pack(now_ms)
    # What stands before the payload of a bare message depends on its size alone; a size is in here once it is found
    # to be within the limit.
    heads: dict[int, bytes] = {}
    earliest_ms = 0 if allow_past else EARLIEST_DUE_MS
    bare = True  # all so far, and `bodies` are their payloads
    dedups: dict[int, Dedup] | None = None
    for message in messages:
        try:
            payload = message.payload
            at = message.deliver_at
            if message.deliver_after is None and (at is None or (type(at) is int and earliest_ms <= at <= MAX_DUE_MS)):
                due_ms = at
            else:
                due_ms = resolve_due_ms(message, now_ms, allow_past=allow_past)
            if (
                type(payload) is bytes
                and message.key is None
                and message.properties is None
                and message.ttl is None
                and message.dedup_key is None
                and message.dedup_for is None
                and not message.replace
            ):
                size = len(payload)
                if size not in heads:
                    heads[size] = _bare_head(packed_now, size, max_message_bytes)
                body = payload if bare else heads[size] + payload
            else:
                dedup = Dedup.checked(message.dedup_key, message.dedup_for, message.replace, InvalidMessage)
                if dedup is not None:
                    dedups = dedups or {}
                    dedups[len(bodies)] = dedup
                body = _encode_fields(message, packed_now, max_message_bytes, None)
                if bare:
                    bare, bodies[:] = False, _with_heads(heads, bodies)
        except InvalidMessage as error:
            raise InvalidMessage(f"messages[{len(bodies)}].{error.field}", error.value, error.reason) from None
        except AttributeError:
            if isinstance(message, Message):
                raise  # out of a mapping or a tzinfo of the caller's
            raise InvalidMessage(f"messages[{len(bodies)}]", message, "expected a Message") from None
        add_body(body)
        add_due(now_ms if due_ms is None else due_ms)
    columns = np.array(dues, dtype=np.int64)
    return EncodedBatch(columns, columns > now_ms, _bare_bodies(heads, bodies) if bare else bodies, dedups=dedups)


def _with_heads(heads: Mapping[int, bytes], payloads: Iterable[bytes]) -> list[bytes]:
    return [heads[len(payload)] + payload for payload in payloads]


def _bare_bodies(heads: Mapping[int, bytes], payloads: list[bytes]) -> list[bytes] | Bodies:
    """Bodies of bare messages, given what stands before a payload of each size."""
    if len(heads) != 1:
        return _with_heads(heads, payloads)
    ((size, head),) = heads.items()
    return Bodies(payloads, head, len(head) + size)


def encode_payloads(
    payloads: Sequence[bytes],
    deliver_at: object,
    deliver_after: float | timedelta | None,
    now_ms: int,
    max_message_bytes: int,
    *,
    allow_past: bool = False,
) -> EncodedBatch:
    """Check and encode messages that are nothing but payloads, published at ``now_ms``; all or none.

    deliver_at: None, one time for all, or a column of epoch ms. Raises InvalidMessage naming ``payloads[3]`` or
    ``deliver_at[3]``, InvalidArgument for what is no sequence. Thread-safe.
    """
    rests = checked_list("payloads", payloads, "a sequence of bytes")
    count = len(rests)
    if deliver_at is None or isinstance(deliver_at, (int, datetime, np.integer)):
        asked = Message(b"", deliver_at=cast(int, deliver_at), deliver_after=deliver_after)
        due_ms = resolve_due_ms(asked, now_ms, allow_past=allow_past)
        dues = np.full(count, now_ms if due_ms is None else due_ms, dtype=np.int64)
    else:
        if deliver_after is not None:
            raise InvalidMessage("deliver_after", deliver_after, "deliver_at is given too: one of the two")
        dues = _due_column(deliver_at, count, allow_past)
    packed_now = _pack(now_ms)
    if not set(map(type, rests)) <= {bytes}:
        rests = [_one_of(rests, at, max_message_bytes) for at in range(count)]
    heads: dict[int, bytes] = {}
    for size in set(map(len, rests)):
        try:
            heads[size] = _bare_head(packed_now, size, max_message_bytes)
        except InvalidMessage as error:
            at = [len(payload) for payload in rests].index(size)
            raise InvalidMessage(f"payloads[{at}]", error.value, error.reason) from None
    return EncodedBatch(dues, dues > now_ms, _bare_bodies(heads, rests))


def _one_of(payloads: Sequence[object], at: int, max_message_bytes: int) -> bytes:
    try:
        return checked_payload(payloads[at], max_message_bytes)
    except InvalidMessage as error:
        raise InvalidMessage(f"payloads[{at}]", error.value, error.reason) from None


def _due_column(deliver_at: object, count: int, allow_past: bool) -> npt.NDArray[np.int64]:
    """A column of due times in epoch ms, checked."""
    if isinstance(deliver_at, np.ndarray):
        column = deliver_at
    elif isinstance(deliver_at, Sequence) and not isinstance(deliver_at, (str, bytes)):
        times: Sequence[int] = deliver_at
        if not set(map(type, deliver_at)) <= {int}:
            times = [due_at_ms(f"deliver_at[{at}]", each, allow_past=allow_past) for at, each in enumerate(deliver_at)]
        try:
            column = np.array(times, dtype=np.int64)
        except OverflowError:
            column = np.array(times, dtype=object)
    else:
        raise InvalidMessage("deliver_at", deliver_at, "expected epoch ms, an aware datetime, or a column of epoch ms")
    if column.ndim != 1 or len(column) != count:
        raise InvalidMessage("deliver_at", deliver_at, f"expected one due time for each of {count} payloads")
    if not np.issubdtype(column.dtype, np.integer) and column.dtype != object:
        raise InvalidMessage("deliver_at", deliver_at, f"a column of {column.dtype}; expected integer epoch ms")
    earliest_ms = 0 if allow_past else EARLIEST_DUE_MS
    if count and (column.min() < earliest_ms or column.max() > MAX_DUE_MS):
        wrong = int(np.flatnonzero((column < earliest_ms) | (column > MAX_DUE_MS))[0])
        due_at_ms(f"deliver_at[{wrong}]", int(column[wrong]), allow_past=allow_past)
    return column.astype(np.int64)  # a copy: the array is the caller's


def encode_one(
    message: Message,
    now_ms: int,
    max_message_bytes: int,
    extra: Mapping[str, object] | None = None,
    *,
    allow_past: bool = False,
) -> tuple[int, bytes]:
    """Check and encode one message: its due time in ms (``now_ms`` without a delay) and its body.

    ``extra`` does not count towards the limit, so that a message once taken can be handed on with facts added.
    Raises InvalidMessage naming the message's field. Thread-safe.
    """
    if not isinstance(message, Message):
        raise InvalidMessage("message", message, "expected a Message")
    due_ms = resolve_due_ms(message, now_ms, allow_past=allow_past)
    body = _encode_fields(message, _pack(now_ms), max_message_bytes, extra)
    return now_ms if due_ms is None else due_ms, body


def encode_send(
    payload: bytes | bytearray | memoryview,
    deliver_at: int | datetime | None,
    deliver_after: float | timedelta | None,
    key: str | None,
    properties: Mapping[str, str] | None,
    now_ms: int,
    max_message_bytes: int,
    allow_past: bool = False,
    ttl: Duration | None = None,
    dedup_key: str | None = None,
) -> tuple[int, bytes]:
    """Encode a message of these fields, as ``encode_one`` does, without making a Message."""
    if (
        type(payload) is bytes
        and key is None
        and properties is None
        and ttl is None
        and dedup_key is None
        and (deliver_at is None or (type(deliver_at) is int and deliver_at >= EARLIEST_DUE_MS))
        and (deliver_after is None or deliver_at is None)
        and (size := len(payload)) <= min(_BARE_TO_BYTES, max_message_bytes - _BARE_16.size)
        and now_ms >= _BARE_FROM_MS
    ):
        due_ms = now_ms if deliver_at is None else deliver_at
        if deliver_after is not None:
            due_ms += duration_ms("deliver_after", deliver_after, InvalidMessage)
        if due_ms <= MAX_DUE_MS:
            if size < 1 << 8:
                return due_ms, _BARE_8.pack(_BARE_FORM, now_ms, _BIN_8, size) + payload
            return due_ms, _BARE_16.pack(_BARE_FORM, now_ms, _BIN_16, size) + payload
    message = Message(
        payload,
        deliver_at=deliver_at,
        deliver_after=deliver_after,
        key=key,
        properties=properties,
        ttl=ttl,
        dedup_key=dedup_key,
    )
    return encode_one(message, now_ms, max_message_bytes, allow_past=allow_past)


def decode_body(data: bytes | memoryview) -> Body:
    """Read a body; raises ValueError where it is not exactly of the form above, trailing bytes included.

    REQUIRES: its checksum was checked; what is wrong here was written wrong.
    """
    # A bare message has one form for each width of its payload's length, read here without an unpacker.
    if len(data) > _BARE_16.size:
        form, publish, width, size = _BARE_16.unpack_from(data)
        if form == _BARE_FORM and width == _BIN_16 and size == len(data) - _BARE_16.size:
            return publish, bytes(data[_BARE_16.size :]), None, None, None
    try:
        fields = msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:  # TypeError: a map's key that has no hash
        raise ValueError(f"body is not msgpack: {error}") from error
    if type(fields) is not list or not 2 <= len(fields) <= 5:
        raise ValueError("body is not an array of 2 to 5 fields")
    publish_ms, payload = fields[0], fields[1]
    if type(publish_ms) is not int or publish_ms < 0:
        raise ValueError("publish_ms of a body is not a time in ms")
    if type(payload) is not bytes:
        raise ValueError("payload of a body is not binary")
    if len(fields) == 2:
        return publish_ms, payload, None, None, None
    if fields[-1] is None:
        raise ValueError("body ends in nil")
    key = fields[2]
    if key is not None and type(key) is not str:
        raise ValueError("key of a body is not text")
    properties = fields[3] if len(fields) > 3 else None
    if properties is not None:
        if type(properties) is not dict:
            raise ValueError("properties of a body are not a map")
        for name, value in properties.items():
            if type(name) is not str or type(value) is not str:
                raise ValueError("properties of a body are not text by name")
    extra = fields[4] if len(fields) > 4 else None
    if extra is not None and (type(extra) is not dict or any(type(name) is not str for name in extra)):
        raise ValueError("extra of a body is not a map by name")
    return publish_ms, payload, key, properties, extra


def _pack(value: object) -> bytes:
    packed: bytes = _local.packer.pack(value)
    return packed


def _binary_head(size: int) -> bytes:
    if size < 1 << 8:
        return struct.pack(">BB", 0xC4, size)
    if size < 1 << 16:
        return struct.pack(">BH", 0xC5, size)
    return struct.pack(">BI", 0xC6, size)


def _bare_head(packed_now: bytes, size: int, max_message_bytes: int) -> bytes:
    """Pack the bytes before a payload of ``size`` bytes in ``[publish_ms, payload]``; refuses one over the limit."""
    head = _ARRAY_HEADS[2] + packed_now + _binary_head(size)
    if len(head) + size > max_message_bytes:
        raise too_large(len(head) + size, max_message_bytes)
    return head


def _encode_fields(
    message: Message, packed_now: bytes, max_message_bytes: int, extra: Mapping[str, object] | None
) -> bytes:
    """Check and encode all of a message but its due time."""
    payload = checked_payload(message.payload, max_message_bytes)
    key = checked_key(message.key)
    properties = checked_properties(message.properties)
    if properties:
        count, tail = 4, _pack(key) + _pack(properties)
    elif key is not None:
        count, tail = 3, _pack(key)
    else:
        count, tail = 2, b""
    before = packed_now + _binary_head(len(payload))
    size = 1 + len(before) + len(payload) + len(tail)
    if size > max_message_bytes:
        raise too_large(size, max_message_bytes)
    if message.dedup_key is not None:
        extra = {**(extra or {}), DEDUP: checked_dedup_key(message.dedup_key, error=InvalidMessage)}
    if message.ttl is not None:
        extra = {**(extra or {}), "ttl": checked_ttl(message.ttl)}
    if extra:
        tail += _NIL * (4 - count) + _pack(dict(extra))
        count = 5
    # The payload is joined, not packed: a packer keeps a buffer of the largest thing it ever packed.
    return b"".join((_ARRAY_HEADS[count], before, payload, tail))


# -- the schedule in `extra`: it goes along where a message is sent again, postponed, dead or requeued --

_SCHEDULE = "schedule"


def occurrence_extra(occurrence: Occurrence | None) -> dict[str, object]:
    """Make the part of ``extra`` that names the schedule of a message."""
    return {} if occurrence is None else {_SCHEDULE: list(occurrence)}


def retry_of(extra: dict[str, object]) -> tuple[int, str | None, str | None]:
    """Deliveries before a retry, for whom it is, and why the last failed. Raises ValueError."""
    retries, addressee, failure = extra.get("retries", 0), extra.get("addressee"), extra.get("failure")
    if not (isinstance(retries, int) and isinstance(addressee, str | None) and isinstance(failure, str | None)):
        raise ValueError(f"retry facts {extra!r} of a body are malformed")
    return retries, addressee, failure


def occurrence_of(extra: Mapping[str, object] | None) -> Occurrence | None:
    """Return the occurrence of a schedule that a message is; None: it is none. Raises ValueError."""
    facts = None if extra is None else extra.get(_SCHEDULE)
    if facts is None:
        return None
    if type(facts) is not list or [type(fact) for fact in facts] != [str, int]:
        raise ValueError(f"schedule {facts!r} of a body is malformed")
    return Occurrence(*facts)
