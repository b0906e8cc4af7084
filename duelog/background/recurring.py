"""Recurring messages: kept schedules, each with its next occurrence waiting as a delayed message.

When an occurrence has fallen due, the next is scheduled: the first one after now. So after a stop, or a jump of the
clock, the occurrence that was waiting comes once, late, what else was missed does not come, and there is no burst.
Occurrences are due when their timetable says, whatever delay policies say: their maximum and fixed delay are for what
producers ask for at each send, a timetable was asked for once and is kept by the store.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgpack

from duelog.markers.firing.suspensions import Part, Suspensions
from duelog.markers.succession import Succession
from duelog.store.clock import Clock
from duelog.store.codec import format as fmt
from duelog.store.codec.body import encode_one
from duelog.store.codec.format import Table
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from duelog.store.errors import CorruptRecord, InvalidArgument, UnknownTopic
from duelog.store.log import catalog
from duelog.store.message import Message
from duelog.store.position import MessageId

from ..topics.topic_list import Topics
from ..topics.topic_state import TopicState
from .timetable import Timetable

_log = logging.getLogger("duelog.maintenance")

_Key = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A kept schedule of a topic.

    One of `cron` and `interval_ms`; `timezone` is the cron expression's. next_due_ms, next_id: the occurrence that
    waits; None while it is paused.
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


@dataclass(eq=False, repr=False)
class Recurring:
    """The schedules of an open store. Thread-safe; changes are made one at a time."""

    _main: Environment
    _topics: Topics
    _succession: Succession
    _clock: Clock
    _max_message_bytes: int
    _wake: Callable[[], None]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        """Held during changes: within maintenance's lock, around Firing.gate."""
        self._due: dict[_Key, int] = {}
        for page in catalog.pages(self._main, fmt.prefix(Table.SCHEDULE)):
            for key, fields in page:
                number, name = fmt.split_named_key(key)
                try:
                    schedule = unpack_schedule(fields, name, "")
                except CorruptRecord as error:  # a finding of `check`, too
                    _log.error("%s: a schedule recurs no more: %s", self._main.path.parent, error)
                    continue
                if schedule.next_due_ms is not None:
                    self._due[number, name] = schedule.next_due_ms

    # -- for Maintenance -----------------------------------------------------------------------------

    def next_due_ms(self, suspensions: Suspensions) -> int | None:
        """When `run` has something to do."""
        dues = (suspensions.not_before(_part(key), due_ms) for key, due_ms in list(self._due.items()))
        return min((due_ms for due_ms in dues if due_ms is not None), default=None)

    def run(self, now_ms: int, suspensions: Suspensions) -> None:
        """Schedule what follows each occurrence that is due by `now_ms`. Raises StoreFull, StoreFailed.

        A schedule for which that fails otherwise is suspended.
        """
        if not self._due:
            return
        with self._lock:
            for key in [key for key, due_ms in self._due.items() if due_ms <= now_ms]:
                suspensions.run(_part(key), now_ms, functools.partial(self._advance, key, now_ms), None)

    def _advance(self, key: _Key, now_ms: int) -> None:
        topic = self._topics.by_id(key[0])
        try:
            schedule = None if topic is None else self._read(topic, key[1])
        except CorruptRecord as error:
            _log.error("%s: a schedule recurs no more: %s", self._main.path.parent, error)
            schedule = None
        if topic is None or schedule is None or schedule.next_due_ms is None:
            self._due.pop(key, None)
            return
        try:
            due_ms = _table(schedule).after(now_ms, schedule.next_due_ms)
        except InvalidArgument:  # it has no occurrence any more
            self._due.pop(key, None)
            return
        if self._put(topic, replace(schedule, next_due_ms=due_ms), None, must_exist=True) is None:
            self._due.pop(key, None)  # the topic is being deleted

    # -- for Topic -----------------------------------------------------------------------------------

    def every(self, topic: TopicState, name: str, table: Timetable, message: Message) -> Schedule:
        """Make a schedule, or give the one there is if it says the same; else replace it."""
        with self._lock:
            found = self._read(topic, name)
            now_ms = self._clock.now_ms()
            wanted = Schedule(
                name,
                str(topic.name),
                table.cron,
                table.interval_ms,
                table.timezone,
                bytes(message.payload),
                message.key,
                dict(message.properties or {}),
                table.after(now_ms, now_ms),
                None,
                False,
            )
            if found is not None:
                waiting = replace(wanted, next_due_ms=found.next_due_ms, next_id=found.next_id, paused=found.paused)
                if found == waiting:
                    return found
            made = self._put(topic, wanted, None if found is None else found.next_id)
            if made is None:  # deleted meanwhile
                raise UnknownTopic(str(topic.name))
            return made

    def pause(self, topic: TopicState, name: str) -> Schedule | None:
        """Take the waiting occurrence back until `resume`; None: no such schedule."""
        with self._lock:
            found = self._read(topic, name)
            if found is None or found.paused:
                return found
            return self._put(topic, replace(found, next_due_ms=None, paused=True), found.next_id)

    def resume(self, topic: TopicState, name: str) -> Schedule | None:
        """Go on with the first occurrence after now; None: no such schedule."""
        with self._lock:
            found = self._read(topic, name)
            if found is None or not found.paused:
                return found
            now_ms = self._clock.now_ms()
            due_ms = _table(found).after(now_ms, now_ms)
            return self._put(topic, replace(found, next_due_ms=due_ms, paused=False), None)

    def remove(self, topic: TopicState, name: str) -> bool:
        """Remove a schedule and take its waiting occurrence back; False: there was none."""
        with self._lock:
            found = self._read(topic, name)
            if found is None:
                return False
            key = fmt.schedule_key(topic.topic_id, name)
            self._succession.succeed(
                topic.log, found.next_id, None, b"", lambda transaction, _: transaction.delete(key)
            )
            self._due.pop((topic.topic_id, name), None)
            return True

    def of_topic(self, topic: TopicState) -> list[Schedule]:
        """The topic's schedules by name. Raises CorruptRecord."""
        with self._main.read() as raw:
            rows = list(catalog.rows(raw, fmt.prefix(Table.SCHEDULE, topic.topic_id)))
        return [unpack_schedule(fields, fmt.split_named_key(key)[1], str(topic.name)) for key, fields in rows]

    # -- inside --------------------------------------------------------------------------------------

    def _read(self, topic: TopicState, name: str) -> Schedule | None:
        fields = self._main.get(fmt.schedule_key(topic.topic_id, name))
        return None if fields is None else unpack_schedule(fields, name, str(topic.name))

    def _put(
        self, topic: TopicState, schedule: Schedule, old: MessageId | None, *, must_exist: bool = False
    ) -> Schedule | None:
        """Record a schedule, with its occurrence in place of `old`; None: it is gone. REQUIRES: the lock."""
        key = fmt.schedule_key(topic.topic_id, schedule.name)
        topic_key = fmt.topic_key(str(topic.name))
        done: list[Schedule] = []
        while True:

            def record(transaction: Transaction, new_id: MessageId | None, wanted: Schedule = schedule) -> bool:
                done.clear()
                if transaction.get(topic_key) is None or (must_exist and transaction.get(key) is None):
                    return False
                done.append(replace(wanted, next_id=new_id))
                transaction.put(key, _pack(done[0]))
                # Memory follows the disk, also where the caller is interrupted after the commit.
                transaction.after_commit(lambda: self._note(topic.topic_id, wanted))
                return True

            body = b""
            if schedule.next_due_ms is not None:
                message = Message(schedule.payload, key=schedule.key, properties=schedule.properties)
                body = encode_one(message, self._clock.now_ms(), self._max_message_bytes)[1]
            if self._succession.succeed(topic.log, old, schedule.next_due_ms, body, record):
                break
            now_ms = self._clock.now_ms()
            if schedule.next_due_ms is None or schedule.next_due_ms > now_ms:
                return None
            # The time it was to be at has passed meanwhile: the one after it.
            schedule = replace(schedule, next_due_ms=_table(schedule).after(now_ms, schedule.next_due_ms))
        if schedule.next_due_ms is not None:
            self._wake()
        return done[0]

    def _note(self, topic_id: int, schedule: Schedule) -> None:
        """Have memory know when a schedule comes next."""
        if schedule.next_due_ms is None:
            self._due.pop((topic_id, schedule.name), None)
        else:
            self._due[topic_id, schedule.name] = schedule.next_due_ms


def _part(key: _Key) -> Part:
    return Part("recur", topic_id=key[0], name=key[1])


def _table(schedule: Schedule) -> Timetable:
    return Timetable(schedule.cron, schedule.interval_ms, schedule.timezone)


def _pack(schedule: Schedule) -> bytes:
    """The fields of a schedule's record, but for its name and its topic, which are the key's."""
    fields = [(field.name, getattr(schedule, field.name)) for field in dataclasses.fields(Schedule)[2:]]
    packed: bytes = msgpack.packb({name: value for name, value in fields if value is not None})
    return packed


def unpack_schedule(packed: bytes, name: str = "", topic: str = "") -> Schedule:
    """The schedule of a record's fields. Raises CorruptRecord."""
    try:
        fields = msgpack.unpackb(packed)
        next_id = None if fields.get("next_id") is None else MessageId(*fields["next_id"])
        required = {each: fields[each] for each in ("timezone", "payload", "properties", "paused")}
        optional = {each: fields.get(each) for each in ("cron", "interval_ms", "key", "next_due_ms")}
        schedule = Schedule(name=name, topic=topic, next_id=next_id, **required, **optional)
        encode_one(Message(schedule.payload, key=schedule.key, properties=schedule.properties), 0, 2**30)
        if (schedule.cron is None) == (schedule.interval_ms is None) or schedule.paused != (
            schedule.next_due_ms is None
        ):
            raise ValueError("its fields contradict each other")
        Timetable(schedule.cron, schedule.interval_ms, "UTC").after(schedule.next_due_ms or 0, 0)
        return schedule
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, msgpack.UnpackException) as error:
        raise CorruptRecord(f"schedule {name!r} cannot be read: {error}") from error
