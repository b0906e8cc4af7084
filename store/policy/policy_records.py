"""Records of policies: one for the store, for each namespace and for each topic that has any.

A topic's record holds those of its subscriptions too, since the names of both would not fit into one key. The store's
record says that the defaults of the program that made the store are in it (`recorded`); without that it was lost,
and the store keeps everything. Functions from transactions to values; nothing is cached here.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgpack

from ..codec import format as fmt
from ..codec.format import Table
from ..env.memtable import Reads
from ..env.transaction import Transaction
from ..errors import CorruptRecord, FormatMismatch, InvalidArgument
from ..log import catalog
from ..log.catalog import Rows
from ..names import SCHEME, TopicName, validate_namespace_name, validate_subscription_name
from .policies import (
    DEFAULTS,
    DELAY_FIELDS,
    KEEP_ALL,
    SUBSCRIPTION_FIELDS,
    DelayedDeliveryPolicies,
    EffectivePolicies,
    Policies,
    PolicyValue,
    merge,
)

RECORD_VERSION = 3
"""The latest. A record is written in the earliest version that has all its fields."""

_NEW_IN_3 = ("max_in_flight", "max_pending", "replicated")

_STORE = "store"
"""Key of the store's own policies; namespaces and topics have a `/` in theirs."""


class Scope(NamedTuple):
    """The place of policies: a record, and in a topic's the subscription."""

    key: str
    subscription: str | None = None

    @classmethod
    def of(cls, namespace: str | None = None, topic: str | None = None, subscription: str | None = None) -> Self:
        """The scope that a caller names; with nothing the store. Raises InvalidArgument."""
        if topic is not None:
            if namespace is not None:
                raise InvalidArgument("namespace", namespace, f"topic={topic!r} is given too: one of the two")
            name = None if subscription is None else validate_subscription_name(subscription)
            return cls(str(TopicName.parse(topic)), name)
        if subscription is not None:
            raise InvalidArgument("subscription", subscription, "needs topic=, the topic that it is of")
        return cls(_STORE if namespace is None else validate_namespace_name(namespace))

    @property
    def is_store(self) -> bool:
        return self.key == _STORE

    def __str__(self) -> str:
        """Show it as "store", "namespace a/b", "topic persistent://a/b/c", "subscription s of topic ..."."""
        if self.is_store:
            return "store"
        name = f"topic {self.key}" if self.key.startswith(SCHEME) else f"namespace {self.key}"
        return name if self.subscription is None else f"subscription {self.subscription} of {name}"

    def includes(self, topic: TopicName) -> bool:
        """True where policies set here may count for the topic or one of its subscriptions."""
        return self.key in (_STORE, topic.namespace_name, str(topic))


STORE_SCOPE = Scope(_STORE)


class PolicyRecord(NamedTuple):
    """The policies of one record. recorded: in the store's only, see above."""

    policies: Policies = Policies()
    subscriptions: Mapping[str, Policies] = {}
    recorded: bool = False

    def pack(self) -> bytes:
        """Fields of the record: a msgpack map."""
        named = {
            *self.policies.fields_set(),
            *(name for policies in self.subscriptions.values() for name in policies.fields_set()),
        }
        version = 2 if named.isdisjoint(_NEW_IN_3) else RECORD_VERSION
        fields: dict[str, Any] = {"version": version, **self.policies.fields_set()}
        if self.subscriptions:
            fields["subscriptions"] = {name: set_.fields_set() for name, set_ in sorted(self.subscriptions.items())}
        if self.recorded:
            fields["recorded"] = True
        packed: bytes = msgpack.packb(fields)
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Read the fields of a record. Raises CorruptRecord, FormatMismatch (another version)."""
        try:
            fields = msgpack.unpackb(packed)
            version = fields.pop("version", None)
            if version not in (2, RECORD_VERSION):
                raise FormatMismatch(Path("main"), "version of a policy record", version, RECORD_VERSION)
            recorded = bool(fields.pop("recorded", False))
            subscriptions = {name: Policies(**of_one) for name, of_one in fields.pop("subscriptions", {}).items()}
            return cls(Policies(**fields), subscriptions, recorded)
        except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
            raise CorruptRecord(f"policies cannot be read: {error}") from error

    def at(self, subscription: str | None) -> Policies:
        """The policies set at the record's own scope, or for one of its subscriptions."""
        return self.policies if subscription is None else self.subscriptions.get(subscription, Policies())

    def with_(self, subscription: str | None, policies: Policies) -> Self:
        if subscription is None:
            return self._replace(policies=policies)
        others = {name: set_ for name, set_ in self.subscriptions.items() if name != subscription}
        return self._replace(subscriptions={**others, subscription: policies} if policies.fields_set() else others)


_NOTHING = PolicyRecord()


def find(raw: Reads, scope: Scope) -> Policies | None:
    """Read the policies set at a scope; None: nothing is set. Raises CorruptRecord."""
    policies = _read(raw, scope.key).at(scope.subscription)
    return policies if policies.fields_set() else None


def change(
    transaction: Transaction, scope: Scope, work: Callable[[Policies], DelayedDeliveryPolicies]
) -> tuple[Policies, Policies]:
    """Put what `work` makes of the policies set at a scope in their place; returns those before, and those now.

    Delay policies replace the delay policies, and leave the rest. Raises InvalidArgument for what cannot be set there.
    """
    record = _read(transaction.raw, scope.key)
    before = record.at(scope.subscription)
    after = work(before)
    if not isinstance(after, Policies):
        rest = {name: value for name, value in before.fields_set().items() if name not in DELAY_FIELDS}
        after = Policies(**rest, **after.fields_set())  # type: ignore[arg-type]
    _refuse_misplaced(scope, after)
    _write(transaction, scope.key, record.with_(scope.subscription, after))
    return before, after


def record_defaults(transaction: Transaction, policies: Policies) -> bool:
    """Set the defaults of a store that has none recorded; False: they are recorded already, and stay."""
    record = _read(transaction.raw, _STORE)
    if record.recorded:
        return False
    fields = {**policies.fields_set(), **record.policies.fields_set()}
    _write(transaction, _STORE, PolicyRecord(Policies(**fields), recorded=True))  # type: ignore[arg-type]
    return True


def is_recorded(raw: Reads) -> bool:
    """True once the store has its defaults recorded."""
    return _read(raw, _STORE).recorded


def forget_subscription(transaction: Transaction, topic: TopicName, subscription: str) -> bool:
    """Remove the policies of a subscription that is removed; False: it had none."""
    record = _read(transaction.raw, str(topic))
    if subscription not in record.subscriptions:
        return False
    _write(transaction, str(topic), record.with_(subscription, Policies()))
    return True


def scopes_set(raw: Reads) -> list[tuple[Scope, Policies]]:
    """(scope, policies) of every scope at which something is set."""
    scopes = []
    for key, fields in catalog.rows(raw, fmt.prefix(Table.POLICY)):
        name, record = fmt.name_of(key), PolicyRecord.unpack(fields)
        if record.policies.fields_set():
            scopes.append((Scope(name), record.policies))
        scopes += [(Scope(name, subscription), each) for subscription, each in record.subscriptions.items()]
    return scopes


def effective(raw: Rows, topic: TopicName, subscription: str | None = None) -> EffectivePolicies:
    """Return the policies in force for a topic or subscription. Three lookups. Raises CorruptRecord."""
    return merge(*in_force(raw, topic, subscription))


def in_force(
    raw: Rows, topic: TopicName, subscription: str | None = None
) -> tuple[tuple[tuple[str, DelayedDeliveryPolicies], ...], Mapping[str, PolicyValue]]:
    """The arguments of `merge` for a topic or subscription: equal ones have equal policies in force."""
    of_store, of_namespace, of_topic = (_read(raw, key) for key in (_STORE, topic.namespace_name, str(topic)))
    scopes = [] if subscription is None else [(Scope(str(topic), subscription), of_topic.at(subscription))]
    scopes += [
        (Scope(str(topic)), of_topic.policies),
        (Scope(topic.namespace_name), of_namespace.policies),
        (STORE_SCOPE, of_store.policies),
    ]
    set_there = tuple((str(scope), policies) for scope, policies in scopes if policies.fields_set())
    return set_there, DEFAULTS if of_store.recorded else KEEP_ALL


def _refuse_misplaced(scope: Scope, policies: Policies) -> None:
    set_ = policies.fields_set()
    if scope.is_store and "fixed_delivery_delay_ms" in set_:
        value = set_["fixed_delivery_delay_ms"]
        raise InvalidArgument("fixed_delivery_delay_ms", value, "is set for a namespace or a topic (PIP-437)")
    if scope.subscription is not None:
        for name in set_:
            if name not in SUBSCRIPTION_FIELDS:
                raise InvalidArgument(name, set_[name], "is set for a topic or wider, not for a subscription")


def _read(raw: Rows, scope_key: str) -> PolicyRecord:
    fields = catalog.fields_of(raw, fmt.policy_key(scope_key))
    return _NOTHING if fields is None else PolicyRecord.unpack(fields)


def _write(transaction: Transaction, scope_key: str, record: PolicyRecord) -> None:
    """Store a record; one that says nothing goes."""
    key = fmt.policy_key(scope_key)
    if record == _NOTHING:
        transaction.delete(key)
    else:
        transaction.put(key, record.pack())
