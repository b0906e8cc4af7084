"""Numbers of named producers: which are stored.

The numbers are rows of the group that stores the messages, so both are there after a crash, or neither; in memory they
are one bitmap a producer. A call looks which of its numbers are stored, and sends the messages of the others. The
leader of the group looks once more: it runs alone, so of several calls with one number the first stores it, and each of
the others looks again.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from pyroaring import BitMap64

from duelog.partitions import producer_numbers
from duelog.partitions.producer_numbers import BLOCK_BITS
from duelog.store.codec import format as fmt
from duelog.store.codec.bits import BitChange
from duelog.store.codec.format import Table
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from duelog.store.errors import BrokenInvariant, InvalidArgument
from duelog.store.log import catalog
from duelog.store.position import MessageId
from duelog.store.wal.write_batch import WriteBatch

from .topic_state import TopicState

T = TypeVar("T")

MAX_SEQUENCE = 2**62

_NONE = BitMap64()

MOST_NUMBERS = 1 << BLOCK_BITS
"""Numbers of one message that are each recorded."""

_COMPRESS_EVERY = 1 << BLOCK_BITS
"""Numbers stored after which the bitmap in memory is brought to runs."""


class NumbersStored(Exception):
    """A number was stored between the look and the group: look again."""


class ProducerState:
    """Numbers that one producer has stored. Thread-safe; a leaf lock, but `ids` reads."""

    def __init__(self, stored: BitMap64, main: Environment, topic_id: int, name: str) -> None:
        """`stored` has the numbers that are stored; the state keeps and changes it."""
        self._main = main
        self._topic_id = topic_id
        self._name = name
        self._lock = threading.Lock()
        self._compress_in = _COMPRESS_EVERY
        self._stored = stored

    @property
    def last(self) -> int:
        with self._lock:
            return _last(self._stored)

    def unstored(self, first: int, last: int) -> BitMap64:
        """A message's numbers that are not stored; of more than `MOST_NUMBERS` the first and the last count."""
        with self._lock:
            if first == last:  # as most are
                found = BitMap64()
                if first not in self._stored:
                    found.add(first)
                return found
            few = last - first < MOST_NUMBERS
            return BitMap64(range(first, last + 1) if few else (first, last)) - self._stored

    def unstored_of(self, first: int, count: int) -> BitMap64:
        """Those of `count` messages' numbers from `first` on that are not stored. Raises InvalidArgument."""
        check_sequence(first, count)
        with self._lock:
            return BitMap64(range(first, first + count)) - self._stored

    def write(self, group: WriteBatch, sequences: Iterable[int]) -> None:
        """Record numbers in the group that stores their messages. A unit of work. Raises NumbersStored.

        sequences: of a BitMap64 that nobody changes any more.
        """
        staged = group.stage(self, _StagedNumbers)
        numbers = sequences if isinstance(sequences, BitMap64) else BitMap64(sequences)
        with self._lock:
            is_new = numbers.isdisjoint(self._stored)
        if not (is_new and numbers.isdisjoint(staged.numbers)):
            raise NumbersStored(self._name)
        staged.numbers = staged.numbers | numbers if staged.numbers else numbers
        for key, block in producer_numbers.blocks(self._topic_id, self._name, numbers):
            group.change_bits(key, BitChange(block, _NONE))

    def following(self, group: WriteBatch, count: int) -> range:
        """The `count` numbers after the highest that is stored, or that the group stores. Raises InvalidArgument."""
        staged = group.stage(self, _StagedNumbers)
        first = max(self.last, _last(staged.numbers)) + 1
        check_sequence(first, count)
        return range(first, first + count)

    def write_ids(
        self, group: WriteBatch, numbers: Sequence[int], ids: Sequence[MessageId], starts: Mapping[int, int]
    ) -> None:
        """Record the ids of messages by their numbers, ascending, in the group that stores them. A unit of work."""
        for key, fields in producer_numbers.id_records(self._topic_id, self._name, numbers, ids, starts):
            group.put(key, fields)

    def ids(self, first: int, count: int) -> list[MessageId | None]:
        """The ids that `count` numbers from `first` on are stored under, as far as they are known."""
        with self._main.read() as raw:
            return producer_numbers.find_ids(raw, self._topic_id, self._name, first, count)

    def stored(self, numbers: BitMap64) -> None:
        """A group with these numbers is durable."""
        with self._lock:
            count = len(numbers)
            if count == 1:  # as mostly, and quicker
                self._stored.add(numbers.min())
            else:
                self._stored |= numbers
            self._compress_in -= count
            if self._compress_in <= 0:
                self._stored.run_optimize()
                self._compress_in = _COMPRESS_EVERY


class _StagedNumbers:
    """The numbers of a producer that a group stores. For the leader."""

    def __init__(self, producer: ProducerState) -> None:
        self._producer = producer
        self.numbers = _NONE

    def committed(self) -> None:
        self._producer.stored(self.numbers)


def check_sequence(first: int, count: int) -> None:
    """Raise InvalidArgument where `count` numbers from `first` on are too high."""
    if first > MAX_SEQUENCE - count:
        raise InvalidArgument("sequence_id", first, f"expected an int from 0 to {MAX_SEQUENCE}")


class Numbered(Protocol):
    """Something whose producers number what they do: a topic, by its id."""

    producers: dict[str, Any]
    producers_lock: threading.Lock

    @property
    def topic_id(self) -> int: ...


class _WholeStore:
    """The store, in the place of a topic: of connections that number their transactions."""

    topic_id = 0

    def __init__(self) -> None:
        self.producers: dict[str, Any] = {}
        self.producers_lock = threading.Lock()


class Producers:
    """The named producers of an open store. Thread-safe."""

    def __init__(self, main: Environment) -> None:
        self._main = main
        self.whole_store = _WholeStore()

    def of(self, topic: Numbered, name: str) -> ProducerState:
        """Return the state of a producer; all that send under one name share it. O(blocks) at first."""
        known: ProducerState | None = topic.producers.get(name)
        if known is None:
            if self._main.read_only:
                raise BrokenInvariant("a read-only store is written to")
            with topic.producers_lock:
                known = topic.producers.get(name)
                if known is None:
                    stored = self._stored(topic.topic_id, name)
                    known = topic.producers[name] = ProducerState(stored, self._main, topic.topic_id, name)
        return known

    def once(self, name: str, number: int, store: Callable[[Callable[[WriteBatch], None]], T]) -> T | None:
        """Do what `store` does under a number of the whole store; None: it is stored already, and nothing is done.

        `store` is given what writes the number, for its group.
        """
        producer = self.of(self.whole_store, name)
        if producer.unstored(number, number):
            with suppress(NumbersStored):
                return store(lambda group: producer.write(group, (number,)))
        return None

    def stored(self) -> set[tuple[int, str]]:
        """(topic id, name) of all that have numbers. O(blocks)."""
        keys = (key for page in catalog.pages(self._main, fmt.prefix(Table.SEQUENCE)) for key, _ in page)
        return {producer_numbers.split_key(key)[:2] for key in keys}

    def forget(self, topic: Numbered, names: Iterable[str]) -> None:
        """Forget the numbers of producers that send no more, whose ids are not kept."""
        forgotten = list(names)
        with topic.producers_lock:
            for name in forgotten:
                topic.producers.pop(name, None)

        def work(transaction: Transaction) -> None:
            for name in forgotten:
                producer_numbers.remove(transaction, topic.topic_id, name)

        self._main.write(work, alone=True, makes_space=True)  # alone: none of their rows is unapplied

    def last(self, topic: TopicState, name: str) -> int:
        return _last(self._stored(topic.topic_id, name)) if self._main.read_only else self.of(topic, name).last

    def _stored(self, topic_id: int, name: str) -> BitMap64:
        with self._main.read() as raw:
            return producer_numbers.read(raw, topic_id, name)


def _last(numbers: BitMap64) -> int:
    return int(numbers.max()) if numbers else -1
