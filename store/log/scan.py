"""Reading runs of a ledger in order, or the one that holds an entry.

Everything here works inside a read transaction that the caller holds, and yields views into it. Unapplied runs, which
follow the applied ones, come behind them.
"""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from operator import attrgetter

import lmdb

from ..codec.format import is_run_of, run_key
from ..codec.run import ReadBodies, Run
from ..env.memtable import Reads, UnappliedRun, read_bodies, unapplied_runs
from ..errors import CorruptEntry
from ..position import ENTRY_MASK

_first, _limit = attrgetter("first"), attrgetter("limit")


def seek(cursor: lmdb.Cursor, ledger_id: int, entry_id: int) -> bool:
    """Place `cursor` on the run of `ledger_id` that begins at or before `entry_id`; O(log n).

    Where there is none, on the first run of the ledger after it; False when there is neither.
    """
    key = run_key(ledger_id, entry_id)
    if cursor.set_range(key):
        if cursor.key() == key:
            return True
        if cursor.prev() and is_run_of(cursor.key(), ledger_id):
            return True
        return bool(cursor.set_range(key)) and is_run_of(cursor.key(), ledger_id)
    return bool(cursor.last()) and is_run_of(cursor.key(), ledger_id)


def runs(
    raw: Reads, environment: str, ledger_id: int, start: int = 0, limit: int | None = None
) -> Iterator[Run | CorruptEntry]:
    """The runs that hold entries of [start, limit), in order; a damaged one comes as its error. O(log n + runs)."""
    rows = unapplied_runs(raw, ledger_id)
    applied, read = start, read_bodies(raw)
    cursor = raw.cursor()
    bound = None if limit is None else run_key(ledger_id, limit)
    unapplied = rows and limit is not None and rows[0].first <= start and limit <= rows[-1].limit
    more = not unapplied and seek(cursor, ledger_id, start)
    while more:
        key = bytes(cursor.key())
        if not is_run_of(key, ledger_id):
            break
        if bound is not None and key >= bound:
            return
        try:
            run = Run(environment, key, cursor.value(), read)
        except CorruptEntry as error:
            yield error
        else:
            applied = max(applied, run.limit)
            if run.limit > start:
                yield run
        more = cursor.next()
    for at in range(bisect_right(rows, applied, key=_limit), len(rows)):
        row = rows[at]
        if limit is not None and row.first >= limit:
            return
        yield _run(environment, ledger_id, row, read)


def _run(environment: str, ledger_id: int, row: UnappliedRun, read: ReadBodies | None) -> Run:
    return Run(environment, run_key(ledger_id, row.first), memoryview(row.value), read)


def measured(raw: Reads, environment: str, ledger_id: int) -> tuple[int, int]:
    """Bytes of a ledger's runs, and the latest due time of the messages that were not due when they were appended."""
    size = due_by_ms = 0
    for run in runs(raw, environment, ledger_id):
        if not isinstance(run, Exception):
            size += run.stored_bytes
            if run.early:
                due_by_ms = max(due_by_ms, int(run.dues().max()))
    return size, due_by_ms


class RunFinder:
    """Finds the run that holds an entry. REQUIRES: the read transaction lasts."""

    def __init__(self, raw: Reads, environment: str) -> None:
        self._raw = raw
        self._environment = environment
        self._read = read_bodies(raw)
        self._cursor = raw.cursor()
        self._last: Run | None = None
        """The run on which the cursor stands."""

    def find(self, ledger_id: int, entry_id: int) -> Run | None:
        """The run, or None where there is none. Raises CorruptEntry. O(log n), no payload touched.

        Tries the run that follows the last one found first, where it holds the entry if it is as long.
        """
        rows = unapplied_runs(self._raw, ledger_id)
        if rows and rows[0].first <= entry_id < rows[-1].limit:
            row = rows[bisect_right(rows, entry_id, key=_first) - 1]
            return _run(self._environment, ledger_id, row, self._read) if entry_id < row.limit else None
        run = self._follow(ledger_id, entry_id) or self._find(ledger_id, entry_id)
        self._last = run
        return run

    def _find(self, ledger_id: int, entry_id: int) -> Run | None:
        cursor = self._cursor
        self._last = None
        if not 0 <= entry_id < ENTRY_MASK:  # a caller may ask for any id
            return None
        after = run_key(ledger_id, entry_id + 1)  # entry ids end below the largest number of 32 bits
        if not (cursor.prev() if cursor.set_range(after) else cursor.last()):
            return None
        found, value = cursor.item()
        found = bytes(found)
        # A key before those of the ledger: the entry would lie before its first run.
        if not is_run_of(found, ledger_id):
            return None
        run = Run(self._environment, found, value, self._read)
        return run if entry_id < run.first_entry + run.count else None

    def _follow(self, ledger_id: int, entry_id: int) -> Run | None:
        last = self._last
        if last is None or last.ledger_id != ledger_id or not last.limit <= entry_id < last.limit + last.count:
            return None
        if self._cursor.next():
            found, value = self._cursor.item()
            found = bytes(found)
            if is_run_of(found, ledger_id) and found <= run_key(ledger_id, entry_id):
                with suppress(CorruptEntry):  # it may be another run that holds the entry
                    run = Run(self._environment, found, value, self._read)
                    if entry_id < run.first_entry + run.count:
                        return run
        return None
