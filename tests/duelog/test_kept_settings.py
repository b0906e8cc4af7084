"""Settings that decide what is kept live in the store: each process that opens it goes by them."""

import logging
import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from duelog import DelayedDeliveryPolicies, DelayedStore, ManualClock, Message, Policies, StoreConfig, Subscription
from duelog.engine import open_engine
from duelog.store.codec.format import policy_key
from duelog.store.env.environment import Environment
from duelog.store.policy.policy_records import STORE_SCOPE, PolicyRecord
from tests.conftest import START_MS, OpenStore
from tests.duelog.store_state import payloads
from tests.fixtures.freeze import CONFIG as FROZEN_CONFIG
from tests.tools.command_line import json_lines_of, ok, run

WEEK_MS = 7 * 86_400_000
FROZEN = Path(__file__).parent.parent / "fixtures" / "store-v1.tar.gz"


def keep_hundred(store: DelayedStore) -> None:
    """A hundred messages in ledgers of ten, all of them acknowledged."""
    topic = store.topic("kept")
    with topic.subscribe("reader") as reader:
        topic.send_batch([Message(b"%d" % number) for number in range(100)])
        reader.ack(reader.receive(100), durable=True)


def all_again(reader: Subscription) -> list[bytes]:
    """Messages that there are to go back to; acknowledged again."""
    reader.seek("earliest")
    return payloads(reader, durable=True)


ALL = [b"%d" % number for number in range(100)]


def test_a_ledger_that_a_lower_limit_makes_full_takes_no_message_more(open_store: OpenStore) -> None:
    """Sent alone or in a batch, after the store was opened again: the next ledger begins."""
    for lone in (True, False):
        store = open_store(config=StoreConfig(ledger_max_entries=5))
        topic = store.topic(f"t{lone}")
        topic.send_batch([Message(b"x")] * 3)
        store.close()
        store = open_store(config=StoreConfig(ledger_max_entries=3))
        topic = store.topic(f"t{lone}")
        if lone:
            topic.send(b"y")
        else:
            topic.send_batch([Message(b"y")])
        assert [ledger.entries for ledger in topic.ledgers()] == [3, 1]
        store.close()


def test_retention_is_not_lost_by_looking_at_another_topic_on_the_command_line(path: Path) -> None:
    """`duelog receive` of another topic leaves a week's retention alone."""
    with DelayedStore.open(path, StoreConfig(retention_ms=WEEK_MS, ledger_max_entries=10, background=False)) as store:
        keep_hundred(store)
    ok("send", "--create", path, "other", "x")
    assert len(json_lines_of("receive", "--create", path, "other", "looker", "--timeout", "0")) == 1
    with DelayedStore.open(path, StoreConfig(background=False)) as store:
        store.tick()
        with store.topic("kept").subscribe("reader") as reader:
            assert all_again(reader) == ALL


def store_without_settings(tmp_path: Path) -> Path:
    """A store whose record of its settings is gone."""
    with tarfile.open(FROZEN) as packed:
        packed.extractall(tmp_path, filter="data")
    path = tmp_path / "store"
    with closing(Environment(path / "main", name="main")) as main:
        assert main.write(lambda transaction: transaction.delete(policy_key(STORE_SCOPE.key)))
    return path


def test_a_store_without_settings_takes_over_those_of_the_first_program(tmp_path: Path) -> None:
    """Once: what a later opening asks for changes nothing."""
    path, clock = store_without_settings(tmp_path), ManualClock(START_MS * 2)
    first = StoreConfig(partition_ms=FROZEN_CONFIG.partition_ms, retention_ms=WEEK_MS, max_redeliveries=3)
    with DelayedStore.open(path, first, clock=clock) as store:
        assert store.policies() == Policies(retention_ms=WEEK_MS, max_redeliveries=3)
    later = StoreConfig(partition_ms=FROZEN_CONFIG.partition_ms, ttl_ms=5)
    with DelayedStore.open(path, later, clock=clock) as store:
        assert store.policies() == Policies(retention_ms=WEEK_MS, max_redeliveries=3)
        effective = store.effective_policies("frozen", "reader")
        assert (effective.ttl_ms, effective.set_at["ttl_ms"]) == (0, "default")
        assert (effective.max_redeliveries, effective.set_at["max_redeliveries"]) == (3, "store")


def test_commands_record_no_settings_in_a_store_without_them(tmp_path: Path) -> None:
    """They let go of nothing: the retention in force is for ever until a program says what is to be kept."""
    path = store_without_settings(tmp_path)
    ok("send", "--create", path, "other", "x")
    ok("policies", "set", path, "--max-delay", "7d")
    config = StoreConfig(partition_ms=FROZEN_CONFIG.partition_ms, background=False, retention_ms=WEEK_MS)
    clock = ManualClock(START_MS * 2)
    engine = open_engine(path, config, clock, read_only=False, records_defaults=False)
    with DelayedStore(engine) as store:
        effective = store.effective_policies("frozen")
        assert (effective.retention_ms, effective.set_at["retention_ms"]) == (2**63 - 1, "nothing recorded yet")
        with store.topic("frozen").subscribe("reader", type="shared") as reader:
            received = reader.receive(1_000)
            reader.ack(received, durable=True)
            clock.advance(100 * WEEK_MS)
            store.tick()
            reader.seek("earliest")
            assert {message.payload for message in received} <= {message.payload for message in reader.receive(1_000)}
    with DelayedStore.open(path, config, clock=clock) as store:
        assert store.policies() == Policies(retention_ms=WEEK_MS, max_delivery_delay_ms=WEEK_MS)


def test_an_import_of_an_archive_records_no_settings_either(tmp_path: Path) -> None:
    """It opens the store, finds that it is not empty, and leaves it as it was."""
    pytest.importorskip("pyarrow")
    path = store_without_settings(tmp_path)
    ok("send", "--create", tmp_path / "other", "t", "x")
    ok("export", tmp_path / "other", tmp_path / "archive")
    assert run("import", path, "--parquet", tmp_path / "archive").exit_code == 2
    with DelayedStore.open(path, StoreConfig(partition_ms=FROZEN_CONFIG.partition_ms), read_only=True) as store:
        assert store.effective_policies("frozen").set_at["retention_ms"] == "nothing recorded yet"


def test_an_opening_that_asks_for_other_settings_is_told_in_one_warning(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Field, both values and what changes it; what equals the default was not asked for."""
    open_store(config=StoreConfig(retention_ms=WEEK_MS)).close()
    with caplog.at_level(logging.WARNING, "duelog.config"):
        open_store().close()
        open_store(config=StoreConfig(retention_ms=WEEK_MS)).close()
        assert caplog.messages == []
        open_store(config=StoreConfig(retention_ms=5, max_redeliveries=2)).close()
    (message,) = caplog.messages
    assert "retention_ms=5 is asked for, the store keeps retention_ms=604800000" in message
    assert "max_redeliveries=2 is asked for, the store keeps max_redeliveries=-1" in message
    assert "set_policies" in message


def test_delay_policies_leave_what_else_is_set(open_store: OpenStore) -> None:
    """A program that sets its delay policies at every start does not lose the store's retention by it."""
    store = open_store(config=StoreConfig(retention_ms=WEEK_MS))
    store.set_policies(DelayedDeliveryPolicies(tick_time_ms=100))
    assert store.policies() == Policies(retention_ms=WEEK_MS, tick_time_ms=100)
    store.set_policies(DelayedDeliveryPolicies())
    assert store.policies() == Policies(retention_ms=WEEK_MS)
    store.set_policies(Policies(ttl_ms=5))
    assert store.policies() == Policies(ttl_ms=5)
    assert PolicyRecord().at(None) == Policies()
    assert store._engine.policies.get(STORE_SCOPE) == Policies(ttl_ms=5)
