"""What an open store does when policies were set or removed: running subscriptions go by them at once.

Subscriptions keep what is in force for them, so that receiving and acknowledging look at an attribute; here it is
replaced. Retention and time to live are asked for when ledgers are trimmed and messages expire, which happens at the
next tick after a change.
"""

from __future__ import annotations

from functools import partial

from duelog.store.clock import StoreClock
from duelog.store.policy.policy_records import Scope

from ..sending.delay_policies import DelayPolicies
from ..topics.topic_list import Topics
from .maintenance import Maintenance


class Following:
    """The topics of one open store, told of changes. Thread-safe."""

    def __init__(self, topics: Topics, policies: DelayPolicies, maintenance: Maintenance, clock: StoreClock) -> None:
        self._topics = topics
        self._policies = policies
        self._maintenance = maintenance
        self._clock = clock

    def changed(self, scope: Scope) -> None:
        """Policies were set or removed at a scope. O(subscriptions in memory for which it may count).

        Topics that are not in memory are looked at for trimming once after opening anyway. Takes the locks of
        subscriptions, one after the other.
        """
        now_ms = self._clock.now_ms()
        for topic in self._topics.loaded():
            if not scope.includes(topic.name):
                continue
            for subscription in list(topic.subscriptions.values()):
                effective = partial(self._policies.effective, topic.name, subscription.name)
                subscription.follow(effective, now_ms)
            self._maintenance.look_at(topic.topic_id, 0)
            topic.changed()
        self._maintenance.look_for_expired()
