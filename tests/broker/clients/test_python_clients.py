"""The Python client, the newest and the oldest version of it, each scenario in a process of its own."""

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
    RunScenarios,
    ServedStore,
    ServeStore,
    token,
)
from tests.broker.lookup.stage import Stage
from tests.broker.security.certificates import write_pair
from tests.ports import free_port
from tests.proof import PROOF

VERSIONS = ("installed", "3.1.0")
"""The newest one, a dependency of the tests, and the oldest, from the package index."""

SCENARIOS = (
    "produce_and_consume",
    "empty_and_large",
    "chunks_among_consumers",
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
    "dead_letter_of_one_consumer",
    "seek",
    "reader",
    "table_view",
    "pattern",
    "schema",
    "access_modes",
    "names_that_break_rules",
    "unknown_listener",
)

ONCE = ("blocked_by_a_quota", *["acknowledgement_timeout"] * PROOF)
"""Scenarios that the newest version alone runs; the client's timeout is 10 s at least."""


@pytest.mark.series
@pytest.mark.parametrize("version", VERSIONS)
def test_programs_work_as_with_pulsar(version: str, broker: ServedStore, run_scenarios: RunScenarios) -> None:
    """Each scenario says what it shows; versions share a namespace, and each has topics of its own."""
    run_scenarios(version, broker.url, version, *(ONCE if version == "installed" else ()), *SCENARIOS)


def test_a_partitioned_topic_is_one_to_its_clients(serve_store: ServeStore, run_scenarios: RunScenarios) -> None:
    """Made as the broker's settings say; REST tells its partitions, too."""
    port = free_port()
    broker = serve_store(defaultNumPartitions=3, webServicePort=port)
    for version in VERSIONS:
        run_scenarios(version, broker.url, version, "partitioned")
    run_scenarios("installed", f"http://127.0.0.1:{port}", "http", "partitioned")


@pytest.mark.parametrize("version", VERSIONS)
def test_tokens_open_the_broker_to_those_that_may(
    version: str, secured_broker: ServedStore, run_scenarios: RunScenarios
) -> None:
    """A superuser's does, a wrong one does not, and a role without a grant sees and changes nothing."""
    wrong = jwt.encode({"sub": "root"}, SECRET[::-1], "HS256")
    run_scenarios(
        version,
        secured_broker.url,
        version,
        ("not_authenticated", wrong),
        ("not_authorized", token("stranger")),
        ("authenticated", token("root")),
    )


def test_a_role_may_do_what_its_namespace_grants_it(serve_store: ServeStore, run_scenarios: RunScenarios) -> None:
    """Produce or consume; a client that gives no credentials has the rights of the anonymous role."""

    def grant(store: DelayedStore) -> None:
        rights = {"w": frozenset({Action.PRODUCE}), "r": frozenset({Action.CONSUME}), "guest": frozenset(Action)}
        Stage(store).set("public/default", permissions=rights)

    broker = serve_store(grant, **SECURED, anonymousUserRole="guest")
    rights = [("one_right", token("w"), "produce"), ("one_right", token("r"), "consume")]
    run_scenarios("installed", broker.url, "installed", *rights, "produce_and_consume")


def test_passwords_open_the_broker(secured_broker: ServedStore, run_scenarios: RunScenarios) -> None:
    """The file is one that htpasswd writes."""
    run_scenarios("installed", secured_broker.url, "password", ("password", "root", "secret"))


def test_tls_is_as_good_as_its_certificate(broker: ServedStore, run_scenarios: RunScenarios, tmp_path: Path) -> None:
    """A client that trusts it is served; one that trusts another is not."""
    other, _ = write_pair(tmp_path)
    trusting = ("secured", broker.settings["tlsCertificateFilePath"]), ("not_trusted", other)
    for version in VERSIONS:
        run_scenarios(version, broker.tls_url, f"tls-{version}", *trusting)


def test_a_program_with_an_address_over_http_works_as_well(broker: ServedStore, run_scenarios: RunScenarios) -> None:
    """It asks REST where topics are, what partitions they have, and which there are: those that it makes, too."""
    url = f"http://127.0.0.1:{broker.settings['webServicePort']}"
    run_scenarios("installed", url, "http", "produce_and_consume", "pattern", "schema")


@pytest.mark.series
@pytest.mark.parametrize(("how", "version"), [("kill", "installed"), ("stop", VERSIONS[-1])][: 1 + PROOF])
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


def run_flex(folder: Path, *arguments: str) -> None:
    """Run a scenario of flex.js."""
    done = subprocess.run(
        ["node", "flex.js", *arguments], cwd=folder, capture_output=True, text=True, timeout=SCENARIO_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3_000:]}\n{done.stderr[-3_000:]}"


@pytest.mark.parametrize("scenario", ["produceAndConsume", "sharedWithNack"])
def test_a_program_of_pulsar_flex_works_as_with_pulsar(scenario: str, broker: ServedStore, flex: Path) -> None:
    """The scenario says what is shown."""
    run_flex(flex, scenario, f"127.0.0.1:{broker.port}")


def test_pulsar_flex_is_let_in_with_a_token(secured_broker: ServedStore, flex: Path) -> None:
    """The same token opens the broker to every client."""
    run_flex(flex, "token", f"127.0.0.1:{secured_broker.port}", token("root"))
