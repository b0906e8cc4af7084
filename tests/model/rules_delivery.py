"""Rules: messages are handed out, acknowledged and sought; policies change; time goes on, back and far forward."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from duelog import (
    DeadLetter,
    DelayedDeliveryPolicies,
    MessageId,
    Outcome,
    Policies,
    PublishedAt,
    ReceivedMessage,
    ReceivedMessages,
    SubscriptionAdmin,
)
from duelog.delivery.dispatcher import SubscriptionType
from duelog.errors import (
    ConsumerBusy,
    DelayTooLong,
    InvalidArgument,
    QuotaExceeded,
    TransactionConflict,
    UnknownSubscription,
    UnknownTopic,
)
from duelog.metrics import PARTITIONS_DELETED, REJECTED
from duelog.store.names import TopicName
from duelog.topics.dead_letters import KEEPER

from .drawing import (
    DUES,
    FAR_MS,
    HANDING_OUT,
    INLINE_DELAYS,
    KINDS,
    NAMES,
    PICK,
    PICKS,
    STORING,
    TAKING_BACK,
    TOPICS,
    Spec,
    only,
    pick,
    received_something,
)
from .driver import PAYLOAD, full_disk
from .machine import NOWHERE, Consumer, Item
from .rules_sending import SendingRules
from .twin_policies import NAMESPACE, STORE, Fields, Scope
from .twin_subscription import TwinSubscription
from .twin_topic import TwinLetter, TwinMessage, TwinTopic
from .twin_withdrawal import outcome

Route = Callable[[ReceivedMessages], ReceivedMessages]

SCOPES: tuple[Scope, ...] = (STORE, NAMESPACE, "t0", "t1", ("t0", "a"), ("t0", "b"))

KEPT = st.fixed_dictionaries(
    {
        "retention_ms": st.sampled_from((None, None, 0, 30, 1_000)),
        "retention_bytes": st.sampled_from((None, None, 0, 150)),
        "ttl_ms": st.sampled_from((None, None, 0, 40, 3_000)),
        "max_redeliveries": st.sampled_from((None, None, -1, 0, 2)),
        "ack_timeout_ms": st.sampled_from((None, None, 0, 1, 50)),
        "nack_backoff_ms": st.sampled_from((None, None, 0, 10)),
        "nack_backoff_max_ms": st.sampled_from((None, None, 1_000)),
        "max_in_flight": st.sampled_from((None, None, 0, 1, 3)),
        "max_pending": st.sampled_from((None, None, 0, 1, 4)),
    }
)


class DeliveryRules(SendingRules):
    """Whatever consumers, administrators and clocks do."""

    @only(STORING, HANDING_OUT, INLINE_DELAYS)
    @rule(topic=TOPICS, name=NAMES, kind=KINDS, initial=st.sampled_from(("earliest", "latest")))
    def subscribe(self, topic: str, name: str, kind: SubscriptionType, initial: str) -> None:
        self._subscribe(self._topic(topic), name, kind, initial)

    @only(STORING, HANDING_OUT, INLINE_DELAYS)
    @precondition(lambda self: any(consumer.twin.kind != "exclusive" for consumer in self.consumers))
    @rule(which=PICK)
    def join(self, which: int) -> None:
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
        inside = self._inside(face)
        consumer = Consumer(face, twin, sub, inside._id)
        sub.attach(kind, consumer.number)
        settle = functools.partial(self._route, consumer, inside._route)
        inside._route = settle  # type: ignore[method-assign]
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
        if sub.tracks and sub.looked:
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

    @only(STORING)
    @rule(
        which=PICK,
        acks=st.lists(PICK, max_size=3),
        topic=TOPICS,
        specs=st.lists(DUES, max_size=3),
        cancels=st.lists(PICK, max_size=2),
        required=st.booleans(),
    )
    def transact(
        self, which: int, acks: list[int], topic: str, specs: list[Spec], cancels: list[int], required: bool
    ) -> None:
        """Acknowledge, cancel, send and count in one transaction: all of it, or nothing where one cannot be."""
        consumer, name = pick(self.consumers, which) if self.consumers else None, self._topic(topic)
        twin = self.twin.topics.get(name)
        if twin is None:
            return
        self._learn()
        drawn, dues = self._drawn(name, specs)
        asked = self._asked(name, cancels) if self.ids else None
        ids = [] if asked is None else asked[1]
        items = [pick(consumer.received, number) for number in acks] if consumer and consumer.received else []
        transaction = self.store.transaction()
        transaction.ack([message for _, _, message in items], consumer=consumer.face if consumer else None)
        cancelled = [transaction.cancel(name, message_id, required=required) for message_id in ids]
        sent = [
            transaction.send(name, each.payload, deliver_at=each.deliver_at, key=each.key, ttl=each.ttl)
            for each in drawn
        ]
        document = self.store.documents.get("transactions")
        put = transaction.put_document("transactions", b"%d" % self.transactions)
        outcomes = [outcome(self.twin, twin, message_id) for message_id in ids]
        may_be = [each in (Outcome.CANCELLED, Outcome.ALREADY_CANCELLED) for each in outcomes]
        held = consumer is None or all(consumer.twin.holds(consumer.number, *each) for each in items)
        error: type[Exception] | None = None
        if dues is None:
            error = DelayTooLong
        elif self._over_quota(name, dues):
            error = QuotaExceeded
        elif not held or (required and not all(may_be)):
            error = TransactionConflict
        raised: type[Exception] | None = None
        try:
            with transaction:
                pass
        except (DelayTooLong, QuotaExceeded, TransactionConflict) as refused:
            raised = type(refused)
        assert raised is error
        if error is not None:
            assert self.store.documents.get("transactions") == document
            if dues is None:
                self._refused(name, drawn)
            elif error is TransactionConflict:
                self._adopt_left_over()
            return
        assert dues is not None
        assert self.store.documents.get("transactions") == (b"%d" % self.transactions, put.value)
        self.transactions += 1
        assert [each.value for each in cancelled] == may_be
        self._cancelled(twin, ids)
        self._sent(twin, self._twins(name, drawn, dues, [each.value for each in sent], self.twin.now_ms))
        if consumer and items:
            self._acked(consumer.topic, consumer.twin, consumer.twin.ack([place for place, _, _ in items]), False)
            consumer.twin.save()

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
        """Twice as long each time, up to the most; by the message, so that an old one gives back no later delivery."""
        consumer = self._given(which)
        items = {item[0]: item for item in (pick(consumer.received, number) for number in picks)}
        sub, now_ms = consumer.twin, self.twin.now_ms
        until_ms = {}
        for place, _, message in items.values():
            wait_ms = sub.setting("nack_backoff_ms") * 2**message.redelivery_count
            wait_ms = min(wait_ms, sub.setting("nack_backoff_max_ms"))
            if sub.holds(consumer.number, *items[place]):
                until_ms[place] = now_ms + wait_ms
        given = [message for _, _, message in items.values()]
        assert consumer.face.nack(given) == sub.nack(consumer.number, until_ms, now_ms)

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
        assert (new_id is None) == consumer.twin.is_acked(place)
        if new_id is None:
            return
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

    @only(TAKING_BACK)
    @rule(
        scope=st.sampled_from((STORE, NAMESPACE, "t0", "t1")),
        active=st.sampled_from((None, None, True, False)),
        tick_ms=st.sampled_from((None, 0, 1, 7, 100)),
        longest_ms=st.sampled_from((None, None, 0, 40)),
        fixed_ms=st.sampled_from((None, None, 0, 30)),
    )
    def set_delay_policies(
        self, scope: str, active: bool | None, tick_ms: int | None, longest_ms: int | None, fixed_ms: int | None
    ) -> None:
        fields: Fields = {
            "active": active,
            "tick_time_ms": tick_ms,
            "max_delivery_delay_ms": longest_ms,
            "fixed_delivery_delay_ms": None if scope == STORE else fixed_ms,
        }
        self._set(scope, fields, delays_alone=True)

    @only(STORING, HANDING_OUT, INLINE_DELAYS)
    @rule(number=PICK, fields=KEPT)
    def set_policies(self, number: int, fields: Fields) -> None:
        """Set the kept policies; with them the delay policies of that scope go, which are not among the fields."""
        scope = pick(SCOPES, number)
        if isinstance(scope, tuple):
            fields = {
                field: value for field, value in fields.items() if not field.startswith(("retention", "max_pending"))
            }
        self._set(scope, fields, delays_alone=False)

    def _set(self, scope: Scope, fields: Fields, *, delays_alone: bool) -> None:
        policies = (DelayedDeliveryPolicies if delays_alone else Policies)(**fields)  # type: ignore[arg-type]
        with self._other_timeouts():
            namespace, topic, subscription = _named(scope)
            self.store.set_policies(policies, namespace=namespace, topic=topic, subscription=subscription)
            now = self.twin.policies.set(scope, fields, delays_alone=delays_alone)
        found = self.store.policies(namespace=namespace, topic=topic, subscription=subscription)
        assert found == (Policies(**now) if now else None)  # type: ignore[arg-type]

    @precondition(lambda self: self.twin.policies.scopes)
    @rule(number=PICK)
    def remove_policies(self, number: int) -> None:
        scope = pick(list(self.twin.policies.scopes), number)
        namespace, topic, subscription = _named(scope)
        with self._other_timeouts():
            removed = self.store.remove_policies(namespace=namespace, topic=topic, subscription=subscription)
            assert removed == self.twin.policies.remove(scope)

    @contextmanager
    def _other_timeouts(self) -> Iterator[None]:
        """Messages held when a timeout begins to be in force count as held from then on."""
        subs = [sub for topic in self.twin.topics.values() for sub in topic.subscriptions.values()]
        untimed = [sub for sub in subs if not sub.setting("ack_timeout_ms")]
        yield
        for sub in subs:
            if not sub.setting("ack_timeout_ms"):
                sub.until_ms.clear()
                sub.batches.clear()
        for sub in untimed:
            sub.handed_ms = dict.fromkeys(sub.held, self.twin.now_ms)
            if sub.held and sub.setting("ack_timeout_ms"):
                sub.hold_since(list(sub.held), self.twin.now_ms)

    @rule(ms=st.integers(1, 10) | st.integers(1, 400))
    def forward(self, ms: int) -> None:
        self._forward(ms)

    @only(STORING, TAKING_BACK)
    @rule(partitions=st.integers(1, 6), offset_ms=st.integers(-1, 1))
    def forward_to_a_boundary(self, partitions: int, offset_ms: int) -> None:
        span_ms = self.config.partition_ms
        self._forward_to((self.twin.now_ms // span_ms + partitions) * span_ms + offset_ms)

    @precondition(lambda self: self.next_due_ms is not None)
    @rule()
    def forward_to_what_is_next(self) -> None:
        self._forward_to(self.next_due_ms or 0)

    @only(STORING, HANDING_OUT, INLINE_DELAYS)
    @precondition(lambda self: not self.twin.lead_ms)
    @rule(ms=st.integers(1, 30) | st.integers(1, 1_000))
    def set_the_clock_back(self, ms: int) -> None:
        """Not where what fires early is not yet visible."""
        self._back(ms)

    @only(STORING)
    @rule()
    def stop_for_long(self) -> None:
        self._forward(FAR_MS)

    @rule()
    def tick(self) -> None:
        self._tick()

    @only(STORING)
    @rule(count=st.integers(1, 8))
    def tick_on_a_full_disk(self, count: int) -> None:
        """Whatever write of a tick fails, the next tick does the rest."""
        with full_disk(self.store._engine, count):
            self._tick_until_it_works()


def _named(scope: Scope) -> tuple[str | None, str | None, str | None]:
    """Namespace, topic and subscription of a scope."""
    if isinstance(scope, tuple):
        return None, *scope
    return (None if scope != NAMESPACE else "public/default", None if scope in (STORE, NAMESPACE) else scope, None)
