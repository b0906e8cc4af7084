"""Rules: messages are sent under deduplication keys, replaced, found and cancelled by them; crashes come in between."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from duelog import Message, MessageId, Outcome
from duelog.errors import DelayTooLong, QuotaExceeded, UnknownTopic
from duelog.metrics import CANCELLED

from .drawing import DUES, TAKING_BACK, TOPICS, Spec, only
from .driver import Once, SimulatedCrash, armed, copy_store
from .rules_restarts import RestartRules
from .twin_topic import TwinKey, TwinMessage, TwinTopic
from .twin_withdrawal import cancel, outcome

KEYS = st.sampled_from(("k", "l"))
HOLDS = st.sampled_from((None, 0.005, 0.3))


class KeyRules(RestartRules):
    """Whatever is done by a key. The twin has of each topic the message that each key is of."""

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
            return
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
        with armed("wal.after" if stored else "wal.before", Once(1, crash)), pytest.raises(SimulatedCrash):
            self._send_keyed(topic, drawn[0], key, hold, replace)
        self.twin.add_partition(due_ms)  # it is there, and nothing may be in it
        nothing = MessageId(-1, -1)
        messages = self._twins(topic, drawn, dues, [nothing], self.twin.now_ms) if stored else []
        self._reopen_after_crash(target)
        for message in messages:
            found = self.store.topic(topic).find(key)
            assert found is not None, "the message is there, and its key is not"
            message.message_id = found.message_id
            self._stored_under(there, key, message, hold, now_ms)
        self.find_by_key(topic, key)
