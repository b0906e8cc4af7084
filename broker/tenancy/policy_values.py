"""Policies as Pulsar's clients write them, and as the store has them. No I/O.

Pulsar writes retention as minutes and MiB, -1 for no end, and the time to live in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...store.config import MIB
from ...store.message import MAX_DUE_MS
from ...store.policy.policies import EffectivePolicies, Policies
from ..admin.http_request import HttpError, checked_integer, one_of, texts_of, value_of
from ..lookup.compatibility import Compatibility
from ..lookup.resources import AutoCreation
from ..security.permissions import Action

Fields = dict[str, Any]
"""Fields of `Policies`; None: not set."""

Set = Policies | EffectivePolicies
"""Shows a policy that is set at a scope, or in force there."""

Shown = Callable[[Set, EffectivePolicies], Any]
"""Writes what is set, which is told with what is in force; None: it is not set."""

_FOR_EVER = 2**63 - 1
_MINUTE_MS = 60_000
_MAX_PARTITIONS = 10_000

_NO_ACTIONS = ("functions", "sources", "sinks", "packages")
"""Pulsar grants these, too. There is nothing here that they would allow."""

_DELAYS = {
    "tickTime": "tick_time_ms",
    "maxDeliveryDelayInMillis": "max_delivery_delay_ms",
    "fixedDeliveryDelayInMillis": "fixed_delivery_delay_ms",
}


def delays_of(found: object) -> Fields:
    """`DelayedDeliveryPolicies` of PIP-437; a field that is left out or null is not set. HttpError 412."""
    body = as_object("delayedDelivery", found)
    active = None if body.get("active") is None else value_of(body, "active", bool, True)
    given = {name: body.get(name) for name in _DELAYS}
    return {"active": active} | {
        _DELAYS[name]: None if value is None else checked_integer(name, value, 0, MAX_DUE_MS)
        for name, value in given.items()
    }


def delays_json(found: Set, in_force: EffectivePolicies) -> dict[str, Any] | None:
    """Write delays; None: nothing is set.

    `active` and `tickTime` are always told, as Java's client reads a missing one as false.
    """
    if all(getattr(found, field) is None for field in ("active", *_DELAYS.values())):
        return None
    values = {name: getattr(found, field) for name, field in _DELAYS.items()}
    set_there = {name: value for name, value in values.items() if value is not None}
    return {"active": in_force.active, "tickTime": in_force.tick_time_ms, **set_there}


def retention_of(found: object) -> Fields:
    """`RetentionPolicies`. The store keeps what either field asks for; 0: that one asks for nothing. HttpError 412."""
    body = as_object("retention", found)
    minutes = checked_integer("retentionTimeInMinutes", body.get("retentionTimeInMinutes"), -1, 2**31 - 1)
    mib = checked_integer("retentionSizeInMB", body.get("retentionSizeInMB"), -1, 2**40)
    if (minutes == 0) != (mib == 0):
        raise HttpError(412, f"retentionTimeInMinutes={minutes}, retentionSizeInMB={mib}: both are 0, or none is")
    if minutes < 0 and mib < 0:
        return {"retention_ms": _FOR_EVER, "retention_bytes": 0}
    return {"retention_ms": max(minutes, 0) * _MINUTE_MS, "retention_bytes": max(mib, 0) * MIB}


def retention_json(found: Set, _: object) -> dict[str, int] | None:
    """The inverse of `retention_of`; None: nothing is set."""
    if found.retention_ms is None and found.retention_bytes is None:
        return None
    ms, size = found.retention_ms or 0, found.retention_bytes or 0
    minutes, mib = -(-ms // _MINUTE_MS), -(-size // MIB)
    if ms == _FOR_EVER:
        minutes = mib = -1
    elif ms and not size:
        mib = -1
    elif size and not ms:
        minutes = -1
    return {"retentionTimeInMinutes": minutes, "retentionSizeInMB": mib}


def creation_of(found: object) -> AutoCreation:
    """`AutoTopicCreationOverride`. HttpError 412."""
    body = as_object("autoTopicCreation", found)
    allowed = value_of(body, "allowAutoTopicCreation", bool, False)
    kind = body.get("topicType")
    partitions = body.get("defaultNumPartitions")
    if not allowed and kind is None:
        return AutoCreation(False)
    if one_of("topicType", kind, ("partitioned", "non-partitioned")) == "non-partitioned":
        if partitions:
            raise HttpError(412, f"defaultNumPartitions={partitions}: topicType is non-partitioned")
        return AutoCreation(allowed)
    return AutoCreation(allowed, checked_integer("defaultNumPartitions", partitions, 1, _MAX_PARTITIONS))


def creation_json(found: AutoCreation) -> dict[str, Any]:
    """The inverse of `creation_of`."""
    shown: dict[str, Any] = {
        "allowAutoTopicCreation": found.allowed,
        "topicType": "partitioned" if found.partitions else "non-partitioned",
    }
    return {**shown, "defaultNumPartitions": found.partitions} if found.partitions else shown


def compatibility_of(found: object) -> Compatibility | None:
    """`SchemaCompatibilityStrategy`; None: as the broker's configuration says. HttpError 412."""
    text = one_of("schemaCompatibilityStrategy", found, ("UNDEFINED", *Compatibility))
    return None if text == "UNDEFINED" else Compatibility(text)


def seconds_of(found: object) -> Fields:
    """A time to live. HttpError 412."""
    return {"ttl_ms": checked_integer("messageTTL", found, 0, 2**31 - 1) * 1_000}


def seconds_json(found: Set, _: object) -> int | None:
    """The inverse of `seconds_of`, rounded up."""
    return None if found.ttl_ms is None else -(-found.ttl_ms // 1_000)


def boolean_of(found: object) -> bool:
    """True or false. HttpError 412."""
    if not isinstance(found, bool):
        raise HttpError(412, f"the body: expected true or false, not {found!r:.100}")
    return found


def actions_of(name: str, values: Mapping[str, Any]) -> frozenset[Action]:
    """The actions in a field, a list of texts; those for what duelog has not are passed over. HttpError 412."""
    found = {one_of(name, action, (*Action, *_NO_ACTIONS)) for action in texts_of(values, name)}
    return frozenset(map(Action, found.difference(_NO_ACTIONS)))


def granted_of(found: object) -> dict[str, frozenset[Action]]:
    """`AuthPolicies` of a namespace: by role, what it may do.

    Raises HttpError 412, also for rights by topic or subscription.
    """
    body = as_object("auth_policies", found)
    for name in ("destination_auth", "subscription_auth_roles"):
        if value_of(body, name, dict, {}):
            raise HttpError(412, f"auth_policies.{name}: rights are by namespace here, in namespace_auth")
    roles: dict[str, Any] = value_of(body, "namespace_auth", dict, {})
    granted = {role: actions_of(role, roles) for role in roles}
    return {role: actions for role, actions in granted.items() if actions}


def as_object(name: str, found: object) -> Mapping[str, Any]:
    """A JSON object. HttpError 412."""
    if not isinstance(found, dict):
        raise HttpError(412, f"{name}: expected a JSON object")
    return found
