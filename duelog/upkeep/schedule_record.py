"""Kept schedules as records of table RECURRENCE: the fields of a schedule, in memory and on disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgpack

from duelog.store.codec import format as fmt
from duelog.store.codec.body import encode_one
from duelog.store.codec.format import Table
from duelog.store.env.memtable import Reads
from duelog.store.errors import CorruptRecord
from duelog.store.log import catalog
from duelog.store.message import Message
from duelog.store.position import MessageId

from .timetable import MISFIRES, WITH_GRACE, Misfires, Recurrence, Timetable


@dataclass(frozen=True, slots=True)
class Schedule:
    """A kept schedule of a topic.

    One of `cron` and `interval_ms`; `timezone` is the cron expression's. next_due_ms, next_id: the occurrence that
    waits; None while it is paused, and once it has ended. next_nominal_ms: the time that the timetable says for it,
    which jitter puts `next_due_ms` after. sent: occurrences that were sent, with the one that waits. until_ms, count,
    jitter_ms, misfires, grace_ms: as `Topic.every` was asked. All times and lengths are ms. replaced: of what `every`
    returns, the schedule that was there under this name and said something else.
    """

    name: str
    topic: str
    cron: str | None
    interval_ms: int | None
    timezone: str
    payload: bytes
    key: str | None
    properties: dict[str, str]
    next_due_ms: int | None
    next_id: MessageId | None
    paused: bool
    next_nominal_ms: int | None = None
    sent: int = 0
    until_ms: int | None = None
    count: int | None = None
    jitter_ms: int = 0
    misfires: Misfires = "first"
    grace_ms: int | None = None
    ended: bool = False
    replaced: Schedule | None = field(default=None, compare=False)

    @property
    def recurrence(self) -> Recurrence:
        table = Timetable(self.cron, self.interval_ms, self.timezone)
        seed = f"{self.topic}\0{self.name}".encode()
        return Recurrence(table, seed, self.until_ms, self.jitter_ms, self.misfires, self.grace_ms)

    @property
    def message(self) -> Message:
        return Message(self.payload, key=self.key, properties=self.properties)

    @property
    def misfires_from_ms(self) -> int | None:
        """From when on the occurrence that waits is a misfire that is not to come; None: it comes in any case."""
        if self.next_id is None or self.next_due_ms is None or self.misfires not in WITH_GRACE:
            return None
        return self.next_due_ms + (self.grace_ms or 0) + 1

    def says_the_same(self, other: Schedule) -> bool:
        """Return whether both were asked for with the same arguments, whatever their progress."""
        return all(getattr(self, name) == getattr(other, name) for name in _ASKED)


_STATE = ("next_due_ms", "next_id", "paused", "next_nominal_ms", "sent", "ended")
_FIELDS = tuple(each.name for each in dataclasses.fields(Schedule)[2:] if each.name != "replaced")
"""Those of a record: name and topic are the key's."""

_ASKED = tuple(name for name in _FIELDS if name not in _STATE)


def pack_schedule(schedule: Schedule) -> bytes:
    """The fields of a schedule's record."""
    fields = {name: getattr(schedule, name) for name in _FIELDS}
    packed: bytes = msgpack.packb({name: value for name, value in fields.items() if value is not None})
    return packed


def unpack_schedule(packed: bytes, name: str = "", topic: str = "") -> Schedule:
    """The schedule of a record's fields. Raises CorruptRecord."""
    try:
        fields = msgpack.unpackb(packed)
        known = {field_name: fields[field_name] for field_name in _FIELDS if field_name in fields}
        next_id = None if known.pop("next_id", None) is None else MessageId(*fields["next_id"])
        required = {field_name: known.pop(field_name) for field_name in ("timezone", "payload", "properties", "paused")}
        optional = {
            field_name: known.pop(field_name, None) for field_name in ("cron", "interval_ms", "key", "next_due_ms")
        }
        nominal_ms = known.pop("next_nominal_ms", optional["next_due_ms"])
        schedule = Schedule(
            name=name, topic=topic, next_id=next_id, next_nominal_ms=nominal_ms, **required, **optional, **known
        )
        encode_one(schedule.message, 0, 2**30)
        numbers = (
            schedule.sent,
            schedule.until_ms or 0,
            schedule.count or 0,
            schedule.jitter_ms,
            schedule.grace_ms or 0,
        )
        if (
            (schedule.cron is None) == (schedule.interval_ms is None)
            or (schedule.paused or schedule.ended) != (schedule.next_due_ms is None)
            or (nominal_ms is None) != (schedule.next_due_ms is None)
            or schedule.misfires not in MISFIRES
            or not all(type(number) is int and number >= 0 for number in numbers)
        ):
            raise ValueError("its fields contradict each other")
        Timetable(schedule.cron, schedule.interval_ms, "UTC").after(nominal_ms or 0, 0)
        return schedule
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, msgpack.UnpackException) as error:
        raise CorruptRecord(f"schedule {name!r} cannot be read: {error}") from error


def schedule_rows(raw: Reads, topic_id: int | None = None) -> Iterator[tuple[bytes, bytes]]:
    """(key, fields) of the records of all schedules, or of a topic's. Raises CorruptRecord at a damaged one."""
    yield from catalog.rows(raw, fmt.prefix(Table.RECURRENCE, topic_id))
