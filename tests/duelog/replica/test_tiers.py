"""Days that lie in the copy alone: they go and come, whatever happens meanwhile, and no message is lost or early."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from duelog import DelayedStore, Finding, ManualClock, Message, ReceivedMessage, StoreConfig, TickResult, Topic
from duelog.check import check_store
from duelog.errors import ReplicaRefused, ReplicaUnreachable
from duelog.replica import tiers
from duelog.replica.bucket import Bucket, manifest_name
from duelog.replica.following import Standby
from duelog.replica.identity import claim
from duelog.replica.pruning import prune
from duelog.replica.set_aside import read_aside
from duelog.replica.tiers import Tiers
from duelog.store.env.environment import Environment
from duelog.store.files import failpoints
from duelog.store.wal import write_batch
from tests.conftest import OpenStore, applied, in_threads, present, tick_after
from tests.duelog.busy_store import BEFORE, COPY, BusyStore, OtherProcess, assert_is, saying_where
from tests.duelog.replica.faulty import URL, FaultyBucket, manifested, restored, ship
from tests.duelog.side_by_side import crashed
from tests.duelog.store_state import payloads
from tests.proof import length
from tests.tools.command_line import json_lines_of, json_of, ok, run

DAY_MS = 3_600_000
CONFIG = StoreConfig(partition_ms=DAY_MS, replica=URL, max_local_bytes=1)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any rest goes, each look looks, and a manifest is made whenever one is wanted."""
    monkeypatch.setattr(tiers, "LEAST_BYTES", 0)
    monkeypatch.setattr(tiers, "LOOK_MS", 0)
    monkeypatch.setattr(tiers, "MANIFEST_MS", 0)


def tiers_of(store: DelayedStore) -> Tiers:
    """What gives days of a store back."""
    return present(store._engine.tiers)


def settle(store: DelayedStore) -> int:
    """Have all that is written be applied, in a manifest, and given back; how many days are away."""
    manifested(applied(store))
    store.tick()
    return len(away(store))


def away(store: DelayedStore) -> list[int]:
    """The days that are in the copy alone."""
    return [partition.start_ms for partition in store._engine.storage.partitions if partition.away is not None]


def received(store: DelayedStore) -> list[bytes]:
    """Take all messages that are due, whatever days they are of."""
    with store.topic("t").subscribe("s") as reader:
        return sorted(payloads(reader))


def test_a_far_day_goes_takes_sends_and_comes_before_it_begins(
    clock: ManualClock, bucket: FaultyBucket, store: DelayedStore, topic: Topic
) -> None:
    """It is fetched once: sending and cancelling need nothing of it."""
    topic.subscribe("s").close()
    topic.send_batch([Message(b"before %d" % n, deliver_after=5 * 3600 + n) for n in range(300)])
    assert settle(store) == 1
    topic.send_batch([Message(b"meanwhile %d" % n, deliver_after=5 * 3600 + n) for n in range(300)])
    cancelled = topic.send(b"cancelled", deliver_after=5 * 3600)
    assert topic.cancel(cancelled)
    assert tiers_of(store).fetched == 0
    for _ in range(7):
        tick_after(store, clock, DAY_MS)
    assert tiers_of(store).fetched == 1
    assert received(store) == sorted(b"%s %d" % (when, n) for when in (b"before", b"meanwhile") for n in range(300))


STORIES = length("DUELOG_TIERS", 8, 200)


@pytest.mark.series
@pytest.mark.parametrize("seed", range(STORIES))
def test_a_busy_store_whose_days_go_and_come_is_as_its_twin(
    seed: int, bucket: FaultyBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sends, cancels, reschedulings, closings, restarts, crashes and prunings between; and so are its copies."""
    random = Random(seed)
    monkeypatch.setattr("duelog.replica.shipping.MANIFEST_MS", random.choice((1_000, 7_200_000)))
    busy = BusyStore(tmp_path / "store", seed, replica=URL, ship_bytes=1 << 16, max_local_bytes=1)
    gone = came = 0
    for step in range(50):
        busy.act(random.randrange(1, 4))
        match random.randrange(8):
            case 0 | 1 | 2:
                settle(busy.store)
            case 3:
                ship(busy.store)
            case 4:
                gone, came = gone + tiers_of(busy.store).given_back, came + tiers_of(busy.store).fetched
                busy.reopen()
            case 5:
                gone, came = gone + tiers_of(busy.store).given_back, came + tiers_of(busy.store).fetched
                left = crashed(busy.store, tmp_path / f"crashed {step}")
                bucket.is_down = True
                busy.store.close()
                bucket.is_down = False
                (tmp_path / "store").rename(tmp_path / f"before {step}")
                left.rename(tmp_path / "store")
                busy.store = DelayedStore.open(tmp_path / "store", busy.config, clock=busy.clock)
            case 6:
                prune(bucket, busy.clock.now_ms(), 0, making=1)
            case _:
                assert list(busy.store.check(deep=True)) == []
    ship(busy.store)
    gone, came = gone + tiers_of(busy.store).given_back, came + tiers_of(busy.store).fetched
    assert gone
    twin = busy.twin()
    busy.store.backup(tmp_path / "backup")
    busy.store.close()
    restored(bucket, tmp_path / "restored")
    plain = replace(busy.config, replica=None, max_local_bytes=None)
    for copy, config in (("restored", plain), ("backup", plain), ("store", busy.config)):
        assert_is(tmp_path / copy, twin, config)


def filled(open_store: OpenStore, config: StoreConfig = CONFIG) -> DelayedStore:
    """A store whose two days, five and nine hours ahead, are away, with a message each."""
    store = open_store(config=config)
    store.topic("t").subscribe("s").close()
    store.topic("t").send(b"first", deliver_after=5 * 3600)
    store.topic("t").send(b"second", deliver_after=9 * 3600)
    assert settle(store) == 2
    return store


def passed(store: DelayedStore, clock: ManualClock, hours: int) -> TickResult:
    """Let time pass; the last tick."""
    for _ in range(2 * hours):
        result = tick_after(store, clock, DAY_MS // 2)
    return result


def reasons(result: TickResult) -> str:
    """Why parts of the upkeep are suspended."""
    return "; ".join(f"{each}: {each.reason}" for each in result.suspended)


def test_a_transaction_fetches_a_day_before_firing_has_to_wait_for_it(
    clock: ManualClock, bucket: FaultyBucket, store: DelayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It held the gate of firing meanwhile: nothing of the whole store fired."""
    topic, free = store.topic("t"), list[bool]()
    moved = topic.send(b"moved", deliver_after=5 * 3600)
    cancelled = topic.send(b"cancelled", deliver_after=7 * 3600, dedup_key="a")
    topic.send(b"of a key", deliver_after=9 * 3600, dedup_key="b", dedup_for=3600)
    assert settle(store) == 3

    def download(name: str, download: Any = bucket.download) -> Iterator[bytes] | None:
        def look() -> None:
            with store._engine.delivery.firing.gate.alone_at_once() as alone:
                free.append(alone)

        in_threads([look])
        pieces: Iterator[bytes] | None = download(name)
        return pieces

    monkeypatch.setattr(bucket, "download", download)
    monkeypatch.setattr(tiers_of(store), "_config", replace(CONFIG, max_local_bytes=1 << 40))  # none goes again
    with store.transaction() as transaction:
        transaction.reschedule("t", moved, deliver_after=2 * 3600)
        transaction.cancel("t", cancelled)
        transaction.cancel_key("t", "b")
    assert (len(free), all(free)) == (3, True)
    assert [message.payload for message in topic.scheduled()] == [b"moved"]


@pytest.mark.parametrize("by", ["cancel_key", "cancel_keys", "transaction"])
def test_cancelling_by_key_waits_for_the_bucket_without_the_lock_of_the_key(
    bucket: FaultyBucket, store: DelayedStore, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Who sent, cancelled or looked by that key, or one that shares its lock, waited for the day too."""
    topic = store.topic("t")
    topic.send(b"", deliver_after=9 * 3600, dedup_key="a", dedup_for=3600)
    assert settle(store) == 1
    meanwhile = list[bool]()

    def download(name: str, download: Any = bucket.download) -> Iterator[bytes] | None:
        if not meanwhile:
            send = {"payload": b"x", "deliver_after": 9 * 3600, "dedup_key": "a", "replace": True}
            other = threading.Thread(target=topic.send, kwargs=send)
            other.start()
            other.join(20)
            meanwhile.append(not other.is_alive())
        pieces: Iterator[bytes] | None = download(name)
        return pieces

    monkeypatch.setattr(bucket, "download", download)
    if by == "transaction":
        with store.transaction() as transaction:
            transaction.cancel_key("t", "a")
    elif by == "cancel_key":
        assert topic.cancel_key("a")
    else:
        assert topic.cancel_keys(["a"]) == ["a"]
    assert meanwhile == [True]
    assert topic.find("a") is None


def test_a_day_whose_bucket_is_down_is_late_and_not_lost(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket
) -> None:
    """Its upkeep says why; sends to it and other days go on, and it is fetched once the bucket is back."""
    store = filled(open_store)
    late = store.topic("t").send(b"late", deliver_after=5 * 3600)
    cancelled = store.topic("t").send(b"cancelled", deliver_after=5 * 3600)
    store.topic("t").send(b"now and then", deliver_after=3600)
    bucket.is_down = True
    result = passed(store, clock, 6)
    assert "fetch, partition" in reasons(result)
    assert "is down" in reasons(result)
    assert received(store) == [b"now and then"]
    assert store.topic("t").cancel(cancelled)  # nothing of the day has fired
    with pytest.raises(ReplicaUnreachable):
        store.topic("t").reschedule(late, deliver_after=1)
    assert [each.code for each in store.check() if each.code != "suspended"] == []
    bucket.is_down = False
    assert tick_after(store, clock, 60_000).suspended == ()
    assert received(store) == [b"first", b"late"]
    assert not store.topic("t").cancel(late)


def objects_of(store: DelayedStore) -> list[str]:
    """The objects of the days that are away."""
    partitions = store._engine.storage.partitions
    return [piece.name for each in partitions if each.away is not None for piece in each.away.pieces]


def test_a_damaged_object_is_named_and_what_is_appended_stays(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket
) -> None:
    """Once it is as it was, the day comes."""
    store = filled(open_store)
    name = objects_of(store)[0]
    content = present(bucket.get(name))
    bucket.put(name, content[:-1] + b"?")
    store.topic("t").send(b"more", deliver_after=5 * 3600)
    assert f"{name} does not match" in reasons(passed(store, clock, 6))
    bucket.delete([name])
    assert f"{name} is missing" in reasons(tick_after(store, clock, 60_000))
    bucket.put(name, content)
    tick_after(store, clock, 60_000)
    assert received(store) == [b"first", b"more"]


def test_a_day_does_not_go_whose_object_cannot_be_read_back(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket
) -> None:
    """What this machine has is then the only copy. It keeps no other day here."""
    store = open_store(config=replace(CONFIG, max_local_bytes=1 << 40))
    store.topic("t").subscribe("s").close()
    store.topic("t").send(b"first", deliver_after=5 * 3600)
    store.topic("t").send(b"second", deliver_after=4 * 3600)
    settle(store)
    name = max(each.name for each in bucket.listing("files") if "main" not in each.name)
    bucket.put(name, b"?")
    store.close()
    store = open_store(config=CONFIG)
    assert "give back" in reasons(store.tick())
    assert away(store) == [next(iter(store._engine.storage.partitions)).start_ms]
    passed(store, clock, 6)
    assert received(store) == [b"first", b"second"]
    store.close()  # what is damaged is a finding as long as it is there


def test_a_store_that_cannot_give_a_day_back_does_not_look_again_without_a_pause(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pauses after failures become longer than the time between two looks."""
    monkeypatch.setattr(tiers, "LOOK_MS", 10_000)
    store = open_store(config=CONFIG)
    store.topic("t").send(b"first", deliver_after=5 * 3600)
    applied(store)
    manifested(store)
    bucket.is_down = True
    for _ in range(20):
        due_ms = present(store.tick().next_due_ms)
        assert due_ms > clock.now_ms()
        clock.set(due_ms)
    assert tiers_of(store).failures > 5
    bucket.is_down = False
    tick_after(store, clock, 60_000)
    assert len(away(store)) == 1


def test_a_day_that_does_not_fit_the_disk_is_late_and_not_lost(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket
) -> None:
    """Nothing of the try is left."""
    store = filled(open_store)
    with patch("duelog.store.files.system_errors.free_bytes", lambda path: 1_000):
        assert "no space to fetch a day" in reasons(passed(store, clock, 6))
        assert not any((store.path / "staging").glob("fetch-*"))
    assert tick_after(store, clock, 60_000).suspended == ()
    assert received(store) == [b"first"]


def test_pruning_keeps_what_an_away_day_needs(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each later manifest names it; while one cannot be read, no file goes at all."""
    monkeypatch.setattr("duelog.replica.pruning.timedelta", lambda days: timedelta(0))  # as if a day had passed
    store = filled(open_store)
    needed = set(objects_of(store))
    for _ in range(5):
        clock.advance(1_000)
        store.topic("t").send(b"now")
        settle(store)
        prune(bucket, clock.now_ms() + 1, 0)
    assert len(bucket.manifests()) == 1
    assert needed <= {each.name for each in bucket.listing("files")}
    newest = manifest_name(bucket.manifests()[0])
    content = present(bucket.get(newest))
    bucket.put(manifest_name(1), content)
    bucket.put(newest, b"?")
    bucket.put("files/stray.mdb", b"")
    prune(bucket, clock.now_ms() + 1, 0)
    assert {*needed, "files/stray.mdb"} <= {each.name for each in bucket.listing("files")}
    bucket.put(newest, content)
    prune(bucket, clock.now_ms() + 1, 0)
    assert bucket.get("files/stray.mdb") is None
    passed(store, clock, 10)
    assert {b"first", b"second"} <= set(received(store))


def test_a_store_with_away_days_ships_to_no_other_prefix(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket, tmp_path: Path
) -> None:
    """Without a bound the days come back; then it may."""
    store = filled(open_store)
    store.close()
    other = Bucket((tmp_path / "other").as_uri())
    with pytest.raises(ReplicaRefused, match="days of this store are in memory:/// alone"):
        claim(other, store.path, store._engine.storage.store_id, DAY_MS)
    store = open_store(config=replace(CONFIG, max_local_bytes=None))
    assert store.tick().suspended == ()
    assert away(store) == []
    store.close()
    claim(other, store.path, store._engine.storage.store_id, DAY_MS)


def test_a_day_with_body_files_goes_and_comes_with_them(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were written before there was a bound; from then on the log has all bodies."""
    monkeypatch.setattr(write_batch, "LARGE_BYTES", 2_000)
    large = [b"%04d" % number * 100 for number in range(20)]
    store = open_store(config=replace(CONFIG, max_local_bytes=None))
    store.topic("t").subscribe("s").close()
    store.topic("t").send(b"0", deliver_after=5 * 3600)
    for _ in range(2):
        applied(store).topic("t").send_batch([Message(body, deliver_after=5 * 3600) for body in large])
    (bodies,) = (store.path / "partitions").rglob("*.bodies")
    with bodies.open("ab") as left:
        left.write(b"what a killed process left behind the last that is named")
    store.close()
    store = open_store(config=CONFIG)
    assert settle(store) == 1
    assert list((store.path / "partitions").rglob("*.bodies")) == []
    store.topic("t").send_batch([Message(body, deliver_after=5 * 3600) for body in large])
    settle(store)
    store.close()
    store = open_store(config=CONFIG)
    restored(bucket, store.path.with_name("restored"))
    passed(store, clock, 6)
    assert received(store) == sorted([b"0", *large, *large, *large])
    copy = open_store(store.path.with_name("restored"), replace(CONFIG, replica=None, max_local_bytes=None))
    passed(copy, clock, 1)
    assert received(copy) == sorted([b"0", *large, *large, *large])


def test_a_store_ten_times_its_disk_runs_through_all_its_days(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket
) -> None:
    """The days that are not away take no more than the bound, two days, and 64 KiB for each day that is."""
    days, messages, size = 40, 100, 4_000
    most = days * messages * size // 10
    store = open_store(config=replace(CONFIG, max_local_bytes=most, wal_bytes=1 << 20, preload_ms=DAY_MS // 4))
    topic, start_ms = store.topic("t"), clock.now_ms() - clock.now_ms() % DAY_MS
    topic.subscribe("s").close()
    peak = 0
    for day in range(2, days + 2):
        due_ms = start_ms + day * DAY_MS
        topic.send_batch([Message(b"%d " % n * size, deliver_at=due_ms + n * 1_000) for n in range(messages)])
        settle(store)
        peak = max(peak, tiers_of(store).local_bytes())
    whole = sum(each.disk_bytes + each.away_bytes for each in store.partitions())
    assert whole > 10 * most
    got: list[int] = []
    while clock.now_ms() < start_ms + (days + 2) * DAY_MS:
        assert tick_after(store, clock, DAY_MS // 4).suspended == ()
        with topic.subscribe("s") as reader:
            while found := reader.receive(1_000, timeout=0):
                assert all(message.due_ms <= clock.now_ms() for message in found)
                got += [message.due_ms for message in found]
                reader.ack(found, durable=True)
        peak = max(peak, tiers_of(store).local_bytes())
    assert sorted(got) == [start_ms + day * DAY_MS + n * 1_000 for day in range(2, days + 2) for n in range(messages)]
    assert tiers_of(store).fetched >= days - 6
    assert peak < most + 2 * whole // days + days * 65_536


def test_a_day_that_comes_to_be_read_and_goes_again_as_it_was_is_not_read_back(
    open_store: OpenStore, bucket: FaultyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetching it has shown that its object is whole; another object, of a day that was sent to, is read."""
    store, read = filled(open_store), list[str]()
    download = bucket.download

    def pieces(name: str) -> Iterator[bytes]:
        for piece in present(download(name)):
            read.append(name)
            yield piece

    monkeypatch.setattr(bucket, "download", pieces)
    for _ in range(2):
        assert [message.payload for message in store.topic("t").scheduled(limit=1)] == [b"first"]
        assert len(away(store)) == 1
        assert settle(store) == 2
    assert len(read) == 2
    assert len(set(read)) == 1
    store.topic("t").send(b"third", deliver_after=5 * 3600)
    assert len(list(store.topic("t").scheduled())) == 3
    assert settle(store) == 2
    assert len(set(read)) == 3


def test_a_restored_store_gives_its_days_back_to_its_new_prefix_and_moves_to_a_smaller_disk(
    open_store: OpenStore, clock: ManualClock, tmp_path: Path
) -> None:
    """The files of the prefix before are not needed then."""
    old, new = (tmp_path / "old").as_uri(), (tmp_path / "new").as_uri()
    store = filled(open_store, replace(CONFIG, replica=old))
    store.close()
    path = restored(Bucket(old), tmp_path / "restored").path
    claim(Bucket(new), path, store._engine.storage.store_id, DAY_MS)
    shutil.rmtree(tmp_path / "old")
    copy = open_store(path, replace(CONFIG, replica=new))
    assert away(copy) == []
    assert settle(copy) == 2
    copy.close()
    shutil.move(path, tmp_path / "smaller")
    copy = open_store(tmp_path / "smaller", replace(CONFIG, replica=new))
    assert len(away(copy)) == 2
    passed(copy, clock, 10)
    assert received(copy) == [b"first", b"second"]


def test_a_thread_fetches_and_gives_back_beside_the_upkeep(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket
) -> None:
    """The upkeep asks it, and hears of what failed with its next turn; closing the store breaks a fetch off."""
    store = filled(open_store)
    engine, woken = store._engine, threading.Event()
    engine.tiers = engine.upkeep.maintenance.tiers = threaded = Tiers(
        engine.storage, engine.clock, engine.shipping, engine.delivery.firing.loaded, woken.set, background=True
    )

    def ticks_until(wanted: Callable[[TickResult], bool]) -> None:
        """Tick whenever the thread has done something, until a tick says what is wanted."""
        for _ in range(60):
            woken.clear()
            if wanted(store.tick()):
                return
            woken.wait(1)
        raise TimeoutError

    clock.advance(5 * DAY_MS)
    bucket.is_down = True
    ticks_until(lambda result: "is down" in reasons(result))
    bucket.is_down = False
    clock.advance(60_000)
    ticks_until(lambda result: not result.suspended and threaded.fetched == 1)
    assert len(away(store)) == 1
    tick_after(store, clock, DAY_MS)
    with store.topic("t").subscribe("s") as reader:  # the day is over, and may have gone again before there was one
        first: list[ReceivedMessage] = []

        def receives(_: TickResult) -> bool:
            first.extend(reader.receive(timeout=0))
            return bool(first)

        ticks_until(receives)
        assert [message.payload for message in first] == [b"first"]
        reader.ack(first)
    store.topic("t").send(b"third", deliver_after=9 * 3600)
    settle(store)
    ticks_until(lambda result: len(away(store)) >= 2)  # the day that is over, too, or it went before
    reached, goes_on = threading.Event(), threading.Event()

    def slow(name: str) -> Iterator[bytes]:
        for _ in range(2):
            reached.set()
            assert goes_on.wait(60)
            yield b"?"

    bucket.download = slow  # type: ignore[method-assign]
    tick_after(store, clock, 5 * DAY_MS)
    assert reached.wait(60)
    closing = threading.Thread(target=store.close)
    closing.start()
    while not threaded._closing:
        reached.wait(0.01)
    goes_on.set()
    closing.join(60)
    assert store.closed
    del bucket.download
    store = open_store(config=CONFIG)
    passed(store, clock, 6)
    assert received(store) == [b"second", b"third"]


def test_a_day_goes_though_it_grows_all_the_time(clock: ManualClock, bucket: FaultyBucket, store: DelayedStore) -> None:
    """What was applied since its file was made stays in the rest, of new topics too."""
    store.topic("t").send(b"first", deliver_after=5 * 3600)
    for number in range(4):
        applied(store)
        manifested(store)
        for name in ("t", f"new {number}"):
            store.topic(name).send(b"%d" % number, deliver_after=5 * 3600)
        applied(store).tick()
        assert len(away(store)) == 1
    assert tiers_of(store).given_back == 4
    (partition,) = store._engine.storage.partitions
    assert len(present(partition.away).pieces) == 4
    found = {message.payload for message in store.topic("t").scheduled()}
    assert found == {b"first", *(b"%d" % number for number in range(4))}
    assert [message.payload for message in store.topic("new 2").scheduled()] == [b"2"]
    assert list(store.check(deep=True)) == []


def test_senders_meet_a_day_that_goes_and_comes(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket
) -> None:
    """Sends, checkpoints and cancels of other threads go to whichever directory counts, and none is lost."""
    store = open_store(config=replace(CONFIG, wal_bytes=16 << 10))
    topic = store.topic("t")
    topic.subscribe("s").close()
    topic.send(b"first", deliver_after=5 * 3600)
    settle(store)
    ended = threading.Event()
    wanted, errors = [{b"first"}, set[bytes](), set[bytes]()], list[Exception]()

    def send(number: int) -> None:
        try:
            for n in range(100_000):
                if ended.is_set():
                    break
                message_id = topic.send(b"%d %d" % (number, n), deliver_after=5 * 3600)
                if n % 5 or not topic.cancel(message_id):
                    wanted[number].add(b"%d %d" % (number, n))
        except Exception as error:
            errors.append(error)

    senders = [threading.Thread(target=send, args=(number,)) for number in (1, 2)]
    for sender in senders:
        sender.start()
    (partition,) = store._engine.storage.partitions
    for _ in range(12):
        settle(store)
        store._engine.storage.partitions.at_hand(partition)
    ended.set()
    for sender in senders:
        sender.join(60)
    assert errors == []
    assert tiers_of(store).fetched > 3
    passed(store, clock, 6)
    assert received(store) == sorted(set().union(*wanted))


def test_other_processes_are_told_what_is_away(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket, tmp_path: Path
) -> None:
    """Figures and checks have what is here; what needs the messages names the copy, which has them."""
    store = filled(open_store)
    store.topic("t").send(b"more", deliver_after=5 * 3600)
    backup = tmp_path / "backup"
    store.backup(backup)
    assert store.stats().away_partitions == 2
    store.close()
    there = json_lines_of("partitions", store.path)
    assert [(row["messages"], row["pending"]) for row in there] == [(2, 2), (1, 1)]
    assert all(row["away_bytes"] > 0 for row in there)
    assert json_of("stats", store.path)["away_partitions"] == 2
    assert ok("check", store.path, "--deep").count("alone") == 0  # it is said to who watches
    assert "memory:/// alone, and were not read there: 2" in run("check", store.path).stderr
    for command in (["audit", store.path], ["table", store.path, "pending", "-o", tmp_path / "pending.parquet"]):
        assert "is in memory:/// alone: give that in place of the store" in run(*command).stderr
    assert "is away, in memory:///" in run("scheduled", store.path, "t").stderr
    with DelayedStore.open(backup, StoreConfig(partition_ms=DAY_MS), clock=clock) as copy:
        assert {message.payload for message in copy.topic("t").scheduled()} == {b"first", b"second", b"more"}


@contextmanager
def looking(store: DelayedStore) -> Iterator[Callable[[], str]]:
    """Another process that has the store open to read, and says how many messages each day has."""
    code = """if True:
        import sys
        from duelog import DelayedStore, StoreConfig
        with DelayedStore.open(sys.argv[1], StoreConfig(partition_ms=3_600_000), read_only=True) as store:
            for _ in sys.stdin:
                print([row.messages for row in store.partitions()], flush=True)
    """
    command = [sys.executable, "-c", code, str(store.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:

        def seen() -> str:
            print(file=present(reader.stdin), flush=True)
            return present(reader.stdout).readline().strip()

        yield seen
        present(reader.stdin).close()


def test_a_read_only_store_follows_a_day_that_goes(
    clock: ManualClock, bucket: FaultyBucket, store: DelayedStore
) -> None:
    """It sees what is appended to the rest, once that is applied and the log has forgotten it, too."""
    store.topic("t").send(b"first", deliver_after=5 * 3600)
    with looking(applied(store)) as seen:
        assert seen() == "[1]"
        assert settle(store) == 1
        store.topic("t").send(b"second", deliver_after=5 * 3600)
        assert seen() == "[2]"
        for _ in range(3):
            settle(store)
            store.topic("t").send(b"more", deliver_after=5 * 3600)
        assert seen() == "[5]"
        tick_after(store, clock, 5 * DAY_MS)
        assert away(store) == []
        assert seen() == "[5]"


def gone_and_back(store: DelayedStore) -> None:
    """Have the day go, and come into a directory of the same name with one more message, which is applied."""
    assert settle(store) == 1
    store.topic("t").send(b"meanwhile", deliver_after=5 * 3600)
    assert list(store.topic("t").scheduled())  # which fetches it
    assert away(store) == []
    applied(store)


def test_a_read_only_store_sees_a_day_that_went_and_came_between_two_looks(
    clock: ManualClock, bucket: FaultyBucket, store: DelayedStore
) -> None:
    """Its directory has the name of before, and is another."""
    store.topic("t").send(b"first", deliver_after=5 * 3600)
    with looking(applied(store)) as seen:
        assert seen() == "[1]"
        gone_and_back(store)
        assert seen() == "[2]"
        gone_and_back(store)
        assert seen() == "[3]"


def test_a_check_looks_again_at_a_day_that_went_and_came_as_it_was_read(
    clock: ManualClock, bucket: FaultyBucket, store: DelayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory of before lacks what was sent meanwhile, and so does the log: entries seemed to be lost."""
    message_id = store.topic("t").send(b"first", deliver_after=5 * 3600)
    manifested(applied(store))
    seen: list[list[int]] = []

    def meanwhile() -> None:
        tiers_of(store).make_room()
        seen.append(away(store))
        assert store.topic("t").reschedule(message_id, deliver_after=5 * 3600)
        seen.append(away(store))
        applied(store)

    def check_pages(environment: Environment) -> Iterator[Finding]:
        if environment is not store._engine.storage.main and not seen:
            in_threads([meanwhile])
        return iter(())

    monkeypatch.setattr(check_store, "check_pages", check_pages)
    assert list(store.check(deep=True)) == []
    assert list(map(len, seen)) == [1, 0]


def test_a_backup_by_another_process_has_a_day_that_went_and_came_before_its_instant(
    clock: ManualClock, bucket: FaultyBucket, store: DelayedStore, tmp_path: Path
) -> None:
    """The backup held the directory that had its name before, and what was sent meanwhile was in neither."""
    store.topic("t").subscribe("s").close()
    store.topic("t").send(b"first", deliver_after=5 * 3600)
    other = OtherProcess(applied(store), replace(CONFIG, replica=None, max_local_bytes=None))
    places = iter((BEFORE,))
    other.back_up(lambda place: gone_and_back(store) if place == next(places, None) else None, tmp_path / "copy")
    other.close()
    with DelayedStore.open(tmp_path / "copy", StoreConfig(partition_ms=DAY_MS), clock=clock) as copy:
        assert [message.payload for message in copy.topic("t").scheduled()] == [b"first", b"meanwhile"]


def test_no_day_goes_while_the_store_is_copied(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket, tmp_path: Path
) -> None:
    """One that went and came would be held a second time under its name, and keep the store from being closed."""
    store = filled(open_store)
    topic = store.topic("t")
    assert len(list(topic.scheduled())) == 2  # which fetches both days
    topic.send(b"more", deliver_after=9 * 3600)
    applied(store)
    given_back = tiers_of(store).given_back

    def said(place: str) -> None:
        if place == COPY:
            tiers_of(store).make_room()
            assert len(list(topic.scheduled())) == 3

    with saying_where(store._engine, said):
        store.backup(tmp_path / "copy")
    assert tiers_of(store).given_back == given_back
    tiers_of(store).make_room()
    assert len(away(store)) == 2
    assert all(partition.leases == 0 for partition in store._engine.storage.partitions)
    with DelayedStore.open(tmp_path / "copy", StoreConfig(partition_ms=DAY_MS), clock=clock) as copy:
        assert len(list(copy.topic("t").scheduled())) == 3


def test_a_standby_takes_over_from_a_store_with_away_days(
    open_store: OpenStore, clock: ManualClock, bucket: FaultyBucket, tmp_path: Path
) -> None:
    """It has all days whole, and gives back what it cannot hold once it leads; what was not shipped is set aside."""
    elapsed = [1_000.0]
    with patch("duelog.replica.shipping.since_boot_s", lambda: elapsed[0]):
        config = replace(CONFIG, lease_ms=10_000)
        store = filled(open_store, config)
        follower = Standby(
            tmp_path / "two", bucket, lease_ms=10_000, address="pulsar://two", elapsed=lambda: elapsed[0]
        )
        assert not follower.begin()
        store.topic("t").send(b"more", deliver_after=5 * 3600)
        settle(store)
        assert not follower.step()
        told = store.topic("t").send(b"not shipped", deliver_after=9 * 3600)
        elapsed[0] += 10.1
        assert follower.step()
        bucket.is_down = True
        store.close()
        bucket.is_down = False
        second = open_store(tmp_path / "two", config)
        assert away(second) == []
        ship(second)
        assert settle(second) == 2
        passed(second, clock, 10)
        assert received(second) == [b"first", b"more", b"second"]
        assert not Standby(store.path, bucket, lease_ms=10_000).begin()
        assert [each.message_id for each in read_aside(store.path)[1]] == [str(told)]


AWAY_POINTS = [point for point in failpoints.POINTS if point.startswith("away.")]


@pytest.mark.parametrize("point", AWAY_POINTS)
@pytest.mark.parametrize("again", [False, True], ids=["whole", "away already"])
def test_a_crash_as_a_day_goes_or_comes_loses_nothing(
    point: str, again: bool, clock: ManualClock, bucket: FaultyBucket, store: DelayedStore, topic: Topic, disarmed: None
) -> None:
    """What lies on the disk at each point, with what was sent right before, opens and has each message once."""
    topic.subscribe("s").close()
    ids = topic.send_batch([Message(b"1%03d" % n, deliver_after=5 * 3600 + n) for n in range(50)])
    assert topic.cancel(ids[0])
    left: list[Path] = []
    if again:
        settle(store)
        topic.send_batch([Message(b"2%03d" % n, deliver_after=5 * 3600 + n) for n in range(50)])
    failpoints.arm(point, lambda: left.append(crashed(store, store.path.with_name(f"left {len(left)}"))))
    settle(store)
    topic.send(b"3", deliver_after=5 * 3600)
    passed(store, clock, 5)
    failpoints.disarm()
    bucket.is_down = True
    store.close()
    bucket.is_down = False
    wanted = [b"1%03d" % n for n in range(1, 50)] + again * [b"2%03d" % n for n in range(50)]
    assert left
    for number, path in enumerate(left):
        copy = replace(CONFIG, replica=None, max_local_bytes=None)
        with DelayedStore.open(path, copy, clock=clock) as opened:
            assert list(opened.check(deep=True)) == []
            assert len(list((path / "partitions").glob("*/*/data.mdb"))) == 1
            passed(opened, clock, 6)
            assert received(opened) in (wanted, sorted([*wanted, b"3"])), number
