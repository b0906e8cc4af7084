"""Firing goes by the write-ahead log, as sends do: markers, frontiers and the clock mark are rows of one group."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.errors import StoreFull
from duelog.sending.wal_segments import WalSegments
from duelog.sending.wal_writer import WalWriter
from duelog.store.codec.format import Table
from duelog.store.codec.run import Run, RunKind
from duelog.store.wal.segment import MAIN, Group, RowKind
from tests.conftest import HOUR_MS, START_MS, OpenStore, raising, tick_after
from tests.duelog.side_by_side import CONFIG, FIRST_MS, Together, crashed, in_wal, send
from tests.duelog.store_state import payloads

ROOM = replace(CONFIG, wal_bytes=1 << 20)


def markers_in(group: Group) -> int:
    """Markers in a group's rows of the main environment."""
    rows = [row for row in group.rows() if row.kind == RowKind.RUN and row.start_ms == MAIN]
    runs = [Run("main", row.key, memoryview(row.value)) for row in rows]
    return sum(run.count for run in runs if run.kind == RunKind.MARKERS)


SECOND_BEFORE_MS = FIRST_MS - START_MS - 1_000
"""From the start of the clock to when the tests send: the log is not applied before the messages are due."""


def delivered(store: DelayedStore) -> list[bytes]:
    """Receive and acknowledge the due messages."""
    with store.topic("a").subscribe("all") as consumer:
        return payloads(consumer, durable=True)


def test_what_has_fired_is_known_after_a_crash(open_store: OpenStore, clock: ManualClock, tmp_path: Path) -> None:
    """None of it is applied yet: it fires once, and goes behind what was in the main log."""
    clock.advance(SECOND_BEFORE_MS)
    store = open_store(config=ROOM)
    store.topic("a").subscribe("all").close()
    for number in range(6):
        send(store, number, number % 2)
    tick_after(store, clock, 1_100)
    assert [markers_in(group) for group in in_wal(store)][-1] == 3
    copy = crashed(store, tmp_path / "copy")
    with DelayedStore.open(copy, ROOM, clock=clock, read_only=True) as seen:
        assert seen.topic("a").stats().entries == 3
        assert [message.payload for message in seen.topic("a").scheduled()] == [b"1", b"3", b"5"]
    again = open_store(copy, ROOM)
    assert again._engine.delivery.firing.fired == 0
    assert delivered(again) == [b"0", b"2", b"4"]
    clock.advance(HOUR_MS)
    assert delivered(again) == [b"1", b"3", b"5"]
    assert list(again.check(deep=True)) == []


def test_the_clock_mark_of_what_fired_is_known_after_a_crash(
    open_store: OpenStore, clock: ManualClock, tmp_path: Path
) -> None:
    """A clock that was set back meanwhile does not have what has fired be early."""
    clock.advance(SECOND_BEFORE_MS)
    store = open_store(config=ROOM)
    send(store, 1)
    tick_after(store, clock, 1_100)
    fired_ms = clock.now_ms()
    records = [row.key[0] for group in in_wal(store) for row in group.rows() if row.kind == RowKind.RECORD]
    assert {Table.COUNTER, Table.FRONTIER} <= set(records)
    set_back = ManualClock(START_MS)
    with DelayedStore.open(crashed(store, tmp_path / "copy"), ROOM, clock=set_back) as again:
        assert again._engine.clock.now_ms() >= fired_ms
        assert delivered(again) == [b"1"]


@pytest.mark.parametrize("entries", [3, 1_000])
def test_what_fires_and_what_is_sent_at_once_are_one_group(
    open_store: OpenStore, clock: ManualClock, tmp_path: Path, entries: int
) -> None:
    """Entries of one topic follow each other in the main log, whether or not it rolls over to another ledger."""
    config = replace(ROOM, ledger_max_entries=entries)
    clock.advance(SECOND_BEFORE_MS)
    store = open_store(config=config)
    topic = store.topic("a")
    topic.subscribe("all").close()
    for number in range(4):
        send(store, number)
    clock.advance(1_100)

    def fire() -> object:
        return store.tick()

    def at_once() -> object:
        return topic.send(b"now")

    before = len(in_wal(store))
    group = Together(store, [at_once, fire, at_once])  # type: ignore[list-item]
    for future in group.run(lambda: send(store, 99, 1)):
        future.result()
    assert len(in_wal(store)) == before + 2
    assert markers_in(in_wal(store)[-1]) == 4
    again = open_store(crashed(store, tmp_path / "copy"), config)
    for each in (again, store):
        assert sorted(delivered(each)) == [b"0", b"1", b"2", b"3", b"now", b"now"]
        assert list(each.check(deep=True)) == []


def test_a_firing_fits_a_group_however_much_of_a_ledger_an_entry_takes(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """Each marker fills a ledger, and the write-ahead log is small: more groups, and nothing is suspended."""
    config = StoreConfig(
        partition_ms=HOUR_MS, wal_bytes=16 << 10, max_message_bytes=1_024, fire_batch=1_000_000, ledger_max_entries=1
    )
    store = open_store(config=config)
    topic = store.topic("a")
    topic.subscribe("all").close()
    for at in range(0, 600, 50):
        topic.send_batch([Message(b"%d" % number, deliver_at=FIRST_MS) for number in range(at, at + 50)])
    tick_after(store, clock, HOUR_MS + FIRST_MS - START_MS)
    assert store.suspended() == []
    assert len(delivered(store)) == 600


def test_what_is_due_fires_though_the_log_takes_no_more(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: sends are refused, and what is delivered frees space."""
    store = open_store(config=ROOM)
    store.topic("a").subscribe("all").close()
    send(store, 1)
    clock.advance(2 * HOUR_MS + FIRST_MS - START_MS)
    with monkeypatch.context() as patch:
        patch.setattr(WalSegments, "fits", lambda *_: False)
        patch.setattr(WalSegments, "fits_reserve", lambda *_: True)
        patch.setattr(WalSegments, "make_space", raising(StoreFull(store.path / "wal", "no room, says the test")))
        with pytest.raises(StoreFull):
            send(store, 2, 5)
        assert delivered(store) == [b"1"]
    send(store, 2, 5)
    assert list(store.check(deep=True)) == []


def test_a_firing_that_no_group_takes_is_given_back(open_store: OpenStore, clock: ManualClock) -> None:
    """Messages that the log refuses have not fired, and fire with the next tick."""
    store = open_store(config=ROOM)
    store.topic("a").subscribe("all").close()
    send(store, 1)
    clock.advance(2 * HOUR_MS + FIRST_MS - START_MS)
    with patch.object(WalWriter, "change", raising(ValueError("refused"))):
        store.tick()
        assert store._engine.delivery.firing.fired == 0
    clock.advance(60_000)
    assert delivered(store) == [b"1"]
