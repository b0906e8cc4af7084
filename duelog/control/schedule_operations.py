"""The operations on schedules; a part of `Operations`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from duelog.store.errors import InvalidArgument

from ..background.timetable import Misfires
from .asked_store import Store
from .json_values import payload_of, schedule_json


class ScheduleOperations:
    """Make, list, pause, resume and remove."""

    _store: Store

    def every(
        self,
        topic: str,
        name: str,
        payload: str = "",
        cron: str | None = None,
        interval: float | None = None,
        timezone: str = "UTC",
        key: str | None = None,
        properties: Mapping[str, str] | None = None,
        until: int | None = None,
        count: int | None = None,
        jitter: float = 0,
        misfires: Misfires = "first",
        grace: float | None = None,
        create: bool = False,
    ) -> dict[str, object]:
        """As `Topic.every`. payload: base64. create: make the topic where there is none."""
        target = self._store.topic(topic)
        if not create and not target.exists():
            raise InvalidArgument("TOPIC", topic, "there is no such topic; --create makes it")
        made = target.every(
            name,
            cron=cron,
            interval=interval,
            timezone=timezone,
            payload=payload_of("payload", payload),
            key=key,
            properties=properties,
            until=until,
            count=count,
            jitter=jitter,
            misfires=misfires,
            grace=grace,
        )
        return schedule_json(made)

    def schedules(self, topic: str | None = None) -> Iterator[dict[str, object]]:
        """Those of a topic by name, or of all topics."""
        for one in self._store.topics() if topic is None else [self._store.topic(topic)]:
            yield from map(schedule_json, one.schedules())

    def pause_schedule(self, topic: str, name: str) -> dict[str, object] | None:
        """Take its pending occurrence back, until it is resumed; None: there is no such schedule."""
        found = self._store.topic(topic).pause_schedule(name)
        return None if found is None else schedule_json(found)

    def resume_schedule(self, topic: str, name: str) -> dict[str, object] | None:
        """Go on with the first occurrence after now; None: there is no such schedule."""
        found = self._store.topic(topic).resume_schedule(name)
        return None if found is None else schedule_json(found)

    def remove_schedule(self, topic: str, name: str) -> bool:
        """End it and take its pending occurrence back; False: there is no such schedule."""
        return self._store.topic(topic).remove_schedule(name)
