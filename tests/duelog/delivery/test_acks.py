"""Acknowledgements against a plain set of positions, and the corners that a set does not show."""

import pytest
from pyroaring import BitMap

from duelog.delivery.acks import AckChanges, AckSet
from duelog.store.codec.bits import BitChange
from duelog.store.codec.format import acked_key
from duelog.store.errors import BrokenInvariant, InvalidArgument
from duelog.store.position import Position
from tests.duelog.delivery.twins import Ledgers, acked_after_mark


def stored(rows: dict[int, bytes], mark: Position, acks: AckSet) -> Position:
    """Write the changes of ``acks`` into ``rows``; the mark-delete position on disk."""
    changes = acks.changes()
    mark = written(rows, mark, changes)
    acks.wrote(changes)
    return mark


def written(rows: dict[int, bytes], mark: Position, changes: AckChanges) -> Position:
    """Write changes into ``rows`` as a cursor's table would; the mark-delete position on disk."""
    for ledger_id, change in changes.acked.items():
        key = acked_key(1, ledger_id)
        row = change.fields(key, rows.pop(ledger_id, None))
        if row is not None:
            rows[ledger_id] = row
    return changes.mark_delete if changes.mark_delete_changed else mark


def test_acks_of_trimmed_ledgers_are_harmless_and_of_unknown_ones_refused() -> None:
    """A late acknowledgement of what retention took is no error; a ledger that the topic never had is one."""
    ledgers = Ledgers({5: 3, 9: 1})
    acks = AckSet(Position(1, 0))
    assert acks.ack(1, BitMap([1]), ledgers) == 0
    assert acks.ack(3, BitMap([1]), ledgers) == 0
    assert acks.ack_cumulative(Position(3, 7), ledgers) == 0
    for ledger_id in (7, 10):
        with pytest.raises(InvalidArgument, match="no such ledger"):
            acks.ack(ledger_id, BitMap([0]), ledgers)
        with pytest.raises(InvalidArgument, match="no such ledger"):
            acks.ack_cumulative(Position(ledger_id, 0), ledgers)
    assert not acks.changed


def test_more_than_ten_thousand_separate_ranges_survive_a_restart() -> None:
    """There is no cap on acknowledged ranges: every other one of 60,000 entries comes back from the rows."""
    ledgers = Ledgers({1: 60_000})
    acks = AckSet(Position(1, -1))
    assert acks.ack(1, BitMap(range(1, 60_000, 2)), ledgers) == 30_000
    rows: dict[int, bytes] = {}
    mark = stored(rows, acks.mark_delete, acks)
    again = AckSet.load(mark, rows)
    assert acked_after_mark(again) == 30_000
    assert again.unacked(1, 0, 60_000) == BitMap(range(0, 60_000, 2))


def test_rows_at_or_before_the_mark_are_dropped_when_loaded() -> None:
    """Stored rows that the mark covers are cleaned up by the next write."""
    acks = AckSet(Position(4, 3), {1: BitMap([5]), 4: BitMap([3, 7])})
    assert acked_after_mark(acks) == 1
    changes = acks.take_changes()
    assert changes.acked == {1: BitChange(BitMap(), BitMap([5])), 4: BitChange(BitMap(), BitMap([3]))}


def test_the_callers_bitmaps_stay_their_own() -> None:
    """Neither the loaded bitmaps nor those handed to ack are changed or kept."""
    ledgers = Ledgers({1: 20})
    mine, loaded = BitMap([3, 5]), BitMap([0, 9])
    acks = AckSet(Position(1, 0), {1: loaded})
    acks.ack(1, mine, ledgers)
    acks.ack_cumulative(Position(1, 4), ledgers)
    mine.add(7)
    assert loaded == BitMap([0, 9])
    assert not acks.is_acked(Position(1, 7))


@pytest.mark.parametrize("position", [Position(1, -2), Position(1, -7)])
def test_positions_under_minus_one_are_refused(position: Position) -> None:
    """Entry -1 is 'before the first'; anything under it is a mistake, and named."""
    acks = AckSet(Position(1, -1))
    with pytest.raises(InvalidArgument):
        AckSet(position)
    with pytest.raises(InvalidArgument):
        acks.reset(position)
    with pytest.raises(InvalidArgument):
        acks.ack_cumulative(position, Ledgers({1: 3}))


def test_a_mark_past_the_end_of_its_ledger_is_reported() -> None:
    """The check of the invariants finds a mark-delete position that no ledger explains."""
    with pytest.raises(BrokenInvariant):
        AckSet(Position(1, 3))._check(Ledgers({1: 3}))


def test_trimming_under_the_mark_moves_it_over_what_is_acknowledged_there() -> None:
    """Retention may take unacknowledged ledgers; the mark goes to the first one left, and on in it."""
    ledgers = Ledgers({5: 3})
    acks = AckSet(Position(1, 0), {1: BitMap([2]), 5: BitMap([0, 2])})
    acks.trim_to(5, ledgers)
    assert acks.mark_delete == Position(5, 0)
    assert acks.take_changes().acked[1] == BitChange(BitMap(), BitMap([2]))
