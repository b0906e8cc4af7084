"""The takeover commit: after it no id is given out that the leader before may have given to what was not shipped.

A client may hold the id of a message that its leader had on disk, and not in the copy. Were it given again, to another
message, an acknowledgement or a cancel would lose that one. So the first groups of a store that was restored

- pass over `LEDGERS` ids of ledgers and `VERSIONS` versions of documents,
- go on in a new ledger of each main log,
- go on `ENTRIES` ids later in each log of a partition: the ids between count as cancelled, and a last one, cancelled
  too, has a run that says how many were passed over (FLAG_SKIPS).

They are groups of the write-ahead log as any other: whoever restores the copy later has them. A standby that takes over
has them in the copy before it tells an id. After a crash they are written again, and pass over more.
"""

from __future__ import annotations

from collections.abc import Callable

from pyroaring import BitMap

from duelog.engine import Engine
from duelog.partitions import cancellations
from duelog.partitions.partition import Partition
from duelog.store.codec import format as fmt
from duelog.store.codec.format import PartitionState, Table
from duelog.store.codec.run import pack_skip
from duelog.store.log import catalog
from duelog.store.names import TopicName
from duelog.store.wal.write_batch import WriteBatch

from .shipping import ENTRIES

LEDGERS = 1 << 20
VERSIONS = 1 << 32
"""Most ledgers, and changes of documents, that are shipped late."""

_LOGS_A_GROUP = 500


def renew_ids(engine: Engine) -> None:
    """Write the takeover commit. REQUIRES: nothing was written since the store was opened. O(logs of partitions)."""
    write = engine.writer().write

    def pass_over(group: WriteBatch) -> None:
        catalog.take_numbers(group, catalog.LEDGERS, LEDGERS)
        catalog.take_numbers(group, catalog.DOCUMENTS, VERSIONS)

    write(pass_over)
    now_ms = engine.clock.now_ms()
    names = list(engine.topics.names())
    for start in range(0, len(names), _LOGS_A_GROUP):
        write(_in_new_ledgers(engine, names[start : start + _LOGS_A_GROUP], now_ms))
    for partition in engine.storage.partitions.held(lambda each: each.state is PartitionState.OPEN, partial=True):
        topic_ids = [log.topic_id for log in partition.logs()]
        for start in range(0, len(topic_ids), _LOGS_A_GROUP):
            write(_skipping(partition, topic_ids[start : start + _LOGS_A_GROUP]))


def _in_new_ledgers(engine: Engine, names: list[str], now_ms: int) -> Callable[[WriteBatch], None]:
    """The unit of work that has main logs go on in new ledgers."""
    logs = [engine.topics.get(TopicName.parse(name)).log for name in names]

    def work(group: WriteBatch) -> None:
        for log in logs:
            log.begin_ledger(group, now_ms)

    return work


def _skipping(partition: Partition, topic_ids: list[int]) -> Callable[[WriteBatch], None]:
    """The unit of work that has logs of a partition go on later."""
    with partition.environment.read() as raw:
        passed = dict(catalog.rows(raw, fmt.counter_key(catalog.PASSED_OVER)))

    def work(group: WriteBatch) -> None:
        rows = group.to(partition.start_ms, partition.memtable)
        for topic_id in topic_ids:
            log = partition.log(topic_id)
            if log is None:
                continue
            tail = partition.end_of(rows, log)
            last = tail + ENTRIES
            cancellations.add(group, Table.CANCELLED, log.ledger_id, BitMap(range(tail, last + 1)))
            counter = fmt.counter_key(f"{catalog.PASSED_OVER}{log.ledger_id}")
            before = fmt.unpack_u64(passed[counter]) if counter in passed else 0
            rows.put(counter, fmt.pack_u64(before + ENTRIES + 1))
            partition.skip_to(rows, log, last, pack_skip(fmt.run_key(log.ledger_id, last), partition.start_ms, ENTRIES))

    return work
