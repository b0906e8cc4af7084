"""The dispatcher against its twin for every subscription type; and restarts, memory, late logs, bad arguments."""

from collections.abc import Sequence
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from duelog.delivery.acks import AckSet
from duelog.delivery.dispatcher import Dispatcher, SubscriptionType
from duelog.delivery.key_slots import KeyShared, KeySlots, Parts, PartsOfKey
from duelog.delivery.position_set import group_by_ledger
from duelog.markers.reader import Unacknowledged
from duelog.store.errors import InvalidArgument
from duelog.store.position import Position
from duelog.store.received_messages import ReceivedMessages
from tests.duelog.delivery.twins import Log, Twin, at, columns, dispatcher_on, entries, has_ready, log_of
from tests.proof import length

KEYS = st.sampled_from([None, "a", "b", "c", "d"])
MAX_KEPT_BACK = 4


class DispatcherMachine(RuleBasedStateMachine):
    """Deliveries, acknowledgements, time, consumers and ledgers that come and go, seeks and failing reads."""

    kind: ClassVar[SubscriptionType] = "shared"
    how: ClassVar[KeyShared] = KeyShared()

    @initialize(
        ledgers=st.lists(st.lists(KEYS, min_size=1, max_size=8), min_size=1, max_size=3),
        timeout_ms=st.none() | st.integers(1, 20),
        consumers=st.integers(1, 3),
    )
    def start(self, ledgers: list[list[str | None]], timeout_ms: int | None, consumers: int) -> None:
        self.log = Log({2 * number + 1: list(keys) for number, keys in enumerate(ledgers)})
        self.acks = AckSet(Position(1, -1))
        self.dispatcher = Dispatcher(
            self.acks,
            self.log,
            self.log,
            type=self.kind,
            ack_timeout_ms=timeout_ms,
            max_kept_back=MAX_KEPT_BACK,
            key_shared=self.how,
        )
        self.twin = Twin(self.log, self.kind, timeout_ms, MAX_KEPT_BACK, self.how)
        self.now_ms = 1_000
        self.next_consumer = 0
        for _ in range(consumers):
            self.add_consumer()

    def _some(self, data: st.DataObject, positions: list[Position]) -> list[Position]:
        return data.draw(st.lists(st.sampled_from(positions), max_size=6)) if positions else []

    def ranges_of(self, consumer_id: int) -> tuple[tuple[int, int], ...] | None:
        """The keys that a consumer asks for."""
        return None

    @rule()
    def add_consumer(self) -> None:
        if len(self.twin.consumers) < 4:
            self.dispatcher.add_consumer(self.next_consumer, self.ranges_of(self.next_consumer))
            self.twin.consumers.append(self.next_consumer)
            self.twin.consumers_changed()
            self.next_consumer = (self.next_consumer + 1) % 6
            while self.next_consumer in self.twin.consumers:
                self.next_consumer = (self.next_consumer + 1) % 6

    @precondition(lambda self: self.twin.consumers)
    @rule(data=st.data())
    def remove_consumer(self, data: st.DataObject) -> None:
        self.remove_consumer_numbered(data.draw(st.sampled_from(self.twin.consumers)))

    def remove_consumer_numbered(self, consumer_id: int) -> None:
        """One that is there."""
        self.dispatcher.remove_consumer(consumer_id, self.now_ms)
        self.twin.remove_consumer(consumer_id, self.now_ms)

    @precondition(lambda self: self.twin.consumers)
    @rule(data=st.data(), count=st.integers(1, 6))
    def next_batch(self, data: st.DataObject, count: int) -> None:
        consumer_id = data.draw(st.sampled_from(self.twin.consumers))
        batch = self.dispatcher.next_batch(consumer_id, count, self.now_ms)
        got = [(message.position, message.redelivery_count) for message in batch]
        assert got == self.twin.next_batch(consumer_id, count, self.now_ms)
        assert not any(position in self.twin.acked for position, _ in got)

    @precondition(lambda self: self.twin.consumers)
    @rule(data=st.data())
    def next_batch_from_a_failing_disk(self, data: st.DataObject) -> None:
        consumer_id = data.draw(st.sampled_from(self.twin.consumers))
        self.log.fails = True
        self.log.reads = 0
        try:
            batch = list(self.dispatcher.next_batch(consumer_id, 3, self.now_ms))
        except OSError:
            batch = []
        if self.log.reads or self.dispatcher.may_receive(consumer_id):
            self.twin.due(self.now_ms)
        self.log.fails = False
        assert not batch

    @rule(data=st.data(), hint=st.none() | st.integers(0, 5))
    def ack(self, data: st.DataObject, hint: int | None) -> None:
        positions = self._some(data, sorted(self.twin.held))
        assert self.dispatcher.ack(hint, positions) == self.twin.ack(positions)

    @rule(data=st.data())
    def ack_anything(self, data: st.DataObject) -> None:
        positions = self._some(data, self.log.positions())
        assert self.dispatcher.ack(None, positions) == self.twin.ack(positions)

    @rule(data=st.data())
    def ack_with_one_mistake(self, data: st.DataObject) -> None:
        positions = [*self._some(data, self.log.positions()), self.log.end()]
        with pytest.raises(InvalidArgument):
            self.dispatcher.ack(None, positions)

    @rule(data=st.data())
    def ack_cumulative(self, data: st.DataObject) -> None:
        target = data.draw(st.sampled_from(self.log.positions() or [self.log.end()]))
        if self.kind in ("shared", "key_shared") or target == self.log.end():
            with pytest.raises(InvalidArgument):
                self.dispatcher.ack_cumulative(target)
            return
        upto = [position for position in self.log.positions() if position <= target]
        assert self.dispatcher.ack_cumulative(target) == self.twin.ack(upto)
        after = Position(target.ledger_id, target.entry_id + 1)
        self.twin.read_position = max(self.twin.read_position, after)

    @rule(data=st.data(), delay_ms=st.integers(-5, 30))
    def nack(self, data: st.DataObject, delay_ms: int) -> None:
        consumer_id = data.draw(st.integers(0, 5))
        mine = [position for position, (who, _) in self.twin.held.items() if who == consumer_id]
        positions = self._some(data, sorted(mine) or self.log.positions())
        at_ms = self.now_ms + delay_ms
        count = self.dispatcher.nack(consumer_id, positions, at_ms, self.now_ms)
        assert count == self.twin.nack(consumer_id, positions, at_ms, self.now_ms)

    @rule(data=st.data(), ms=st.integers(-5, 30))
    def extend(self, data: st.DataObject, ms: int) -> None:
        consumer_id = data.draw(st.integers(0, 5))
        mine = [position for position, (who, _) in self.twin.held.items() if who == consumer_id]
        positions = self._some(data, sorted(mine) or self.log.positions())
        count = self.dispatcher.extend(consumer_id, group_by_ledger(positions), self.now_ms + ms)
        assert count == len(set(mine) & set(positions))
        for position in set(mine) & set(positions) if self.twin.timeout_ms is not None else ():
            self.twin.held[position] = consumer_id, self.now_ms + ms

    @precondition(lambda self: self.twin.consumers)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        consumer_id = data.draw(st.sampled_from(self.twin.consumers))
        count = self.twin.nack(consumer_id, list(self.twin.held), self.now_ms, self.now_ms)
        assert self.dispatcher.nack_all(consumer_id, self.now_ms) == count

    @precondition(lambda self: self.twin.consumers and self.kind == "failover")
    @rule(data=st.data())
    def activate(self, data: st.DataObject) -> None:
        consumer_id = data.draw(st.sampled_from(self.twin.consumers))
        self.dispatcher.activate(consumer_id, self.now_ms)
        self.twin.activate(consumer_id, self.now_ms)

    @rule(ms=st.integers(0, 25))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms

    @rule()
    def expire(self) -> None:
        now_ms = self.now_ms
        overdue = [at for at, (_, deadline) in self.twin.held.items() if deadline is not None and deadline <= now_ms]
        assert self.dispatcher.expire(now_ms) == len(overdue)
        for position in overdue:
            del self.twin.held[position]
            self.twin.ready.add(position)

    @rule()
    def has_ready(self) -> None:
        got = {who: has_ready(self.dispatcher, self.now_ms, who) for who in self.twin.consumers}
        self.twin.due(self.now_ms)
        served = self.twin.consumers
        if self.kind == "failover" and served:
            served = [self.twin.active]
        assert got == {who: who in served and bool(self.twin.peek(who, 1)) for who in self.twin.consumers}
        assert has_ready(self.dispatcher, self.now_ms) == any(got.values())

    @rule(keys=st.lists(KEYS, min_size=1, max_size=6))
    def append(self, keys: list[str | None]) -> None:
        self.log.keys[max(self.log.keys)].extend(keys)

    @rule()
    def roll(self) -> None:
        last = max(self.log.keys)
        if self.log.keys[last]:
            self.log.keys[last + 2] = []

    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        first = data.draw(st.sampled_from(sorted(self.log.keys)))
        for ledger_id in [ledger_id for ledger_id in self.log.keys if ledger_id < first]:
            del self.log.keys[ledger_id]
        self.dispatcher.trimmed(first)
        self.twin.trimmed()

    @rule(data=st.data())
    def seek(self, data: st.DataObject) -> None:
        target = data.draw(st.sampled_from([*self.log.positions(), self.log.end()]))
        mark_delete = Position(target.ledger_id, target.entry_id - 1)
        self.dispatcher.seek(mark_delete)
        self.twin.seek(mark_delete)

    @precondition(lambda self: self.log.positions())
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        self.log.unreadable.add(data.draw(st.sampled_from(self.log.positions())))

    @precondition(lambda self: self.log.positions())
    @rule(data=st.data())
    def go_away(self, data: st.DataObject) -> None:
        self.log.away.add(data.draw(st.sampled_from(self.log.positions())))

    @rule()
    def come_back(self) -> None:
        self.log.away.clear()

    @invariant()
    def agrees(self) -> None:
        twin, dispatcher = self.twin, self.dispatcher
        dispatcher._check()
        assert dispatcher.consumers == tuple(twin.consumers)
        assert dispatcher.read_position == twin.read_position
        places: dict[int, set[Position]] = {consumer_id: set() for consumer_id in twin.consumers}
        for position, (consumer_id, _) in twin.held.items():
            places[consumer_id].add(position)
        assert dispatcher.outstanding.by_consumer() == places
        assert dispatcher.outstanding_count == len(twin.held)
        assert dispatcher.kept_back_count == len(twin.kept_back)
        assert dispatcher.awaiting_redelivery_count == len(twin.waiting) + len(twin.ready) - len(twin.kept_back)
        deadlines = [deadline_ms for _, deadline_ms in twin.held.values() if deadline_ms is not None]
        assert dispatcher.next_redelivery_ms() == min([*deadlines, *twin.waiting.values()], default=None)
        for position in self.log.positions():
            assert self.acks.is_acked(position) == (position in twin.acked)

    def teardown(self) -> None:
        """Nothing is lost: a consumer that goes on receiving gets everything left that can be read, and can finish."""
        if not hasattr(self, "twin"):
            return
        self.now_ms += 1_000
        self.come_back()
        if not self.twin.consumers:
            self.add_consumer()
        left = {p for p in self.log.positions() if p not in self.twin.acked and self.log.readable(p)}
        left -= {p for p in left if p < self.twin.read_position and p not in self._placed()}  # skipped while damaged
        for consumer_id in list(self.twin.consumers):
            held = [position for position, (who, _) in self.twin.held.items() if who == consumer_id]
            self.dispatcher.nack(consumer_id, held, 0, self.now_ms)
        got: set[Position] = set()
        progress = True
        while progress:
            progress = False
            for consumer_id in self.twin.consumers:
                while batch := self.dispatcher.next_batch(consumer_id, 5, self.now_ms):
                    progress = True
                    positions = [message.position for message in batch]
                    assert got.isdisjoint(positions)
                    got.update(positions)
                    self.dispatcher.ack(consumer_id, positions)
        assert got == left
        self.dispatcher._check()

    def _placed(self) -> set[Position]:
        return {*self.twin.held, *self.twin.waiting, *self.twin.ready}


class ExclusiveMachine(DispatcherMachine):
    """Exclusive, with the rest of the consumers let in by this test alone."""

    kind = "exclusive"


class FailoverMachine(DispatcherMachine):
    """Only the active consumer is served."""

    kind = "failover"


class KeySharedMachine(DispatcherMachine):
    """Order by key, one consumer for a key."""

    kind = "key_shared"


class KeyNumberMachine(KeySharedMachine):
    """Order by a number that stands for several keys."""

    how = KeyShared(lambda _, key: None if key is None else ord(key) % 2)


class OutOfOrderMachine(KeySharedMachine):
    """A key's messages go to its owner, whoever holds earlier ones."""

    how = KeyShared(out_of_order=True)


class StickyMachine(KeySharedMachine):
    """Each consumer has a range of its own; some keys are in that of a consumer that is not there."""

    how = KeyShared(lambda _, key: None if key is None else 65_536 + 12_000 * (ord(key) - ord("a")))

    def ranges_of(self, consumer_id: int) -> tuple[tuple[int, int], ...]:
        first = 9_000 * consumer_id
        ranges = ((first, first + 4_000), (first + 4_001, first + 8_999))
        self.twin.ranges[consumer_id] = ranges
        return ranges

    def teardown(self) -> None:
        """A consumer that has all ranges gets what was in none."""
        if hasattr(self, "twin"):
            for consumer_id in list(self.twin.consumers):
                self.remove_consumer_numbered(consumer_id)
            self.dispatcher.add_consumer(9, ((0, 65_535),))
            self.twin.consumers.append(9)
            self.twin.consumers_changed()
            self.twin.ranges[9] = ((0, 65_535),)
        super().teardown()


class StickyOutOfOrderMachine(StickyMachine):
    """Ranges and no order."""

    how = KeyShared(StickyMachine.how.order_by, out_of_order=True)


def parts_of(_: bytes, key: str | None) -> str | None:
    """Keys of which one is of parts that stay together, and one stands for nothing."""
    return Parts(key) if key == "a" else None if key == "b" else key


class SharedPartsMachine(DispatcherMachine):
    """A shared subscription that keeps some messages together."""

    how = KeyShared(lambda _, key: None if key is None or key == "b" else Parts(key))


class PartsAmongKeysMachine(KeySharedMachine):
    """Order by key, and parts that stay where the first is."""

    how = KeyShared(parts_of)


class StickyPartsMachine(StickyMachine):
    """Ranges, and parts that are in none for most of the time."""

    how = KeyShared(parts_of)


class PartsOfKeysMachine(StickyMachine):
    """Ranges, and keys of which all messages are in parts."""

    how = KeyShared(
        lambda _, key: (
            None if key is None else PartsOfKey(65_536 + 12_000 * (ord(key) - ord("a"))) if key < "c" else key
        )
    )


EXAMPLES = length("DUELOG_EXAMPLES", 15, 50)

for machine in (
    DispatcherMachine,
    ExclusiveMachine,
    FailoverMachine,
    KeySharedMachine,
    KeyNumberMachine,
    OutOfOrderMachine,
    StickyMachine,
    StickyOutOfOrderMachine,
    SharedPartsMachine,
    PartsAmongKeysMachine,
    StickyPartsMachine,
    PartsOfKeysMachine,
):
    examples = length("DUELOG_EXAMPLES", 30, 120) if machine is KeySharedMachine else EXAMPLES
    machine.TestCase.settings = settings(max_examples=examples, stateful_step_count=40, deadline=None)

TestShared = pytest.mark.series(DispatcherMachine.TestCase)
TestExclusive = pytest.mark.series(ExclusiveMachine.TestCase)
TestFailover = pytest.mark.series(FailoverMachine.TestCase)
TestKeyShared = pytest.mark.series(KeySharedMachine.TestCase)
TestKeyNumber = pytest.mark.series(KeyNumberMachine.TestCase)
TestOutOfOrder = pytest.mark.series(OutOfOrderMachine.TestCase)
TestSticky = pytest.mark.series(StickyMachine.TestCase)
TestStickyOutOfOrder = pytest.mark.series(StickyOutOfOrderMachine.TestCase)
TestSharedParts = pytest.mark.series(SharedPartsMachine.TestCase)
TestPartsAmongKeys = pytest.mark.series(PartsAmongKeysMachine.TestCase)
TestStickyParts = pytest.mark.series(StickyPartsMachine.TestCase)
TestPartsOfKeys = pytest.mark.series(PartsOfKeysMachine.TestCase)


def test_parts_stay_with_the_consumer_that_holds_one_when_others_come() -> None:
    """It would await the rest for ever; what is not read yet of others is shared out. Consumers may come first."""
    log = log_of(*[f"message-{number % 20}" for number in range(40)], *map(str, range(60)))
    dispatcher = dispatcher_on(log, consumers=(1,))
    dispatcher.keep_together(KeyShared(lambda _, key: Parts(key)))
    assert entries(dispatcher.next_batch(1, 20, 0)) == list(range(20))
    for consumer in (2, 3, 4):
        dispatcher.add_consumer(consumer)
    got = [entries(dispatcher.next_batch(consumer, 100, 0)) for consumer in (1, 2, 3, 4)]
    assert got[0][:20] == list(range(20, 40))
    assert all(got)
    assert sorted(entry for each in got for entry in each) == list(range(20, 100))
    dispatcher._check()


def test_a_clock_that_goes_back_holds_no_timeout_up_for_ever() -> None:
    """Deadlines stay in order: a batch handed out at an earlier time expires no earlier than the one before it."""
    dispatcher = dispatcher_on(log_of(None, None), ack_timeout_ms=100)
    dispatcher.next_batch(1, 1, 1000)
    dispatcher.next_batch(1, 1, 500)
    dispatcher._check()
    assert dispatcher.expire(1100) == 2


def test_one_bad_position_leaves_a_batch_of_acknowledgements_undone() -> None:
    """A position that the topic does not have is refused before anything is acknowledged, in whatever ledger."""
    log = Log({1: [None] * 2, 5: [None] * 2})
    dispatcher = dispatcher_on(log)
    dispatcher.next_batch(1, 4, 0)
    for bad in (Position(5, 2), Position(6, 0), Position(5, -1), Position(1, 2**32)):
        with pytest.raises(InvalidArgument):
            dispatcher.ack(1, [Position(1, 0), bad])
    assert dispatcher.outstanding_count == 4
    assert not dispatcher.acks.changed


def test_what_cannot_be_read_holds_nothing_else_up() -> None:
    """A redelivery that cannot be read is skipped, stays unacknowledged, and the rest goes on."""
    log = log_of(*[None] * 4)
    dispatcher = dispatcher_on(log)
    dispatcher.next_batch(1, 3, 0)
    dispatcher.nack(1, at(0, 1, 2), 0, 0)
    log.unreadable.update(at(0, 1))
    assert entries(dispatcher.next_batch(2, 1, 0)) == [2]
    assert dispatcher.awaiting_redelivery_count == 0
    assert dispatcher.acks.mark_delete == Position(1, -1)


def test_consumers_are_known_by_name() -> None:
    """An unknown consumer, one that is there already, or a batch of nothing is refused."""
    dispatcher = dispatcher_on(log_of(None), consumers=[1])
    with pytest.raises(InvalidArgument):
        dispatcher.add_consumer(1)
    with pytest.raises(InvalidArgument):
        dispatcher.add_consumer(-1)
    for refused in (2, 7):
        with pytest.raises(InvalidArgument):
            dispatcher.next_batch(refused, 1, 0)
        with pytest.raises(InvalidArgument):
            dispatcher.remove_consumer(refused, 0)
    with pytest.raises(InvalidArgument):
        dispatcher.next_batch(1, 0, 0)


def test_memory_does_not_grow_with_what_was_acknowledged() -> None:
    """After everything is acknowledged nothing is left of it, deadlines and delivery counts included."""
    dispatcher = dispatcher_on(log_of(*[None] * 500), ack_timeout_ms=1000, consumers=[1])
    for _ in range(50):
        positions = [message.position for message in dispatcher.next_batch(1, 10, 0)]
        dispatcher.nack(1, positions[:3], 0, 0)
        dispatcher.next_batch(1, 3, 0)
        dispatcher.ack(1, positions)
    assert dispatcher.next_redelivery_ms() is None
    assert not dispatcher.outstanding._batches
    assert not dispatcher.outstanding.counts.failed
    assert dispatcher.acks.mark_delete == Position(1, 499)


def key_of(consumer_id: int, consumers: Sequence[int], number: int = 0) -> str:
    """The ``number``-th key that belongs to a consumer when these are the consumers."""
    slots = KeySlots(consumers)
    keys = [f"key-{i}" for i in range(1000) if slots.owner_of(f"key-{i}") == consumer_id]
    return keys[number]


def test_nothing_is_remembered_of_a_key_that_is_done_with() -> None:
    """Keys that are acknowledged leave no trace: memory does not grow with the number of keys met."""
    dispatcher = dispatcher_on(log_of(*[f"key-{i}" for i in range(300)]), "key_shared", max_kept_back=300)
    for consumer_id in (1, 2, 1, 2):
        dispatcher.ack(consumer_id, [m.position for m in dispatcher.next_batch(consumer_id, 300, 0)])
    assert dispatcher.acks.mark_delete == Position(1, 299)
    order = dispatcher._order
    assert not vars(order)["_keys"]
    assert not vars(order)["_key_at"]


class LateLog(Log):
    """A log whose reader passes everything over, and later returns it one by one without moving on."""

    late: list[Position]

    def read(self, start: Position, max_entries: int, skip: Unacknowledged) -> tuple[ReceivedMessages, Position]:
        if start < self.end():
            self.late = self.positions()
            return columns([]), self.end()
        return columns([self.message(self.late.pop(0))] if self.late else []), start


def test_messages_that_come_late_from_the_reader_do_not_hide_each_other() -> None:
    """A message that the reader had passed over and that is another consumer's is kept back; the next one is found."""
    theirs, mine = key_of(2, [1, 2]), key_of(1, [1, 2])
    log = LateLog({1: [theirs, theirs, mine]})
    dispatcher = dispatcher_on(log, "key_shared")
    assert entries(dispatcher.next_batch(1, 9, 0)) == [2]
    dispatcher._check()
    assert entries(dispatcher.next_batch(2, 9, 0)) == [0, 1]
    assert dispatcher.next_batch(2, 9, 0) == []


@pytest.mark.parametrize(
    ("kind", "meanwhile"), [("exclusive", []), ("failover", []), ("shared", [2, 3]), ("key_shared", [3])]
)
def test_what_is_to_come_again_and_is_away_holds_up_what_the_order_needs(
    kind: SubscriptionType, meanwhile: list[int]
) -> None:
    """All that is new, those of its key, or nothing; none is skipped, and each comes once it is there."""
    log = log_of("a", "b", "a", "c")
    dispatcher = dispatcher_on(log, kind, consumers=(1,))
    dispatcher.next_batch(1, 2, 0)
    dispatcher.nack_all(1, 0)
    log.away.update(at(0))
    assert entries(dispatcher.next_batch(1, 10, 0)) == meanwhile
    log.away.clear()
    assert sorted(entries(dispatcher.next_batch(1, 10, 0))) == sorted({0, 1, 2, 3} - {*meanwhile})
