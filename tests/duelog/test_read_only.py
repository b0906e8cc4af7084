"""A store opened read-only beside the process that writes it: sees what comes and goes, changes nothing."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from duelog import (
    DelayedStore,
    Documents,
    ManualClock,
    Message,
    MessageId,
    Policies,
    StoreConfig,
    SubscriptionAdmin,
    Topic,
)
from duelog.errors import ClosedError, FormatMismatch, ReadOnly, UnknownTopic
from duelog.sending.wal_segments import CHECKPOINT_MS
from duelog.store.codec import format as fmt
from duelog.store.env.body_file import body_files
from duelog.store.env.environment import Environment
from duelog.store.env.transaction import Transaction
from duelog.store.files import pages
from duelog.store.log import catalog
from duelog.store.wal.segment import numbers_in
from duelog.tools.store_check import environments
from tests.conftest import HOUR_MS, present
from tests.duelog.writing_process import START_MS, WritingProcess


@contextlib.contextmanager
def reading(path: Path, now_ms: int = START_MS) -> Iterator[DelayedStore]:
    """The store opened read-only on a clock of its own, checked at the end."""
    config = StoreConfig(partition_ms=HOUR_MS)
    with DelayedStore.open(path, config, clock=ManualClock(now_ms), read_only=True) as store:
        yield store
        assert list(store.check(deep=True)) == []


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


def test_a_reader_walks_the_pages_of_a_day_that_was_vacant_when_it_first_looked(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took a day without a file for one that it had looked at."""
    config = StoreConfig(partition_ms=HOUR_MS, max_open_partitions=1)
    walked, refuse_broken = set[Path](), pages.refuse_broken

    def walk(directory: Path) -> pages.DataFile:
        walked.add(directory)
        return refuse_broken(directory)

    with (
        WritingProcess(path) as writer,
        DelayedStore.open(path, config, clock=ManualClock(START_MS), read_only=True) as store,
    ):
        writer.send("a", "x", HOUR_MS, 2 * HOUR_MS)
        topic = store.topic("a")
        assert len(list(topic.scheduled())) == 2
        writer.do("advance", CHECKPOINT_MS)
        monkeypatch.setattr(pages, "refuse_broken", walk)
        assert len(list(topic.scheduled())) == 2
        assert walked == {file.parent for file in (path / "partitions").rglob("data.mdb")}
        assert len(walked) == 2


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


@pytest.mark.parametrize("opened_before", [True, False])
def test_a_reader_outlives_partitions_that_are_deleted(path: Path, opened_before: bool) -> None:
    """Partitions deleted by the writing process disappear for a reader, whether it has looked into them or not."""
    with WritingProcess(path, ledger_max_entries=2) as writer:
        writer.do("subscribe", "a", "mailer")
        sent = writer.send("a", "x", 1_000, HOUR_MS, 2 * HOUR_MS, 9 * HOUR_MS)
        with reading(path) as store:
            if opened_before:
                assert len(list(store.topic("a").scheduled())) == 4
            for _ in range(6):
                writer.do("advance", HOUR_MS)
                writer.do("drain", "a", "mailer")
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


@pytest.mark.parametrize("durability", ["none", "commit"])
def test_checking_beside_a_busy_writer_finds_nothing(path: Path, durability: str) -> None:
    """A check that runs while messages are sent, fired, acknowledged and deleted takes no change for a fault.

    With "commit" body files come and go, too.
    """
    with WritingProcess(path, ledger_max_entries=50, durability=durability) as writer, reading(path) as store:
        writer.do("subscribe", "a", "mailer")
        writer.send("a", "x", *range(1, HOUR_MS, HOUR_MS // 1000))
        turns = 30
        writer.ask("live", "a", "mailer", turns)
        checks = received = 0
        bodies: set[int] = set()
        while checks < 4 or not writer.answered():
            if writer.answered():  # it was quicker than that
                received += writer.answer()
                writer.ask("live", "a", "mailer", turns)
            for directory in environments(path):
                bodies.update(body_files(directory))
            for finding in store.check(deep=checks % 2 == 1):
                pytest.fail(str(finding))
            checks += 1
        assert received + writer.answer() > 1000
        assert bool(bodies) == (durability == "commit")


def test_a_reader_follows_a_file_that_outgrows_its_map(path: Path) -> None:
    """Several threads read on while the writing process grows its files past the map they were opened with."""
    small = 1 << 20
    with WritingProcess(path, map_bytes=small) as writer:
        writer.send("a", "x", 1)
        config = StoreConfig(partition_ms=HOUR_MS, map_bytes=small)
        with DelayedStore.open(path, config, clock=ManualClock(START_MS), read_only=True) as store:
            stop = threading.Event()

            def look() -> int:
                looks = 0
                while not stop.is_set() or not looks:
                    assert all(found.payload for found in store.topic("a").scheduled())
                    looks += 1
                return looks

            with ThreadPoolExecutor(3) as pool:
                looking = [pool.submit(look) for _ in range(3)]
                for _ in range(12):
                    writer.send("a", "y" * 100_000, *[1_000] * 8)
                stop.set()
                assert all(future.result() for future in looking)
            assert len(list(store.topic("a").scheduled())) == 97
            assert store.stats().disk_bytes > 8 * small
            assert list(store.check(deep=True)) == []


_READER_THAT_DIES = """
import os, signal, sys
from pathlib import Path
from duelog.store.env.environment import Environment

with Environment(Path(sys.argv[1]), name="read", read_only=True).read() as raw:
    raw.get(b"x")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_reader_killed_in_a_transaction_does_not_hold_pages_for_ever(tmp_path: Path) -> None:
    """The writing process drops what a dead reader held, so that its file stops growing."""
    path = tmp_path / "environment"
    environment = Environment(path, name="written", durability="none", create=True)

    def put(transaction: Transaction) -> None:
        transaction.put(fmt.counter_key(str(environment.counts.commits % 100)), bytes(100))

    def commit(times: int) -> int:
        for _ in range(times):
            environment.write(put)
        return environment.file_bytes()

    commit(100)
    subprocess.run([sys.executable, "-c", _READER_THAT_DIES, str(path)], check=False)
    grown = commit(1_000)
    assert grown > 1 << 20
    assert commit(2_000) < grown + (1 << 20)
    environment.close()


SMALL = 16 << 10
"""Bytes of a segment: full after a few sends."""


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
            for number in range(40):
                sent += writer.send("a", "y" * 900, (2 + number) * 1_000, 2 * HOUR_MS + number)
                assert sorted(ids(store)) == sorted(sent)
                assert store.topic("a").get(MessageId.parse(sent[-1])) is not None
                assert store.stats().pending == len(sent)
            assert numbers_in(path / "wal")[-1] > first[-1] + 3
        with reading(path) as store:  # one that opens now
            assert sorted(ids(store)) == sorted(sent)


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
                topic = present(catalog.find_topic(raw, store.topic("a").name))
                assert len(catalog.ledgers(raw, topic.topic_id)) == 1
                assert raw.get(fmt.counter_key(catalog.LEDGERS)) is not None


CONFIG = StoreConfig(partition_ms=3_600_000)


@dataclass
class Opened:
    """A store open read-only, what is in it, and its bytes when it was opened."""

    store: DelayedStore
    topic: Topic
    subscription: SubscriptionAdmin
    message_id: MessageId


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a message, a subscription, a schedule and a document."""
    written = tmp_path_factory.mktemp("read_only") / "store"
    with DelayedStore.open(written, CONFIG, clock=ManualClock(START_MS)) as store:
        topic = store.topic("a")
        topic.subscribe("s").close()
        topic.send(b"x", deliver_after=10)
        topic.every("daily", cron="0 9 * * *")
        store.documents.put("d", b"1")
    return written


@pytest.fixture
def read_only(written: Path) -> Iterator[Opened]:
    """The store open read-only."""
    with DelayedStore.open(written, CONFIG, clock=ManualClock(START_MS), read_only=True) as store:
        topic = store.topic("a")
        message = next(each for each in topic.scheduled() if each.payload == b"x")
        yield Opened(store, topic, topic.subscription("s"), message.message_id)


def bytes_of(written: Path) -> dict[str, bytes]:
    """Every file of a store with its bytes, but for LMDB's lock files, in which readers are registered."""
    return {str(each): each.read_bytes() for each in written.rglob("*") if each.is_file() and each.name != "lock.mdb"}


Call = Callable[[Opened], Any]

WRITES: dict[type, dict[str, Call]] = {
    DelayedStore: {
        "accept_clock": lambda it: it.store.accept_clock(),
        "create_topics": lambda it: it.store.create_topics(["b"]),
        "delete_topic": lambda it: it.store.delete_topic("a"),
        "flush": lambda it: it.store.flush(),
        "hand_over": lambda it: it.store.hand_over(),
        "on_topics": lambda it: it.store.on_topics(print),
        "purge_dead_letters": lambda it: it.store.purge_dead_letters([]),
        "remove_policies": lambda it: it.store.remove_policies(topic="a"),
        "report_to": lambda it: it.store.report_to(None),  # type: ignore[arg-type]  # it is not looked at
        "requeue_dead_letters": lambda it: it.store.requeue_dead_letters([]),
        "save_snapshots": lambda it: it.store.save_snapshots(),
        "send_batch": lambda it: it.store.send_batch([("b", Message(b"x"))]),
        "save_manifest": lambda it: it.store.save_manifest(),
        "set_policies": lambda it: it.store.set_policies(Policies(ttl_ms=5), topic="a"),
        "tick": lambda it: it.store.tick(),
        "transaction": lambda it: it.store.transaction(),
        "listen": lambda it: it.store.listen("localhost", 0, admit=lambda *_: lambda *_: None),
        "update_policies": lambda it: it.store.update_policies(topic="a", ttl_ms=5),
    },
    Topic: {
        "cancel": lambda it: it.topic.cancel(it.message_id),
        "cancel_batch": lambda it: it.topic.cancel_batch([it.message_id]),
        "cancel_key": lambda it: it.topic.cancel_key("k"),
        "cancel_keys": lambda it: it.topic.cancel_keys(["k"]),
        "clear_inline": lambda it: it.topic.clear_inline("s"),
        "create": lambda it: it.store.topic("b").create(),
        "every": lambda it: it.topic.every("hourly", cron="0 * * * *"),
        "fire_now": lambda it: it.topic.fire_now(it.message_id),
        "pause_schedule": lambda it: it.topic.pause_schedule("daily"),
        "producer": lambda it: it.topic.producer("p"),
        "put": lambda it: it.topic.put(b"x", done=print),
        "reader": lambda it: it.topic.reader(),
        "remove_schedule": lambda it: it.topic.remove_schedule("daily"),
        "reschedule": lambda it: it.topic.reschedule(it.message_id, deliver_after=1),
        "reschedule_batch": lambda it: it.topic.reschedule_batch([it.message_id], deliver_after=1),
        "resume_schedule": lambda it: it.topic.resume_schedule("daily"),
        "send": lambda it: it.topic.send(b"x"),
        "send_async": lambda it: it.topic.send_async(b"x"),
        "send_batch": lambda it: it.topic.send_batch([]),
        "send_payloads": lambda it: it.topic.send_payloads([b"x"]),
        "subscribe": lambda it: it.topic.subscribe("s"),
        "unsubscribe": lambda it: it.topic.unsubscribe("s"),
    },
    SubscriptionAdmin: {
        "expire": lambda it: it.subscription.expire(START_MS),
        "pause": lambda it: it.subscription.pause(),
        "reset": lambda it: it.subscription.reset("latest"),
        "resume": lambda it: it.subscription.resume(),
        "skip": lambda it: it.subscription.skip(1),
    },
    Documents: {
        "delete": lambda it: it.store.documents.delete("d"),
        "put": lambda it: it.store.documents.put("d", b"2"),
    },
}

READS: dict[type, set[str]] = {
    DelayedStore: {
        *("all_policies", "backup", "check", "clock", "close", "closed", "config", "dead_letters", "documents"),
        *("effective_policies", "kept_by", "open", "partitions", "path", "policies", "stats", "suspended", "topic"),
        *("calendar", "connections", "jobs", "overview", "receiving", "snapshots", "timeline", "topic_rows", "topics"),
        "timeline_by_topic",
    },
    Topic: {
        *("count", "exists", "get", "ledgers", "name", "position_of", "positions", "producer_number", "scheduled"),
        *("find", "keys", "schedules", "sender", "state", "stats", "subscription", "subscriptions"),
    },
    SubscriptionAdmin: {"name", "peek", "stats", "tasks", "topic"},
    Documents: {"get", "items"},
}


@pytest.mark.parametrize("face", WRITES, ids=lambda face: face.__name__)
def test_a_writing_call_raises_read_only_and_changes_nothing(read_only: Opened, written: Path, face: type) -> None:
    """The error is of its own, and still one of those that programs caught before.

    A method that is new goes into one of the lists above: so no writing call is left without its test.
    """
    public = {name for name in dir(face) if not name.startswith("_")}
    assert public == WRITES[face].keys() | READS[face]
    assert not WRITES[face].keys() & READS[face]
    before = bytes_of(written)
    for name, call in WRITES[face].items():
        with pytest.raises(ReadOnly, match="is open read-only: nothing can be changed") as caught:
            call(read_only)
        assert str(written) in str(caught.value)
        assert isinstance(caught.value, ClosedError)
        assert bytes_of(written) == before, name
        assert read_only.topic.state(read_only.message_id) == "scheduled"
