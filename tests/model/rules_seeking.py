"""Rules: subscriptions go to another place, are paused and removed; topics are deleted."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from duelog import PublishedAt, SubscriptionAdmin
from duelog.errors import ConsumerBusy, UnknownSubscription, UnknownTopic
from duelog.metrics import PARTITIONS_DELETED

from .drawing import HANDING_OUT, INLINE_DELAYS, NAMES, PICK, STORING, TOPICS, only, pick, received_something
from .machine import Machine
from .stage import Consumer
from .twin_subscription import TwinSubscription
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

    @only(HANDING_OUT, INLINE_DELAYS)
    @precondition(lambda self: self.consumers and not self.ever_back)
    @rule(which=PICK, number=PICK, offset_ms=st.integers(-1, 1))
    def seek_to_a_publish_time(self, which: int, number: int, offset_ms: int) -> None:
        """The first message, in log order, that was published then or later and may be read.

        Not where a ledger may have been closed, by the clock, before what is in it was published.
        """
        consumer = pick(self.consumers, which)
        topic = consumer.topic
        base_ms = pick(topic.main, number).publish_ms if topic.main else self.twin.now_ms
        time_ms = max(base_ms + offset_ms, 0)
        consumer.face.seek(PublishedAt(time_ms))
        found = [place for place in self._readable(topic) if topic.main[place].publish_ms >= time_ms]
        self._sought(consumer, min(found, default=len(topic.main)))

    def _readable(self, topic: TwinTopic) -> list[int]:
        """Places of what may be read now, acknowledged or not."""
        now_ms = self.twin.now_ms
        places = range(topic.first, topic.latest(now_ms))
        return [place for place in places if not topic.main[place].waits or topic.main[place].due_ms <= now_ms]

    # -- from outside ------------------------------------------------------------------------------------

    def _administered(self, topic: str, name: str) -> tuple[TwinTopic, TwinSubscription, SubscriptionAdmin] | None:
        """A subscription, where there is one of this name; ledgers are learned."""
        twin = self.twin.topics.get(topic)
        if twin is None or name not in twin.subscriptions:
            with pytest.raises(UnknownTopic if twin is None else UnknownSubscription):
                self.store.topic(topic).subscription(name)
            return None
        self._learn()
        return twin, twin.subscriptions[name], self.store.topic(topic).subscription(name)

    @only(HANDING_OUT, INLINE_DELAYS)
    @precondition(lambda self: any(topic.subscriptions for topic in self.twin.topics.values()))
    @rule(topic=TOPICS, name=NAMES, count=st.integers(1, 5), skip=st.booleans())
    def peek_or_skip(self, topic: str, name: str, count: int, skip: bool) -> None:
        found = self._administered(topic, name)
        if found is None:
            return
        twin, sub, admin = found
        places = [place for place in self._readable(twin) if not sub.is_acked(place)]
        places = [place for place in places if twin.gives(place, sub, self.twin.now_ms)][:count]
        if skip:
            assert admin.skip(count) == len(places)
            self._acknowledged(twin, sub, places)
        else:
            assert [message.position for message in admin.peek(count)] == [twin.position(place) for place in places]

    @only(HANDING_OUT, INLINE_DELAYS)
    @precondition(lambda self: any(topic.main and topic.subscriptions for topic in self.twin.topics.values()))
    @rule(topic=TOPICS, name=NAMES, number=PICK, offset_ms=st.integers(0, 1))
    def expire(self, topic: str, name: str, number: int, offset_ms: int) -> None:
        """Whatever was due before a time, wherever it lies and whoever holds it."""
        found = self._administered(topic, name)
        if found is None or not found[0].main:
            return
        twin, sub, admin = found
        before_ms = pick(twin.main, number).due_ms + offset_ms
        places = range(twin.first, len(twin.main))
        places_due = [place for place in places if twin.main[place].due_ms < before_ms and not sub.is_acked(place)]
        assert admin.expire(before_ms) == len(places_due)
        self._acknowledged(twin, sub, places_due)

    def _acknowledged(self, topic: TwinTopic, sub: TwinSubscription, places: list[int]) -> None:
        """From outside, durably."""
        sub.ack(places)
        self.twin.flush()

    @only(HANDING_OUT, INLINE_DELAYS)
    @precondition(lambda self: any(topic.subscriptions for topic in self.twin.topics.values()))
    @rule(topic=TOPICS, name=NAMES, to=st.sampled_from(("earliest", "latest")))
    def reset(self, topic: str, name: str, to: str) -> None:
        found = self._administered(topic, name)
        if found is None:
            return
        twin, sub, admin = found
        if sub.consumers:
            with pytest.raises(ConsumerBusy):
                admin.reset(to)
            return
        admin.reset(to)
        now_ms = self.twin.now_ms
        place = twin.first if to == "earliest" else twin.latest(now_ms)
        sub.begin_at(max(place, twin.first), twin.first, now_ms)
        self.twin.flush()

    def _sought(self, consumer: Consumer, place: int) -> None:
        """A subscription goes to a place, but not past what is not to be read yet."""
        topic, now_ms = consumer.topic, self.twin.now_ms
        consumer.twin.begin_at(max(min(place, topic.latest(now_ms)), topic.first), topic.first, now_ms)
        self.twin.flush()

    @only(HANDING_OUT)
    @precondition(lambda self: self.consumers)
    @rule(which=PICK, ms=st.sampled_from((None, 0, 0, 1, 40)))
    def pause_or_resume(self, which: int, ms: int | None) -> None:
        """None: it is paused for ever; 0: it is resumed; else it is paused for so long."""
        consumer, now_ms = pick(self.consumers, which), self.twin.now_ms
        if ms == 0:
            consumer.face.resume()
        else:
            consumer.face.pause(None if ms is None else now_ms + ms)
        consumer.twin.paused_until_ms = 2**63 if ms is None else ms and now_ms + ms
        stats = consumer.face.stats()
        until_ms = now_ms + ms if ms else None
        assert (consumer.face.paused, stats.paused, stats.paused_until_ms) == (ms != 0, ms != 0, until_ms)

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
