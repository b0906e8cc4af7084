"""Healthy stores of many shapes, one written meanwhile: an audit has no finding, and its tables add up."""

import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.store.errors import AlreadyOpen
from duelog.tools.audit import audit_store, partition_audit
from duelog.tools.audit.partition_audit import PartitionResult, PartitionTask, audit_environment
from duelog.tools.audit.store_audit import run_here
from duelog.tools.compact_store import compact_store
from tests.audit.histories import CONFIG, SLOW, damage
from tests.conftest import HOUR_MS, tick_after
from tests.duelog.writing_process import WritingProcess
from tests.proof import length
from tests.tools.command_line import ok

START_MS = 1_790_000_000_000 // HOUR_MS * HOUR_MS
TOPICS = ("a", "b", "c")
SUBSCRIPTIONS = ("s", "t")

DELAYS = st.integers(0, 6 * HOUR_MS)
TOPIC = st.sampled_from(TOPICS)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), TOPIC, st.lists(DELAYS, min_size=1, max_size=12)),
        st.tuples(st.just("advance"), st.integers(0, 2 * HOUR_MS)),
        st.tuples(st.just("subscribe"), TOPIC, st.sampled_from(SUBSCRIPTIONS)),
        st.tuples(st.just("receive"), TOPIC, st.sampled_from(SUBSCRIPTIONS), st.integers(0, 3)),
        st.tuples(st.just("cancel"), TOPIC, st.integers(0, 30)),
        st.tuples(st.just("reschedule"), TOPIC, st.integers(0, 30), DELAYS),
        st.tuples(st.just("seek"), TOPIC, st.sampled_from(SUBSCRIPTIONS)),
        st.tuples(st.just("delete"), TOPIC),
        st.tuples(st.just("reopen")),
        st.tuples(st.just("compact")),
    ),
    min_size=8,
    max_size=40,
)


class History:
    """A store driven by steps, on a manual clock."""

    def __init__(self, path: Path, config: StoreConfig) -> None:
        self.path = path
        self.config = config
        self.clock = ManualClock(START_MS)
        self.store = DelayedStore.open(path, config, clock=self.clock)
        self.ids: dict[str, list[Any]] = {name: [] for name in TOPICS}

    def run(self, step: tuple[Any, ...]) -> None:
        match step:
            case "send", topic, delays:
                messages = [Message(b"x" * (delay % 50 + 1), deliver_after=delay / 1000) for delay in delays]
                self.ids[topic] += self.store.topic(topic).send_batch(messages)
            case "advance", ms:
                self.clock.advance(ms)
                self.store.tick()
            case "subscribe", topic, name:
                self.store.topic(topic).subscribe(name).close()
            case "receive", topic, name, skip:
                with self.store.topic(topic).subscribe(name) as consumer:
                    received = consumer.receive(100, timeout=0)
                    consumer.ack([message for at, message in enumerate(received) if not skip or at % skip])
            case "cancel" | "reschedule", topic, at, *_ if at >= len(self.ids[topic]):
                pass
            case "cancel", topic, at:
                self.store.topic(topic).cancel(self.ids[topic][at])
            case "reschedule", topic, at, delay:
                moved = self.store.topic(topic).reschedule(self.ids[topic][at], deliver_at=self.clock.now_ms() + delay)
                self.ids[topic] += [] if moved is None else [moved]
            case "seek", topic, name:
                with self.store.topic(topic).subscribe(name) as consumer:
                    consumer.seek(START_MS)
            case "delete", topic:
                if self.store.topic(topic).exists():
                    self.store.delete_topic(topic)
                    self.ids[topic].clear()
            case (("reopen" | "compact") as what,):
                self.store.close()
                if what == "compact":
                    compact_store(self.path, min_dead_ratio=0.0)
                self.store = DelayedStore.open(self.path, self.config, clock=self.clock)
                self.store.tick()
            case _:
                raise AssertionError(f"no such step: {step}")


@pytest.mark.series
@settings(max_examples=length("DUELOG_AUDIT_HISTORIES", 15, 40), deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=STEPS, retention=st.sampled_from((0, HOUR_MS)), ledger=st.sampled_from((3, 10, 50_000)),
       later=st.sampled_from((0, 10 * HOUR_MS)))  # fmt: skip
def test_no_healthy_store_has_a_finding(steps: list[tuple[Any, ...]], retention: int, ledger: int, later: int) -> None:
    """Whatever was sent, fired, trimmed, cancelled, moved, sought back and deleted."""
    path = Path(tempfile.mkdtemp()) / "store"
    config = StoreConfig(
        partition_ms=HOUR_MS, ledger_max_entries=ledger, retention_ms=retention, run_entries=4, background=False
    )
    history = History(path, config)
    try:
        for step in steps:
            history.run(step)
    finally:
        history.store.close()
    result = audit_store(path, as_of_ms=history.clock.now_ms() + later, patience_s=0)
    assert damage(result.findings) == []
    for row in result.retention:
        assert row.messages >= row.pending + row.fired >= row.acknowledged
        assert row.oldest_due_ms <= row.newest_due_ms
    assert sum(row.messages for row in result.ahead) == sum(row.pending for row in result.retention)
    shutil.rmtree(path.parent)


def test_the_tables_say_what_was_done(tmp_path: Path) -> None:
    """Each count of a small history that is known in full."""
    clock = ManualClock(START_MS)
    with DelayedStore.open(tmp_path / "s", StoreConfig(partition_ms=HOUR_MS, background=False), clock=clock) as store:
        topic = store.topic("t")
        consumer = topic.subscribe("done")
        topic.subscribe("idle").close()
        ids = topic.send_batch([Message(b"12345", deliver_at=START_MS + 1000 * n) for n in range(1, 11)])
        topic.send_batch([Message(b"later", deliver_at=START_MS + 5 * HOUR_MS)] * 4)
        assert topic.cancel(ids[0])
        assert topic.reschedule(ids[1], deliver_at=START_MS + 5 * HOUR_MS + 7)
        tick_after(store, clock, 3_500)
        tick_after(store, clock, HOUR_MS)
        consumer.ack(consumer.receive(3, timeout=0))
        consumer.close()
    result = audit_store(tmp_path / "s", as_of_ms=clock.now_ms())
    (row,) = result.retention
    counts = (row.messages, row.pending, row.overdue, row.fired, row.acknowledged, row.cancelled)
    assert counts == (15, 5, 0, 8, 0, 2)
    assert (row.oldest_due_ms, row.newest_due_ms) == (START_MS + 1000, START_MS + 5 * HOUR_MS + 7)
    lateness: Counter[int] = Counter()
    for late in result.lateness:
        lateness[late.below_ms] += late.markers
    assert lateness == {1_000: 1, 3_600_000: 7}
    assert [(each.hour_ms, each.messages) for each in result.ahead] == [(START_MS + 5 * HOUR_MS, 5)]
    assert [(each.subscription, each.backlog) for each in result.subscriptions] == [("done", 5), ("idle", 8)]
    assert [(each.reason, each.subscription, each.behind) for each in result.held] == [
        ("subscription", "done", 5), ("subscription", "idle", 8)]  # fmt: skip
    assert [(each.state, each.scope, each.messages) for each in result.partitions] == [
        ("closed", "whole", 10), ("open", "open", 5)]  # fmt: skip


def test_retention_and_as_of_decide_what_should_have_gone(tmp_path: Path) -> None:
    """A partition that all subscriptions have passed is kept by the store's own retention, by age or bytes."""
    clock = ManualClock(START_MS)
    config = StoreConfig(partition_ms=HOUR_MS, retention_ms=10 * HOUR_MS, ledger_max_entries=2, background=False)
    with DelayedStore.open(tmp_path / "s", config, clock=clock) as store:
        with store.topic("t").subscribe("s") as consumer:
            store.topic("t").send_batch([Message(b"a", deliver_after=60.0), Message(b"b", deliver_after=61.0)])
            tick_after(store, clock, 2 * HOUR_MS)
            consumer.ack(consumer.receive(10, timeout=0))
        store.tick()
    now_ms, path = clock.now_ms(), tmp_path / "s"
    assert [row.reason for row in audit_store(path, as_of_ms=now_ms).held] == ["retention"]
    for later_ms, why in ((HOUR_MS, "retention keeps it until 2026-"), (11 * HOUR_MS, "retention does not keep it")):
        judged = audit_store(path, as_of_ms=now_ms + later_ms)
        assert ([row.reason for row in judged.held], damage(judged.findings)) == (["retention"], [])
        assert why in judged.held[0].explanation
    ok("policies", "set", path, "--topic", "t", "--retention", "0", "--retention-bytes", "1000")
    assert "the newest 1,000 bytes" in audit_store(path, as_of_ms=now_ms + 11 * HOUR_MS).held[0].explanation
    assert audit_store(path, as_of_ms=START_MS).held == []


def test_dead_letters_are_counted_by_where_they_came_from_and_why(tmp_path: Path) -> None:
    """Those that are held: not what was requeued or purged."""
    clock = ManualClock(START_MS)
    with DelayedStore.open(tmp_path / "store", StoreConfig(max_redeliveries=0), clock=clock) as store:
        for number in range(3):
            store.topic("t").send(b"%d" % number)
            with store.topic("t").subscribe("s") as consumer:
                consumer.nack(consumer.receive(10), delay=0)
                assert consumer.receive(10) == []
            clock.advance(1_000)
        first, *_ = store.dead_letters()
        assert store.purge_dead_letters(first) == 1
        name = store.topic("t").name
    (row,) = audit_store(tmp_path / "store").dead_letters
    assert row == (name, "s", "redeliveries", 2, START_MS + 1_000, START_MS + 2_000)


def test_dead_letters_of_one_kind_of_exception_are_one_row(tmp_path: Path) -> None:
    """Whatever their texts say: an audit of a million of them is not a million rows."""
    clock = ManualClock(START_MS)
    with DelayedStore.open(tmp_path / "store", clock=clock) as store, store.topic("t").subscribe("s") as consumer:
        store.topic("t").send_payloads([b"x"] * 3)
        for message, reason in zip(consumer.receive(3), ("KeyError: 1", "KeyError: 2", "ValueError"), strict=True):
            consumer.dead_letter(message, reason)
    rows = audit_store(tmp_path / "store").dead_letters
    assert [(row.reason, row.letters) for row in rows] == [("KeyError", 2), ("ValueError", 1)]


_COMPACT = """
import sys
from pathlib import Path
from duelog.tools.compact_store import compact_store
report = compact_store(Path(sys.argv[1]), min_dead_ratio=0.1)
assert {each.outcome for each in report.partitions} >= {"adopted"}, report
"""

_DRAIN = """
import sys
from duelog import DelayedStore, ManualClock
from tests.audit.histories import CONFIG, SLOW, damage, TRIMMED
clock = ManualClock(int(sys.argv[2]) + 10**9)
with DelayedStore.open(sys.argv[1], CONFIG, clock=clock) as store:
    store.tick()
    for name in (*SLOW, *TRIMMED):
        for subscription in store.topic(name).subscriptions():
            with store.topic(name).subscribe(subscription) as consumer:
                while batch := consumer.receive(1000, timeout=0):
                    consumer.ack(batch)
    clock.advance(10**9)
    store.tick()
    assert not list(store.partitions())
"""


class Meanwhile:
    """A runner that has another process do something before the first partition is read."""

    def __init__(self, program: str, *arguments: object) -> None:
        self._command = [sys.executable, "-c", program, *map(str, arguments)]

    def __call__(self, tasks: list[PartitionTask]) -> Iterable[PartitionResult]:
        root = Path(__file__).parents[2]
        subprocess.run(self._command, check=True, cwd=root, env={"PYTHONPATH": str(root), "PATH": ""})
        return run_here(tasks)


@pytest.fixture
def store(healthy: tuple[Path, int], tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return shutil.copytree(healthy[0], tmp_path / "store")


def test_partitions_that_are_compacted_meanwhile_are_read_anew(healthy: tuple[Path, int], store: Path) -> None:
    """With as many messages as before, in their newer generations."""
    before = audit_store(store, as_of_ms=healthy[1])
    after = audit_store(store, as_of_ms=healthy[1], run=Meanwhile(_COMPACT, store), patience_s=0)
    assert damage(after.findings) == []
    assert [row.messages for row in after.partitions] == [row.messages for row in before.partitions]
    generations = [
        (old.generation, new.generation) for old, new in zip(before.partitions, after.partitions, strict=True)
    ]
    assert (1, 2) in generations


def test_partitions_that_are_deleted_meanwhile_are_left_out(healthy: tuple[Path, int], store: Path) -> None:
    """Nor is what pointed into them a finding."""
    found = audit_store(store, as_of_ms=healthy[1], run=Meanwhile(_DRAIN, store, healthy[1]), patience_s=0)
    assert damage(found.findings) == []
    assert [row.state for row in found.partitions] == ["open"] * 4


def test_an_open_partition_that_closes_and_goes_while_it_is_read_is_no_finding(
    healthy: tuple[Path, int], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was opened is read to its end, though its file has no name any more; the others are left out."""
    drain = [Meanwhile(_DRAIN, store, healthy[1])]

    def read(*arguments: Any) -> Any:
        found = audit_environment(*arguments)
        if drain:
            drain.pop()([])
        return found

    monkeypatch.setattr(partition_audit, "audit_environment", read)
    audit = audit_store(store, as_of_ms=healthy[1], patience_s=0)
    assert damage(audit.findings) == []
    assert [(row.state, row.file_bytes) for row in audit.partitions] == [("open", 0)]
    assert list((store / "partitions").iterdir()) == []


def test_the_process_that_has_the_store_open_is_told_to_let_another_one_audit(
    healthy: tuple[Path, int], store: Path
) -> None:
    """LMDB lets a process open an environment once only."""
    with DelayedStore.open(store, CONFIG, clock=ManualClock(healthy[1])) as opened:
        assert opened.topic(SLOW[0]).exists()
        for verify in (True, False):
            with pytest.raises(AlreadyOpen, match="this process has"):
                audit_store(store, verify=verify)


def test_what_has_fired_and_is_not_applied_is_not_missing(tmp_path: Path) -> None:
    """The markers are in the main environment, the messages in the write-ahead log alone."""
    with WritingProcess(tmp_path / "store", ledger_max_entries=2) as writer:
        writer.do("subscribe", "a", "mailer")
        writer.send("a", "x", 0, 0, 1_000, HOUR_MS)
        assert writer.do("advance", 1_500) == 1  # the partition is loaded
        writer.send("a", "x", 0, 0, 0, 0, 500, 600, 60_000)  # ledgers that the log alone knows
        assert writer.do("advance", 1_000) == 2
        writer.do("drain", "a", "mailer")
        writer.send("a", "x", 0, 0, 0, 0, 0)
        audit = audit_store(tmp_path / "store")
        assert damage(audit.findings) == []
        assert [(row.messages, row.pending) for row in audit.partitions] == [(4, 1), (1, 1)]
        assert [row.backlog for row in audit.subscriptions] == [5]
