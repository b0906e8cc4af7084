"""The topic-level tracker (PIP-448): its index against a sorted list, and when it looks for what all were served."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog import ManualClock, Message, StoreConfig, Subscription
from duelog.markers.tracker import TopicDelayTracker
from duelog.markers.waiting import Stretch, WaitingEntries
from duelog.store.codec.run import Int64s, UInt32s
from duelog.store.position import Position, position_at
from tests.conftest import OpenStore
from tests.proof import length

PAST = Position(2**63, 0)


class Twin:
    """The entries of a WaitingEntries, one by one, and the log that it reads from."""

    def __init__(self) -> None:
        self.log: dict[tuple[int, int], int] = {}
        self.entries: set[tuple[int, int, int]] = set()

    def read(self, stretch: Stretch) -> tuple[UInt32s, Int64s]:
        """Due times of a stretch."""
        entries = np.arange(stretch.first, stretch.limit, dtype=np.uint32)
        return entries, np.array([self.log[stretch.ledger_id, int(entry)] for entry in entries], dtype=np.int64)

    def after(self, due_ms: int, delivered: Position, until_ms: int) -> list[tuple[int, int, int]]:
        """Entries after (due_ms, served) that are due by `until_ms`."""
        bound = (due_ms, *delivered)
        return [entry for entry in sorted(self.entries) if entry > bound and entry[0] <= until_ms]


RUNS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.one_of(
            st.lists(st.integers(0, 40), min_size=1, max_size=8),
            st.lists(st.integers(0, 40), min_size=30, max_size=80).map(sorted),
        ),
    ),
    max_size=12,
)


@pytest.mark.series
@settings(max_examples=length("DUELOG_WAITING", 40, 300), deadline=None)
@given(runs=RUNS, data=st.data())
def test_entries_come_in_due_order_whatever_form_they_are_kept_in(
    runs: list[tuple[int, list[int]]], data: st.DataObject
) -> None:
    """Runs in and out of due order, asked from anywhere, pruned and trimmed: as a sorted list has them."""
    twin = Twin()
    index = WaitingEntries(twin.read)
    ledger, entry = 1, 0
    floor = 0
    for step, dues in runs:
        if step == 1:
            ledger, entry = ledger + 1, 0
        column = np.array(dues, dtype=np.int64)
        for at, due_ms in enumerate(dues):
            twin.log[ledger, entry + at] = due_ms
            twin.entries.add((due_ms, ledger, entry + at))
        index.add(ledger, entry, column)
        entry += len(dues)
        due_ms, until_ms = data.draw(st.integers(floor, 45)), data.draw(st.integers(0, 45))
        delivered = data.draw(st.sampled_from([PAST, Position(0, 0), Position(ledger, max(entry - 3, 0))]))
        found = [
            (due, *position_at(number))
            for dues_found, places in index.after(due_ms, delivered, until_ms, 1)
            for due, number in zip(dues_found.tolist(), places.tolist(), strict=True)
        ]
        assert found == twin.after(due_ms, delivered, until_ms)
        for inclusive in (False, True):
            expected = min(
                (e[0] for e in twin.entries if e[0] > due_ms or (inclusive and e[0] == due_ms)), default=None
            )
            assert index.next_due_ms(due_ms, inclusive=inclusive) == expected
        for limit in (None, Position(ledger, 0), Position(ledger, max(entry - 5, 0))):
            expected_places = {(e[1], e[2]) for e in twin.entries if e > (due_ms, *delivered)}
            by_ledger = index.after_by_ledger(due_ms, delivered, limit)
            assert all(by_ledger.values())
            assert {(ledger_id, entry_id) for ledger_id, ids in by_ledger.items() for entry_id in ids} == {
                position for position in expected_places if limit is None or position < limit
            }
        assert index.count_after(due_ms) == sum(due > due_ms for due, *_ in twin.entries)
        if step == 2:
            floor = max(floor, data.draw(st.integers(0, 45)))
            index.prune(floor)
            twin.entries = {e for e in twin.entries if e[0] >= floor}
        if data.draw(st.integers(0, 5)) == 0:
            index.forget_before(ledger)
            twin.entries = {e for e in twin.entries if e[1] >= ledger}


def test_a_backlog_larger_than_a_batch_comes_in_order() -> None:
    """Levels longer than what is read at once, and stretches that begin amid them."""
    twin = Twin()
    index = WaitingEntries(twin.read)
    chance = np.random.default_rng(7)
    first = 0
    for number in range(40):
        dues = chance.integers(0, 20_000, 500)
        if number % 3 == 0:
            dues = np.sort(dues)
        for at, due_ms in enumerate(dues.tolist()):
            twin.log[5, first + at] = due_ms
            twin.entries.add((due_ms, 5, first + at))
        index.add(5, first, dues)
        first += 500
    found = [number for _, places in index.after(-1, PAST, 30_000, 10) for number in places.tolist()]
    assert [tuple(position_at(number)) for number in found] == [(e[1], e[2]) for e in sorted(twin.entries)]


def test_a_topic_with_a_fixed_delay_needs_no_index() -> None:
    """Twenty thousand messages in due order, sent one by one or in batches: the ends of some stretches."""
    for size in (1, 100):
        twin = Twin()
        index = WaitingEntries(twin.read)
        for first in range(0, 20_000, size):
            index.add(3, first, np.arange(first, first + size, dtype=np.int64) // 7)
        assert len(index) == 20_000
        assert index.memory_bytes() < 1_000


MOMENTS = 20


class Tracked:
    """Messages due a second apart, that two consumers have passed over; how often the index was pruned."""

    def __init__(self, open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, config: StoreConfig):
        store = open_store(config=config)
        topic = store.topic("t")
        self.one, self.other = topic.subscribe("one"), topic.subscribe("other")
        topic.send_batch([Message(b"x", deliver_after=second) for second in range(1, MOMENTS + 1)])
        assert self.take(self.one) == self.take(self.other) == 0
        tracker = store._engine.topics.loaded()[0].tracker
        assert isinstance(tracker, TopicDelayTracker)
        self.tracker, self.pruned = tracker, 0
        prune = WaitingEntries.prune

        def counted(index: WaitingEntries, due_ms: int) -> None:
            self.pruned += 1
            prune(index, due_ms)

        monkeypatch.setattr(WaitingEntries, "prune", counted)

    @staticmethod
    def take(consumer: Subscription) -> int:
        """How many messages a consumer gets now, acknowledged."""
        messages = consumer.receive(100, timeout=0)
        consumer.ack(messages)
        return len(messages)


def test_between_two_prunings_lies_the_interval(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is served in between; then what was due before the time of the slower one goes at once."""
    config = StoreConfig(inline_delay_ms=60_000, tracker_prune_interval_ms=5_000, ack_flush_ms=0)
    tracked = Tracked(open_store, clock, monkeypatch, config)
    kept = []
    for _ in range(10):
        clock.advance(1_000)
        assert tracked.take(tracked.one) == tracked.take(tracked.other) == 1
        kept.append(len(tracked.tracker._waiting))
    assert tracked.pruned == 2
    assert kept == [20, 20, 20, 20, 17, 17, 17, 17, 17, 12]


@pytest.mark.parametrize(("ratio", "looks"), [(0, 10), (0.5, 10), (0.6, 1), (1, 1)])
def test_too_few_subscriptions_that_moved_on_are_no_reason_to_prune(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, ratio: float, looks: int
) -> None:
    """One of two is half of them; what the other still needs stays in any case, and it gets all of it."""
    config = StoreConfig(inline_delay_ms=60_000, tracker_prune_interval_ms=0, tracker_prune_ratio=ratio)
    tracked = Tracked(open_store, clock, monkeypatch, config)
    for _ in range(9):
        clock.advance(1_000)
        assert tracked.take(tracked.one) == 1
    assert len(tracked.tracker._waiting) == MOMENTS
    assert tracked.take(tracked.other) == 9
    assert tracked.pruned == looks
    assert len(tracked.tracker._waiting) == MOMENTS - 8
