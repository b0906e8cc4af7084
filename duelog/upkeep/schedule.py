"""Kept schedules: their fields, as records of table RECURRENCE, and when each recurs.

A timetable is a cron expression in a time zone, or an interval. Cron expressions are cronsim's (those of Debian's cron,
with a seconds field in front if there are six), and so is what happens when clocks change: a job at a fixed time of day
that the clock skips runs right after the gap, one whose time comes twice runs once; one that runs every few minutes
follows the real time. An interval is real time always. `@hourly`, `@daily`, `@weekly`, `@monthly` and `@yearly` stand
for expressions, `@every 90m` for an interval.

An occurrence has a nominal time, which the timetable says, and a due time, which jitter puts after it. The due time
follows from the schedule's name and the nominal time alone, so it is the same after a restart.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple, get_args
from zoneinfo import ZoneInfo

import msgpack
from cronsim import CronSim, CronSimError

from duelog.store.codec import format as fmt
from duelog.store.codec.body import encode_one
from duelog.store.codec.format import Table
from duelog.store.duration import Duration, duration_ms, duration_seconds
from duelog.store.env.memtable import Reads
from duelog.store.errors import BrokenInvariant, CorruptRecord, InvalidArgument
from duelog.store.log import catalog
from duelog.store.message import MAX_DUE_MS, Message
from duelog.store.position import MessageId

MIN_INTERVAL_MS = 1_000
"""Shortest interval: each occurrence costs two commits."""

NICKNAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}

Misfires = Literal["first", "all", "latest", "skip"]
"""Treatment of occurrences that could not come in time: see `Recurrence.late`."""

MISFIRES: tuple[Misfires, ...] = get_args(Misfires)
WITH_GRACE = ("latest", "skip")
DEFAULT_GRACE = timedelta(seconds=60)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EVERY = "@every"
_STEPS_BACK = 3
"""Occurrences that `Timetable.back` goes back: one that jitter has not let be due yet, and one at a clock change."""


@dataclass(frozen=True, slots=True)
class Timetable:
    """Either `cron` or `interval_ms`; `timezone` is an IANA name, that of the cron expression."""

    cron: str | None
    interval_ms: int | None
    timezone: str

    @classmethod
    def make(cls, cron: str | None, interval: Duration | None, timezone: str) -> "Timetable":
        """Check the arguments of a caller. Raises InvalidArgument naming `cron`, `interval` or `timezone`."""
        if (cron is None) == (interval is None):
            raise InvalidArgument("cron", cron, f"expected one of cron and interval, interval={interval!r}")
        if not isinstance(timezone, str):
            raise InvalidArgument("timezone", timezone, "expected a str such as Europe/Rome")
        try:
            ZoneInfo(timezone)
        except (ValueError, OSError) as error:  # ZoneInfoNotFoundError is a KeyError with its own text
            raise InvalidArgument("timezone", timezone, f"not a time zone: {error}") from None
        except KeyError:
            raise InvalidArgument("timezone", timezone, "unknown; expected an IANA name such as Europe/Rome") from None
        if interval is not None:
            return cls._of_interval("interval", interval, duration_ms("interval", interval), timezone)
        if not isinstance(cron, str):
            raise InvalidArgument("cron", cron, "expected a str such as '0 9 * * MON-FRI'")
        if cron.strip().startswith("@"):
            nickname, _, rest = cron.strip().partition(" ")
            if nickname.lower() == _EVERY:
                seconds = duration_seconds("cron", rest)
                return cls._of_interval("cron", cron, duration_ms("cron", seconds), timezone)
            if nickname.lower() not in NICKNAMES or rest:
                known = ", ".join(NICKNAMES)
                raise InvalidArgument("cron", cron, f"unknown; expected one of {known}, or {_EVERY} 90m")
            cron = NICKNAMES[nickname.lower()]
        table = cls(cron, None, timezone)
        table.after(0, 0)
        return table

    @classmethod
    def _of_interval(cls, field: str, given: object, interval_ms: int, timezone: str) -> "Timetable":
        if interval_ms < MIN_INTERVAL_MS:
            raise InvalidArgument(field, given, f"shorter than {MIN_INTERVAL_MS} ms")
        return cls(None, interval_ms, timezone)

    def after(self, now_ms: int, anchor_ms: int) -> int:
        """The first occurrence after `now_ms`; intervals are counted from `anchor_ms`, an occurrence or the start.

        Raises InvalidArgument: the expression cannot be read, or has no occurrence any more.
        """
        if self.interval_ms is not None:
            due_ms = anchor_ms + ((now_ms - anchor_ms) // self.interval_ms + 1) * self.interval_ms
            if due_ms > MAX_DUE_MS:
                raise InvalidArgument("interval", self.interval_ms, "no occurrence before the year 10000")
            return due_ms
        try:
            # In an hour that comes twice, seen from its second half, the first is one of its first half.
            return next(due_ms for due_ms in self._from(now_ms) if due_ms > now_ms)
        except CronSimError as error:
            raise InvalidArgument("cron", self.cron, str(error)) from None
        except (StopIteration, OverflowError):
            raise InvalidArgument("cron", self.cron, "has no occurrence") from None

    def back(self, now_ms: int, anchor_ms: int) -> int:
        """A time some occurrences before `now_ms`, so that those up to it need not be gone through from `anchor_ms`.

        Of an interval it is an occurrence; no earlier than `anchor_ms`, which is one.
        """
        if self.interval_ms is not None:
            steps = (now_ms - anchor_ms) // self.interval_ms - _STEPS_BACK
            return anchor_ms + max(steps, 0) * self.interval_ms
        try:
            times = list(itertools.islice(self._from(now_ms, reverse=True), _STEPS_BACK))
        except OverflowError:
            times = []
        return max(times[-1] - 1, anchor_ms) if times else anchor_ms

    def _from(self, now_ms: int, *, reverse: bool = False) -> Iterator[int]:
        if self.cron is None:
            raise BrokenInvariant("a timetable has neither an expression nor an interval")
        moment = (_EPOCH + timedelta(milliseconds=now_ms)).astimezone(ZoneInfo(self.timezone))
        return ((due - _EPOCH) // timedelta(milliseconds=1) for due in CronSim(self.cron, moment, reverse=reverse))


class Due(NamedTuple):
    """An occurrence: its nominal time and when it is due, epoch ms."""

    nominal_ms: int
    due_ms: int


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The times of a schedule. `seed` differs between schedules, so that their jitter does."""

    table: Timetable
    seed: bytes
    until_ms: int | None = None
    jitter_ms: int = 0
    misfires: Misfires = "first"
    grace_ms: int | None = None

    def after(self, nominal_ms: int, anchor_ms: int | None = None) -> Due | None:
        """The first occurrence whose nominal time is after `nominal_ms`; None: there is none any more.

        anchor_ms: what intervals are counted from; None: `nominal_ms` is an occurrence, or the start.
        """
        try:
            nominal_ms = self.table.after(nominal_ms, nominal_ms if anchor_ms is None else anchor_ms)
        except InvalidArgument:
            return None
        if self.until_ms is not None and nominal_ms > self.until_ms:
            return None
        return Due(nominal_ms, self._due_ms(nominal_ms))

    def _due_ms(self, nominal_ms: int) -> int:
        """Up to `jitter_ms` later, and always before the next occurrence: they never change their order."""
        if not self.jitter_ms:
            return nominal_ms
        try:
            gap_ms = self.table.after(nominal_ms, nominal_ms) - nominal_ms
        except InvalidArgument:
            gap_ms = MAX_DUE_MS + 1 - nominal_ms
        digest = hashlib.blake2b(b"%s\0%d" % (self.seed, nominal_ms), digest_size=8).digest()
        return nominal_ms + int.from_bytes(digest, "big") % min(self.jitter_ms + 1, gap_ms)

    def following(self, nominal_ms: int, now_ms: int) -> Due | None:
        if not self.jitter_ms:
            return self.after(max(nominal_ms, now_ms), nominal_ms)
        return next(self._due_after(nominal_ms, now_ms), None)

    def late(self, nominal_ms: int, now_ms: int, *, misfired: bool = False) -> Iterator[Due]:
        """Yield the occurrences after the one at `nominal_ms` that are due by `now_ms` and still to be sent.

        One that is due more than `grace_ms` before is a misfire. first: none comes, the one at `nominal_ms` has. all:
        each comes. latest: if one is a misfire, or `misfired`, that at `nominal_ms` itself, only the last comes, else
        all do. skip: those come that are no misfires.
        """
        if self.misfires == "first":
            return iter(())
        from_ms = now_ms - (self.grace_ms or 0)
        if self.misfires == "latest":
            first = self.after(nominal_ms)
            if first is None or first.due_ms > now_ms:
                return iter(())
            if misfired or first.due_ms < from_ms:
                return iter(list(self._until(self._anew(nominal_ms, now_ms), now_ms))[-1:])
        after = self._due_after(nominal_ms, from_ms - 1) if self.misfires == "skip" else self._anew(nominal_ms, None)
        return self._until(after, now_ms)

    @staticmethod
    def _until(occurrences: Iterator[Due], now_ms: int) -> Iterator[Due]:
        for due in occurrences:
            if due.due_ms > now_ms:
                return
            yield due

    def _due_after(self, nominal_ms: int, now_ms: int) -> Iterator[Due]:
        return (due for due in self._anew(nominal_ms, now_ms) if due.due_ms > now_ms)

    def _anew(self, nominal_ms: int, near_ms: int | None) -> Iterator[Due]:
        """The occurrences after the one at `nominal_ms`, from shortly before `near_ms` on; None: all."""
        if near_ms is not None and self.until_ms is not None:
            near_ms = min(near_ms, self.until_ms)
        from_ms = nominal_ms if near_ms is None else self.table.back(max(near_ms, nominal_ms), nominal_ms)
        due = self.after(from_ms, nominal_ms)
        while due is not None:
            yield due
            due = self.after(due.nominal_ms)


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
    replaced: "Schedule | None" = field(default=None, compare=False)

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

    def says_the_same(self, other: "Schedule") -> bool:
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
        known: dict[str, Any] = dict.fromkeys(("cron", "interval_ms", "key", "next_due_ms", "next_id"))
        known |= {field_name: fields[field_name] for field_name in _FIELDS if field_name in fields}
        if known["next_id"] is not None:
            known["next_id"] = MessageId(*known["next_id"])
        nominal_ms = known.setdefault("next_nominal_ms", known["next_due_ms"])
        schedule = Schedule(name=name, topic=topic, **known)
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
