"""What a replay delivered, held against the trace: never early, none lost, none double, in order.

It knows the trace and hears of what was received, at which time of the clock. It asks the engine nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .demo_trace import Trace


@dataclass(frozen=True, slots=True)
class Verdict:
    """Counts of messages; all 0 when the engine kept every guarantee.

    early: received before they were due by the trace. late: due, and not received when everything due was
    asked for. lost: never received. double: received once more. disordered: delayed ones received after one
    that is due later, or that is due at the same time and was written later. foreign: not of the trace, or
    with a key of another.
    """

    early: int
    late: int
    lost: int
    double: int
    disordered: int
    foreign: int


class Audit:
    """Counts what goes wrong while a trace is replayed."""

    def __init__(self, trace: Trace) -> None:
        self._rows = {name.encode(): row for row, name in enumerate(trace.ids)}
        self._ready_ms: list[int] = trace.ready_ms.tolist()
        self._due_ms: list[int] = trace.due_ms.tolist()
        self._delayed: list[bool] = trace.delayed.tolist()
        self._receptions = np.zeros(len(trace), np.int64)
        self._asked_ms = -1
        self._last = (-1, -1)
        self._early = self._late = self._disordered = self._foreign = 0

    def received(self, now_ms: int, messages: Sequence[tuple[bytes, str | None]]) -> None:
        """Take in what was received, in order, as (payload, key), while the clock showed `now_ms`."""
        for payload, key in messages:
            row = self._rows.get(payload)
            if row is None or key != payload.decode():
                self._foreign += 1
                continue
            self._receptions[row] += 1
            if self._receptions[row] > 1:
                continue
            if now_ms < self._ready_ms[row]:
                self._early += 1
            elif self._asked_ms >= self._ready_ms[row] + (not self._delayed[row]):
                # One without a delay may be sent in the very ms for which everything was asked before.
                self._late += 1
            if self._delayed[row]:
                place = (self._due_ms[row], row)
                self._disordered += place < self._last
                self._last = max(self._last, place)

    def drained(self, now_ms: int) -> None:
        """Hear that everything due by `now_ms` was asked for: what was due by then and comes later is late."""
        self._asked_ms = now_ms

    def verdict(self) -> Verdict:
        """What was found, now that nothing more is coming."""
        return Verdict(
            early=self._early,
            late=self._late,
            lost=int(np.count_nonzero(self._receptions == 0)),
            double=int(np.maximum(self._receptions - 1, 0).sum()),
            disordered=self._disordered,
            foreign=self._foreign,
        )
