"""Rules: messages are sent, alone and in batches, by producers with numbers, under policies, on full disks, late."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from duelog import DelayedStore, Message, MessageId
from duelog.errors import DelayTooLong, QuotaExceeded, StoreFull
from tests.duelog.sending.putting import Heard, together

from .drawing import DUES, STORING, TOPICS, Spec, only
from .driver import Once, armed, full_disk, stalled_sender
from .machine import Machine

FIRING = ("fire.before", "fire.after", "close.before", "close.after")
APPLYING = ("wal.prepared", "wal.ended", "wal.part", "wal.applied", "wal.released")
CLEANUP = ("acks.before", "trim.recorded", "trim.part", "delete.recorded", "delete.moved", "delete.removed")


def no_room(store: DelayedStore) -> None:
    """A send that finds the disk full."""
    raise StoreFull(store.path, "no room, says the test")


class SendingRules(Machine):
    """Whatever brings a message into the store."""

    @rule(topic=TOPICS, spec=DUES, relative=st.booleans())
    def send(self, topic: str, spec: Spec, relative: bool) -> None:
        topic = self._topic(topic)
        drawn, dues = self._drawn(topic, [spec], relative)
        one, face = drawn[0], self.store.topic(topic)
        if dues is None:
            with pytest.raises(DelayTooLong):
                face.send(
                    one.payload, deliver_at=one.deliver_at, deliver_after=one.deliver_after, key=one.key, ttl=one.ttl
                )
            self._refused(topic, drawn)
            return
        twin = self.twin.topic(topic)
        if self._over_quota(topic, dues):
            with pytest.raises(QuotaExceeded):
                face.send(
                    one.payload, deliver_at=one.deliver_at, deliver_after=one.deliver_after, key=one.key, ttl=one.ttl
                )
            return
        message_id = face.send(
            one.payload, deliver_at=one.deliver_at, deliver_after=one.deliver_after, key=one.key, ttl=one.ttl
        )
        self._sent(twin, self._twins(topic, drawn, dues, [message_id], self.twin.now_ms))

    @rule(topic=TOPICS, specs=st.lists(DUES, max_size=6), relative=st.booleans())
    def send_batch(self, topic: str, specs: list[Spec], relative: bool) -> None:
        topic = self._topic(topic)
        drawn, dues = self._drawn(topic, specs, relative)
        if dues is None:
            with pytest.raises(DelayTooLong):
                self.store.topic(topic).send_batch(drawn)
            self._refused(topic, drawn)
            return
        if self._over_quota(topic, dues):
            with pytest.raises(QuotaExceeded):
                self.store.topic(topic).send_batch(drawn)
            self.twin.topic(topic)
            return
        ids = self.store.topic(topic).send_batch(drawn)
        if drawn:
            self._sent(self.twin.topic(topic), self._twins(topic, drawn, dues, ids, self.twin.now_ms))

    @rule(topic=TOPICS, specs=st.lists(DUES, min_size=1, max_size=5))
    def put(self, topic: str, specs: list[Spec]) -> None:
        """Messages that are put one by one are one group; one that is refused holds up no other."""
        topic = self._topic(topic)
        face, heard = self.store.topic(topic), Heard()
        taken: list[Message] = []
        dues: list[int] = []

        def put_all() -> None:
            for spec in specs:
                (one,), due = self._drawn(topic, [spec])
                if due is None:
                    with pytest.raises(DelayTooLong):
                        face.put(one.payload, deliver_at=one.deliver_at, key=one.key, ttl=one.ttl, done=heard)
                    self._refused(topic, [one])
                    continue
                assert face.put(
                    one.payload, deliver_at=one.deliver_at, key=one.key, ttl=one.ttl, token=len(taken), done=heard
                )
                taken.append(one)
                dues.extend(due)

        together(self.store, put_all)
        outcomes = heard.outcomes(len(taken))
        assert [token for token, _ in heard.results] == list(range(len(outcomes)))
        later = [row for row, due_ms in enumerate(dues) if due_ms > self.twin.now_ms]
        over = set(later[max(self._places(topic), 0) :])
        assert [row for row, outcome in enumerate(outcomes) if isinstance(outcome, QuotaExceeded)] == sorted(over)
        rows = [row for row in range(len(taken)) if row not in over]
        ids = [outcome for outcome in outcomes if isinstance(outcome, MessageId)]
        if taken:
            twin, sent = self.twin.topic(topic), [taken[row] for row in rows]
            self._sent(twin, self._twins(topic, sent, [dues[row] for row in rows], ids, self.twin.now_ms))

    @only(STORING)
    @rule(
        topic=TOPICS,
        specs=st.lists(DUES, min_size=1, max_size=4),
        ms=st.integers(0, 20) | st.integers(0, 400),
        point=st.sampled_from(("after", *FIRING, *CLEANUP)),
        count=st.integers(1, 3),
        fails=st.booleans(),
    )
    def send_that_stalls(self, topic: str, specs: list[Spec], ms: int, point: str, count: int, fails: bool) -> None:
        """A sender looks at the clock, and writes when another thread is in the middle of a later tick, or past it."""
        drawn, found = self._drawn(topic, specs)
        if found is None or self.twin.policies.value(topic, "max_pending"):
            return
        dues, twin, sent_ms = found, self.twin.topic(topic), self.twin.now_ms

        def meanwhile(write: Callable[[], list[MessageId]]) -> None:
            self._learn()
            self._forward(ms)
            if point == "after":
                self._tick()
                self._sent(twin, self._twins(topic, drawn, dues, write(), sent_ms))
                return

            def write_beside() -> None:
                self.beside = twin, self._twins(topic, drawn, dues, write(), sent_ms)
                if fails and point == "fire.before":
                    no_room(self.store)

            self.cleaning_up = point in CLEANUP
            once = Once(count, write_beside)
            with armed(point, once):
                self._tick_until_it_works()
            if not once.done:
                self._sent(twin, self._twins(topic, drawn, dues, write(), sent_ms))

        with stalled_sender(self.store._engine, meanwhile):
            self.store.topic(topic).send_batch(drawn)

    @only(STORING)
    @rule(topic=TOPICS, spec=DUES, count=st.integers(1, 4))
    def send_to_a_full_disk(self, topic: str, spec: Spec, count: int) -> None:
        """A send that raises has appended nothing."""
        drawn, dues = self._drawn(topic, [spec])
        if dues is None or self._over_quota(topic, dues):
            return
        face, partitions, due_ms = self.store.topic(topic), self.store._engine.storage.partitions, dues[0]
        try:
            with full_disk(self.store._engine, count):
                ids = face.send_batch(drawn)
        except StoreFull:
            self.creation_failed = True
            if face.exists():
                self.twin.topic(topic)
            if due_ms > self.twin.now_ms and partitions.get(due_ms - due_ms % self.config.partition_ms) is not None:
                self.twin.add_partition(due_ms)
        else:
            self._sent(self.twin.topic(topic), self._twins(topic, drawn, dues, ids, self.twin.now_ms))
