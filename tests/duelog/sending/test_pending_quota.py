"""A quota of pending messages: what would go over it is refused whole, whatever way it comes."""

import threading
from concurrent.futures import Future

import pytest

from duelog import DelayedStore, ManualClock, Message, MessageId, Policies, StoreConfig
from duelog.errors import InvalidArgument, QuotaExceeded
from duelog.store.policy.pending_quotas import PendingQuotas
from tests.conftest import OpenStore, in_threads, tick_after

FACES = True

LATER = 10.0


def limited(store: DelayedStore, limit: int, topic: str | None = "t") -> None:
    """A topic, or the store, that may have so many messages pending."""
    store.set_policies(Policies(max_pending=limit), topic=topic)


def pending(store: DelayedStore, topic: str = "t") -> int:
    """The count that the figures give."""
    return store.topic(topic).stats().pending


def test_a_send_over_the_quota_is_refused_with_what_is_pending_and_where_it_is_set(store: DelayedStore) -> None:
    """A message that is due at once is not pending, and is taken."""
    limited(store, 2)
    topic = store.topic("t")
    for _ in range(2):
        topic.send(b"x", deliver_after=LATER)
    with pytest.raises(QuotaExceeded, match=r"2 messages are pending.*max_pending=2 set on topic t") as caught:
        topic.send(b"x", deliver_after=LATER)
    assert (caught.value.count, caught.value.pending, caught.value.limit) == (1, 2, 2)
    topic.send(b"now")
    assert pending(store) == 2


def test_a_batch_that_does_not_fit_as_a_whole_is_not_stored_at_all(store: DelayedStore) -> None:
    """However it is sent; what fits exactly is stored."""
    limited(store, 3)
    topic = store.topic("t")
    for send in (
        lambda count: topic.send_batch([Message(b"x", deliver_after=LATER)] * count),
        lambda count: topic.send_payloads([b"x"] * count, deliver_after=LATER),
        lambda count: topic.producer("p").send_batch([Message(b"x", deliver_after=LATER)] * count),
    ):
        with pytest.raises(QuotaExceeded):
            send(4)
        assert pending(store) == 0
        topic.send_batch([Message(b"x", deliver_after=LATER), Message(b"due")])
        with pytest.raises(QuotaExceeded):
            send(3)
        ids = send(2)
        assert pending(store) == 3
        topic.cancel_batch([each for each in ids if each is not None])
        topic.cancel_batch([message.message_id for message in topic.scheduled()])
        assert pending(store) == 0


def test_a_batch_larger_than_a_group_is_refused_whole_too(open_store: OpenStore) -> None:
    """It would be several groups of the write-ahead log."""
    store = open_store(config=StoreConfig(wal_bytes=16 * 1024, max_message_bytes=8 * 1024))
    limited(store, 99)
    messages = [Message(bytes(7_000), deliver_after=LATER)] * 100
    with pytest.raises(QuotaExceeded):
        store.topic("t").send_batch(messages)
    assert not store.topic("t").exists() or pending(store) == 0
    assert len(store.topic("t").send_batch(messages[1:])) == 99


def test_an_atomic_group_is_refused_if_one_of_its_topics_is_full(store: DelayedStore) -> None:
    """Nothing of it is stored in the others; one quota of the store counts for each topic by itself."""
    limited(store, 2, None)
    store.topic("full").send_batch([Message(b"x", deliver_after=LATER)] * 2)
    group = [("t", Message(b"x", deliver_after=LATER)), ("full", Message(b"x", deliver_after=LATER))]
    with pytest.raises(QuotaExceeded, match="full"):
        store.send_batch(group)
    assert pending(store) == 0
    store.send_batch([group[0], group[0], ("full", Message(b"now"))])
    assert (pending(store), pending(store, "full")) == (2, 2)


def test_of_what_is_put_together_so_many_are_stored_as_have_place(open_store: OpenStore) -> None:
    """The first; the others hear why not, and no other topic's are concerned."""
    store = open_store()
    limited(store, 3)
    release, held = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        held.set()
        release.wait(10)

    store.topic("other").put(b"first", done=hold)
    held.wait(10)  # the thread that writes is busy, so that what follows is one group
    futures: list[Future[MessageId]] = []
    for number in range(6):
        futures.append(store.topic("t").send_async(b"%d" % number, deliver_after=LATER))
        futures.append(store.topic("other").send_async(b"x", deliver_after=LATER))
    release.set()
    errors = [future.exception(10) for future in futures]
    assert [isinstance(error, QuotaExceeded) for error in errors[::2]] == [False] * 3 + [True] * 3
    assert errors[1::2] == [None] * 6
    assert [message.payload for message in store.topic("t").scheduled()] == [b"0", b"1", b"2"]


def test_retries_letters_and_occurrences_count_and_are_not_refused(store: DelayedStore) -> None:
    """Messages in the store already are not lost for a quota."""
    limited(store, 3)
    store.update_policies(topic="t", max_redeliveries=0)
    topic = store.topic("t")
    topic.send_batch([Message(b"retry"), Message(b"dead")])
    topic.send(b"x", deliver_after=LATER)
    with topic.subscribe("s") as consumer:
        retry, dead = consumer.receive(2)
        consumer.retry_later(retry, LATER)
        consumer.nack(dead, delay=0)
        assert consumer.receive() == []
    topic.every("hour", interval=3_600)
    assert store.requeue_dead_letters(list(store.dead_letters()), delay=LATER) == 1
    assert pending(store) == 4
    with pytest.raises(QuotaExceeded, match="4 messages are pending"):
        topic.send(b"x", deliver_after=LATER)


def test_what_waits_inline_from_before_short_delays_were_switched_off_makes_place_when_it_is_due(
    open_store: OpenStore, clock: ManualClock
) -> None:
    """A quota counted it for good, until something else fired or was cancelled."""
    store = open_store(config=StoreConfig(inline_delay_ms=5_000))
    store.topic("t").send(b"x", deliver_after=1)
    store.close()
    store = open_store(config=StoreConfig(inline_delay_ms=0))
    limited(store, 1)
    with pytest.raises(QuotaExceeded):
        store.topic("t").send(b"x", deliver_after=LATER)
    clock.advance(1_000)
    store.topic("t").send(b"x", deliver_after=LATER)
    assert pending(store) == 1


def test_a_quota_set_lowered_and_removed_counts_at_once(open_store: OpenStore) -> None:
    """Also what was sent while there was none, and what was there at opening."""
    store = open_store()
    topic = store.topic("t")
    topic.send_batch([Message(b"x", deliver_after=LATER)] * 5)
    limited(store, 5)
    with pytest.raises(QuotaExceeded, match="5 messages"):
        topic.send(b"x", deliver_after=LATER)
    limited(store, 0)
    topic.send(b"x", deliver_after=LATER)
    limited(store, 7, None)
    store.remove_policies(topic="t")
    topic.send(b"x", deliver_after=LATER)
    store.close()
    store = open_store()
    with pytest.raises(QuotaExceeded, match=r"7 messages are pending.*set on store"):
        store.topic("t").send(b"x", deliver_after=LATER)
    store.update_policies(max_pending=2)
    with pytest.raises(QuotaExceeded, match="7 messages"):
        store.topic("t").send(b"x", deliver_after=LATER)


@pytest.mark.parametrize("event", ["cancelled", "fired"])
def test_what_goes_as_a_topic_is_first_counted_makes_place(
    store: DelayedStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    """No bound was there yet to be marked as too high: sends were refused by it until something else went."""
    topic = store.topic("t")
    ids = [topic.send(b"x", deliver_after=LATER) for _ in range(2)]
    limited(store, 2)
    (quotas,) = (each for each in store._engine.storage.listeners if isinstance(each, PendingQuotas))
    count = quotas._count

    def counting(topic_id: int) -> tuple[int, int]:
        counted = count(topic_id)
        if event == "cancelled":
            topic.cancel(ids[0])
        else:
            tick_after(store, clock, 11_000)
        return counted

    with monkeypatch.context() as patch:
        patch.setattr(quotas, "_count", counting)
        with pytest.raises(QuotaExceeded):
            topic.send(b"x", deliver_after=LATER)
    topic.send(b"x", deliver_after=LATER)


def test_threads_fill_a_topic_to_its_quota_and_not_over_it(open_store: OpenStore) -> None:
    """Every message that has place is taken."""
    store = open_store()
    limited(store, 100)
    refused: list[int] = []

    def send() -> None:
        count = 0
        for _ in range(20):
            try:
                store.topic("t").send_batch([Message(b"x", deliver_after=LATER)] * 3)
            except QuotaExceeded:
                count += 1
        refused.append(count)

    in_threads([send] * 4)
    assert (pending(store), sum(refused)) == (99, 80 - 33)


def test_a_quota_is_of_topics_not_of_subscriptions(store: DelayedStore) -> None:
    """A subscription has no messages of its own."""
    with pytest.raises(InvalidArgument, match="max_pending"):
        store.set_policies(Policies(max_pending=1), topic="t", subscription="s")


def test_a_key_that_is_replaced_needs_no_place(store: DelayedStore) -> None:
    """Its message goes; another key is refused."""
    limited(store, 1)
    topic = store.topic("t")
    topic.send(b"old", deliver_after=LATER, dedup_key="k")
    topic.send(b"new", deliver_after=LATER, dedup_key="k", replace=True)
    with pytest.raises(QuotaExceeded):
        topic.send(b"x", deliver_after=LATER, dedup_key="another")
    assert [message.payload for message in topic.scheduled()] == [b"new"]
