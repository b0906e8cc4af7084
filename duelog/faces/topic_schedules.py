"""The schedules of a topic: messages that are sent again and again."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from duelog.store.codec.body import encode_one
from duelog.store.message import Message
from duelog.store.names import validate_subscription_name

from ..background.recurring import Schedule
from ..background.timetable import Timetable
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

    def every(
        self,
        name: str,
        *,
        cron: str | None = None,
        interval: float | timedelta | None = None,
        timezone: str = "UTC",
        payload: bytes = b"",
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> Schedule:
        """Have a message sent again and again: by `cron` in `timezone` (an IANA name), or each `interval`.

        interval: seconds or a timedelta, 1 s at least, from now. The schedule is kept under `name`: to ask for the same
        again changes nothing, for another replaces it. After a stop the occurrence that waited comes once, and then the
        next after now. Durable when it returns. Raises InvalidArgument, StoreFull, StoreFailed.
        """
        self._engine.check_writable()
        validate_subscription_name(name, "schedule")
        table = Timetable.make(cron, interval, timezone)
        message = Message(payload, key=key, properties=properties)
        encode_one(message, 0, self._engine.config.max_message_bytes)
        return self._engine.recurring.every(self.sender.topic(self._engine.clock.now_ms()), name, table, message)

    def schedules(self) -> list[Schedule]:
        """The topic's schedules by name. Raises UnknownTopic."""
        return self._engine.recurring.of_topic(self._existing())

    def pause_schedule(self, name: str) -> Schedule | None:
        """Take a schedule's waiting occurrence back, until it is resumed; None: there is no such schedule."""
        self._engine.check_writable()
        return self._engine.recurring.pause(self._existing(), name)

    def resume_schedule(self, name: str) -> Schedule | None:
        """Go on with the first occurrence after now; None: there is no such schedule."""
        self._engine.check_writable()
        return self._engine.recurring.resume(self._existing(), name)

    def remove_schedule(self, name: str) -> bool:
        """End a schedule and take its waiting occurrence back; False: there is no such schedule."""
        self._engine.check_writable()
        return self._engine.recurring.remove(self._existing(), name)
