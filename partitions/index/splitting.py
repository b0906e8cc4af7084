"""Where a bucket that holds more than a window takes is divided. Chooses only; the index divides."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .buckets import Bucket
from .window import Dues, Ids

_SAMPLE_ENTRIES = 4_096
_MAX_PARTS = 256


def cuts_of(bucket: Bucket, due_of: Callable[[Ids], Dues], window_entries: int) -> list[int]:
    """Where to divide ``bucket``, longer than 1 ms: quantiles of a sample, about half a window apart.

    A due time that takes several quantiles is cut off on both sides, so that one crowded instant among
    others is alone in its part at once. At least one cut, inside the bucket.
    """
    size = len(bucket.ids)
    sample = np.array([bucket.ids[at] for at in range(0, size, -(-size // _SAMPLE_ENTRIES))], dtype=np.uint32)
    dues = np.sort(due_of(sample))
    dues = dues[(dues >= bucket.start_ms) & (dues < bucket.limit_ms)]
    if not len(dues):  # all misplaced or unreadable
        return [(bucket.start_ms + bucket.limit_ms) // 2]
    parts = min(-(-2 * size // window_entries), _MAX_PARTS)
    marks = dues[np.linspace(0, len(dues) - 1, parts + 1).astype(np.intp)]
    crowded = marks[1:][marks[1:] == marks[:-1]]
    cuts = np.unique(np.concatenate((marks, crowded + 1)))
    inside: list[int] = cuts[(cuts > bucket.start_ms) & (cuts < bucket.limit_ms)].tolist()
    return inside
