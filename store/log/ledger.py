"""The append side of one ledger: entries of many callers, gathered in a transaction, written as runs.

An append in a group commit has its entry id at once; the entries themselves are written when all
work of the commit is done, so that the sends of many threads to one log become one run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..codec.bodies import Bodies, Buffer
from ..codec.format import MAX_ENTRY_ID, is_run_of, run_key
from ..codec.frontier import HELD
from ..codec.run import (
    Int64s,
    PackedRun,
    Run,
    RunLimits,
    UInt32s,
    pack_groups,
    pack_markers,
    pack_message,
    pack_messages,
)
from ..codec.run_lengths import cut, fits_runs
from ..env.memtable import Reads, unapplied_runs
from ..env.transaction import StagingTransaction
from ..errors import BrokenInvariant, CorruptEntry, InvalidArgument

MARKER_BYTES = 8
"""Bytes of a ledger's size that each marker takes: its columns in a run."""

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

    def takes(self, count: int) -> bool:
        """True while ids are left for `count` more entries."""
        return self.entries + count <= MAX_ENTRY_ID


Dues = Int64s | tuple[int]
"""Due times in ms: a column, or the one of a single message."""


class PackedMessages:
    """Messages for a log in runs that want nothing but their keys: packed before they are appended, by any thread."""

    __slots__ = ("count", "dues", "runs")

    def __init__(self, dues: Int64s, bodies: Bodies, base_ms: int, limits: RunLimits) -> None:
        """Due times lie within [base_ms, base_ms + MAX_DUE_SPAN_MS]."""
        self.dues = dues
        self.count = len(bodies)
        ranges = _ranges(dues, bodies, base_ms, limits)
        self.runs = [PackedRun(base_ms, dues[start:limit], bodies[start:limit]) for start, limit in ranges]

    @classmethod
    def each(
        cls, dues: Int64s, bodies: Bodies, groups: Sequence[tuple[int, int, int]], limits: RunLimits
    ) -> list[PackedMessages]:
        """Pack groups (base_ms, start, limit) of rows, which follow each other from 0 on."""
        if not fits_runs(bodies, groups, limits) or len(groups) == 1:
            return [cls(dues[start:limit], bodies[start:limit], base_ms, limits) for base_ms, start, limit in groups]
        found = []
        for (_, start, limit), run in zip(groups, pack_groups(dues, bodies, groups), strict=True):
            messages = cls.__new__(cls)
            messages.dues, messages.count, messages.runs = dues[start:limit], limit - start, [run]
            found.append(messages)
        return found


class _Piece:
    """Consecutive entries of one kind; messages have bodies, markers have a target."""

    __slots__ = ("base_ms", "bodies", "dues", "early", "entries", "fired_ms", "replaced", "target")

    def __init__(
        self,
        dues: list[Dues],
        bodies: list[bytes] | Bodies | None,
        base_ms: int | None,
        target: int = 0,
        entries: UInt32s | None = None,
        replaced: Replaced | None = None,
    ) -> None:
        self.dues = dues
        self.bodies = bodies
        self.base_ms = base_ms
        self.target = target
        self.entries = entries
        self.replaced = replaced
        self.early = False
        self.fired_ms: int | None = None


class StagedLedger:
    """The appends of one transaction to one ledger."""

    __slots__ = ("_callback", "_limits", "_pieces", "_written_bytes", "due_by_ms", "ledger", "next_entry")

    def __init__(self, ledger: Ledger, limits: RunLimits, committed: Callable[[int, Dues], None] | None = None) -> None:
        """`committed` is called once with (first entry id, due times) when messages are on disk.

        The due time it gets for a conditional entry is HELD.
        """
        self.ledger = ledger
        self.next_entry = ledger.entries
        self.due_by_ms = ledger.due_by_ms
        self._limits = limits
        self._callback = committed
        self._pieces: list[_Piece | PackedMessages] = []
        self._written_bytes = 0

    def add_messages(
        self,
        dues: Dues,
        bodies: Sequence[bytes],
        base_ms: int | None,
        replaced: Replaced | None = None,
        *,
        early: bool = False,
    ) -> int:
        """Append messages; returns the id of the first. `base_ms` None: the smallest due time of a run.

        `early`: some of them, appended to a main log, are not due yet.
        """
        first = self._advance(len(bodies))
        last = self._pieces[-1] if self._pieces else None
        if type(bodies) is Bodies:  # a batch of its own, not copied to be one with its neighbours
            last = _Piece([dues], bodies, base_ms, replaced=replaced)
            self._pieces.append(last)
        elif (
            isinstance(last, _Piece)
            and type(last.bodies) is list
            and last.base_ms == base_ms
            and not (last.replaced or replaced)
        ):
            last.dues.append(dues)
            last.bodies.extend(bodies)
        else:
            last = _Piece([dues], list(bodies), base_ms, replaced=replaced)
            self._pieces.append(last)
        if early:
            last.early = True
            self.due_by_ms = max(self.due_by_ms, int(np.max(dues)))
        return first

    def add_packed(self, messages: PackedMessages) -> int:
        """Append packed messages; returns the id of the first."""
        first = self._advance(messages.count)
        self._pieces.append(messages)
        return first

    def add_markers(
        self, target: int, base_ms: int, entries: UInt32s, dues: Int64s, fired_ms: int | None = None
    ) -> int:
        """Append markers of `entries` of the partition log `target`, fired at `fired_ms`; returns the first id."""
        first = self._advance(len(entries))
        piece = _Piece([dues], None, base_ms, target, entries)
        piece.fired_ms = fired_ms
        self._pieces.append(piece)
        return first

    def _advance(self, count: int) -> int:
        first = self.next_entry
        if first + count > MAX_ENTRY_ID:
            raise InvalidArgument("entries", first + count, f"ledger {self.ledger.ledger_id} would pass {MAX_ENTRY_ID}")
        self.next_entry = first + count
        return first

    def flush(self, transaction: StagingTransaction) -> None:
        first = self.ledger.entries
        transaction.entries += self.next_entry - first
        self._written_bytes = 0
        for piece in self._pieces:
            if isinstance(piece, PackedMessages):
                first = self._write_packed(transaction, first, piece.runs)
            elif piece.bodies is not None:
                first = self._write_messages(transaction, first, piece, piece.bodies)
            elif piece.entries is not None:
                first = self._write_markers(transaction, first, piece, piece.entries)

    def _write(self, transaction: StagingTransaction, key: bytes, value: Buffer) -> None:
        transaction.insert_run(key, value)
        self._written_bytes += len(value)

    def _write_messages(
        self, transaction: StagingTransaction, first: int, piece: _Piece, bodies: list[bytes] | Bodies
    ) -> int:
        ledger_id = self.ledger.ledger_id
        if len(bodies) == 1 and piece.replaced is None:  # a single send, the commonest commit
            due_ms, body = int(piece.dues[0][0]), bodies[0]
            key = run_key(ledger_id, first)
            base_ms = due_ms if piece.base_ms is None else piece.base_ms
            self._write(transaction, key, pack_message(key, base_ms, due_ms, body, early=piece.early))
            return first + 1
        dues = _joined(piece.dues)
        bodies = Bodies.of(bodies)
        for start, limit in _ranges(dues, bodies, piece.base_ms, self._limits):
            key = run_key(ledger_id, first + start)
            base_ms = int(dues[start:limit].min()) if piece.base_ms is None else piece.base_ms
            replaced = piece.replaced
            if replaced is not None:
                replaced = Replaced(replaced.ledgers[start:limit], replaced.entries[start:limit])
            value = pack_messages(key, base_ms, dues[start:limit], bodies[start:limit], replaced, early=piece.early)
            self._write(transaction, key, value)
        return first + len(bodies)

    def _write_packed(self, transaction: StagingTransaction, first: int, runs: Sequence[PackedRun]) -> int:
        for run in runs:
            key = run_key(self.ledger.ledger_id, first)
            self._write(transaction, key, run.sealed(key))
            first += run.count
        return first

    def _write_markers(self, transaction: StagingTransaction, first: int, piece: _Piece, entries: UInt32s) -> int:
        base_ms = piece.base_ms
        if base_ms is None:
            raise BrokenInvariant(f"markers of ledger {piece.target} do not say which partition they point into")
        dues = _joined(piece.dues)
        for start in range(0, len(entries), MAX_RUN_ENTRIES):
            limit = min(start + MAX_RUN_ENTRIES, len(entries))
            key = run_key(self.ledger.ledger_id, first + start)
            value = pack_markers(key, piece.target, base_ms, entries[start:limit], dues[start:limit], piece.fired_ms)
            self._write(transaction, key, value)
        return first + len(entries)

    def committed(self) -> None:
        first = self.ledger.entries
        self.ledger.due_by_ms = self.due_by_ms  # before readers can find the entries
        self.ledger.entries = self.next_entry
        self.ledger.stored_bytes += self._written_bytes
        if self._callback is not None:
            dues: list[Dues] = []
            for piece in self._pieces:
                if isinstance(piece, PackedMessages):
                    dues.append(piece.dues)
                elif piece.replaced is None:
                    dues += piece.dues
                else:
                    dues += [np.full(len(due), HELD) for due in piece.dues]
            self._callback(first, dues[0] if len(dues) == 1 else _joined(dues))


def _ranges(dues: Int64s, bodies: Bodies, base_ms: int | None, limits: RunLimits) -> Iterable[tuple[int, int]]:
    """The places at which messages are cut into runs (`cut`)."""
    if base_ms is not None and len(bodies) <= limits.entries and bodies.total() <= limits.bytes:
        return ((0, len(bodies)),)
    return cut(dues, bodies.sizes(), limits.entries, limits.bytes, base_ms)


def _joined(dues: Sequence[Dues]) -> Int64s:
    """One column of several."""
    return np.asarray(dues[0], dtype=np.int64) if len(dues) == 1 else np.concatenate(dues, dtype=np.int64)


def find_tail(raw: Reads, environment: str, ledger_id: int) -> int:
    """One past the last entry id of a ledger, 0 when it has none; O(log n).

    After a last run whose header is damaged it is MAX_RUN_ENTRIES on: no id is ever given out twice.
    """
    rows = unapplied_runs(raw, ledger_id)
    return max(applied_tail(raw, environment, ledger_id), rows[-1].limit if rows else 0)


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
