"""Rules: consumers of every type come, receive, acknowledge, give back, postpone, seek, pause and go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from duelog import DeadLetter, MessageId, ReceivedMessage, ReceivedMessages
from duelog.delivery.dispatcher import SubscriptionType
from duelog.errors import ConsumerBusy, DelayTooLong, InvalidArgument, UnknownSubscription, UnknownTopic
from duelog.metrics import REJECTED
from duelog.store.names import TopicName
from duelog.topics.dead_letters import KEEPER

from .drawing import (
    HANDING_OUT,
    INLINE_DELAYS,
    KINDS,
    NAMES,
    PICK,
    PICKS,
    STORING,
    TAKING_BACK,
    TOPICS,
    only,
    pick,
    received_something,
)
from .driver import PAYLOAD
from .machine import NOWHERE, Machine
from .stage import Consumer, Item
from .twin_subscription import TwinSubscription
from .twin_topic import TwinLetter, TwinMessage, TwinTopic

Route = Callable[[ReceivedMessages], ReceivedMessages]


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

    def _twin_subscription(self, topic: TwinTopic, name: str, start: int) -> TwinSubscription:
        setting = functools.partial(self.twin.policies.value, topic.name, subscription=name)
        return TwinSubscription(name, start, topic.main, setting)

    def _subscribe(self, topic: str, name: str, kind: SubscriptionType, initial: str) -> None:
        twin = self.twin.topic(topic)
        sub = twin.subscriptions.get(name)
        if sub is None:
            sub = twin.subscriptions[name] = self._twin_subscription(twin, name, twin.first)
            if initial == "latest":
                sub.begin_at(twin.latest(self.twin.now_ms), twin.first, self.twin.now_ms)
            sub.flush()
        if not sub.admits(kind):
            with pytest.raises(ConsumerBusy):
                self.store.topic(topic).subscribe(name, type=kind, initial_position=initial)
            return
        face = self.store.topic(topic).subscribe(name, type=kind, initial_position=initial)
        consumer = Consumer(face, twin, sub, face._id)
        sub.attach(kind, consumer.number)
        settle = functools.partial(self._route, consumer, face._route)
        face._route = settle  # type: ignore[method-assign]
        self.consumers.append(consumer)

    @only(STORING, HANDING_OUT, INLINE_DELAYS)
    @precondition(lambda self: self.consumers)
    @rule(which=PICK)
    def leave(self, which: int) -> None:
        self._leave(pick(self.consumers, which))

    def _leave(self, consumer: Consumer) -> None:
        self.consumers.remove(consumer)
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
        """Messages that the twin hands out now."""
        topic, sub, items = consumer.topic, consumer.twin, []
        for place, times in sub.receive(consumer.number, self.asked, self.twin.now_ms):
            message, position = topic.main[place], topic.position(place)
            expected = ReceivedMessage(
                b"%0*d" % (PAYLOAD, message.number),
                message.key,
                {} if message.letter is None else message.letter.properties,
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

    def _route(self, consumer: Consumer, settle: Route, batch: ReceivedMessages) -> ReceivedMessages:
        """Stands in for what becomes of a batch that was handed out: some is not for the consumer, some is dead."""
        self._learn()
        items, limit = self._taken(consumer), consumer.twin.setting("max_redeliveries")
        assert batch == [message for _, _, message in items]
        wanted: list[Item] = []
        dead: list[Item] = []
        over: list[Item] = []
        # What the consumer was given knows more than what is compared of it: what was postponed first.
        items = [(place, position, message) for (place, position, _), message in zip(items, batch, strict=True)]
        for item in items:
            message = item[2]
            if not consumer.topic.gives(item[0], consumer.twin, self.twin.now_ms):
                over.append(item)
            elif limit >= 0 and consumer.topic.keeper is None and message.redelivery_count + message.retries > limit:
                dead.append(item)
            else:
                wanted.append(item)
        result = settle(batch)
        assert result == [message for _, _, message in wanted]
        sub = consumer.twin
        if dead:
            self._bury(consumer, dead)
            self._acked(consumer.topic, sub, sub.ack([place for place, _, _ in dead]), False)
            sub.save()
        if over:
            self._acked(consumer.topic, sub, sub.ack([place for place, _, _ in over]), False)
        consumer.received.extend(wanted)
        return result

    def _bury(self, consumer: Consumer, dead: Sequence[Item]) -> None:
        """A letter lies in the dead-letter topic from the moment on in which the message is acknowledged."""
        grave = self.twin.topic(f"{consumer.topic.name}-{consumer.twin.name}-DLQ")
        now_ms = self.twin.now_ms
        if grave.keeper is None:
            grave.subscriptions[KEEPER] = self._twin_subscription(grave, KEEPER, grave.first)
        letters = []
        for place, _, message in dead:
            origin_id = consumer.topic.main[place].first_id or message.message_id
            attempts = message.redelivery_count + message.retries
            letter = TwinMessage(int(message.payload), now_ms, now_ms, origin_id)
            letter.letter = TwinLetter(message.topic, consumer.twin.name, origin_id, attempts)
            letters.append(letter)
        self._appended({grave: letters})
        face = self.store.topic(grave.name)
        for letter, (_, _, message) in zip(letters, dead, strict=True):
            there = face.get(letter.message_id)
            assert there is not None
            assert (there.payload, there.key) == (message.payload, message.key)

    def _appended(self, messages: Mapping[TwinTopic, Sequence[TwinMessage]]) -> None:
        """Messages were appended to main logs by the engine itself: their ids are learned."""
        for topic, of_topic in messages.items():
            for message in of_topic:
                topic.append(message, self.twin.now_ms)
        self._learn()
        for topic, of_topic in messages.items():
            for at, message in enumerate(of_topic, len(topic.main) - len(of_topic)):
                message.message_id = topic.position(at)

    # -- dead letters --------------------------------------------------------------------------------

    @only(HANDING_OUT)
    @rule(number=PICK, count=st.integers(1, 3), back=st.booleans(), delay_ms=st.sampled_from((0, 0, 1, 40, 700)))
    def take_letters(self, number: int, count: int, back: bool, delay_ms: int) -> None:
        """Some of the letters that are kept, which are those of the twin, are requeued, for later too, or purged."""
        self._learn()
        letters = list(self.store.dead_letters())
        kept = {
            (str(TopicName.parse(grave.name)), grave.position(place)): (grave, place)
            for grave in self.twin.topics.values()
            if grave.keeper is not None
            for place in range(grave.keeper.mark, len(grave.main))
            if not grave.keeper.is_acked(place)
        }
        assert {(each.dead_letter_topic, each.position) for each in letters} == kept.keys()
        for each in letters:
            grave, place = kept[each.dead_letter_topic, each.position]
            said = TwinLetter(each.topic, each.subscription, each.message_id, each.attempts)
            assert (int(each.payload), said) == (grave.main[place].number, grave.main[place].letter)
        chosen = [pick(letters, number + at) for at in range(min(count, len(letters)))]
        if back and not all(self._origin(letter) for letter in chosen):
            with pytest.raises((UnknownTopic, UnknownSubscription)):
                self.store.requeue_dead_letters(chosen, delay=delay_ms / 1000)
            return
        if back:
            assert self.store.requeue_dead_letters(chosen, delay=delay_ms / 1000) == len(chosen)
        else:
            assert self.store.purge_dead_letters(chosen) == len(chosen)
        self._taken_letters([kept[each.dead_letter_topic, each.position] for each in chosen], back, delay_ms)

    def _origin(self, letter: DeadLetter) -> TwinTopic | None:
        """The topic of a letter, None where it, or the subscription, is gone."""
        topic = self.twin.topics.get(TopicName.parse(letter.topic).local_name)
        return topic if topic is not None and letter.subscription in topic.subscriptions else None

    def _taken_letters(self, taken: Sequence[tuple[TwinTopic, int]], back: bool, delay_ms: int) -> None:
        """Letters, by dead-letter topic and place, were purged, or moved back: all of them by one call."""
        now_ms, moved = self.twin.now_ms, dict[TwinTopic, list[TwinMessage]]()
        for grave, place in taken:
            letter, keeper = grave.main[place].letter, grave.keeper
            assert letter is not None
            assert keeper is not None
            if back:
                origin = self.twin.topics[TopicName.parse(letter.topic).local_name]
                number, due_ms = grave.main[place].number, now_ms + delay_ms
                message = TwinMessage(number, due_ms, now_ms, NOWHERE, addressee=letter.subscription)
                moved.setdefault(origin, []).append(message)
            self._acked(grave, keeper, keeper.ack([place]), False)
            keeper.save()
        if not delay_ms:
            self._appended(moved)
            return
        for topic, of_topic in moved.items():
            for message in of_topic:
                self._add_delayed(topic, message)
                self.ids.append((topic.name, message.message_id))

    # -- acknowledging -----------------------------------------------------------------------------------

    @only(STORING, HANDING_OUT, INLINE_DELAYS)
    @precondition(received_something)
    @rule(which=PICK, picks=PICKS, durable=st.booleans())
    def ack(self, which: int, picks: list[int], durable: bool) -> None:
        """Anything that some consumer of the subscription was ever given, wherever it is now."""
        consumer = self._given(which)
        self._ack(consumer, [pick(consumer.received, number) for number in picks], durable)

    @precondition(received_something)
    @rule(which=PICK, durable=st.booleans())
    def ack_all_received(self, which: int, durable: bool) -> None:
        consumer = self._given(which)
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
        self._acked(consumer.topic, consumer.twin, count, durable)

    @only(STORING, HANDING_OUT, INLINE_DELAYS)
    @precondition(received_something)
    @rule(which=PICK, last=PICK, durable=st.booleans())
    def ack_cumulative(self, which: int, last: int, durable: bool) -> None:
        consumer = self._given(which)
        place, position, _ = pick(consumer.received, last)
        if consumer.twin.kind in ("shared", "key_shared"):
            with pytest.raises(InvalidArgument):
                consumer.face.ack_cumulative(position)
            return
        count = consumer.face.ack_cumulative(position, durable=durable)
        assert count == consumer.twin.ack_cumulative(place, self.twin.now_ms)
        self._acked(consumer.topic, consumer.twin, count, durable)

    def _acked(self, topic: TwinTopic, sub: TwinSubscription, count: int, durable: bool) -> None:
        now_ms = self.twin.now_ms
        if count:
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
        consumer = self._given(which)
        self._nack(consumer, [pick(consumer.received, number) for number in picks], ms)

    def _nack(self, consumer: Consumer, items: Sequence[Item], ms: int) -> None:
        count = consumer.face.nack([position for _, position, _ in items], delay=ms / 1000)
        now_ms = self.twin.now_ms
        until_ms = dict.fromkeys([place for place, _, _ in items], now_ms + ms)
        assert count == consumer.twin.nack(consumer.number, until_ms, now_ms)

    @only(HANDING_OUT)
    @precondition(received_something)
    @rule(which=PICK, picks=PICKS, ms=st.sampled_from((None, 0, 1, 60)), wait_ms=st.sampled_from((0, 1, 50, 60)))
    def extend(self, which: int, picks: list[int], ms: int | None, wait_ms: int) -> None:
        """Hold some for so long from now, or for the timeout; then time goes on."""
        consumer = self._given(which)
        items = [pick(consumer.received, number) for number in picks]
        timeout_ms = consumer.twin.setting("ack_timeout_ms")
        count = consumer.face.extend([position for _, position, _ in items], None if ms is None else ms / 1000)
        until_ms = self.twin.now_ms + (timeout_ms if ms is None else ms)
        assert count == consumer.twin.extend(consumer.number, [place for place, _, _ in items], until_ms)
        self._forward(wait_ms)
        self._receive(consumer, 100)

    @only(HANDING_OUT)
    @precondition(received_something)
    @rule(which=PICK, picks=PICKS)
    def nack_with_backoff(self, which: int, picks: list[int]) -> None:
        """Twice as long each time, up to the most; by the message, so that an old one counts what it counted then."""
        consumer = self._given(which)
        items = {place: message for place, _, message in (pick(consumer.received, number) for number in picks)}
        sub, now_ms = consumer.twin, self.twin.now_ms
        until_ms = {}
        for place, message in items.items():
            wait_ms = sub.setting("nack_backoff_ms") * 2**message.redelivery_count
            wait_ms = min(wait_ms, sub.setting("nack_backoff_max_ms"))
            until_ms[place] = now_ms + wait_ms
        assert consumer.face.nack(list(items.values())) == sub.nack(consumer.number, until_ms, now_ms)

    @only(HANDING_OUT)
    @precondition(received_something)
    @rule(which=PICK, number=PICK, ms=st.sampled_from((0, 5, 50, 300)))
    def retry_later(self, which: int, number: int, ms: int) -> None:
        consumer = self._given(which)
        place, _, message = pick(consumer.received, number)
        now_ms, topic = self.twin.now_ms, consumer.topic
        dues = self.twin.policies.dues(topic.name, [now_ms + ms], now_ms, retried=True)
        if dues is None:
            with pytest.raises(DelayTooLong):
                consumer.face.retry_later(message, ms / 1000)
            self.twin.count(REJECTED, 1, topic.name)
            return
        new_id = consumer.face.retry_later(message, ms / 1000)
        new = TwinMessage(
            int(message.payload),
            dues[0],
            now_ms,
            new_id,
            addressee=consumer.twin.name,
            retries=message.retries + message.redelivery_count + 1,
            first_id=consumer.topic.main[place].first_id or message.message_id,
        )
        expires_ms = consumer.topic.main[place].expires_ms
        new.ttl_ms = None if expires_ms is None else expires_ms - dues[0]
        self._sent(consumer.topic, [new])
        self._acked(consumer.topic, consumer.twin, consumer.twin.ack([place]), True)
