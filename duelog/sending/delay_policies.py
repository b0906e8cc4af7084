"""The policies of an open store: set, looked up, and the delay policies applied to what is sent.

What is in force for a topic or a subscription is worked out once and kept in memory until something is set or removed.
While no delay policy is set anywhere, a send pays one look at a flag.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import EllipsisType

import numpy as np
import numpy.typing as npt

from duelog.store.codec.body import EncodedBatch
from duelog.store.config import StoreConfig
from duelog.store.duration import plain_setting
from duelog.store.env.environment import Environment
from duelog.store.errors import DelayTooLong, PoliciesChanged, StoreFull
from duelog.store.listener import StoreListener, tell
from duelog.store.names import TopicName
from duelog.store.policy import policy_records as rows
from duelog.store.policy.policies import (
    DEFAULTS,
    DELAY_FIELDS,
    DelayedDeliveryPolicies,
    EffectivePolicies,
    Policies,
    PolicyChange,
    check_value,
    delay_part,
    merge,
    of_config,
)
from duelog.store.policy.policy_records import STORE_SCOPE, Scope

_log = logging.getLogger("duelog.config")


class DelayPolicies:
    """Policies by scope. Thread-safe."""

    def __init__(self, main: Environment, listeners: Sequence[StoreListener], *, read_only: bool) -> None:
        """`listeners` hear of messages that are rejected or overridden."""
        self._main = main
        self._keeps = not read_only  # another process may set what a read-only store reads
        self._lock = threading.Lock()
        self._known: dict[tuple[TopicName, str | None], EffectivePolicies] = {}
        self._shared: dict[object, EffectivePolicies] = {}
        self._any = True
        self.shortest_ttl_ms: int | None = None
        """The shortest time to live that is set anywhere; None: none is."""
        self.limits_pending = False
        """True when a quota of pending messages is set anywhere."""
        self.says_replicated = False
        """True when `replicated` is set anywhere."""
        self.version = 0
        """Another number after each change."""
        self._listeners = listeners
        self._look()

    def _look(self) -> None:
        with self._main.read() as raw:
            scopes = [policies for _, policies in rows.scopes_set(raw)]
        self._any = any(name in policies.fields_set() for policies in scopes for name in DELAY_FIELDS)
        self.limits_pending = any(policies.max_pending for policies in scopes)
        self.says_replicated = any(policies.replicated is not None for policies in scopes)
        self.version += 1
        self.shortest_ttl_ms = min((policies.ttl_ms for policies in scopes if policies.ttl_ms), default=None)

    # -- what a store is made with -------------------------------------------------------------------

    def record(self, config: StoreConfig) -> None:
        """Have a store without recorded defaults go by those of `config` from now on, once and for all.

        On a full disk nothing is recorded, and everything is kept until a later opening.
        """
        with self._main.read() as raw:
            if rows.is_recorded(raw):
                return
        try:
            self._main.write(lambda transaction: rows.record_defaults(transaction, of_config(config)))
            self.changed()
        except StoreFull as error:
            _log.warning("defaults are not recorded, everything is kept until a later opening: %s", error)

    def warn_of(self, config: StoreConfig) -> None:
        """Log which of the settings that a program asks for the store has otherwise: it goes by its own."""
        with self._main.read() as raw:
            kept = rows.find(raw, STORE_SCOPE) or Policies()
        differing = [
            f"{name}={asked!r} is asked for, the store keeps {name}={kept.fields_set().get(name, DEFAULTS[name])!r}"
            for name, asked in of_config(config).fields_set().items()
            if kept.fields_set().get(name, DEFAULTS[name]) != asked
        ]
        if differing:
            _log.warning("%s: %s; DelayedStore.set_policies changes it", self._main.path.parent, "; ".join(differing))

    # -- by scope ------------------------------------------------------------------------------------

    def get(self, scope: Scope) -> Policies | None:
        """Return the policies set at a scope, None: there are none."""
        with self._main.read() as raw:
            return rows.find(raw, scope)

    def all(self) -> list[tuple[Scope, Policies]]:
        """(scope, policies) of every scope at which something is set."""
        with self._main.read() as raw:
            return rows.scopes_set(raw)

    def set(
        self,
        scope: Scope,
        policies: DelayedDeliveryPolicies,
        expected: DelayedDeliveryPolicies | EllipsisType | None = ...,
    ) -> None:
        """Set the policies of a scope, durably. A send that has begun may still go by those before.

        expected: what must be set there (`...`: whatever is), compared and replaced in one transaction; delay policies
        are compared with the delay policies. Raises PoliciesChanged, with nothing set.
        """

        def compare(before: Policies) -> DelayedDeliveryPolicies:
            if not isinstance(expected, EllipsisType):
                whole = expected is None or isinstance(expected, Policies)
                if (before if whole else delay_part(before)) != (expected or Policies()):
                    raise PoliciesChanged(str(scope), expected, before if before.fields_set() else None)
            return policies

        self._change(scope, compare)

    def update(self, scope: Scope, given: Mapping[str, PolicyChange]) -> Policies:
        """Set some fields at a scope and leave the others; a value of None unsets one. Returns the new policies."""
        values = {name: plain_setting(name, value) for name, value in given.items()}
        for name, value in values.items():
            check_value(name, value)
        return self._change(scope, lambda before: replace(before, **values))[1]  # type: ignore[arg-type]

    def remove(self, scope: Scope) -> bool:
        """Remove the policies of a scope, durably. Returns False if it had none."""
        return bool(self._change(scope, lambda before: Policies())[0].fields_set())

    def _change(self, scope: Scope, work: Callable[[Policies], DelayedDeliveryPolicies]) -> tuple[Policies, Policies]:
        changed = self._main.write(lambda transaction: rows.change(transaction, scope, work))
        self.changed()
        return changed

    def changed(self) -> None:
        """Forget cached policies after rows were written."""
        with self._lock:
            self._known.clear()
            self._shared.clear()
            self._look()

    def effective(self, topic: TopicName, subscription: str | None = None) -> EffectivePolicies:
        """Return the policies in force for a topic or a subscription, each field with its scope. O(1) once cached."""
        policies = self._known.get((topic, subscription))
        if policies is not None:
            return policies
        with self._lock:  # so that nothing is kept that was read before a change and comes after it
            with self._main.read() as raw:
                scopes, defaults = rows.in_force(raw, topic, subscription)
            policies = self._shared.get((scopes, defaults is DEFAULTS))
            if policies is None:
                policies = merge(scopes, defaults)
            if self._keeps:
                self._shared[scopes, defaults is DEFAULTS] = policies
                self._known[topic, subscription] = policies
            return policies

    def replicated(self, topic: TopicName) -> bool | None:
        """Return the policy `replicated` of a topic; None: no scope sets it."""
        effective = self.effective(topic) if self.says_replicated else None
        if effective is None or effective.set_at["replicated"] == merge(()).set_at["replicated"]:
            return None
        return effective.replicated

    def apply_one(self, topic: TopicName, due_ms: int, now_ms: int, count: int = 1) -> tuple[int, bool]:
        """(the due time that the policies in force ask for, whether it is `overridden`) of one message.

        count: of several that ask for the same. Raises DelayTooLong.
        """
        if not self._any or not count:
            return due_ms, False
        batch = EncodedBatch(np.full(count, due_ms, dtype=np.int64), np.full(count, due_ms > now_ms), [])
        self.apply(topic, batch, now_ms)
        return int(batch.dues[0]), batch.overridden is not None and bool(batch.overridden[0])

    def apply(self, topic: TopicName, batch: EncodedBatch, now_ms: int) -> None:
        """Give a batch the due times that the policies in force ask for. Raises DelayTooLong; all or none.

        Which of them are overridden is counted by `stored`, once they are on disk.
        """
        if not self._any:
            return
        effective = self.effective(topic)
        if effective.is_plain:
            return
        try:
            dues = effective.apply(batch.dues, now_ms)
        except DelayTooLong:
            tell(self._listeners, StoreListener.rejected, topic, effective.over_limit(batch.dues, now_ms))
            raise
        batch.overridden = effective.overridden(batch.dues, now_ms)
        batch.dues = dues
        batch.delayed = dues > now_ms

    def apply_each(
        self, topics: Sequence[TopicName], owners: npt.NDArray[np.intp] | None, batch: EncodedBatch, now_ms: int
    ) -> None:
        """Apply policies to messages of several topics.

        owners: the topic of each, as an index into `topics`; None: all are of the one topic.
        """
        if not self._any:
            return
        if owners is None:
            self.apply(topics[0], batch, now_ms)
            return
        order = owners.argsort(kind="stable")
        edges = np.searchsorted(owners[order], np.arange(len(topics) + 1))
        overridden = np.zeros(len(batch), dtype=np.bool_)
        for at, topic in enumerate(topics):
            rows = order[edges[at] : edges[at + 1]]
            own = EncodedBatch(batch.dues[rows], batch.delayed[rows], [])
            self.apply(topic, own, now_ms)
            batch.dues[rows], batch.delayed[rows] = own.dues, own.delayed
            if own.overridden is not None:
                overridden[rows] = own.overridden
        batch.overridden = overridden

    def retry_due_ms(self, topic: TopicName, due_ms: int, now_ms: int) -> int:
        """When a message comes again whose consumer asked for `due_ms`. Raises DelayTooLong.

        As for one that is sent, but that a fixed delay, which is for what producers send, does not put it off.
        """
        if not self._any:
            return due_ms
        effective = replace(self.effective(topic), fixed_delivery_delay_ms=0)
        try:
            return int(effective.apply(np.array([due_ms], dtype=np.int64), now_ms)[0])
        except DelayTooLong:
            tell(self._listeners, StoreListener.rejected, topic, 1)
            raise

    def stored(self, topic: TopicName, overridden: npt.NDArray[np.bool_] | bool | int | None) -> None:
        """Count durable messages that did not get the delay they asked for: those that `apply` marked, or a number."""
        if isinstance(overridden, np.ndarray):
            overridden = int(np.count_nonzero(overridden))
        count = int(overridden or 0)
        if count:
            tell(self._listeners, StoreListener.overridden, topic, count)
