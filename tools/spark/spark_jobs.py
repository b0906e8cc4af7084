"""Audit, export and compaction on Spark, of one store or of several; of several also in this process.

The audit and the export hand each task a function and its value. A task of compaction plans one partition by the claims
that it carries; where that is worth it, it copies and verifies it in a directory below staging/ that no other attempt
has, and answers where. Once all have answered, the driver publishes the attempts that Spark took, and removes what
others have left: a task that fails, is repeated or runs twice at a time changes nothing but staging/, and what a driver
that dies leaves there is removed when the store is next opened. All tasks must reach the store's directory: a shared
file system on a cluster. A store that is named by the URL of its copy needs none: tasks fetch what they read, and put
what they have compacted beside it.

On Spark several stores are dealt with at a time, so that the last tasks of one leave no core idle. A store that fails,
its tasks on Spark included, is an outcome with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...store.files.directory import remove_tree
from ..audit import Audit, audit_store
from ..audit.partition_audit import audit_partition
from ..compact_store import CompactionTask, PartitionAnswer, compact_partition, compact_store, publish
from ..fleet import AT_ONCE, Outcome, each_store
from .session import session_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ..compact_store import CompactionReport
    from ..transfer.parquet_export import Exported


def audit_with_spark(path: Path, *, master: str | None = None, spark: SparkSession | None = None, **how: Any) -> Audit:
    """Audit a store as `audit_store` does, with `how` for its other keywords.

    spark: a session to use; else one is made as `master` says, and stopped. Facts are read, and findings put together,
    in this process. Raises SparkUnavailable, SparkFailed, and what `audit_store` raises.
    """
    with session_for("duelog audit", spark, master) as session:
        return audit_store(path, **_spread(session, audit_partition), **how)


def _spread(session: SparkSession | None, function: Callable[[Any], object]) -> dict[str, Any]:
    """The argument by which a job has its tasks done on Spark; without a session none: they are done here."""
    if session is None:
        return {}
    from .tasks import run_tasks

    return {"run": lambda tasks: run_tasks(session, function, tasks)}


def export_with_spark(
    store: Path, dest: Path, *, master: str | None = None, spark: SparkSession | None = None, **how: Any
) -> Exported:
    """Export a store as `export_store` does, with `how` for its other keywords; all tasks must reach `dest` too.

    spark: a session to use; else one is made as `master` says, and stopped. Raises SparkUnavailable, SparkFailed.
    """
    from ..transfer.parquet_export import export_slice, export_store

    with session_for("duelog export", spark, master) as session:
        return export_store(store, dest, **_spread(session, export_slice), **how)


def compact_with_spark(
    tasks: Sequence[CompactionTask], *, master: str | None = None, spark: SparkSession | None = None
) -> list[PartitionAnswer]:
    """Compact partitions of one store, a Spark task for each, the largest first; what was staged is handed over.

    The answer of one that cannot be compacted (it is damaged, or the disk is full) has a failure, and the others go on.
    spark: a session to use; else one is made as `master` says, and stopped. Raises SparkUnavailable, and SparkFailed
    with nothing published: a task has failed for good in a way that another attempt might not have.
    """
    if not tasks:
        return []
    store = Path(tasks[0].sealed.store)
    names = {task.sealed.partition for task in tasks}
    there = set(_attempts(store, names))
    try:
        with session_for("duelog compact", spark, master) as session:
            from .tasks import run_tasks

            largest_first = sorted(tasks, key=lambda task: -task.sealed.file_bytes)
            return [publish(store, answer) for answer in run_tasks(session, compact_in_task, largest_first)]
    finally:
        for left in set(_attempts(store, names)) - there:
            remove_tree(left)


def compact_in_task(task: CompactionTask) -> PartitionAnswer:
    """Compact a partition; raises what another attempt might mend, as Spark then begins it again."""
    return compact_partition(task, again=True)


def _attempts(store: Path, names: Iterable[str]) -> list[Path]:
    """Directories in which attempts at these partitions are being made, or were."""
    with suppress(FileNotFoundError):
        paths = [path for path in (store / "staging").iterdir() if path.name.startswith("compact-")]
        return [path for path in paths if path.name.split("-")[1] in names]
    return []


# -- several stores ------------------------------------------------------------------------------


def audit_fleet(stores: Sequence[Path], *, session: SparkSession | None = None, **how: Any) -> Iterator[Outcome[Audit]]:
    """The audit of each store, with `how` for the other keywords of `audit_store`."""
    how |= _spread(session, audit_partition)
    return each_store(stores, lambda store: audit_store(store, **how), at_once=_at_once(session))


def export_fleet(
    stores: Sequence[Path], *, dest: Path, session: SparkSession | None = None, **how: Any
) -> Iterator[Outcome[Exported]]:
    """The export of each store into a directory of its own in `dest`, with `how` for `export_store`."""
    from ..transfer.parquet_export import export_slice, export_store, export_stores

    how |= _spread(session, export_slice)
    return export_stores(stores, dest, lambda store, into: export_store(store, into, **how), at_once=_at_once(session))


def compact_fleet(
    stores: Sequence[Path], *, session: SparkSession | None = None, **how: Any
) -> Iterator[Outcome[CompactionReport]]:
    """The compaction of each store, with `how` for `compact_store`."""
    if session is not None:
        how["run"] = lambda tasks, progress: compact_with_spark(tasks, spark=session)
    return each_store(stores, lambda store: compact_store(store, **how), at_once=_at_once(session))


def _at_once(session: SparkSession | None) -> int:
    return 1 if session is None else AT_ONCE
