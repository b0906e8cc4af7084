"""Loading part by part, with sends, cancellations, reschedulings, failed commits, damage and crashes in between.

A twin knows of every message when it is due, whether it was cancelled, and whether it has fired. Each fires once, never
early, never cancelled, in order of (due time, entry id) but for late ones; and at every step the recorded frontier
tells exactly what has fired.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from duelog import DelayedStore, ManualClock, Message, MessageId, StoreConfig
from duelog.markers.firing import loaded as loaded_module
from duelog.markers.firing.log_firing import LogFiring, Taken
from duelog.partitions import due_column
from duelog.snapshot.snapshot_format import snapshot_keys
from duelog.snapshot.writer import write_snapshots
from duelog.store.codec.format import Table
from duelog.store.errors import StoreFull
from duelog.store.files import failpoints
from duelog.store.log.ledger import RunLimits
from duelog.store.log.scan import runs

HOUR_MS = 3_600_000
START_MS = 1_790_000_000_000 - 1_790_000_000_000 % HOUR_MS
SPAN_MS = 8_000
"""Due times lie in so much time after the start, or after now."""
CONFIG = StoreConfig(
    partition_ms=HOUR_MS,
    bucket_ms=50,
    durability="none",
    run_entries=5,
    fire_batch=7,
    snapshot_part_bytes=1_024,
    ledger_max_entries=100_000,
)


class HalfLoading(RuleBasedStateMachine):
    """One partition, one topic; a step of the machine is at most one step of a load."""

    @initialize(seed=st.integers(0, 1_000))
    def begin(self, seed: int) -> None:
        """A store with some hundred messages."""
        self.patches: list[Any] = [
            patch.object(loaded_module, "_LOAD_SLICE_S", 0.0),
            patch.object(due_column, "_RUNS_A_TRANSACTION", 8),
        ]
        for each in self.patches:
            each.start()
        self.path = Path(tempfile.mkdtemp(prefix="duelog-half-"))
        self.clock = ManualClock(START_MS)
        self.store = DelayedStore.open(self.path / "store", CONFIG, clock=self.clock)
        self.topic = self.store.topic("t")
        self.topic.subscribe("keeper").close()
        self.firing = self.store._engine.firing
        self.firing.observe = self._fired
        self.due: dict[int, int] = {}
        self.cancelled: set[int] = set()
        self.fired: set[int] = set()
        self.ids: list[MessageId] = []
        self.damaged = False
        self.ahead_ms = 0
        self._send(np.random.default_rng(seed).integers(1, SPAN_MS, 300).tolist())
        self.store.tick()
        self.snapshot()
        self.crash()

    # -- what happens ----------------------------------------------------------------------------

    @rule(ms=st.one_of(st.just(0), st.integers(1, 400), st.just(SPAN_MS)))
    def step(self, ms: int) -> None:
        """Time passes; a step of the load, and what is due fires."""
        self.clock.advance(ms)
        self.store._engine.slice()

    @rule(after_ms=st.lists(st.integers(1, SPAN_MS), min_size=1, max_size=10))
    def send(self, after_ms: list[int]) -> None:
        """Messages due soon or later."""
        self._send(after_ms)

    @rule(before_ms=st.lists(st.integers(1, 500), min_size=1, max_size=4))
    def append_late(self, before_ms: list[int]) -> None:
        """Messages that reach the partition after their time has come."""
        dues = np.maximum(self.clock.now_ms() - np.array(before_ms), START_MS)
        partition = self._partition()
        topic_id = self.topic._existing().log.topic_id
        with partition.environment.read() as raw:
            run = next(runs(raw, "partition", self._log().ledger_id))
            body = run.body(0)  # type: ignore[union-attr]
        assert body is not None
        _, first = partition.append(topic_id, dues, [body] * len(dues), RunLimits(5, 1 << 16), self._no_ledger)
        self.due.update(zip(range(first, first + len(dues)), dues.tolist(), strict=True))

    @rule(data=st.data(), count=st.sampled_from([1, 1, 3, 150]))
    def cancel(self, data: st.DataObject, count: int) -> None:
        """Messages sent before are cancelled, fired or not; the answer is the twin's."""
        at = data.draw(st.integers(0, len(self.ids) - 1))
        ids = [self.ids[(at + n) % len(self.ids)] for n in range(min(count, len(self.ids)))]
        before = set(self.cancelled)
        for message_id, outcome in zip(ids, self.topic.cancel_batch(ids), strict=True):
            entry = message_id.entry_id
            expected = "already cancelled" if entry in before else "fired" if entry in self.fired else "cancelled"
            assert outcome.value == expected
            if outcome.value == "cancelled":
                self.cancelled.add(entry)

    @rule(data=st.data(), after_ms=st.integers(1, SPAN_MS))
    def reschedule(self, data: st.DataObject, after_ms: int) -> None:
        """A message sent before gets another time: a conditional entry."""
        old = data.draw(st.sampled_from(self.ids))
        due_ms = self.clock.now_ms() + after_ms
        moved = self.topic.reschedule(old, deliver_at=due_ms)
        assert (moved is None) == (old.entry_id in self.fired | self.cancelled)
        if moved is not None:
            self.cancelled.add(old.entry_id)
            self.due[moved.entry_id] = due_ms
            self.ids.append(moved)

    @rule()
    def fail_to_commit(self) -> None:
        """What is due is taken, and cannot be written."""

        def fail() -> None:
            raise StoreFull(self.path, "no room")

        failpoints.arm("fire.before", fail)
        try:
            self.store._engine.slice()
        except StoreFull:
            pass
        finally:
            failpoints.disarm()

    @rule(ms=st.integers(1, 400))
    def fire_ahead(self, ms: int) -> None:
        """What is due in a moment is written; nothing of it is read before its time, which then comes."""
        now_ms, before = self.clock.now_ms(), set(self.fired)
        self.ahead_ms = ms
        log = self.topic._existing().log
        was_readable = log.readable(now_ms).end
        fired = self.firing.fire(now_ms, now_ms + ms)
        assert len(self.fired - before) == fired
        late = [entry for entry in self.fired - before if self.due[entry] <= now_ms]
        assert late or log.readable(now_ms).end == was_readable
        assert (log.next_readable_ms(now_ms) or now_ms + ms) <= now_ms + ms
        self.clock.set(max([now_ms, *(self.due[entry] for entry in self.fired - before)]))
        assert log.readable(self.clock.now_ms()).end == log.end
        self.ahead_ms = 0

    @precondition(lambda self: self.firing.loaded_starts())
    @rule(steps=st.integers(1, 3))
    def settle(self, steps: int) -> None:
        """Buckets are put to sleep, as they would be if more had come in; not while some are missing."""
        with patch("duelog.partitions.index.packing._AT_ONCE_BYTES", 64):
            for _ in range(steps):
                if not self._log().settle():
                    break

    @precondition(lambda self: self._loaded())
    @rule()
    def snapshot(self) -> None:
        """A complete snapshot of this instant."""
        cut = self._log().cut()
        assert cut is not None
        list(write_snapshots(self._partition().environment, [cut], CONFIG.snapshot_part_bytes, 0))

    @rule(where=st.floats(0, 1), part=st.integers(-2, 3))
    def damage(self, where: float, part: int) -> None:
        """A byte of a part of a snapshot is changed, read by now or not."""
        environment = self._partition().environment
        with environment.read() as raw:
            keys = [key for key, _ in snapshot_keys(raw, Table.SNAPSHOT_PART)]
            if not -len(keys) <= part < len(keys):
                return
            value = bytearray(raw.get(keys[part]) or b"")
        value[int(where * (len(value) - 1))] ^= 0x10
        environment.write(lambda transaction: transaction.raw.put(keys[part], bytes(value)))
        self.damaged = True

    @rule()
    def crash(self) -> None:
        """The index is lost, loaded or not; loading begins anew."""
        partition = self._partition()
        self.firing._loading = None
        self.firing._unload(partition)

    @rule()
    def finish(self) -> None:
        """The load ends, and all that is due has fired."""
        self.store.tick()
        now_ms = self.clock.now_ms()
        assert self._left(now_ms) == set()
        assert len(self._log()) == len(self._left(1 << 62))
        self._log()._check()

    @invariant()
    def the_frontier_tells(self) -> None:
        """What has fired is what lies below T at or before C; of the rest, what was cancelled has not."""
        assert not self.fired & self.cancelled
        if not self.firing.loaded_starts():
            return
        for log in self.firing._loaded[START_MS].values():
            frontier = log.frontier
            passed = {
                entry
                for entry, due_ms in self.due.items()
                if entry < frontier.seen and (due_ms, entry) <= (frontier.due_ms, frontier.entry_id)
            }
            assert passed - self.cancelled == self.fired

    def teardown(self) -> None:
        """At the end of the partition everything has fired, and the store verifies."""
        if not hasattr(self, "store"):
            return
        try:
            self.clock.advance(SPAN_MS + 1)
            self.finish()
            assert self.fired == set(self.due) - self.cancelled
            assert [finding for finding in self.store.check() if finding.code != "snapshot"] == []
        finally:
            self.store.close()
            shutil.rmtree(self.path)
            for each in self.patches:
                each.stop()

    # -- the twin --------------------------------------------------------------------------------

    def _fired(self, topic_id: int, taken: Taken, now_ms: int) -> None:
        before = (taken.before.due_ms, taken.before.entry_id)
        keys = list(zip(taken.dues.tolist(), taken.entries.tolist(), strict=True))
        for due_ms, entry in keys:
            assert due_ms <= now_ms + self.ahead_ms
            assert self.due[entry] == due_ms
            assert entry not in self.fired
            assert entry not in self.cancelled
        assert keys[taken.late :] == sorted(keys[taken.late :])
        assert all(key > before for key in keys[taken.late :])
        assert all(key <= before and key[1] >= taken.before.seen for key in keys[: taken.late])
        self.fired |= {entry for _, entry in keys}

    def _send(self, after_ms: list[int]) -> None:
        now_ms = self.clock.now_ms()
        sent = self.topic.send_batch([Message(b"m", deliver_at=now_ms + ms) for ms in after_ms])
        self.ids += sent
        self.due.update({found.entry_id: now_ms + ms for found, ms in zip(sent, after_ms, strict=True)})

    def _left(self, until_ms: int) -> set[int]:
        return {entry for entry, due_ms in self.due.items() if due_ms <= until_ms} - self.fired - self.cancelled

    # -- the engine's parts ----------------------------------------------------------------------

    @staticmethod
    def _no_ledger() -> int:
        raise AssertionError("the log exists")

    def _partition(self) -> Any:
        partition = self.store._engine.partitions.get(START_MS)
        assert partition is not None
        if not self.firing.loaded_starts():
            self.store._engine.slice()
        return partition

    def _log(self) -> LogFiring:
        (log,) = self.firing._loaded[START_MS].values()
        return log

    def _loaded(self) -> bool:
        return bool(self.firing.loaded_starts()) and self._log().loaded and self.firing._loading is None


HalfLoading.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestHalfLoading = HalfLoading.TestCase
