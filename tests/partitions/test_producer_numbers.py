"""Records of producers: exactly the numbers that were added, in few bytes where they are consecutive."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from duelog.partitions import producer_numbers as producers
from duelog.partitions.producer_numbers import ProducerRecord
from duelog.store.codec import format as fmt
from duelog.store.env.environment import Environment
from duelog.store.errors import BrokenInvariant
from duelog.store.log.catalog import add_topic

NUMBERS = st.sets(st.integers(0, 300_000) | st.sampled_from((2**32, 2**62 - 1, 65_535, 65_536)), max_size=40)


def test_what_was_added_is_read_of_that_producer_alone(tmp_path: Path) -> None:
    """One name may begin as another does, and a topic's id may be a byte of its name."""

    @settings(max_examples=60, derandomize=True, deadline=None, database=None)
    @given(st.lists(st.tuples(st.sampled_from(((1, "p"), (1, "pq"), (1, "é"), (112, "p"))), NUMBERS), max_size=8))
    def check(sends: list[tuple[tuple[int, str], set[int]]]) -> None:
        twin: dict[tuple[int, str], set[int]] = {}
        for (topic_id, name), wanted in sends:
            stored = twin.setdefault((topic_id, name), set())
            numbers = wanted - stored
            stored |= numbers
            main.write(lambda transaction: producers.add(transaction, topic_id, name, numbers))  # noqa: B023
        with main.read() as raw:
            for (topic_id, name), stored in twin.items():
                assert set(producers.read(raw, topic_id, name).above) == stored
        for topic_id in (1, 112):
            main.write(lambda transaction: producers.remove(transaction, topic_id))  # noqa: B023
        with main.read() as raw:
            assert producers.all_rows(raw) == []

    with closing(Environment(tmp_path, name="main", durability="none", create=True)) as main:
        check()


def test_consecutive_numbers_cost_a_row_of_a_few_bytes_for_each_65536(tmp_path: Path) -> None:
    """However they came: one by one, or from partitions that each had some of them."""
    with closing(Environment(tmp_path, name="main", durability="none", create=True)) as main:
        main.write(lambda transaction: add_topic(transaction, "persistent://a/b/c", 0))
        for part in range(7):
            rows: list[tuple[bytes, bytes]] = []
            for block in range(4):
                numbers = BitMap64(range(block * 65_536 + part, (block + 1) * 65_536, 7))
                rows.append((fmt.sequence_key(1, "p", block), numbers.serialize()))
            main.write(lambda transaction: producers.take_over(transaction, rows))  # noqa: B023
        main.write(lambda transaction: producers.add(transaction, 1, "p", range(4 * 65_536, 5 * 65_536 - 1)))
        main.write(lambda transaction: producers.add(transaction, 1, "p", [5 * 65_536 - 1]))
        with main.read() as raw:
            assert producers.read(raw, 1, "p").above == BitMap64(range(5 * 65_536))
            assert [len(fields) < 60 for _, fields in producers.all_rows(raw)] == [True] * 5


def test_a_number_is_never_recorded_twice_in_one_environment(tmp_path: Path) -> None:
    """It would be a message stored twice; nothing of that transaction is kept."""
    with closing(Environment(tmp_path, name="main", durability="none", create=True)) as main:
        main.write(lambda transaction: producers.add(transaction, 1, "p", [3, 70_000]))
        with pytest.raises(BrokenInvariant, match="70000"):
            main.write(lambda transaction: producers.add(transaction, 1, "p", [5, 70_000]))
        with main.read() as raw:
            assert list(producers.read(raw, 1, "p").above) == [3, 70_000]


def test_the_record_of_an_old_store_counts_beside_the_new_ones(tmp_path: Path) -> None:
    """Up to its watermark everything is taken for stored; it is taken over with the rest, unless the topic is gone."""
    old = ProducerRecord(7, BitMap64([9, 12]))
    rows = [(fmt.producer_key(topic_id, "p"), old.pack()) for topic_id in (1, 2)]
    with closing(Environment(tmp_path, name="main", durability="none", create=True)) as main:
        main.write(lambda transaction: add_topic(transaction, "persistent://a/b/c", 0))
        known = ProducerRecord(3, BitMap64([5])).pack()
        main.write(lambda transaction: transaction.put(fmt.producer_key(1, "p"), known))
        main.write(lambda transaction: producers.add(transaction, 1, "p", [4, 20]))
        main.write(lambda transaction: producers.take_over(transaction, rows))
        with main.read() as raw:
            assert producers.read(raw, 1, "p") == ProducerRecord(7, BitMap64([9, 12, 20]))
            assert producers.read(raw, 2, "p") == producers.nothing()
