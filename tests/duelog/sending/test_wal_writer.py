"""Sends of many threads share flushes of the write-ahead log: groups, segments, checkpoints, interrupts."""

from __future__ import annotations

import errno
import functools
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, Message, MessageId
from duelog.errors import StoreFailed
from duelog.sending.wal_segments import WalSegments
from duelog.sending.wal_writer import WalWriter, _Change
from duelog.store.codec.format import counter_key
from duelog.store.config import Durability
from duelog.store.env.commit_queue import Request
from duelog.store.env.transaction import Transaction
from duelog.store.files import failpoints
from duelog.store.wal.segment import MAIN, RowKind, capacity_of
from duelog.store.wal.write_batch import single_rows
from tests.conftest import START_MS, OpenStore
from tests.duelog.side_by_side import (
    CONFIG,
    FIRST_MS,
    HOUR_MS,
    Together,
    crashed,
    entries_in,
    held,
    in_wal,
    open_store_elsewhere,
    send,
    unapplied,
)


@pytest.fixture
def store(open_store: OpenStore) -> DelayedStore:
    """A store whose topic "a" has a log in each of three partitions, with one message."""
    store = open_store(config=CONFIG)
    store.topic("a").send_payloads([b"first"] * 3, deliver_at=[FIRST_MS + hour * HOUR_MS for hour in range(3)])
    return store


def writer(store: DelayedStore) -> WalWriter:
    """Return the writer of a store that is open for writing."""
    found = store._engine.sending.wal_writer
    assert found is not None
    return found


def everything(store: DelayedStore, clock: ManualClock) -> list[bytes]:
    """Return the messages of a topic once all of it is due."""
    clock.advance(1_000 * HOUR_MS)
    found: list[bytes] = []
    with store.topic("a").subscribe("all") as consumer:
        store.tick()
        while messages := consumer.receive(1_000):
            found += [bytes(message.payload) for message in messages]
            consumer.ack(messages)
    return sorted(found)


# -- groups ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("numbered", [False, True])
def test_a_batch_is_one_group_over_partitions_and_main(
    open_store: OpenStore, tmp_path: Path, clock: ManualClock, numbered: bool
) -> None:
    """A crash before it is written leaves nothing of it, one after that all of it."""
    store = open_store(config=CONFIG)
    topic, copies = store.topic("a"), list[Path]()
    topic.send(b"begun")
    batch = [Message(b"%d" % at, deliver_at=START_MS + (0 if at % 4 == 0 else at % 4 * HOUR_MS)) for at in range(12)]
    producer = topic.producer("p")
    before = len(in_wal(store))
    for point in ("wal.before", "wal.after"):
        failpoints.arm(point, lambda: copies.append(crashed(store, tmp_path / f"copy{len(copies)}")))
    try:
        if numbered:
            producer.send_batch(batch)
        else:
            topic.send_batch(batch)
    finally:
        failpoints.disarm()
    group = in_wal(store)[-1]  # those before it have records of what was made for it
    assert len(in_wal(store)) > before
    assert len({row.start_ms for row in single_rows(group.rows())}) == 4
    assert MAIN in {row.start_ms for row in group.rows()}
    for copy, expected in zip(copies[-2:], ([], range(12)), strict=True):
        again = open_store(copy, CONFIG)
        assert again.topic("a").producer("p").last_sequence_id == (11 if expected and numbered else -1)
        assert everything(again, clock) == sorted([b"begun", *(b"%d" % number for number in expected)])


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
        assert kinds == [*([RowKind.RECORD] * 2 if number == 1 else []), RowKind.BATCH]
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


def test_a_batch_of_more_messages_for_a_log_than_a_run_takes_is_cut_into_runs(open_store: OpenStore) -> None:
    """It is no scattered batch; the others are."""
    store = open_store(config=replace(CONFIG, run_entries=16, wal_bytes=1 << 20))
    topic = store.topic("a")
    for count, kinds in ((16, {RowKind.BATCH}), (17, {RowKind.RUN})):
        payloads = [b"%d" % number for number in range(count)]
        sent = topic.send_payloads(payloads, deliver_after=3_600)
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


def test_ids_go_on_from_single_messages_to_batches(store: DelayedStore) -> None:
    """In the order of the sends."""
    ids = [send(store, 0), send(store, 1)]
    ids += store.topic("a").send_payloads([b"2", b"3"], deliver_at=FIRST_MS + 5)
    ids += [send(store, 4), send(store, 5)]
    first = ids[0].entry_id
    assert [id_.entry_id - first for id_ in ids] == list(range(6))
    found = held(store)
    assert [found[id_] for id_ in ids] == [b"%d" % number for number in range(6)]


@pytest.mark.parametrize(
    "look",
    [
        lambda store, id_: store.topic("a").get(id_).payload,
        lambda store, id_: store.topic("a").state(id_) == "scheduled",
        lambda store, id_: store.topic("a").cancel(id_),
        lambda store, id_: store.topic("a").reschedule(id_, deliver_after=7200),
        lambda store, id_: list(store.topic("a").scheduled())[1].message_id == id_,
        lambda store, _: store.topic("a").stats().pending == 4,
        lambda store, _: list(store.check()) == [],
    ],
    ids=["get", "state", "cancel", "reschedule", "scheduled", "stats", "check"],
)
def test_a_message_is_found_as_soon_as_it_is_sent(
    store: DelayedStore, look: Callable[[DelayedStore, MessageId], object]
) -> None:
    """Though it is not applied."""
    id_ = send(store, 1)
    assert len(unapplied(store)) == 3
    assert look(store, id_)


def test_a_message_for_a_partition_that_has_begun_is_fired_from_memory(store: DelayedStore, clock: ManualClock) -> None:
    """Its index hears of it with the group."""
    send(store, 0)
    clock.set(FIRST_MS)
    store.tick()
    send(store, 1)
    clock.advance(100)
    with store.topic("a").subscribe("s") as consumer:
        store.tick()
        assert sorted(bytes(message.payload) for message in consumer.receive(10)) == [b"0", b"1", b"first"]


# -- durability ------------------------------------------------------------------------------------


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
    open_store: OpenStore,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    durability: Durability,
    expected: int,
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
    clock.advance(19)
    store.tick()
    assert flushes.count == 0
    clock.advance(1)
    store.tick()
    assert flushes.count == 1
    send(store, 2)
    assert flushes.count == 1
    store._engine.storage.main.commit(lambda _: None)
    assert flushes.count == 2
    store._engine.storage.main.commit(lambda _: None)
    assert flushes.count == 2


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


# -- interrupts and other processes ----------------------------------------------------------------


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


def test_an_interrupt_while_memory_hears_of_a_group_closes_the_store_for_writing(
    store: DelayedStore, open_store: OpenStore
) -> None:
    """Memory may not know what was appended; what is on disk is whole."""
    id_ = send(store, 0)

    def interrupt() -> None:
        raise KeyboardInterrupt

    failpoints.arm("wal.after", interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            send(store, 1)
    finally:
        failpoints.disarm()
    with pytest.raises(StoreFailed):
        send(store, 2)
    store.close()
    found = held(open_store(config=CONFIG))
    assert found[id_] == b"0"
    assert sorted(found.values()) == [b"0", b"1", b"first", b"first", b"first"]


def test_a_reader_in_another_process_sees_a_message_as_soon_as_it_is_sent(store: DelayedStore) -> None:
    """It reads the log."""
    id_ = send(store, 1)
    assert str(id_) in open_store_elsewhere(store.path)()
    assert unapplied(store)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_backup_has_what_only_the_log_has(
    store: DelayedStore, tmp_path: Path, open_store: OpenStore, elsewhere: bool
) -> None:
    """Also one that another process makes: it was acknowledged before the backup began."""
    sent = {send(store, number, number % 3): b"%d" % number for number in range(5)}
    if elsewhere:
        open_store_elsewhere(store.path)(str(tmp_path / "backup"))
    else:
        store.backup(tmp_path / "backup")
    assert len(unapplied(store)) == 3
    assert sent.items() <= held(open_store(tmp_path / "backup", CONFIG)).items()


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


def test_after_a_group_that_failed_nothing_of_its_requests_is_appended(
    store: DelayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flush that succeeds after one that failed does not say that what was written before is on disk."""
    wal, appended = writer(store), list[int]()

    def fail(*_: object) -> int:
        appended.append(1)
        raise OSError(errno.EIO, "says the test")

    def change(transaction: Transaction) -> None:
        transaction.put(counter_key("a"), b"x")

    monkeypatch.setattr(WalSegments, "append", fail)
    requests = [Request(lambda batch: change(batch.main)), Request(_Change(change, alone=True, makes_space=True))]
    wal._commit_group(requests)
    assert len(appended) == 1
    assert [type(request.error) for request in requests] == [StoreFailed, StoreFailed]
    store.close()
