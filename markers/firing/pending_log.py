"""The unfired entries of one partition log: entries come in, a batch is taken, and confirmed or rolled back.

The frontier (C, T) says that the entries below T at or before C have fired and no others. Whatever way an entry comes
in (appended, read back, admitted) it says where it belongs: after C into the delay index; at or before C and below T
it has fired; at or before C from T on it is late (`LateEntries`).

A firing is three steps: `take` chooses a bounded batch and moves the frontier in memory, the caller commits markers
and the new frontier record in one transaction, then `confirm`, from the commit itself, or `roll_back`. One firing at a
time; appends may arrive meanwhile, and are late or not by the frontier that `take` left.

A change that an interrupt or an error breaks off leaves the log TORN: its memory may differ from the disk. Its owner
closes it, and loads the partition again (loaded.py).
"""

import threading
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap

from ...partitions.due_column import DueBatch
from ...partitions.index.delay_index import DelayIndex, DueOf
from ...partitions.index.index_cut import Piece
from ...snapshot.writer import Cut
from ...store.codec.frontier import HELD, FrontierRecord
from ...store.codec.run import Int64s, UInt32s
from ...store.errors import BrokenInvariant


class LateEntries:
    """Entries at or before C that have not fired: ids, ascending, and due times.

    They came after firing had passed their due time, or were admitted after it. T of the frontier cannot pass one
    until it has fired. Few as a rule, so every operation is O(entries). REQUIRES of every call: the log's lock.
    """

    __slots__ = ("dues", "entries")

    def __init__(self) -> None:
        self.entries: UInt32s = np.empty(0, np.uint32)
        self.dues: Int64s = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self.entries)

    def add(self, entries: UInt32s, dues: Int64s) -> None:
        """Add entries; one that is here already stays once."""
        self.entries, kept = np.unique(np.concatenate((self.entries, entries)), return_index=True)
        self.dues = np.concatenate((self.dues, dues))[kept]

    def first(self, count: int) -> tuple[UInt32s, Int64s]:
        entries, dues = self.entries[:count], self.dues[:count]
        order = np.lexsort((entries, dues))
        return entries[order], dues[order]

    def remove_first(self, count: int) -> None:
        self.entries, self.dues = self.entries[count:], self.dues[count:]

    def remove_after(self, frontier: FrontierRecord) -> tuple[UInt32s, Int64s]:
        """Remove and return those that come after C of `frontier`."""
        late = frontier.passes(self.entries, self.dues)
        removed = self.entries[~late], self.dues[~late]
        self.entries, self.dues = self.entries[late], self.dues[late]
        return removed

    def discard(self, entries: BitMap) -> None:
        if len(self.entries):
            keep = np.array([entry_id not in entries for entry_id in self.entries.tolist()])
            self.entries, self.dues = self.entries[keep], self.dues[keep]

    def check(self, frontier: FrontierRecord) -> None:
        """Raise BrokenInvariant unless all are at or before C and not below T, ascending."""
        if len(self.entries) and not (
            frontier.passes(self.entries, self.dues).all()
            and int(self.entries[0]) >= frontier.absorbed_end
            and (np.diff(self.entries.astype(np.int64)) > 0).all()
        ):
            raise BrokenInvariant(f"entries {self.entries} at {self.dues} are not late by {frontier}")


class LogState(Enum):
    """Where a log is between its loading and its end."""

    LOADING = "loading"
    """Entries that come in are kept aside; the index belongs to the thread that loads it. Nothing fires."""
    LOADED = "loaded"
    """It may fire."""
    FIRING = "firing"
    """A batch was taken, and is neither confirmed nor rolled back."""
    TORN = "torn"
    """A change has begun; an interrupted one leaves the log so, to be loaded again."""
    CLOSED = "closed"
    """Its partition was unloaded, or its topic deleted: nothing of it fires any more."""


class Taken(NamedTuple):
    """A batch on its way into the main log, in firing order, and the frontier to be recorded with it."""

    entries: UInt32s
    dues: Int64s
    late: int
    """How many of the first entries were late."""
    frontier: FrontierRecord
    """The new frontier; its last marker is filled in by the append of the markers."""
    before: FrontierRecord


_ABSORBED_AT_ONCE = 1 << 16
"""Entries heard while loading that are put into the index with the lock in hand, at the end of it."""

_BULK = 100
"""From this many on, cancelled entries are looked for in all buckets at once."""

_COPIED_AT_ONCE = 1 << 18
"""Entries of the index copied with the lock in hand: about 1 ms."""

HAND_OVER_S = 0.0005
"""A thread that lets a lock go and takes it at once gets it again; one that waits for it needs this long."""


class PendingLog:
    """The unfired entries of one topic's log in one begun partition. Thread-safe."""

    def __init__(
        self, topic_id: int, start_ms: int, frontier: FrontierRecord, index: DelayIndex, *, loaded: bool
    ) -> None:
        """`loaded` False: what comes in is kept aside until `finish_loading`."""
        self.topic_id = topic_id
        self.start_ms = start_ms
        self.frontier = frontier
        self.saved_tail = 0
        """Entries below it are covered by a complete snapshot; belongs to the thread that saves and loads."""
        self._state = LogState.LOADED if loaded else LogState.LOADING
        self._index = index
        self._late = LateEntries()
        self.tail = 0
        """Entries below it are in the index, late, or fired."""
        self._takes = 0
        self._packed_tail = 0
        """The tail when packing last began."""
        self._packed_to_ms: int | None = None
        self._heard: list[DueBatch] = []
        self._cancelled = BitMap()
        """Entries that came in, or were cancelled, while it was loading; a cancellation is the last word."""
        self._lock = threading.Lock()

    @property
    def ledger_id(self) -> int:
        return self.frontier.ledger_id

    @property
    def due_of(self) -> DueOf:
        return self._index.due_of

    @property
    def state(self) -> LogState:
        """The state between two changes: waits for the lock."""
        with self._lock:
            return self._state

    @property
    def loaded(self) -> bool:
        """True when it may fire, or is firing."""
        return self.state in (LogState.LOADED, LogState.FIRING)

    @property
    def whole(self) -> bool:
        """Return whether memory has exactly the unfired entries. REQUIRES: nothing is fired meanwhile."""
        return self.state not in (LogState.FIRING, LogState.TORN)

    def __len__(self) -> int:
        """Entries left to fire, as far as loaded."""
        return len(self._index) + len(self._late)

    def counts(self) -> tuple[Int64s, Int64s] | None:
        """Starts of buckets, and how many unfired entries each has, as `DelayIndex.counts`; None until it is loaded.

        Late entries count by their due times.
        """
        with self._lock:
            if self._state not in (LogState.LOADED, LogState.FIRING):
                return None
            starts, counts = self._index.counts()
            return np.concatenate((self._late.dues, starts)), np.concatenate((np.ones_like(self._late.dues), counts))

    def memory_bytes(self) -> int:
        """Estimated bytes of the delay index (see DelayIndex.memory_bytes); 0 until it is loaded."""
        with self._lock:
            return 0 if self._state is LogState.LOADING else self._index.memory_bytes()

    def close(self) -> None:
        """Nothing of it fires any more, wherever it is still referred to."""
        with self._lock:
            self._state = LogState.CLOSED

    # -- loading -----------------------------------------------------------------------------------

    def restore_index(self, index: DelayIndex, tail: int) -> None:
        """Take over an index restored from a snapshot that covers the entries below `tail`.

        REQUIRES: nothing absorbed yet; the index holds no fired entry, and none late.
        """
        with self._lock:
            self._index = index
            self.tail = self.saved_tail = tail

    def restore(self, first_entry: int, dues: Int64s) -> None:
        """Entries read back from the due column, in order; fired ones are left out. REQUIRES: it is loading.

        Without the lock, so that appends are not held up: what they bring is kept aside.
        """
        self._absorb(first_entry, dues)

    def restore_admitted(self, entries: UInt32s, dues: Int64s) -> None:
        """Conditional entries below the tail that may fire; those that are in the index already, or fired, stay so.

        REQUIRES: it is loading.
        """
        self._index.discard(BitMap(entries.tolist()))
        self._place(entries, dues)

    def skip_unreadable(self, limit: int) -> None:
        """The entries from the tail up to `limit` cannot be read: go on after them."""
        with self._lock:
            self.tail = max(self.tail, limit)

    def finish_loading(self) -> None:
        """End loading once the log is read up to where listening began: add the entries heard since, then fire.

        Appends meanwhile wait for the last few entries only.
        """
        while True:
            with self._lock:
                if self._state is LogState.CLOSED:
                    return
                heard, self._heard = self._heard, []
                if sum(len(batch.dues) for batch in heard) <= _ABSORBED_AT_ONCE:
                    self._finish_loading(heard)
                    return
            for first_entry, dues in heard:
                self._absorb(first_entry, dues)

    def _finish_loading(self, heard: list[DueBatch]) -> None:
        self._state = LogState.TORN
        for first_entry, dues in heard:
            self._absorb(first_entry, dues)
        self._discard(self._cancelled)
        self._cancelled = BitMap()
        self._state = LogState.LOADED

    # -- entries come in -------------------------------------------------------------------------

    def hear(self, first_entry: int, dues: Int64s) -> None:
        """Entries were committed. Called in commit order by the leader of the partition's commits."""
        self._change(lambda: self._heard.append(DueBatch(first_entry, dues)), lambda: self._absorb(first_entry, dues))

    def discard(self, entries: BitMap) -> None:
        """Entries were cancelled: they are not fired. While loading it is noted, and done at its end."""
        self._change(lambda: self._cancelled.update(entries), lambda: self._discard(entries))

    def withdraw(self, dues: Mapping[int, int]) -> None:
        """Discard entries whose due times are known: quick for a few."""
        self._change(lambda: self._cancelled.update(dues), lambda: self._withdraw(dues))

    def _withdraw(self, dues: Mapping[int, int]) -> None:
        if len(dues) > _BULK or len(self._late):
            self._discard(BitMap(dues))
        else:
            for entry_id, due_ms in dues.items():
                self._index.discard_one(entry_id, due_ms)

    def _change(self, note: Callable[[], object], make: Callable[[], object]) -> None:
        """Make a change, or note it while the log is loading; one that does not come to its end leaves the log torn."""
        with self._lock:
            before, self._state = self._state, LogState.TORN
            if before is LogState.LOADING:
                note()
            elif before is not LogState.CLOSED:
                make()
            self._state = before

    def _absorb(self, first_entry: int, dues: Int64s) -> None:
        if first_entry < self.tail:
            raise BrokenInvariant(f"entry {first_entry} of ledger {self.ledger_id} comes twice, tail {self.tail}")
        frontier = self.frontier
        self.tail = first_entry + len(dues)
        if len(dues) == 1 and frontier.due_ms < int(dues[0]) != HELD:  # a single send, the commonest
            self._index.add_one(first_entry, int(dues[0]))
            return
        held = dues == HELD
        if held.any():
            self._place(np.arange(first_entry, self.tail, dtype=np.uint32)[~held], dues[~held])
            return
        if frontier.due_ms < 0 or int(dues.min()) > frontier.due_ms:
            self._index.add(first_entry, dues)
            return
        self._place(np.arange(first_entry, self.tail, dtype=np.uint32), dues)

    def _place(self, entries: UInt32s, dues: Int64s) -> None:
        """Put entries where they belong by the frontier; fired ones are left out. REQUIRES: none is in the index."""
        passed, fired = self.frontier.passes(entries, dues), self.frontier.has_fired(entries, dues)
        late = passed & ~fired
        if late.any():
            self._late.add(entries[late], dues[late])
        if not passed.all():
            self._index.add(entries[~passed], dues[~passed])

    def _discard(self, entries: BitMap) -> None:
        if entries:
            self._index.discard(entries)
            self._late.discard(entries)

    # -- firing ------------------------------------------------------------------------------------

    def next_due_ms(self) -> int | None:
        """A lower bound of when something is due: 0 when late entries wait, None when nothing is left to fire."""
        with self._lock:
            return self._next_due_ms()

    def _next_due_ms(self) -> int | None:
        if self._state in (LogState.LOADING, LogState.CLOSED):
            return None
        return 0 if len(self._late) else self._index.next_due_ms()

    def exact_next_due_ms(self) -> int | None:
        """When the next entry is due, 0 when late entries wait, None when nothing is left to fire.

        Puts the earliest bucket in order if that is still to be done, which makes the next `take` quick.
        """
        with self._lock:
            if self._state is not LogState.LOADED or len(self._late):
                return self._next_due_ms()
            self._state = LogState.TORN
            try:
                due_ms = self._index.exact_next_due_ms()
            except Exception:
                if self._index.could_not_read():
                    self._state = LogState.LOADED
                raise
            self._state = LogState.LOADED
            return due_ms

    def take(self, now_ms: int, limit: int) -> Taken | None:
        """Choose at most `limit` entries due by `now_ms` and move the frontier in memory; None: nothing is due.

        Late entries go first; only when all of them are in the batch may C advance, because T must not
        pass an unfired late entry.
        """
        with self._lock:
            if self._state is not LogState.LOADED:
                return None
            self._state = LogState.TORN
            before = self.frontier
            late = min(len(self._late), limit)
            entries, dues = self._late.first(late)
            if late < len(self._late):
                frontier = before._replace(absorbed_end=int(self._late.entries[late]), fired=before.fired + late)
            else:
                try:
                    on_time, on_time_dues = self._index.take(now_ms, limit - late)
                except Exception:
                    if self._index.could_not_read():  # then nothing has been removed
                        self._state = LogState.LOADED
                    raise
                if not late and not len(on_time):
                    self._state = LogState.LOADED
                    return None
                frontier = before._replace(absorbed_end=self.tail, fired=before.fired + late + len(on_time))
                if len(on_time):
                    frontier = frontier._replace(due_ms=int(on_time_dues[-1]), entry_id=int(on_time[-1]))
                    entries = np.concatenate((entries, on_time))
                    dues = np.concatenate((dues, on_time_dues))
            # Invariant: C never goes back, T never goes back.
            back = (frontier.due_ms, frontier.entry_id) < (before.due_ms, before.entry_id)
            if back or frontier.absorbed_end < before.absorbed_end:
                raise BrokenInvariant(f"frontier {frontier} is behind {before}")
            self._late.remove_first(late)
            self.frontier = frontier
            self._takes += 1
            self._state = LogState.FIRING
            return Taken(entries, dues, late, frontier, before)

    def confirm(self, recorded: FrontierRecord) -> None:
        """The markers and this frontier are on disk. Called as the commit ends."""
        with self._lock:
            self.frontier = recorded
            if self._state is LogState.FIRING:
                self._state = LogState.LOADED

    def roll_back(self, taken: Taken) -> None:
        """Put a batch that was not written back, to be fired again, and the frontier with it.

        A torn log stays as it is, to be loaded again.
        """
        with self._lock:
            if self._state is not LogState.FIRING:
                return
            self._state = LogState.TORN
            self.frontier = taken.before
            # What arrived since and was late by the frontier now withdrawn may not be late any more.
            entries, dues = self._late.remove_after(taken.before)
            self._late.add(taken.entries[: taken.late], taken.dues[: taken.late])
            entries = np.concatenate((taken.entries[taken.late :], entries))
            self._index.add(entries, np.concatenate((taken.dues[taken.late :], dues)))
            self._state = LogState.LOADED

    # -- saving and packing ------------------------------------------------------------------------

    @property
    def unsaved(self) -> int:
        """How many entries a restart would have to replay after the newest snapshot."""
        return self.tail - self.saved_tail

    def cut(self) -> Cut | None:
        """A copy of the index as of one instant, for a snapshot; None while it is not LOADED.

        Gathered in slices of a few ms between which appends get the lock; None as well if something was taken in
        between. Covers the entries before the first late one: that one, and what comes after it, is replayed.
        """
        with self._lock:
            if self._state is not LogState.LOADED:
                return None
            takes, frontier = self._takes, self.frontier
            tail = int(self._late.entries[0]) if len(self._late) else self.tail
            gathering = self._index.cut(tail)
        gathering.arrange()
        pieces: list[Piece] = []
        while True:
            with self._lock:
                if takes != self._takes:
                    return None
                more = gathering.more(_COPIED_AT_ONCE)
            if not more:
                return Cut(self.start_ms, self._index.bucket_ms, tail, frontier, pieces)
            pieces += more
            time.sleep(HAND_OVER_S)

    @property
    def is_worth_packing(self) -> bool:
        """Guess, without the lock, whether enough entries came in for `pack` to begin. O(1)."""
        return self._state is not LogState.LOADING and self._index.is_worth_packing(self.tail - self._packed_tail)

    def pack(self) -> bool:
        """Pack some buckets of the index, 1 to 2 ms with the lock in hand; True: there are more of them."""
        with self._lock:
            if self._state not in (LogState.LOADED, LogState.FIRING):
                return False
            before, self._state = self._state, LogState.TORN
            if self._packed_to_ms is None:
                self._packed_tail = self.tail
            self._packed_to_ms = self._index.pack(self._packed_to_ms)
            self._state = before
            return self._packed_to_ms is not None

    def unreadable(self) -> list[int]:
        """Entries whose due time could not be read when they were to fire, taken once."""
        with self._lock:
            found = list(self._index.unreadable)
            self._index.unreadable.clear()
            return found

    def _check(self) -> None:
        with self._lock:
            self._index._check()
            self._late.check(self.frontier)
