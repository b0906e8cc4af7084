"""`duelog repair` and single records: what the rest tells is made anew, and costs no message."""

import dataclasses
import os
import shutil
from pathlib import Path

import lmdb
import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.errors import DamagedStore
from duelog.partitions.partition_set import build_partition
from duelog.store.codec.format import FORMAT_VERSION, PARTITION_INFO_KEY, PartitionInfo, Table, quarantine_key, seal
from duelog.store.codec.run import HEADER_BYTES
from duelog.tools.repair.repair_store import RepairReport, repair_store
from duelog.tools.store_check import check_store
from tests.conftest import DAY_MS, START_MS, tick_after
from tests.tools.small_records import DAMAGES, IN_BOTH, Damage, environments, flip, forget_applied, keys, remove

CONFIG = StoreConfig(background=False, max_clock_jump_ms=None)
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


def test_a_log_that_may_have_been_of_a_deleted_topic_gets_a_topic_of_its_own(tmp_path: Path) -> None:
    """Nothing tells whose messages they are: they are neither discarded nor given to another."""
    path = tmp_path / "store"
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        for name in ("gone", "t"):
            store.topic(name).subscribe("s").close()
        store.delete_topic("gone")
        store.topic("t").send_payloads([b"x"] * 50, deliver_at=START_MS + 5 * DAY_MS)
    forget_applied(path)
    (partition,) = environments(path)[1:]
    (key,) = keys(partition, Table.LOG)
    IN_BOTH["missing"](partition, key)
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


def test_a_cursor_record_that_cannot_be_read_begins_as_early_as_the_rest_allows(half_acked: Path) -> None:
    """Its copy is lost too: its key tells the name, and what it had acknowledged singly stays acknowledged."""
    IN_BOTH["flipped"](half_acked / "main", keys(half_acked / "main", Table.CURSOR)[0])
    report = repaired(half_acked)
    assert len(report.subscriptions) == 1
    assert report.again == 50
    assert delivered(half_acked) == OWED


def test_a_cursor_record_that_is_gone_is_found_and_what_it_was_to_get_is_delivered(half_acked: Path) -> None:
    """Its copy is gone too: nothing tells the name: the subscription goes on under one that says so."""
    IN_BOTH["missing"](half_acked / "main", keys(half_acked / "main", Table.CURSOR)[0])
    assert [found.code for found in check_store(half_acked)] == ["acked-without-subscription"]
    report = repaired(half_acked)
    assert [line.split(":")[-2].split()[-1] for line in report.subscriptions] == ["recovered-1"]
    assert delivered(half_acked, "t", "recovered-1") == OWED


@pytest.mark.parametrize("lose", [remove, IN_BOTH["missing"]], ids=["with a copy", "without"])
def test_a_partition_that_the_catalog_does_not_know_is_found_and_registered_again(tmp_path: Path, lose: Damage) -> None:
    """However new its directory is: opening for writing refuses the store, so `check` says so and `repair` helps."""
    path = tmp_path / "store"
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        store.topic("t").subscribe("s").close()
        store.topic("t").send_payloads([b"pay"] * 7, deliver_after=5 * 86_400)
    lose(path / "main", keys(path / "main", Table.PARTITION)[0])
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
        info = PartitionInfo(FORMAT_VERSION, store._engine.storage.store_id, 0, DAY_MS, 1)
        build_partition(path, path / "partitions" / "20270101T000000Z" / "g000001", info)
        assert [found.severity for found in store.check()] == ["warning"]
    DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)).close()
    assert list((path / "partitions").iterdir()) == []


FIRED = [b"%d" % number for number in range(3_000)]


@pytest.fixture
def fired(tmp_path: Path) -> tuple[Path, list[bytes]]:
    """A store in which three thousand messages have fired in three runs, and what its subscription is to get."""
    path = tmp_path / "store"
    clock = ManualClock(START_MS)
    with DelayedStore.open(path, CONFIG, clock=clock) as store:
        topic = store.topic("t")
        with topic.subscribe("s") as reader:
            topic.send_payloads(FIRED, deliver_at=[START_MS + 1_000 + at for at in range(3_000)])
            for _ in range(3):
                tick_after(store, clock, 1_500)
            reader.ack(reader.receive(2_000)[::2], durable=True)
    return path, [*FIRED[1:2_000:2], *FIRED[2_000:]]


@DAMAGE
@pytest.mark.parametrize("run", [0, 1, 2])
def test_a_run_of_markers_that_is_lost_costs_no_message(fired: tuple[Path, list[bytes]], run: int, damage: str) -> None:
    """Its targets lie whole in the partition; those that were acknowledged stay acknowledged."""
    path, owed = fired
    DAMAGES[damage](path / "main", keys(path / "main", Table.RUN)[run])
    report = repaired(path)
    assert (report.lost, report.again) == (0, 0)
    assert delivered(path) == owed


def test_markers_of_two_partitions_that_are_lost_together_get_new_ones(tmp_path: Path, clock: ManualClock) -> None:
    """Which of them lay where is not told: those that were acknowledged may come again, and are counted."""
    path = tmp_path / "store"
    with DelayedStore.open(path, CONFIG, clock=clock) as store:
        topic = store.topic("t")
        with topic.subscribe("s") as reader:
            for day in (1, 2):
                payloads = [b"%d %d" % (day, number) for number in range(100)]
                topic.send_payloads(payloads, deliver_at=START_MS + day * DAY_MS)
            tick_after(store, clock, 3 * DAY_MS)
            reader.ack(reader.receive(30), durable=True)
    for segment in (path / "wal").glob("*.wal"):  # which are applied, and still have the markers
        segment.unlink()
    for key in keys(path / "main", Table.RUN):
        flip(path / "main", key)
    report = repaired(path)
    assert (report.lost, report.again) == (0, 30)
    assert sorted(delivered(path)) == sorted(b"%d %d" % (day, number) for day in (1, 2) for number in range(100))


@DAMAGE
def test_a_closed_ledger_whose_record_is_lost_has_its_entries_again(tmp_path: Path, damage: str) -> None:
    """Those of them that were acknowledged stay acknowledged."""
    path = tmp_path / "store"
    config = dataclasses.replace(CONFIG, ledger_max_entries=100)
    with DelayedStore.open(path, config, clock=ManualClock(START_MS)) as store:
        topic = store.topic("t")
        with topic.subscribe("s") as reader:
            for first in range(0, 300, 100):
                topic.send_payloads([b"%d" % number for number in range(first, first + 100)])
            assert topic.stats().ledgers > 1
            reader.ack(reader.receive(300)[1::2], durable=True)
    forget_applied(path)
    IN_BOTH[damage](path / "main", keys(path / "main", Table.LEDGER)[0])
    report = repaired(path)
    assert (report.lost, report.again) == (0, 0)
    assert delivered(path) == [b"%d" % number for number in range(0, 300, 2)]


def test_markers_tell_whose_a_log_is_that_nothing_else_names(tmp_path: Path) -> None:
    """A topic was deleted, so that a log without a record may have been its own."""
    path, clock = tmp_path / "store", ManualClock(START_MS)
    with DelayedStore.open(path, CONFIG, clock=clock) as store:
        for name in ("gone", "t", "u"):
            store.topic(name).subscribe("s").close()
        store.delete_topic("gone")
        payloads = [b"%d" % number for number in range(50)]
        store.topic("t").send_payloads(payloads, deliver_at=[START_MS + 1_000 * at for at in range(1, 51)])
        tick_after(store, clock, 30_000)
    forget_applied(path)
    (partition,) = environments(path)[1:]
    IN_BOTH["missing"](partition, keys(partition, Table.LOG)[0])
    IN_BOTH["missing"](path / "main", keys(path / "main", Table.FRONTIER)[0])
    report = repaired(path)
    assert (report.lost, report.again) == (0, 0)
    assert delivered(path) == payloads


@DAMAGE
def test_a_lost_frontier_is_told_by_the_markers(fired: tuple[Path, list[bytes]], damage: str) -> None:
    """Its copy is lost too: nothing fires twice, and nothing that has not fired is held back."""
    path, owed = fired
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS + 10_000)) as store:
        store.topic("t").send_payloads([b"to come"] * 50, deliver_at=START_MS + 60_000)
    IN_BOTH[damage](path / "main", keys(path / "main", Table.FRONTIER)[0])
    report = repaired(path)
    assert (report.lost, report.again) == (0, 0)
    assert delivered(path) == owed + [b"to come"] * 50


def test_what_was_quarantined_and_can_be_read_is_delivered(fired: tuple[Path, list[bytes]]) -> None:
    """Quarantined by a process that had no descriptors left: nothing of it is damaged, so nothing is discarded."""
    path, owed = fired
    (log,) = keys(next(path.glob("partitions/*/g*")), Table.LOG)
    assert len(log) == 5
    with lmdb.open(str(path / "main"), map_size=1 << 30) as environment, environment.begin(write=True) as raw:
        key = quarantine_key(2, 2_500)
        raw.put(key, seal(key, b"no descriptors"))
    assert [found.code for found in check_store(path)] == ["set-aside"]
    report = repaired(path)
    assert (report.lost, report.given_up) == (0, 0)
    assert delivered(path) == owed


def test_messages_whose_run_cannot_be_read_are_counted_exactly(tmp_path: Path) -> None:
    """Also those of the last run of a log, of which nothing but its own length tells how many they are."""
    path = tmp_path / "store"
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        store.topic("t").subscribe("s").close()
        store.topic("t").send_payloads(FIRED, deliver_at=START_MS + DAY_MS)
        store.topic("t").send_payloads(FIRED)
    forget_applied(path)
    for directory in (path / "main", next(path.glob("partitions/*/g*"))):
        whole = shutil.copytree(path, tmp_path / "copy")
        last = keys(directory, Table.RUN)[-1]
        flip(whole / directory.relative_to(path), last, at=HEADER_BYTES + 1)
        count = 3_000 - int.from_bytes(last[9:], "big")
        assert 0 < count < 192
        assert repaired(whole).lost == count
        assert len(delivered(whole)) == 6_000 - count
        shutil.rmtree(whole)


@pytest.fixture
def withdrawn(tmp_path: Path) -> Path:
    """Sixty messages of which twenty were cancelled and twenty rescheduled to another partition."""
    path = tmp_path / "store"
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        topic = store.topic("t")
        topic.subscribe("s").close()
        ids = topic.send_batch([Message(b"%d" % number, deliver_at=START_MS + 5 * DAY_MS) for number in range(60)])
        for message_id in ids[:20]:
            assert topic.cancel(message_id)
        for message_id in ids[20:40]:
            assert topic.reschedule(message_id, deliver_at=START_MS + 7 * DAY_MS)
    return path


NOT_CANCELLED = [*(b"%d" % number for number in range(40, 60)), *(b"%d" % number for number in range(20, 40))]


@DAMAGE
def test_rescheduled_messages_tell_of_lost_records_of_withdrawals(withdrawn: Path, damage: str) -> None:
    """The copy is lost too: none of those comes twice; the report has how many may come though cancelled."""
    IN_BOTH[damage](withdrawn / "main", keys(withdrawn / "main", Table.CANCELLED)[0])
    if damage == "missing":
        (found,) = check_store(withdrawn)
        assert (found.code, found.message.split()[0]) == ("lost-cancellation", "20")
    report = repaired(withdrawn)
    assert (report.lost, report.uncancelled) == (0, 40)
    assert sorted(delivered(withdrawn)) == sorted([*NOT_CANCELLED, *(b"%d" % number for number in range(20))])


def test_rescheduled_messages_whose_admission_cannot_be_read_are_delivered(withdrawn: Path) -> None:
    """The copy is damaged too: that their predecessors are cancelled tells that they were admitted."""
    IN_BOTH["flipped"](withdrawn / "main", keys(withdrawn / "main", Table.ADMITTED)[0])
    report = repaired(withdrawn)
    assert (report.lost, report.uncancelled) == (0, 0)
    assert sorted(delivered(withdrawn)) == sorted(NOT_CANCELLED)


def test_a_snapshot_tells_what_was_cancelled_before_it(tmp_path: Path, clock: ManualClock) -> None:
    """The copy is damaged too: only what was cancelled since may come, and is counted among what may."""
    path = tmp_path / "store"
    with DelayedStore.open(path, dataclasses.replace(CONFIG, snapshot_every_entries=50), clock=clock) as store:
        topic = store.topic("t")
        topic.subscribe("s").close()
        store.topic("t").send(b"first", deliver_at=START_MS + 60_000)
        store.tick()  # loads the partition
        ids = topic.send_batch([Message(b"%d" % number, deliver_at=START_MS + 60_000) for number in range(60)])
        for message_id in ids[:20]:
            assert topic.cancel(message_id)
        store.tick()  # writes a snapshot
        assert topic.cancel(ids[20])
    IN_BOTH["flipped"](path / "main", keys(path / "main", Table.CANCELLED)[0])
    assert repaired(path).uncancelled == 41
    assert delivered(path) == [b"first", *(b"%d" % number for number in range(20, 60))]


def test_an_entry_that_was_never_admitted_is_no_finding_once_its_predecessor_is_cancelled(tmp_path: Path) -> None:
    """A crash in the middle of rescheduling leaves such an entry, and nothing is made of it."""
    path = tmp_path / "store"
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        topic = store.topic("t")
        topic.subscribe("s").close()
        message_id = topic.send(b"x", deliver_after=86_400)
        new = topic.reschedule(message_id, deliver_after=5 * 86_400)
    for table in (Table.ADMITTED, Table.CANCELLED):  # as before its main transaction
        (key,) = keys(path / "main", table)
        IN_BOTH["missing"](path / "main", key)
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        assert store.topic("t").cancel(message_id)
        assert new is not None
    assert check_store(path, deep=True) == []


def test_a_recurring_message_whose_last_occurrence_fired_has_lost_no_cancellation(tmp_path: Path) -> None:
    """The next one names it, and replaces nothing."""
    path = tmp_path / "store"
    clock = ManualClock(START_MS)
    with DelayedStore.open(path, CONFIG, clock=clock) as store:
        topic = store.topic("t")
        topic.subscribe("s").close()
        topic.every("tick", interval=60, payload=b"x")
        for _ in range(5):
            tick_after(store, clock, 60_000)
        assert list(store.check(deep=True)) == []
    assert check_store(path, deep=True) == []


SENT = [b"%d %d" % (day, number) for day in range(2, 5) for number in range(50)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with fifty messages on each of three days to come."""
    path = tmp_path / "store"
    with DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        topic = store.topic("t")
        topic.subscribe("s").close()
        for day in range(2, 5):
            payloads = [b"%d %d" % (day, number) for number in range(50)]
            topic.send_payloads(payloads, deliver_at=START_MS + day * DAY_MS)
    return path


def turn(path: Path) -> None:
    """Have each partition's directory lie in the place of the next."""
    directories = environments(path)[1:]
    for number, directory in enumerate(directories):
        os.rename(directory, path / f"on-the-way-{number}")
    for number in range(len(directories)):
        os.rename(path / f"on-the-way-{number}", directories[number - 1])


@pytest.mark.parametrize("described", [True, False])
def test_directories_that_lie_in_each_others_place_are_put_back(path: Path, described: bool) -> None:
    """Each says where it belongs; where it does not, its runs do."""
    turn(path)
    if not described:
        remove(environments(path)[1], PARTITION_INFO_KEY)
    with pytest.raises(DamagedStore), DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS)) as store:
        for _ in store.topic("t").scheduled():
            pass
    report = repaired(path)
    assert (report.lost, report.given_up) == (0, 0)
    assert delivered(path) == SENT


def test_directories_that_a_killed_repair_was_putting_back_are_put_back_by_the_next(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait in a place that opening does not clear."""
    turn(path)
    whole = os.rename
    calls = []

    def rename(source: object, target: object) -> None:
        calls.append(source)
        if len(calls) == 5:
            raise KeyboardInterrupt
        whole(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        repair_store(path, path.with_name("given-up"))
    monkeypatch.undo()
    with pytest.raises(DamagedStore):
        DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS))
    assert repaired(path).lost == 0
    assert delivered(path) == SENT


def test_a_directory_whose_place_is_taken_goes_to_the_quarantine(path: Path) -> None:
    """A copy of one day in the place of another: that day is lost, which is said, and nothing comes twice."""
    one, other, _ = environments(path)[1:]
    forget_applied(path)
    shutil.copy(one / "data.mdb", other / "data.mdb")
    report = repaired(path)
    assert [each.name for each in (path / "quarantine").iterdir()] == [f"{other.parent.name}-{other.name}-1"]
    assert delivered(path) == [payload for payload in SENT if not payload.startswith(b"3")]
    assert any("written anew with the 0 records" in action for action in report.actions)


def test_a_directory_of_another_store_goes_to_the_quarantine(path: Path, tmp_path: Path) -> None:
    """It may be of the same day, and full of messages."""
    with DelayedStore.open(tmp_path / "other", CONFIG, clock=ManualClock(START_MS)) as store:
        store.topic("t").send_payloads([b"not mine"] * 9, deliver_at=START_MS + 9 * DAY_MS)
    (theirs,) = environments(tmp_path / "other")[1:]
    shutil.copytree(theirs.parent, path / "partitions" / theirs.parent.name)
    repaired(path)
    assert len(list((path / "quarantine").iterdir())) == 1
    assert delivered(path) == SENT


@pytest.mark.parametrize("content", [None, b"", b"\0" * 65_536])
def test_a_store_whose_main_environment_is_gone_is_left_as_it_is(path: Path, content: bytes | None) -> None:
    """Every partition stays, what to do is said, and with main/ of a backup beside them all is delivered."""
    backup = shutil.copytree(path / "main", path.with_name("backup"))
    shutil.rmtree(path / "main")
    if content is not None:
        (path / "main").mkdir()
        (path / "main" / "data.mdb").write_bytes(content)
    before = {file: file.read_bytes() for file in path.glob("partitions/*/*/data.mdb")}
    report = repair_store(path, path.with_name("given-up"))
    assert report.left
    assert any("3 partitions with messages are there" in action for action in report.actions)
    assert {file: file.read_bytes() for file in path.glob("partitions/*/*/data.mdb")} == before
    shutil.rmtree(path / "main", ignore_errors=True)
    shutil.move(backup, path / "main")
    assert check_store(path, deep=True) == []
    assert delivered(path) == SENT
