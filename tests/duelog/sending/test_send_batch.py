"""`DelayedStore.send_batch`: messages to several topics, all of them or none, and how it is done for many topics."""

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import duelog
from duelog import DelayedDeliveryPolicies, DelayedStore, ManualClock, Message, MessageId, MessageIds, StoreConfig
from duelog.errors import DelayTooLong, InvalidArgument, InvalidMessage
from duelog.store.codec.body import encode_batch, encode_payloads
from duelog.store.files import failpoints
from duelog.store.names import TopicName
from tests.conftest import HOUR_MS, START_MS, OpenStore, present

FACES = True

CONFIG = StoreConfig(partition_ms=HOUR_MS, max_clock_jump_ms=None, retention_ms=1_000 * HOUR_MS)


def sends(count: int, seed: int = 0) -> list[tuple[str, Message]]:
    """Messages of five topics over four partitions, and some that are due at once."""
    random = Random(seed)
    pairs = []
    for number in range(count):
        delay_ms = random.choice((0, random.randrange(1, 4 * HOUR_MS)))
        pairs.append((f"t{random.randrange(5)}", Message(b"%d" % number, deliver_at=START_MS + delay_ms)))
    return pairs


def stored(store: DelayedStore) -> dict[str, list[bytes]]:
    """Payloads by topic of all that there is, fired or not, in order of due time; it consumes them."""
    found: dict[str, list[bytes]] = {}
    for topic in store.topics():
        with topic.subscribe("all") as reader:
            found[topic.name.rpartition("/")[2]] = sorted(m.payload for m in reader.receive(10_000, timeout=0))
    return found


def of(pairs: list[tuple[str, Message]]) -> dict[str, list[bytes]]:
    """Return the sent messages in the form of `stored`."""
    found: dict[str, list[bytes]] = {}
    for topic, message in pairs:
        found.setdefault(topic, []).append(bytes(message.payload))
    return {topic: sorted(payloads) for topic, payloads in sorted(found.items())}


def end_of_time(store: DelayedStore, clock: ManualClock) -> None:
    """Have all be due."""
    clock.advance(6 * HOUR_MS)
    store.tick()


def test_each_topic_gets_its_messages_and_each_message_its_id(store: DelayedStore, clock: ManualClock) -> None:
    """Due at once or later, in topics that were there and topics that were not."""
    store.topic("t1").send(b"before", deliver_after=1)
    pairs = sends(300)
    ids = store.send_batch(pairs)
    assert len(set(ids)) == 300
    for (topic, message), message_id in zip(pairs, ids, strict=True):
        assert present(store.topic(topic).get(message_id)).payload == message.payload
    expected = of([*pairs, ("t1", Message(b"before"))])
    end_of_time(store, clock)
    assert stored(store) == expected
    assert list(store.check(deep=True)) == []


def test_a_topic_is_named_or_given_and_both_are_the_same_topic(store: DelayedStore) -> None:
    """Short, full, or as `DelayedStore.topic` gives it."""
    topic = store.topic("a")
    ids = store.send_batch([("a", Message(b"0")), (topic, Message(b"1")), (topic.name, Message(b"2"))])
    assert len({message_id.ledger_id for message_id in ids}) == 1
    assert [message_id.entry_id for message_id in ids] == [0, 1, 2]
    assert [each.name for each in store.topics()] == [topic.name]


def test_what_is_no_sequence_of_pairs_is_refused_and_an_empty_one_is_no_group(store: DelayedStore) -> None:
    """By name; no message, no id."""
    assert store.send_batch([]) == []
    for messages in (Message(b"x"), "t", 3, None):
        with pytest.raises(InvalidArgument, match="messages"):
            store.send_batch(messages)  # type: ignore[arg-type]


WRONG: list[tuple[object, type[Exception], str]] = [
    (("new", Message(b"x", deliver_at=1_000)), InvalidMessage, r"messages\[2\]\.deliver_at"),
    (("new", Message("text")), InvalidMessage, r"messages\[2\]\.payload"),  # type: ignore[arg-type]
    (("new", b"x"), InvalidMessage, r"messages\[2\]"),
    (("a//b", Message(b"x")), InvalidArgument, "topic"),
    ((7, Message(b"x")), InvalidArgument, r"messages\[2\]"),
    (Message(b"x"), InvalidArgument, r"messages\[2\]"),
    (("new", Message(b"x"), 1), InvalidArgument, r"messages\[2\]"),
]


@pytest.mark.usefixtures("unchanged")
def test_all_are_checked_before_any_is_stored(store: DelayedStore) -> None:
    """Not even a topic comes into being."""
    for wrong, error, said in WRONG:
        with pytest.raises(error, match=said):
            store.send_batch([("t", Message(b"1")), ("other", Message(b"2")), wrong])  # type: ignore[list-item]
    assert not store.topic("other").exists()


def test_a_topic_of_another_store_is_refused(store: DelayedStore, open_store: OpenStore, tmp_path: Path) -> None:
    """Its messages would be found in this one by nobody."""
    other = open_store(tmp_path / "other")
    with pytest.raises(InvalidArgument, match="topic"):
        store.send_batch([(other.topic("a"), Message(b"x"))])
    assert list(store.topics()) == []


def test_more_than_a_group_takes_is_refused_with_the_limit_and_nothing_is_stored(open_store: OpenStore) -> None:
    """No message, no topic, no partition; as much as a group takes is taken."""
    store = open_store(config=replace(CONFIG, wal_bytes=1 << 20, max_message_bytes=100_000))
    limit = store._engine.writer().largest_group
    pairs = [(f"t{number % 7}", Message(bytes(10_000), deliver_after=number * 600)) for number in range(105)]
    with pytest.raises(InvalidArgument, match=rf"messages=105: they take 10\d{{5}} bytes, .* at most {limit}"):
        store.send_batch(pairs)
    assert list(store.topics()) == []
    assert store.partitions() == []
    assert len(store.send_batch(pairs[:100])) == 100


def test_no_batch_that_passes_the_check_is_refused_by_the_log(open_store: OpenStore) -> None:
    """The check before anything is stored counts no less than the group has: many logs, runs that are cut by size."""
    store = open_store(config=replace(CONFIG, wal_bytes=1 << 18, max_message_bytes=1 << 17, run_bytes=1 << 16))
    limit = store._engine.writer().largest_group
    for seed, (low, high) in enumerate([(1_000, 3_000), (0, 10), (30_000, 66_000), (1_000, 3_000), (30_000, 66_000)]):
        random = Random(seed)
        pairs = []
        for number in range(20_000):
            due_ms = START_MS + random.randrange(6 * HOUR_MS)
            pairs.append((f"t{number % (seed + 1)}", Message(bytes(random.randint(low, high)), deliver_at=due_ms)))
            if sum(len(message.payload) + 40 for _, message in pairs[-500:]) * len(pairs) // 500 > 2 * limit:
                break
        while True:
            try:
                ids = store.send_batch(pairs)
            except InvalidArgument as error:
                if "they take" not in str(error):
                    raise
                del pairs[-max(len(pairs) // 50, 1) :]
            else:
                assert len(ids) == len(pairs) > 0
                break


def test_delay_policies_apply_topic_by_topic(store: DelayedStore) -> None:
    """A fixed delay of one topic is none of the others; one delay that is too long refuses all."""
    store.set_policies(DelayedDeliveryPolicies(fixed_delivery_delay_ms=60_000), topic="fixed")
    store.set_policies(DelayedDeliveryPolicies(max_delivery_delay_ms=5_000), topic="short")
    now_ms = store.clock.now_ms()
    pairs = [("free", Message(b"0")), ("fixed", Message(b"1")), ("short", Message(b"2", deliver_after=4)),
             ("fixed", Message(b"3", deliver_after=1)), ("free", Message(b"4", deliver_after=7))]  # fmt: skip
    ids = store.send_batch(pairs)
    found = [store.topic(topic).get(id_) for (topic, _), id_ in zip(pairs, ids, strict=True)]
    assert [message.due_ms - now_ms for message in found if message] == [0, 60_000, 4_000, 60_000, 7_000]
    with pytest.raises(DelayTooLong):
        store.send_batch([("new", Message(b"0")), ("short", Message(b"1", deliver_after=6))])
    assert not store.topic("new").exists()


def test_two_thousand_new_topics_are_one_commit_of_the_main_environment(store: DelayedStore) -> None:
    """And so are their logs in a partition few: ids of ledgers are reserved in blocks."""
    store.topic("first").send(b"x", deliver_after=5)
    before = store._engine.storage.main.counts.commits
    store.send_batch([(f"t{number}", Message(b"x", deliver_after=5)) for number in range(2_000)])
    assert store._engine.storage.main.counts.commits - before < 12
    before = store._engine.storage.main.counts.commits
    store.send_batch([(f"t{number}", Message(b"x", deliver_after=5)) for number in range(2_000)])
    assert store._engine.storage.main.counts.commits == before


@pytest.mark.inside
@pytest.mark.parametrize(("point", "there"), [("wal.before", False), ("wal.after", True)])
def test_after_a_crash_all_of_it_is_there_or_nothing(
    store: DelayedStore, open_store: OpenStore, clock: ManualClock, tmp_path: Path, point: str, there: bool
) -> None:
    """Over topics, partitions and the main environment: a copy of the files as they were at the point."""
    earlier = sends(40)
    store.send_batch(earlier)
    pairs = sends(300, seed=1)
    crash_at(point, lambda: shutil.copytree(store.path, tmp_path / "crashed"))
    store.send_batch(pairs)
    failpoints.disarm()
    crashed = open_store(tmp_path / "crashed", CONFIG)
    end_of_time(crashed, clock)
    assert stored(crashed) == of(earlier + pairs if there else earlier)
    assert list(crashed.check(deep=True)) == []


def crash_at(point: str, action: Callable[[], object]) -> None:
    """Do something the first time that the point is reached."""
    left = [action]

    def once() -> None:
        if left:
            left.pop()()

    failpoints.arm(point, once)


def test_a_deleted_topic_among_them_refuses_all(store: DelayedStore, clock: ManualClock) -> None:
    """A topic that is deleted while the batch is on its way, and is created anew by the next."""
    store.send_batch([("a", Message(b"1", deliver_after=5)), ("b", Message(b"1", deliver_after=5))])
    topics = store._engine.topics
    make = topics.get_or_create_all

    def make_and_delete(names: list[TopicName], now_ms: int) -> object:
        states = make(names, now_ms)
        store.delete_topic("b")
        return states

    topics.get_or_create_all = make_and_delete  # type: ignore[method-assign, assignment]
    with pytest.raises(duelog.errors.UnknownTopic):
        store.send_batch([("a", Message(b"2", deliver_after=5)), ("b", Message(b"2", deliver_after=5))])
    del topics.get_or_create_all
    store.send_batch([("a", Message(b"3", deliver_after=5)), ("b", Message(b"3", deliver_after=5))])
    end_of_time(store, clock)
    assert stored(store) == {"a": [b"1", b"3"], "b": [b"3"]}


@settings(max_examples=200, deadline=None)
@given(
    payloads=st.lists(st.one_of(st.binary(max_size=300), st.integers(0, 70_000).map(bytes)), max_size=20),
    data=st.data(),
)
def test_columns_are_encoded_as_messages_are(payloads: list[bytes], data: st.DataObject) -> None:
    """Byte for byte, whatever the sizes of the payloads and the form of the column."""
    dues = data.draw(st.lists(st.integers(0, 10**13), min_size=len(payloads), max_size=len(payloads)))
    messages = [Message(p, deliver_at=d) for p, d in zip(payloads, dues, strict=True)]
    expected = encode_batch(messages, START_MS, 1 << 20, allow_past=True)
    for column in (dues, tuple(dues), np.array(dues, dtype=np.int64), np.array(dues, dtype=np.uint64)):
        found = encode_payloads(payloads, column, None, START_MS, 1 << 20, allow_past=True)
        assert list(found.bodies) == list(expected.bodies)
        assert found.dues.tolist() == expected.dues.tolist()
        assert found.delayed.tolist() == expected.delayed.tolist()


def test_what_is_sent_as_columns_is_received(open_store: OpenStore, clock: ManualClock) -> None:
    """Over several partitions and the main log; the ids are those that the messages come with."""
    topic = open_store(config=StoreConfig(partition_ms=1_000)).topic("t")
    subscription = topic.subscribe("s")
    dues = [START_MS + 500 * number - 700 for number in range(12)]
    ids = topic.send_payloads([b"%d" % number for number in range(12)], deliver_at=np.array(dues))
    assert isinstance(ids, MessageIds)
    assert len(ids) == 12
    clock.advance(10_000)
    received = []
    while batch := subscription.receive(100):
        received += batch
    assert {message.message_id: message.payload for message in received} == {
        message_id: b"%d" % number for number, message_id in enumerate(ids)
    }
    subscription.ack(received)


def test_one_time_for_all(store: DelayedStore, clock: ManualClock) -> None:
    """A delay, an instant, or neither: as `send` takes them."""
    topic = store.topic("t")
    subscription = topic.subscribe("s")
    topic.send_payloads([b"now", bytearray(b"copied")])  # type: ignore[list-item]
    topic.send_payloads([b"later"], deliver_after=1.5)
    topic.send_payloads([b"then"], deliver_at=datetime.fromtimestamp((START_MS + 2_000) / 1000, UTC))
    assert [message.payload for message in subscription.receive(10)] == [b"now", b"copied"]
    clock.advance(2_000)
    assert [message.payload for message in subscription.receive(10)] == [b"later", b"then"]
    assert topic.send_payloads([]) == []


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (b"bytes", {}, "payloads"),
    ([b"a", "text"], {}, r"payloads\[1\]"),
    ([b"a", bytes(3 << 20), bytes(6 << 20)], {}, r"payloads\[2\]"),
    ([b"a", b"b"], {"deliver_at": [START_MS]}, "deliver_at"),
    ([b"a", b"b"], {"deliver_at": [START_MS, -1]}, r"deliver_at\[1\]"),
    ([b"a", b"b"], {"deliver_at": [START_MS, 10**30]}, r"deliver_at\[1\]"),
    ([b"a", b"b"], {"deliver_at": [START_MS, 1.5]}, r"deliver_at\[1\]"),
    ([b"a", b"b"], {"deliver_at": [True, START_MS]}, r"deliver_at\[0\]"),
    ([b"a"], {"deliver_at": np.array([1.5])}, "deliver_at"),
    ([b"a"], {"deliver_at": np.array([[START_MS]])}, "deliver_at"),
    ([b"a"], {"deliver_at": np.array([10**15])}, r"deliver_at\[0\]"),
    ([b"a"], {"deliver_at": "soon"}, "deliver_at"),
    ([b"a"], {"deliver_at": [START_MS], "deliver_after": 1}, "deliver_after"),
    ([b"a"], {"deliver_at": datetime(2026, 1, 1)}, "deliver_at"),
]


def test_columns_that_cannot_be_taken_are_named_and_nothing_is_sent(store: DelayedStore) -> None:
    """The first thing that is wrong, by its field and place; of delays one over a policy's limit."""
    for payloads, keywords, field in REFUSED:
        with pytest.raises((InvalidMessage, InvalidArgument), match=field):
            store.topic("t").send_payloads(payloads, **keywords)
    store.set_policies(DelayedDeliveryPolicies(max_delivery_delay_ms=1_000))
    with pytest.raises(DelayTooLong):
        store.topic("t").send_payloads([b"a", b"b"], deliver_at=[START_MS + 1, START_MS + 1_001])
    assert store.stats().pending == 0


def test_many_ids_are_a_sequence() -> None:
    """Indexed, sliced, iterated and compared as a list of MessageId would be."""
    ids = MessageIds([(2, 0, 1), (1, 5, 2)], np.array([2, 0, 1]))
    as_list = [MessageId(1, 5), MessageId(1, 6), MessageId(2, 0)]
    assert list(ids) == ids.to_list() == as_list
    assert ids == as_list
    assert ids == tuple(as_list)
    assert ids != as_list[:2]
    assert ids[-1] == as_list[-1]
    assert ids[1:] == as_list[1:]
    assert MessageId(1, 6) in ids
    assert "1:5" in repr(ids)
    assert ids != 3


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(1, 3)), max_size=8), st.randoms())
def test_runs_of_ids_are_the_ids(segments: list[tuple[int, int, int]], chance: random.Random) -> None:
    """In the order of the messages, however the ids are kept."""
    count = sum(length for _, _, length in segments)
    places = np.array(chance.sample(range(count), count), dtype=np.intp)
    for ids in (MessageIds(segments), MessageIds(segments, places), MessageIds(segments, places)[1:]):
        runs = ids.runs()
        each = zip(runs[::3], runs[1::3], runs[2::3], strict=True)
        assert [MessageId(ledger, first + at) for ledger, first, length in each for at in range(length)] == list(ids)
