"""Compaction of a store's closed partitions, beside the process that has the store open or with none.

Reads what is claimed of all of them in one read transaction of the main environment, has each planned and, where it is
worth it, copied and verified while it is open once, and sees that they are adopted: at once where no process has the
store open, else by that one at its next tick. The store's lock is held for the moments of adoption only, so a store can
be opened meanwhile; what was being copied then is lost, and reported.

One partition is a task that carries all that is needed of the main environment, and an answer that has all that the
report tells, both picklable: one core does them one after the other, a Spark task does one somewhere else. Claims are
read without looking at a run of any partition, and are well below a byte a message; planning, which reads the header of
every run, is shared out like copying. A task writes a directory of its own below staging/, and its caller publishes it.

Of a copy in object storage a task fetches main and its partition, and puts what it has made beside the copy, from where
the process that ships there takes it (replica/compacted.py).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Self

from ..cleanup.adoption import Adopted, Refused, adopt_ready
from ..cleanup.compaction import Staged, hand_over, stage_generation
from ..cleanup.compaction_plan import partition_logs, plan_generation
from ..cleanup.log_claims import LogClaims, claims_of_logs, read_claims, reason_to_keep
from ..opening import Identity, StoreLock, open_main
from ..replica.bucket import Bucket
from ..replica.compacted import compacted_waiting, put_compacted
from ..replica.copied_store import Excerpt, open_copy
from ..store.clock import SystemClock
from ..store.codec.format import PartitionState, Relied
from ..store.config import StoreConfig
from ..store.env.memtable import Reads
from ..store.errors import (
    DamagedStore,
    DuelogError,
    InvalidArgument,
    ReplicaDamaged,
    StoreFailed,
    StoreLocked,
    StoreUnavailable,
)
from ..store.log import catalog
from .columns.sealed import (
    Sealed,
    copied_partitions,
    copy_url,
    excerpt,
    identity_of,
    open_generation,
    open_main_to_read,
    read_sealed,
)
from .values import MIN_DEAD_RATIO

SWEPT = "the store was opened meanwhile, which clears staging/: try again"


class CompactionTask(NamedTuple):
    """One partition, and what makes its compaction worth it.

    claims: on each of its logs, as of the transaction in which the catalog had the generation. dry_run: plan only.
    copied: how it is fetched from the store's copy, which says what is claimed; None: `sealed` says where it is.
    """

    sealed: Sealed
    store_id: bytes
    claims: tuple[LogClaims, ...]
    min_dead_ratio: float
    dry_run: bool
    copied: Excerpt | None = None


@dataclass(frozen=True, slots=True)
class PartitionCompaction:
    """The outcome of one partition, and its figures.

    outcome: "skipped" (too little to drop), "planned" (a dry run), "adopted", "waiting" (for the process that has the
    store open) or "failed", with the `reason`. dead_*: bodies that no subscription needs; file_bytes: the length of the
    file. messages, body_bytes and dead_* are 0 where it failed before it was planned.
    """

    partition: str
    generation: int
    messages: int
    body_bytes: int
    dead_messages: int
    dead_bytes: int
    file_bytes: int
    file_bytes_after: int | None = None
    outcome: str = "skipped"
    reason: str = ""

    @classmethod
    def of(cls, sealed: Sealed) -> Self:
        """The outcome of a partition that was not planned yet."""
        return cls(sealed.partition, sealed.generation, 0, 0, 0, 0, sealed.file_bytes)

    def failed(self, reason: str) -> Self:
        return replace(self, outcome="failed", reason=reason, file_bytes_after=None)

    @property
    def dead_ratio(self) -> float:
        return self.dead_bytes / self.body_bytes if self.body_bytes else 0.0


class PartitionAnswer(NamedTuple):
    """Result of a task: the outcome so far, and what was staged."""

    start_ms: int
    outcome: PartitionCompaction
    result: Staged | None = None

    def failed(self, reason: str) -> Self:
        return self._replace(outcome=self.outcome.failed(reason), result=None)


def compact_partition(
    task: CompactionTask, *, again: bool = False, progress: Callable[[int], object] = lambda done: None
) -> PartitionAnswer:
    """Plan a partition; if enough of it is dead, copy and verify it. Told bytes of the file dealt with, twice over.

    What is wrong with the partition, and a full disk, is an answer that says so. So is what the system refuses (an
    OSError, or an error that it is the cause of), unless the task is begun `again` by the caller that gets it raised.
    """
    if task.copied is not None:
        return _compact_copied(task, task.copied, again)
    found, result = PartitionCompaction.of(task.sealed), None
    try:
        with open_generation(task.sealed, task.store_id) as source:
            plan = plan_generation(source, task.claims)
            entries = sum(log.entries for log in plan.logs)
            found = replace(found, messages=entries, body_bytes=plan.body_bytes)
            found = replace(found, dead_messages=plan.dead_entries, dead_bytes=plan.dead_bytes)
            if plan.dead_entries > 0 and plan.dead_ratio >= task.min_dead_ratio:
                found = replace(found, outcome="planned")
                if not task.dry_run:
                    result = stage_generation(Path(task.sealed.store), source, plan, progress=progress)
                    found = replace(found, outcome="waiting", file_bytes_after=result.file_bytes)
    except (DuelogError, OSError) as error:
        refused = _refused_by_system(error, Path(task.sealed.store) / "staging")
        if again and refused is not None:
            raise
        found = found.failed(SWEPT if isinstance(refused, FileNotFoundError) else str(error))
    return PartitionAnswer(task.sealed.start_ms, found, result)


def _compact_copied(task: CompactionTask, copied: Excerpt, again: bool) -> PartitionAnswer:
    """Fetch a partition of a copy, compact it, and put the result beside the copy."""
    try:
        with copied.fetched() as path:
            tasks, found = _tasks(path, task.min_dead_ratio, task.dry_run)
            answers = [*found.answers.values(), *(compact_partition(each, again=again) for each in tasks)]
            (answer,) = answers
            if answer.result is not None:
                name = put_compacted(Bucket(task.sealed.store), answer.result)
                answer = answer._replace(result=answer.result._replace(directory=name))
            return answer._replace(outcome=replace(answer.outcome, file_bytes=task.sealed.file_bytes))
    except (ReplicaDamaged, DamagedStore) as error:
        return PartitionAnswer(task.sealed.start_ms, PartitionCompaction.of(task.sealed).failed(str(error)))


def _refused_by_system(error: DuelogError | OSError, staging: Path) -> OSError | None:
    """The system's refusal; None where the partition, or a full disk, is at fault."""
    if isinstance(error, OSError):
        return error
    staged = isinstance(error, (DamagedStore, StoreFailed)) and staging in error.path.parents
    refused = error.__cause__ if staged or isinstance(error, StoreUnavailable) else None
    return refused if isinstance(refused, OSError) else None


def publish(store: Path, answer: PartitionAnswer) -> PartitionAnswer:
    """Hand over what an answer has staged, from when on it may be adopted; a failure where it is no longer there."""
    if answer.result is None or copy_url(store) is not None:
        return answer
    try:
        return answer._replace(result=hand_over(store, answer.result))
    except FileNotFoundError:
        return answer.failed(SWEPT)


_ADOPTED_AT_ONCE = 64
_ADOPTED_AT_ONCE_BYTES = 256 << 20
"""So many partitions, or so many bytes of them, are finished before the store's lock is taken to adopt them: until
then both generations take space."""

Progress = Callable[[int, int], object]
"""Told (bytes dealt with so far, bytes in all): a partition is read twice, to copy it and to verify the copy. One that
is not copied has been dealt with once it is planned."""


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
        return sum(each.file_bytes for each in self.partitions if each.file_bytes_after is not None)

    @property
    def bytes_after(self) -> int:
        return sum(each.file_bytes_after or 0 for each in self.partitions)


Runner = Callable[[Sequence[CompactionTask], Callable[[int], object]], Iterable[PartitionAnswer]]
"""Does tasks and publishes what they have staged, in any order, with an answer for each; told bytes dealt with."""


def compact_store(
    path: Path,
    *,
    min_dead_ratio: float = MIN_DEAD_RATIO,
    dry_run: bool = False,
    run: Runner | None = None,
    progress: Progress = lambda done, total: None,
) -> CompactionReport:
    """Rewrite the closed partitions of which at least `min_dead_ratio` of the bytes of bodies is needed no more.

    path: or the URL of the store's copy in object storage: the process that ships there takes over what is finished
    with its next manifest, and until the one behind that such a partition is left out. What the store's retention
    keeps stays. What is dropped cannot be gone back to by seeking, as if it had been trimmed. run: what plans and
    copies; None: this process, one partition after the other. A partition that the store deletes or replaces before
    it was planned is left out; one that is damaged has failed.
    Not in a process that has the store open. Raises InvalidArgument, FormatMismatch, DamagedStore; of a copy what
    `open_copy` raises, and ReplicaUnreachable.
    """
    if not 0 <= min_dead_ratio <= 1:
        raise InvalidArgument("min_dead_ratio", min_dead_ratio, "expected a ratio of 0 to 1")
    if (url := copy_url(path)) is None:
        tasks, found = _tasks(path, min_dead_ratio, dry_run)
        return _compact(path, tasks, found, run or run_here, progress)
    with open_copy(url) as copy:
        waiting = compacted_waiting(Bucket(url))
        closed = [
            each
            for each, state, _ in copied_partitions(copy)
            if state is PartitionState.CLOSED
            and each.start_ms not in copy.behind
            and (each.start_ms, each.generation + 1) not in waiting
        ]
        tasks = [
            CompactionTask(each, copy.main.manifest.store_id, (), min_dead_ratio, dry_run, excerpt(copy, each.start_ms))
            for each in closed
        ]
        found = _Found({each.start_ms: each for each in closed})
        return _compact(copy.path, tasks, found, run or run_here, progress)


def _compact(
    path: Path, tasks: Sequence[CompactionTask], found: "_Found", run: Runner, progress: Progress
) -> CompactionReport:
    """Do tasks, and see that a store adopts what they have made; of a copy it does so by itself."""
    dealt_with = done = 0
    total = 2 * sum(task.sealed.file_bytes for task in tasks)

    def further(size: int) -> None:
        nonlocal done
        done += size
        progress(min(done, total), total)

    progress(0, total)
    waiting: list[Staged] = []
    for answer in run(tasks, further) if tasks else ():
        found.answers[answer.start_ms] = answer
        dealt_with += 2 * found.sealed[answer.start_ms].file_bytes
        further(max(0, dealt_with - done))
        if answer.result is None or tasks[0].copied is not None:
            continue
        waiting.append(answer.result)
        if len(waiting) >= _ADOPTED_AT_ONCE or sum(each.source_bytes for each in waiting) >= _ADOPTED_AT_ONCE_BYTES:
            found.note(_adopt(path))
            waiting = []
    if waiting:
        found.note(_adopt(path))
    return found.report(path)


def run_here(
    tasks: Sequence[CompactionTask], progress: Callable[[int], object] = lambda done: None
) -> Iterator[PartitionAnswer]:
    """Compact partitions in this process, one after the other."""
    for task in tasks:
        yield publish(Path(task.sealed.store), compact_partition(task, progress=progress))


def _tasks(path: Path, min_dead_ratio: float, dry_run: bool) -> "tuple[list[CompactionTask], _Found]":
    """A task for each closed partition, with the claims on all of them as of one point in time.

    Of one that cannot be read there is no task, and the answer instead.
    """

    def work(raw: Reads, identity: Identity, generations: list[Sealed]) -> tuple[list[CompactionTask], _Found]:
        found = _Found({sealed.start_ms: sealed for sealed in generations})
        now_ms = SystemClock().now_ms()
        known = read_claims(raw, "main", found.sealed, now_ms=now_ms)
        tasks = []
        for start_ms, sealed in found.sealed.items():
            try:
                with open_generation(sealed, identity.store_id) as source, source.read() as rows:
                    logs = partition_logs(rows)
            except DuelogError as error:
                found.answers[start_ms] = PartitionAnswer(start_ms, PartitionCompaction.of(sealed).failed(str(error)))
                continue
            claims = tuple(claims_of_logs(raw, known[start_ms], logs))
            tasks.append(CompactionTask(sealed, identity.store_id, claims, min_dead_ratio, dry_run))
        return tasks, found

    return read_sealed(path, work)


def _adopt(path: Path) -> list[Adopted | Refused] | None:
    """Adopt what is ready; None: a process has the store open, and does it."""
    identity, lock = identity_of(path), StoreLock(path)
    try:
        lock.take()
    except StoreLocked:
        return None
    try:
        config = StoreConfig(partition_ms=identity.partition_ms)
        with closing(open_main(path, config, identity, read_only=False)) as main:

            def retained(relied_on: Sequence[Relied]) -> str | None:
                with main.read() as raw:
                    return reason_to_keep(raw, relied_on, SystemClock().now_ms())

            return adopt_ready(path, main, identity.store_id, reason_in_memory=retained)
    finally:
        lock.release()


@dataclass(slots=True)
class _Found:
    """Rows of partitions by their start, as far as they are known."""

    sealed: dict[int, Sealed]
    answers: dict[int, PartitionAnswer] = field(default_factory=dict)
    adopted: dict[int, int] = field(default_factory=dict)
    """Bytes of the new file."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why, by the name of the directory."""

    def note(self, outcomes: Sequence[Adopted | Refused] | None) -> None:
        """Note the outcome of finished generations: these, or others that were there when adoption began."""
        for each in outcomes or ():
            if isinstance(each, Adopted):
                self.adopted[each.start_ms] = each.bytes_after
            else:
                self.refused[each.name] = each.reason

    def report(self, path: Path) -> CompactionReport:
        """A row for each partition but those that the store has deleted or replaced before they were planned."""
        rows = {start_ms: self._row(self.answers[start_ms]) for start_ms in self.sealed}
        unplanned = [start_ms for start_ms, row in rows.items() if row.outcome == "failed" and not row.messages]
        if unplanned:
            with open_main_to_read(path) as (_, main), main.read() as raw:
                records = dict(catalog.partitions(raw))
            for start_ms in unplanned:
                record = records.get(start_ms)
                expected = (PartitionState.CLOSED, self.sealed[start_ms].generation)
                if record is None or (record.state, record.generation) != expected:
                    del rows[start_ms]
        return CompactionReport(list(rows.values()))

    def _row(self, answer: PartitionAnswer) -> PartitionCompaction:
        if answer.start_ms in self.adopted:
            after = self.adopted[answer.start_ms]
            return replace(answer.outcome, outcome="adopted", file_bytes_after=after, reason="")
        name = "" if answer.result is None else Path(answer.result.directory).name
        return answer.outcome.failed(self.refused[name]) if name in self.refused else answer.outcome
