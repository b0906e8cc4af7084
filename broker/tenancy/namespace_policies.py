"""Policies of namespaces and topics, each under a path of its own: GET (204: not set there), POST, DELETE.

`applied=true` asks for what is in force, wherever it was set. Pulsar writes retention as minutes and MiB, -1 for no
end, and the time to live in seconds.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from ...delayed_store import DelayedStore
from ...store.config import MIB
from ...store.message import MAX_DUE_MS
from ...store.names import TopicName
from ...store.policy.policies import DELAY_FIELDS, EffectivePolicies, Policies, merge
from ..admin.http_request import (
    HttpError,
    Request,
    checked_integer,
    existing_namespace,
    integer,
    one_of,
    texts_of,
    value_of,
)
from ..admin.routing import NAMESPACE, TOPIC, Need, Route
from ..lookup.compatibility import Compatibility
from ..lookup.resources import AutoCreation, NamespaceSettings, Resources, path_of
from ..lookup.topic_address import TopicAddress, partition_name
from ..lookup.topic_lookup import TopicAccess
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


_QUERY = ("applied", "isGlobal", "authoritative")


class PolicyScope(NamedTuple):
    """A namespace, or a topic: of a partitioned one what is set is set for each partition, too."""

    namespace: str | None = None
    topics: tuple[str, ...] = ()
    """The topic, and its partitions."""

    def each(self) -> list[dict[str, str]]:
        """The names, as the store's methods take them."""
        return [{"topic": topic} for topic in self.topics] or [{"namespace": self.namespace or ""}]


def topic_scope(resources: Resources, topic: TopicName) -> PolicyScope:
    """The scope of a topic or a partitioned one."""
    partitions = (str(partition_name(topic, number)) for number in range(resources.partitions(topic)))
    return PolicyScope(topics=(str(topic), *partitions))


async def hand_down(store: DelayedStore, scope: PolicyScope) -> None:
    """Set for partitions that are new what is set for their topic."""

    def work() -> None:
        first, *others = scope.topics
        own = store.policies(topic=first)
        for topic in others if own is not None else ():
            store.set_policies(own or Policies(), topic=topic)

    await asyncio.to_thread(work)


@dataclass(frozen=True, slots=True)
class _Policy:
    """One policy of one kind of scope."""

    path: str
    summary: str
    body: str
    read: Callable[[PolicyScope, bool], Awaitable[Any]]
    """At a scope, or applied; its JSON, None where it is not set."""
    check: Callable[[Any], Any]
    """From JSON to the value that is written. Raises HttpError 412."""
    write: Callable[[PolicyScope, Any], Awaitable[object]]
    """None: not set there."""
    field: str = ""
    """Its name in `Policies`."""
    method: str = "POST"
    query: str = ""
    """A query that may have the number in place of the body: Java's client writes the one of a topic there."""


class NamespacePolicies:
    """For the event loop's thread alone."""

    def __init__(self, store: DelayedStore, resources: Resources, access: TopicAccess) -> None:
        self._store = store
        self._resources = resources
        self._access = access
        kept = (
            _Policy("delayedDelivery", "delays of messages (PIP-437)", "object",
                    partial(self._stored, delays_json), delays_of,
                    partial(self._change, DELAY_FIELDS), "delayed_delivery_policies"),
            _Policy("retention", "how long acknowledged messages are kept", "object",
                    partial(self._stored, retention_json), retention_of,
                    partial(self._change, ("retention_ms", "retention_bytes")), "retention_policies"),
            _Policy("messageTTL", "seconds after which messages count as acknowledged", "integer",
                    partial(self._stored, seconds_json), seconds_of,
                    partial(self._change, ("ttl_ms",)), "message_ttl_in_seconds", query="messageTTL"),
        )  # fmt: skip
        self._of_namespace = (
            *kept,
            _Policy("deduplication", "whether numbered messages are stored once", "boolean",
                    partial(self._setting, "deduplication"), boolean_of,
                    partial(self._set, "deduplication"), "deduplicationEnabled"),
            _Policy("autoTopicCreation", "whether topics come into being by use", "object",
                    self._creation, creation_of,
                    partial(self._set, "auto_creation"), "autoTopicCreationOverride"),
            _Policy("schemaCompatibilityStrategy", "what a topic's next schema has to be", "string",
                    self._compatibility, compatibility_of,
                    partial(self._set, "compatibility"), "schema_compatibility_strategy", "PUT"),
        )  # fmt: skip
        self._of_topic = (
            *kept,
            _Policy("deduplicationEnabled", "whether numbered messages are stored once", "boolean",
                    self._topic_deduplication, boolean_of, self._set_topic_deduplication),
        )  # fmt: skip

    def routes(self) -> list[Route]:
        found = []
        for base, policies, scope in (
            (NAMESPACE, self._of_namespace, self._namespace_scope),
            (TOPIC, self._of_topic, self._topic_scope),
        ):
            for each in policies:
                path, asked = f"{base}/{each.path}", (*_QUERY[1:], each.query) if each.query else _QUERY[1:]
                found += [
                    Route("GET", path, partial(self._get, each, scope), f"Get {each.summary}", Need.TENANT, _QUERY),
                    Route(each.method, path, partial(self._put, each, scope), f"Set {each.summary}", Need.TENANT,
                          asked, each.body),
                ]  # fmt: skip
                if each.method == "POST":
                    delete = partial(self._delete, each, scope)
                    found.append(Route("DELETE", path, delete, f"Unset {each.summary}", Need.TENANT, _QUERY[1:]))
        for name, value in _UNSET.items():
            get = partial(self._unset, value)
            found.append(Route("GET", f"{NAMESPACE}/{name}", get, "A policy that duelog has not: not set", Need.TENANT))
        return found

    async def all_of(self, namespace: str) -> dict[str, Any]:
        """The policies set for a namespace, as fields of `Policies`."""
        scope = PolicyScope(namespace)
        found = {each.field: await each.read(scope, False) for each in self._of_namespace}
        return {name: value for name, value in found.items() if value is not None}

    def changes(self, namespace: str, body: dict[str, Any]) -> list[Callable[[], Awaitable[object]]]:
        """Prepare the writes of a new namespace's `Policies`. HttpError 412 for what is not offered.

        Java's client sends every field, those that say nothing too.
        """
        scope = PolicyScope(namespace)
        fields = {each.field: (each.check, each.write) for each in self._of_namespace}
        fields["auth_policies"] = (granted_of, partial(self._set, "permissions"))
        found: list[Callable[[], Awaitable[object]]] = []
        for name, value in body.items():
            if name in fields:
                check, write = fields[name]
                if value is not None:
                    found.append(partial(write, scope, check(value)))
            elif name not in _PASSED_OVER and _says_something(name, value):
                raise HttpError(412, f"{name}: such a policy is not offered here")
        return found

    # -- one policy ----------------------------------------------------------------------------------

    async def _get(self, policy: _Policy, scope: Callable[[Request], Awaitable[PolicyScope]], request: Request) -> Any:
        applied = request.flag("applied")
        return await policy.read(await scope(request), applied)

    async def _unset(self, value: Any, request: Request) -> Any:
        await self._namespace_scope(request)
        return value

    async def _put(self, policy: _Policy, scope: Callable[[Request], Awaitable[PolicyScope]], request: Request) -> None:
        found = await scope(request)
        text = request.query.get(policy.query)
        value = integer(policy.query, text, 0, 2**31 - 1) if text else request.json()
        await policy.write(found, policy.check(value))

    async def _delete(
        self, policy: _Policy, scope: Callable[[Request], Awaitable[PolicyScope]], request: Request
    ) -> None:
        await policy.write(await scope(request), None)

    async def _namespace_scope(self, request: Request) -> PolicyScope:
        for name in _QUERY:
            request.flag(name)
        return PolicyScope(existing_namespace(self._resources, request))

    async def _topic_scope(self, request: Request) -> PolicyScope:
        namespace = (await self._namespace_scope(request)).namespace
        address = TopicAddress(request.topic.base)  # a partition has what its topic has
        if not await self._access.exists(request.topic):
            raise HttpError(404, f"topic {request.topic.name} does not exist in {namespace}")
        partitioned = self._resources.partitions(address.name)
        return topic_scope(self._resources, address.name if partitioned else request.topic.name)

    # -- the store's ---------------------------------------------------------------------------------

    async def _stored(self, show: Shown, scope: PolicyScope, applied: bool) -> Any:
        def work() -> Any:
            own = self._store.policies(**scope.each()[0]) or Policies()
            if scope.topics:
                in_force = self._store.effective_policies(scope.topics[0])
            else:  # of its topics that set nothing
                of_store = self._store.policies() or Policies()
                in_force = merge([(f"namespace {scope.namespace}", own), ("store", of_store)])
            return show(in_force if applied else own, in_force)

        return await asyncio.to_thread(work)

    async def _change(self, fields: Collection[str], scope: PolicyScope, found: Mapping[str, Any] | None) -> None:
        def work() -> None:
            for each in scope.each():
                self._store.update_policies(**each, **(dict.fromkeys(fields) if found is None else found))

        await asyncio.to_thread(work)

    # -- the broker's --------------------------------------------------------------------------------

    async def _setting(self, name: str, scope: PolicyScope, applied: bool) -> Any:
        settings = self._resources.namespaces.get(scope.namespace or "") or NamespaceSettings()
        own = getattr(settings, name)
        return getattr(self._resources.defaults, name) if own is None and applied else own

    async def _set(self, name: str, scope: PolicyScope, value: Any) -> None:
        change = {name: value}
        await self._resources.namespaces.change(
            scope.namespace or "", lambda before: None if before is None else replace(before, **change)
        )

    async def _creation(self, scope: PolicyScope, applied: bool) -> Any:
        found = await self._setting("auto_creation", scope, applied)
        return None if found is None else creation_json(found)

    async def _compatibility(self, scope: PolicyScope, applied: bool) -> Any:
        return str(await self._setting("compatibility", scope, applied) or "UNDEFINED")

    async def _topic_deduplication(self, scope: PolicyScope, applied: bool) -> Any:
        name = TopicAddress.parse(scope.topics[0]).base
        return self._resources.deduplicates(name) if applied else self._resources.deduplication.get(path_of(name))

    async def _set_topic_deduplication(self, scope: PolicyScope, value: bool | None) -> None:
        name = path_of(TopicAddress.parse(scope.topics[0]).base)
        await self._resources.deduplication.change(name, lambda before: value)


_UNSET: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            "antiAffinity", "autoSubscriptionCreation", "compactionThreshold", "deduplicationSnapshotInterval",
            "dispatchRate", "entryFilters", "inactiveTopicPolicies", "maxConsumersPerSubscription",
            "maxConsumersPerTopic", "maxProducersPerTopic", "maxSubscriptionsPerTopic", "maxTopicsPerNamespace",
            "maxUnackedMessagesPerConsumer", "maxUnackedMessagesPerSubscription", "offloadDeletionLagMs",
            "offloadPolicies", "persistence", "persistence/bookieAffinity", "publishRate",
            "replicatorDispatchRate", "resourcegroup", "schemaAutoUpdateCompatibilityStrategy", "subscribeRate",
            "subscriptionDispatchRate", "subscriptionExpirationTime",
        )
    ),
    "allowedClusters": [],
    "backlogQuotaMap": {},
    "dispatcherPauseOnAckStatePersistent": False,
    "encryptionRequired": False,
    "isAllowAutoUpdateSchema": True,
    "offloadThreshold": -1,
    "offloadThresholdInSeconds": -1,
    "permissions/subscription": {},
    "properties": {},
    "schemaValidationEnforced": False,
    "subscriptionAuthMode": "None",
    "subscriptionTypesEnabled": [],
}  # fmt: skip
"""Pulsar's answers for policies that duelog does not have; None: 204."""

_PASSED_OVER = {"bundles", "replication_clusters", "allowed_clusters", "bundles_activated", "deleted"}


def _says_something(name: str, value: Any) -> bool:
    """Return True if a field of `Policies` asks for anything but what duelog does.

    Java writes -1 for a limit that is not set.
    """
    if name == "is_allow_auto_update_schema":
        return value is False
    if isinstance(value, dict):
        return any(_says_something(key, each) for key, each in value.items())
    if isinstance(value, int | float):
        return value > 0
    return bool(value) and value not in ("None", "UNDEFINED", "Full")
