"""A topic whose messages wait inline, against a twin that knows who is owed what: sets of numbers, and the clock.

Subscriptions are made, sought, left and come back to at any time; ledgers hold three messages, so that trimming is
never far; the store is closed and opened, the index of what waits is freed. After every step the figures and the list
of what waits are compared; at the end every subscription gets what it is to get, and nothing else.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from duelog import DelayedStore, ManualClock, Message, MessageId, ReceivedMessage, StoreConfig, Subscription
from duelog.metrics import BACKLOG, DELAYED, PENDING
from tests.conftest import START_MS

NAMES = st.sampled_from(("a", "b", "c"))
INLINE_MS = 1_000
DELAYS = st.lists(st.sampled_from((0, 0, 1, 40, 200, 500, INLINE_MS)), min_size=1, max_size=5)
LEDGER = 3


class TwinSubscription:
    """What a subscription is owed, by number of the message, and what of that it has been given."""

    def __init__(self, owed: set[int]) -> None:
        self.owed = owed
        self.held: set[int] = set()
        """With its consumer."""
        self.given: set[int] = set()
        """Handed out since it was made, sought, or the store was opened."""

    def ack(self, numbers: set[int]) -> int:
        count = len(self.owed & numbers)
        self.owed -= numbers
        self.held -= numbers
        return count


class InlineMachine(RuleBasedStateMachine):
    """Everything that may be done to one topic, done to the twin too."""

    @initialize(idle_ms=st.sampled_from((0, 300)), delays=DELAYS, where=st.sampled_from(("earliest", "latest")))
    def start(self, idle_ms: int, delays: list[int], where: str) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.clock = ManualClock(START_MS)
        self.config = StoreConfig(
            durability="none",
            inline_delay_ms=INLINE_MS,
            ledger_max_entries=LEDGER,
            ack_flush_ms=0,
            tracker_idle_ms=idle_ms,
            map_bytes=1 << 24,
        )
        self.ids: list[MessageId] = []
        self.dues: list[int] = []
        self.first = 0
        """The first message that is kept."""
        self.subscriptions: dict[str, TwinSubscription] = {}
        self.consumers: dict[str, Subscription] = {}
        self.received: dict[str, dict[int, ReceivedMessage]] = {}
        self._open()
        self.send(delays)
        self.come("a", where)

    def _open(self) -> None:
        self.store = DelayedStore.open(Path(self.directory.name) / "store", self.config, clock=self.clock)
        self.topic = self.store.topic("t")
        self.topic.sender.topic(self.clock.now_ms())  # it comes into being

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            try:
                self._drain()
                assert list(self.store.check()) == []
            finally:
                self.store.close()
                self.directory.cleanup()

    def _drain(self) -> None:
        self.clock.advance(INLINE_MS)
        for name, twin in self.subscriptions.items():
            consumer = self.consumers.get(name) or self.topic.subscribe(name)
            got = [int(message.payload) for message in consumer.receive(1_000)]
            assert sorted(got) == sorted(twin.owed - twin.held)
            assert consumer.receive(1) == []

    # -- asking the twin -----------------------------------------------------------------------------

    def _waiting(self) -> set[int]:
        return {number for number, due_ms in enumerate(self.dues) if due_ms > self.clock.now_ms()}

    def _kept(self) -> set[int]:
        return set(range(self.first, len(self.ids)))

    # -- sending, time ---------------------------------------------------------------------------------

    @rule(delays=DELAYS)
    def send(self, delays: list[int]) -> None:
        now_ms, first = self.clock.now_ms(), len(self.ids)
        messages = [Message(b"%d" % (first + at), deliver_at=now_ms + ms) for at, ms in enumerate(delays)]
        self.ids += self.topic.send_batch(messages)
        self.dues += [now_ms + ms for ms in delays]
        for twin in self.subscriptions.values():
            twin.owed |= set(range(first, len(self.ids)))

    @rule(ms=st.sampled_from((1, 39, 160, 300, INLINE_MS)))
    def time_passes(self, ms: int) -> None:
        self.clock.advance(ms)

    @rule()
    def tick(self) -> None:
        """Ledgers that are full, due, and owed to no subscription are trimmed from the front."""
        self.store.tick()
        self._learn_what_was_trimmed()
        wanted = self._wanted()
        full = [at for at in self._kept() if self.ids[at].entry_id == LEDGER - 1]
        assert not [at for at in full if wanted.isdisjoint(range(self.first, at + 1))], "a ledger was to be trimmed"

    def _wanted(self) -> set[int]:
        return self._waiting().union(*(twin.owed for twin in self.subscriptions.values()))

    def _learn_what_was_trimmed(self) -> None:
        """By a tick, or by `receive`, which does what a tick does: it was due, and owed to no subscription."""
        kept_from = self.store._engine.topics.get(self.topic._name).log.first_ledger
        gone = {number for number in self._kept() if self.ids[number].ledger_id < kept_from}
        assert self._wanted().isdisjoint(gone), "trimmed and still wanted"
        self.first += len(gone)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.consumers.clear()
        self.received.clear()
        for twin in self.subscriptions.values():
            twin.held, twin.given = set(), set()
        self._open()

    # -- subscriptions -----------------------------------------------------------------------------------

    @rule(name=NAMES, where=st.sampled_from(("earliest", "latest")))
    def come(self, name: str, where: str) -> None:
        """Made where there is none; come back to where there is."""
        if name in self.consumers:
            return
        if name not in self.subscriptions:
            self.subscriptions[name] = TwinSubscription(self._kept() if where == "earliest" else self._waiting())
        self.consumers[name] = self.topic.subscribe(name, initial_position=where)
        self.received.setdefault(name, {})

    @precondition(lambda self: self.consumers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.consumers)))
        self.consumers.pop(name).close()
        self.subscriptions[name].held.clear()

    @precondition(lambda self: len(self.subscriptions) > len(self.consumers))
    @rule(data=st.data())
    def unsubscribe(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(set(self.subscriptions) - set(self.consumers))))
        self.topic.unsubscribe(name)
        del self.subscriptions[name]
        self.received.pop(name, None)

    @precondition(lambda self: self.consumers)
    @rule(data=st.data(), to=st.sampled_from(("earliest", "latest", "message", "time")))
    def seek(self, data: st.DataObject, to: str) -> None:
        """What is before the place counts as acknowledged, but for what is not due yet."""
        name = data.draw(st.sampled_from(sorted(self.consumers)))
        consumer, kept = self.consumers[name], sorted(self._kept())
        if to in ("message", "time") and not kept:
            return
        if to == "message":
            place = data.draw(st.sampled_from(kept))
            consumer.seek(self.ids[place])
        elif to == "time":
            time_ms = self.dues[data.draw(st.sampled_from(kept))] + data.draw(st.integers(-1, 1))
            place = next((at for at in kept if self.dues[at] >= time_ms), len(self.ids))
            consumer.seek(time_ms)
        else:
            place = self.first if to == "earliest" else len(self.ids)
            consumer.seek(to)
        self.subscriptions[name] = TwinSubscription({at for at in kept if at >= place} | self._waiting())
        self.received[name] = {}

    # -- deliveries ----------------------------------------------------------------------------------------

    @precondition(lambda self: self.consumers)
    @rule(data=st.data(), most=st.sampled_from((1, 2, 100)))
    def receive(self, data: st.DataObject, most: int) -> None:
        self._receive(data.draw(st.sampled_from(sorted(self.consumers))), most)

    def _receive(self, name: str, most: int) -> None:
        twin = self.subscriptions[name]
        messages = self.consumers[name].receive(most)
        got = [int(message.payload) for message in messages]
        there = twin.owed - twin.held - self._waiting()
        assert len(set(got)) == len(got) == min(most, len(there))
        assert set(got) <= there
        assert [message.due_ms for message in messages] == [self.dues[number] for number in got]
        twin.held |= set(got)
        twin.given |= set(got)
        self.received[name].update(zip(got, messages, strict=True))

    @precondition(lambda self: self.consumers)
    @rule(data=st.data())
    def nack(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.consumers)))
        twin = self.subscriptions[name]
        numbers = data.draw(st.sets(st.sampled_from(sorted(twin.held)), max_size=3)) if twin.held else set()
        messages = [self.received[name][number] for number in numbers]
        assert self.consumers[name].nack(messages, delay=0) == len(numbers)
        twin.held -= numbers

    @precondition(lambda self: self.consumers)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        """Any message that is kept, by its id: given or not, due or not."""
        name = data.draw(st.sampled_from(sorted(self.consumers)))
        kept = sorted(self._kept())
        numbers = data.draw(st.sets(st.sampled_from(kept), max_size=3)) if kept else set()
        count = self.consumers[name].ack([self.ids[number] for number in numbers])
        assert count == self.subscriptions[name].ack(numbers)

    @precondition(lambda self: self.consumers)
    @rule(data=st.data(), delays=DELAYS, most=st.sampled_from((1, 2, 100)), ms=st.sampled_from((0, 1, 160, 300)))
    def send_receive_and_ack_cumulative(self, data: st.DataObject, delays: list[int], most: int, ms: int) -> None:
        """Some time later, all that was given up to some message: what was not given is still owed, due or not."""
        self.send(delays)
        name = data.draw(st.sampled_from(sorted(self.consumers)))
        twin = self.subscriptions[name]
        self._receive(name, most)
        self.clock.advance(ms)
        if not twin.given:
            return
        last = data.draw(st.sampled_from(sorted(twin.given)))
        count = self.consumers[name].ack_cumulative(self.ids[last])
        assert count == twin.ack({number for number in twin.given if number <= last})

    # -- after every step ------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "directory"):
            return
        self._learn_what_was_trimmed()
        waiting = self._waiting()
        stats = self.topic.stats()
        assert stats.pending == self.store.stats().pending == len(waiting)
        listed = sorted(waiting, key=lambda number: (self.dues[number], number))
        assert [int(found.payload) for found in self.topic.scheduled()] == listed
        assert [int(found.payload) for found in self.topic.scheduled(limit=2)] == listed[:2]
        middle_ms = self.clock.now_ms() + 200
        later = [number for number in listed if self.dues[number] >= middle_ms]
        assert [int(found.payload) for found in self.topic.scheduled(start=middle_ms)] == later
        for number in sorted(self._kept())[:3]:
            state = "scheduled" if number in waiting else "fired"
            assert self.topic.state(self.ids[number]) == state
        backlog = {name: len(twin.owed - waiting) for name, twin in self.subscriptions.items()}
        assert {sub.name: sub.backlog for sub in stats.subscriptions} == backlog
        assert {sub.name: sub.unacknowledged for sub in stats.subscriptions} == {
            name: len(twin.held) for name, twin in self.subscriptions.items()
        }
        assert self.store._engine.metrics is not None
        gauges = self.store._engine.metrics._look()
        assert [each.value for each in gauges[PENDING]] == [len(waiting)]
        delayed = {name: len(twin.owed & waiting) for name, twin in self.subscriptions.items()}
        for gauge, expected in ((DELAYED, delayed), (BACKLOG, backlog)):
            found = {str((each.attributes or {})["pulsar.subscription"]): each.value for each in gauges[gauge]}
            assert found == expected


InlineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestInlineMachine = InlineMachine.TestCase
