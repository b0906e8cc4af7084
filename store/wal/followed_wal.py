"""The unapplied rows that another process has in the write-ahead log, by environment, for a store open to read.

A reader of an environment looks here first and begins its transaction then. What was acknowledged before the look is
in the log, or in LMDB by the time the transaction begins. The rows of groups that the transaction finds applied
(memtable.APPLIED_KEY) are left out; those that are left follow what it finds, without a gap.
"""

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..env.memtable import Follow, Look, Unapplied
from ..files.system_errors import explained
from .segment import MAIN, Group, Row
from .wal_reader import DIRECTORY, WalFollower
from .write_batch import BatchRow, add_row, registered_by, rows_by_log

_BEYOND = 1 << 64
"""Past the place of every group."""

_Placed = tuple[int, Row | BatchRow]
"""The place of a group, and a row of it."""


class FollowedWal:
    """The write-ahead log of the store in `path`, which another process writes. Thread-safe.

    Memory: twice the bytes of the segments that there are.
    """

    def __init__(self, path: Path, store_id: bytes) -> None:
        self._path = path / DIRECTORY
        self._wal = WalFollower(path, store_id)
        self._lock = threading.Lock()
        self._last: Group | None = None
        """The last group whose rows are in `_rows`."""
        self._rows: dict[int, list[_Placed]] = {}
        self._made: dict[int, tuple[int, int, Unapplied]] = {}
        """Rows of groups after one place, up to another, by environment."""

    def of(self, start_ms: int) -> Follow:
        """Return the reader of rows of a partition's environment, or of the main one (MAIN)."""
        return _FollowedRows(self, start_ms)

    def registers(self, start_ms: int) -> bool:
        """True while it has the registration of a partition, which is vacant then where it has no directory."""
        with self._lock, explained(self._path):
            self._read_on()
            return any(registered_by(row) == start_ms for _, row in self._rows.get(MAIN, ()))

    def look(self, start_ms: int) -> Look:
        with self._lock, explained(self._path):
            self._read_on()
            return partial(self._unapplied, start_ms, self._rows.get(start_ms, [])[:])

    def _read_on(self) -> None:
        groups = self._wal.follow()
        oldest = groups[0].position if groups else _BEYOND
        last = self._last
        if last is not None and last.position >= oldest and not any(group is last for group in groups):
            self._last, self._rows, self._made = None, {}, {}  # its append was interrupted, another took its place
        for start_ms, rows in list(self._rows.items()):
            if rows[0][0] < oldest:
                self._rows[start_ms] = [row for row in rows if row[0] >= oldest]
                if not self._rows[start_ms]:
                    del self._rows[start_ms]
        known = -1 if self._last is None else self._last.position
        for group in groups:
            if group.position > known:
                for row in rows_by_log(group):
                    self._rows.setdefault(row.start_ms, []).append((group.position, row))
        if groups:
            self._last = groups[-1]

    def _unapplied(self, start_ms: int, rows: Sequence[_Placed], applied: int) -> Unapplied:
        if not rows or rows[-1][0] <= applied:
            return Unapplied.nothing()
        last = rows[-1][0]
        with self._lock:
            after, until, made = self._made.get(start_ms, (applied, applied, Unapplied.nothing()))
        if after != applied or until > last:
            until, made = applied, Unapplied.nothing()
        if until < last:
            made = made.copy()
            for position, row in rows:
                if position > until:
                    add_row(made, row)
            with self._lock:
                self._made[start_ms] = applied, last, made
        return made


class _FollowedRows(NamedTuple):
    """The rows of one environment in the log."""

    wal: FollowedWal
    start_ms: int

    def __call__(self) -> Look:
        return self.wal.look(self.start_ms)

    def is_registered(self) -> bool:
        return self.wal.registers(self.start_ms)
