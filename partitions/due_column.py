"""The due column of a partition log: the due times in the headers of its runs, read without payloads."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap

from ..store.codec.frontier import HELD, UNREADABLE_DUE, FrontierRecord
from ..store.codec.run import Int64s, Run, UInt32s
from ..store.env.environment import Environment
from ..store.errors import CorruptEntry
from ..store.log.scan import RunFinder, runs

_RUNS_A_TRANSACTION = 4_096


class DueBatch(NamedTuple):
    """Due times of the entries [first_entry, first_entry + len(dues)), epoch ms, in append order."""

    first_entry: int
    dues: Int64s


def scan_dues(
    environment: Environment, ledger_id: int, start: int, limit: int, admitted: BitMap | None = None
) -> Iterator[DueBatch | CorruptEntry]:
    """Read due times of the entries [start, limit), in batches of thousands of runs; a damaged run comes as its error.

    A conditional entry that is not in `admitted` comes with HELD for its due time. Each batch is a read
    transaction of its own. The entries below `limit` must be committed.
    """
    while start < limit:
        columns: list[Int64s | UInt32s] = []
        base_ms = 0
        errors: list[CorruptEntry] = []
        first = start
        with environment.read() as raw:
            for run in runs(raw, environment.name, ledger_id, start, limit):
                if isinstance(run, CorruptEntry):
                    errors.append(run)
                    continue
                if run.first_entry > start:
                    # Ids are dense but for a damaged run: what lies before it is a batch of its own.
                    if columns:
                        break
                    first = start = run.first_entry
                if run.base_ms != base_ms:
                    if columns:
                        break
                    base_ms = run.base_ms
                offsets = _held(run, admitted) if run.conditional else run.due_offsets()
                whole = start == run.first_entry and run.limit <= limit
                columns.append(offsets if whole else offsets[start - run.first_entry : limit - run.first_entry])
                start = min(run.limit, limit)
                if len(columns) == _RUNS_A_TRANSACTION:
                    break
            else:
                limit = start
            # One pass over all columns, while the transaction that they lie in is open.
            dues = np.concatenate(columns).astype(np.int64) if columns else np.empty(0, np.int64)
        yield from errors
        if len(dues):
            dues += base_ms
            yield DueBatch(first, dues)


def fired_entries(
    environment: Environment, frontier: FrontierRecord, tail: int, admitted: BitMap
) -> tuple[BitMap, list[CorruptEntry]]:
    """Find the entries of a log that have fired, cancelled ones among them, and those that cannot be read."""
    found, damaged = BitMap(), []
    for batch in scan_dues(environment, frontier.ledger_id, 0, min(tail, frontier.absorbed_end), admitted):
        if isinstance(batch, CorruptEntry):
            damaged.append(batch)
            continue
        first, dues = batch
        entries = np.arange(first, first + len(dues), dtype=np.uint32)
        found.update(entries[frontier.has_fired(entries, dues) & (dues != HELD)])
    return found, damaged


def _held(run: Run, admitted: BitMap | None) -> Int64s:
    """Due times of a conditional run, as offsets from its base."""
    offsets: Int64s = run.due_offsets().astype(np.int64)
    for index in range(run.count):
        if admitted is None or run.first_entry + index not in admitted:
            offsets[index] = HELD - run.base_ms
    return offsets


def dues_of(environment: Environment, ledger_id: int, entries: UInt32s) -> Int64s:
    """Due times of `entries` (ascending ids), UNREADABLE_DUE for one whose run is damaged or missing.

    O(k log n) for k runs touched.
    """
    dues = np.empty(len(entries), dtype=np.int64)
    with environment.read() as raw:
        finder = RunFinder(raw, environment.name)
        at = 0
        while at < len(entries):
            entry_id = int(entries[at])
            run = _intact_run(finder, ledger_id, entry_id)
            if run is None:
                dues[at] = UNREADABLE_DUE
                at += 1
                continue
            if at + 1 == len(entries) or entries[at + 1] >= run.limit:
                dues[at] = run.due(entry_id - run.first_entry)
                at += 1
                continue
            limit = at + int(np.searchsorted(entries[at : at + run.count], run.limit))
            dues[at:limit] = run.dues()[entries[at:limit] - np.uint32(run.first_entry)]
            at = limit
    return dues


def _intact_run(finder: RunFinder, ledger_id: int, entry_id: int) -> Run | None:
    try:
        return finder.find(ledger_id, entry_id)
    except CorruptEntry:
        return None
