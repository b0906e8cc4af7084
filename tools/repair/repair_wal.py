"""The write-ahead log's part of a repair: it is discarded where it is damaged, else it is left for replay at opening.

Opening the store needs each log to lead up to what an intact WAL holds of it. Where a log has lost its end, the
entries in between are discarded like any others of it, and the WAL stays: only what is lost is discarded. A damaged
WAL goes, since what it has lost cannot be told; what can be read of it, and no partition has, is reported first,
and the ids that were reserved for those messages are not given out again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from pyroaring import BitMap

from ...cleanup.mend import Discarded
from ...store.codec.run import Run
from ...store.errors import DamagedStore
from ...store.files.directory import make_directory, move_away
from ...store.wal.segment import Group, RowKind, numbers_in, salvage
from ...store.wal.wal_reader import DIRECTORY, read_wal

Discard = Callable[[Discarded], object]


class WalRecord(NamedTuple):
    """A message of the log: the environment, its ledger, its entry id, and its body."""

    start_ms: int
    ledger_id: int
    entry_id: int
    body: bytes


_Held = dict[int, WalRecord]


class WalRepair:
    """What the WAL of a store under repair holds, and what a log has to become for it."""

    def __init__(self, path: Path, store_id: bytes, oldest: int | None, discard: Discard) -> None:
        """Read it from the segment `oldest` on (catalog.WAL). Raises FormatMismatch: a later version wrote it."""
        self._path = path
        self._discard = discard
        self._lost = 0
        self._damage: str | None = None
        directory = path / DIRECTORY
        numbers = numbers_in(directory)
        counts: list[Group] = []
        try:
            counts = read_wal(path, store_id, min(numbers) if oldest is None and numbers else oldest).groups
        except DamagedStore as error:
            self._damage = f"{error.path.name}: {error.reason}"
        salvaged = [group for number in numbers for group in salvage(directory, number, store_id)]
        salvaged.sort(key=lambda group: group.position)
        self._salvaged = _by_log(salvaged)
        self._counts = _by_log(salvaged if self._damage else counts)

    def least_entries(self, start_ms: int, ledger_id: int) -> int:
        """How many entries a log must have: as many as lead up to the WAL, or, if that goes, were reserved."""
        held = self._counts.get(start_ms, {}).get(ledger_id, {})
        at = max(held, default=-1) + 1
        while self._damage is None and at - 1 in held:
            at -= 1
        return at

    def discard_holes(self, environment: str, start_ms: int, ledger_id: int, holes: BitMap) -> None:
        """Report what the WAL has of entries that a log has lost, or never got."""
        held = self._salvaged.get(start_ms, {}).get(ledger_id, {})
        self._report(environment, [held[entry] for entry in sorted(held) if entry in holes], "no partition has it")

    def discard_logs(self, environment: str, start_ms: int, ledgers: Collection[int]) -> None:
        """Report what the WAL has for other logs than the partition's: they were lost with its file."""
        for ledger_id, held in self._counts.get(start_ms, {}).items():
            if ledger_id not in ledgers:
                self._report(environment, [held[entry] for entry in sorted(held)], "its log is gone")

    def _report(self, environment: str, records: list[WalRecord], reason: str) -> None:
        for record in records:
            reason_here = f"{reason}; this is from the write-ahead log"
            self._discard(Discarded(environment, record.ledger_id, record.entry_id, reason_here, record.body))
        self._lost += len(records)

    def end(self) -> list[str]:
        """Move a damaged WAL away. REQUIRES: every log was mended."""
        if self._damage is None:
            return []
        trash = self._path / "trash" / "repair-wal"
        make_directory(trash)
        move_away(self._path / DIRECTORY, trash / DIRECTORY)
        return [f"{DIRECTORY}: {self._damage}; discarded, with {self._lost} messages that no partition has"]


def _by_log(groups: list[Group]) -> dict[int, dict[int, _Held]]:
    """By start of the partition, ledger id and entry id."""
    found: dict[int, dict[int, _Held]] = defaultdict(lambda: defaultdict(dict))
    for group in groups:
        for row in group.rows():
            if row.kind != RowKind.RUN:
                continue
            run = Run("the write-ahead log", row.key, memoryview(row.value))
            for index in range(run.count):
                record = WalRecord(row.start_ms, run.ledger_id, run.first_entry + index, run.body(index) or b"")
                found[row.start_ms][run.ledger_id][record.entry_id] = record
    return found
