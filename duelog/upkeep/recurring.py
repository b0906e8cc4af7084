"""Recurring messages: kept schedules, each with its next occurrence waiting as a delayed message.

When an occurrence has fallen due, the next is scheduled: the first one that is due after now. What lies between them
was missed, in a stop or a jump of the clock, and `Recurrence.late` says what of it comes all the same: it is appended
to the main log in the transaction that records the next, so that none is lost or doubled by a crash. Where a schedule
says that misfires are skipped, or that only the latest comes, the occurrence that waits is one too: `withdraw` takes
it back before it fires. Where that fails, for want of space say, it comes late.

A schedule that has ended is kept, so that a program that asks for it at every start has it run once.

Occurrences are due when their timetable says, whatever delay policies say: their maximum and fixed delay are for what
producers ask for at each send, a timetable was asked for once and is kept by the store.
"""

import functools
import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from duelog.markers.firing.suspensions import Part, Suspensions
from duelog.markers.pending_entries import Successors
from duelog.store.clock import Clock
from duelog.store.codec import format as fmt
from duelog.store.codec.body import encode_one, occurrence_extra
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from duelog.store.errors import CorruptRecord, InvalidArgument, UnknownTopic
from duelog.store.held import Held
from duelog.store.log import catalog
from duelog.store.message import Occurrence
from duelog.store.names import validate_subscription_name
from duelog.store.position import MessageId

from ..sending.withdrawal import Withdrawals
from ..topics.topic_list import Topics
from ..topics.topic_state import TopicState
from .schedule import Due, Schedule, pack_schedule, schedule_rows, unpack_schedule

_log = logging.getLogger("duelog.maintenance")

_Key = tuple[int, str]

_AT_ONCE = 256
"""Missed occurrences that are sent in one transaction."""


@dataclass(eq=False, repr=False)
class Recurring:
    """The schedules of an open store. Thread-safe; changes are made one at a time."""

    _main: Environment
    _topics: Topics
    _withdrawals: Withdrawals
    _clock: Clock
    _max_message_bytes: int
    _wake: Callable[[], None]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        """Held during changes: within maintenance's lock, around Firing.gate."""
        self._due: dict[_Key, int] = {}
        self._misfires: dict[_Key, int] = {}
        """From when on an occurrence that waits is not to come, of those schedules that say so."""
        for page in catalog.pages(self._main, fmt.prefix(fmt.Table.RECURRENCE)):
            for key, fields in page:
                number, name = fmt.split_named_key(key)
                try:
                    self._note(number, unpack_schedule(fields, name, ""))
                except CorruptRecord as error:  # a finding of `check`, too
                    _log.error("%s: a schedule stopped recurring: %s", self._main.path.parent, error)

    # -- for Maintenance -----------------------------------------------------------------------------

    def next_due_ms(self, suspensions: Suspensions) -> int | None:
        dues = (suspensions.not_before(_part(key), due_ms) for key, due_ms in list(self._due.items()))
        return min((due_ms for due_ms in dues if due_ms is not None), default=None)

    def is_late(self, now_ms: int) -> bool:
        return any(from_ms <= now_ms for from_ms in list(self._misfires.values()))

    def withdraw(self, now_ms: int, suspensions: Suspensions) -> None:
        """Take back waiting occurrences too late at `now_ms`, before they fire. Raises StoreFull, StoreFailed."""
        self._each(self._misfires, now_ms, suspensions, firing=False, withdrawing=True)

    def run(self, now_ms: int, suspensions: Suspensions, *, firing: bool) -> bool:
        """Schedule the occurrence after each that is due by `now_ms`; returns whether there is more to send now.

        firing: due messages are still unfired, so occurrences missed after an unfired one wait. A schedule for which
        that fails is suspended. Raises StoreFull, StoreFailed.
        """
        return bool(self._due) and self._each(self._due, now_ms, suspensions, firing=firing, withdrawing=False)

    def _each(
        self, times: dict[_Key, int], now_ms: int, suspensions: Suspensions, *, firing: bool, withdrawing: bool
    ) -> bool:
        more = False
        with self._lock:
            for key in [key for key, due_ms in times.items() if due_ms <= now_ms]:
                advance = functools.partial(self._advance, key, now_ms, firing=firing, withdrawing=withdrawing)
                more = suspensions.run(_part(key), now_ms, advance, otherwise=False) or more
        return more

    def _advance(self, key: _Key, now_ms: int, *, firing: bool, withdrawing: bool) -> bool:
        """Send the missed occurrences that are still to be sent, schedule the next, and return whether more remain.

        A waiting occurrence that is too late is taken back. firing: as in `run`. withdrawing: called by `withdraw`.
        """
        topic = self._topics.by_id(key[0])
        try:
            schedule = None if topic is None else self._read(topic, key[1])
        except CorruptRecord as error:
            _log.error("%s: a schedule stopped recurring: %s", self._main.path.parent, error)
            schedule = None
        if topic is None or schedule is None or schedule.next_nominal_ms is None:
            self._forget(key)
            return False
        rule, nominal_ms, waiting = schedule.recurrence, schedule.next_nominal_ms, schedule.next_id
        misfired = schedule.misfires_from_ms is not None and schedule.misfires_from_ms <= now_ms
        late = list(itertools.islice(rule.late(nominal_ms, now_ms, misfired=misfired), _AT_ONCE + 1))
        if misfired and not late and schedule.misfires == "latest":
            misfired = False  # it is the latest itself
            if withdrawing:
                self._misfires.pop(key, None)
                return False
        if late and firing and not misfired and waiting is not None and self._is_pending(topic, waiting):
            return False
        old = waiting if misfired else None
        remaining = None if schedule.count is None else max(schedule.count - schedule.sent, 0)
        if remaining is not None and old is not None and self._is_pending(topic, old):
            remaining += 1
        more = len(late) > _AT_ONCE
        late = late[:_AT_ONCE] if remaining is None else late[: min(remaining, _AT_ONCE)]
        last_ms = late[-1].nominal_ms if late else nominal_ms
        following: Due | None = None
        if remaining is None or len(late) < remaining:
            following = late[-1] if more else rule.following(last_ms, now_ms)
        wanted = replace(
            _at(schedule, following), sent=schedule.sent + len(late) + (following is not None and not more)
        )
        if self._put(topic, wanted, old, late, sends_next=not more, must_exist=True) is None:
            self._forget(key)  # the topic is being deleted
            return False
        return more and following is not None

    # -- for Topic -----------------------------------------------------------------------------------

    def every(self, topic: TopicState, asked: Schedule) -> Schedule:
        """Make a schedule, or give the one there is if it says the same; else replace it, and say which that was.

        Raises InvalidArgument where it would have no occurrence.
        """
        with self._lock:
            kept = self._read(topic, asked.name)
            if kept is not None and kept.says_the_same(asked):
                return kept
            first = first_occurrence(asked, self._clock.now_ms())
            old = None if kept is None else kept.next_id
            made = self._put(topic, replace(_at(asked, first), sent=1), old, replaces=True)
            if made is None:  # deleted meanwhile
                raise UnknownTopic(str(topic.name))
            return replace(made, replaced=kept)

    def pause(self, topic: TopicState, name: str) -> Schedule | None:
        """Take the waiting occurrence back until `resume`; None: no such schedule."""
        with self._lock:
            schedule = self._read(topic, name)
            if schedule is None or schedule.paused or schedule.ended:
                return schedule
            return self._put(topic, replace(_at(schedule, None), paused=True, ended=False), schedule.next_id)

    def resume(self, topic: TopicState, name: str) -> Schedule | None:
        """Go on with the first occurrence after now, if there is one; None: no such schedule."""
        with self._lock:
            schedule = self._read(topic, name)
            if schedule is None or not schedule.paused:
                return schedule
            spent = schedule.count is not None and schedule.sent >= schedule.count
            first = None if spent else schedule.recurrence.after(self._clock.now_ms())
            return self._put(topic, replace(_at(schedule, first), sent=schedule.sent + (first is not None)), None)

    def remove(self, topic: TopicState, name: str) -> bool:
        with self._lock:
            schedule = self._read(topic, name)
            if schedule is None:
                return False
            old = {} if schedule.next_id is None else {0: (schedule.next_id, None)}
            with Held() as held:
                withdraw = self._withdrawals.replacing(held, [Successors(topic.log, [], {}, old)])

                def work(transaction: Transaction) -> None:
                    withdraw(transaction)
                    transaction.delete(fmt.schedule_key(topic.topic_id, name))

                self._main.write(work)
            self._forget((topic.topic_id, name))
            return True

    def of_topic(self, topic: TopicState) -> list[Schedule]:
        with self._main.read() as raw:
            rows = list(schedule_rows(raw, topic.topic_id))
        schedules = [unpack_schedule(fields, fmt.split_named_key(key)[1], str(topic.name)) for key, fields in rows]
        return sorted(schedules, key=lambda schedule: schedule.name.encode())

    # -- inside --------------------------------------------------------------------------------------

    def _read(self, topic: TopicState, name: str) -> Schedule | None:
        fields = self._main.get(fmt.schedule_key(topic.topic_id, validate_subscription_name(name, "schedule")))
        return None if fields is None else unpack_schedule(fields, name, str(topic.name))

    def _put(
        self,
        topic: TopicState,
        schedule: Schedule,
        old: MessageId | None,
        late: list[Due] | None = None,
        *,
        sends_next: bool = True,
        replaces: bool = False,
        must_exist: bool = False,
    ) -> Schedule | None:
        """Record a schedule, with its occurrence in place of `old` and those that are late; None: it is gone.

        sends_next: its next occurrence is to be sent, it is none of those late. replaces: `old` is of another schedule,
        and was not counted. REQUIRES: the lock.
        """
        key, topic_key = fmt.schedule_key(topic.topic_id, schedule.name), fmt.topic_key(str(topic.name))
        now_ms = self._clock.now_ms()

        def body(nominal_ms: int) -> bytes:
            extra = occurrence_extra(Occurrence(schedule.name, nominal_ms))
            return encode_one(schedule.message, now_ms, self._max_message_bytes, extra)[1]

        passed = [body(occurrence.nominal_ms) for occurrence in late or ()]
        dues_passed = np.array([occurrence.due_ms for occurrence in late or ()], dtype=np.int64)
        dues, bodies = [], {}
        if schedule.next_due_ms is not None and sends_next:
            dues, bodies = [max(schedule.next_due_ms, now_ms + 1)], {0: body(schedule.next_nominal_ms or 0)}
        olds = {} if old is None else {0: (old, None)}
        with Held() as held:
            succeed = self._withdrawals.replacing(held, [Successors(topic.log, dues, bodies, olds)])

            def work(transaction: Transaction) -> Schedule | None:
                is_gone = transaction.get(topic_key) is None or (must_exist and transaction.get(key) is None)
                if is_gone:
                    return None
                ((placed, withdrawn),) = succeed(transaction)
                if passed:
                    topic.log.append_messages(transaction, dues_passed, passed, now_ms)
                done = replace(
                    schedule,
                    next_id=placed[0].message_id if placed else None,
                    next_due_ms=dues[0] if dues else schedule.next_due_ms,
                    sent=schedule.sent - (withdrawn and not replaces),
                )
                transaction.put(key, pack_schedule(done))
                # Memory follows the disk, also where the caller is interrupted after the commit.
                transaction.after_commit(functools.partial(self._note, topic.topic_id, done))
                return done

            done = self._main.write(work)
        if done is not None and (schedule.next_due_ms is not None or passed):
            self._wake()
        return done

    def _is_pending(self, topic: TopicState, message_id: MessageId) -> bool:
        return self._withdrawals.states(topic, [message_id]) == [None]

    def _note(self, topic_id: int, schedule: Schedule) -> None:
        key = (topic_id, schedule.name)
        self._forget(key)
        if schedule.next_due_ms is not None:
            self._due[key] = schedule.next_due_ms
        if schedule.misfires_from_ms is not None:
            self._misfires[key] = schedule.misfires_from_ms

    def _forget(self, key: _Key) -> None:
        self._due.pop(key, None)
        self._misfires.pop(key, None)


def first_occurrence(asked: Schedule, now_ms: int) -> Due:
    """The first occurrence after now. Raises InvalidArgument: there is none, or it is after the end."""
    first = asked.recurrence.after(now_ms)
    if first is None:
        nominal_ms = asked.recurrence.table.after(now_ms, now_ms)
        raise InvalidArgument("until", asked.until_ms, f"before the first occurrence, {nominal_ms}")
    return first


def _at(schedule: Schedule, due: Due | None) -> Schedule:
    """A schedule whose next occurrence is `due`; None: it has ended."""
    nominal_ms, due_ms = (None, None) if due is None else due
    return replace(
        schedule, next_nominal_ms=nominal_ms, next_due_ms=due_ms, next_id=None, paused=False, ended=due is None
    )


def _part(key: _Key) -> Part:
    return Part("recur", topic_id=key[0], name=key[1])
