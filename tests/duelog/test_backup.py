"""Backups of a store in use: the copy opens, checks clean, and is the store at one instant, as a twin has it."""

import json
import shutil
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.errors import DamagedStore
from duelog.store.env.environment import Environment
from duelog.store.env.held_read import HeldRead
from duelog.store.errors import ClosedError, InvalidArgument, StoreFull
from tests.conftest import HOUR_MS, OpenStore, applied, present
from tests.duelog.busy_store import (
    AFTER,
    BEFORE,
    COPY,
    INSTANT,
    START_MS,
    BusyStore,
    OtherProcess,
    Twin,
    assert_is,
    saying_where,
    trusting_what_is_newer,
)
from tests.proof import length

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


BACKUPS = length("DUELOG_BACKUPS", 8, 30)
A_STORE = 4
"""Backups of one store; the next ones are of another."""


class Meanwhile:
    """Actions on a busy store while a backup is made of it, and the twin of its instant."""

    def __init__(self, busy: BusyStore, seed: int) -> None:
        self._busy = busy
        self._random = Random(seed)
        self._before = self._after = 3
        self.twin: Twin | None = None
        self.instants = 0
        self.changed: dict[str, int] = {}
        """How many partitions had been deleted and replaced at the instant."""

    def said(self, place: str) -> None:
        """The backup has come to a place."""
        if place == INSTANT:
            self.twin = self._busy.twin()
            self.instants += 1
            self.changed = {what: self._busy.done.get(what, 0) for what in ("deleted", "adopted")}
        elif place == COPY:
            self._busy.act(self._random.randrange(8))
        elif place == BEFORE and self._before and self._random.random() < 0.5:
            self._before -= 1
            self._busy.act(self._random.randint(1, 3))
        elif place == AFTER and self._after and self._random.random() < 0.5:
            self._after -= 1
            self._busy.act()


def back_up_here(busy: BusyStore, target: Path, seed: int) -> Meanwhile:
    """A backup by the process that writes the store."""
    meanwhile = Meanwhile(busy, seed)
    with saying_where(busy.store._engine, meanwhile.said):
        busy.store.backup(target)
    # Its files stay where they are until the end.
    assert meanwhile.changed == {what: busy.done.get(what, 0) for what in meanwhile.changed}
    return meanwhile


@pytest.mark.series
@pytest.mark.parametrize("seed", range(-(-BACKUPS * 2 // 3 // A_STORE)))
def test_a_backup_is_the_store_at_one_instant(tmp_path: Path, seed: int) -> None:
    """The copy has what was stored, fired, cancelled, rescheduled and acknowledged by then, and nothing later."""
    busy = BusyStore(tmp_path / "store", seed)
    for number in range(A_STORE):
        busy.act(30)
        meanwhile = back_up_here(busy, tmp_path / "copy", seed * A_STORE + number)
        assert_is(tmp_path / "copy", present(meanwhile.twin), busy.config)
        shutil.rmtree(tmp_path / "copy")
    assert list(busy.store.check(deep=True)) == []
    busy.store.close()
    assert busy.done.keys() >= {"fired", "closed", "snapshots", "cancel", "reschedule"}


@pytest.mark.series
@pytest.mark.parametrize("seed", range(1_000, 1_000 + -(-BACKUPS // 3 // A_STORE)))
def test_a_backup_by_another_process_is_the_store_at_one_instant(tmp_path: Path, seed: int) -> None:
    """Also while the process that writes deletes partitions and goes over to compacted ones."""
    busy = BusyStore(tmp_path / "store", seed)
    other = OtherProcess(busy.store, busy.config)
    for number in range(A_STORE):
        busy.act(30)
        meanwhile = Meanwhile(busy, seed * A_STORE + number)
        other.back_up(meanwhile.said, tmp_path / "copy")
        assert_is(tmp_path / "copy", present(meanwhile.twin), busy.config)
        shutil.rmtree(tmp_path / "copy")
    other.close()
    assert list(busy.store.check(deep=True)) == []
    busy.store.close()


def test_what_is_done_while_backups_are_made_is_of_every_kind(tmp_path: Path) -> None:
    """Else the others would prove little: partitions are deleted and replaced by compaction, too."""
    done: Counter[str] = Counter()
    for seed in range(2):
        busy = BusyStore(tmp_path / f"store{seed}", seed)
        busy.act(300)
        done.update(busy.done)
        busy.store.close()
    kinds = "send", "send_batch", "cancel", "reschedule", "receive", "compact"
    results = "fired", "closed", "deleted", "snapshots", "adopted"
    assert all(done[each] > 3 for each in (*kinds, *results)), done


def test_an_engine_that_trusts_what_is_newer_than_the_instant_is_found_out(tmp_path: Path) -> None:
    """The harness sees a copy in which partitions are newer than the main environment."""
    wrong = 0
    for seed in range(4):
        busy = BusyStore(tmp_path / f"store{seed}", seed)
        busy.act(60)
        with trusting_what_is_newer():
            meanwhile = back_up_here(busy, tmp_path / f"copy{seed}", seed)
        busy.store.close()
        try:
            assert_is(tmp_path / f"copy{seed}", present(meanwhile.twin), busy.config)
        except (AssertionError, DamagedStore):
            wrong += 1
    assert wrong >= 2


def test_an_instant_too_close_to_a_commit_does_not_count(tmp_path: Path) -> None:
    """A message sent right after it may be in a partition that was looked at before: another one is found."""
    busy = BusyStore(tmp_path / "store", 0)
    busy.store.topic("a").send(b"before", deliver_after=60)
    places = []

    def said(place: str) -> None:
        places.append(place)
        if place == AFTER and places.count(AFTER) == 1:
            busy.store.topic("a").send(b"after", deliver_after=60)

    with saying_where(busy.store._engine, said):
        busy.store.backup(tmp_path / "copy")
    assert places.count(INSTANT) == 2
    with DelayedStore.open(tmp_path / "copy", busy.config, clock=ManualClock(START_MS)) as copy:
        assert [message.payload for message in copy.topic("a").scheduled()] == [b"before", b"after"]
    busy.store.close()


def test_a_snapshot_written_while_a_backup_is_made_loses_no_message_of_the_copy(tmp_path: Path) -> None:
    """One that lacks what was rescheduled since, and has what was admitted, would have it lost or doubled."""
    clock = ManualClock(START_MS)
    config = StoreConfig(snapshot_every_entries=100, max_clock_jump_ms=None)
    with DelayedStore.open(tmp_path / "store", config, clock=clock) as store:
        topic = store.topic("t")
        topic.subscribe("s").close()
        mine = topic.send(b"mine", deliver_after=3_600)
        store.tick()
        snapshots = 0

        def said(place: str) -> None:
            nonlocal snapshots
            if place == COPY and not snapshots:
                assert topic.reschedule(mine, deliver_after=7_200) is not None
                topic.send_payloads([b"filler"] * 200, deliver_at=START_MS + 1_800_000)
                snapshots = store.tick().snapshots

        with saying_where(store._engine, said):
            store.backup(tmp_path / "copy")
        assert snapshots == 1
    clock.advance(3 * 3_600_000)
    with DelayedStore.open(tmp_path / "copy", config, clock=clock) as store:
        store.tick()
        with store.topic("t").subscribe("s") as subscription:
            assert [(each.payload, each.due_ms) for each in subscription.receive(10)] == [
                (b"mine", START_MS + 3_600_000)
            ]
