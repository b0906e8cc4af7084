"""Firing what is left of one partition log, and copying it for a snapshot; how entries come in: log_entries.py.

The frontier (C, T) says that the entries below T at or before C have fired and no others.

A firing is three steps: `take` chooses a bounded batch and moves the frontier in memory, the caller
commits markers and the new frontier record in one transaction, then `confirm`, from the commit itself, or `roll_back`.
One firing at a time; appends may arrive meanwhile, and are late or not by the frontier that `take` left.

What does not come to its end, interrupted or by an error, leaves the log `torn`: what it has in memory is not known to
be what the disk says is left to fire. Its owner then forgets it and reads it back.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from ...partitions.index.index_cut import Piece
from ...snapshot.writer import Cut
from ...store.codec.frontier import FrontierRecord
from ...store.codec.run import Int64s, UInt32s
from ...store.errors import BrokenInvariant
from .log_entries import LogEntries

_COPIED_AT_ONCE = 1 << 18
"""Entries of the index copied with the lock in hand: about 1 ms."""

HAND_OVER_S = 0.0005
"""A thread that lets a lock go and takes it at once gets it again; one that waits for it needs this long."""


class Taken(NamedTuple):
    """A batch on its way into the main log, in firing order, and what is to be recorded with it."""

    entries: UInt32s
    dues: Int64s
    late: int
    """How many of the first entries were late."""
    frontier: FrontierRecord
    """The new frontier; its last marker is filled in by whoever appends the markers."""
    before: FrontierRecord


class LogFiring(LogEntries):
    """The unfired entries of one topic's log in one begun partition, and their firing. Thread-safe."""

    # -- firing ------------------------------------------------------------------------------------

    def next_due_ms(self) -> int | None:
        """A lower bound of when something is due: 0 when late entries wait, None when nothing is left."""
        with self._lock:
            return self._next_due_ms()

    def _next_due_ms(self) -> int | None:
        if self._heard is not None:
            return None
        if len(self._late_entries):
            return 0
        return self._index.next_due_ms()

    def exact_next_due_ms(self) -> int | None:
        """When the next entry is due, 0 when late entries wait, None when nothing is left.

        Puts the earliest bucket in order if that is still to be done, which makes the next `take` quick.
        """
        with self._lock:
            if self._heard is not None or len(self._late_entries):
                return self._next_due_ms()
            torn, self.torn = self.torn, True
            try:
                due_ms = self._index.exact_next_due_ms()
            except Exception:
                if self._index.could_not_read():
                    self.torn = torn
                raise
            self.torn = torn
            return due_ms

    def take(self, now_ms: int, limit: int) -> Taken | None:
        """Choose at most `limit` entries due by `now_ms` and move the frontier in memory; None: nothing is due.

        Late entries go first; only when all of them are in the batch may C advance, because T must not
        pass an unfired late entry.
        """
        with self._lock:
            if self._heard is not None:
                return None
            torn, self.torn, self._on_its_way = self.torn, True, True
            before = self.frontier
            waiting = len(self._late_entries)
            late = min(waiting, limit)
            entries, dues = self._late_entries[:late], self._late_dues[:late]
            if late:
                order = np.lexsort((entries, dues))
                entries, dues = entries[order], dues[order]
            if late < waiting:
                frontier = before._replace(absorbed_end=int(self._late_entries[late]), fired=before.fired + late)
            else:
                try:
                    on_time, on_time_dues = self._index.take(now_ms, limit - late)
                except Exception:
                    if self._index.could_not_read():  # then nothing has been removed
                        self.torn, self._on_its_way = torn, False
                    raise
                if not late and not len(on_time):
                    self.torn, self._on_its_way = torn, False
                    return None
                frontier = before._replace(absorbed_end=self._tail, fired=before.fired + late + len(on_time))
                if len(on_time):
                    frontier = frontier._replace(due_ms=int(on_time_dues[-1]), entry_id=int(on_time[-1]))
                    entries = np.concatenate((entries, on_time))
                    dues = np.concatenate((dues, on_time_dues))
            # Invariant: C never goes back, T never goes back.
            if (frontier.due_ms, frontier.entry_id) < (
                before.due_ms,
                before.entry_id,
            ) or frontier.absorbed_end < before.absorbed_end:
                raise BrokenInvariant(f"frontier {frontier} is behind {before}")
            self._late_entries, self._late_dues = self._late_entries[late:], self._late_dues[late:]
            self.frontier = frontier
            self._takes += 1
            self.torn = torn
            return Taken(entries, dues, late, frontier, before)

    def confirm(self, recorded: FrontierRecord) -> None:
        """The markers and this frontier are on disk. Called as the commit ends."""
        with self._lock:
            self.frontier = recorded
            self._on_its_way = False

    def roll_back(self, taken: Taken) -> None:
        """Nothing was written: everything taken is left to fire again, and the frontier is as before."""
        with self._lock:
            torn, self.torn = self.torn, True
            self.frontier = taken.before
            # What arrived since and was late by the frontier now withdrawn may not be late any more.
            arrived_late = taken.before.passes(self._late_entries, self._late_dues)
            back_entries = np.concatenate((taken.entries[taken.late :], self._late_entries[~arrived_late]))
            back_dues = np.concatenate((taken.dues[taken.late :], self._late_dues[~arrived_late]))
            late = np.concatenate((taken.entries[: taken.late], self._late_entries[arrived_late]))
            late_dues = np.concatenate((taken.dues[: taken.late], self._late_dues[arrived_late]))
            order = np.argsort(late)
            self._late_entries, self._late_dues = late[order], late_dues[order]
            order = np.lexsort((back_entries, back_dues))
            self._index.put_back(back_entries[order], back_dues[order])
            self.torn, self._on_its_way = torn, False

    # -- saving ------------------------------------------------------------------------------------

    @property
    def unsaved(self) -> int:
        """How many entries a restart would have to replay after the newest snapshot."""
        return self._tail - self.saved_tail

    def cut(self) -> Cut | None:
        """A copy of the index as of one instant, for a snapshot; None while it is loaded or something is on its way.

        Gathered in slices of a few ms between which whoever appends gets the lock; None as well if something
        was taken in between. Covers the entries before the first late one that waits: that one, and what comes
        after it, is replayed.
        """
        with self._lock:
            if not self.loaded or self._on_its_way:
                return None
            takes, frontier = self._takes, self.frontier
            tail = int(self._late_entries[0]) if len(self._late_entries) else self._tail
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
    def unsettled(self) -> bool:
        """Whether enough has come in for `pack_next`; asked without the lock, it is a guess. O(1)."""
        return self.loaded and self._index.is_worth_packing(self._tail - self._packed_tail)

    def pack_next(self) -> bool:
        """Bring some of the index to its smaller form, 1 to 2 ms with the lock in hand; True: there is more of it."""
        with self._lock:
            if not self.loaded:
                return False
            torn, self.torn = self.torn, True
            if self._packed_to_ms is None:
                self._packed_tail = self._tail
            self._packed_to_ms = self._index.pack_next(self._packed_to_ms)
            self.torn = torn
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
            frontier = self.frontier
            if len(self._late_entries):
                # Invariant: what waits as late is at or before C and not below T, in append order.
                right = bool(frontier.passes(self._late_entries, self._late_dues).all())
                right &= int(self._late_entries[0]) >= frontier.absorbed_end
                if not right or (np.diff(self._late_entries.astype(np.int64)) <= 0).any():
                    raise BrokenInvariant(f"ledger {self.ledger_id}: what waits as late is not what the frontier says")
