"""Bodies of large runs: written once, to body files; found by every reader, carried by every mover, gone with the rest.

LARGE is what one send has for one log; `large` sends it.
"""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.errors import DamagedStore, ResourceShortage, StoreFailed, StoreFull
from duelog.partitions.partition import Partition
from duelog.sending import wal_writer
from duelog.store.codec.run import Run
from duelog.store.config import Durability
from duelog.store.env import body_file, environment
from duelog.store.env.body_file import body_files
from duelog.store.log.scan import runs
from duelog.store.wal import write_batch
from duelog.tools.audit import store_audit
from duelog.tools.audit.store_audit import audit_store
from duelog.tools.compact_store import compact_store
from duelog.tools.dump import wal_rows
from duelog.tools.repair.repair_store import repair_store
from duelog.tools.store_check import check_store
from tests.conftest import HOUR_MS, START_MS, BodyMapsMade, OpenStore, applied, present, tick_after
from tests.duelog.side_by_side import crashed
from tests.duelog.store_state import payloads_after

CONFIG = StoreConfig(partition_ms=HOUR_MS, ledger_max_entries=40, run_entries=8)
LARGE = [b"%04d" % number * 100 for number in range(20)]
SMALL = [b"small %d" % number for number in range(20)]


@pytest.fixture(autouse=True)
def _little_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_batch, "LARGE_BYTES", 2_000)


@pytest.fixture
def store(open_store: OpenStore) -> DelayedStore:
    """A store with a topic "t", a subscription "s" of it, and partitions whose directories are made."""
    store = open_store(config=CONFIG)
    store.topic("t").subscribe("s").close()
    dues = [START_MS + hour * HOUR_MS for hour in (1, 2, 3)]
    store.topic("t").cancel_batch(store.topic("t").send_payloads([b"."] * 3, deliver_at=dues))
    return applied(store)


def large(store: DelayedStore, hours: tuple[int, ...] = (0,)) -> list[bytes]:
    """Send a large run to each of the partitions that begin in so many hours; 0: to the main log."""
    store.topic("t").send_batch([Message(body, deliver_after=3_600 * hour) for hour in hours for body in LARGE])
    return LARGE * len(hours)


def bodies_of(store: Path) -> list[Path]:
    """The body files of a store."""
    return sorted(path for path in store.rglob("*.bodies"))


def received(store: DelayedStore, clock: ManualClock) -> list[bytes]:
    """All that the subscription gets in ten hours."""
    return [body for hour in range(10) for body in payloads_after(store, clock, HOUR_MS * (hour > 0))]


def in_log(store: Path) -> list[dict[str, Any]]:
    """The runs that the log has."""
    return [row.value for row in wal_rows(store) if row.table == "RUN"]


def test_bodies_of_a_large_run_are_in_a_file_and_nowhere_else(store: DelayedStore, clock: ManualClock) -> None:
    """Neither in the log nor in LMDB once it is applied; the last run of the batch, a small one, goes with the rest."""
    sent = large(store, (0, 2, 3))
    assert len(bodies_of(store.path)) == 3
    assert [row.get("bodies_at") for row in in_log(store.path)][-9:] == [0, 3_304, 6_608] * 3
    applied(store)
    assert not any(LARGE[3] in path.read_bytes() for path in store.path.glob("wal/*"))
    with store._engine.storage.main.read() as raw:
        (of_topic,) = body_files(store.path / "main")
        assert [run.bodies_at for run in runs(raw, "main", of_topic) if isinstance(run, Run)] == [0, 3_304, 6_608]
    assert sorted(received(store, clock)) == sorted(sent)


def test_a_vacant_partition_has_no_body_file_all_of_it_is_in_the_log(store: DelayedStore, clock: ManualClock) -> None:
    """Its directory is not there before a checkpoint has made it."""
    sent = large(store, (5,))
    assert bodies_of(store.path) == []
    applied(store)
    sent += large(store, (5,))
    assert len(bodies_of(store.path)) == 1
    assert received(store, clock) == sent


def test_a_large_batch_over_days_has_a_body_file_for_each_that_gets_a_quarter(
    store: DelayedStore, clock: ManualClock
) -> None:
    """Their flushes run side by side; a small batch goes by the log, and so does what a day gets little of."""
    dues = [START_MS + hour * HOUR_MS for hour in (1, 1, 2, 2, 3)]
    topic = store.topic("t")
    topic.send_payloads(LARGE[:4], deliver_at=dues[:4])
    assert bodies_of(store.path) == []
    topic.send_payloads(LARGE[4:9], deliver_at=dues)
    assert len(bodies_of(store.path)) == 2
    assert sorted(received(store, clock)) == LARGE[:9]


def test_messages_alone_and_small_batches_go_by_the_log(store: DelayedStore, clock: ManualClock) -> None:
    """A lone message waits for one flush, however large it is; so do batches that have little for each log."""
    store.topic("t").send(b"x" * 50_000)
    store.topic("t").send_payloads(SMALL, deliver_at=[START_MS + (at % 4 + 1) * HOUR_MS for at in range(20)])
    assert bodies_of(store.path) == []
    assert sorted(received(store, clock)) == sorted([b"x" * 50_000, *SMALL])


@pytest.mark.parametrize("durability", ["relaxed", "none"])
def test_a_store_that_flushes_later_flushes_bodies_first_and_one_that_never_does_has_none_apart(
    open_store: OpenStore, durability: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that is not flushed may reach the disk by itself, and names no bodies that are not there."""
    flushed = list[int]()
    monkeypatch.setattr(body_file, "sync_all", flushed.extend)
    store = open_store(config=replace(CONFIG, durability=durability))
    large(store)
    assert bool(bodies_of(store.path)) == bool(flushed) == (durability == "relaxed")


def test_markers_never_go_to_a_body_file(store: DelayedStore, clock: ManualClock) -> None:
    """However many fire at once, and whatever their log has got in the same group."""
    store.topic("t").send_payloads([b"tiny"] * 2_000, deliver_at=[START_MS + HOUR_MS] * 2_000)
    applied(store)
    tick_after(store, clock, HOUR_MS)
    assert not body_files(store.path / "main")
    assert received(store, clock) == [b"tiny"] * 2_000


def test_a_killed_store_has_what_was_sent_before_it_and_after(
    store: DelayedStore, open_store: OpenStore, clock: ManualClock, tmp_path: Path
) -> None:
    """What lies behind the last bodies that a group names stays as a gap."""
    sent = large(store, (0, 2))
    copy = crashed(store, tmp_path / "copy")
    for path in bodies_of(copy):
        with path.open("ab") as file:
            file.write(b"torn")
    again = open_store(copy, CONFIG)
    sent += large(again, (0, 2))
    assert sorted(received(again, clock)) == sorted(sent)
    assert list(again.check(deep=True)) == []


def test_the_name_of_a_file_is_flushed_by_each_process_that_appends_to_it(
    store: DelayedStore, open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was killed before may not have come to it."""
    large(store, (2,))
    again = open_store(crashed(store, tmp_path / "copy"), CONFIG)
    flushed: list[Path] = []
    monkeypatch.setattr(body_file, "sync_directory", flushed.append)
    large(again, (2,))
    large(again, (2,))
    bodies = bodies_of(again.path)[0].parent
    assert flushed == [bodies, bodies.parent]


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE)


@pytest.mark.parametrize("number", FULL)
def test_without_space_for_bodies_nothing_is_stored_and_the_store_goes_on(
    store: DelayedStore, clock: ManualClock, number: int
) -> None:
    """Single messages are sent meanwhile, and the same batch again when there is space."""
    sent, attempts = large(store, (0, 2)), []

    def full(*_: Any, **__: Any) -> int:
        attempts.append(1)
        raise OSError(number, os.strerror(number))

    with patch.object(wal_writer, "append_bodies", full):
        with pytest.raises(ResourceShortage if number == errno.EMFILE else StoreFull):
            large(store, (0, 2))
        store.topic("t").send(b"alone")
    assert attempts
    sent += large(store, (0, 2))
    assert sorted(received(store, clock)) == sorted([*sent, b"alone"])


def test_bodies_leave_the_space_that_is_kept_for_applying_the_log(
    store: DelayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is nearly full refuses them before they are written."""
    monkeypatch.setattr("duelog.store.files.system_errors.free_bytes", lambda path: 100_000)
    with pytest.raises(StoreFull, match="bodies of a large run"):
        large(store)
    assert bodies_of(store.path) == []


def test_bodies_that_cannot_be_flushed_stop_the_store_and_nothing_names_them(
    store: DelayedStore, open_store: OpenStore, clock: ManualClock, tmp_path: Path
) -> None:
    """As a log that cannot be written does."""
    sent = large(store)

    def fails(descriptors: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with patch.object(body_file, "sync_all", fails), pytest.raises(StoreFailed):
        large(store)
    with pytest.raises(StoreFailed):
        store.topic("t").send(b"refused")
    assert received(open_store(crashed(store, tmp_path / "copy"), CONFIG), clock) == sent
    store.close()


def trimmed(store: DelayedStore, clock: ManualClock) -> None:
    """Have the ledgers of what was received be removed."""
    tick_after(store, clock, 5 * HOUR_MS)
    store.tick()


def test_a_writer_forgets_the_names_of_files_before_they_are_many(
    store: DelayedStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each day has new ones; what is forgotten is flushed once more, and nothing is lost."""
    monkeypatch.setattr(wal_writer, "_MOST_NAMED", 3)
    sent = [body for hour in range(8) for body in large(store, (hour,))]
    assert len(store._engine.writer()._body_files) <= 3
    assert sorted(received(store, clock)) == sorted(sent)


def test_a_body_file_goes_with_its_ledger_and_with_its_partition(store: DelayedStore, clock: ManualClock) -> None:
    """Of main when it is trimmed, of a day when it is deleted, of a topic when that is."""
    large(store, (0, 2))
    received(store, clock)
    trimmed(store, clock)
    assert bodies_of(store.path) == []
    large(store)
    store.delete_topic("t")
    assert bodies_of(store.path) == []


@pytest.mark.parametrize("end", ["pages are given back", "closed"])
def test_no_body_file_stays_mapped(store: DelayedStore, body_maps: BodyMapsMade, end: str) -> None:
    """Once what was read shall not count as memory of this process, or the store is closed."""
    sent = large(store)
    with store.topic("t").subscribe("s") as reader:
        assert [message.payload for message in reader.receive(100, timeout=0)] == sent
    assert body_maps.alive()
    if end == "closed":
        store.close()
    else:
        assert store._engine.storage.main.give_back_pages()
    assert not body_maps.alive()


def test_a_file_that_a_crash_left_without_runs_is_removed_and_one_with_runs_is_not(
    store: DelayedStore, open_store: OpenStore, clock: ManualClock, tmp_path: Path
) -> None:
    """A group that was never written leaves one, a kill amid trimming another."""
    sent = large(store)
    copy = crashed(store, tmp_path / "copy")
    left = body_file.body_file(copy / "main", 999)
    left.write_bytes(b"nobody's")
    again = open_store(copy, CONFIG)
    assert not left.exists()
    assert received(again, clock) == sent


def test_a_backup_has_the_bodies_and_a_ledger_that_is_trimmed_meanwhile_waits_for_it(
    store: DelayedStore, open_store: OpenStore, clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy has what was not acknowledged at its instant; its manifest lists the files."""
    large(store, (0, 2))
    prefetch = "duelog.store.env.environment.page_cache.prefetch"

    def everything_is_read_and_trimmed(path: Path) -> tuple[()]:
        if path.parent.name == "main":
            received(store, clock)
            trimmed(store, clock)
            assert body_files(store.path / "main")
        return ()

    monkeypatch.setattr(prefetch, everything_is_read_and_trimmed)
    store.backup(tmp_path / "copy")
    assert not body_files(store.path / "main")
    assert check_store(tmp_path / "copy", deep=True) == []
    bodies_of(tmp_path / "copy")[0].write_bytes(b"changed")
    assert {found.code for found in check_store(tmp_path / "copy", deep=True)} >= {"backup-file"}
    monkeypatch.undo()
    monkeypatch.setattr(write_batch, "LARGE_BYTES", 2_000)
    store.backup(tmp_path / "later")
    copy = open_store(tmp_path / "later", CONFIG)
    assert received(copy, clock) == []


def test_a_backup_by_another_process_has_bodies_that_are_removed_while_it_copies(
    store: DelayedStore, clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the files open from its instant on."""
    sent = large(store)
    applied(store)
    with DelayedStore.open(crashed(store, tmp_path / "other"), CONFIG, clock=clock, read_only=True) as other:

        def gone(path: Path) -> tuple[()]:
            shutil.rmtree(other.path / "main" / "bodies", ignore_errors=True)
            return ()

        monkeypatch.setattr("duelog.store.env.environment.page_cache.prefetch", gone)
        other.backup(tmp_path / "copy")
    with DelayedStore.open(tmp_path / "copy", CONFIG, clock=clock) as copy:
        assert received(copy, clock) == sent


def test_another_process_reads_bodies_that_are_applied_and_that_are_not(
    store: DelayedStore, clock: ManualClock, tmp_path: Path
) -> None:
    """By the reference in LMDB, and by that in the log."""
    large(store, (2,))
    applied(store)
    large(store, (2,))
    with DelayedStore.open(crashed(store, tmp_path / "other"), CONFIG, clock=clock, read_only=True) as other:
        assert [message.payload for message in other.topic("t").scheduled()] == LARGE * 2


def test_compaction_puts_bodies_into_their_runs(store: DelayedStore, open_store: OpenStore, clock: ManualClock) -> None:
    """What is not needed is dropped, and the body file goes with the old generation."""
    large(store, (1, 2))
    tick_after(store, clock, 4 * HOUR_MS)
    with store.topic("t").subscribe("s") as reader:
        reader.ack(reader.receive(100)[:7], durable=True)
    assert store.tick().closed == 0
    store.close()
    report = compact_store(store.path)
    assert [each.dead_messages for each in report.partitions] == [8, 1]  # those that were cancelled, too
    again = open_store(config=CONFIG)
    assert len(bodies_of(again.path)) == 1
    assert received(again, clock) == [*LARGE[7:], *LARGE]


@pytest.mark.parametrize("damage", ["a body", "the pages"])
def test_repair_keeps_what_body_files_have(
    store: DelayedStore, open_store: OpenStore, clock: ManualClock, tmp_path: Path, damage: str
) -> None:
    """A damaged body is discarded alone; an LMDB file that is written anew finds its body files beside it."""
    sent = large(store, (2,))
    applied(store)
    copy = crashed(store, tmp_path / "copy")
    (path,) = bodies_of(copy)
    if damage == "a body":
        content = bytearray(path.read_bytes())
        content[content.index(LARGE[3]) + 50] ^= 1
        path.write_bytes(content)
        sent.remove(LARGE[3])
    else:
        data = path.parent.parent / "data.mdb"
        content = bytearray(data.read_bytes())
        for page in range(2, len(content) // 4096):
            content[4096 * page + 13] ^= 0xFF  # how much of it is used
        data.write_bytes(content)
    assert check_store(copy, deep=True)
    repair_store(copy, tmp_path / "discarded")
    assert check_store(copy, deep=True) == []
    assert path.exists()
    again = open_store(copy, CONFIG)
    if damage == "a body":
        assert received(again, clock) == sent


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_check_by_another_process_finds_bodies_that_are_missing(
    store: DelayedStore, tmp_path: Path, damage: str, deep: bool
) -> None:
    """Of a file that is gone it says so once for each run; one that is short costs what lies behind its end."""
    large(store, (0, 2))
    applied(store)
    copy = crashed(store, tmp_path / "copy")
    assert check_store(copy, deep=deep) == []
    for path in bodies_of(copy):
        path.unlink() if damage == "gone" else os.truncate(path, 8_000)
    found = {(each.code, each.address.split(",")[0]) for each in check_store(copy, deep=deep)}
    assert {code for code, _ in found} == {"missing-bodies" if damage == "gone" else "corrupt-entry"}
    assert len(found) == 2


@pytest.mark.parametrize("kept", [True, False])
def test_an_audit_tells_of_bodies_that_are_gone_where_their_ledger_is_not_trimmed(
    store: DelayedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """Beside a process that trims it may find that they were removed as it came to them."""
    large(store)
    applied(store)
    copy = crashed(store, tmp_path / "copy")
    assert audit_store(copy, as_of_ms=START_MS).findings == []
    for path in bodies_of(copy):
        path.unlink()
    if not kept:
        monkeypatch.setattr(store_audit, "is_kept", lambda *_: False)
    assert [each.code for each in audit_store(copy, as_of_ms=START_MS).findings] == ["corrupt-entry"] * kept


def made(store: DelayedStore, due_ms: int) -> Partition:
    """The partition of a message, once its directory was to be made and the log has its registration still."""
    partitions = store._engine.storage.partitions
    partition = present(partitions.get(due_ms - due_ms % HOUR_MS))
    with partitions.lease(partition):
        partition.environment.apply()
    return partition


def test_a_directory_that_was_made_is_not_made_again_over_the_bodies_in_it(
    store: DelayedStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its first opening fails, for want of descriptors say; a large batch goes to its body file before the next."""
    topic, due_ms = store.topic("t"), START_MS + 9 * HOUR_MS
    topic.send(b"first", deliver_at=due_ms)
    open_lmdb, failed = environment._open_lmdb, list[Path]()

    def fails_once(path: Path, **more: Any) -> Any:
        if not failed and path.parent.parent.name == "staging":
            failed.append(path)
            raise ResourceShortage(path, "too many open files", errno.EMFILE)
        return open_lmdb(path, **more)

    monkeypatch.setattr(environment, "_open_lmdb", fails_once)
    with pytest.raises(ResourceShortage):
        made(store, due_ms)
    topic.send_payloads(LARGE, deliver_at=due_ms)
    assert not list(store.path.glob("partitions/*/*/bodies"))  # there is no directory yet
    assert made(store, due_ms).path.is_dir()
    topic.send_payloads(LARGE, deliver_at=due_ms)
    assert body_files(made(store, due_ms).path)
    applied(store)
    assert check_store(crashed(store, tmp_path / "copy"), deep=True) == []
    assert sorted(each.payload for each in topic.scheduled()) == sorted([b"first", *LARGE, *LARGE])


def test_a_partition_that_has_lost_its_file_and_has_bodies_is_not_vacant(store: DelayedStore, tmp_path: Path) -> None:
    """Its directory would be made anew, without the bodies that the log names."""
    topic, due_ms = store.topic("t"), START_MS + 9 * HOUR_MS
    topic.send(b"first", deliver_at=due_ms)
    path = made(store, due_ms).path
    topic.send_payloads(LARGE, deliver_at=due_ms)
    copy = crashed(store, tmp_path / "copy")
    lost = copy / path.relative_to(store.path)
    (lost / "data.mdb").unlink()
    with pytest.raises(DamagedStore, match="missing"):
        DelayedStore.open(copy, CONFIG, clock=ManualClock(START_MS))
    assert body_files(lost)
