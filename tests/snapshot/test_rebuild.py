"""Indexes from snapshots: made anew from the logs, or restored after any history, they are those of a full replay."""

import shutil
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.markers.firing import loaded
from duelog.markers.firing.firing import Firing
from duelog.markers.firing.pending_log import PendingLog
from duelog.partitions import due_column
from duelog.partitions.index import buckets
from duelog.partitions.timespan import directory_name
from duelog.snapshot import rebuild
from duelog.snapshot.snapshot_format import inspect_snapshots, snapshot_keys
from duelog.snapshot.writer import remove_snapshots, write_snapshots
from duelog.store.codec.format import Table, run_key, seal, unseal
from duelog.store.codec.run import RunLimits
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from duelog.store.errors import InvalidArgument, StoreLocked, UnknownTopic
from duelog.store.log.scan import runs
from duelog.tools.snapshot_tool import list_snapshots, rebuild_snapshots
from tests.conftest import DAY_MS, HOUR_MS, START_MS, OpenStore, present, raising
from tests.partitions.packing_all import buckets_of
from tests.proof import length

CONFIG = StoreConfig(snapshot_every_entries=1_000, snapshot_part_bytes=1_024, bucket_ms=1_000, run_entries=10)


@pytest.fixture
def store(open_store: OpenStore, clock: ManualClock) -> DelayedStore:
    """A closed store: two topics, two days, some fired, cancelled, rescheduled; today's partition has snapshots."""
    opened = open_store(config=CONFIG)
    for topic in ("a", "b"):
        opened.topic(topic).subscribe("reader").close()
        messages = [Message(b"%d" % at, deliver_at=START_MS + 1_000 + at * 500) for at in range(600)]
        messages += [Message(b"tomorrow", deliver_at=START_MS + DAY_MS + at) for at in range(50)]
        ids = opened.topic(topic).send_batch(messages)
        opened.tick()
        assert opened.topic(topic).cancel(ids[400])
        assert opened.topic(topic).reschedule(ids[401], deliver_at=START_MS + HOUR_MS)
    clock.advance(60_000)
    opened.tick()
    opened.topic("a").send_batch([Message(b"later", deliver_at=START_MS + HOUR_MS + at) for at in range(300)])
    opened.close()
    return opened


def environment_of(store: DelayedStore, start_ms: int = START_MS - START_MS % DAY_MS) -> Environment:
    """The environment of a day, opened by itself."""
    return Environment(store.path / "partitions" / directory_name(start_ms) / "g000001", name="partition")


def pending(store: DelayedStore, topic: str) -> list[tuple[int, bytes]]:
    """(due time, payload) of what is left to fire."""
    return [(message.due_ms, message.payload) for message in store.topic(topic).scheduled()]


def indexes(store: DelayedStore) -> list[Any]:
    """The indexes in memory after a tick, as plain values."""
    store.tick()
    logs = [
        log
        for _, by_topic in sorted(store._engine.delivery.firing.loaded.logs.items())
        for _, log in sorted(by_topic.items())
    ]
    return [([(start_ms, list(ids)) for start_ms, ids in buckets_of(log._index)], log.tail) for log in logs]


def remove_all(store: DelayedStore) -> None:
    """No snapshot at all."""
    environment = environment_of(store)
    remove_snapshots(environment)
    environment.close()


def _change(store: DelayedStore, table: Table, change: Callable[[bytes, bytes], bytes | None]) -> None:
    environment = environment_of(store)
    with environment.read() as raw:
        found = [(key, bytes(raw.get(key) or b"")) for key, _ in snapshot_keys(raw, table)]

    def work(transaction: Any) -> None:
        for key, value in found:
            changed = change(key, value)
            if changed is None:
                transaction.raw.delete(key)
            else:
                transaction.raw.put(key, changed)

    environment.write(work)
    environment.close()


def _flipped(key: bytes, value: bytes) -> bytes:
    return value[:9] + bytes([value[9] ^ 4]) + value[10:]


SPOILED: dict[str, Callable[[DelayedStore], None]] = {
    "as they were": lambda store: None,
    "none": remove_all,
    "torn": lambda store: _change(store, Table.SNAPSHOT_META, lambda key, value: None),
    "damaged parts": lambda store: _change(store, Table.SNAPSHOT_PART, _flipped),
    "damaged metadata": lambda store: _change(store, Table.SNAPSHOT_META, _flipped),
    "of a later version": lambda store: _change(
        store, Table.SNAPSHOT_META, lambda key, value: seal(key, b"\x09\x09" + unseal(key, value)[2:])
    ),
}


@pytest.mark.parametrize("state", SPOILED)
def test_what_is_rebuilt_is_what_a_full_replay_makes(store: DelayedStore, open_store: OpenStore, state: str) -> None:
    """Whatever state the snapshots were in, each log has one complete one afterwards, and the index is the same."""
    remove_all(store)
    opened = open_store(config=CONFIG)
    replayed, left = indexes(opened), [pending(opened, topic) for topic in "ab"]
    opened.close()
    SPOILED[state](store)
    told: list[tuple[int, int]] = []
    report = rebuild_snapshots(
        store.path, bucket_ms=CONFIG.bucket_ms, progress=lambda read, total: told.append((read, total))
    )
    assert (report.damaged, report.removed, len(report.logs)) == (0, 0, 4)
    assert told[-1][0] == told[-1][1] == sum(log.found.entries for log in report.logs)
    found = list_snapshots(store.path, verify=True)
    assert [(each.topic or "")[-1] for each in found] == ["a", "b", "a", "b"]
    assert all(each.usable and each.tail == each.log_entries for each in found)
    opened = open_store(config=CONFIG)
    assert indexes(opened) == replayed
    assert [pending(opened, topic) for topic in "ab"] == left


def test_the_new_snapshot_is_complete_before_the_old_ones_go(
    store: DelayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the rebuilding fails in the middle, what was usable before still is."""
    before = [each for each in list_snapshots(store.path, verify=True) if each.usable]
    assert before
    monkeypatch.setattr(rebuild, "write_snapshot", raising(RuntimeError("in the middle")))
    with pytest.raises(RuntimeError, match="in the middle"):
        rebuild_snapshots(store.path)
    assert [each for each in list_snapshots(store.path, verify=True) if each.usable] == before


def test_only_what_was_asked_for_is_rebuilt(store: DelayedStore) -> None:
    """One topic, one partition, by name; unknown names are refused."""
    tomorrow = directory_name(START_MS - START_MS % DAY_MS + DAY_MS)
    report = rebuild_snapshots(store.path, topic="b", partition=tomorrow)
    assert [(log.topic, log.found.entries) for log in report.logs] == [("persistent://public/default/b", 50)]
    with pytest.raises(UnknownTopic):
        rebuild_snapshots(store.path, topic="nobody")
    with pytest.raises(InvalidArgument, match="there is none"):
        rebuild_snapshots(store.path, partition="20300101T000000Z")


def test_every_entry_is_read_and_damage_reported(store: DelayedStore) -> None:
    """A flipped bit in a payload and one in a header: both are named, and the rest of the log is in the snapshot."""
    ledger_id = list_snapshots(store.path, topic="a")[0].ledger_id
    environment = environment_of(store)
    with environment.read() as raw:
        payload_key, header_key = run_key(ledger_id, 100), run_key(ledger_id, 110)
        payload, header = bytearray(raw.get(payload_key) or b""), bytearray(raw.get(header_key) or b"")
    payload[-1] ^= 1
    header[20] ^= 1

    def spoil(transaction: Any) -> None:
        transaction.raw.put(payload_key, bytes(payload))
        transaction.raw.put(header_key, bytes(header))

    environment.commit(spoil)
    environment.close()
    report = rebuild_snapshots(store.path)
    damaged = [(error.ledger_id, error.entry_id) for log in report.logs for error in log.found.damaged]
    assert sorted(damaged) == [(ledger_id, 109), (ledger_id, 110)]
    assert all(log.found.written is not None for log in report.logs)


def test_late_entries_that_wait_are_left_to_the_replay(open_store: OpenStore, clock: ManualClock) -> None:
    """A log that ends with entries behind its frontier gets a snapshot of what came before them."""
    opened = open_store(config=CONFIG)
    opened.topic("a").subscribe("reader").close()
    opened.topic("a").send_batch([Message(b"m", deliver_at=START_MS + at) for at in range(1, 200)])
    opened.tick()
    clock.advance(100)
    opened.tick()
    (log,) = (log for logs in opened._engine.delivery.firing.loaded.logs.values() for log in logs.values())
    partition = present(opened._engine.storage.partitions.get(log.start_ms))
    dues = np.array([START_MS + 50, START_MS + 500])
    with partition.environment.read() as raw:
        body = next(runs(raw, "partition", log.ledger_id)).body(0)  # type: ignore[union-attr]
    assert body is not None
    late = present(partition.log(log.topic_id))

    def append(transaction: Transaction) -> None:
        partition.add(transaction.to(partition.start_ms, partition.memtable), late, dues, [body, body], RunLimits())

    opened._engine.storage.main.write(append)
    opened.close()
    report = rebuild_snapshots(opened.path)
    (rebuilt,) = report.logs
    assert (rebuilt.found.entries, present(rebuilt.found.written).tail, rebuilt.found.pending) == (201, 199, 99)
    opened = open_store(config=CONFIG)
    clock.advance(1_000)
    with opened.topic("a").subscribe("reader") as reader:
        received = reader.receive(300)
    assert len(received) == 201


def test_listing_says_why_a_snapshot_is_not_used(store: DelayedStore) -> None:
    """Torn and damaged ones by their state, with the reason."""
    SPOILED["damaged metadata"](store)
    states = {(each.state, each.usable) for each in list_snapshots(store.path)}
    assert states == {("damaged", False)}
    assert all("checksum" in each.reason for each in list_snapshots(store.path))


def test_a_store_that_is_open_is_refused(store: DelayedStore, open_store: OpenStore) -> None:
    """Rebuilding and verifying take the store's lock; listing looks on."""
    open_store(config=CONFIG)
    refused: list[StoreLocked] = []

    def try_it() -> None:
        for tool in (rebuild_snapshots, partial(list_snapshots, verify=True)):
            try:
                tool(store.path)
            except StoreLocked as error:
                refused.append(error)

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    assert len(refused) == 2


BEGIN_MS = 1_790_000_000_000 - 1_790_000_000_000 % HOUR_MS
BUCKET_MS = 50
TOPIC = "history"

offsets = st.lists(st.integers(1, 400), min_size=1, max_size=12)


def _no_snapshot(*_: Any, **__: Any) -> Any:
    return None
    yield


class History(RuleBasedStateMachine):
    """One partition, one topic, a small grid of due times."""

    @initialize(part_bytes=st.sampled_from([1_024, 1 << 20]))
    def begin(self, part_bytes: int) -> None:
        """A store in the first second of its partition, with one message so that the partition is there."""
        self.path = Path(tempfile.mkdtemp(prefix="duelog-history-"))
        self.clock = ManualClock(BEGIN_MS)
        self.config = StoreConfig(
            partition_ms=HOUR_MS,
            bucket_ms=BUCKET_MS,
            durability="none",
            run_entries=5,
            fire_batch=7,
            snapshot_part_bytes=part_bytes,
            ledger_max_entries=1_000,
        )
        self.ids: list[Any] = []
        self.store = DelayedStore.open(self.path / "store", self.config, clock=self.clock)
        self.topic = self.store.topic(TOPIC)
        self.topic.subscribe("keeper").close()
        self.send([HOUR_MS // 2])
        self.store.tick()

    @rule(after_ms=offsets)
    def send(self, after_ms: list[int]) -> None:
        """Messages due soon."""
        now_ms = self.clock.now_ms()
        self.ids += self.topic.send_batch([Message(b"m", deliver_at=now_ms + ms) for ms in after_ms])

    @rule(before_ms=offsets)
    def append_late(self, before_ms: list[int]) -> None:
        """Messages that reach the partition after their time has come."""
        dues = np.maximum(self.clock.now_ms() - np.array(before_ms), BEGIN_MS)
        partition = present(self.store._engine.storage.partitions.get(BEGIN_MS))
        body = self._some_body()
        log, limits = partition.log(self._log().topic_id), RunLimits(5, 1 << 16)
        assert log is not None

        def append(transaction: Transaction) -> None:
            rows = transaction.to(partition.start_ms, partition.memtable)
            partition.add(rows, log, dues, [body] * len(dues), limits)

        self.store._engine.storage.main.write(append)

    @rule(ms=st.integers(1, 150))
    def advance(self, ms: int) -> None:
        """Time passes, and what is due fires."""
        self.clock.advance(ms)
        self.store.tick()

    @rule(ms=st.integers(1, 150))
    def fire_one_batch(self, ms: int) -> None:
        """Time passes, and only some of what is due fires."""
        self.clock.advance(ms)
        self._firing().fire(self.clock.now_ms())

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A message sent before is cancelled, fired or not."""
        self.topic.cancel(data.draw(st.sampled_from(self.ids)))

    @rule(data=st.data(), after_ms=st.integers(1, 400))
    def reschedule(self, data: st.DataObject, after_ms: int) -> None:
        """A message sent before gets another time: a conditional entry."""
        moved = self.topic.reschedule(data.draw(st.sampled_from(self.ids)), deliver_at=self.clock.now_ms() + after_ms)
        if moved is not None:
            self.ids.append(moved)

    @rule(slices=st.integers(1, 3) | st.just(1_000))
    def pack(self, slices: int) -> None:
        """Buckets of the index are packed, two at once."""
        with patch.object(buckets, "_PACKED_AT_ONCE", 2):
            for _ in range(slices):
                if not self._log().pack():
                    break

    @rule()
    def snapshot(self) -> None:
        """A complete snapshot of this instant."""
        self._snapshot(1_000)

    @rule(steps=st.integers(0, 3))
    def torn_snapshot(self, steps: int) -> None:
        """A snapshot that the process does not live to finish."""
        self._snapshot(steps)

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """A byte of a snapshot is changed."""
        environment = self._environment()
        with environment.read() as raw:
            tables = (Table.SNAPSHOT_META, Table.SNAPSHOT_PART)
            keys = [key for table in tables for key, _ in snapshot_keys(raw, table)]
            if not keys:
                return
            key = data.draw(st.sampled_from(keys))
            value = bytearray(raw.get(key) or b"")
        value[data.draw(st.integers(0, len(value) - 1))] ^= 0x10
        environment.commit(lambda transaction: transaction.raw.put(key, bytes(value)))

    @rule()
    def crash(self) -> None:
        """The index is lost; what is made of the disk with snapshots is what is made of it without."""
        with patch.object(loaded, "restore_steps", _no_snapshot):
            replayed = self._load_anew()
        restored = self._load_anew()
        assert self._state(restored) == self._state(replayed)
        restored._check()

    @rule(data=st.data(), after_ms=offsets)
    def load_in_steps(self, data: st.DataObject, after_ms: list[int]) -> None:
        """The index is lost, and messages are sent, cancelled and rescheduled between the steps of loading it."""
        firing = self._unloaded()
        between = {"send": lambda: self.send(after_ms), "cancel": lambda: self.cancel(data), "nothing": lambda: None,
                   "reschedule": lambda: self.reschedule(data, after_ms[0])}  # fmt: skip
        with patch.object(loaded, "_LOAD_SLICE_S", 0.0), patch.object(due_column, "_RUNS_A_TRANSACTION", 1):
            while firing.loaded.load(self.clock.now_ms()):
                between[data.draw(st.sampled_from(sorted(between)))]()
        found = self._log()
        found._check()
        assert self._state(found) == self._state(self._load_anew())

    @rule()
    def close_and_open(self) -> None:
        """The store is closed in order."""
        self.store.close()
        self.store = DelayedStore.open(self.path / "store", self.config, clock=self.clock)
        self.topic = self.store.topic(TOPIC)
        self.store.tick()

    @invariant()
    def at_most_one_is_unfinished(self) -> None:
        """The remains of snapshots that crashes leave do not gather."""
        assert sum(info.state.value == "torn" for info in list(inspect_snapshots(self._environment()))) <= 1

    def teardown(self) -> None:
        """Every store ends with a check, which finds nothing but the snapshots that were damaged."""
        if hasattr(self, "store"):
            try:
                self.store.tick()
                assert [finding for finding in self.store.check() if finding.code != "snapshot"] == []
            finally:
                self.store.close()
                shutil.rmtree(self.path)

    def _firing(self) -> Firing:
        return self.store._engine.delivery.firing

    def _log(self) -> PendingLog:
        (log,) = self._firing().loaded.logs[BEGIN_MS].values()
        return log

    def _environment(self) -> Any:
        partition = present(self.store._engine.storage.partitions.get(BEGIN_MS))
        return partition.environment

    def _some_body(self) -> bytes:
        with self._environment().read() as raw:
            run = next(runs(raw, "partition", self._log().ledger_id))
            body = run.body(0)  # type: ignore[union-attr]
        assert body is not None
        return body

    def _snapshot(self, most_steps: int) -> None:
        cut = present(self._log().cut())
        steps = write_snapshots(self._environment(), [cut], self.config.snapshot_part_bytes, self.clock.now_ms())
        for _ in range(most_steps):
            if next(steps, self) is self:
                break

    def _unloaded(self) -> Firing:
        firing = self._firing()
        partition = present(self.store._engine.storage.partitions.get(BEGIN_MS))
        firing.loaded.unload(partition)
        return firing

    def _load_anew(self) -> PendingLog:
        firing = self._unloaded()
        while firing.loaded.load(self.clock.now_ms()):
            pass
        return self._log()

    @staticmethod
    def _state(log: PendingLog) -> tuple[object, ...]:
        buckets = [(start_ms, list(ids)) for start_ms, ids in buckets_of(log._index)]
        late = list(zip(log._late.entries.tolist(), log._late.dues.tolist(), strict=True))
        return buckets, late, log.tail, log.frontier, len(log)


History.TestCase.settings = settings(
    max_examples=length("DUELOG_HISTORIES", 8, 40), stateful_step_count=30, deadline=None
)
TestHistory = pytest.mark.series(History.TestCase)
