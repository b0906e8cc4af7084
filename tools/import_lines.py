"""Importing messages from JSON lines, in batches: a bad line stops it, and nothing of its batch is written.

    {"topic": "reminders", "payload": "pay", "deliver_at": "2026-11-21T09:00:00Z", "key": "order-17"}
    {"topic": "reminders", "payload_base64": "AP8=", "deliver_after": "2h", "properties": {"shop": "7"}}

`payload` is text, stored as UTF-8; `payload_base64` stands for bytes. `deliver_at`: epoch ms or ISO 8601 with a zone;
`deliver_after`: seconds, or text such as "5m"; neither: due at once. A field of another name is refused: a misspelt
due time would mean "now". Empty lines are passed over.

Every line is checked as `send` would check it before anything of its batch is written. Batches written before it stand.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterator
from typing import IO, Any

from .. import DelayedStore, Message
from ..store.body import encode_one
from ..store.errors import InvalidArgument, InvalidMessage
from ..store.names import TopicName
from .values import duration_seconds, time_ms

FIELDS = ("topic", "payload", "payload_base64", "deliver_at", "deliver_after", "key", "properties")

_BATCH_BYTES = 32 << 20
"""A batch ends at this size too, whatever its number of messages."""


class Import:
    """One import into an open store; the counts say how far it has come, also after an error."""

    def __init__(self, store: DelayedStore, *, batch_messages: int = 5_000) -> None:
        self._store = store
        self._batch_messages = batch_messages
        self._longest_line = 8 * store.config.max_message_bytes + (1 << 20)
        self._topics: set[str] = set()
        self.messages = 0
        """Messages of the batches that are written in full."""
        self.lines = 0
        """Lines up to the end of the last of those batches."""
        self.began = False
        """Whether the batch after it was being written when the import ended: some of it may be in the store."""

    @property
    def topics(self) -> int:
        """Topics that got messages."""
        return len(self._topics)

    def run(self, file: IO[bytes], progress: Callable[[], object] = lambda: None) -> None:
        """Import every line of a file; `progress` is called after each batch.

        Raises InvalidMessage whose field begins with `line 17`, and what sending raises.
        """
        batch: dict[str, list[Message]] = {}
        count = size = number = 0
        for number, line in self._lines(file):
            try:
                topic, message = self._message(line)
            except InvalidArgument as error:
                raise InvalidMessage(f"line {number}: {error.field}", error.value, error.reason) from None
            batch.setdefault(topic, []).append(message)
            count += 1
            size += len(line)
            if count == self._batch_messages or size >= _BATCH_BYTES:
                self._write(batch, count, number)
                progress()
                batch, count, size = {}, 0, 0
        self._write(batch, count, number)
        progress()

    def _lines(self, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
        number = 0
        while line := file.readline(self._longest_line):
            number += 1
            if len(line) == self._longest_line and not line.endswith(b"\n"):
                raise InvalidMessage(f"line {number}: line", line[:80], f"longer than {self._longest_line} bytes")
            if not line.isspace():
                yield number, line

    def _write(self, batch: dict[str, list[Message]], count: int, number: int) -> None:
        self.began = bool(batch)
        for topic, messages in batch.items():
            self._store.topic(topic).send_batch(messages)
            self._topics.add(topic)
        self.began = False
        self.messages += count
        self.lines = max(self.lines, number)

    def _message(self, line: bytes) -> tuple[str, Message]:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidMessage("line", line.strip(), f"no JSON: {error}") from None
        if not isinstance(fields, dict):
            raise InvalidMessage("line", fields, "expected a JSON object")
        for name, value in fields.items():
            if name not in FIELDS:
                raise InvalidMessage(name, value, f"unknown field; expected {', '.join(FIELDS)}")
        topic = str(TopicName.parse(_required(fields, "topic")))
        message = Message(
            _payload(fields),
            deliver_at=_deliver_at(fields.get("deliver_at")),
            deliver_after=_deliver_after(fields.get("deliver_after")),
            key=fields.get("key"),
            properties=fields.get("properties"),
        )
        encode_one(message, self._store.clock.now_ms(), self._store.config.max_message_bytes)
        return topic, message


def _required(fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise InvalidMessage(name, None, "missing")
    return fields[name]


def _payload(fields: dict[str, Any]) -> bytes:
    text, encoded = fields.get("payload"), fields.get("payload_base64")
    if (text is None) == (encoded is None):
        raise InvalidMessage("payload", text, "expected one of payload (text) and payload_base64")
    if text is not None:
        if not isinstance(text, str):
            raise InvalidMessage("payload", text, "expected text; put other JSON into a string")
        try:
            return text.encode()
        except UnicodeEncodeError:
            raise InvalidMessage("payload", text, "a lone surrogate has no UTF-8 form") from None
    try:
        return base64.b64decode(encoded, validate=True)  # type: ignore[arg-type]  # what is no str is refused by it
    except (binascii.Error, TypeError, ValueError) as error:
        raise InvalidMessage("payload_base64", encoded, f"no base64: {error}") from None


def _deliver_at(value: object) -> int | None:
    if isinstance(value, str):
        return time_ms("deliver_at", value)
    return value  # type: ignore[return-value]  # whatever else it is, it is checked as `send` checks it


def _deliver_after(value: object) -> float | None:
    if isinstance(value, str):
        return duration_seconds("deliver_after", value)
    return value  # type: ignore[return-value]  # as above
