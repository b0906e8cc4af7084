"""Policies said plainly: which of four scopes wins, and what becomes of a due time."""

from collections.abc import Sequence

from duelog import StoreConfig

Fields = dict[str, int | bool | None]
NAMESPACE, STORE = "namespace", "store"

DELAYS: Fields = {"active": True, "tick_time_ms": 0, "max_delivery_delay_ms": 0, "fixed_delivery_delay_ms": 0}
KEPT: Fields = {
    "retention_ms": 0,
    "retention_bytes": 0,
    "ttl_ms": 0,
    "max_redeliveries": -1,
    "ack_timeout_ms": 0,
    "nack_backoff_ms": 1_000,
    "nack_backoff_max_ms": 60_000,
    "max_in_flight": 0,
    "max_pending": 0,
}
"""The default of each policy; off is 0, and -1 for redeliveries."""


def made_with(config: StoreConfig) -> Fields:
    """The part of a configuration that a store made with it keeps as policies of the store."""
    fields = {field: getattr(config, field) for field in KEPT if hasattr(config, field)}
    return {field: value for field, value in fields.items() if value not in (None, KEPT[field])}


Scope = str | tuple[str, str]
"""STORE, NAMESPACE, a topic by its short name, or a topic and a subscription of it."""


class TwinPolicies:
    """Policies set at each scope: the store, the one namespace, a topic by its short name, a subscription of it."""

    def __init__(self, config: StoreConfig) -> None:
        self.scopes: dict[Scope, Fields] = {STORE: made_with(config)}

    def value(self, topic: str, field: str, subscription: str | None = None) -> int:
        """The narrowest scope that sets a field has it."""
        scopes = (topic, NAMESPACE, STORE)
        for scope in scopes if subscription is None else ((topic, subscription), *scopes):
            found = self.scopes.get(scope, {}).get(field)
            if found is not None:
                return int(found)
        return int({**DELAYS, **KEPT}[field] or 0)

    def dues(self, topic: str, asked: Sequence[int], now_ms: int, *, retried: bool = False) -> list[int] | None:
        """The due times that messages get which ask for `asked`; None: they are refused.

        retried: they are not sent by a producer, whose delays alone may be fixed.
        """
        if not self.value(topic, "active"):
            return [now_ms] * len(asked)
        fixed_ms = 0 if retried else self.value(topic, "fixed_delivery_delay_ms")
        tick_ms = max(self.value(topic, "tick_time_ms"), 1)
        if fixed_ms:
            asked = [now_ms + fixed_ms] * len(asked)
        elif self.too_long(topic, asked, now_ms):
            return None
        return [due_ms if due_ms <= now_ms else (due_ms + tick_ms - 1) // tick_ms * tick_ms for due_ms in asked]

    def too_long(self, topic: str, asked: Sequence[int], now_ms: int) -> int:
        """How many of the due times that are asked for are later than the maximum allows."""
        longest_ms = self.value(topic, "max_delivery_delay_ms")
        return sum(due_ms - now_ms > longest_ms for due_ms in asked) if longest_ms else 0

    def overridden(self, topic: str, asked: Sequence[int], now_ms: int) -> int:
        """How many messages ask for a delay, and get the fixed one in its place."""
        fixed_ms = self.value(topic, "fixed_delivery_delay_ms") if self.value(topic, "active") else 0
        return sum(now_ms < due_ms != now_ms + fixed_ms for due_ms in asked) if fixed_ms else 0

    def forget(self, topic: str, subscription: str | None = None) -> None:
        """A topic was deleted, or a subscription of it."""
        for scope in list(self.scopes):
            of_topic = scope == topic or (isinstance(scope, tuple) and scope[0] == topic)
            if scope == (topic, subscription) or (subscription is None and of_topic):
                del self.scopes[scope]

    def set(self, scope: Scope, fields: Fields, *, delays_alone: bool) -> Fields:
        """Replace what is set at a scope, or its delay policies; returns what is set there now."""
        kept = {field: value for field, value in self.scopes.get(scope, {}).items() if field not in DELAYS}
        fields = {field: value for field, value in fields.items() if value is not None}
        self.scopes[scope] = {**kept, **fields} if delays_alone else fields
        return self.scopes[scope]

    def remove(self, scope: Scope) -> bool:
        """Remove the policies of a scope; True if anything was set."""
        return bool(self.scopes.pop(scope, None))
