"""The operations by which an import checks and sends many messages, and finds those of earlier imports by key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from duelog.store.errors import DelayTooLong, InvalidArgument
from duelog.store.message import Message

from .asked_store import Store
from .json_values import payload_of, scheduled_json

_FIELDS = {"payload", "deliver_at", "deliver_after", "key", "properties", "dedup_key", "dedup_for", "replace"}


class ImportOperations:
    """Check, send in batches, find and cancel by deduplication key; a part of `Operations`."""

    _store: Store

    def limits(self) -> dict[str, int]:
        """What an import has to know of the store before it sends."""
        return {"now_ms": self._store.clock.now_ms(), "max_message_bytes": self._store.config.max_message_bytes}

    def has_topic(self, topic: str) -> bool:
        return self._store.topic(topic).exists()

    def check_delays(self, topic: str, delays: Sequence[Sequence[Any]]) -> dict[str, object] | None:
        """Of pairs of deliver_at and deliver_after, the first that a delay policy refuses; None: none."""
        if not self._store.effective_policies(topic).max_delivery_delay_ms:
            return None
        check = self._store.topic(topic).sender.check
        for at, pair in enumerate(delays):
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise InvalidArgument(f"delays[{at}]", pair, "expected deliver_at and deliver_after")
            try:
                check(Message(b"", deliver_at=pair[0], deliver_after=pair[1]), allow_past=True)
            except DelayTooLong as error:
                return {"at": at, "asked_ms": error.asked_ms, "reason": error.reason}
        return None

    def send_messages(
        self,
        topic: str,
        messages: Sequence[Mapping[str, object]],
        allow_past: bool = False,
        producer: str | None = None,
        first: int = 0,
    ) -> int:
        """Send a batch, numbered from `first` on where a producer is named; how many that one had stored before."""
        if not isinstance(messages, list):
            raise InvalidArgument("messages", messages, "expected a list")
        batch = [_message(f"messages[{at}]", each) for at, each in enumerate(messages)]
        target = self._store.topic(topic)
        if producer is None:
            target.send_batch(batch, allow_past=allow_past)
            return 0
        numbered = target.producer(producer)
        last = numbered.last_sequence_id
        numbered.send_batch(batch, first_sequence_id=first, allow_past=allow_past)
        return min(max(last + 1 - first, 0), len(batch))  # from 0 on without a gap: batches come in order

    def keys(self, topic: str, prefix: str = "") -> Iterator[str]:
        """As `Topic.keys`."""
        return self._store.topic(topic).keys(prefix)

    def find(self, topic: str, key: str) -> dict[str, object] | None:
        """As `Topic.find`."""
        found = self._store.topic(topic).find(key)
        return None if found is None else scheduled_json(found)

    def cancel_key(self, topic: str, key: str) -> bool:
        """As `Topic.cancel_key`."""
        return self._store.topic(topic).cancel_key(key)


def _message(field: str, fields: object) -> Message:
    if not isinstance(fields, Mapping) or not {"payload"} <= fields.keys() <= _FIELDS:
        raise InvalidArgument(field, fields, f"expected an object with payload, and of {', '.join(sorted(_FIELDS))}")
    return Message(**{**fields, "payload": payload_of(f"{field}: payload", fields["payload"])})
