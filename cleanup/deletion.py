"""Deletion of a partition that every topic has released: recorded, moved to trash/, removed.

The record comes first: after a crash the directory is removed because the catalog says so, never the
other way round. What the record needs is checked again inside its transaction.
"""

from pathlib import Path

from ..partitions import cancellations
from ..partitions.partition import Partition, partition_path
from ..partitions.partition_set import Storage
from ..store.codec import format as fmt
from ..store.codec.format import PartitionRecord, PartitionState
from ..store.codec.frontier import FrontierRecord
from ..store.env.environment import Environment
from ..store.env.transaction import Transaction
from ..store.files.directory import move_to_trash, remove_tree
from ..store.files.failpoints import reach
from ..store.files.pages import refuse_broken
from ..store.log import catalog


def deletable(main: Environment) -> list[int]:
    """Starts of the closed partitions without references."""
    with main.read() as raw:
        return [
            start_ms
            for start_ms, record in catalog.partitions(raw)
            if record.state is PartitionState.CLOSED and record.references == 0
        ]


def delete_partition(storage: Storage, partition: Partition) -> bool:
    """Delete a closed partition; False when it is still referenced or read.

    A partition with entries that were quarantined as unreadable is kept until they are discarded. Raises DamagedStore
    for one whose pages may hide something.
    """
    with storage.partitions.lease(partition, partial=True):
        refuse_broken(partition.environment.path)
        logs = [(log.topic_id, log.ledger_id) for log in partition.logs()]

    def recorded() -> None:
        partition.state = PartitionState.DELETING

    def record_it(transaction: Transaction) -> bool:
        key = fmt.partition_key(partition.start_ms)
        fields = transaction.get(key)
        record = None if fields is None else PartitionRecord.unpack(fields)
        if record is None or record.state is not PartitionState.CLOSED or record.references:
            return False
        for topic_id, ledger_id in logs:
            frontier = transaction.get(fmt.frontier_key(topic_id, partition.start_ms))
            if frontier is not None and not FrontierRecord.unpack(frontier).released:
                return False
            if _has_quarantined(transaction, ledger_id):
                return False
        transaction.put(key, record._replace(state=PartitionState.DELETING).pack())
        transaction.after_commit(recorded)
        for topic_id, ledger_id in logs:
            transaction.delete(fmt.frontier_key(topic_id, partition.start_ms))
            cancellations.remove_log(transaction, ledger_id)
        return True

    if not storage.main.write(record_it, makes_space=True):
        return False
    reach("delete.recorded")
    return finish_deletion(storage, partition)


def finish_deletion(storage: Storage, partition: Partition) -> bool:
    """Remove a partition whose deletion is recorded; False while it is being read. May be repeated."""
    if not storage.partitions.retire(partition):
        return False
    remove_recorded(storage.path, storage.main, partition.start_ms, partition.generation)
    storage.partitions.forget(partition)
    return True


def _has_quarantined(transaction: Transaction, ledger_id: int) -> bool:
    return next(catalog.keys(transaction.raw, fmt.block_prefix(fmt.Table.SET_ASIDE, ledger_id)), None) is not None


def remove_recorded(path: Path, main: Environment, start_ms: int, generation: int) -> None:
    """Remove the directory of a partition whose deletion is recorded, then the record. May be repeated."""
    main.flush()  # what is not on disk for sure is not recorded
    directory = partition_path(path, start_ms, generation).parent
    trash = move_to_trash(path, directory)
    reach("delete.moved")
    remove_tree(trash)
    reach("delete.removed")
    main.write(lambda transaction: transaction.delete(fmt.partition_key(start_ms)), makes_space=True)
