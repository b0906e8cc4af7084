"""Delay policies (PIP-437): what may be set at which scope, what is in force for a topic, what it does to due times.

Three scopes: the store, a namespace, a topic. Each field is taken from the narrowest scope that sets it, so that a
topic's zero turns off what its namespace asks for. Whose policies are in force is remembered with the value, for
audits and for the error that a producer gets.

Pure values and rows here; who caches them is the engine's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType

import lmdb
import msgpack
import numpy as np
import numpy.typing as npt

from . import catalog
from . import format as fmt
from .errors import DelayTooLong, InvalidArgument
from .format import Table
from .message import MAX_DUE_MS
from .names import SCHEME, TopicName
from .transaction import Transaction

STORE_SCOPE = "store"
"""Key of the store's own policies; namespaces and topics have a `/` in theirs."""


@dataclass(frozen=True, slots=True)
class DelayedDeliveryPolicies:
    """Delay policies as set at one scope (PIP-437); a field that is None is not set there.

    active: False delivers messages at once whatever delay they ask for, and no other policy applies.
    tick_time_ms: Pulsar's tick, in ms. Firing is exact here and no message is ever early, so a tick of 0 or 1 is
        exact too; a larger one rounds due times up to the next multiple of it (counted from the epoch), so that
        messages of one tick are fired together, late by less than a tick.
    max_delivery_delay_ms: longest delay a producer may ask for, in ms; a longer one is refused with DelayTooLong.
        0: no limit.
    fixed_delivery_delay_ms: the delay of every message in ms, whatever its producer asked for, and beside the
        maximum; not to be set for the whole store. 0: none.

    Raises InvalidArgument naming the field.
    """

    active: bool | None = None
    tick_time_ms: int | None = None
    max_delivery_delay_ms: int | None = None
    fixed_delivery_delay_ms: int | None = None

    def __post_init__(self) -> None:
        if self.active is not None and not isinstance(self.active, bool):
            raise InvalidArgument("active", self.active, "expected True, False or None")
        for name in ("tick_time_ms", "max_delivery_delay_ms", "fixed_delivery_delay_ms"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidArgument(name, value, "expected an int of ms, or None")
            if not 0 <= value <= MAX_DUE_MS:
                raise InvalidArgument(name, value, f"expected 0 to {MAX_DUE_MS}")

    def pack(self) -> bytes:
        """Fields of the record: a msgpack map of what is set."""
        packed: bytes = msgpack.packb({name: value for name, value in asdict(self).items() if value is not None})
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> DelayedDeliveryPolicies:
        """Read a record. Raises CorruptRecord."""
        try:
            return cls(**msgpack.unpackb(packed))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise fmt.CorruptRecord(f"delay policies cannot be read: {error}") from error


POLICY_FIELDS = tuple(field.name for field in fields(DelayedDeliveryPolicies))

_DEFAULTS: Mapping[str, bool | int] = MappingProxyType(
    {"active": True, "tick_time_ms": 0, "max_delivery_delay_ms": 0, "fixed_delivery_delay_ms": 0}
)


@dataclass(frozen=True, slots=True)
class EffectivePolicies:
    """What is in force for a topic: every field has a value (0: off).

    set_at: by field name, where its value comes from: "default", "store", "namespace tenant/namespace" or
    "topic persistent://tenant/namespace/name".
    """

    active: bool
    tick_time_ms: int
    max_delivery_delay_ms: int
    fixed_delivery_delay_ms: int
    set_at: Mapping[str, str]

    @property
    def is_plain(self) -> bool:
        """Whether due times are taken as they are asked for."""
        return (
            self.active
            and self.tick_time_ms <= 1
            and not self.max_delivery_delay_ms
            and not self.fixed_delivery_delay_ms
        )

    def apply(self, dues: npt.NDArray[np.int64], now_ms: int) -> npt.NDArray[np.int64]:
        """The due times that messages get which ask for `dues` at `now_ms` (a due time by then: no delay).

        None is earlier than asked, unless delays are off or fixed. Raises DelayTooLong with the longest delay
        asked; then all are refused. O(messages), in numpy.
        """
        if not self.active:
            return np.full(len(dues), now_ms, dtype=np.int64)
        if self.fixed_delivery_delay_ms:
            dues = np.full(len(dues), min(now_ms + self.fixed_delivery_delay_ms, MAX_DUE_MS), dtype=np.int64)
        elif self.max_delivery_delay_ms and len(dues):
            longest_ms = int(dues.max()) - now_ms
            if longest_ms > self.max_delivery_delay_ms:
                raise DelayTooLong(longest_ms, self.max_delivery_delay_ms, self.set_at["max_delivery_delay_ms"])
        if self.tick_time_ms > 1:
            tick_ms = self.tick_time_ms
            rounded = np.minimum(-(-dues // tick_ms) * tick_ms, MAX_DUE_MS)
            dues = np.where(dues > now_ms, rounded, dues)
        return dues

    def over_limit(self, dues: npt.NDArray[np.int64], now_ms: int) -> int:
        """How many of `dues` the maximum refuses."""
        return int(np.count_nonzero(dues - now_ms > self.max_delivery_delay_ms))


def resolve(
    topic: TopicName,
    of_store: DelayedDeliveryPolicies | None,
    of_namespace: DelayedDeliveryPolicies | None,
    of_topic: DelayedDeliveryPolicies | None,
) -> EffectivePolicies:
    """What is in force for a topic, by field: topic over namespace over store over the default."""
    scopes = (
        (f"topic {topic}", of_topic),
        (f"namespace {topic.namespace_name}", of_namespace),
        (STORE_SCOPE, of_store),
    )
    values = dict(_DEFAULTS)
    set_at = dict.fromkeys(POLICY_FIELDS, "default")
    for name in POLICY_FIELDS:
        for where, policies in scopes:
            value = None if policies is None else getattr(policies, name)
            if value is not None:
                values[name] = value
                set_at[name] = where
                break
    return EffectivePolicies(
        bool(values["active"]),
        values["tick_time_ms"],
        values["max_delivery_delay_ms"],
        values["fixed_delivery_delay_ms"],
        MappingProxyType(set_at),
    )


# -- rows --------------------------------------------------------------------------------------


def find(raw: lmdb.Transaction, scope: str) -> DelayedDeliveryPolicies | None:
    """The policies set at a scope. Raises CorruptRecord."""
    key = fmt.policy_key(scope)
    value = raw.get(key)
    return None if value is None else DelayedDeliveryPolicies.unpack(fmt.unseal(key, value))


def put(transaction: Transaction, scope: str, policies: DelayedDeliveryPolicies) -> None:
    """Set the policies of a scope in place of those there; where no field is set the record goes."""
    if policies == DelayedDeliveryPolicies():
        transaction.delete(fmt.policy_key(scope))
        return
    if scope == STORE_SCOPE and policies.fixed_delivery_delay_ms is not None:
        raise InvalidArgument(
            "fixed_delivery_delay_ms", policies.fixed_delivery_delay_ms, "is set for a namespace or a topic (PIP-437)"
        )
    transaction.put(fmt.policy_key(scope), policies.pack())


def scopes_set(raw: lmdb.Transaction) -> list[tuple[str, DelayedDeliveryPolicies]]:
    """(scope, policies) of every scope at which something is set."""
    prefix = fmt.prefix(Table.POLICY)
    return [(key[1:].decode(), DelayedDeliveryPolicies.unpack(row)) for key, row in catalog.rows(raw, prefix)]


def scope_name(scope: str) -> str:
    """A scope as people read it: "store", "namespace a/b", "topic persistent://a/b/c"."""
    if scope == STORE_SCOPE:
        return scope
    return f"topic {scope}" if scope.startswith(SCHEME) else f"namespace {scope}"
