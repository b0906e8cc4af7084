"""Rules of many calls: a consumer's life, or a message's, in one step, so that runs come to the point."""

from __future__ import annotations

from hypothesis.stateful import precondition, rule

from .drawing import (
    HANDING_CALLS,
    HANDING_OUT,
    INLINE_DELAYS,
    TAKING_BACK,
    TAKING_CALLS,
    TOPICS,
    Call,
    TakingCall,
    only,
)
from .rules_delivery import DeliveryRules
from .rules_recurring import RecurringRules
from .rules_restarts import RestartRules
from .rules_sending import SendingRules
from .rules_withdrawal import WithdrawalRules


class BusyRules(SendingRules, DeliveryRules, WithdrawalRules, RecurringRules, RestartRules):
    """Calls of the other rules, one after the other."""

    def _begin(self, handing: list[Call], taking: list[TakingCall]) -> None:
        """What a run is about is in every run, whatever rules come after it."""
        if self.theme in (HANDING_OUT, INLINE_DELAYS):
            self._hand_out(handing)
        elif self.theme == TAKING_BACK:
            self._take_back("t0", taking)

    @only(HANDING_OUT, INLINE_DELAYS)
    @precondition(lambda self: self.consumers)
    @rule(calls=HANDING_CALLS)
    def hand_out(self, calls: list[Call]) -> None:
        self._hand_out(calls)

    def _hand_out(self, calls: list[Call]) -> None:
        """Consumers of a subscription and their messages."""
        for call, number, ms in calls:
            if not self.consumers:
                return
            given = any(consumer.received for consumer in self.consumers)
            match call:
                case "send":
                    self.send_batch("t0", [("after", ms + 1)] * (1 + number % 3) if ms else [("none",)], False)
                case "forward":
                    self._forward(ms)
                case "receive":
                    self._receive(self.consumers[number % len(self.consumers)], 1 + number % 3)
                case "bounce" if self.theme != INLINE_DELAYS:
                    consumer = self.consumers[number % len(self.consumers)]
                    for _ in range(1 + number % 3):
                        self._nack(consumer, self._receive(consumer, 3), 0)
                case "ack" if given:
                    self.ack(number, [number], bool(number % 2))
                case "nack" if given and self.theme != INLINE_DELAYS:
                    self.nack(number, [-1 - number % 3], ms)
                case "back off" if given and self.theme != INLINE_DELAYS:
                    self.nack_with_backoff(number, [-1 - number % 3])
                case "retry" if given and self.theme != INLINE_DELAYS:
                    self.retry_later(number, -1 - number % 3, ms)
                case "move" if given:
                    self.seek_to_a_message(number, number)
                case "leave":
                    kind = self.consumers[number % len(self.consumers)].face.type
                    self.leave(number)
                    self._subscribe("t0", "a", kind, "earliest")
                case "join" if self.consumers[0].face.type != "exclusive":
                    self._subscribe("t0", "a", self.consumers[0].face.type, "earliest")
                case "seek" if given:
                    self.seek_to_a_time(number, number, number % 3 - 1)
                case "reopen" if self.consumers[0].twin.name == "a":
                    kind = self.consumers[0].face.type
                    self.reopen(None)
                    self._subscribe("t0", "a", kind, "earliest")
                case "pause" | "resume" if self.theme == HANDING_OUT:
                    self.pause_or_resume(number, call == "pause")

    @only(TAKING_BACK)
    @rule(topic=TOPICS, calls=TAKING_CALLS)
    def take_back(self, topic: str, calls: list[TakingCall]) -> None:
        self._take_back(topic, calls)

    def _take_back(self, topic: str, calls: list[TakingCall]) -> None:
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
                case "reopen" if self.messages:
                    self.reopen(None)
                case "policy":
                    self.set_policies(topic, None, ms, None, (None, 0, 30)[len(picks) - 1])
                case "every":
                    self.every(topic, "s", 1)
                case "follow" if self.twin.topics.get(topic) and self.twin.topics[topic].schedules:
                    self._forward(1_000 + ms)
                    self._tick()
