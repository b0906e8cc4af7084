"""Producers against a dict: whatever breaks a send off, and however its numbers are sent again, each is stored once.

Sends and ticks fail, die (a copy of the directory as it is then is opened in place of the store) or are left in doubt:
before or after the group of a batch is written, or at a commit that it needs; partitions are deleted and compacted in
between. What the twin knows of the store is the answers alone.
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from duelog import DUPLICATE, DelayedStore, ManualClock, Message, MessageId, StoreConfig, Subscription
from duelog.cleanup.compaction import hand_over, stage_generation
from duelog.errors import StoreFailed
from duelog.store.codec.format import PartitionState
from duelog.store.files.failpoints import arm, disarm
from tests.cleanup.compacting import plan_compaction
from tests.conftest import START_MS
from tests.duelog.sending.putting import Heard, together
from tests.proof import length

SPAN_MS = 1_000
CONFIG = StoreConfig(partition_ms=SPAN_MS, ledger_max_entries=2, durability="none", background=False)
DUES = st.lists(st.sampled_from((0, 300, 900, 1_500, 2_500)), min_size=1, max_size=6)
DUE = st.sampled_from((0, 300, 2_500))
ENDS = st.sampled_from(("fails", "dies", "doubt", "dies"))
TICK_POINTS = st.sampled_from(("commit.before", "commit.after", "delete.recorded", "delete.moved", "delete.removed"))


POINTS = {
    "fails": ("wal.before", "commit.before"),
    "dies": ("wal.before", "wal.after"),
    "doubt": ("wal.after", "wal.after"),
}
"""Where a send breaks off, by how it ends: before its group is written, after it, or at a commit that it needs."""


class Lost(Exception):
    """The answer never came."""


class ProducerMachine(RuleBasedStateMachine):
    """One producer; a subscription that acknowledges at once, and one of another topic that holds partitions."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="duelog-producers-"))
        self.paths = (self.root / f"store{number}" for number in count())
        self.clock = ManualClock(START_MS)
        self.stored: set[int] = set()
        self.doubtful: set[int] = set()
        self.ids: dict[int, MessageId] = {}
        """By number, the ids that sends gave; a number that was put has none."""
        self.delivered: dict[int, set[str]] = {}
        self.again: Counter[int] = Counter()
        """How often a stored number was stored again, in a message with others."""
        self.open(next(self.paths))

    def open(self, path: Path) -> None:
        self.store = DelayedStore.open(path, CONFIG, clock=self.clock)
        self.topic = self.store.topic("t")
        self.reader: Subscription = self.topic.subscribe("s")
        self.holder: Subscription = self.store.topic("held").subscribe("slow")
        self.producer = self.topic.producer("p")

    def reopen(self, path: Path) -> None:
        self.store.close()
        self.open(path)

    @contextmanager
    def breaking(self, point: str, at: int, end: str) -> Iterator[Callable[[], bool]]:
        """The `at`-th time that the store comes to `point` it breaks off; gives whether it did."""
        copied: Path | None = None
        left = at

        def break_off() -> None:
            nonlocal left, copied
            left -= 1
            if left == 0:
                if end == "dies":
                    copied = next(self.paths)
                    shutil.copytree(self.store.path, copied)
                raise Lost

        arm(point, break_off)
        try:
            yield lambda: left <= 0
        finally:
            disarm()
        if left <= 0 and end != "fails":
            self.reopen(copied or self.store.path)

    @rule(first=st.integers(0, 14), dues=DUES)
    def send(self, first: int, dues: list[int]) -> None:
        """Numbers that may be stored or not, in any grouping, with other due times than before."""
        messages = [Message(b"%d" % number, deliver_after=due / 1_000) for number, due in enumerate(dues, first)]
        ids = self.producer.send_batch(messages, first_sequence_id=first)
        for number, message_id in enumerate(ids, first):
            known = self.ids.get(number)
            if known is not None:
                gone = self.topic.get(known) is None or self.topic.state(known) in ("fired", "unknown")
                assert message_id == known or (message_id is None and gone)
            elif number not in self.doubtful:
                assert (message_id is None) == (number in self.stored)
            self.stored.add(number)
            self.doubtful.discard(number)
            if message_id is not None:
                self.ids[number] = message_id
        assert max(self.stored) <= self.producer.last_sequence_id <= max(self.stored | self.doubtful)

    @rule(first=st.integers(0, 14), dues=DUES, late=st.booleans(), end=ENDS, again=st.booleans())
    def send_and_break_off(self, first: int, dues: list[int], late: bool, end: str, again: bool) -> None:
        """All of the batch is there, or nothing of it."""
        new = set(range(first, first + len(dues))) - self.stored - self.doubtful
        messages = [Message(b"%d" % number, deliver_after=due / 1_000) for number, due in enumerate(dues, first)]
        with self.breaking(POINTS[end][late], 1, end) as broken:
            try:
                ids = self.producer.send_batch(messages, first_sequence_id=first)
            except (Lost, StoreFailed):
                assert broken()
                self.doubtful |= set(range(first, first + len(dues))) - self.stored
            else:
                self.stored |= set(range(first, first + len(dues)))
                self.doubtful -= self.stored
                self.ids.update((number, each) for number, each in enumerate(ids, first) if each is not None)
        known = self.producer._producer._stored
        assert {number for number in new if number in known} in (set(), new)
        if again:
            self.send(first, dues)

    @precondition(lambda self: not self.doubtful)
    @rule(ranges=st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), min_size=1, max_size=6), due=DUE)
    def put_ranges(self, ranges: list[tuple[int, int]], due: int) -> None:
        """A message with several numbers is stored unless all of them are, by others of its group too."""
        ranges, heard = [(min(each), max(each)) for each in ranges], Heard()

        def put() -> None:
            for low, high in ranges:
                numbers = ("p", low, high)
                self.topic.put(b"%d-%d" % (low, high), deliver_after=due / 1_000, numbers=numbers, done=heard)

        together(self.store, put)
        for (low, high), outcome in zip(ranges, heard.outcomes(len(ranges)), strict=True):
            numbers = set(range(low, high + 1))
            assert (outcome is DUPLICATE) == (numbers <= self.stored)
            if outcome is not DUPLICATE:
                self.again.update(numbers & self.stored)
                self.stored |= numbers
        assert self.topic.producer_number("p") == max(self.stored)

    @rule(first=st.integers(0, 14), dues=DUES, late=st.booleans(), end=ENDS)
    def put_and_break_off(self, first: int, dues: list[int], late: bool, end: str) -> None:
        """Each is stored with its number, or neither is."""
        heard = Heard()

        def put() -> None:
            for number, due in enumerate(dues, first):
                self.topic.put(
                    b"%d" % number, deliver_after=due / 1_000, numbers=("p", number, number), token=number, done=heard
                )

        with self.breaking(POINTS[end][late], 1, end):
            together(self.store, put)
            heard.wait(len(dues))
        for number, outcome in heard.results:
            if not isinstance(outcome, Exception) and end == "fails":
                self.stored.add(number)
                self.doubtful.discard(number)
            elif number not in self.stored:
                self.doubtful.add(number)

    @rule(number=st.integers(0, 14), due=DUE)
    def send_one(self, number: int, due: int) -> None:
        """Alone."""
        self.send(number, [due])

    @precondition(lambda self: not self.doubtful)
    @rule(due=DUE)
    def send_the_next(self, due: int) -> None:
        """The next number is above every one that is stored."""
        expected = max(self.stored, default=-1) + 1
        if expected < 15:
            message_id = self.producer.send(Message(b"%d" % expected, deliver_after=due / 1_000))
            assert message_id is not None
            assert self.producer.last_sequence_id == expected
            self.ids[expected] = message_id
            self.stored.add(expected)

    @rule(ms=st.sampled_from((0, 400, 1_000, 3_000)), hold=st.booleans())
    def pass_time(self, ms: int, hold: bool) -> None:
        """Messages are delivered and acknowledged, their partitions closed, and deleted unless one is held."""
        if hold:
            self.store.topic("held").send(b"", deliver_after=ms / 1_000 + 0.1)
        self.clock.advance(ms)
        self.receive()
        self.store.tick()

    @rule(ms=st.sampled_from((1_000, 3_000)), point=TICK_POINTS, at=st.integers(1, 4))
    def pass_time_and_die(self, ms: int, point: str, at: int) -> None:
        """Firing, closing, trimming and deleting are broken off."""
        self.clock.advance(ms)
        with self.breaking(point, at, "dies") as broken:
            try:
                self.store.tick()
            except (Lost, StoreFailed):
                assert broken()

    @rule()
    def release(self) -> None:
        """Nothing holds partitions that are past any more."""
        self.holder.ack(self.holder.receive(1_000), durable=True)
        self.store.tick()

    @rule()
    def compact(self) -> None:
        """Closed partitions lose the bodies that were acknowledged, and are adopted."""
        for partition in self.store._engine.storage.partitions.held(lambda each: each.state is PartitionState.CLOSED):
            plan = plan_compaction(self.store._engine.storage.main, partition)
            if plan.dead_entries:
                hand_over(self.store.path, stage_generation(self.store.path, partition.environment, plan))
        self.store.tick()

    @rule()
    def close_and_open(self) -> None:
        """The state of a producer comes from the disk."""
        self.reopen(self.store.path)

    def receive(self) -> None:
        while messages := self.reader.receive(1_000):
            for message in messages:
                low, _, high = message.payload.decode().partition("-")
                for number in range(int(low), int(high or low) + 1):
                    self.delivered.setdefault(number, set()).add(str(message.message_id))
            self.reader.ack(messages, durable=True)

    def teardown(self) -> None:
        try:
            for number in sorted(self.doubtful, reverse=True):
                self.send(number, [300])
            self.clock.advance(60_000)
            self.receive()
            expected = {number: 1 + self.again[number] for number in self.stored}
            assert {number: len(ids) for number, ids in self.delivered.items()} == expected
            assert list(self.store.check(deep=True)) == []
        finally:
            self.store.close()
            shutil.rmtree(self.root)


ProducerMachine.TestCase.settings = settings(
    max_examples=length("DUELOG_PRODUCERS", 12, 40),
    stateful_step_count=25,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestProducers = pytest.mark.series(ProducerMachine.TestCase)
