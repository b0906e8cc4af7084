"""Copying a log's index for a snapshot while producers append and others cancel."""

import threading
from typing import Any

import numpy as np
import pytest
from pyroaring import BitMap

from duelog import DelayedStore, ManualClock, Message, StoreConfig, Topic
from duelog.markers.firing import pending_log
from duelog.markers.firing.pending_log import PendingLog
from duelog.partitions.index.index_cut import IndexCut
from duelog.snapshot.writer import Cut
from duelog.store.codec.run import Int64s, UInt32s
from tests.conftest import START_MS, OpenStore, present
from tests.markers.firing.logs import new_log
from tests.store.commits import until


def entries_of(cut: Cut) -> list[int]:
    """Every entry of a copy, each once."""
    ids = [entry_id for piece in cut.pieces for entry_id in BitMap.deserialize(piece.bitmap)]
    assert len(ids) == len(set(ids))
    return sorted(ids)


def test_a_copy_taken_while_threads_append_is_of_one_instant(
    open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds every entry below its tail and none above, though slices were taken between appends."""
    monkeypatch.setattr(pending_log, "_COPIED_AT_ONCE", 50)
    store = open_store(config=StoreConfig(durability="none", bucket_ms=1_000))
    topic = store.topic("t")
    source = np.random.default_rng(5)
    topic.send_batch([Message(b"m", deliver_at=START_MS + ms) for ms in source.integers(1, 600_000, 1_000).tolist()])
    store.tick()
    (log,) = (log for logs in store._engine.delivery.firing.loaded.logs.values() for log in logs.values())
    stop = threading.Event()

    def append(seed: int) -> None:
        mine = np.random.default_rng(seed)
        while not stop.is_set():
            dues = mine.integers(1, 600_000, 7).tolist()
            topic.send_batch([Message(b"m", deliver_at=START_MS + ms) for ms in dues])

    threads = [threading.Thread(target=append, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    tails = []
    try:
        for _ in range(4):
            cut = present(log.cut())
            assert entries_of(cut) == list(range(cut.tail))
            tails.append(cut.tail)
            until(lambda: log.tail > tails[-1])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert tails == sorted(set(tails))


def test_nothing_is_copied_while_a_batch_is_on_its_way() -> None:
    """Taken and not recorded: a copy would have lost it if the commit failed."""
    log = new_log(START_MS + np.array([5, 10, 15]))
    taken = present(log.take(START_MS + 10, 10))
    assert log.cut() is None
    log.roll_back(taken)
    assert entries_of(present(log.cut())) == [0, 1, 2]
    taken = present(log.take(START_MS + 10, 10))
    log.confirm(taken.frontier)
    cut = present(log.cut())
    assert (entries_of(cut), cut.frontier) == ([2], taken.frontier)


def test_a_copy_is_thrown_away_when_something_fires_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it came back: the slices are not of one instant."""
    log = new_log(START_MS + np.array([5, 100, 200]))
    original = IndexCut.more

    def fire_first(cutting: IndexCut, max_entries: int) -> Any:
        monkeypatch.setattr(IndexCut, "more", original)
        return original(cutting, max_entries)

    def arrange_and_fire(cutting: IndexCut) -> None:
        taken = present(log.take(START_MS + 5, 1))
        log.roll_back(taken)

    monkeypatch.setattr(IndexCut, "more", fire_first)
    monkeypatch.setattr(IndexCut, "arrange", arrange_and_fire)
    assert log.cut() is None


def test_a_copy_ends_before_the_first_late_entry_that_waits() -> None:
    """Unfired entries behind the frontier are replayed, with all that came after them."""
    log = new_log(START_MS + np.array([5, 100]))
    taken = present(log.take(START_MS + 5, 10))
    log.confirm(taken.frontier)
    log.hear(2, np.array([START_MS + 3, START_MS + 300]))
    cut = present(log.cut())
    assert (cut.tail, entries_of(cut)) == (2, [1])


CONFIG = StoreConfig(partition_ms=3_600_000, fire_batch=3)


def overtaken(store: DelayedStore, clock: ManualClock) -> tuple[Topic, list[bytes]]:
    """A batch whose sender was held up between looking at the clock and its commit, while others fired."""
    topic = store.topic("t")
    consumer = topic.subscribe("s")
    held_up, sent_ms = topic.sender.encode(
        [Message(b"late-%d" % number, deliver_after=number + 1) for number in range(7)]
    )
    topic.send_batch([Message(b"first", deliver_after=20), Message(b"after", deliver_after=40)])
    clock.set(START_MS + 30_000)
    got = [message.payload for message in consumer.receive(10)]
    store._engine.sending.sender.send(topic.sender.topic(sent_ms), held_up, sent_ms)
    clock.set(START_MS + 60_000)
    while messages := consumer.receive(10):
        got += [message.payload for message in messages]
    return topic, got


EXPECTED = [b"first", *(b"late-%d" % number for number in range(7)), b"after"]


def test_a_sender_that_was_overtaken_loses_nothing(open_store: OpenStore, clock: ManualClock) -> None:
    """Its messages fire in order of due time, in batches, before anything later does."""
    _, got = overtaken(open_store(config=CONFIG), clock)
    assert got == EXPECTED


def test_without_the_clamp_of_late_entries_messages_are_lost(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong engine that takes all at or before the frontier for fired is found out above, and by `check`."""

    def no_clamp(self: PendingLog, entries: UInt32s, dues: Int64s) -> None:
        ahead = ~self.frontier.passes(entries, dues)
        if ahead.any():
            self._index.add(entries[ahead], dues[ahead])

    monkeypatch.setattr(PendingLog, "_place", no_clamp)
    store = open_store(config=CONFIG)
    _, got = overtaken(store, clock)
    assert got == [b"first", b"after"]
    assert [finding.code for finding in store.check()] == ["fired-count"]
    store.close()
