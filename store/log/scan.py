"""Reading runs of a ledger in order, or the one that holds an entry.

Everything here works inside a read transaction that the caller holds, and yields views into it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import lmdb

from ..codec.format import is_run_of, run_key
from ..codec.run import Run
from ..errors import CorruptEntry


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
    raw: lmdb.Transaction, environment: str, ledger_id: int, start: int = 0, limit: int | None = None
) -> Iterator[Run | CorruptEntry]:
    """The runs that hold entries of [start, limit), in order; a damaged one comes as its error."""
    cursor = raw.cursor()
    bound = None if limit is None else run_key(ledger_id, limit)
    more = seek(cursor, ledger_id, start)
    while more:
        key = bytes(cursor.key())
        if not is_run_of(key, ledger_id) or (bound is not None and key >= bound):
            return
        try:
            run = Run(environment, key, cursor.value())
        except CorruptEntry as error:
            yield error
        else:
            if run.limit > start:
                yield run
        more = cursor.next()


def find_run(cursor: lmdb.Cursor, environment: str, ledger_id: int, entry_id: int) -> Run | None:
    """The run that holds an entry, or None. Raises CorruptEntry. O(log n), no payload touched."""
    after = run_key(ledger_id, entry_id + 1)  # entry ids end below the largest number of 32 bits
    if not (cursor.prev() if cursor.set_range(after) else cursor.last()):
        return None
    found, value = cursor.item()
    found = bytes(found)
    # A key before those of the ledger: the entry would lie before its first run.
    if not is_run_of(found, ledger_id):
        return None
    run = Run(environment, found, value)
    return run if entry_id < run.first_entry + run.count else None


def find_run_after(cursor: lmdb.Cursor, environment: str, last: Run, entry_id: int) -> Run | None:
    """As `find_run`, for an entry after `last`, on which `cursor` stands.

    Tries the run that follows first, where it holds the entry if it is as long as `last`.
    """
    if entry_id < last.limit + last.count and cursor.next():
        key = run_key(last.ledger_id, entry_id)
        found, value = cursor.item()
        found = bytes(found)
        if is_run_of(found, last.ledger_id) and found <= key:
            with suppress(CorruptEntry):  # it may be another run that holds the entry
                run = Run(environment, found, value)
                if entry_id < run.first_entry + run.count:
                    return run
    return find_run(cursor, environment, last.ledger_id, entry_id)
