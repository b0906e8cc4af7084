"""The rows of each environment in groups that were read, by columns: batches may be of half a million logs."""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..codec.format import split_run_key
from ..codec.run import FLAG_SKIPS, HEADER, Int64s
from ..codec.run_lengths import ScatteredBatch, WholeRun
from ..env.memtable import LedgerRow
from .segment import Group, Row, RowKind


@dataclass(slots=True)
class LedgerRows:
    """Runs of one ledger: [first, limit) of each, with ids passed over before it, and the row of a memtable."""

    ledger_id: int
    firsts: Int64s
    limits: Int64s
    rows: list[LedgerRow]

    def gap(self, tail: int) -> tuple[int, int] | None:
        """(entry, end before it) of the first run that does not begin where the one before, or `tail`, ends."""
        ends = np.concatenate(([tail], self.limits[:-1]))
        wrong = np.flatnonzero(ends != self.firsts)
        return (int(self.firsts[wrong[0]]), int(ends[wrong[0]])) if len(wrong) else None


class _Runs(NamedTuple):
    """Columns of runs, as many of each: the ledger, [first, limit) of its entries, and which row of the log has it."""

    ledger_ids: Int64s
    firsts: Int64s
    limits: Int64s
    rows: Int64s

    def take(self, places: Int64s | slice) -> "_Runs":
        return _Runs(*(column[places] for column in self))


_PAST = (1 << 63) - 1
"""Behind every place in a log."""

_NO_RUNS = _Runs(*(np.empty(0, dtype=np.int64) for _ in range(4)))


@dataclass(slots=True)
class EnvironmentRows:
    """Rows of one environment, in order."""

    others: list[tuple[int, Row]] = field(default_factory=list)
    """Rows that are no runs, with the places of their groups."""
    _runs: _Runs = _NO_RUNS
    _made: Sequence[LedgerRow] = ()
    """The rows of the log that have runs, of this environment or of others."""
    _positions: Int64s = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The places of their groups."""

    @property
    def last(self) -> int:
        """The place of the last group that has any."""
        of_runs: list[int] = self._positions[self._runs.rows[-1:]].tolist()
        return max([*(at for at, _ in self.others[-1:]), *of_runs])

    def after(self, position: int) -> "EnvironmentRows":
        """Select the rows of groups after the one at a place."""
        return self.between(position + 1, _PAST)

    def between(self, begin: int, limit: int) -> "EnvironmentRows":
        """Select the rows of groups at places from `begin` on, before `limit`."""
        others = [(at, row) for at, row in self.others if begin <= at < limit]
        rows = np.searchsorted(self._positions, (begin, limit))
        runs = self._runs.take(slice(*np.searchsorted(self._runs.rows, rows)))
        return EnvironmentRows(others, runs, self._made, self._positions)

    def __bool__(self) -> bool:
        return bool(self.others) or len(self._runs.rows) > 0

    def ledgers(self) -> Iterator[LedgerRows]:
        """The runs of each ledger, in order."""
        for ledger_id, runs in _split(self._runs.ledger_ids, self._runs):
            rows = list(map(self._made.__getitem__, runs.rows.tolist()))
            yield LedgerRows(ledger_id, runs.firsts, runs.limits, rows)


def rows_by_environment(groups: Iterable[Group]) -> dict[int, EnvironmentRows]:
    """Group rows by the start of the partition, or MAIN. O(rows, and logs of batches)."""
    environments: dict[int, EnvironmentRows] = defaultdict(EnvironmentRows)
    starts_ms, ledger_ids, firsts, counts = array("q"), array("Q"), array("I"), array("I")
    made: list[LedgerRow] = []
    positions, lengths = array("q"), array("I")
    run, of_several = RowKind.RUN, RowKind.BATCH  # to look a member up takes as long as to unpack a row
    for group in groups:
        position, content = group.position, group.content
        for kind, start_ms, begin, middle, end in group.heads():
            if kind == run:
                ledger_id, first = split_run_key(content, begin)
                value = bytes(content[middle:end])  # of which the garbage collector knows nothing
                _, _, _, flags, count, _, _, spare = HEADER.unpack_from(value)
                skipped = spare if flags & FLAG_SKIPS else 0
                starts_ms.append(start_ms)
                ledger_ids.append(ledger_id)
                firsts.append(first - skipped)
                counts.append(count + skipped)
                made.append(WholeRun(first, first + count, value))
                lengths.append(1)
            elif kind == of_several:
                batch = ScatteredBatch(content[middle:end])
                starts_ms += batch.starts_ms
                ledger_ids += batch.ledger_ids
                firsts += batch.firsts
                counts += batch.counts
                made.append(batch)
                lengths.append(len(batch.counts))
            else:
                row = Row(kind, start_ms, bytes(content[begin:middle]), bytes(content[middle:end]))
                environments[start_ms].others.append((position, row))
                continue
            positions.append(position)
    places = np.array(positions)
    begins = np.array(firsts, dtype=np.int64)
    rows = np.repeat(np.arange(len(made)), lengths)
    runs = _Runs(np.array(ledger_ids, dtype=np.int64), begins, begins + np.array(counts), rows)
    for start_ms, part in _split(np.array(starts_ms), runs):
        environment = environments[start_ms]
        environment._runs, environment._made, environment._positions = part, made, places
    return environments


def _split(values: Int64s, runs: _Runs) -> Iterator[tuple[int, _Runs]]:
    """The runs of each of the values, of which each run has one; in order."""
    if not len(values):
        return
    if (values[1:] != values[:-1]).any():
        order = values.argsort(kind="stable")
        values, runs = values[order], runs.take(order)
    cuts = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    for low, high in pairwise(cuts):
        yield int(values[low]), runs.take(slice(low, high))
