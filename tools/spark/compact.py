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
from ...store.errors import DuelogError
from ..compaction import Failed
from ..sealed import Sealed, open_sealed
from .session import make_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def compact_with_spark(
    store: Path, plans: Sequence[CompactionPlan], *, master: str | None = None, spark: SparkSession | None = None
) -> list[Finished | Failed]:
    """Compact partitions as planned, a task for each; what is Finished waits in staging/ready/ to be adopted.

    One that cannot be compacted (it is damaged, or the disk is full) is Failed, and the others go on. spark: a session
    to use; else one is made as `master` says, and stopped. Raises SparkUnavailable, and SparkFailed with nothing
    published: a task has failed for good in a way that another attempt might not have.
    """
    if not plans:
        return []
    store = store.absolute()
    session = spark or make_session(master, name="duelog compact")
    from .tasks import run_tasks

    there = set(_attempts(store, plans))
    try:
        tasks = [pickle.dumps((str(store), plan)) for plan in plans]
        answers: list[Staged | Failed] = [pickle.loads(each) for each in run_tasks(session, copy_partition, tasks)]
        return [each if isinstance(each, Failed) else _publish(store, each) for each in answers]
    finally:
        if spark is None:
            session.stop()
        for left in set(_attempts(store, plans)) - there:
            remove_tree(left)


def copy_partition(task: bytes) -> bytes:
    """What one task does: copy and verify a partition. From and to a pickle, as tasks want it."""
    store, plan = pickle.loads(task)
    sealed = Sealed(store, plan.start_ms, plan.end_ms, plan.generation, plan.file_bytes)
    result: Staged | Failed
    try:
        with open_sealed(sealed, plan.store_id) as source:
            result = stage_generation(Path(store), source, plan)
    except DuelogError as error:
        result = Failed(plan.start_ms, str(error))
    return pickle.dumps(result)


def _publish(store: Path, staged: Staged) -> Finished | Failed:
    try:
        return hand_over(store, staged)
    except FileNotFoundError:
        return Failed(staged.start_ms, "the store was opened meanwhile, which clears staging/: try again")


def _attempts(store: Path, plans: Sequence[CompactionPlan]) -> list[Path]:
    """Directories in which attempts of these partitions are being made, or were."""
    names = {plan.partition for plan in plans}
    found: list[Path] = []
    with suppress(FileNotFoundError):
        found = [path for path in (store / "staging").iterdir() if path.name.startswith("compact-")]
    return [path for path in found if path.name.split("-")[1] in names]
