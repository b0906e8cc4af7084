"""The Python client, several released versions of it, each scenario in a process of its own."""

from __future__ import annotations

import base64
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest

from duelog import DelayedStore, Policies
from duelog.broker.security.permissions import Action
from tests.broker.clients.conftest import HERE, SCENARIO_S, RunScenario, ServedStore, ServeStore, free_port
from tests.broker.lookup.stage import Stage
from tests.broker.security.certificates import write_pair

VERSIONS = ("installed", "3.9.0", "3.5.0", "3.1.0")
"""The newest one is a dependency of the tests; the others come from the package index."""

SCENARIOS = (
    "produce_and_consume",
    "empty_and_large",
    "subscription_goes_on",
    "cumulative",
    "delays",
    "batches",
    "batch_index",
    "exclusive",
    "shared",
    "failover",
    "key_shared",
    "sticky",
    "nack",
    "redelivery",
    "dead_letter",
    "seek",
    "reader",
    "table_view",
    "pattern",
    "schema",
    "access_modes",
    "names_that_break_rules",
    "unknown_listener",
)

SECRET = b"0123456789abcdef0123456789abcdef"


def token(role: str, **claims: Any) -> str:
    """A token of a role."""
    return jwt.encode({"sub": role, **claims}, SECRET, "HS256")


SECURED = {
    "authenticationProviders": ["token"],
    "authorizationEnabled": True,
    "superUserRoles": ["root"],
    "tokenSecretKey": "data:;base64," + base64.b64encode(SECRET).decode(),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_program_works_as_with_pulsar(
    scenario: str, version: str, broker: ServedStore, run_scenario: RunScenario, request: pytest.FixtureRequest
) -> None:
    """What the scenario says, in a namespace that the versions share; each has topics of its own."""
    run_scenario(version, scenario, broker.url, version)


def test_what_a_client_holds_too_long_comes_again(broker: ServedStore, run_scenario: RunScenario) -> None:
    """The shortest timeout that clients take is ten seconds."""
    run_scenario("installed", "acknowledgement_timeout", broker.url, "installed")


def test_a_full_quota_blocks_a_producer_until_there_is_place(
    serve_store: ServeStore, run_scenario: RunScenario
) -> None:
    """The ordinary client raises ProducerBlockedQuotaExceededException, and the same producer sends later."""
    broker = serve_store()
    broker.kill()
    with DelayedStore.open(broker.folder / "store") as store:
        store.set_policies(Policies(max_pending=2), topic="quota")
    broker.start()
    run_scenario("installed", "blocked_by_a_quota", broker.url, "installed")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_partitioned_topic_is_one_to_its_clients(
    version: str, serve_store: ServeStore, run_scenario: RunScenario
) -> None:
    """Made as the broker's settings say."""
    broker = serve_store(defaultNumPartitions=3)
    run_scenario(version, "partitioned", broker.url, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_tokens_open_the_broker_to_those_that_may(
    version: str, serve_store: ServeStore, run_scenario: RunScenario
) -> None:
    """A superuser's does, a wrong one does not, and a role without a grant sees and changes nothing."""
    broker = serve_store(**SECURED)
    wrong = jwt.encode({"sub": "root"}, SECRET[::-1], "HS256")
    run_scenario(version, "not_authenticated", broker.url, version, wrong)
    run_scenario(version, "not_authorized", broker.url, version, token("stranger"))
    run_scenario(version, "authenticated", broker.url, version, token("root"))


def test_a_role_may_do_what_its_namespace_grants_it(serve_store: ServeStore, run_scenario: RunScenario) -> None:
    """Produce or consume; a client that gives no credentials has the rights of the anonymous role."""

    def grant(store: DelayedStore) -> None:
        rights = {"w": frozenset({Action.PRODUCE}), "r": frozenset({Action.CONSUME}), "guest": frozenset(Action)}
        Stage(store).set("public/default", permissions=rights)

    broker = serve_store(grant, **SECURED, anonymousUserRole="guest")
    run_scenario("installed", "one_right", broker.url, "installed", token("w"), "produce")
    run_scenario("installed", "one_right", broker.url, "installed", token("r"), "consume")
    run_scenario("installed", "produce_and_consume", broker.url, "installed")


def test_a_connection_outlives_its_token(serve_store: ServeStore, run_scenario: RunScenario) -> None:
    """The client is asked for a new one after the old one's end."""
    broker = serve_store(**SECURED, authenticationRefreshCheckSeconds=1)
    now = int(time.time())
    short = [token("root", exp=now + seconds) for seconds in (2, 3_600)]
    run_scenario("installed", "refreshed", broker.url, "installed", *short)


def test_passwords_open_the_broker(serve_store: ServeStore, run_scenario: RunScenario, tmp_path: Path) -> None:
    """Of a file as htpasswd writes it."""
    bcrypt = pytest.importorskip("bcrypt")
    path = tmp_path / "htpasswd"
    path.write_bytes(b"me:" + bcrypt.hashpw(b"secret", bcrypt.gensalt(4)) + b"\n")
    broker = serve_store(authenticationProviders=["basic"], basicAuthConf=path)
    run_scenario("installed", "password", broker.url, "installed", "me", "secret")


@pytest.mark.parametrize("version", VERSIONS)
def test_tls_is_as_good_as_its_certificate(
    version: str, serve_store: ServeStore, run_scenario: RunScenario, tmp_path: Path
) -> None:
    """A client that trusts it is served; one that trusts another is not."""
    certificate, key = write_pair(tmp_path)
    (tmp_path / "other").mkdir()
    other, _ = write_pair(tmp_path / "other")
    broker = serve_store(tlsCertificateFilePath=certificate, tlsKeyFilePath=key)
    run_scenario(version, "secured", broker.tls_url, version, str(certificate))
    run_scenario(version, "not_trusted", broker.tls_url, version, str(other))


@pytest.mark.parametrize(
    ("scenarios", "settings"),
    [(("produce_and_consume", "pattern", "schema"), {}), (("partitioned",), {"defaultNumPartitions": 3})],
    ids=["plain", "partitioned"],
)
def test_a_program_with_an_address_over_http_works_as_well(
    scenarios: tuple[str, ...], settings: dict[str, Any], serve_store: ServeStore, run_scenario: RunScenario
) -> None:
    """It asks REST where topics are, what partitions they have, and which there are: those that it makes, too."""
    port = free_port()
    serve_store(webServicePort=port, **settings)
    for scenario in scenarios:
        run_scenario("installed", scenario, f"http://127.0.0.1:{port}", "installed")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_stream_goes_on_when_the_broker_comes_back(
    how: str, version: str, serve_store: ServeStore, library: Callable[[str], dict[str, str]]
) -> None:
    """Killed or ended in mid-stream: every receipt is delivered."""
    broker = serve_store()
    command = [sys.executable, str(HERE / "scenarios.py"), "streaming", broker.url, version]
    with subprocess.Popen(
        command, env=library(version), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as client:
        try:
            assert client.stdout is not None
            line = client.stdout.readline()
            while line and "streaming" not in line:
                line = client.stdout.readline()
            if how == "kill":
                broker.kill()
            else:
                assert broker.stop() == 0, broker.log()
            broker.start()
            out, err = client.communicate("go on\n", timeout=SCENARIO_S)
        finally:
            client.kill()
    assert client.returncode == 0, f"{out[-3_000:]}\n{err[-3_000:]}\n{broker.log()}"
