"""Sends of many threads share flushes of the log: groups, segments, checkpoints; Ctrl-C loses and doubles nothing."""

import errno
import functools
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from duelog import DelayedStore, ManualClock, MessageId
from duelog.errors import ClosedError, StoreFailed
from duelog.partitions.partition import StagedLog
from duelog.sending.wal_segments import Checkpoint, WalSegments
from duelog.sending.wal_writer import WalWriter, _Action
from duelog.store.codec.format import counter_key
from duelog.store.config import Durability
from duelog.store.env.commit_queue import Request
from duelog.store.env.memtable import Memtable
from duelog.store.files import failpoints
from duelog.store.listener import StoreListener
from duelog.store.wal.segment import RowKind, Segment, capacity_of
from duelog.store.wal.write_ahead_log import WriteAheadLog
from duelog.store.wal.write_batch import WriteBatch
from tests.conftest import HOUR_MS, OpenStore, Plant, tick_after
from tests.duelog.side_by_side import (
    CONFIG,
    FIRST_MS,
    Together,
    crashed,
    entries_in,
    everything,
    held,
    in_wal,
    send,
    unapplied,
)
from tests.store.commits import PATIENCE_S, until


@pytest.fixture
def store(open_store: OpenStore) -> DelayedStore:
    """A store whose topic "a" has a log in each of three partitions, with one message."""
    store = open_store(config=CONFIG)
    store.topic("a").send_payloads([b"first"] * 3, deliver_at=[FIRST_MS + hour * HOUR_MS for hour in range(3)])
    return store


def writer(store: DelayedStore) -> WalWriter:
    """Return the writer of a store that is open for writing."""
    return store._engine.writer()


def test_messages_sent_together_are_one_group(store: DelayedStore) -> None:
    """With the ids that they are told, in as many partitions as there are; nothing is applied for it."""
    before = len(in_wal(store))
    sends = [functools.partial(send, store, number, number % 3) for number in range(1, 9)]
    futures = Together(store, sends).run(lambda: send(store, 0))
    assert len(unapplied(store)) == 3
    assert [entries_in(group) for group in in_wal(store)[before:]] == [1, 8]
    ids = {future.result(): b"%d" % number for number, future in enumerate(futures, 1)}
    assert {id_: payload for id_, payload in held(store).items() if id_ in ids} == ids
    assert len(unapplied(store)) == 3


def test_a_batch_for_several_logs_is_one_row_whether_they_are_new_or_not(
    open_store: OpenStore, tmp_path: Path, clock: ManualClock
) -> None:
    """Logs that are new are registered beside it; a crash leaves all of it."""
    store = open_store(config=CONFIG)
    topic = store.topic("a")
    topic.send(b"0", deliver_at=FIRST_MS)
    for number in (1, 2):
        topic.send_payloads([b"%d" % number] * 3, deliver_at=[FIRST_MS + hour * HOUR_MS for hour in range(3)])
        kinds = [row.kind for row in in_wal(store)[-1].rows()]
        assert kinds == [*([RowKind.RECORD] * 4 if number == 1 else []), RowKind.BATCH]  # partitions, and logs
        before = held(store)
        assert sorted(before.values()) == sorted([b"0", *([b"1"] * 3), *([b"2"] * 3 * (number - 1))])
        assert held(open_store(crashed(store, tmp_path / f"copy{number}"), CONFIG)) == before
    assert everything(store, clock) == sorted(before.values())


def test_batches_and_messages_of_one_group_follow_each_other_in_their_logs(
    store: DelayedStore, open_store: OpenStore, tmp_path: Path
) -> None:
    """Their entry ids have no gap, before a crash and after it; each is told the ids of its own."""
    ids: dict[MessageId, bytes] = {}

    def batch(number: int) -> MessageId:
        payloads = [b"%d.%d" % (number, hour) for hour in range(3)]
        dues = [FIRST_MS + hour * HOUR_MS + 1 + number for hour in range(3)]
        sent = store.topic("a").send_payloads(payloads, deliver_at=dues)
        ids.update(zip(sent, payloads, strict=True))
        return sent[0]

    sends = [functools.partial(batch if number % 2 else functools.partial(send, store), number) for number in range(6)]
    before = len(in_wal(store))
    futures = Together(store, sends).run(lambda: send(store, 10))
    (group,) = in_wal(store)[before + 1 :]
    assert [row.kind for row in group.rows()].count(RowKind.BATCH) == 3
    assert entries_in(group) == 12
    ids.update((futures[number].result(), b"%d" % number) for number in (0, 2, 4))
    for each in (store, open_store(crashed(store, tmp_path / "copy"), CONFIG)):
        found = held(each)
        assert {id_: found[id_] for id_ in ids} == ids
        for ledger_id in {id_.ledger_id for id_ in found}:
            entries = sorted(id_.entry_id for id_ in found if id_.ledger_id == ledger_id)
            assert entries == list(range(len(entries)))


def test_a_batch_of_more_messages_for_a_log_than_a_run_takes_is_cut_into_runs(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """It is no scattered batch; the others are, but for one that is for a single log."""
    store = open_store(config=replace(CONFIG, run_entries=16, wal_bytes=1 << 20))
    topic, week_ms = store.topic("a"), 7 * 86_400_000
    for count, logs, kinds in ((16, 2, {RowKind.BATCH}), (17, 2, {RowKind.RUN}), (16, 1, {RowKind.RUN})):
        payloads = [b"%d" % number for number in range(count * logs)]
        dues = [clock.now_ms() + week_ms * (1 + at // count) for at in range(len(payloads))]
        sent = topic.send_payloads(payloads, deliver_at=dues)
        assert {row.kind for row in in_wal(store)[-1].rows()} - {RowKind.RECORD} == kinds
        found = held(store)
        assert [found[id_] for id_ in sent] == payloads


@pytest.mark.parametrize("short_of", range(0, 700, 100))
def test_a_batch_that_is_larger_than_a_group_is_several(open_store: OpenStore, short_of: int) -> None:
    """However near to the limit its messages come; each is in its place, and the ids are in order."""
    config = replace(CONFIG, wal_bytes=256 << 10, max_message_bytes=90_000)
    store = open_store(config=config)
    most = writer(store).largest_group
    assert most == capacity_of(config.wal_bytes)
    size = (most - 3 * 140 - short_of) // 3
    payloads = [bytes([at]) * size for at in range(7)]
    ids = list(store.topic("a").send_payloads(payloads, deliver_after=3_600))
    assert [id_.entry_id for id_ in ids] == list(range(7))
    assert held(store) == dict(zip(ids, payloads, strict=True))


def test_a_message_that_is_larger_than_the_log_is_taken(open_store: OpenStore, tmp_path: Path) -> None:
    """Its segment is made for it; the next one is as large as it is to be."""
    store = open_store(config=replace(CONFIG, wal_bytes=16 << 10))
    sent = {store.topic("a").send(bytes([at]) * (at << 20), deliver_after=3_600): at << 20 for at in (0, 1, 0, 3)}
    assert max((store.path / "wal").iterdir()).stat().st_size > 3 << 20
    again = open_store(crashed(store, tmp_path / "copy"), CONFIG)
    assert {id_: len(payload) for id_, payload in held(again).items()} == sent
    store.topic("a").send(bytes(12 << 10), deliver_after=3_600)
    for _ in range(400):
        store.topic("a").send(bytes(12 << 10), deliver_after=3_600)
    assert max((store.path / "wal").iterdir()).stat().st_size <= 32 << 10


class Flushes:
    """Counts flushes of the write-ahead log."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        flush, write_through = os.fdatasync, os.pwritev

        def counted(descriptor: int) -> None:
            self.count += 1
            flush(descriptor)

        def counted_write(descriptor: int, parts: list[memoryview], at: int) -> int:
            self.count += 1
            return write_through(descriptor, parts, at)

        monkeypatch.setattr(os, "fdatasync", counted)
        monkeypatch.setattr(os, "pwritev", counted_write)


@pytest.mark.parametrize(("durability", "expected"), [("commit", 6), ("relaxed", 2), ("none", 0)])
def test_the_log_is_flushed_as_often_as_the_durability_says(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, durability: Durability, expected: int
) -> None:
    """For each group, once in `relaxed_ms`, or never."""
    store = open_store(config=replace(CONFIG, durability=durability, relaxed_ms=20))
    for number in range(3):
        send(store, number)
    clock.advance(100)
    send(store, 3)
    flushes = Flushes(monkeypatch)
    clock.advance(15)
    send(store, 4)
    clock.advance(5)
    for number in range(5, 8):
        send(store, number)
    clock.advance(20)
    for number in range(8, 10):
        send(store, number)
    assert flushes.count == expected


def test_what_relaxed_sends_left_unflushed_is_flushed_in_time_and_before_a_commit_tells_of_it(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a tick, which says when; by the commit of a partition or of the main environment."""
    store = open_store(config=replace(CONFIG, durability="relaxed", relaxed_ms=20))
    send(store, 0)
    send(store, 1)
    flushes = Flushes(monkeypatch)
    assert store.tick().next_due_ms == clock.now_ms() + 20
    tick_after(store, clock, 19)
    assert flushes.count == 0
    tick_after(store, clock, 1)
    assert flushes.count == 1
    send(store, 2)
    assert flushes.count == 1
    store._engine.storage.main.commit(lambda _: None)
    assert flushes.count == 2
    store._engine.storage.main.commit(lambda _: None)
    assert flushes.count == 2


def test_an_interrupted_leader_leaves_the_others_their_places(
    store: DelayedStore, tmp_path: Path, open_store: OpenStore
) -> None:
    """They are in the next group, without the message of the caller that was interrupted."""
    interrupted = threading.Event()

    def interrupt() -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    sends = [functools.partial(send, store, number) for number in range(1, 6)]
    futures = Together(store, sends).run(lambda: send(store, 0), interrupt)
    outcomes = [future.exception() for future in futures]
    assert sum(isinstance(outcome, KeyboardInterrupt) for outcome in outcomes) == 1
    ids = {
        future.result(): b"%d" % number
        for number, (future, outcome) in enumerate(zip(futures, outcomes, strict=True), 1)
        if outcome is None
    }
    assert len(ids) == 4
    again = open_store(crashed(store, tmp_path / "copy"), CONFIG)
    for both in (store, again):
        found = held(both)
        assert sorted(found.values()) == sorted([b"first"] * 3 + [b"0", *ids.values()])
        assert ids.items() <= found.items()


def test_a_child_leaves_the_log_alone(store: DelayedStore) -> None:
    """Closing what it has inherited waits for nothing, also where a thread led when it was made."""
    before = len(in_wal(store))
    send(store, 0)
    queue = writer(store)._queue
    queue._led = True
    child = os.fork()
    if not child:
        signal.alarm(20)
        store.close()
        os._exit(7)
    queue._led = False
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(in_wal(store)) == before + 1


def test_what_waits_with_the_close_of_the_store_is_refused_and_does_not_fail_it(store: DelayedStore) -> None:
    """It was written to the segment that the close had just replaced: the store stopped, as if its disk had failed."""
    wal = writer(store)
    request = Request(lambda batch: batch.main.put(counter_key("a"), b"x"))
    wal._commit_group([request, Request(_Action(wal._close))])
    assert isinstance(request.error, ClosedError)
    assert store._engine.storage.main.failed is None


def test_after_a_group_that_failed_nothing_of_its_requests_is_appended(
    store: DelayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush that succeeds after one that failed does not say that what was written before is on disk."""
    wal, appended = writer(store), list[int]()

    def fail(*_: object) -> int:
        appended.append(1)
        raise OSError(errno.EIO, "says the test")

    def change(batch: WriteBatch) -> None:
        batch.main.put(counter_key("a"), b"x")

    monkeypatch.setattr(WalSegments, "append", fail)
    requests = [Request(change), Request(change, alone=True, makes_space=True)]
    wal._commit_group(requests)
    assert len(appended) == 1
    assert [type(request.error) for request in requests] == [StoreFailed, StoreFailed]
    store.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("where", ["group", "end of a segment"])
def test_a_flush_that_fails_closes_the_store_for_writing(
    store: DelayedStore, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, where: str, number: int
) -> None:
    """The state of the disk is unknown then; acknowledged messages are there when it is opened again."""
    sent = {send(store, 0): b"0"}
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        patch.setattr(os, "fdatasync", fail)
        patch.setattr(os, "pwritev", fail)
        act = functools.partial(send, store, 1) if where == "group" else writer(store).apply_all
        with pytest.raises(StoreFailed):
            act()
    with pytest.raises(StoreFailed):
        send(store, 2)
    store.close()
    assert sent.items() <= held(open_store(config=CONFIG)).items()


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
        if interrupts or self.active is None:
            return real(self, following)
        segment, self.active = self.active, Ending(self.active)  # type: ignore[assignment]
        try:
            return real(self, following)
        finally:
            self.active = segment

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
