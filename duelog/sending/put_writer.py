"""The writer of the outbox: messages of any topics and their producers' numbers as one group.

A message with numbers that are all stored is a duplicate: neither it nor anything else is written. Else its numbers are
rows of the group that stores it, so both are there after a crash, or neither. Where another call stores one of them
first, which the leader of the group sees (topics/producer_state.py), all is looked at again.

Messages with deduplication keys are sent as a batch of such, with those that were put in around them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from pyroaring import BitMap64

from duelog.store.codec.bodies import Bodies
from duelog.store.codec.body import EncodedBatch
from duelog.store.errors import QuotaExceeded, UnknownTopic
from duelog.store.held import Held
from duelog.store.message import Dedup
from duelog.store.position import MessageId
from duelog.store.wal.write_batch import WriteBatch

from ..topics.producer_state import NumbersStored, Producers, ProducerState
from ..topics.topic_state import TopicState
from .delay_policies import DelayPolicies
from .keyed_messages import KeyedMessages
from .log_append import AddressedBatch, PlaceAlso, Stored
from .outbox import DUPLICATE, Numbers, Outgoing, PutOutcome
from .sender import Sender

_FEW = 6
"""So many messages without keys are appended one by one, which a batch is too much work for."""


class _Group:
    """Messages that are written together, as places in the list given."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.owners: list[int] = []
        """Whose each of `rows` is, as a place in `topics`."""
        self.topics: dict[TopicState, int] = {}
        self.repeated: list[int] = []
        """Messages with numbers of others of the group: duplicates if these are stored."""
        self.numbers: dict[ProducerState, BitMap64] = {}
        self.dedups: dict[int, Dedup] = {}
        """By place in `rows`."""

    def write_numbers(self, batch: WriteBatch, _: Stored | None = None) -> None:
        """Record the numbers, as a unit of work."""
        for producer, numbers in self.numbers.items():
            producer.write(batch, numbers)


@dataclass(eq=False, repr=False)
class PutWriter:
    """Writes the messages of an outbox. For its thread."""

    _sender: Sender
    _policies: DelayPolicies
    _producers: Producers
    _keyed: KeyedMessages

    def write(self, items: Sequence[Outgoing], *, again: bool = True) -> Sequence[PutOutcome]:
        """Store the messages not stored yet, in one group of the write-ahead log; returns the outcome of each.

        again: where a topic is deleted meanwhile, each topic is written alone, and that one is created again.
        """
        if len(items) == 1 and items[0].dedup is None:
            return [self._write_one(items[0], items[0].numbers, again=again)]
        outcomes: list[PutOutcome | None] = [None] * len(items)
        over_quota = False
        group = self._gather(items, outcomes)
        if group.rows:
            try:
                self._write_group(items, group, outcomes)
                for row in group.repeated:
                    outcomes[row] = DUPLICATE
            except NumbersStored:
                return self.write(items, again=again)
            except Exception as error:
                over_quota = isinstance(error, QuotaExceeded) and len(items) > 1
                if not (over_quota or (again and isinstance(error, UnknownTopic))):
                    for row in (*group.rows, *group.repeated):
                        outcomes[row] = error
        if over_quota:  # which of them has place is found by halves, in order
            middle = len(items) // 2
            return [*self.write(items[:middle], again=again), *self.write(items[middle:], again=again)]
        undecided = [row for row, outcome in enumerate(outcomes) if outcome is None]
        if undecided:
            for state in group.topics:
                rows = [row for row in undecided if items[row].name == state.name]
                for row, outcome in zip(rows, self.write([items[row] for row in rows], again=False), strict=True):
                    outcomes[row] = outcome
        return outcomes  # type: ignore[return-value]

    def _write_one(self, item: Outgoing, numbers: Numbers | None, *, again: bool) -> PutOutcome:
        """Store one message, without the overhead of a batch."""
        try:
            topic = item.topic(item.now_ms)
            also: PlaceAlso | None = None
            if numbers is not None:
                producer = self._producers.of(topic, numbers.producer)
                if not (wanted := producer.unstored(numbers.first, numbers.last)):
                    return DUPLICATE

                def also(group: WriteBatch, *_: int) -> None:
                    producer.write(group, wanted)

            message_id = self._sender.send_one(topic, item.due_ms, item.body, item.now_ms, also)
            self._policies.stored(item.name, item.overridden)
        except UnknownTopic as error:
            return self._write_one(item, numbers, again=False) if again else error
        except NumbersStored:
            return self._write_one(item, numbers, again=again)
        except Exception as error:
            return error
        return message_id

    def _gather(self, items: Sequence[Outgoing], outcomes: list[PutOutcome | None]) -> _Group:
        """Gather the messages to write, and their numbers; the others get their outcome."""
        group = _Group()
        places: dict[Callable[[int], TopicState], tuple[int, TopicState] | Exception] = {}
        for row, item in enumerate(items):
            place = places.get(item.topic)
            if place is None:
                try:
                    topic = item.topic(item.now_ms)
                    place = group.topics.setdefault(topic, len(group.topics)), topic
                except Exception as error:
                    place = error
                places[item.topic] = place
            if isinstance(place, Exception):
                outcomes[row] = place
                continue
            owner, topic = place
            if item.numbers is not None:
                try:
                    fresh = self._take(topic, item.numbers, group)
                except Exception as error:
                    outcomes[row] = error
                    continue
                if fresh is None:
                    outcomes[row] = DUPLICATE
                    continue
                if not fresh:
                    group.repeated.append(row)
                    continue
            if item.dedup is not None:
                group.dedups[len(group.rows)] = item.dedup
            group.rows.append(row)
            group.owners.append(owner)
        return group

    def _take(self, topic: TopicState, numbers: Numbers, group: _Group) -> bool | None:
        """Add a message's numbers to the group's; None: all are stored, False: all are in the group."""
        producer = self._producers.of(topic, numbers.producer)
        wanted = producer.unstored(numbers.first, numbers.last)
        if not wanted:
            return None
        taken = group.numbers.setdefault(producer, wanted)
        if taken is wanted:
            return True
        if wanted.issubset(taken):
            return False
        taken |= wanted
        return True

    def _write_group(self, items: Sequence[Outgoing], group: _Group, outcomes: list[PutOutcome | None]) -> None:
        now_ms = items[-1].now_ms
        written = items if len(group.rows) == len(items) else [items[row] for row in group.rows]
        if len(written) <= _FEW and not (group.dedups or self._policies.limits_pending):
            for row, outcome in zip(group.rows, self._write_few(written, group), strict=True):
                outcomes[row] = outcome
            return
        dues = np.array([item.due_ms for item in written], dtype=np.int64)
        overridden = np.array([item.overridden for item in written])
        batch = EncodedBatch(dues, dues > now_ms, Bodies([item.body for item in written]), overridden)
        owners = np.array(group.owners, dtype=np.intp) if len(group.topics) > 1 else None
        also = group.write_numbers if group.numbers else None
        messages = AddressedBatch(list(group.topics), owners, batch, now_ms)
        if group.dedups:
            batch.dedups = group.dedups
            ids = self._keyed.send_all(messages, also, policies=False)
        else:
            ids = self._sender.send_all(messages, also)
        for row, message_id in zip(group.rows, ids.to_list(), strict=True):
            outcomes[row] = message_id

    def _write_few(self, items: Sequence[Outgoing], group: _Group) -> list[MessageId]:
        """Store messages without the overhead of a batch, in one group; their ids."""
        topics, sender = list(group.topics), self._sender
        with Held() as held:
            works = [
                sender.sending_one(held, topics[owner], item.due_ms, item.body, item.now_ms)
                for item, owner in zip(items, group.owners, strict=True)
            ]

            def work(batch: WriteBatch) -> list[MessageId]:
                ids = [MessageId(*each(batch)) for each in works]
                group.write_numbers(batch)
                return ids

            ids = sender.write(work)
        for item in items:
            self._policies.stored(item.name, item.overridden)
        return ids
