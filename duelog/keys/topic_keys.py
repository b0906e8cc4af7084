"""Records of deduplication keys: which message a key stands for, whether that is pending, which topics have keys.

A key has one record at most, in the main environment, so a send finds it by one look, whatever day its message is due.
It takes no memory and nothing is read when a store is opened. The record is written with the message: in one group of
the write-ahead log, or in the transaction that admits it. It is moved with the rescheduling of its message. Firing and
cancelling leave it, but for one that would hold on (`dedup_for`), which cancelling removes: the frontier and the
cancellations say what has become of a message, and upkeep/reclaiming.py removes the record some time later.

A call that sends or cancels by keys has them for itself from its first look to the end of its commit. What is done
by id meanwhile (a cancellation, a rescheduling, firing) changes the record in its own transaction, and only if the
record is still of that message.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from duelog.markers.withdrawal import Withdrawals
from duelog.partitions.partition import Partition
from duelog.partitions.partition_set import PartitionSet
from duelog.store.codec import format as fmt
from duelog.store.codec.format import PartitionState, Table
from duelog.store.codec.sent_ids import KeyRecord, sent_key
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import unapplied_records
from duelog.store.errors import DamagedStore
from duelog.store.log import catalog

from ..topics.topic_state import TopicState

_LOCKS = 1_024
"""Two keys that share one wait for each other."""


Looked = tuple[KeyRecord | None, Partition | None]
"""The record of a key, and the partition of its message if that is pending."""


class TopicKeys:
    """The keys of an open store. Thread-safe."""

    def __init__(self, main: Environment, partitions: PartitionSet, withdrawals: Withdrawals) -> None:
        self._main = main
        self._partitions = partitions
        self._withdrawals = withdrawals
        self._locks = [threading.Lock() for _ in range(_LOCKS)]

    @contextmanager
    def locks(self, keys: Iterable[bytes]) -> Iterator[None]:
        """Held by a call that sends or cancels by keys, of records; taken in one order by all, before any other."""
        with ExitStack() as held:
            for at in sorted({hash(key) % _LOCKS for key in keys}):
                held.enter_context(self._locks[at])
            yield

    def lock(self, key: bytes) -> threading.Lock:
        """The lock of one key; several are taken by `locks`."""
        return self._locks[hash(key) % _LOCKS]

    def record(self, key: bytes) -> KeyRecord | None:
        """The record under a key. Raises CorruptRecord."""
        fields = self._main.get(key)
        return None if fields is None else KeyRecord.unpack(fields)

    def _records(self, keys: Iterable[bytes]) -> dict[bytes, KeyRecord | None]:
        """In one read transaction."""
        with self._main.read() as raw:
            values = {key: raw.get(key) for key in keys}
            return {
                key: None if value is None else KeyRecord.unpack(fmt.unseal(key, value))
                for key, value in values.items()
            }

    def look(self, topic: TopicState, key: bytes) -> Looked:
        """Look up one key; see `look_all`."""
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
            try:
                outcomes = self._withdrawals.states(topic.log, [records[key][1].message_id for key in keys], partition)
            except DamagedStore:
                if self._partitions.registered(partition):
                    raise
                continue  # it was deleted meanwhile: all of it had fired
            found |= {key: partition for key, outcome in zip(keys, outcomes, strict=True) if outcome is None}
        return found

    def are_used(self, topic: TopicState) -> bool:
        """Return True if a message with a key was ever sent to the topic, as far as records show."""
        if topic.has_keys is None:
            prefix = fmt.prefix(Table.KEY, topic.topic_id)
            with self._main.read() as raw:
                cursor = raw.cursor()
                applied = cursor.set_range(prefix) and bytes(cursor.key()).startswith(prefix)
                topic.has_keys = topic.has_keys or applied or bool(unapplied_records(raw, prefix))
        return topic.has_keys
