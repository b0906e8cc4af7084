"""Claims on a partition log: markers, acknowledgements, cancellations, retention, damage."""

import pickle

from pyroaring import BitMap

from duelog import DelayedStore, ManualClock, Message, Policies, StoreConfig
from duelog.cleanup.log_claims import LogClaims, claims_of_logs, needed, read_claims
from tests.cleanup.compacting import DAY, DAY_MS, close_day, send_day
from tests.conftest import OpenStore


def claims_of(store: DelayedStore, day: int = 0, now_ms: int = 0) -> list[LogClaims]:
    """The claims on a day's partition."""
    with store._engine.storage.main.read() as raw:
        start_ms = DAY + day * DAY_MS
        return read_claims(raw, "main", [start_ms], now_ms=now_ms)[start_ms]


def ids(*entries: int) -> BitMap:
    """A bitmap of entry ids."""
    return BitMap(entries)


def test_claims_are_small_to_send(open_store: OpenStore, clock: ManualClock) -> None:
    """Less than a byte an entry where every second one is acknowledged; little where all are in a row."""
    store = open_store()
    count = 20_000
    subscriptions = [store.topic(topic).subscribe("one") for topic in "ab"]
    for topic in "ab":
        store.topic(topic).send_batch([Message(b"x", deliver_at=DAY + at) for at in range(count)])
    close_day(store, clock)
    for subscription, step in zip(subscriptions, (1, 2), strict=True):
        subscription.ack(subscription.receive(count)[::step], durable=True)
    in_a_row, every_second = (len(pickle.dumps(each)) for each in claims_of(store))
    assert in_a_row < 1_000
    assert every_second < count  # bitmaps of 8 KiB for up to 65,536 entries of a ledger


def test_retention_keeps_what_all_have_acknowledged(open_store: OpenStore, clock: ManualClock) -> None:
    """While its main-log ledger is open, and for as long after it was closed as is asked for."""
    store = open_store(config=StoreConfig(ledger_max_entries=4, retention_ms=3_600_000))
    subscription = store.topic("a").subscribe("one")
    store.topic("b").subscribe("slow")
    send_day(store, "a", 6)
    close_day(store, clock)
    subscription.ack(subscription.receive(6), durable=True)
    now_ms = clock.now_ms()
    kept = claims_of(store, now_ms=now_ms + 3_599_999)[0]
    assert needed(kept, 6, BitMap()) == BitMap(range(6))
    assert not kept.relied_on
    later = claims_of(store, now_ms=now_ms + 3_600_000)[0]
    assert needed(later, 6, BitMap()) == ids(4, 5)  # their ledger is open
    store.set_policies(Policies(retention_ms=0), topic="a")
    assert needed(claims_of(store)[0], 6, BitMap()) == BitMap()


def test_the_newest_bytes_that_retention_asks_for_are_kept(open_store: OpenStore, clock: ManualClock) -> None:
    """The ledger that is written to counts for nothing, and stays; a slow subscription changes nothing."""
    store = open_store(config=StoreConfig(ledger_max_entries=4))
    subscription = store.topic("a").subscribe("one")
    slow = store.topic("a").subscribe("slow")
    send_day(store, "a", 10)
    close_day(store, clock)
    subscription.ack(subscription.receive(10), durable=True)
    slow.ack(slow.receive(10)[1:9], durable=True)
    store.set_policies(Policies(retention_bytes=1), namespace="public/default")
    assert needed(claims_of(store)[0], 10, BitMap()) == ids(0, 4, 5, 6, 7, 8, 9)
    store.set_policies(Policies(retention_bytes=1 << 30), namespace="public/default")
    assert needed(claims_of(store)[0], 10, BitMap()) == BitMap(range(10))


def test_where_the_main_log_is_damaged_only_what_is_known_to_be_done_goes(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """Markers that cannot be read may point at anything that was not cancelled or acknowledged."""
    store = open_store()
    subscription = store.topic("a").subscribe("one")
    sent = send_day(store, "a", 3)
    store.topic("a").cancel(sent[0])
    for at in (1, 2):
        clock.set(DAY + at * 1000)
        store.tick()
    close_day(store, clock)
    subscription.ack(subscription.receive(1), durable=True)
    main = store._engine.storage.main

    def damage(transaction: object) -> None:
        cursor = transaction.raw.cursor()  # type: ignore[attr-defined]
        assert cursor.last()
        value = bytearray(cursor.value())
        value[20] ^= 1
        cursor.put(cursor.key(), bytes(value))

    before = claims_of(store)[0]
    main.commit(damage)
    after = claims_of(store)[0]
    assert (before.complete, after.complete) == (True, False)
    assert needed(before, 3, BitMap()) == needed(after, 3, BitMap()) == ids(2)
    assert needed(before, 3, None) == ids(2)
    main.commit(damage)


def test_a_log_of_which_all_was_cancelled_has_no_frontier_and_needs_nothing(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """The facts about it are read by its ledger id."""
    store = open_store()
    store.topic("a").subscribe("one")
    store.topic("b").subscribe("one")
    send_day(store, "b", 1)
    sent = send_day(store, "a", 3)
    assert all(store.topic("a").cancel(each) for each in sent)
    close_day(store, clock)
    assert [row.topic for row in claims_of(store)] == ["persistent://public/default/b"]
    with store._engine.storage.main.read() as raw:
        (claims,) = claims_of_logs(raw, [], [(1, sent[0].ledger_id)])
    assert claims.topic is not None
    assert needed(claims, 3, BitMap()) == BitMap()
    assert needed(claims, 4, BitMap()) == ids(3)  # one that was neither cancelled nor fired: not hidden


def test_nothing_is_needed_of_a_released_log_or_a_deleted_topic(open_store: OpenStore, clock: ManualClock) -> None:
    """Bodies that cannot be handed out any more go, acknowledged or not."""
    store = open_store(config=StoreConfig(ledger_max_entries=4))
    subscription = store.topic("a").subscribe("one")
    store.topic("b").subscribe("slow")
    send_day(store, "a", 4)
    send_day(store, "b", 4)
    close_day(store, clock)
    subscription.ack(subscription.receive(4), durable=True)
    clock.advance(1_000)
    store.tick()
    released, held = claims_of(store)
    assert (released.frontier.released, held.frontier.released) == (1, 0)
    assert needed(released, 4, BitMap()) == BitMap()
    assert needed(held, 4, BitMap()) == BitMap(range(4))
    with store._engine.storage.main.read() as raw:
        (gone,) = claims_of_logs(raw, [], [(99, held.ledger_id)])
    assert needed(gone, 4, BitMap()) == BitMap()
