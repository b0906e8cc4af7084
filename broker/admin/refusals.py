"""Answers to requests that no route takes: that there is no such address, or what to do instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from .http_request import HttpError

_BASE = ("admin", "lookup")
"""First words of Pulsar's paths."""

_LIST = "GET /duelog/v1/openapi.json lists what is offered"

_NO_RATES = "rates are not limited; subscriptions are held by their permits, producers by unanswered sends"
_NO_COPIES = "nothing is replicated; duelog backup copies a store, a placement table spreads namespaces over brokers"
_OUTSIDE = "functions, sources, sinks and packages are no part of duelog; run them as clients"

_BY_KIND: Mapping[str, str] = MappingProxyType(
    {
        "non-persistent": "topics are persistent here, under /admin/v2/persistent",
        "functions": _OUTSIDE,
        "function": _OUTSIDE,
        "sources": _OUTSIDE,
        "source": _OUTSIDE,
        "sinks": _OUTSIDE,
        "sink": _OUTSIDE,
        "packages": _OUTSIDE,
        "worker": _OUTSIDE,
        "worker-stats": _OUTSIDE,
        "transactions": "there are no transactions; deduplication has a message stored once",
        "bookies": "messages are in the store's own files; duelog stats and /metrics have figures of them",
        "broker-stats": "figures are at /metrics",
        "resource-quotas": _NO_RATES,
        "resourcegroups": _NO_RATES,
        "clusters": "there is one cluster, named by the setting clusterName; " + _NO_COPIES,
        "scalable": "topics are plain or partitioned",
        "segments": "topics are plain or partitioned",
        "metadata": "documents are in the store; duelog backup copies them",
    }
)
"""By the word after `/admin/v2`."""

_BY_WORD: Mapping[str, str] = MappingProxyType(
    {
        "backlogQuota": "a backlog is not limited but by the disk; messageTTL and subscriptions' skip shorten it",
        "compaction": "topics are not compacted; readCompacted reads everything",
        "terminate": "topics do not end; a producer with exclusive access keeps others out",
        "truncate": "skip_all on each subscription and retention do that",
        "offload": "closed days are exported by duelog export",
        "dispatchRate": _NO_RATES,
        "publishRate": _NO_RATES,
        "subscribeRate": _NO_RATES,
        "subscriptionDispatchRate": _NO_RATES,
        "replicatorDispatchRate": _NO_COPIES,
        "replication": _NO_COPIES,
        "replicatedSubscriptionStatus": _NO_COPIES,
        "antiAffinity": _NO_COPIES,
        "permissions": "roles are granted actions by namespace: /admin/v2/namespaces/{tenant}/{namespace}/permissions",
        "bundle": "a namespace is one part, and is not split",
        "split": "a namespace is one part, and is not split",
        "maxProducersPerTopic": "connections are limited: maxProducersPerConnection",
        "maxConsumersPerTopic": "connections are limited: maxConsumersPerConnection",
        "maxConsumersPerSubscription": "connections are limited: maxConsumersPerConnection",
        "maxUnackedMessages": "settings of the broker: maxUnackedMessagesPerConsumer, -PerSubscription",
        "maxMessageSize": "a setting of the broker: maxMessageSize",
        "persistence": "how durable a message is, is a setting of the store: [store] durability",
        "inactiveTopicPolicies": "topics stay until they are deleted",
        "schemaValidationEnforced": "producers without a schema are let in; schemas that are named have to fit",
        "encryptionRequired": "clients may encrypt; the broker does not ask for it",
        "subscriptionAuthMode": "roles may use any subscription of a namespace in which they may consume",
        "subscriptionExpirationTime": "subscriptions stay until they are deleted",
    }
)
"""By what a word of the path begins with, behind tenant and namespace."""


def instead_of(method: str, raw_path: str, methods: Sequence[str]) -> HttpError:
    """The answer; methods: those that the path has.

    405 for another method and for what Pulsar has and this broker has not, 404 for what neither has.
    """
    segments = raw_path.strip("/").split("/")
    if methods:
        allowed = ", ".join(methods)
        why = _why(segments)
        reason = f"{method} is not offered here, but {allowed}" + (f": {why}" if why else "")
        return HttpError(405, reason, {"Allow": allowed})
    shown = f"{method} {raw_path[:400]}"
    if segments[0] in _BASE:
        why = _why(segments) or "this broker has no such resource"
        return HttpError(405, f"{shown} is not offered: {why}; {_LIST}", {"Allow": ""})
    return HttpError(404, f"{shown}: no such address; {_LIST}")


def _why(segments: Sequence[str]) -> str:
    """Advice what to do instead; empty: nothing is known of it."""
    kind = segments[2] if len(segments) > 2 else ""
    if kind in _BY_KIND:
        return _BY_KIND[kind]
    for word in segments[5:]:
        for name, text in _BY_WORD.items():
            if word.startswith(name):
                return text
    return ""
