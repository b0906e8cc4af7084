"""Reminders of a calendar (RFC 5545, VALARM) as delayed messages.

Reads an .ics file with icalendar, lets recurring-ical-events expand what recurs within a horizon, and sends one message
for each reminder in the future, due when it triggers. Times without a zone, and days, are those of a time zone that
the caller names. What is already past is not sent; neither is a reminder of a component without a start.

Each reminder has a deduplication key: the event's UID, when it triggers, and which it is of those of that instant. So
importing a calendar again updates what was imported before: a reminder that is pending is not sent again, one that says
something else is replaced, one that its event has no more is cancelled. Events that are not in the file are left alone.
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import IO, Any
from zoneinfo import ZoneInfo

from ... import Message
from ...operations.operations import Operations
from ...store.codec.body import encode_one
from ...store.errors import InvalidArgument, InvalidMessage
from ..values import iso_time
from .import_lines import first_refused

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class ImportedReminders:
    """The result of an import: messages sent, reminders already past, reminders that have no time.

    Of those of an earlier import: reminders that were replaced, that are as they were, and that were cancelled.
    """

    messages: int = 0
    past: int = 0
    without_time: int = 0
    updated: int = 0
    unchanged: int = 0
    cancelled: int = 0


def import_ics(
    store: Operations, file: IO[bytes], topic: str, *, timezone: str = "UTC", horizon: timedelta = timedelta(days=366)
) -> ImportedReminders:
    """Send the reminders of a calendar that trigger within `horizon` from the store's now, and update earlier ones.

    A message's payload is a JSON object (summary, description, location, start, trigger, uid), its key the event's
    UID. All are checked before any is written; an import that is broken off is finished by importing again. Raises
    InvalidMessage naming the event and the time of the first that a delay policy refuses; InvalidArgument: the file is
    no calendar, or `timezone` no time zone; ImportError without `pip install 'duelog[calendar]'`; and what sending
    raises.
    """
    import recurring_ical_events
    from icalendar import Calendar

    zone = _zone(timezone)
    limits = store.limits()
    now = _EPOCH + timedelta(milliseconds=limits["now_ms"])
    try:
        calendar = Calendar.from_ical(file.read())
        if calendar.name != "VCALENDAR":
            raise ValueError(f"it begins with {calendar.name}")
        query = recurring_ical_events.of(calendar, components=["VEVENT", "VTODO"], skip_bad_series=True)
        # A reminder may be after its event's start, or long before it.
        components = list(query.between(now - timedelta(days=31), now + horizon + timedelta(days=31)))
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument("FILE", getattr(file, "name", None), f"no calendar: {error}") from None
    done, messages = ImportedReminders(), list[Message]()
    seen: set[tuple[str, int, str]] = set()  # an absolute trigger of a recurring event is one reminder
    for component in components:
        if str(component.get("STATUS", "")).upper() == "CANCELLED":
            continue
        triggers = _triggers(component, zone)
        if triggers is None:
            done.without_time += 1
            continue
        for trigger in triggers:
            message = _message(component, trigger, zone)
            identity = (message.key or "", _ms(trigger), str(component.get("SUMMARY", "")))
            if trigger <= now:
                done.past += 1
            elif trigger <= now + horizon and identity not in seen:
                seen.add(identity)
                messages.append(message)
    messages.sort(key=_due)
    for message in messages:
        encode_one(message, limits["now_ms"], limits["max_message_bytes"])
    refused = first_refused(store, topic, messages)
    if refused is not None:
        message = messages[refused["at"]]
        event = f"event {message.key!r}: reminder"
        reason = f"a delay of {refused['asked_ms']} ms is {refused['reason']}"
        raise InvalidMessage(event, iso_time(_due(message)), reason)
    uids = {str(component.get("UID", "")) for component in calendar.walk() if component.name in ("VEVENT", "VTODO")}
    _update(store, topic, messages, uids, (_ms(now), _ms(now + horizon)), done)
    return done


def _update(
    store: Operations, topic: str, messages: list[Message], uids: set[str], within_ms: tuple[int, int],
    done: ImportedReminders,
) -> None:  # fmt: skip
    """Have the pending reminders of these events, from a time to another, be the messages, which are sorted."""
    keyed: dict[str, Message] = {}
    of_instant: Counter[str] = Counter()
    for message in messages:
        instant = f"{_prefix(message.key or '')}{_due(message):015d}"
        keyed[f"{instant}/{of_instant[instant]}"] = message
        of_instant[instant] += 1
    is_there = store.has_topic(topic=topic)
    if is_there:
        for uid in sorted(uids):
            for key in list(store.keys(topic=topic, prefix=_prefix(uid))):
                trigger_ms = int(key.rpartition("/")[0][-15:])
                if key not in keyed and within_ms[0] < trigger_ms <= within_ms[1]:
                    done.cancelled += store.cancel_key(topic=topic, key=key)
    for key, message in keyed.items():
        found = store.find(topic, key) if is_there else None
        if found is not None and found.payload == message.payload:
            done.unchanged += 1
            continue
        payload, due_ms = bytes(message.payload), _due(message)
        store.send(topic, payload, create=True, deliver_at=due_ms, key=message.key, dedup_key=key, replace=True)
        done.messages += found is None
        done.updated += found is not None


def _prefix(uid: str) -> str:
    """The beginning of the deduplication keys of one event alone: of its UID, which may be of any length."""
    return f"ics/{hashlib.sha256(uid.encode(errors='replace')).hexdigest()[:32]}/"


def _zone(name: str) -> tzinfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise InvalidArgument("--timezone", name, "expected an IANA name such as Europe/Rome") from None


def _triggers(component: Any, zone: tzinfo) -> list[datetime] | None:
    """When the reminders of a component trigger; None: it has some, and their time cannot be told."""
    from icalendar import Alarms
    from icalendar.error import InvalidCalendar

    try:
        for name in ("DTSTART", "DTEND", "DUE"):  # a day begins at midnight in the zone, and alarms need the hour
            found = component.get(name)
            if found is not None:
                del component[name]
                component.add(name, _aware(found.dt, zone))
        return [_aware(alarm.trigger, zone) for alarm in Alarms(component).times]
    except (InvalidCalendar, ValueError):
        return None


def _aware(moment: date | datetime, zone: tzinfo) -> datetime:
    if not isinstance(moment, datetime):
        moment = datetime.combine(moment, time(), zone)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=zone)


def _message(component: Any, trigger: datetime, zone: tzinfo) -> Message:
    start = component.get("DTSTART") or component.get("DUE")
    fields = {
        "summary": str(component.get("SUMMARY", "")),
        "description": str(component.get("DESCRIPTION", "")),
        "location": str(component.get("LOCATION", "")),
        "start": None if start is None else _aware(start.dt, zone).isoformat(),
        "trigger": trigger.isoformat(),
        "uid": str(component.get("UID", "")),
    }
    payload = json.dumps(fields, ensure_ascii=False).encode()
    return Message(payload, deliver_at=_ms(trigger), key=fields["uid"] or None)


def _ms(moment: datetime) -> int:
    return -((_EPOCH - moment) // timedelta(milliseconds=1))  # rounded up, so that nothing is early


def _due(message: Message) -> int:
    return message.deliver_at if isinstance(message.deliver_at, int) else 0
