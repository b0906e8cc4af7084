"""A store opened read-only sees what the write-ahead log holds, beside the process that writes it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, MessageId, StoreConfig
from duelog.store.codec import format as fmt
from duelog.store.log import catalog
from duelog.store.wal.segment import numbers_in
from tests.duelog.writing_process import HOUR_MS, START_MS, WritingProcess

SMALL = 16 << 10
"""Bytes of a segment: full after a few sends."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the store is."""
    return tmp_path / "store"


@contextlib.contextmanager
def reading(path: Path) -> Iterator[DelayedStore]:
    """The store opened read-only, checked at the end."""
    config = StoreConfig(partition_ms=HOUR_MS)
    with DelayedStore.open(path, config, clock=ManualClock(START_MS), read_only=True) as store:
        yield store
        assert list(store.check(deep=True)) == []


def ids(store: DelayedStore) -> list[str]:
    """The ids of what waits in the topic, by due time."""
    return [str(message.message_id) for message in store.topic("a").scheduled(limit=None)]


def test_every_message_is_seen_once_it_is_acknowledged(path: Path) -> None:
    """Over many segments that are used again, with checkpoints between them, and over two partitions."""
    with WritingProcess(path, wal_bytes=SMALL) as writer:
        writer.send("a", "x", 1)
        with reading(path) as store:
            sent = ids(store)
            first = numbers_in(path / "wal")
            for number in range(60):
                sent += writer.send("a", "y" * 900, (2 + number) * 1_000, 2 * HOUR_MS + number)
                assert sorted(ids(store)) == sorted(sent)
                found = store.topic("a").get(MessageId.parse(sent[-1]))
                assert found is not None
                assert store.stats().pending == len(sent)
            assert numbers_in(path / "wal")[-1] > first[-1] + 3
        with reading(path) as store:  # one that opens now
            assert sorted(ids(store)) == sorted(sent)


def test_a_log_and_a_partition_that_only_the_write_ahead_log_knows_are_seen(path: Path) -> None:
    """The first message of a topic in a partition is applied to nothing yet."""
    with WritingProcess(path) as writer, reading(path) as store:
        (sent,) = writer.send("a", "x", 5 * HOUR_MS)
        (partition,) = store.partitions()
        assert partition.pending == 1
        assert ids(store) == [sent]
        found = store.topic("a").get(MessageId.parse(sent))
        assert found is not None
        assert found.payload == b"x"


def test_messages_that_were_due_at_once_count_for_a_subscription(path: Path) -> None:
    """Entries of the main log, over ledgers that the write-ahead log alone knows of."""
    with WritingProcess(path, ledger_max_entries=2) as writer:
        writer.do("subscribe", "a", "mailer")
        with reading(path) as store:
            for count in range(1, 8):
                writer.send("a", "x", 0)
                stats = store.topic("a").stats()
                assert stats.subscriptions[0].backlog == count
                assert stats.ledgers == count // 2 + 1


def test_what_was_applied_and_removed_does_not_come_back_from_a_segment(path: Path) -> None:
    """The log still holds the rows of messages that have fired, were consumed and trimmed, with their ledgers."""
    with WritingProcess(path, ledger_max_entries=2) as writer:
        writer.do("subscribe", "a", "mailer")
        with reading(path) as store:
            writer.send("a", "x", 0, 0, 0, 0, 1_000, 2_000)
            assert store.topic("a").stats().ledgers == 3
            writer.do("advance", 3_000)
            writer.do("drain", "a", "mailer")
            writer.do("advance", 3_000)
            stats = store.topic("a").stats()
            assert stats.ledgers == 1
            assert stats.subscriptions[0].backlog == 0
            assert ids(store) == []
            with store._engine.storage.main.read() as raw:
                topic = catalog.find_topic(raw, store.topic("a").name)
                assert topic is not None
                assert len(catalog.ledgers(raw, topic.topic_id)) == 1
                assert raw.get(fmt.counter_key(catalog.LEDGERS)) is not None


def test_a_reader_of_a_store_that_no_process_writes_sees_what_a_crash_left(path: Path) -> None:
    """The process was killed before anything was applied."""
    with WritingProcess(path) as writer:
        sent = writer.send("a", "x", 1_000, HOUR_MS)
        writer.kill()
        with reading(path) as store:
            assert ids(store) == sent
