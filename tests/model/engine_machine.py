"""All rules together: lists of actions about one theme, and the end that every run comes to."""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from .drawing import (
    HANDING_CALLS,
    HANDING_OUT,
    INLINE_DELAYS,
    PICK,
    PICKS,
    STORING,
    TAKING_BACK,
    TAKING_CALLS,
    TOPICS,
    Call,
    Spec,
    TakingCall,
    only,
    pick,
    received_something,
)
from .machine import Consumer
from .rules_delivery import DeliveryRules


class EngineMachine(DeliveryRules):
    """The model test."""

    def _begin(self, handing: list[Call], taking: list[TakingCall]) -> None:
        """The theme of a run comes first in every run, whatever rules come after it."""
        if self.theme in (HANDING_OUT, INLINE_DELAYS):
            self.hand_out(handing)
        elif self.theme == TAKING_BACK:
            self.take_back("t0", taking)

    @only(HANDING_OUT, INLINE_DELAYS)
    @precondition(lambda self: self.consumers)
    @rule(calls=HANDING_CALLS)
    def hand_out(self, calls: list[Call]) -> None:
        """Consumers of a subscription and their messages."""
        for call, number, ms in calls:
            if not self.consumers:
                return
            given, consumer = received_something(self), pick(self.consumers, number)
            match call:
                case "send":
                    self.send_batch("t0", [("after", ms + 1)] * (1 + number % 3) if ms else [("none",)], False)
                case "forward":
                    self._forward(ms)
                case "back" if not self.twin.lead_ms:
                    self._back(ms)
                case "receive":
                    self._receive(consumer, 1 + number % 3)
                case "bounce" if self.theme != INLINE_DELAYS:
                    for _ in range(1 + number % 3):
                        self._nack(consumer, self._receive(consumer, 3), 0)
                case "ack" if given:
                    self.ack(number, [number], bool(number % 2))
                case "nack" if given and self.theme != INLINE_DELAYS:
                    self.nack(number, [-1 - number % 3], ms)
                    self._receive(consumer, 3)
                case "back off" if given and self.theme != INLINE_DELAYS:
                    self.nack_with_backoff(number, [-1 - number % 3])
                case "retry" if given and self.theme != INLINE_DELAYS:
                    self.retry_later(number, -1 - number % 3, ms)
                case "move" if given:
                    self.seek_to_a_message(number, number)
                case "cumulative":
                    self.send_batch("t0", [("after", ms + 1), ("none",)], False)
                    if self._receive(consumer, 1 + number % 3):
                        self.ack_cumulative(number, -1, False)
                case "hold":
                    self._hold(consumer, 1 + number % 3)
                case "letters":
                    self._bury_one(consumer)
                    self._look_at_letters(number)
                case "take letters":
                    self.take_letters(number, 1 + number % 2, bool(number % 3), ms * (number % 2))
                case "latest":
                    self.seek_to_an_end(number, "latest")
                case "leave":
                    kind = consumer.face.type
                    self.leave(number)
                    self._subscribe("t0", "a", kind, "earliest")
                case "join" if self.consumers[0].face.type != "exclusive":
                    self._subscribe("t0", "a", self.consumers[0].face.type, "earliest")
                case "seek" if given:
                    self.seek_to_a_time(number, number, number % 3 - 1)
                case "reopen" if self.consumers[0].twin.name == "a":
                    kind = self.consumers[0].face.type
                    self.reopen({"retention_ms": ms, "max_redeliveries": None} if number % 2 else None)
                    self._subscribe("t0", "a", kind, "earliest")
                case "pause" | "resume" if self.theme == HANDING_OUT:
                    self.pause_or_resume(number, None if call == "pause" else 0)

    def _hold(self, consumer: Consumer, count: int) -> None:
        """Messages are held for as long as the acknowledgement timeout, where there is one, and asked for again."""
        self.send_batch("t0", [("none",)] * count, False)
        self._receive(consumer, count)
        self._forward(consumer.twin.setting("ack_timeout_ms"))
        for other in self.consumers:
            self._receive(other, 3)

    @only(STORING, HANDING_OUT, INLINE_DELAYS)
    @rule(topic=TOPICS, count=st.integers(1, 3), ms=st.integers(1, 60))
    def fill_a_quota(self, topic: str, count: int, ms: int) -> None:
        """A quota's worth is sent, twice; and again when the first of them are due."""
        topic = self._topic(topic)
        self._set(topic, {"max_pending": count}, delays_alone=False)
        for wait_ms in (0, ms, 2 * ms):
            self._forward(wait_ms)
            self._tick()
            self.send_batch(topic, [("after", ms)] * count, False)

    def _bury_one(self, consumer: Consumer) -> None:
        """A message is given back as often as it takes to be dead-lettered, where there is a limit."""
        if self.theme == HANDING_OUT:
            self.send_batch("t0", [("none",)], False)
            for _ in range(consumer.twin.setting("max_redeliveries") + 2):
                self._nack(consumer, self._receive(consumer, 3), 0)

    def _look_at_letters(self, number: int) -> None:
        """Dead letters are received by a consumer that leaves without acknowledging them, again and again."""
        graves = [topic.name for topic in self.twin.topics.values() if topic.keeper is not None]
        for _ in range(2 + number % 3 if graves else 0):
            before = len(self.consumers)
            self._subscribe(graves[0], "g", "shared", "earliest")
            if len(self.consumers) > before:
                self._receive(self.consumers[-1], 3)
                self._leave(self.consumers[-1])

    @only(TAKING_BACK)
    @rule(topic=TOPICS, calls=TAKING_CALLS)
    def take_back(self, topic: str, calls: list[TakingCall]) -> None:
        """Messages are sent, moved, and taken back before they fire, while they do, and after."""
        for call, picks, ms in calls:
            match call:
                case "send":
                    self.send_batch(topic, [("after", ms)] * len(picks), False)
                case "cancel" if self.ids:
                    self.cancel(topic, picks)
                case "move" if self.ids:
                    self.reschedule(topic, picks, ("after", ms))
                case "now" if self.ids:
                    self.fire_now(topic, picks[0])
                case "ask" if self.ids:
                    self.ask(topic, picks[0])
                case "forward":
                    self._forward(ms)
                case "tick":
                    self._tick()
                case "number":
                    self.send_numbered(topic, "p", [("after", ms)] * len(picks), None if ms < 5 else picks[0] % 6)
                case "break":
                    dues: list[Spec] = [("partition", number, ms % 3) for number in picks]
                    self.break_a_numbered_batch(topic, "p", [*dues, ("none",)], None, picks[0] % 2 > 0, [1, 2])
                case "key":
                    hold = (None, 0.005, 0.3)[picks[0] % 3]
                    self.send_under_a_key(topic, "k", ("after", ms), hold, len(picks) > 1)
                    if len(picks) > 2:
                        self.cancel_by_key(topic, "k")
                case "near":
                    self.write_ahead(topic, picks, ms)
                case "reopen" if self.messages:
                    self.reopen(None)
                case "policy":
                    self.set_delay_policies(topic, None, ms, None, (None, 0, 30)[len(picks) - 1])
                case "every":
                    self.every(topic, "s", 1)
                case "follow" if self.twin.topics.get(topic) and self.twin.topics[topic].schedules:
                    self._forward(1_000 + ms)
                    self._tick()

    @only(TAKING_BACK)
    @rule(topic=TOPICS, picks=PICKS, ms=PICK)
    def write_ahead(self, topic: str, picks: list[int], ms: int) -> None:
        """Something is written early, and messages are sent, moved and taken back within that time."""
        self.send_batch(topic, [("near", -1), ("after", 300), ("after", 301)], False)
        self._tick()
        for number in picks:
            self.reschedule(topic, [1], ("near", ms + number))
        self.send(topic, ("near", ms), False)

    def _drain(self) -> None:
        """Going only where `next_due_ms` sends us, everything is delivered, and everything that may go is gone."""
        self._look_at_figures()
        self._look_at_metrics()
        for consumer in self.consumers:
            consumer.face.close()
            consumer.twin.detach(consumer.number, self.twin.now_ms)
        self.consumers.clear()
        for topic in list(self.twin.topics.values()):
            for name in list(topic.schedules):
                self.change_a_schedule(topic.name, name, "remove")
        idle = 0
        for _ in range(2_000):
            self._listen_to_all()
            self._tick()
            for consumer in self.consumers:
                while items := self._receive(consumer, 100):
                    self._ack(consumer, items, False)
            self._tick()
            planned_ms = min((ms for ms in (self._planned_ms(), self._awaited_ms()) if ms is not None), default=None)
            if planned_ms is None:
                break
            idle = idle + 1 if planned_ms <= self.twin.now_ms else 0
            assert idle < 4, "the scheduler would run without a pause"
            self._forward_to(planned_ms)
        else:
            raise AssertionError("no end of things to do")
        for topic in self.twin.topics.values():
            assert not self.twin.pending(topic), "a message was forgotten"
            assert all(not sub.backlog(len(topic.main)) for sub in topic.subscriptions.values())
        if not any(topic.setting("retention_bytes") for topic in self.twin.topics.values()):
            assert not self.twin.partitions, "a partition was forgotten"
        self._same_logs()
        self._look_at_figures()
        self._look_at_metrics()
        self._look_up()
        self._check()

    def _listen_to_all(self) -> None:
        """Every subscription has a consumer, also the keeper of what is dead-lettered meanwhile."""
        for topic in list(self.twin.topics.values()):
            for name, sub in topic.subscriptions.items():
                if not sub.consumers:
                    self._subscribe(topic.name, name, "exclusive", "earliest")
                    self.consumers[-1].face.resume()
                    sub.paused_until_ms = 0

    def _planned_ms(self) -> int | None:
        """The next time, but for the look for old messages, which a store with a time to live takes for ever."""
        engine = self.store._engine
        shortest_ms, engine.policies.shortest_ttl_ms = engine.policies.shortest_ttl_ms, None
        try:
            if shortest_ms is None:
                return self.next_due_ms
            return engine.upkeep.maintenance._next_due_ms(engine.clock.now_ms())
        finally:
            engine.policies.shortest_ttl_ms = shortest_ms

    def _awaited_ms(self) -> int | None:
        """When time alone gives a receiver something that is in the main log already."""
        times: list[int] = []
        for topic in self.twin.topics.values():
            for sub in topic.subscriptions.values():
                times += sub.waiting.values()
                times += [topic.main[place].due_ms for place in sub.passed_over]
        return min(times, default=None)
