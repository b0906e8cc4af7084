"""Values on the wire: msgpack, with extension types for what it does not have, and columns in place of many objects.

What a client cannot write (an object of a class of its own) goes as *other*: a number and its text, so that the engine
refuses it by field and value as it would in one process; in the error that comes back it is the client's object again.
Values of named classes are made by their constructors, which check them; no other class can be named.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import datetime, timedelta
from enum import Enum
from functools import cache
from importlib import import_module
from itertools import chain
from operator import attrgetter
from pathlib import PurePath
from struct import Struct
from typing import Any, cast

import msgpack

from duelog.store import errors
from duelog.store.errors import BrokenInvariant, InvalidArgument
from duelog.store.message import Message, ReceivedMessage
from duelog.store.position import FoundId, MessageId, MessageIds, message_ids

from . import wire
from .wire import Refused

_HOMES = {
    "duelog.delivery.consumer_arguments": "Failover",
    "duelog.delivery.key_slots": "KeyShared",
    "duelog.markers.firing.suspensions": "Suspension",
    "duelog.markers.pending_entries": "Outcome",
    "duelog.stats": "ClientPart ClientStats Connections Keeper LimitUse Overview PartitionStats Receiving "
    "SnapshotStats StoreStats SubscriptionStats TopicPage TopicRow TopicStats TopicTimelines",
    "duelog.store.log.documents": "Document",
    "duelog.store.log.managed_ledger": "LedgerInfo",
    "duelog.store.message": "Message Occurrence ScheduledMessage",
    "duelog.store.policy.policies": "DelayedDeliveryPolicies EffectivePolicies Policies",
    "duelog.topics.dead_letters": "DeadLetter",
    "duelog.topics.seeking": "LogPositions PublishedAt",
    "duelog.topics.task_activity": "Attempt Failure TaskActivity",
    "duelog.upkeep.schedule": "Schedule",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

(ID, IDS, ID_COLUMNS, MESSAGES, RECEIVED, ONE_RECEIVED, INSTANT, DURATION, RECORD, FAILED, OTHER, ELLIPSIS, PATH, TUPLE,
 BIG, FOUND) = range(1, 17)  # fmt: skip
"""Codes of the extension types."""

_SENT = tuple(name for name in Message.__dataclass_fields__ if name != "payload")
_FIELDS_OF = attrgetter(*_SENT)
_BARE = {(*(None for _ in _SENT[:-1]), False)}
"""Fields of a message that has none."""
_UNSAID = {type(None), bool}
"""Types of fields that say nothing where none is True."""
_CALLED = {"choose", "may_order", "on_change", "order_by"}
"""Fields of `Failover` and `KeyShared` that are functions."""
_RARE = ("first_try", "expires_ms", "occurrence", "failure")
_MOST_KEPT = 1 << 16
"""A packer that has written more bytes is not kept: it has them still."""
_LONG_EXTENSION = Struct(">BIb")
"""Before the data of an extension type: 0xC9, bytes of it, code."""

_UNREADABLE = (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError)
"""Raised for what is not as it is written here."""
_BUILTIN = {each.__name__: each for each in (TypeError, ValueError, LookupError, OSError, MemoryError, OverflowError)}


class Other:
    """A value of the client's that has no form on the wire: its number, and its text."""

    def __init__(self, number: int, text: str) -> None:
        self.number = number
        self._text = text

    def __repr__(self) -> str:
        return self._text


_packers: list[msgpack.Packer] = []
"""Packers of values that msgpack has, those that no thread uses: one costs more to make than it has to do."""


def pack(value: object, others: list[Any] | None = None) -> bytes:
    """Write a value. others: collects what has no form; None: that is an error of ours."""
    try:
        try:
            packer = _packers.pop() if _packers else msgpack.Packer(strict_types=True, unicode_errors="surrogatepass")
            data: bytes = packer.pack(value)
        except (TypeError, OverflowError, IndexError):
            return msgpack.packb(
                value, default=lambda each: _extension(each, others), strict_types=True, unicode_errors="surrogatepass"
            )
    except BufferError:
        return pack(_joined(value), others)
    if len(data) <= _MOST_KEPT:
        _packers.append(packer)
    return data


def _joined(value: Any) -> Any:
    """A value with the bytes of each memoryview in one piece, where it has a step, which msgpack cannot read."""
    if isinstance(value, memoryview):
        return value.tobytes()
    if type(value) in (list, tuple):
        return type(value)(map(_joined, value))
    return {name: _joined(each) for name, each in value.items()} if type(value) is dict else value


def unpack(body: bytes | memoryview, others: Sequence[Any] = ()) -> Any:
    """Read a value; `others` are the client's objects. Raises InvalidArgument for what is none."""
    try:
        return msgpack.unpackb(
            body,
            ext_hook=_read_alone if not others else lambda code, data: _READERS[code](data, others),
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )
    except (InvalidArgument, MemoryError):
        raise
    except (*_UNREADABLE, msgpack.UnpackException) as error:
        raise InvalidArgument("frame", bytes(body[:40]), f"cannot be read: {error!r}") from None


def unpack_plain(body: bytes | memoryview) -> Any:
    """Read a value of a peer that is not known yet: no object is made, and no more memory taken than its bytes are."""
    try:
        return msgpack.unpackb(body, strict_map_key=False, unicode_errors="surrogatepass")
    except (*_UNREADABLE, msgpack.UnpackException) as error:
        raise InvalidArgument("frame", bytes(body[:40]), f"cannot be read: {error!r}") from None


def _read_alone(code: int, data: bytes) -> Any:
    """Read a value of an extension type, of a body that has no objects of the client's."""
    return _READERS[code](data, ())


def columns(value: Any, others: list[Any] | None = None) -> Any:
    """Many ids or messages as columns, whatever they are many of; any other value as it is."""
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        if len(value) > 1:
            types = set(map(type, value))
            if types == {MessageId} and set(map(type, chain.from_iterable(value))) == {int}:
                return msgpack.ExtType(IDS, pack(_runs(value)))
            if types == {Message}:
                front, rest = _message_columns(value, others)
                payloads = pack([message.payload for message in value], others)
                return msgpack.ExtType(MESSAGES, b"".join((front, payloads, rest)))
        return value
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, bytearray, memoryview, Mapping, Sequence)):
        return value if hasattr(value, "tolist") else columns(list(value), others)
    return value


def request(
    number: int, name: str, target: object, arguments: Sequence[Any], named: object, others: list[Any]
) -> bytes:
    """Write the frame of a request; the payloads of a batch are copied once."""
    if len(arguments) == 1 and type(arguments[0]) in (list, tuple) and len(arguments[0]) > 1:
        (batch,) = arguments
        messages = batch if set(map(type, batch)) == {Message} else None
        payloads = batch if messages is None else [message.payload for message in messages]
        if set(map(type, payloads)) == {bytes}:
            head = b"".join((b"\x95", pack(number), pack(name), pack(target, others), b"\x91"))
            return _batch_frame(head, payloads, messages, pack(named, others), others)
    is_payload = len(arguments) == 1 and type(arguments[0]) is bytes
    written = [*arguments] if is_payload else [columns(each, others) for each in arguments]
    return wire.framed(pack([number, name, target, written, named], others))


def _batch_frame(
    before: bytes, payloads: Sequence[bytes], messages: Sequence[Message] | None, after: bytes, others: list[Any]
) -> bytes:
    """The frame of a request of one batch. messages: whose other columns go with the payloads."""
    sizes = Counter(map(len, payloads))
    heads = {size: pack(bytes(size))[: -size or None] for size in sizes}
    array_head: bytes = msgpack.Packer().pack_array_header(len(payloads))
    length = len(array_head) + sum(count * (len(heads[size]) + size) for size, count in sizes.items())
    if messages is not None:
        front, rest = _message_columns(messages, others)
        before += _LONG_EXTENSION.pack(0xC9, len(front) + length + len(rest), MESSAGES) + front
        after = rest + after
    begin = wire.HEAD.pack(len(before) + length + len(after)) + before + array_head
    if len(heads) > 1:
        pieces = chain.from_iterable((heads[len(each)], each) for each in payloads)
        return b"".join((begin, *pieces, after))
    (head,) = heads.values()
    first, *further = payloads
    further[-1] += after
    return head.join((begin + head + first, *further))


def _runs(ids: Sequence[MessageId]) -> list[int]:
    """Ledger, first entry and count of consecutive ids, one run after the other."""
    runs: list[int] = []
    at_ledger = next_entry = -2
    for ledger, entry in ids:
        if ledger == at_ledger and entry == next_entry:
            runs[-1] += 1
        else:
            runs += (ledger, entry, 1)
            at_ledger = ledger
        next_entry = entry + 1
    return runs


def _triples(runs: list[int]) -> list[tuple[int, int, int]]:
    if set(map(type, runs)) - {int} or len(runs) % 3 or min(runs[2::3], default=0) < 0:
        raise ValueError("ids are ledger, first entry, count")
    if sum(runs[2::3]) > 1 << 24:
        raise ValueError("too many ids")
    return list(zip(runs[::3], runs[1::3], runs[2::3], strict=True))


def _read_ids(data: bytes, _: object) -> list[MessageId]:
    return list(
        chain.from_iterable(
            message_ids([ledger] * count, range(first, first + count))
            for ledger, first, count in _triples(unpack(data))
        )
    )


def _message_columns(messages: Sequence[Message], others: list[Any] | None) -> tuple[bytes, bytes]:
    """Write the beginning of messages as columns, before their payloads, and the other columns, behind them."""
    found: dict[str, Any] = {}
    for name, column in zip(_SENT, zip(*map(_FIELDS_OF, messages), strict=True), strict=True):
        if not set(map(type, column)) <= _UNSAID or any(column):
            found[name] = list(column)
    head: bytes = msgpack.Packer().pack_map_header(len(found) + 1)
    rest = (piece for name, column in found.items() for piece in (pack(name), pack(column, others)))
    return head + pack("payload"), b"".join(rest)


def payloads_alone(messages: Sequence[object]) -> list[bytes] | None:
    """The payloads of messages that are nothing but those; None: one of them is more, or is none."""
    if set(map(type, messages)) != {Message}:
        return None
    batch = cast(Sequence[Message], messages)
    payloads = [message.payload for message in batch]
    if set(map(type, payloads)) != {bytes}:
        return None
    try:
        are_bare = _BARE.issuperset(map(_FIELDS_OF, batch))
    except Exception:  # of a value of the client's own
        return None
    return cast(list[bytes], payloads) if are_bare else None


def _read_messages(data: bytes, others: Sequence[Any]) -> Sequence[Message]:
    found = unpack(data, others)
    messages = list(map(Message, found.pop("payload")))
    for name, column in found.items():
        if name not in _SENT or len(column) != len(messages):
            raise ValueError("no columns of messages")
        for message, value in zip(messages, column, strict=True):
            setattr(message, name, value)
    return messages


def _received_columns(messages: Any) -> bytes:
    """The columns of ReceivedMessages; those that say nothing are None."""
    facts = [
        [row, *each[:3], each.first_try and list(each.first_try), *each[4:]]
        for row, place in enumerate(messages.places)
        if messages.facts and (each := messages.facts.get(place)) is not None
    ]
    return pack(
        [
            messages.topic,
            messages.subscription,
            messages.places,
            None if messages.id_places == messages.places else messages.id_places,
            messages.payloads,
            messages.keys if any(key is not None for key in messages.keys) else None,
            messages.due_ms,
            messages.publish_ms,
            messages.redelivery_counts if any(messages.redelivery_counts) else None,
            facts,
        ]
    )


def _read_received(data: bytes, _: object) -> Any:
    from duelog.store.received_messages import Facts, ReceivedMessages  # noqa: PLC0415 - numpy, which commands lack

    topic, subscription, places, ids, payloads, keys, due_ms, publish_ms, counts, facts = unpack(data)
    found = ReceivedMessages(topic, subscription)
    found.places, found.id_places, found.payloads = places, ids or places, payloads
    found.keys = keys or [None] * len(places)
    found.due_ms, found.publish_ms, found.redelivery_counts = due_ms, publish_ms, counts or [0] * len(places)
    for row, properties, retries, addressee, first_try, *rest in facts:
        found.facts[places[row]] = Facts(properties, retries, addressee, first_try and tuple(first_try), *rest)
    return found


def _one_received(message: ReceivedMessage) -> bytes:
    names = (*ReceivedMessage.__dataclass_fields__, *_RARE)
    values = {name: getattr(message, name) for name in names}
    return pack({name: value for name, value in values.items() if value is not None})


def _read_one_received(data: bytes, _: object) -> ReceivedMessage:
    given = unpack(data)
    rare = {name: given.pop(name) for name in _RARE if name in given}
    message = ReceivedMessage(**{"key": None, **given})
    for name, value in rare.items():
        setattr(message, f"_{name}", tuple(value) if name == "first_try" else value)
    return message


def _extension(value: Any, others: list[Any] | None) -> Any:
    """The form of a value that msgpack does not have."""
    kind = type(value)
    if (kind is MessageId or kind is FoundId) and set(map(type, value)) == {int}:
        ledger, entry = value
        return msgpack.ExtType(ID if kind is MessageId else FOUND, pack([ledger, entry]))
    if kind is tuple:
        return msgpack.ExtType(TUPLE, pack(list(value), others))
    if kind.__name__ == "ReceivedMessages":
        return msgpack.ExtType(RECEIVED, _received_columns(value))
    if kind is MessageIds:
        return msgpack.ExtType(ID_COLUMNS, pack(value.runs()))
    if isinstance(value, ReceivedMessage):
        return msgpack.ExtType(ONE_RECEIVED, _one_received(value))
    if _HOME.get(kind.__name__) == kind.__module__:
        return msgpack.ExtType(RECORD, pack([kind.__name__, _content(value)], others))
    if isinstance(value, BaseException):
        return msgpack.ExtType(FAILED, pack_error(value))
    if isinstance(value, datetime):
        return msgpack.ExtType(INSTANT, value.isoformat().encode())
    if isinstance(value, timedelta):
        return msgpack.ExtType(DURATION, pack([value.days, value.seconds, value.microseconds]))
    if value is ...:
        return msgpack.ExtType(ELLIPSIS, b"")
    if isinstance(value, PurePath):
        return msgpack.ExtType(PATH, str(value).encode(errors="surrogateescape"))
    if kind is int:
        return msgpack.ExtType(BIG, hex(value).encode())
    if isinstance(value, str):
        return str.__str__(value)  # of an enumeration too, whose own may be its name
    plain = next((each for each in (bytes, int, float) if isinstance(value, each)), None)
    if plain is not None:
        return plain(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset, list, tuple)) and not isinstance(value, MessageId):
        return list(value)
    if hasattr(value, "tolist") and getattr(value, "shape", None) != ():  # an array, of numpy or none; no number
        return value.tolist()
    if hasattr(value, "__index__"):
        with suppress(TypeError):  # so says numpy's bool
            return operator.index(value)
    if kind is Other:
        return msgpack.ExtType(OTHER, pack([value.number, repr(value)]))
    if others is None:
        raise BrokenInvariant(f"{kind.__module__}.{kind.__qualname__} has no form on the wire")
    others.append(value)
    return msgpack.ExtType(OTHER, pack([len(others) - 1, repr(value)[:1_000]]))


def _content(value: Any) -> Any:
    """The fields of a named value by name; of an enumeration the value."""
    if isinstance(value, Enum):
        return value.value
    names = [each.name for each in fields(value)] if is_dataclass(value) else value._fields
    found = {name: getattr(value, name) for name in names}
    for name in _CALLED & found.keys():
        if found.pop(name) is not None:
            raise InvalidArgument(
                name, getattr(value, name), "only the process that has the store open calls functions"
            )
    return found


@cache
def _class(name: str) -> Any:
    return getattr(import_module(_HOME[name]), name)


def _read_record(data: bytes, others: Sequence[Any]) -> Any:
    name, content = unpack(data, others)
    kind = _class(name)
    return kind(content) if issubclass(kind, Enum) else kind(**content)


def pack_error(error: BaseException) -> bytes:
    """An error: the name of its class, its text, its fields."""
    facts: dict[str, Any] = {}
    for name, value in vars(error).items():
        if not name.startswith("_"):
            try:
                pack(value)
                facts[name] = value
            except Exception:
                facts[name] = repr(value)
    return pack([type(error).__name__, str(error) or type(error).__name__, facts])


def error_of(content: Any) -> Any:
    """The error that `pack_error` wrote."""
    name, text, facts = content
    kind = _BUILTIN.get(name) or getattr(errors, name, None) or getattr(wire, name, None)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        return Refused(name, text)
    error = kind.__new__(kind, text)
    if issubclass(kind, errors.DuelogError):
        error.__dict__.update(facts)
    return error


def _read_other(data: bytes, others: Sequence[Any]) -> Any:
    at, text = unpack(data)
    return others[at] if 0 <= at < len(others) else Other(at, text)


_READERS: dict[int, Callable[[bytes, Sequence[Any]], Any]] = {
    ID: lambda data, _: MessageId(*map(int, unpack(data))),
    IDS: _read_ids,
    ID_COLUMNS: lambda data, _: MessageIds(_triples(unpack(data))),
    MESSAGES: _read_messages,
    RECEIVED: _read_received,
    ONE_RECEIVED: _read_one_received,
    INSTANT: lambda data, _: datetime.fromisoformat(data.decode()),
    DURATION: lambda data, _: timedelta(*unpack(data)),
    RECORD: _read_record,
    FAILED: lambda data, others: error_of(unpack(data, others)),
    OTHER: _read_other,
    ELLIPSIS: lambda *_: ...,
    PATH: lambda data, _: PurePath(data.decode(errors="surrogateescape")),
    TUPLE: lambda data, others: tuple(unpack(data, others)),
    BIG: lambda data, _: int(data, 16),
    FOUND: lambda data, _: FoundId(*map(int, unpack(data))),
}


def number_of(body: bytes | memoryview) -> int:
    """The number of a request or an answer, read before the rest. Raises InvalidArgument."""
    first = body[1] if len(body) > 1 else 0xFF
    if first < 0x80:
        return first
    if not 0xCC <= first <= 0xCF:
        raise InvalidArgument("frame", bytes(body[:40]), "does not begin with a number")
    return int.from_bytes(body[2 : 2 + (1 << (first - 0xCC))], "big")


def pages(items: Iterator[Any], most_items: int = 500, most_bytes: int = 1 << 18) -> tuple[list[bytes], bool]:
    """The next items of a sequence, each written, and whether there may be more."""
    page: list[bytes] = []
    size = 0
    for item in items:
        page.append(pack(item))
        size += len(page[-1])
        if len(page) == most_items or size >= most_bytes:
            return page, True
    return page, False


_pack_ints: Callable[[object], bytes] = msgpack.Packer().pack
"""Writes integers, which calls back nothing, so that threads may share it."""

_ID_HEADS = {
    kind: [msgpack.packb(msgpack.ExtType(code, bytes(size)))[:-size] for size in range(1, 20)]
    for kind, code in ((MessageId, ID), (FoundId, FOUND))
}
"""The bytes before an id whose data has 1, 2 ... bytes."""


def answer(number: int, kind: int, value: bytes) -> bytes:
    """The frame of an answer, whose value is written already."""
    return wire.framed(b"\x93" + _pack_ints(number) + bytes([kind]), value)


def id_answer(number: int, message_id: MessageId) -> bytes:
    """The frame of an answer whose result is an id."""
    content = _pack_ints([*message_id])
    body = b"\x93" + _pack_ints(number) + b"\x00" + _ID_HEADS[type(message_id)][len(content) - 1] + content
    return wire.HEAD.pack(len(body)) + body


def items_answer(number: int, page: list[bytes], *, more: bool) -> bytes:
    """The frame of an answer that is a page of a sequence."""
    head: bytes = msgpack.Packer().pack_array_header(len(page))
    return answer(number, wire.MORE if more else wire.LAST, head + b"".join(page))
