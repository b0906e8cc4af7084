"""Messages that were taken back from a consumer and await the time of their redelivery.

Owns the times. When a message's time has come it leaves for the delivery order (``delivery_order.py``), which knows the
consumer that may have it.
"""

from __future__ import annotations

from pyroaring import BitMap

from duelog.store.errors import BrokenInvariant
from duelog.store.position import Position
from duelog.store.timer_queue import TimerQueue

from .position_set import PositionSet


class Redeliveries:
    """For each time and ledger the entries that fall due then; no position twice."""

    def __init__(self) -> None:
        self._times: TimerQueue[tuple[int, int]] = TimerQueue()  # the keys of _due
        self._due: dict[tuple[int, int], BitMap] = {}  # by (redeliver_at_ms, ledger id), acknowledged ones among them
        self._waiting = PositionSet()  # what really awaits redelivery

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, ledger_id: int, entries: BitMap, redeliver_at_ms: int) -> None:
        """Entries that are not in it yet are to be handed out again at ``redeliver_at_ms``. O(log of the times)."""
        due = self._due.get((redeliver_at_ms, ledger_id))
        if due is None:
            self._due[redeliver_at_ms, ledger_id] = entries.copy()
            self._times.replace((redeliver_at_ms, ledger_id), redeliver_at_ms)
        else:
            due |= entries
        self._waiting.update(ledger_id, entries)

    def next_ms(self) -> int | None:
        """The earliest time at which something falls due; None if there is none. O(log) amortised."""
        while (found := self._times.next()) is not None:
            at_ms, key = found
            if self._waiting.shared(key[1], self._due[key]) is not None:
                return at_ms
            self._times.discard(key)
            del self._due[key]
        return None

    def take_due(self, now_ms: int) -> list[tuple[int, BitMap]]:
        """Remove and return what is due by ``now_ms``: (ledger id, entries) pairs."""
        taken: list[tuple[int, BitMap]] = []
        while (key := self._times.pop_due(now_ms)) is not None:
            ledger_id = key[1]
            entries = self._waiting.shared(ledger_id, self._due.pop(key))
            if entries is not None:
                self._waiting.remove(ledger_id, entries)
                taken.append((ledger_id, entries))
        return taken

    def forget(self, ledger_id: int, entries: BitMap) -> int:
        """Drop entries that were acknowledged; how many waited."""
        return self._waiting.remove(ledger_id, entries)

    def forget_through(self, position: Position) -> None:
        """Drop everything at or before ``position``."""
        self._waiting.remove_through(position)

    def clear(self) -> None:
        self._times.clear()
        self._due.clear()
        self._waiting.clear()

    def waiting(self) -> dict[Position, int]:
        """A copy: the time at which each position falls due, for checks and tests. O(positions)."""
        times: dict[Position, int] = {}
        for (at_ms, ledger_id), due in self._due.items():
            entries = self._waiting.shared(ledger_id, due)
            times.update((Position(ledger_id, entry_id), at_ms) for entry_id in entries or ())
        return times

    def _check(self) -> None:
        """Raise BrokenInvariant unless every waiting position falls due at exactly one time."""
        self._waiting._check()
        self._times._check()
        if len(self._times) != len(self._due) or any(self._times.due_ms(key) != key[0] for key in self._due):
            raise BrokenInvariant("the redelivery times and their entries differ")
        seen = PositionSet()
        for (_, ledger_id), due in self._due.items():
            entries = self._waiting.shared(ledger_id, due)
            if entries is None:
                continue
            if seen.shared(ledger_id, entries) is not None:
                raise BrokenInvariant(f"a message of ledger {ledger_id} waits for two times")
            seen.update(ledger_id, entries)
        if len(seen) != len(self._waiting):
            raise BrokenInvariant("a message waits for no time")
