"""The write-ahead log's part of a repair: what can be read of it is applied, and a damaged one is begun anew.

A row whose group an environment has not applied yet is applied as opening would, whether its log leads up to it or not:
entries that are missing between are a hole like any other. What was applied is still in the files until they are used
again: it fills what an environment has lost since. A damaged log goes to the trash then, since what it has lost cannot
be told; an intact one stays, and opening finds all of it applied.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from pyroaring import BitMap, BitMap64

from ...store.codec import format as fmt
from ...store.codec.format import Table, run_key
from ...store.codec.run import Run
from ...store.config import MIB
from ...store.env.environment import Environment
from ...store.env.memtable import APPLIED_KEY, Reads
from ...store.env.transaction import Transaction
from ...store.errors import DamagedStore
from ...store.files.directory import make_directory, move, remove_tree
from ...store.log import catalog
from ...store.log.scan import runs
from ...store.wal.segment import MAIN, Group, Row, RowKind, Segment, file_name, numbers_in, place_of, salvage
from ...store.wal.wal_reader import DIRECTORY, read_wal
from ...store.wal.write_batch import single_rows
from ...survey.contents import main_ledgers
from .repair_entries import entries_told
from .repair_report import Account, Discarded

_THE_LOG = "the write-ahead log"


class WalRepair:
    """The log of a store under repair: its rows by environment, and its end."""

    def __init__(self, path: Path, store_id: bytes, oldest: int | None, account: Account) -> None:
        """Read it from the segment `oldest` on (catalog.WAL). Raises FormatMismatch: a later version wrote it."""
        self._path = path
        self._store_id = store_id
        self._oldest = oldest
        self._account = account
        self._damage: str | None = None
        directory = path / DIRECTORY
        needed: list[Group] | None = None
        try:
            needed = read_wal(path, store_id, oldest).groups
        except DamagedStore as error:
            self._damage = f"{error.path.name}: {error.reason}"
        numbers = numbers_in(directory)
        self._last = max([oldest or 0, *numbers])
        """The number of the last segment that there was, or that an environment knows of."""
        salvaged = {group.position: group for number in numbers for group in salvage(directory, number, store_id)}
        if needed is not None:  # what lies behind its end was never told to be stored
            first = place_of(oldest or 0, 0)
            salvaged = {at: group for at, group in salvaged.items() if at < first}
            salvaged |= {group.position: group for group in needed}
        self._rows: dict[int, list[tuple[int, Row]]] = defaultdict(list)
        """By start of the partition, in order: the place of a row's group, and the row."""
        for position, group in sorted(salvaged.items()):
            for row in single_rows(group.rows()):
                self._rows[row.start_ms].append((position, row))

    def apply(self, environment: Environment, start_ms: int) -> None:
        """Have an environment, whose small records are mended, store what it lacks. Once for each."""
        rows = self._rows.pop(start_ms, [])
        fields = environment.get(APPLIED_KEY)
        applied = -1 if fields is None else fmt.unpack_u64(fields)
        if fields is None and start_ms == MAIN:
            applied = place_of(self._oldest or 0, 0) - 1
        self._last = max(self._last, applied >> 32)
        if not rows:
            return
        runs = self._missing_runs(environment, start_ms, applied, rows)

        def work(transaction: Transaction) -> None:
            for position, row in rows:
                if row.kind == RowKind.RECORD:
                    if position > applied or (row.key[0] == Table.LOG and transaction.get(row.key) is None):
                        transaction.put(row.key, bytes(row.value))
                elif row.kind == RowKind.NUMBERS:
                    known = transaction.get(row.key)
                    both = BitMap64.deserialize(bytes(row.value))
                    both |= BitMap64() if known is None else BitMap64.deserialize(known)
                    transaction.put(row.key, bytes(both.serialize()))
            for row in runs:
                transaction.raw.put(row.key, bytes(row.value))
            transaction.put(APPLIED_KEY, fmt.pack_u64(max(rows[-1][0], applied)))

        environment.write(work)
        if runs:
            entries = sum(_run(row).count for row in runs)
            self._account.say(f"{environment.name}: {entries} entries applied from {_THE_LOG}")

    def _missing_runs(
        self, environment: Environment, start_ms: int, applied: int, rows: list[tuple[int, Row]]
    ) -> list[Row]:
        """The runs that an environment lacks; of two of one entry the later one."""
        found: list[Row] = []
        placed = [(position, row, _run(row)) for position, row in rows if row.kind == RowKind.RUN]
        with environment.read() as raw:
            known = main_ledgers(raw) if start_ms == MAIN else None
            in_log: dict[int, BitMap] = defaultdict(BitMap)
            for _, _, run in placed:
                in_log[run.ledger_id].add_range(run.first_entry, run.limit)
            covered = {ledger_id: _intact(raw, environment.name, ledger_id, of) for ledger_id, of in in_log.items()}
            for position, row, run in reversed(placed):
                if position <= applied and known is not None and run.ledger_id not in known:
                    continue  # trimmed
                entries = BitMap(range(run.first_entry, run.limit))
                if not entries & covered[run.ledger_id]:
                    covered[run.ledger_id] |= entries
                    found.append(row)
        return found

    def end(self, main: Environment) -> None:
        """Report what is of partitions that are gone, and begin a damaged log anew. REQUIRES: the rest is applied."""
        for start_ms, rows in self._rows.items():
            for _, row in rows:
                if row.kind == RowKind.RUN and self._damage is not None:
                    run = _run(row)
                    self._account.count("entries of the write-ahead log", run.count, run.count)
                    for entry_id, body in run.bodies():
                        raw = body if isinstance(body, bytes) else b""
                        reason = f"its partition, from {start_ms} on, is gone; this is from {_THE_LOG}"
                        self._account.discard(Discarded(_THE_LOG, run.ledger_id, entry_id, reason, raw))
        if self._damage is None:
            return
        directory = self._path / DIRECTORY
        make_directory(directory)
        Segment(directory, self._last + 1, self._store_id, MIB).close()
        begins = fmt.pack_u64(self._last + 1)
        main.write(lambda transaction: transaction.put(fmt.counter_key(catalog.WAL), begins))
        self._discard("repair-wal", *(directory / file_name(at) for at in numbers_in(directory) if at <= self._last))
        self._account.say(f"{DIRECTORY}: {self._damage}; what can be read of it is applied, and it is begun anew")

    def _discard(self, name: str, *files: Path) -> None:
        """Move files to the trash."""
        trash = self._path / "trash" / name
        remove_tree(trash)
        make_directory(trash)
        for file in files:
            move(file, trash / file.name)


def _run(row: Row) -> Run:
    return Run(_THE_LOG, row.key, memoryview(row.value))


def _intact(raw: Reads, environment: str, ledger_id: int, in_log: BitMap) -> BitMap:
    """Entries of a ledger that an environment has; a run that is damaged counts unless the log has all of it."""
    found = BitMap()
    for run in runs(raw, environment, ledger_id):
        if isinstance(run, Run):
            found.add_range(run.first_entry, run.limit)
            continue
        count = entries_told(bytes(raw.get(run_key(ledger_id, run.entry_id), b"")))
        lost = BitMap(range(run.entry_id, run.entry_id + (count or 1)))
        if count is None or lost - in_log:
            found |= lost
    return found
