"""Backups of a store in use: the copy opens, checks clean, and has all that was acknowledged before it began."""

import json
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.store.env.environment import Environment
from duelog.store.env.held_read import HeldRead
from duelog.store.errors import ClosedError, InvalidArgument, StoreFull
from tests.conftest import OpenStore, applied, present

HOUR_MS = 3_600_000
CONFIG = StoreConfig(partition_ms=HOUR_MS, ledger_max_entries=50, snapshot_every_entries=40)
"""Many partitions and ledgers in little time."""


def test_the_manifest_lists_every_file_with_its_checksum(store: DelayedStore, tmp_path: Path) -> None:
    """BACKUP names the files as they were written."""
    store.topic("t").send(b"a", deliver_after=5)
    applied(store)
    store.backup(tmp_path / "copy")
    manifest = json.loads((tmp_path / "copy" / "BACKUP").read_bytes())
    assert len(manifest["files"]) == 4
    for name, (size, crc) in manifest["files"].items():
        content = (tmp_path / "copy" / name).read_bytes()
        assert (len(content), zlib.crc32(content)) == (size, crc)


def test_a_backup_into_a_used_directory_is_refused(store: DelayedStore, tmp_path: Path) -> None:
    """Nothing is overwritten, and a store is not copied into itself."""
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("mine")
    with pytest.raises(InvalidArgument, match="empty directory"):
        store.backup(tmp_path / "used")
    (tmp_path / "link").symlink_to(store.path / "staging")
    for inside in (store.path / "copy", tmp_path / "link" / "copy", tmp_path / "used" / ".." / "store" / "copy"):
        with pytest.raises(InvalidArgument, match="inside the store"):
            store.backup(inside)
        assert not inside.exists()
    assert (tmp_path / "used" / "file").read_text() == "mine"


def around_copies(
    patch: pytest.MonkeyPatch,
    before: Callable[[Environment], object] = lambda _: None,
    after: Callable[[Environment], object] = lambda _: None,
) -> None:
    """Have something done before and after each copy of an environment."""
    copy = Environment.copy

    def copy_(environment: Environment, path: Path, held: HeldRead) -> None:
        before(environment)
        copy(environment, path, held)
        after(environment)

    patch.setattr(Environment, "copy", copy_)


def send_hourly(store: DelayedStore, hours: int) -> None:
    """One message in each of so many partitions."""
    for hour in range(hours):
        store.topic("t").send(b"%d" % hour, deliver_after=hour * 3_600 + 5)


def test_ids_given_out_during_a_backup_are_not_given_out_by_the_copy(
    open_store: OpenStore, store: DelayedStore, clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic that comes into being between the copies of main and of a partition does not lend its log to another."""
    store.topic("old").send(b"old", deliver_after=5)
    main, meanwhile = store._engine.storage.main, store.topic("meanwhile")
    around_copies(monkeypatch, after=lambda each: each is main and meanwhile.send(b"meanwhile", deliver_after=6))
    store.backup(tmp_path / "copy")
    copied = open_store(tmp_path / "copy", CONFIG)
    assert [topic.name for topic in copied.topics()] == ["persistent://public/default/old"]
    reader = copied.topic("new").subscribe("s")
    copied.topic("new").send(b"new", deliver_after=5)
    clock.advance(10_000)
    copied.tick()
    assert [message.payload for message in reader.receive(10, timeout=0)] == [b"new"]


def test_a_backup_opens_no_more_partitions_at_once_than_the_store_does(
    open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store of thousands of days is copied with the descriptors that it has."""
    store = open_store(config=replace(CONFIG, max_open_partitions=2))
    send_hourly(store, 12)
    applied(store)
    partitions, seen = store._engine.storage.partitions, list[int]()
    around_copies(monkeypatch, before=lambda _: seen.append(partitions.open_count()))
    assert store.backup(tmp_path / "copy").partitions == 12
    assert max(seen) == 2
    assert partitions.open_count() == 2


def test_a_backup_that_fails_lets_go_of_all_that_it_held(
    store: DelayedStore, clock: ManualClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partitions are deleted afterwards, environments close, and the next backup is made."""
    send_hourly(store, 3)
    applied(store)

    def fail(environment: Environment) -> None:
        if environment is not store._engine.storage.main:
            raise StoreFull(environment.path, "no room")

    with monkeypatch.context() as patched:
        around_copies(patched, before=fail)
        with pytest.raises(StoreFull):
            store.backup(tmp_path / "copy")
    assert list((tmp_path / "copy").iterdir()) == []
    assert [partition.leases for partition in store._engine.storage.partitions] == [0, 0, 0]
    assert store.backup(tmp_path / "copy").partitions == 3
    clock.advance(24 * HOUR_MS * 40)
    for _ in range(10):  # a slice of a tick ends by the machine's time, and leaves the rest to the next
        store.tick()
        clock.advance(24 * HOUR_MS)  # a ledger that a later slice wrote to is closed by age
    assert len(store.partitions()) == 0


def test_a_store_that_closes_while_it_is_copied_waits_for_what_is_held(
    open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither waits for the other for ever: what is open is copied, what is not is refused."""
    store = open_store(config=replace(CONFIG, max_open_partitions=2))
    send_hourly(store, 6)
    wal_writer = present(store._engine.wal_writer)
    wal_writer.apply_all()  # else closing opens every partition to apply it
    closing: list[threading.Thread] = []

    def close_meanwhile(environment: Environment) -> None:
        if environment is not store._engine.storage.main and not closing:
            closing.append(threading.Thread(target=store.close))
            closing[0].start()
            while not store._engine.storage.partitions._open.closed:
                threading.Event().wait(0.001)

    around_copies(monkeypatch, after=close_meanwhile)
    with pytest.raises(ClosedError):
        store.backup(tmp_path / "copy")
    closing[0].join(60)
    assert not closing[0].is_alive()
    assert list((tmp_path / "copy").iterdir()) == []
