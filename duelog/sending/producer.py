"""Producer: a named sender whose messages are numbered, and stored once however often they are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import numpy as np

from duelog.store.codec.body import EncodedBatch
from duelog.store.errors import InvalidMessage, checked_int, checked_list
from duelog.store.message import Message
from duelog.store.position import FoundId, MessageId
from duelog.store.wal.write_batch import WriteBatch

from ..topics.producer_state import MAX_SEQUENCE, NumbersStored, ProducerState
from ..topics.topic_state import TopicState
from .log_append import Stored
from .topic_sender import TopicSender


class Producer:
    """A named sender of one topic. Made by Topic.producer; thread-safe.

    Every message has a sequence number. One that is stored already is not stored again, however it is sent again:
    alone or in another batch, in any order, after a crash between the commit and the answer, and also when its due
    time was relative and would be another one now. So a program that does not know whether a send succeeded sends it
    again, and is given the id of the message that is stored. Numbers may be left out and sent later; each that is left
    out costs some bytes for good.

    Ids are recorded with the messages, in the same group: of one sent alone some 150 bytes in the main environment, of
    those of a batch that go into one log side by side as much for all of them. They are kept as long as what they are
    of (a partition, a ledger), and some time after that.
    """

    def __init__(
        self, sender: TopicSender, topic: TopicState, producer: ProducerState, name: str, settle: Callable[[], None]
    ) -> None:
        """`settle` waits for the copy, if need be."""
        self._sender = sender
        self._settle = settle
        self._topic = topic
        self._producer = producer
        self.name = name

    @property
    def last_sequence_id(self) -> int:
        """The highest sequence number stored, -1 when there is none.

        Lower ones may be missing: those that were never sent, and those of a batch that a crash broke off. A program
        that goes on after a crash sends again from the first number on that it has no answer for.
        """
        return self._producer.last

    def send(self, message: Message, *, sequence_id: int | None = None, allow_past: bool = False) -> MessageId | None:
        """Append one message; its id once it is durable. Of a number that is stored already the id it is stored under.

        None: it is stored, and its id is not known any more, since it was delivered and deleted, or never was: it was
        stored by `Topic.put` or by an earlier version. sequence_id None: one above the last. Raises as Topic.send; then
        the number may be sent again. StoreFailed for a number whose commit is in doubt, until the store is opened
        again.
        """
        return self.send_batch([message], first_sequence_id=sequence_id, allow_past=allow_past)[0]

    def send_batch(
        self, messages: Iterable[Message], *, first_sequence_id: int | None = None, allow_past: bool = False
    ) -> list[MessageId | None]:
        """Append messages numbered from `first_sequence_id` on; returns for each what `send` would."""
        batch = checked_list("messages", messages, "a sequence of Message")
        if not batch:
            return []
        first = first_sequence_id
        if first is not None:
            first = checked_int("sequence_id", first, 0, f"an int from 0 to {MAX_SEQUENCE}")
        encoded, now_ms = self._sender.encode(batch, allow_past=allow_past)
        if encoded.dedups:
            place, dedup = next(iter(encoded.dedups.items()))
            reason = "not of a producer, whose numbers say what is stored once"
            raise InvalidMessage(f"messages[{place}].dedup_key", dedup.key, reason)
        return list(self.send_encoded(encoded, now_ms, first, keep_ids=True))

    def send_encoded(
        self, encoded: EncodedBatch, now_ms: int, first: int | None, *, keep_ids: bool
    ) -> Sequence[MessageId | None]:
        """Append a checked batch. Without `keep_ids` what is sent again is known to be stored, not under which id."""
        while True:
            with suppress(NumbersStored):
                ids = self._append_unstored(encoded, now_ms, first, keep_ids=keep_ids)
                self._settle()
                return ids

    def _append_unstored(
        self, encoded: EncodedBatch, now_ms: int, first: int | None, *, keep_ids: bool
    ) -> Sequence[MessageId | None]:
        if first is None:
            return self._append(encoded, now_ms, None, keep_ids=keep_ids)
        unstored = self._producer.unstored_of(first, len(encoded))
        if len(unstored) == len(encoded):
            return self._append(encoded, now_ms, range(first, first + len(encoded)), keep_ids=keep_ids)
        ids: list[MessageId | None] = [known and FoundId(*known) for known in self._producer.ids(first, len(encoded))]
        if unstored:
            rows = [number - first for number in unstored]
            new_ids = self._append(encoded.rows(np.array(rows)), now_ms, list(unstored), keep_ids=keep_ids)
            for row, message_id in zip(rows, new_ids, strict=True):
                ids[row] = message_id
        return ids

    def _append(
        self, part: EncodedBatch, now_ms: int, numbers: Sequence[int] | None, *, keep_ids: bool
    ) -> Sequence[MessageId]:
        """Append messages under numbers, None: those after the last. Raises NumbersStored."""
        # Not to what is stored already, by other policies perhaps; nor here to what has keys: they are applied to those
        # that no message of the store answers.
        if not part.dedups:
            self._sender.apply_policies(part, now_ms)

        def also(group: WriteBatch, places: range, stored: Stored) -> None:
            producer = self._producer
            wanted = numbers[places.start : places.stop] if numbers else producer.following(group, len(places))
            producer.write(group, wanted)
            if keep_ids:
                producer.write_ids(group, wanted, stored.ids, stored.starts)

        return self._sender.append(self._topic, part, now_ms, also)
