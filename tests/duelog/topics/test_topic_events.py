"""Topic.create, and who hears of topics that come and go: every commit, once, in order, outside locks."""

import asyncio
import logging
import random
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig, TopicEvent, aio
from duelog.errors import ClosedError, InvalidArgument, ResourceShortage, UnknownTopic
from duelog.store.env.memtable import Entry, Records
from duelog.store.files import failpoints
from duelog.store.names import TopicName
from tests.conftest import OpenStore, in_threads
from tests.duelog.aio.test_aio import in_a_loop
from tests.duelog.side_by_side import crashed, in_wal
from tests.store.commits import beside

LIMIT_S = 60


class Ears:
    """A listener: what it has heard."""

    def __init__(self) -> None:
        self.events: list[TopicEvent] = []
        self._more = threading.Condition()

    def __call__(self, events: list[TopicEvent]) -> None:
        with self._more:
            self.events += events
            self._more.notify_all()

    def wait(self, count: int) -> list[tuple[str, str]]:
        """(kind, last part of the name) of all, once there are so many."""
        with self._more:
            assert self._more.wait_for(lambda: len(self.events) >= count, LIMIT_S)
        return [(event.kind, event.name.rsplit("/")[-1]) for event in self.events]


def test_create_makes_a_topic_durably_and_says_whether_it_was_made(
    open_store: OpenStore, store: DelayedStore, tmp_path: Path
) -> None:
    """A crash right after it finds the topic; nothing is in it."""
    topic = store.topic("a")
    assert topic.create()
    assert not topic.create()
    assert not store.topic("persistent://public/default/a").create()
    copy = open_store(crashed(store, tmp_path / "copy"))
    assert copy.topic("a").exists()
    assert not copy.topic("a").create()
    assert copy.topic("a").stats().entries == 0


def test_many_topics_are_created_by_one_commit(store: DelayedStore) -> None:
    """Each says whether it was made, one that is named twice once; a bad name makes none."""
    ears = Ears()
    store.on_topics(ears)
    store.topic("b").create()
    with pytest.raises(InvalidArgument, match="topic"):
        store.create_topics(["a", "no/name"])
    with pytest.raises(InvalidArgument, match="names"):
        store.create_topics("xy")  # not the topics x and y
    before = len(in_wal(store))
    assert store.create_topics(["a", "b", "c", "a"]) == [True, False, True, False]
    assert store.create_topics(name for name in ("c", "b")) == [False, False]
    assert len(in_wal(store)) == before + 1
    assert ears.wait(3) == [("created", "b"), ("created", "a"), ("created", "c")]


def test_of_many_that_create_a_topic_one_has_made_it(open_store: OpenStore) -> None:
    """Also where they share a commit, and where some of them send."""
    store, ears = open_store(config=StoreConfig(durability="none")), Ears()
    store.on_topics(ears)
    for number in range(10):
        topic, ready = store.topic(f"t{number}"), threading.Barrier(6)
        made: list[bool] = []

        def create(topic: Any = topic, made: list[bool] = made, ready: threading.Barrier = ready) -> None:
            ready.wait()
            made.append(topic.create())

        in_threads(create for _ in range(6))
        assert sorted(made) == [False] * 5 + [True]
    assert ears.wait(10) == [("created", f"t{number}") for number in range(10)]


def test_a_topic_that_is_being_created_is_found_whole_or_not_at_all(
    store: DelayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread that looks as the group comes to memory had been told that it has no open ledger."""
    found, update = list[bool](), Records.update

    def look() -> None:
        found.append(store._engine.topics.find(TopicName.parse("t")) is not None)

    def looked_at(records: Records, entries: Mapping[bytes, Entry]) -> None:
        with beside(records, look):
            update(records, entries)

    monkeypatch.setattr(Records, "update", looked_at)
    assert store.topic("t").create()
    look()
    assert (found[0], found[-1]) == (False, True)


def test_every_way_in_which_a_topic_comes_and_goes_is_heard_in_order(store: DelayedStore) -> None:
    """Sending, putting, subscribing, several in one commit, dead letters; deleting; again under the same name."""
    ears = Ears()
    store.topic("before").create()
    end = store.on_topics(ears)
    store.topic("a").send(b"x")
    store.topic("b").subscribe("s").close()
    store.send_batch([("d", Message(b"x")), ("c", Message(b"x")), ("a", Message(b"x"))])
    store.delete_topic("d")
    store.topic("d").send_batch([Message(b"x")])
    with pytest.raises(UnknownTopic):
        store.delete_topic("e")
    store.topic("b").create()
    assert ears.wait(6) == [
        ("created", "a"), ("created", "b"), ("created", "d"), ("created", "c"), ("deleted", "d"), ("created", "d")
    ]  # fmt: skip
    assert ears.events[2].topic_id == ears.events[4].topic_id < ears.events[5].topic_id
    assert ears.events[0].name == "persistent://public/default/a"
    end()
    end()
    other = Ears()
    store.on_topics(other)
    store.topic("f").create()
    assert other.wait(1) == [("created", "f")]
    assert len(ears.events) == 6


def test_of_two_that_delete_a_topic_at_once_one_does_and_a_new_one_of_its_name_stays(store: DelayedStore) -> None:
    """The other comes too late, also where it had looked before; what waits for a subscription's end as well."""
    ears = Ears()
    store.on_topics(ears)
    topic = store.topic("a")
    topic.create()
    topic.subscribe("s").close()
    removal, state = store._engine.upkeep.removal, store._engine.topics.get(topic._name)
    store.delete_topic("a")
    topic.send(b"x")
    topic.subscribe("s").close()
    with pytest.raises(UnknownTopic):
        removal.remove_topic(state)
    with pytest.raises(UnknownTopic):
        removal.remove_subscription(state, "s")
    assert topic.subscriptions() == ["s"]
    assert topic.stats().entries == 1
    assert ears.wait(3) == [("created", "a"), ("deleted", "a"), ("created", "a")]


def test_a_commit_that_failed_is_not_heard_of(store: DelayedStore) -> None:
    """It has made nothing."""
    ears = Ears()
    store.on_topics(ears)

    def fail() -> None:
        failpoints.disarm()
        raise ZeroDivisionError

    failpoints.arm("commit.before", fail)
    with pytest.raises(ZeroDivisionError):
        store.topic("a").create()
    assert store.topic("a").create()
    assert ears.wait(1) == [("created", "a")]


def test_a_listener_may_use_the_store_and_hold_up_nothing(open_store: OpenStore) -> None:
    """It runs in a thread of its own, without locks: what it does is heard of like all else."""
    store, ears, held = open_store(), Ears(), threading.Event()

    def also(events: list[TopicEvent]) -> None:
        assert held.wait(LIMIT_S)
        for event in events:
            there = store.topic(event.name)
            if event.kind == "created" and not event.name.endswith("-too"):
                assert there.exists()
                store.topic(f"{event.name}-too").send(b"x")
                store.delete_topic(event.name)
            elif event.kind == "deleted":
                assert not there.exists()

    store.on_topics(also)
    store.on_topics(ears)
    store.topic("a").create()
    store.topic("b").create()
    held.set()
    assert sorted(ears.wait(6)) == sorted(
        [
            ("created", "a"),
            ("created", "b"),
            ("created", "a-too"),
            ("created", "b-too"),
            ("deleted", "a"),
            ("deleted", "b"),
        ]
    )


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_listener_that_raises_is_logged_and_others_hear(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    """And it hears what comes after."""
    store, ears, heard = open_store(), Ears(), []

    def broken(events: list[TopicEvent]) -> None:
        heard.extend(events)
        raise error("made up")

    with caplog.at_level(logging.ERROR, "duelog"):
        store.on_topics(broken)
        store.on_topics(ears)
        store.topic("a").create()
        ears.wait(1)
        store.topic("b").create()
        ears.wait(2)
        store.close()
    assert "made up" in caplog.text
    assert len(heard) == 2


def test_closing_tells_what_was_not_heard_and_a_listener_may_close(open_store: OpenStore, tmp_path: Path) -> None:
    """Nothing is lost, and nothing waits for itself."""
    store, ears, let_go = open_store(), Ears(), threading.Event()

    def slow(events: list[TopicEvent]) -> None:
        assert let_go.wait(LIMIT_S)
        ears(events)

    store.on_topics(slow)
    for number in range(5):
        store.topic(f"t{number}").create()
    closing = threading.Thread(target=store.close)
    closing.start()
    let_go.set()
    closing.join()
    assert len(ears.events) == 5
    with pytest.raises(ClosedError):
        store.on_topics(ears)

    other, closed = open_store(tmp_path / "other"), threading.Event()

    def close(events: list[TopicEvent]) -> None:
        other.close()
        closed.set()

    other.on_topics(close)
    other.topic("a").create()
    assert closed.wait(LIMIT_S)


def test_listening_is_refused_where_it_could_hear_nothing(open_store: OpenStore, store: DelayedStore) -> None:
    """Something not callable, a read-only store, a thread that cannot be started."""
    with pytest.raises(InvalidArgument, match="callback"):
        store.on_topics(None)  # type: ignore[arg-type]

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with patch.object(threading.Thread, "start", refuse), pytest.raises(ResourceShortage, match="events"):
        store.on_topics(print)
    store.close()
    with pytest.raises(ClosedError, match="read-only"):
        open_store(read_only=True).on_topics(print)


def test_what_was_listed_and_what_is_heard_make_up_what_is_there(tmp_path: Path, clock: ManualClock) -> None:
    """Threads create and delete; a program that listens, then lists, then applies the events, ends with the truth."""
    with DelayedStore.open(tmp_path / "s", StoreConfig(durability="none"), clock=clock) as store:
        started = threading.Event()

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for step in range(60):
                if step == 10:
                    started.set()
                name = f"t{rng.randrange(8)}"
                if rng.random() < 0.6:
                    store.topic(name).create()
                else:
                    try:
                        store.delete_topic(name)
                    except UnknownTopic:
                        continue

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        assert started.wait(LIMIT_S)
        ears = Ears()
        store.on_topics(ears)
        known = {topic.name for topic in store.topics()}
        for thread in threads:
            thread.join()
        there = {topic.name for topic in store.topics()}
    for event in ears.events:  # closing has told all
        if event.kind == "created":
            known.add(event.name)
        else:
            known.discard(event.name)
    assert known == there
    created = [event.topic_id for event in ears.events if event.kind == "created"]
    assert created == sorted(set(created))
    deleted: set[int] = set()
    for event in ears.events:
        assert event.topic_id not in deleted
        if event.kind == "deleted":
            deleted.add(event.topic_id)


@in_a_loop
async def test_asyncio_hears_in_its_loop(tmp_path: Path, clock: ManualClock) -> None:
    """The callback is called by the loop that asked."""
    async with aio.DelayedStore.open(tmp_path / "s", clock=clock) as store:
        heard: asyncio.Queue[TopicEvent] = asyncio.Queue()

        def hear(events: list[TopicEvent]) -> None:
            assert asyncio.get_running_loop()
            for event in events:
                heard.put_nowait(event)

        end = await store.on_topics(hear)
        assert await store.topic("a").create()
        assert not await store.topic("a").create()
        assert (await heard.get()).kind == "created"
        await store.delete_topic("a")
        assert (await heard.get()).kind == "deleted"
        end()
