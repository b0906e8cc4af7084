"""Policies of an open store that were set or removed: running subscriptions go by them at once.

Subscriptions keep what is in force for them, so that receiving and acknowledging look at an attribute; here it is
replaced. Retention and time to live are looked up when ledgers are trimmed and messages expire, which happens at the
next tick after a change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from duelog.store.clock import StoreClock
from duelog.store.policy.policy_records import Scope

from ..sending.delay_policies import DelayPolicies
from ..topics.topic_list import Topics
from ..topics.trim_agenda import TrimAgenda
from .expiry import Expiry


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
