"""The Python client, the newest and the oldest version of it, each scenario in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jwt
import pytest

from duelog import DelayedStore
from duelog.broker.security.permissions import Action
from tests.broker.clients.conftest import (
    HERE,
    SCENARIO_S,
    SECRET,
    SECURED,
    RunScenario,
    ServedStore,
    ServeStore,
    free_port,
    short_tokens,
    token,
)
from tests.broker.lookup.stage import Stage
from tests.broker.security.certificates import write_pair

VERSIONS = ("installed", "3.1.0")
"""The newest one, a dependency of the tests, and the oldest, from the package index."""

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

ONCE = ("acknowledgement_timeout", "blocked_by_a_quota")
"""Scenarios that the newest version alone runs."""


@pytest.mark.parametrize("version", VERSIONS)
def test_programs_work_as_with_pulsar(version: str, broker: ServedStore, run_scenarios: RunScenario) -> None:
    """Each scenario says what it shows; versions share a namespace, and each has topics of its own."""
    run_scenarios(version, SCENARIOS if version != "installed" else (*SCENARIOS, *ONCE), broker.url, version)


def test_a_partitioned_topic_is_one_to_its_clients(serve_store: ServeStore, run_scenario: RunScenario) -> None:
    """Made as the broker's settings say; REST tells its partitions, too."""
    port = free_port()
    broker = serve_store(defaultNumPartitions=3, webServicePort=port)
    for version in VERSIONS:
        run_scenario(version, "partitioned", broker.url, version)
    run_scenario("installed", "partitioned", f"http://127.0.0.1:{port}", "http")


@pytest.mark.parametrize("version", VERSIONS)
def test_tokens_open_the_broker_to_those_that_may(
    version: str, secured_broker: ServedStore, run_scenario: RunScenario
) -> None:
    """A superuser's does, a wrong one does not, and a role without a grant sees and changes nothing."""
    url, wrong = secured_broker.url, jwt.encode({"sub": "root"}, SECRET[::-1], "HS256")
    run_scenario(version, "not_authenticated", url, version, wrong)
    run_scenario(version, "not_authorized", url, version, token("stranger"))
    run_scenario(version, "authenticated", url, version, token("root"))


def test_a_role_may_do_what_its_namespace_grants_it(serve_store: ServeStore, run_scenario: RunScenario) -> None:
    """Produce or consume; a client that gives no credentials has the rights of the anonymous role."""

    def grant(store: DelayedStore) -> None:
        rights = {"w": frozenset({Action.PRODUCE}), "r": frozenset({Action.CONSUME}), "guest": frozenset(Action)}
        Stage(store).set("public/default", permissions=rights)

    broker = serve_store(grant, **SECURED, anonymousUserRole="guest")
    run_scenario("installed", "one_right", broker.url, "installed", token("w"), "produce")
    run_scenario("installed", "one_right", broker.url, "installed", token("r"), "consume")
    run_scenario("installed", "produce_and_consume", broker.url, "installed")


def test_a_connection_outlives_its_token(secured_broker: ServedStore, run_scenario: RunScenario) -> None:
    """The client is asked for a new one after the old one's end."""
    run_scenario("installed", "refreshed", secured_broker.url, "refreshed", *short_tokens())


def test_passwords_open_the_broker(serve_store: ServeStore, run_scenario: RunScenario, tmp_path: Path) -> None:
    """The file is one that htpasswd writes."""
    bcrypt = pytest.importorskip("bcrypt")
    path = tmp_path / "htpasswd"
    path.write_bytes(b"me:" + bcrypt.hashpw(b"secret", bcrypt.gensalt(4)) + b"\n")
    broker = serve_store(authenticationProviders=["basic"], basicAuthConf=path)
    run_scenario("installed", "password", broker.url, "installed", "me", "secret")


def test_tls_is_as_good_as_its_certificate(serve_store: ServeStore, run_scenario: RunScenario, tmp_path: Path) -> None:
    """A client that trusts it is served; one that trusts another is not."""
    certificate, key = write_pair(tmp_path)
    (tmp_path / "other").mkdir()
    other, _ = write_pair(tmp_path / "other")
    broker = serve_store(tlsCertificateFilePath=certificate, tlsKeyFilePath=key)
    for version in VERSIONS:
        run_scenario(version, "secured", broker.tls_url, version, str(certificate))
        run_scenario(version, "not_trusted", broker.tls_url, version, str(other))


def test_a_program_with_an_address_over_http_works_as_well(broker: ServedStore, run_scenarios: RunScenario) -> None:
    """It asks REST where topics are, what partitions they have, and which there are: those that it makes, too."""
    url = f"http://127.0.0.1:{broker.settings['webServicePort']}"
    run_scenarios("installed", ("produce_and_consume", "pattern", "schema"), url, "http")


@pytest.mark.parametrize(("how", "version"), [("kill", "installed"), ("stop", "installed"), ("kill", VERSIONS[-1])])
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
