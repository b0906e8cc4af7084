"""Discarding what cannot be read of a ledger: its place is kept, its contents are not.

Entry ids stay dense and are never given out twice: a hole is filled with entries that have no body, as compaction
leaves them, and a damaged body is dropped from its run. What is discarded is reported with its raw bytes first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap

from ..store.codec.body import decode_body
from ..store.codec.format import is_run_of, run_key, split_run_key
from ..store.codec.run import FLAG_CONDITIONAL, HEADER, HEADER_BYTES, Run, RunKind, pack_messages
from ..store.env.environment import Environment
from ..store.env.transaction import Transaction
from ..store.errors import CorruptEntry
from ..store.log.ledger import MAX_RUN_ENTRIES

_RUNS_AT_ONCE = 512
_FILLED_AT_ONCE = 50_000


class Discarded(NamedTuple):
    """Something that could not be read: `entry_id` None for a record of the catalog, `raw` as far as it is there."""

    environment: str
    ledger_id: int
    entry_id: int | None
    reason: str
    raw: bytes


class Mended(NamedTuple):
    """A ledger after mending: its length, and the entries discarded, apart by whether their due times are known."""

    entries: int
    holes: BitMap
    bodies: BitMap


def mend_ledger(
    environment: Environment,
    ledger_id: int,
    *,
    least_entries: int,
    base_ms: int,
    dues: Mapping[int, int],
    discard: Callable[[Discarded], object],
) -> Mended:
    """Make the entries [0, tail) of a ledger dense and readable; tail is at least `least_entries`.

    base_ms: of runs that fill a hole. dues: due times known from elsewhere (markers) of entries in holes; the others
    get base_ms. REQUIRES: no other use of the environment. Does nothing where nothing is damaged. O(bytes).
    """
    changes: list[tuple[bytes, bytes | None]] = []
    holes, bodies = BitMap(), BitMap()
    expected = 0
    least = least_entries
    with environment.read() as raw:
        cursor = raw.cursor()
        more = cursor.set_range(run_key(ledger_id, 0))
        while more:
            key = bytes(cursor.key())
            if not is_run_of(key, ledger_id):
                break
            first = split_run_key(key)[1]
            try:
                run = Run(environment.name, key, cursor.value())
                if first < expected:
                    raise CorruptEntry(environment.name, ledger_id, first, f"entries up to {expected - 1} come before")
            except CorruptEntry as error:
                value = bytes(cursor.value())
                discard(Discarded(environment.name, ledger_id, first, error.reason, value))
                changes.append((key, None))
                if cursor.next() and is_run_of(cursor.key(), ledger_id):
                    continue
                least = max(least, first + (entries_told(value) or MAX_RUN_ENTRIES))
                break
            holes.add_range(expected, first)
            expected = run.limit
            if run.kind == RunKind.MESSAGES and (damaged := _damaged_bodies(run, discard)):
                bodies |= damaged
                changes.append((key, _without(run, key, damaged)))
            more = cursor.next()
    holes.add_range(expected, max(expected, least))
    for first, limit in _ranges(holes):
        discard(Discarded(environment.name, ledger_id, first, f"entries {first} to {limit - 1} are gone", b""))
        for start in range(first, limit, _FILLED_AT_ONCE):
            count = min(_FILLED_AT_ONCE, limit - start)
            filled = np.fromiter((dues.get(start + at, base_ms) for at in range(count)), np.int64, count)
            key = run_key(ledger_id, start)
            changes = [change for change in changes if change[0] != key]
            changes.append((key, bytes(pack_messages(key, base_ms, filled, [b""] * count))))
    for at in range(0, len(changes), _RUNS_AT_ONCE):
        part = changes[at : at + _RUNS_AT_ONCE]
        environment.write(lambda transaction: _apply(transaction, part))  # noqa: B023 - it has returned by then
    return Mended(max(expected, least), holes, bodies)


def entries_told(value: bytes) -> int | None:
    """How many entries a run had whose header does not match its checksum; None: its length does not agree.

    The count, the columns that it makes and the length of the value tell the same, or one of them is damaged.
    """
    if len(value) < HEADER_BYTES:
        return None
    _, _, kind, flags, count, *_ = HEADER.unpack_from(value)
    if not 0 < count <= MAX_RUN_ENTRIES:
        return None
    if kind == RunKind.MARKERS:
        return count if len(value) == HEADER_BYTES + 8 * count else None
    bodies = HEADER_BYTES + (24 if flags & FLAG_CONDITIONAL else 12) * count
    if bodies > len(value):
        return None
    ends = np.frombuffer(value, "<u4", count, HEADER_BYTES + 4 * count)
    return count if bodies + int(ends[-1]) == len(value) else None


def _apply(transaction: Transaction, changes: list[tuple[bytes, bytes | None]]) -> None:
    for key, value in changes:
        if value is None:
            transaction.raw.delete(key)
        else:
            transaction.raw.put(key, value)


def _damaged_bodies(run: Run, discard: Callable[[Discarded], object]) -> BitMap:
    damaged = BitMap()
    for entry_id, body in run.bodies():
        reason = body.reason if isinstance(body, CorruptEntry) else None
        if isinstance(body, bytes):
            try:
                decode_body(body)
            except ValueError as error:
                reason = str(error)
        if reason is not None:
            raw = run.raw_body(entry_id - run.first_entry)
            discard(Discarded(run.environment, run.ledger_id, entry_id, reason, raw))
            damaged.add(entry_id)
    return damaged


def _without(run: Run, key: bytes, damaged: BitMap) -> bytes:
    bodies = [b"" if entry_id in damaged else body or b"" for entry_id, body in run.bodies()]
    replaced = None
    if run.conditional:
        ledgers, entries = run.replaced()
        replaced = (ledgers.copy(), entries.copy())
    return bytes(pack_messages(key, run.base_ms, run.dues(), bodies, replaced, early=run.early))  # type: ignore[arg-type]


def _ranges(entries: BitMap) -> list[tuple[int, int]]:
    """The entries as half-open ranges."""
    found: list[tuple[int, int]] = []
    if not entries:
        return found
    ids = np.frombuffer(entries.to_array(), dtype=np.uint32).astype(np.int64)
    breaks = np.flatnonzero(np.diff(ids) != 1)
    starts, ends = np.concatenate(([0], breaks + 1)), np.concatenate((breaks, [len(ids) - 1]))
    return [(int(ids[start]), int(ids[end]) + 1) for start, end in zip(starts, ends, strict=True)]
