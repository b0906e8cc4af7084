"""What deduplication keys stand for: the record of a key, whether its message is pending, which topics have keys.

A key has one record at most, in the main environment, so a send finds it by one look, whatever day its message is due.
It takes no memory and nothing is read when a store is opened. The record is written with the message: in one group of
the write-ahead log, or in the transaction that admits it. It is moved with the rescheduling of its message. Firing and
cancelling leave it, but for one that would hold on (`dedup_for`), which cancelling removes: the frontier and the
cancellations say what has become of a message, and background/id_sweep.py removes the record some time later.

A call that sends or cancels by a key has the key for itself from its first look to the end of its commit. What is done
by id meanwhile (a cancellation, a rescheduling, firing) changes the record in its own transaction, and only if the
record is still of that message.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from duelog.markers.withdrawal import Withdrawals
from duelog.partitions.partition import Partition
from duelog.partitions.partition_set import PartitionSet
from duelog.store.codec import format as fmt
from duelog.store.codec.format import PartitionState, Table
from duelog.store.codec.sent_ids import MAX_DEDUP_KEY_BYTES, KeyRecord, sent_key
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import unapplied_records
from duelog.store.errors import DamagedStore, InvalidArgument
from duelog.store.log import catalog

from ..topics.topic_state import TopicState

_LOCKS = 1_024
"""Two keys that share one wait for each other."""


def checked_key(key: object, field: str = "dedup_key") -> str:
    """A deduplication key as a caller gave it: 1 to 256 bytes of UTF-8. Raises InvalidArgument."""
    if not isinstance(key, str):
        raise InvalidArgument(field, key, "expected a str")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(field, key, "a lone surrogate has no UTF-8 form") from None
    if not 0 < size <= MAX_DEDUP_KEY_BYTES:
        raise InvalidArgument(field, key, f"{size} bytes in UTF-8, expected 1 to {MAX_DEDUP_KEY_BYTES}")
    return key


class TopicKeys:
    """The keys of an open store. Thread-safe."""

    def __init__(self, main: Environment, partitions: PartitionSet, withdrawals: Withdrawals) -> None:
        self._main = main
        self._partitions = partitions
        self._withdrawals = withdrawals
        self._locks = [threading.Lock() for _ in range(_LOCKS)]

    def lock(self, topic: TopicState, key: str) -> threading.Lock:
        """Held by a call that sends or cancels by a key; nothing waits for it with another lock in hand."""
        return self._locks[hash((topic.topic_id, key)) % _LOCKS]

    def record(self, topic: TopicState, key: str) -> KeyRecord | None:
        """The record of a key. Raises CorruptRecord."""
        fields = self._main.get(sent_key(topic.topic_id, key))
        return None if fields is None else KeyRecord.unpack(fields)

    def look(self, topic: TopicState, key: str) -> tuple[KeyRecord | None, Partition | None]:
        """The record of a key, and the partition of its message if that is pending. Raises CorruptRecord."""
        while True:
            record = self.record(topic, key)
            partition = None if record is None else self.pending_in(topic, record)
            if record is None or partition is not None or self.record(topic, key) == record:
                return record, partition  # else its message was rescheduled between the two looks

    def names(self, topic: TopicState, prefix: str) -> Iterator[str]:
        """The keys of pending messages that begin with `prefix`, in the order of their bytes. O(keys with it)."""
        for page in catalog.pages(self._main, sent_key(topic.topic_id, prefix)):
            for key, fields in page:
                if self.pending_in(topic, KeyRecord.unpack(fields)) is not None:
                    yield fmt.split_named_key(key)[1]

    def pending_in(self, topic: TopicState, record: KeyRecord) -> Partition | None:
        """The partition of a record's message, if that may still fire and is not cancelled."""
        partition = self._partitions.get(record.start_ms)
        if partition is None or partition.state is not PartitionState.OPEN:
            return None
        try:
            (outcome,) = self._withdrawals.states(topic.log, [record.message_id], partition)
        except DamagedStore:
            if self._partitions.registered(partition):
                raise
            return None  # it was deleted meanwhile: all of it had fired
        return partition if outcome is None else None

    def are_used(self, topic: TopicState) -> bool:
        """Whether a message with a key was ever sent to the topic, as far as records tell."""
        if topic.has_keys is None:
            prefix = fmt.prefix(Table.KEY, topic.topic_id)
            with self._main.read() as raw:
                cursor = raw.cursor()
                applied = cursor.set_range(prefix) and bytes(cursor.key()).startswith(prefix)
                topic.has_keys = topic.has_keys or applied or bool(unapplied_records(raw, prefix))
        return topic.has_keys
