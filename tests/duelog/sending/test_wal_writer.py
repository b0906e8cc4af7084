"""Messages that many threads send one by one: they share flushes by the WAL, and nothing else is to be seen."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, MessageId
from duelog.errors import StoreFailed, StoreFull
from duelog.partitions.partition import Partition, PartitionLog
from duelog.sending import wal_writer as intake_module
from duelog.sending.wal_segments import CHECKPOINT_MS
from duelog.store.config import Durability
from duelog.store.log.ledger import Ledger
from duelog.store.wal.wal_file import FILE_NAME
from tests.conftest import START_MS, OpenStore
from tests.duelog.side_by_side import (
    CONFIG,
    FIRST_MS,
    HOUR_MS,
    Group,
    crashed,
    held,
    in_wal,
    open_store_elsewhere,
    owing,
    send,
)


@pytest.fixture
def store(open_store: OpenStore) -> DelayedStore:
    """A store whose topic "a" has a log in each of three partitions, with one message."""
    store = open_store(config=CONFIG)
    store.topic("a").send_payloads([b"first"] * 3, deliver_at=[FIRST_MS + hour * HOUR_MS for hour in range(3)])
    return store


def test_messages_sent_together_are_one_group_of_the_wal(store: DelayedStore) -> None:
    """With the ids that they are told, in as many partitions as there are."""
    sends = [functools.partial(send, store, number, number % 3) for number in range(1, 9)]
    futures = Group(store, sends).run(lambda: send(store, 0))
    assert len(owing(store)) == 3
    records = in_wal(store)
    assert [record.body.endswith(b"0") for record in records] == [True] + [False] * 8
    ids = {future.result(): b"%d" % number for number, future in enumerate(futures, 1)}
    assert {(record.ledger_id, record.entry_id) for record in records[1:]} == set(ids)
    assert {id_: payload for id_, payload in held(store).items() if id_ in ids} == ids
    assert not owing(store)


@pytest.mark.parametrize("journal_from", [0, 2])
def test_a_message_that_is_sent_alone_makes_no_wal(open_store: OpenStore, journal_from: int) -> None:
    """Where it is not to: it is a commit of its partition."""
    store = open_store(config=replace(CONFIG, journal_from=journal_from))
    for number in range(5):
        send(store, number)
    assert not (store.path / FILE_NAME).exists()
    assert not owing(store)


@pytest.mark.parametrize("durability", ["relaxed", "none"])
def test_there_is_no_wal_where_sends_do_not_wait_for_the_disk(open_store: OpenStore, durability: Durability) -> None:
    """Nothing of it would be saved."""
    store = open_store(config=replace(CONFIG, durability=durability))
    for number in range(5):
        send(store, number)
    assert not (store.path / FILE_NAME).exists()


@pytest.mark.parametrize(
    "look",
    [
        lambda store, id_: store.topic("a").get(id_).payload,
        lambda store, id_: store.topic("a").state(id_) == "scheduled",
        lambda store, id_: store.topic("a").cancel(id_),
        lambda store, id_: store.topic("a").reschedule(id_, deliver_after=7200),
        lambda store, id_: list(store.topic("a").scheduled())[1].message_id == id_,
        lambda store, _: store.topic("a").stats().pending == 4,
        lambda store, _: store.check() is not None and list(store.check()) == [],
    ],
    ids=["get", "state", "cancel", "reschedule", "scheduled", "stats", "check"],
)
def test_whoever_looks_finds_a_message_as_soon_as_it_is_sent(
    store: DelayedStore, look: Callable[[DelayedStore, MessageId], object]
) -> None:
    """The partition writes what it owes before it is read."""
    id_ = send(store, 1)
    assert len(owing(store)) == 1
    assert look(store, id_)
    assert not owing(store)


def test_ids_go_on_from_one_way_of_sending_to_the_other(store: DelayedStore) -> None:
    """What is promised comes first, then what is appended behind it, in the order of the sends."""
    ids = [send(store, 0), send(store, 1)]
    ids += store.topic("a").send_payloads([b"2", b"3"], deliver_at=FIRST_MS + 5)
    ids += [send(store, 4), send(store, 5)]
    first = ids[0].entry_id
    assert [id_.entry_id - first for id_ in ids] == list(range(6))
    found = held(store)
    assert [found[id_] for id_ in ids] == [b"%d" % number for number in range(6)]


def test_the_first_message_of_a_log_is_appended(open_store: OpenStore) -> None:
    """The WAL is for logs that are there."""
    store = open_store(config=CONFIG)
    send(store, 0)
    assert in_wal(store) == []
    send(store, 1)
    assert len(in_wal(store)) == 1


def test_a_log_that_no_commit_has_promises_nothing(store: DelayedStore) -> None:
    """Its first message is on its way; a crash would leave a WAL that names a log nobody has heard of."""
    partition = next(iter(store._engine.partitions))
    limits = store._engine.topics.run_limits
    with store._engine.partitions.lease(partition):
        partition._logs[77] = PartitionLog(77, Ledger(7_777), registered=False)
        assert partition.reserve([(77, FIRST_MS + 1, b"x")], limits) == [None]
        partition._logs[77].registered = True
        assert partition.reserve([(77, FIRST_MS + 1, b"x")] * 2, limits) == [(7_777, 0), (7_777, 1)]
        partition.environment._deferred.clear()


def test_a_large_message_is_written_once(store: DelayedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into its partition."""
    monkeypatch.setattr(intake_module, "_MOST_BYTES", 100)
    store.topic("a").send(bytes(200), deliver_at=FIRST_MS + 5)
    assert not owing(store)


def test_a_message_for_a_partition_that_has_begun_is_appended(store: DelayedStore, clock: ManualClock) -> None:
    """Its index has to hear of it."""
    send(store, 0)
    clock.set(FIRST_MS)
    assert store.tick().fired == 1
    assert not owing(store)
    send(store, 1)
    assert not owing(store)
    clock.advance(100)
    assert store.tick().fired == 2


def test_partitions_write_what_they_owe_after_a_while(store: DelayedStore, clock: ManualClock) -> None:
    """A tick says when, and does it."""
    send(store, 0, 0)
    send(store, 1, 2)
    assert store.tick().next_due_ms == START_MS + CHECKPOINT_MS
    clock.advance(CHECKPOINT_MS - 1)
    store.tick()
    assert len(owing(store)) == 2
    clock.advance(1)
    assert store.tick().next_due_ms != clock.now_ms()
    assert not owing(store)
    send(store, 2)
    assert store.tick().next_due_ms == clock.now_ms() + CHECKPOINT_MS


def test_partitions_write_what_they_owe_soon_after_the_clock_was_set_back(
    store: DelayedStore, clock: ManualClock
) -> None:
    """Not when it has come to where it was."""
    send(store, 0)
    clock.set(START_MS - HOUR_MS)
    assert store.tick().next_due_ms == clock.now_ms() + CHECKPOINT_MS
    clock.advance(CHECKPOINT_MS)
    store.tick()
    assert not owing(store)


def test_what_was_promised_while_it_was_looked_for_is_written_a_while_later(
    store: DelayedStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not forgotten."""
    send(store, 0)
    clock.advance(CHECKPOINT_MS)
    apply_one_partition = store._engine.partitions.apply_one_partition

    def found_none() -> bool:
        if apply_one_partition():
            return True
        monkeypatch.undo()
        send(store, 1)
        return False

    monkeypatch.setattr(store._engine.partitions, "apply_one_partition", found_none)
    assert store.tick().next_due_ms == clock.now_ms() + CHECKPOINT_MS
    clock.advance(CHECKPOINT_MS)
    store.tick()
    assert not owing(store)


def test_a_full_wal_is_begun_anew(store: DelayedStore) -> None:
    """The partitions have what it held by then, and it stays as long as it was."""
    sent = {send(store, number, number % 3): b"%d" % number for number in range(120)}
    assert 0 < len(in_wal(store)) < 40
    assert (store.path / FILE_NAME).stat().st_size == 24 << 10
    assert sent.items() <= held(store).items()


def test_closing_leaves_nothing_in_the_wal(store: DelayedStore, open_store: OpenStore) -> None:
    """The partitions have it."""
    sent = {send(store, number, number % 3): b"%d" % number for number in range(5)}
    store.close()
    assert in_wal(store) == []
    again = open_store(config=CONFIG)
    assert not owing(again)
    assert sent.items() <= held(again).items()


def test_what_a_crash_left_in_the_wal_gets_home(store: DelayedStore, tmp_path: Path, open_store: OpenStore) -> None:
    """Each message once, with its id; then the WAL is empty, and ids go on behind."""
    sent = {send(store, number, number % 3): b"%d" % number for number in range(9)}
    held(store)
    sent |= {send(store, number, number % 2): b"%d" % number for number in range(9, 15)}
    copy = crashed(store, tmp_path / "copy")
    assert len(in_wal(store)) == 15
    for _ in range(2):
        again = open_store(copy, CONFIG)
        assert in_wal(again) == []
        assert {id_: payload for id_, payload in held(again).items() if payload != b"first"} == sent
        again.close()
    again = open_store(copy, CONFIG)
    assert send(again, 99) not in sent


def test_the_threads_of_a_store_with_a_thread_of_its_own_lose_nothing(tmp_path: Path, open_store: OpenStore) -> None:
    """Senders, somebody who looks and cancels, and the store's own thread, side by side; then everything is there."""
    config = replace(CONFIG, max_open_partitions=2)
    with DelayedStore.open(tmp_path / "busy", config) as busy:
        topic = busy.topic("a")
        now_ms = busy._engine.clock.now_ms()
        sent: dict[MessageId, bytes] = {}
        cancelled: list[MessageId] = []

        def produce(thread: int) -> None:
            for number in range(150):
                payload = b"%d/%d" % (thread, number)
                id_ = topic.send(payload, deliver_at=now_ms + HOUR_MS + (thread * 7 + number) % 5 * HOUR_MS)
                sent[id_] = payload
                if number % 10 == 0:
                    assert topic.cancel(id_)
                    cancelled.append(id_)
                elif number % 10 == 5:
                    found = topic.get(id_)
                    assert found is not None
                    assert found.payload == payload

        with ThreadPoolExecutor(6) as pool:
            for future in [pool.submit(produce, thread) for thread in range(6)]:
                future.result()
        assert len(sent) == 900
        expected = {id_: payload for id_, payload in sent.items() if id_ not in set(cancelled)}
        assert {message.message_id: bytes(message.payload) for message in topic.scheduled()} == expected
        assert list(busy.check()) == []
    again = open_store(tmp_path / "busy", config)
    assert held(again) == expected


def test_a_partition_that_owes_stays_open(open_store: OpenStore) -> None:
    """However few may be: what is closed forgets it."""
    store = open_store(config=replace(CONFIG, max_open_partitions=2))
    for number in range(4):
        send(store, number, number // 2)
    assert len(owing(store)) == 2
    for number in range(4, 7):
        send(store, number, 2)
    assert len(owing(store)) == 2
    assert len(held(store)) == 7
    assert store._engine.partitions.open_count() == 2


def test_a_partition_that_owes_takes_messages_until_it_has_written_them(store: DelayedStore) -> None:
    """It is not closed with entries that no commit has."""
    send(store, 0)
    partitions = store._engine.partitions
    (partition,) = owing(store)
    assert not partitions.stop_appends(partition)
    assert partitions.apply_one_partition()
    assert partitions.stop_appends(partition)
    partitions.resume_appends(partition)


def test_an_interrupted_leader_leaves_the_others_their_places(
    store: DelayedStore, tmp_path: Path, open_store: OpenStore
) -> None:
    """Promised before the interrupt, they are in the next group, with the message of whoever was interrupted."""
    interrupted = threading.Event()

    def interrupt() -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    sends = [functools.partial(send, store, number) for number in range(1, 6)]
    futures = Group(store, sends).run(lambda: send(store, 0), interrupt)
    outcomes = [future.exception() for future in futures]
    assert sum(isinstance(outcome, KeyboardInterrupt) for outcome in outcomes) == 1
    ids = [future.result() for future, outcome in zip(futures, outcomes, strict=True) if outcome is None]
    assert len(set(ids)) == 4
    again = open_store(crashed(store, tmp_path / "copy"), CONFIG)
    for both in (store, again):
        found = held(both)
        assert sorted(found.values()) == sorted([b"first"] * 3 + [b"%d" % number for number in range(6)])
        assert set(ids) <= set(found)


def test_an_interrupt_while_places_are_promised_closes_the_store_for_writing(
    store: DelayedStore, monkeypatch: pytest.MonkeyPatch, open_store: OpenStore
) -> None:
    """Memory may not know what was reserved; what is on disk is whole."""
    id_ = send(store, 0)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Partition, "reserve", interrupt)
        with pytest.raises(KeyboardInterrupt):
            send(store, 1)
    with pytest.raises(StoreFailed):
        send(store, 2)
    store.close()
    assert held(open_store(config=CONFIG))[id_] == b"0"


def test_without_room_for_a_wal_messages_are_appended(store: DelayedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not tried again as long as the store is open."""
    tried: list[int] = []

    def no_room(_: object) -> None:
        tried.append(1)
        raise StoreFull(store.path, "no room, says the test")

    monkeypatch.setattr(store._engine.wal_writer, "_open_wal", lambda: no_room(store))
    sent = {send(store, number): b"%d" % number for number in range(3)}
    assert tried == [1]
    assert sent.items() <= held(store).items()


def test_a_reader_in_another_process_sees_a_message_when_its_partition_has_it(
    store: DelayedStore, open_store: OpenStore
) -> None:
    """Reading the store's own environments has them write; a reader beside it waits for that."""
    id_ = send(store, 1)
    reader = open_store_elsewhere(store.path)
    assert str(id_) not in reader()
    held(store)
    assert str(id_) in reader()


def test_a_backup_made_by_another_process_has_what_the_wal_holds(
    store: DelayedStore, tmp_path: Path, open_store: OpenStore
) -> None:
    """It was acknowledged before the backup began."""
    held(store)
    sent = {send(store, number, number % 3): b"%d" % number for number in range(5)}
    open_store_elsewhere(store.path)(str(tmp_path / "backup"))
    assert len(owing(store)) == 3
    again = open_store(tmp_path / "backup", CONFIG)
    assert sent.items() <= held(again).items()


def test_a_backup_made_by_the_writing_process_has_what_only_the_wal_has(
    store: DelayedStore, tmp_path: Path, open_store: OpenStore
) -> None:
    """The copy is what a crash at its instant would leave."""
    sent = {send(store, number, number % 3): b"%d" % number for number in range(5)}
    store.backup(tmp_path / "backup")
    assert sent.items() <= held(open_store(tmp_path / "backup", CONFIG)).items()


def test_a_child_leaves_the_wal_alone(store: DelayedStore) -> None:
    """Closing what it has inherited waits for nobody, whoever led when it was made."""
    send(store, 0)
    store._engine.wal_writer._queue._led = True  # type: ignore[union-attr]
    child = os.fork()
    if not child:
        signal.alarm(20)
        store.close()
        os._exit(7)
    store._engine.wal_writer._queue._led = False  # type: ignore[union-attr]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(in_wal(store)) == 1
