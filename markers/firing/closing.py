"""What is recorded when a partition closes: which topics still reference it, and that it takes no more messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...partitions.partition import Partition
from ...store.codec import format as fmt
from ...store.codec.format import PartitionRecord, PartitionState
from ...store.codec.frontier import FrontierRecord
from ...store.env.transaction import Transaction
from ...store.errors import DamagedStore
from ...store.log import catalog
from ...store.log.managed_ledger import ManagedLedger


def record_closed(
    transaction: Transaction,
    partition: Partition,
    topic_ids: Iterable[int],
    main_log: Callable[[int], ManagedLedger | None],
    mark_ms: int,
) -> None:
    """Close a partition in the catalog, held by each topic whose last marker is in a ledger that is kept.

    A topic without a marker, one whose ledgers have been trimmed past it, or one that was deleted, holds nothing.
    `mark_ms` becomes the clock mark.
    """
    references = 0
    for topic_id in topic_ids:
        key = fmt.frontier_key(topic_id, partition.start_ms)
        fields = transaction.get(key)
        if fields is None:
            continue
        record = FrontierRecord.unpack(fields)
        log = main_log(topic_id)
        held = log is not None and record.marker_ledger >= log.first_in(transaction)
        transaction.put(key, record._replace(released=int(not held)).pack())
        references += held
    fields = transaction.get(fmt.partition_key(partition.start_ms))
    if fields is None:
        raise DamagedStore(partition.path, "is not in the catalog")
    closed = PartitionRecord.unpack(fields)._replace(state=PartitionState.CLOSED, references=references)
    transaction.put(fmt.partition_key(partition.start_ms), closed.pack())
    transaction.put(fmt.counter_key(catalog.CLOCK), fmt.pack_u64(max(mark_ms, 0)))
