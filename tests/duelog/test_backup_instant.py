"""Backups at any instant of a busy store are that instant: each copy is drained against a twin of it.

What else is done comes between any two steps of a backup, one thing after the other and by a seed, so that what fails
can be repeated. `DUELOG_BACKUPS=200` has so many made instead of 8, a third of them by another process.
"""

import shutil
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from duelog import DelayedStore, ManualClock, StoreConfig
from duelog.errors import DamagedStore
from tests.conftest import present
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
