"""Time to live: what is not acknowledged for `ttl_ms` after its due time counts as acknowledged.

Here that is found in the background, from mark-delete on; a consumer is not handed out what is too old, wherever it
lies (topics/consumer.py).

Dead letters are exempt: their keeper holds them until they are requeued or purged.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from duelog.markers.firing.suspensions import Part, Suspensions
from duelog.store.env.environment import Environment

from ..sending.delay_policies import DelayPolicies
from ..topics.ack_flusher import AckFlusher
from ..topics.seeking import expired
from ..topics.subscription_state import SubscriptionState
from ..topics.topic_list import Topics
from ..topics.topic_state import TopicState
from ..topics.trim_agenda import TrimAgenda

_PARTS = 16
_LEAST_MS = 1_000


@dataclass(eq=False, repr=False)
class Expiry:
    """Looks through the topics in memory sixteen times in the shortest time to live, at most once a second.

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
        """Have the next run look through the topics whenever it comes."""
        self._due_ms = 0

    def run(self, now_ms: int, suspensions: Suspensions) -> None:
        """Acknowledge what has expired, if it is time to look; a topic that cannot be read is suspended."""
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
            found = list(expired(self._main, topic.log, subscription.acks, before_ms))
            count = sum(subscription.acknowledge({ledger_id: entries}, topic.log) for ledger_id, entries in found)
            subscription.counts.expired += count
            return count
