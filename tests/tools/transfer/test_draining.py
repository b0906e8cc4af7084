"""A drain against a broker in memory: killed, it goes on, loses nothing, and what comes twice is known."""

import os
import random
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("crc32c", reason="needs duelog[broker]")

from duelog import DelayedStore, StoreConfig
from duelog.broker.operate.client_message import ClientMessage
from duelog.engine import open_engine
from duelog.store.clock import SystemClock
from duelog.store.errors import DuelogError
from duelog.tools.transfer import draining
from duelog.tools.transfer.draining import (
    ADDRESSED,
    AT_ONCE,
    BY_SCHEDULE,
    EXPIRES,
    Drain,
    Drained,
    DrainStopped,
    StoreTarget,
)
from tests.disaster.running import module
from tests.tools.command_line import DAY_MS, FUTURE_MS

TOPICS = ("persistent://public/default/a", "persistent://shop/mail/b")


class _KilledError(BaseException):
    """The process is gone."""


class Broker:
    """The other broker: what it stored, by topic; it may refuse a payload, and kill its client at a message."""

    def __init__(self, *, deduplicates: bool) -> None:
        self.stored: dict[str, list[tuple[bytes | None, int]]] = {}
        self.subscriptions: set[tuple[str, str]] = set()
        self.last: dict[tuple[str, str], int] = {}
        self.deduplicates = deduplicates
        self.refused: bytes | None = None
        self.kill_after = -1
        self.lock = threading.Lock()

    def subscribe(self, topic: str, subscription: str) -> None:
        assert topic not in self.stored or (topic, subscription) in self.subscriptions
        self.subscriptions.add((topic, subscription))

    def open(self, topic: str, producer: str) -> "_Producer":
        return _Producer(self, topic, producer)

    def close(self) -> None:
        pass


class _Producer:
    def __init__(self, broker: Broker, topic: str, name: str) -> None:
        self.broker, self.place = broker, (topic, name)
        self.last_number = broker.last.get(self.place, -1) if broker.deduplicates else -1

    def send(self, message: ClientMessage, due_ms: int, number: int) -> None:
        broker = self.broker
        with broker.lock:
            if broker.kill_after == 0:
                raise _KilledError
            if message.content == broker.refused and broker.refused is not None:
                raise DuelogError("too large")
            assert number > broker.last.get(self.place, -1) or not broker.deduplicates
            broker.last[self.place] = number
            broker.stored.setdefault(self.place[0], []).append((message.content, due_ms))
            broker.kill_after -= 1
            if broker.kill_after == 0:
                raise _KilledError  # stored, and never confirmed; so is all that the others have on their way

    def close(self) -> None:
        pass


def fill(path: Path, count: int) -> dict[str, list[tuple[bytes, int]]]:
    """A store with so many pending messages in two topics of several days, and what they are."""
    source = random.Random(3)
    sent: dict[str, list[tuple[bytes, int]]] = {topic: [] for topic in TOPICS}
    with DelayedStore.open(path, StoreConfig(background=False)) as store:
        store.topic(TOPICS[0]).subscribe("mailer%2F1").close()
        for number in range(count):
            topic, due_ms = source.choice(TOPICS), FUTURE_MS + source.randrange(3 * DAY_MS)
            store.topic(topic).send(str(number).encode(), deliver_at=due_ms)
            sent[topic].append((str(number).encode(), due_ms))
    return sent


@contextmanager
def a_drain(path: Path, broker: Broker | StoreTarget | None, *, keep: bool = False) -> Iterator[Drain]:
    """One run that is to come."""
    engine = open_engine(
        path, StoreConfig(background=False), SystemClock(), read_only=keep or broker is None, records_defaults=False
    )
    with DelayedStore(engine):
        yield Drain(engine, broker, to_store=isinstance(broker, StoreTarget), keep=keep)


def drain(path: Path, broker: Broker | StoreTarget | None, *, keep: bool = False, kill: bool = False) -> Drained:
    """One run. kill: as a process that is killed, it cancels nothing more once a message has killed it."""
    with a_drain(path, broker, keep=keep) as work:
        if kill:
            cancel = work._cancel
            assert isinstance(broker, Broker)
            work._cancel = lambda: None if not broker.kill_after else cancel()  # type: ignore[method-assign]
        work.run()
        return work.done


def stored(broker: Broker) -> dict[str, list[tuple[bytes | None, int]]]:
    """The messages that the broker has, in an order."""
    return {topic: sorted(found, key=str) for topic, found in sorted(broker.stored.items())}


def by_topic(sent: dict[str, list[tuple[bytes, int]]]) -> dict[str, list[tuple[bytes, int]]]:
    """The same order."""
    return {topic: sorted(found, key=str) for topic, found in sorted(sent.items())}


def test_what_is_pending_goes_with_its_due_times_and_is_cancelled(tmp_path: Path) -> None:
    """Subscriptions are made first, under the names that clients know; a second run has nothing to do."""
    sent = fill(tmp_path / "store", 150)
    counted = drain(tmp_path / "store", None)
    broker = Broker(deduplicates=False)
    done = drain(tmp_path / "store", broker)
    assert stored(broker) == by_topic(sent)
    assert broker.subscriptions == {(TOPICS[0], "mailer/1")}
    assert (counted.entries, counted.messages, counted.first_due_ms, counted.last_due_ms) == (
        done.entries, done.messages, done.first_due_ms, done.last_due_ms,
    )  # fmt: skip
    assert done.entries == 150
    with DelayedStore.open(tmp_path / "store") as store:
        assert [list(topic.scheduled()) for topic in store.topics()] == [[], []]
        assert list(store.check(deep=True)) == []
    assert drain(tmp_path / "store", broker).entries == 0


@pytest.mark.parametrize("deduplicates", [True, False])
def test_a_drain_that_is_killed_goes_on_and_loses_nothing(tmp_path: Path, deduplicates: bool) -> None:
    """Killed several times: once each where the other broker deduplicates, else few come twice, and none more often."""
    sent = fill(tmp_path / "store", 2 * AT_ONCE)
    broker = Broker(deduplicates=deduplicates)
    for kill_after in (1, 100, AT_ONCE + 50):
        broker.kill_after = kill_after
        with pytest.raises(_KilledError):
            drain(tmp_path / "store", broker, kill=True)
    with DelayedStore.open(tmp_path / "store", StoreConfig(background=False)) as store:
        late = store.topic(TOPICS[0]).send(b"sent between two runs", deliver_at=FUTURE_MS)
        sent[TOPICS[0]].append((b"sent between two runs", FUTURE_MS))
        assert late.entry_id > 0
    broker.kill_after = -1
    done = drain(tmp_path / "store", broker)
    if deduplicates:
        assert stored(broker) == by_topic(sent)
        assert done.before > 0
    else:
        again = 0
        for topic, messages in sent.items():
            counts = Counter(broker.stored[topic])
            assert counts.keys() == set(messages)
            again += sum(counts.values()) - len(messages)
        assert 0 < again <= 3 * AT_ONCE
    assert drain(tmp_path / "store", broker).entries == 0


def test_an_interrupted_drain_cancels_what_was_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends it once that is confirmed, so that the next run sends nothing twice; their counts add up."""
    sent = fill(tmp_path / "store", 200)
    broker, held, go = Broker(deduplicates=False), threading.Event(), threading.Event()
    store_it = _Producer.send

    def send(producer: _Producer, *arguments: Any) -> None:
        held.set()
        assert go.wait(60)
        store_it(producer, *arguments)

    def interrupted(results: list[Future[None]]) -> None:
        monkeypatch.setattr(draining, "wait", goes_on)
        assert held.wait(60)
        raise KeyboardInterrupt

    def goes_on(results: list[Future[None]]) -> None:
        go.set()
        wait(results)

    monkeypatch.setattr(_Producer, "send", send)
    monkeypatch.setattr(draining, "wait", interrupted)
    with a_drain(tmp_path / "store", broker) as work:
        cancel = work._cancel

        def cancels() -> None:
            cancel()
            go.set()

        monkeypatch.setattr(work, "_cancel", cancels)
        with pytest.raises(KeyboardInterrupt):
            work.run()
    done = work.done.entries
    assert 0 < done < 200
    assert done + drain(tmp_path / "store", broker).entries == 200
    assert stored(broker) == by_topic(sent)


def test_a_message_that_is_refused_ends_the_drain_and_is_not_taken_for_sent_later(tmp_path: Path) -> None:
    """No number above its own was stored by its producer, so that the next run sends it."""
    sent = fill(tmp_path / "store", 400)
    broker = Broker(deduplicates=True)
    broker.refused = sent[TOPICS[1]][20][0]
    counted = 0
    for _ in range(2):
        with a_drain(tmp_path / "store", broker) as work, pytest.raises(DrainStopped, match="too large"):
            work.run()
        counted += work.done.entries
        assert counted == sum(map(len, broker.stored.values()))
    broker.refused = None
    drain(tmp_path / "store", broker)
    assert stored(broker) == by_topic(sent)


def test_a_copy_leaves_the_store_as_it_is(tmp_path: Path) -> None:
    """It is open read-only; where the other broker deduplicates a second copy sends nothing."""
    sent = fill(tmp_path / "store", 60)
    broker = Broker(deduplicates=True)
    assert drain(tmp_path / "store", broker, keep=True).before == 0
    assert drain(tmp_path / "store", broker, keep=True).before == 60
    assert stored(broker) == by_topic(sent)
    with DelayedStore.open(tmp_path / "store") as store:
        assert sum(topic.stats().pending for topic in store.topics()) == 60


def test_what_belongs_to_this_store_alone_is_left(tmp_path: Path) -> None:
    """The next occurrence of a schedule, a retry that one subscription asked for, and what is to expire."""
    with DelayedStore.open(tmp_path / "store", StoreConfig(background=False)) as store:
        topic = store.topic(TOPICS[0])
        with topic.subscribe("mailer") as consumer:
            topic.send(b"again")
            consumer.retry_later(consumer.receive(1, timeout=5)[0], delay=10 * DAY_MS / 1000)
        topic.every("daily", interval=DAY_MS / 1000, payload=b"daily")
        topic.send(b"soon over", deliver_after=DAY_MS / 1000, ttl=1)
    broker = Broker(deduplicates=False)
    assert drain(tmp_path / "store", broker).left == {ADDRESSED: 1, BY_SCHEDULE: 1, EXPIRES: 1}
    assert broker.stored == {}


def pending(store: DelayedStore) -> dict[str, list[tuple[bytes, int]]]:
    """The pending messages of a store, in an order."""
    return by_topic(
        {str(topic.name): [(each.payload, each.due_ms) for each in topic.scheduled()] for topic in store.topics()}
    )


def test_a_drain_to_another_store_that_is_killed_stores_each_message_once(tmp_path: Path) -> None:
    """Killed before and after its groups, once what it sent is confirmed and not cancelled; entries gone in between."""
    sent = fill(tmp_path / "store", 400)
    command = module("duelog.tools.cli.main", "drain", str(tmp_path / "store"), "--to", str(tmp_path / "other"))
    killed = 0
    with DelayedStore.open(tmp_path / "other") as other:
        for point in ("wal.before:1", "wal.after:1", "wal.before:2", "wal.after:2", ""):
            environment = {**os.environ, "DUELOG_FAILPOINT": point}
            ended = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
            assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
            killed += ended.returncode != 0
            if point == "wal.before:1":
                with DelayedStore.open(tmp_path / "store", StoreConfig(background=False)) as store:
                    store.topic(TOPICS[0]).send(b"between two runs", deliver_at=FUTURE_MS)
                sent[TOPICS[0]].append((b"between two runs", FUTURE_MS))
        assert killed >= 2
        assert pending(other) == by_topic(sent)
        assert sum(topic.stats().sent for topic in other.topics()) == 401
        assert other.topic(TOPICS[0]).subscriptions() == ["mailer%2F1"]
    with DelayedStore.open(tmp_path / "store") as store:
        assert [list(topic.scheduled()) for topic in store.topics()] == [[], []]


def test_another_store_gets_entries_as_they_are_and_one_that_it_refuses_ends_the_drain(tmp_path: Path) -> None:
    """Keys, times to live, properties; those before the refused one are there, and it comes once it is taken."""
    with DelayedStore.open(tmp_path / "store", StoreConfig(background=False)) as store:
        topic = store.topic("t")
        topic.send(b"first", deliver_at=FUTURE_MS, key="k", properties={"a": "b"}, ttl=60, dedup_key="d")
        topic.send(bytes(2_000), deliver_at=FUTURE_MS)
        topic.send(b"last", deliver_at=FUTURE_MS)
    with DelayedStore.open(tmp_path / "other", StoreConfig(max_message_bytes=1_000)) as other:
        target = StoreTarget(str(tmp_path / "other"))
        for _ in range(2):
            with pytest.raises(DrainStopped, match=r"at most 1,?000|payload"):
                drain(tmp_path / "store", target)
        target.close()
        assert [each.payload for each in other.topic("t").scheduled()] == [b"first"]
    with DelayedStore.open(tmp_path / "other") as other:
        target = StoreTarget(str(tmp_path / "other"))
        assert drain(tmp_path / "store", target).messages == 3
        target.close()
        found = list(other.topic("t").scheduled())
        assert [each.payload for each in found] == [b"first", bytes(2_000), b"last"]
        first = other.topic("t").find("d")
        assert first is not None
        assert (first.key, first.properties, first.payload) == ("k", {"a": "b"}, b"first")
        assert other.topic("t").stats().sent == 2
