"""Rules: policies are set and removed at every scope: those of delays, and those of what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from duelog import DelayedDeliveryPolicies, Policies

from .drawing import HANDING_OUT, INLINE_DELAYS, PICK, STORING, TAKING_BACK, only, pick
from .machine import Machine
from .twin_policies import NAMESPACE, STORE, Fields, Scope

SCOPES: tuple[Scope, ...] = (STORE, NAMESPACE, "t0", "t1", ("t0", "a"), ("t0", "b"))
KEPT = st.fixed_dictionaries(
    {
        "retention_ms": st.sampled_from((None, None, 0, 30, 1_000)),
        "retention_bytes": st.sampled_from((None, None, 0, 150)),
        "ttl_ms": st.sampled_from((None, None, 0, 40, 3_000)),
        "max_redeliveries": st.sampled_from((None, None, -1, 0, 2)),
        "ack_timeout_ms": st.sampled_from((None, None, 0, 1, 50)),
        "nack_backoff_ms": st.sampled_from((None, None, 0, 10)),
        "nack_backoff_max_ms": st.sampled_from((None, None, 1_000)),
        "max_in_flight": st.sampled_from((None, None, 0, 1, 3)),
        "max_pending": st.sampled_from((None, None, 0, 1, 4)),
    }
)


class PolicyRules(Machine):
    """Whatever is set for a store, a namespace, a topic or a subscription."""

    @only(TAKING_BACK)
    @rule(
        scope=st.sampled_from((STORE, NAMESPACE, "t0", "t1")),
        active=st.sampled_from((None, None, True, False)),
        tick_ms=st.sampled_from((None, 0, 1, 7, 100)),
        longest_ms=st.sampled_from((None, None, 0, 40)),
        fixed_ms=st.sampled_from((None, None, 0, 30)),
    )
    def set_delay_policies(
        self, scope: str, active: bool | None, tick_ms: int | None, longest_ms: int | None, fixed_ms: int | None
    ) -> None:
        fields: Fields = {
            "active": active,
            "tick_time_ms": tick_ms,
            "max_delivery_delay_ms": longest_ms,
            "fixed_delivery_delay_ms": None if scope == STORE else fixed_ms,
        }
        self._set(scope, fields, delays_alone=True)

    @only(STORING, HANDING_OUT, INLINE_DELAYS)
    @rule(number=PICK, fields=KEPT)
    def set_policies(self, number: int, fields: Fields) -> None:
        """Set the kept policies; with them the delay policies of that scope go, which are not among the fields."""
        scope = pick(SCOPES, number)
        if isinstance(scope, tuple):
            fields = {
                field: value for field, value in fields.items() if not field.startswith(("retention", "max_pending"))
            }
        self._set(scope, fields, delays_alone=False)

    def _set(self, scope: Scope, fields: Fields, *, delays_alone: bool) -> None:
        policies = (DelayedDeliveryPolicies if delays_alone else Policies)(**fields)  # type: ignore[arg-type]
        with self._other_timeouts():
            namespace, topic, subscription = _named(scope)
            self.store.set_policies(policies, namespace=namespace, topic=topic, subscription=subscription)
            now = self.twin.policies.set(scope, fields, delays_alone=delays_alone)
        found = self.store.policies(namespace=namespace, topic=topic, subscription=subscription)
        assert found == (Policies(**now) if now else None)  # type: ignore[arg-type]

    @precondition(lambda self: self.twin.policies.scopes)
    @rule(number=PICK)
    def remove_policies(self, number: int) -> None:
        scope = pick(list(self.twin.policies.scopes), number)
        namespace, topic, subscription = _named(scope)
        with self._other_timeouts():
            removed = self.store.remove_policies(namespace=namespace, topic=topic, subscription=subscription)
            assert removed == self.twin.policies.remove(scope)

    @contextmanager
    def _other_timeouts(self) -> Iterator[None]:
        """Messages held when a timeout begins to be in force count as held from then on."""
        subs = [sub for topic in self.twin.topics.values() for sub in topic.subscriptions.values()]
        untimed = [sub for sub in subs if not sub.setting("ack_timeout_ms")]
        yield
        for sub in subs:
            if not sub.setting("ack_timeout_ms"):
                sub.until_ms.clear()
                sub.batches.clear()
        for sub in untimed:
            sub.handed_ms = dict.fromkeys(sub.held, self.twin.now_ms)
            if sub.held and sub.setting("ack_timeout_ms"):
                sub.hold_since(list(sub.held), self.twin.now_ms)


def _named(scope: Scope) -> tuple[str | None, str | None, str | None]:
    """Namespace, topic and subscription of a scope."""
    if isinstance(scope, tuple):
        return None, *scope
    return (None if scope != NAMESPACE else "public/default", None if scope in (STORE, NAMESPACE) else scope, None)
