"""Counts for somebody who looks all the time: right against a twin, and within their allowance."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duelog import DelayedStore, ManualClock, Message, StoreConfig
from duelog.census import MINUTE_MS, Allowance
from duelog.errors import InvalidArgument
from duelog.replica.takeover import _skipping
from duelog.store.names import TopicName

DAY_MS = 86_400_000
START_MS = 1_700_006_400_000 - 1_700_006_400_000 % DAY_MS

SENDS = st.tuples(
    st.just("send"), st.sampled_from("abc"), st.lists(st.integers(1, 40 * 24 * 60), min_size=1, max_size=9)
)
STEPS = st.lists(
    st.one_of(
        SENDS,
        st.tuples(st.just("cancel"), st.sampled_from("abc"), st.integers(0, 5)),
        st.tuples(st.just("wait"), st.just(""), st.integers(1, 3 * 24 * 60)),
        st.tuples(st.just("delete"), st.sampled_from("abc"), st.just(0)),
        st.tuples(st.just("look"), st.just(""), st.just(0)),
    ),
    max_size=12,
)


class Twin:
    """Due times of pending messages by topic."""

    def __init__(self) -> None:
        self.pending: dict[str, list[tuple[int, Any]]] = {}

    def bars(self, start_ms: int, step_ms: int, bars: int, topic: str | None = None) -> list[int]:
        found = [0] * bars
        for name, held in self.pending.items():
            for due_ms, _ in held if topic in (None, name) else ():
                at = max((due_ms - start_ms) // step_ms, 0)
                if at < bars:
                    found[at] += 1
        return found


@settings(max_examples=25, deadline=None)
@given(steps=STEPS, inline=st.sampled_from([0, 30 * MINUTE_MS]))
def test_counts_are_those_of_a_plain_twin(steps: list[tuple[str, str, Any]], inline: int) -> None:
    """Sent, cancelled, fired, deleted, inline or not: pending by topic, by minute, hour and day, and in total."""
    clock, twin = ManualClock(START_MS), Twin()
    config = StoreConfig(inline_delay_ms=inline)
    with TemporaryDirectory() as path, DelayedStore.open(path, config, clock=clock) as store:
        for kind, name, value in [*steps, ("look", "", 0)]:
            held = twin.pending.get(name, [])
            if kind == "send":
                dues = [clock.now_ms() + minutes * MINUTE_MS for minutes in value]
                ids = store.topic(name).send_batch([Message(b"", deliver_at=due_ms) for due_ms in dues])
                twin.pending.setdefault(name, []).extend(zip(dues, ids, strict=True))
            elif kind == "cancel" and value < len(held):
                if store.topic(name).cancel(held[value][1]):
                    del held[value]
            elif kind == "wait":
                clock.advance(value * MINUTE_MS)
                store.tick()
                for each in twin.pending.values():
                    each[:] = [pair for pair in each if pair[0] > clock.now_ms()]
            elif kind == "delete" and store.topic(name).exists():
                store.delete_topic(name)
                twin.pending.pop(name)
            elif kind == "look":
                compare(store, twin, clock.now_ms())


def compare(store: DelayedStore, twin: Twin, now_ms: int) -> None:
    """See that the census and its twin say the same."""
    midnight_ms = now_ms - now_ms % DAY_MS
    assert store.overview().pending == sum(map(len, twin.pending.values()))
    page = store.topic_rows()
    assert (page.total, page.known) == (len(twin.pending),) * 2
    short = {row.name.rpartition("/")[2]: row.pending for row in page.rows}
    assert short == {name: len(held) for name, held in twin.pending.items()}
    for topic in (None, *twin.pending):
        for step_ms, bars in ((MINUTE_MS, 120), (60 * MINUTE_MS, 24)):
            assert store.timeline(midnight_ms, step_ms, bars, topic) == twin.bars(midnight_ms, step_ms, bars, topic)
        days = store.timeline(midnight_ms, DAY_MS, 50, topic)
        assert days == twin.bars(midnight_ms, DAY_MS, 50, topic)
    apart, long = store.timeline_by_topic(midnight_ms, DAY_MS, 50, 2), "persistent://public/default/{}".format
    by_topic = {long(name): twin.bars(midnight_ms, DAY_MS, 50, name) for name in twin.pending}
    found = (name for name in by_topic if any(by_topic[name]))
    largest = sorted(found, key=lambda name: (-sum(by_topic[name]), name))[:2]
    assert (list(apart.topics), list(apart.counts)) == (largest, [by_topic[name] for name in largest])
    total = twin.bars(midnight_ms, DAY_MS, 50)
    assert [sum(each) for each in zip(apart.rest, *apart.counts, strict=True)] == total
    counted, read = (
        [replace(each, disk_bytes=0) for each in found] for found in (store.calendar(), store.partitions())
    )
    assert counted == read


def test_a_page_of_topics_is_searched_sorted_and_cut(tmp_path: Path) -> None:
    """Search takes any case; equal values go by name; an unknown field is named."""
    with DelayedStore.open(tmp_path / "store", clock=ManualClock(START_MS)) as store:
        store.topic("public/default2/bikes").create()
        for count, name in enumerate(["Bills", "bikes", "cars"]):
            store.topic(name).send_batch([Message(b"", deliver_after=60)] * count or [Message(b"")])
        within = "public/default"
        found = store.topic_rows("BI", namespace=within, sort="pending", descending=True)
        assert ([row.name[-5:] for row in found.rows], found.total, found.known) == (["bikes", "Bills"], 2, 3)
        assert (store.topic_rows("BI").total, store.topic_rows(namespace="none/none").known) == (3, 0)
        page = store.topic_rows(namespace=within, sort="name", descending=True, offset=1, limit=1)
        assert (page.total, [row.name[-5:] for row in page.rows]) == (3, ["bikes"])
        with pytest.raises(InvalidArgument, match="sort='size'"):
            store.topic_rows(sort="size")
        with pytest.raises(InvalidArgument, match="limit=0"):
            store.topic_rows(limit=0)
        with pytest.raises(InvalidArgument, match="namespace='none'"):
            store.topic_rows(namespace="none")


def test_a_fine_step_far_ahead_is_refused(tmp_path: Path) -> None:
    """It would read the due column of every day; whole days are counted."""
    with DelayedStore.open(tmp_path / "store", clock=ManualClock(START_MS)) as store:
        store.topic("t").send_batch([Message(b"", deliver_after=day * 86_400) for day in range(10)])
        with pytest.raises(InvalidArgument, match="step_ms"):
            store.timeline(START_MS, 60 * MINUTE_MS, 240)
        assert store.timeline(START_MS, 60 * MINUTE_MS, 240, "t") == [
            int(not hour % 24 and hour > 0) for hour in range(240)
        ]
        assert sum(store.timeline(START_MS, DAY_MS, 10)) == 9


def test_a_partition_that_cannot_be_read_is_left_out_of_what_is_counted(tmp_path: Path) -> None:
    """Each time, and `partitions_counted` tells it: before, the first look raised, and later ones took none for all."""
    path, clock = tmp_path / "store", ManualClock(START_MS)
    with DelayedStore.open(path, clock=clock) as store:
        store.topic("t").send_batch([Message(b"", deliver_after=day * 86_400) for day in (3, 5, 5)])
    (damaged, _) = sorted(path.glob("partitions/*/*/data.mdb"))
    damaged.write_bytes(b"SQLite format 3\0" + bytes(8_176))
    with DelayedStore.open(path, clock=clock) as store:
        for _ in range(3):
            found = store.overview()
            assert (found.partitions, found.partitions_counted, found.pending) == (2, 1, 2)
            clock.advance(MINUTE_MS)


def test_steps_stop_when_the_allowance_is_spent_and_go_on_as_it_grows() -> None:
    """A step of 200 ms is paid for in 40 s."""
    wall, spent, steps = [0.0], [0.0], [0]

    def work() -> Iterator[None]:
        for _ in range(20):
            spent[0] += 0.2
            steps[0] += 1
            yield

    allowance, under_way = Allowance(lambda: wall[0], lambda: spent[0]), work()
    assert not allowance.steps(under_way, Allowance.SHARE)
    first = steps[0]
    assert first * 0.2 < Allowance.SAVED_S + 0.21
    for _ in range(1_000):
        wall[0] += 1.0
        allowance.steps(under_way, Allowance.SHARE)
    assert steps[0] == 20
    assert not any(allowance.steps(work(), Allowance.SHARE) for _ in range(9))
    assert spent[0] < Allowance.SAVED_S + 4.0 + 0.21


def test_a_row_follows_what_is_not_written_within_a_minute(tmp_path: Path) -> None:
    """Consumers that come and go, though nothing is sent and no overview asked for; inline messages that fall due."""
    clock = ManualClock(START_MS)
    with DelayedStore.open(tmp_path / "store", StoreConfig(inline_delay_ms=30 * MINUTE_MS), clock=clock) as store:
        store.topic("t").subscribe("s").close()
        store.topic("t").send(b"", deliver_after=600)
        assert [(row.consumers, row.pending) for row in store.topic_rows().rows] == [(0, 1)]
        with store.topic("t").subscribe("s"):
            clock.advance(MINUTE_MS)
            assert [row.consumers for row in store.topic_rows().rows] == [1]
        clock.advance(MINUTE_MS)
        assert [row.consumers for row in store.topic_rows().rows] == [0]
        clock.advance(600_000)
        assert [(row.pending, row.backlog) for row in store.topic_rows().rows] == [(0, 1)]


def test_ids_that_a_takeover_passed_over_are_no_messages(tmp_path: Path) -> None:
    """For the calendar, which counted them, as for `partitions`."""
    with DelayedStore.open(tmp_path / "store", clock=ManualClock(START_MS)) as store:
        topic, engine = store.topic("t"), store._engine
        topic.send_batch([Message(b"", deliver_after=86_400)] * 3)
        (partition,) = engine.storage.partitions
        with engine.storage.partitions.lease(partition):
            engine.writer().write(_skipping(partition, [engine.topics.get(TopicName.parse("t")).topic_id]))
        assert store.calendar() == store.partitions()
        (found,) = store.partitions()
        assert (found.messages, found.pending) == (3, 3)
