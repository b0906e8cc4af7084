"""Settings, health and version of the broker over HTTP."""

from __future__ import annotations

from pathlib import Path

from duelog.broker.listing.dynamic_settings import NAMES
from tests.broker.admin.rest import SECURED, administered

CONFIGURATION = "/admin/v2/brokers/configuration"
HEAP = "maxTopicListInFlightHeapMemSizeMB"


async def test_a_setting_changes_at_once_and_over_a_restart_until_it_is_deleted(tmp_path: Path) -> None:
    """POST and DELETE; the limiter follows."""

    async with administered(tmp_path / "s") as (_, rest, _):
        assert (await rest.ask("GET", CONFIGURATION)).value == sorted(NAMES)
        assert (await rest.ask("GET", f"{CONFIGURATION}/values")).value == {}
        assert (await rest.ask("POST", f"{CONFIGURATION}/{HEAP}/3")).status == 204
        assert (await rest.ask("GET", f"{CONFIGURATION}/runtime")).value[HEAP] == "3"
        assert rest.services.limiter.heap.max_permits == 3 << 20
    async with administered(tmp_path / "s") as (_, rest, _):
        assert (await rest.ask("GET", f"{CONFIGURATION}/values")).value == {HEAP: "3"}
        assert rest.services.limiter.heap.max_permits == 3 << 20
        assert (await rest.ask("DELETE", f"{CONFIGURATION}/{HEAP}")).status == 204
        assert (await rest.ask("GET", f"{CONFIGURATION}/values")).value == {}
        assert rest.services.limiter.heap.max_permits == 100 << 20


async def test_the_broker_tells_its_addresses_version_and_settings_but_no_secret(tmp_path: Path) -> None:
    """Pulsar's tools ask so."""
    async with administered(tmp_path / "s", **SECURED) as (broker, rest, _):
        here = rest.address.removeprefix("http://")
        assert (await rest.ask("GET", "/admin/v2/brokers", role="root")).value == [here]
        assert (await rest.ask("GET", "/admin/v2/brokers/standalone", role="root")).value == [here]
        leader = (await rest.ask("GET", "/admin/v2/brokers/leaderBroker", role="root")).value
        assert leader == {"serviceUrl": rest.address, "brokerId": here}
        cluster = (await rest.ask("GET", "/admin/v2/clusters/standalone", role="any")).value
        assert (cluster["serviceUrl"], cluster["brokerServiceUrl"]) == (rest.address, broker.urls.plain)
        assert (await rest.ask("GET", "/admin/v2/brokers/health", role="any")).value == b"ok"
        assert (await rest.ask("GET", "/admin/v2/brokers/ready", role="any")).value == b"ok"
        assert (await rest.ask("GET", "/admin/v2/brokers/version", role="any")).value.startswith(b"duelog-")
        settings = (await rest.ask("GET", f"{CONFIGURATION}/runtime", role="root")).value
        assert settings["superUserRoles"] == "root"
        assert settings["authorizationEnabled"] == "true"
        assert settings["tokenSecretKey"] == "*****"
        assert all(isinstance(each, str) for each in settings.values())
