"""Markers as columns: where they point, which of them every subscription has acknowledged, how late they were written.

Copied out of the main environment inside its read transaction, worked on after it has ended. No object per marker.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from duelog.cleanup.log_claims import bitmap_of, ids_of
from duelog.store.codec.run import Int64s, Run, UInt32s

_MOST_SHOWN = 10

UNTIMED = -1
"""Stands for the time of markers written by a version that did not store it."""

LATENESS_EDGES_MS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000, 900_000, 3_600_000,
    21_600_000, 86_400_000, 604_800_000,
)  # fmt: skip
"""Upper bounds of the bins of lateness, exclusive; one more bin has none."""

_EDGES = np.array(LATENESS_EDGES_MS, dtype=np.int64)


class MarkerRun(NamedTuple):
    """The markers of one run, copied."""

    first_entry: int
    target: int
    base_ms: int
    fired_ms: int
    entries: UInt32s
    dues: Int64s


def copy_markers(run: Run) -> MarkerRun:
    """The columns of a run of markers, to be kept after its transaction."""
    fired_ms = run.fired_ms()
    return MarkerRun(
        run.first_entry,
        run.target,
        run.base_ms,
        UNTIMED if fired_ms is None else fired_ms,
        run.targets().copy(),
        run.dues(),
    )


class Marks(NamedTuple):
    """The markers in kept ledgers that point into one partition log.

    `markers` counts them, doubled ones too. `start_ms`: the partition that they name.
    """

    start_ms: int
    markers: int
    marked: BitMap
    doubled: BitMap
    acknowledged: BitMap


class TopicMarkers:
    """The markers of one topic, gathered ledger by ledger."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[int, int], list[tuple[UInt32s, npt.NDArray[np.bool_]]]] = {}
        self._bins = np.zeros(len(_EDGES) + 1, dtype=np.int64)
        self._untimed = 0

    def add_ledger(self, runs: list[MarkerRun], tail: int, acknowledged: BitMap) -> None:
        """The markers of one main-log ledger of `tail` entries, those in `acknowledged` acknowledged by all."""
        done = np.zeros(tail, dtype=np.bool_)
        done[ids_of(acknowledged)] = True
        for run in runs:
            limit = run.first_entry + len(run.entries)
            piece = run.entries, done[run.first_entry : limit]
            self._pieces.setdefault((run.target, run.base_ms), []).append(piece)
        timed = [run for run in runs if run.fired_ms != UNTIMED]
        self._untimed += sum(len(run.entries) for run in runs) - sum(len(run.entries) for run in timed)
        if timed:
            fired = np.repeat([run.fired_ms for run in timed], [len(run.entries) for run in timed])
            late = fired - np.concatenate([run.dues for run in timed])
            self._bins += np.bincount(np.searchsorted(_EDGES, late, side="right"), minlength=len(self._bins))

    def by_target(self) -> dict[int, list[Marks]]:
        """Marks by the ledger that they point into; more than one where they name several partitions for it."""
        found: dict[int, list[Marks]] = {}
        for (target, start_ms), pieces in self._pieces.items():
            entries = np.concatenate([piece[0] for piece in pieces])
            done = np.concatenate([piece[1] for piece in pieces])
            marked = bitmap_of(entries)
            doubled = BitMap()
            if len(marked) < len(entries):
                values, counts = np.unique(entries, return_counts=True)
                doubled = bitmap_of(values[counts > 1])
            acknowledged = marked - bitmap_of(entries[~done])
            found.setdefault(target, []).append(Marks(start_ms, len(entries), marked, doubled, acknowledged))
        return found

    def lateness(self) -> dict[int, int]:
        """Markers by the upper bound of their bin: UNTIMED unknown, 0 without a bound. Empty bins are left out."""
        counts = {UNTIMED: self._untimed, **dict(zip((*LATENESS_EDGES_MS, 0), self._bins.tolist(), strict=True))}
        return {below_ms: count for below_ms, count in counts.items() if count}


def ranges_text(entries: BitMap) -> str:
    """Some entry ids for people: `3, 5, 7 and 12 more`."""
    shown = ", ".join(str(entry_id) for entry_id in entries[:_MOST_SHOWN])
    return shown if len(entries) <= _MOST_SHOWN else f"{shown} and {len(entries) - _MOST_SHOWN:,} more"
