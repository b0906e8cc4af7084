"""The tick of a store: load, fire, close, save, expire, persist, trim, delete. One tick at a time.

A tick does whatever is due now, in that order, and says when the next thing is. It is run by the
scheduler thread, by the program, or by `receive` where there is no thread.

A tick is made of slices of some ten ms: a piece of a partition being loaded, batches of what is due, one
transaction of a snapshot, some of an index put to sleep, and the small things. So what takes long (loading ten million
entries, saving them, a backlog after a long stop) holds up neither what is due meanwhile nor the flushing of
acknowledgements, and `receive` hands out what the first slices fired while later partitions still load.

Each piece may fail on its own: it is suspended with its error, tried again after a pause, and the others go on
(markers/firing/suspensions.py). What is raised concerns the whole store.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from duelog.cleanup.deletion import deletable, delete_partition, finish_deletion
from duelog.markers.firing.firing import Firing
from duelog.markers.firing.suspensions import UPKEEP, Part, Suspension
from duelog.partitions.partition import Partition
from duelog.partitions.partition_set import Storage
from duelog.store.clock import ManualClock, StoreClock
from duelog.store.codec.format import PartitionState
from duelog.store.errors import ClockJumped, DuelogError, StoreFull
from duelog.store.files.system_calls import since_boot_s
from duelog.store.files.system_errors import explain
from duelog.store.listener import StoreListener, tell
from duelog.upkeep.quarantine import Quarantine

from ..sending.wal_writer import WalWriter
from ..topics.ack_flusher import AckFlusher
from .policies_in_force import Expiry
from .reclaiming import Adopting, IdSweep, Trimming
from .recurring import Recurring
from .scheduler import Wakeups

T = TypeVar("T")

_SLICE_S = 0.05
"""How long a slice goes on firing."""

_GIVE_WAY_MS = 3
"""After what was fired early is due: a thread that waits for that gets the interpreter before the rest of a slice."""


@dataclass(frozen=True, slots=True)
class TickResult:
    """The counts of one tick, and when the next thing is due.

    fired: messages whose markers were written. closed, deleted: partitions. trimmed: main-log ledgers.
    snapshots: delay indexes saved. next_due_ms: epoch ms of the next thing to do, None: nothing is planned.
    adopted: partitions replaced by their compacted generation. suspended: parts of the upkeep that failed, and are
    tried again later.
    """

    fired: int
    closed: int
    trimmed: int
    deleted: int
    snapshots: int
    next_due_ms: int | None
    adopted: int = 0
    suspended: tuple[Suspension, ...] = ()


_COUNTS = ("fired", "closed", "trimmed", "deleted", "snapshots", "adopted")
"""Fields of a TickResult that add up over the slices of a tick."""


@dataclass(frozen=True, slots=True, eq=False)
class Tasks:
    """The pieces of upkeep that a tick runs besides firing and deleting partitions."""

    recurring: Recurring
    expiry: Expiry
    trimming: Trimming
    adopting: Adopting
    id_sweep: IdSweep


class Fetching(Protocol):
    """Gives days back to the store's copy, and fetches them (duelog/replica/tiers.py)."""

    def run(self, now_ms: int) -> None:
        """Do, or have a thread do, what is to be done."""
        ...

    def next_ms(self, now_ms: int) -> int | None:
        """When there is more to do; None: it is not known."""
        ...


@dataclass(eq=False, repr=False)
class Maintenance:
    """The upkeep of one open store. `_wal_writer` is None in a read-only store."""

    _storage: Storage
    _clock: StoreClock
    _firing: Firing
    _flusher: AckFlusher
    _quarantine: Quarantine
    _wal_writer: WalWriter | None
    tasks: Tasks
    _wakeups: Wakeups

    def __post_init__(self) -> None:
        self._main = self._storage.main
        self._partitions = self._storage.partitions
        self.lock = threading.Lock()
        """Held during a tick, and by calls that must not run beside one."""
        self.stopping = False
        self.tiers: Fetching | None = None
        self.suspensions = self._firing.suspensions
        self._surveyed = False
        self._undeleted: list[int] = []
        self._gives_way = False
        """The last slice fired ahead of time and left all other steps to the next one."""
        self._seen: tuple[int, float] | None = None
        self._full: StoreFull | None = None
        """The first of the slice: later steps may free space, so it is raised at the end."""
        self._next_ms: int | None = 0
        """When the last slice said that there is more; 0: it did not come to its end, or the clock was set back."""
        self._deletion_holds = 0
        """Number of `deletions_held` blocks under way."""

    def accept_clock(self) -> None:
        """Believe the clock as it is now (after ClockJumped)."""
        self._seen = None

    # -- the tick --------------------------------------------------------------------------------

    def tick(self) -> TickResult:
        """Do whatever is due, all of it.

        Raises ClockJumped, StoreFull, StoreFailed; what was done stands. What fails on its own is in the result.
        """
        result, more = self.slice()
        while more:
            following, more = self.slice()
            sums = {name: getattr(result, name) + getattr(following, name) for name in _COUNTS}
            result = replace(following, **sums)
        return result

    def slice(self, *, if_due: bool = False) -> tuple[TickResult, bool]:
        """Run a slice of a tick, and return whether there is more; `next_due_ms` is then now, or when to go on.

        if_due: not before that time, unless something has asked for it since, as the scheduler's thread does. Raises as
        `tick`, and DuelogError where not even the time could be told, or when to go on.
        """
        with self.lock:
            if self._main.failed is not None:
                raise self._main.failed
            try:
                now_ms = self._time()
                if if_due and not self._wakeups.asked and (self._next_ms is None or now_ms < self._next_ms):
                    return TickResult(0, 0, 0, 0, 0, self._next_ms), False
                self._wakeups.asked, self._next_ms = False, 0
                result, more = self._slice(now_ms)
            except Exception as error:
                raise self._stopped(error)  # noqa: B904 - its cause is set
            if self._full is not None:
                raise self._full
            self._next_ms = 0 if more else result.next_due_ms
            self.suspensions.succeeded(UPKEEP, now_ms)
            return result, more

    def _slice(self, now_ms: int) -> tuple[TickResult, bool]:
        """Take every step of a tick once, in order. Returns its result, and whether a step has more to do now."""
        firing, tasks, suspensions = self._firing, self.tasks, self.suspensions
        gave_way, self._gives_way = self._gives_way, False
        self._full = None
        fired = closed = saved = 0
        loading = interrupted = saving = packing = False

        if tasks.recurring.is_late(now_ms):
            self._step("recur", now_ms, lambda: tasks.recurring.withdraw(now_ms, suspensions), None)
        if not self.stopping:
            if self.tiers is not None:
                self._step("tier", now_ms, functools.partial(self.tiers.run, now_ms), None)
            # A partition without space for its unapplied entries does not hold back the loaded ones.
            loading = self._step("load", now_ms, lambda: firing.loaded.load(now_ms), otherwise=False)
            fired, interrupted = self._fire(now_ms)
            if fired and not interrupted and firing.recorded_ms > now_ms and not gave_way:
                self._gives_way = True
                self._full = None  # the next slice meets it again
                return TickResult(fired, 0, 0, 0, 0, self._after_giving_way()), True
        if not self.stopping and not interrupted:
            closed = self._step("close", now_ms, lambda: self._close_finished(now_ms), 0)
            saved = self._step("snapshot", now_ms, lambda: firing.loaded.save(now_ms), 0)
            saving = firing.loaded.saving.is_due() and not suspensions.is_suspended(Part("snapshot"), now_ms)
            self._step("pack", now_ms, firing.loaded.pack, None)
            packing = firing.loaded.is_worth_packing() and not suspensions.is_suspended(Part("pack"), now_ms)
        advancing = not self.stopping and (loading or interrupted or closed > 0 or saving or packing)

        behind = advancing or self._full is not None
        recurring = self._step(
            "recur", now_ms, lambda: tasks.recurring.run(now_ms, suspensions, firing=behind), otherwise=False
        )
        self._step("expire", now_ms, lambda: tasks.expiry.run(now_ms, suspensions), None)
        self._step("flush", now_ms, lambda: self._flush(now_ms), None)
        if self._wal_writer is not None:
            self._step("apply", now_ms, functools.partial(self._wal_writer.checkpoint, now_ms), None)

        trimmed = self._step("trim", now_ms, lambda: self._trim(now_ms), 0)
        trimming = tasks.trimming.is_due(now_ms) and not suspensions.is_suspended(Part("trim"), now_ms)
        deleted = self._step("delete", now_ms, lambda: self._delete(now_ms), 0)
        adopted, adopting = self._step("adopt", now_ms, self._adopt, (0, False))
        if closed or trimmed or deleted:
            tasks.id_sweep.is_wanted = True
        sweeping = self._step("sweep", now_ms, lambda: tasks.id_sweep.run(now_ms), otherwise=False)

        more = advancing or recurring or trimming or adopting or sweeping
        next_due_ms = now_ms if more else self._next_due_ms(now_ms)
        firing.loaded.give_back_pages()
        suspended = tuple(suspensions.all()) if suspensions else ()
        return TickResult(fired, closed, trimmed, deleted, saved, next_due_ms, adopted, suspended), more

    def _fire(self, now_ms: int) -> tuple[int, bool]:
        """Fire batches for at most a slice. Returns how many messages fired, and whether a batch may be left."""
        until = time.perf_counter() + _SLICE_S
        fire = functools.partial(self._firing.fire, now_ms, now_ms + self._clock.lead_ms)
        fired = 0
        while batch := self._step("fire", now_ms, fire, 0):
            fired += batch
            if self.stopping or time.perf_counter() >= until:
                return fired, True
        return fired, False

    def _step(self, task: str, now_ms: int, action: Callable[[], T], otherwise: T) -> T:
        """Run a task; where it fails it is suspended, where there is no space it is tried again with the next slice."""
        try:
            return self.suspensions.run(Part(task), now_ms, action, otherwise)
        except StoreFull as error:
            self.suspensions.note(Part(task), error, now_ms, pauses=False)
            self._full = self._full or error
            return otherwise

    def _flush(self, now_ms: int) -> None:
        due_ms = self._flusher.due_ms()
        if due_ms is not None and due_ms <= now_ms:
            self._flusher.flush()
        self._quarantine.flush()

    def _stopped(self, error: Exception) -> DuelogError:
        """Turn the error that ended a slice into the one to raise; a broken invariant stops the store."""
        if isinstance(error, AssertionError):
            return self._main.fail(error)
        if self._main.failed is not None:
            return self._main.failed
        self.suspensions.note(UPKEEP, error, self._clock.now_ms(), pauses=not isinstance(error, ClockJumped))
        return explain(self._storage.path, error)

    def _time(self) -> int:
        """Now; refused when the clock ran ahead of the time that passed by more than the bound.

        After a clock was set back, no earlier than what was fired ahead of it: those messages are not held back again.
        """
        now_ms, passed_ms = self.read_clock()
        if self._seen is not None and now_ms < self._seen[0]:
            self._clock.raise_to(self._firing.recorded_ms)
            self._next_ms = 0
        self._seen = (now_ms, passed_ms)
        return max(now_ms, self._clock.mark_ms)

    def read_clock(self) -> tuple[int, float]:
        """(now, how long the machine has run), in ms, by any thread. Raises ClockJumped."""
        now_ms = self._clock.wrapped.now_ms()
        passed_ms = since_boot_s() * 1000
        bound_ms, seen = self._storage.config.max_clock_jump_ms, self._seen
        if seen is not None and bound_ms is not None and not isinstance(self._clock.wrapped, ManualClock):
            seen_ms, seen_at = seen
            if now_ms - seen_ms - (passed_ms - seen_at) > bound_ms:
                raise ClockJumped(seen_ms, now_ms, bound_ms)
        return now_ms, passed_ms

    def _close_finished(self, now_ms: int) -> int:
        closed = 0
        for start_ms in self._firing.close_finished(now_ms):
            self._undeleted.append(start_ms)
            closed += 1
        return closed

    def _after_giving_way(self) -> int:
        """When to go on: sooner where there is something to fire again."""
        again_ms, due_ms = self._firing.recorded_ms + _GIVE_WAY_MS, self._next_firing_ms()
        return again_ms if due_ms is None else min(again_ms, due_ms)

    def _next_firing_ms(self) -> int | None:
        """When to fire again: at half the lead before what is due, so that what is due until then is one commit."""
        due_ms = self._firing.next_due_ms()
        return None if due_ms is None else due_ms - self._clock.lead_ms // 2

    def _trim(self, now_ms: int) -> int:
        if not self._surveyed:
            self._undeleted.extend(deletable(self._main))
            self.tasks.trimming.look_at_all()
            self._surveyed = True
        try:
            return self.tasks.trimming.run(now_ms, self.suspensions)
        finally:
            self._undeleted += self.tasks.trimming.freed
            self.tasks.trimming.freed = []

    def _delete(self, now_ms: int) -> int:
        if self._deletion_holds:
            return 0
        starts, self._undeleted = sorted(set(self._undeleted)), []
        self.suspensions.keep("delete", lambda start_ms: self._partitions.get(start_ms) is not None)
        deleted = 0
        for at, start_ms in enumerate(starts):
            partition = self._partitions.get(start_ms)
            if partition is None:
                continue
            part = Part("delete", start_ms=start_ms)
            try:
                gone = self.suspensions.run(part, now_ms, functools.partial(self._delete_one, partition), None)
            except BaseException:
                self._undeleted.extend(starts[at:])
                raise
            if gone:
                deleted += 1
                self.suspensions.forget(start_ms=start_ms)
                tell(self._storage.listeners, StoreListener.partition_deleted, start_ms)
            elif gone is None or partition.state is PartitionState.DELETING:
                self._undeleted.append(start_ms)
        return deleted

    def _delete_one(self, partition: Partition) -> bool:
        if partition.state is PartitionState.DELETING:  # recorded before, and it was being read
            return finish_deletion(self._storage, partition)
        return delete_partition(self._storage, partition)

    def _adopt(self) -> tuple[int, bool]:
        """Adopt at most one generation, so that firing comes between two. Returns the number, and whether more wait."""
        if self._deletion_holds:
            return 0, False
        return self.tasks.adopting.run(at_most=1), self.tasks.adopting.more

    @contextmanager
    def deletions_held(self) -> Iterator[None]:
        """Keep every partition directory in place inside the block; released ones are removed after it."""
        with self.lock:
            self._deletion_holds += 1
        try:
            yield
        finally:
            with self.lock:
                self._deletion_holds -= 1
            self._wakeups.wake()

    def delete_released(self, starts: Sequence[int]) -> None:
        """Delete the partitions at `starts`, which have no references. REQUIRES: the lock."""
        self._undeleted.extend(starts)
        self._delete(self._clock.now_ms())

    def _next_due_ms(self, now_ms: int) -> int | None:
        not_before = self.suspensions.not_before
        candidates = (
            not_before(Part("fire"), self._next_firing_ms()),
            None if self.tiers is None else not_before(Part("tier"), self.tiers.next_ms(now_ms)),
            not_before(Part("load"), self._firing.loaded.next_load_ms(now_ms)),
            not_before(Part("close"), self._firing.next_close_ms()),
            not_before(Part("flush"), self._flusher.due_ms()),
            not_before(Part("expire"), self.tasks.expiry.due_ms()),
            not_before(Part("recur"), self.tasks.recurring.next_due_ms(self.suspensions)),
            None if self._wal_writer is None else not_before(Part("apply"), self._wal_writer.segments.due_ms()),
            not_before(Part("trim"), self.tasks.trimming.next_due_ms()),
            self.suspensions.next_ms(now_ms) if self.suspensions else None,
        )
        return min((due_ms for due_ms in candidates if due_ms is not None), default=None)
