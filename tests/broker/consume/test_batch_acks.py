"""Sets of what remains of batches: joined by AND, bounded, as words for the wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duelog.broker.consume import attached
from duelog.broker.consume.attached import BatchAcks


def words_of(left: set[int]) -> list[int]:
    """Bits as signed 64-bit words, trailing zeros left out, as clients send them."""
    number = sum(1 << each for each in left)
    words = []
    while number:
        word = number & 2**64 - 1
        words.append(word - 2**64 if word >> 63 else word)
        number >>= 64
    return words


@given(st.integers(1, 200), st.lists(st.sets(st.integers(0, 199)), min_size=1, max_size=5))
def test_what_remains_is_what_remains_in_every_set(messages: int, sets: list[set[int]]) -> None:
    """Until nothing does; then the batch is forgotten."""
    acks, expected = BatchAcks(), set(range(messages))
    for left in sets:
        expected &= left
        assert acks.take(7, words_of(left), messages) == len(expected)
        assert list(acks.words(7)) == words_of(expected)
        assert acks.left(7) == (len(expected) or None)
        if not expected:
            assert len(acks) == 0
            break


def test_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten: it is delivered whole when it comes again."""
    monkeypatch.setattr(attached, "MOST_BATCHES", 3)
    acks = BatchAcks()
    for place in range(5):
        acks.take(place, [1], 2)
    assert len(acks) == 3
    assert acks.left(1) is None
    assert acks.left(2) == 1
    assert acks.take(2, [2], 2) == 0


def test_a_set_that_is_too_long_changes_nothing() -> None:
    """No batch has so many messages; a client cannot fill the memory with it."""
    acks = BatchAcks()
    assert acks.take(1, [1] * 1_025, None) == 1
    assert len(acks) == 0


def test_a_size_that_no_batch_has_takes_no_memory() -> None:
    """A client's size of a batch counts only as far as its set has words."""
    batches = BatchAcks()
    assert batches.take(1, [0b101], 1 << 62) == 2
    assert batches.words(1) == [0b101]


def test_forgetting_by_place() -> None:
    """One entry, all up to one, all."""
    acks = BatchAcks()
    for place in range(6):
        acks.take(place, [1], 2)
    acks.forget(5)
    acks.forget_through(2)
    assert [place for place in range(6) if acks.left(place)] == [3, 4]
    acks.clear()
    assert len(acks) == 0
