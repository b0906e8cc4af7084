"""Partitions that no checkpoint has made a directory for yet: every reader, mover and tool takes them as any other."""

from collections.abc import Callable
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock
from duelog.errors import DamagedStore
from duelog.tools.audit.store_audit import audit_store
from duelog.tools.columns.scan_arrow import plan_pending, scan_pending
from duelog.tools.dump import wal_rows
from duelog.tools.repair.repair_store import repair_store
from duelog.tools.snapshot_tool import list_snapshots, rebuild_snapshots
from duelog.tools.store_check import check_store
from tests.conftest import HOUR_MS, START_MS, OpenStore, applied
from tests.duelog.side_by_side import CONFIG, FIRST_MS, crashed, held, send

SENT = [b"0", b"1", b"2"]


@pytest.fixture
def path(open_store: OpenStore, tmp_path: Path) -> Path:
    """A store that was killed with three vacant partitions, one of which has a cancelled message too."""
    store = open_store(config=CONFIG)
    for number in range(3):
        send(store, number, number)
    store.topic("a").cancel(send(store, 3))
    copy = crashed(store, tmp_path / "copy")
    assert list((copy / "partitions").iterdir()) == []
    return copy


def opened_to_read(path: Path) -> DelayedStore:
    """The store as another process sees it."""
    return DelayedStore.open(path, CONFIG, clock=ManualClock(START_MS), read_only=True)


def scheduled(path: Path) -> list[bytes]:
    """What a store says is to come."""
    with opened_to_read(path) as store:
        return sorted(held(store).values())


def backed_up(path: Path) -> list[bytes]:
    """What is in a backup by another process."""
    with opened_to_read(path) as store:
        assert store.backup(path.with_name("backup")).partitions == 3
    assert check_store(path.with_name("backup"), deep=True) == []
    return scheduled(path.with_name("backup"))


def pending(path: Path) -> list[bytes]:
    """The rows that a query gets."""
    found = [scan_pending(part) for part in plan_pending(path, as_of_ms=START_MS)]
    return sorted(body for batches in found for batch in batches for body in batch.column("payload").to_pylist())


def repaired(path: Path) -> list[bytes]:
    """What is there after a repair of other damage: the counters are lost."""
    assert repair_store(path, path.with_name("discarded")).left == []
    return scheduled(path)


def figures(path: Path) -> list[object]:
    """Counts of what is pending, by several ways."""
    with opened_to_read(path) as store:
        return [store.stats().pending, [each.pending for each in store.partitions()], list(store.check(deep=True))]


READERS: dict[str, tuple[Callable[[Path], object], object]] = {
    "scheduled": (scheduled, SENT),
    "backup": (backed_up, SENT),
    "pending": (pending, SENT),
    "repair": (repaired, SENT),
    "figures": (figures, [3, [1, 1, 1], []]),
    "check": (lambda path: check_store(path, deep=True), []),
    "audit": (lambda path: audit_store(path, as_of_ms=START_MS).findings, []),
    "snapshots": (lambda path: [*list_snapshots(path), *list_snapshots(path, verify=True)], []),
    "rebuild": (lambda path: rebuild_snapshots(path).logs, []),
    "log": (lambda path: sum(row.table == "PARTITION" for row in wal_rows(path)), 3),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_takes_a_partition_that_has_no_directory(path: Path, reader: str) -> None:
    """As the writer would: with what the log has, and no finding."""
    read, expected = READERS[reader]
    assert read(path) == expected


def test_a_writer_goes_on_with_what_it_finds_vacant(path: Path, open_store: OpenStore, clock: ManualClock) -> None:
    """It reads, appends, cancels and fires without a directory; who applies the log makes them."""
    store = open_store(path, CONFIG)
    ids = {body: id_ for id_, body in held(store).items()}
    assert store.topic("a").cancel(ids[b"1"])
    assert send(store, 5).entry_id == 2
    clock.set(FIRST_MS + HOUR_MS)
    with store.topic("a").subscribe("s") as reader:
        store.tick()
        assert sorted(bytes(message.payload) for message in reader.receive(9)) == [b"0", b"5"]
    store.backup(path.with_name("backup"))
    applied(store)
    assert len(list((path / "partitions").iterdir())) == 3
    assert list(store.check(deep=True)) == []
    assert scheduled(path.with_name("backup")) == [b"2"]


def test_a_directory_that_was_made_and_is_gone_is_refused(path: Path, open_store: OpenStore) -> None:
    """The log has no registration of it any more, whatever else it has."""
    store = applied(open_store(path, CONFIG))
    send(store, 7)
    killed = crashed(store, path.with_name("killed"))
    (killed / "partitions").rename(killed / "elsewhere")
    (killed / "partitions").mkdir()
    with pytest.raises(DamagedStore, match="is registered in the catalog, and is missing"):
        DelayedStore.open(killed, CONFIG, clock=ManualClock(START_MS))
    assert any("entries were lost" in found.message for found in check_store(killed))
