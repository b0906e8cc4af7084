"""A log that fires what the first parts of its snapshot hold, while the others are still being read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pyroaring import BitMap

from duelog import DelayedStore, ManualClock, Message, MessageId, StoreConfig
from duelog.markers.firing import loaded as loaded_module
from duelog.markers.firing.log_firing import LogFiring
from duelog.markers.firing.partially_loaded import Missing
from duelog.partitions.index.delay_index import DelayIndex
from duelog.snapshot.snapshot_format import snapshot_keys
from duelog.snapshot.stored import inspect_snapshots
from duelog.store.codec.format import Table
from duelog.store.codec.frontier import FrontierRecord
from duelog.store.env.environment import Environment
from duelog.store.errors import StoreFull
from duelog.store.files import failpoints
from tests.conftest import START_MS, OpenStore

HOUR_MS = 3_600_000
FIRST_MS = START_MS - START_MS % HOUR_MS + HOUR_MS
COUNT = 1_000
STEP_MS = 3_000
"""Message number k is due k steps after the partition's start."""
CONFIG = StoreConfig(
    partition_ms=HOUR_MS,
    bucket_ms=1_000,
    durability="none",
    run_entries=50,
    snapshot_part_bytes=1_024,
    snapshot_every_entries=1_000,
)


@pytest.fixture(autouse=True)
def _in_small_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every call of `load` reads one part; no failpoint is left armed."""
    monkeypatch.setattr(loaded_module, "_LOAD_SLICE_S", 0.0)
    yield
    failpoints.disarm()


@pytest.fixture
def store(open_store: OpenStore, clock: ManualClock) -> DelayedStore:
    """A store with a snapshot of 1,000 messages in some thirty parts, opened again; nothing is loaded yet."""
    clock.set(FIRST_MS)
    first = open_store(config=CONFIG)
    first.topic("t").subscribe("reader").close()
    order = np.random.default_rng(3).permutation(COUNT)
    first.topic("t").send_batch([Message(b"%d" % at, deliver_at=due_ms(at)) for at in order.tolist()])
    first.tick()
    first.close()
    return open_store(config=CONFIG)


def due_ms(number: int) -> int:
    """When a message is due."""
    return FIRST_MS + 500 + number * STEP_MS


def log_of(store: DelayedStore) -> LogFiring:
    """The topic's log."""
    (log,) = store._engine.firing._loaded[FIRST_MS].values()
    return log


def environment_of(store: DelayedStore) -> Environment:
    """The partition's environment."""
    partition = store._engine.partitions.get(FIRST_MS)
    assert partition is not None
    return partition.environment


def until_half_loaded(store: DelayedStore) -> int:
    """Slices until the log fires and is not loaded; how many messages have fired with them."""
    fired = 0
    while not (store._engine.firing.loaded_starts() and log_of(store).fires):
        fired += store._engine.slice()[0].fired
    assert not log_of(store).loaded
    return fired


def limit_ms(store: DelayedStore) -> int:
    """The time before which everything is in the index."""
    missing = log_of(store)._missing
    assert missing is not None
    return missing.limit_ms


def received(store: DelayedStore) -> list[int]:
    """The numbers of all messages that can be received, in order; acknowledged."""
    found: list[int] = []
    with store.topic("t").subscribe("reader") as reader:
        while batch := reader.receive(200):
            found += [int(message.payload) for message in batch]
            reader.ack(batch)
    return found


def id_of(store: DelayedStore, number: int) -> MessageId:
    """The id of a message."""
    entry_id = np.random.default_rng(3).permutation(COUNT).tolist().index(number)
    return MessageId(log_of(store).ledger_id, entry_id)


def damage(store: DelayedStore, part: int) -> None:
    """Change a byte of a part of the snapshot."""
    environment = environment_of(store)
    with environment.read() as raw:
        key = [key for key, _ in snapshot_keys(raw, Table.SNAPSHOT_PART)][part]
        value = bytearray(raw.get(key) or b"")
    value[len(value) // 2] ^= 0x10
    environment.write(lambda transaction: transaction.raw.put(key, bytes(value)))


def test_what_is_due_fires_before_all_parts_are_read(store: DelayedStore, clock: ManualClock) -> None:
    """The slice that makes the log fire fires too, and what comes due meanwhile is not late."""
    clock.set(due_ms(4))
    assert until_half_loaded(store) == 5
    clock.set(due_ms(5))
    assert store._engine.slice()[0].fired == 1
    assert not log_of(store).loaded
    store.tick()
    assert log_of(store).loaded
    assert received(store) == list(range(6))
    clock.advance(HOUR_MS)
    assert received(store) == list(range(6, COUNT))


def test_firing_comes_before_the_later_parts_though_there_is_time_for_them(
    store: DelayedStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slice begins to load and fires, the next reads the rest."""
    monkeypatch.setattr(loaded_module, "_LOAD_SLICE_S", 3_600.0)
    clock.set(due_ms(4))
    assert store._engine.slice()[0].fired == 5
    assert not log_of(store).loaded
    store._engine.slice()
    assert log_of(store).loaded


def test_a_message_sent_while_half_loaded_fires_without_another_part(store: DelayedStore, clock: ManualClock) -> None:
    """It is in the index at once, and its log is armed for it; one due after the limit waits for its bucket."""
    until_half_loaded(store)
    store.topic("t").send(b"%d" % COUNT, deliver_at=FIRST_MS + 100)
    store.topic("t").send(b"%d" % (COUNT + 1), deliver_at=due_ms(500) + 1)
    clock.set(FIRST_MS + 100)
    assert store._engine.firing.fire(clock.now_ms()) == 1
    assert not log_of(store).loaded
    clock.advance(HOUR_MS)
    assert received(store) == [COUNT, *range(501), COUNT + 1, *range(501, COUNT)]


def test_nothing_fires_from_the_limit_on(store: DelayedStore, clock: ManualClock) -> None:
    """All is overdue: what is known to be first goes first, the rest as its parts are read, in order."""
    clock.set(FIRST_MS + HOUR_MS - 2)
    fired = until_half_loaded(store)
    store.topic("t").send(b"%d" % COUNT, deliver_at=FIRST_MS + HOUR_MS - 1)  # in a bucket after the limit
    assert fired == sum(due_ms(number) < limit_ms(store) for number in range(COUNT)) > 0
    assert store._engine.firing.fire(clock.now_ms()) == 0
    clock.advance(1)
    assert store._engine.firing.fire(clock.now_ms()) == 0
    assert log_of(store).next_due_ms() is None
    assert log_of(store).exact_next_due_ms() is None
    assert len(log_of(store)._index._window) == 0
    assert received(store) == list(range(COUNT + 1))


def test_a_log_fires_while_another_loads(open_store: OpenStore, store: DelayedStore, clock: ManualClock) -> None:
    """The first parts of every log are read before the later ones of any."""
    other = store.topic("other")
    other.subscribe("reader").close()
    other.send_batch([Message(b"%d" % at, deliver_at=due_ms(at)) for at in range(COUNT)])
    store.tick()
    store.close()
    store = open_store(config=CONFIG)
    clock.set(due_ms(2))
    fired = 0
    while not fired:
        fired = store._engine.slice()[0].fired
    logs = list(store._engine.firing._loaded[FIRST_MS].values())
    assert [(log.fires, log.loaded) for log in logs] == [(True, False), (False, False)]
    while not logs[1].fires:
        fired += store._engine.slice()[0].fired
    assert fired == 6
    assert not logs[0].loaded


@pytest.mark.parametrize("part", [-1, 3])
def test_a_damaged_later_part_costs_no_message(store: DelayedStore, clock: ManualClock, part: int) -> None:
    """Found after the log began to fire: it is read back by its frontier, and each message comes once, in order."""
    clock.set(due_ms(4))
    until_half_loaded(store)
    damage(store, part)
    store.topic("t").send(b"%d" % COUNT, deliver_at=due_ms(COUNT))
    assert store.topic("t").cancel(id_of(store, 700))
    assert store.topic("t").cancel(id_of(store, 6))
    moved = store.topic("t").reschedule(id_of(store, 701), deliver_at=due_ms(COUNT) + 1)
    assert moved is not None
    began_again = False
    while not log_of(store).loaded:
        store._engine.slice()
        began_again = began_again or not log_of(store).fires
    assert began_again
    assert len(log_of(store)) == COUNT - 5 - 3 + 2
    assert log_of(store).saved_tail == 0
    clock.advance(HOUR_MS)
    assert received(store) == [n for n in range(COUNT) if n not in (6, 700, 701)] + [COUNT, 701]


def test_a_log_that_was_read_back_is_armed(store: DelayedStore, clock: ManualClock) -> None:
    """What is due when it has been read back fires though nothing else arms it."""
    until_half_loaded(store)
    damage(store, -1)
    while log_of(store).fires:
        store._engine.slice()
    store._engine.firing._ready.discard(log_of(store))
    clock.set(due_ms(4))
    assert store.tick().fired == 5


def test_appends_before_and_after_a_damaged_part_is_found_are_kept(store: DelayedStore, clock: ManualClock) -> None:
    """What was heard before is read back, what comes after is heard."""
    until_half_loaded(store)
    damage(store, -1)
    store.topic("t").send(b"%d" % COUNT, deliver_at=due_ms(2) + 1)
    while log_of(store).fires:
        store._engine.slice()
    store.topic("t").send(b"%d" % (COUNT + 1), deliver_at=due_ms(3) + 1)
    clock.advance(HOUR_MS)
    assert received(store) == [0, 1, 2, COUNT, 3, COUNT + 1, *range(4, COUNT)]


def test_a_cancelled_message_never_fires_wherever_it_is(store: DelayedStore, clock: ManualClock) -> None:
    """In a part that is read, in one that is not, and both again once all are."""
    until_half_loaded(store)
    gone = [1, 2, 500, 501, 999]
    assert due_ms(2) < limit_ms(store) < due_ms(500)
    assert all(store.topic("t").cancel(id_of(store, number)) for number in gone)
    store.tick()
    assert len(log_of(store)) == COUNT - len(gone)
    log_of(store)._check()
    clock.advance(HOUR_MS)
    assert received(store) == [number for number in range(COUNT) if number not in gone]


def test_many_are_cancelled_at_once_while_half_loaded(store: DelayedStore, clock: ManualClock) -> None:
    """Three hundred, of all parts."""
    until_half_loaded(store)
    store.topic("t").cancel_batch([id_of(store, number) for number in range(0, COUNT, 3)])
    store.tick()
    log_of(store)._check()
    clock.advance(HOUR_MS)
    assert received(store) == [number for number in range(COUNT) if number % 3]


def test_what_was_cancelled_or_admitted_after_the_snapshot_is_so_in_every_part(
    open_store: OpenStore, store: DelayedStore, clock: ManualClock
) -> None:
    """Recorded before the start: neither fires what is gone nor twice what the snapshot holds already."""
    store.tick()
    moved = store.topic("t").reschedule(id_of(store, 3), deliver_at=due_ms(600) + 1)
    store.topic("t").send_batch([Message(b"%d" % (COUNT + at), deliver_at=due_ms(COUNT + at)) for at in range(100)])
    store.close()  # a snapshot that holds the new one
    store = open_store(config=CONFIG)
    store.tick()
    assert store.topic("t").cancel(id_of(store, 700))
    again = store.topic("t").reschedule(id_of(store, 5), deliver_at=due_ms(1) + 1)
    assert moved is not None
    assert again is not None
    store.close()
    store = open_store(config=CONFIG)
    until_half_loaded(store)
    store.tick()
    log_of(store)._check()
    assert len(log_of(store)) == COUNT + 100 - 1
    clock.advance(HOUR_MS)
    everything = [0, 1, 5, 2, 4, *range(6, 601), 3, *range(601, 700), *range(701, COUNT + 100)]
    assert received(store) == everything


def test_a_message_admitted_while_half_loaded_fires_once(store: DelayedStore, clock: ManualClock) -> None:
    """Rescheduled to before the limit and to after it, from before and from after."""
    until_half_loaded(store)
    topic = store.topic("t")
    assert topic.reschedule(id_of(store, 800), deliver_at=due_ms(1) + 1) is not None
    assert topic.reschedule(id_of(store, 3), deliver_at=due_ms(900) + 1) is not None
    clock.set(due_ms(4))
    assert store._engine.slice()[0].fired == 5
    assert not log_of(store).loaded
    store.tick()
    log_of(store)._check()
    clock.advance(HOUR_MS)
    expected = [0, 1, 800, 2, *range(4, 800), *range(801, 901), 3, *range(901, COUNT)]
    assert received(store) == expected


def test_a_failed_commit_of_a_half_loaded_log_is_undone(store: DelayedStore, clock: ManualClock) -> None:
    """What was taken comes first again, and C lies before it."""
    until_half_loaded(store)
    clock.set(due_ms(4))
    before = log_of(store).frontier

    def fail() -> None:
        raise StoreFull(store.path, "no room")

    failpoints.arm("fire.before", fail)
    with pytest.raises(StoreFull):
        store._engine.slice()
    assert log_of(store).frontier == before
    failpoints.disarm()
    assert not log_of(store).loaded
    clock.advance(HOUR_MS)
    assert received(store) == list(range(COUNT))


def test_half_loaded_is_not_loaded_for_closing_and_saving(
    open_store: OpenStore, store: DelayedStore, clock: ManualClock
) -> None:
    """Its end has passed and nothing of what is in memory is left: it stays open, and keeps the snapshot it has."""
    clock.set(FIRST_MS + HOUR_MS)
    until_half_loaded(store)
    log = log_of(store)
    assert len(log) == 0
    partition = store._engine.partitions.get(FIRST_MS)
    assert partition is not None
    assert store._engine.firing._left(partition)
    assert list(store._engine.firing.close_finished(clock.now_ms())) == []
    assert log.cut() is None
    log.saved_tail = -CONFIG.snapshot_every_entries  # as if it were worth saving
    assert store._engine.firing.save_all(clock.now_ms()) == 0
    store.close()
    store = open_store(config=CONFIG)
    assert received(store) == list(range(COUNT))
    assert store._engine.firing.loaded_starts() == []


def test_a_store_that_closes_half_loaded_starts_from_the_same_snapshot(
    open_store: OpenStore, store: DelayedStore, clock: ManualClock
) -> None:
    """Time after time, a few parts each: what fired meanwhile is passed over."""
    for number in (4, 40, 200):
        clock.set(due_ms(number))
        until_half_loaded(store)
        assert [info.snapshot_id for info in inspect_snapshots(environment_of(store))] == [1]
        store.close()
        store = open_store(config=CONFIG)
    clock.advance(HOUR_MS)
    assert received(store) == list(range(COUNT))


def test_the_due_column_is_replayed_before_anything_fires(
    open_store: OpenStore, store: DelayedStore, clock: ManualClock
) -> None:
    """Messages sent after the snapshot, due at the same time as those in it, come in order."""
    store.tick()
    store.topic("t").send_batch([Message(b"%d" % (COUNT + at), deliver_at=due_ms(at) - 1) for at in range(0, 90, 10)])
    store.close()
    store = open_store(config=CONFIG)
    clock.set(due_ms(25))
    until_half_loaded(store)
    clock.advance(HOUR_MS)
    expected = sorted([*range(COUNT), *range(COUNT, COUNT + 90, 10)],
                      key=lambda n: due_ms(n) if n < COUNT else due_ms(n - COUNT) - 1)  # fmt: skip
    assert received(store) == expected


def test_buckets_lose_what_is_gone_and_sleep_where_nothing_is() -> None:
    """Only ids below the snapshot's tail are looked for."""
    missing = Missing(10, 100, BitMap([100, 101]))
    buckets: list[Any] = [(10, BitMap([1, 2])), (20, BitMap([3]))]
    assert missing.without_gone(buckets) is buckets
    missing.gone |= BitMap([2])
    kept = missing.without_gone(buckets)
    assert kept == [(10, BitMap([1])), (20, BitMap([3]))]
    assert kept[1][1] is buckets[1][1]
    assert [missing.before_limit(at) for at in (None, 9, 10)] == [None, 9, None]


def test_a_log_that_begins_again_takes_nothing_until_it_is_read_back() -> None:
    """Armed by what it had before, it comes up, and there is nothing to take; then what is late is late once."""
    column = np.array([5, 10, 15], dtype=np.int64) + START_MS
    index = DelayIndex(lambda ids: column[ids], start_ms=START_MS, bucket_ms=10)
    log = LogFiring(1, START_MS, FrontierRecord.start(7), index, loaded=False)
    log.restore(0, column)
    log.finish_loading(Missing(START_MS + 20, 3, BitMap()))
    taken = log.take(START_MS + 12, 10)
    assert taken is not None
    assert taken.entries.tolist() == [0, 1]
    log.confirm(taken.frontier)
    column = np.append(column, START_MS + 7)
    log.hear(3, column[3:])
    assert log.begin_again() == 4
    for read_back in (0, 4):
        if read_back:
            log.restore(0, column)
        assert log.take(START_MS + 100, 10) is None
        assert (log.next_due_ms(), log.exact_next_due_ms()) == (None, None)
    log.finish_loading()
    taken = log.take(START_MS + 100, 10)
    assert taken is not None
    assert (taken.entries.tolist(), taken.late) == ([3, 2], 1)
    assert log.take(START_MS + 100, 10) is None


def test_a_half_loaded_log_puts_nothing_to_sleep(store: DelayedStore, clock: ManualClock) -> None:
    """A bucket whose saved entries are still to come is not closed to them; once all have come it may sleep."""
    clock.set(due_ms(4))
    until_half_loaded(store)
    ahead = [Message(b"%d" % (COUNT + at), deliver_at=due_ms(900 + at) + 1) for at in range(20)]
    store.topic("t").send_batch(ahead)
    log = log_of(store)
    assert not log.settle()
    store.tick()
    assert log.loaded
    while log.settle():
        pass
    log._check()
    clock.advance(HOUR_MS)
    assert sorted(received(store)) == list(range(COUNT + 20))


def test_a_log_that_begins_again_settles_anew(store: DelayedStore, clock: ManualClock) -> None:
    """What it remembers of the last time is about an index that is gone."""
    clock.set(due_ms(4))
    until_half_loaded(store)
    log = log_of(store)
    log._settled_tail, log._settled_ms = log.tail, FIRST_MS + 1_000_000
    log.begin_again()
    assert not log._settled_tail
    assert not log._settled_ms
    store._engine.firing._loading = None
    partition = store._engine.partitions.get(FIRST_MS)
    assert partition is not None
    store._engine.firing._unload(partition)
