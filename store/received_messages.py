"""Messages that a subscription handed out, as columns.

A consumer that passes messages on, or works on payloads alone, needs no object for each: `ReceivedMessages` is a
sequence whose `ReceivedMessage` is made when it is looked at, as `MessageIds` is of ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, overload

import numpy as np

from .message import Occurrence, ReceivedMessage
from .position import ENTRY_MASK, MessageId, MessageIds, Place, position_at

COLUMNS = ("places", "id_places", "payloads", "keys", "due_ms", "publish_ms", "redelivery_counts")
NUMBERS = {int}


class Facts(NamedTuple):
    """Fields that few messages have, as in ReceivedMessage."""

    properties: dict[str, str] | None
    retries: int = 0
    addressee: str | None = None
    first_try: tuple[MessageId, int] | None = None
    expires_ms: int | None = None
    occurrence: Occurrence | None = None
    failure: str | None = None

    def deliverable(self, subscription: str, now_ms: int) -> bool:
        """True where a subscription gets it: it is addressed to it, or to all, and has not expired."""
        return self.addressee in (None, subscription) and (self.expires_ms is None or self.expires_ms > now_ms)


NO_FACTS = Facts(None)


class ReceivedMessages(Sequence[ReceivedMessage]):
    """Many received messages as columns of one length, in the order in which they were handed out.

    payloads: `bytes`. keys: `str`, or None for a message without one. due_ms, publish_ms: epoch ms.
    redelivery_counts: how often each was handed out before. positions, message_ids: as `MessageIds`. The columns are
    not to be written to. Equal to any other sequence of the same messages.
    """

    __slots__ = (*COLUMNS, "facts", "subscription", "topic")

    def __init__(self, topic: str, subscription: str) -> None:
        """No messages."""
        self.topic = topic
        self.subscription = subscription
        self.places: list[Place] = []
        self.id_places: list[Place] = []
        self.payloads: list[bytes] = []
        self.keys: list[str | None] = []
        self.due_ms: list[int] = []
        self.publish_ms: list[int] = []
        self.redelivery_counts: list[int] = []
        self.facts: dict[Place, Facts] = {}
        """Rare fields by position; of other messages too, where columns were divided."""

    @classmethod
    def of(cls, topic: str, subscription: str, messages: Sequence[ReceivedMessage]) -> ReceivedMessages:
        """The columns of messages of one topic and subscription."""
        columns = cls(topic, subscription)
        for message in messages:
            place = message._place
            columns.places.append(place)
            columns.id_places.append(message._id_place)
            columns.payloads.append(message.payload)
            columns.keys.append(message.key)
            columns.due_ms.append(message.due_ms)
            columns.publish_ms.append(message.publish_ms)
            columns.redelivery_counts.append(message.redelivery_count)
            facts = Facts(
                message._properties or None,
                message.retries,
                message.addressee,
                message.first_try,
                message.expires_ms,
                message.occurrence,
                message.failure,
            )
            if facts != NO_FACTS:
                columns.facts[place] = facts
        return columns

    # -- columns -----------------------------------------------------------------------------------

    @property
    def positions(self) -> MessageIds:
        """The position of each message, or of its marker, in the main log, which is acknowledged."""
        return _ids(self.places)

    @property
    def message_ids(self) -> MessageIds:
        """The ids that `send` gave."""
        return _ids(self.id_places)

    def part(self, start: int, limit: int) -> ReceivedMessages:
        """The messages at [start, limit)."""
        found = ReceivedMessages.__new__(ReceivedMessages)  # the hottest of these: written out
        found.topic, found.subscription, found.facts = self.topic, self.subscription, self.facts
        found.places, found.id_places = self.places[start:limit], self.id_places[start:limit]
        found.payloads, found.keys = self.payloads[start:limit], self.keys[start:limit]
        found.due_ms, found.publish_ms = self.due_ms[start:limit], self.publish_ms[start:limit]
        found.redelivery_counts = self.redelivery_counts[start:limit]
        return found

    def pick(self, rows: Sequence[int]) -> ReceivedMessages:
        """The messages at these places, in this order."""
        if len(rows) < 2:
            return self._divided(lambda column: [column[row] for row in rows])
        pick = itemgetter(*rows)
        return self._divided(lambda column: list(pick(column)))

    def deliverable(self, subscription: str, now_ms: int, expired_ms: int) -> ReceivedMessages:
        """Those that this subscription is to get: addressed to it, or to all, and not expired.

        expired_ms: what was due by then has expired by the policies; -1: nothing has.
        """
        facts = self.facts
        if not facts and expired_ms < 0:
            return self
        rows = [
            row
            for row, (at, due_ms) in enumerate(zip(self.places, self.due_ms, strict=True))
            if due_ms > expired_ms and facts.get(at, NO_FACTS).deliverable(subscription, now_ms)
        ]
        return self.pick(rows)

    def _divided(self, take: Any) -> ReceivedMessages:
        found = ReceivedMessages.__new__(ReceivedMessages)
        found.topic, found.subscription, found.facts = self.topic, self.subscription, self.facts
        for column in COLUMNS:
            setattr(found, column, take(getattr(self, column)))
        return found

    def __add__(self, other: ReceivedMessages) -> ReceivedMessages:
        if not self.places or not other.places:
            return other if not self.places else self
        found = self._divided(list)
        for column in COLUMNS:
            getattr(found, column).extend(getattr(other, column))
        if other.facts:
            found.facts = {**self.facts, **other.facts}
        return found

    # -- messages ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> ReceivedMessage: ...

    @overload
    def __getitem__(self, index: slice) -> ReceivedMessages: ...

    def __getitem__(self, index: int | slice) -> ReceivedMessage | ReceivedMessages:
        if isinstance(index, slice):
            return self._divided(lambda column: column[index])
        return next(iter(self.pick([index])))

    def __iter__(self) -> Iterator[ReceivedMessage]:
        return iter(self.to_list())

    def to_list(self) -> list[ReceivedMessage]:
        """The messages as a list."""
        new, facts, topic, subscription = object.__new__, self.facts, self.topic, self.subscription
        found: list[ReceivedMessage] = []
        add = found.append
        for place, id_place, payload, key, due_ms, publish_ms, count in zip(
            self.places,
            self.id_places,
            self.payloads,
            self.keys,
            self.due_ms,
            self.publish_ms,
            self.redelivery_counts,
            strict=True,
        ):
            message: ReceivedMessage = new(ReceivedMessage)  # its constructor takes three times as long
            message._place = place
            message._id_place = id_place
            message.payload = payload
            message.key = key
            message.due_ms = due_ms
            message.publish_ms = publish_ms
            message.redelivery_count = count
            message.topic = topic
            message.subscription = subscription
            if facts and (rare := facts.get(place)) is not None:
                message._properties, message.retries, message.addressee = rare[:3]
                first_try, expires_ms, occurrence, failure = rare[3:]
                if first_try is not None:
                    message._first_try = first_try
                if expires_ms is not None:
                    message._expires_ms = expires_ms
                if occurrence is not None:
                    message._occurrence = occurrence
                if failure is not None:
                    message._failure = failure
            else:
                message._properties = message.addressee = None
                message.retries = 0
            add(message)
        return found

    def __eq__(self, other: object) -> bool:
        return self.to_list() == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<ReceivedMessages of {self.topic!r}, {self.subscription!r}: {len(self)}>"


def _ids(places: list[Place]) -> MessageIds:
    if set(map(type, places)) <= NUMBERS and (not places or max(places) >> 63 == 0):  # type: ignore[operator]
        numbers = np.array(places, dtype=np.int64)
        return MessageIds.of(numbers >> 32, numbers & ENTRY_MASK)
    ids = [position_at(place) for place in places]
    ledgers, entries = zip(*ids, strict=True)
    return MessageIds.of(np.array(ledgers, dtype=np.int64), np.array(entries, dtype=np.int64))
