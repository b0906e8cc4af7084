"""What is left to fire of one partition log, and how entries come into it: appended, read back, admitted, cancelled.

Whatever way an entry comes in, the frontier (C, T) says where it belongs (`_place`): after C into the delay index; at
or before C and below T it has fired; at or before C from T on it is late, and waits on its own: T cannot pass it until
it has fired. Appended entries arrive in order; admitted ones were heard before, and did not fire.

While it is loaded a log hears and does not fire (loading.py).

Does not take anything out to be fired, nor move the frontier: log_firing.py.
"""

from __future__ import annotations

import threading

import numpy as np
from pyroaring import BitMap

from ...partitions.due_column import DueBatch
from ...partitions.index.delay_index import DelayIndex, DueOf
from ...store.codec.frontier import HELD, FrontierRecord
from ...store.codec.run import Int64s, UInt32s
from ...store.errors import BrokenInvariant

_ABSORBED_AT_ONCE = 1 << 16
"""Entries heard while loading that are put into the index with the lock in hand, at the end of it."""

_BULK = 100
"""From this many on, cancelled entries are looked for in all buckets at once."""


class LogEntries:
    """The unfired entries of one topic's log in one begun partition, as far as they come in. Thread-safe."""

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
        self.torn = False
        """Whether a change has begun; where it did not come to its end, the log is to be read back (log_firing.py)."""
        self.saved_tail = 0
        """Entries below it are covered by a complete snapshot; belongs to whoever saves and loads."""
        self._packed_tail = 0
        """The tail when `pack_next` last began."""
        self._packed_to_ms: int | None = None
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
    def whole(self) -> bool:
        """Whether what it has in memory is what is left to fire; asked while nothing is fired."""
        return not (self.torn or self._on_its_way)

    @property
    def loaded(self) -> bool:
        """Whether it may fire."""
        return self._heard is None

    def __len__(self) -> int:
        """Entries left to fire, as far as loaded."""
        return len(self._index) + len(self._late_entries)

    def memory_bytes(self) -> int:
        """Estimated bytes of the delay index (see DelayIndex.memory_bytes); 0 until it is loaded."""
        with self._lock:
            return 0 if self._heard is not None else self._index.memory_bytes()

    # -- entries come in -------------------------------------------------------------------------

    def hear(self, first_entry: int, dues: Int64s) -> None:
        """Entries were committed. Called in commit order by the leader of the partition's commits."""
        with self._lock:
            torn, self.torn = self.torn, True
            if self._heard is not None:
                self._heard.append(DueBatch(first_entry, dues))
            else:
                self._absorb(first_entry, dues)
            self.torn = torn

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
        """The log has been read up to where listening began: take what was heard since, and fire from now on.

        Appends meanwhile wait for the last few entries only.
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
        for entries, dues in self._admitted:
            self._admit(entries, dues)
        self._discard(self._cancelled)
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
            self._place(np.arange(first_entry, self._tail, dtype=np.uint32)[~held], dues[~held])
            return
        if frontier.due_ms < 0 or int(dues.min()) > frontier.due_ms:
            self._index.add(first_entry, dues)
            return
        self._place(np.arange(first_entry, self._tail, dtype=np.uint32), dues)

    def _place(self, entries: UInt32s, dues: Int64s) -> None:
        """Put entries where they belong by the frontier; what has fired is left out. REQUIRES: none is in the index."""
        passed, fired = self.frontier.passes(entries, dues), self.frontier.has_fired(entries, dues)
        late = passed & ~fired
        if late.any():  # in append order, and once: an admitted one may have been read back as well
            both = np.concatenate((self._late_entries, entries[late]))
            self._late_entries, kept = np.unique(both, return_index=True)
            self._late_dues = np.concatenate((self._late_dues, dues[late]))[kept]
        if not passed.all():
            self._index.add(entries[~passed], dues[~passed])

    def admit(self, entries: UInt32s, dues: Int64s) -> None:
        """Conditional entries heard before may fire now; those that are in the index already, late, or fired stay so.

        REQUIRES: no firing since they were appended, so that T is not above them: then one at or before C is late.
        """
        with self._lock:
            torn, self.torn = self.torn, True
            if self._heard is not None:
                self._admitted.append((entries, dues))
            else:
                self._admit(entries, dues)
            self.torn = torn

    def _admit(self, entries: UInt32s, dues: Int64s) -> None:
        self._index.discard(BitMap(entries.tolist()))
        self._place(entries, dues)

    def discard(self, entries: BitMap) -> None:
        """Entries were cancelled: they are not fired. While loading it is noted, and done at its end."""
        with self._lock:
            torn, self.torn = self.torn, True
            if self._heard is not None:
                self._cancelled |= entries
            else:
                self._discard(entries)
            self.torn = torn

    def withdraw(self, entries: UInt32s, dues: Int64s) -> None:
        """As `discard`, for entries whose due times are known: quick for a few."""
        with self._lock:
            torn, self.torn = self.torn, True
            if self._heard is not None:
                self._cancelled |= BitMap(entries.tolist())
            elif len(entries) > _BULK or len(self._late_entries):
                self._discard(BitMap(entries.tolist()))
            else:
                for entry_id, due_ms in zip(entries.tolist(), dues.tolist(), strict=True):
                    self._index.discard_one(entry_id, due_ms)
            self.torn = torn

    def _discard(self, entries: BitMap) -> None:
        if not entries:
            return
        self._index.discard(entries)
        if len(self._late_entries):
            keep = np.array([entry_id not in entries for entry_id in self._late_entries.tolist()])
            self._late_entries, self._late_dues = self._late_entries[keep], self._late_dues[keep]
