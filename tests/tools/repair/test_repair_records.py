"""`duelog repair` and single small records: what the rest tells is made anew, and costs no message."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.errors import DamagedStore
from duelog.partitions.creation import build_partition
from duelog.store.codec.format import Table
from duelog.tools.repair.repair_store import RepairReport, repair_store
from duelog.tools.store_check import check_store
from tests.conftest import START_MS
from tests.tools.small_records import DAMAGES, environments, flip, forget_applied, keys, remove, without_copies

DAY_MS = 86_400_000
CONFIG = StoreConfig(background=False, max_clock_jump_ms=None)
COPIES = pytest.mark.parametrize("copies", [True, False], ids=["with copies", "of an earlier version"])
DAMAGE = pytest.mark.parametrize("damage", DAMAGES)


def repaired(store: Path) -> RepairReport:
    """The report of a repair that leaves nothing, agrees with `check`, and has a second one do nothing."""
    assert check_store(store, deep=True)
    report = repair_store(store, store.with_name("given-up"))
    assert report.left == check_store(store, deep=True) == []
    assert repair_store(store, store.with_name("given-up")).actions == []
    return report


def delivered(store: Path, topic: str = "t", subscription: str = "s") -> list[bytes]:
    """Payloads that a subscription gets until nothing more comes, ten days on."""
    clock = ManualClock(START_MS + 10 * DAY_MS)
    found = []
    with DelayedStore.open(store, CONFIG, clock=clock) as opened:
        assert subscription in [each.name for each in opened.topic(topic).stats().subscriptions]
        with opened.topic(topic).subscribe(subscription) as reader:
            while messages := reader.receive(1_000, timeout=0):
                found += [message.payload for message in messages]
                reader.ack(messages)
        assert list(opened.check(deep=True)) == []
    return found


@DAMAGE
def test_a_lost_record_of_a_main_log_ledger_costs_no_message(tmp_path: Path, damage: str) -> None:
    """In a store without copies its runs tell what it said, whether the ledger was the open one or one before."""
    whole = tmp_path / "whole"
    config = StoreConfig(background=False, ledger_max_entries=40)
    with DelayedStore.open(whole, config, clock=ManualClock(START_MS)) as store:
        for name in ("other", "t"):
            store.topic(name).subscribe("s").close()
            for number in range(100):
                store.topic(name).send(f"{name} {number}".encode())
    without_copies(whole)
    ledgers = keys(whole / "main", Table.LEDGER)
    assert len(ledgers) == 6
    for key in ledgers:
        path = shutil.copytree(whole, tmp_path / "copy")
        DAMAGES[damage](path / "main", key)
        report = repaired(path)
        assert report.lost == 0
        found = delivered(path) + delivered(path, "other")
        assert [payload[:2] for payload in found] == sorted((payload[:2] for payload in found), reverse=True), key
        if any("recovered" in action for action in report.actions):  # nothing tells whose it was: not discarded either
            found += delivered(path, f"recovered-ledger-{int.from_bytes(key[5:], 'big')}", "recovered")
        assert sorted(found) == sorted(f"{name} {number}".encode() for name in ("t", "other") for number in range(100))
        shutil.rmtree(path)


@DAMAGE
def test_a_lost_ledger_id_of_a_topic_in_a_partition_costs_no_message(tmp_path: Path, damage: str) -> None:
    """In a store without copies the only runs without an owner are the topic's."""
    path = tmp_path / "store"
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        for name in ("other", "t"):
            store.topic(name).subscribe("s").close()
            store.topic(name).send_payloads([b"%d" % number for number in range(500)], deliver_at=START_MS + 5 * DAY_MS)
    without_copies(path)
    (partition,) = environments(path)[1:]
    DAMAGES[damage](partition, keys(partition, Table.LOG)[1])
    assert repaired(path).lost == 0
    assert delivered(path) == delivered(path, "other") == [b"%d" % number for number in range(500)]


def test_a_log_that_may_have_been_of_a_deleted_topic_gets_a_topic_of_its_own(tmp_path: Path) -> None:
    """Nothing tells whose messages they are: they are neither discarded nor given to another."""
    path = tmp_path / "store"
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        for name in ("gone", "t"):
            store.topic(name).subscribe("s").close()
        store.delete_topic("gone")
        store.topic("t").send_payloads([b"x"] * 50, deliver_at=START_MS + 5 * DAY_MS)
    without_copies(path)
    forget_applied(path)
    (partition,) = environments(path)[1:]
    (key,) = keys(partition, Table.LOG)
    remove(partition, key)
    report = repaired(path)
    assert (report.lost, report.given_up) == (0, 0)
    (name,) = [action.split()[1][:-1] for action in report.actions if "recovered-ledger" in action]
    assert delivered(path, name, "recovered") == [b"x"] * 50


@pytest.fixture
def half_acked(tmp_path: Path) -> Path:
    """A store whose subscription has acknowledged every second of a hundred messages."""
    path = tmp_path / "store"
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        topic = store.topic("t")
        with topic.subscribe("s") as reader:
            topic.send_payloads([b"%d" % number for number in range(100)])
            reader.ack(reader.receive(100)[1::2], durable=True)
    return path


OWED = [b"%d" % number for number in range(0, 100, 2)]


@DAMAGE
def test_a_lost_cursor_is_made_anew_from_its_copy(half_acked: Path, damage: str) -> None:
    """It is where it was, so nothing comes twice."""
    DAMAGES[damage](half_acked / "main", keys(half_acked / "main", Table.CURSOR)[0])
    report = repaired(half_acked)
    assert (report.lost, report.again, report.given_up) == (0, 0, 0)
    assert delivered(half_acked) == OWED


def test_a_cursor_record_that_cannot_be_read_begins_as_early_as_the_rest_allows(half_acked: Path) -> None:
    """In a store without copies its key tells the name, and what it had acknowledged singly stays acknowledged."""
    without_copies(half_acked)
    flip(half_acked / "main", keys(half_acked / "main", Table.CURSOR)[0])
    report = repaired(half_acked)
    assert len(report.subscriptions) == 1
    assert report.again == 50
    assert delivered(half_acked) == OWED


def test_a_cursor_record_that_is_gone_is_found_and_what_it_was_to_get_is_delivered(half_acked: Path) -> None:
    """In a store without copies nothing tells the name: the subscription goes on under one that says so."""
    without_copies(half_acked)
    remove(half_acked / "main", keys(half_acked / "main", Table.CURSOR)[0])
    assert [found.code for found in check_store(half_acked)] == ["acked-without-subscription"]
    report = repaired(half_acked)
    assert [line.split(":")[-2].split()[-1] for line in report.subscriptions] == ["recovered-1"]
    assert delivered(half_acked, "t", "recovered-1") == OWED


@COPIES
def test_a_partition_that_the_catalog_does_not_know_is_found_and_registered_again(tmp_path: Path, copies: bool) -> None:
    """However new its directory is: opening for writing refuses the store, so `check` says so and `repair` helps."""
    path = tmp_path / "store"
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        store.topic("t").subscribe("s").close()
        store.topic("t").send_payloads([b"pay"] * 7, deliver_after=5 * 86_400)
    if not copies:
        without_copies(path)
    remove(path / "main", keys(path / "main", Table.PARTITION)[0])
    with pytest.raises(DamagedStore):
        DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS))
    assert "lost-partition" in {found.code for found in check_store(path)}
    report = repaired(path)
    assert (report.lost, report.given_up) == (0, 0)
    assert delivered(path) == [b"pay"] * 7


def test_a_partition_of_topics_that_the_catalog_does_not_know_keeps_its_messages(tmp_path: Path) -> None:
    """The main environment is of an older state: topics made since then are made anew, and no id is given out twice."""
    path = tmp_path / "store"
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        store.topic("t").subscribe("s").close()
    older = shutil.copytree(path / "main", tmp_path / "older")
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        store.topic("later").send_payloads([b"pay"] * 7, deliver_after=5 * 86_400)
    shutil.rmtree(path / "main")
    shutil.move(older, path / "main")
    report = repaired(path)
    assert (report.lost, report.given_up) == (0, 0)
    assert delivered(path, "recovered-2", "recovered") == [b"pay"] * 7


def test_a_partition_that_is_not_in_the_catalog_and_holds_nothing_is_removed_at_opening(tmp_path: Path) -> None:
    """A crash before its registration left it: no message was ever in it."""
    path = tmp_path / "store"
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        build_partition(
            path, path / "partitions" / "20270101T000000Z", 0, DAY_MS, store._engine.storage.store_id, 1 << 30
        )
        assert [found.severity for found in store.check()] == ["warning"]
    DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)).close()
    assert list((path / "partitions").iterdir()) == []
