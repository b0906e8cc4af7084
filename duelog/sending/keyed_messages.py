"""Sending, finding and cancelling by a deduplication key.

A key stands for one message of its topic. It holds as long as that message is pending, and at least for the time that
the send asked for, also if the message has fired by then. Cancelling the message frees the key at once; rescheduling
gives it to the message under its new id. While a key holds, a send with it stores nothing and answers with the id of
the message that is there, unless it is to replace it: then one transaction cancels the pending message and sends the
other. A message with a key never waits in the main log (`inline_delay_ms`), so that it can be taken back.

A send that stores costs one look into the main environment more than one without a key, and a record: a row of the
group that stores the message.

Messages sent together, to one topic or several, are one group, and are decided on one after the other, as if each were
sent alone: a key stands for a message of the store, or for one before it in the batch. All keys are looked up at once,
and are the call's own until its commit ends. What is sent together with a message that takes the place of a pending one
(withdrawal.py) never waits inline.

A key has one record at most, in the main environment, so a send finds it by one look, whatever day its message is due.
It takes no memory and nothing is read when a store is opened. The record is written with the message, and is moved with
the rescheduling of its message. Firing and cancelling leave it, but for one that would hold on (`dedup_for`), which
cancelling removes: the frontier and the cancellations say what has become of a message, and upkeep/reclaiming.py
removes the record some time later.

A call that sends or cancels by keys has them for itself from its first look to the end of its commit. What is done
by id meanwhile (a cancellation, a rescheduling, firing) changes the record in its own transaction, and only if the
record is still of that message.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from duelog.markers.lookup import read_entry
from duelog.markers.pending_entries import Outcome, Successors
from duelog.partitions.partition import Partition
from duelog.partitions.partition_set import PartitionSet, Storage
from duelog.store.codec import format as fmt
from duelog.store.codec.bodies import Bodies
from duelog.store.codec.body import EncodedBatch
from duelog.store.codec.format import PartitionState
from duelog.store.codec.sent_ids import IN_MAIN, KeyRecord, sent_key
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction, Work
from duelog.store.errors import DamagedStore
from duelog.store.held import Held
from duelog.store.listener import StoreListener, tell
from duelog.store.log import catalog
from duelog.store.message import Dedup, ScheduledMessage, checked_dedup_key
from duelog.store.names import TopicName
from duelog.store.policy.pending_quotas import PendingQuotas, Wanted
from duelog.store.position import FoundId, MessageId, MessageIds
from duelog.store.wal.write_batch import WriteBatch

from ..topics.topic_list import Topics
from ..topics.topic_state import TopicState
from .delay_policies import DelayPolicies
from .log_append import AddressedBatch, GroupAlso, Stored, refuse_deleted
from .sender import Sender
from .wal_writer import Work as GroupWork
from .withdrawal import Withdrawals

_LOCKS = 1_024
"""Two keys that share one wait for each other."""


EncodedMessage = tuple[int, bytes, int]
"""The due time that one message asks for, its body, and the time at which it was encoded (epoch ms)."""

Looked = tuple[KeyRecord | None, Partition | None]
"""The record of a key, and the partition of its message if that is pending."""


class TopicKeys:
    """The keys of an open store. Thread-safe."""

    def __init__(self, main: Environment, partitions: PartitionSet, withdrawals: Withdrawals) -> None:
        self._main = main
        self._partitions = partitions
        self._withdrawals = withdrawals
        self._locks = [threading.Lock() for _ in range(_LOCKS)]

    def lock_all(self, held: Held, keys: Iterable[bytes]) -> None:
        """Held by a call that sends or cancels by keys, of records; taken in one order by all, before any other."""
        for at in sorted({hash(key) % _LOCKS for key in keys}):
            held.enter(self._locks[at])

    def lock(self, key: bytes) -> threading.Lock:
        return self._locks[hash(key) % _LOCKS]

    def record(self, key: bytes) -> KeyRecord | None:
        fields = self._main.get(key)
        return None if fields is None else KeyRecord.unpack(fields)

    def _records(self, keys: Iterable[bytes]) -> dict[bytes, KeyRecord | None]:
        with self._main.read() as raw:
            values = {key: raw.get(key) for key in keys}
            return {
                key: None if value is None else KeyRecord.unpack(fmt.unseal(key, value))
                for key, value in values.items()
            }

    def look(self, topic: TopicState, key: bytes) -> Looked:
        return (None, None) if self.record(key) is None else self.look_all({key: topic})[key]

    def look_all(self, wanted: Mapping[bytes, TopicState]) -> dict[bytes, Looked]:
        """Return the record of each key, and its partition if its message is pending. Raises CorruptRecord.

        wanted: the topic of each key of a record.
        """
        found: dict[bytes, Looked] = {}
        left = wanted
        while left:
            records = self._records(left)
            pending = self._pending({key: (left[key], record) for key, record in records.items() if record is not None})
            found |= {key: (record, pending.get(key)) for key, record in records.items()}
            unsure = [key for key, record in records.items() if record is not None and key not in pending]
            now = self._records(unsure) if unsure else {}
            left = {key: wanted[key] for key in unsure if now[key] != records[key]}  # rescheduled between the looks
        return found

    def names(self, topic: TopicState, prefix: str) -> Iterator[str]:
        """The keys of pending messages that begin with `prefix`, in the order of their bytes. O(keys with it)."""
        for page in catalog.pages(self._main, sent_key(topic.topic_id, prefix)):
            pending = self._pending({key: (topic, KeyRecord.unpack(fields)) for key, fields in page})
            for key, _ in page:
                if key in pending:
                    yield fmt.split_named_key(key)[1]

    def _pending(self, records: Mapping[bytes, tuple[TopicState, KeyRecord]]) -> dict[bytes, Partition]:
        """By key, the partitions of records' messages that may still fire and are not cancelled."""
        together: dict[tuple[TopicState, int], list[bytes]] = {}
        for key, (topic, record) in records.items():
            together.setdefault((topic, record.start_ms), []).append(key)
        found: dict[bytes, Partition] = {}
        for (topic, start_ms), keys in together.items():
            partition = self._partitions.get(start_ms)
            if partition is None or partition.state is not PartitionState.OPEN:
                continue
            outcomes = self._withdrawals.states(topic, [records[key][1].message_id for key in keys], partition)
            found |= {key: partition for key, outcome in zip(keys, outcomes, strict=True) if outcome is None}
        return found


class KeyChanged(Exception):
    """The record of a key was changed between the look and the transaction: look again."""


class _Plan(NamedTuple):
    """The decision about each message of a batch, by its place in it."""

    repeated: dict[int, int]
    """Not stored: it gets the id of one before it in the batch."""
    replaced: dict[int, tuple[KeyRecord, Partition]]
    """The record of the pending message that this one replaces, and its partition."""
    passing: set[int]
    """Stored, and cancelled by one behind it."""
    last: dict[bytes, int]
    """By the key of its record, the message that a key stands for in the end."""


def answer(looked: Looked, dedup: Dedup, now_ms: int) -> MessageId | None:
    """The id of the message of the store that answers a send; None: another one is to be stored."""
    record, pending = looked
    if record is None or dedup.replace or not (pending is not None or record.until_ms > now_ms):
        return None
    return record.message_id


def until_ms(dedup: Dedup, now_ms: int) -> int:
    """Return until when the key of a message sent now holds (epoch ms); 0: only while that is pending."""
    return now_ms + dedup.hold_ms if dedup.hold_ms else 0


def _answered(
    found: Mapping[bytes, Looked], keys: Mapping[int, bytes], dedups: Mapping[int, Dedup], now_ms: int
) -> dict[int, MessageId]:
    """By place, the ids of messages of the store that answer those of a batch, which are not stored then."""
    answered: dict[int, MessageId] = {}
    changed: set[bytes] = set()
    for place, key in keys.items():
        if key not in changed:
            message_id = answer(found[key], dedups[place], now_ms)
            if message_id is None:
                changed.add(key)
            else:
                answered[place] = message_id
    return answered


def _decided(
    found: Mapping[bytes, Looked],
    keys: Mapping[int, bytes],
    dedups: Mapping[int, Dedup],
    dues: Mapping[int, int],
    now_ms: int,
) -> _Plan:
    """Decide on the messages that no message of the store answers: those with `dues`."""
    plan = _Plan({}, {}, set(), {})
    for place, key in keys.items():
        if place not in dues:
            continue
        dedup, before = dedups[place], plan.last.get(key)
        if before is None:
            record, pending = found[key]
            if record is not None and pending is not None:
                plan.replaced[place] = record, pending
        else:
            waits = dues[before] > now_ms
            if not dedup.replace and (waits or dedups[before].hold_ms):
                plan.repeated[place] = before
                continue
            if waits:
                plan.passing.add(before)
        plan.last[key] = place
    return plan


@dataclass(eq=False, repr=False)
class KeyedMessages:
    """The messages with keys of an open store: sent, found and cancelled. Thread-safe."""

    _storage: Storage
    _topics: Topics
    _policies: DelayPolicies
    _quotas: PendingQuotas
    _sender: Sender
    _keys: TopicKeys
    _withdrawals: Withdrawals

    def send(self, name: TopicName, encoded: EncodedMessage, dedup: Dedup, writing_at: Callable[[], int]) -> MessageId:
        """Send one message as `Topic.send` does. writing_at: returns the time; raises if the store takes no writes."""
        due_ms, body, now_ms = encoded
        topic = self._topics.get_or_create(name, now_ms)
        key = sent_key(topic.topic_id, dedup.key)
        self.fetch({key: topic})
        with self._keys.lock(key):
            now_ms = writing_at()
            looked = self._keys.look(topic, key)
            message_id = answer(looked, dedup, now_ms)
            if message_id is not None:
                return FoundId(*message_id)
            if looked[1] is not None:  # it is replaced
                one = EncodedBatch(np.array([due_ms]), np.array([due_ms > now_ms]), [body], dedups={0: dedup})
                message = AddressedBatch([topic], None, one, now_ms)
                return self.send_locked(message, {0: key}, policies=True, known={key: looked})[0]
            due_ms, overridden = self._policies.apply_one(name, due_ms, now_ms)
            topic.has_keys = True
            until = until_ms(dedup, now_ms)

            def record(group: WriteBatch, start_ms: int, ledger_id: int, entry_id: int) -> None:
                fields = KeyRecord(start_ms, ledger_id, entry_id, until).pack()
                group.put(key, fields)

            message_id = self._sender.send_one(topic, due_ms, body, now_ms, record, may_be_inline=False)
        if overridden:
            self._policies.stored(name, overridden)
        return message_id

    def fetch(self, topics: Mapping[bytes, TopicState], *, cancels: bool = False) -> None:
        """Fetch what is away and looking at messages of keys reads, or cancelling them; raises as that.

        Before the locks of the keys are taken: others wait for these. topics: by the key of a record.
        """
        if self._storage.partitions.away:
            for key, topic in topics.items():
                if (record := self._keys.record(key)) is not None:
                    self._withdrawals.fetch(topic, [record.message_id], keyed=cancels and record.until_ms > 0)

    def cancel(self, topic: TopicState, key: str) -> bool:
        place = sent_key(topic.topic_id, checked_dedup_key(key, "key"))
        self.fetch({place: topic}, cancels=True)
        with self._keys.lock(place):
            while True:
                with suppress(KeyChanged), Held() as held:
                    work = self.cancelling(held, topic, place)
                    return work is not None and self._storage.main.write(work, makes_space=True) is Outcome.CANCELLED

    def cancelling(self, held: Held, topic: TopicState, key: bytes) -> Work[Outcome] | None:
        """The unit of work that cancels the message of a key, of a record; None: there is none that may be pending.

        Written before `held` ends. It raises KeyChanged. REQUIRES: the key's lock.
        """
        record = self._keys.record(key)
        partition = None if record is None else self._storage.partitions.get(record.start_ms)
        if record is None or partition is None or partition.state is not PartitionState.OPEN:
            return None
        cancel = self._withdrawals.cancelling(held, topic, [record.message_id], partition, keyed=record.until_ms > 0)

        def work(transaction: Transaction) -> Outcome:
            (outcome,) = cancel(transaction)
            if outcome is not Outcome.CANCELLED and transaction.get(key) != record.pack():
                raise KeyChanged  # its message was rescheduled meanwhile
            return outcome

        return work

    def cancel_all(self, topic: TopicState, keys: Sequence[str]) -> list[str]:
        """Cancel the pending messages of keys in one transaction; the keys that had one."""
        key_of = {sent_key(topic.topic_id, key): key for key in keys}
        self.fetch(dict.fromkeys(key_of, topic), cancels=True)
        with Held() as locks:
            self._keys.lock_all(locks, key_of)
            while True:
                with suppress(KeyChanged), Held() as held:
                    works = [(key, self.cancelling(held, topic, place)) for place, key in key_of.items()]

                    def cancel(transaction: Transaction) -> list[str]:
                        pending = [(key, work) for key, work in works if work is not None]  # noqa: B023 - it ends here
                        return [key for key, work in pending if work(transaction) is Outcome.CANCELLED]

                    return self._storage.main.write(cancel, makes_space=True)

    def count(self, topic: TopicState, prefix: str, start_ms: int, limit_ms: int) -> int:
        """Count pending messages with keys that begin with `prefix`, due in [start_ms, limit_ms). O(keys with it)."""
        messages = (self.find(topic, key) for key in self.keys(topic, prefix))
        return sum(start_ms <= message.due_ms < limit_ms for message in messages if message is not None)

    def keys(self, topic: TopicState, prefix: str) -> Iterator[str]:
        return self._keys.names(topic, checked_dedup_key(prefix, "prefix") if prefix else "")

    def find(self, topic: TopicState, key: str) -> ScheduledMessage | None:
        record, partition = self._keys.look(topic, sent_key(topic.topic_id, checked_dedup_key(key, "key")))
        if record is None or partition is None:
            return None
        try:
            with self._storage.partitions.lease(partition):
                return read_entry(partition.environment, record.message_id, str(topic.name))
        except DamagedStore:
            if self._storage.partitions.registered(partition):
                raise
            return None  # it has fired, and was deleted, meanwhile

    # -- batches -----------------------------------------------------------------------------------

    def send_all(self, messages: AddressedBatch, also: GroupAlso | None = None, *, policies: bool) -> MessageIds:
        """Send a batch with `dedups`; a message that is not stored gets the id of the one that is there.

        Otherwise as `Sender.send_all`; `also` writes where no message is stored, too. policies: apply delay policies
        to those that no message of the store answers.
        """
        dedups = messages.batch.dedups or {}
        keys = {place: sent_key(messages.topic_of(place).topic_id, dedup.key) for place, dedup in dedups.items()}
        self.fetch({key: messages.topic_of(place) for place, key in keys.items()})
        with Held() as held:
            self._keys.lock_all(held, keys.values())
            return self.send_locked(messages, keys, also, policies=policies)

    def send_locked(
        self,
        messages: AddressedBatch,
        keys: Mapping[int, bytes],
        also: GroupAlso | None = None,
        *,
        policies: bool,
        known: Mapping[bytes, Looked] | None = None,
    ) -> MessageIds:
        """Send as `send_all` does. REQUIRES: the locks of `keys`."""
        while True:
            with suppress(KeyChanged), Held() as held:
                return self._sender.write(self.sending(held, messages, keys, also, policies=policies, known=known))
            known = None

    def sending(
        self,
        held: Held,
        messages: AddressedBatch,
        keys: Mapping[int, bytes],
        also: GroupAlso | None = None,
        *,
        policies: bool,
        known: Mapping[bytes, Looked] | None = None,
    ) -> GroupWork[MessageIds]:
        """The unit of work of `send_all`, written before `held` ends. It raises KeyChanged.

        keys: by place, the key of a record. known: the records of all of them; None: they are looked up. REQUIRES: the
        locks of `keys`.
        """
        topic_of = {key: messages.topic_of(place) for place, key in keys.items()}
        for topic in topic_of.values():
            topic.has_keys = True
        count, dedups, now_ms = len(messages.batch), messages.batch.dedups or {}, messages.now_ms
        found = known or self._keys.look_all(topic_of)
        answered = _answered(found, keys, dedups, now_ms)
        places = np.array([place for place in range(count) if place not in answered], dtype=np.intp)
        part = messages.rows(places)
        if policies:
            self._policies.apply_each([topic.name for topic in part.topics], part.owners, part.batch, now_ms)
        dues = dict(zip(places.tolist(), part.batch.dues.tolist(), strict=True))
        plan = _decided(found, keys, dedups, dues, now_ms)
        if plan.repeated:
            rows = np.array([row for row, place in enumerate(dues) if place not in plan.repeated], dtype=np.intp)
            places, part = places[rows], part.rows(rows)
        part.batch.dedups = {row: dedups[place] for row, place in enumerate(places.tolist()) if place in keys}
        store = self._storing(held, part, places.tolist(), keys, plan)

        def work(group: WriteBatch) -> MessageIds:
            ledgers, entries = np.empty((2, count), dtype=np.int64)
            ledgers[places], entries[places] = store(group).columns()
            for place, message_id in answered.items():
                ledgers[place], entries[place] = message_id
            for place, before in plan.repeated.items():
                ledgers[place], entries[place] = ledgers[before], entries[before]
            ids = MessageIds.of(ledgers, entries, answered.keys() | plan.repeated.keys())
            if also is not None:
                also(group, Stored(ids, {}))
            return ids

        return work

    def _storing(
        self,
        held: Held,
        part: AddressedBatch,
        places: Sequence[int],
        keys: Mapping[int, bytes],
        plan: _Plan,
    ) -> GroupWork[MessageIds]:
        """The unit that stores messages, which had `places` in the batch. It raises KeyChanged."""
        if not places:
            return lambda group: MessageIds.run(0, 0, 0)
        row_of = {place: row for row, place in enumerate(places)}
        dedups = part.batch.dedups or {}
        records = [
            (row_of[place], key, until_ms(dedups[row_of[place]], part.now_ms)) for key, place in plan.last.items()
        ]
        if plan.replaced or plan.passing:
            replaced = {row_of[place]: (keys[place], *each) for place, each in plan.replaced.items()}
            passing = {row_of[place] for place in plan.passing}
            return self._replacing(held, part, records, replaced, passing)

        def also(group: WriteBatch, stored: Stored) -> None:
            ids = stored.ids.to_list()
            for row, key, until in records:
                message_id = ids[row]
                start_ms = stored.starts.get(message_id.ledger_id, IN_MAIN)
                group.put(key, KeyRecord(start_ms, *message_id, until).pack())

        return self._sender.sending(held, part, also)

    def _replacing(
        self,
        held: Held,
        part: AddressedBatch,
        records: Sequence[tuple[int, bytes, int]],
        replaced: Mapping[int, tuple[bytes, KeyRecord, Partition]],
        passing: set[int],
    ) -> Work[MessageIds]:
        """The unit that stores messages some of which take the place of others.

        The numbers of mappings and records are rows.
        """
        dues, bodies = part.batch.dues.tolist(), Bodies.of(part.batch.bodies)
        rows_of: dict[TopicState, list[int]] = {}
        for row in range(len(dues)):
            rows_of.setdefault(part.topic_of(row), []).append(row)
        batches, wanted = [], []
        for topic, rows in rows_of.items():
            olds = {row: (replaced[row][1].message_id, replaced[row][2]) for row in rows if row in replaced}
            gone = passing.intersection(rows)
            batches.append(Successors(topic.log, dues, {row: bodies[row] for row in rows}, olds, gone))
            more = max(sum(dues[row] > part.now_ms for row in rows) - len(olds) - len(gone), 0)
            wanted.append(Wanted(topic.topic_id, topic.name, more))

        counts: list[int] = []
        if self._policies.limits_pending:
            held.enter(self._quotas.sending(wanted))
        replace = self._withdrawals.replacing(held, batches)

        def work(transaction: Transaction) -> MessageIds:
            refuse_deleted(rows_of)
            for key, old, _ in replaced.values():
                if transaction.get(key) != old.pack():
                    raise KeyChanged
            done = replace(transaction)
            where = {row: place for placed, _ in done for row, place in placed.items()}
            for row, key, until in records:
                transaction.put(key, KeyRecord(where[row].start_ms, *where[row].message_id, until).pack())
            counts[:] = [
                cancelled + sum(placed[row].start_ms != IN_MAIN for row in passing.intersection(placed))
                for placed, cancelled in done
            ]
            ids = [where[row].message_id for row in range(len(dues))]
            return MessageIds.of(*np.array(ids, dtype=np.int64).T)

        def stored() -> None:
            for topic, count in zip(rows_of, counts, strict=True):
                tell(self._storage.listeners, StoreListener.cancelled, topic.name, count)

        held.stored.append(partial(self._sender.count_sent, part))
        held.stored.append(stored)
        return work
