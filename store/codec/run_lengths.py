"""Lengths of runs: a batch of messages is cut into runs, and short runs that follow each other become one.

What one send put into the write-ahead log is a run there, or a part of a scattered batch; in LMDB many short ones cost
more than few long ones. A scattered batch has plain messages for several logs of time partitions, as one value:

    batch   := logs:u32 count:u32 start_ms:i64[logs] ledger:u64[logs] first:u32[logs] messages:u32[logs]
               message[count] bodies
    message := due:u32 end:u32 body_crc:u32

Little-endian. A log has so many `messages`, those of the first log come first; they are entries of `ledger` from
`first` on. `due` counts ms from the log's `start_ms`; `end` is where a body ends, counted from where the bodies of its
log begin. So what a run (run.py) of the log has is two slices.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from itertools import accumulate
from operator import or_
from typing import NamedTuple, TypeAlias

import numpy as np

from ..errors import BrokenInvariant
from .bodies import Bodies, Buffer
from .format import run_key
from .run import (
    FLAG_CONDITIONAL,
    FLAG_SKIPS,
    HEADER,
    HEADER_BYTES,
    MAX_DUE_SPAN_MS,
    RUN_VERSION,
    Int64s,
    RunKind,
    RunLimits,
    seal_run,
    skipped_before,
)


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


def largest_group(bodies: Bodies, groups: Sequence[tuple[int, int, int]]) -> int:
    """Bytes of the bodies of the largest of groups (base_ms, start, limit), which follow each other from 0 on."""
    return int(np.add.reduceat(bodies.sizes(), [start for _, start, _ in groups]).max())


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
    def is_plain(self) -> bool:
        """True for messages that are not conditional: such runs may be merged."""
        value = self.value
        return (
            value[4] == RUN_VERSION and value[5] == RunKind.MESSAGES and not value[6] & (FLAG_CONDITIONAL | FLAG_SKIPS)
        )

    @property
    def stored_bytes(self) -> int:
        return len(self.value)

    @property
    def follows(self) -> int:
        """The first id of its own, or of those that are passed over before it."""
        return self.first - skipped_before(self.value)

    def parts(self) -> RunParts:
        value = self.value
        _, _, _, flags, count, base_ms, _, _ = HEADER.unpack_from(value)
        begin = HEADER_BYTES + 12 * count
        rows = value[HEADER_BYTES:begin]
        if count > 1:
            rows = np.frombuffer(rows, "<u4").reshape(3, -1).T.tobytes()
        return RunParts(flags, base_ms, rows, memoryview(value)[begin:])


ShortRun: TypeAlias = "WholeRun | BatchRun"
"""Entries of a ledger that a run is made of."""


def merged_runs(
    key_of: Callable[[int], bytes], runs: Sequence[ShortRun], limits: RunLimits
) -> Iterator[tuple[bytes, Buffer, int]]:
    """Runs that follow each other, plain MESSAGES runs as few as `limits` allow: (key, value, entries) of each.

    key_of: the key of a run by its first entry id. Bodies and their checksums are copied, not read.
    """
    begin = 0
    plain = [run.is_plain for run in runs]
    while begin < len(runs):
        first, size, end = runs[begin].first, runs[begin].stored_bytes, begin + 1
        while end < len(runs):
            run, expected = runs[end], runs[end - 1].limit
            passes_over = run.first != expected
            if passes_over and run.follows != expected:
                raise BrokenInvariant(f"entry {run.first} follows one before {expected}")
            size += run.stored_bytes
            if run.limit - first > limits.entries or size > limits.bytes:
                break
            if not (plain[begin] and plain[end]):
                break
            end += 1
        merged = _merged(key_of(first), runs[begin:end]) if end - begin > 1 else None
        if merged is not None:
            yield key_of(first), merged, runs[end - 1].limit - first
        else:
            for each in runs[begin:end]:
                yield key_of(each.first), each.value, each.limit - each.first
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


_HEAD = struct.Struct("<II")
_LOG_BYTES = 24
_MESSAGE_BYTES = 12


class ScatteredBatch:
    """The messages of several logs. Those that were packed have no entry ids before `place`.

    What it has of each log is in arrays: as objects it would take several times the memory of small messages.
    """

    __slots__ = ("_places", "bodies_at", "counts", "firsts", "ledger_ids", "limits", "rows_at", "starts_ms", "value")

    def __init__(self, value: Buffer) -> None:
        logs, _ = _HEAD.unpack_from(value)
        at = _HEAD.size
        self.value = value
        self.starts_ms = _column("q", value, at, logs)
        self.ledger_ids = _column("Q", value, at + 8 * logs, logs)
        self.firsts = _column("I", value, at + 16 * logs, logs)
        self.counts = _column("I", value, at + 20 * logs, logs)
        self.rows_at = at + _LOG_BYTES * logs
        self._places: dict[int, int] = {}

    def _index(self) -> None:
        """Find where the rows and the bodies of each log are: when the first of them is asked for. O(logs)."""
        _, count = _HEAD.unpack_from(self.value)
        limits = np.cumsum(self.counts)
        ends = np.frombuffer(self.value, "<u4", 3 * count, self.rows_at).reshape(-1, 3)[:, 1]
        bodies = np.full(len(limits) + 1, self.rows_at + _MESSAGE_BYTES * count, dtype=np.int64)
        bodies[1:] += np.cumsum(ends[limits - 1], dtype=np.int64)
        self.limits = array("I", limits.astype("I").tobytes())
        self.bodies_at = array("q", bodies.tobytes())
        self._places = {ledger_id: at for at, ledger_id in enumerate(self.ledger_ids)}

    @classmethod
    def pack(
        cls, dues: Int64s, bodies: Bodies, groups: Sequence[tuple[int, int, int]], ledger_ids: Sequence[int]
    ) -> ScatteredBatch:
        """A batch of groups (start_ms, start, limit) of rows, each for a ledger, which follow each other from 0 on."""
        logs, count = len(groups), len(dues)
        starts_ms, starts, limits = np.array(groups, dtype=np.int64).T
        counts = limits - starts
        ends = np.cumsum(bodies.sizes())
        before = np.zeros(logs, dtype=np.int64)
        before[1:] = ends[starts[1:] - 1]
        rows = np.empty((count, 3), dtype="<u4")
        rows[:, 0] = dues - np.repeat(starts_ms, counts)
        rows[:, 1] = ends - np.repeat(before, counts)
        rows[:, 2] = np.frombuffer(bodies.checksums(), "<u4")
        columns = (
            starts_ms.astype("<i8"),
            np.array(ledger_ids, dtype="<u8"),
            np.zeros(logs, dtype="<u4"),
            counts.astype("<u4"),
            rows,
        )
        head = _HEAD.pack(logs, count)
        return cls(bytearray().join((head, *(column.tobytes() for column in columns), *bodies.parts())))

    def place(self, firsts: Sequence[int]) -> None:
        """Give each log's messages the entry ids from the first on. REQUIRES: a batch that was packed."""
        self.firsts = array("I", firsts)
        struct.pack_into(f"<{len(firsts)}I", self.value, _HEAD.size + 16 * len(firsts), *firsts)

    def run_of(self, ledger_id: int) -> BatchRun:
        if not self._places:
            self._index()
        at = self._places[ledger_id]
        first = self.firsts[at]
        return _new_run((first, first + self.counts[at], self, at))

    def by_log(self) -> Iterator[tuple[int, int, BatchRun]]:
        """(start of the partition, ledger id, messages) of each log."""
        return zip(self.starts_ms, self.ledger_ids, map(self.run_of, self.ledger_ids), strict=True)


def _column(code: str, value: Buffer, at: int, logs: int) -> array[int]:
    found: array[int] = array(code)
    found.frombytes(value[at : at + found.itemsize * logs])
    if sys.byteorder == "big":
        found.byteswap()
    return found


class BatchRun(NamedTuple):
    """Entries [first, limit) of a ledger: those of one log of a batch, as `run_lengths.WholeRun`."""

    first: int
    limit: int
    batch: ScatteredBatch
    at: int

    @property
    def is_plain(self) -> bool:
        return True

    @property
    def follows(self) -> int:
        return self.first

    @property
    def value(self) -> bytes:
        """The run, made at each call."""
        _, base_ms, rows, bodies = self.parts()
        header = HEADER.pack(0, RUN_VERSION, RunKind.MESSAGES, 0, self.limit - self.first, base_ms, 0, 0)[4:]
        columns = np.frombuffer(rows, "<u4").reshape(-1, 3).T.tobytes()
        return seal_run(run_key(self.batch.ledger_ids[self.at], self.first), header + columns, (bodies,))

    @property
    def stored_bytes(self) -> int:
        first, limit, batch, at = self
        return HEADER_BYTES + _MESSAGE_BYTES * (limit - first) + batch.bodies_at[at + 1] - batch.bodies_at[at]

    def parts(self) -> RunParts:
        first, limit, batch, at = self
        value, bodies_at, end = batch.value, batch.bodies_at, batch.rows_at + _MESSAGE_BYTES * batch.limits[at]
        rows = value[end - _MESSAGE_BYTES * (limit - first) : end]
        return RunParts(0, batch.starts_ms[at], rows, value[bodies_at[at] : bodies_at[at + 1]])


_new_run = partial(tuple.__new__, BatchRun)
