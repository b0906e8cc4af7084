"""What is written ahead of its time is shown when that has come: nobody waits for the disk then.

Markers of messages that are due in a moment are committed at once, with the clock mark at the last of their due times,
and kept back in their main logs (`ManagedLedger.show`): nobody reads them before. A crash in between leaves what it
would leave a moment later, as the store's clock is never before its mark.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..store.managed_ledger import ManagedLedger, Segment
from ..store.position import Position
from ..store.run import Int64s


class Written(NamedTuple):
    """Markers that were appended to a main log: their due times in order of the log, and where they are."""

    log: ManagedLedger
    dues: Int64s
    segments: list[Segment]


class _Step(NamedTuple):
    """From `due_ms` on the log may be read up to `end`; None: all of it."""

    due_ms: int
    log: ManagedLedger
    end: Position | None


class Ahead(NamedTuple):
    """How far ahead to fire, and who waits for a time that is no further than that (`Clock.near_ms`, `Clock.stay`)."""

    until_ms: int
    stay: Callable[[int], object]

    def show(self, written: Sequence[Written]) -> None:
        """Show markers that are kept back, in order of their logs, each once it and those before it are due."""
        by_log: dict[ManagedLedger, list[Written]] = {}
        for piece in written:
            by_log.setdefault(piece.log, []).append(piece)
        steps = deque(sorted((step for pieces in by_log.values() for step in _steps(pieces)), key=_due_ms))
        try:
            self._take(steps)
        except BaseException:  # an interrupt makes nothing early, and leaves nothing kept back
            self._take(steps)
            raise

    def _take(self, steps: deque[_Step]) -> None:
        while steps:
            due_ms, log, end = steps[0]
            self.stay(due_ms)
            log.show(end)
            steps.popleft()


def _due_ms(step: _Step) -> int:
    return step.due_ms


def _steps(pieces: list[Written]) -> Iterator[_Step]:
    """What is shown of one log, and when: an entry not before those in front of it."""
    log = pieces[0].log
    due_by = np.maximum.accumulate(np.concatenate([piece.dues for piece in pieces]))
    lasts = np.flatnonzero(np.diff(due_by)).tolist()
    segments = [segment for piece in pieces for segment in piece.segments]
    for last in lasts:
        yield _Step(int(due_by[last]), log, _after(segments, last))
    yield _Step(int(due_by[-1]), log, None)


def _after(segments: list[Segment], index: int) -> Position:
    """One past the entry at `index` of the segments."""
    for segment in segments:
        if index < segment.length:
            return Position(segment.ledger_id, segment.first_entry + index + 1)
        index -= segment.length
    raise IndexError(index)
