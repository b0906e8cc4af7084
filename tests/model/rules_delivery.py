"""Rules: consumers of every type come, receive, acknowledge, give back, postpone, seek, pause and go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from duelog import MessageId, ReceivedMessage
from duelog.dispatcher import SubscriptionType
from duelog.errors import ConsumerBusy, DelayTooLong, InvalidArgument, UnknownSubscription, UnknownTopic

from .drawing import HANDING_OUT, INLINE_DELAYS, KINDS, NAMES, PICK, PICKS, STORING, TAKING_BACK, TOPICS, only, pick
from .driver import PAYLOAD
from .machine import Consumer, Item, Machine
from .twin import TwinMessage, TwinTopic
from .twin_subscription import TwinSubscription

Settle = Callable[[list[ReceivedMessage]], list[ReceivedMessage]]


def received_something(machine: Machine) -> bool:
    """Whether there is a consumer that was ever given a message."""
    return any(consumer.received for consumer in machine.consumers)


class DeliveryRules(Machine):
    """Whatever consumers do."""

    @only(STORING, HANDING_OUT, INLINE_DELAYS)
    @rule(topic=TOPICS, name=NAMES, kind=KINDS, initial=st.sampled_from(("earliest", "latest")))
    def subscribe(self, topic: str, name: str, kind: SubscriptionType, initial: str) -> None:
        self._subscribe(self._topic(topic), name, kind, initial)

    @only(STORING, HANDING_OUT, INLINE_DELAYS)
    @precondition(lambda self: any(consumer.twin.kind != "exclusive" for consumer in self.consumers))
    @rule(which=PICK)
    def join(self, which: int) -> None:
        """One more consumer beside another."""
        consumer = pick([consumer for consumer in self.consumers if consumer.twin.kind != "exclusive"], which)
        self._subscribe(consumer.topic.name, consumer.twin.name, consumer.face.type, "earliest")

    def _subscribe(self, topic: str, name: str, kind: SubscriptionType, initial: str) -> None:
        twin = self.twin.topic(topic)
        sub = twin.subscriptions.get(name)
        if sub is None:
            start = twin.first if initial == "earliest" else twin.latest(self.twin.now_ms)
            sub = twin.subscriptions[name] = TwinSubscription(name, start, twin.main, self.config.ack_timeout_ms)
        if not sub.admits(kind):
            with pytest.raises(ConsumerBusy):
                self.store.topic(topic).subscribe(name, type=kind, initial_position=initial)
            return
        face = self.store.topic(topic).subscribe(name, type=kind, initial_position=initial)
        consumer = Consumer(face, twin, sub, face._consumer)
        sub.attach(kind, consumer.number)
        settle = functools.partial(self._settle, consumer, face._settle)
        face._settle = settle  # type: ignore[method-assign]
        self.consumers.append(consumer)

    @only(STORING, HANDING_OUT, INLINE_DELAYS)
    @precondition(lambda self: self.consumers)
    @rule(which=PICK)
    def leave(self, which: int) -> None:
        consumer = self.consumers.pop(which % len(self.consumers))
        consumer.face.close()
        consumer.twin.detach(consumer.number, self.twin.now_ms)

    # -- receiving -------------------------------------------------------------------------------------

    @precondition(lambda self: self.consumers)
    @rule(which=PICK, count=st.integers(1, 4) | st.just(100))
    def receive(self, which: int, count: int) -> None:
        self._receive(pick(self.consumers, which), count)

    @only(HANDING_OUT, INLINE_DELAYS, TAKING_BACK)
    @precondition(lambda self: self.consumers)
    @rule(which=PICK, ms=st.integers(0, 10) | st.integers(0, 400), counts=st.lists(st.integers(1, 4), min_size=1))
    def receive_later(self, which: int, ms: int, counts: list[int]) -> None:
        """Time goes on, and consumers take turns."""
        self._forward(ms)
        for at, count in enumerate(counts):
            self._receive(pick(self.consumers, which + at), count)

    def _receive(self, consumer: Consumer, count: int) -> list[Item]:
        self.asked = count
        batch = consumer.face.receive(count)
        assert all(message.due_ms <= self.shown_ms for message in batch), "early"
        if not batch:
            self._learn()
            assert not self._taken(consumer), "there is something, and it is not handed out"
            return []
        return consumer.received[-len(batch) :]

    def _taken(self, consumer: Consumer) -> list[Item]:
        """What the twin hands out now."""
        topic, sub, items = consumer.topic, consumer.twin, []
        for place, times in sub.receive(consumer.number, self.asked, self.twin.now_ms):
            message, position = topic.main[place], topic.position(place)
            expected = ReceivedMessage(
                b"%0*d" % (PAYLOAD, message.number),
                message.key,
                {},
                message.message_id,
                position,
                message.due_ms,
                message.publish_ms,
                times,
                consumer.face.topic,
                sub.name,
                message.retries,
                message.addressee,
            )
            items.append((place, position, expected))
        if sub.tracks:
            self.twin.mark_ms = max(self.twin.mark_ms, self.twin.now_ms)
        return items

    def _settle(self, consumer: Consumer, settle: Settle, batch: list[ReceivedMessage]) -> list[ReceivedMessage]:
        """Stands in for what becomes of a batch that was handed out: some is not for the consumer, some is dead."""
        self._learn()
        items, limit = self._taken(consumer), self.config.max_redeliveries
        assert batch == [message for _, _, message in items]
        wanted: list[Item] = []
        dead: list[Item] = []
        foreign: list[Item] = []
        for item in items:
            message = item[2]
            if message.addressee not in (None, consumer.twin.name):
                foreign.append(item)
            elif limit is not None and message.redelivery_count + message.retries > limit:
                dead.append(item)
            else:
                wanted.append(item)
        result = settle(batch)
        assert result == [message for _, _, message in wanted]
        if dead:
            self._bury(consumer, dead)
        if dead or foreign:
            self._acked(consumer, consumer.twin.ack([place for place, _, _ in (*dead, *foreign)]), False)
        consumer.received.extend(wanted)
        return result

    def _bury(self, consumer: Consumer, dead: Sequence[Item]) -> None:
        grave = self.twin.topic(f"{consumer.topic.name}-{consumer.twin.name}-DLQ")
        now_ms = self.twin.now_ms
        letters = [TwinMessage(int(item[2].payload), now_ms, now_ms, item[1]) for item in dead]
        for letter in letters:
            grave.append(letter, now_ms)
        self._learn()
        for at, letter in enumerate(letters):
            letter.message_id = grave.position(len(grave.main) - len(letters) + at)
        face = self.store.topic(grave.name)
        for letter, (_, _, message) in zip(letters, dead, strict=True):
            there = face.get(letter.message_id)
            assert there is not None
            assert (there.payload, there.key) == (message.payload, message.key)
            assert there.properties["ORIGIN_MESSAGE_ID"] == str(message.message_id)

    # -- acknowledging -----------------------------------------------------------------------------------

    @only(STORING, HANDING_OUT, INLINE_DELAYS)
    @precondition(received_something)
    @rule(which=PICK, picks=PICKS, durable=st.booleans())
    def ack(self, which: int, picks: list[int], durable: bool) -> None:
        """Anything that some consumer of the subscription was ever given, wherever it is now."""
        consumer = pick([consumer for consumer in self.consumers if consumer.received], which)
        self._ack(consumer, [pick(consumer.received, number) for number in picks], durable)

    @precondition(received_something)
    @rule(which=PICK, durable=st.booleans())
    def ack_all_received(self, which: int, durable: bool) -> None:
        consumer = pick([consumer for consumer in self.consumers if consumer.received], which)
        self._ack(consumer, consumer.received, durable)

    @only(STORING, HANDING_OUT, INLINE_DELAYS)
    @precondition(lambda self: any(consumer.topic.main for consumer in self.consumers))
    @rule(which=PICK, picks=PICKS)
    def ack_what_nobody_was_given(self, which: int, picks: list[int]) -> None:
        consumer = pick(self.consumers, which)
        topic = consumer.topic
        self._learn()
        if kept := range(topic.first, len(topic.main)):
            places = [pick(kept, number) for number in picks]
            self._ack_places(consumer, places, [topic.position(place) for place in places], False)

    def _ack(self, consumer: Consumer, items: Sequence[Item], durable: bool) -> None:
        self._ack_places(consumer, [place for place, _, _ in items], [position for _, position, _ in items], durable)

    def _ack_places(
        self, consumer: Consumer, places: Sequence[int], positions: Sequence[MessageId], durable: bool
    ) -> None:
        count = consumer.face.ack(positions[0] if len(positions) == 1 else positions, durable=durable)
        assert count == consumer.twin.ack(places)
        self._acked(consumer, count, durable)

    @only(STORING, HANDING_OUT)
    @precondition(received_something)
    @rule(which=PICK, last=PICK, durable=st.booleans())
    def ack_cumulative(self, which: int, last: int, durable: bool) -> None:
        consumer = pick([consumer for consumer in self.consumers if consumer.received], which)
        place, position, _ = pick(consumer.received, last)
        if consumer.twin.kind in ("shared", "key_shared"):
            with pytest.raises(InvalidArgument):
                consumer.face.ack_cumulative(position)
            return
        count = consumer.face.ack_cumulative(position, durable=durable)
        assert count == consumer.twin.ack_cumulative(place)
        self._acked(consumer, count, durable)

    def _acked(self, consumer: Consumer, count: int, durable: bool) -> None:
        now_ms, sub = self.twin.now_ms, consumer.twin
        if count:
            topic = consumer.topic
            topic.unflushed_until_ms = max(topic.unflushed_until_ms, now_ms + self.config.ack_flush_ms)
            if sub.unflushed_since_ms is None:
                sub.unflushed_since_ms = now_ms
            if not self.config.ack_flush_ms:
                self.twin.flush()
        if durable:
            self.twin.flush()

    @only(STORING)
    @precondition(lambda self: self.consumers)
    @rule(which=PICK)
    def ack_what_does_not_exist(self, which: int) -> None:
        consumer = pick(self.consumers, which)
        end = self._state(consumer.topic).log.end
        with pytest.raises(InvalidArgument):
            consumer.face.ack([*(position for _, position, _ in consumer.received), end])

    # -- giving back -------------------------------------------------------------------------------------

    @only(STORING, HANDING_OUT)
    @precondition(received_something)
    @rule(which=PICK, picks=PICKS, ms=st.sampled_from((0, 1, 20, 300)))
    def nack(self, which: int, picks: list[int], ms: int) -> None:
        consumer = pick([consumer for consumer in self.consumers if consumer.received], which)
        self._nack(consumer, [pick(consumer.received, number) for number in picks], ms)

    def _nack(self, consumer: Consumer, items: Sequence[Item], ms: int) -> None:
        count = consumer.face.nack([position for _, position, _ in items], delay=ms / 1000)
        until_ms = self.twin.now_ms + ms
        assert count == consumer.twin.nack(consumer.number, dict.fromkeys([place for place, _, _ in items], until_ms))

    @only(HANDING_OUT)
    @precondition(received_something)
    @rule(which=PICK, picks=PICKS)
    def nack_with_backoff(self, which: int, picks: list[int]) -> None:
        """Twice as long each time, up to the most; by the message, so that an old one counts what it counted then."""
        consumer = pick([consumer for consumer in self.consumers if consumer.received], which)
        items = {place: message for place, _, message in (pick(consumer.received, number) for number in picks)}
        config, until_ms = self.config, {}
        for place, message in items.items():
            wait_ms = min(config.nack_backoff_ms * 2**message.redelivery_count, config.nack_backoff_max_ms)
            until_ms[place] = self.twin.now_ms + wait_ms
        assert consumer.face.nack(list(items.values())) == consumer.twin.nack(consumer.number, until_ms)

    @only(HANDING_OUT)
    @precondition(received_something)
    @rule(which=PICK, number=PICK, ms=st.sampled_from((0, 5, 50, 300)))
    def retry_later(self, which: int, number: int, ms: int) -> None:
        consumer = pick([consumer for consumer in self.consumers if consumer.received], which)
        place, _, message = pick(consumer.received, number)
        now_ms = self.twin.now_ms
        dues = self.twin.policies.dues(consumer.topic.name, [now_ms + ms], now_ms, retry=True)
        if dues is None:
            with pytest.raises(DelayTooLong):
                consumer.face.retry_later(message, ms / 1000)
            return
        new_id = consumer.face.retry_later(message, ms / 1000)
        now_ms = self.twin.now_ms
        new = TwinMessage(
            int(message.payload),
            dues[0],
            now_ms,
            new_id,
            addressee=consumer.twin.name,
            retries=message.retries + message.redelivery_count + 1,
        )
        self._sent(consumer.topic, [new])
        self._acked(consumer, consumer.twin.ack([place]), True)

    # -- moving ------------------------------------------------------------------------------------------

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
        consumer = pick([consumer for consumer in self.consumers if consumer.received], which)
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
        consumer.twin.seek(max(place, consumer.topic.first))
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

    # -- going -------------------------------------------------------------------------------------------

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
        self.twin.policies.scopes.pop(topic, None)
        self._forget(twin)

    def _forget(self, topic: TwinTopic) -> None:
        doomed = {part.start_ms for part in self.twin.partitions.values() if not part.holders}
        topic.deleted = True
        self.twin.release(doomed)  # what a crash left for the next tick is the next tick's
        for consumer in [consumer for consumer in self.consumers if consumer.topic is topic]:
            with pytest.raises(UnknownSubscription):
                consumer.face.receive()
            consumer.face.close()
            self.consumers.remove(consumer)
