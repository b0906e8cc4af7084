"""The one rule of which entries have fired, against its definition in plain Python."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from duelog.store.codec.frontier import HELD, UNREADABLE_DUE, Entries, FrontierRecord

FEW = st.integers(0, 6)
"""Few values, so that due times and entry ids are often those of the frontier."""

LARGE = st.sampled_from([2**31 - 1, 2**31, 2**32 - 2])
ENTRY = FEW | LARGE
DUE = FEW | st.sampled_from([2**53, 253_402_300_799_999])


@given(
    st.lists(st.tuples(ENTRY, DUE), max_size=30, unique_by=lambda pair: pair[0]),
    st.tuples(DUE, ENTRY) | st.just((-1, -1)),
    ENTRY,
    st.booleans(),
)
def test_an_entry_has_fired_if_it_is_below_t_and_at_or_before_c(
    entries: list[tuple[int, int]], c: tuple[int, int], t: int, narrow: bool
) -> None:
    """Whatever the type of the ids, for one entry and for many; those at or before C from T on are late."""
    due_ms, entry_id = c
    frontier = FrontierRecord(7, due_ms, entry_id, t, 0, 0, 0, 0)
    ids: Entries = np.array([entry for entry, _ in entries], dtype=np.uint32 if narrow else np.int64)
    dues = np.array([due for _, due in entries], dtype=np.int64)
    passed = [(due, entry) <= c for entry, due in entries]
    assert frontier.passes(ids, dues).tolist() == passed
    assert frontier.has_fired(ids, dues).tolist() == [
        entry < t and before for (entry, _), before in zip(entries, passed, strict=True)
    ]


def test_nothing_has_fired_at_the_start() -> None:
    """Not even an entry due at 0, nor one that has no due time to compare."""
    start = FrontierRecord.start(7)
    ids = np.arange(3, dtype=np.uint32)
    dues = np.array([0, HELD, UNREADABLE_DUE])
    assert not start.has_fired(ids, dues).any()
    assert not start.passes(ids, dues).any()
