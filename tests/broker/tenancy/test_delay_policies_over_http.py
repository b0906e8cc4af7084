"""PIP-437 over HTTP: what is set, what is in force, and what becomes of messages."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from duelog import DelayedDeliveryPolicies, metrics
from tests.broker.admin.rest import Rest, administered

NAMESPACE = "/admin/v2/namespaces/public/default/delayedDelivery"
TOPIC = "/admin/v2/persistent/public/default/{}/delayedDelivery"
FIXED, MAX = "fixedDeliveryDelayInMillis", "maxDeliveryDelayInMillis"


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
    topic = TOPIC.format("t")
    for path in (NAMESPACE, topic):
        assert (await rest.ask("GET", path))[:2] == (204, None)
        everything = {"active": True, "tickTime": 7, MAX: 90, FIXED: 0}
        assert (await rest.ask("GET", path + "?applied=true")).value == everything
    assert (await rest.ask("POST", NAMESPACE, {FIXED: 5, MAX: None, "hello": 1})).status == 204
    assert (await rest.ask("GET", NAMESPACE)).value == {"active": True, "tickTime": 7, FIXED: 5}
    assert (await rest.ask("GET", topic)).status == 204
    applied = {"active": True, "tickTime": 7, MAX: 90, FIXED: 5}
    assert (await rest.ask("GET", topic + "?applied=true&authoritative=false&isGlobal=false")).value == applied
    assert (await rest.ask("POST", topic + "?isGlobal=true", {"active": False})).status == 204
    assert (await rest.ask("GET", topic)).value == {"active": False, "tickTime": 7}
    assert (await rest.ask("GET", NAMESPACE)).value["active"] is True
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
    assert (await rest.ask("POST", TOPIC.format("p-partition-1"), {MAX: 9})).status == 204
    for name in ("p", "p-partition-0", "p-partition-1", "p-partition-2"):
        assert (await rest.ask("GET", TOPIC.format(name))).value[MAX] == 9
        assert rest.store.effective_policies(name).max_delivery_delay_ms == 9
    assert (await rest.ask("DELETE", TOPIC.format("p"))).status == 204
    assert rest.store.all_policies() == {}
    path = "/admin/v2/persistent/public/default/{}/deduplicationEnabled"
    assert (await rest.ask("POST", path.format("p-partition-0"), True)).status == 204
    assert (await rest.ask("GET", path.format("p"))).value is True
    assert (await rest.ask("GET", TOPIC.format("p-partition-9"))).status == 404
