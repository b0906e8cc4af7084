"""Operations on a store with unapplied messages: the same as after they are applied, and after a crash."""

from pathlib import Path

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from tests.conftest import HOUR_MS, START_MS, OpenStore, tick_after
from tests.duelog.side_by_side import crashed
from tests.duelog.store_state import payloads_after

CONFIG = StoreConfig(partition_ms=HOUR_MS, ledger_max_entries=4, max_clock_jump_ms=None)


def fill(store: DelayedStore, *names: str) -> None:
    """Ten messages that are due at once and ten in each of two hours, for each topic, unapplied."""
    for name in names:
        store.topic(name).subscribe("s").close()
        store.topic(name).send_batch(
            [Message(b"%d" % at, deliver_at=START_MS + (1 + at % 2) * HOUR_MS + at) for at in range(10, 30)]
        )
    for name in names:
        store.topic(name).send_batch([Message(b"%d" % at) for at in range(10)])
    assert store._engine.storage.main.has_unapplied


def received(store: DelayedStore, name: str, clock: ManualClock) -> list[int]:
    """All payloads of a topic, in the end; acknowledged."""
    return sorted(map(int, payloads_after(store, clock, 20 * HOUR_MS, name)))


@pytest.mark.parametrize("after_a_crash", [False, True])
def test_a_topic_is_deleted_with_what_is_unapplied_of_it(
    store: DelayedStore, open_store: OpenStore, clock: ManualClock, tmp_path: Path, after_a_crash: bool
) -> None:
    """One of its name that is made anew has nothing of it; another topic has all of its own."""
    fill(store, "a", "b")
    store.delete_topic("a")
    if after_a_crash:
        store = open_store(crashed(store, tmp_path / "crashed"), CONFIG)
    assert [topic.name.rpartition("/")[2] for topic in store.topics()] == ["b"]
    fill(store, "a")
    store.topic("a").send(b"99", deliver_after=1)
    assert list(store.check(deep=True)) == []
    assert received(store, "a", clock) == [*range(30), 99]
    assert received(store, "b", clock) == list(range(30))
    tick_after(store, clock, 100 * HOUR_MS)
    assert store.partitions() == []


@pytest.mark.parametrize("after_a_crash", [False, True])
def test_ledgers_that_filled_in_the_log_are_trimmed_once_acknowledged(
    store: DelayedStore, open_store: OpenStore, clock: ManualClock, tmp_path: Path, after_a_crash: bool
) -> None:
    """The records of ledgers that a group closes are unapplied as its entries are."""
    fill(store, "a")
    assert store.topic("a").stats().ledgers == 3
    with store.topic("a").subscribe("s") as reader:
        reader.ack(reader.receive(100), durable=True)
    if after_a_crash:
        store = open_store(crashed(store, tmp_path / "crashed"), CONFIG)
    store.tick()
    tick_after(store, clock, 5 * HOUR_MS)
    assert received(store, "a", clock) == list(range(10, 30))
    tick_after(store, clock, 100 * HOUR_MS)
    store.tick()
    assert store.topic("a").stats().ledgers == 1
    assert store.partitions() == []
