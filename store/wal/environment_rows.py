"""What groups that were read hold of each environment, by columns: batches may have rows of half a million logs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ..codec.format import split_run_key
from ..codec.run import HEADER, Int64s
from ..codec.run_lengths import WholeRun
from ..codec.scattered import ScatteredBatch
from ..env.memtable import LedgerRow
from .segment import Group, Row, RowKind

_Table = npt.NDArray[np.int64]


@dataclass(slots=True)
class LedgerRows:
    """Runs of one ledger: [first, limit) of each, and the row of a memtable that has it."""

    ledger_id: int
    firsts: Int64s
    limits: Int64s
    rows: list[LedgerRow]

    def gap(self, tail: int) -> tuple[int, int] | None:
        """(entry, end before it) of the first run that does not begin where the one before, or `tail`, ends."""
        ends = np.concatenate(([tail], self.limits[:-1]))
        wrong = np.flatnonzero(ends != self.firsts)
        return (int(self.firsts[wrong[0]]), int(ends[wrong[0]])) if len(wrong) else None


@dataclass(slots=True)
class EnvironmentRows:
    """Rows of one environment, in order."""

    others: list[tuple[int, Row]] = field(default_factory=list)
    """Those that are no runs, with the places of their groups."""
    _runs: _Table = field(default_factory=lambda: np.empty((0, 5), dtype=np.int64))
    """Place of the group, ledger id, first entry, limit, and where in `_made` the row is."""
    _made: Sequence[LedgerRow] = ()

    @property
    def last(self) -> int:
        """The place of the last group that has any."""
        return max(int(position) for position in (*(at for at, _ in self.others[-1:]), *self._runs[-1:, 0]))

    def after(self, position: int) -> EnvironmentRows:
        """Those of groups after the one at a place."""
        others = [(at, row) for at, row in self.others if at > position]
        return EnvironmentRows(others, self._runs[self._runs[:, 0] > position], self._made)

    def __bool__(self) -> bool:
        return bool(self.others) or len(self._runs) > 0

    def ledgers(self) -> Iterator[LedgerRows]:
        """The runs of each ledger, in order."""
        for ledger_id, table in _split(self._runs, 1):
            rows = list(map(self._made.__getitem__, table[:, 4].tolist()))
            yield LedgerRows(ledger_id, table[:, 2], table[:, 3], rows)


def rows_by_environment(groups: Iterable[Group]) -> dict[int, EnvironmentRows]:
    """By start of the partition, or MAIN. O(rows, and logs of batches)."""
    found: dict[int, EnvironmentRows] = defaultdict(EnvironmentRows)
    made: list[LedgerRow] = []
    tables: list[_Table] = []
    runs: list[tuple[int, ...]] = []
    for group in groups:
        position = group.position
        for row in group.rows():
            if row.kind == RowKind.RUN:
                ledger_id, first = split_run_key(row.key)
                limit = first + HEADER.unpack_from(row.value)[4]
                runs.append((row.start_ms, position, ledger_id, first, limit, len(made)))
                made.append(WholeRun(first, limit, row.value))
            elif row.kind == RowKind.BATCH:
                batch = ScatteredBatch(row.value)
                table = np.empty((len(batch.counts), 6), dtype=np.int64)
                table[:, 0], table[:, 1], table[:, 2] = batch.starts_ms, position, batch.ledger_ids
                table[:, 3], table[:, 4], table[:, 5] = batch.firsts, batch.counts, len(made)
                table[:, 4] += table[:, 3]
                tables += [*_table(runs), table]
                runs = []
                made.append(batch)
            else:
                found[row.start_ms].others.append((position, row))
    tables += _table(runs)
    if tables:
        for start_ms, table in _split(np.concatenate(tables), 0):
            found[start_ms]._runs, found[start_ms]._made = table[:, 1:], made
    return found


def _table(runs: Sequence[tuple[int, ...]]) -> list[_Table]:
    return [np.array(runs, dtype=np.int64)] if runs else []


def _split(table: _Table, column: int) -> Iterator[tuple[int, _Table]]:
    """The rows of each value of a column, in order."""
    if not len(table):
        return
    values = table[:, column]
    if (values[1:] != values[:-1]).any():
        table = table[values.argsort(kind="stable")]
        values = table[:, column]
    cuts = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(table)]
    for low, high in pairwise(cuts):
        yield int(values[low]), table[low:high]
