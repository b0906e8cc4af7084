"""Compaction over Spark: tasks plan and copy partitions, the driver publishes one attempt of each.

A task plans one partition by the claims that it carries; where that is worth it, it copies and verifies it in a
directory below staging/ that no other attempt has, and answers where. Once all have answered, the driver hands over
the attempts that Spark took, and removes what others have left. So a task that fails, is repeated or runs twice at a
time changes nothing but staging/, and what a driver that dies leaves there is removed when the store is next opened.

All tasks must reach the store's directory: a shared file system on a cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ...store.files.directory import remove_tree
from ..partition_compaction import CompactionTask, PartitionAnswer, compact_partition, publish
from .session import session_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def compact_with_spark(
    tasks: Sequence[CompactionTask], *, master: str | None = None, spark: SparkSession | None = None
) -> list[PartitionAnswer]:
    """Compact partitions of one store, a Spark task for each, the largest first; what was staged is handed over.

    The answer of one that cannot be compacted (it is damaged, or the disk is full) is Failed, and the others go on.
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
    """What a task does: raises what another attempt might mend, as Spark then begins it again."""
    return compact_partition(task, again=True)


def _attempts(store: Path, names: Iterable[str]) -> list[Path]:
    """Directories in which attempts at these partitions are being made, or were."""
    found: list[Path] = []
    with suppress(FileNotFoundError):
        found = [path for path in (store / "staging").iterdir() if path.name.startswith("compact-")]
    return [path for path in found if path.name.split("-")[1] in names]
