"""Taking back races with firing: each message is delivered once or taken back once, and the answers say which.

Threads meet at failpoints and barriers; after that any of them may be first, and every order is allowed as long as
answers and deliveries agree.
"""

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from duelog import DelayedStore, ManualClock, Message, MessageId, Outcome, StoreConfig, Topic
from duelog.markers.lookup import find_partition
from duelog.store.config import Durability
from duelog.store.env.transaction import Transaction
from duelog.store.log.ledger import applied_tail
from tests.conftest import OpenStore, tick_after
from tests.duelog.store_state import payloads
from tests.model.driver import armed

LIMIT_S = 60.0
GONE = "unknown"
"""The answers about a message whose partition has been deleted."""

CONFIG = StoreConfig(partition_ms=50, preload_ms=20, ledger_max_entries=9, ack_flush_ms=1, bucket_ms=3, fire_batch=3)


def _cancel(topic: Topic, message_id: MessageId) -> bool:
    return topic.cancel(message_id)


def _reschedule(topic: Topic, message_id: MessageId) -> bool:
    return topic.reschedule(message_id, deliver_after=9) is not None


def _fire_now(topic: Topic, message_id: MessageId) -> bool:
    return topic.fire_now(message_id) is not None


def _replace(topic: Topic, message_id: MessageId) -> bool:
    return topic.send(b"y", deliver_after=9, dedup_key="k", replace=True) != message_id


def _state(topic: Topic, message_id: MessageId) -> bool:
    return topic.state(message_id) == "scheduled"


ACTIONS = pytest.mark.parametrize("act", [_cancel, _reschedule, _fire_now])


def _payloads(store: DelayedStore, clock: ManualClock) -> Counter[bytes]:
    """Whatever is delivered, now and later."""
    got: Counter[bytes] = Counter()
    with store.topic("t").subscribe("s", type="shared") as reader:
        for _ in range(3):
            got.update(payloads(reader))
            tick_after(store, clock, 20_000)
    return got


@ACTIONS
@pytest.mark.parametrize("point", ["fire.before", "fire.after"])
def test_what_is_on_its_way_into_the_main_log_cannot_be_taken_back(
    store: DelayedStore, topic: Topic, clock: ManualClock, act: Callable[[Topic, MessageId], bool], point: str
) -> None:
    """A request that begins in the middle of a firing is answered after it: too late, and delivered once."""
    topic.subscribe("s").close()
    message_id = topic.send(b"x", deliver_after=1)
    clock.advance(1_000)
    requests: list[Future[bool]] = []
    with ThreadPoolExecutor(1) as pool:
        begun = threading.Event()

        def request() -> bool:
            begun.set()
            return act(topic, message_id)

        def meanwhile() -> None:
            if not requests:
                requests.append(pool.submit(request))
                assert begun.wait(LIMIT_S)

        with armed(point, meanwhile):
            store.tick()
        assert requests[0].result(LIMIT_S) is False
    assert topic.state(message_id) == "fired"
    assert _payloads(store, clock) == {b"x": 1}


@ACTIONS
def test_what_is_being_taken_back_does_not_fire(
    store: DelayedStore, topic: Topic, clock: ManualClock, act: Callable[[Topic, MessageId], bool]
) -> None:
    """A firing that begins when the request is in its transaction finds nothing to fire under the old id."""
    topic.subscribe("s").close()
    message_id = topic.send(b"x", deliver_after=1)
    store.tick()
    firings: list[Future[object]] = []
    with ThreadPoolExecutor(1) as pool:
        begun = threading.Event()
        requester = threading.current_thread()

        def fire() -> object:
            begun.set()
            return store.tick()

        def meanwhile() -> None:
            if not firings and threading.current_thread() is requester:
                clock.advance(1_000)
                firings.append(pool.submit(fire))
                assert begun.wait(LIMIT_S)

        with armed("wal.before", meanwhile):
            assert act(topic, message_id)
        firings[0].result(LIMIT_S)
    assert topic.state(message_id) == "cancelled"
    assert _payloads(store, clock) == ({} if act is _cancel else {b"x": 1})


@pytest.mark.parametrize("durability", ["commit", "none"])
def test_answers_and_deliveries_agree_when_all_run_at_once(
    open_store: OpenStore, clock: ManualClock, durability: Durability
) -> None:
    """Two threads cancel, one reschedules, one fires, one receives: each message comes once or is cancelled once."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    store = open_store(config=replace(CONFIG, durability=durability))
    topic = store.topic("t")
    topic.subscribe("s", type="shared").close()
    rounds, messages = 6, 30
    expected: Counter[bytes] = Counter()
    got: Counter[bytes] = Counter()
    for round_ in range(rounds):
        chance = random.Random(f"{seed}/{round_}")
        names = [b"%d-%d" % (round_, number) for number in range(messages)]
        ids = topic.send_batch([Message(name, deliver_after=chance.randrange(1, 30) / 1000) for name in names])
        barrier = threading.Barrier(5)
        shuffled = [chance.sample(range(messages), messages) for _ in range(3)]

        def cancel(order: list[int], ids: list[MessageId] = ids, barrier: threading.Barrier = barrier) -> list[Outcome]:
            barrier.wait(LIMIT_S)
            outcomes: dict[int, Outcome] = {}
            for at in range(0, messages, 5):
                rows = order[at : at + 5]
                outcomes.update(zip(rows, topic.cancel_batch([ids[row] for row in rows]), strict=True))
            return [outcomes[row] for row in range(messages)]

        def move(
            order: list[int], ids: list[MessageId] = ids, barrier: threading.Barrier = barrier
        ) -> list[MessageId | None]:
            barrier.wait(LIMIT_S)
            moved = {row: topic.reschedule(ids[row], deliver_after=(row % 3) * 0.004) for row in order}
            return [moved[row] for row in range(messages)]

        def fire(barrier: threading.Barrier = barrier) -> None:
            barrier.wait(LIMIT_S)
            for _ in range(40):
                tick_after(store, clock, 1)

        def receive(barrier: threading.Barrier = barrier) -> Counter[bytes]:
            found: Counter[bytes] = Counter()
            with topic.subscribe("s", type="shared") as reader:
                barrier.wait(LIMIT_S)
                for _ in range(60):
                    batch = reader.receive(7)
                    reader.ack(batch)
                    found.update(message.payload for message in batch)
            return found

        with ThreadPoolExecutor(5) as pool:
            cancels = [pool.submit(cancel, order) for order in shuffled[:2]]
            moves = pool.submit(move, shuffled[2])
            firing, receiving = pool.submit(fire), pool.submit(receive)
            first, second = (future.result(LIMIT_S) for future in cancels)
            new_ids = moves.result(LIMIT_S)
            firing.result(LIMIT_S)
            got += receiving.result(LIMIT_S)
        for row, name in enumerate(names):
            answers = [first[row], second[row]]
            won = answers.count(Outcome.CANCELLED) + (new_ids[row] is not None)
            assert won <= 1, f"{name!r} was taken back twice: {answers}, {new_ids[row]}"
            if won:
                assert topic.state(ids[row]) in ("cancelled", GONE)
                assert Outcome.FIRED not in answers
            else:
                assert {*answers} <= {Outcome.FIRED, Outcome.UNKNOWN}
            if Outcome.CANCELLED not in answers:
                expected[name] += 1
    got += _payloads(store, clock)
    assert got == expected
    assert topic.stats().pending == 0


def test_a_commit_applies_what_came_while_its_work_was_done(store: DelayedStore) -> None:
    """So a message that the work knows of, as an acknowledgement does, is in LMDB as soon as what tells of it."""
    topic, main = store.topic("t"), store._engine.storage.main
    first = topic.send(b"before")

    def work(transaction: Transaction) -> None:
        if not sent:
            sent.append(topic.send(b"meanwhile"))

    sent: list[MessageId] = []
    main.commit(work)
    assert sent == [MessageId(first.ledger_id, first.entry_id + 1)]
    with main.read() as raw:
        assert applied_tail(raw, "main", first.ledger_id) == 2


@pytest.mark.parametrize("act", [_replace, _cancel, _reschedule, _state])
def test_a_message_whose_day_goes_while_it_is_looked_for_has_fired(
    store: DelayedStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, act: Callable[[Topic, MessageId], bool]
) -> None:
    """A send that was to replace it stores its message; it said that the store was damaged."""
    topic = store.topic("t")
    message_id = topic.send(b"x", deliver_after=0.02, dedup_key="k")
    subscription = topic.subscribe("s")
    if act is not _replace:  # it has fired before
        clock.advance(100)
        assert subscription.receive()
    keys, where = store._engine.pending.keys, "duelog.markers.pending_entries.find_partition"

    def have_it_go(found: object) -> object:
        monkeypatch.undo()
        clock.advance(100)
        subscription.ack(subscription.receive() or message_id)
        for _ in range(50):
            topic.send(b"another")
            subscription.ack(subscription.receive())
            tick_after(store, clock, 10)
        assert store.partitions() == []
        return found

    monkeypatch.setattr(keys, "look", lambda *given: have_it_go(type(keys).look(keys, *given)))
    monkeypatch.setattr(where, lambda *given: have_it_go(find_partition(*given)))
    assert act(topic, message_id) is (act is _replace)
    assert [message.payload for message in topic.scheduled()] == ([b"y"] if act is _replace else [])
