"""Rules: messages are sent, alone and in batches, by producers with numbers, under policies, on full disks, late."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from duelog import DelayedDeliveryPolicies, DelayedStore, MessageId
from duelog.errors import DelayTooLong, StoreFull

from .drawing import DUES, STORING, TAKING_BACK, TOPICS, Spec, only
from .driver import Once, armed, full_disk, stalled_sender
from .machine import Machine
from .twin_policies import NAMESPACE, STORE

FIRING = ("fire.before", "fire.after", "close.before", "close.after")
CLEANUP = ("acks.before", "trim.recorded", "trim.part", "delete.recorded", "delete.moved", "delete.removed")


def no_room(store: DelayedStore) -> None:
    """What a full disk does."""
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
                face.send(one.payload, deliver_at=one.deliver_at, deliver_after=one.deliver_after, key=one.key)
            return
        twin = self.twin.topic(topic)
        message_id = face.send(one.payload, deliver_at=one.deliver_at, deliver_after=one.deliver_after, key=one.key)
        self._sent(twin, self._twins(drawn, dues, [message_id], self.twin.now_ms))

    @rule(topic=TOPICS, specs=st.lists(DUES, max_size=6), relative=st.booleans())
    def send_batch(self, topic: str, specs: list[Spec], relative: bool) -> None:
        topic = self._topic(topic)
        drawn, dues = self._drawn(topic, specs, relative)
        if dues is None:
            with pytest.raises(DelayTooLong):
                self.store.topic(topic).send_batch(drawn)
            return
        ids = self.store.topic(topic).send_batch(drawn)
        if drawn:
            self._sent(self.twin.topic(topic), self._twins(drawn, dues, ids, self.twin.now_ms))

    @only(TAKING_BACK)
    @rule(
        topic=TOPICS,
        name=st.sampled_from(("p", "q")),
        specs=st.lists(DUES, min_size=1, max_size=4),
        first=st.none() | st.integers(0, 12),
    )
    def send_numbered(self, topic: str, name: str, specs: list[Spec], first: int | None) -> None:
        """A number that is stored already is not stored again, whatever became of its message."""
        twin = self.twin.topic(topic)
        producer = self.store.topic(topic).producer(name)
        stored = twin.producers.setdefault(name, set())
        last = max(stored, default=-1)
        assert producer.last_sequence_id == last
        drawn, dues = self._drawn(topic, specs)
        if dues is None:
            with pytest.raises(DelayTooLong):
                producer.send_batch(drawn, first_sequence_id=first)
            return
        ids = producer.send_batch(drawn, first_sequence_id=first)
        start = last + 1 if first is None else first
        for number, message_id in enumerate(ids, start):
            assert message_id is None or number not in stored, "what is stored is stored again"
            # A number that was left out may count as stored, since numbers are to ascend; a later one never does.
            assert message_id is not None or number <= last, "it is taken for stored, and is not"
        kept = [row for row, message_id in enumerate(ids) if message_id is not None]
        twins = self._twins(
            [drawn[row] for row in kept],
            [dues[row] for row in kept],
            [message_id for message_id in ids if message_id is not None],
            self.twin.now_ms,
        )
        self._sent(twin, twins)
        stored.update(start + row for row in kept)

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
        if found is None:
            return
        dues, twin, sent_ms = found, self.twin.topic(topic), self.twin.now_ms

        def meanwhile(write: Callable[[], list[MessageId]]) -> None:
            self._learn()
            self._forward(ms)
            if point == "after":
                self._tick()
                self._sent(twin, self._twins(drawn, dues, write(), sent_ms))
                return

            def write_beside() -> None:
                self.beside = twin, self._twins(drawn, dues, write(), sent_ms)
                if fails and point == "fire.before":
                    no_room(self.store)

            self.cleaning_up = point in CLEANUP
            once = Once(count, write_beside)
            with armed(point, once):
                self._tick_until_it_works()
            if not once.done:
                self._sent(twin, self._twins(drawn, dues, write(), sent_ms))

        with stalled_sender(self.store._engine, meanwhile):
            self.store.topic(topic).send_batch(drawn)

    @only(STORING)
    @rule(topic=TOPICS, spec=DUES, count=st.integers(1, 4))
    def send_to_a_full_disk(self, topic: str, spec: Spec, count: int) -> None:
        """A send that raises has appended nothing."""
        drawn, dues = self._drawn(topic, [spec])
        if dues is None:
            return
        face, partitions, due_ms = self.store.topic(topic), self.store._engine.partitions, dues[0]
        try:
            with full_disk(self.store._engine.main, count):
                ids = face.send_batch(drawn)
        except StoreFull:
            self.creation_failed = True
            if face.exists():
                self.twin.topic(topic)
            if due_ms > self.twin.now_ms and partitions.get(due_ms - due_ms % self.config.partition_ms) is not None:
                self.twin.add_partition(due_ms)
        else:
            self._sent(self.twin.topic(topic), self._twins(drawn, dues, ids, self.twin.now_ms))

    # -- policies ------------------------------------------------------------------------------------

    @only(TAKING_BACK)
    @rule(
        scope=st.sampled_from((STORE, NAMESPACE, "t0", "t1")),
        active=st.sampled_from((None, None, True, False)),
        tick_ms=st.sampled_from((None, 0, 1, 7, 100)),
        longest_ms=st.sampled_from((None, None, 0, 40)),
        fixed_ms=st.sampled_from((None, None, 0, 30)),
    )
    def set_policies(
        self, scope: str, active: bool | None, tick_ms: int | None, longest_ms: int | None, fixed_ms: int | None
    ) -> None:
        fields: dict[str, int | bool | None] = {
            "active": active,
            "tick_time_ms": tick_ms,
            "max_delivery_delay_ms": longest_ms,
            "fixed_delivery_delay_ms": None if scope == STORE else fixed_ms,
        }
        self.twin.policies.scopes[scope] = fields
        policies = DelayedDeliveryPolicies(
            active=active,
            tick_time_ms=tick_ms,
            max_delivery_delay_ms=longest_ms,
            fixed_delivery_delay_ms=None if scope == STORE else fixed_ms,
        )
        namespace, topic = _scope(scope)
        self.store.set_policies(policies, namespace=namespace, topic=topic)
        assert self.store.policies(namespace=namespace, topic=topic) == (
            policies if any(value is not None for value in fields.values()) else None
        )

    @only(TAKING_BACK)
    @precondition(lambda self: self.twin.policies.scopes)
    @rule(data=st.data())
    def remove_policies(self, data: st.DataObject) -> None:
        scope = data.draw(st.sampled_from(sorted(self.twin.policies.scopes)))
        fields = self.twin.policies.scopes.pop(scope)
        namespace, topic = _scope(scope)
        there = any(value is not None for value in fields.values())
        assert self.store.remove_policies(namespace=namespace, topic=topic) == there


def _scope(scope: str) -> tuple[str | None, str | None]:
    if scope == STORE:
        return None, None
    return ("public/default", None) if scope == NAMESPACE else (None, scope)
