"""Showing what was written ahead: in order of the log, each entry at its time, whatever interrupts the wait."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duelog.markers.ahead import Ahead, Written
from duelog.store.managed_ledger import Segment
from duelog.store.position import Position


class Log:
    """Stands in for a main log: notes when it is shown, and how far."""

    def __init__(self, clock: list[int]) -> None:
        self.clock = clock
        self.shown: list[tuple[int, Position | None]] = []

    def show(self, end: Position | None) -> None:
        self.shown.append((self.clock[-1], end))


def pieces(log: Log, dues: list[list[int]], lengths: list[int]) -> list[Written]:
    """Markers with these due times, one piece after the other, in ledgers of these lengths in turn."""
    written, ledger_id, entry, at = [], 1, 0, 0
    for each in dues:
        segments, left = [], len(each)
        while left:
            length = min(left, lengths[at % len(lengths)] - entry)
            segments.append(Segment(ledger_id, entry, length))
            entry, left = entry + length, left - length
            if entry == lengths[at % len(lengths)]:
                ledger_id, entry, at = ledger_id + 1, 0, at + 1
        written.append(Written(log, np.array(each, dtype=np.int64), segments))  # type: ignore[arg-type]
    return written


@given(
    first=st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=6), min_size=1, max_size=3),
    second=st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=6), max_size=2),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    interrupted=st.none() | st.integers(0, 12),
)
def test_an_entry_is_shown_when_it_and_all_before_it_in_its_log_are_due_and_no_later(
    first: list[list[int]], second: list[list[int]], lengths: list[int], interrupted: int | None
) -> None:
    """Of two topics, due times in any order, ledgers that roll, and one interrupt."""
    clock, interrupts = [0], [] if interrupted is None else [interrupted]
    logs = [Log(clock), Log(clock)]
    written = [pieces(log, dues, lengths) for log, dues in zip(logs, (first, second), strict=True)]

    def stay(due_ms: int) -> None:
        assert due_ms >= clock[-1]
        if interrupts and interrupts[0] < len(clock):
            interrupts.clear()
            raise KeyboardInterrupt
        clock.append(due_ms)

    ahead = Ahead(20, stay)
    try:
        ahead.show([piece for each in written for piece in each])
    except KeyboardInterrupt:
        assert not interrupts
    for log, own in zip(logs, written, strict=True):
        places = [
            Position(segment.ledger_id, segment.first_entry + at)
            for piece in own
            for segment in piece.segments
            for at in range(segment.length)
        ]
        dues = [due_ms for piece in own for due_ms in piece.dues.tolist()]
        for at, place in enumerate(places):
            shown_ms = min(time_ms for time_ms, end in log.shown if end is None or place < end)
            assert shown_ms == max(dues[: at + 1])
        assert [end for _, end in log.shown].count(None) == (1 if own else 0)


def test_an_error_of_the_clock_reaches_the_caller_once_all_has_been_shown() -> None:
    """It makes nothing early either."""
    clock = [0]
    log = Log(clock)
    raised = [ValueError("clock")]

    def stay(due_ms: int) -> None:
        if raised:
            raise raised.pop()
        clock.append(due_ms)

    with pytest.raises(ValueError, match="clock"):
        Ahead(20, stay).show(pieces(log, [[5, 7]], [9]))
    assert log.shown == [(5, Position(1, 1)), (7, None)]
