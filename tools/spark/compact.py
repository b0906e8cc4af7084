"""Compaction over Spark: tasks copy partitions, the driver publishes one attempt of each.

A task copies and verifies one partition in a directory below staging/ that no other attempt has, and answers where.
Once all have answered, the driver hands over the attempts that Spark took, and removes what others have left. So a task
that fails, is repeated or runs twice at a time changes nothing but staging/, and what a driver that dies leaves there
is removed when the store is next opened.

All tasks must reach the store's directory: a shared file system on a cluster.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ...cleanup.compaction import Finished, Staged, hand_over, stage_generation
from ...cleanup.compaction_plan import CompactionPlan
from ...store.directory import remove_tree
from ..sealed import Sealed, open_sealed
from .session import make_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def compact_with_spark(
    store: Path, plans: Sequence[CompactionPlan], *, master: str | None = None, spark: SparkSession | None = None
) -> list[Finished]:
    """Compact partitions as planned, a task for each; what is returned waits in staging/ready/ to be adopted.

    spark: a session to use; else one is made as `master` says, and stopped. Raises SparkUnavailable, and SparkFailed
    with nothing published.
    """
    if not plans:
        return []
    store = store.absolute()
    session = spark or make_session(master, name="duelog compact")
    from .tasks import run_tasks

    there = set(_attempts(store, plans))
    try:
        tasks = [pickle.dumps((str(store), plan)) for plan in plans]
        staged: list[Staged] = [pickle.loads(answer) for answer in run_tasks(session, copy_partition, tasks)]
        return [hand_over(store, each) for each in staged]
    finally:
        if spark is None:
            session.stop()
        for left in set(_attempts(store, plans)) - there:
            remove_tree(left)


def copy_partition(task: bytes) -> bytes:
    """What one task does: copy and verify a partition. From and to a pickle, as tasks want it."""
    store, plan = pickle.loads(task)
    sealed = Sealed(store, plan.start_ms, plan.end_ms, plan.generation, plan.file_bytes)
    with open_sealed(sealed, plan.store_id) as source:
        return pickle.dumps(stage_generation(Path(store), source, plan))


def _attempts(store: Path, plans: Sequence[CompactionPlan]) -> list[Path]:
    """Directories in which attempts of these partitions are being made, or were."""
    names = {plan.partition for plan in plans}
    found: list[Path] = []
    with suppress(FileNotFoundError):
        found = [path for path in (store / "staging").iterdir() if path.name.startswith("compact-")]
    return [path for path in found if path.name.split("-")[1] in names]
