"""Lengths of runs: a batch of messages is cut into runs, and short runs that follow each other become one.

What one send put into the write-ahead log is a run there; in LMDB many short ones cost more than few long ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import accumulate
from operator import or_
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from ..errors import BrokenInvariant
from .bodies import Bodies, Buffer
from .run import HEADER, HEADER_BYTES, MAX_DUE_SPAN_MS, RUN_VERSION, Int64s, RunKind, RunLimits, seal_run

if TYPE_CHECKING:
    from .scattered import BatchRun


def cut(
    dues: Int64s, sizes: Sequence[int] | Int64s, max_entries: int, max_bytes: int, base_ms: int | None
) -> Iterator[tuple[int, int]]:
    """Split a batch into runs: (start, limit) of each, in order.

    A run holds at most `max_entries` entries and about `max_bytes` of bodies, one entry at least, and
    (where `base_ms` is None: the base is the smallest due time) due times that fit into 32 bits.
    """
    count = len(sizes)
    narrow = base_ms is not None or count == 1 or int(dues.max()) - int(dues.min()) <= MAX_DUE_SPAN_MS
    ends: Int64s = np.cumsum(sizes, dtype=np.int64)
    if narrow and (count == 1 or (count <= max_entries and int(ends[-1]) <= max_bytes)):
        yield 0, count
        return
    start = 0
    while start < count:
        before = int(ends[start - 1]) if start else 0
        limit = min(start + max_entries, int(np.searchsorted(ends, before + max_bytes, side="right")), count)
        limit = max(limit, start + 1)
        if not narrow:
            highs = np.maximum.accumulate(dues[start:limit])
            lows = np.minimum.accumulate(dues[start:limit])
            limit = start + int(np.searchsorted(highs - lows, MAX_DUE_SPAN_MS, side="right"))
        yield start, limit
        start = limit


def fits_runs(bodies: Bodies, groups: Sequence[tuple[int, int, int]], limits: RunLimits) -> bool:
    """True where each group (base_ms, start, limit) of bodies is certain to be one run. O(groups)."""
    return max(limit - start for _, start, limit in groups) <= limits.entries and (
        bodies.total() <= limits.bytes or int(bodies.sizes().max()) * limits.entries <= limits.bytes
    )


class RunParts(NamedTuple):
    """The parts of a run of plain messages.

    rows: (due, end, body_crc) of each message; in the value of a run these are columns.
    """

    flags: int
    base_ms: int
    rows: Buffer
    bodies: Buffer


class WholeRun(NamedTuple):
    """Entries [first, limit) of a ledger, as the value of a run."""

    first: int
    limit: int
    value: Buffer

    @property
    def kind(self) -> int:
        return int(HEADER.unpack_from(self.value)[2])

    @property
    def stored_bytes(self) -> int:
        return len(self.value)

    def parts(self) -> RunParts:
        value = self.value
        _, _, _, flags, count, base_ms, _, _ = HEADER.unpack_from(value)
        begin = HEADER_BYTES + 12 * count
        rows = value[HEADER_BYTES:begin]
        if count > 1:
            rows = np.frombuffer(rows, "<u4").reshape(3, -1).T.tobytes()
        return RunParts(flags, base_ms, rows, value[begin:])


ShortRun: TypeAlias = "WholeRun | BatchRun"
"""Entries of a ledger that a run is made of."""


def merged_runs(
    key_of: Callable[[int], bytes], runs: Sequence[ShortRun], limits: RunLimits
) -> Iterator[tuple[bytes, Buffer, int]]:
    """Runs that follow each other, plain MESSAGES runs as few as `limits` allow: (key, value, entries) of each.

    key_of: the key of a run by its first entry id. Bodies and their checksums are copied, not read.
    """
    begin = 0
    kinds = [run.kind for run in runs]
    while begin < len(runs):
        first, size, end = runs[begin].first, runs[begin].stored_bytes, begin + 1
        while end < len(runs):
            if runs[end].first != runs[end - 1].limit:
                raise BrokenInvariant(f"entry {runs[end].first} follows one before {runs[end - 1].limit}")
            size += runs[end].stored_bytes
            if runs[end].limit - first > limits.entries or size > limits.bytes:
                break
            if RunKind.MARKERS in (kinds[begin], kinds[end]):
                break
            end += 1
        merged = _merged(key_of(first), runs[begin:end]) if end - begin > 1 else None
        if merged is not None:
            yield key_of(first), merged, runs[end - 1].limit - first
        else:
            for run in runs[begin:end]:
                yield key_of(run.first), run.value, run.limit - run.first
        begin = end


def _merged(key: bytes, runs: Sequence[ShortRun]) -> bytes | None:
    """Merge several runs; None: their due times lie too far apart."""
    all_flags, bases, rows, bodies = zip(*[run.parts() for run in runs], strict=True)
    counts = [run.limit - run.first for run in runs]
    columns = np.frombuffer(b"".join(rows), "<u4").reshape(-1, 3).T.copy()
    base_ms = min(bases)
    if base_ms != max(bases):
        offsets = columns[0] + np.repeat(np.array(bases, dtype=np.int64) - base_ms, counts)
        if int(offsets.max()) > MAX_DUE_SPAN_MS:
            return None
        columns[0] = offsets
    starts = list(accumulate(map(len, bodies[:-1]), initial=0))
    columns[1] += np.repeat(np.array(starts, dtype=np.uint32), counts)
    flags = reduce(or_, all_flags)
    header = HEADER.pack(0, RUN_VERSION, RunKind.MESSAGES, flags, len(columns[0]), base_ms, 0, 0)[4:]
    return seal_run(key, header + columns.tobytes(), bodies)
