"""Settings from a file: names, types, what cannot be."""

import asyncio
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from duelog import DelayedStore, Policies, StoreConfig
from duelog.broker import configuration
from duelog.broker.configuration import BrokerConfig, read_settings
from duelog.broker.server.broker import Broker
from duelog.store.errors import InvalidArgument

EXAMPLE = """
bindAddress = "0.0.0.0"
advertisedAddress = "broker.example"
brokerServicePortTls = 7000
tlsCertificateFilePath = "/etc/duelog/cert.pem"
tlsKeyFilePath = "/etc/duelog/key.pem"
keepAliveIntervalSeconds = 10
authenticationProviders = ["token"]
authorizationEnabled = true
superUserRoles = ["admin"]
delayRejection = "clamp"

[store]
durability = "relaxed"
"""


def written(path: Path, text: str) -> Path:
    """A file with this text."""
    path = path / "broker.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_has_the_names_that_operators_know(tmp_path: Path) -> None:
    """Settings that the file leaves out have their defaults; those of the caller count more."""
    found = read_settings(BrokerConfig, written(tmp_path, EXAMPLE), broker_service_port=7777)
    assert found == BrokerConfig(
        bind_address="0.0.0.0",
        advertised_address="broker.example",
        broker_service_port=7777,
        broker_service_port_tls=7000,
        tls_certificate_file_path=Path("/etc/duelog/cert.pem"),
        tls_key_file_path=Path("/etc/duelog/key.pem"),
        keep_alive_interval_seconds=10.0,
        authentication_providers=("token",),
        authorization_enabled=True,
        super_user_roles=("admin",),
        delay_rejection="clamp",
        store={"durability": "relaxed"},
    )
    assert found.reachable_address == "broker.example"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("keepAliveIntervalSecond = 3", "keepAliveIntervalSecond=3: .* not known"),
        ("keep_alive_interval_seconds = 3", "not known"),
        ('brokerServicePort = "6650"', "brokerServicePort='6650': expected an integer"),
        ("brokerServicePort = true", "expected an integer"),
        ("brokerServicePort = 70000", "0 to 65535"),
        ("superUserRoles = [1]", "a list of texts"),
        ("tlsKeyFilePath = 3", "a path"),
        ('tlsKeyFilePath = "key.pem"', "tlsKeyFilePath=.*go together"),
        ("authorizationEnabled = 1", "expected bool"),
        ('authorizationEnabled = "yes"', "expected bool"),
        ("authorizationEnabled = true", "needs authenticationProviders"),
        ('authenticationProviders = ["kerberos"]', "kerberos"),
        ('delayRejection = "drop"', "clamp"),
        ('schemaCompatibilityStrategy = "SOME"', "BACKWARD"),
        ('advertisedListeners = ["pulsar://host:6650"]', "advertisedListeners='pulsar:.*expected name:"),
        ('advertisedListeners = ["a:http://host:80"]', "expected name:"),
        ("maxPendingRequests = 0", "maxPendingRequests=0: expected more than 0"),
        ("writeStallSeconds = -1", "0 or more"),
        ("writeLowMark = 2000000", "over writeHighMark"),
        ("store = 3", "a table"),
        ("delayedDeliveryMaxDelayInMillis = -1", "delayedDeliveryMaxDelayInMillis=-1: expected 0 or more"),
        ("delayedDeliveryTopicManagerIdleMillis = 0", "ManagerIdleMillis=0: here it is tracker_idle_ms of .*store"),
        ("delayedDeliveryPruneMinIntervalMillis = 0", "here it is tracker_prune_interval_ms"),
        ("delayedDeliveryPruneEligibleRatio = 0.5", "here it is tracker_prune_ratio"),
        ('delayedDeliveryTrackerFactoryClassName = "org"', "one kind of delay index"),
        ("fixedDelayedDeliveryTimeMs = 1", "--fixed-delay"),
        ("a = ", "not TOML"),
    ],
)
def test_a_setting_that_cannot_be_is_named(tmp_path: Path, text: str, says: str) -> None:
    """One of each kind."""
    with pytest.raises(InvalidArgument, match=says):
        read_settings(BrokerConfig, written(tmp_path, text))


def test_names_of_pulsar_that_are_refused_are_told_by_names_that_the_store_has() -> None:
    """No setting of the broker is among them."""
    texts = " ".join(configuration._ELSEWHERE.values())
    named = set(re.findall(r"here it is (\w+) of the table", texts))
    assert len(named) == 4
    assert named <= {each.name for each in fields(StoreConfig)}
    assert not set(configuration._ELSEWHERE) & {BrokerConfig.in_file(each.name) for each in fields(BrokerConfig)}


def test_delays_of_the_configuration_are_set_for_the_whole_store(tmp_path: Path) -> None:
    """By Pulsar's names; what is left out, and other policies of the store, stay as they are."""
    text = """
        delayedDeliveryEnabled = true
        delayedDeliveryTickTimeMillis = 1000
        delayedDeliveryMaxDelayInMillis = 3600000
    """
    config = replace(
        read_settings(BrokerConfig, written(tmp_path, text)), bind_address="127.0.0.1", broker_service_port=0
    )

    async def served(store: DelayedStore, config: BrokerConfig) -> None:
        broker = Broker(store, config)
        await broker.start()
        await broker.stop()

    with DelayedStore.open(tmp_path / "store") as store:
        store.set_policies(Policies(max_delivery_delay_ms=5, retention_ms=7))
        asyncio.run(served(store, config))
        wanted = Policies(active=True, tick_time_ms=1_000, max_delivery_delay_ms=3_600_000, retention_ms=7)
        assert store.policies() == wanted
        asyncio.run(served(store, replace(config, delayed_delivery_enabled=None)))
        assert store.policies() == wanted


def test_a_listener_has_an_address_for_each_scheme() -> None:
    """The listeners that are named."""
    config = BrokerConfig(advertised_listeners=("a:pulsar://x:1", "b:pulsar://y:2", "a:pulsar+ssl://x:3"))
    assert config.listeners() == {
        "a": {"pulsar": "pulsar://x:1", "pulsar+ssl": "pulsar+ssl://x:3"},
        "b": {"pulsar": "pulsar://y:2"},
    }


def test_every_setting_can_be_in_a_file(tmp_path: Path) -> None:
    """Names are told apart, and a default can be written down."""
    names = [BrokerConfig.in_file(each.name) for each in fields(BrokerConfig)]
    assert len(set(names)) == len(names)
    lines = []
    for each in fields(BrokerConfig):
        value = getattr(BrokerConfig(), each.name)
        if isinstance(value, bool):
            lines.append(f"{BrokerConfig.in_file(each.name)} = {str(value).lower()}")
        elif isinstance(value, (int, float, str)):
            lines.append(f"{BrokerConfig.in_file(each.name)} = {value!r}")
        elif isinstance(value, tuple):
            lines.append(f"{BrokerConfig.in_file(each.name)} = []")
    assert read_settings(BrokerConfig, written(tmp_path, "\n".join(lines))) == BrokerConfig()
