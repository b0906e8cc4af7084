"""Policies in force: messages that outlive their time to live, and changes that running subscriptions follow at once.

Subscriptions keep the policies in force for them, so that receiving and acknowledging look at an attribute; a change
replaces it. Retention and time to live are looked up when ledgers are trimmed and messages expire, at the next tick
after a change.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from duelog.markers.firing.suspensions import Part, Suspensions
from duelog.store.clock import StoreClock
from duelog.store.env.environment import Environment
from duelog.store.policy.policy_records import Scope

from ..sending.delay_policies import DelayPolicies
from ..topics.ack_flusher import AckFlusher
from ..topics.seeking import expired
from ..topics.topic_list import Topics, TrimAgenda
from ..topics.topic_state import SubscriptionState, TopicState

_PARTS = 16
_LEAST_MS = 1_000


@dataclass(eq=False, repr=False)
class Expiry:
    """Acknowledges messages that are not acknowledged within `ttl_ms` after their due time.

    Dead letters are exempt: their keeper holds them until they are requeued or purged. The topics in memory are looked
    through sixteen times in the shortest time to live, at most once a second.

    So a message that nobody receives stays for its time to live, and at most a sixteenth of it (or a second) longer;
    one behind another that is not too old stays as long as that.
    """

    _main: Environment
    _topics: Topics
    _agenda: TrimAgenda
    _flusher: AckFlusher
    _policies: DelayPolicies
    _due_ms: int = field(default=0, init=False)

    def due_ms(self) -> int | None:
        """When to look through the topics next; None: there is no time to live."""
        return None if self._policies.shortest_ttl_ms is None else self._due_ms

    def look_again(self) -> None:
        self._due_ms = 0

    def run(self, now_ms: int, suspensions: Suspensions) -> None:
        """Acknowledge expired messages, if it is time to look; a topic that cannot be read is suspended."""
        shortest_ms = self._policies.shortest_ttl_ms
        if shortest_ms is None or now_ms < self._due_ms:
            return
        self._due_ms = now_ms + max(shortest_ms // _PARTS, _LEAST_MS)
        for topic in self._topics.loaded():
            look_through = functools.partial(self._look_through, topic, now_ms)
            suspensions.run(Part("expire", topic.topic_id), now_ms, look_through, None)

    def _look_through(self, topic: TopicState, now_ms: int) -> None:
        for subscription in list(topic.subscriptions.values()):
            before_ms = subscription.expired_ms(self._policies.effective(topic.name, subscription.name), now_ms)
            if before_ms >= 0 and self._expire(topic, subscription, before_ms):
                self._flusher.mark(subscription, now_ms)
                topic.changed()  # a consumer may hold less than its limit
                self._agenda.look_at(topic.topic_id, now_ms)

    def _expire(self, topic: TopicState, subscription: SubscriptionState, before_ms: int) -> int:
        with subscription.lock:
            runs = list(expired(self._main, topic.log, subscription.acks, before_ms))
            count = sum(subscription.acknowledge({ledger_id: entries}, topic.log) for ledger_id, entries in runs)
            subscription.counts.expired += count
            return count


@dataclass(eq=False, repr=False)
class PolicyChanges:
    """Has one open store go by its policies as they are now. Thread-safe. `_wake` wakes the scheduler."""

    _policies: DelayPolicies
    _topics: Topics
    _agenda: TrimAgenda
    _expiry: Expiry
    _clock: StoreClock
    _wake: Callable[[], None]

    def forget(self, scope: Scope) -> None:
        """The policies of a scope were removed in another transaction."""
        self._policies.changed()
        self.follow(scope)

    def follow(self, scope: Scope) -> None:
        """The policies of a scope were changed: have subscriptions go by them. O(subscriptions of it in memory).

        Topics that are not in memory are looked at for trimming once after opening anyway. Takes the locks of
        subscriptions, one after the other.
        """
        now_ms = self._clock.now_ms()
        for topic in self._topics.loaded():
            if not scope.includes(topic.name):
                continue
            for subscription in topic.followers:
                effective = partial(self._policies.effective, topic.name, subscription.name)
                subscription.follow(effective, now_ms)
            self._agenda.look_at(topic.topic_id, 0)
            topic.changed()
        self._expiry.look_again()
        self._wake()
