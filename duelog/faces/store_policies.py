"""The policies of a store: set, looked at and removed by scope."""

from __future__ import annotations

from types import EllipsisType

from duelog.store.errors import InvalidArgument
from duelog.store.names import TopicName
from duelog.store.policy.policies import DelayedDeliveryPolicies, EffectivePolicies, Policies, PolicyChange
from duelog.store.policy.policy_records import Scope

from ..engine import Engine


class StorePolicies:
    """What a store has for those who set policies; a part of DelayedStore."""

    _engine: Engine

    def set_policies(
        self,
        policies: DelayedDeliveryPolicies,
        *,
        namespace: str | None = None,
        topic: str | None = None,
        subscription: str | None = None,
        expected: DelayedDeliveryPolicies | EllipsisType | None = ...,
    ) -> None:
        """Set policies for a namespace, a topic, a subscription of `topic`, or with none of them the store.

        `Policies` replace all that is set there, `DelayedDeliveryPolicies` the delay policies (PIP-437) alone. Durable
        when it returns, kept by the store and in force at once: for what is sent after it (messages that wait keep
        their due times), for subscriptions that are open, and for what retention keeps. The namespace, topic or
        subscription need not exist.

        expected: set them only if this is what is set there (None: nothing is), in one step; else PoliciesChanged is
        raised, with both. Left out: whatever is set there. Raises InvalidArgument, StoreFull, StoreFailed.
        """
        self._engine.check_writable()
        if not isinstance(policies, DelayedDeliveryPolicies):
            raise InvalidArgument("policies", policies, "expected Policies or DelayedDeliveryPolicies")
        if not isinstance(expected, (DelayedDeliveryPolicies, EllipsisType)) and expected is not None:
            raise InvalidArgument("expected", expected, "expected Policies, DelayedDeliveryPolicies or None")
        scope = Scope.of(namespace, topic, subscription)
        self._engine.policies.set(scope, policies, expected)
        self._engine.upkeep.policy_changes.follow(scope)

    def update_policies(
        self,
        /,
        *,
        namespace: str | None = None,
        topic: str | None = None,
        subscription: str | None = None,
        **values: PolicyChange,
    ) -> Policies:
        """Set single fields of `Policies` at a scope, durably, and leave the others; None unsets a field.

        So `update_policies(topic="reminders", retention_ms=timedelta(days=7), ttl_ms=None)` has a topic keep for a week
        and live as long as its namespace says. Returns what is set there then. Raises as `set_policies`.
        """
        self._engine.check_writable()
        scope = Scope.of(namespace, topic, subscription)
        updated = self._engine.policies.update(scope, values)
        self._engine.upkeep.policy_changes.follow(scope)
        return updated

    def policies(
        self, *, namespace: str | None = None, topic: str | None = None, subscription: str | None = None
    ) -> Policies | None:
        """The policies set at just this scope; None: none are. Raises InvalidArgument."""
        self._engine.check_open()
        return self._engine.policies.get(Scope.of(namespace, topic, subscription))

    def all_policies(self) -> dict[str, Policies]:
        """What is set at every scope, by its name: "store", "namespace a/b", "topic persistent://a/b/c", ...

        A subscription's is "subscription NAME of topic persistent://a/b/c".
        """
        self._engine.check_open()
        return {str(scope): policies for scope, policies in self._engine.policies.all()}

    def remove_policies(
        self, *, namespace: str | None = None, topic: str | None = None, subscription: str | None = None
    ) -> bool:
        """Remove the policies set at a scope, durably; False: none were. Raises as `set_policies`."""
        self._engine.check_writable()
        scope = Scope.of(namespace, topic, subscription)
        removed = self._engine.policies.remove(scope)
        self._engine.upkeep.policy_changes.follow(scope)
        return removed

    def effective_policies(self, topic: str, subscription: str | None = None) -> EffectivePolicies:
        """The policies in force for a topic or a subscription, and by field at which scope each was set.

        Raises InvalidArgument.
        """
        self._engine.check_open()
        scope = Scope.of(topic=topic, subscription=subscription)
        return self._engine.policies.effective(TopicName.parse(topic), scope.subscription)
