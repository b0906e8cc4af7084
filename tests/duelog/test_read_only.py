"""A store opened read-only beside the process that writes it: sees what comes and goes, changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, MessageId, StoreConfig
from duelog.errors import ClosedError, FormatMismatch, StoreLocked, UnknownTopic
from tests.duelog.writing_process import HOUR_MS, START_MS, WritingProcess


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@contextlib.contextmanager
def reading(path: Path, now_ms: int = START_MS) -> Iterator[DelayedStore]:
    """The store opened read-only on a clock of its own, checked at the end."""
    config = StoreConfig(partition_ms=HOUR_MS)
    with DelayedStore.open(path, config, clock=ManualClock(now_ms), read_only=True) as store:
        yield store
        assert list(store.check()) == []


def files(path: Path) -> set[str]:
    """Every file and directory under a path."""
    return {str(found.relative_to(path)) for found in path.rglob("*")}


def test_opening_read_only_where_there_is_no_store_makes_none(path: Path) -> None:
    """A missing directory and an empty one are refused and stay as they were."""
    with pytest.raises(FormatMismatch):
        DelayedStore.open(path, read_only=True)
    assert not path.exists()
    path.mkdir()
    with pytest.raises(FormatMismatch):
        DelayedStore.open(path, read_only=True)
    assert not files(path)


def test_a_reader_changes_no_file_of_the_store(path: Path) -> None:
    """Looking at everything leaves the set of files as it was."""
    with WritingProcess(path) as writer:
        sent = writer.send("a", "x", 0, 1_000, HOUR_MS)
    before = files(path)
    with reading(path) as store:
        topic = store.topic("a")
        assert [m.payload for m in topic.scheduled()] == [b"x", b"x"]
        assert topic.get(MessageId.parse(sent[2])) is not None
        assert topic.stats().pending == 2
        assert store.stats().pending == 2
        assert len(store.partitions()) == 2
    assert files(path) == before


def test_a_second_writer_is_refused_and_a_reader_is_not(path: Path) -> None:
    """While a process writes, opening for writing is StoreLocked and opening read-only works."""
    with WritingProcess(path):
        with pytest.raises(StoreLocked):
            DelayedStore.open(path, StoreConfig(partition_ms=HOUR_MS))
        with reading(path) as store:
            assert store.stats().topics == 0


def test_a_reader_sees_topics_and_messages_that_came_after_it_opened(path: Path) -> None:
    """Topics, entries and subscriptions of the writing process are seen without opening again."""
    with WritingProcess(path) as writer, reading(path) as store:
        topic = store.topic("a")
        assert not topic.exists()
        with pytest.raises(UnknownTopic):
            topic.stats()
        writer.send("a", "one", 1_000)
        assert topic.exists()
        assert [m.payload for m in topic.scheduled()] == [b"one"]
        writer.send("a", "two", 2_000)
        assert [m.payload for m in topic.scheduled()] == [b"one", b"two"]
        assert topic.stats().pending == 2
        writer.do("subscribe", "a", "mailer")
        assert topic.subscriptions() == ["mailer"]
        assert [found.name for found in store.topics()] == [topic.name]


def test_a_reader_sees_partitions_created_after_it_opened(path: Path) -> None:
    """A partition made by the writing process is listed, counted, searched and checked."""
    with WritingProcess(path) as writer:
        writer.send("a", "near", 1_000)
        with reading(path) as store:
            assert len(store.partitions()) == 1
            sent = writer.send("a", "far", 10 * HOUR_MS)
            assert [found.pending for found in store.partitions()] == [1, 1]
            assert store.stats().pending == 2
            assert [m.payload for m in store.topic("a").scheduled()] == [b"near", b"far"]
            found = store.topic("a").get(MessageId.parse(sent[0]))
            assert found is not None
            assert found.payload == b"far"


def test_what_has_fired_is_no_longer_scheduled_for_a_reader(path: Path) -> None:
    """The frontier that the writing process moves is read anew each time."""
    with WritingProcess(path) as writer, reading(path) as store:
        writer.do("subscribe", "a", "mailer")
        writer.send("a", "x", 1_000, 2_000, 3_000)
        topic = store.topic("a")
        assert len(list(topic.scheduled())) == 3
        assert writer.do("advance", 2_000) == 2
        assert len(list(topic.scheduled())) == 1
        stats = topic.stats()
        assert (stats.pending, stats.subscriptions[0].backlog) == (1, 2)


def test_a_reader_outlives_partitions_that_are_deleted(path: Path) -> None:
    """Partitions closed and deleted by the writing process disappear for a reader that had them open, and for one
    that had not."""
    with WritingProcess(path, ledger_max_entries=2) as writer:
        writer.do("subscribe", "a", "mailer")
        sent = writer.send("a", "x", 1_000, HOUR_MS, 2 * HOUR_MS, 9 * HOUR_MS)
        with reading(path) as seen, reading(path) as unseen:
            assert len(list(seen.topic("a").scheduled())) == 4
            for _ in range(6):
                writer.do("advance", HOUR_MS)
                writer.do("drain", "a", "mailer")
            for store in (seen, unseen):
                assert [found.pending for found in store.partitions()][-1] == 1
                assert len(store.partitions()) < 4
                assert len(list(store.topic("a").scheduled())) == 1
                assert store.topic("a").get(MessageId.parse(sent[0])) is None
                assert store.stats().pending == 1


def test_a_partition_deleted_while_a_reader_lists_is_left_out(path: Path) -> None:
    """Between two steps of an iteration partitions may go; the iteration passes over them."""
    with WritingProcess(path, ledger_max_entries=1) as writer:
        writer.do("subscribe", "a", "mailer")
        writer.send("a", "x", HOUR_MS, 2 * HOUR_MS, 9 * HOUR_MS)
        with reading(path) as store:
            scheduled = store.topic("a").scheduled()
            assert next(scheduled).due_ms == START_MS + HOUR_MS
            for _ in range(5):
                writer.do("advance", HOUR_MS)
                writer.do("drain", "a", "mailer")
            assert [m.due_ms for m in scheduled] == [START_MS + 9 * HOUR_MS]


def test_a_reader_that_would_write_is_refused(path: Path) -> None:
    """Sending, subscribing, ticking and flushing say that the store is open read-only."""
    with WritingProcess(path) as writer:
        writer.send("a", "x", 0)
    with reading(path) as store:
        topic = store.topic("a")
        for attempt in (
            lambda: topic.send(b"x"),
            lambda: topic.send_batch([]),
            lambda: topic.subscribe("mailer"),
            lambda: topic.unsubscribe("mailer"),
            lambda: store.delete_topic("a"),
            store.tick,
            store.flush,
            store.accept_clock,
        ):
            with pytest.raises(ClosedError, match="read-only"):
                attempt()


def test_checking_beside_a_busy_writer_finds_nothing(path: Path) -> None:
    """A check that runs while messages are sent, fired, acknowledged and deleted takes no change for a fault."""
    with WritingProcess(path, ledger_max_entries=50, durability="none") as writer, reading(path) as store:
        writer.do("subscribe", "a", "mailer")
        for turn in range(20):
            writer.send("a", f"x{turn}", *range(0, 4 * HOUR_MS, HOUR_MS // 8))
            writer.do("advance", HOUR_MS)
            assert list(store.check(deep=True)) == []
            writer.do("drain", "a", "mailer")
            assert list(store.check()) == []
