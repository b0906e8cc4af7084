"""Producer: a named sender whose messages are numbered, and stored once however often they are sent."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from pyroaring import BitMap64

from duelog.store import producers
from duelog.store.errors import InvalidArgument
from duelog.store.message import Message
from duelog.store.position import MessageId
from duelog.store.producers import ProducerRecord
from duelog.store.transaction import Transaction

from .engine import Engine
from .topic_state import TopicState

if TYPE_CHECKING:
    from .topic import Topic

_MAX_SEQUENCE = 2**62


class ProducerState:
    """What a producer has stored, is storing, and may not have stored. Thread-safe; leaf lock.

    Invariant: the watermark is below every number that is unsure.
    """

    def __init__(self, topic_id: int, name: str, record: ProducerRecord) -> None:
        self._topic_id = topic_id
        self._name = name
        self._watermark = record.watermark
        self._above = BitMap64(record.above)
        self._unsure = BitMap64()
        self._lock = threading.Lock()

    @property
    def last(self) -> int:
        """The highest number stored; -1: none."""
        with self._lock:
            return int(self._above.max()) if self._above else self._watermark

    @property
    def watermark(self) -> int:
        """Every number up to it that was sent is stored."""
        return self._watermark

    def begin(self, sequences: Sequence[int]) -> list[bool]:
        """Which of the numbers, ascending, are to be stored. Raises InvalidArgument: one is being sent just now."""
        with self._lock:
            wanted = [number > self._watermark and number not in self._above for number in sequences]
            numbers = BitMap64(number for number, store in zip(sequences, wanted, strict=True) if store)
            self._unsure |= numbers
            return wanted

    def next(self) -> int:
        """A number above every one that was used."""
        with self._lock:
            used = [self._watermark, *(int(numbers.max()) for numbers in (self._above, self._unsure) if numbers)]
            return max(used) + 1

    def write(self, transaction: Transaction, sequences: Sequence[int]) -> None:
        """Record the numbers in the transaction that stores their messages. A unit of work: may run again."""
        numbers = BitMap64(sequences)
        producers.merge(transaction, self._topic_id, self._name, ProducerRecord(self._watermark, numbers))
        transaction.after_commit(lambda: self._stored(numbers))

    def _stored(self, numbers: BitMap64) -> None:
        with self._lock:
            self._above |= numbers
            self._unsure -= numbers
            # A number that failed, or is on its way, holds the watermark: it may be sent again.
            limit = int(self._unsure.min()) if self._unsure else _MAX_SEQUENCE + 1
            passed = [int(number) for number in self._above if number < limit]
            if passed:
                self._watermark = max(self._watermark, passed[-1])
                self._above.remove_range(0, self._watermark + 1)


class Producer:
    """A named sender of one topic. Made by Topic.producer; thread-safe.

    Every message has a sequence number, ascending; one that is stored already is not stored again, also
    after a crash between the commit and the answer, and also when its due time was relative and would be
    another one now. So a program that does not know whether a send succeeded sends it again. A number below the
    last that was left out may be taken for stored.
    """

    def __init__(self, engine: Engine, topic: Topic, state: TopicState, producer: ProducerState, name: str) -> None:
        self._engine = engine
        self._topic = topic
        self._state = state
        self._producer = producer
        self.name = name

    @property
    def last_sequence_id(self) -> int:
        """The highest sequence number stored, -1 when there is none."""
        return self._producer.last

    def send(self, message: Message, *, sequence_id: int | None = None) -> MessageId | None:
        """Append one message; its id once it is durable, None when that number is stored already.

        sequence_id None: one above the last. Raises as Topic.send; then the number may be sent again.
        """
        return self.send_batch([message], first_sequence_id=sequence_id)[0]

    def send_batch(
        self, messages: Iterable[Message], *, first_sequence_id: int | None = None
    ) -> list[MessageId | None]:
        """Append messages numbered from `first_sequence_id` on; an id each, None where it is stored already."""
        batch = list(messages)
        if not batch:
            return []
        first = self._producer.next() if first_sequence_id is None else first_sequence_id
        if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first <= _MAX_SEQUENCE - len(batch):
            raise InvalidArgument("sequence_id", first, f"expected an int from 0 to {_MAX_SEQUENCE}")
        sequences = range(first, first + len(batch))
        encoded, now_ms = self._topic.encode(batch)  # all are checked before a number is taken
        wanted = self._producer.begin(sequences)
        rows = [row for row, store in enumerate(wanted) if store]
        ids: list[MessageId | None] = [None] * len(batch)
        if rows:
            numbers = [sequences[row] for row in rows]
            part = encoded if len(rows) == len(batch) else encoded.rows(np.array(rows))

            def also(transaction: Transaction, places: Sequence[int]) -> None:
                self._producer.write(transaction, [numbers[place] for place in places])

            for row, message_id in zip(rows, self._engine.sender.send(self._state, part, now_ms, also), strict=True):
                ids[row] = message_id
        return ids


def load_producer(engine: Engine, topic_id: int, name: str) -> ProducerState:
    """What the main environment and every partition know of a producer. O(partitions)."""
    with engine.main.read() as raw:
        record = producers.read(raw, topic_id, name)
    for partition in engine.partitions.held():
        with partition.environment.read() as raw:
            record = record.merged(producers.read(raw, topic_id, name))
    return ProducerState(topic_id, name, record)
