"""Ctrl-C in a program that goes on: what breaks off amid a group stops the store, and nothing is lost or doubled."""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore, MessageId
from duelog.errors import StoreFailed
from duelog.partitions.partition import StagedLog
from duelog.sending.wal_segments import Checkpoint, WalSegments
from duelog.sending.wal_writer import WalWriter
from duelog.store.env.memtable import Memtable
from duelog.store.files import failpoints
from duelog.store.listener import StoreListener
from duelog.store.wal.segment import Segment
from duelog.store.wal.write_ahead_log import WriteAheadLog
from duelog.store.wal.write_batch import WriteBatch
from tests.conftest import OpenStore, Plant
from tests.duelog.side_by_side import CONFIG, FIRST_MS, HOUR_MS, Together, held, in_wal, send
from tests.store.commits import PATIENCE_S, until


@pytest.fixture
def store(open_store: OpenStore) -> DelayedStore:
    """A store whose topic "a" has a log in each of three partitions, with one message."""
    store = open_store(config=CONFIG)
    store.topic("a").send_payloads([b"first"] * 3, deliver_at=[FIRST_MS + hour * HOUR_MS for hour in range(3)])
    return store


def reopened(store: DelayedStore, open_store: OpenStore) -> list[bytes]:
    """Return the messages of the store after it is closed and opened again."""
    store.close()
    return sorted(held(open_store(config=CONFIG)).values())


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(
    ("owner", "name", "before"),
    [
        (WalSegments, "append", False),  # the group is on disk, and the writer does not know it yet
        (WriteAheadLog, "append", False),
        (StagedLog, "committed", True),
        (StagedLog, "committed", False),
    ],
)
def test_an_interrupt_behind_the_first_byte_of_a_group_gives_its_ids_to_no_other(
    store: DelayedStore, open_store: OpenStore, plant: Plant, owner: Any, name: str, before: bool, twice: bool
) -> None:
    """The store stops for every thread, also if it is interrupted as it stops, and opened again has the group, once."""
    plant(owner, name, KeyboardInterrupt(), after=not before)
    if twice:
        plant(WalWriter, "_broke_off", KeyboardInterrupt(), after=False)
    with pytest.raises(KeyboardInterrupt):
        send(store, 1)
    for number in (2, 3):
        with pytest.raises(StoreFailed, match="in doubt"):
            send(store, number)
    assert reopened(store, open_store) == [b"1", b"first", b"first", b"first"]


def test_requests_of_a_group_that_broke_off_are_not_appended_again(
    store: DelayedStore, open_store: OpenStore, plant: Plant
) -> None:
    """Those whose caller waits are told that theirs is in doubt; each is there once."""
    sends: list[Callable[[], MessageId]] = [functools.partial(send, store, number) for number in range(1, 6)]
    futures: list[Future[MessageId]] = Together(store, sends).run(
        lambda: send(store, 0), lambda: plant(WriteAheadLog, "append", KeyboardInterrupt())
    )
    outcomes = [type(future.exception()) for future in futures]
    assert sorted(outcome.__name__ for outcome in outcomes) == ["KeyboardInterrupt"] + ["StoreFailed"] * 4
    assert reopened(store, open_store) == [*(b"%d" % number for number in range(6)), *[b"first"] * 3]


def test_no_commit_applies_a_part_of_a_group_that_broke_off(
    store: DelayedStore, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of a checkpoint would record that the group is applied, and the rest of it would be missing."""
    published: list[Memtable] = []

    def second_is_interrupted(self: Memtable, position: int) -> None:
        published.append(self)
        if len(published) == 2:
            raise KeyboardInterrupt
        self.__dict__["position"] = position

    moved = property(lambda self: self.__dict__["position"], second_is_interrupted)
    monkeypatch.setattr(Memtable, "position", moved, raising=False)
    with pytest.raises(KeyboardInterrupt):
        store.topic("a").send_payloads([b"x", b"y", b"z"], deliver_at=[FIRST_MS + hour * HOUR_MS for hour in range(3)])
    monkeypatch.undo()
    assert [sum(map(len, memtable.view.runs.values())) for memtable in published] == [2, 1]  # "first" and one
    for partition in store._engine.storage.partitions:
        with store._engine.storage.partitions.lease(partition), pytest.raises(StoreFailed):
            partition.environment.apply()
    assert reopened(store, open_store) == [*[b"first"] * 3, b"x", b"y", b"z"]


def test_a_reschedule_that_broke_off_gives_its_ids_to_no_send_that_waits(
    store: DelayedStore, open_store: OpenStore
) -> None:
    """Both were on disk with one id, and the store did not open: "entries were lost"."""
    outcome: Future[MessageId] = Future()

    def send_beside() -> None:
        try:
            outcome.set_result(send(store, 2))
        except StoreFailed as error:
            outcome.set_exception(error)

    def break_off() -> None:
        failpoints.disarm()
        threading.Thread(target=send_beside).start()
        until(lambda: len(store._engine.writer()._queue))
        raise KeyboardInterrupt

    moved = send(store, 1)
    failpoints.arm("wal.after", break_off)
    with pytest.raises(KeyboardInterrupt):
        store.topic("a").reschedule(moved, deliver_at=FIRST_MS + 9)
    with pytest.raises(StoreFailed, match="in doubt"):
        outcome.result(PATIENCE_S)
    assert reopened(store, open_store) == [b"1", b"first", b"first", b"first"]


@pytest.mark.parametrize("before", [True, False])
def test_an_interrupt_as_a_group_ends_keeps_no_later_send_waiting(
    store: DelayedStore, plant: Plant, before: bool
) -> None:
    """The log stayed claimed: sends to it, and closing, waited for ever."""
    outcome: Future[MessageId] = Future()
    plant(WriteBatch, "close", KeyboardInterrupt(), after=not before)
    with pytest.raises(KeyboardInterrupt):
        send(store, 1)
    threading.Thread(target=lambda: outcome.set_result(send(store, 2)), daemon=True).start()
    id_ = outcome.result(PATIENCE_S)
    assert held(store)[id_] == b"2"


@pytest.mark.parametrize("before", [True, False])
def test_a_close_that_is_interrupted_while_it_applies_the_log_loses_nothing(
    store: DelayedStore, open_store: OpenStore, plant: Plant, before: bool
) -> None:
    """Tried again, it took what it had not applied for applied, and removed the log."""
    plant(Checkpoint, "_apply", KeyboardInterrupt(), after=not before)
    with pytest.raises(KeyboardInterrupt):
        store.close()
    assert reopened(store, open_store) == [b"first"] * 3


def test_an_interrupt_as_a_segment_follows_the_one_of_a_clean_close_keeps_no_store_from_opening(
    store: DelayedStore, open_store: OpenStore, plant: Plant
) -> None:
    """The next close removed the segment with which reading begins."""
    store.close()
    again = open_store(config=CONFIG)
    plant(Segment, "close", KeyboardInterrupt(), after=False)
    with pytest.raises(KeyboardInterrupt):
        send(again, 1)
    assert reopened(again, open_store) == [b"first"] * 3


def test_an_interrupt_as_a_segment_ends_lets_no_group_follow_its_end(
    store: DelayedStore, tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading stops at the end: what came behind it would be lost."""
    real, interrupts = WriteAheadLog.begin_segment, list[int]()

    class Ending:
        """The active segment, whose end is written as the interrupt comes."""

        def __init__(self, segment: Any) -> None:
            self._segment = segment

        def __getattr__(self, name: str) -> Any:
            return getattr(self._segment, name)

        def end(self, *, flush: bool) -> None:
            self._segment.end(flush=flush)
            interrupts.append(1)
            raise KeyboardInterrupt

    def begin(self: WriteAheadLog, following: Any) -> int | None:
        if interrupts or self._active is None:
            return real(self, following)
        segment, self._active = self._active, Ending(self._active)  # type: ignore[assignment]
        try:
            return real(self, following)
        finally:
            self._active = segment

    monkeypatch.setattr(WriteAheadLog, "begin_segment", begin)
    sent = 0
    for number in range(600):
        try:
            send(store, number)
            sent += 1
        except KeyboardInterrupt:
            assert sent
    assert interrupts == [1]
    assert sent == 599
    assert len(in_wal(store)) > 0
    assert len(reopened(store, open_store)) == 599 + 3


def test_a_listener_that_raises_behind_a_flush_makes_no_stored_message_an_error(store: DelayedStore) -> None:
    """An exporter's error would have the message sent again."""

    class Raising(StoreListener):
        def committed(self, environment: str, elapsed_ns: int, requests: int, entries: int) -> None:
            raise SystemExit

    writer = store._engine.writer()
    writer._listeners = [Raising()]
    id_ = send(store, 1)
    assert held(store)[id_] == b"1"
