"""Partition logs by themselves, without a store."""

from duelog.markers.firing.pending_log import PendingLog
from duelog.partitions.index.delay_index import DelayIndex
from duelog.store.codec.frontier import FrontierRecord
from duelog.store.codec.run import Int64s
from tests.conftest import START_MS


def new_log(column: Int64s, *, heard: bool = True, loaded: bool = True, bucket_ms: int = 10) -> PendingLog:
    """A log whose entries have the due times of a column; they are appended to it unless they are not `heard`."""
    index = DelayIndex(lambda ids: column[ids], start_ms=START_MS, bucket_ms=bucket_ms)
    log = PendingLog(1, START_MS, FrontierRecord.start(7), index, loaded=loaded)
    if heard:
        log.hear(0, column)
    return log
