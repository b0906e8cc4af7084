"""Records of producers: exactly the numbers that were added, in few bytes where they are consecutive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from duelog.partitions import producer_numbers as producers
from duelog.partitions.producer_numbers import ProducerRecord
from duelog.store.codec import format as fmt
from duelog.store.codec.run import RunLimits
from duelog.store.env.claims import Claims
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import Memtable
from duelog.store.log.catalog import add_topic

NUMBERS = st.sets(st.integers(0, 300_000) | st.sampled_from((2**32, 2**62 - 1, 65_535, 65_536)), max_size=40)


class Numbers:
    """A main environment, and what is not yet applied to it."""

    def __init__(self, path: Path) -> None:
        self.memtable = Memtable(Claims(), RunLimits())
        self.main = Environment(path, name="main", durability="none", create=True, memtable=self.memtable)

    def add(self, topic_id: int, name: str, numbers: Iterable[int]) -> None:
        """A group of the write-ahead log with the numbers is durable."""
        self.memtable.position += 1
        for key, block in producers.blocks(topic_id, name, BitMap64(numbers)):
            self.memtable.add_numbers(key, block)

    def close(self) -> None:
        """Close the environment."""
        self.main.close()


@pytest.fixture
def numbers(tmp_path: Path) -> Iterator[Numbers]:
    """No numbers."""
    with closing(Numbers(tmp_path)) as made:
        yield made


def test_what_was_added_is_read_of_that_producer_alone(numbers: Numbers) -> None:
    """One name may begin as another does, and a topic's id may be a byte of its name; applied, in part, or not."""

    @settings(max_examples=60, derandomize=True, deadline=None, database=None)
    @given(
        st.lists(
            st.tuples(st.sampled_from(((1, "p"), (1, "pq"), (1, "é"), (112, "p"))), NUMBERS, st.booleans()), max_size=8
        )
    )
    def check(sends: list[tuple[tuple[int, str], set[int], bool]]) -> None:
        twin: dict[tuple[int, str], set[int]] = {}
        for (topic_id, name), wanted, apply in sends:
            twin.setdefault((topic_id, name), set()).update(wanted)
            numbers.add(topic_id, name, wanted)
            if apply:
                numbers.main.apply()
                assert not numbers.memtable
        with numbers.main.read() as raw:
            for (topic_id, name), stored in twin.items():
                assert set(producers.read(raw, topic_id, name).above) == stored
        for topic_id in (1, 112):
            numbers.main.write(lambda transaction: producers.remove(transaction, topic_id))  # noqa: B023
        with numbers.main.read() as raw:
            assert producers.all_rows(raw) == []

    check()


def test_consecutive_numbers_cost_a_row_of_a_few_bytes_for_each_65536(numbers: Numbers) -> None:
    """However they came: one by one, or from partitions that each had some of them."""
    main = numbers.main
    main.write(lambda transaction: add_topic(transaction, "persistent://a/b/c", 0))
    for part in range(7):
        rows: list[tuple[bytes, bytes]] = []
        for block in range(4):
            block_numbers = BitMap64(range(block * 65_536 + part, (block + 1) * 65_536, 7))
            rows.append((fmt.sequence_key(1, "p", block), block_numbers.serialize()))
        main.write(lambda transaction: producers.take_over(transaction, rows))  # noqa: B023
    numbers.add(1, "p", range(4 * 65_536, 5 * 65_536 - 1))
    numbers.add(1, "p", [5 * 65_536 - 1])
    main.apply()
    with main.read() as raw:
        assert producers.read(raw, 1, "p").above == BitMap64(range(5 * 65_536))
        assert [len(fields) < 60 for _, fields in producers.all_rows(raw)] == [True] * 5


def test_the_record_of_an_old_store_counts_beside_the_new_ones(numbers: Numbers) -> None:
    """Up to its watermark everything is taken for stored; it is taken over with the rest, unless the topic is gone."""
    old = ProducerRecord(7, BitMap64([9, 12]))
    rows = [(fmt.producer_key(topic_id, "p"), old.pack()) for topic_id in (1, 2)]
    main = numbers.main
    main.write(lambda transaction: add_topic(transaction, "persistent://a/b/c", 0))
    known = ProducerRecord(3, BitMap64([5])).pack()
    main.write(lambda transaction: transaction.put(fmt.producer_key(1, "p"), known))
    numbers.add(1, "p", [4, 20])
    main.write(lambda transaction: producers.take_over(transaction, rows))
    with main.read() as raw:
        assert producers.read(raw, 1, "p") == ProducerRecord(7, BitMap64([9, 12, 20]))
        assert producers.read(raw, 2, "p") == producers.nothing()
