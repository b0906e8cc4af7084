"""The append side of one ledger: messages and markers, packed as runs and inserted in a transaction."""

import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..codec.bodies import Bodies
from ..codec.format import MAX_ENTRY_ID, RUN_KEY_BYTES, RUN_PREFIX, is_run_of, run_key
from ..codec.run import (
    HEADER_BYTES,
    RUN_VERSION,
    Int64s,
    PackedRun,
    Run,
    RunLimits,
    UInt32s,
    is_apart,
    pack_groups,
    pack_markers,
)
from ..codec.run_lengths import cut, fits_runs
from ..env.body_file import body_files
from ..env.memtable import Reads, ReadTransaction, unapplied_runs
from ..env.transaction import Transaction
from ..errors import CorruptEntry, InvalidArgument

_KEY_FIELDS = np.dtype([("table", "u1"), ("ledger", ">u8"), ("first", ">u4")])
_HEADER_FIELDS = np.dtype([("checksum", "<u4"), ("version", "u1"), ("kind", "V3"), ("count", "<u4"), ("rest", "V20")])
_NO_KEY, _NO_HEADER = bytes(RUN_KEY_BYTES), bytes(HEADER_BYTES)

MAX_RUN_ENTRIES = 65_535
"""Most entries of a run; the next id after a run whose header is damaged is this much higher."""


class Replaced(NamedTuple):
    """The entries that conditional ones replace, by row: ledger ids and entry ids."""

    ledgers: npt.NDArray[np.uint64]
    entries: UInt32s


class Ledger:
    """The committed end of a ledger. Only the leader of a commit changes it."""

    __slots__ = ("due_by_ms", "entries", "ledger_id", "stored_bytes")

    def __init__(self, ledger_id: int, entries: int = 0, stored_bytes: int = 0) -> None:
        self.ledger_id = ledger_id
        self.entries = entries
        """Committed entries; the id of the next."""
        self.stored_bytes = stored_bytes
        """Bytes of the runs written since the ledger was opened here, and before where that is known."""
        self.due_by_ms = 0
        """Latest due time of a main log's messages that were not due when they were appended; 0: all were."""


class PackedMessages(NamedTuple):
    """Messages for a log in runs that want nothing but their keys: packed before they are appended, by any thread."""

    dues: Int64s
    runs: list[PackedRun]

    @classmethod
    def each(
        cls, dues: Int64s, bodies: Bodies, groups: Sequence[tuple[int, int, int]], limits: RunLimits
    ) -> "list[PackedMessages]":
        """Pack groups (base_ms, start, limit) of rows, which follow each other from 0 on.

        Due times of each lie within [base_ms, base_ms + MAX_DUE_SPAN_MS].
        """
        if len(groups) > 1 and fits_runs(bodies, groups, limits):
            runs = [[run] for run in pack_groups(dues, bodies, groups)]
        else:
            runs = [_packed(dues[low:high], bodies[low:high], base_ms, limits) for base_ms, low, high in groups]
        return [cls(dues[low:high], packed) for (_, low, high), packed in zip(groups, runs, strict=True)]


def _packed(dues: Int64s, bodies: Bodies, base_ms: int, limits: RunLimits) -> list[PackedRun]:
    ranges = _ranges(dues, bodies, base_ms, limits)
    return [PackedRun(base_ms, dues[start:limit], bodies[start:limit]) for start, limit in ranges]


def insert_messages(
    transaction: Transaction,
    ledger_id: int,
    first: int,
    dues: Int64s,
    bodies: Sequence[bytes],
    base_ms: int | None,
    limits: RunLimits,
    replaced: Replaced | None = None,
    *,
    early: bool = False,
) -> int:
    """Insert messages as runs of a ledger, from the entry `first` on; returns the bytes of the runs.

    base_ms: None takes the smallest due time of a run. early: some of them, appended to a main log, are not due yet.
    """
    bodies, size = Bodies.of(bodies), 0
    for start, limit in _ranges(dues, bodies, base_ms, limits):
        key = run_key(ledger_id, first + start)
        base = int(dues[start:limit].min()) if base_ms is None else base_ms
        part = replaced and Replaced(replaced.ledgers[start:limit], replaced.entries[start:limit])
        value = PackedRun(base, dues[start:limit], bodies[start:limit], part, early=early).sealed(key)
        transaction.insert_run(key, value, limit - start)
        size += len(value)
    return size


def insert_packed(transaction: Transaction, ledger_id: int, first: int, messages: PackedMessages) -> None:
    """Insert packed messages as runs of a ledger, from the entry `first` on."""
    for run in messages.runs:
        key = run_key(ledger_id, first)
        transaction.insert_run(key, run.sealed(key), run.count)
        first += run.count


def insert_markers(
    transaction: Transaction,
    ledger_id: int,
    first: int,
    target: int,
    base_ms: int,
    entries: UInt32s,
    dues: Int64s,
    fired_ms: int | None,
) -> int:
    """Insert markers of `entries` of the partition log `target`, fired at `fired_ms`; returns the bytes of the runs."""
    size = 0
    for start in range(0, len(entries), MAX_RUN_ENTRIES):
        limit = min(start + MAX_RUN_ENTRIES, len(entries))
        key = run_key(ledger_id, first + start)
        value = pack_markers(key, target, base_ms, entries[start:limit], dues[start:limit], fired_ms)
        transaction.insert_run(key, value, limit - start)
        size += len(value)
    return size


def end_after(ledger_id: int, first: int, count: int) -> int:
    """Return the id behind `count` entries from `first` on. Raises InvalidArgument: the ledger has no ids left."""
    if first + count > MAX_ENTRY_ID:
        raise InvalidArgument("entries", first + count, f"ledger {ledger_id} would pass {MAX_ENTRY_ID}")
    return first + count


def _ranges(dues: Int64s, bodies: Bodies, base_ms: int | None, limits: RunLimits) -> Iterable[tuple[int, int]]:
    """The places at which messages are cut into runs (`cut`)."""
    if base_ms is not None and len(bodies) <= limits.entries and bodies.total() <= limits.bytes:
        return ((0, len(bodies)),)
    return cut(dues, bodies.sizes(), limits.entries, limits.bytes, base_ms)


def find_tail(raw: Reads, environment: str, ledger_id: int) -> int:
    """One past the last entry id of a ledger, 0 when it has none; O(log n).

    After a last run whose header is damaged it is MAX_RUN_ENTRIES on: no id is ever given out twice.
    """
    rows = unapplied_runs(raw, ledger_id)
    return max(applied_tail(raw, environment, ledger_id), rows[-1].limit if rows else 0)


def find_tails(raw: Reads, environment: str, ledgers: npt.NDArray[np.uint64]) -> Int64s:
    """Find the tail of each ledger, for figures: the checksums of headers are not verified. 2 us a ledger."""
    cursor = raw.cursor()
    set_range, prev, key_of, value_of = cursor.set_range, cursor.prev, cursor.key, cursor.value
    keys, headers = [], []
    for (number,), (after,) in zip(_numbers(ledgers), _numbers(ledgers + 1), strict=True):
        there = prev() if set_range(RUN_PREFIX + after) else cursor.last()
        found = bytes(key_of()) if there else b""
        is_run = found.startswith(RUN_PREFIX + number)
        keys.append(found if is_run else _NO_KEY)
        headers.append(bytes(value_of()[:HEADER_BYTES]).ljust(HEADER_BYTES, b"\0") if is_run else _NO_HEADER)
    key, header = np.frombuffer(b"".join(keys), _KEY_FIELDS), np.frombuffer(b"".join(headers), _HEADER_FIELDS)
    tails: Int64s = key["first"].astype(np.int64) + header["count"]
    damaged = (key["table"] > 0) & (header["version"] != RUN_VERSION) | (header["count"] > MAX_RUN_ENTRIES)
    unapplied = raw.unapplied.runs if isinstance(raw, ReadTransaction) else {}
    for at, ledger_id in enumerate(ledgers.tolist() if unapplied or damaged.any() else ()):
        if damaged[at] or ledger_id in unapplied:
            tails[at] = find_tail(raw, environment, ledger_id)
    return tails


def _numbers(ledgers: npt.NDArray[np.uint64]) -> Iterator[tuple[bytes]]:
    return struct.iter_unpack("8s", ledgers.astype(">u8").tobytes())


def applied_tail(raw: Reads, environment: str, ledger_id: int) -> int:
    """Find the end of the applied entries, as `find_tail` does of all."""
    try:
        run = last_applied_run(raw, environment, ledger_id)
    except CorruptEntry as error:
        return error.entry_id + MAX_RUN_ENTRIES
    return 0 if run is None else run.limit


def last_applied_run(raw: Reads, environment: str, ledger_id: int) -> Run | None:
    """The last run of a ledger that is applied; O(log n). Raises CorruptEntry with its first entry: its header is."""
    cursor = raw.cursor()
    found = cursor.set_range(run_key(ledger_id + 1, 0))
    if not (cursor.prev() if found else cursor.last()):
        return None
    key = bytes(cursor.key())
    if not is_run_of(key, ledger_id):
        return None
    return Run(environment, key, cursor.value())


def named_bodies(raw: Reads, environment: str, directory: Path) -> dict[int, int]:
    """The bytes of the body files in `directory` that applied runs name, by ledger: up to the end of the last run.

    They never change, whatever a failed or lost append leaves behind them. A file that no run names is left out. Where
    the last run that may name some is damaged, all of the file counts. It reads the keys of runs behind the last named.
    """
    found = {}
    for ledger_id, path in body_files(directory).items():
        try:
            end = _end_of_named(raw, environment, ledger_id)
        except CorruptEntry:
            end = path.stat().st_size
        if end:
            found[ledger_id] = end
    return found


def _end_of_named(raw: Reads, environment: str, ledger_id: int) -> int:
    cursor = raw.cursor()
    found = cursor.set_range(run_key(ledger_id + 1, 0))
    found = cursor.prev() if found else cursor.last()
    while found and is_run_of(key := bytes(cursor.key()), ledger_id):
        value = cursor.value()
        if is_apart(value):
            run = Run(environment, key, value)
            return (run.bodies_at or 0) + int(run.ends()[-1])
        found = cursor.prev()
    return 0
