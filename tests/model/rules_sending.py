"""Rules: messages are sent, numbered, sent under keys, withdrawn, and recur; processes crash meanwhile."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from duelog import DelayedStore, Message, MessageId, Outcome
from duelog.errors import DelayTooLong, QuotaExceeded, StoreFull, UnknownTopic
from duelog.metrics import CANCELLED, OVERRIDDEN, REJECTED, RESCHEDULED
from duelog.store.names import TopicName
from tests.conftest import present
from tests.duelog.sending.putting import Heard, together

from .drawing import CONFIGS, DUES, HANDING_OUT, PICK, PICKS, STORING, TAKING_BACK, TOPICS, Spec, only, pick
from .driver import PAYLOAD, Once, SimulatedCrash, armed, copy_store, full_disk, stalled_sender
from .machine import Machine
from .twin_recurring import TwinSchedule
from .twin_topic import TwinKey, TwinMessage, TwinProducer, TwinTopic, key_of
from .twin_withdrawal import cancel, outcome, reschedule

FIRING = ("fire.before", "fire.after", "close.before", "close.after")

APPLYING = (
    "wal.prepared", "wal.ended", "directory.staged", "directory.renamed", "wal.part", "wal.applied", "wal.released",
)  # fmt: skip

CLEANUP = ("acks.before", "trim.recorded", "trim.part", "delete.recorded", "delete.moved", "delete.removed")


def no_room(store: DelayedStore) -> None:
    """A send that finds the disk full."""
    raise StoreFull(store.path, "no room, says the test")


FIRSTS = st.none() | st.integers(0, 12)

KEYS = st.sampled_from(("k", "l"))

HOLDS = st.sampled_from((None, 0.005, 0.3))

STATES = {
    Outcome.CANCELLED: "scheduled",
    Outcome.ALREADY_CANCELLED: "cancelled",
    Outcome.FIRED: "fired",
    Outcome.UNKNOWN: "unknown",
}

SCHEDULES = st.sampled_from(("s", "z"))

NUMBERS = {"s": 900_001, "z": 900_003}


class SendingRules(Machine):
    """Whatever brings messages in, takes them back, or ends a process."""

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
        face = self.store.topic(topic)
        try:
            with full_disk(self.store._engine, count):
                ids = face.send_batch(drawn)
        except StoreFull:
            if face.exists():
                self.twin.topic(topic)
        else:
            self._sent(self.twin.topic(topic), self._twins(topic, drawn, dues, ids, self.twin.now_ms))

    @only(STORING)
    @precondition(lambda self: self.consumers)
    @rule()
    def flush(self) -> None:
        self.store.flush()
        self.twin.flush()

    @precondition(lambda self: self.messages)
    @rule(other=st.none() | CONFIGS)
    def reopen(self, other: dict[str, Any] | None) -> None:
        """Closed and opened; now and then with other settings, of which those of what is kept change nothing."""
        path = self.store.path
        self.store.close()
        self.twin.flush()
        if other is not None:
            other["partition_ms"] = self.config.partition_ms
            self.config = self.twin.config = dataclasses.replace(self.config, **other)
            self.ever_inline |= self.config.inline_delay_ms > 0
        self._open(path)

    @only(STORING, TAKING_BACK, HANDING_OUT)
    @precondition(lambda self: self.messages)
    @rule()
    def crash(self) -> None:
        target = self._next_copy()
        copy_store(self.store.path, target)
        self._reopen_after_crash(target)

    @only(STORING, TAKING_BACK)
    @rule(point=st.sampled_from((*FIRING, *CLEANUP)), count=st.integers(1, 3))
    def crash_in_a_tick(self, point: str, count: int) -> None:
        self._crash_in(self.store.tick, point, count)

    @only(STORING, TAKING_BACK)
    @rule(point=st.sampled_from(APPLYING), count=st.integers(1, 3))
    def crash_in_a_checkpoint(self, point: str, count: int) -> None:
        """All of the write-ahead log is being applied."""
        self._crash_in(self.store._engine.writer().apply_all, point, count)

    def _crash_in(self, call: Callable[[], object], point: str, count: int) -> None:
        target = self._next_copy()

        def crash() -> None:
            copy_store(self.store.path, target)
            raise SimulatedCrash

        try:
            with armed(point, Once(count, crash)):
                call()
        except SimulatedCrash:
            pass
        else:
            copy_store(self.store.path, target)
        self._reopen_after_crash(target)

    def _reopen_after_crash(self, target: Path) -> None:
        self._learn()
        self.store.close()
        for topic in self.twin.topics.values():
            for sub in topic.subscriptions.values():
                sub.crash()
        self._open(target)
        self.twin.release({partition.start_ms for partition in self.store._engine.storage.partitions})
        self._adopt_acks()

    def _next_copy(self) -> Path:
        self.copies += 1
        return self.directory / str(self.copies)

    def _adopt_acks(self) -> None:
        """After a crash: what was surely on disk is acknowledged, and of the rest nothing that was not acknowledged."""
        for topic in self.twin.topics.values():
            state = self._state(topic)
            for name, sub in topic.subscriptions.items():
                found = set()
                mark, acked = sub.flushed
                for place in range(topic.first, len(topic.main)):
                    there = state.subscriptions[name].acks.is_acked(topic.position(place))
                    assert there or not (place < mark or place in acked), "an acknowledgement was lost"
                    assert sub.is_acked(place) or not there, "acknowledged by no call"
                    if there:
                        found.add(place)
                sub.restore(topic.first, found)

    @only(TAKING_BACK)
    @rule(topic=TOPICS, name=st.sampled_from(("p", "q")), specs=st.lists(DUES, min_size=1, max_size=4), first=FIRSTS)
    def send_numbered(self, topic: str, name: str, specs: list[Spec], first: int | None) -> None:
        """A number that is stored is not stored again, whatever became of its message; any other is."""
        twin = self.twin.topic(topic)
        face, producer = self.store.topic(topic).producer(name), twin.producers.setdefault(name, TwinProducer())
        assert face.last_sequence_id == producer.last
        drawn, _ = self._drawn(topic, specs)
        first, start = producer.numbering(first)
        wanted, dues = self._wanted(topic, producer, start, drawn)
        if dues is None:
            with pytest.raises(DelayTooLong):
                face.send_batch(drawn, first_sequence_id=first)
            self._refused(topic, [drawn[row] for row in wanted])
            return
        if self._over_quota(topic, list(dues.values())):
            with pytest.raises(QuotaExceeded):
                face.send_batch(drawn, first_sequence_id=first)
            return
        ids = face.send_batch(drawn, first_sequence_id=first)
        stored = {row: message_id for row in wanted if (message_id := ids[row]) is not None}
        assert list(stored) == wanted, "what is not stored is stored, once"
        for row in set(range(len(ids))) - set(wanted):
            known = self.twin.by_id[producer.stored[start + row]]
            gone = not self.twin.is_stored(twin, known)
            assert ids[row] == known.message_id or (gone and ids[row] is None), "a number answers with its id"
        self._stored(twin, producer, start, drawn, dues, stored)

    def _wanted(
        self, topic: str, producer: TwinProducer, start: int, drawn: Sequence[Message]
    ) -> tuple[list[int], dict[int, int] | None]:
        """The rows of a batch that are not stored, and their due times by policies; None: those are refused."""
        rows = [row for row in range(len(drawn)) if start + row not in producer.stored]
        dues = self.twin.policies.dues(topic, self._asked_for([drawn[row] for row in rows]), self.twin.now_ms)
        return rows, None if dues is None else dict(zip(rows, dues, strict=True))

    @only(TAKING_BACK)
    @rule(
        topic=TOPICS,
        name=st.sampled_from(("p", "q")),
        specs=st.lists(DUES, min_size=2, max_size=5),
        first=FIRSTS,
        crashes=st.booleans(),
        again=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    )
    def break_a_numbered_batch(
        self, topic: str, name: str, specs: list[Spec], first: int | None, crashes: bool, again: list[int]
    ) -> None:
        """A batch finds no space, or the process dies before it is in the log; its numbers are sent again in others.

        again: of how many messages each batch is that is sent afterwards; single ones go on until all are sent.
        """
        twin = self.twin.topic(topic)
        face, producer = self.store.topic(topic).producer(name), twin.producers.setdefault(name, TwinProducer())
        drawn, _ = self._drawn(topic, specs)
        first, start = producer.numbering(first)
        _, dues = self._wanted(topic, producer, start, drawn)
        if not dues or self.twin.policies.value(topic, "max_pending"):
            return
        target = self._next_copy()

        def crash() -> None:
            copy_store(self.store.path, target)
            raise SimulatedCrash

        self._learn()
        later_ms = self.twin.now_ms + self.config.inline_delay_ms
        with (
            self._logs_made(topic, [due_ms for due_ms in dues.values() if due_ms > later_ms]),
            armed("wal.before", Once(1, crash if crashes else lambda: no_room(self.store))),
            pytest.raises(SimulatedCrash if crashes else StoreFull),
        ):
            face.send_batch(drawn, first_sequence_id=first)
        if crashes:
            self._reopen_after_crash(target)
        self._send_again(topic, name, specs, start, again)

    @contextmanager
    def _logs_made(self, topic: str, dues: Iterable[int]) -> Iterator[None]:
        """Have the logs be there that messages go into, so that the next group is that of the messages."""
        engine, span_ms = self.store._engine, self.config.partition_ms
        partitions, now_ms = engine.storage.partitions, engine.clock.now_ms()
        topic_id = engine.topics.get_or_create(TopicName.parse(topic), now_ms).topic_id
        with ExitStack() as leases:
            for start_ms in {due_ms - due_ms % span_ms for due_ms in dues}:
                partition = partitions.begin_append(start_ms, now_ms, topic_id)
                if partition is not None:
                    leases.callback(partitions.end_appends, [partition])
                    partition.log_to_append(topic_id, partitions.new_ledger)
            yield

    def _send_again(self, topic: str, name: str, specs: Sequence[Spec], start: int, sizes: Sequence[int]) -> None:
        at = 0
        for size in (*sizes, *[1] * len(specs)):
            if at < len(specs):
                self.send_numbered(topic, name, list(specs[at : at + size]), start + at)
                at += size

    def _stored(
        self,
        topic: TwinTopic,
        producer: TwinProducer,
        start: int,
        drawn: Sequence[Message],
        dues: dict[int, int],
        ids: dict[int, MessageId],
    ) -> None:
        """Rows of a batch were stored under these ids."""
        rows = sorted(ids)
        twins = self._twins(
            topic.name,
            [drawn[row] for row in rows],
            [dues[row] for row in rows],
            [ids[row] for row in rows],
            self.twin.now_ms,
        )
        self._sent(topic, twins)
        producer.stored.update((start + row, ids[row]) for row in rows)

    @only(TAKING_BACK)
    @rule(topic=TOPICS, key=KEYS, spec=DUES, hold=HOLDS, replace=st.booleans())
    def send_under_a_key(self, topic: str, key: str, spec: Spec, hold: float | None, replace: bool) -> None:
        """The holder of the key is the answer while it holds; else the message is stored, in place of a pending one."""
        drawn, dues = self._drawn(topic, [spec])
        there = self.twin.topics.get(topic)
        holder, pending = (None, False) if there is None else self._holder(there, key)
        holds = holder is not None and not replace and (pending or self.twin.now_ms < holder.until_ms)
        if dues is None and not holds:
            with pytest.raises(DelayTooLong):
                self._send_keyed(topic, drawn[0], key, hold, replace)
            self._refused(topic, drawn)
            self.twin.topic(topic)
            return
        if not (holds or pending) and dues is not None and self._over_quota(topic, dues):
            with pytest.raises(QuotaExceeded):
                self._send_keyed(topic, drawn[0], key, hold, replace)
            self.twin.topic(topic)
            return
        message_id = self._send_keyed(topic, drawn[0], key, hold, replace)
        if holds:
            assert holder is not None
            assert message_id == holder.message.message_id, "a key that holds answers with its message"
            assert not message_id.stored
            return
        assert message_id.stored
        twin = self.twin.topic(topic)
        assert dues is not None
        if holder is not None and pending:
            self._taken_back(twin, holder)
        (message,) = self._twins(topic, drawn, dues, [message_id], self.twin.now_ms)
        self._stored_under(twin, key, message, hold, self.twin.now_ms)

    def _send_keyed(self, topic: str, one: Message, key: str, hold: float | None, replace: bool) -> MessageId:
        return self.store.topic(topic).send(
            one.payload,
            deliver_at=one.deliver_at,
            key=one.key,
            dedup_key=key,
            dedup_for=hold,
            replace=replace,
            ttl=one.ttl,
        )

    def _holder(self, topic: TwinTopic, key: str) -> tuple[TwinKey | None, bool]:
        """The message of a key, and whether it is pending; one that was cancelled is none."""
        holder = topic.keys.get(key)
        if holder is None or holder.message.cancelled:
            return None, False
        self._learn()
        return holder, outcome(self.twin, topic, holder.message.message_id) is Outcome.CANCELLED

    def _taken_back(self, topic: TwinTopic, holder: TwinKey) -> None:
        assert cancel(self.twin, topic, [holder.message.message_id]) == [Outcome.CANCELLED]
        self.twin.count(CANCELLED, 1, topic.name)

    def _stored_under(self, topic: TwinTopic, key: str, message: TwinMessage, hold: float | None, now_ms: int) -> None:
        """At `now_ms`; it never waits inline."""
        part = self.twin.partitions.get(message.due_ms - message.due_ms % self.config.partition_ms)
        if message.due_ms > now_ms and not (part is not None and part.closed):
            self.twin.add_delayed(topic, message)
        else:
            self.twin.add_direct(topic, message)
        self.ids.append((topic.name, message.message_id))
        topic.keys[key] = TwinKey(message, 0 if hold is None else now_ms + round(hold * 1_000))

    @only(TAKING_BACK)
    @rule(topic=TOPICS, key=KEYS)
    def cancel_by_key(self, topic: str, key: str) -> None:
        twin, face = self.twin.topics.get(topic), self.store.topic(topic)
        if twin is None:
            with pytest.raises(UnknownTopic):
                face.cancel_key(key)
            return
        holder, pending = self._holder(twin, key)
        assert face.cancel_key(key) == pending
        if holder is not None and pending:
            self._taken_back(twin, holder)

    @only(TAKING_BACK)
    @rule(topic=TOPICS, by_prefix=st.booleans())
    def cancel_by_keys(self, topic: str, by_prefix: bool) -> None:
        twin, face = self.twin.topics.get(topic), self.store.topic(topic)
        if twin is not None:
            holders = {key: self._holder(twin, key) for key in sorted(twin.keys)}
            expected = [key for key, (_, pending) in holders.items() if pending]
            assert (face.cancel_keys(prefix="") if by_prefix else face.cancel_keys(holders)) == expected
            for key in expected:
                self._taken_back(twin, present(holders[key][0]))

    @only(TAKING_BACK)
    @rule(topic=TOPICS, key=KEYS)
    def find_by_key(self, topic: str, key: str) -> None:
        twin = self.twin.topics.get(topic)
        if twin is not None:
            holder, pending = self._holder(twin, key)
            found = self.store.topic(topic).find(key)
            assert (found is not None) == pending
            assert found is None or holder is not None
            if found is not None and holder is not None:
                expected = holder.message
                assert (found.message_id, found.due_ms) == (expected.message_id, expected.due_ms)
                assert int(found.payload) == expected.number

    @only(TAKING_BACK)
    @rule(topic=TOPICS, key=KEYS, spec=DUES, hold=HOLDS, replace=st.booleans(), stored=st.booleans())
    def crash_amid_a_send_under_a_key(
        self, topic: str, key: str, spec: Spec, hold: float | None, replace: bool, stored: bool
    ) -> None:
        """The process dies before the group is on disk, or after it: key and message are there, or neither is."""
        there = self.twin.topics.get(topic)
        if there is None or self._holder(there, key)[1]:
            return  # nothing is pending: the message goes by the write-ahead log
        holder = self._holder(there, key)[0]
        drawn, dues = self._drawn(topic, [spec])
        if dues is None or (holder is not None and not replace and self.twin.now_ms < holder.until_ms):
            return
        due_ms = dues[0]
        part = self.twin.partitions.get(due_ms - due_ms % self.config.partition_ms)
        limited = self.twin.policies.value(topic, "max_pending")
        if due_ms <= self.twin.now_ms or limited or (part is not None and part.closed):
            return
        target = self._next_copy()
        now_ms = self.twin.now_ms  # what has fired early may make it later when the store is opened

        def crash() -> None:
            copy_store(self.store.path, target)
            raise SimulatedCrash

        self._learn()
        with (
            self._logs_made(topic, [due_ms]),
            armed("wal.after" if stored else "wal.before", Once(1, crash)),
            pytest.raises(SimulatedCrash),
        ):
            self._send_keyed(topic, drawn[0], key, hold, replace)
        nothing = MessageId(-1, -1)
        messages = self._twins(topic, drawn, dues, [nothing], self.twin.now_ms) if stored else []
        self._reopen_after_crash(target)
        for message in messages:
            found = self.store.topic(topic).find(key)
            assert found is not None, "the message is there, and its key is not"
            message.message_id = found.message_id
            self._stored_under(there, key, message, hold, now_ms)
        self.find_by_key(topic, key)

    def _asked(self, topic: str, picks: Sequence[int]) -> tuple[TwinTopic, list[MessageId]] | None:
        """Ids of the topic, or of another now and then; None where the topic is unknown, which is said."""
        mine = [message_id for name, message_id in self.ids if name == topic]
        if not mine:
            mine = [MessageId(1_000_000, 0), *(message_id for _, message_id in self.ids)]
        ids = [pick(mine, -1 - number) if number % 20 else pick(self.ids, number)[1] for number in picks]
        twin = self.twin.topics.get(topic)
        if twin is None:
            with pytest.raises(UnknownTopic):
                self.store.topic(topic).cancel_batch(ids)
            return None
        self._learn()
        return twin, ids

    @only(TAKING_BACK)
    @precondition(lambda self: self.ids)
    @rule(topic=TOPICS, picks=PICKS)
    def cancel(self, topic: str, picks: list[int]) -> None:
        asked = self._asked(topic, picks)
        if asked is None:
            return
        twin, ids = asked
        face = self.store.topic(topic)
        if len(ids) == 1:
            expected = outcome(self.twin, twin, ids[0])
            assert face.cancel(ids[0]) == (expected in (Outcome.CANCELLED, Outcome.ALREADY_CANCELLED))
            self._cancelled(twin, ids)
        else:
            assert face.cancel_batch(ids) == self._cancelled(twin, ids)

    def _cancelled(self, topic: TwinTopic, ids: Sequence[MessageId]) -> list[Outcome]:
        outcomes = cancel(self.twin, topic, ids)
        self.twin.count(CANCELLED, outcomes.count(Outcome.CANCELLED), topic.name)
        return outcomes

    @only(TAKING_BACK)
    @precondition(lambda self: self.ids)
    @rule(topic=TOPICS, number=PICK)
    def ask(self, topic: str, number: int) -> None:
        asked = self._asked(topic, [number])
        if asked is not None:
            twin, (message_id,) = asked
            waits = any(message.message_id == message_id for message in twin.waiting(self.twin.now_ms))
            expected = "scheduled" if waits else STATES[outcome(self.twin, twin, message_id)]
            assert self.store.topic(topic).state(message_id) == expected

    @only(TAKING_BACK)
    @precondition(lambda self: self.ids)
    @rule(topic=TOPICS, picks=PICKS, count=st.integers(1, 3), move=st.booleans())
    def take_back_on_a_full_disk(self, topic: str, picks: list[int], count: int, move: bool) -> None:
        """A request that raises has taken nothing back."""
        asked = self._asked(topic, picks)
        if asked is None:
            return
        twin, ids = asked
        face, due_ms = self.store.topic(topic), self.twin.now_ms + 50
        dues = self.twin.policies.dues(topic, [due_ms], self.twin.now_ms)
        if move and dues is None:
            return
        try:
            with full_disk(self.store._engine, count):
                done = face.reschedule_batch(ids, deliver_at=due_ms) if move else face.cancel_batch(ids)
        except StoreFull:
            self._adopt_left_over()
            return
        if not move:
            assert done == self._cancelled(twin, ids)
        else:
            assert dues is not None
            new_ids = [new for new in done if not isinstance(new, Outcome)]
            self._moved(twin, ids, dues[0], new_ids, due_ms)

    @only(TAKING_BACK)
    @precondition(lambda self: self.ids)
    @rule(topic=TOPICS, picks=PICKS, spec=DUES)
    def reschedule(self, topic: str, picks: list[int], spec: Spec) -> None:
        found = self._asked(topic, picks)
        if found is None:
            return
        twin, ids = found
        face, now_ms, wanted_ms = self.store.topic(topic), self.twin.now_ms, self._due_ms(spec)
        asked_ms = now_ms if wanted_ms is None else wanted_ms
        dues = self.twin.policies.dues(topic, [asked_ms] * len(ids), now_ms)
        if dues is None:
            with pytest.raises(DelayTooLong):
                face.reschedule_batch(ids, deliver_at=wanted_ms)
            self.twin.count(REJECTED, self.twin.policies.too_long(topic, [asked_ms] * len(ids), now_ms), topic)
            return
        if len(ids) == 1:
            new_ids = [face.reschedule(ids[0], deliver_at=wanted_ms)]
        else:
            new_ids = face.reschedule_batch(ids, deliver_at=wanted_ms)
        self._moved(twin, ids, dues[0], new_ids, asked_ms)

    @only(TAKING_BACK)
    @precondition(lambda self: self.ids)
    @rule(topic=TOPICS, number=PICK)
    def fire_now(self, topic: str, number: int) -> None:
        asked = self._asked(topic, [number])
        if asked is not None:
            twin, ids = asked
            now_ms = self.twin.now_ms
            self._moved(twin, ids, now_ms, [self.store.topic(topic).fire_now(ids[0])], now_ms)

    def _moved(
        self,
        topic: TwinTopic,
        ids: Sequence[MessageId],
        due_ms: int,
        new_ids: Sequence[MessageId | None],
        asked_ms: int,
    ) -> None:
        """Messages were rescheduled to `due_ms`; `asked_ms` was asked for, which a fixed delay may have replaced."""
        moved = reschedule(self.twin, topic, ids, due_ms)
        answers: dict[int, MessageId] = {}
        for row, message in moved.appended:
            self._add_delayed(topic, message)
            answers[row] = message.message_id
        for _, message in moved.direct:
            topic.append(message, self.twin.now_ms)
        self._learn()
        for at, (row, message) in enumerate(moved.direct):
            message.message_id = answers[row] = topic.position(len(topic.main) - len(moved.direct) + at)
        moved_to = {ids[row]: message for row, message in (*moved.appended, *moved.direct) if row in answers}
        for holder in topic.keys.values():
            holder.message = moved_to.get(holder.message.message_id, holder.message)
        assert list(new_ids) == [answers.get(row) for row in range(len(ids))]
        self.ids += [(topic.name, message_id) for message_id in answers.values()]
        self.twin.count(RESCHEDULED, len(answers), topic.name)
        overridden = self.twin.policies.overridden(topic.name, [asked_ms] * len(answers), self.twin.now_ms)
        self.twin.count(OVERRIDDEN, overridden, topic.name)

    def _cancel_waiting(self, topic: TwinTopic, schedule: TwinSchedule) -> None:
        if schedule.next_id is not None:
            cancel(self.twin, topic, [schedule.next_id])

    @only(TAKING_BACK)
    @rule(topic=TOPICS, name=SCHEDULES, seconds=st.sampled_from((1, 1, 3)))
    def every(self, topic: str, name: str, seconds: int) -> None:
        """The same again changes nothing; another interval replaces what there was."""
        twin, number = self.twin.topic(topic), NUMBERS[name]
        made = self.store.topic(topic).every(
            name, interval=seconds, payload=b"%0*d" % (PAYLOAD, number), key=key_of(number)
        )
        self._learn()
        found = twin.schedules.get(name)
        if found is None or found.interval_ms != seconds * 1_000:
            if found is not None:
                self._cancel_waiting(twin, found)
            twin.schedules[name] = TwinSchedule(number, seconds * 1_000)
            self._occurrence(twin, name, self.twin.now_ms + seconds * 1_000, made.next_id)
        self._same_schedules(twin)

    @only(TAKING_BACK)
    @precondition(lambda self: any(topic.schedules for topic in self.twin.topics.values()))
    @rule(topic=TOPICS, name=SCHEDULES, what=st.sampled_from(("pause", "resume", "remove")))
    def change_a_schedule(self, topic: str, name: str, what: str) -> None:
        face, twin = self.store.topic(topic), self.twin.topics.get(topic)
        if twin is None:
            with pytest.raises(UnknownTopic):
                face.remove_schedule(name)
            return
        self._learn()
        schedule = twin.schedules.get(name)
        if what == "remove":
            assert face.remove_schedule(name) == (schedule is not None)
            if schedule is not None:
                self._cancel_waiting(twin, twin.schedules.pop(name))
        elif what == "pause":
            assert (face.pause_schedule(name) is not None) == (schedule is not None)
            if schedule is not None and not schedule.paused:
                self._cancel_waiting(twin, schedule)
                schedule.next_due_ms = schedule.next_id = None
        else:
            found = face.resume_schedule(name)
            assert (found is not None) == (schedule is not None)
            if schedule is not None and schedule.paused:
                assert found is not None
                self._occurrence(twin, name, self.twin.now_ms + schedule.interval_ms, found.next_id)
        self._same_schedules(twin)

    def _same_schedules(self, topic: TwinTopic) -> None:
        found = [
            (schedule.name, schedule.interval_ms, schedule.next_due_ms, schedule.next_id, schedule.paused)
            for schedule in self.store.topic(topic.name).schedules()
        ]
        assert found == [
            (name, schedule.interval_ms, schedule.next_due_ms, schedule.next_id, schedule.paused)
            for name, schedule in sorted(topic.schedules.items())
        ]
