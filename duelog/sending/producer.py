"""Producer: a named sender whose messages are numbered, and stored once however often they are sent.

The numbers are rows of the group that stores the messages, so both are there after a crash, or neither; in memory they
are one bitmap. A call claims its numbers before it sends, so that no other call stores them meanwhile. A call that ends
without all of them stored (a full disk, an interrupt) leaves its claim behind, which is revoked before one of these
numbers is sent again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np
from pyroaring import BitMap64

from duelog.partitions import producer_numbers as producers
from duelog.partitions.partition_set import PartitionSet
from duelog.store.env.environment import Environment
from duelog.store.errors import BrokenInvariant, DuelogError, InvalidArgument
from duelog.store.message import Message
from duelog.store.position import MessageId
from duelog.store.wal.write_batch import WriteBatch

from ..topics.topic_state import TopicState
from .topic_sender import TopicSender
from .wal_writer import WalWriter

_MAX_SEQUENCE = 2**62

_COMPRESS_EVERY = 1 << producers.BLOCK_BITS
"""Numbers stored after which the bitmap in memory is brought to runs."""


class Claim:
    """The numbers that one call is storing, ascending; `numbers` are those that are not stored yet."""

    def __init__(self) -> None:
        self.first = 0
        self.numbers = BitMap64()
        self.calling = threading.Lock()
        """Held while the call lasts; what it has left to write may go on, until the claim is revoked."""
        self.revoked = False


class ProducerState:
    """What a producer has stored and is storing. Thread-safe; leaf lock, except that `claim` reads and waits."""

    def __init__(
        self, main: Environment, partitions: PartitionSet, wal_writer: WalWriter, topic_id: int, name: str
    ) -> None:
        """Ask every environment what it has recorded: those of partitions by earlier versions. O(partitions)."""
        self._wal_writer = wal_writer
        self._topic_id = topic_id
        self._name = name
        self._lock = threading.Lock()
        self._reconciling = threading.Lock()
        self._claims: list[Claim] = []
        self._compress_in = _COMPRESS_EVERY
        record = producers.nothing()
        for partition in partitions.held():
            with partition.environment.read() as raw:
                record = record.merged(producers.read(raw, topic_id, name))
        with main.read() as raw:  # last: it takes over what a partition has recorded that is deleted meanwhile
            record = record.merged(producers.read(raw, topic_id, name))
        self._watermark = record.watermark
        self._stored = record.above

    @property
    def last(self) -> int:
        """The highest number stored; -1: none."""
        with self._lock:
            return int(self._stored.max()) if self._stored else self._watermark

    def claim(self, claim: Claim, first: int | None, count: int) -> None:
        """Claim those of `count` numbers from `first` on that are not stored; None: above all that were used.

        Waits while another call is sending one of them. REQUIRES: the claim's `calling` is held. Raises
        InvalidArgument, and StoreFailed where an earlier call's commit is in doubt.
        """
        while True:
            with self._lock:
                start = self._next() if first is None else first
                if start > _MAX_SEQUENCE - count:
                    raise InvalidArgument("sequence_id", start, f"expected an int from 0 to {_MAX_SEQUENCE}")
                wanted = BitMap64(range(max(start, self._watermark + 1), start + count)) - self._stored
                other = next((each for each in self._claims if each.numbers & wanted), None)
                if other is None:
                    claim.first, claim.numbers = start, wanted
                    if wanted:
                        self._claims.append(claim)
                    return
            with other.calling:  # its call has ended
                pass
            self._reconcile()

    def _next(self) -> int:
        used = [int(each.numbers.max()) for each in self._claims if each.numbers]
        return max(self._watermark, int(self._stored.max()) if self._stored else -1, *used, -1) + 1

    def write(self, group: WriteBatch, claim: Claim, sequences: Sequence[int]) -> None:
        """Record claimed numbers in the group that stores their messages. A unit of work: may run again.

        Invariant: a number is stored while it is claimed, and is not stored already.
        """
        numbers = BitMap64(sequences)
        with self._lock:
            if claim.revoked:  # the caller was interrupted; a thread that works for it learns of it here
                raise DuelogError(f"the call of producer {self._name!r} has ended")
            if numbers - claim.numbers or numbers & self._stored:
                raise BrokenInvariant(f"producer {self._name!r}: {list(numbers)[:10]} are not claimed, or are stored")
        rows = self._wal_writer.main_rows(group)
        for key, block in producers.blocks(self._topic_id, self._name, numbers):
            rows.add_numbers(key, block)
        group.after_commit(lambda: self._committed(claim, numbers))

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
        """Undo a claim of which nothing was handed on to be written."""
        with self._lock:
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
            self._wal_writer.wait_for_groups()
            with self._lock:
                self._claims = [each for each in self._claims if each not in left]


class Producer:
    """A named sender of one topic. Made by Topic.producer; thread-safe.

    Every message has a sequence number. One that is stored already is not stored again, however it is sent again:
    alone or in another batch, in any order, after a crash between the commit and the answer, and also when its due
    time was relative and would be another one now. So a program that does not know whether a send succeeded sends it
    again. Numbers may be left out and sent later; each that is left out costs some bytes for good.
    """

    @classmethod
    def of(
        cls,
        sender: TopicSender,
        topic: TopicState,
        main: Environment,
        partitions: PartitionSet,
        wal_writer: WalWriter,
        name: str,
    ) -> Producer:
        """The producer of a name; all of one name share what is known of their numbers. O(partitions)."""
        with topic.producers_lock:
            known = topic.producers.get(name)
            if known is None:
                known = topic.producers[name] = ProducerState(main, partitions, wal_writer, topic.topic_id, name)
        return cls(sender, topic, known, name)

    def __init__(self, sender: TopicSender, topic: TopicState, producer: ProducerState, name: str) -> None:
        self._sender = sender
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
        """Append one message; its id once it is durable, None when that number is stored already.

        sequence_id None: one above the last. Raises as Topic.send; then the number may be sent again. StoreFailed for
        a number whose commit is in doubt, until the store is opened again.
        """
        return self.send_batch([message], first_sequence_id=sequence_id, allow_past=allow_past)[0]

    def send_batch(
        self, messages: Iterable[Message], *, first_sequence_id: int | None = None, allow_past: bool = False
    ) -> list[MessageId | None]:
        """Append messages numbered from `first_sequence_id` on; an id each, None where it is stored already."""
        batch = list(messages)
        if not batch:
            return []
        first = first_sequence_id
        if first is not None and (isinstance(first, bool) or not isinstance(first, int) or first < 0):
            raise InvalidArgument("sequence_id", first, f"expected an int from 0 to {_MAX_SEQUENCE}")
        encoded, now_ms = self._sender.encode(
            batch, allow_past=allow_past
        )  # all are checked before a number is claimed
        claim = Claim()
        with claim.calling:
            self._producer.claim(claim, first, len(batch))
            numbers = list(claim.numbers)
            ids: list[MessageId | None] = [None] * len(batch)
            if not numbers:
                return ids
            rows = [number - claim.first for number in numbers]
            part = encoded if len(rows) == len(batch) else encoded.rows(np.array(rows))
            try:
                self._sender.apply_policies(part, now_ms)  # not to what is stored already, by other policies perhaps
            except Exception:
                self._producer.drop(claim)
                raise

            def also(group: WriteBatch, places: range) -> None:
                self._producer.write(group, claim, [numbers[place] for place in places])

            for row, message_id in zip(rows, self._sender.append(self._topic, part, now_ms, also), strict=True):
                ids[row] = message_id
            return ids
