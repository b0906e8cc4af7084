"""The trace of the demo: when each message was written, and when it is due; and what was delivered, held against it.

What is computed here is what the engine's work is judged by, so nothing here imports the engine.
"""

import gzip
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

DATA = Path(__file__).parent / "data" / "git-delays.tsv.gz"
"""The trace that comes with duelog; data/README.md describes it."""

Times = npt.NDArray[np.int64]


class Step(NamedTuple):
    """Messages that are written, or become due, between two changes of order.

    first_ms, last_ms: the times of the first and the last of them. start, limit: the rows that are written,
    start inclusive, limit exclusive; none where messages become due.
    """

    first_ms: int
    last_ms: int
    start: int
    limit: int

    @property
    def writes(self) -> bool:
        return self.start < self.limit


@dataclass(frozen=True, slots=True)
class Trace:
    """Messages in the order they were written. ids: all different, and the payloads as well.

    written_ms: publish times. due_ms: due times as asked for, which may be before they were written.
    """

    written_ms: Times
    due_ms: Times
    ids: list[str]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def delayed(self) -> npt.NDArray[np.bool_]:
        """Which messages are due after they were written."""
        return self.due_ms > self.written_ms

    @property
    def ready_ms(self) -> Times:
        """When each message may be received first: when it is both written and due."""
        return np.maximum(self.written_ms, self.due_ms)

    def last_years(self, years: int) -> "Trace":
        """The messages written in the last `years` calendar years, counted back from the last message."""
        if not len(self):
            return self
        last = datetime.fromtimestamp(int(self.written_ms[-1]) / 1000, UTC)
        try:
            since = last.replace(year=last.year - years)
        except ValueError:  # 29 February
            since = last.replace(year=last.year - years, day=28)
        return self[int(np.searchsorted(self.written_ms, int(since.timestamp() * 1000))) :]

    def __getitem__(self, rows: slice) -> "Trace":
        return Trace(self.written_ms[rows], self.due_ms[rows], self.ids[rows])

    def due_days(self, span_ms: int) -> int:
        return len(np.unique(self.due_ms[self.delayed] // span_ms))

    def pending_at(self, now_ms: int) -> int:
        """How many messages are written and not due yet, after everything that happens at `now_ms`. O(n)."""
        return int(np.count_nonzero(self.delayed & (self.written_ms <= now_ms) & (self.due_ms > now_ms)))

    def peak_pending(self) -> tuple[int, int]:
        """(most messages that were written and not due at one time, the first time when it was so)."""
        if not self.delayed.any():
            return 0, 0
        # At equal times what is due goes before what is written.
        times = np.concatenate([self.due_ms[self.delayed], self.written_ms[self.delayed]])
        change = np.repeat(np.array([-1, 1]), len(times) // 2)
        order = np.lexsort((change, times))
        pending = np.cumsum(change[order])
        at = int(np.argmax(pending))
        return int(pending[at]), int(times[order[at]])

    def steps(self) -> Iterator[Step]:
        """The trace as the fewest steps that keep the order of everything written and everything due.

        Messages written with nothing becoming due in between are one step; so are due times with nothing
        written in between. What is due in the very ms in which something is written is due before it.
        """
        delayed = self.due_ms[self.delayed]
        times = np.concatenate([delayed, self.written_ms])
        writes = np.concatenate([np.zeros(len(delayed), np.int64), np.ones(len(self), np.int64)])
        order = np.lexsort((writes, times))
        times, writes = times[order], writes[order]
        firsts = np.flatnonzero(np.diff(writes, prepend=-1))
        lasts = np.append(firsts[1:], len(times)) - 1
        written = np.cumsum(writes)
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            start = int(written[first] - writes[first])
            yield Step(int(times[first]), int(times[last]), start, int(written[last]))


def load_trace(path: Path = DATA) -> Trace:
    """Read a trace: lines of written_s, due_s and id, separated by tabs, ordered by the first; gzip."""
    with gzip.open(path, "rt", encoding="ascii") as lines:
        rows = [line.rstrip("\n").split("\t") for line in lines]
    times = np.array([(int(written), int(due)) for written, due, _ in rows], dtype=np.int64).reshape(-1, 2) * 1000
    return Trace(times[:, 0], times[:, 1], [name for _, _, name in rows])


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
        return Verdict(
            early=self._early,
            late=self._late,
            lost=int(np.count_nonzero(self._receptions == 0)),
            double=int(np.maximum(self._receptions - 1, 0).sum()),
            disordered=self._disordered,
            foreign=self._foreign,
        )
