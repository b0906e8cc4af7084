"""Compaction of one sealed generation: planned and, where it is worth it, copied and verified while it is open once.

A task carries all that is needed of the main environment and an answer all that the report tells, both picklable: so
this is what one core does one partition after the other, and what a Spark task does somewhere else. Claims are read
without looking at a run of any partition, and are well below a byte a message; planning, which reads the header of
every run, is shared out like copying. A task reads the generation and writes a directory of its own below staging/; its
caller publishes what it made (`publish`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..cleanup.compaction import Staged, hand_over, stage_generation
from ..cleanup.compaction_plan import plan_generation
from ..cleanup.log_claims import LogClaims
from ..store.errors import DamagedStore, DuelogError, StoreFailed, StoreUnavailable
from .columns.sealed import Sealed, open_generation

SWEPT = "the store was opened meanwhile, which clears staging/: try again"


class CompactionTask(NamedTuple):
    """One partition, and what makes its compaction worth it.

    claims: on each of its logs, as of the transaction in which the catalog had the generation. dry_run: plan only.
    """

    sealed: Sealed
    store_id: bytes
    claims: tuple[LogClaims, ...]
    min_dead_ratio: float
    dry_run: bool


class Figures(NamedTuple):
    """Size of a partition, and of what no subscription needs of it; bytes are those of bodies."""

    messages: int
    body_bytes: int
    dead_messages: int
    dead_bytes: int


class Failed(NamedTuple):
    """Why a partition could not be compacted; the store is as it was."""

    reason: str


class PartitionAnswer(NamedTuple):
    """Result of a task. figures None: it failed before it was planned. result None: nothing was to be copied."""

    start_ms: int
    figures: Figures | None
    worth_it: bool
    result: Staged | Failed | None


def compact_partition(
    task: CompactionTask, *, again: bool = False, progress: Callable[[int], object] = lambda done: None
) -> PartitionAnswer:
    """Plan a partition; if enough of it is dead, copy and verify it. Told bytes of the file dealt with, twice over.

    What is wrong with the partition, and a full disk, is an answer (Failed). So is what the system refuses (an OSError,
    or an error that it is the cause of), unless the task is begun `again` by the caller that gets it raised.
    """
    figures, worth_it = None, False
    result: Staged | Failed | None = None
    try:
        with open_generation(task.sealed, task.store_id) as source:
            plan = plan_generation(source, task.claims)
            entries = sum(log.entries for log in plan.logs)
            figures = Figures(entries, plan.body_bytes, plan.dead_entries, plan.dead_bytes)
            worth_it = plan.dead_entries > 0 and plan.dead_ratio >= task.min_dead_ratio
            if worth_it and not task.dry_run:
                result = stage_generation(Path(task.sealed.store), source, plan, progress=progress)
    except (DuelogError, OSError) as error:
        refused = _refused_by_system(error, Path(task.sealed.store) / "staging")
        if again and refused is not None:
            raise
        result = Failed(SWEPT if isinstance(refused, FileNotFoundError) else str(error))
    return PartitionAnswer(task.sealed.start_ms, figures, worth_it, result)


def _refused_by_system(error: DuelogError | OSError, staging: Path) -> OSError | None:
    """The system's refusal; None where the partition, or a full disk, is at fault."""
    if isinstance(error, OSError):
        return error
    staged = isinstance(error, (DamagedStore, StoreFailed)) and staging in error.path.parents
    refused = error.__cause__ if staged or isinstance(error, StoreUnavailable) else None
    return refused if isinstance(refused, OSError) else None


def publish(store: Path, answer: PartitionAnswer) -> PartitionAnswer:
    """Hand over what an answer has staged, from when on it may be adopted; Failed where it is no longer there."""
    if not isinstance(answer.result, Staged):
        return answer
    try:
        return answer._replace(result=hand_over(store, answer.result))
    except FileNotFoundError:
        return answer._replace(result=Failed(SWEPT))
