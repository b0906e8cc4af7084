"""The tables of a store's copy in object storage, in tasks: each fetches what it reads, and reads it as of a store.

A task is of one partition, or of the main environment alone. All tasks of a plan are of one group of the log.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import pyarrow as pa

from ...replica.copied_store import CopiedStore, Excerpt
from ...store.codec import format as fmt
from ...store.codec.format import PartitionState
from ...store.env.environment import Environment
from ...store.log import catalog
from .copies import copied_partitions, excerpt
from .main_tables import View
from .scan_pending import logs_now
from .scan_plan import Wanted
from .sealed import open_main_to_read

_STATES = {"messages": PartitionState.CLOSED, "pending": PartitionState.OPEN}


class CopyTask(NamedTuple):
    """The rows of a table that one task reads; as_of_ms: of `pending`, as in `pending_in`. Picklable."""

    excerpt: Excerpt
    table: str
    wanted: Wanted
    as_of_ms: int | None = None


def plan_copy(copy: CopiedStore, table: str, wanted: Wanted, as_of_ms: int | None = None) -> list[CopyTask]:
    """The tasks of everything that is wanted of a table."""
    main = Excerpt(copy.main, {}, None, str(copy.path))
    state = _STATES.get(table)
    if state is None:
        return [CopyTask(main._replace(catalog=copy.catalog), table, wanted)]
    if as_of_ms is None and table == "pending":
        as_of_ms = _now_ms(copy)
    tasks = [
        CopyTask(
            excerpt(copy, sealed.start_ms), table, wanted._replace(partitions=frozenset({sealed.partition})), as_of_ms
        )
        for sealed, its_state, _ in copied_partitions(copy)
        if its_state is state and wanted.has_partition(sealed)
    ]
    if table == "pending" and wanted.partitions is None:  # what waits in main logs
        tasks.append(CopyTask(main, table, wanted, as_of_ms))
    return tasks


def _now_ms(copy: CopiedStore) -> int:
    with closing(Environment(copy.path / "main", name="main", read_only=True)) as main:
        mark = main.get(fmt.counter_key(catalog.CLOCK))
    return max(time.time_ns() // 1_000_000, 0 if mark is None else fmt.unpack_u64(mark))


def scan_copy(task: CopyTask, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a task. Raises ReplicaDamaged, ReplicaRefused, ReplicaUnreachable, DamagedStore, StoreFull."""
    with task.excerpt.fetched() as path:
        known = logs_now(path) if task.table == "pending" else None
        with open_main_to_read(path) as (identity, main), main.read() as raw:
            view = View(path, identity, raw, known)
            yield from view.batches(task.table, columns, task.wanted, task.as_of_ms)
