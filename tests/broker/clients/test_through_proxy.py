"""The Python client through `duelog proxy`: what programs do, TLS on both ways, tokens, two brokers behind it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from duelog import DelayedStore
from tests.broker.clients.conftest import (
    SECRET,
    RunScenarios,
    ServedProxy,
    ServedStore,
    ServeStore,
    listens,
    token,
)
from tests.broker.lookup.stage import Stage
from tests.ports import free_port
from tests.store.commits import until

SCENARIOS = ("produce_and_consume", "empty_and_large", "batches", "seek", "pattern", "schema")

StartProxy = Callable[..., ServedProxy]


@pytest.fixture
def start_proxy(tmp_path: Path) -> Iterator[StartProxy]:
    """Start a proxy; it ends cleanly."""
    with ExitStack() as stack:

        def start(*urls: str, options: tuple[str, ...] = ()) -> ServedProxy:
            return stack.enter_context(ServedProxy(tmp_path / "proxy", *urls, options=options).running())

        yield start


def test_a_program_works_through_the_proxy_as_without(
    broker: ServedStore, start_proxy: StartProxy, run_scenarios: RunScenarios
) -> None:
    """Each scenario says what it shows; the topics are not those of other tests."""
    run_scenarios("installed", start_proxy(broker.url).url, "proxied", *SCENARIOS)


def test_tls_holds_on_both_ways(
    broker: ServedStore, start_proxy: StartProxy, run_scenarios: RunScenarios, tmp_path: Path
) -> None:
    """From the client to the proxy, and from there to the broker, whose certificate is checked."""
    certificate, key = broker.settings["tlsCertificateFilePath"], broker.settings["tlsKeyFilePath"]
    tls_port = free_port()
    config = tmp_path / "proxy.toml"
    config.write_text(f'servicePortTls = {tls_port}\nbrokerClientTrustCertsFilePath = "{certificate}"\n')
    options = ("--config", str(config), "--tls-cert", str(certificate), "--tls-key", str(key))
    start_proxy(broker.tls_url, options=options)
    until(lambda: listens(tls_port))
    run_scenarios("installed", f"pulsar+ssl://localhost:{tls_port}", "tls-proxied", ("secured", certificate))


def test_brokers_check_the_clients_tokens(
    secured_broker: ServedStore, start_proxy: StartProxy, run_scenarios: RunScenarios
) -> None:
    """The right one, a role without a right; and one that expires while the client is there."""
    proxy = start_proxy(secured_broker.url)
    run_scenarios(
        "installed",
        proxy.url,
        "proxied",
        ("authenticated", token("root")),
        ("not_authorized", token("stranger")),
        ("refreshed", SECRET.decode()),
    )


def test_two_brokers_are_one_to_programs_with_and_without_a_proxy(
    serve_store: ServeStore, start_proxy: StartProxy, run_scenarios: RunScenarios, tmp_path: Path
) -> None:
    """Whichever of them a program is told of, its topics are in the store of the one that the table names."""
    table = tmp_path / "placement.toml"
    ports = [free_port(), free_port()]
    lines = ['default = "b"']
    for name, port in zip("ab", ports, strict=True):
        lines += [f"[brokers.{name}]", f'url = "pulsar://127.0.0.1:{port}"']
    table.write_text("\n".join(lines))

    def prepare(store: DelayedStore) -> None:
        Stage(store).set("public/default")

    brokers = [
        serve_store(prepare, placementFile=table, placementBroker=name, brokerServicePort=port)
        for name, port in zip("ab", ports, strict=True)
    ]
    urls = [f"pulsar://127.0.0.1:{port}" for port in ports]
    run_scenarios("installed", urls[0], "redirected", "produce_and_consume", "pattern")
    placed = start_proxy(options=("--placement", str(table)))
    run_scenarios("installed", placed.url, "placed", "produce_and_consume")
    for broker in brokers:
        broker.stop()
    found = []
    for broker in brokers:
        with DelayedStore.open(broker.folder / "store", read_only=True) as store:
            found.append(len(list(store.topics())))
    assert found[0] == 0
    assert found[1] >= 3
