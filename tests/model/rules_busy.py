"""Rules of many calls: a consumer's life, or a message's, in one step, so that runs come to the point."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from .drawing import HANDING_OUT, INLINE_DELAYS, PICK, TAKING_BACK, TOPICS
from .machine import only
from .rules_delivery import DeliveryRules
from .rules_recurring import RecurringRules
from .rules_restarts import RestartRules
from .rules_sending import SendingRules
from .rules_withdrawal import WithdrawalRules

MS = st.sampled_from((0, 1, 5, 30, 300, 1_000))
HANDING = (
    *("send", "send", "forward", "receive", "receive", "receive", "ack", "nack", "back off", "retry"),
    *("move", "seek", "leave", "join", "pause", "resume", "reopen"),
)
LATER = st.sampled_from((1, 2, 5, 5, 30, 300))


class BusyRules(SendingRules, DeliveryRules, WithdrawalRules, RecurringRules, RestartRules):
    """Calls of the other rules, one after the other."""

    @only(HANDING_OUT, INLINE_DELAYS)
    @precondition(lambda self: self.consumers)
    @rule(
        calls=st.lists(
            st.tuples(
                st.sampled_from(HANDING),
                PICK,
                MS,
            ),
            min_size=4,
            max_size=12,
        )
    )
    def hand_out(self, calls: list[tuple[str, int, int]]) -> None:
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
    @rule(
        topic=TOPICS,
        calls=st.lists(
            st.tuples(
                st.sampled_from(
                    (
                        "send",
                        "send",
                        "cancel",
                        "move",
                        "move",
                        "now",
                        "ask",
                        "forward",
                        "tick",
                        "every",
                        "follow",
                        "policy",
                    )
                ),
                st.lists(PICK, min_size=1, max_size=3),
                LATER,
            ),
            min_size=4,
            max_size=12,
        ),
    )
    def take_back(self, topic: str, calls: list[tuple[str, list[int], int]]) -> None:
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
                case "policy":
                    self.set_policies(topic, None, ms, None, (None, 0, 30)[len(picks) - 1])
                case "every":
                    self.every(topic, "s", 1)
                case "follow" if self.twin.topics.get(topic) and self.twin.topics[topic].schedules:
                    self._forward(1_000 + ms)
                    self._tick()
