"""Records of producers: exactly the numbers that were added, in few bytes where they are consecutive."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from duelog.partitions import producer_numbers as producers
from duelog.store.codec import format as fmt
from duelog.store.codec.bits import BitChange
from duelog.store.codec.run import RunLimits
from duelog.store.env.environment import Environment
from duelog.store.env.memtable import Memtable, Publication
from duelog.store.log.catalog import rows

NUMBERS = st.sets(st.integers(0, 300_000) | st.sampled_from((2**32, 2**62 - 1, 65_535, 65_536)), max_size=40)


class Numbers:
    """A main environment, and what is not yet applied to it."""

    def __init__(self, path: Path) -> None:
        self.memtable = Memtable(Publication(), RunLimits())
        self.main = Environment(path, name="main", durability="none", create=True, memtable=self.memtable)

    def add(self, topic_id: int, name: str, numbers: Iterable[int]) -> None:
        """A group of the write-ahead log with the numbers is durable."""
        self.memtable.position += 1
        for key, block in producers.blocks(topic_id, name, BitMap64(numbers)):
            self.memtable.view.change_bits(key, BitChange(block, BitMap64()))

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
                assert set(producers.read(raw, topic_id, name)) == stored
        for topic_id in (1, 112):
            numbers.main.write(lambda transaction: producers.remove(transaction, topic_id))  # noqa: B023
        with numbers.main.read() as raw:
            assert list(rows(raw, fmt.prefix(fmt.Table.SEQUENCE))) == []

    check()


def test_consecutive_numbers_cost_a_row_of_a_few_bytes_for_each_65536(numbers: Numbers) -> None:
    """However they came: in sevenths, in blocks, or one by one."""
    for part in range(7):
        numbers.add(1, "p", range(part, 4 * 65_536, 7))
        numbers.main.apply()
    numbers.add(1, "p", range(4 * 65_536, 5 * 65_536 - 1))
    numbers.add(1, "p", [5 * 65_536 - 1])
    numbers.main.apply()
    with numbers.main.read() as raw:
        assert producers.read(raw, 1, "p") == BitMap64(range(5 * 65_536))
        assert [len(fields) < 60 for _, fields in rows(raw, fmt.prefix(fmt.Table.SEQUENCE))] == [True] * 5
