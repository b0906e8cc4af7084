"""Delay policies said plainly: which of three scopes wins, and what becomes of a due time."""

from __future__ import annotations

from collections.abc import Sequence

Fields = dict[str, int | bool | None]
NAMESPACE, STORE = "namespace", "store"


class TwinPolicies:
    """What is set at each scope: the store, the one namespace, a topic by its short name."""

    def __init__(self) -> None:
        self.scopes: dict[str, Fields] = {}

    def value(self, topic: str, field: str, default: int | bool) -> int:
        """The narrowest scope that sets a field has it."""
        for scope in (topic, NAMESPACE, STORE):
            found = self.scopes.get(scope, {}).get(field)
            if found is not None:
                return int(found)
        return int(default)

    def dues(self, topic: str, asked: Sequence[int], now_ms: int, *, retry: bool = False) -> list[int] | None:
        """The due times that messages get which ask for `asked`; None: they are refused. No fixed delay for a retry."""
        if not self.value(topic, "active", True):
            return [now_ms] * len(asked)
        fixed_ms = 0 if retry else self.value(topic, "fixed_delivery_delay_ms", 0)
        longest_ms = self.value(topic, "max_delivery_delay_ms", 0)
        tick_ms = max(self.value(topic, "tick_time_ms", 0), 1)
        if fixed_ms:
            asked = [now_ms + fixed_ms] * len(asked)
        elif longest_ms and any(due_ms - now_ms > longest_ms for due_ms in asked):
            return None
        return [due_ms if due_ms <= now_ms else (due_ms + tick_ms - 1) // tick_ms * tick_ms for due_ms in asked]
