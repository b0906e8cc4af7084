"""Rules: subscriptions go to another place, are paused and removed; topics are deleted."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from duelog.errors import ConsumerBusy, UnknownSubscription, UnknownTopic
from duelog.metrics import PARTITIONS_DELETED

from .drawing import HANDING_OUT, INLINE_DELAYS, NAMES, PICK, STORING, TOPICS, only, pick, received_something
from .machine import Machine
from .stage import Consumer
from .twin_topic import TwinTopic


class SeekingRules(Machine):
    """Whatever is done to subscriptions and topics as a whole."""

    @only(HANDING_OUT, INLINE_DELAYS)
    @precondition(lambda self: self.consumers)
    @rule(which=PICK, to=st.sampled_from(("earliest", "latest")))
    def seek_to_an_end(self, which: int, to: str) -> None:
        consumer = pick(self.consumers, which)
        consumer.face.seek(to)
        topic = consumer.topic
        self._sought(consumer, topic.first if to == "earliest" else topic.latest(self.twin.now_ms))

    @only(HANDING_OUT, INLINE_DELAYS)
    @precondition(received_something)
    @rule(which=PICK, number=PICK)
    def seek_to_a_message(self, which: int, number: int) -> None:
        consumer = self._given(which)
        place, _, message = pick(consumer.received, number)
        consumer.face.seek(message)
        self._sought(consumer, place)

    @only(HANDING_OUT, INLINE_DELAYS)
    @precondition(lambda self: self.consumers)
    @rule(which=PICK, number=PICK, offset_ms=st.integers(-1, 1))
    def seek_to_a_time(self, which: int, number: int, offset_ms: int) -> None:
        """The first message, in log order, that was due then or later."""
        consumer = pick(self.consumers, which)
        topic = consumer.topic
        base_ms = pick(topic.main, number).due_ms if topic.main else self.twin.now_ms
        time_ms = max(base_ms + offset_ms, 0)
        consumer.face.seek(time_ms)
        places = range(topic.first, len(topic.main))
        self._sought(
            consumer, next((place for place in places if topic.main[place].due_ms >= time_ms), len(topic.main))
        )

    def _sought(self, consumer: Consumer, place: int) -> None:
        """A subscription goes to a place, but not past what is not to be read yet."""
        topic, now_ms = consumer.topic, self.twin.now_ms
        consumer.twin.begin_at(max(min(place, topic.latest(now_ms)), topic.first), topic.first, now_ms)
        self.twin.flush()

    @only(HANDING_OUT)
    @precondition(lambda self: self.consumers)
    @rule(which=PICK, paused=st.booleans())
    def pause_or_resume(self, which: int, paused: bool) -> None:
        consumer = pick(self.consumers, which)
        if paused:
            consumer.face.pause()
        else:
            consumer.face.resume()
        consumer.twin.paused = paused
        assert consumer.face.paused == paused

    @only(STORING)
    @precondition(lambda self: any(topic.subscriptions for topic in self.twin.topics.values()))
    @rule(topic=TOPICS, name=NAMES)
    def unsubscribe(self, topic: str, name: str) -> None:
        twin, face = self.twin.topics.get(topic), self.store.topic(topic)
        if twin is None or name not in twin.subscriptions:
            with pytest.raises(UnknownTopic if twin is None else UnknownSubscription):
                face.unsubscribe(name)
        elif twin.subscriptions[name].consumers:
            with pytest.raises(ConsumerBusy):
                face.unsubscribe(name)
        else:
            face.unsubscribe(name)
            del twin.subscriptions[name]
            self.twin.policies.forget(topic, name)

    @only(STORING)
    @precondition(lambda self: self.messages)
    @rule(topic=TOPICS)
    def delete_topic(self, topic: str) -> None:
        twin = self.twin.topics.pop(topic, None)
        if twin is None:
            with pytest.raises(UnknownTopic):
                self.store.delete_topic(topic)
            return
        self.store.delete_topic(topic)
        self.twin.policies.forget(topic)
        self._forget(twin)

    def _forget(self, topic: TwinTopic) -> None:
        doomed = {part.start_ms for part in self.twin.partitions.values() if not part.references}
        topic.deleted = True
        # What a crash left for the next tick is the next tick's.
        self.twin.count(PARTITIONS_DELETED, self.twin.release(doomed))
        for consumer in [consumer for consumer in self.consumers if consumer.topic is topic]:
            with pytest.raises(UnknownSubscription):
                consumer.face.receive()
            consumer.face.close()
            self.consumers.remove(consumer)
