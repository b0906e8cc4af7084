"""Requests of Pulsar's tools, path and body as its documentation has them, and their answers."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from duelog import DelayedDeliveryPolicies, DelayedStore, metrics
from duelog.broker.protocol import commands
from duelog.errors import StoreFull
from tests.broker.admin.rest import SECURED, Rest, Rows, administered
from tests.broker.server.raw_client import RawClient
from tests.conftest import raising

ALLOW, PARTITIONS = "allowAutoTopicCreation", "defaultNumPartitions"
FIXED, MAX = "fixedDeliveryDelayInMillis", "maxDeliveryDelayInMillis"
MINUTES, MIB = "retentionTimeInMinutes", "retentionSizeInMB"

NAMESPACE = "/admin/v2/namespaces/my-tenant/my-ns"
TENANT = "/admin/v2/tenants/my-tenant"
TENANT_INFO = {"adminRoles": ["admin1", "admin2"], "allowedClusters": ["standalone"]}

CREATED_BY_JAVA: dict[str, Any] = {
    "auth_policies": {"namespace_auth": {}, "destination_auth": {}, "subscription_auth_roles": {}},
    "replication_clusters": ["standalone"],
    "bundles": {"boundaries": None, "numBundles": 4},
    "backlog_quota_map": {},
    "clusterDispatchRate": {},
    "topicDispatchRate": {},
    "message_ttl_in_seconds": 120,
    "deleted": False,
    "encryption_required": False,
    "subscription_auth_mode": "None",
    "schema_auto_update_compatibility_strategy": None,
    "schema_compatibility_strategy": "UNDEFINED",
    "schema_validation_enforced": False,
    "latency_stats_sample_rate": {},
    "migrated": False,
}
"""`pulsar-admin namespaces create` sends `Policies` as Java writes it."""

UNSET_IN_JAVA: dict[str, Any] = {
    **CREATED_BY_JAVA,
    "allowed_clusters": [],
    "subscriptionDispatchRate": {},
    "replicatorDispatchRate": {},
    "clusterSubscribeRate": {},
    "persistence": None,
    "deduplicationEnabled": None,
    "autoTopicCreationOverride": None,
    "autoSubscriptionCreationOverride": None,
    "publishMaxMessageRate": {},
    "message_ttl_in_seconds": None,
    "retention_policies": None,
    "delayed_delivery_policies": None,
    "inactive_topic_policies": None,
    "max_producers_per_topic": None,
    "max_unacked_messages_per_consumer": -1,
    "max_unacked_messages_per_subscription": -1,
    "compaction_threshold": None,
    "offload_threshold": -1,
    "offload_threshold_in_seconds": -1,
    "offload_deletion_lag_ms": None,
    "schema_auto_update_compatibility_strategy": "Full",
    "is_allow_auto_update_schema": True,
    "offload_policies": None,
    "subscription_types_enabled": [],
    "properties": {},
    "resource_group_name": None,
    "dispatcherPauseOnAckStatePersistentEnabled": None,
}
"""Every field of `Policies`, each as it is where nothing is set."""


async def made(rest: Rest, role: str | None = None) -> None:
    """A tenant and a namespace of it."""
    assert (await rest.ask("PUT", TENANT, TENANT_INFO, role=role)).status == 204
    assert (await rest.ask("PUT", NAMESPACE, CREATED_BY_JAVA, role=role)).status == 204


WRITTEN: tuple[tuple[str, Any, Any], ...] = (
    ("messageTTL", 3600, 3600),
    ("retention", {MINUTES: 10, MIB: 100}, ...),
    ("retention", {MINUTES: -1, MIB: -1}, ...),
    ("retention", {MINUTES: 0, MIB: 0}, ...),
    ("retention", {MINUTES: -1, MIB: 3}, ...),
    ("retention", {MINUTES: 3, MIB: -1}, ...),
    ("deduplication", True, True),
    ("deduplication", False, False),
    ("autoTopicCreation", {ALLOW: True, "topicType": "partitioned", PARTITIONS: 2}, ...),
    ("autoTopicCreation", {ALLOW: True, "topicType": "non-partitioned"}, ...),
    ("autoTopicCreation", {ALLOW: False}, {ALLOW: False, "topicType": "non-partitioned"}),
    ("delayedDelivery", {"tickTime": 1000, "active": True}, ...),
    ("delayedDelivery", {"tickTime": 1, "active": True, MAX: 60000}, ...),
    ("delayedDelivery", {"tickTime": 0, "active": False, MAX: 0, FIXED: 5}, ...),
)


async def test_a_policy_is_read_as_it_was_written_and_unset(tmp_path: Path) -> None:
    """POST, GET, DELETE, GET; over a restart, too."""
    paths = [f"/admin/v2/namespaces/my-tenant/n{number}/{row[0]}" for number, row in enumerate(WRITTEN)]
    async with administered(tmp_path / "s") as (_, rest, _):
        await made(rest)
        for path, (_, written, _) in zip(paths, WRITTEN, strict=True):
            assert (await rest.ask("PUT", path.rpartition("/")[0])).status == 204
            assert (await rest.ask("DELETE", path)).status == 204
            assert (await rest.ask("GET", path))[:2] == (204, None)
            assert (await rest.ask("POST", path, written)).status == 204
    async with administered(tmp_path / "s") as (_, rest, _):
        for path, (_, written, read) in zip(paths, WRITTEN, strict=True):
            assert (await rest.ask("GET", path))[:2] == (200, written if read is ... else read)
            assert (await rest.ask("DELETE", path)).status == 204
            assert (await rest.ask("GET", path)).status == 204


BAD: Rows = (
    ("POST", f"{NAMESPACE}/messageTTL", -1, 412, "messageTTL=-1"),
    ("POST", f"{NAMESPACE}/messageTTL", "soon", 412, "messageTTL='soon'"),
    ("POST", f"{NAMESPACE}/retention", {MINUTES: 10, MIB: 0}, 412, "retentionSizeInMB=0"),
    ("POST", f"{NAMESPACE}/retention", {MINUTES: 10}, 412, "retentionSizeInMB"),
    ("POST", f"{NAMESPACE}/retention", None, 412, "retention"),
    ("POST", f"{NAMESPACE}/deduplication", "true", 412, "true or false"),
    ("POST", f"{NAMESPACE}/autoTopicCreation", {ALLOW: True}, 412, "topicType"),
    ("POST", f"{NAMESPACE}/autoTopicCreation",
     {ALLOW: True, "topicType": "partitioned", PARTITIONS: 0}, 412, "defaultNumPartitions=0"),
    ("POST", f"{NAMESPACE}/autoTopicCreation",
     {ALLOW: True, "topicType": "non-partitioned", PARTITIONS: 3}, 412, "defaultNumPartitions=3"),
    ("POST", f"{NAMESPACE}/delayedDelivery", {MAX: -1}, 412, "maxDeliveryDelayInMillis=-1"),
    ("POST", f"{NAMESPACE}/delayedDelivery", {FIXED: 1.5}, 412, "fixedDeliveryDelayInMillis=1.5"),
    ("POST", f"{NAMESPACE}/delayedDelivery", {"tickTime": True}, 412, "tickTime=True"),
    ("POST", f"{NAMESPACE}/delayedDelivery", {"active": 1}, 412, "active=1"),
    ("POST", f"{NAMESPACE}/delayedDelivery", {FIXED: 10**30}, 412, "fixedDeliveryDelayInMillis="),
    ("POST", f"{NAMESPACE}/delayedDelivery", [], 412, "delayedDelivery"),
    ("GET", f"{NAMESPACE}/delayedDelivery?applied=maybe", ..., 412, "applied='maybe'"),
    ("GET", f"{NAMESPACE}/topics?mode=SOME", ..., 412, "mode='SOME'"),
    ("PUT", f"{NAMESPACE}/schemaCompatibilityStrategy", "SOMETIMES", 412, "schemaCompatibilityStrategy='SOMETIMES'"),
    ("POST", f"{NAMESPACE}/permissions/me", ["fly"], 412, "actions='fly'"),
    ("POST", f"{NAMESPACE}/permissions/me", [], 412, "produce and consume"),
    ("POST", f"{NAMESPACE}/permissions/me", {"a": 1}, 412, "actions"),
    ("POST", f"{NAMESPACE}/replication", ["elsewhere"], 412, "'elsewhere'"),
    ("PUT", "/admin/v2/namespaces/my-tenant/a%20b", ..., 412, "namespace"),
    ("PUT", "/admin/v2/namespaces/my-tenant/other", {"backlog_quota_map": {"destination_storage": {"limit": 1}}},
     412, "backlog_quota_map"),
    ("PUT", "/admin/v2/namespaces/my-tenant/other", {"replication_clusters": ["b"]}, 412, "'b'"),
    ("PUT", "/admin/v2/namespaces/my-tenant/other", {"message_ttl_in_seconds": -3}, 412, "messageTTL=-3"),
    ("PUT", "/admin/v2/namespaces/my-tenant/other", {"offload_threshold": 1}, 412, "offload_threshold"),
    ("PUT", "/admin/v2/namespaces/my-tenant/other", {"is_allow_auto_update_schema": False}, 412, "auto_update_schema"),
    ("PUT", "/admin/v2/namespaces/my-tenant/other", {"auth_policies": {"namespace_auth": {"r": ["x"]}}}, 412, "r='x'"),
    ("PUT", "/admin/v2/namespaces/my-tenant/other",
     {"auth_policies": {"destination_auth": {"t": {"r": ["produce"]}}}}, 412, "destination_auth"),
    ("PUT", "/admin/v2/tenants/a%2Fb", TENANT_INFO, 412, "a/b"),
    ("PUT", "/admin/v2/tenants/other", {"allowedClusters": ["b"]}, 412, "allowedClusters='b'"),
    ("PUT", "/admin/v2/tenants/other", {"adminRoles": [3]}, 412, "adminRoles"),
    ("POST", TENANT, [], 412, "JSON object"),
    ("POST", TENANT, None, 412, "JSON object"),
    ("POST", TENANT, ..., 412, "JSON object"),
    ("POST", "/admin/v2/brokers/configuration/no/3", ..., 412, "'no'"),
    ("DELETE", "/admin/v2/brokers/configuration/no", ..., 412, "'no'"),
    ("POST", "/admin/v2/brokers/configuration/maxTopicListInFlightHeapMemSizeMB/much", ..., 412, "much"),
    ("GET", "/lookup/v2/topic/persistent/my-tenant/my-ns/t?listenerName=x", ..., 412, "listenerName='x'"),
    ("POST", "/admin/v2/schemas/my-tenant/my-ns/t/schema", {"type": "AVROO", "schema": ""}, 412, "type='AVROO'"),
    ("POST", "/admin/v2/schemas/my-tenant/my-ns/t/compatibility", {"type": "KEY_VALUE", "schema": "{"}, 412, "schema"),
)  # fmt: skip


async def test_a_bad_value_is_412_and_named(rest: Rest) -> None:
    """The namespace is as it was."""
    await made(rest)
    before = (await rest.ask("GET", NAMESPACE)).value
    await rest.refuses(BAD)
    assert (await rest.ask("GET", NAMESPACE)).value == before
    assert (await rest.ask("GET", "/admin/v2/namespaces/my-tenant")).value == ["my-tenant/my-ns"]
    assert (await rest.ask("GET", "/admin/v2/tenants")).value == ["my-tenant", "public"]


NOT_THERE: tuple[tuple[str, str, Any], ...] = (
    ("GET", "/admin/v2/tenants/no", ...),
    ("POST", "/admin/v2/tenants/no", TENANT_INFO),
    ("DELETE", "/admin/v2/tenants/no", ...),
    ("GET", "/admin/v2/namespaces/no", ...),
    ("PUT", "/admin/v2/namespaces/no/ns", ...),
    ("GET", "/admin/v2/namespaces/my-tenant/no", ...),
    ("DELETE", "/admin/v2/namespaces/my-tenant/no", ...),
    ("GET", "/admin/v2/namespaces/my-tenant/no/topics", ...),
    ("GET", "/admin/v2/namespaces/my-tenant/no/permissions", ...),
    ("POST", "/admin/v2/namespaces/my-tenant/no/permissions/r", ["produce"]),
    ("GET", "/admin/v2/namespaces/my-tenant/no/delayedDelivery", ...),
    ("POST", "/admin/v2/namespaces/my-tenant/no/delayedDelivery", {"active": True}),
    ("DELETE", "/admin/v2/namespaces/my-tenant/no/retention", ...),
    ("POST", "/admin/v2/persistent/my-tenant/my-ns/no/delayedDelivery", {"active": True}),
    ("GET", "/admin/v2/persistent/my-tenant/my-ns/no/delayedDelivery", ...),
    ("GET", "/lookup/v2/topic/persistent/my-tenant/no/t", ...),
    ("GET", "/admin/v2/schemas/my-tenant/my-ns/no/schema", ...),
    ("POST", "/admin/v2/schemas/my-tenant/no/t/schema", {"type": "STRING", "schema": ""}),
    ("GET", "/admin/v2/clusters/no", ...),
    ("GET", "/admin/v2/brokers/no", ...),
    ("GET", "/nowhere", ...),
)


async def test_what_is_not_there_is_404(rest: Rest) -> None:
    """And nothing comes into being."""
    await made(rest)
    await rest.refuses((*row, 404, " ") for row in NOT_THERE)
    assert (await rest.ask("GET", "/admin/v2/namespaces/my-tenant")).value == ["my-tenant/my-ns"]


NOT_OFFERED = (
    ("POST", f"{NAMESPACE}/backlogQuota", "messageTTL"),
    ("PUT", f"{NAMESPACE}/compactionThreshold", "readCompacted"),
    ("POST", f"{NAMESPACE}/dispatchRate", "permits"),
    ("PUT", f"{NAMESPACE}/0x00000000_0xffffffff/split", "one part"),
    ("PUT", "/admin/v2/persistent/my-tenant/my-ns/t/compaction", "readCompacted"),
    ("POST", "/admin/v2/persistent/my-tenant/my-ns/t/terminate", "exclusive"),
    ("POST", "/admin/v2/persistent/my-tenant/my-ns/t/permissions/r", "namespaces"),
    ("GET", "/admin/v2/non-persistent/my-tenant/my-ns/t/stats", "/admin/v2/persistent"),
    ("PUT", "/admin/v2/clusters/other", "GET"),
    ("GET", "/admin/v2/clusters/standalone/failureDomains", "placement"),
    ("GET", "/admin/v3/functions/a/b/c", "clients"),
    ("GET", "/admin/v2/broker-stats/metrics", "/metrics"),
    ("GET", "/admin/v2/bookies/all", "store"),
    ("PATCH", NAMESPACE, "DELETE, GET, PUT"),
)


async def test_what_is_not_offered_is_405_and_says_what_to_do_instead(rest: Rest) -> None:
    """Pulsar's tools show it so."""
    await made(rest)
    await rest.refuses((method, path, ..., 405, instead) for method, path, instead in NOT_OFFERED)


async def test_pulsar_admin_topics_list_asks_for_topics_that_are_not_persistent_and_gets_none(rest: Rest) -> None:
    """`topics list` and `list-partitioned-topics` join both answers, and fail where one is refused."""
    for path in ("", "/partitioned"):
        assert (await rest.ask("GET", f"/admin/v2/non-persistent/public/default{path}"))[:2] == (200, [])
        assert (await rest.ask("GET", f"/admin/v2/non-persistent/public/no{path}")).status == 404


@pytest.mark.parametrize("body", ["", ...])
async def test_topic_policies_set_message_ttl_has_its_number_in_the_query(rest: Rest, body: Any) -> None:
    """Java sends an empty text as the body; a number there counts too."""
    path = "/admin/v2/persistent/public/default/t/messageTTL"
    rest.store.topic("t").create()
    assert (await rest.ask("POST", f"{path}?messageTTL=60&isGlobal=false", body)).status == 204
    assert (await rest.ask("GET", path)).value == 60
    answered = await rest.ask("POST", f"{path}?messageTTL=-1", body)
    assert (answered.status, "messageTTL=-1" in answered.reason) == (412, True)
    assert (await rest.ask("POST", path, 90)).status == 204
    assert (await rest.ask("GET", path)).value == 90


NOT_SET: tuple[tuple[str, Any], ...] = (
    *((name, None) for name in (
        "persistence", "dispatchRate", "subscriptionDispatchRate", "subscribeRate", "publishRate",
        "replicatorDispatchRate", "maxProducersPerTopic", "maxConsumersPerTopic", "maxConsumersPerSubscription",
        "maxUnackedMessagesPerConsumer", "maxUnackedMessagesPerSubscription", "maxSubscriptionsPerTopic",
        "maxTopicsPerNamespace", "compactionThreshold", "offloadDeletionLagMs", "offloadPolicies",
        "inactiveTopicPolicies", "subscriptionExpirationTime", "deduplicationSnapshotInterval", "antiAffinity",
        "autoSubscriptionCreation", "resourcegroup", "entryFilters", "persistence/bookieAffinity",
        "schemaAutoUpdateCompatibilityStrategy",
    )),
    ("backlogQuotaMap", {}), ("properties", {}), ("permissions/subscription", {}), ("allowedClusters", []),
    ("subscriptionTypesEnabled", []), ("offloadThreshold", -1), ("offloadThresholdInSeconds", -1),
    ("encryptionRequired", False), ("schemaValidationEnforced", False), ("isAllowAutoUpdateSchema", True),
    ("dispatcherPauseOnAckStatePersistent", False), ("subscriptionAuthMode", "None"),
)  # fmt: skip


async def test_namespaces_get_a_policy_that_duelog_has_not_is_what_pulsar_says_of_one_that_is_not_set(
    rest: Rest,
) -> None:
    """So that a tool which reads all of them goes on; to set one is 405."""
    await made(rest)
    for path, read in NOT_SET:
        assert (await rest.ask("GET", f"{NAMESPACE}/{path}"))[:2] == (204 if read is None else 200, read), path
        assert (await rest.ask("GET", f"/admin/v2/namespaces/my-tenant/no/{path}")).status == 404, path
        assert (await rest.ask("PUT", f"{NAMESPACE}/{path}", 1)).status == 405, path


async def test_topics_permissions_are_those_of_the_namespace(tmp_path: Path) -> None:
    """A topic has none of its own, and need not exist; its name has to be one."""
    path = "/admin/v2/persistent/my-tenant/my-ns/t/permissions"

    async with administered(tmp_path / "s", **SECURED) as (_, rest, _):
        await made(rest, role="root")
        assert (await rest.ask("POST", f"{NAMESPACE}/permissions/ann", ["consume"], role="admin1")).status == 204
        assert (await rest.ask("GET", path, role="admin1"))[:2] == (200, {"ann": ["consume"]})
        assert (await rest.ask("GET", path, role="ann")).status == 403
        assert (await rest.ask("GET", path.replace("my-ns", "no"), role="admin1")).status == 404
        assert (await rest.ask("POST", f"{path}/ann", ["produce"], role="admin1")).status == 405


async def test_tenants_and_namespaces_come_and_go(tmp_path: Path) -> None:
    """409 where one is there, or has something in it; force takes all; a restart changes nothing."""

    async with administered(tmp_path / "s") as (broker, rest, store):
        await made(rest)
        assert (await rest.ask("PUT", TENANT, TENANT_INFO)).status == 409
        assert (await rest.ask("PUT", NAMESPACE)).status == 409
        assert (await rest.ask("GET", TENANT)).value == TENANT_INFO
        assert (await rest.ask("POST", TENANT, {"adminRoles": ["x", "x"]})).status == 204
        assert (await rest.ask("GET", TENANT)).value == {"adminRoles": ["x"], "allowedClusters": ["standalone"]}
        assert (await rest.ask("GET", f"{NAMESPACE}/messageTTL")).value == 120
        policies = (await rest.ask("GET", NAMESPACE)).value
        assert policies["message_ttl_in_seconds"] == 120
        assert policies["bundles"] == (await rest.ask("GET", f"{NAMESPACE}/bundles")).value
        assert (await rest.ask("PUT", "/admin/v2/namespaces/my-tenant/empty", "")).status == 204
        assert (
            await rest.ask("POST", "/admin/v2/namespaces/my-tenant/empty/replication", ["standalone"])
        ).status == 204

        client = await RawClient.connected(int(broker.urls.plain.rpartition(":")[2]))
        topic = "persistent://my-tenant/my-ns/t"
        assert isinstance(await client.ask(commands.Producer(topic, 1, 1)), commands.ProducerSuccess)
        assert (await rest.ask("GET", f"{NAMESPACE}/topics")).value == [topic]
        assert (await rest.ask("GET", f"{NAMESPACE}/topics?mode=NON_PERSISTENT")).value == []
        store.update_policies(topic=topic, ttl_ms=5)
        answered = await rest.ask("DELETE", NAMESPACE)
        assert (answered.status, topic in answered.reason) == (409, True)
        assert (await rest.ask("DELETE", TENANT)).status == 409
        assert (await rest.ask("GET", f"{NAMESPACE}/topics")).value == [topic]
        assert (await rest.ask("DELETE", f"{NAMESPACE}?force=true")).status == 204
        await client.hear_a(commands.CloseProducer)
        again = await client.ask_for(commands.Error, commands.Producer(topic, 2, 3))
        assert again.error == commands.ServerError.TOPIC_NOT_FOUND
        assert list(store.topics()) == []
        assert store.all_policies() == {}

    async with administered(tmp_path / "s") as (_, rest, _):
        assert (await rest.ask("GET", "/admin/v2/namespaces/my-tenant")).value == ["my-tenant/empty"]
        assert (await rest.ask("DELETE", "/admin/v2/namespaces/my-tenant/empty")).status == 204
        assert (await rest.ask("DELETE", TENANT)).status == 204
        assert (await rest.ask("GET", "/admin/v2/tenants")).value == ["public"]


async def test_pulsar_admin_namespaces_create_sends_minus_one_for_what_is_not_set(rest: Rest) -> None:
    """No field of them asks for anything; each by itself does not either."""
    assert (await rest.ask("PUT", TENANT, TENANT_INFO)).status == 204
    assert (await rest.ask("PUT", NAMESPACE, UNSET_IN_JAVA)).status == 204
    for number, (name, value) in enumerate(UNSET_IN_JAVA.items()):
        answered = await rest.ask("PUT", f"/admin/v2/namespaces/my-tenant/n{number}", {name: value})
        assert answered.status == 204, (name, answered)


async def test_a_namespace_is_made_with_roles_in_auth_policies_and_what_get_says_can_be_put(rest: Rest) -> None:
    """Pulsar's own scripts grant actions of functions and packages, too: they mean nothing here."""
    path = "/admin/v2/namespaces/my-tenant/"
    granted = {"ann": ["consume", "produce"], "bob": ["consume"]}
    asked = {"ann": ["produce", "consume", "functions", "packages"], "bob": ["consume"], "eve": ["sinks"], "joe": []}
    assert (await rest.ask("PUT", TENANT, TENANT_INFO)).status == 204
    assert (await rest.ask("PUT", f"{path}a", {"auth_policies": {"namespace_auth": asked}})).status == 204
    assert (await rest.ask("GET", f"{path}a/permissions")).value == granted
    assert (await rest.ask("POST", f"{path}a/messageTTL", 60)).status == 204
    assert (await rest.ask("POST", f"{path}a/retention", {MINUTES: 3, MIB: -1})).status == 204
    assert (await rest.ask("POST", f"{path}a/delayedDelivery", {"active": True, MAX: 5})).status == 204
    read = (await rest.ask("GET", f"{path}a")).value
    assert (await rest.ask("PUT", f"{path}b", read)).status == 204
    assert (await rest.ask("GET", f"{path}b")).value == read


async def test_a_namespace_whose_policies_cannot_be_stored_is_not_made(
    rest: Rest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request may be made again."""
    assert (await rest.ask("PUT", TENANT, TENANT_INFO)).status == 204
    with monkeypatch.context() as patched:
        patched.setattr(DelayedStore, "update_policies", raising(StoreFull(tmp_path, "no space")))
        assert (await rest.ask("PUT", NAMESPACE, CREATED_BY_JAVA)).status == 507
        assert (await rest.ask("GET", NAMESPACE)).status == 404
    assert (await rest.ask("PUT", NAMESPACE, CREATED_BY_JAVA)).status == 204


async def test_a_deleted_tenant_takes_its_namespaces_with_it_if_forced(rest: Rest) -> None:
    """Topics of an embedded program, in a namespace that was never made, too."""
    await made(rest)
    for name in ("my-tenant/my-ns/a", "my-tenant/my-ns/a-partition-0", "other/wild/t"):
        rest.store.topic(name).create()
    assert (await rest.ask("DELETE", "/admin/v2/namespaces/other/wild")).status == 409
    assert (await rest.ask("DELETE", "/admin/v2/namespaces/other/wild?force=true")).status == 204
    assert (await rest.ask("DELETE", f"{TENANT}?force=true")).status == 204
    assert list(rest.store.topics()) == []


async def test_rights_are_those_of_the_wire(tmp_path: Path) -> None:
    """A superuser makes a tenant, its administrator a namespace, whose grants count for both; 401 and 403 else."""
    async with administered(tmp_path / "s", **SECURED) as (_, rest, _):
        for method, path in (("GET", NAMESPACE), ("PUT", TENANT), ("GET", "/admin/v2/brokers/health"), ("GET", "/x")):
            assert (await rest.ask(method, path)).status == 401
        assert (await rest.ask("GET", "/status.html")).status == 200
        await made(rest, role="root")
        role = f"{NAMESPACE}/permissions/ann"
        for method, path, body in (
            ("GET", "/admin/v2/tenants", ...), ("PUT", "/admin/v2/tenants/x", TENANT_INFO), ("DELETE", TENANT, ...),
            ("POST", "/admin/v2/brokers/configuration/maxTopicListInFlightHeapMemSizeMB/3", ...),
            ("GET", "/admin/v2/brokers/configuration/runtime", ...),
            ("POST", TENANT, {"adminRoles": ["ann"]}),
        ):  # fmt: skip
            assert (await rest.ask(method, path, body, role="admin1")).status == 403, path
        refused: tuple[tuple[str, str, Any], ...] = (
            ("GET", TENANT, ...), ("GET", NAMESPACE, ...), ("POST", role, ["produce"]), ("DELETE", NAMESPACE, ...),
            ("POST", f"{NAMESPACE}/delayedDelivery", {"active": False}), ("GET", f"{NAMESPACE}/topics", ...),
            ("PUT", "/admin/v2/namespaces/my-tenant/x", ...), ("GET", "/admin/v2/namespaces/no/no", ...),
            ("GET", "/lookup/v2/topic/persistent/my-tenant/my-ns/t", ...),
        )  # fmt: skip
        for method, path, body in refused:
            assert (await rest.ask(method, path, body, role="ann")).status == 403, path
        assert (await rest.ask("POST", role, ["consume", "consume"], role="admin2")).status == 204
        answered = await rest.ask("GET", f"{NAMESPACE}/permissions", role="admin1")
        assert answered.value == {"ann": ["consume"]}
        policies = (await rest.ask("GET", NAMESPACE, role="admin1")).value
        assert policies["auth_policies"]["namespace_auth"] == {"ann": ["consume"]}
        assert (await rest.ask("GET", f"{NAMESPACE}/topics", role="ann")).status == 200
        assert (await rest.ask("GET", "/lookup/v2/topic/persistent/my-tenant/my-ns/t", role="ann")).status == 200
        assert (await rest.ask("DELETE", role, role="admin1")).status == 204
        assert (await rest.ask("GET", f"{NAMESPACE}/topics", role="ann")).status == 403


async def test_schemas_are_stored_compared_and_told_by_version(rest: Rest) -> None:
    """Schemas come as the wire has them; KEY_VALUE as one JSON object."""
    path = "/admin/v2/schemas/public/default/t"

    def record(*names: str) -> str:
        fields = ",".join(f'{{"name":"{name}","type":["null","int"],"default":null}}' for name in names)
        return f'{{"type":"record","name":"R","fields":[{fields}]}}'

    rest.store.topic("t").create()
    first = {"type": "AVRO", "schema": record("a"), "properties": {"k": "v"}}
    assert (await rest.ask("POST", f"{path}/schema", first)).value == {"version": 0}
    second = {"type": "AVRO", "schema": record("a", "b"), "properties": {}}
    answered = await rest.ask("POST", f"{path}/compatibility", second)
    assert answered.value == {"isCompatibility": True, "schemaCompatibilityStrategy": "FULL"}
    assert (await rest.ask("POST", f"{path}/version", second)).value == {"version": -1}
    assert (await rest.ask("POST", f"{path}/schema", second)).value == {"version": 1}
    assert (await rest.ask("POST", f"{path}/schema", first)).value == {"version": 0}
    found = (await rest.ask("GET", f"{path}/schema/0")).value
    assert (found["type"], found["data"], found["properties"]) == ("AVRO", record("a"), {"k": "v"})
    assert (await rest.ask("GET", f"{path}/schema")).value["version"] == 1
    both = (await rest.ask("GET", f"{path}/schemas")).value["getSchemaResponses"]
    assert [each["version"] for each in both] == [0, 1]
    assert (await rest.ask("GET", f"{path}/schema/2")).status == 404
    assert (await rest.ask("GET", f"{path}/schema/x")).status == 412
    bad = {"type": "STRING", "schema": "", "properties": {}}
    assert (await rest.ask("POST", f"{path}/schema", bad)).status == 409
    assert (await rest.ask("DELETE", f"{path}/schema")).value == {"version": 1}
    pair = {"type": "KEY_VALUE", "schema": '{"key": "", "value": ' + record("a") + "}",
            "properties": {"key.schema.type": "STRING", "value.schema.type": "AVRO"}}  # fmt: skip
    assert (await rest.ask("POST", f"{path}/schema", pair)).value == {"version": 0}
    found = (await rest.ask("GET", f"{path}/schema")).value
    assert found["data"].replace(" ", "") == str(pair["schema"]).replace(" ", "")


@pytest.mark.parametrize("body", [None, ..., {"adminRoles": None}])
async def test_a_tenant_keeps_its_admin_roles_when_it_is_posted_null(rest: Rest, body: Any) -> None:
    """An empty list takes them all; nothing at all asks for nothing."""
    assert (await rest.ask("PUT", TENANT, TENANT_INFO)).status == 204
    assert (await rest.ask("POST", TENANT, body)).status == 412
    assert (await rest.ask("GET", TENANT)).value == TENANT_INFO
    assert (await rest.ask("POST", TENANT, {"adminRoles": []})).status == 204
    assert (await rest.ask("GET", TENANT)).value["adminRoles"] == []


async def test_schemas_upload_comes_before_its_topic_and_goes_with_its_namespace(rest: Rest) -> None:
    """It is so with Pulsar; a producer of the topic has to fit then."""
    namespace, schema = "/admin/v2/namespaces/public/n", "/admin/v2/schemas/public/n/t/schema"
    assert (await rest.ask("PUT", namespace)).status == 204
    assert (await rest.ask("POST", schema, {"type": "INT8", "schema": ""})).value == {"version": 0}
    assert (await rest.ask("GET", "/admin/v2/persistent/public/n")).value == []
    client = await rest.client()
    other = commands.Schema("t", b"", 7, [])
    answer = await client.ask_for(commands.Error, commands.Producer("persistent://public/n/t", 1, 1, schema=other))
    assert answer.error == commands.ServerError.INCOMPATIBLE_SCHEMA
    await client.close()
    assert (await rest.ask("DELETE", f"{namespace}?force=true")).status == 204
    assert (await rest.ask("PUT", namespace)).status == 204
    assert (await rest.ask("GET", schema)).status == 404


async def test_a_new_schema_is_compared_as_the_namespace_says(rest: Rest) -> None:
    """PUT schemaCompatibilityStrategy."""
    path = "/admin/v2/namespaces/public/default/schemaCompatibilityStrategy"
    rest.store.topic("t").create()
    assert (await rest.ask("GET", path)).value == "UNDEFINED"
    assert (await rest.ask("GET", path + "?applied=true")).value == "FULL"
    schemas = "/admin/v2/schemas/public/default/t/schema"
    assert (await rest.ask("POST", schemas, {"type": "INT8", "schema": ""})).status == 200
    assert (await rest.ask("POST", schemas, {"type": "INT16", "schema": ""})).status == 409
    assert (await rest.ask("PUT", path, "ALWAYS_COMPATIBLE")).status == 204
    assert (await rest.ask("POST", schemas, {"type": "INT16", "schema": ""})).status == 200
    assert (await rest.ask("PUT", path, "UNDEFINED")).status == 204
    assert (await rest.ask("POST", schemas, {"type": "INT32", "schema": ""})).status == 409


DELAYING = "/admin/v2/namespaces/public/default/delayedDelivery"
DELAYED = "/admin/v2/persistent/public/default/{}/delayedDelivery"


async def test_a_client_s_messages_go_by_fixed_delay_maximum_and_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fixed beats maximum beats the client, topic over namespace, and the counters of PIP-437 count."""
    reader = InMemoryMetricReader()
    meter = MeterProvider(metric_readers=[reader]).get_meter("duelog")
    monkeypatch.setattr(metrics._Shared, "instruments", metrics.Instruments(meter))

    async with administered(tmp_path / "s") as (broker, _, _):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("delaying_client.py")),
            broker.urls.plain,
            broker.web_urls.plain,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), 300)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, output.decode(errors="replace")[-4_000:]
        assert counted(reader, metrics.REJECTED) == {"fixed": 1}
        assert counted(reader, metrics.OVERRIDDEN) == {"fixed": 1, "parted": 1}


def counted(reader: InMemoryMetricReader, name: str) -> dict[str, int]:
    """A counter by topic, partitions as one."""
    found: dict[str, int] = {}
    data: Any = reader.get_metrics_data()
    for metric in (each for of in data.resource_metrics for scope in of.scope_metrics for each in scope.metrics):
        for point in metric.data.data_points if metric.name == name else ():
            topic = point.attributes["pulsar.topic"].rpartition("/")[2].partition("-")[0]
            found[topic] = found.get(topic, 0) + point.value
    return found


async def test_a_scope_tells_what_is_set_there_and_what_is_in_force(rest: Rest) -> None:
    """GET of nothing: 204; active and tickTime are always told; POST replaces; other policies stay."""
    rest.store.set_policies(DelayedDeliveryPolicies(tick_time_ms=7, max_delivery_delay_ms=90))
    rest.store.topic("t").create()
    rest.store.update_policies(topic="t", ttl_ms=3_000)
    topic = DELAYED.format("t")
    for path in (DELAYING, topic):
        assert (await rest.ask("GET", path))[:2] == (204, None)
        everything = {"active": True, "tickTime": 7, MAX: 90, FIXED: 0}
        assert (await rest.ask("GET", path + "?applied=true")).value == everything
    assert (await rest.ask("POST", DELAYING, {FIXED: 5, MAX: None, "hello": 1})).status == 204
    assert (await rest.ask("GET", DELAYING)).value == {"active": True, "tickTime": 7, FIXED: 5}
    assert (await rest.ask("GET", topic)).status == 204
    applied = {"active": True, "tickTime": 7, MAX: 90, FIXED: 5}
    assert (await rest.ask("GET", topic + "?applied=true&authoritative=false&isGlobal=false")).value == applied
    assert (await rest.ask("POST", topic + "?isGlobal=true", {"active": False})).status == 204
    assert (await rest.ask("GET", topic)).value == {"active": False, "tickTime": 7}
    assert (await rest.ask("GET", DELAYING)).value["active"] is True
    assert (await rest.ask("POST", topic, {"tickTime": 0})).status == 204
    assert (await rest.ask("GET", topic)).value == {"active": True, "tickTime": 0}
    assert (await rest.ask("DELETE", topic)).status == 204
    assert (await rest.ask("DELETE", topic)).status == 204
    assert (await rest.ask("GET", topic)).status == 204
    found = rest.store.policies(topic="t")
    assert found is not None
    assert found.ttl_ms == 3_000
    assert (await rest.ask("GET", "/admin/v2/persistent/public/default/t/messageTTL")).value == 3
    assert (await rest.ask("POST", topic, {})).status == 204
    assert (await rest.ask("GET", topic)).status == 204


async def test_a_partition_has_what_its_topic_has(rest: Rest) -> None:
    """Set at either name, for all partitions; deduplication and what else topics have, too."""
    access = rest.services.access
    address = access.admit(None, "p")
    await access.make_partitioned(address, 3)
    assert (await rest.ask("POST", DELAYED.format("p-partition-1"), {MAX: 9})).status == 204
    for name in ("p", "p-partition-0", "p-partition-1", "p-partition-2"):
        assert (await rest.ask("GET", DELAYED.format(name))).value[MAX] == 9
        assert rest.store.effective_policies(name).max_delivery_delay_ms == 9
    assert (await rest.ask("DELETE", DELAYED.format("p"))).status == 204
    assert rest.store.all_policies() == {}
    path = "/admin/v2/persistent/public/default/{}/deduplicationEnabled"
    assert (await rest.ask("POST", path.format("p-partition-0"), True)).status == 204
    assert (await rest.ask("GET", path.format("p"))).value is True
    assert (await rest.ask("GET", DELAYED.format("p-partition-9"))).status == 404
