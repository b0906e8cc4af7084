"""The policies that the store keeps, read and written for a namespace or for a topic and its partitions."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from ...delayed_store import DelayedStore
from ...store.names import TopicName
from ...store.policy.policies import (
    DELAY_FIELDS,
    DelayedDeliveryPolicies,
    EffectivePolicies,
    Policies,
    merge,
)
from ..lookup.resources import Resources
from ..lookup.topic_address import partition_name


class PolicyScope(NamedTuple):
    """A namespace, or a topic: of a partitioned one what is set is set for each partition, too."""

    namespace: str | None = None
    topics: tuple[str, ...] = ()
    """The topic, and its partitions."""


def topic_scope(resources: Resources, topic: TopicName) -> PolicyScope:
    """The scope of a topic or a partitioned one."""
    partitions = (str(partition_name(topic, number)) for number in range(resources.partitions(topic)))
    return PolicyScope(topics=(str(topic), *partitions))


class PolicyStore:
    """For the event loop's thread alone; the work is done in others."""

    def __init__(self, store: DelayedStore) -> None:
        self._store = store

    async def own(self, scope: PolicyScope) -> Policies:
        """The policies set at just this scope."""
        return await asyncio.to_thread(self._own, scope)

    async def in_force(self, scope: PolicyScope) -> EffectivePolicies:
        """The policies in force for a topic, or for a namespace's topics that set nothing."""
        if scope.topics:
            return await asyncio.to_thread(self._store.effective_policies, scope.topics[0])

        def work() -> EffectivePolicies:
            of_store = self._store.policies() or Policies()
            return merge([(f"namespace {scope.namespace}", self._own(scope)), ("store", of_store)])

        return await asyncio.to_thread(work)

    async def set_delays(self, scope: PolicyScope, delays: DelayedDeliveryPolicies) -> None:
        """Replace the delay policies, and leave the others."""

        def work() -> None:
            if scope.namespace is not None:
                self._store.set_policies(delays, namespace=scope.namespace)
            for topic in scope.topics:
                self._store.set_policies(delays, topic=topic)

        await asyncio.to_thread(work)

    async def update(self, scope: PolicyScope, **values: Any) -> None:
        """Set fields, and leave the others; None: not set there."""

        def work() -> None:
            if scope.namespace is not None:
                self._store.update_policies(namespace=scope.namespace, **values)
            for topic in scope.topics:
                self._store.update_policies(topic=topic, **values)

        await asyncio.to_thread(work)

    async def remove_delays(self, scope: PolicyScope) -> None:
        """Have no delay policy be set there."""
        await self.update(scope, **dict.fromkeys(DELAY_FIELDS))

    async def hand_down(self, scope: PolicyScope) -> None:
        """Set for partitions that are new what is set for their topic."""

        def work() -> None:
            first, *others = scope.topics
            own = self._store.policies(topic=first)
            for topic in others if own is not None else ():
                self._store.set_policies(own or Policies(), topic=topic)

        await asyncio.to_thread(work)

    def _own(self, scope: PolicyScope) -> Policies:
        if scope.namespace is not None:
            return self._store.policies(namespace=scope.namespace) or Policies()
        return self._store.policies(topic=scope.topics[0]) or Policies()
