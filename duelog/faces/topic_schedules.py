"""The schedules of a topic: messages that are sent again and again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from duelog.store.codec.body import encode_one
from duelog.store.duration import Duration, duration_ms
from duelog.store.errors import InvalidArgument
from duelog.store.message import Message, at_ms
from duelog.store.names import validate_subscription_name

from ..background.recurring import first_occurrence
from ..background.schedule_record import Schedule
from ..background.timetable import DEFAULT_GRACE, MISFIRES, WITH_GRACE, Misfires, Timetable
from ..engine import Engine
from ..sending.topic_sender import TopicSender
from ..topics.topic_state import TopicState


class TopicSchedules:
    """What a topic has for those who send by the calendar; a part of Topic."""

    _engine: Engine
    sender: TopicSender

    def _existing(self) -> TopicState:
        """The topic's state. Raises UnknownTopic."""
        raise NotImplementedError

    def exists(self) -> bool:
        """Whether the topic exists."""
        raise NotImplementedError

    def every(
        self,
        name: str,
        *,
        cron: str | None = None,
        interval: Duration | None = None,
        timezone: str = "UTC",
        payload: bytes = b"",
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        until: int | datetime | None = None,
        count: int | None = None,
        jitter: Duration = 0,
        misfires: Misfires = "first",
        grace: Duration | None = None,
    ) -> Schedule:
        """Have a message sent again and again: by `cron` in `timezone` (an IANA name), or each `interval`.

        cron: an expression, `@hourly`, `@daily`, `@weekly`, `@monthly`, `@yearly`, or `@every 90m`. interval: seconds
        or a timedelta, 1 s at least, from now. The schedule is kept under `name`: to ask for the same again changes
        nothing, for another replaces it, and `replaced` of what is returned is the one that was there.

        until: the latest nominal time, epoch ms or an aware datetime. count: so many messages are sent. Once it has
        ended it is kept, so that asking for the same again does not begin anew; `remove_schedule` forgets it.

        jitter: an occurrence is due up to so much after its nominal time, and always before the nominal time of the
        next. How much follows from topic, name and nominal time: it is the same after a restart.

        misfires: what comes, after a stop or a jump of the clock, of the occurrences that were missed. "first": the
        one that waited, once, late. "all": each, in order. "latest": one, the last of them. "skip": none. For "latest"
        and "skip" one is a misfire that could not come within `grace` (60 s by default) of its due time: those that
        are later by less come.

        `occurrence` of a received message names its schedule and nominal time. Durable when it returns. Raises
        InvalidArgument, StoreFull, StoreFailed.
        """
        self._engine.check_writable()
        validate_subscription_name(name, "schedule")
        table = Timetable.make(cron, interval, timezone)
        message = Message(payload, key=key, properties=properties)
        encode_one(message, 0, self._engine.storage.config.max_message_bytes)
        if count is not None and (type(count) is not int or not 1 <= count < 1 << 63):
            raise InvalidArgument("count", count, "expected an int from 1 on")
        if misfires not in MISFIRES:
            raise InvalidArgument("misfires", misfires, f"expected one of {', '.join(MISFIRES)}")
        if grace is not None and misfires not in WITH_GRACE:
            raise InvalidArgument("grace", grace, f"only with misfires {' and '.join(WITH_GRACE)}, not {misfires}")
        if misfires in WITH_GRACE and grace is None:
            grace = DEFAULT_GRACE
        asked = Schedule(
            name,
            "",
            table.cron,
            table.interval_ms,
            table.timezone,
            bytes(payload),
            key,
            dict(properties or {}),
            next_due_ms=None,
            next_id=None,
            paused=False,
            until_ms=None if until is None else at_ms("until", until),
            count=count,
            jitter_ms=duration_ms("jitter", jitter),
            misfires=misfires,
            grace_ms=duration_ms("grace", DEFAULT_GRACE if grace is None else grace)
            if misfires in WITH_GRACE
            else None,
        )
        if not self.exists():
            first_occurrence(asked, self._engine.clock.now_ms())  # what is refused makes no topic
        topic = self.sender.topic(self._engine.clock.now_ms())
        return self._engine.upkeep.recurring.every(topic, replace(asked, topic=str(topic.name)))

    def schedules(self) -> list[Schedule]:
        """The topic's schedules by name. Raises UnknownTopic."""
        return self._engine.upkeep.recurring.of_topic(self._existing())

    def pause_schedule(self, name: str) -> Schedule | None:
        """Take a schedule's waiting occurrence back, until it is resumed; None: there is no such schedule."""
        self._engine.check_writable()
        return self._engine.upkeep.recurring.pause(self._existing(), name)

    def resume_schedule(self, name: str) -> Schedule | None:
        """Go on with the first occurrence after now; None: there is no such schedule."""
        self._engine.check_writable()
        return self._engine.upkeep.recurring.resume(self._existing(), name)

    def remove_schedule(self, name: str) -> bool:
        """End a schedule and take its waiting occurrence back; False: there is no such schedule."""
        self._engine.check_writable()
        return self._engine.upkeep.recurring.remove(self._existing(), name)
