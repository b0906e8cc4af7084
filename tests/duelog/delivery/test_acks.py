"""Acknowledgements against a plain set of positions, and the corners that a set does not show."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pyroaring import BitMap

from duelog.delivery.acks import AckChanges, AckSet
from duelog.store.codec.bits import BitChange
from duelog.store.codec.format import acked_key
from duelog.store.errors import BrokenInvariant, InvalidArgument
from duelog.store.position import Position
from tests.duelog.delivery.twins import Ledgers, acked_after_mark
from tests.proof import length


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


class AckMachine(RuleBasedStateMachine):
    """Every operation on the set and on a twin: a mark and a plain set of the acknowledged positions after it."""

    @initialize(counts=st.lists(st.integers(1, 12), max_size=3), last=st.integers(0, 12))
    def start(self, counts: list[int], last: int) -> None:
        self.ledgers = Ledgers({3 * (number + 1): count for number, count in enumerate([*counts, last])})
        self.mark = Position(3, -1)
        self.acked: set[Position] = set()
        self.acks = AckSet(self.mark)
        self.rows: dict[int, bytes] = {}
        self.on_the_way: AckChanges | None = None
        self.disk_mark = self.mark

    def _normalise(self) -> None:
        for position in self.ledgers.positions():
            if position > self.mark:
                if position not in self.acked:
                    break
                self.mark = position
        self.acked = {position for position in self.acked if position > self.mark}

    def _twin_ack(self, positions: list[Position]) -> int:
        new = {position for position in positions if position > self.mark and position not in self.acked}
        self.acked |= new
        self._normalise()
        return len(new)

    def _ledger(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.ledgers.counts)))

    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        ledger_id = self._ledger(data)
        count = self.ledgers.counts[ledger_id]
        entries = data.draw(st.sets(st.integers(0, count - 1), max_size=count)) if count else set()
        got = self.acks.ack(ledger_id, BitMap(entries), self.ledgers)
        assert got == self._twin_ack([Position(ledger_id, entry) for entry in entries])

    @rule(data=st.data())
    def ack_run(self, data: st.DataObject) -> None:
        """A run of entries, mostly right after the mark, as a consumer of batches acknowledges them."""
        ledger_id, marked_entry = self.mark if self.mark[0] in self.ledgers.counts else (self._ledger(data), -1)
        count = self.ledgers.counts[ledger_id]
        start = min(max(marked_entry + 1 + data.draw(st.sampled_from([0, 0, 0, 1, -1])), 0), count)
        entries = range(start, min(start + data.draw(st.integers(1, 6)), count))
        got = self.acks.ack(ledger_id, BitMap(entries), self.ledgers)
        assert got == self._twin_ack([Position(ledger_id, entry) for entry in entries])

    @rule(data=st.data())
    def ack_cumulative(self, data: st.DataObject) -> None:
        ledger_id = self._ledger(data)
        target = Position(ledger_id, data.draw(st.integers(-1, self.ledgers.counts[ledger_id] - 1)))
        got = self.acks.ack_cumulative(target, self.ledgers)
        new = [p for p in self.ledgers.positions() if self.mark < p <= target and p not in self.acked]
        self.mark = max(self.mark, target)
        self._normalise()
        assert got == len(new)

    @rule(data=st.data())
    def ack_cumulative_but_some(self, data: st.DataObject) -> None:
        """Entries left out stay as they are, acknowledged or not, at or behind the target."""
        ledger_id = self._ledger(data)
        target = Position(ledger_id, data.draw(st.integers(-1, self.ledgers.counts[ledger_id] - 1)))
        positions = self.ledgers.positions()
        left_out = data.draw(st.sets(st.sampled_from(positions), max_size=6)) if positions else set()
        but: dict[int, BitMap] = {}
        for position in left_out:
            but.setdefault(position.ledger_id, BitMap()).add(position.entry_id)
        got = self.acks.ack_cumulative(target, self.ledgers, but)
        first = min(left_out, default=None)
        before = target if first is None or first > target else Position(first.ledger_id, first.entry_id - 1)
        new = self._twin_ack([p for p in positions if p <= target and p not in left_out])
        self.mark = max(self.mark, before)
        self._normalise()
        assert got == new

    @rule(data=st.data())
    def ack_past_the_end(self, data: st.DataObject) -> None:
        ledger_id = self._ledger(data)
        with pytest.raises(InvalidArgument):
            self.acks.ack(ledger_id, BitMap([0, self.ledgers.counts[ledger_id]]), self.ledgers)

    @rule(more=st.integers(1, 8))
    def append(self, more: int) -> None:
        self.ledgers.counts[max(self.ledgers.counts)] += more

    @rule(gap=st.integers(1, 3))
    def roll(self, gap: int) -> None:
        last = max(self.ledgers.counts)
        if self.ledgers.counts[last]:
            self.ledgers.counts[last + gap] = 0

    @rule(data=st.data(), told=st.booleans())
    def trim(self, data: st.DataObject, told: bool) -> None:
        first = self._ledger(data)
        passed = all(
            self.acks.mark_delete >= (id_, count - 1) for id_, count in self.ledgers.counts.items() if id_ < first
        )
        if not told and not passed:
            return
        for ledger_id in [ledger_id for ledger_id in self.ledgers.counts if ledger_id < first]:
            del self.ledgers.counts[ledger_id]
        if told:
            self.acks.trim_to(first, self.ledgers)
            self.mark = max(self.mark, Position(first, -1))
            self._normalise()

    @rule(data=st.data())
    def seek(self, data: st.DataObject) -> None:
        ledger_id = self._ledger(data)
        self.mark = Position(ledger_id, data.draw(st.integers(-1, self.ledgers.counts[ledger_id] - 1)))
        self.acked.clear()
        self.acks.reset(self.mark)

    @rule()
    def begin_to_write(self) -> None:
        """Other operations come before the group is on disk; or it never is."""
        self.on_the_way = self.acks.changes()

    @rule()
    def is_on_disk(self) -> None:
        if self.on_the_way is not None:
            self.disk_mark = written(self.rows, self.disk_mark, self.on_the_way)
            self.acks.wrote(self.on_the_way)
            self.on_the_way = None

    @rule()
    def commit(self) -> None:
        self.on_the_way = None
        self.disk_mark = stored(self.rows, self.disk_mark, self.acks)
        assert not self.acks.changed
        assert not self.acks.changes()
        again = AckSet.load(self.disk_mark, self.rows)
        again._check(self.ledgers)
        assert again.mark_delete == self.mark
        assert not again.changed
        assert {p for p in self.ledgers.positions() if p > self.mark and again.is_acked(p)} == self.acked

    @rule(data=st.data())
    def window(self, data: st.DataObject) -> None:
        ledger_id = self._ledger(data)
        start, limit = data.draw(st.integers(0, 14)), data.draw(st.integers(0, 14))
        missing = [e for e in range(start, limit) if not self.acks.is_acked(Position(ledger_id, e))]
        assert list(self.acks.unacked(ledger_id, start, limit)) == missing

    @invariant()
    def agrees(self) -> None:
        self.acks._check(self.ledgers)
        positions = self.ledgers.positions()
        assert self.acks.mark_delete == self.mark
        assert acked_after_mark(self.acks) == len(self.acked)
        unacked = [p for p in positions if p > self.mark and p not in self.acked]
        assert [p for p in positions if not self.acks.is_acked(p)] == unacked
        assert self.acks.backlog(self.ledgers) == len(unacked)
        for ledger_id, count in self.ledgers.counts.items():
            if count:
                assert (self.acks.mark_delete >= (ledger_id, count - 1)) == all(p[0] > ledger_id for p in unacked)


AckMachine.TestCase.settings = settings(
    max_examples=length("DUELOG_EXAMPLES", 50, 150), stateful_step_count=30, deadline=None
)
TestAckMachine = pytest.mark.series(AckMachine.TestCase)


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
