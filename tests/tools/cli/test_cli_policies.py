"""`duelog policies`."""

from pathlib import Path

import pytest

from duelog import DelayedStore
from duelog.opening import stored_span_ms
from duelog.store.policy.policies import CONFIG_FIELDS, DELAY_FIELDS
from tests.tools.command_line import FUTURE_MS, json_lines_of, json_of, make_store, ok, process, refused


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store without messages."""
    make_store(tmp_path / "store").close()
    return tmp_path / "store"


def test_what_is_set_is_shown_with_the_scope_that_wins(path: Path) -> None:
    """A topic's view has what is set there, what is in force, and where it comes from. Flags may be Pulsar's."""
    ok("policies", "set", path, "-d", "-md", "7d")
    ok("policies", "set", path, "-n", "public/default", "-e", "-t", "1s", "-fd", "1s")
    ok("policies", "set", path, "--topic", "t", "--fixedDelay", "30s")
    shown = json_of("policies", "get", path, "--topic", "t")
    assert {name: shown["effective"][name] for name in DELAY_FIELDS} == {
        "active": True,
        "tick_time_ms": 1_000,
        "max_delivery_delay_ms": 604_800_000,
        "fixed_delivery_delay_ms": 30_000,
    }
    assert shown["set_at"]["max_delivery_delay_ms"] == "store"
    assert shown["set_at"]["tick_time_ms"] == "namespace public/default"
    assert shown["set"]["fixed_delivery_delay_ms"] == 30_000
    assert "namespace public/default" in ok("policies", "get", path, "--topic", "t")
    assert [row["scope"] for row in json_lines_of("policies", "get", path)] == [
        "topic persistent://public/default/t",
        "namespace public/default",
        "store",
    ]


def test_set_leaves_what_it_does_not_name(path: Path) -> None:
    """--disable after the maximum keeps it; remove takes both; to set nothing is refused."""
    assert "--max-delay" in refused("policies", "set", path)
    ok("policies", "set", path, "--namespace", "public/default", "--enable", "--time", "1s", "--fixed-delay", "1")
    assert json_of("policies", "remove", path, "--namespace", "public/default") == {"removed": True}
    ok("policies", "set", path, "--maxDelay", "0.5")
    assert json_of("policies", "set", path, "--disable")["max_delivery_delay_ms"] == 500
    assert json_lines_of("policies", "get", path)[0]["active"] is False
    assert json_of("policies", "remove", path) == {"removed": True}
    assert json_lines_of("policies", "get", path) == []


def test_a_message_over_the_maximum_is_refused_on_the_command_line(path: Path) -> None:
    """The line says the limit and where it was set."""
    ok("policies", "set", path, "--topic", "t", "--max-delay", "1h")
    assert "max_delivery_delay_ms=3600000 set on topic" in refused("send", "--create", path, "t", "x", "--after", "2h")


def test_what_is_kept_is_set_at_every_scope_and_shown_with_where_it_comes_from(path: Path) -> None:
    """Store, namespace, topic, subscription; a subscription's view has all four."""
    ok("policies", "set", path, "--retention", "7d", "--ttl", "30d", "--max-redeliveries", "9")
    ok("policies", "set", path, "-n", "public/default", "--ack-timeout", "90s", "--retention-bytes", "1000")
    ok("policies", "set", path, "--topic", "t", "--dead-letter-topic", "graves", "--backoff", "0.5")
    ok("policies", "set", path, "--topic", "t", "-s", "mailer", "--max-redeliveries", "-1", "--max-backoff", "5m")
    shown = json_of("policies", "get", path, "--topic", "t", "--subscription", "mailer")
    assert {name: shown["effective"][name] for name in CONFIG_FIELDS} == {
        "retention_ms": 604_800_000,
        "retention_bytes": 1_000,
        "ttl_ms": 2_592_000_000,
        "max_redeliveries": -1,
        "dead_letter_topic": "graves",
        "ack_timeout_ms": 90_000,
        "nack_backoff_ms": 500,
        "nack_backoff_max_ms": 300_000,
    }
    topic = "topic persistent://public/default/t"
    assert [shown["set_at"][name] for name in CONFIG_FIELDS] == [
        "store", "namespace public/default", "store", f"subscription mailer of {topic}", topic,
        "namespace public/default", topic, f"subscription mailer of {topic}",
    ]  # fmt: skip
    ok("policies", "set", path, "-n", "public/default", "--max-in-flight", "7", "--max-pending", "9")
    ok("policies", "set", path, "--topic", "t", "-s", "mailer", "--max-in-flight", "5")
    flow = json_of("policies", "get", path, "--topic", "t", "--subscription", "mailer")
    assert [(flow["effective"][name], flow["set_at"][name]) for name in ("max_in_flight", "max_pending")] == [
        (5, f"subscription mailer of {topic}"), (9, "namespace public/default")
    ]  # fmt: skip
    assert "604,800,000" in ok("policies", "get", path, "--topic", "t")
    assert "subscription mailer of topic t " in ok("policies", "get", path)
    assert "retention_ms=1000" in refused("policies", "set", path, "--topic", "t", "-s", "mailer", "--retention", "1")


def test_one_policy_is_unset_and_the_others_stay(path: Path) -> None:
    """By its name; an unknown one is refused with the names there are."""
    ok("policies", "set", path, "--topic", "t", "--retention", "7d", "--ttl", "1d", "--max-delay", "5")
    left = json_of("policies", "unset", path, "--topic", "t", "retention_ms", "max_delivery_delay_ms")
    assert {name: value for name, value in left.items() if value is not None} == {"ttl_ms": 86_400_000}
    assert "retention_ms" in refused("policies", "unset", path, "--topic", "t", "retention")
    assert ok("policies", "unset", path, "--topic", "t", "ttl_ms") == "nothing is set there\n"
    assert json_lines_of("policies", "get", path) == []


def test_a_store_is_made_with_a_span_and_defaults_of_its_own(tmp_path: Path) -> None:
    """`init` says what was made; commands and programs go by it; a store that is there is left alone."""
    path = tmp_path / "made"
    made = json_of("init", path, "--partition", "1h", "--retention", "7d", "--ttl", "0", "--max-redeliveries", "5")
    assert made == {"partition_ms": 3_600_000, "policies": {"retention_ms": 604_800_000, "max_redeliveries": 5}}
    ok("send", "--create", path, "t", "x", "--at", FUTURE_MS)
    assert stored_span_ms(path) == 3_600_000
    assert json_of("policies", "get", path, "--topic", "t")["effective"]["max_redeliveries"] == 5
    assert "there is a store already" in refused("init", path)
    assert "partition_ms=0" in refused("init", tmp_path / "other", "--partition", "0")
    assert not (tmp_path / "other").exists()
    (tmp_path / "file").write_text("")
    refused("init", tmp_path / "file")


def test_a_reader_sees_what_another_process_sets(path: Path) -> None:
    """A store that is open read-only asks anew."""
    with DelayedStore.open(path, read_only=True) as reader:
        assert reader.effective_policies("t").retention_ms == 0
        assert process("policies", "set", path, "--retention", "1").returncode == 0
        assert reader.effective_policies("t").retention_ms == 1_000
