"""Compaction of a store's closed partitions, beside the process that has the store open or with none.

Plans from one read transaction of the main environment, has the partitions copied that are worth it, here or by
somebody else (Spark), and sees that they are adopted: at once where no process has the store open, else by that one at
its next tick. The store's lock is held for the moments of adoption only, so a store can be opened meanwhile; what was
being copied then is lost, and reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from ..cleanup.adoption import Adopted, Refused, adopt_ready
from ..cleanup.claims import read_all_claims
from ..cleanup.compaction import Finished, hand_over, stage_generation
from ..cleanup.compaction_plan import CompactionPlan, plan_compaction
from ..opening import Identity, StoreLock, open_main
from ..partitions.timespan import directory_name
from ..store import catalog
from ..store.clock import SystemClock
from ..store.config import StoreConfig
from ..store.errors import DamagedStore, DuelogError, InvalidArgument, StoreLocked
from .sealed import Sealed, identity_of, open_main_to_read, open_sealed, sealed_generations, sealed_in

DEFAULT_MIN_DEAD_RATIO = 0.3

_ADOPTED_AT_ONCE = 64
_ADOPTED_AT_ONCE_BYTES = 256 << 20
"""So many partitions, or so many bytes of them, are finished before the store's lock is taken to adopt them: until
then both generations take room."""

Progress = Callable[[int, int], object]
"""Told (bytes dealt with so far, bytes in all): each partition is read twice, to copy it and to verify the copy."""


@dataclass(frozen=True, slots=True)
class PartitionCompaction:
    """What became of one partition, and its figures.

    outcome: "skipped" (too little to drop), "planned" (a dry run), "adopted", "waiting" (for the process that has the
    store open) or "failed", with the `reason`. dead_*: bodies that nobody needs; file_bytes: the length of the file.
    """

    partition: str
    generation: int
    messages: int
    body_bytes: int
    dead_messages: int
    dead_bytes: int
    file_bytes: int
    file_bytes_after: int | None
    outcome: str
    reason: str = ""

    @property
    def dead_ratio(self) -> float:
        return self.dead_bytes / self.body_bytes if self.body_bytes else 0.0


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """Every closed partition of a store, by start."""

    partitions: list[PartitionCompaction]

    @property
    def failed(self) -> list[PartitionCompaction]:
        return [each for each in self.partitions if each.outcome == "failed"]

    @property
    def waiting(self) -> list[PartitionCompaction]:
        return [each for each in self.partitions if each.outcome == "waiting"]

    @property
    def bytes_before(self) -> int:
        """Bytes of the files that were compacted."""
        return sum(each.file_bytes for each in self.partitions if each.file_bytes_after is not None)

    @property
    def bytes_after(self) -> int:
        """Bytes of the files that came of it."""
        return sum(each.file_bytes_after or 0 for each in self.partitions)


@dataclass(frozen=True, slots=True)
class Failed:
    """A partition that could not be compacted; the store is as it was."""

    start_ms: int
    reason: str


Runner = Callable[[Path, Sequence[CompactionPlan], Callable[[int], object]], Iterable[Finished | Failed]]
"""Copies partitions as planned and hands them over; told bytes dealt with as it goes."""


def compact_store(
    path: Path,
    *,
    min_dead_ratio: float = DEFAULT_MIN_DEAD_RATIO,
    retention_ms: int = 0,
    dry_run: bool = False,
    run: Runner | None = None,
    progress: Progress = lambda done, total: None,
) -> CompactionReport:
    """Rewrite the closed partitions of which at least `min_dead_ratio` of the bytes of bodies is needed by nobody.

    retention_ms: keep what everybody has acknowledged while its main-log ledger is open, or was closed less than this
    ago: `StoreConfig.retention_ms`, which is not stored. What is dropped cannot be gone back to by seeking, as if it
    had been trimmed. run: who copies; None: this process, one partition after the other.
    Not in a process that has the store open. Raises InvalidArgument, FormatMismatch, DamagedStore.
    """
    if not 0 <= min_dead_ratio <= 1:
        raise InvalidArgument("min_dead_ratio", min_dead_ratio, "expected a ratio of 0 to 1")
    identity = identity_of(path)
    found = {plan.start_ms: plan for plan in _plan(path, identity, retention_ms)}
    chosen = [plan for plan in found.values() if plan.dead_entries and plan.dead_ratio >= min_dead_ratio]
    rows = {start_ms: _row(plan, "skipped") for start_ms, plan in found.items()}
    rows.update((plan.start_ms, _row(plan, "planned")) for plan in chosen)
    if dry_run or not chosen:
        return CompactionReport(list(rows.values()))
    done, total = 0, 2 * sum(plan.file_bytes for plan in chosen)

    def further(size: int) -> None:
        nonlocal done
        done += size
        progress(min(done, total), total)

    progress(0, total)
    rows.update((plan.start_ms, _row(plan, "failed", "nothing came of it")) for plan in chosen)
    waiting: list[Finished] = []
    for result in (run or run_here)(path, chosen, further):
        row = rows[result.start_ms]
        if isinstance(result, Failed):
            rows[result.start_ms] = replace(row, reason=result.reason)
            continue
        if row.outcome != "adopted":  # by an adoption since then, where all were handed over before the first was told
            rows[result.start_ms] = replace(row, outcome="waiting", reason="", file_bytes_after=result.file_bytes)
        waiting.append(result)
        if len(waiting) >= _ADOPTED_AT_ONCE or sum(each.source_bytes for each in waiting) >= _ADOPTED_AT_ONCE_BYTES:
            _note(rows, _adopt(path, identity), waiting)
            waiting = []
    if waiting:
        _note(rows, _adopt(path, identity), waiting)
    return CompactionReport(list(rows.values()))


def run_here(
    path: Path, plans: Sequence[CompactionPlan], progress: Callable[[int], object]
) -> Iterator[Finished | Failed]:
    """Copy partitions in this process, one after the other."""
    for plan in plans:
        sealed = Sealed(str(path.absolute()), plan.start_ms, plan.end_ms, plan.generation, plan.file_bytes)
        try:
            with open_sealed(sealed, plan.store_id) as source:
                result: Finished | Failed = hand_over(path, stage_generation(path, source, plan, progress=progress))
        except FileNotFoundError:
            result = Failed(plan.start_ms, "the store was opened meanwhile, which clears staging/: try again")
        except (DuelogError, OSError) as error:
            result = Failed(plan.start_ms, str(error))
        yield result


def _plan(path: Path, identity: Identity, retention_ms: int) -> Iterator[CompactionPlan]:
    """A plan for each closed partition; one that goes meanwhile is left out."""
    generations = sealed_generations(path)  # opens main by itself, as is done next
    with open_main_to_read(path) as (_, main):
        now_ms = SystemClock().now_ms()
        with main.read() as raw:
            starts = [sealed.start_ms for sealed in generations]
            claims = read_all_claims(raw, main.name, starts, retention_ms=retention_ms, now_ms=now_ms)
        for sealed in generations:
            try:
                with open_sealed(sealed, identity.store_id) as source:
                    plan = plan_compaction(main, source, claims[sealed.start_ms])
            except DamagedStore:
                with main.read() as raw:
                    if sealed in sealed_in(path, catalog.partitions(raw)):
                        raise
                continue
            yield plan


def _adopt(path: Path, identity: Identity) -> list[Adopted | Refused] | None:
    """Adopt what is ready; None: a process has the store open, and does it."""
    try:
        lock = StoreLock(path)
    except StoreLocked:
        return None
    try:
        config = StoreConfig(partition_ms=identity.partition_ms)
        with closing(open_main(path, config, identity, read_only=False)) as main:
            return adopt_ready(path, main, identity.store_id)
    finally:
        lock.release()


def _note(
    rows: dict[int, PartitionCompaction], adopted: list[Adopted | Refused] | None, waiting: Sequence[Finished]
) -> None:
    by_name = {Path(each.directory).name: each.start_ms for each in waiting}
    for each in adopted or ():
        if isinstance(each, Adopted):
            if each.start_ms in rows:
                row = rows[each.start_ms]
                rows[each.start_ms] = replace(row, outcome="adopted", file_bytes_after=each.bytes_after)
        elif each.name in by_name:
            start_ms = by_name[each.name]
            rows[start_ms] = replace(rows[start_ms], outcome="failed", reason=each.reason, file_bytes_after=None)


def _row(plan: CompactionPlan, outcome: str, reason: str = "") -> PartitionCompaction:
    return PartitionCompaction(
        directory_name(plan.start_ms),
        plan.generation,
        sum(log.entries for log in plan.logs),
        plan.body_bytes,
        plan.dead_entries,
        plan.dead_bytes,
        plan.file_bytes,
        None,
        outcome,
        reason,
    )
