"""The rows of each environment in groups are those that going over the rows one by one finds."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog.store.codec.bodies import Bodies
from duelog.store.codec.format import counter_key, run_key, split_run_key
from duelog.store.codec.run import HEADER, fields_of_message, seal_run
from duelog.store.codec.run_lengths import ScatteredBatch
from duelog.store.env.memtable import LedgerRuns
from duelog.store.wal.environment_rows import rows_by_environment
from duelog.store.wal.segment import MAIN, SEVERAL, Group, GroupContent, Row, RowKind, Segment, place_of, read_segment
from duelog.store.wal.write_batch import single_rows
from tests.proof import length
from tests.store.wal.segments import STORE_ID

Found = dict[int, tuple[list[tuple[int, Row]], dict[int, list[tuple[int, bytes]]]]]
"""By environment: rows that are no runs, and by ledger (first entry, value) of its runs."""

ENVIRONMENTS = (MAIN, 0, 1_000, 2_000)


def run(start_ms: int, ledger_id: int, first: int) -> Row:
    """Make a row of one message."""
    key = run_key(ledger_id, first)
    body, base_ms = b"%d" % first, max(start_ms, 0)
    return Row(RowKind.RUN, start_ms, key, seal_run(key, fields_of_message(base_ms, base_ms + 5, body), [body]))


def batch(firsts: dict[int, int], count: int) -> Row:
    """So many messages for a ledger, 100 + number, of each partition by number."""
    logs = len(firsts)
    starts = [1_000 * number for number in firsts]
    groups = [(start_ms, at * count, (at + 1) * count) for at, start_ms in enumerate(starts)]
    dues = np.repeat(np.array(starts, dtype=np.int64), count) + 7
    made = ScatteredBatch.pack(
        dues, Bodies([b"%d" % at for at in range(logs * count)]), groups, [100 + n for n in firsts]
    )
    made.place(list(firsts.values()))
    return Row(RowKind.BATCH, SEVERAL, b"", made.value)


def written(groups: Sequence[Sequence[Row]]) -> list[Group]:
    """Groups, written and read back."""
    with tempfile.TemporaryDirectory() as path:
        segment = Segment(Path(path), 1, STORE_ID, 1 << 18)
        for rows in groups:
            segment.append(GroupContent.of(rows), flush=False)
        segment.close()
        return read_segment(Path(path), 1, STORE_ID).groups


def one_by_one(groups: Sequence[Group], applied: int) -> Found:
    """The rows that are not applied, one by one."""
    found: Found = {}
    for group in groups:
        for row in single_rows(group.rows()) if group.position > applied else ():
            others, runs = found.setdefault(row.start_ms, ([], {}))
            if row.kind == RowKind.RUN:
                ledger_id, first = split_run_key(row.key)
                runs.setdefault(ledger_id, []).append((first, bytes(row.value)))
            else:
                others.append((group.position, row))
    return found


def by_columns(groups: Sequence[Group], applied: int) -> Found:
    """The same from columns."""
    found: Found = {}
    for start_ms, rows in rows_by_environment(groups).items():
        left = rows.after(applied)
        if left:
            runs = {
                each.ledger_id: [
                    (int(first), bytes(run.value))
                    for first, run in zip(each.firsts, LedgerRuns(each.ledger_id, each.rows), strict=True)
                ]
                for each in left.ledgers()
            }
            found[start_ms] = left.others, runs
            assert left.last == max(group.position for group in groups if has(group, start_ms))
    return found


def has(group: Group, start_ms: int) -> bool:
    """True where a group has a row of an environment."""
    return any(row.start_ms == start_ms for row in single_rows(group.rows()))


ROWS = st.one_of(
    st.tuples(st.just("run"), st.sampled_from(ENVIRONMENTS), st.integers(100, 102)),
    st.tuples(st.just("record"), st.sampled_from(ENVIRONMENTS), st.integers(0, 3)),
    st.tuples(st.just("batch"), st.sets(st.integers(0, 2), min_size=1), st.integers(1, 3)),
)


@pytest.mark.series
@settings(max_examples=length("DUELOG_ROWS", 50, 200), deadline=None)
@given(plan=st.lists(st.lists(ROWS, min_size=1, max_size=4), max_size=6), applied=st.integers(-1, 6))
def test_rows_of_each_environment_are_found_in_order(plan: list[list[tuple[str, object, int]]], applied: int) -> None:
    """Runs by ledger, those of batches among them, and all other rows; of the groups after a place alone."""
    firsts: dict[int, int] = {}
    groups: list[list[Row]] = []
    for rows in plan:
        groups.append([])
        for kind, what, number in rows:
            if kind == "batch":
                assert isinstance(what, set)
                groups[-1].append(batch({each: firsts.get(100 + each, 0) for each in sorted(what)}, number))
                firsts.update({100 + each: firsts.get(100 + each, 0) + number for each in what})
            elif kind == "run":
                assert isinstance(what, int)
                groups[-1].append(run(what, number, firsts.get(number, 0)))
                firsts[number] = firsts.get(number, 0) + 1
            else:
                assert isinstance(what, int)
                groups[-1].append(Row(RowKind.RECORD, what, counter_key(str(number)), b"%d" % number))
    found = written(groups)
    place = -1 if applied < 0 else place_of(1, applied)
    assert by_columns(found, place) == one_by_one(found, place)


@pytest.mark.parametrize(
    ("tail", "firsts", "gap"),
    [(0, [0, 1, 2], None), (4, [4, 5], None), (3, [4, 5], (4, 3)), (4, [4, 6], (6, 5)), (4, [4, 4], (4, 5))],
    ids=["from the beginning", "behind what is applied", "before it", "between", "twice"],
)
def test_a_gap_is_where_a_run_does_not_begin_at_the_end_before_it(
    tail: int, firsts: list[int], gap: tuple[int, int] | None
) -> None:
    """The entry, and the end before it."""
    rows = rows_by_environment(written([[run(0, 100, first)] for first in firsts]))[0]
    (ledger,) = rows.ledgers()
    assert ledger.gap(tail) == gap
    assert HEADER.unpack_from(LedgerRuns(100, ledger.rows)[0].value)[4] == 1
