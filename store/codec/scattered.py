"""Scattered batch: plain messages for several logs of time partitions, as one value of the write-ahead log.

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
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from .bodies import Bodies, Buffer
from .format import run_key
from .run import HEADER, HEADER_BYTES, RUN_VERSION, Int64s, RunKind, seal_run
from .run_lengths import RunParts

_HEAD = struct.Struct("<II")
_LOG_BYTES = 24
_MESSAGE_BYTES = 12


class ScatteredBatch:
    """The messages of several logs. Those that were packed have no entry ids before `place`.

    What it has of each log is in arrays: as objects it would take several times the memory of small messages.
    """

    __slots__ = ("_bodies_at", "_limits", "_places", "_rows_at", "counts", "firsts", "ledger_ids", "starts_ms", "value")

    def __init__(self, value: Buffer) -> None:
        logs, _ = _HEAD.unpack_from(value)
        at = _HEAD.size
        self.value = value
        self.starts_ms = _column("q", value, at, logs)
        self.ledger_ids = _column("Q", value, at + 8 * logs, logs)
        self.firsts = _column("I", value, at + 16 * logs, logs)
        self.counts = _column("I", value, at + 20 * logs, logs)
        self._rows_at = at + _LOG_BYTES * logs
        self._places: dict[int, int] = {}

    def _index(self) -> None:
        """Find where the rows and the bodies of each log are: when the first of them is asked for. O(logs)."""
        _, count = _HEAD.unpack_from(self.value)
        limits = np.cumsum(self.counts)
        ends = np.frombuffer(self.value, "<u4", 3 * count, self._rows_at).reshape(-1, 3)[:, 1]
        bodies = np.full(len(limits) + 1, self._rows_at + _MESSAGE_BYTES * count, dtype=np.int64)
        bodies[1:] += np.cumsum(ends[limits - 1], dtype=np.int64)
        self._limits = array("I", limits.astype("I").tobytes())
        self._bodies_at = array("q", bodies.tobytes())
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

    def limits(self) -> list[int]:
        return list(map(int.__add__, self.firsts, self.counts))

    def run_of(self, ledger_id: int) -> BatchRun:
        if not self._places:
            self._index()
        at = self._places[ledger_id]
        first = self.firsts[at]
        return _new_run((first, first + self.counts[at], self, at))

    def by_log(self) -> Iterator[tuple[int, int, BatchRun]]:
        """(start of the partition, ledger id, messages) of each log."""
        return zip(self.starts_ms, self.ledger_ids, map(self.run_of, self.ledger_ids), strict=True)

    def rows_of(self, at: int) -> slice:
        """The places of the rows of a log, by its place."""
        if not self._places:
            self._index()
        limit = self._limits[at]
        return slice(limit - self.counts[at], limit)

    def stored_bytes(self, at: int) -> int:
        bodies_at = self._bodies_at
        return HEADER_BYTES + _MESSAGE_BYTES * self.counts[at] + bodies_at[at + 1] - bodies_at[at]

    def parts(self, at: int) -> RunParts:
        bodies, limit = self._bodies_at, self._rows_at + _MESSAGE_BYTES * self._limits[at]
        return RunParts(
            0,
            self.starts_ms[at],
            self.value[limit - _MESSAGE_BYTES * self.counts[at] : limit],
            self.value[bodies[at] : bodies[at + 1]],
        )


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
    def kind(self) -> int:
        return RunKind.MESSAGES

    @property
    def value(self) -> bytes:
        """The run, made at each call."""
        _, base_ms, rows, bodies = self.batch.parts(self.at)
        header = HEADER.pack(0, RUN_VERSION, RunKind.MESSAGES, 0, self.limit - self.first, base_ms, 0, 0)[4:]
        columns = np.frombuffer(rows, "<u4").reshape(-1, 3).T.tobytes()
        return seal_run(run_key(self.batch.ledger_ids[self.at], self.first), header + columns, (bodies,))

    @property
    def stored_bytes(self) -> int:
        return self.batch.stored_bytes(self.at)

    def parts(self) -> RunParts:
        return self.batch.parts(self.at)


_new_run = partial(tuple.__new__, BatchRun)


def logs_in(value: Buffer) -> int:
    """Number of logs that a stored batch has messages for."""
    return int(_HEAD.unpack_from(value)[0])
