"""How long runs are: where a batch of messages is cut, and where short runs that follow each other become one.

What one send put into the write-ahead log is a run there; in LMDB many short ones cost more than few long ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .run import HEADER, HEADER_BYTES, MAX_DUE_SPAN_MS, RUN_VERSION, Int64s, RunKind, RunLimits, seal_run


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


def merged_runs(
    key_of: Callable[[int], bytes], first: int, values: Sequence[bytes | bytearray], limits: RunLimits
) -> Iterator[tuple[bytes, bytes | bytearray, int]]:
    """Plain MESSAGES runs that follow each other, as few as `limits` allow: (key, value, entries) of each.

    key_of: the key of a run by its first entry id, `first` for the first of `values`. Bodies and their checksums are
    copied, not read.
    """
    heads = [HEADER.unpack_from(value) for value in values]
    begin = 0
    while begin < len(values):
        count, size, end = heads[begin][4], len(values[begin]), begin + 1
        while end < len(values):
            count, size = count + heads[end][4], size + len(values[end])
            if count > limits.entries or size > limits.bytes:
                break
            end += 1
        merged = _merged(key_of(first), heads[begin:end], values[begin:end]) if end - begin > 1 else None
        if merged is not None:
            entries = sum(head[4] for head in heads[begin:end])
            yield key_of(first), merged, entries
            first += entries
        else:
            for head, value in zip(heads[begin:end], values[begin:end], strict=True):
                yield key_of(first), value, head[4]
                first += head[4]
        begin = end


def _merged(key: bytes, heads: Sequence[tuple[int, ...]], values: Sequence[bytes | bytearray]) -> bytes | None:
    """One run of several; None: their due times lie too far apart."""
    dues: list[bytes | bytearray] = []
    ends: list[bytes | bytearray] = []
    crcs: list[bytes | bytearray] = []
    bodies: list[bytes | bytearray] = []
    counts, sizes, flags = [], [], 0
    for head, value in zip(heads, values, strict=True):
        count = head[4]
        flags |= head[3]
        second, third, begin = HEADER_BYTES + 4 * count, HEADER_BYTES + 8 * count, HEADER_BYTES + 12 * count
        dues.append(value[HEADER_BYTES:second])
        ends.append(value[second:third])
        crcs.append(value[third:begin])
        bodies.append(value[begin:])
        counts.append(count)
        sizes.append(len(value) - begin)
    due_column = b"".join(dues)
    bases = [head[5] for head in heads]
    base_ms = min(bases)
    if base_ms != max(bases):
        offsets = np.frombuffer(due_column, "<u4") + np.repeat(np.array(bases, dtype=np.int64) - base_ms, counts)
        if int(offsets.max()) > MAX_DUE_SPAN_MS:
            return None
        due_column = offsets.astype("<u4").tobytes()
    starts = np.cumsum([0, *sizes[:-1]]).astype(np.uint32)
    ended = (np.frombuffer(b"".join(ends), "<u4") + np.repeat(starts, counts)).astype("<u4").tobytes()
    header = HEADER.pack(0, RUN_VERSION, RunKind.MESSAGES, flags, sum(counts), base_ms, 0, 0)[4:]
    return seal_run(key, b"".join((header, due_column, ended, *crcs)), bodies)
