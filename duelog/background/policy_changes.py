"""Setting and removing policies of an open store: running subscriptions go by them at once.

Subscriptions keep what is in force for them, so that receiving and acknowledging look at an attribute; here it is
replaced. Retention and time to live are looked up when ledgers are trimmed and messages expire, which happens at the
next tick after a change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import EllipsisType

from duelog.store.clock import StoreClock
from duelog.store.policy.policies import DelayedDeliveryPolicies, Policies, PolicyValue
from duelog.store.policy.policy_records import Scope

from ..sending.delay_policies import DelayPolicies
from ..topics.topic_list import Topics
from ..topics.trim_agenda import TrimAgenda
from .expiry import Expiry


class PolicyChanges:
    """Changes the policies of one open store. Thread-safe."""

    def __init__(
        self,
        policies: DelayPolicies,
        topics: Topics,
        agenda: TrimAgenda,
        expiry: Expiry,
        clock: StoreClock,
        wake: Callable[[], None],
    ) -> None:
        """`wake` wakes the scheduler, where there is one."""
        self._policies = policies
        self._topics = topics
        self._agenda = agenda
        self._expiry = expiry
        self._clock = clock
        self._wake = wake

    def set(
        self,
        scope: Scope,
        policies: DelayedDeliveryPolicies,
        expected: DelayedDeliveryPolicies | EllipsisType | None = ...,
    ) -> None:
        """As `DelayPolicies.set`."""
        self._policies.set(scope, policies, expected)
        self.follow(scope)

    def update(self, scope: Scope, values: Mapping[str, PolicyValue | None]) -> Policies:
        """As `DelayPolicies.update`."""
        updated = self._policies.update(scope, values)
        self.follow(scope)
        return updated

    def remove(self, scope: Scope) -> bool:
        """As `DelayPolicies.remove`."""
        removed = self._policies.remove(scope)
        self.follow(scope)
        return removed

    def forget(self, scope: Scope) -> None:
        """The policies of a scope were removed in another transaction."""
        self._policies.changed()
        self.follow(scope)

    def follow(self, scope: Scope) -> None:
        """Have subscriptions go by what is in force now. O(subscriptions in memory for which it may count).

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
            self._agenda.look_at(topic.topic_id, 0)
            topic.changed()
        self._expiry.look_again()
        self._wake()
