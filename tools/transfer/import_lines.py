"""Importing messages from JSON lines: a line that cannot be taken is found before anything is written.

    {"topic": "reminders", "payload": "pay", "deliver_at": "2026-11-21T09:00:00Z", "key": "order-17"}
    {"topic": "reminders", "payload_base64": "AP8=", "deliver_after": "2h", "properties": {"shop": "7"}}

    {"topic": "reminders", "payload": "pay", "deliver_after": "2h", "dedup_key": "order-17", "replace": true}

`payload` is text, stored as UTF-8; `payload_base64` stands for bytes. `deliver_at`: epoch ms or ISO 8601 with a zone;
`deliver_after`: seconds, or text such as "5m"; neither: due at once. `dedup_key`, `dedup_for` (as `deliver_after`) and
`replace`: as of `send`, not with `once`. A field of another name is refused: a misspelt
due time would mean "now". Empty lines are passed over.

Every line is checked as `send` would check it, delay policies included, before anything is written: all lines of a file
that can be read twice; else, of a pipe, those of a batch, and the batches before it stand.

What the machine refuses (a full disk) can still end it between batches, or within one. With `once`, the name of a
producer, the messages of each topic are numbered in the order of their lines: an import of the same lines under that
name stores what is missing and nothing twice.
"""

import base64
import binascii
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

from ... import Message
from ...operations.operations import Operations
from ...store.codec.body import encode_one
from ...store.duration import duration_seconds
from ...store.errors import InvalidArgument, InvalidMessage
from ...store.message import Dedup
from ...store.names import TopicName
from ..values import time_ms

FIELDS = ("topic", "payload", "payload_base64", "deliver_at", "deliver_after", "key", "properties",
          "dedup_key", "dedup_for", "replace")  # fmt: skip

_BATCH_BYTES = 32 << 20
"""A batch ends at this size too, whatever its number of messages."""


class _Read(NamedTuple):
    """A message that was read, and where it stands."""

    line: int
    fields: dict[str, Any]
    message: Message


class Import:
    """One import into an open store; the counts say how far it has come, also after an error."""

    def __init__(
        self, store: Operations, *, batch_messages: int = 5_000, allow_past: bool = False, once: str | None = None
    ) -> None:
        """`allow_past` as in `Topic.send`; `once`: name of the producer that numbers the messages."""
        self._store = store
        self._batch_messages = batch_messages
        self._allow_past = allow_past
        self._once = once
        self._limits = store.limits()
        self._longest_line = 8 * self._limits["max_message_bytes"] + (1 << 20)
        self._counts: dict[str, int] = {}
        self.messages = 0
        """Messages of the batches that are written in full."""
        self.stored_before = 0
        """How many of them an earlier import of that name had stored."""
        self.lines = 0
        """Lines up to the end of the last of those batches."""
        self.began_to = 0
        """Last line of the batch after it, if that was being written when the import ended: some may be stored."""

    @property
    def topics(self) -> int:
        return len(self._counts)

    def run(self, file: IO[bytes], progress: Callable[[], object] = lambda: None) -> None:
        """Import every line of a file; `progress` is called after each batch that is checked or written.

        Raises InvalidMessage whose field begins with `line 17`, and what sending raises.
        """
        if file.seekable():
            start = file.tell()
            for _ in self._batches(file):
                progress()
            file.seek(start)
        for batch, number in self._batches(file):
            self._write(batch, number)
            progress()

    def _batches(self, file: IO[bytes]) -> Iterator[tuple[dict[str, list[_Read]], int]]:
        """Messages by topic, each of them checked, and the number of the last line."""
        batch: dict[str, list[_Read]] = {}
        count = size = number = 0
        for number, line in self._lines(file):
            try:
                topic, found = self._message(number, line)
            except InvalidArgument as error:
                self._check_delays(batch)  # of the lines before it
                raise InvalidMessage(f"line {number}: {error.field}", error.value, error.reason) from None
            batch.setdefault(topic, []).append(found)
            count += 1
            size += len(line)
            if count == self._batch_messages or size >= _BATCH_BYTES:
                self._check_delays(batch)
                yield batch, number
                batch, count, size = {}, 0, 0
        self._check_delays(batch)
        yield batch, number

    def _check_delays(self, batch: dict[str, list[_Read]]) -> None:
        """Raise InvalidMessage for the first line that a delay policy refuses."""
        refused = []
        for topic, found in batch.items():
            refusal = first_refused(self._store, topic, [each.message for each in found])
            if refusal is not None:
                refused.append((found[refusal["at"]], refusal))
        if refused:
            first, refusal = min(refused, key=lambda each: each[0].line)
            field = "deliver_at" if first.message.deliver_after is None else "deliver_after"
            reason = f"a delay of {refusal['asked_ms']} ms is {refusal['reason']}"
            raise InvalidMessage(f"line {first.line}: {field}", first.fields[field], reason)

    def _lines(self, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
        number = 0
        while line := file.readline(self._longest_line):
            number += 1
            if len(line) == self._longest_line and not line.endswith(b"\n"):
                raise InvalidMessage(f"line {number}: line", line[:80], f"longer than {self._longest_line} bytes")
            if not line.isspace():
                yield number, line

    def _write(self, batch: dict[str, list[_Read]], number: int) -> None:
        self.began_to = number if batch else 0
        for name, found in batch.items():
            for piece in pieces_of([each.message for each in found]):
                self._send(name, piece)
        self.began_to = 0
        self.messages += sum(map(len, batch.values()))
        self.lines = max(self.lines, number)

    def _send(self, topic: str, piece: Sequence[Message]) -> None:
        first = self._counts.get(topic, 0)
        self.stored_before += self._store.send_messages(topic, piece, self._allow_past, self._once, first)
        self._counts[topic] = first + len(piece)

    def _message(self, number: int, line: bytes) -> tuple[str, _Read]:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidMessage("line", line.strip(), f"no JSON: {error}") from None
        if not isinstance(fields, dict):
            raise InvalidMessage("line", fields, "expected a JSON object")
        for name, value in fields.items():
            if name not in FIELDS:
                raise InvalidMessage(name, value, f"unknown field; expected {', '.join(FIELDS)}")
        if "topic" not in fields:
            raise InvalidMessage("topic", None, "missing")
        topic = str(TopicName.parse(fields["topic"]))
        message = Message(
            payload_of(fields),
            deliver_at=time_of(fields, "deliver_at", time_ms),
            deliver_after=time_of(fields, "deliver_after", duration_seconds),
            key=fields.get("key"),
            properties=fields.get("properties"),
            dedup_key=fields.get("dedup_key"),
            dedup_for=time_of(fields, "dedup_for", duration_seconds),
            replace=fields.get("replace", False),
        )
        if type(message.replace) is not bool:
            raise InvalidMessage("replace", message.replace, "expected true or false")
        Dedup.checked(message.dedup_key, message.dedup_for, message.replace, InvalidMessage)
        if self._once is not None and message.dedup_key is not None:
            raise InvalidMessage("dedup_key", message.dedup_key, "not with --once: either says what is stored once")
        encode_one(message, self._limits["now_ms"], self._limits["max_message_bytes"], allow_past=self._allow_past)
        return topic, _Read(number, fields, message)


def payload_of(fields: Mapping[str, Any], name: str = "payload") -> bytes:
    """The bytes that are text in one field, or base64 in another. Raises InvalidMessage."""
    text, encoded = fields.get(name), fields.get(f"{name}_base64")
    if (text is None) == (encoded is None):
        raise InvalidMessage(name, text, f"expected one of {name} (text) and {name}_base64")
    if text is not None:
        if not isinstance(text, str):
            raise InvalidMessage(name, text, "expected text; put other JSON into a string")
        try:
            return text.encode()
        except UnicodeEncodeError:
            raise InvalidMessage(name, text, "a lone surrogate has no UTF-8 form") from None
    try:
        return base64.b64decode(encoded, validate=True)  # type: ignore[arg-type]  # what is no str is refused by it
    except (binascii.Error, TypeError, ValueError) as error:
        raise InvalidMessage(f"{name}_base64", encoded, f"no base64: {error}") from None


def time_of(fields: Mapping[str, Any], name: str, read: Callable[[str, str], float]) -> Any:
    """Text as it is read; whatever else it is, it is checked as `send` checks it."""
    value = fields.get(name)
    return read(name, value) if isinstance(value, str) else value


_PIECE_BYTES = 768 << 10
"""The most in one request: a socket takes lines of 1 MiB and the largest message."""

_DELAYS = 10_000


def first_refused(store: Operations, topic: str, messages: Sequence[Message]) -> dict[str, Any] | None:
    """The first message whose delay a policy refuses: "at", its place, "asked_ms", "reason"; None: there is none."""
    delayed = [at for at, each in enumerate(messages) if (each.deliver_at, each.deliver_after) != (None, None)]
    for start in range(0, len(delayed), _DELAYS):
        places = delayed[start : start + _DELAYS]
        delays = [[messages[at].deliver_at, messages[at].deliver_after] for at in places]
        refused = store.check_delays(topic, delays)
        if refused is not None:
            return {**refused, "at": places[refused["at"]]}
    return None


def pieces_of(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Divide messages into lists that `send_messages` takes, a request's worth each."""
    piece: list[Message] = []
    size = 0
    for message in messages:
        texts = (
            message.key or "",
            message.dedup_key or "",
            *(text for pair in (message.properties or {}).items() for text in pair),
        )
        takes = 128 + len(message.payload) * 4 // 3 + 12 * sum(map(len, texts))  # JSON escapes a character by 12 bytes
        if piece and size + takes > _PIECE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(message)
        size += takes
    if piece:
        yield piece
