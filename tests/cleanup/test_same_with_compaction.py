"""Whatever is done to a store, each subscription receives the same with compaction at any point and without."""

import functools
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from duelog import DelayedStore, ManualClock, MessageId, StoreConfig
from duelog.cleanup import adoption, compaction_plan, log_claims
from duelog.cleanup.compaction import Staged, hand_over, stage_generation
from duelog.cleanup.log_claims import LogClaims
from duelog.errors import UnknownTopic
from duelog.store.codec.format import PartitionState
from duelog.store.codec.run import Run, RunKind
from duelog.store.log.scan import runs
from duelog.store.position import Position
from tests.cleanup.compacting import plan_compaction
from tests.conftest import HOUR_MS, raising
from tests.model.driver import armed
from tests.proof import length, wrong_engines

START_MS = 1_790_035_200_000
CONFIG = StoreConfig(
    partition_ms=HOUR_MS,
    durability="none",
    ledger_max_entries=5,
    ledger_max_age_ms=6 * HOUR_MS,
    run_entries=3,
    fire_batch=7,
    max_open_partitions=2,
    map_bytes=1 << 20,
)


class Stop(BaseException):
    """Raised at a failpoint."""


class Side:
    """One of the two stores, and the ids of what was sent to it, by payload."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = ManualClock(START_MS)
        self.ids: dict[bytes, MessageId] = {}
        self.store = self._open()

    def _open(self) -> DelayedStore:
        return DelayedStore.open(self.path, CONFIG, clock=self.clock)

    def reopen(self) -> None:
        """Close the store and open it again."""
        self.store.close()
        self.store = self._open()

    def marker_positions(self, topic: str) -> dict[MessageId, Position]:
        """Where in the topic's main log the markers stand, by the message that they point at."""
        engine = self.store._engine
        found = {}
        with suppress(UnknownTopic), engine.storage.main.read() as raw:
            for ledger in engine.topics.get(self.store.topic(topic)._name).log.ledgers():
                for run in runs(raw, "main", ledger.ledger_id):
                    assert isinstance(run, Run)
                    if run.kind == RunKind.MARKERS:
                        for at, entry in enumerate(run.targets().tolist()):
                            found[MessageId(run.target, entry)] = Position(run.ledger_id, run.first_entry + at)
        return found


class SideBySide:
    """The two stores, and everything that may be done to them."""

    def __init__(self, path: Path) -> None:
        self.plain = Side(path / "plain")
        self.compacted = Side(path / "compacted")
        self.sides = (self.plain, self.compacted)
        self.topic_of: dict[bytes, str] = {}
        self.withdrawn: set[bytes] = set()
        self.dropped: set[bytes] = set()
        self.adopted = 0
        self._seen: dict[tuple[int, int], None] = {}
        self._staged: list[Staged] = []
        self._sent = 0

    def close(self) -> None:
        """Nothing is wrong with either store."""
        for side in self.sides:
            assert list(side.store.check(deep=True)) == []
            side.store.close()

    def send(self, topic: str, count: int, after_ms: int) -> None:
        """Messages one ms apart."""
        for at in range(count):
            self._sent += 1
            payload = b"%d" % self._sent
            self.topic_of[payload] = topic
            for side in self.sides:
                due_ms = side.clock.now_ms() + after_ms + at
                side.ids[payload] = side.store.topic(topic).send(payload, deliver_at=due_ms)

    def withdraw(self, which: int, after_ms: int | None) -> None:
        """Cancel a message, or give it another time; the answers agree."""
        payloads = sorted(payload for payload in self.topic_of if payload not in self.withdrawn)
        if not payloads:
            return
        payload = payloads[which % len(payloads)]
        answers = []
        for side in self.sides:
            topic = side.store.topic(self.topic_of[payload])
            try:
                if after_ms is None:
                    answers.append(topic.cancel(side.ids[payload]))
                else:
                    new = topic.reschedule(side.ids[payload], deliver_at=side.clock.now_ms() + after_ms)
                    answers.append(new is not None)
                    if new is not None:
                        side.ids[payload] = new
            except UnknownTopic:
                answers.append(False)
        assert answers[0] == answers[1]
        if answers[0] and after_ms is None:
            self.withdrawn.add(payload)

    def forward(self, ms: int) -> None:
        """Let time pass."""
        for side in self.sides:
            side.clock.advance(ms)
        self.tick()

    def tick(self) -> None:
        """Do everything that is due, adoption too."""
        fired = [side.store.tick().fired for side in self.sides]
        assert fired[0] == fired[1]
        self._look()

    def receive(self, topic: str, name: str, acknowledge: int) -> None:
        """Receive all there is, and acknowledge all, every second, the first half, or nothing."""
        self.tick()
        found: list[list[bytes]] = []
        for side in self.sides:
            with side.store.topic(topic).subscribe(name) as subscription:
                messages = []
                while batch := subscription.receive(4):
                    messages += batch
                payloads = [message.payload for message in messages]
                gone = [message for message in messages if message.payload in self.dropped]
                if side is self.plain:  # the other passes over them
                    subscription.ack(gone)
                kept = [message for message in messages if message.payload not in self.dropped]
                found.append(payloads if side is self.compacted else [message.payload for message in kept])
                if acknowledge == 1:
                    subscription.ack(kept)
                elif acknowledge == 2:
                    subscription.ack(kept[::2])
                elif acknowledge == 3 and kept:
                    subscription.ack_cumulative(kept[len(kept) // 2])
        assert found[0] == found[1], f"{name} of {topic} receives {found[1]}, and {found[0]} where nothing is compacted"

    def subscribe(self, topic: str, name: str, latest: bool) -> None:
        """A subscription, new or not."""
        for side in self.sides:
            position = "latest" if latest else "earliest"
            side.store.topic(topic).subscribe(name, initial_position=position).close()

    def unsubscribe(self, topic: str, name: str) -> None:
        """Remove a subscription, if it is there."""
        for side in self.sides:
            with suppress(LookupError):
                side.store.topic(topic).unsubscribe(name)

    def seek(self, topic: str, name: str, to: int) -> None:
        """To the earliest, the latest, or a time; where that is depends on what is trimmed."""
        self.tick()
        for side in self.sides:
            with side.store.topic(topic).subscribe(name) as subscription:
                subscription.seek({0: "earliest", 1: "latest"}.get(to, side.clock.now_ms() - to * HOUR_MS // 2))

    def delete_topic(self, topic: str) -> None:
        """And all its messages."""
        for side in self.sides:
            with suppress(UnknownTopic):
                side.store.delete_topic(topic)
        for payload, name in self.topic_of.items():
            if name == topic:
                self.withdrawn.add(payload)

    def flush(self) -> None:
        """Acknowledgements go to the disk."""
        for side in self.sides:
            side.store.flush()

    def reopen(self) -> None:
        """Both; what was being copied is swept away."""
        for side in self.sides:
            side.reopen()
        self._staged.clear()
        self._look()

    def stage(self, which: int) -> None:
        """Copy some closed partition, worth it or not."""
        engine = self.compacted.store._engine
        closed = [each for each in engine.storage.partitions if each.state is PartitionState.CLOSED]
        if closed:
            with engine.storage.partitions.lease(closed[which % len(closed)]) as partition:
                plan = plan_compaction(engine.storage.main, partition)
                self._staged.append(stage_generation(self.compacted.path, partition.environment, plan))

    def hand_over(self) -> None:
        """Take the copy made longest ago."""
        if self._staged:
            hand_over(self.compacted.path, self._staged.pop(0))

    def compact(self, which: int) -> None:
        """The whole of it, but for adoption, which is the store's to do."""
        self.stage(which)
        while self._staged:
            self.hand_over()

    def crash(self, point: str) -> None:
        """Whatever is adopted next fails at this point; then both are opened anew."""
        self.flush()  # a crash forgets acknowledgements that are not on disk
        self.plain.store.tick()
        with armed(point, raising(Stop())), suppress(Stop):
            self.compacted.store.tick()
        self.reopen()

    def _look(self) -> None:
        """See what adopted generations lack, and that no subscription needs it."""
        partitions = self.compacted.store._engine.storage.partitions
        for partition in partitions:
            if partition.generation > 1 and (partition.start_ms, partition.generation) not in self._seen:
                self._seen[partition.start_ms, partition.generation] = None
                self.adopted += 1
                with partitions.lease(partition), partition.environment.read() as raw:
                    lost = set()
                    for log in partition.logs():
                        for run in runs(raw, partition.name, log.ledger_id):
                            assert isinstance(run, Run)
                            lost |= {MessageId(log.ledger_id, at) for at, body in run.bodies() if body is None}
                self._judge(lost)

    def _judge(self, lost: set[MessageId]) -> None:
        dropped = {payload for payload, id_ in self.compacted.ids.items() if id_ in lost} - self.dropped
        for topic in {self.topic_of[payload] for payload in dropped}:
            positions = self.plain.marker_positions(topic)
            for payload in dropped:
                position = positions.get(self.plain.ids[payload])
                if self.topic_of[payload] != topic or payload in self.withdrawn or position is None:
                    continue  # without a marker it was trimmed: the plain store has closed the partition too
                log = self.plain.store._engine.topics.get(self.plain.store.topic(topic)._name)
                if log.log.entries_of(position.ledger_id) is None:
                    continue
                assert log.subscriptions, f"{payload!r} was dropped, and {topic} has no subscription"
                for name, state in log.subscriptions.items():
                    assert state.acks.is_acked(position), f"{payload!r} was dropped, {name} has not acknowledged it"
        self.dropped |= dropped


Step = Callable[[SideBySide], object]


topics = st.sampled_from("ab")
names = st.sampled_from(("one", "two", "three"))
delays = st.integers(0, 5 * HOUR_MS)


def step(name: str, *strategies: st.SearchStrategy[object]) -> st.SearchStrategy[Step]:
    """Steps that call a method of SideBySide with drawn arguments."""
    return st.tuples(*strategies).map(lambda values: Call(name, values))


class Call:
    """A step that can be read in a failed example."""

    def __init__(self, name: str, values: tuple[object, ...]) -> None:
        self.name = name
        self.values = values

    def __call__(self, stores: SideBySide) -> object:
        return getattr(stores, self.name)(*self.values)

    def __repr__(self) -> str:
        return f"{self.name}{self.values}"


STEPS = st.one_of(
    step("send", topics, st.integers(1, 9), delays),
    step("send", topics, st.integers(1, 9), st.integers(0, HOUR_MS)),
    step("withdraw", st.integers(0, 50), st.none() | delays),
    step("forward", st.sampled_from((1, HOUR_MS // 3, HOUR_MS, HOUR_MS, 3 * HOUR_MS))),
    step("receive", topics, names, st.integers(0, 3)),
    step("receive", topics, names, st.integers(1, 3)),
    step("subscribe", topics, names, st.booleans()),
    step("unsubscribe", topics, names),
    step("seek", topics, names, st.integers(0, 8)),
    step("delete_topic", topics),
    step("flush"),
    step("reopen"),
    step("stage", st.integers(0, 5)),
    step("stage", st.integers(0, 5)),
    step("hand_over"),
    step("compact", st.integers(0, 5)),
    step("compact", st.integers(0, 5)),
    step("tick"),
    step("crash", st.sampled_from(("compact.published", "compact.adopted", "commit.before", "commit.after"))),
)  # fmt: skip

BEGINNING: list[Step] = [
    Call("subscribe", ("a", "one", False)),
    Call("send", ("a", 8, HOUR_MS // 2)),
    Call("send", ("b", 4, HOUR_MS // 2)),
    Call("forward", (2 * HOUR_MS,)),
]
"""Something to compact."""


def run(steps: list[Step]) -> int:
    """Do them to new stores; how many generations were adopted."""
    with tempfile.TemporaryDirectory(prefix="duelog-side-", dir=memory()) as path:
        stores = SideBySide(Path(path))
        for each in [*BEGINNING, *steps]:
            each(stores)
        for topic in "ab":
            for name in ("one", "two", "three"):
                stores.receive(topic, name, 2)
        stores.close()
        return stores.adopted


@functools.cache
def memory() -> str | None:
    """Where an fsync costs nothing, if there is such a place."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


@pytest.mark.series
@settings(max_examples=length("DUELOG_SIDES", 12, 50), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEPS, min_size=10, max_size=50))
def test_each_subscription_receives_the_same(steps: list[Step]) -> None:
    """With seeks, new subscriptions, cancellations, crashes and reopening between plan and adoption."""
    run(steps)


def by_anybody(cursors: object, ledger_id: int, tail: int) -> BitMap:
    """Acknowledged by one of them."""
    each = [claims_by_all([cursor], ledger_id, tail) for cursor in cursors]  # type: ignore[attr-defined]
    return BitMap.union(BitMap(), *each)


claims_by_all = log_claims.acknowledged_by_all


def too_little(log: LogClaims, tail: int, conditional: BitMap | None) -> BitMap:
    """Unacknowledged messages are needed; those with a marker and no subscription are not."""
    return log.marked - log.acknowledged if log.subscriptions else BitMap()


def by_all(cursors: object, ledger_id: int, tail: int) -> BitMap:
    """The claims as they should be."""
    return claims_by_all(cursors, ledger_id, tail)  # type: ignore[arg-type]


def nothing_needed(log: LogClaims, tail: int, conditional: BitMap | None) -> BitMap:
    """All goes."""
    return BitMap()


MUTANTS: dict[str, tuple[object, str, Callable[..., object]]] = {
    "acknowledged by one is enough": (log_claims, "acknowledged_by_all", by_anybody),
    "no subscription, so it is not needed": (compaction_plan, "needed", too_little),
    "nothing is needed": (compaction_plan, "needed", nothing_needed),
    "seeks are not looked at": (log_claims, "acknowledged_by_all", by_all),
}


@pytest.mark.parametrize("mutant", wrong_engines(MUTANTS, "acknowledged by one is enough"))
def test_a_wrong_compaction_is_found_out(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails where compaction drops too much, or adopts what it may not."""
    owner, name, wrong = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, wrong)
    # Adoption looks at what compaction relies on a second time; here it does not.
    monkeypatch.setattr(adoption, "_taken_back", lambda raw, topic_id, relied_on: None)
    monkeypatch.setattr("duelog.upkeep.reclaiming.Adopting._gone_back", lambda self, relied_on: None)
    told: list[Step] = [
        Call("subscribe", ("a", "two", False)),
        Call("receive", ("a", "one", 2)),
        Call("flush", ()),
        Call("stage", (0,)),
        Call("seek", ("a", "one", 0)),
        Call("hand_over", ()),
        Call("tick", ()),
    ]
    if mutant == "seeks are not looked at":
        told.insert(2, Call("receive", ("a", "two", 1)))
    with pytest.raises(AssertionError, match=r"dropped|receives"):
        run(told)
