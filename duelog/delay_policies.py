"""The delay policies of an open store: set, looked up, and applied to what is sent.

What is in force for a topic is worked out once and kept in memory until something is set or removed. While nothing
is set anywhere, a send pays one look at a flag.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import lmdb
import numpy as np

from duelog.store import policies as rows
from duelog.store.body import EncodedBatch
from duelog.store.environment import Environment
from duelog.store.errors import DelayTooLong, InvalidArgument
from duelog.store.names import TopicName, validate_namespace_name
from duelog.store.policies import STORE_SCOPE, DelayedDeliveryPolicies, EffectivePolicies
from duelog.store.transaction import Transaction

Note = Callable[[TopicName, int], None]
"""Told (topic, how many messages)."""


class DelayPolicies:
    """Policies by scope. Thread-safe."""

    def __init__(self, main: Environment, *, read_only: bool) -> None:
        self._main = main
        self._keeps = not read_only  # another process may set what a read-only store reads
        self._lock = threading.Lock()
        self._by_topic: dict[TopicName, EffectivePolicies] = {}
        self._any = True
        self.on_rejected: Note | None = None
        self.on_overridden: Note | None = None
        with main.read() as raw:
            self._any = bool(rows.scopes_set(raw))

    def get(self, scope: str) -> DelayedDeliveryPolicies | None:
        """What is set at a scope, None: nothing."""
        with self._main.read() as raw:
            return rows.find(raw, scope)

    def all(self) -> list[tuple[str, DelayedDeliveryPolicies]]:
        """(scope, policies) of every scope at which something is set."""
        with self._main.read() as raw:
            return rows.scopes_set(raw)

    def set(self, scope: str, policies: DelayedDeliveryPolicies) -> None:
        """Set the policies of a scope, durably. A send that has begun may still go by those before."""
        self._main.write(lambda transaction: rows.put(transaction, scope, policies))
        self.changed()

    def remove(self, scope: str) -> bool:
        """Remove what is set at a scope, durably; False: nothing was."""

        def work(transaction: Transaction) -> bool:
            found = rows.find(transaction.raw, scope) is not None
            rows.put(transaction, scope, DelayedDeliveryPolicies())
            return found

        removed = self._main.write(work)
        self.changed()
        return removed

    def changed(self) -> None:
        """Forget what was worked out: rows were written."""
        with self._lock:
            self._by_topic.clear()
            with self._main.read() as raw:
                self._any = bool(rows.scopes_set(raw))

    def effective(self, topic: TopicName) -> EffectivePolicies:
        """What is in force for a topic, and where each field comes from. O(1) once worked out."""
        found = self._by_topic.get(topic)
        if found is not None:
            return found
        with self._lock:  # so that nothing is kept that was read before a change and comes after it
            with self._main.read() as raw:
                found = self._resolve(raw, topic)
            if self._keeps:
                self._by_topic[topic] = found
            return found

    @staticmethod
    def _resolve(raw: lmdb.Transaction, topic: TopicName) -> EffectivePolicies:
        return rows.resolve(
            topic,
            rows.find(raw, STORE_SCOPE),
            rows.find(raw, topic.namespace_name),
            rows.find(raw, str(topic)),
        )

    def apply_one(self, topic: TopicName, due_ms: int, now_ms: int) -> int:
        """The due time that the policies in force ask for, of one message. Raises DelayTooLong."""
        if not self._any:
            return due_ms
        batch = EncodedBatch(np.array([due_ms], dtype=np.int64), np.array([due_ms > now_ms]), [b""])
        self.apply(topic, batch, now_ms)
        return int(batch.dues[0])

    def apply(self, topic: TopicName, batch: EncodedBatch, now_ms: int) -> None:
        """Give a batch the due times that the policies in force ask for. Raises DelayTooLong; all or none."""
        if not self._any:
            return
        effective = self.effective(topic)
        if effective.is_plain:
            return
        try:
            dues = effective.apply(batch.dues, now_ms)
        except DelayTooLong:
            if self.on_rejected is not None:
                self.on_rejected(topic, effective.over_limit(batch.dues, now_ms))
            raise
        if effective.active and effective.fixed_delivery_delay_ms and self.on_overridden is not None:
            self.on_overridden(topic, len(batch))
        batch.dues = dues
        batch.delayed = dues > now_ms


def scope_of(namespace: str | None, topic: str | None) -> str:
    """The scope that a caller names: a namespace, a topic, or with neither the store. Raises InvalidArgument."""
    if topic is not None:
        if namespace is not None:
            raise InvalidArgument("namespace", namespace, f"topic={topic!r} is given too: one of the two")
        return str(TopicName.parse(topic))
    return STORE_SCOPE if namespace is None else validate_namespace_name(namespace)
