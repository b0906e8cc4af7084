"""Visibility: an entry written before its time is hidden until it is due, and with it all that follows in the log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..codec.run import Int64s
from ..errors import BrokenInvariant
from ..position import Position


class Hidden(NamedTuple):
    """Nothing of a log from `first` on is read before `due_ms`."""

    due_ms: int
    first: Position


def first_hidden(hidden: Iterable[Hidden], now_ms: int) -> Hidden | None:
    """The first of ascending `hidden` that is not visible at `now_ms`; None: all are."""
    return next((wait for wait in hidden if wait.due_ms > now_ms), None)


def still_hidden(
    hidden: Iterable[Hidden], firsts: Sequence[Position], lengths: Sequence[int], dues: Int64s, now_ms: int
) -> tuple[Hidden, ...]:
    """Those of `hidden` that are not visible at `now_ms`, and those of entries appended after them.

    The entries lie at `firsts`, so many in a row as `lengths` says, and are due at `dues`. An entry is not
    visible before those in front of it are, so that a log is read in order.
    """
    kept = [wait for wait in hidden if wait.due_ms > now_ms]
    before_ms = kept[-1].due_ms if kept else now_ms
    due_by = np.maximum.accumulate(np.maximum(dues, before_ms))
    ends = np.cumsum(lengths)
    for index in np.flatnonzero(np.diff(due_by, prepend=before_ms)).tolist():
        at = int(np.searchsorted(ends, index, side="right"))
        ledger_id, entry_id = firsts[at]
        kept.append(Hidden(int(due_by[index]), Position(ledger_id, entry_id + index - int(ends[at]) + lengths[at])))
    # Invariant: what is later in the log is visible later.
    for one, other in pairwise(kept):
        if not (one.due_ms < other.due_ms and one.first < other.first):
            raise BrokenInvariant(f"{other} behind {one}")
    return tuple(kept)
