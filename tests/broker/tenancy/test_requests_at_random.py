"""Requests at random over every route: each is answered, none by a fault of the broker's."""

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from duelog import DelayedStore, Message
from duelog.broker.admin.routing import Need, Route
from tests.broker.admin.rest import Answered, Rest, administered

T = TypeVar("T")

EXAMPLES = int(os.environ.get("DUELOG_REST_EXAMPLES", "150"))

NAMES = ("t", "p-partition-0", "p-partition-1", "my-tenant/my-ns/t")

METHODS = ("GET", "PUT", "POST", "DELETE")

WORDS = (
    "my-tenant", "my-ns", "public", "default", "t", "p", "p-partition-0", "p-partition-9", "s", "0", "1", "-1", "2",
    "9223372036854775807", "9223372036854775808", "true", "null", "standalone", "__change_events", "a/b", "%", "a b",
    "\u00e9", ".", "..", "x" * 300, "maxTopicListInFlightHeapMemSizeMB", "earliest", "latest", "AVRO",
)  # fmt: skip

FIELDS = (
    "adminRoles", "allowedClusters", "bundles", "replication_clusters", "message_ttl_in_seconds", "active", "tickTime",
    "retention_policies", "retentionTimeInMinutes", "retentionSizeInMB", "maxDeliveryDelayInMillis", "topicType",
    "fixedDeliveryDelayInMillis", "allowAutoTopicCreation", "defaultNumPartitions", "type", "schema", "properties",
    "ledgerId", "entryId", "partitionIndex", "batchIndex", "deliverAt", "deliver_at", "dueAt", "messageIds", "ids",
    "delayed_delivery_policies", "autoTopicCreationOverride", "schema_compatibility_strategy", "deduplicationEnabled",
)  # fmt: skip

text = st.one_of(st.sampled_from(WORDS), st.text(max_size=8))
scalar = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 70), st.integers(), st.floats(allow_nan=False), text, st.just(10**25)
)
answers = st.one_of(st.sampled_from(("true", "false", "1", "10", "earliest")), text)
value = st.recursive(
    scalar,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(st.sampled_from(FIELDS), text), inner, max_size=5)
    ),
    max_leaves=12,
)
objects = st.dictionaries(st.sampled_from(FIELDS), value, max_size=6)
OF_KIND: dict[str, st.SearchStrategy[Any]] = {
    "object": objects,
    "array": st.lists(st.one_of(st.sampled_from(["produce", "consume"]), value), max_size=3),
    "integer": st.integers(-2, 5),
    "boolean": st.booleans(),
    "string": st.sampled_from(["FULL", "UNDEFINED", "earliest", "latest", "1:0"]),
}
RIGHT = {
    "tenant": ("public",), "namespace": ("default",), "topic": ("t", "p", "p-partition-0"),
    "subscription": ("s",), "cluster": ("standalone",), "name": ("maxTopicListInFlightHeapMemSizeMB",),
}  # fmt: skip
"""Values of path parameters that mean something."""


class RestRunner:
    """Sends requests from code that does not wait in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rest: Rest, store: DelayedStore, routes: list[Route]) -> None:
        self.loop = loop
        self.rest = rest
        self.store = store
        self.routes = routes

    def ask(self, method: str, path: str, body: Any = ..., **values: Any) -> Answered:
        """See `Rest.ask`."""
        return self.loop.run_until_complete(self.rest.ask(method, path, body, **values))


@pytest.fixture(scope="module")
def rest_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestRunner]:
    """A broker with tenant my-tenant and namespace my-tenant/my-ns."""
    path: Path = tmp_path_factory.mktemp("broker") / "store"
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        stack = AsyncExitStack()
        broker, rest, store = loop.run_until_complete(stack.enter_async_context(administered(path)))
        assert broker.application is not None
        found = RestRunner(loop, rest, store, broker.application.router.routes)
        found.ask("PUT", "/admin/v2/tenants/my-tenant", {"adminRoles": []})
        found.ask("PUT", "/admin/v2/namespaces/my-tenant/my-ns")
        yield found
        loop.run_until_complete(stack.aclose())


def mostly(right: st.SearchStrategy[T], wrong: st.SearchStrategy[T]) -> st.SearchStrategy[T]:
    """The first one, nine times of ten."""
    return st.integers(0, 9).flatmap(lambda number: right if number else wrong)


def bodies(kind: str) -> st.SearchStrategy[bytes]:
    """A body, mostly of the kind that the route takes."""
    right = OF_KIND.get(kind, value).map(lambda found: json.dumps(found).encode())
    wrong = st.one_of(st.just(b""), value.map(lambda found: json.dumps(found).encode()), st.binary(max_size=20))
    return mostly(right, st.one_of(wrong, st.just(b"[" * 5_000)))


def part_of(name: str) -> st.SearchStrategy[str]:
    """A path parameter, mostly one that means something."""
    known = st.sampled_from(RIGHT.get(name, WORDS[9:16]))
    return mostly(known, text)


def prepare(rest: RestRunner) -> None:
    """Have there be something to ask about, where requests before have deleted it."""
    for tenant, namespace in (("public", "default"), ("my-tenant", "my-ns")):
        rest.ask("PUT", f"/admin/v2/tenants/{tenant}", {})
        rest.ask("PUT", f"/admin/v2/namespaces/{tenant}/{namespace}")
    rest.ask("PUT", "/admin/v2/persistent/public/default/p/partitions", 2)
    for name in NAMES:
        topic = rest.store.topic(name)
        if not topic.exists():
            topic.subscribe("s").close()
            topic.send_batch([Message(b"due"), Message(b"later", deliver_after=3_600_000)])


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_request_is_answered_with_500(rest_of_module: RestRunner, data: st.DataObject) -> None:
    """Right and wrong names, queries and bodies; an error has a reason."""
    if not all(rest_of_module.store.topic(name).exists() for name in NAMES):
        prepare(rest_of_module)
    routes = [route for route in rest_of_module.routes if route.path != "/"]  # which answers in HTML
    route = data.draw(st.sampled_from(routes))
    method, queries = route.method, list(route.query)
    parts = [
        quote(data.draw(part_of(part[1:-1])).encode(errors="surrogatepass"), safe="") if part.startswith("{") else part
        for part in route.path.split("/")
    ]
    query = data.draw(st.dictionaries(st.sampled_from(queries), answers, max_size=2)) if queries else {}
    shown = "&".join(f"{name}={quote(each.encode(errors='surrogatepass'))}" for name, each in query.items())
    if data.draw(st.integers(0, 19)) == 0:
        method = data.draw(st.sampled_from(METHODS))
    sent = data.draw(bodies(route.body)) if route.body or data.draw(st.integers(0, 9)) == 0 else None
    answered = rest_of_module.ask(method, f"{'/'.join(parts)}?{shown}", data=sent)
    assert answered.status < 500, (method, parts, query, sent, answered)
    event(f"{answered.status}")
    if answered.status >= 400:
        assert answered.reason, (method, parts, query, sent, answered)


def test_every_route_is_in_the_document_and_every_operation_of_it_is_a_route(rest_of_module: RestRunner) -> None:
    """With its parameters; what needs no credentials says so."""
    document = rest_of_module.ask("GET", "/duelog/v1/openapi.json").value
    routes: list[Route] = rest_of_module.routes
    found = {
        (method.upper(), path): operation
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    assert set(found) == {(route.method, route.path) for route in routes}
    for route in routes:
        operation: dict[str, Any] = found[route.method, route.path]
        assert operation["summary"]
        in_path = [each["name"] for each in operation["parameters"] if each["in"] == "path"]
        assert in_path == [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
        assert [each["name"] for each in operation["parameters"] if each["in"] == "query"] == list(route.query)
        assert ("requestBody" in operation) == bool(route.body)
        assert (operation.get("security") == []) == (route.need is Need.NOTHING)
    ids = [operation["operationId"] for operation in found.values()]
    assert len(set(ids)) == len(ids)
