"""Numbers of named producers: which are stored, and which are being stored.

The numbers are rows of the group that stores the messages, so both are there after a crash, or neither; in memory they
are one bitmap a producer. A call claims its numbers before it sends, so that no other call stores them meanwhile. A
call that ends without all of them stored (a full disk, an interrupt) leaves its claim behind, which is revoked before
one of these numbers is sent again.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from pyroaring import BitMap64

from duelog.partitions import producer_numbers
from duelog.partitions.producer_numbers import BLOCK_BITS
from duelog.store.codec import format as fmt
from duelog.store.codec.bits import BitChange
from duelog.store.codec.format import Table
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from duelog.store.errors import BrokenInvariant, DuelogError, InvalidArgument
from duelog.store.log import catalog
from duelog.store.position import MessageId
from duelog.store.wal.write_batch import GroupWriter, WriteBatch

from .topic_state import TopicState

T = TypeVar("T")

MAX_SEQUENCE = 2**62

MOST_NUMBERS = 1 << BLOCK_BITS
"""Numbers of one message that are each recorded."""

_COMPRESS_EVERY = 1 << BLOCK_BITS
"""Numbers stored after which the bitmap in memory is brought to runs."""


def _counting(first: int, last: int) -> Sequence[int]:
    """Which numbers of a message are recorded."""
    return range(first, last + 1) if last - first < MOST_NUMBERS else (first, last)


class Claim:
    """The numbers that one call is storing, ascending; `numbers` are those that are not stored yet."""

    def __init__(self) -> None:
        self.first = 0
        self.numbers = BitMap64()
        self.calling = threading.Lock()
        """Held while the call lasts; what it has left to write may go on, until the claim is revoked."""
        self.revoked = False


class ProducerState:
    """Numbers that one producer has stored and is storing. Thread-safe; a leaf lock, but `claim` reads and waits."""

    def __init__(self, stored: BitMap64, main: Environment, writer: GroupWriter, topic_id: int, name: str) -> None:
        """`stored` has the numbers that are stored; the state keeps and changes it."""
        self._main = main
        self._writer = writer
        self._topic_id = topic_id
        self._name = name
        self._lock = threading.Lock()
        self._reconciling = threading.Lock()
        self._claims: list[Claim] = []
        self._compress_in = _COMPRESS_EVERY
        self._stored = stored

    @property
    def last(self) -> int:
        with self._lock:
            return _last(self._stored)

    def claim(self, claim: Claim, first: int | None, count: int) -> None:
        """Claim those of `count` numbers from `first` on that are not stored; None: above all that were used.

        Waits while another call is sending one of them. REQUIRES: the claim's `calling` is held. Raises
        InvalidArgument, and StoreFailed where an earlier call's commit is in doubt.
        """
        while True:
            with self._lock:
                start = self._next() if first is None else first
                if start > MAX_SEQUENCE - count:
                    raise InvalidArgument("sequence_id", start, f"expected an int from 0 to {MAX_SEQUENCE}")
                wanted = self._unstored(range(start, start + count))
                other = self._take(claim, wanted)
                if other is None:
                    claim.first = start
                    return
            self._wait_for(other)

    def claim_range(self, claim: Claim, first: int, last: int) -> bool | None:
        """Add to a claim those of a message's numbers that are not stored; None: all are, False: all are in the claim.

        Of more than `MOST_NUMBERS` only the first and the last count. Waits and raises as `claim`.
        """
        while True:
            with self._lock:
                if first == last:  # as most are: without bitmaps for what is there
                    wanted = BitMap64() if first in self._stored else BitMap64((first,))
                    is_mine = first in claim.numbers
                else:
                    wanted = self._unstored(_counting(first, last))
                    is_mine = not wanted - claim.numbers
                if not wanted:
                    return None
                if is_mine:
                    return False
                other = self._take(claim, wanted)
                if other is None:
                    return True
            self._wait_for(other)

    def has(self, first: int, last: int) -> bool:
        with self._lock:
            return not self._unstored(_counting(first, last))

    def _unstored(self, numbers: Sequence[int]) -> BitMap64:
        """Those of some numbers, ascending, that are not stored. REQUIRES: the lock."""
        return BitMap64(numbers) - self._stored

    def _take(self, claim: Claim, wanted: BitMap64) -> Claim | None:
        """Add numbers to a claim; the claim that has one of them already, with nothing done. REQUIRES: the lock."""
        for other in self._claims:
            if other is not claim and not other.numbers.isdisjoint(wanted):
                return other
        if wanted:
            if claim not in self._claims:
                self._claims.append(claim)
            claim.numbers |= wanted
        return None

    def _wait_for(self, other: Claim) -> None:
        with other.calling:  # its call has ended
            pass
        self._reconcile()

    def _next(self) -> int:
        used = [int(each.numbers.max()) for each in self._claims if each.numbers]
        return max(_last(self._stored), *used, -1) + 1

    def write(self, group: WriteBatch, claim: Claim, sequences: Iterable[int]) -> None:
        """Record claimed numbers in the group that stores their messages. A unit of work: may run again.

        Invariant: a number is stored while it is claimed, and is not stored already.
        """
        numbers = BitMap64(sequences)
        with self._lock:
            if claim.revoked:  # the caller was interrupted; a thread that works for it learns of it here
                raise DuelogError(f"the call of producer {self._name!r} has ended")
            if not (numbers.issubset(claim.numbers) and numbers.isdisjoint(self._stored)):
                raise BrokenInvariant(f"producer {self._name!r}: {list(numbers)[:10]} are not claimed, or are stored")
        for key, block in producer_numbers.blocks(self._topic_id, self._name, numbers):
            group.main.change_bits(key, BitChange(block, BitMap64()))
        group.after_commit(lambda: self._committed(claim, numbers))

    def write_ids(
        self, group: WriteBatch, numbers: Sequence[int], ids: Sequence[MessageId], starts: Mapping[int, int]
    ) -> None:
        """Record the ids of messages by their numbers, ascending, in the group that stores them. A unit of work."""
        for key, fields in producer_numbers.id_records(self._topic_id, self._name, numbers, ids, starts):
            group.main.put(key, fields)

    def ids(self, first: int, count: int) -> list[MessageId | None]:
        """The ids that `count` numbers from `first` on are stored under, as far as they are known."""
        with self._main.read() as raw:
            return producer_numbers.find_ids(raw, self._topic_id, self._name, first, count)

    def _committed(self, claim: Claim, numbers: BitMap64) -> None:
        with self._lock:
            self._stored |= numbers
            self._compress_in -= len(numbers)
            if self._compress_in <= 0:
                self._stored.run_optimize()
                self._compress_in = _COMPRESS_EVERY
            claim.numbers -= numbers
            if not claim.numbers and claim in self._claims:
                self._claims.remove(claim)

    def drop(self, claim: Claim) -> None:
        """Undo what is left of a claim, of which nothing is being written."""
        with self._lock:
            if claim in self._claims:
                self._claims.remove(claim)

    def _reconcile(self) -> None:
        """Learn what became of the numbers of calls that ended without all of them stored."""
        with self._reconciling:
            with self._lock:
                left = [each for each in self._claims if not each.calling.locked()]
                for each in left:
                    each.revoked = True
            if not left:
                return
            self._writer.wait_for_groups()
            with self._lock:
                self._claims = [each for each in self._claims if each not in left]


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

    def __init__(self, main: Environment, writer: GroupWriter | None) -> None:
        self._main = main
        self._writer = writer
        self.whole_store = _WholeStore()

    def of(self, topic: Numbered, name: str) -> ProducerState:
        """Return the state of a producer; all that send under one name share it. O(blocks) at first."""
        known: ProducerState | None = topic.producers.get(name)
        if known is None:
            if self._writer is None:
                raise BrokenInvariant("a read-only store is written to")
            with topic.producers_lock:
                known = topic.producers.get(name)
                if known is None:
                    stored = self._stored(topic.topic_id, name)
                    known = topic.producers[name] = ProducerState(
                        stored, self._main, self._writer, topic.topic_id, name
                    )
        return known

    def once(self, name: str, number: int, store: Callable[[Callable[[WriteBatch], None]], T]) -> T | None:
        """Do what `store` does under a number of the whole store; None: it is stored already, and nothing is done.

        `store` is given what writes the number, for its group.
        """
        claim, producer = Claim(), self.of(self.whole_store, name)
        with claim.calling:
            if producer.claim_range(claim, number, number) is None:
                return None
            try:
                return store(lambda group: producer.write(group, claim, claim.numbers))
            except Exception:
                producer.drop(claim)
                raise

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
        return _last(self._stored(topic.topic_id, name)) if self._writer is None else self.of(topic, name).last

    def _stored(self, topic_id: int, name: str) -> BitMap64:
        with self._main.read() as raw:
            return producer_numbers.read(raw, topic_id, name)


def _last(numbers: BitMap64) -> int:
    return int(numbers.max()) if numbers else -1
