"""What the operations of a store give and take, as JSON has it: messages, schedules, ids; payloads in base64."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import fields

from duelog.store.errors import InvalidArgument
from duelog.store.message import ReceivedMessage, ScheduledMessage
from duelog.store.position import MessageId

from ..background.schedule_record import Schedule
from ..topics.dead_letters import DeadLetter
from ..topics.seeking import PublishedAt, SeekTarget


def seek_target(to: object) -> SeekTarget:
    """Where to go in a log. Raises InvalidArgument."""
    if isinstance(to, str):
        return to if to in ("earliest", "latest") else MessageId.parse(to)
    if isinstance(to, Mapping) and len(to) == 1:
        ((name, value),) = to.items()
        if isinstance(value, int) and name in ("due_ms", "published_ms"):
            return value if name == "due_ms" else PublishedAt(value)
    raise InvalidArgument(
        "to", to, 'expected "earliest", "latest", a position, {"due_ms": ...} or {"published_ms": ...}'
    )


def message_ids_of(texts: object) -> list[MessageId]:
    """Ids from their texts. Raises InvalidArgument."""
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise InvalidArgument("ids", texts, "expected a list of ids")
    return [MessageId.parse(text) for text in texts]


def payload_of(field: str, text: object) -> bytes:
    """Bytes from base64. Raises InvalidArgument."""
    try:
        return base64.b64decode(text, validate=True)  # type: ignore[arg-type]
    except (binascii.Error, TypeError, ValueError):
        raise InvalidArgument(field, text, "expected base64") from None


def scheduled_json(message: ScheduledMessage) -> dict[str, object]:
    """A message that is not due."""
    return {
        "message_id": str(message.message_id),
        "payload": base64.b64encode(message.payload).decode(),
        "key": message.key,
        "properties": message.properties,
        "due_ms": message.due_ms,
        "publish_ms": message.publish_ms,
        "occurrence": None if message.occurrence is None else message.occurrence._asdict(),
        "topic": message.topic,
        "dedup_key": message.dedup_key,
    }


def received_json(message: ReceivedMessage) -> dict[str, object]:
    """A message that was handed out."""
    return {
        "payload": base64.b64encode(message.payload).decode(),
        "key": message.key,
        "properties": message.properties,
        "message_id": str(message.message_id),
        "position": str(message.position),
        "due_ms": message.due_ms,
        "publish_ms": message.publish_ms,
        "occurrence": None if message.occurrence is None else message.occurrence._asdict(),
        "redelivery_count": message.redelivery_count,
        "retries": message.retries,
        "addressee": message.addressee,
        "topic": message.topic,
        "subscription": message.subscription,
    }


def letter_json(letter: DeadLetter) -> dict[str, object]:
    """A dead letter."""
    return {
        **{each.name: getattr(letter, each.name) for each in fields(letter)},
        "payload": base64.b64encode(letter.payload).decode(),
        "message_id": str(letter.message_id),
        "position": str(letter.position),
        "occurrence": None if letter.occurrence is None else letter.occurrence._asdict(),
    }


def schedule_json(schedule: Schedule) -> dict[str, object]:
    """A schedule, and the one that it replaced."""
    return {
        **{each.name: getattr(schedule, each.name) for each in fields(schedule)},
        "payload": base64.b64encode(schedule.payload).decode(),
        "next_id": None if schedule.next_id is None else str(schedule.next_id),
        "replaced": None if schedule.replaced is None else schedule_json(schedule.replaced),
    }
