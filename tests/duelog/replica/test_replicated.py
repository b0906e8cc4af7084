"""Changes that are told once they are in the copy: by the store's durability, by policy, and never by mistake."""

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from duelog import DelayedStore, ManualClock, Message, StoreConfig, SystemClock
from duelog.errors import ClosedError, InvalidArgument, NotReplicated, StoreFull
from duelog.replica.bucket import FILES, Listed
from duelog.replica.identity import Shipped
from duelog.replica.log_object import unpack
from duelog.replica.manifest import Manifest
from duelog.replica.manifest_files import ManifestFiles
from duelog.replica.shipping import Draft, Shipping
from tests.conftest import OpenStore, in_threads, present, raising
from tests.duelog.replica.faulty import URL, FaultyBucket, manifested, restored, ship, shipping_of

REPLICATED = StoreConfig(replica=URL, durability="replicated", replicated_timeout_ms=200)
LOCAL = StoreConfig(replica=URL, replicated_timeout_ms=200)
DAY_S = 86_400


def in_copy(bucket: FaultyBucket) -> int:
    """The place up to which the copy has all groups."""
    numbers = bucket.numbers()
    return unpack(URL, "", present(bucket.read(numbers[-1])))[0].end if numbers else 0


def written(store: DelayedStore) -> int:
    """The place up to which the store has written."""
    return shipping_of(store)._the_source().next_place()


def in_transaction(store: DelayedStore) -> None:
    """Send by a transaction."""
    with store.transaction() as transaction:
        transaction.send("a", b"", deliver_after=DAY_S)
        transaction.put_document("d", b"")


def received_and_acknowledged(store: DelayedStore) -> None:
    """Acknowledge a message durably."""
    store.topic("a").send(b"")
    with store.topic("a").subscribe("s") as consumer:
        consumer.ack(consumer.receive(1, timeout=0), durable=True)


def cancelled(store: DelayedStore) -> None:
    """Take a message back."""
    assert store.topic("a").cancel(store.topic("a").send(b"", deliver_after=DAY_S))


CHANGES: list[Callable[[DelayedStore], Any]] = [
    lambda store: store.topic("a").send(b"", deliver_after=DAY_S),
    lambda store: store.topic("a").send(b"", deliver_after=DAY_S, dedup_key="k", replace=True),
    lambda store: store.topic("a").send_async(b"").result(30),
    lambda store: store.topic("a").send_batch([Message(b"", deliver_after=DAY_S)] * 3),
    lambda store: store.topic("a").send_payloads([b""] * 3, deliver_after=DAY_S),
    lambda store: store.topic("a").producer("p").send(Message(b"")),
    lambda store: store.send_batch([("a", Message(b"")), ("b", Message(b""))]),
    lambda store: store.topic(f"c{written(store)}").create(),
    lambda store: store.topic("a").every(f"hour{written(store)}", interval=3_600),
    lambda store: store.documents.put("d", b""),
    lambda store: store.update_policies(topic="a", ttl_ms=1_000),
    received_and_acknowledged,
    cancelled,
    in_transaction,
]


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_a_change_is_told_once_the_copy_has_it(number: int, bucket: FaultyBucket, open_store: OpenStore) -> None:
    """Whatever call makes it; and where the bucket is down it is said that the copy may lack it."""
    store = open_store(config=REPLICATED)
    CHANGES[number](store)
    assert in_copy(bucket) == written(store)
    bucket.is_down = True
    with pytest.raises(NotReplicated, match="is down"):
        CHANGES[number](store)
    bucket.is_down = False
    ship(store)
    assert in_copy(bucket) == written(store)


def test_a_policy_says_which_topics_wait_for_the_copy(bucket: FaultyBucket, open_store: OpenStore) -> None:
    """The narrowest scope that sets it; without one the store's durability."""
    store = open_store(config=LOCAL)
    store.update_policies(namespace="public/money", replicated=True)
    store.update_policies(topic="public/money/log", replicated=False)
    ship(store)
    store.topic("a").send(b"")
    store.topic("public/money/log").send(b"")
    assert in_copy(bucket) < written(store)
    store.topic("public/money/orders").send(b"")
    assert in_copy(bucket) == written(store)
    bucket.is_down = True
    store.topic("a").send(b"")
    store.send_batch([("a", Message(b"")), ("public/money/log", Message(b""))])
    with pytest.raises(NotReplicated):
        store.send_batch([("a", Message(b"")), ("public/money/orders", Message(b""))])
    with pytest.raises(NotReplicated):
        store.topic("public/money/orders").send_async(b"").result(30)
    with pytest.raises(NotReplicated), store.transaction() as transaction:
        transaction.send("public/money/orders", b"")
    assert store.topic("a").send_async(b"").result(30)


def test_a_topic_of_a_replicated_store_may_be_left_out(bucket: FaultyBucket, open_store: OpenStore) -> None:
    """By a policy that says so."""
    store = open_store(config=REPLICATED)
    store.update_policies(topic="a", replicated=False)
    bucket.is_down = True
    store.topic("a").send(b"")
    with pytest.raises(NotReplicated):
        store.topic("b").send(b"")


def test_a_store_without_its_copy_tells_no_replicated_change(
    bucket: FaultyBucket, tmp_path: Path, clock: ManualClock
) -> None:
    """A program that opens it without `replica` is told, not silently given less."""
    with pytest.raises(InvalidArgument, match="needs `replica`"):
        StoreConfig(durability="replicated")
    with DelayedStore.open(tmp_path / "store", LOCAL, clock=clock) as store:
        store.update_policies(topic="a", replicated=True)
    with DelayedStore.open(tmp_path / "store", clock=clock) as store:
        store.topic("b").send(b"")
        with pytest.raises(NotReplicated, match="open without `replica`"):
            store.topic("a").send(b"")


@pytest.mark.parametrize("is_full", [False, True])
def test_nothing_is_told_as_replicated_before_it_can_be_restored(
    bucket: FaultyBucket, open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """The log alone is no copy: at its beginning, and behind a gap of it, there has to be a manifest.

    An opening that came after the gap did not know of it, and told sends for up to an hour; nor, where the disk was
    full as the gap was noted, did one that came after the note.
    """
    store = open_store(config=REPLICATED)
    shipping = shipping_of(store)
    drafts, shipping._manifests = shipping._manifests, None
    with pytest.raises(NotReplicated):
        store.topic("a").send(b"1", deliver_after=DAY_S)
    shipping._manifests = drafts
    store.topic("a").send(b"2", deliver_after=DAY_S)
    restored(bucket, tmp_path / "restored")
    with DelayedStore.open(tmp_path / "restored", clock=store.clock) as again:
        assert again.stats().pending == 2
    shipping._manifests = None
    shipping.kept.lost = True  # as where the bucket was down for so long that the log was given up
    write, failures = Shipped.write, [StoreFull(store.path, "no space")] * is_full

    def fails_once(shipped: Shipped, path: Path) -> None:
        if shipped.gap and failures:
            raise failures.pop()
        write(shipped, path)

    monkeypatch.setattr(Shipped, "write", fails_once)
    with pytest.raises(NotReplicated):
        store.topic("a").send(b"3", deliver_after=DAY_S)
    store.close()  # before there is a manifest; the next opening has to know
    store = open_store(config=REPLICATED)
    shipping = shipping_of(store)
    drafts, shipping._manifests = shipping._manifests, None
    with pytest.raises(NotReplicated):
        store.topic("a").send(b"4", deliver_after=DAY_S)
    shipping._manifests = drafts
    store.topic("a").send(b"5", deliver_after=DAY_S)
    restored(bucket, tmp_path / "behind")
    with DelayedStore.open(tmp_path / "behind", clock=store.clock) as again:
        assert again.stats().pending == 5


def test_firing_does_not_wait_for_the_copy(bucket: FaultyBucket, open_store: OpenStore, clock: ManualClock) -> None:
    """While the bucket is down messages are delivered on time, and acknowledged in memory."""
    store = open_store(config=REPLICATED)
    store.topic("a").send(b"x", deliver_after=1)
    with store.topic("a").subscribe("s") as consumer:
        bucket.is_down = True
        clock.advance(2_000)
        (message,) = consumer.receive(1, timeout=0)
        assert consumer.ack(message) == 1
    bucket.is_down = False
    assert in_copy(bucket) < written(store)


class Waits:
    """Counts the threads that have begun to wait for the copy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._begun, wait_for = threading.Semaphore(0), Shipping.wait_for

        def counted(shipping: Shipping, place: int) -> None:
            self._begun.release()
            wait_for(shipping, place)

        monkeypatch.setattr(Shipping, "wait_for", counted)

    def until(self, count: int) -> None:
        """Until so many more have."""
        for _ in range(count):
            assert self._begun.acquire(timeout=60)


def test_many_threads_wait_for_one_put(bucket: FaultyBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an object is put the groups of all others gather for the next one."""
    config = StoreConfig(replica=URL, durability="replicated", ship_ms=60_000)
    sent, waits = 40, Waits(monkeypatch)
    with DelayedStore.open(tmp_path / "store", config, clock=SystemClock()) as store:
        store.topic("a").send(b"")
        waits.until(1)
        first = bucket.creations

        def gathering(name: str) -> None:
            bucket.before_creation = lambda name: None
            waits.until(sent)

        bucket.before_creation = gathering
        in_threads([lambda: store.topic("a").send(b"", deliver_after=DAY_S)] * sent)
        assert in_copy(bucket) >= written(store)
        assert bucket.creations - first <= 2
    restored(bucket, tmp_path / "restored")
    with DelayedStore.open(tmp_path / "restored") as again:
        assert again.stats().pending == sent


def test_those_that_a_put_told_come_again_with_the_next_one(
    bucket: FaultyBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for them as long as a part of a put takes. Before, two halves of all callers took turns."""
    monkeypatch.setattr("duelog.replica.shipping._GATHER", 10.0)
    config = StoreConfig(replica=URL, durability="replicated", ship_ms=60_000)
    threads, sends, never, waits = 6, 3, threading.Event(), Waits(monkeypatch)
    with DelayedStore.open(tmp_path / "store", config, clock=SystemClock()) as store:
        store.topic("a").send(b"")
        waits.until(1)
        first = bucket.creations

        def slow(name: str) -> None:
            if bucket.creations == first:
                waits.until(threads)
            never.wait(0.2)

        bucket.before_creation = slow

        def send() -> None:
            for _ in range(sends):
                store.topic("a").send(b"", deliver_after=DAY_S)

        in_threads([send] * threads)
        assert bucket.creations - first <= sends + 1


def test_who_waits_for_the_first_manifest_keeps_no_thread_busy(
    bucket: FaultyBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the thread that ships looked again and again until the manifest was made."""
    looks, many, made = itertools.count(), threading.Event(), threading.Event()
    step, draft = Shipping.step, ManifestFiles.draft

    def counted(shipping: Shipping) -> None:
        if next(looks) > 20:
            many.set()
        step(shipping)

    def late(files: ManifestFiles, before: Manifest | None) -> Draft | None:
        made.wait()
        return draft(files, before)

    monkeypatch.setattr(Shipping, "step", counted)
    monkeypatch.setattr(ManifestFiles, "draft", late)
    config = StoreConfig(replica=URL, durability="replicated", ship_ms=60_000)
    with DelayedStore.open(tmp_path / "store", config, clock=SystemClock()) as store:
        sent = store.topic("a").send_async(b"")
        is_busy = many.wait(0.3)
        made.set()
        sent.result(30)
        assert not is_busy


def test_an_error_that_was_not_foreseen_ends_shipping_and_is_told(bucket: FaultyBucket, tmp_path: Path) -> None:
    """Who waits for the copy need not wait for as long as it may take."""
    config = StoreConfig(replica=URL, durability="replicated")
    with DelayedStore.open(tmp_path / "store", config, clock=SystemClock()) as store:
        failing = patch.object(Shipping, "_ship", raising(RuntimeError("says the test")))
        with failing, pytest.raises(NotReplicated, match="shipping has failed: RuntimeError"):
            store.topic("a").send(b"x")
        assert shipping_of(store).state().ended


def test_nobody_waits_for_pruning(bucket: FaultyBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lists all objects, a minute where there are many. Before, nothing was shipped meanwhile, and the lease passed.

    A close breaks it off.
    """
    prunes, goes_on, listing = threading.Event(), threading.Event(), bucket.listing

    def slowly(folder: str, offset: str | None = None) -> list[Listed]:
        if folder == FILES:  # which pruning alone lists
            prunes.set()
            goes_on.wait()
        return listing(folder, offset)

    monkeypatch.setattr(bucket, "listing", slowly)
    config = StoreConfig(replica=URL, durability="replicated", ship_ms=10)
    with DelayedStore.open(tmp_path / "store", config, clock=SystemClock()) as store:
        store.topic("a").send(b"", deliver_after=DAY_S)
        prunes.wait()
        try:
            store.topic("a").send(b"", deliver_after=DAY_S)
        finally:
            goes_on.set()
        shipping = shipping_of(store)
    with pytest.raises(ClosedError):
        present(shipping._manifests).prune(present(shipping.manifest), 1 << 60)
    assert bucket.listing(FILES)


@pytest.mark.usefixtures("bucket")
def test_a_call_that_changes_nothing_in_a_store_that_was_opened_again_need_not_wait(open_store: OpenStore) -> None:
    """Its log goes on in the next segment. Before, the call ended with NotReplicated, after replicated_timeout_ms."""
    store = open_store(config=REPLICATED)
    message_id = store.topic("a").send(b"", deliver_after=DAY_S)
    assert store.topic("a").cancel(message_id)
    manifested(store)
    for _ in range(3):
        store.close()
        store = open_store(config=REPLICATED)
        assert store.topic("a").cancel(message_id)
