"""Administration of a store that `duelog serve --http` serves, by its REST paths.

Policies over REST are those of namespaces and topics that Pulsar has: delays, retention in minutes and MiB, time to
live in seconds; others are refused by name.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from math import ceil
from pathlib import Path
from typing import Any

from ... import Policies, ReceivedMessage, ScheduledMessage
from ...stats import PartitionStats
from ...store.config import MIB
from ...store.errors import InvalidArgument
from ...store.names import TopicName, validate_namespace_name
from ...store.policy.policies import PolicyValue
from ...store.position import MessageId
from .operations import STORE_FIGURES, Effective, Scope, ServerRefused, SubscriptionFigures, TopicFigures
from .rest_client import RestClient, segment

_PAGE = 1_000
_PAYLOAD_BYTES = 4_096
_MINUTE_MS = 60_000
_FOR_EVER = 2**63 - 1
_LATEST, _EARLIEST = {"ledgerId": 2**63 - 1, "entryId": 2**63 - 1}, {"ledgerId": -1, "entryId": -1}

_DELAYS = {
    "active": "active",
    "tickTime": "tick_time_ms",
    "maxDeliveryDelayInMillis": "max_delivery_delay_ms",
    "fixedDeliveryDelayInMillis": "fixed_delivery_delay_ms",
}
_FIELDS = (*_DELAYS.values(), "retention_ms", "retention_bytes", "ttl_ms")


class ServerSide:
    """By requests, each on its own: nothing is open between two."""

    def __init__(self, url: str, token: str | None, trust: Path | None) -> None:
        self._rest = RestClient(url, token, trust)
        self.name = self._rest.url

    # -- topics ----------------------------------------------------------------------------------------

    def topics(self, namespace: str | None) -> Iterator[str]:
        for each in self._namespaces() if namespace is None else [validate_namespace_name(namespace)]:
            yield from self._rest.get(f"/admin/v2/persistent/{each}")

    def _namespaces(self) -> Iterator[str]:
        for tenant in self._rest.get("/admin/v2/tenants"):
            yield from self._rest.get(f"/admin/v2/namespaces/{segment(tenant)}")

    def create_topic(self, topic: str) -> bool:
        return self._create(_admin(topic), {})

    def delete_topic(self, topic: str, *, force: bool) -> None:
        self._rest.ask("DELETE", _admin(topic), force=str(force).lower())

    def _create(self, path: str, body: object) -> bool:
        try:
            self._rest.ask("PUT", path, body)
        except ServerRefused as refused:
            if refused.status != 409:
                raise
            return False
        return True

    def store_figures(self) -> dict[str, int]:
        found = self._rest.get("/duelog/v1/counters")["store"]
        return {name: found[_camel(name)] for name in STORE_FIGURES}

    def partitions(self) -> list[PartitionStats]:
        names = {field.name: _camel(field.name) for field in fields(PartitionStats)} | {"holders": "references"}
        found = self._rest.get("/duelog/v1/partitions")
        return [PartitionStats(**{name: each[theirs] for name, theirs in names.items()}) for each in found]

    def topic_figures(self, topic: str) -> TopicFigures:
        stats = self._rest.get(f"{_admin(topic)}/stats", excludePublishers="true", excludeConsumers="true")
        log = self._rest.get(f"{_admin(topic)}/internalStats")
        of = {name: each for name, each in stats["subscriptions"].items() if each["isDurable"]}
        subscriptions = [
            SubscriptionFigures(name, each["msgBacklogNoDelayed"], log["cursors"][name]["markDeletePosition"])
            for name, each in sorted(of.items())
            if name in log["cursors"]
        ]
        pending = max((each["msgDelayed"] for each in of.values()), default=None)
        name = str(TopicName.parse(topic))
        return TopicFigures(
            name, pending, None, log["numberOfEntries"], len(log["ledgers"]), log["totalSize"], subscriptions
        )

    # -- messages --------------------------------------------------------------------------------------

    def scheduled(self, topic: str, start_ms: int | None, end_ms: int | None, limit: int) -> list[ScheduledMessage]:
        found: list[ScheduledMessage] = []
        after = None
        while len(found) < limit:
            page = self._rest.get(
                f"{_duelog(topic)}/scheduled",
                start=start_ms,
                end=end_ms,
                limit=min(limit - len(found), _PAGE),
                after=after,
                payloadBytes=_PAYLOAD_BYTES,
            )
            found += [_message(each, str(TopicName.parse(topic))) for each in page["messages"]]
            after = page["next"]
            if after is None:
                break
        return found

    def cancel(self, topic: str, ids: Sequence[MessageId]) -> list[str]:
        return [each["outcome"] for each in self._together(topic, "cancel", ids, {})]

    def cancel_key(self, topic: str, key: str) -> bool:
        raise InvalidArgument("--server", self.name, "a server is not asked by key; cancel by id, or in its directory")

    def reschedule(
        self, topic: str, ids: Sequence[MessageId], deliver_at: int | None, deliver_after: float | None
    ) -> list[MessageId | None]:
        given = {"deliverAt": deliver_at, "deliverAfter": deliver_after}
        body = {name: value for name, value in given.items() if value is not None}
        new_ids = [each["newMessageId"] for each in self._together(topic, "reschedule", ids, body)]
        return [None if each is None else MessageId.parse(each) for each in new_ids]

    def _together(self, topic: str, what: str, ids: Sequence[MessageId], body: Mapping[str, Any]) -> list[Any]:
        """In one transaction for each 1,000."""
        found: list[Any] = []
        for at in range(0, len(ids), _PAGE):
            some = [str(each) for each in ids[at : at + _PAGE]]
            found += self._rest.ask("POST", f"{_duelog(topic)}/{what}", {**body, "messageIds": some})["messages"]
        return found

    # -- subscriptions ---------------------------------------------------------------------------------

    def subscriptions(self, topic: str) -> list[str]:
        return list(self._rest.get(f"{_admin(topic)}/subscriptions"))

    def create_subscription(self, topic: str, subscription: str, position: str) -> bool:
        start = _EARLIEST if position == "earliest" else _LATEST
        return self._create(f"{_admin(topic)}/subscription/{segment(subscription)}", start)

    def delete_subscription(self, topic: str, subscription: str) -> None:
        self._rest.ask("DELETE", f"{_admin(topic)}/subscription/{segment(subscription)}")

    def seek(self, topic: str, subscription: str, to: str | Mapping[str, int]) -> None:
        path = f"{_admin(topic)}/subscription/{segment(subscription)}/resetcursor"
        if not isinstance(to, str):
            if "due_ms" in to:
                raise InvalidArgument("--due", to["due_ms"], "a server goes by --published")
            self._rest.ask("POST", f"{path}/{to['published_ms']}")
        elif to in ("earliest", "latest"):
            self._rest.ask("POST", path, _EARLIEST if to == "earliest" else _LATEST)
        else:
            position = MessageId.parse(to)
            self._rest.ask("POST", path, {"ledgerId": position.ledger_id, "entryId": position.entry_id})

    def skip(self, topic: str, subscription: str, count: int) -> None:
        self._rest.ask("POST", f"{_admin(topic)}/subscription/{segment(subscription)}/skip/{count}")

    def expire(self, topic: str, subscription: str, older_than: float) -> None:
        seconds = max(ceil(older_than), 1)
        self._rest.ask("POST", f"{_admin(topic)}/subscription/{segment(subscription)}/expireMessages/{seconds}")

    def peek(self, topic: str, subscription: str, count: int) -> Iterator[ReceivedMessage]:
        raise InvalidArgument("--server", self.name, "a server is not asked for messages; peek in its directory")

    # -- policies --------------------------------------------------------------------------------------

    def policies(self, scope: Scope) -> dict[str, Policies]:
        names = list(self._namespaces()) if scope == Scope() else [str(scope.namespace)]
        found = {f"namespace {name}": Policies(**self._own(_of(Scope(name)))) for name in names}
        return {name: each for name, each in found.items() if each.fields_set()}

    def effective(self, scope: Scope) -> Effective:
        path = _of(scope)
        own = Policies(**self._own(path))
        values = self._own(path, applied="true")
        return Effective(
            str(TopicName.parse(str(scope.topic))),
            own if own.fields_set() else None,
            {name: values.get(name) for name in _FIELDS},
            None,
        )

    def update_policies(self, scope: Scope, values: Mapping[str, PolicyValue | None]) -> Policies:
        path = _of(scope)
        for name in values:
            if name not in _FIELDS:
                raise InvalidArgument(name, values[name], f"a server takes only {', '.join(_FIELDS)}")
        wanted = {name: value for name, value in {**self._own(path), **values}.items() if value is not None}
        requests = [
            self._change(path, "delayedDelivery", _delays(wanted), values.keys() & set(_DELAYS.values())),
            self._change(path, "retention", _retention(wanted), values.keys() & {"retention_ms", "retention_bytes"}),
            self._change(path, "messageTTL", _ttl(wanted), values.keys() & {"ttl_ms"}),
        ]
        for request in requests:  # all of them have been checked
            if request is not None:
                self._rest.ask(*request)
        return Policies(**self._own(path))

    @staticmethod
    def _change(path: str, name: str, body: object, concerned: set[str]) -> tuple[Any, ...] | None:
        if not concerned:
            return None
        return ("DELETE", f"{path}/{name}") if body is None else ("POST", f"{path}/{name}", body)

    def remove_policies(self, scope: Scope) -> bool:
        path = _of(scope)
        there = bool(self._own(path))
        for name in ("delayedDelivery", "retention", "messageTTL"):
            self._rest.ask("DELETE", f"{path}/{name}")
        return there

    def _own(self, path: str, **query: str) -> dict[str, Any]:
        """What is set at a scope, as fields of `Policies`; what is in force, where the query asks for that."""
        delays = self._rest.get(f"{path}/delayedDelivery", **query) or {}
        found = {field: delays[name] for name, field in _DELAYS.items() if name in delays}
        retention = self._rest.get(f"{path}/retention", **query)
        if retention is not None:
            minutes, mib = retention["retentionTimeInMinutes"], retention["retentionSizeInMB"]
            found["retention_ms"] = _FOR_EVER if minutes == mib == -1 else max(minutes, 0) * _MINUTE_MS
            found["retention_bytes"] = max(mib, 0) * MIB
        seconds = self._rest.get(f"{path}/messageTTL", **query)
        return found if seconds is None else found | {"ttl_ms": seconds * 1_000}


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def _admin(topic: str) -> str:
    name = TopicName.parse(topic)
    return f"/admin/v2/persistent/{name.namespace_name}/{segment(name.local_name)}"


def _duelog(topic: str) -> str:
    return _admin(topic).replace("/admin/v2", "/duelog/v1", 1)


def _of(scope: Scope) -> str:
    """Where the policies of a scope are."""
    if scope.subscription is not None:
        raise InvalidArgument("--subscription", scope.subscription, "a server has policies of namespaces and topics")
    if scope.topic is not None:
        return _admin(scope.topic)
    if scope.namespace is None:
        raise InvalidArgument("--namespace", None, "a server has policies of namespaces and topics: name one")
    return f"/admin/v2/namespaces/{validate_namespace_name(scope.namespace)}"


def _message(found: Mapping[str, Any], topic: str) -> ScheduledMessage:
    return ScheduledMessage(
        MessageId.parse(found["messageId"]),
        base64.b64decode(found.get("payload", "")),
        found["key"],
        found["properties"],
        found["dueMs"],
        found["publishMs"],
        topic,
    )


def _delays(values: Mapping[str, Any]) -> dict[str, Any] | None:
    return {name: values[field] for name, field in _DELAYS.items() if field in values} or None


def _retention(values: Mapping[str, Any]) -> dict[str, int] | None:
    if "retention_ms" not in values and "retention_bytes" not in values:
        return None
    ms, size = values.get("retention_ms", 0), values.get("retention_bytes", 0)
    if ms == _FOR_EVER:
        return {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
    minutes = _whole("retention_ms", ms, _MINUTE_MS, "minutes")
    mib = _whole("retention_bytes", size, MIB, "MiB")
    return {"retentionTimeInMinutes": minutes or (-1 if mib else 0), "retentionSizeInMB": mib or (-1 if minutes else 0)}


def _ttl(values: Mapping[str, Any]) -> int | None:
    return _whole("ttl_ms", values["ttl_ms"], 1_000, "seconds") if "ttl_ms" in values else None


def _whole(name: str, value: int, unit: int, called: str) -> int:
    if value % unit:
        raise InvalidArgument(name, value, f"a server takes whole {called}")
    return value // unit
