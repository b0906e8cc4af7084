"""Rules: messages are cancelled, rescheduled, fired now, and asked about; the answers are the twin's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from duelog import MessageId, Outcome
from duelog.errors import DelayTooLong, StoreFull, UnknownTopic
from duelog.metrics import CANCELLED, OVERRIDDEN, REJECTED, RESCHEDULED

from .drawing import DUES, PICK, PICKS, TAKING_BACK, TOPICS, Spec, only, pick
from .driver import full_disk
from .machine import Machine
from .twin_topic import TwinTopic
from .twin_withdrawal import cancel, outcome, reschedule

STATES = {
    Outcome.CANCELLED: "scheduled",
    Outcome.ALREADY_CANCELLED: "cancelled",
    Outcome.FIRED: "fired",
    Outcome.UNKNOWN: "unknown",
}


class WithdrawalRules(Machine):
    """Whatever takes a message back."""

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
            self.creation_failed = True
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
            if not message.unadmitted:
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
