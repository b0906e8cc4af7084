"""Routes: which handler answers which method and path, who may ask, which route a request means; and their document.

A path is split at `/` before it is decoded, so that a name may have `%2F` in it. A route with a fixed word counts
before one with a parameter at the same place. A request that no route takes is told that there is no such address, or
what to do instead.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import version
from typing import Any, NamedTuple
from urllib.parse import unquote_plus

from ...operations.operation import Right
from ...operations.operations import OPERATIONS
from ..security.permissions import Action
from .http_request import HttpError, Request

_BASE = ("admin", "lookup")
"""First words of Pulsar's paths."""

NAMESPACE = "/admin/v2/namespaces/{tenant}/{namespace}"
TOPICS = "/admin/v2/persistent/{tenant}/{namespace}"
TOPIC = TOPICS + "/{topic}"

_LIST = "GET /duelog/v1/openapi.json lists what is offered"

_NO_RATES = "rates are not limited; subscriptions are held by their permits, producers by unanswered sends"
_NO_COPIES = "nothing is replicated; duelog backup copies a store, a placement table spreads namespaces over brokers"
_OUTSIDE = "functions, sources, sinks and packages are no part of duelog; run them as clients"

_BY_KIND: Mapping[str, str] = {
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
"""By the word after `/admin/v2`."""

_BY_WORD: Mapping[str, str] = {
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


Handler = Callable[[Request], Awaitable[Any]]
"""See `http_request`: a JSON value, None or a Reply."""


_TENANT = "superusers, administrators of the tenant"


class Need(Enum):
    """Right that a route needs: who has it, and actions of which `{tenant}/{namespace}` has to grant a role one."""

    NOTHING = "needs no credentials", ()
    LOGIN = "any role", ()
    SUPERUSER = "superusers", ()
    TENANT = _TENANT, ()
    PRODUCE = f"{_TENANT}, roles that may produce in the namespace", (Action.PRODUCE,)
    CONSUME = f"{_TENANT}, roles that may consume in the namespace", (Action.CONSUME,)
    EITHER = f"{_TENANT}, roles that may produce or consume in the namespace", (Action.PRODUCE, Action.CONSUME)

    def __init__(self, roles: str, actions: tuple[Action, ...]) -> None:
        self.roles = roles
        self.actions = actions


_NEEDS = {
    Right.READ: Need.EITHER, Right.PRODUCE: Need.PRODUCE, Right.CONSUME: Need.CONSUME, Right.ADMIN: Need.SUPERUSER
}  # fmt: skip


def need_of(operation: str) -> Need:
    """Return what a role needs for an operation of the table."""
    return _NEEDS[OPERATIONS[operation].right]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path. Parameters are `{name}`; those named tenant, namespace, topic, subscription are checked.

    `Request.namespace`, `.topic` and `.subscription` check and join them.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    need: Need
    query: Sequence[str] = ()
    """Names of the queries that count; others are passed over."""
    body: str = ""
    """Kind of the body, for the OpenAPI document: "object", "integer", "boolean", "string", "array"; empty: none."""
    here: bool = False
    """Answered by this broker, whichever owns the namespace."""

    @property
    def segments(self) -> list[str]:
        return self.path.strip("/").split("/")


class Found(NamedTuple):
    """The route of a request, and its parameters."""

    route: Route
    parameters: dict[str, str]


class Router:
    """Finds routes."""

    def __init__(self, routes: Iterable[Route]) -> None:
        """Raises ValueError where two routes are one."""
        self.routes = sorted(routes, key=lambda route: (route.path, route.method))
        self._by_length: dict[int, list[tuple[list[str], Route]]] = {}
        seen: dict[tuple[str, ...], Route] = {}
        for route in self.routes:
            shape = (route.method, *("{}" if _is_parameter(each) else each for each in route.segments))
            if shape in seen:
                raise ValueError(f"two routes are one: {route.method} {route.path} and {seen[shape].path}")
            seen[shape] = route
            self._by_length.setdefault(len(route.segments), []).append((route.segments, route))
        for found in self._by_length.values():
            found.sort(key=lambda each: [_is_parameter(part) for part in each[0]])

    def find(self, method: str, raw_path: str) -> Found | list[str]:
        """The route; else the methods that the path has, none: there is no such path. HttpError 412: not UTF-8."""
        try:
            segments = [unquote_plus(part, errors="strict") for part in raw_path.strip("/").split("/")]
        except UnicodeDecodeError as error:
            raise HttpError(412, "the path is not UTF-8") from error
        methods = []
        for parts, route in self._by_length.get(len(segments), ()):
            if all(
                part == given or (given and _is_parameter(part)) for part, given in zip(parts, segments, strict=True)
            ):
                if route.method == method:
                    pairs = zip(parts, segments, strict=True)
                    return Found(route, {part[1:-1]: given for part, given in pairs if _is_parameter(part)})
                methods.append(route.method)
        return sorted(set(methods))


def _is_parameter(part: str) -> bool:
    return part.startswith("{")


def with_document(routes: Sequence[Route]) -> list[Route]:
    """Return the routes, and one that answers with the OpenAPI document of all."""

    async def document(_: Request) -> dict[str, Any]:
        paths: dict[str, dict[str, Any]] = {}
        for route in sorted(found, key=lambda route: (route.path, route.method)):
            paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
        return {
            "openapi": "3.1.0",
            "info": {"title": "duelog", "version": version("duelog")},
            "paths": paths,
            "components": {
                "securitySchemes": {
                    "token": {"type": "http", "scheme": "bearer"},
                    "basic": {"type": "http", "scheme": "basic"},
                },
                "schemas": {"Failure": {"type": "object", "properties": {"reason": {"type": "string"}}}},
            },
            "security": [{"token": []}, {"basic": []}, {}],
        }

    found = [*routes, Route("GET", "/duelog/v1/openapi.json", document, "This document", Need.NOTHING)]
    return found


def _operation(route: Route) -> dict[str, Any]:
    parameters = [
        {"name": part[1:-1], "in": "path", "required": True, "schema": {"type": "string"}}
        for part in route.segments
        if part.startswith("{")
    ]
    parameters += [{"name": name, "in": "query", "schema": {"type": "string"}} for name in route.query]
    failure = {
        "description": "what keeps it from being done",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Failure"}}},
    }
    found: dict[str, Any] = {
        "operationId": f"{route.method} {route.path}",
        "summary": route.summary,
        "description": f"For: {route.need.roles}.",
        "parameters": parameters,
        "responses": {"2XX": {"description": "done"}, "4XX": failure, "5XX": failure},
    }
    if route.need is Need.NOTHING:
        found["security"] = []
    if route.body:
        found["requestBody"] = {"content": {"application/json": {"schema": {"type": route.body}}}}
    return found
