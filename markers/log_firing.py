"""What is left to fire of one partition log: its delay index and its frontier.

The frontier (C, T) says that the entries below T at or before C have fired and no others. Appended
entries arrive in order: one at or before C is late and waits in `_late` (T cannot pass it until it has
fired), any other goes into the index.

A firing is three steps: `take` chooses a bounded batch and moves the frontier in memory, the caller
commits markers and the new frontier record in one transaction, then `confirm` or `roll_back`. One firing
at a time; appends may arrive meanwhile, and are late or not by the frontier that `take` left.
"""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from ..partitions.due_column import DueBatch
from ..partitions.index import DelayIndex, DueOf
from ..partitions.index_cut import Piece
from ..snapshot.writer import Cut
from ..store.errors import BrokenInvariant
from ..store.format import FrontierRecord
from ..store.ledger import HELD
from ..store.run import Int64s, UInt32s

_COPIED_AT_ONCE = 1 << 18
"""Entries of the index copied with the lock in hand: about 1 ms."""

HAND_OVER_S = 0.0005
"""A thread that lets a lock go and takes it at once gets it again; one that waits for it needs this long."""

_ABSORBED_AT_ONCE = 1 << 16
"""Entries heard while loading that are put into the index with the lock in hand, at the end of it."""

Key = tuple[int, int]
"""(due_ms, entry_id): the order of firing."""


_BULK = 100
"""From this many on, cancelled entries are looked for in all buckets at once."""


class Taken(NamedTuple):
    """A batch on its way into the main log, in firing order, and what is to be recorded with it."""

    entries: UInt32s
    dues: Int64s
    late: int
    """How many of the first entries were late."""
    frontier: FrontierRecord
    """The new frontier; its last marker is filled in by whoever appends the markers."""
    before: FrontierRecord


def _at_or_before(entries: UInt32s, dues: Int64s, key: Key) -> npt.NDArray[np.bool_]:
    passed: npt.NDArray[np.bool_] = (dues < key[0]) | ((dues == key[0]) & (entries.astype(np.int64) <= key[1]))
    return passed


class LogFiring:
    """The unfired entries of one topic's log in one begun partition. Thread-safe."""

    def __init__(
        self, topic_id: int, start_ms: int, frontier: FrontierRecord, index: DelayIndex, *, loaded: bool
    ) -> None:
        """`loaded` False: entries heard are kept aside until `finish_loading`."""
        self.topic_id = topic_id
        self.start_ms = start_ms
        self.frontier = frontier
        self.armed_ms: int | None = None
        """The due time under which the ready queue has it; belongs to the queue's lock."""
        self._index = index
        self._tail = 0
        """Entries below it are in the index, late, or fired."""
        self._late_entries: UInt32s = np.empty(0, np.uint32)
        self._late_dues: Int64s = np.empty(0, np.int64)
        self._heard: list[DueBatch] | None = None if loaded else []
        self._cancelled = BitMap()
        self._admitted: list[tuple[UInt32s, Int64s]] = []
        self._takes = 0
        self._on_its_way = False
        """Whether something was taken and neither confirmed nor rolled back."""
        self.saved_tail = 0
        """Entries below it are covered by a complete snapshot; belongs to whoever saves and loads."""
        self._settled_tail = 0
        """The tail when `settle` last began."""
        self._settled_ms: int | None = None
        self._lock = threading.Lock()

    @property
    def ledger_id(self) -> int:
        return self.frontier.ledger_id

    @property
    def due_of(self) -> DueOf:
        """Reads due times of the log's entries."""
        return self._index.due_of

    @property
    def tail(self) -> int:
        return self._tail

    @property
    def loaded(self) -> bool:
        return self._heard is None

    def __len__(self) -> int:
        """Entries left to fire, as far as loaded."""
        return len(self._index) + len(self._late_entries)

    def memory_bytes(self) -> int:
        """Estimated bytes of the delay index (see DelayIndex.memory_bytes); 0 while it is being loaded."""
        with self._lock:
            return 0 if self._heard is not None else self._index.memory_bytes()

    # -- entries come in -------------------------------------------------------------------------

    def hear(self, first_entry: int, dues: Int64s) -> None:
        """Entries were committed. Called in commit order by the leader of the partition's commits."""
        with self._lock:
            if self._heard is not None:
                self._heard.append(DueBatch(first_entry, dues))
            else:
                self._absorb(first_entry, dues)

    def restore(self, first_entry: int, dues: Int64s) -> None:
        """Entries read back from the due column, in order, while loading; fired ones are left out.

        Without the lock, so that whoever appends is not held up: until `finish_loading` the index belongs to
        the one thread that loads it, and what others bring is kept aside.
        """
        self._absorb(first_entry, dues)

    def restore_index(self, index: DelayIndex, tail: int) -> None:
        """Take over an index restored from a snapshot that covers the entries below `tail`.

        REQUIRES: nothing absorbed yet; the index holds no fired entry, and none late.
        """
        with self._lock:
            self._index = index
            self._tail = self.saved_tail = tail

    def finish_loading(self) -> None:
        """The log has been read up to where listening began: take what was heard since.

        Whoever appends meanwhile waits for a short rest of it only.
        """
        while True:
            with self._lock:
                heard, self._heard = self._heard or [], []
                if sum(len(batch.dues) for batch in heard) <= _ABSORBED_AT_ONCE:
                    self._finish(heard)
                    return
            for first_entry, dues in heard:
                self._absorb(first_entry, dues)

    def _finish(self, heard: list[DueBatch]) -> None:
        for first_entry, dues in heard:
            self._absorb(first_entry, dues)
        self._heard = None
        self._discard(self._cancelled)
        for entries, dues in self._admitted:
            self._admit(entries, dues)
        self._cancelled, self._admitted = BitMap(), []

    def skip_unreadable(self, limit: int) -> None:
        """The entries from the tail up to `limit` cannot be read: go on after them."""
        with self._lock:
            self._tail = max(self._tail, limit)

    def _absorb(self, first_entry: int, dues: Int64s) -> None:
        if first_entry < self._tail:
            raise BrokenInvariant(f"entry {first_entry} of ledger {self.ledger_id} comes twice, tail {self._tail}")
        frontier = self.frontier
        self._tail = first_entry + len(dues)
        held = dues == HELD
        if held.any():
            self._absorb_some(np.arange(first_entry, self._tail, dtype=np.uint32)[~held], dues[~held])
            return
        if frontier.due_ms < 0 or int(dues.min()) > frontier.due_ms:
            self._index.add(first_entry, dues)
            return
        self._absorb_some(np.arange(first_entry, self._tail, dtype=np.uint32), dues)

    def _absorb_some(self, entries: UInt32s, dues: Int64s) -> None:
        frontier = self.frontier
        passed = _at_or_before(entries, dues, (frontier.due_ms, frontier.entry_id))
        late = passed & (entries >= frontier.seen)
        if late.any():
            self._late_entries = np.concatenate((self._late_entries, entries[late]))
            self._late_dues = np.concatenate((self._late_dues, dues[late]))
        ahead = ~passed
        if ahead.any():
            self._index.add(entries[ahead], dues[ahead])

    def admit(self, entries: UInt32s, dues: Int64s) -> None:
        """Conditional entries heard before may fire now; those that are in the index already, or fired, stay so.

        REQUIRES: no firing since they were appended, so that one at or before C has fired.
        """
        with self._lock:
            if self._heard is not None:
                self._admitted.append((entries, dues))
            else:
                self._admit(entries, dues)

    def _admit(self, entries: UInt32s, dues: Int64s) -> None:
        ahead = ~_at_or_before(entries, dues, (self.frontier.due_ms, self.frontier.entry_id))
        entries, dues = entries[ahead], dues[ahead]
        if len(entries):
            self._index.discard(BitMap(entries.tolist()))
            self._index.add(entries, dues)

    def discard(self, entries: BitMap) -> None:
        """Entries were cancelled: they are not fired. While loading it is noted, and done at its end."""
        with self._lock:
            if self._heard is not None:
                self._cancelled |= entries
            else:
                self._discard(entries)

    def withdraw(self, entries: UInt32s, dues: Int64s) -> None:
        """As `discard`, for entries whose due times are known: quick for a few."""
        with self._lock:
            if self._heard is not None:
                self._cancelled |= BitMap(entries.tolist())
            elif len(entries) > _BULK or len(self._late_entries):
                self._discard(BitMap(entries.tolist()))
            else:
                for entry_id, due_ms in zip(entries.tolist(), dues.tolist(), strict=True):
                    self._index.discard_one(entry_id, due_ms)

    def _discard(self, entries: BitMap) -> None:
        if not entries:
            return
        self._index.discard(entries)
        if len(self._late_entries):
            keep = np.array([entry_id not in entries for entry_id in self._late_entries.tolist()])
            self._late_entries, self._late_dues = self._late_entries[keep], self._late_dues[keep]

    # -- firing ------------------------------------------------------------------------------------

    def next_due_ms(self) -> int | None:
        """A lower bound of when something is due: 0 when late entries wait, None when nothing is left."""
        with self._lock:
            return 0 if len(self._late_entries) else self._index.next_due_ms()

    def exact_next_due_ms(self) -> int | None:
        """When the next entry is due, 0 when late entries wait, None when nothing is left.

        Puts the earliest bucket in order if that is still to be done, which makes the next `take` quick.
        """
        with self._lock:
            return 0 if len(self._late_entries) else self._index.exact_next_due_ms()

    def take(self, now_ms: int, limit: int) -> Taken | None:
        """Choose at most `limit` entries due by `now_ms` and move the frontier in memory; None: nothing is due.

        Late entries go first; only when all of them are in the batch may C advance, because T must not
        pass an unfired late entry.
        """
        with self._lock:
            before = self.frontier
            waiting = len(self._late_entries)
            late = min(waiting, limit)
            entries, dues = self._late_entries[:late], self._late_dues[:late]
            self._late_entries, self._late_dues = self._late_entries[late:], self._late_dues[late:]
            if late:
                order = np.lexsort((entries, dues))
                entries, dues = entries[order], dues[order]
            if late < waiting:
                frontier = before._replace(seen=int(self._late_entries[0]), fired=before.fired + late)
            else:
                ahead, ahead_dues = self._index.take(now_ms, limit - late) if limit > late else (entries[:0], dues[:0])
                if not late and not len(ahead):
                    return None
                frontier = before._replace(seen=self._tail, fired=before.fired + late + len(ahead))
                if len(ahead):
                    frontier = frontier._replace(due_ms=int(ahead_dues[-1]), entry_id=int(ahead[-1]))
                    entries = np.concatenate((entries, ahead))
                    dues = np.concatenate((dues, ahead_dues))
            # Invariant: C never goes back, T never goes back.
            if (frontier.due_ms, frontier.entry_id) < (before.due_ms, before.entry_id) or frontier.seen < before.seen:
                raise BrokenInvariant(f"frontier {frontier} is behind {before}")
            self.frontier = frontier
            self._takes += 1
            self._on_its_way = True
            return Taken(entries, dues, late, frontier, before)

    def confirm(self, recorded: FrontierRecord) -> None:
        """The markers and this frontier are on disk."""
        with self._lock:
            self.frontier = recorded
            self._on_its_way = False

    def roll_back(self, taken: Taken) -> None:
        """Nothing was written: everything taken is left to fire again, and the frontier is as before."""
        with self._lock:
            self.frontier = taken.before
            self._on_its_way = False
            key = (taken.before.due_ms, taken.before.entry_id)
            # What arrived since and was late by the frontier now withdrawn may not be late any more.
            arrived_late = _at_or_before(self._late_entries, self._late_dues, key)
            back_entries = np.concatenate((taken.entries[taken.late :], self._late_entries[~arrived_late]))
            back_dues = np.concatenate((taken.dues[taken.late :], self._late_dues[~arrived_late]))
            late = np.concatenate((taken.entries[: taken.late], self._late_entries[arrived_late]))
            late_dues = np.concatenate((taken.dues[: taken.late], self._late_dues[arrived_late]))
            order = np.argsort(late)
            self._late_entries, self._late_dues = late[order], late_dues[order]
            order = np.lexsort((back_entries, back_dues))
            self._index.put_back(back_entries[order], back_dues[order])

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
            if self._heard is not None or self._on_its_way:
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
        """Whether so much has come in that it is worth it to `settle`; asked without the lock, it is a guess. O(1)."""
        return self._heard is None and self._index.is_worth_settling(self._tail - self._settled_tail)

    def settle(self) -> bool:
        """Bring some of the index to its smaller form, 1 to 2 ms with the lock in hand; True: there is more of it."""
        with self._lock:
            if self._heard is not None:
                return False
            if self._settled_ms is None:
                self._settled_tail = self._tail
            self._settled_ms = self._index.settle(self._settled_ms)
            return self._settled_ms is not None

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
                key = (frontier.due_ms, frontier.entry_id)
                # Invariant: what waits as late is at or before C and not below T, in append order.
                assert _at_or_before(self._late_entries, self._late_dues, key).all()
                assert int(self._late_entries[0]) >= frontier.seen
                assert (np.diff(self._late_entries.astype(np.int64)) > 0).all()
